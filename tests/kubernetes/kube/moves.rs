//! Moves of volumes on a small API server, with agents that a test makes: what is written, and in which
//! order.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::{Value, json};
use slackwater::agent::describe_response::Fence;
use slackwater::error::{Error, Result};
use slackwater::model::{PoolId, SnapshotId, VolumeId};
use slackwater::operation::{MoveContentStatus, MoveSnapshotStatus, MovingState, VolumeMoveStatus};
use slackwater::router::kube::orphans::{Stored, StoredSnapshot};
use slackwater::router::volume_moves::{Copied, MoveCopy, MovingVolumes, TargetPool, snapshot_of};
use slackwater::router::{ClusterOptions, InCluster};
use slackwater_testkit::eventually;
use uuid::Uuid;

use crate::kube::agents::{Agents, cluster, list, report};
use crate::kube::kubelet::ApiServer;

const DRIVER: &str = "csi.slackwater.dev";
const KEY: &str = "topology.csi.slackwater.dev/home";
const MOVES: &str = "/apis/slackwater.dev/v1alpha1/volumemoves";
const MOVE: &str = "/apis/slackwater.dev/v1alpha1/namespaces/shop/volumemoves/pg";
const POOLS: &str = "/apis/slackwater.dev/v1alpha1/pools";
const VOLUME: &str = "/api/v1/persistentvolumes/pv";
const CLAIM: &str = "/api/v1/namespaces/shop/persistentvolumeclaims/data";
const UID: &str = "aaaaaaaa-2222-4333-8444-555555555555";

fn pool(n: u32) -> String {
    format!("11111111-2222-4333-8444-{n:012}")
}

fn source() -> String {
    format!("{}.bbbbbbbb-2222-4333-8444-555555555555", pool(1))
}

/// The volumes of both agents.
#[derive(Default)]
struct Volumes {
    source: Mutex<VolumeMoveStatus>,
    copy: Mutex<VolumeMoveStatus>,
    /// What was ordered, in order.
    ordered: Mutex<Vec<String>>,
    /// The number of snapshots that were taken.
    taken: Mutex<u64>,
    /// The copy fails with this message.
    fails: Mutex<Option<&'static str>>,
}

impl Volumes {
    fn new() -> Arc<Volumes> {
        let volumes = Volumes::default();
        *volumes.source.lock().unwrap() = VolumeMoveStatus {
            state: MovingState::Ready,
            size: 1 << 30,
            ..VolumeMoveStatus::default()
        };
        Arc::new(volumes)
    }

    /// Takes a snapshot of the source, and returns its identity.
    fn take(&self, copy: &MoveCopy) -> u64 {
        let id = snapshot_of(copy.source, copy.move_uid, copy.round).to_string();
        let mut source = self.source.lock().unwrap();
        if let Some(taken) = source.snapshots.iter().find(|one| one.id == id) {
            return taken.identity;
        }
        let mut taken = self.taken.lock().unwrap();
        *taken += 1;
        source.snapshots.push(MoveSnapshotStatus {
            id,
            is_ready: true,
            identity: *taken,
        });
        *taken
    }

    fn order(&self, what: &str) {
        self.ordered.lock().unwrap().push(what.into());
    }

    fn ordered(&self) -> Vec<String> {
        self.ordered.lock().unwrap().clone()
    }
}

#[tonic::async_trait]
impl MovingVolumes for Volumes {
    fn targets(&self) -> Vec<TargetPool> {
        let target = |n: u32, node: &str| TargetPool {
            id: PoolId(pool(n).parse().unwrap()),
            name: "default".into(),
            node: node.into(),
            home: format!("home-of-{node}"),
            provisionable: 1 << 40,
            problem: None,
        };
        vec![target(1, "node-a"), target(2, "node-b")]
    }

    async fn look(&self, volume: VolumeId, _: &[SnapshotId]) -> Result<VolumeMoveStatus> {
        let is_source = volume.to_string() == source();
        let which = if is_source { &self.source } else { &self.copy };
        Ok(which.lock().unwrap().clone())
    }

