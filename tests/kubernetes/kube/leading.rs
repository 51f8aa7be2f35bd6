//! What the leading router writes, with a small API server whose watches report no changes.

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::jiff::SignedDuration;
use serde_json::{Value, json};
use slackwater::router::Cluster;
use slackwater::router::kube::reconcile::lease::Pace;
use slackwater::router::kube::{AgentReports, InCluster, Options};
use slackwater::telemetry::volumes::VolumeClaim;

use crate::kube::api::{Agents, DRIVER, eventually};
use crate::kube::kubelet::ApiServer;

const POOLS: &str = "/apis/slackwater.dev/v1alpha1/pools";
const REJECTED: &str = "11111111-2222-4333-8444-000000000001";
const GOOD: &str = "11111111-2222-4333-8444-000000000002";

fn put_list(api: &ApiServer, path: &str, kind: &str, items: &[Value]) {
    let list = json!({"kind": format!("{kind}List"), "apiVersion": "v1",
        "metadata": {"resourceVersion": "1"}, "items": items});
    api.put(path, list);
}

/// A PersistentVolume of a driver, with the claim that it names.
fn volume(name: &str, driver: &str, phase: &str) -> Value {
    json!({"apiVersion": "v1", "kind": "PersistentVolume",
        "metadata": {"name": name, "resourceVersion": "5"},
        "spec": {"csi": {"driver": driver, "volumeHandle": format!("pool.{name}")},
            "claimRef": {"namespace": "shop", "name": format!("data-{name}")}},
        "status": {"phase": phase}})
}

#[test]
fn only_the_leader_reports_claims_and_only_where_it_should() {
    let api = ApiServer::new();
    let volumes = [
        volume("a", DRIVER, "Bound"),
        volume("b", DRIVER, "Released"),
        volume("c", "csi.example.org", "Bound"),
    ];
    put_list(&api, "/api/v1/nodes", "Node", &[]);
    put_list(
        &api,
        "/api/v1/persistentvolumes",
        "PersistentVolume",
        &volumes,
    );
    put_list(&api, POOLS, "Pool", &[]);
    let start = |metrics_per_volume| {
        let options = Options {
            metrics_per_volume,
            ..options(None)
        };
        lead_by(&api, Arc::default(), options)
    };
    let cluster = start(true);
    eventually("its claims", || cluster.volume_claims().is_some());
    let claim = VolumeClaim {
        volume: "pool.a".into(),
        namespace: "shop".into(),
        claim: "data-a".into(),
    };
    assert_eq!(cluster.volume_claims(), Some(vec![claim]));
    api.runtime.block_on(cluster.shut_down());
    assert_eq!(cluster.volume_claims(), None, "it does not lead any more");

    let without = start(false);
    eventually("another one leads", || {
        without.is_leader() && without.is_complete()
    });
    assert_eq!(without.volume_claims(), None);
    api.runtime.block_on(without.shut_down());
}

fn lead(api: &ApiServer, agents: Arc<Agents>) -> Arc<InCluster> {
    lead_with(api, agents, None)
}

fn lead_with(api: &ApiServer, agents: Arc<Agents>, lost_after: Option<Duration>) -> Arc<InCluster> {
    lead_by(api, agents, options(lost_after))
}

fn options(lost_after: Option<Duration>) -> Options {
    Options {
        lost_after,
        // Nothing here waits for an agent that is restarted.
        unreachable_after: SignedDuration::from_secs(1),
        poll_interval: Duration::from_millis(100),
        pace: Pace {
            every: Duration::from_millis(100),
            ..Pace::default()
        },
        ..Options::new(DRIVER, "slackwater", "router-a")
    }
}

fn lead_by(api: &ApiServer, agents: Arc<Agents>, options: Options) -> Arc<InCluster> {
    let client = api.client();
    let _inside = api.runtime.enter();
    InCluster::start(client, options, agents as Arc<dyn AgentReports>)
}

#[test]
fn an_object_that_the_api_server_rejects_stops_no_other() {
    let api = ApiServer::new();
    let key = format!("topology.{DRIVER}/home");
    let node = json!({"apiVersion": "v1", "kind": "Node", "metadata": {
        "name": "node-1", "resourceVersion": "5", "labels": {&key: "home-old"},
    }});
    put_list(&api, "/api/v1/nodes", "Node", std::slice::from_ref(&node));
    put_list(&api, "/api/v1/persistentvolumes", "PersistentVolume", &[]);
    put_list(&api, POOLS, "Pool", &[]);
    api.put("/api/v1/nodes/node-1", node);
    api.forbid(&format!("{POOLS}/{REJECTED}/status"));
    let agents = Arc::<Agents>::default();
    agents.say("node-1", "home-1", &[REJECTED, GOOD]);
    let cluster = lead(&api, agents);

    let field = |path: &str, field: &str| {
        let objects = api.objects.lock().unwrap();
        let object = objects.at.get(path)?;
        object.pointer(field)?.as_str().map(String::from)
    };
    let health = |id: &str| field(&format!("{POOLS}/{id}"), "/status/health");
    eventually("the other pool has a status", || {
        health(GOOD).as_deref() == Some("Healthy")
    });
    let label = format!("/metadata/labels/{}", key.replace('/', "~1"));
    eventually("the label is right", || {
        field("/api/v1/nodes/node-1", &label).as_deref() == Some("home-1")
    });
    eventually("the rejected one is tried again", || {
        api.asked(&format!("{REJECTED}/status")) >= 3
    });
    assert_eq!(health(REJECTED), None);
    api.objects.lock().unwrap().forbidden.clear();
    eventually("it is accepted now", || {
        health(REJECTED).as_deref() == Some("Healthy")
    });
    let labeled = |(_, path, _): &&(String, String, Value)| path.contains("/nodes/");
    let changes = || api.objects.lock().unwrap().changes.clone();
    assert_eq!(changes().iter().filter(labeled).count(), 1, "labeled once");

    api.runtime.block_on(cluster.shut_down());
    assert!(!cluster.is_leader());
    std::thread::sleep(Duration::from_millis(500));
    let before = changes().len();
    std::thread::sleep(Duration::from_millis(500));
    assert_eq!(changes().len(), before, "it writes nothing any more");
}

