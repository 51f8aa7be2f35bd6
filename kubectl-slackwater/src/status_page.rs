//! `page`: forwards a port of this machine to the status page in a pod of the controller.
//!
//! Each replica of the controller serves the same page (docs/status-page.md), so the pod need not be
//! that of the leader. The user's permission to forward ports of the pod is the login.

use std::cell::RefCell;
use std::rc::Rc;

use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, DynamicObject, ListParams};
use serde_json::Value;
use tokio::io::{AsyncWriteExt, DuplexStream};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::LocalSet;

use crate::cluster::object::{self, Fields};
use crate::cluster::{Cluster, Scope};
use crate::driver_pod::{self, CONTROLLER_LABELS, require_stream};
use crate::failure::{Failure, Result};
use crate::listing::print;
use crate::text::escaped;

/// Where the page is served.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Target {
    namespace: String,
    pod: String,
    port: u16,
}

/// What all connections share.
struct Page {
    cluster: Cluster,
    scope: Scope,
    /// The pod of the last connection that did not fail.
    target: RefCell<Option<Target>>,
}

/// Serves the page until the program is interrupted. Without a namespace, the controller is searched for
/// in that of the Helm release.
pub async fn run(cluster: &Cluster, namespace: Option<&str>, port: u16) -> Result<()> {
    let scope = driver_pod::scope(cluster, namespace).await;
    let own = Cluster::with_client(cluster.client.clone(), &cluster.namespace, &cluster.driver);
    let page = Rc::new(Page {
        cluster: own,
        scope,
        target: RefCell::default(),
    });
    let target = page.get_target().await?;
    let refusal = "the page cannot be opened, because these permissions are missing";
    let pod = (target.namespace.as_str(), target.pod.as_str());
    require_stream(cluster, &object::POD_PORT, pod, refusal).await?;
    let listener = TcpListener::bind(("127.0.0.1", port)).await;
    let local = listener.and_then(|listener| Ok((listener.local_addr()?, listener)));
    let (address, listener) = local.map_err(|error| {
        Failure::failed(format!(
            "listening at port {port} of 127.0.0.1: {error}; --port names another one, and 0 is any that is free"
        ))
    })?;
    page.use_from_now(&target);
    print(&format!("http://{address}/\n"), &[]);
    let serve = async {
        loop {
            match listener.accept().await {
                Ok((local, _)) => {
                    tokio::task::spawn_local(Rc::clone(&page).forward(local));
                }
                Err(error) => {
                    let action = format!("accepting a connection at {address}");
                    return Err(Failure::failed(format!("{action}: {error}")));
                }
            }
        }
    };
    LocalSet::new().run_until(serve).await
}

impl Page {
    /// A pod of the controller that serves the page.
    async fn get_target(&self) -> Result<Target> {
        let params = ListParams::default().labels(CONTROLLER_LABELS);
        let found = self.cluster.get_all(&object::POD, &self.scope, &params);
        let pods = found.await.map_err(|failure| match self.scope {
            Scope::All => Failure {
                message: format!(
                    "{}; -n names the namespace of the controller",
                    failure.message
                ),
                ..failure
            },
            Scope::Namespace(_) => failure,
        })?;
        choose(&pods, &self.cluster.driver, &self.scope)
    }

    /// Remembers the pod, and reports it.
    fn use_from_now(&self, target: &Target) {
        let Target {
            namespace,
            pod,
            port,
        } = target;
        log_line(&format!(
            "forwarding to port {port} of pod {namespace}/{pod}"
        ));
        *self.target.borrow_mut() = Some(target.clone());
    }

    /// Connects one local connection with the page. One that fails is closed.
    async fn forward(self: Rc<Page>, local: TcpStream) {
        let before = self.target.borrow().clone();
        let opened = match before {
            Some(target) => match self.open(&target).await {
                Ok(stream) => Ok((target, stream)),
                Err(failure) => {
                    log_line(&format!(
                        "{}; trying another pod of the controller",
                        failure.message
                    ));
                    self.open_another().await
                }
            },
            None => self.open_another().await,
        };
        let (target, (stream, problem)) = match opened {
            Ok(opened) => opened,
            Err(failure) => {
                self.forget(None);
                return log_line(&failure.message);
            }
        };
        let is_answered = copy(local, stream).await;
        let problem = match (problem.await, is_answered) {
            (Some(problem), _) => problem,
            (None, false) => "it has closed the connection without an answer".into(),
            (None, true) => return,
        };
        self.forget(Some(&target));
        log_line(&format!(
            "pod {}/{}: {problem}",
            target.namespace, target.pod
        ));
    }

