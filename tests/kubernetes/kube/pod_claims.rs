//! What the router reads before it chooses a node for the volumes of a pod, on a small API server.

use std::sync::Arc;

use serde_json::{Value, json};
use slackwater::error::Result;
use slackwater::operation::ContentSource;
use slackwater::router::InCluster;
use slackwater::router::cluster::{Cluster, Unwanted};
use slackwater::router::create_volume::pod_placement::{
    Claim, Class, PodClaims, Source, State, Tie,
};

use crate::kube::agents::{Agents, cluster, list};
use crate::kube::kubelet::ApiServer;

const CLAIMS: &str = "/api/v1/namespaces/shop/persistentvolumeclaims";
const PODS: &str = "/api/v1/namespaces/shop/pods";
const CLASSES: &str = "/apis/storage.k8s.io/v1/storageclasses";
const SNAPSHOT: &str = "/apis/snapshot.storage.k8s.io/v1/namespaces/shop/volumesnapshots/snap";
const CONTENT: &str = "/apis/snapshot.storage.k8s.io/v1/volumesnapshotcontents/content";

fn claim(name: &str, spec: Value) -> Value {
    let mut claim = json!({"apiVersion": "v1", "kind": "PersistentVolumeClaim",
        "metadata": {"name": name, "namespace": "shop", "uid": format!("uid-{name}"),
            "annotations": {"volume.kubernetes.io/selected-node": "node-b"}},
        "spec": {"storageClassName": "slackwater",
            "resources": {"requests": {"storage": "1Gi"}}}});
    let given = spec.as_object().unwrap();
    claim["spec"].as_object_mut().unwrap().extend(given.clone());
    claim
}

fn from_snapshot() -> Value {
    json!({"dataSource": {"apiGroup": "snapshot.storage.k8s.io", "kind": "VolumeSnapshot",
        "name": "snap"}})
}

fn pod(name: &str, claims: &[&str]) -> Value {
    let volumes = claims.iter().map(|claim| {
        let template = claim.split('-').next();
        json!({"name": template, "persistentVolumeClaim": {"claimName": claim}})
    });
    json!({"metadata": {"name": name, "namespace": "shop", "uid": name, "ownerReferences": [
            {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": "db", "uid": "set",
             "controller": true}]},
        "spec": {"containers": [{"name": "c"}], "volumes": volumes.collect::<Vec<_>>()}})
}

fn volume(name: &str, driver: &str, key: &str, value: &str) -> Value {
    json!({"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": name},
        "spec": {"csi": {"driver": driver, "volumeHandle": format!("handle-{name}")},
            "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [
                {"key": key, "operator": "In", "values": [value]}]}]}}}})
}

struct Shop {
    api: ApiServer,
    cluster: Arc<InCluster>,
}

impl Shop {
    /// A StatefulSet of two pods. `data-db-0` is restored; `log-db-0` is new.
    fn new() -> Shop {
        let api = ApiServer::new();
        let claims = [
            claim("data-db-0", from_snapshot()),
            claim("log-db-0", json!({})),
            claim("data-db-1", json!({"volumeName": "pv-1"})),
            claim("data-db-2", from_snapshot()),
            claim("data-other-0", json!({})),
        ];
        list(&api, CLAIMS, "PersistentVolumeClaim", json!(claims));
        let pods = [
            pod("db-0", &["data-db-0", "log-db-0"]),
            pod("db-1", &["data-db-1"]),
        ];
        list(&api, PODS, "Pod", json!(pods));
        let class = |provisioner: &str| {
            json!({"apiVersion": "storage.k8s.io/v1", "kind": "StorageClass",
                "metadata": {"name": "c"}, "provisioner": provisioner,
                "parameters": {"restore": "auto"}})
        };
        api.put(
            &format!("{CLASSES}/slackwater"),
            class("csi.slackwater.dev"),
        );
        api.put(&format!("{CLASSES}/foreign"), class("other.example"));
        let home = "topology.csi.slackwater.dev/home";
        let pv = volume("pv-1", "csi.slackwater.dev", home, "home-1");
        api.put("/api/v1/persistentvolumes/pv-1", pv);
        let local = volume("local", "other.example", "kubernetes.io/hostname", "node-a");
        api.put("/api/v1/persistentvolumes/local", local);
        let bound = json!({"metadata": {"name": "snap"},
            "status": {"boundVolumeSnapshotContentName": "content"}});
        api.put(SNAPSHOT, bound);
        let content = json!({"metadata": {"name": "content"},
            "status": {"snapshotHandle": "pool.snapshot"}});
        api.put(CONTENT, content);
        let cluster = cluster(&api, &Arc::<Agents>::default(), |_| {});
        Shop { api, cluster }
    }

