//! The status page of a router over HTTP, with a small API server.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::jiff::{SignedDuration, Timestamp};
use serde_json::{Value, json};
use slackwater::error::{Error, Result};
use slackwater::model::Alpha;
use slackwater::router::kube::{AgentReports, InCluster};
use slackwater::router::{Agents as RouterAgents, Dial, Router, StatusSource};
use slackwater::telemetry::{Metrics, page};
use tonic::transport::Channel;

use crate::kube::api::{Agents, DRIVER, eventually, options};
use crate::kube::kubelet::ApiServer;

const POOL: &str = "11111111-2222-4333-8444-000000000001";
const GROUPS: &str = "/apis/groupsnapshot.storage.k8s.io/v1beta2";
const OURS: &str = "/apis/slackwater.dev/v1alpha1";

fn put_list(api: &ApiServer, path: &str, kind: &str, items: &[Value]) {
    let list = json!({"kind": format!("{kind}List"), "apiVersion": "v1",
        "metadata": {"resourceVersion": "1"}, "items": items});
    api.put(path, list);
}

fn ago(minutes: i64) -> String {
    let at = Timestamp::now() - SignedDuration::from_mins(minutes);
    Timestamp::from_second(at.as_second()).unwrap().to_string()
}

/// No agent is called.
struct Nowhere;

#[tonic::async_trait]
impl Dial for Nowhere {
    async fn dial(&self, node: &str, _address: &str) -> Result<Channel> {
        Err(Error::unreachable(node, "it is not there"))
    }
}