    async fn open_another(&self) -> Result<(Target, Opened)> {
        let target = self.get_target().await?;
        let stream = self.open(&target).await?;
        self.use_from_now(&target);
        Ok((target, stream))
    }

    /// The next connection searches for a pod again, unless another one has already found another pod.
    fn forget(&self, target: Option<&Target>) {
        let mut now = self.target.borrow_mut();
        if target.is_none() || now.as_ref() == target {
            *now = None;
        }
    }

    async fn open(&self, target: &Target) -> Result<Opened> {
        let Target {
            namespace,
            pod,
            port,
        } = target;
        let pods: Api<Pod> = Api::namespaced(self.cluster.client.clone(), namespace);
        let action = format!("forwarding to pod {namespace}/{pod}");
        let mut forwarded = match pods.portforward(pod, &[*port]).await {
            Ok(forwarded) => forwarded,
            Err(error) => return Err(Failure::of(&action, &error)),
        };
        let stream = forwarded.take_stream(*port);
        let problem = forwarded.take_error(*port);
        let both = stream.zip(problem);
        let (stream, problem) =
            both.ok_or_else(|| Failure::failed(format!("{action}: no stream")))?;
        let problem: Problem = Box::pin(problem);
        Ok((stream, problem))
    }
}

/// What the kubelet reports when the port cannot be used.
type Problem = std::pin::Pin<Box<dyn Future<Output = Option<String>>>>;
/// A stream to the port of a pod.
type Opened = (DuplexStream, Problem);

/// Copies both ways until both have ended. Returns whether what was sent was answered. A connection that
/// breaks off on the side of the browser is no failure: the browser opens another one.
async fn copy(mut local: TcpStream, stream: DuplexStream) -> bool {
    let (mut from_local, mut to_local) = local.split();
    let (mut from_pod, mut to_pod) = tokio::io::split(stream);
    let requests = async {
        let sent = tokio::io::copy(&mut from_local, &mut to_pod).await;
        let _ = to_pod.shutdown().await;
        sent
    };
    let answers = async {
        let received = tokio::io::copy(&mut from_pod, &mut to_local).await;
        let _ = to_local.shutdown().await;
        received
    };
    let (sent, received) = futures_util::future::join(requests, answers).await;
    matches!(sent, Ok(0)) || !matches!(received, Ok(0))
}

/// The pod whose page is shown: one that is ready, or else one that runs.
fn choose(pods: &[DynamicObject], driver: &str, scope: &Scope) -> Result<Target> {
    let own = pods.iter().filter(|pod| {
        let role = flag(pod, "role");
        role == Some("controller") && flag(pod, "driver-name") == Some(driver)
    });
    let own: Vec<_> = own.collect();
    if own.is_empty() {
        let place = match scope {
            Scope::All => "in any namespace".into(),
            Scope::Namespace(namespace) => format!("in namespace {namespace}"),
        };
        return Err(Failure::failed(format!(
            "no pod of the controller of {driver} was found {place}; with singleNode the driver has no controller, and no page"
        )));
    }
    let serving = own.iter().filter_map(|pod| {
        let port = flag(pod, "page-port")?.parse().ok()?;
        Some((*pod, port))
    });
    let serving: Vec<(&DynamicObject, u16)> = serving.collect();
    if serving.is_empty() {
        return Err(Failure::failed(format!(
            "the status page is off in namespace {}: set page.create=true in the values of the chart (helm upgrade … --reuse-values --set page.create=true)",
            own[0].namespace()
        )));
    }
    let running = serving
        .iter()
        .filter(|(pod, _)| pod.text("/status/phase") == "Running" && !pod.is_being_deleted());
    let best = running.min_by_key(|(pod, _)| (!is_ready(pod), pod.name().to_string()));
    match best {
        Some((pod, port)) => Ok(Target {
            namespace: pod.namespace().into(),
            pod: pod.name().into(),
            port: *port,
        }),
        None => {
            let states = serving.iter().map(|(pod, _)| {
                let state = match pod.metadata.deletion_timestamp {
                    Some(_) => "Terminating",
                    None => pod.text("/status/phase"),
                };
                format!("{}/{}: {state}", pod.namespace(), pod.name())
            });
            let states: Vec<_> = states.collect();
            Err(Failure::failed(format!(
                "no pod of the controller runs ({})",
                states.join(", ")
            )))
        }
    }
}

