//! The pods of the driver, in whose containers its own commands are run.

pub mod command;
pub mod exec;

use kube::api::{DynamicObject, ListParams};
use serde_json::Value;

use crate::change::{Need, missing};
use crate::cluster::object::{self, Fields, Kind};
use crate::cluster::{Cluster, Scope};
use crate::failure::{Failure, Result};

/// The labels that the chart gives to the pods of the nodes.
const NODE_LABELS: &str = "app.kubernetes.io/name=slackwater,app.kubernetes.io/component=node";
/// The container of the driver in them.
const NODE_CONTAINER: &str = "driver";
/// Those of the controller.
pub const CONTROLLER_LABELS: &str =
    "app.kubernetes.io/name=slackwater,app.kubernetes.io/component=controller";
/// The container of the driver in them.
const CONTROLLER_CONTAINER: &str = "router";
/// Names that an error lists.
const MAX_NAMES: usize = 10;

/// A container in which commands of the driver can be run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DriverPod {
    /// The namespace of the pod.
    pub namespace: String,
    pub pod: String,
    pub node: String,
    pub container: &'static str,
    /// The arguments of the driver in it.
    arguments: Vec<String>,
}

impl DriverPod {
    fn of(pod: &DynamicObject, container: &'static str) -> DriverPod {
        DriverPod {
            namespace: pod.namespace().into(),
            pod: pod.name().into(),
            node: pod.text("/spec/nodeName").into(),
            container,
            arguments: arguments(pod, container),
        }
    }

    /// The pod, as an error names it.
    pub fn title(&self) -> String {
        format!("pod {}/{} on node {}", self.namespace, self.pod, self.node)
    }

    /// The driver's own options of these names, for a command that works on the same pools, directories
    /// or socket.
    pub fn options(&self, names: &[&str]) -> Vec<String> {
        let is_named = |argument: &&String| {
            let option = argument
                .strip_prefix("--")
                .and_then(|it| it.split_once('='));
            // Kubernetes replaces variables in the arguments of a container, and in no others.
            option.is_some_and(|(name, value)| names.contains(&name) && !value.contains("$("))
        };
        self.arguments.iter().filter(is_named).cloned().collect()
    }
}

/// In the CSIDriver: the namespace of the release, which Helm writes to each object that it creates.
const RELEASE_NAMESPACE: &str = "meta.helm.sh/release-namespace";

/// Where the driver's pods are searched for: in the namespace that the user names, or in that of the Helm
/// release. A tenant can give its own pods the labels and arguments of the driver's, but cannot write a
/// CSIDriver. Without this annotation, in all namespaces.
pub async fn scope(cluster: &Cluster, named: Option<&str>) -> Scope {
    if let Some(namespace) = named {
        return Scope::Namespace(namespace.into());
    }
    let driver = cluster.find_one(&object::CSI_DRIVER, "", &cluster.driver);
    match driver.await {
        Ok(Some(driver)) if !driver.annotation(RELEASE_NAMESPACE).is_empty() => {
            Scope::Namespace(driver.annotation(RELEASE_NAMESPACE).into())
        }
        _ => Scope::All,
    }
}

/// The driver's pods on nodes, as objects. They may be of several nodes, and of several installations.
pub async fn on_nodes(cluster: &Cluster, scope: &Scope) -> Result<Vec<DynamicObject>> {
    labeled(cluster, scope, NODE_LABELS, NODE_CONTAINER).await
}

/// The pods with these labels whose container is of this driver.
async fn labeled(
    cluster: &Cluster,
    scope: &Scope,
    labels: &str,
    container: &str,
) -> Result<Vec<DynamicObject>> {
    let params = ListParams::default().labels(labels);
    let found = cluster.get_all(&object::POD, scope, &params).await;
    let mut pods = found.map_err(|failure| match scope {
        Scope::All => Failure {
            message: format!(
                "{}; --driver-namespace names the namespace of the driver",
                failure.message
            ),
            ..failure
        },
        Scope::Namespace(_) => failure,
    })?;
    let own = format!("--driver-name={}", cluster.driver);
    pods.retain(|pod| {
        !pod.is_being_deleted()
            && !crate::model::has_ended(pod)
            && arguments(pod, container).contains(&own)
    });
    Ok(pods)
}

