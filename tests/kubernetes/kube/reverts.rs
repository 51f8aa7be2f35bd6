//! Reverts of volumes on a small API server, with agents that a test makes: what is ordered of the
//! agents, in which order, and what the objects show.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::{Value, json};
use slackwater::agent::describe_response::RevertFence;
use slackwater::error::{Error, Result};
use slackwater::model::{SnapshotId, VolumeId};
use slackwater::operation::VolumeRevertStatus;
use slackwater::router::volume_reverts::{RevertStep, RevertingVolumes};
use slackwater::router::{Cluster, ClusterOptions, InCluster};
use slackwater_testkit::eventually;
use tokio::sync::Barrier;
use uuid::Uuid;

use crate::kube::agents::{Agents, cluster, list, report};
use crate::kube::api;
use crate::kube::kubelet::ApiServer;
use crate::kube::plane::Plane;

const DRIVER: &str = "csi.slackwater.dev";
const REVERTS: &str = "/apis/slackwater.dev/v1alpha1/volumereverts";
const REVERT: &str = "/apis/slackwater.dev/v1alpha1/namespaces/shop/volumereverts/back";
const SNAPSHOTS: &str = "/apis/snapshot.storage.k8s.io/v1/namespaces/shop/volumesnapshots";
const CONTENTS: &str = "/apis/snapshot.storage.k8s.io/v1/volumesnapshotcontents";
const GROUPS: &str = "/apis/groupsnapshot.storage.k8s.io/v1beta1";
const PODS: &str = "/api/v1/namespaces/shop/pods";
const UID: &str = "aaaaaaaa-2222-4333-8444-555555555555";
const POOL: &str = "11111111-2222-4333-8444-000000000001";

/// The ID of the volume, or of the snapshot, with this number.
fn id(n: u32) -> String {
    format!("{POOL}.bbbbbbbb-2222-4333-8444-{n:012}")
}

/// The volumes of the agents, by ID.
#[derive(Default)]
struct Volumes {
    seen: Mutex<BTreeMap<String, VolumeRevertStatus>>,
    /// What was ordered: the step, and the last digit of the volume.
    ordered: Mutex<Vec<String>>,
    /// What prepares fail with.
    fails: Mutex<Option<tonic::Code>>,
    /// Prepares wait until this number of them run at the same time.
    together: Mutex<Option<Arc<Barrier>>>,
    /// Switches fail.
    is_held: AtomicBool,
}

impl Volumes {
    fn new() -> Arc<Volumes> {
        let volumes = Volumes::default();
        for n in [1, 2] {
            let seen = VolumeRevertStatus {
                exists: true,
                number: 5,
                ..VolumeRevertStatus::default()
            };
            volumes.seen.lock().unwrap().insert(id(n), seen);
        }
        Arc::new(volumes)
    }

    fn change(&self, n: u32, change: impl FnOnce(&mut VolumeRevertStatus)) {
        change(self.seen.lock().unwrap().get_mut(&id(n)).unwrap());
    }

    fn ordered(&self) -> Vec<String> {
        self.ordered.lock().unwrap().clone()
    }
}

#[tonic::async_trait]
impl RevertingVolumes for Volumes {
    async fn look(&self, volume: VolumeId, _: SnapshotId) -> Result<VolumeRevertStatus> {
        let seen = self.seen.lock().unwrap();
        Ok(seen[&volume.to_string()].clone())
    }