    async fn fence(&self, _: VolumeId, move_uid: Uuid, lift: bool) -> Result<()> {
        self.order(if lift { "lift" } else { "fence" });
        let mut source = self.source.lock().unwrap();
        source.fenced = (!lift).then_some(move_uid);
        source.lifted = lift.then_some(move_uid);
        Ok(())
    }

    async fn snapshot(&self, copy: &MoveCopy, base: Option<u32>) -> Result<u64> {
        let of_base = base.map_or(String::new(), |base| format!(" after {base}"));
        self.order(&format!("snapshot {}{of_base}", copy.round.unwrap()));
        self.take(copy);
        Ok(1 << 20)
    }

    async fn copy(&self, copy: &MoveCopy) -> Result<Copied> {
        assert_eq!(copy.max_bytes, 1 << 30);
        assert_eq!(
            (copy.claim.as_str(), copy.pool.as_str()),
            ("shop/data", "default")
        );
        let mut made = self.copy.lock().unwrap();
        if let Some(why) = *self.fails.lock().unwrap() {
            return Err(Error::unreachable("the agent of node node-b", why));
        }
        let identity = self.take(copy);
        if let Some(round) = copy.round {
            self.order(&format!("fill {round}"));
            made.state = MovingState::Filling;
            made.content = Some(MoveContentStatus {
                identity,
                is_whole: true,
            });
            return Ok(Copied::Complete);
        }
        if made.state == MovingState::Absent {
            self.order("copy");
            made.state = MovingState::Filling;
            return Ok(Copied::Continues);
        }
        self.order("copied");
        (made.state, made.content) = (MovingState::Ready, None);
        Ok(Copied::Complete)
    }

    async fn delete_source(&self, _: VolumeId, _: Uuid) -> Result<()> {
        self.order("delete source");
        *self.source.lock().unwrap() = VolumeMoveStatus::default();
        Ok(())
    }

    async fn delete_copy(&self, _: VolumeId) -> Result<()> {
        self.order("delete copy");
        *self.copy.lock().unwrap() = VolumeMoveStatus::default();
        Ok(())
    }

    async fn delete_snapshot(&self, snapshot: SnapshotId) -> Result<()> {
        self.order("delete snapshot");
        let mut source = self.source.lock().unwrap();
        source
            .snapshots
            .retain(|one| one.id != snapshot.to_string());
        Ok(())
    }
}

fn at(api: &ApiServer, path: &str) -> Value {
    let objects = api.objects.lock().unwrap();
    objects.at.get(path).cloned().unwrap_or_default()
}

fn phase(api: &ApiServer) -> String {
    let phase = at(api, MOVE)["status"]["phase"].clone();
    phase.as_str().unwrap_or_default().into()
}

fn persistent_volume() -> Value {
    json!({
        "apiVersion": "v1", "kind": "PersistentVolume",
        "metadata": {"name": "pv", "uid": "pv-1", "resourceVersion": "10",
            "finalizers": ["kubernetes.io/pv-protection"]},
        "spec": {
            "capacity": {"storage": "1Gi"}, "accessModes": ["ReadWriteOnce"],
            "persistentVolumeReclaimPolicy": "Delete", "storageClassName": "fast",
            "claimRef": {"namespace": "shop", "name": "data", "uid": "claim-1"},
            "csi": {"driver": DRIVER, "volumeHandle": source()},
            "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [
                {"key": KEY, "operator": "In", "values": ["home-of-node-a"]}]}]}},
        },
        "status": {"phase": "Bound"},
    })
}

