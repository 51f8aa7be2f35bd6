//! Claims of lost nodes, with the real API server and the real controllers of StatefulSets, claims and
//! volumes. The test does the work of the scheduler, the provisioner and the kubelets.

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use kube::Api;
use kube::api::{DeleteParams, Preconditions};
use serde_json::{Value, json};
use slackwater::router::Cluster;
use slackwater::router::kube::{InCluster, Options};

use crate::kube::api::{Agents, DRIVER, eventually, options, start};
use crate::kube::plane::Plane;

const TAINT: &str = "node.kubernetes.io/out-of-service=nodeshutdown:NoExecute";

fn pool(node: u32) -> String {
    format!("11111111-2222-4333-8444-{node:012}")
}

/// A cluster with three nodes, and a StatefulSet with a replica on each.
struct Fixture {
    plane: Plane,
    agents: Arc<Agents>,
    cluster: Arc<InCluster>,
}

impl Fixture {
    fn new() -> Option<Fixture> {
        let mut plane = Plane::start("claims of lost nodes")?;
        plane.apply(include_str!("../../../deploy/chart/crds/pools.yaml"));
        plane.kubectl(&[
            "wait",
            "--for=condition=Established",
            "crd/pools.slackwater.dev",
        ]);
        for namespace in ["slackwater", "shop"] {
            plane.kubectl(&["create", "namespace", namespace]);
        }
        plane.apply(
            &json!({"apiVersion": "storage.k8s.io/v1", "kind": "StorageClass",
                "metadata": {"name": "replicated"}, "provisioner": DRIVER,
                "volumeBindingMode": "WaitForFirstConsumer",
                "parameters": {"onNodeLost": "recreate"}})
            .to_string(),
        );
        let agents = Arc::<Agents>::default();
        for node in 1..=3 {
            let name = format!("node-{node}");
            let home = format!("home-{node}");
            plane.apply(
                &json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name,
                    "labels": {format!("topology.{DRIVER}/home"): home}}})
                .to_string(),
            );
            agents.say(&name, &home, &[&pool(node)]);
        }
        plane.start_controllers();
        plane.apply(
            &json!({"apiVersion": "apps/v1", "kind": "StatefulSet",
                "metadata": {"name": "db", "namespace": "shop"},
                "spec": {"replicas": 3, "podManagementPolicy": "Parallel", "serviceName": "db",
                    "selector": {"matchLabels": {"app": "db"}},
                    "template": {"metadata": {"labels": {"app": "db"}}, "spec": {"containers": [
                        {"name": "main", "image": "busybox",
                            "volumeMounts": [{"name": "data", "mountPath": "/v"}]}]}},
                    "volumeClaimTemplates": [{"metadata": {"name": "data"}, "spec": {
                        "storageClassName": "replicated", "accessModes": ["ReadWriteOnce"],
                        "resources": {"requests": {"storage": "1Gi"}}}}]}})
            .to_string(),
        );
        let mine = Options {
            unreachable_after: SignedDuration::from_secs(1),
            ..options("router-a")
        };
        let cluster = start(&plane, mine, &agents);
        let fixture = Fixture {
            plane,
            agents,
            cluster,
        };
        for node in 1..=3 {
            fixture.ready_node(node, true);
        }
        Some(fixture)
    }

    fn get(&self, what: &str, field: &str) -> String {
        let path = format!("jsonpath={{{field}}}");
        let words = ["get", "-n", "shop", what, "-o", &path];
        self.plane.try_kubectl(&words).unwrap_or_default()
    }

    fn patch(&self, what: &str, patch: &Value, more: &[&str]) {
        let patch = patch.to_string();
        let words = [
            "patch",
            "-n",
            "shop",
            what,
            "--type=strategic",
            "-p",
            &patch,
        ];
        self.plane.kubectl(&[&words[..], more].concat());
    }

    fn ready_node(&self, node: u32, is_ready: bool) {
        let status = if is_ready { "True" } else { "Unknown" };
        let patch = json!({"status": {"conditions": [{"type": "Ready", "status": status}]}});
        self.patch(
            &format!("node/node-{node}"),
            &patch,
            &["--subresource=status"],
        );
    }

    /// A volume is created for the claim of a replica, and its pod runs there.
    fn run(&self, replica: u32, node: u32) {
        let claim = format!("data-db-{replica}");
        eventually("the StatefulSet creates the claim and the pod", || {
            let phase = self.get(&format!("pvc/{claim}"), ".status.phase");
            let pod = self.get(&format!("pod/db-{replica}"), ".status.phase");
            phase == "Pending" && pod == "Pending"
        });
        let uid = self.get(&format!("pvc/{claim}"), ".metadata.uid");
        let handle = format!("{}.{uid}", pool(node));
        self.plane.apply(
            &json!({"apiVersion": "v1", "kind": "PersistentVolume",
                "metadata": {"name": format!("pvc-{uid}"),
                    "annotations": {"pv.kubernetes.io/provisioned-by": DRIVER}},
                "spec": {
                    "capacity": {"storage": "1Gi"}, "accessModes": ["ReadWriteOnce"],
                    "persistentVolumeReclaimPolicy": "Delete", "storageClassName": "replicated",
                    "claimRef": {"apiVersion": "v1", "kind": "PersistentVolumeClaim",
                        "namespace": "shop", "name": claim, "uid": uid},
                    "csi": {"driver": DRIVER, "volumeHandle": handle},
                    "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [
                        {"key": format!("topology.{DRIVER}/home"), "operator": "In",
                            "values": [format!("home-{node}")]}]}]}}}})
            .to_string(),
        );
        eventually("the claim is bound", || {
            self.get(&format!("pvc/{claim}"), ".status.phase") == "Bound"
        });
        let binding = json!({"apiVersion": "v1", "kind": "Binding",
            "metadata": {"name": format!("db-{replica}")},
            "target": {"apiVersion": "v1", "kind": "Node", "name": format!("node-{node}")}});
        let file = self.plane.path("binding");
        std::fs::write(&file, binding.to_string()).unwrap();
        let path = format!("/api/v1/namespaces/shop/pods/db-{replica}/binding");
        let words = ["create", "--raw", &path, "-f", file.to_str().unwrap()];
        self.plane.kubectl(&words);
        let ago = Timestamp::now() - SignedDuration::from_mins(10);
        let patch = json!({"status": {"phase": "Running", "conditions": [
            {"type": "Ready", "status": "True", "lastTransitionTime": ago.to_string()}]}});
        self.patch(
            &format!("pod/db-{replica}"),
            &patch,
            &["--subresource=status"],
        );
    }

    /// Messages of the events about a claim.
    fn events(&self, claim: &str, reason: &str) -> String {
        let selector = format!("--field-selector=involvedObject.name={claim},reason={reason}");
        let path = "jsonpath={.items[*].message}";
        let words = ["get", "events", "-n", "shop", &selector, "-o", path];
        self.plane.kubectl(&words)
    }

    /// The pod is deleted by the router; the test does the rest, as the garbage collector of pods
    /// does for a node that is gone. Returns the PersistentVolume of the claim that is gone.
    fn recreated(&self, replica: u32) -> String {
        let (claim, pod) = (
            format!("pvc/data-db-{replica}"),
            format!("pod/db-{replica}"),
        );
        let uid = self.get(&claim, ".metadata.uid");
        let volume = self.get(&claim, ".spec.volumeName");
        eventually("the claim and its pod are being deleted", || {
            let leaving = |what: &str| !self.get(what, ".metadata.deletionTimestamp").is_empty();
            leaving(&claim) && leaving(&pod)
        });
        let name = format!("db-{replica}");
        let words = ["delete", "pod", &name, "-n", "shop", "--force"];
        self.plane.kubectl(&words);
        eventually("the StatefulSet creates the claim again", || {
            let now = self.get(&claim, ".metadata.uid");
            !now.is_empty() && now != uid
        });
        eventually("the PersistentVolume stays", || {
            let phase = self.get(&format!("pv/{volume}"), ".status.phase");
            phase == "Released"
        });
        let policy = ".spec.persistentVolumeReclaimPolicy";
        assert_eq!(self.get(&format!("pv/{volume}"), policy), "Retain");
        let from = r".metadata.annotations.slackwater\.dev/quarantined-from";
        let from = self.get(&format!("pv/{volume}"), from);
        assert!(from.starts_with(&format!("{uid}/")), "{from}");
        volume
    }

    /// What the steps depend on: a deletion that names an earlier version of a claim has no effect.
    fn keeps_a_claim_that_has_changed(&self) {
        let version = self.get("pvc/data-db-0", ".metadata.resourceVersion");
        let words = ["annotate", "pvc", "data-db-0", "-n", "shop", "a=b"];
        self.plane.kubectl(&words);
        let params = DeleteParams {
            preconditions: Some(Preconditions {
                uid: Some(self.uid(0)),
                resource_version: Some(version),
            }),
            ..DeleteParams::default()
        };
        let claims = Api::<PersistentVolumeClaim>::namespaced(self.plane.client(), "shop");
        let deleted = self
            .plane
            .runtime
            .block_on(claims.delete("data-db-0", &params));
        let code = match deleted {
            Err(kube::Error::Api(status)) => status.code,
            other => panic!("{other:?}"),
        };
        assert_eq!(code, 409);
    }

    fn uid(&self, replica: u32) -> String {
        self.get(&format!("pvc/data-db-{replica}"), ".metadata.uid")
    }
}