    async fn step(&self, volume: VolumeId, uid: Uuid, step: RevertStep) -> Result<()> {
        let volume = volume.to_string();
        let word = match &step {
            RevertStep::Begin {
                name,
                number,
                members,
                ..
            } => {
                assert_eq!((name.as_str(), *number), ("shop/back", 5));
                assert!((1..=2).contains(&members.count) && members.digest.is_some());
                "fence"
            }
            RevertStep::Prepare => "prepare",
            RevertStep::Switch { members } => {
                assert!((1..=2).contains(&members.count) && members.digest.is_some());
                "switch"
            }
            RevertStep::End => "lift",
            RevertStep::Abort { number } => {
                assert_eq!(*number, 5);
                "abort"
            }
        };
        let digit = &volume[volume.len() - 1..];
        self.ordered.lock().unwrap().push(format!("{word} {digit}"));
        let fails = *self.fails.lock().unwrap();
        if let (RevertStep::Prepare, Some(code)) = (&step, fails) {
            return Err(Error::Forwarded {
                code: code as i32,
                message: "no space".into(),
            });
        }
        let together = self.together.lock().unwrap().clone();
        if let (RevertStep::Prepare, Some(together)) = (&step, together) {
            together.wait().await;
        }
        if word == "switch" && self.is_held.load(Ordering::SeqCst) {
            return Err(Error::unreachable("the agent", "it is away"));
        }
        let mut seen = self.seen.lock().unwrap();
        let seen = seen.get_mut(&volume).unwrap();
        match step {
            RevertStep::Begin { .. } => seen.fenced = Some(uid),
            RevertStep::Prepare => seen.is_prepared = true,
            RevertStep::Switch { .. } => (seen.is_prepared, seen.is_switched) = (false, true),
            RevertStep::End | RevertStep::Abort { .. } => {
                let is_done = matches!(step, RevertStep::End);
                *seen = VolumeRevertStatus {
                    exists: true,
                    number: seen.number + 1,
                    ended: Some((uid, is_done)),
                    ..VolumeRevertStatus::default()
                };
            }
        }
        Ok(())
    }
}

fn at(api: &ApiServer, path: &str) -> Value {
    let objects = api.objects.lock().unwrap();
    objects.at.get(path).cloned().unwrap_or_default()
}

fn phase(api: &ApiServer) -> String {
    let phase = at(api, REVERT)["status"]["phase"].clone();
    phase.as_str().unwrap_or_default().into()
}

/// A claim with its volume, and a snapshot of it, which is a member of a group.
fn member(api: &ApiServer, n: u32) -> Value {
    api.put(
        &format!("/api/v1/persistentvolumes/pv-{n}"),
        json!({"apiVersion": "v1", "kind": "PersistentVolume",
            "metadata": {"name": format!("pv-{n}"), "uid": format!("pv-{n}")},
            "spec": {"claimRef": {"namespace": "shop", "name": format!("data-{n}"),
                    "uid": format!("claim-{n}")},
                "csi": {"driver": DRIVER, "volumeHandle": id(n)}}}),
    );
    api.put(
        &format!("/api/v1/namespaces/shop/persistentvolumeclaims/data-{n}"),
        json!({"apiVersion": "v1", "kind": "PersistentVolumeClaim",
            "metadata": {"name": format!("data-{n}"), "namespace": "shop",
                "uid": format!("claim-{n}")},
            "spec": {"volumeName": format!("pv-{n}")}, "status": {"phase": "Bound"}}),
    );
    api.put(
        &format!("{CONTENTS}/content-{n}"),
        json!({"apiVersion": "snapshot.storage.k8s.io/v1", "kind": "VolumeSnapshotContent",
            "metadata": {"name": format!("content-{n}")},
            "spec": {"driver": DRIVER, "volumeSnapshotRef": {"uid": format!("snapshot-{n}")}},
            "status": {"snapshotHandle": id(n + 5)}}),
    );
    let snapshot = json!({"apiVersion": "snapshot.storage.k8s.io/v1", "kind": "VolumeSnapshot",
        "metadata": {"name": format!("snap-{n}"), "namespace": "shop",
            "uid": format!("snapshot-{n}")},
        "spec": {"volumeSnapshotClassName": "fast",
            "source": {"persistentVolumeClaimName": format!("data-{n}")}},
        "status": {"readyToUse": true, "volumeGroupSnapshotName": "nightly",
            "boundVolumeSnapshotContentName": format!("content-{n}")}});
    api.put(&format!("{SNAPSHOTS}/snap-{n}"), snapshot.clone());
    snapshot
}

