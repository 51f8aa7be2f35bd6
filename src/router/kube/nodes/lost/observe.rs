//! Reads everything that decisions about claims of lost nodes need.

use std::collections::{BTreeMap, BTreeSet};

use ::kube::api::{Api, ListParams};
use ::kube::{Error as KubeError, ResourceExt};
use k8s_openapi::api::apps::v1::StatefulSet;
use k8s_openapi::api::core::v1::{Node, PersistentVolumeClaim, Pod};
use k8s_openapi::api::storage::v1::StorageClass;
use k8s_openapi::jiff::{SignedDuration, Timestamp};

use super::Namespace;
use super::decide::{Loss, RECREATE, Seen, Volume, class_of, is_concerned, is_marked, volume_of};
use crate::error::Result;
use crate::model::{PoolId, VolumeId};
use crate::router::kube::adopt::manifest::Manifest;
use crate::router::kube::adopt::resource;
use crate::router::kube::moves::object::VolumeMove;
use crate::router::kube::pools::object::{Health, Pool};
use crate::router::kube::{InCluster, ask};

/// The parameter of a class that requests this.
const PARAMETER: &str = "onNodeLost";
/// The taint with which an administrator states that a node is shut down and does not run any pods.
const OUT_OF_SERVICE: &str = "node.kubernetes.io/out-of-service";

/// The pools that no agent reports, by their objects and by what agents have answered since.
pub(super) fn silent_pools(cluster: &InCluster) -> BTreeSet<PoolId> {
    let pools = cluster.pool_objects().into_iter();
    let silent = pools.filter(|(_, pool)| find_sign_of_life(cluster, pool).is_none());
    silent.map(|(id, _)| id).collect()
}

/// What shows that the node of a pool may be running.
fn find_sign_of_life(cluster: &InCluster, pool: &Pool) -> Option<String> {
    let status = pool.status.clone().unwrap_or_default();
    let (id, node) = (pool.name_any(), &status.node);
    if !matches!(status.health, Health::Unreachable | Health::Lost) {
        return Some(format!("pool {id} is {}", status.health.as_str()));
    }
    if node.is_empty() {
        return Some(format!("it is not known which node has pool {id}"));
    }
    if let Some(other) = &pool.spec.node {
        return Some(format!("pool {id} is handed over to node {other}"));
    }
    let reports = cluster.agents.reports().into_iter();
    let mut answering = reports.filter(|report| report.problem.is_none());
    let answers = answering.find(|report| {
        let answer = report.seen.as_ref().map(|(_, answer)| answer);
        let mut pools = answer.iter().flat_map(|answer| &answer.pools);
        report.node == *node || pools.any(|one| one.id == id)
    });
    answers.map(|report| format!("the agent of node {} answers", report.node))
}

/// The node that had a pool last, and whether it is lost for good.
pub(super) async fn loss(cluster: &InCluster, pool: PoolId) -> Result<(String, Loss)> {
    let id = pool.to_string();
    let api = Api::<Pool>::all(cluster.client.clone());
    let Some(object) = ask(&format!("Pool {id}"), api.get_opt(&id)).await? else {
        return Ok((String::new(), Err(format!("there is no Pool object {id}"))));
    };
    let node = object.status.clone().unwrap_or_default().node;
    if let Some(sign) = find_sign_of_life(cluster, &object) {
        return Ok((node, Err(sign)));
    }
    let found = node_of(cluster, &node).await?;
    let loss = match found.map(|found| (is_out_of_service(&found), is_ready(&found))) {
        None => Ok(format!("node {node} does not exist any more")),
        Some((true, false)) => Ok(format!("node {node} is out of service")),
        Some((true, true)) => Err(format!(
            "node {node} has the taint {OUT_OF_SERVICE}, but is Ready"
        )),
        Some((false, _)) => Err(format!(
            "node {node} is in the cluster, without the taint {OUT_OF_SERVICE}"
        )),
    };
    Ok((node, loss))
}

async fn node_of(cluster: &InCluster, name: &str) -> Result<Option<Node>> {
    let api = Api::<Node>::all(cluster.client.clone());
    ask(&format!("node {name}"), api.get_opt(name)).await
}

fn is_out_of_service(node: &Node) -> bool {
    let taints = node.spec.iter().flat_map(|spec| &spec.taints);
    taints.flatten().any(|taint| taint.key == OUT_OF_SERVICE)
}

fn is_ready(node: &Node) -> bool {
    let conditions = node.status.iter().flat_map(|status| &status.conditions);
    let mut conditions = conditions.flatten();
    conditions.any(|one| one.type_ == "Ready" && one.status == "True")
}