/// A cluster with a claim on node-a, and a move of it.
fn prepared(spec: Value) -> ApiServer {
    let api = ApiServer::new();
    let object = json!({"apiVersion": "slackwater.dev/v1alpha1", "kind": "VolumeMove",
        "metadata": {"name": "pg", "namespace": "shop", "uid": UID, "resourceVersion": "1",
            "generation": 1},
        "spec": spec});
    api.put(MOVE, object.clone());
    list(&api, MOVES, "VolumeMove", json!([object]));
    api.put(VOLUME, persistent_volume());
    list(
        &api,
        "/api/v1/persistentvolumes",
        "PersistentVolume",
        json!([persistent_volume()]),
    );
    api.put(
        CLAIM,
        json!({"apiVersion": "v1", "kind": "PersistentVolumeClaim",
            "metadata": {"name": "data", "namespace": "shop", "uid": "claim-1"},
            "spec": {"volumeName": "pv"}, "status": {"phase": "Bound"}}),
    );
    let pools = [(1, "node-a"), (2, "node-b")].map(|(n, node)| {
        json!({"apiVersion": "slackwater.dev/v1alpha1", "kind": "Pool",
            "metadata": {"name": pool(n), "uid": pool(n), "resourceVersion": "1",
                "labels": {"slackwater.dev/driver": DRIVER}},
            "spec": {},
            "status": {"node": node, "home": format!("home-of-{node}"), "name": "default",
                "health": "Healthy"}})
    });
    for (n, object) in (1..).zip(&pools) {
        api.put(&format!("{POOLS}/{}", pool(n)), object.clone());
    }
    list(&api, POOLS, "Pool", json!(pools));
    api.put(
        "/apis/storage.k8s.io/v1/storageclasses/fast",
        json!({"apiVersion": "storage.k8s.io/v1", "kind": "StorageClass",
            "metadata": {"name": "fast"}, "provisioner": DRIVER}),
    );
    list(
        &api,
        "/apis/storage.k8s.io/v1/volumeattachments",
        "VolumeAttachment",
        json!([]),
    );
    list(&api, "/api/v1/pods", "Pod", json!([]));
    list(&api, "/api/v1/namespaces/shop/pods", "Pod", json!([]));
    api
}

fn start(api: &ApiServer, volumes: &Arc<Volumes>) -> Arc<InCluster> {
    start_with(api, volumes, &Arc::default())
}

fn start_with(api: &ApiServer, volumes: &Arc<Volumes>, agents: &Arc<Agents>) -> Arc<InCluster> {
    let started = cluster(api, agents, |options: &mut ClusterOptions| {
        options.orphans.age = Duration::ZERO;
    });
    for node in ["node-a", "node-b"] {
        let object = json!({"apiVersion": "v1", "kind": "Node",
            "metadata": {"name": node, "uid": node, "labels": {KEY: format!("home-of-{node}")}},
            "status": {"conditions": [{"type": "Ready", "status": "True",
                "lastHeartbeatTime": null, "lastTransitionTime": null}]}});
        api.put(&format!("/api/v1/nodes/{node}"), object);
    }
    let _inside = api.runtime.enter();
    started.move_volumes(Arc::clone(volumes) as Arc<dyn MovingVolumes>);
    started.lift_fences(Arc::clone(volumes) as Arc<dyn MovingVolumes>);
    started
}

/// Methods and paths of the changes of the PersistentVolume and of the annotation that stores it.
fn exchanged(api: &ApiServer) -> Vec<&'static str> {
    let objects = api.objects.lock().unwrap();
    let of_pool = format!("{POOLS}/{}", pool(2));
    let each = objects.changes.iter().filter_map(|(method, path, sent)| {
        let annotations = sent["metadata"]["annotations"].as_object();
        let note = annotations.and_then(|all| {
            let mut all = all.iter();
            all.find(|(key, _)| key.starts_with("move.slackwater.dev/"))
        });
        Some(match (method.as_str(), path.as_str(), note) {
            ("PATCH", path, Some((_, Value::Null))) if path == of_pool => "strike",
            ("PATCH", path, Some(_)) if path == of_pool => "note",
            ("DELETE", VOLUME, _) => "delete",
            ("POST", "/api/v1/persistentvolumes", _) => "make",
            ("PATCH", VOLUME, _) if sent["metadata"]["finalizers"].is_null() => {
                match sent["spec"]["persistentVolumeReclaimPolicy"].as_str() {
                    Some("Retain") => "retain",
                    Some(_) => "restore",
                    None => "release",
                }
            }
            _ => return None,
        })
    });
    each.collect()
}

