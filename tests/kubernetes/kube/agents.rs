//! The objects that the leading router writes, on a small API server: with lying agents, with pools
//! that are handed over, and of snapshots; and a node that requests its certificate.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use k8s_openapi::jiff::Timestamp;
use serde_json::{Map, Value, json};
use slackwater::agent::describe_response::LongFreeze;
use slackwater::agent::{DescribeResponse, NotGrown, Pool as Shown};
use slackwater::error::{Error, Result};
use slackwater::model::{Level, PoolId};
use slackwater::router::cluster::{Cluster, Content, Note, Reached};
use slackwater::router::kube::orphans::{DescribedVolume, Orphan, Stored};
use slackwater::router::kube::pools::requests::progress::PoolRequest;
use slackwater::router::kube::pools::status::Report;
use slackwater::router::kube::reconcile::lease::Pace;
use slackwater::router::kube::{AgentReports, InCluster, Options};
use slackwater::router::{Enrolment, hand_over};
use slackwater_testkit::eventually;

use crate::kube::kubelet::ApiServer;

const DRIVER: &str = "csi.slackwater.dev";
const POOLS: &str = "/apis/slackwater.dev/v1alpha1/pools";
const VOLUMES: &str = "/api/v1/persistentvolumes";
const REQUESTS: &str = "/apis/certificates.k8s.io/v1/certificatesigningrequests";

/// Agents that give any answer that a test needs.
#[derive(Default)]
pub struct Agents(pub Mutex<Vec<Report>>, pub Mutex<Vec<Stored>>);

#[tonic::async_trait]
impl AgentReports for Agents {
    fn place(&self, _agents: BTreeMap<String, SocketAddr>) {}

    fn reports(&self) -> Vec<Report> {
        self.0.lock().unwrap().clone()
    }

    async fn stored(&self) -> Vec<Stored> {
        self.1.lock().unwrap().clone()
    }

    async fn describe(&self, _node: &str, _ids: Vec<String>) -> Result<Vec<DescribedVolume>> {
        Ok(Vec::new())
    }

    async fn delete(&self, orphan: &Orphan) -> Result<()> {
        Err(Error::refused(
            &orphan.id,
            "no test deletes orphans of these agents",
        ))
    }

    async fn change_pool(&self, node: &str, _pool: PoolId, _request: PoolRequest) -> Result<()> {
        Err(Error::refused(
            node,
            "no test changes pools of these agents",
        ))
    }
}

fn id(n: u32) -> String {
    format!("11111111-2222-4333-8444-{n:012}")
}

pub fn report(node: &str, pools: &[u32]) -> Report {
    let shown = pools.iter().map(|n| Shown {
        name: "default".into(),
        place: "file:/pool".into(),
        id: id(*n),
        ..Shown::default()
    });
    let answer = DescribeResponse {
        node_name: node.into(),
        driver_name: DRIVER.into(),
        home: format!("home-of-{node}"),
        guard_alive: true,
        pools: shown.collect(),
        ..DescribeResponse::default()
    };
    Report {
        node: node.into(),
        seen: Some((Timestamp::now(), Arc::new(answer))),
        problem: None,
        is_refused: false,
    }
}

pub fn list(api: &ApiServer, path: &str, kind: &str, items: Value) {
    let list = json!({"kind": format!("{kind}List"), "apiVersion": "v1",
        "metadata": {"resourceVersion": "1"}, "items": items});
    api.put(path, list);
}

pub fn cluster(
    api: &ApiServer,
    agents: &Arc<Agents>,
    change: impl FnOnce(&mut Options),
) -> Arc<InCluster> {
    let nodes = ["node-a", "node-b"].map(|name| json!({"metadata": {"name": name, "uid": name}}));
    list(api, "/api/v1/nodes", "Node", json!(nodes));
    for (path, kind) in [(VOLUMES, "PersistentVolume"), (POOLS, "Pool")] {
        if !api.objects.lock().unwrap().at.contains_key(path) {
            list(api, path, kind, json!([]));
        }
    }
    for node in ["node-a", "node-b"] {
        let object =
            json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": node, "uid": node}});
        api.put(&format!("/api/v1/nodes/{node}"), object);
    }
    let mut options = Options {
        poll_interval: Duration::from_millis(100),
        pace: Pace {
            duration: Duration::from_secs(6),
            belief: Duration::from_secs(4),
            every: Duration::from_millis(200),
        },
        ..Options::new(DRIVER, "slackwater", "router-a")
    };
    change(&mut options);
    let client = api.client();
    let _inside = api.runtime.enter();
    InCluster::start(client, options, Arc::clone(agents) as Arc<dyn AgentReports>)
}

