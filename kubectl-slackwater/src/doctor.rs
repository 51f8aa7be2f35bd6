//! `doctor`: the driver's own examination of a node and its pools, run in its container on that node.

use std::collections::BTreeSet;
use std::io::{self, Write};

use serde_json::{Value, json};

use crate::change::print_lines;
use crate::cli::Format;
use crate::cli::driver::{DoctorArguments, DriverFormat};
use crate::cluster::Cluster;
use crate::cluster::object::Fields;
use crate::driver_pod::command::{check_exit_code, command_line, run_and_print};
use crate::driver_pod::exec::{self, join_words};
use crate::driver_pod::{self, DriverPod, may_run};
use crate::failure::{FAILED, Failure, Result};
use crate::text::escaped;
use crate::{listing, model};

/// The options of the driver that select what `doctor` examines.
const DOCTOR_OPTIONS: [&str; 5] = ["config", "pool", "node-record", "allowed-path", "state-dir"];
/// What is kept of the output of one node.
const MAX_OUTPUT_BYTES: usize = 16 << 20;

/// Examines one node, or all, one after the other. One that cannot be examined does not stop the others.
pub async fn run(cluster: &Cluster, arguments: &DoctorArguments) -> Result<()> {
    let is_json = arguments.print.format == DriverFormat::Json;
    if let Some(node) = &arguments.node {
        let pod = arguments.pods.on_node(cluster, node).await?;
        return run_and_print(cluster, &pod, &examination(&pod, is_json)).await;
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
        let all = listing::serialize(Format::Json, &json!({ "items": items }))?;
        crate::listing::print(&all, &[]);
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
    let mut words = command_line(pod, &["doctor"], &DOCTOR_OPTIONS);
    words.extend(is_json.then(|| "--json".to_string()));
    words
}

/// Examines one of several nodes, below its name.
async fn show(cluster: &Cluster, pod: &DriverPod) -> Result<()> {
    may_run(cluster, pod).await?;
    print_lines(&format!("Node {}:", pod.node));
    run_and_print(cluster, pod, &examination(pod, false)).await
}

/// Examines one of several nodes, and adds what the driver prints.
async fn examine(
    cluster: &Cluster,
    pod: &DriverPod,
    node: &str,
    items: &mut Vec<Value>,
) -> Result<()> {
    may_run(cluster, pod).await?;
    let mut output = LimitedOutput::default();
    let words = examination(pod, true);
    let code = exec::run(cluster, pod, &words, &mut output, None).await?;
    let doctor: Value = serde_json::from_slice(&output.0).map_err(|error| {
        Failure::failed(format!(
            "{} of {}: {error}",
            join_words(&words),
            pod.title()
        ))
    })?;
    items.push(json!({"node": node, "exitCode": code, "doctor": doctor}));
    check_exit_code(pod, &words, code)
}

/// Output, up to a limit.
#[derive(Default)]
struct LimitedOutput(Vec<u8>);

impl Write for LimitedOutput {
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