/// A cluster with two claims and a group snapshot of them, and a revert.
fn prepared(spec: Value) -> ApiServer {
    let api = ApiServer::new();
    let object = json!({"apiVersion": "slackwater.dev/v1alpha1", "kind": "VolumeRevert",
        "metadata": {"name": "back", "namespace": "shop", "uid": UID, "resourceVersion": "1",
            "generation": 1, "creationTimestamp": k8s_openapi::jiff::Timestamp::now()},
        "spec": spec});
    api.put(REVERT, object.clone());
    list(&api, REVERTS, "VolumeRevert", json!([object]));
    let members = [1, 2].map(|n| member(&api, n));
    list(&api, SNAPSHOTS, "VolumeSnapshot", json!(members));
    list(&api, PODS, "Pod", json!([]));
    list(&api, "/api/v1/pods", "Pod", json!([]));
    list(
        &api,
        "/api/v1/persistentvolumes",
        "PersistentVolume",
        json!([]),
    );
    api.put(
        &format!("{GROUPS}/namespaces/shop/volumegroupsnapshots/nightly"),
        json!({"apiVersion": "groupsnapshot.storage.k8s.io/v1beta1", "kind": "VolumeGroupSnapshot",
            "metadata": {"name": "nightly", "namespace": "shop"},
            "status": {"readyToUse": true,
                "boundVolumeGroupSnapshotContentName": "nightly-content"}}),
    );
    api.put(
        &format!("{GROUPS}/volumegroupsnapshotcontents/nightly-content"),
        json!({"apiVersion": "groupsnapshot.storage.k8s.io/v1beta1",
            "kind": "VolumeGroupSnapshotContent", "metadata": {"name": "nightly-content"},
            "spec": {"source": {"volumeHandles": [id(1), id(2)]}},
            "status": {"volumeSnapshotHandlePairList": [
                {"volumeHandle": id(1), "snapshotHandle": id(6)},
                {"volumeHandle": id(2), "snapshotHandle": id(7)}]}}),
    );
    api
}

fn start(api: &ApiServer, volumes: &Arc<Volumes>, agents: &Arc<Agents>) -> Arc<InCluster> {
    let started = cluster(api, agents, |options: &mut ClusterOptions| {
        options.orphans.age = Duration::ZERO;
    });
    let _inside = api.runtime.enter();
    started.revert_volumes(Arc::clone(volumes) as Arc<dyn RevertingVolumes>);
    started.lift_revert_fences(Arc::clone(volumes) as Arc<dyn RevertingVolumes>);
    started
}

#[test]
fn all_members_of_a_group_are_fenced_and_prepared_before_the_first_switch() {
    let api = prepared(json!({"groupSnapshot": "nightly"}));
    let volumes = Volumes::new();
    let _cluster = start(&api, &volumes, &Arc::default());
    eventually("it is done", || phase(&api) == "Done");
    let steps = ["fence", "prepare", "switch", "lift"];
    let expected: Vec<_> = steps
        .iter()
        .flat_map(|step| [1, 2].map(|n| format!("{step} {n}")))
        .collect();
    assert_eq!(volumes.ordered(), expected);
    eventually("the object is let go", || {
        let finalizers = at(&api, REVERT)["metadata"]["finalizers"].clone();
        finalizers.as_array().is_none_or(|all| all.is_empty())
    });
    let status = at(&api, REVERT)["status"].clone();
    assert_eq!(status["conditions"][0]["status"], "True");
    let states: Vec<_> = status["members"]
        .as_array()
        .unwrap()
        .iter()
        .map(|member| member["state"].clone())
        .collect();
    assert_eq!(states, ["Reverted", "Reverted"]);
}

