//! `pool follow`: a command of the driver in a pod of its controller.

use crate::cli::driver::{Confirmation, Pods};
use crate::cluster::Cluster;
use crate::driver_pod::command::{command_line, run_with_plan};
use crate::failure::Result;

/// Lets the PersistentVolumes of a pool follow it to the node that has adopted it. The driver prints what
/// it would do, and changes nothing without `--yes`.
pub async fn run(
    cluster: &Cluster,
    pool: String,
    pods: &Pods,
    confirmed: &Confirmation,
) -> Result<()> {
    let pod = pods.of_controller(cluster).await?;
    let mut words = command_line(&pod, &["pool", "adopt", "--cluster"], &["endpoint"]);
    words.push(pool);
    let how = (confirmed.yes, confirmed.dry_run);
    run_with_plan(cluster, &pod, words, how).await
}