#[test]
fn a_move_exchanges_the_persistent_volume_and_deletes_the_source_afterwards() {
    let api = prepared(json!({"claim": "data", "to": {"node": "node-b"}, "keepSource": "0s"}));
    let volumes = Volumes::new();
    let cluster = start(&api, &volumes);
    eventually("the PersistentVolume is created again", || {
        let uid = at(&api, VOLUME)["metadata"]["uid"].clone();
        !uid.is_null() && uid != "pv-1"
    });
    let made = at(&api, VOLUME);
    let handle = made["spec"]["csi"]["volumeHandle"].as_str().unwrap();
    assert!(handle.starts_with(&pool(2)), "{handle}");
    let home = &made["spec"]["nodeAffinity"]["required"]["nodeSelectorTerms"][0];
    assert_eq!(
        home["matchExpressions"][0]["values"],
        json!(["home-of-node-b"])
    );
    assert_eq!(made["spec"]["claimRef"]["uid"], "claim-1");
    eventually("it has arrived", || phase(&api) == "Switched");
    assert!(!volumes.ordered().contains(&"delete source".to_string()));
    // What Kubernetes does.
    let bound = json!({"status": {"phase": "Bound"}});
    let mut now = at(&api, VOLUME);
    now["status"] = bound["status"].clone();
    api.put(VOLUME, now);
    eventually("it is done", || phase(&api) == "Done");
    eventually("the object is let go", || {
        at(&api, MOVE)["metadata"]["finalizers"]
            .as_array()
            .is_some_and(Vec::is_empty)
    });
    let expected = [
        "fence",
        "copy",
        "copied",
        "delete snapshot",
        "delete source",
    ];
    assert_eq!(volumes.ordered(), expected);
    let expected = [
        "retain", "note", "delete", "release", "make", "strike", "restore",
    ];
    assert_eq!(exchanged(&api), expected);
    let now = at(&api, VOLUME);
    assert_eq!(now["spec"]["persistentVolumeReclaimPolicy"], "Delete");
    assert!(at(&api, MOVE)["status"]["stillMs"].is_u64());
    eprintln!("{}", at(&api, MOVE)["status"]);
    api.runtime.block_on(cluster.shut_down());
}

#[test]
fn a_move_waits_for_the_end_of_its_pods_and_shows_what_fails() {
    let api = prepared(json!({"claim": "data", "to": {"node": "node-b"}}));
    let pod = json!({"metadata": {"name": "pg-0", "namespace": "shop", "uid": "pod-1"},
        "spec": {"nodeName": "node-a", "containers": [], "volumes": [
            {"name": "v", "persistentVolumeClaim": {"claimName": "data"}}]},
        "status": {"phase": "Running"}});
    list(&api, "/api/v1/namespaces/shop/pods", "Pod", json!([pod]));
    let volumes = Volumes::new();
    let cluster = start(&api, &volumes);
    let message = || at(&api, MOVE)["status"]["message"].to_string();
    eventually("it waits for the pod", || message().contains("pg-0"));
    assert_eq!(phase(&api), "Waiting");
    // It was copied while the pod used it.
    let pre_copied = [
        "snapshot 2",
        "fill 2",
        "snapshot 1 after 2",
        "fill 1",
        "delete snapshot",
    ];
    assert_eq!(volumes.ordered(), pre_copied);
    assert_eq!(at(&api, MOVE)["status"]["preCopy"]["round"], 2);
    let copied = at(&api, MOVE)["status"]["conditions"][1].clone();
    assert_eq!(
        (&copied["type"], &copied["status"]),
        (&json!("CopiedInAdvance"), &json!("True"))
    );
    *volumes.fails.lock().unwrap() = Some("it is down");
    let waits = at(&api, MOVE)["status"]["conditions"][0].clone();
    assert_eq!(
        (&waits["status"], &waits["reason"]),
        (&json!("False"), &json!("InUse"))
    );
    list(&api, "/api/v1/namespaces/shop/pods", "Pod", json!([]));
    eventually("its copy fails", || message().contains("it is down"));
    assert_eq!(phase(&api), "LastCopy");
    // It is deleted, and undone.
    let mut object = at(&api, MOVE);
    object["metadata"]["deletionTimestamp"] = json!("2026-01-02T00:00:00Z");
    api.put(MOVE, object);
    eventually("it is gone", || at(&api, MOVE).is_null());
    let ordered = volumes.ordered().split_off(pre_copied.len());
    // The incomplete copy might still be reading the snapshot.
    let undone = ["fence", "lift", "delete copy", "delete snapshot"];
    assert_eq!(ordered, undone);
    assert_eq!(exchanged(&api), [""; 0]);
    assert_eq!(at(&api, VOLUME), persistent_volume());
    api.runtime.block_on(cluster.shut_down());
}