/// A pod of the controller, in which commands can be run that work on objects. Any of them does.
pub async fn get_of_controller(cluster: &Cluster, scope: &Scope) -> Result<DriverPod> {
    let pods = labeled(cluster, scope, CONTROLLER_LABELS, CONTROLLER_CONTAINER).await?;
    let ready = pods
        .iter()
        .filter(|pod| is_ready(pod, CONTROLLER_CONTAINER));
    match (ready.min_by_key(|pod| pod.name()), pods.first()) {
        (Some(pod), _) => Ok(DriverPod::of(pod, CONTROLLER_CONTAINER)),
        (None, Some(pod)) => Err(not_ready(&DriverPod::of(pod, CONTROLLER_CONTAINER))),
        (None, None) => Err(Failure::failed(format!(
            "no pod of the controller of {} was found; --driver-name and --driver-namespace name another installation, and with singleNode there is no controller",
            cluster.driver
        ))),
    }
}

/// The driver's pod on a node, in which its commands can be run.
pub async fn get_on_node(cluster: &Cluster, scope: &Scope, node: &str) -> Result<DriverPod> {
    let pods = on_nodes(cluster, scope).await?;
    match choose(&pods, node, &cluster.driver, scope) {
        Ok(pod) => Ok(pod),
        Err(failure) => {
            let is_there = pods.iter().any(|pod| pod.text("/spec/nodeName") == node);
            let object = cluster.find_one(&object::NODE, "", node);
            // Who may not read nodes gets the failure alone.
            match is_there || !matches!(object.await, Ok(None)) {
                true => Err(failure),
                false => Err(Failure::failed(format!(
                    "the cluster has no node {node}; kubectl get nodes lists them"
                ))),
            }
        }
    }
}

/// The one pod on the node, if its container is ready.
pub fn choose(
    pods: &[DynamicObject],
    node: &str,
    driver: &str,
    scope: &Scope,
) -> Result<DriverPod> {
    let there = pods.iter().filter(|pod| pod.text("/spec/nodeName") == node);
    let there: Vec<_> = there.collect();
    let pod = match there[..] {
        [pod] => pod,
        [] => return Err(Failure::failed(describe_missing(pods, node, driver, scope))),
        _ => {
            let names = there
                .iter()
                .map(|pod| format!("{}/{}", pod.namespace(), pod.name()));
            return Err(Failure::failed(format!(
                "node {node} has several pods of the driver {driver} ({}): wait until an update has ended, or name one namespace with --driver-namespace",
                names.collect::<Vec<_>>().join(", ")
            )));
        }
    };
    let found = DriverPod::of(pod, NODE_CONTAINER);
    match is_ready(pod, NODE_CONTAINER) {
        true => Ok(found),
        false => Err(not_ready(&found)),
    }
}

fn is_ready(pod: &DynamicObject, container: &str) -> bool {
    let states = pod.list("/status/containerStatuses").iter();
    let mut own = states.filter(|state| state["name"] == container);
    own.any(|state| state["ready"] == true)
}

fn not_ready(pod: &DriverPod) -> Failure {
    Failure::failed(format!(
        "the container {} of {} is not ready; its log has the reason: kubectl -n {} logs {} -c {}",
        pod.container,
        pod.title(),
        pod.namespace,
        pod.pod,
        pod.container
    ))
}

fn describe_missing(pods: &[DynamicObject], node: &str, driver: &str, scope: &Scope) -> String {
    let place = match scope {
        Scope::All => "any namespace".into(),
        Scope::Namespace(namespace) => format!("namespace {namespace}"),
    };
    if pods.is_empty() {
        return format!(
            "no pod of the driver {driver} was found in {place}; --driver-name and --driver-namespace name another installation"
        );
    }
    let mut nodes: Vec<_> = pods.iter().map(|pod| pod.text("/spec/nodeName")).collect();
    nodes.sort_unstable();
    nodes.dedup();
    let more = match nodes.len() > MAX_NAMES {
        true => " and others",
        false => "",
    };
    nodes.truncate(MAX_NAMES);
    format!(
        "no pod of the driver {driver} runs on node {node}, but on {}{more}; node.nodeSelector and node.tolerations of the chart select the nodes",
        nodes.join(", ")
    )
}