    fn read_claim(&self, claim: &str, is_elsewhere: bool) -> Result<Option<PodClaims>> {
        let read = self.cluster.pod_claims(claim, None, is_elsewhere);
        self.api.runtime.block_on(read)
    }

    /// As for the new volume of `log-db-0`.
    fn read(&self) -> PodClaims {
        self.read_claim("shop/log-db-0", false).unwrap().unwrap()
    }

    fn restored(&self) -> State {
        let claims = self.read().claims;
        let restored = claims.into_iter().find(|one| one.path == "shop/data-db-0");
        restored.unwrap().state
    }

    /// Replaces the restored claim.
    fn change(&self, spec: Value) {
        let claims = [
            claim("data-db-0", spec),
            claim("log-db-0", json!({})),
            claim("log-other-0", from_snapshot()),
        ];
        list(&self.api, CLAIMS, "PersistentVolumeClaim", json!(claims));
    }
}

impl Drop for Shop {
    fn drop(&mut self) {
        self.api.runtime.block_on(self.cluster.shut_down());
    }
}

fn paths(claims: &[Claim]) -> Vec<&str> {
    claims.iter().map(|claim| claim.path.as_str()).collect()
}

fn ours(source: Source) -> State {
    let parameters = [("restore".to_string(), "auto".to_string())].into();
    let class = Class::Ours(parameters);
    State::Unbound { class, source }
}

#[test]
fn the_claims_of_the_pod_and_of_its_controller_are_read() {
    let shop = Shop::new();
    let read = shop.read();
    let expected = |name: &str, source: Source| Claim {
        path: format!("shop/{name}"),
        uid: format!("uid-{name}"),
        selected: Some("node-b".into()),
        bytes: 1 << 30,
        state: ours(source),
    };
    let handle = Source::Of(ContentSource::Snapshot("pool.snapshot".into()));
    let claims = [
        expected("data-db-0", handle),
        expected("log-db-0", Source::None),
    ];
    assert_eq!(read.claims, claims);
    // That of the other pod, and that of a member whose pod does not exist.
    assert_eq!(paths(&read.others), ["shop/data-db-1", "shop/data-db-2"]);
    assert_eq!(
        read.others[0].state,
        State::Bound(Tie::Home("home-1".into()))
    );
    assert_eq!(read.pods.len(), 1);
    // The call has the source of its own volume.
    let given = ContentSource::Snapshot("given".into());
    let own = shop
        .cluster
        .pod_claims("shop/data-db-0", Some(&given), true);
    let own = shop.api.runtime.block_on(own).unwrap().unwrap();
    assert_eq!(own.claims[0].state, ours(Source::Of(given)));
}

#[test]
fn a_namespace_without_restores_costs_one_request() {
    let shop = Shop::new();
    let claims = [claim("log-db-0", json!({})), claim("data-db-0", json!({}))];
    list(&shop.api, CLAIMS, "PersistentVolumeClaim", json!(claims));
    assert!(shop.read_claim("shop/log-db-0", false).unwrap().is_none());
    assert_eq!(shop.api.asked(PODS), 0);
    assert!(shop.read_claim("shop/log-db-0", true).unwrap().is_some());
}