#[test]
fn a_group_with_a_missing_member_does_not_begin() {
    let api = prepared(json!({"groupSnapshot": "nightly"}));
    let one = member(&api, 1);
    list(&api, SNAPSHOTS, "VolumeSnapshot", json!([one]));
    let volumes = Volumes::new();
    let cluster = start(&api, &volumes, &Arc::default());
    let reason = || at(&api, REVERT)["status"]["conditions"][0]["reason"].clone();
    eventually("it waits", || reason() == "GroupIncomplete");
    assert_eq!(volumes.ordered(), [""; 0]);
    // The watches of this server report no changes.
    let counts = || cluster.status().and_then(|status| status.reverts);
    assert_eq!(counts(), Some([("Pending", 1)].into()));
    api.runtime.block_on(cluster.shut_down());
    assert_eq!(counts(), None, "it does not lead any more");
}

#[test]
fn a_group_of_other_snapshots_does_not_begin_although_their_number_is_right() {
    let api = prepared(json!({"groupSnapshot": "nightly"}));
    // As if the snapshot had been replaced by a later one of the same volume.
    api.put(
        &format!("{CONTENTS}/content-2"),
        json!({"apiVersion": "snapshot.storage.k8s.io/v1", "kind": "VolumeSnapshotContent",
            "metadata": {"name": "content-2"},
            "spec": {"driver": DRIVER, "volumeSnapshotRef": {"uid": "snapshot-2"}},
            "status": {"snapshotHandle": id(9)}}),
    );
    let volumes = Volumes::new();
    let _cluster = start(&api, &volumes, &Arc::default());
    let status = || at(&api, REVERT)["status"].clone();
    eventually("it waits", || {
        status()["conditions"][0]["reason"] == "GroupIncomplete"
    });
    let message = status()["message"].to_string();
    assert!(
        message.contains(&id(7)) && message.contains(&id(9)),
        "{message}"
    );
    assert_eq!(volumes.ordered(), [""; 0]);
}

#[test]
fn the_members_of_a_group_are_prepared_at_the_same_time() {
    let api = prepared(json!({"groupSnapshot": "nightly"}));
    let volumes = Volumes::new();
    *volumes.together.lock().unwrap() = Some(Arc::new(Barrier::new(2)));
    let _cluster = start(&api, &volumes, &Arc::default());
    eventually("it is done", || phase(&api) == "Done");
}

#[test]
fn a_revert_that_is_switching_needs_neither_pods_nor_claims() {
    let api = prepared(json!({"groupSnapshot": "nightly"}));
    let volumes = Volumes::new();
    volumes.is_held.store(true, Ordering::SeqCst);
    let _cluster = start(&api, &volumes, &Arc::default());
    eventually("it is switching", || phase(&api) == "Switching");
    for n in [1, 2] {
        api.forbid(&format!(
            "/api/v1/namespaces/shop/persistentvolumeclaims/data-{n}"
        ));
        api.forbid(&format!("/api/v1/persistentvolumes/pv-{n}"));
    }
    api.forbid(PODS);
    volumes.is_held.store(false, Ordering::SeqCst);
    eventually("it is done", || phase(&api) == "Done");
}

#[test]
fn a_revert_waits_for_pods_names_them_and_keeps_the_old_content_under_the_fence() {
    let spec = json!({"claim": "data-1", "snapshot": "snap-1", "keepOld": true});
    let api = prepared(spec);
    let pod = json!({"apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": "pg-0", "namespace": "shop"},
        "spec": {"containers": [], "volumes": [{"name": "data",
            "persistentVolumeClaim": {"claimName": "data-1"}}]},
        "status": {"phase": "Running"}});
    list(&api, PODS, "Pod", json!([pod]));
    let volumes = Volumes::new();
    volumes.change(1, |seen| seen.user = Some("it is mounted".into()));
    let _cluster = start(&api, &volumes, &Arc::default());
    let message = || at(&api, REVERT)["status"]["message"].clone();
    eventually("it waits", || {
        message() == "claim data-1 is in use by pods pg-0"
    });
    assert_eq!(volumes.ordered(), [""; 0]);
    volumes.change(1, |seen| seen.user = None);
    let old = format!("{SNAPSHOTS}/before-revert-{UID}-0");
    eventually("the old content is kept", || phase(&api) == "Keeping");
    assert_eq!(volumes.ordered(), ["fence 1"]);
    let created = || {
        let objects = api.objects.lock().unwrap();
        let mut all = objects.changes.iter();
        let made = all.find(|(method, path, _)| method == "POST" && path == SNAPSHOTS);
        made.map(|(_, _, sent)| sent.clone())
    };
    eventually("the snapshot is created", || created().is_some());
    let mut made = created().unwrap();
    assert_eq!(made["metadata"]["name"], format!("before-revert-{UID}-0"));
    assert_eq!(
        made["spec"],
        json!({"volumeSnapshotClassName": "fast",
            "source": {"persistentVolumeClaimName": "data-1"}})
    );
    // What csi-snapshotter does.
    made["status"] = json!({"readyToUse": true});
    api.put(&old, made);
    eventually("it is done", || phase(&api) == "Done");
    let expected = ["fence 1", "prepare 1", "switch 1", "lift 1"];
    assert_eq!(volumes.ordered(), expected);
}