/// Reads everything that the decision about a namespace depends on; `None` if no claim is to be created
/// again.
pub(super) async fn observe(
    cluster: &InCluster,
    ready_for: SignedDuration,
    namespace: &Namespace,
) -> Result<Option<Seen>> {
    let client = || cluster.client.clone();
    let (name, all) = (&namespace.name, ListParams::default());
    let api = Api::<PersistentVolumeClaim>::namespaced(client(), name);
    let claims = ask(&format!("the claims of namespace {name}"), api.list(&all)).await?;
    let claims = claims.items;
    let classes = classes(cluster, &claims).await?;
    let is_quarantined = namespace.volumes.values().any(|it| *it);
    if !is_quarantined && !claims.iter().any(|one| is_concerned(one, &classes)) {
        return Ok(None);
    }
    let mut names: BTreeSet<String> = namespace.volumes.keys().cloned().collect();
    let marked = claims.iter().filter(|one| is_marked(one));
    names.extend(marked.filter_map(volume_of).map(String::from));
    let volumes = volumes(cluster, &names).await?;
    let api = Api::<Pod>::namespaced(client(), name);
    let pods = ask(&format!("the pods of namespace {name}"), api.list(&all)).await?;
    let api = Api::<StatefulSet>::namespaced(client(), name);
    let what = format!("the StatefulSets of namespace {name}");
    let sets = ask(&what, api.list(&all)).await?;
    Ok(Some(Seen {
        driver: cluster.options.driver.clone(),
        now: Timestamp::now(),
        ready_for,
        nodes: nodes(cluster, &pods.items).await?,
        moving: moving(cluster, name).await?,
        claims,
        volumes,
        pods: pods.items,
        sets: sets.items,
        classes,
    }))
}

/// The classes of these claims that request it.
async fn classes(
    cluster: &InCluster,
    claims: &[PersistentVolumeClaim],
) -> Result<BTreeSet<String>> {
    let api = Api::<StorageClass>::all(cluster.client.clone());
    let named: BTreeSet<&String> = claims.iter().filter_map(class_of).collect();
    let mut found = BTreeSet::new();
    for name in named.into_iter().filter(|name| !name.is_empty()) {
        let class = ask(&format!("StorageClass {name}"), api.get_opt(name)).await?;
        let class = class.filter(|class| class.provisioner == cluster.options.driver);
        let parameters = class.and_then(|class| class.parameters).unwrap_or_default();
        if parameters.get(PARAMETER).map(String::as_str) == Some(RECREATE) {
            found.insert(name.clone());
        }
    }
    Ok(found)
}

async fn volumes(
    cluster: &InCluster,
    names: &BTreeSet<String>,
) -> Result<BTreeMap<String, Volume>> {
    let api = Api::all_with(cluster.client.clone(), &resource());
    let mut losses = BTreeMap::<PoolId, (String, Loss)>::new();
    let mut found = BTreeMap::new();
    for name in names {
        let live = ask(&format!("PersistentVolume {name}"), api.get_opt(name)).await?;
        let Some(live) = live.map(Manifest) else {
            continue;
        };
        let handle = live.handle(&cluster.options.driver);
        let Some(Ok(VolumeId { pool, .. })) = handle.map(str::parse) else {
            continue;
        };
        let (node, loss) = match losses.get(&pool) {
            Some(known) => known.clone(),
            None => {
                let found = loss(cluster, pool).await?;
                losses.insert(pool, found.clone());
                found
            }
        };
        let volume = Volume {
            live,
            pool,
            node,
            loss,
        };
        found.insert(name.clone(), volume);
    }
    Ok(found)
}

/// The nodes of these pods that are Ready and not out of service.
async fn nodes(cluster: &InCluster, pods: &[Pod]) -> Result<BTreeSet<String>> {
    let names = pods.iter().filter_map(|pod| {
        let name = pod.spec.as_ref()?.node_name.as_deref();
        name.filter(|name| !name.is_empty())
    });
    let names: BTreeSet<&str> = names.collect();
    let mut found = BTreeSet::new();
    for name in names {
        let node = node_of(cluster, name).await?;
        if node.is_some_and(|node| is_ready(&node) && !is_out_of_service(&node)) {
            found.insert(name.into());
        }
    }
    Ok(found)
}

/// The claims of a namespace that are moved, and the names of the moves.
async fn moving(cluster: &InCluster, namespace: &str) -> Result<BTreeMap<String, String>> {
    let api = Api::<VolumeMove>::namespaced(cluster.client.clone(), namespace);
    let list = async {
        match api.list(&ListParams::default()).await {
            Ok(moves) => Ok(moves.items),
            // The cluster does not have the CRD.
            Err(KubeError::Api(status)) if status.code == 404 => Ok(Vec::new()),
            Err(error) => Err(error),
        }
    };
    let moves = ask(&format!("the VolumeMoves of namespace {namespace}"), list).await?;
    let active = moves.into_iter().filter(|one| {
        let phase = one.status.as_ref().map(|status| status.phase);
        !phase.unwrap_or_default().is_final()
    });
    Ok(active
        .map(|one| (one.spec.claim.clone(), one.name_any()))
        .collect())
}
