//! `doctor` and `check`: commands of the driver that work on the disks of a node. They are run in the
//! driver's container there.

use std::collections::BTreeSet;
use std::io::{self, Write};

use serde_json::{Value, json};

use crate::change::say;
use crate::cli::Format;
use crate::cluster::Cluster;
use crate::driver_pod::{self, DriverPod, may_run};
use crate::exec::{self, shown};
use crate::failure::{FAILED, Failure, Result};
use crate::listing;
use crate::model::{self, Pool};
use crate::object::{self, Fields, pool_of};
use crate::pod_arguments::{
    CheckArguments, Confirmed, DoctorArguments, ImportVolumeArguments, Printed,
};
use crate::text::escaped;

/// The options of the driver that say what `doctor` examines.
const DOCTOR_OPTIONS: [&str; 5] = ["config", "pool", "node-record", "allowed-path", "state-dir"];
/// The options of the driver that name its socket.
pub const SOCKET_OPTIONS: [&str; 2] = ["config", "endpoint"];
/// What is kept of the output of one node.
const MAX_OUTPUT_BYTES: usize = 16 << 20;

/// A command line of the driver: its name, and the options of the driver itself.
pub fn words(pod: &DriverPod, words: &[&str], options: &[&str]) -> Vec<String> {
    let program = ["slackwater"].iter().chain(words).map(ToString::to_string);
    program.chain(pod.options(options)).collect()
}

/// Runs a command whose output is that of the program.
pub async fn pass_on(cluster: &Cluster, pod: &DriverPod, words: &[String]) -> Result<()> {
    let code = exec::run(cluster, pod, words, &mut io::stdout(), None).await?;
    is_done(pod, words, code)
}

/// Runs a command of the driver that prints what it would do, and changes nothing without its `--yes`.
pub async fn pass_on_plan(
    cluster: &Cluster,
    pod: &DriverPod,
    mut words: Vec<String>,
    (yes, dry_run): (bool, bool),
) -> Result<()> {
    words.extend((yes && !dry_run).then(|| "--yes".to_string()));
    pass_on(cluster, pod, &words).await?;
    match yes || dry_run {
        true => Ok(()),
        false => Err(Failure {
            message: "nothing was changed; add --yes to do this".into(),
            ..Failure::unconfirmed()
        }),
    }
}

/// The exit code of the driver is that of the program.
pub fn is_done(pod: &DriverPod, words: &[String], code: u8) -> Result<()> {
    match code {
        0 => Ok(()),
        code => Err(Failure {
            code,
            ..Failure::failed(format!(
                "{} in {} has ended with exit code {code}",
                shown(words),
                pod.title()
            ))
        }),
    }
}

/// Prints what will be run, if it changes something. Returns whether it is to be run.
pub fn confirm(confirmed: &Confirmed, pod: &DriverPod, words: &[String]) -> Result<bool> {
    say(&format!(
        "In the container {} of {}, this will be run: {}",
        pod.container,
        pod.title(),
        shown(words)
    ));
    match (confirmed.dry_run, confirmed.yes) {
        (true, _) => Ok(false),
        (false, true) => Ok(true),
        (false, false) => Err(Failure {
            message: "nothing was run; add --yes to run this".into(),
            ..Failure::unconfirmed()
        }),
    }
}

/// Examines one node, or all, one after the other. One that cannot be examined does not stop the others.
pub async fn doctor(cluster: &Cluster, arguments: &DoctorArguments) -> Result<()> {
    let is_json = arguments.print.format == Printed::Json;
    if let Some(node) = &arguments.node {
        let pod = arguments.pods.on_node(cluster, node).await?;
        return pass_on(cluster, &pod, &examination(&pod, is_json)).await;
    }
    let scope = arguments.pods.scope(cluster).await;
    let pods = driver_pod::on_nodes(cluster, &scope).await?;
    let mut nodes: BTreeSet<String> = pods
        .iter()
        .map(|pod| pod.text("/spec/nodeName").to_string())
        .collect();
    let pools = model::pools(cluster).await?.unwrap_or_default();
    let served = pools.into_values().filter(|pool| !pool.lost);
    nodes.extend(served.map(|pool| pool.node));
    nodes.remove("");
    if nodes.is_empty() {
        // It has the reason.
        driver_pod::choose(&pods, "", &cluster.driver, &scope)?;
    }
    let mut items = Vec::new();
    let mut failed = Vec::new();
    let mut code = FAILED;
    for node in &nodes {
        let pod = driver_pod::choose(&pods, node, &cluster.driver, &scope);
        let done = match pod {
            Ok(pod) if is_json => examine(cluster, &pod, node, &mut items).await,
            Ok(pod) => show(cluster, &pod).await,
            Err(failure) => Err(failure),
        };
        if let Err(failure) = done {
            eprintln!("kubectl-slackwater: {}", escaped(&failure.message));
            if is_json
                && items
                    .last()
                    .is_none_or(|item: &Value| item["node"] != **node)
            {
                items.push(json!({"node": node, "error": failure.message}));
            }
            code = failure.code;
            failed.push(node.as_str());
        }
    }
    if is_json {
        let all = listing::value(Format::Json, &json!({ "items": items }))?;
        crate::watch::write(&all, &[]);
    }
    match failed.len() {
        0 => Ok(()),
        count => Err(Failure {
            // Of several reasons, none is that of all.
            code: if count == 1 { code } else { FAILED },
            ..Failure::failed(format!(
                "{count} of {} nodes have a problem, or could not be examined: {}",
                nodes.len(),
                failed.join(", ")
            ))
        }),
    }
}