/// The arguments of a container.
fn arguments(pod: &DynamicObject, container: &str) -> Vec<String> {
    let mut containers = pod.list("/spec/containers").iter();
    let own = containers.find(|one| one["name"] == container);
    let words = own.and_then(|one| one["args"].as_array());
    let words = words.into_iter().flatten().filter_map(Value::as_str);
    words.map(str::to_string).collect()
}

/// Fails if the user may not run commands in the pod.
pub async fn may_run(cluster: &Cluster, pod: &DriverPod) -> Result<()> {
    let refusal = "nothing was run, because these permissions are missing, which are those of an administrator";
    require_stream(
        cluster,
        &object::POD_EXEC,
        (&pod.namespace, &pod.pod),
        refusal,
    )
    .await
}

/// Fails if the user may not open a stream to a pod. It begins with a GET, and API servers from Kubernetes
/// 1.35 also require `create`.
pub async fn require_stream(
    cluster: &Cluster,
    kind: &Kind,
    (namespace, name): (&str, &str),
    refusal: &str,
) -> Result<()> {
    let needs = ["get", "create"].map(|verb| Need {
        verb,
        kind,
        namespace,
        name,
    });
    let missing = missing(cluster, &needs).await?;
    match missing.is_empty() {
        true => Ok(()),
        false => Err(Failure::denied(format!("{refusal}:{missing}"))),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn pod(name: &str, node: &str, is_ready: bool) -> DynamicObject {
        let pod = json!({"metadata": {"name": name, "namespace": "storage"},
            "spec": {"nodeName": node, "containers": [
                {"name": "registrar", "args": ["--endpoint=other"]},
                {"name": "driver", "args": ["serve", "--endpoint=unix:///p/csi.sock", "--node-name=$(NODE_NAME)",
                    "--pool=a=file:/a,init", "--pool=b=lvm:g/b", "--pool-x=c", "--state-dir=$(X)/y"]}]},
            "status": {"phase": "Running", "containerStatuses": [
                {"name": "registrar", "ready": true}, {"name": "driver", "ready": is_ready}]}});
        serde_json::from_value(pod).unwrap()
    }

    fn chosen(pods: &[DynamicObject], node: &str) -> std::result::Result<String, String> {
        let pod = choose(pods, node, "own", &Scope::All).map_err(|failure| failure.message)?;
        Ok(pod.pod)
    }

    #[test]
    fn a_node_has_exactly_one_ready_pod_or_the_error_says_what_to_do() {
        let pods = [pod("a", "node-1", true), pod("b", "node-2", false)];
        assert_eq!(chosen(&pods, "node-1").as_deref(), Ok("a"));
        let log = chosen(&pods, "node-2").unwrap_err();
        assert!(log.contains("kubectl -n storage logs b -c driver"), "{log}");
        let none = chosen(&pods, "node-3").unwrap_err();
        assert!(none.contains("but on node-1, node-2;"), "{none}");
        let none = chosen(&[], "node-1").unwrap_err();
        assert!(none.contains("any namespace"), "{none}");
        let two = [pods[0].clone(), pod("c", "node-1", true)];
        let two = chosen(&two, "node-1").unwrap_err();
        assert!(two.contains("storage/a, storage/c"), "{two}");
    }

    #[test]
    fn a_command_gets_the_options_of_the_driver_that_are_written_out() {
        let pods = [pod("a", "node-1", true)];
        let pod = choose(&pods, "node-1", "own", &Scope::All).unwrap();
        let options = pod.options(&["pool", "endpoint", "state-dir", "node-name"]);
        let expected = [
            "--endpoint=unix:///p/csi.sock",
            "--pool=a=file:/a,init",
            "--pool=b=lvm:g/b",
        ];
        assert_eq!(options, expected);
    }
}