/// A pool, a claim on it, a schedule with a cut, a cut of another driver, and a move.
fn put_objects(api: &ApiServer) {
    put_list(api, "/api/v1/nodes", "Node", &[]);
    let volume = json!({"apiVersion": "v1", "kind": "PersistentVolume",
        "metadata": {"name": "pv-1", "resourceVersion": "5"},
        "spec": {"csi": {"driver": DRIVER, "volumeHandle": format!("{POOL}.{POOL}")},
            "claimRef": {"namespace": "shop", "name": "data-<b>"}},
        "status": {"phase": "Bound"}});
    let path = "/api/v1/persistentvolumes";
    put_list(api, path, "PersistentVolume", &[volume]);
    let pool = json!({"apiVersion": "slackwater.dev/v1alpha1", "kind": "Pool",
        "metadata": {"name": POOL, "resourceVersion": "7", "generation": 1,
            "labels": {"slackwater.dev/driver": DRIVER}},
        "spec": {"evacuate": true},
        "status": {"node": "node-1", "name": "fast", "health": "Healthy", "lastSeen": ago(0),
            "totalBytes": 100i64 << 30, "availableBytes": 25i64 << 30,
            "promisedBytes": 50i64 << 30, "volumes": 1, "snapshots": 4, "fullAt": "2126-01-02T03:04:05Z",
            "images": {"ownBytes": 20i64 << 30, "sharedBytes": 30i64 << 30, "snapshotBytes": 10i64 << 30,
                "measuredAt": ago(30)},
            "growth": {"measuredAt": ago(30), "volumes": [
                {"id": format!("{POOL}.{POOL}"), "grownBytes": 5i64 << 30, "since": ago(600)}]},
            "frozen": [{"id": format!("{POOL}.{POOL}"), "since": ago(3), "until": ago(2)}]}});
    put_list(api, &format!("{OURS}/pools"), "Pool", &[pool]);
    let schedule = json!({"apiVersion": "slackwater.dev/v1alpha1", "kind": "SnapshotSchedule",
        "metadata": {"name": "pg", "namespace": "shop", "uid": "uid-of-pg", "resourceVersion": "8"},
        "spec": {"selector": {"matchLabels": {"app": "pg"}}, "class": "c", "every": "1h"},
        "status": {"lastCutSlot": ago(200), "level": "application", "overdueSince": ago(140),
            "missed": 2}});
    let single = json!({"apiVersion": "slackwater.dev/v1alpha1", "kind": "SnapshotSchedule",
        "metadata": {"name": "single", "namespace": "shop", "uid": "uid-of-single", "resourceVersion": "8"},
        "spec": {"claims": ["data"], "class": "c", "every": "1h"},
        "status": {"lastCutSlot": ago(20), "skippedSlots": [ago(80)]}});
    let path = format!("{OURS}/snapshotschedules");
    put_list(api, &path, "SnapshotSchedule", &[schedule, single]);
    put_singles(api);
    let moved = json!({"apiVersion": "slackwater.dev/v1alpha1", "kind": "VolumeMove",
        "metadata": {"name": "away", "namespace": "shop", "resourceVersion": "9"},
        "spec": {"claim": "data"},
        "status": {"phase": "Copying", "bytesDone": 1 << 20, "bytesTotal": 3 << 20,
            "preCopy": {"round": 1, "begunAt": ago(10)}}});
    put_list(api, &format!("{OURS}/volumemoves"), "VolumeMove", &[moved]);
    let revert = json!({"apiVersion": "slackwater.dev/v1alpha1", "kind": "VolumeRevert",
        "metadata": {"name": "back", "namespace": "shop", "resourceVersion": "9",
            "creationTimestamp": "2026-01-02T03:04:05Z"},
        "spec": {"claim": "data", "snapshot": "s", "deadline": "1h"},
        "status": {"phase": "Waiting", "message": "pods use it"}});
    put_list(
        api,
        &format!("{OURS}/volumereverts"),
        "VolumeRevert",
        &[revert],
    );
    let source = json!({"apiVersion": "slackwater.dev/v1alpha1", "kind": "HttpSource",
        "metadata": {"name": "base", "namespace": "shop", "resourceVersion": "9"}, "spec": {},
        "status": {"claims": [{"namespace": "shop", "name": "vm", "uid": "u", "phase": "Populating",
            "receivedBytes": 5 << 20, "totalBytes": 9 << 20, "since": ago(20), "progressAt": ago(1),
            "progressSince": ago(11), "progressSinceBytes": 1 << 20}]}});
    put_list(api, &format!("{OURS}/httpsources"), "HttpSource", &[source]);
    let group = |name: &str, content: &str, labels: Value| {
        json!({"apiVersion": "groupsnapshot.storage.k8s.io/v1beta2", "kind": "VolumeGroupSnapshot",
            "metadata": {"name": name, "namespace": "shop", "labels": labels,
                "creationTimestamp": ago(199)},
            "spec": {}, "status": {"readyToUse": true,
                "boundVolumeGroupSnapshotContentName": content}})
    };
    let label = json!({"slackwater.dev/schedule-uid": "uid-of-pg"});
    let groups = [
        group("pg-first", "content-1", label),
        group("of-another-driver", "content-2", Value::Null),
    ];
    let path = format!("{GROUPS}/volumegroupsnapshots");
    put_list(api, &path, "VolumeGroupSnapshot", &groups);
    let content = |name: &str, annotations: Value| {
        json!({"apiVersion": "meta.k8s.io/v1", "kind": "PartialObjectMetadata",
            "metadata": {"name": name, "annotations": annotations}})
    };
    let level = json!({"slackwater.dev/level": "filesystem", "slackwater.dev/cut-at": ago(198)});
    let contents = [
        content("content-1", level),
        content("content-2", Value::Null),
    ];
    let path = format!("{GROUPS}/volumegroupsnapshotcontents");
    put_list(api, &path, "PartialObjectMetadata", &contents);
}