#[test]
fn a_move_without_a_target_names_the_reason_of_each_node() {
    let api = prepared(json!({"claim": "data", "to": {"nodeSelector": {"disk": "ssd"}}}));
    let volumes = Volumes::new();
    let cluster = start(&api, &volumes);
    let status = || at(&api, MOVE)["status"].clone();
    eventually("there is no target", || {
        status()["conditions"][0]["reason"] == "NoTarget"
    });
    let message = status()["message"].to_string();
    assert!(
        message.contains("node node-b") && message.contains("disk=ssd"),
        "{message}"
    );
    assert!(
        !message.contains("node-a"),
        "the source is no target: {message}"
    );
    assert_eq!(phase(&api), "Pending");
    assert!(
        at(&api, MOVE)["metadata"]["finalizers"].is_null(),
        "nothing has begun"
    );
    api.runtime.block_on(cluster.shut_down());
}

/// The last status of a pool that was written, and its condition Evacuated.
fn evacuation(api: &ApiServer, n: u32) -> (Value, Value) {
    let objects = api.objects.lock().unwrap();
    let path = format!("{POOLS}/{}/status", pool(n));
    let mut its = objects.changes.iter().filter(|(_, at, _)| *at == path);
    let status = its.next_back().map(|(_, _, sent)| sent["status"].clone());
    let status = status.unwrap_or_default();
    let conditions = status["conditions"].as_array().cloned();
    let mut conditions = conditions.unwrap_or_default().into_iter();
    let its = conditions.find(|one| one["type"] == "Evacuated");
    (status, its.unwrap_or_default())
}

/// A cluster whose first pool is to be emptied, without a move.
fn evacuated() -> ApiServer {
    let api = prepared(json!({"claim": "data"}));
    list(&api, MOVES, "VolumeMove", json!([]));
    api.objects.lock().unwrap().at.remove(MOVE);
    let path = format!("{POOLS}/{}", pool(1));
    let mut object = at(&api, &path);
    object["spec"]["evacuate"] = json!(true);
    object["metadata"]["generation"] = json!(2);
    api.put(&path, object.clone());
    list(&api, POOLS, "Pool", json!([object]));
    api
}