fn changed(api: &ApiServer, path: &str) -> Vec<Value> {
    let objects = api.objects.lock().unwrap();
    let of = objects.changes.iter().filter(|(_, at, _)| at == path);
    of.map(|(_, _, sent)| sent.clone()).collect()
}

/// Events with a reason, by the names of their objects.
fn events(api: &ApiServer, reason: &str) -> Vec<String> {
    let objects = api.objects.lock().unwrap();
    let all = objects.changes.iter().map(|(_, _, sent)| sent);
    let its = all.filter(|sent| sent["reason"] == reason);
    its.map(|sent| sent["regarding"]["name"].as_str().unwrap().to_string())
        .collect()
}

#[test]
fn an_invalid_report_of_one_agent_does_not_block_the_reports_of_others() {
    let api = ApiServer::new();
    let agents = Arc::<Agents>::default();
    // The API server accepts no change of the first object: it is too long, an invalid label, or
    // forbidden.
    api.forbid(&format!("{POOLS}/{}/status", id(1)));
    let node =
        json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "node-c", "uid": "c"}});
    api.put("/api/v1/nodes/node-c", node);
    let mut lying = report("node-c", &[]);
    lying.problem = Some("its description was rejected: it reports 200000 pools".into());
    lying.is_refused = true;
    *agents.0.lock().unwrap() = vec![report("node-a", &[1]), report("node-b", &[2]), lying];
    let cluster = cluster(&api, &agents, |_| {});
    let status = format!("{POOLS}/{}/status", id(2));
    eventually("the other one is written", || {
        changed(&api, &status)
            .iter()
            .any(|sent| sent["status"]["node"] == "node-b")
    });
    eventually("the refusal is reported", || {
        events(&api, "AnswerRefused").contains(&"node-c".to_string())
    });
    api.runtime.block_on(cluster.shut_down());
}

/// Creates a volume of a pool, with its PersistentVolume and its claim, which has the volume's
/// name.
fn claimed(api: &ApiServer, pool: u32, name: &str) -> (String, Value) {
    let handle = format!("{}.{}", id(pool), id(100 + pool));
    let claim = json!({"apiVersion": "v1", "kind": "PersistentVolumeClaim",
        "metadata": {"name": name, "namespace": "shop", "uid": name}});
    let path = format!("/api/v1/namespaces/shop/persistentvolumeclaims/{name}");
    api.put(&path, claim);
    let volume = json!({"metadata": {"name": name, "uid": name}, "spec": {
        "csi": {"driver": DRIVER, "volumeHandle": handle},
        "claimRef": {"namespace": "shop", "name": name}}});
    (handle, volume)
}

/// Only for volumes on pools of the node: an agent cannot report anything at another node's claim.
#[test]
fn a_volume_that_could_not_be_grown_is_reported_at_its_claim() {
    let api = ApiServer::new();
    let (own, own_volume) = claimed(&api, 1, "db");
    let (others, others_volume) = claimed(&api, 2, "other");
    list(
        &api,
        VOLUMES,
        "PersistentVolume",
        json!([own_volume, others_volume]),
    );
    let pool = |n: u32, node: &str| {
        json!({"apiVersion": "slackwater.dev/v1alpha1", "kind": "Pool",
            "metadata": {"name": id(n), "uid": id(n), "resourceVersion": "1",
                "labels": {"slackwater.dev/driver": DRIVER}},
            "spec": {},
            "status": {"node": node, "home": format!("home-of-{node}"), "name": "default",
                "health": "Healthy"}})
    };
    let pools = [pool(1, "node-a"), pool(2, "node-b")];
    for (n, pool) in (1..).zip(&pools) {
        api.put(&format!("{POOLS}/{}", id(n)), pool.clone());
    }
    list(&api, POOLS, "Pool", json!(pools));
    let say = |reason: &str| {
        let mut report = report("node-a", &[1]);
        let (at, answer) = report.seen.take().unwrap();
        let mut answer = Arc::unwrap_or_clone(answer);
        // The report that it must not make comes first, and would have been written by then.
        answer.not_grown = [&others, &own]
            .map(|handle| NotGrown {
                volume_id: handle.clone(),
                reason: reason.into(),
            })
            .into();
        report.seen = Some((at, Arc::new(answer)));
        report
    };
    let agents = Arc::<Agents>::default();
    *agents.0.lock().unwrap() = vec![say("resize2fs failed"), report("node-b", &[2])];
    let cluster = cluster(&api, &agents, |_| {});
    let reported = || events(&api, "FileSystemNotGrown");
    eventually("its claim has the event", || reported() == ["db"]);
    let sent = changed(&api, "/apis/events.k8s.io/v1/namespaces/shop/events");
    let note = sent.last().unwrap()["note"].as_str().unwrap();
    assert!(note.contains("resize2fs failed"), "{note}");
    assert_eq!(sent.last().unwrap()["type"], "Warning");
    *agents.0.lock().unwrap() = vec![say("no room"), report("node-b", &[2])];
    eventually("the other reason is reported", || reported().len() > 1);
    assert_eq!(reported(), ["db", "db"]);
    api.runtime.block_on(cluster.shut_down());
}

