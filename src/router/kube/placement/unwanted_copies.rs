//! Whether a volume is still to be copied to a node: the node could have been cordoned or removed
//! since the scheduler selected it, and the claim deleted.

use ::kube::api::{Api, ListParams};
use ::kube::core::PartialObjectMeta;
use k8s_openapi::api::core::v1::{Node, PersistentVolumeClaim, Pod, Taint};

use super::pod_claims::{claims_of, is_waiting};
use crate::error::{Result, chain};
use crate::router::cluster::Unwanted;
use crate::router::create_volume::pod_placement::fit::is_tolerated;
use crate::router::kube::{InCluster, ask};

/// The taint of a node that is cordoned.
const CORDONED: &str = "node.kubernetes.io/unschedulable";

/// Whether a node that is not in memory exists. Its absence leads to a final error, so it is not taken
/// from memory.
pub(in crate::router::kube) async fn exists(cluster: &InCluster, node: &str) -> Result<bool> {
    let api = Api::<PartialObjectMeta<Node>>::all(cluster.client.clone());
    let found = ask(&format!("node {node}"), api.get_opt(node)).await?;
    Ok(found.is_some())
}

/// Why a volume is not to be copied to a node any more; `None` if it is, or if that cannot be read.
pub(in crate::router::kube) async fn find(
    cluster: &InCluster,
    node: &str,
    claim: Option<&str>,
) -> Option<Unwanted> {
    let found = read(cluster, node, claim).await;
    found.unwrap_or_else(|error| {
        let error = chain(&error);
        tracing::debug!(
            node,
            claim,
            error,
            "failed to check whether a copy is wanted"
        );
        None
    })
}

async fn read(cluster: &InCluster, node: &str, claim: Option<&str>) -> Result<Option<Unwanted>> {
    let api = Api::<Node>::all(cluster.client.clone());
    let found = ask(&format!("node {node}"), api.get_opt(node)).await?;
    let Some(found) = found else {
        let gone = "it is no longer in the cluster".into();
        return Ok(Some(Unwanted::Node(gone)));
    };
    let spec = found.spec.as_ref();
    let is_cordoned = spec.and_then(|spec| spec.unschedulable) == Some(true);
    let named = claim.and_then(|claim| claim.split_once('/'));
    let Some((namespace, name)) = named else {
        return Ok(is_cordoned.then(cordoned));
    };
    type Claim = PartialObjectMeta<PersistentVolumeClaim>;
    let api = Api::<Claim>::namespaced(cluster.client.clone(), namespace);
    let what = format!("claim {namespace}/{name}");
    if ask(&what, api.get_opt(name)).await?.is_none() {
        return Ok(Some(Unwanted::Claim(format!("{what} was deleted"))));
    }
    if !is_cordoned {
        return Ok(None);
    }
    let api = Api::<Pod>::namespaced(cluster.client.clone(), namespace);
    let what = format!("the pods of namespace {namespace}");
    let pods = ask(&what, api.list(&ListParams::default())).await?.items;
    let mut its = pods.iter().filter(|pod| {
        let claims = claims_of(pod);
        is_waiting(pod) && claims.iter().any(|claim| claim == name)
    });
    // The scheduler goes on selecting the node for such a pod, for example of a DaemonSet.
    Ok((!its.any(tolerates_cordons)).then(cordoned))
}

fn cordoned() -> Unwanted {
    Unwanted::Node("it is cordoned".into())
}

fn tolerates_cordons(pod: &Pod) -> bool {
    let taint = Taint {
        key: CORDONED.into(),
        effect: "NoSchedule".into(),
        ..Taint::default()
    };
    let spec = pod.spec.iter();
    let mut tolerations = spec.flat_map(|spec| spec.tolerations.iter().flatten());
    tolerations.any(|one| is_tolerated(&taint, one))
}