/// The members of a group snapshot have no class.
#[test]
fn the_old_content_of_a_group_is_kept_with_a_class_of_the_driver() {
    let api = prepared(json!({"groupSnapshot": "nightly", "keepOld": true}));
    let mut members = [1, 2].map(|n| at(&api, &format!("{SNAPSHOTS}/snap-{n}")));
    for (n, member) in (1..).zip(&mut members) {
        member["spec"]
            .as_object_mut()
            .unwrap()
            .remove("volumeSnapshotClassName");
        api.put(&format!("{SNAPSHOTS}/snap-{n}"), member.clone());
    }
    list(&api, SNAPSHOTS, "VolumeSnapshot", json!(members));
    let classes = "/apis/snapshot.storage.k8s.io/v1/volumesnapshotclasses";
    let class = |name: &str, driver: &str, is_default: bool| {
        let key = "snapshot.storage.kubernetes.io/is-default-class";
        json!({"apiVersion": "snapshot.storage.k8s.io/v1", "kind": "VolumeSnapshotClass",
            "metadata": {"name": name, "annotations": {key: is_default.to_string()}},
            "driver": driver, "deletionPolicy": "Delete"})
    };
    let other = class("a", "other.example", true);
    list(&api, classes, "VolumeSnapshotClass", json!([other]));
    let volumes = Volumes::new();
    let _cluster = start(&api, &volumes, &Arc::default());
    eventually("it says what is missing", || {
        let message = at(&api, REVERT)["status"]["message"].clone();
        let message = message.as_str().unwrap_or_default();
        message.contains("VolumeSnapshotClass of driver csi.slackwater.dev")
    });
    assert_eq!(volumes.ordered(), [""; 0]);
    let ours = [class("c", DRIVER, false), class("b", DRIVER, false)];
    let [c, b] = ours;
    list(&api, classes, "VolumeSnapshotClass", json!([other, c, b]));
    for n in [0, 1] {
        let name = format!("before-revert-{UID}-{n}");
        let created = || {
            let objects = api.objects.lock().unwrap();
            let mut all = objects.changes.iter();
            let made = all.find(|(method, path, sent)| {
                method == "POST" && path == SNAPSHOTS && sent["metadata"]["name"] == name
            });
            made.map(|(_, _, sent)| sent.clone())
        };
        eventually("the snapshot is created", || created().is_some());
        let mut made = created().unwrap();
        assert_eq!(made["spec"]["volumeSnapshotClassName"], "b");
        made["status"] = json!({"readyToUse": true});
        api.put(&format!("{SNAPSHOTS}/{name}"), made);
    }
    eventually("it is done", || phase(&api) == "Done");
}