#[test]
fn a_pool_is_handed_over_by_one_command_and_the_mark_is_removed() {
    let api = ApiServer::new();
    let pool = json!({
        "apiVersion": "slackwater.dev/v1alpha1", "kind": "Pool",
        "metadata": {"name": id(1), "uid": "1", "resourceVersion": "1",
            "labels": {"slackwater.dev/driver": DRIVER}},
        "spec": {},
        "status": {"node": "node-a", "home": "home-of-node-a", "name": "default", "health": "Unreachable"},
    });
    let path = format!("{POOLS}/{}", id(1));
    api.put(&path, pool.clone());
    list(&api, POOLS, "Pool", json!([pool]));
    for node in ["node-a", "node-b"] {
        let object =
            json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": node, "uid": node}});
        api.put(&format!("/api/v1/nodes/{node}"), object);
    }
    let client = api.client();
    let over = |to: &str| {
        let done = hand_over::hand_over(&client, None, "node-a/default", to);
        api.runtime.block_on(done)
    };
    let reported = over("node-x").unwrap_err().to_string();
    assert!(reported.contains("node-x"), "{reported}");
    assert!(over("node-a").unwrap().unchanged);
    let done = over("node-b").unwrap();
    assert_eq!((done.from.as_str(), done.to.as_str()), ("node-a", "node-b"));
    assert_eq!(changed(&api, &path), [json!({"spec": {"node": "node-b"}})]);
    // The router sees the mark, and that node-b reports the pool.
    let marked = api.objects.lock().unwrap().at[&path].clone();
    list(&api, POOLS, "Pool", json!([marked]));
    let agents = Arc::<Agents>::default();
    *agents.0.lock().unwrap() = vec![report("node-b", &[1])];
    let cluster = cluster(&api, &agents, |_| {});
    eventually("the pool belongs to node-b", || {
        let status = format!("{path}/status");
        changed(&api, &status)
            .iter()
            .any(|sent| sent["status"]["node"] == "node-b")
    });
    eventually("the mark is away", || {
        let removed = json!({"metadata": {"resourceVersion": "1"}, "spec": {"node": null}});
        changed(&api, &path).contains(&removed)
    });
    assert_eq!(cluster.known_pools()[0].node, "node-b");
    api.runtime.block_on(cluster.shut_down());
}

