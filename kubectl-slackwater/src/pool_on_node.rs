//! `pool adopt`, `pool forget` and `pool follow`: commands of the driver in its containers.

use crate::cli::PoolOnNode;
use crate::cluster::Cluster;
use crate::failure::Result;
use crate::on_node::{RECORD_OPTIONS, confirm, pass_on, pass_on_plan, words};
use crate::pod_arguments::{Confirmed, Pods};

/// Runs one of the commands.
pub async fn run(cluster: &Cluster, command: PoolOnNode) -> Result<()> {
    let (verb, node, pool, pods, confirmed) = match command {
        PoolOnNode::Adopt {
            node,
            place,
            pods,
            confirmed,
        } => ("adopt", node, place, pods, confirmed),
        PoolOnNode::Forget {
            node,
            lost,
            pods,
            confirmed,
        } => ("forget", node, lost, pods, confirmed),
        PoolOnNode::Follow {
            pool,
            pods,
            confirmed,
        } => return follow(cluster, pool, &pods, &confirmed).await,
    };
    let pod = pods.on_node(cluster, &node).await?;
    let mut words = words(&pod, &["pool", verb], &RECORD_OPTIONS);
    words.push(pool);
    match confirm(&confirmed, &pod, &words)? {
        true => pass_on(cluster, &pod, &words).await,
        false => Ok(()),
    }
}

/// Lets the PersistentVolumes of a pool follow it to the node that has adopted it. The driver prints what
/// it would do, and changes nothing without `--yes`.
async fn follow(cluster: &Cluster, pool: String, pods: &Pods, confirmed: &Confirmed) -> Result<()> {
    let pod = pods.of_controller(cluster).await?;
    let mut words = words(&pod, &["pool", "adopt", "--cluster"], &["endpoint"]);
    words.push(pool);
    let how = (confirmed.yes, confirmed.dry_run);
    pass_on_plan(cluster, &pod, words, how).await
}