/// A snapshot of a single claim that a schedule has made, and a member of a group.
fn put_singles(api: &ApiServer) {
    let snapshot = |name: &str, source: Value| {
        json!({"apiVersion": "snapshot.storage.k8s.io/v1", "kind": "VolumeSnapshot",
            "metadata": {"name": name, "namespace": "shop", "creationTimestamp": ago(20),
                "labels": {"slackwater.dev/schedule-uid": "uid-of-single"}},
            "spec": {"source": source}, "status": {"readyToUse": true,
                "boundVolumeSnapshotContentName": format!("content-of-{name}")}})
    };
    let claim = json!({"persistentVolumeClaimName": "data"});
    let content = json!({"volumeSnapshotContentName": "content"});
    let all = [snapshot("one", claim), snapshot("member", content)];
    let path = "/apis/snapshot.storage.k8s.io/v1";
    put_list(
        api,
        &format!("{path}/volumesnapshots"),
        "VolumeSnapshot",
        &all,
    );
    let content = json!({"apiVersion": "meta.k8s.io/v1", "kind": "PartialObjectMetadata",
        "metadata": {"name": "content-of-one", "annotations": {
            "slackwater.dev/level": "application", "slackwater.dev/frozen-ms": "9"}}});
    let path = format!("{path}/volumesnapshotcontents");
    put_list(api, &path, "PartialObjectMetadata", &[content]);
}

