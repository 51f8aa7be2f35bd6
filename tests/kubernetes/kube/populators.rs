//! Data sources with the real API server: the rules of their CRDs, what the controller does with the real
//! binder of claims, and what its service account may do. The test does the work of the scheduler, the
//! provisioner and the kubelet.

mod cached;
mod confined;
mod granted;
mod rules;
mod secured;

use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use slackwater::router::kube::reconcile::lease::Pace;
use slackwater::router::populators::{PopulatorOptions, Populators, Settings};
use slackwater::telemetry::Metrics;

use crate::kube::api::{DRIVER, eventually};
use crate::kube::plane::Plane;

const IMAGE: &str =
    "slackwater-populate@sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";
const ACCOUNT: &str = "slackwater-populators";
const CACHE_CLASS: &str = "slackwater-populators-cache";

/// A cluster with the CRDs, rights and policies of the chart, and the controller with its own account.
struct Fixture {
    plane: Plane,
    populators: Arc<Populators>,
    metrics: Arc<Metrics>,
}

fn chart() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("deploy/chart")
}

fn apply_crds(plane: &Plane) {
    for kind in ["httpsources", "ocisources", "s3sources"] {
        let path = chart().join(format!("crds/{kind}.yaml"));
        plane.apply(&std::fs::read_to_string(path).unwrap());
        let name = format!("crd/{kind}.slackwater.dev");
        plane.kubectl(&["wait", "--for=condition=Established", &name]);
    }
}

/// The rights and the policies, as the chart renders them.
fn apply_chart(plane: &Plane) {
    let (_, digest) = IMAGE.split_once('@').unwrap();
    let output = Command::new(plane.program().with_file_name("helm"))
        .args(["template", "slackwater"])
        .arg(chart())
        .arg("--namespace=slackwater")
        .arg(format!(
            "--set=populators.create=true,populators.image.digest={digest}"
        ))
        .arg("--api-versions=snapshot.storage.k8s.io/v1")
        .arg("--show-only=templates/populators.yaml")
        .arg("--show-only=templates/populators-admission.yaml")
        .output()
        .unwrap();
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{error}");
    let text = String::from_utf8(output.stdout).unwrap();
    // No pod of the Deployment runs here.
    let objects: Vec<_> = text
        .split("\n---\n")
        .filter(|object| !object.contains("kind: Deployment"))
        .collect();
    plane.apply(&objects.join("\n---\n"));
}

impl Fixture {
    fn new() -> Option<Fixture> {
        Fixture::with("data sources", &[])
    }

