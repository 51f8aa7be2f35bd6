//! Pools that nodes are to adopt and to forget (`spec.adopt` and `spec.forget`), with a router that is
//! killed at each of its requests, on a small API server. Each router sees the objects as they are at its
//! start.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicI64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use http::{Request, Response};
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use kube::client::Body;
use serde_json::{Value, json};
use slackwater::agent::pool::Presence;
use slackwater::agent::{DescribeResponse, Pool as Shown};
use slackwater::error::{Error, Result};
use slackwater::model::PoolId;
use slackwater::router::kube::orphans::{DescribedVolume, Orphan, Stored};
use slackwater::router::kube::pools::requests::progress::PoolRequest;
use slackwater::router::kube::pools::status::Report;
use slackwater::router::kube::reconcile::lease::Pace;
use slackwater::router::kube::{AgentReports, InCluster, Options};

use crate::kube::agents::list;
use crate::kube::api::{DRIVER, eventually};
use crate::kube::kubelet::ApiServer;

const POOL: &str = "11111111-2222-4333-8444-000000000001";
const POOLS: &str = "/apis/slackwater.dev/v1alpha1/pools";
const LEASE: &str = "/apis/coordination.k8s.io/v1/namespaces/slackwater/leases/slackwater-router";

/// How many requests about the pool a router still makes, to the API server and to agents.
#[derive(Clone)]
struct Life {
    left: Arc<AtomicI64>,
    made: Arc<AtomicUsize>,
}

impl Life {
    fn of(requests: i64) -> Life {
        Life {
            left: Arc::new(AtomicI64::new(requests)),
            made: Arc::default(),
        }
    }

    /// Whether the next request is still made.
    fn goes_on(&self) -> bool {
        self.made.fetch_add(1, Ordering::SeqCst);
        self.left.fetch_sub(1, Ordering::SeqCst) > 0
    }

    fn is_over(&self) -> bool {
        self.left.load(Ordering::SeqCst) <= 0
    }

    /// A client whose requests all fail after the end.
    fn client(&self, to: kube::Client) -> kube::Client {
        let life = self.clone();
        let send = move |request: Request<Body>| {
            let (life, to) = (life.clone(), to.clone());
            async move {
                let is_about_it = request.uri().path().contains(POOL);
                let goes_on = match is_about_it {
                    true => life.goes_on(),
                    false => !life.is_over(),
                };
                match goes_on {
                    true => to.send(request).await,
                    false => Ok(Response::builder().status(503).body(Body::empty()).unwrap()),
                }
            }
        };
        kube::Client::new(tower::service_fn(send), "default")
    }
}

/// What is at a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum At {
    Nothing,
    OtherHome,
    Served,
    Absent,
    Forgotten,
}

/// The nodes, and the agents as one router knows them.
#[derive(Default)]
struct Nodes {
    at: Mutex<BTreeMap<String, At>>,
    silent: Mutex<BTreeSet<String>>,
    /// Agents of an earlier release.
    old: Mutex<BTreeSet<String>>,
    /// Requests that were executed.
    done: Mutex<Vec<String>>,
}

impl Nodes {
    fn report(&self, node: &str, at: At) -> Report {
        let is_old = self.old.lock().unwrap().contains(node);
        let (refusal, presence) = match at {
            At::Served | At::Nothing => ("", Presence::Unknown),
            At::OtherHome => ("it belongs to another home", Presence::OtherHome),
            At::Absent => ("its disk is missing", Presence::Absent),
            At::Forgotten => ("it was forgotten", Presence::Unknown),
        };
        let presence = match is_old {
            true => Presence::Unknown,
            false => presence,
        };
        let shown = Shown {
            name: "default".into(),
            place: "file:/pool".into(),
            id: POOL.into(),
            refusal: refusal.into(),
            presence: presence.into(),
            forgotten: at == At::Forgotten,
            ..Shown::default()
        };
        let answer = DescribeResponse {
            node_name: node.into(),
            driver_name: DRIVER.into(),
            home: format!("home-of-{node}"),
            guard_alive: true,
            pools: (at != At::Nothing).then_some(shown).into_iter().collect(),
            ..DescribeResponse::default()
        };
        let is_silent = self.silent.lock().unwrap().contains(node);
        let age = SignedDuration::from_secs(if is_silent { 300 } else { 0 });
        Report {
            node: node.into(),
            seen: Some((Timestamp::now() - age, Arc::new(answer))),
            problem: is_silent.then(|| "connection refused".into()),
            is_refused: false,
        }
    }
}