#[test]
fn what_cannot_be_prepared_is_undone_for_good() {
    let api = prepared(json!({"groupSnapshot": "nightly"}));
    let volumes = Volumes::new();
    *volumes.fails.lock().unwrap() = Some(tonic::Code::ResourceExhausted);
    let _cluster = start(&api, &volumes, &Arc::default());
    eventually("it has failed", || phase(&api) == "Failed");
    let steps = ["fence", "prepare", "abort"];
    let each = steps
        .iter()
        .flat_map(|step| [1, 2].map(|n| format!("{step} {n}")));
    assert_eq!(volumes.ordered(), each.collect::<Vec<_>>());
    let message = at(&api, REVERT)["status"]["message"].clone();
    assert!(message.as_str().unwrap().contains("no space"), "{message}");
}

#[test]
fn fences_whose_revert_was_removed_are_lifted() {
    let api = prepared(json!({"claim": "data-1", "snapshot": "absent"}));
    let volumes = Volumes::new();
    let gone: Uuid = "cccccccc-2222-4333-8444-555555555555".parse().unwrap();
    volumes.change(2, |seen| seen.fenced = Some(gone));
    let agents = Arc::<Agents>::default();
    let mut said = report("node-a", &[1]);
    let (_, answer) = said.seen.as_mut().unwrap();
    Arc::get_mut(answer).unwrap().revert_fences = vec![RevertFence {
        volume_id: id(2),
        revert_uid: gone.to_string(),
        number: 5,
        members: 2,
        members_digest: String::new(),
        switched: false,
    }];
    *agents.0.lock().unwrap() = vec![said];
    let _cluster = start(&api, &volumes, &agents);
    eventually("it is lifted", || {
        volumes
            .ordered()
            .first()
            .is_some_and(|first| first == "abort 2")
    });
}

/// A field of an object in the namespace.
fn field(plane: &Plane, what: &str, field: &str) -> String {
    let path = format!("jsonpath={{{field}}}");
    let words = ["get", "-n", "shop", what, "-o", &path];
    plane.try_kubectl(&words).unwrap_or_default()
}

fn patch(plane: &Plane, what: &str, patch: &Value, more: &[&str]) {
    let patch = patch.to_string();
    let words = ["patch", "-n", "shop", what, "--type=merge", "-p", &patch];
    plane.kubectl(&[&words[..], more].concat());
}

/// The claim `data`, which is bound to the first volume.
fn bound_claim(plane: &Plane) {
    let volume = json!({"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": "pv"},
        "spec": {"capacity": {"storage": "1Gi"}, "accessModes": ["ReadWriteOnce"],
            "csi": {"driver": DRIVER, "volumeHandle": id(1)}}});
    plane.apply(&volume.to_string());
    let claim = json!({"apiVersion": "v1", "kind": "PersistentVolumeClaim",
        "metadata": {"name": "data", "namespace": "shop"},
        "spec": {"accessModes": ["ReadWriteOnce"], "volumeName": "pv", "storageClassName": "",
            "resources": {"requests": {"storage": "1Gi"}}}});
    plane.apply(&claim.to_string());
    let uid = field(plane, "pvc/data", ".metadata.uid");
    let bound = json!({"spec": {"claimRef": {"namespace": "shop", "name": "data", "uid": uid}}});
    patch(plane, "pv/pv", &bound, &[]);
    let bound = json!({"status": {"phase": "Bound"}});
    patch(plane, "pvc/data", &bound, &["--subresource=status"]);
}

/// Does what csi-snapshotter does for a VolumeSnapshot.
fn complete(plane: &Plane, snapshot: &str, handle: &str) {
    let what = format!("volumesnapshot/{snapshot}");
    let bound = ".status.boundVolumeSnapshotContentName";
    let content = || field(plane, &what, bound);
    eventually("it has a content", || !content().is_empty());
    let taken = json!({"status": {"snapshotHandle": handle, "readyToUse": true,
        "restoreSize": 1, "creationTime": 1}});
    let content = format!("volumesnapshotcontent/{}", content());
    patch(plane, &content, &taken, &["--subresource=status"]);
    let is_ready = || field(plane, &what, ".status.readyToUse") == "true";
    eventually("it is ready", is_ready);
}