#[test]
fn a_mark_is_removed_only_over_the_version_that_was_read() {
    let api = ApiServer::new();
    let node = |name: &str| json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}});
    put_list(
        &api,
        "/api/v1/nodes",
        "Node",
        &["node-1", "node-2"].map(node),
    );
    put_list(&api, "/api/v1/persistentvolumes", "PersistentVolume", &[]);
    let pool = |id: &str, version: &str, mark: &str| {
        json!({"apiVersion": "slackwater.dev/v1alpha1", "kind": "Pool",
            "metadata": {"name": id, "resourceVersion": version, "generation": 1,
                "labels": {"slackwater.dev/driver": DRIVER}},
            "spec": {"node": mark},
            "status": {"node": "node-1", "name": "default", "health": "Healthy"}})
    };
    // The first object is as it was read. The mark of the second was changed since.
    let read = [GOOD, REJECTED].map(|id| pool(id, "7", "node-2"));
    put_list(&api, POOLS, "Pool", &read);
    api.put(&format!("{POOLS}/{GOOD}"), pool(GOOD, "7", "node-2"));
    api.put(
        &format!("{POOLS}/{REJECTED}"),
        pool(REJECTED, "8", "node-3"),
    );
    let agents = Arc::<Agents>::default();
    agents.say("node-2", "home-2", &[GOOD, REJECTED]);
    let cluster = lead(&api, agents);

    let object = |id: &str| api.objects.lock().unwrap().at[&format!("{POOLS}/{id}")].clone();
    for id in [GOOD, REJECTED] {
        eventually("the status names the node", || {
            object(id)["status"]["node"] == "node-2"
        });
    }
    eventually("the mark is away", || {
        object(GOOD)["spec"].get("node").is_none()
    });
    let changes = api.objects.lock().unwrap().changes.clone();
    let removes = |(_, path, body): &&(String, String, Value)| {
        path.ends_with(GOOD) && body.pointer("/spec/node") == Some(&Value::Null)
    };
    let (_, _, body) = changes.iter().find(removes).unwrap();
    assert_eq!(body["metadata"]["resourceVersion"], "7");
    let tries = api.asked(&format!("{REJECTED}/status"));
    eventually("the other was decided again", || {
        api.asked(&format!("{REJECTED}/status")) > tries + 1
    });
    assert_eq!(object(REJECTED)["spec"]["node"], "node-3", "the person's");
    api.runtime.block_on(cluster.shut_down());
}

#[test]
fn a_pool_is_marked_as_lost_only_over_the_version_that_was_read() {
    let api = ApiServer::new();
    put_list(&api, "/api/v1/nodes", "Node", &[]);
    put_list(&api, "/api/v1/persistentvolumes", "PersistentVolume", &[]);
    let pool = |id: &str, version: &str, spec: Value| {
        let long_ago = "2020-01-01T00:00:00Z";
        json!({"apiVersion": "slackwater.dev/v1alpha1", "kind": "Pool",
            "metadata": {"name": id, "resourceVersion": version, "generation": 1,
                "labels": {"slackwater.dev/driver": DRIVER}},
            "spec": spec,
            "status": {"node": "node-1", "name": "default", "health": "Unreachable",
                "lastSeen": long_ago, "nodeGoneSince": long_ago}})
    };
    // The first object is as it was read. A person has handed over the second one since.
    let read = [GOOD, REJECTED].map(|id| pool(id, "7", json!({})));
    put_list(&api, POOLS, "Pool", &read);
    api.put(&format!("{POOLS}/{GOOD}"), pool(GOOD, "7", json!({})));
    api.put(
        &format!("{POOLS}/{REJECTED}"),
        pool(REJECTED, "8", json!({"node": "node-3"})),
    );
    let after = Some(Duration::from_secs(1));
    let cluster = lead_with(&api, Arc::default(), after);

    let object = |id: &str| api.objects.lock().unwrap().at[&format!("{POOLS}/{id}")].clone();
    eventually("the first one is marked", || {
        object(GOOD)["spec"]["lost"] == true
    });
    let tries = api.asked(&format!("{POOLS}/{REJECTED}"));
    eventually("the other one was decided again", || {
        api.asked(&format!("{POOLS}/{REJECTED}")) > tries + 1
    });
    assert_eq!(object(REJECTED)["spec"], json!({"node": "node-3"}));
    api.runtime.block_on(cluster.shut_down());
}