#[test]
fn claims_of_lost_nodes_are_created_again_one_replica_at_a_time() {
    let Some(fixture) = Fixture::new() else {
        return;
    };
    let Fixture {
        plane,
        agents,
        cluster,
    } = &fixture;
    for replica in 0..3 {
        fixture.run(replica, replica + 1);
    }
    fixture.keeps_a_claim_that_has_changed();
    let quarantined = || cluster.status().and_then(|status| status.quarantined);
    eventually("it leads", || quarantined() == Some(0));
    {
        let _inside = plane.runtime.enter();
        cluster.recreate_claims(Duration::from_secs(3));
    }
    agents.silence("node-3");
    eventually("an event says what is missing", || {
        let events = fixture.events("data-db-2", "NodeLostWaits");
        events.contains("node node-3 is in the cluster, without the taint")
    });
    let before = fixture.uid(2);
    plane.kubectl(&["delete", "node", "node-3"]);
    fixture.recreated(2);
    assert_ne!(fixture.uid(2), before);
    let events = fixture.events("data-db-2", "NodeLost");
    assert!(
        events.contains("node node-3 does not exist any more"),
        "{events}"
    );
    eventually("the volume counts as quarantined", || {
        quarantined() == Some(1)
    });

    // Another node, while the new replica is not Ready, and then while the node seems to run.
    agents.silence("node-2");
    plane.kubectl(&["taint", "node", "node-2", TAINT]);
    fixture.ready_node(2, true);
    eventually("a node that is Ready is not lost", || {
        let events = fixture.events("data-db-1", "NodeLostWaits");
        events.contains("but is Ready")
    });
    fixture.ready_node(2, false);
    eventually("more than half of the replicas must be Ready", || {
        let events = fixture.events("data-db-1", "NodeLostWaits");
        events.contains("only 1 of the 3 replicas")
    });
    let before = fixture.uid(1);
    fixture.run(2, 1);
    let volume = fixture.recreated(1);
    assert_ne!(fixture.uid(1), before);

    // The node is back: nothing touches the old volume.
    agents.say("node-2", "home-2", &[&pool(2)]);
    plane.kubectl(&["taint", "node", "node-2", &format!("{TAINT}-")]);
    fixture.ready_node(2, true);
    std::thread::sleep(Duration::from_secs(5));
    assert_eq!(
        fixture.get(&format!("pv/{volume}"), ".status.phase"),
        "Released"
    );
    assert_eq!(quarantined(), Some(2));
    plane.runtime.block_on(cluster.shut_down());
}
