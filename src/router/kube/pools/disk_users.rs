//! The names of pods that use the disk of a pool that is not served. Their node reports only UIDs.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::PoisonError;

use ::kube::ResourceExt;
use ::kube::api::{Api, ListParams};
use k8s_openapi::api::core::v1::Pod;

use super::status::Report;
use crate::error::chain;
use crate::router::kube::InCluster;

/// The names as NAMESPACE/NAME, by UID. The API server is asked about pods whose names are not known
/// yet. A pod that it does not know either has its UID as its name.
pub(super) async fn named(cluster: &InCluster, reports: &[Report]) -> BTreeMap<String, String> {
    let known = || cluster.pods.lock().unwrap_or_else(PoisonError::into_inner);
    let mut named = BTreeMap::new();
    for report in reports {
        let Some((_, answer)) = &report.seen else {
            continue;
        };
        let pods = answer.pools.iter().flat_map(|pool| &pool.pods);
        let mut unknown: BTreeSet<&String> = BTreeSet::new();
        for uid in pods {
            match known().get(uid) {
                Some(name) => drop(named.insert(uid.clone(), name.clone())),
                None => drop(unknown.insert(uid)),
            }
        }
        if unknown.is_empty() {
            continue;
        }
        let Some(here) = of_node(cluster, &report.node).await else {
            continue;
        };
        for uid in unknown {
            let name = here.get(uid).unwrap_or(uid);
            named.insert(uid.clone(), name.clone());
        }
    }
    known().clone_from(&named);
    named
}

/// The names of all pods of a node, by UID; `None` if they cannot be read now.
async fn of_node(cluster: &InCluster, node: &str) -> Option<BTreeMap<String, String>> {
    let api = Api::<Pod>::all(cluster.client.clone());
    let here = ListParams::default().fields(&format!("spec.nodeName={node}"));
    let found = match tokio::time::timeout(
        crate::router::kube::API_TIMEOUT,
        api.list_metadata(&here),
    )
    .await
    {
        Ok(Ok(found)) => found,
        Ok(Err(error)) => {
            tracing::warn!(node, error = %chain(&error), "failed to list the pods of a node with a pool that is not served");
            return None;
        }
        Err(_) => return None,
    };
    let each = found.items.into_iter().filter_map(|pod| {
        let name = format!("{}/{}", pod.namespace().unwrap_or_default(), pod.name_any());
        Some((pod.metadata.uid?, name))
    });
    Some(each.collect())
}