#[test]
fn the_level_of_a_snapshot_is_written_at_its_object() {
    let api = ApiServer::new();
    let agents = Arc::<Agents>::default();
    let cluster = cluster(&api, &agents, |_| {});
    let contents = "/apis/snapshot.storage.k8s.io/v1/volumesnapshotcontents";
    let groups = "/apis/groupsnapshot.storage.k8s.io/v1beta1/volumegroupsnapshotcontents";
    for (path, kind) in [
        (contents, "VolumeSnapshotContent"),
        (groups, "VolumeGroupSnapshotContent"),
    ] {
        let object = json!({"apiVersion": "x/v1", "kind": kind, "metadata": {"name": "c"}});
        api.put(&format!("{path}/c"), object);
    }
    let cut = |frozen, reason: &str| {
        Note::Reached(Reached {
            level: Level::Filesystem,
            reason: reason.into(),
            cut_at: 1_700_000_000_000_000_000,
            frozen,
        })
    };
    let reached = |reason: &str| cut(None, reason);
    // An object that cannot be written does not delay the others.
    api.forbid(&format!("{contents}/forbidden"));
    cluster.note(Content::Snapshot("forbidden".into()), reached(""));
    cluster.note(Content::Snapshot("gone".into()), reached(""));
    cluster.note(Content::Snapshot("c".into()), reached("no hook"));
    cluster.note(Content::Group("c".into()), reached(""));
    let durations = |frozen, held| Note::Durations { frozen, held };
    let frozen = Duration::from_micros(1200);
    cluster.note(Content::Snapshot("c".into()), durations(Some(frozen), None));
    let held = Some(Duration::from_millis(60));
    cluster.note(Content::Group("c".into()), durations(Some(frozen), held));
    cluster.note(Content::Snapshot("c".into()), cut(Some(frozen), "no pod"));
    let expected = |reason: &str| {
        json!({"metadata": {"annotations": {
            "slackwater.dev/level": "filesystem",
            "slackwater.dev/cut-at": "2023-11-14T22:13:20Z",
            "slackwater.dev/reason": reason,
        }}})
    };
    let lasted = |times: Value| {
        let times = times.as_object().unwrap().iter();
        let times = times.map(|(name, time)| (format!("slackwater.dev/{name}"), time.clone()));
        json!({"metadata": {"annotations": times.collect::<Map<_, _>>()}})
    };
    let mut without_hooks = expected("no pod");
    without_hooks["metadata"]["annotations"]["slackwater.dev/frozen-ms"] = "2".into();
    eventually("the snapshot's", || {
        changed(&api, &format!("{contents}/c"))
            == [
                expected("no hook"),
                lasted(json!({"frozen-ms": "2"})),
                without_hooks.clone(),
            ]
    });
    eventually("the group's", || {
        changed(&api, &format!("{groups}/c"))
            == [
                expected(""),
                lasted(json!({"frozen-ms": "2", "held-ms": "60"})),
            ]
    });
    api.runtime.block_on(cluster.shut_down());
}

#[test]
fn an_installation_without_a_snapshotter_reports_it_if_there_are_snapshots() {
    let api = ApiServer::new();
    let resources = json!({"kind": "APIResourceList", "apiVersion": "v1",
        "groupVersion": "snapshot.storage.k8s.io/v1", "resources": [
            {"name": "volumesnapshots", "singularName": "volumesnapshot", "namespaced": true,
             "kind": "VolumeSnapshot", "verbs": ["get"]}]});
    api.put("/apis/snapshot.storage.k8s.io/v1", resources);
    let agents = Arc::<Agents>::default();
    for (has_snapshotter, missing) in [(true, false), (false, true)] {
        let cluster = cluster(&api, &agents, |options| {
            options.has_snapshotter = has_snapshotter;
        });
        eventually("the router leads", || cluster.is_leader());
        if missing {
            eventually("the pool is counted", || {
                cluster.status().unwrap().snapshotter_missing
            });
            eventually("the conflict is reported", || {
                events(&api, "NoSnapshotter").contains(&"slackwater-router".to_string())
            });
        } else {
            std::thread::sleep(Duration::from_millis(500));
            assert!(!cluster.status().unwrap().snapshotter_missing);
            assert!(events(&api, "NoSnapshotter").is_empty());
        }
        api.runtime.block_on(cluster.shut_down());
        api.objects
            .lock()
            .unwrap()
            .at
            .retain(|path, _| !path.contains("/leases/"));
    }
}

/// A request that is not answered is read again, and no other one is created. Once it is answered,
/// only its own key counts.
#[test]
fn a_node_waits_for_its_own_request() {
    let api = ApiServer::new();
    let map = json!({"apiVersion": "v1", "kind": "ConfigMap",
        "metadata": {"name": "slackwater-authority", "namespace": "slackwater"},
        "data": {"ca.crt": "an authority"}});
    api.put(
        "/api/v1/namespaces/slackwater/configmaps/slackwater-authority",
        map,
    );
    let folder = tempfile::Builder::new()
        .prefix("slackwater-enrol-")
        .tempdir()
        .unwrap();
    let enrolment = Enrolment {
        node: "node-a".into(),
        namespace: "slackwater".into(),
        folder: folder.path().into(),
    };
    let client = api.client();
    let created = || changed(&api, REQUESTS).len();
    let stopped_while_it_waits = || {
        let asked = api.asked(REQUESTS);
        let waits = async {
            tokio::select! {
                done = enrolment.refresh(&client) => panic!("no reply was sent: {done:?}"),
                () = async {
                    while api.asked(REQUESTS) < asked + 2 {
                        tokio::time::sleep(Duration::from_millis(50)).await;
                    }
                } => {}
            }
        };
        api.runtime.block_on(waits);
    };
    // The pod ends three times while it waits.
    for _ in 0..3 {
        stopped_while_it_waits();
        assert_eq!(created(), 1, "its own request is read again");
    }
    let name = {
        let objects = api.objects.lock().unwrap();
        let created = objects.at.keys().find(|path| path.starts_with(REQUESTS));
        created.unwrap().clone()
    };
    // Denied: the next request is a new one.
    let deny = json!({"conditions": [{"type": "Denied", "status": "True", "message": "no"}]});
    api.objects.lock().unwrap().at.get_mut(&name).unwrap()["status"] = deny;
    let reported = api
        .runtime
        .block_on(enrolment.refresh(&client))
        .unwrap_err();
    assert!(
        slackwater::error::chain(&reported).contains("denied"),
        "{reported:?}"
    );
    assert_eq!(created(), 1);
    stopped_while_it_waits();
    assert_eq!(created(), 2);
}

