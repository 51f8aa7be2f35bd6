//! `import-volume`: a volume with the content of an image file, a block device or a directory of a node.

use crate::cli::driver::{DriverFormat, ImportVolumeArguments};
use crate::cluster::Cluster;
use crate::driver_pod::command::{command_line, run_with_plan};
use crate::failure::{Failure, Result};

/// Creates a volume on a node. What the driver prints is passed on alone, because it may be objects.
pub async fn run(cluster: &Cluster, arguments: &ImportVolumeArguments) -> Result<()> {
    if arguments.from == "-" {
        return Err(Failure::usage(
            "--from - is not offered: a broken connection would look like the end of the content"
                .into(),
        ));
    }
    let pod = arguments.pods.on_node(cluster, &arguments.node).await?;
    let mut words = command_line(&pod, &["volumes", "import"], &["endpoint"]);
    let some = |text: &String| Some(text.clone());
    let options = [
        ("from", some(&arguments.from)),
        ("name", some(&arguments.name)),
        ("to-pool", some(&arguments.to_pool)),
        ("size", arguments.size.clone()),
        ("fs-type", arguments.fs_type.clone()),
        ("scratch", arguments.scratch.clone()),
        ("claim", arguments.claim.clone()),
        ("persistent-volume", arguments.persistent_volume.clone()),
        ("storage-class", arguments.storage_class.clone()),
    ];
    for (option, value) in options {
        words.extend(value.map(|value| format!("--{option}={value}")));
    }
    words.extend(arguments.raw.then(|| "--raw".to_string()));
    let is_json = arguments.print.format == DriverFormat::Json;
    words.extend(is_json.then(|| "--json".to_string()));
    let how = (arguments.confirmed.yes, arguments.confirmed.dry_run);
    run_with_plan(cluster, &pod, words, how).await
}