fn create(plane: &Plane, name: &str, spec: &Value) -> std::result::Result<String, String> {
    let object = json!({"apiVersion": "slackwater.dev/v1alpha1", "kind": "VolumeRevert",
        "metadata": {"name": name, "namespace": "shop"}, "spec": spec});
    let file = plane.path("revert.json");
    std::fs::write(&file, object.to_string()).unwrap();
    plane.try_kubectl(&["create", "-f", &file.display().to_string()])
}

#[test]
fn a_claim_is_reverted_on_a_real_api_server_with_the_rules_of_the_crd() {
    let Some(mut plane) = Plane::start("reverts of volumes on a real API server") else {
        return;
    };
    for (crd, name) in [
        (
            include_str!("../../../deploy/chart/crds/pools.yaml"),
            "pools",
        ),
        (
            include_str!("../../../deploy/chart/crds/volumereverts.yaml"),
            "volumereverts",
        ),
    ] {
        plane.apply(crd);
        let name = format!("crd/{name}.slackwater.dev");
        plane.kubectl(&["wait", "--for=condition=Established", &name]);
    }
    plane.start_snapshot_controller();
    for namespace in ["slackwater", "shop"] {
        plane.kubectl(&["create", "namespace", namespace]);
    }
    let class = json!({"apiVersion": "snapshot.storage.k8s.io/v1", "kind": "VolumeSnapshotClass",
        "metadata": {"name": "fast"}, "driver": DRIVER, "deletionPolicy": "Delete"});
    plane.apply(&class.to_string());
    bound_claim(&plane);
    let snapshot = json!({"apiVersion": "snapshot.storage.k8s.io/v1", "kind": "VolumeSnapshot",
        "metadata": {"name": "today", "namespace": "shop"},
        "spec": {"volumeSnapshotClassName": "fast",
            "source": {"persistentVolumeClaimName": "data"}}});
    plane.apply(&snapshot.to_string());
    complete(&plane, "today", &id(6));
    for wrong in [
        json!({}),
        json!({"claim": "data"}),
        json!({"claim": "data", "snapshot": "today", "groupSnapshot": "nightly"}),
        json!({"claim": "data", "snapshot": "today", "deadline": "soon"}),
    ] {
        assert!(create(&plane, "wrong", &wrong).is_err(), "{wrong}");
    }
    let agents = Arc::<api::Agents>::default();
    agents.say("node-1", "home-1", &[POOL]);
    let cluster = api::start(&plane, api::options("router-a"), &agents);
    let volumes = Volumes::new();
    let inside = plane.runtime.enter();
    cluster.revert_volumes(Arc::clone(&volumes) as Arc<dyn RevertingVolumes>);
    drop(inside);
    let spec = json!({"claim": "data", "snapshot": "today", "keepOld": true});
    create(&plane, "back", &spec).unwrap();
    let revert = "volumereverts.slackwater.dev/back";
    let changed = json!({"spec": {"keepOld": false}}).to_string();
    let words = [
        "patch",
        "-n",
        "shop",
        revert,
        "--type=merge",
        "-p",
        &changed,
    ];
    let refused = plane.try_kubectl(&words).unwrap_err();
    assert!(refused.contains("cannot be changed"), "{refused}");
    let phase = || field(&plane, revert, ".status.phase");
    eventually("the old content is kept", || phase() == "Keeping");
    let uid = field(&plane, revert, ".metadata.uid");
    complete(&plane, &format!("before-revert-{uid}-0"), &id(7));
    eventually("it is done", || phase() == "Done");
    let expected = ["fence 1", "prepare 1", "switch 1", "lift 1"];
    assert_eq!(volumes.ordered(), expected);
    let member = |name: &str| field(&plane, revert, &format!(".status.members[0].{name}"));
    assert_eq!(member("state"), "Reverted");
    assert_eq!(member("old"), format!("before-revert-{uid}-0"));
    assert_eq!(member("handle"), id(1));
    // Nothing keeps the object any more.
    plane.kubectl(&["delete", "-n", "shop", revert]);
}
