//! The other pods of the cluster, where the pods of a moved claim have affinity or anti-affinity to
//! others.

use std::collections::BTreeSet;

use ::kube::api::{Api, ListParams};
use k8s_openapi::api::core::v1::{Node, Pod};

use super::object::VolumeMove;
use crate::error::Result;
use crate::router::cluster::Cluster;
use crate::router::create_volume::pod_placement::fit::{self, peers::Peers};
use crate::router::kube::placement::pod_claims::claims_of;
use crate::router::kube::{InCluster, ask};

/// The other pods of the cluster, if a node is to be chosen and one of these pods has a condition about
/// others. A pod whose volume moves counts where the volume will be, and one that waits for its node
/// where its volumes are.
pub(super) async fn peers_of(
    cluster: &InCluster,
    object: &VolumeMove,
    pods: &[Pod],
) -> Result<Option<Peers>> {
    let mut specs = pods.iter().filter_map(|pod| pod.spec.as_ref());
    let is_named = object.spec.to.node.is_some();
    if is_named || specs.all(|spec| fit::depends_on_no_others(spec).is_ok()) {
        return Ok(None);
    }
    let nodes = Api::<Node>::all(cluster.client.clone());
    let nodes = ask("the nodes", nodes.list(&ListParams::default())).await?;
    let all = Api::<Pod>::all(cluster.client.clone());
    let all = ask("the pods", all.list(&ListParams::default())).await?;
    let moves = cluster.moves();
    let own: BTreeSet<_> = pods.iter().map(|pod| &pod.metadata.uid).collect();
    let others = all
        .items
        .into_iter()
        .filter(|pod| !own.contains(&pod.metadata.uid));
    let known = cluster.known_pools();
    let placed = others.filter_map(|pod| {
        let namespace = pod.metadata.namespace.clone().unwrap_or_default();
        let claims: Vec<_> = claims_of(&pod)
            .iter()
            .map(|name| format!("{namespace}/{name}"))
            .collect();
        let is_moving = |one: &&VolumeMove| {
            let status = one.status.as_ref();
            let is_active = status.is_some_and(|status| !status.phase.is_final());
            is_active && claims.contains(&one.claim())
        };
        let target = moves
            .values()
            .find(is_moving)
            .and_then(|one| one.status.clone()?.to);
        let named = || {
            pod.spec
                .as_ref()?
                .node_name
                .clone()
                .filter(|node| !node.is_empty())
        };
        let bound = || {
            let pool = claims
                .iter()
                .find_map(|claim| cluster.volumes.pool_of_claim(claim))?;
            known
                .iter()
                .find(|known| known.id == pool)
                .map(|known| known.node.clone())
        };
        let node = target.map(|to| to.node).or_else(named).or_else(bound)?;
        Some((pod, node))
    });
    let named = nodes.items.into_iter().map(|node| {
        let name = node.metadata.name.clone().unwrap_or_default();
        (name, node)
    });
    Ok(Some(Peers {
        pods: placed.collect(),
        nodes: named.collect(),
    }))
}