#[test]
fn pods_that_share_claims_are_one_group_and_ended_pods_are_none() {
    let shop = Shop::new();
    let mut ended = pod("db-2", &["log-db-0", "data-other-0"]);
    ended["status"]["phase"] = json!("Succeeded");
    let mut deleted = pod("db-3", &["log-db-0", "data-other-0"]);
    deleted["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
    let mut scratch = pod("db-5", &["data-db-1"]);
    let volumes = scratch["spec"]["volumes"].as_array_mut().unwrap();
    volumes.push(json!({"name": "tmp", "ephemeral": {}}));
    let pods = [
        ended,
        deleted,
        pod("db-4", &["log-db-0", "data-db-1"]),
        scratch,
    ];
    list(&shop.api, PODS, "Pod", json!(pods));
    let read = shop.read();
    let expected = ["shop/data-db-1", "shop/db-5-tmp", "shop/log-db-0"];
    assert_eq!(paths(&read.claims), expected);
    assert_eq!(read.pods.len(), 2);
    assert_eq!(read.volumes.len(), 1, "that of the bound claim");
    let missing = &read.claims[1];
    assert_eq!(missing.uid, "", "it does not exist yet");
    let state = &missing.state;
    assert!(
        matches!(
            state,
            State::Unbound {
                class: Class::Unknown(_),
                ..
            }
        ),
        "{state:?}"
    );
    // A claim that was deleted is there as well.
    let read = shop.read_claim("shop/gone", true).unwrap().unwrap();
    assert_eq!(
        (paths(&read.claims), read.pods.len()),
        (vec!["shop/gone"], 0)
    );
}

#[test]
fn sources_and_classes_are_read_or_named_as_unknown() {
    let shop = Shop::new();
    let of_claim =
        |name: &str| json!({"dataSourceRef": {"kind": "PersistentVolumeClaim", "name": name}});
    shop.api.put(
        &format!("{CLAIMS}/data-db-1"),
        claim("data-db-1", json!({"volumeName": "pv-1"})),
    );
    shop.change(of_claim("data-db-1"));
    assert_eq!(
        shop.restored(),
        ours(Source::Of(ContentSource::Volume("handle-pv-1".into())))
    );
    shop.change(json!({"storageClassName": "foreign"}));
    let none = Source::None;
    assert_eq!(
        shop.restored(),
        State::Unbound {
            class: Class::Others,
            source: none
        }
    );
    shop.change(json!({"volumeName": "local"}));
    assert_eq!(shop.restored(), State::Bound(Tie::Node("node-a".into())));
    for (spec, word) in [
        (of_claim("nothing"), "claim shop/nothing does not exist"),
        (
            json!({"dataSourceRef": {"apiGroup": "x", "kind": "Book", "name": "b"}}),
            "Book b",
        ),
    ] {
        shop.change(spec);
        let state = shop.restored();
        let is_unknown = matches!(&state, State::Unbound { source: Source::Unknown(why), .. } if why.contains(word));
        assert!(is_unknown, "{word}: {state:?}");
    }
    shop.change(json!({"storageClassName": "missing"}));
    let state = shop.restored();
    assert!(
        matches!(&state, State::Unbound { class: Class::Unknown(why), .. } if why.contains("missing")),
        "{state:?}"
    );
}

#[test]
fn what_cannot_be_read_is_unknown_and_claims_and_pods_are_demanded() {
    for (path, part) in [(SNAPSHOT, "snap"), (CONTENT, "content")] {
        let shop = Shop::new();
        shop.api.forbid(path);
        let state = shop.restored();
        assert!(
            matches!(&state, State::Unbound { source: Source::Unknown(why), .. } if why.contains(part)),
            "{state:?}"
        );
    }
    let shop = Shop::new();
    shop.api.forbid(&format!("{CLASSES}/slackwater"));
    let state = shop.restored();
    assert!(
        matches!(
            &state,
            State::Unbound {
                class: Class::Unknown(_),
                ..
            }
        ),
        "{state:?}"
    );
    for path in [CLAIMS, PODS, "/api/v1/persistentvolumes/pv-1"] {
        let shop = Shop::new();
        shop.api.forbid(path);
        let read = shop.read_claim("shop/log-db-0", false);
        assert!(read.is_err(), "{path}: {read:?}");
    }
}

#[test]
fn a_node_is_examined_with_its_pods() {
    let shop = Shop::new();
    let claims = shop.read();
    let check = |node: &str| {
        let checked = shop.cluster.check_node(&claims, node);
        shop.api.runtime.block_on(checked)
    };
    let node = |cpu: &str| {
        json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "node-a"}, "status": {
            "conditions": [{"type": "Ready", "status": "True"}],
            "allocatable": {"cpu": cpu, "pods": "10"}}})
    };
    shop.api.put("/api/v1/nodes/node-a", node("1"));
    let busy = json!({"metadata": {"name": "busy"}, "spec": {"containers": [
        {"name": "c", "resources": {"requests": {"cpu": "1"}}}]}});
    list(&shop.api, "/api/v1/pods", "Pod", json!([busy]));
    assert_eq!(check("node-a"), Ok(()));
    assert_eq!(
        shop.api
            .asked("/api/v1/pods?&fieldSelector=spec.nodeName%3Dnode-a"),
        1
    );
    let mut asking = claims.clone();
    let mut pod = pod("db-0", &[]);
    pod["spec"]["containers"][0]["resources"] = json!({"requests": {"cpu": "500m"}});
    asking.pods = vec![serde_json::from_value(pod).unwrap()];
    let check_asking = || {
        let checked = shop.cluster.check_node(&asking, "node-a");
        shop.api.runtime.block_on(checked)
    };
    assert!(check_asking().unwrap_err().contains("too little cpu"));
    shop.api.put("/api/v1/nodes/node-a", node("1500m"));
    assert_eq!(check_asking(), Ok(()));
    assert!(
        check("node-x")
            .unwrap_err()
            .contains("no longer in the cluster")
    );
    shop.api.forbid("/api/v1/nodes/node-a");
    assert!(check("node-a").is_err());
}