#[test]
fn pods_that_use_the_disk_of_a_lost_pool_are_named_at_its_object() {
    let api = ApiServer::new();
    let [known, gone] = [id(7), id(8)];
    let meta = json!({"name": "db-0", "namespace": "shop", "uid": known});
    let pods = json!({"kind": "PartialObjectMetadataList", "apiVersion": "meta.k8s.io/v1",
        "metadata": {"resourceVersion": "1"},
        "items": [{"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": meta}]});
    api.put("/api/v1/pods", pods);
    let agents = Arc::<Agents>::default();
    let mut dead = report("node-a", &[1]);
    let (_, answer) = dead.seen.as_mut().unwrap();
    let pool = &mut Arc::get_mut(answer).unwrap().pools[0];
    pool.refusal = "its disk is dead".into();
    pool.pods = vec![known, gone.clone()];
    *agents.0.lock().unwrap() = vec![dead];
    let cluster = cluster(&api, &agents, |_| {});
    let reported = format!("its disk is dead; in use by pods shop/db-0, {gone}");
    eventually("its object names them", || {
        changed(&api, &format!("{POOLS}/{}/status", id(1)))
            .iter()
            .any(|sent| sent["status"]["message"] == reported)
    });
    eventually("an event at its object reports it", || {
        events(&api, "PoolNotServed") == [id(1)]
    });
    let asked = || {
        let objects = api.objects.lock().unwrap();
        let all = objects.asked.iter();
        let pods: Vec<_> = all
            .filter(|asked| asked.starts_with("/api/v1/pods?"))
            .cloned()
            .collect();
        pods
    };
    let before = asked();
    assert!(before[0].contains("spec.nodeName%3Dnode-a"), "{before:?}");
    // Later polls know it, including pods that no object names.
    std::thread::sleep(Duration::from_millis(500));
    assert_eq!(asked(), before);
    api.runtime.block_on(cluster.shut_down());
}

#[test]
fn what_stays_frozen_is_written_to_its_pool_and_removed_when_it_is_thawed() {
    let api = ApiServer::new();
    let agents = Arc::<Agents>::default();
    let volume = format!("{}.{}", id(1), id(9));
    let mut frozen = report("node-a", &[1, 2]);
    let (_, answer) = frozen.seen.as_mut().unwrap();
    Arc::get_mut(answer).unwrap().long_freezes = vec![LongFreeze {
        volume_id: volume.clone(),
        since: 1_700_000_000,
        until: 1_700_000_010,
        held: true,
    }];
    *agents.0.lock().unwrap() = vec![frozen];
    let cluster = cluster(&api, &agents, |_| {});
    let written = |pool: u32| {
        let sent = changed(&api, &format!("{POOLS}/{}/status", id(pool)));
        sent.last().map(|sent| sent["status"]["frozen"].clone())
    };
    let expected = json!([{"id": volume, "since": "2023-11-14T22:13:20Z",
        "until": "2023-11-14T22:13:30Z", "held": true}]);
    eventually("its object names it", || {
        written(1) == Some(expected.clone())
    });
    eventually("the other has none", || written(2) == Some(Value::Null));
    *agents.0.lock().unwrap() = vec![report("node-a", &[1, 2])];
    // Null removes it from the object.
    eventually("it is removed", || written(1) == Some(Value::Null));
    let sent = changed(&api, &format!("{POOLS}/{}/status", id(1)));
    let status = sent.last().unwrap()["status"].as_object().unwrap();
    assert!(status.contains_key("frozen"), "{status:?}");
    api.runtime.block_on(cluster.shut_down());
}