fn is_ready(pod: &DynamicObject) -> bool {
    let conditions = pod.conditions();
    conditions
        .iter()
        .any(|[kind, status, _, _]| (*kind, *status) == ("Ready", "True"))
}

/// The value of an option of the controller's container.
fn flag<'a>(pod: &'a DynamicObject, name: &str) -> Option<&'a str> {
    let containers = pod.list("/spec/containers").iter();
    let arguments = containers.filter_map(|container| container["args"].as_array());
    let mut arguments = arguments.flatten().filter_map(Value::as_str);
    arguments.find_map(|argument| {
        let argument = argument.strip_prefix("--")?.strip_prefix(name)?;
        argument.strip_prefix('=')
    })
}

fn log_line(line: &str) {
    eprintln!("{}", escaped(line));
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn pod(name: &str, args: &[&str], phase: &str, ready: &str) -> DynamicObject {
        let pod = json!({"metadata": {"name": name, "namespace": "storage"},
            "spec": {"containers": [{"name": "router", "args": args},
                {"name": "provisioner", "args": ["--csi-address=/csi/csi.sock"]}]},
            "status": {"phase": phase, "conditions": [{"type": "Ready", "status": ready}]}});
        serde_json::from_value(pod).unwrap()
    }

    const ON: [&str; 4] = [
        "serve",
        "--role=controller",
        "--driver-name=own",
        "--page-port=9831",
    ];

    fn chosen(pods: &[DynamicObject]) -> std::result::Result<String, String> {
        let target = choose(pods, "own", &Scope::All).map_err(|failure| failure.message)?;
        Ok(format!(
            "{}/{}:{}",
            target.namespace, target.pod, target.port
        ))
    }

    #[test]
    fn a_ready_pod_is_preferred_and_one_that_ends_is_not_chosen() {
        let mut ending = pod("a", &ON, "Running", "True");
        let time = "2026-01-02T03:04:05Z".parse().unwrap();
        ending.metadata.deletion_timestamp =
            Some(k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(time));
        let pods = [
            ending.clone(),
            pod("b", &ON, "Pending", "True"),
            pod("c", &ON, "Running", "False"),
            pod("e", &ON, "Running", "True"),
            pod("d", &ON, "Running", "True"),
        ];
        assert_eq!(chosen(&pods).as_deref(), Ok("storage/d:9831"));
        assert_eq!(chosen(&pods[..3]).as_deref(), Ok("storage/c:9831"));
        let none = chosen(&pods[..2]).unwrap_err();
        let expected = "no pod of the controller runs (storage/a: Terminating, storage/b: Pending)";
        assert_eq!(none, expected);
    }

    #[test]
    fn the_pod_is_a_controller_of_the_driver_with_the_page() {
        let other = ["--role=controller", "--driver-name=other", "--page-port=1"];
        let node = ["--role=agent", "--driver-name=own", "--page-port=1"];
        let foreign = [
            pod("a", &other, "Running", "True"),
            pod("b", &node, "Running", "True"),
        ];
        let none = chosen(&foreign).unwrap_err();
        assert!(
            none.contains("in any namespace") && none.contains("singleNode"),
            "{none}"
        );
        let off = pod("c", &ON[..3], "Running", "True");
        let refused = chosen(std::slice::from_ref(&off)).unwrap_err();
        assert!(refused.contains("page.create=true"), "{refused}");
        // While the setting is rolled out, only one of them has the page.
        let both = [off, pod("d", &ON, "Running", "False")];
        assert_eq!(chosen(&both).as_deref(), Ok("storage/d:9831"));
    }
}
