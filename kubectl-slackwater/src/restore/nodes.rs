//! On which node the volume of a copy has to be.

use std::collections::BTreeMap;

use super::plan::Copy;
use super::storage_class::{Classes, is_immediate};
use crate::cluster::Cluster;
use crate::cluster::object::{self, Fields, pool_of};
use crate::failure::{DENIED, Failure, Result};
use crate::model;

/// Nodes by pool. `None` if the user may not list pools.
pub type Nodes = Option<BTreeMap<String, String>>;

/// Reads the pools.
async fn read(cluster: &Cluster) -> Result<Nodes> {
    let pools = model::pools(cluster).await?;
    let node = |(id, pool): (String, model::Pool)| (id, pool.node);
    Ok(pools.map(|pools| pools.into_iter().map(node).collect()))
}

/// Reads the pools, if a node has to be chosen for one of the copies.
pub async fn read_for(cluster: &Cluster, classes: &Classes, copies: &[Copy]) -> Result<Nodes> {
    match copies.iter().all(|copy| is_immediate(classes, copy)) {
        true => Ok(None),
        false => read(cluster).await,
    }
}

/// The node of a snapshot, if it is known.
pub fn find_snapshot_node<'a>(nodes: &'a Nodes, copy: &Copy) -> Option<&'a str> {
    let node = nodes.as_ref()?.get(&copy.snapshot.pool)?;
    (!node.is_empty()).then_some(node)
}

/// The node on which the volume of a copy is created: that of its snapshot. `None` for a class that
/// chooses it itself. `unknown` is what a user reads if the node is not known.
pub fn get_node_for_volume<'a>(
    nodes: &'a Nodes,
    classes: &Classes,
    copy: &Copy,
    unknown: impl FnOnce() -> String,
) -> Result<Option<&'a str>> {
    if is_immediate(classes, copy) {
        return Ok(None);
    }
    match find_snapshot_node(nodes, copy) {
        Some(node) => Ok(Some(node)),
        None => Err(Failure::failed(format!(
            "a volume of class {} is created for a pod (volumeBindingMode WaitForFirstConsumer), and the node of {}; or give a --storage-class with volumeBindingMode Immediate",
            copy.class,
            unknown()
        ))),
    }
}

/// Refuses copies that no pod can use together, because their volumes exist on several nodes, or will be
/// created there: each on the node of its snapshot, if `is_at_source`. Others are created on the node of
/// the pod.
pub async fn refuse_several_nodes(
    cluster: &Cluster,
    copies: &[Copy],
    is_at_source: impl Fn(&Copy) -> bool,
    advice: &str,
) -> Result<()> {
    let nodes = read(cluster).await?;
    let mut places = Vec::new();
    for copy in copies {
        let node = match copy.volume.is_empty() {
            false => find_volume_node(cluster, &nodes, copy).await?,
            true if is_at_source(copy) => find_snapshot_node(&nodes, copy).map(str::to_string),
            true => None,
        };
        places.extend(node.map(|node| (copy.claim.as_str(), node)));
    }
    match list_by_node(&places) {
        None => Ok(()),
        Some(places) => Err(Failure::failed(format!(
            "no pod can check all copies, because their volumes are on several nodes: {places}. {advice}"
        ))),
    }
}

/// The node of a volume that exists.
async fn find_volume_node(cluster: &Cluster, nodes: &Nodes, copy: &Copy) -> Result<Option<String>> {
    let Some(nodes) = nodes else { return Ok(None) };
    match cluster.find_one(&object::VOLUME, "", &copy.volume).await {
        Ok(volume) => {
            let handle = volume
                .as_ref()
                .map_or("", |volume| volume.text("/spec/csi/volumeHandle"));
            let node = pool_of(handle).and_then(|pool| nodes.get(pool));
            Ok(node.filter(|node| !node.is_empty()).cloned())
        }
        Err(failure) if failure.code == DENIED => {
            cluster.note(
                "whether one node has all volumes is not known: you may not read persistentvolumes"
                    .into(),
            );
            Ok(None)
        }
        Err(failure) => Err(failure),
    }
}

/// The claims by node, if there are several nodes.
fn list_by_node(places: &[(&str, String)]) -> Option<String> {
    let mut by_node: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for (claim, node) in places {
        by_node.entry(node).or_default().push(claim);
    }
    let each = by_node.iter();
    let each = each.map(|(node, claims)| format!("{} on {node}", claims.join(", ")));
    let each: Vec<_> = each.collect();
    (each.len() > 1).then(|| each.join("; "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn volumes_on_several_nodes_are_named() {
        let place = |claim: &'static str, node: &str| (claim, node.to_string());
        let one = [place("a", "node-1"), place("b", "node-1")];
        assert_eq!(list_by_node(&[]), None);
        assert_eq!(list_by_node(&one), None);
        let two = [&one[..], &[place("c", "node-2")]].concat();
        assert_eq!(
            list_by_node(&two).as_deref(),
            Some("a, b on node-1; c on node-2")
        );
    }
}