    fn with(what: &str, gates: &'static [&'static str]) -> Option<Fixture> {
        let mut plane = Plane::start_with(what, gates)?;
        for namespace in ["slackwater", "shop", "bank"] {
            plane.kubectl(&["create", "namespace", namespace]);
        }
        apply_crds(&plane);
        plane.start_snapshot_controller();
        apply_chart(&plane);
        for (name, driver) in [("local", DRIVER), ("foreign", "other.example")] {
            plane.apply(
                &json!({"apiVersion": "storage.k8s.io/v1", "kind": "StorageClass",
                    "metadata": {"name": name}, "provisioner": driver,
                    "volumeBindingMode": "WaitForFirstConsumer"})
                .to_string(),
            );
        }
        plane.start_controllers();
        let client = plane.client_of(&token(&plane));
        let settings = Settings {
            cache_class: Some(CACHE_CLASS.into()),
            cache_snapshots: 4,
            ..Settings::new(DRIVER, IMAGE)
        };
        let options = PopulatorOptions {
            pace: Pace {
                duration: Duration::from_secs(6),
                belief: Duration::from_secs(4),
                every: Duration::from_secs(1),
            },
            poll_interval: Duration::from_millis(500),
            ..PopulatorOptions::new(settings, "slackwater", "populators-a")
        };
        let metrics = Arc::new(Metrics::new());
        let populators = {
            let _inside = plane.runtime.enter();
            Populators::start(client, options, Arc::clone(&metrics))
        };
        Some(Fixture {
            plane,
            populators,
            metrics,
        })
    }

    fn get(&self, what: &str, field: &str) -> String {
        let path = format!("jsonpath={{{field}}}");
        let words = ["get", "-n", "shop", what, "-o", &path];
        self.plane.try_kubectl(&words).unwrap_or_default()
    }

    fn patch(&self, what: &str, patch: &Value, more: &[&str]) {
        let patch = patch.to_string();
        let words = ["patch", "-n", "shop", what, "--type=merge", "-p", &patch];
        self.plane.kubectl(&[&words[..], more].concat());
    }

    fn create_claim(&self, name: &str, class: &str, source: &str) {
        self.plane.apply(
            &json!({"apiVersion": "v1", "kind": "PersistentVolumeClaim",
                "metadata": {"name": name, "namespace": "shop"},
                "spec": {"storageClassName": class, "accessModes": ["ReadWriteOnce"],
                    "resources": {"requests": {"storage": "1Gi"}},
                    "dataSourceRef": {"apiGroup": "slackwater.dev", "kind": "HttpSource",
                        "name": source}}})
            .to_string(),
        );
    }

    fn select_node(&self, claim: &str, node: Option<&str>) {
        let annotations = json!({"volume.kubernetes.io/selected-node": node});
        let patch = json!({"metadata": {"annotations": annotations}});
        self.patch(&format!("pvc/{claim}"), &patch, &[]);
    }

    fn selected_node(&self, claim: &str) -> String {
        let field = r".metadata.annotations.volume\.kubernetes\.io/selected-node";
        self.get(&format!("pvc/{claim}"), field)
    }

    /// Creates the volume of a prime claim, as the provisioner does. Returns its name.
    fn provision(&self, prime: &str) -> String {
        let uid = self.get(&format!("pvc/{prime}"), ".metadata.uid");
        let name = format!("pvc-{uid}");
        self.plane.apply(
            &json!({"apiVersion": "v1", "kind": "PersistentVolume",
                "metadata": {"name": name,
                    "annotations": {"pv.kubernetes.io/provisioned-by": DRIVER}},
                "spec": {
                    "capacity": {"storage": "1Gi"}, "accessModes": ["ReadWriteOnce"],
                    "persistentVolumeReclaimPolicy": "Delete", "storageClassName": "local",
                    "claimRef": {"apiVersion": "v1", "kind": "PersistentVolumeClaim",
                        "namespace": "shop", "name": prime, "uid": uid},
                    "csi": {"driver": DRIVER, "volumeHandle": format!("handle-{uid}")}}})
            .to_string(),
        );
        name
    }

    /// The pod of a prime claim, once it is recorded.
    fn wait_for_pod(&self, prime: &str) -> String {
        let mut uid = String::new();
        eventually("the pod is created and recorded", || {
            let record = r".metadata.annotations.slackwater\.dev/populate-pod";
            uid = self.get(&format!("pod/{prime}"), ".metadata.uid");
            !uid.is_empty() && self.get(&format!("pvc/{prime}"), record) == uid
        });
        uid
    }

    fn end_pod(&self, name: &str, phase: &str, exit_code: i32, message: &str) {
        let status = json!({"status": {"phase": phase, "containerStatuses": [{
            "name": "populate", "image": IMAGE, "imageID": "", "ready": false, "restartCount": 0,
            "state": {"terminated": {"exitCode": exit_code, "message": message}}}]}});
        self.patch(&format!("pod/{name}"), &status, &["--subresource=status"]);
    }

    fn source(&self, field: &str) -> String {
        self.get("httpsource/base", field)
    }

    fn condition(&self) -> String {
        self.source(".status.conditions[0].reason")
    }

    /// Messages of the events about a claim.
    fn events(&self, claim: &str, reason: &str) -> String {
        let selector = format!("--field-selector=involvedObject.name={claim},reason={reason}");
        let path = "jsonpath={.items[*].message}";
        let words = ["get", "events", "-n", "shop", &selector, "-o", path];
        self.plane.kubectl(&words)
    }

    fn is_gone(&self, what: &str) -> bool {
        let found = self.plane.try_kubectl(&["get", "-n", "shop", what]);
        found.is_err_and(|error| error.contains("NotFound"))
    }
}

/// A token of the service account of the controller.
fn token(plane: &Plane) -> String {
    let token = plane.kubectl(&["create", "token", ACCOUNT, "-n", "slackwater"]);
    token.trim().to_string()
}

/// A namespace is asked for its permission, and nothing is created before.
fn asks_the_owner(fixture: &Fixture, prime: &str) {
    eventually(
        "the source shows that the namespace does not allow pods",
        || fixture.condition() == "NotAllowed",
    );
    let message = fixture.source(".status.claims[0].message");
    let (_, advice) = message.split_once("kubectl ").unwrap();
    eventually("an event says it, too", || {
        fixture.events("data", "NotAllowed").contains(advice)
    });
    fixture.select_node("data", Some("node-1"));
    std::thread::sleep(Duration::from_secs(2));
    assert!(fixture.is_gone(&format!("pvc/{prime}")));
    fixture.select_node("data", None);
    let words: Vec<_> = advice.split(' ').collect();
    fixture.plane.kubectl(&words);
    eventually("it waits for a pod", || {
        fixture.source(".status.claims[0].reason") == "WaitForFirstConsumer"
    });
}