fn examination(pod: &DriverPod, is_json: bool) -> Vec<String> {
    let mut words = words(pod, &["doctor"], &DOCTOR_OPTIONS);
    words.extend(is_json.then(|| "--json".to_string()));
    words
}

/// Examines one of several nodes, below its name.
async fn show(cluster: &Cluster, pod: &DriverPod) -> Result<()> {
    may_run(cluster, pod).await?;
    say(&format!("Node {}:", pod.node));
    pass_on(cluster, pod, &examination(pod, false)).await
}

/// Examines one of several nodes, and adds what the driver prints.
async fn examine(
    cluster: &Cluster,
    pod: &DriverPod,
    node: &str,
    items: &mut Vec<Value>,
) -> Result<()> {
    may_run(cluster, pod).await?;
    let mut output = Kept::default();
    let words = examination(pod, true);
    let code = exec::run(cluster, pod, &words, &mut output, None).await?;
    let doctor: Value = serde_json::from_slice(&output.0).map_err(|error| {
        Failure::failed(format!("{} of {}: {error}", shown(&words), pod.title()))
    })?;
    items.push(json!({"node": node, "exitCode": code, "doctor": doctor}));
    is_done(pod, &words, code)
}

/// Output, up to a limit.
#[derive(Default)]
struct Kept(Vec<u8>);

impl Write for Kept {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        if self.0.len() + data.len() > MAX_OUTPUT_BYTES {
            return Err(io::Error::other("it is longer than 16 MiB"));
        }
        self.0.extend_from_slice(data);
        Ok(data.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The node of a volume or a snapshot, by its ID.
pub async fn node_of(cluster: &Cluster, id: &str) -> Result<String> {
    let Some(pool) = pool_of(id) else {
        return Err(Failure::failed(format!(
            "{id} is no ID of a volume or a snapshot of {}",
            cluster.driver
        )));
    };
    let pool = Pool::of(&cluster.get(&object::POOL, "", pool).await?);
    match (pool.lost, pool.node.as_str()) {
        (true, _) => Err(Failure::failed(format!(
            "pool {} is marked as lost, so nothing can be run on its disk",
            pool.title()
        ))),
        (false, "") => Err(Failure::failed(format!("pool {} is on no node", pool.id))),
        (false, node) => Ok(node.to_string()),
    }
}

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
pub async fn check(cluster: &Cluster, arguments: &CheckArguments) -> Result<()> {
    if arguments.confirmed.yes && !arguments.repair {
        return Err(Failure::usage(
            "--yes is for --repair: a check changes nothing".into(),
        ));
    }
    let id = volume_of(cluster, &arguments.claim).await?;
    let node = node_of(cluster, &id).await?;
    let pod = arguments.pods.on_node(cluster, &node).await?;
    let mut words = words(&pod, &["volumes", "check", &id], &SOCKET_OPTIONS);
    let is_json = arguments.print.format == Printed::Json;
    words.extend(arguments.repair.then(|| "--repair".to_string()));
    words.extend(is_json.then(|| "--json".to_string()));
    // Nothing but JSON is printed with the result.
    let is_silent = is_json && arguments.confirmed.yes;
    let is_plan = arguments.repair || arguments.confirmed.dry_run;
    if is_plan && !is_silent && !confirm(&arguments.confirmed, &pod, &words)? {
        return Ok(());
    }
    pass_on(cluster, &pod, &words).await
}

/// Creates a volume on a node. What the driver prints is passed on alone, because it may be objects.
pub async fn import_volume(cluster: &Cluster, arguments: &ImportVolumeArguments) -> Result<()> {
    if arguments.from == "-" {
        return Err(Failure::usage(
            "--from - is not offered: a broken connection would look like the end of the content"
                .into(),
        ));
    }
    let pod = arguments.pods.on_node(cluster, &arguments.node).await?;
    let mut words = words(&pod, &["volumes", "import"], &["endpoint"]);
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
    let is_json = arguments.print.format == Printed::Json;
    words.extend(is_json.then(|| "--json".to_string()));
    let how = (arguments.confirmed.yes, arguments.confirmed.dry_run);
    pass_on_plan(cluster, &pod, words, how).await
}