struct Agents(Arc<Nodes>, Life);

#[tonic::async_trait]
impl AgentReports for Agents {
    fn place(&self, _agents: BTreeMap<String, SocketAddr>) {}

    fn reports(&self) -> Vec<Report> {
        let at = self.0.at.lock().unwrap().clone();
        let each = at.iter();
        each.map(|(node, at)| self.0.report(node, *at)).collect()
    }

    async fn stored(&self) -> Vec<Stored> {
        Vec::new()
    }

    async fn describe(&self, _node: &str, _ids: Vec<String>) -> Result<Vec<DescribedVolume>> {
        Ok(Vec::new())
    }

    async fn delete(&self, orphan: &Orphan) -> Result<()> {
        Err(Error::refused(&orphan.id, "there are no orphans"))
    }

    /// The router can be killed before the request arrives, and before it has the answer.
    async fn change_pool(&self, node: &str, pool: PoolId, request: PoolRequest) -> Result<()> {
        assert_eq!(pool.to_string(), POOL);
        let killed = || Err(Error::unreachable("the agent", "the router was killed"));
        if !self.1.goes_on() {
            return killed();
        }
        if self.0.old.lock().unwrap().contains(node) {
            return Err(Error::refused("the agent", "it is of an earlier release"));
        }
        let mut all = self.0.at.lock().unwrap();
        let at = all.get_mut(node).unwrap();
        *at = match (request, *at) {
            (PoolRequest::Adopt, At::OtherHome | At::Served) => At::Served,
            (PoolRequest::Forget, At::Absent | At::Forgotten) => At::Forgotten,
            (_, at) => return Err(Error::refused("the agent", format!("the pool is {at:?}"))),
        };
        drop(all);
        let done = format!("{request:?} {node}");
        self.0.done.lock().unwrap().push(done);
        match self.1.goes_on() {
            true => Ok(()),
            false => killed(),
        }
    }
}

struct World {
    api: ApiServer,
    nodes: Arc<Nodes>,
}