#[test]
fn a_copy_is_wanted_until_its_node_is_cordoned_or_gone_or_its_claim_is_deleted() {
    let shop = Shop::new();
    let found = |node: &str, claim: Option<&str>| {
        let found = shop.cluster.find_unwanted(node, claim);
        shop.api.runtime.block_on(found)
    };
    let node = |spec: Value| {
        let node = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "node-a"},
            "spec": spec});
        shop.api.put("/api/v1/nodes/node-a", node);
    };
    let pods = |tolerations: Value| {
        let mut tolerant = pod("db-0", &["data-db-0"]);
        tolerant["spec"]["tolerations"] = tolerations;
        list(
            &shop.api,
            PODS,
            "Pod",
            json!([tolerant, pod("db-1", &["data-db-1"])]),
        );
    };
    let claim_path = format!("{CLAIMS}/data-db-0");
    shop.api
        .put(&claim_path, claim("data-db-0", from_snapshot()));
    let claimed = Some("shop/data-db-0");
    let because = |found: Option<Unwanted>, word: &str| match found {
        Some(Unwanted::Node(why)) => assert!(why.contains(word), "{why}"),
        other => panic!("{word}: {other:?}"),
    };
    node(json!({}));
    assert_eq!(found("node-a", claimed), None);
    assert_eq!(
        shop.api.asked(PODS),
        0,
        "pods are read only if the node is cordoned"
    );
    node(json!({"unschedulable": true}));
    pods(json!([]));
    because(found("node-a", claimed), "cordoned");
    because(found("node-a", None), "cordoned");
    // The scheduler selects a cordoned node for this pod.
    let of_daemon_sets = json!([{"key": "node.kubernetes.io/unschedulable",
        "operator": "Exists", "effect": "NoSchedule"}]);
    pods(of_daemon_sets);
    assert_eq!(found("node-a", claimed), None);
    because(found("node-x", claimed), "no longer in the cluster");
    node(json!({}));
    let deleted = found("node-a", Some("shop/gone"));
    assert_eq!(
        deleted,
        Some(Unwanted::Claim("claim shop/gone was deleted".into()))
    );
    // What cannot be read ends no copy.
    shop.api.forbid(&claim_path);
    assert_eq!(found("node-a", claimed), None);
    shop.api.forbid("/api/v1/nodes/node-a");
    assert_eq!(found("node-a", claimed), None);
}