fn passes_the_node_on(fixture: &Fixture, prime: &str) {
    fixture.select_node("data", Some("node-1"));
    eventually("the prime claim has the node", || {
        fixture.selected_node(prime) == "node-1"
    });
    fixture.select_node(prime, None);
    eventually("the claim has no node any more", || {
        fixture.selected_node("data").is_empty()
    });
    fixture.select_node("data", Some("node-2"));
    eventually("the prime claim has the other node", || {
        fixture.selected_node(prime) == "node-2"
    });
}

/// The first attempt fails, and leaves nothing.
fn fails_once(fixture: &Fixture, prime: &str) -> Value {
    let first = fixture.provision(prime);
    fixture.wait_for_pod(prime);
    let pod = fixture
        .plane
        .kubectl(&["get", "pod", prime, "-n", "shop", "-o", "json"]);
    assert_eq!(fixture.get("pvc/data", ".status.phase"), "Pending");
    let before = fixture.get(&format!("pvc/{prime}"), ".metadata.uid");
    let said =
        json!({"reason": "TransferFailed", "message": "the server has closed the connection"});
    fixture.end_pod(prime, "Failed", 12, &said.to_string());
    eventually(
        "the prime claim is deleted, and another one is created",
        || {
            let now = fixture.get(&format!("pvc/{prime}"), ".metadata.uid");
            !now.is_empty() && now != before
        },
    );
    let events = fixture.events("data", "AttemptFailed");
    assert!(
        events.contains("TransferFailed: the server has closed"),
        "{events}"
    );
    assert_eq!(fixture.source(".status.claims[0].failures"), "1");
    eventually("the volume of the attempt is released", || {
        fixture.get(&format!("pv/{first}"), ".status.phase") == "Released"
    });
    fixture
        .plane
        .kubectl(&["delete", "pv", &first, "--wait=false"]);
    serde_json::from_str(&pod).unwrap()
}

fn succeeds(fixture: &Fixture, prime: &str) {
    let volume = fixture.provision(prime);
    fixture.wait_for_pod(prime);
    assert_eq!(fixture.get("pvc/data", ".status.phase"), "Pending");
    fixture.end_pod(prime, "Succeeded", 0, "");
    eventually("the claim is bound", || {
        fixture.get("pvc/data", ".status.phase") == "Bound"
    });
    assert_eq!(fixture.get("pvc/data", ".spec.volumeName"), volume);
    eventually("nothing is left", || {
        fixture.is_gone(&format!("pod/{prime}")) && fixture.is_gone(&format!("pvc/{prime}"))
    });
    eventually("the source shows it", || {
        fixture.source(".status.populated") == "1" && fixture.condition() == "Proceeding"
    });
    assert_eq!(
        fixture.get(&format!("pv/{volume}"), ".status.phase"),
        "Bound"
    );
    // Numbers follow with the next pass.
    let lines = [
        "slackwater_populations{phase=\"Populated\"} 1",
        "slackwater_population_failures_total{next=\"retry\"} 1",
    ];
    eventually("metrics show it", || {
        let text = fixture.metrics.render().unwrap();
        lines.iter().all(|line| text.contains(line))
    });
}

#[test]
fn a_claim_is_filled_on_a_real_api_server_with_the_rights_of_the_chart() {
    let Some(fixture) = Fixture::new() else {
        return;
    };
    let Fixture {
        plane, populators, ..
    } = &fixture;
    plane.apply(
        &json!({"apiVersion": "slackwater.dev/v1alpha1", "kind": "HttpSource",
            "metadata": {"name": "base", "namespace": "shop"},
            "spec": {"url": "https://images.example/base.img", "unverified": true}})
        .to_string(),
    );
    fixture.create_claim("data", "local", "base");
    fixture.create_claim("other", "foreign", "base");
    let prime_of = |claim: &str| {
        let uid = fixture.get(&format!("pvc/{claim}"), ".metadata.uid");
        format!("prime-{uid}")
    };
    let prime = prime_of("data");
    asks_the_owner(&fixture, &prime);
    passes_the_node_on(&fixture, &prime);
    let pod = fails_once(&fixture, &prime);
    succeeds(&fixture, &prime);
    cached::twenty_claims_receive_content_once(&fixture);
    assert_eq!(populators.problem(), None);
    plane.runtime.block_on(populators.shut_down());

    let other = prime_of("other");
    assert!(
        fixture.is_gone(&format!("pvc/{other}")),
        "of another driver"
    );
    let annotations = fixture.get("pvc/other", ".metadata.annotations");
    assert!(!annotations.contains("slackwater.dev"), "{annotations}");

    confined::is_confined(&fixture, &pod);
}

#[test]
fn sources_that_contradict_themselves_are_refused_by_name() {
    let Some(plane) = Plane::start("the CRDs of data sources") else {
        return;
    };
    apply_crds(&plane);
    rules::are_enforced(&plane);
}