impl World {
    /// The pool of node-a, with this spec.
    fn new(spec: Value, health: &str, at: &[(&str, At)]) -> World {
        let api = ApiServer::new();
        let pool = json!({"apiVersion": "slackwater.dev/v1alpha1", "kind": "Pool",
            "metadata": {"name": POOL, "uid": "1", "resourceVersion": "1", "generation": 1,
                "labels": {"slackwater.dev/driver": DRIVER}},
            "spec": spec,
            "status": {"node": "node-a", "home": "home-of-node-a", "name": "default",
                "health": health}});
        api.put(&format!("{POOLS}/{POOL}"), pool);
        let nodes = ["node-a", "node-b"].map(|name| {
            let node = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "uid": name}});
            api.put(&format!("/api/v1/nodes/{name}"), node.clone());
            node
        });
        list(&api, "/api/v1/nodes", "Node", json!(nodes));
        list(
            &api,
            "/api/v1/persistentvolumes",
            "PersistentVolume",
            json!([]),
        );
        let nodes = Nodes::default();
        let each = at.iter().map(|(node, at)| (node.to_string(), *at));
        *nodes.at.lock().unwrap() = each.collect();
        World {
            api,
            nodes: Arc::new(nodes),
        }
    }

    fn pool(&self) -> Value {
        self.api.objects.lock().unwrap().at[&format!("{POOLS}/{POOL}")].clone()
    }

    fn condition(&self, kind: &str) -> Option<(String, String)> {
        let pool = self.pool();
        let all = pool["status"]["conditions"].as_array()?.clone();
        let its = all.iter().find(|one| one["type"] == kind)?;
        assert_eq!(its["status"], "False");
        let text = |field: &str| its[field].as_str().unwrap().to_string();
        Some((text("reason"), text("message")))
    }

    /// Starts a router that leads.
    fn start(&self, life: &Life) -> Arc<InCluster> {
        {
            let mut objects = self.api.objects.lock().unwrap();
            // The Lease of a router that was killed has ended.
            objects.at.remove(LEASE);
            // As the API server does when a spec is changed.
            let path = format!("{POOLS}/{POOL}");
            let pool = objects.at.get_mut(&path).unwrap();
            let next = pool["metadata"]["generation"].as_i64().unwrap() + 1;
            pool["metadata"]["generation"] = json!(next);
            let pools = json!({"kind": "PoolList", "apiVersion": "v1",
                "metadata": {"resourceVersion": "1"}, "items": [pool.clone()]});
            objects.at.insert(POOLS.into(), pools);
        }
        let options = Options {
            poll_interval: Duration::from_millis(20),
            unreachable_after: SignedDuration::from_secs(1),
            pace: Pace {
                every: Duration::from_millis(20),
                ..Pace::default()
            },
            ..Options::new(DRIVER, "slackwater", "router-a")
        };
        let agents = Arc::new(Agents(Arc::clone(&self.nodes), life.clone()));
        let client = self.api.client();
        let _inside = self.api.runtime.enter();
        let client = life.client(client);
        InCluster::start(client, options, agents as Arc<dyn AgentReports>)
    }

    /// Runs routers one after the other until the pool is as it should be. The first one ends after a
    /// number of requests. Returns how many requests it has made.
    fn run(&self, requests: i64, is_done: impl Fn(&Value) -> bool) -> usize {
        let started = Instant::now();
        let first = Life::of(requests);
        let mut life = first.clone();
        loop {
            let of = |pool: &Value| (pool["spec"].clone(), pool["status"]["health"].clone());
            let before = of(&self.pool());
            let cluster = self.start(&life);
            // A router that has changed the object sees the change only after a restart.
            let has_ended =
                || life.is_over() || is_done(&self.pool()) || of(&self.pool()) != before;
            while !has_ended() {
                assert!(
                    started.elapsed() < Duration::from_secs(60),
                    "{}",
                    self.pool()
                );
                std::thread::sleep(Duration::from_millis(5));
            }
            self.api.runtime.block_on(cluster.shut_down());
            if is_done(&self.pool()) {
                return first.made.load(Ordering::SeqCst);
            }
            life = Life::of(i64::MAX);
        }
    }

    fn done(&self) -> Vec<String> {
        self.nodes.done.lock().unwrap().clone()
    }
}

fn adopted(pool: &Value) -> bool {
    pool["status"]["node"] == "node-b"
        && pool["status"]["health"] == "Healthy"
        && pool["spec"] == json!({})
}

fn adopting() -> World {
    let at = [("node-a", At::Absent), ("node-b", At::OtherHome)];
    World::new(json!({"adopt": "node-b"}), "NotServed", &at)
}

#[test]
fn an_adoption_is_completed_whichever_request_its_router_is_killed_at() {
    let whole = adopting();
    let count = whole.run(i64::MAX, adopted);
    assert!(whole.done().contains(&"Adopt node-b".into()));
    assert!(count >= 4, "{count}");
    for requests in 0..count as i64 + 4 {
        let world = adopting();
        world.run(requests, adopted);
        let done: BTreeSet<_> = world.done().into_iter().collect();
        assert_eq!(done, ["Adopt node-b".to_string()].into(), "{requests}");
        assert_eq!(world.nodes.at.lock().unwrap()["node-b"], At::Served);
    }
}

fn forgotten(pool: &Value) -> bool {
    pool["status"]["health"] == "Forgotten" && pool["spec"] == json!({})
}

