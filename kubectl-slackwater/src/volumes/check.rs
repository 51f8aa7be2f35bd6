//! `check`: a check of the file system of a volume, by the driver on its node.

use crate::cli::driver::{CheckArguments, DriverFormat};
use crate::cluster::Cluster;
use crate::cluster::object::{self, Fields, pool_of};
use crate::driver_pod::command::{command_line, confirm, node_of, run_and_print};
use crate::failure::{Failure, Result};

/// The options of the driver that name its socket.
const SOCKET_OPTIONS: [&str; 2] = ["config", "endpoint"];
/// The ID of the volume of a claim, or an ID as it is.
async fn volume_of(cluster: &Cluster, claim: &str) -> Result<String> {
    if pool_of(claim).is_some() {
        return Ok(claim.to_string());
    }
    let namespace = &cluster.namespace;
    let object = cluster.get(&object::CLAIM, namespace, claim).await?;
    let name = match object.text("/spec/volumeName") {
        "" => {
            return Err(Failure::failed(format!(
                "claim {namespace}/{claim} has no volume yet"
            )));
        }
        name => name,
    };
    let volume = cluster.get(&object::VOLUME, "", name).await?;
    match volume.text("/spec/csi/driver") == cluster.driver {
        true => Ok(volume.text("/spec/csi/volumeHandle").to_string()),
        false => Err(Failure::failed(format!(
            "claim {namespace}/{claim} is not of the driver {}",
            cluster.driver
        ))),
    }
}

/// Checks the file system of a volume on its node.
pub async fn run(cluster: &Cluster, arguments: &CheckArguments) -> Result<()> {
    if arguments.confirmed.yes && !arguments.repair {
        return Err(Failure::usage(
            "--yes is for --repair: a check changes nothing".into(),
        ));
    }
    let id = volume_of(cluster, &arguments.claim).await?;
    let node = node_of(cluster, &id).await?;
    let pod = arguments.pods.on_node(cluster, &node).await?;
    let mut words = command_line(&pod, &["volumes", "check", &id], &SOCKET_OPTIONS);
    let is_json = arguments.print.format == DriverFormat::Json;
    words.extend(arguments.repair.then(|| "--repair".to_string()));
    words.extend(is_json.then(|| "--json".to_string()));
    // Nothing but JSON is printed with the result.
    let is_silent = is_json && arguments.confirmed.yes;
    let is_plan = arguments.repair || arguments.confirmed.dry_run;
    if is_plan && !is_silent && !confirm(&arguments.confirmed, &pod, &words)? {
        return Ok(());
    }
    run_and_print(cluster, &pod, &words).await
}