fn get(address: SocketAddr, path: &str) -> (u16, String) {
    let mut stream = TcpStream::connect(address).unwrap();
    let head = format!("GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n");
    stream.write_all(head.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let status = answer.split(' ').nth(1).unwrap().parse().unwrap();
    (status, answer.split_once("\r\n\r\n").unwrap().1.to_string())
}

/// The page of a router, each time as if it was the first one.
fn serve(api: &ApiServer, cluster: &Arc<InCluster>) -> SocketAddr {
    let listener = api.runtime.block_on(page::listen(0)).unwrap();
    let address = listener.local_addr().unwrap();
    let source = Arc::new(StatusSource(Arc::clone(cluster)));
    let served = page::serve(listener, source, std::future::pending());
    api.runtime.spawn(served);
    address
}

#[test]
fn a_router_shows_its_objects_on_a_page_and_as_json() {
    let api = ApiServer::new();
    put_objects(&api);
    let agents = Arc::<Agents>::default();
    agents.say("node-1", "home-1", &[POOL]);
    // Another one leads, and this one writes nothing: each replica has the page.
    let lease = json!({"apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
        "metadata": {"name": "slackwater-router", "namespace": "slackwater", "resourceVersion": "3"},
        "spec": {"holderIdentity": "router-b", "leaseDurationSeconds": 3600,
            "renewTime": ago(0).replace('Z', ".000000Z")}});
    let path = "/apis/coordination.k8s.io/v1/namespaces/slackwater/leases/slackwater-router";
    api.put(path, lease);
    let mut options = options("router-a");
    options.agent_service = None;
    options.pace.duration = Duration::from_secs(3600);
    let cluster = {
        let client = api.client();
        let _inside = api.runtime.enter();
        let cluster = InCluster::start(client, options, agents.clone() as Arc<dyn AgentReports>);
        let of_router = slackwater::router::Options {
            driver_name: DRIVER.into(),
            alpha: Alpha::default(),
            metrics: Arc::new(Metrics::new()),
        };
        let none = RouterAgents::new(Arc::new(Nowhere), DRIVER);
        let router = Router::new(Arc::new(none), cluster.clone(), of_router);
        cluster.move_volumes(Arc::new(router.clone()));
        cluster.revert_volumes(Arc::new(router));
        cluster.schedule_snapshots();
        cluster
    };
    let json = || {
        let (status, text) = get(serve(&api, &cluster), "/status.json?q=");
        assert_eq!(status, 200, "{text}");
        serde_json::from_str::<Value>(&text).unwrap()
    };
    eventually("all objects are shown", || {
        let view = json();
        view["groups"]["count"] == 2 && view["work"]["count"] == 4 && view["is_outdated"] == false
    });
    let view = json();
    let pool = &view["pools"]["first"][0];
    assert_eq!(pool["used_bytes"], 75i64 << 30, "{pool}");
    assert_eq!(
        (&pool["health"], &pool["is_stale"]),
        (&json!("Healthy"), &json!(false))
    );
    assert_eq!(pool["full"]["at"], "2126-01-02T03:04:05Z");
    let images = &pool["images"];
    assert_eq!(
        (
            &images["shared_bytes"],
            &images["other_bytes"],
            &images["is_stale"]
        ),
        (&json!(30i64 << 30), &json!(15i64 << 30), &json!(false))
    );
    let growing = &view["growing"]["first"][0];
    assert_eq!(
        (&growing["claim"], &growing["grown_bytes"]),
        (&json!("shop/data-<b>"), &json!(5i64 << 30))
    );
    assert_eq!(view["pools_without_growth"], 0);
    let frozen = &view["frozen"]["first"][0];
    assert_eq!(
        (&frozen["claim"], &frozen["state"]),
        (&json!("shop/data-<b>"), &json!("orphaned"))
    );
    let group = &view["groups"]["first"][0];
    assert_eq!(group["name"], "shop/pg");
    assert_eq!(
        group["lanes"]["first"][0]["cuts"]["count"], 1,
        "not that of another driver: {group}"
    );
    assert_eq!(
        group["lanes"]["first"][0]["cuts"]["first"][0]["level"], "filesystem",
        "of the content"
    );
    assert_eq!(group["missed"], 2);
    let lanes = &view["groups"]["first"][1]["lanes"];
    assert_eq!(lanes["count"], 1, "not that of the member: {lanes}");
    let rows = &lanes["first"][0]["cuts"]["first"];
    assert_eq!(
        (&lanes["first"][0]["claim"], &rows[0]["name"]),
        (&json!("data"), &json!("one"))
    );
    assert_eq!(
        (&rows[0]["level"], &rows[0]["frozen_ms"]),
        (&json!("application"), &json!(9))
    );
    assert_eq!(rows[1]["state"], "skipped");
    let work = &view["work"]["first"];
    let evacuation = &work[0];
    assert_eq!(evacuation["what"], "evacuation of pool fast of node node-1");
    assert_eq!(evacuation["volumes"], 1, "{evacuation}");
    let fill = &work[1];
    assert_eq!(fill["what"], "claim shop/vm is filled from HttpSource");
    assert_eq!(
        fill["left_seconds"], 600,
        "as long as in the last ten minutes"
    );
    let revert = &work[3]["deadline"]["at"];
    assert_eq!(
        revert, "2026-01-02T04:04:05Z",
        "an hour after its creation: {view}"
    );
    let node = &view["nodes"]["first"][0];
    assert_eq!(
        (&node["claims"], &node["snapshots"]),
        (&json!(1), &json!(4))
    );
    let work = &view["work"]["first"][2];
    let left = work["left_seconds"].as_i64().unwrap();
    assert!(left >= 1200, "two thirds are left after 10 minutes: {left}");
    let problem = &view["problems"]["first"][0];
    let command = "kubectl --namespace shop describe snapshotschedules.slackwater.dev/pg";
    assert_eq!(problem["command"], command, "{view}");

    let address = serve(&api, &cluster);
    let (status, page) = get(address, "/?q=DATA");
    assert_eq!(status, 200);
    assert!(
        page.contains("shop/data-&#60;b&#62;") && !page.contains("data-<b>"),
        "{page}"
    );
    assert!(page.contains(command), "problems are not searched: {page}");
    let (_, page) = get(address, "/");
    assert!(page.contains("Overdue since"), "{page}");

    // What the API server refuses is missing, and the page says so.
    api.forbid(&format!("{GROUPS}/volumegroupsnapshots"));
    let view = json();
    let problem = view["groups_problem"].as_str().unwrap_or_default();
    assert!(problem.contains("VolumeGroupSnapshots"), "{view}");
    assert_eq!(view["groups"]["first"][0]["lanes"]["count"], 0);
    assert_eq!(view["work_problem"], Value::Null);
    api.forbid(&format!("{OURS}/httpsources"));
    let view = json();
    let problem = view["work_problem"].as_str().unwrap_or_default();
    assert!(problem.contains("HttpSources"), "{view}");
    assert_eq!(view["work"]["count"], 3, "{view}");
    agents.silence("node-1");
    let view = json();
    assert_eq!(view["nodes"]["first"][0]["is_up"], false, "{view}");
    api.runtime.block_on(cluster.shut_down());
}