#[test]
fn a_node_forgets_a_pool_whichever_request_the_router_is_killed_at() {
    let forgetting = || {
        let at = [("node-a", At::Absent), ("node-b", At::Nothing)];
        World::new(json!({"forget": "node-a"}), "NotServed", &at)
    };
    let count = forgetting().run(i64::MAX, forgotten);
    for requests in 0..count as i64 + 4 {
        let world = forgetting();
        world.run(requests, forgotten);
        let done: BTreeSet<_> = world.done().into_iter().collect();
        assert_eq!(done, ["Forget node-a".to_string()].into(), "{requests}");
    }
}

/// Runs one router until the condition says this.
#[track_caller]
fn until_condition(world: &World, kind: &str, reason: &str, words: &str) {
    let life = Life::of(i64::MAX);
    let cluster = world.start(&life);
    eventually(&format!("{kind} is {reason}"), || {
        let reported = world.condition(kind);
        reported.is_some_and(|(found, message)| found == reason && message.contains(words))
    });
    world.api.runtime.block_on(cluster.shut_down());
}

#[test]
fn a_request_that_waits_has_a_condition_that_says_for_what() {
    let world = adopting();
    world.nodes.silent.lock().unwrap().insert("node-b".into());
    until_condition(&world, "Adopted", "Unreachable", "connection refused");
    world.nodes.silent.lock().unwrap().clear();
    world.nodes.old.lock().unwrap().insert("node-b".into());
    until_condition(
        &world,
        "Adopted",
        "NotPresent",
        "agents of earlier releases",
    );
    world.nodes.old.lock().unwrap().clear();
    let at = |node: &str, at| {
        world.nodes.at.lock().unwrap().insert(node.into(), at);
    };
    at("node-a", At::Served);
    until_condition(&world, "Adopted", "Served", "node-a");
    assert_eq!(world.done(), [""; 0]);
    // The person takes it back: the condition goes with the field.
    world
        .api
        .objects
        .lock()
        .unwrap()
        .at
        .get_mut(&format!("{POOLS}/{POOL}"))
        .unwrap()["spec"] = json!({});
    let cluster = world.start(&Life::of(i64::MAX));
    eventually("it has no condition", || {
        world.condition("Adopted").is_none()
    });
    world.api.runtime.block_on(cluster.shut_down());
    assert_eq!(world.done(), [""; 0]);
}

#[test]
fn what_an_agent_answers_to_a_request_is_shown() {
    let at = [("node-a", At::Absent), ("node-b", At::Nothing)];
    let world = World::new(json!({"forget": "node-b"}), "NotServed", &at);
    until_condition(&world, "Forgotten", "Refused", "the pool is Nothing");
    world.nodes.old.lock().unwrap().insert("node-b".into());
    until_condition(&world, "Forgotten", "Refused", "earlier release");
    let spec = json!({"forget": "node-a", "adopt": "node-b"});
    let world = World::new(spec, "NotServed", &at);
    until_condition(&world, "Forgotten", "Adopting", "another node");
    until_condition(&world, "Adopted", "NotReported", "mount its disk");
    assert_eq!(world.done(), [""; 0]);
}

/// The decision is older than what a person has done since.
#[test]
fn a_field_that_was_changed_since_is_left_as_it_is() {
    let world = adopting();
    // The router has read the spec before that change, and its watch reports nothing.
    let life = Life::of(i64::MAX);
    let cluster = {
        let cluster = world.start(&life);
        let mut objects = world.api.objects.lock().unwrap();
        let pool = objects.at.get_mut(&format!("{POOLS}/{POOL}")).unwrap();
        pool["spec"] = json!({"adopt": "node-c"});
        pool["metadata"]["generation"] = json!(99);
        pool["metadata"]["resourceVersion"] = json!("2");
        cluster
    };
    eventually("the router has looked at the pool", || {
        life.made.load(Ordering::SeqCst) > 20
    });
    world.api.runtime.block_on(cluster.shut_down());
    assert_eq!(world.done(), [""; 0]);
    assert_eq!(world.pool()["spec"], json!({"adopt": "node-c"}));
}