#[test]
fn a_pool_that_is_evacuated_gets_moves_and_is_evacuated_once_nothing_is_left() {
    let api = evacuated();
    let agents = Arc::<Agents>::default();
    *agents.0.lock().unwrap() = vec![report("node-a", &[1])];
    let snapshot = format!("{}.cccccccc-2222-4333-8444-555555555555", pool(1));
    let stored = |volumes: Vec<String>, snapshots: Vec<String>| Stored {
        pool: PoolId(pool(1).parse().unwrap()),
        node: "node-a".into(),
        volumes,
        snapshots: snapshots
            .into_iter()
            .map(|id| StoredSnapshot {
                id,
                source: String::new(),
                group: None,
            })
            .collect(),
    };
    *agents.1.lock().unwrap() = vec![stored(vec![source()], vec![snapshot.clone()])];
    let cluster = start_with(&api, &Volumes::new(), &agents);
    let created = "/apis/slackwater.dev/v1alpha1/namespaces/shop/volumemoves";
    let sent = || {
        let objects = api.objects.lock().unwrap();
        let mut all = objects.changes.iter();
        all.find(|(method, path, _)| method == "POST" && path == created)
            .map(|(_, _, sent)| sent.clone())
    };
    eventually("its claim gets a move", || sent().is_some());
    let sent = sent().unwrap();
    assert_eq!(sent["spec"]["claim"], "data");
    assert_eq!(sent["spec"]["keepSource"], "0s");
    assert_eq!(
        sent["metadata"]["labels"]["slackwater.dev/evacuates"],
        pool(1)
    );
    eventually("its status shows what is left", || {
        evacuation(&api, 1).0["evacuation"]["left"] == 2
    });
    let (status, condition) = evacuation(&api, 1);
    assert_eq!(status["evacuation"]["claims"], json!(["shop/data"]));
    assert_eq!(status["evacuation"]["snapshots"], json!([snapshot]));
    assert_eq!(condition["status"], "False");
    api.runtime.block_on(cluster.shut_down());

    // Nothing is left; but an agent that cannot be asked is no proof.
    for (is_there, expected) in [(false, "Unknown"), (true, "Empty")] {
        let api = evacuated();
        list(
            &api,
            "/api/v1/persistentvolumes",
            "PersistentVolume",
            json!([]),
        );
        let all = is_there.then(|| stored(Vec::new(), Vec::new()));
        *agents.1.lock().unwrap() = all.into_iter().collect();
        let cluster = start_with(&api, &Volumes::new(), &agents);
        eventually(expected, || evacuation(&api, 1).1["reason"] == expected);
        let status = if is_there { "True" } else { "False" };
        assert_eq!(evacuation(&api, 1).1["status"], status);
        api.runtime.block_on(cluster.shut_down());
    }
}

#[test]
fn a_fence_without_a_move_is_lifted_unless_a_copy_has_a_name() {
    let copy = {
        let name = slackwater::operation::snapshot_name(UID.parse().unwrap(), None);
        let target = PoolId(pool(2).parse().unwrap());
        VolumeId::of_name(target, slackwater::model::id::NameKind::Volume, &name).to_string()
    };
    for names_copy in [true, false] {
        let api = prepared(json!({"claim": "data"}));
        list(&api, MOVES, "VolumeMove", json!([]));
        let mut volumes = vec![persistent_volume()];
        if names_copy {
            let mut other = persistent_volume();
            other["metadata"]["name"] = json!("other");
            other["spec"]["csi"]["volumeHandle"] = json!(copy);
            volumes.push(other);
        }
        let path = "/api/v1/persistentvolumes";
        list(&api, path, "PersistentVolume", json!(volumes));
        let mut fencing = report("node-a", &[1]);
        let (_, answer) = fencing.seen.as_mut().unwrap();
        Arc::get_mut(answer).unwrap().fences = vec![Fence {
            volume_id: source(),
            move_uid: UID.into(),
        }];
        let agents = Arc::<Agents>::default();
        *agents.0.lock().unwrap() = vec![fencing];
        let volumes = Volumes::new();
        let cluster = start_with(&api, &volumes, &agents);
        if names_copy {
            eventually("it was examined", || api.asked(VOLUME) > 3);
            assert_eq!(volumes.ordered(), [""; 0]);
        } else {
            let is_lifted = || volumes.ordered().last().is_some_and(|last| last == "lift");
            eventually("it is lifted", is_lifted);
            // What fails before the fence is lifted is repeated.
            let [first, second, last] = ["delete snapshot"; 3];
            assert_eq!(volumes.ordered(), [first, second, last, "lift"]);
        }
        api.runtime.block_on(cluster.shut_down());
    }
}
