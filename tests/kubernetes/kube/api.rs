//! The cluster state of a router on a real API server: the objects that it watches and writes,
//! leadership, and its behavior while the API server is down.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use k8s_openapi::jiff::{SignedDuration, Timestamp};
use slackwater::agent::{DescribeResponse, Pool as Shown};
use slackwater::error::{Error, Result};
use slackwater::model::PoolId;
use slackwater::router::cluster::{Cluster, ObjectRef};
use slackwater::router::kube::orphans::{self, DescribedVolume, Orphan, Stored};
use slackwater::router::kube::pools::requests::progress::PoolRequest;
use slackwater::router::kube::pools::status::Report;
use slackwater::router::kube::reconcile::lease::Pace;
use slackwater::router::kube::{AgentReports, InCluster, Options};
use slackwater::telemetry::router::Orphans;
pub use slackwater_testkit::eventually;

use crate::kube::plane::Plane;

pub const DRIVER: &str = "csi.slackwater.dev";
const POOL: &str = "11111111-2222-4333-8444-555555555555";

/// An agent's description. If the agent cannot be reached, an error with its last description, and
/// its time.
type LastReport = std::result::Result<DescribeResponse, (Timestamp, DescribeResponse)>;

/// Agents that give any answer that a test needs.
#[derive(Default)]
pub struct Agents {
    placed: Mutex<BTreeMap<String, SocketAddr>>,
    /// By node.
    say: Mutex<BTreeMap<String, LastReport>>,
    stored: Mutex<Vec<Stored>>,
    /// IDs of orphans that were deleted.
    deleted: Mutex<Vec<String>>,
}

impl Agents {
    pub fn say(&self, node: &str, home: &str, pools: &[&str]) {
        let shown = pools.iter().map(|id| Shown {
            name: "default".into(),
            place: "file:/var/lib/slackwater/pool".into(),
            id: id.to_string(),
            total_bytes: 100 << 30,
            available_bytes: 60 << 30,
            volumes: 2,
            ..Shown::default()
        });
        let answer = DescribeResponse {
            node_name: node.into(),
            driver_name: DRIVER.into(),
            version: "0.1.0".into(),
            home: home.into(),
            guard_alive: true,
            pools: shown.collect(),
            ..DescribeResponse::default()
        };
        self.say.lock().unwrap().insert(node.into(), Ok(answer));
    }

    /// The agent has not answered for a long time.
    pub fn silence(&self, node: &str) {
        let mut say = self.say.lock().unwrap();
        let Some(Ok(answer)) = say.remove(node) else {
            panic!("{node} is not there")
        };
        let long_ago = Timestamp::from_second(Timestamp::now().as_second() - 300).unwrap();
        say.insert(node.into(), Err((long_ago, answer)));
    }
}

#[tonic::async_trait]
impl AgentReports for Agents {
    fn place(&self, agents: BTreeMap<String, SocketAddr>) {
        *self.placed.lock().unwrap() = agents;
    }

    fn reports(&self) -> Vec<Report> {
        let say = self.say.lock().unwrap();
        let each = say.iter().map(|(node, said)| match said {
            Ok(answer) => Report {
                node: node.clone(),
                seen: Some((Timestamp::now(), Arc::new(answer.clone()))),
                problem: None,
                is_refused: false,
            },
            Err((at, answer)) => Report {
                node: node.clone(),
                seen: Some((*at, Arc::new(answer.clone()))),
                problem: Some("connection refused".into()),
                is_refused: false,
            },
        });
        each.collect()
    }

    async fn stored(&self) -> Vec<Stored> {
        self.stored.lock().unwrap().clone()
    }

    /// It reports more than the router asks for.
    async fn describe(&self, node: &str, ids: Vec<String>) -> Result<Vec<DescribedVolume>> {
        assert_eq!(node, "node-1");
        let known = ids.into_iter().chain(["pool.stray".to_string()]);
        let each = known.map(|volume_id| DescribedVolume {
            size_bytes: if volume_id.contains("lost") { 7 } else { 0 },
            volume_id,
            file_system: "xfs".into(),
            for_readers: false,
            claim: "shop/data".into(),
            problem: String::new(),
        });
        Ok(each.collect())
    }

    /// The agent refuses to delete a volume with `used` in its ID.
    async fn delete(&self, orphan: &Orphan) -> Result<()> {
        if orphan.id.contains("used") {
            return Err(Error::refused(&orphan.id, "it is staged"));
        }
        for stored in self.stored.lock().unwrap().iter_mut() {
            stored.volumes.retain(|id| *id != orphan.id);
        }
        self.deleted.lock().unwrap().push(orphan.id.clone());
        Ok(())
    }

    async fn change_pool(&self, node: &str, _pool: PoolId, _request: PoolRequest) -> Result<()> {
        Err(Error::refused(
            node,
            "no test changes pools of these agents",
        ))
    }
}

pub fn options(me: &str) -> Options {
    Options {
        agent_service: Some(("slackwater".into(), "agents".into())),
        pace: Pace {
            duration: Duration::from_secs(6),
            belief: Duration::from_secs(4),
            every: Duration::from_secs(1),
        },
        poll_interval: Duration::from_millis(500),
        orphans: orphans::Pace {
            every: Duration::from_millis(500),
            age: Duration::from_secs(3),
            deletion: orphans::Waits {
                unnamed: SignedDuration::from_secs(3),
                kept: SignedDuration::from_secs(2),
                placed: SignedDuration::ZERO,
            },
        },
        ..Options::new(DRIVER, "slackwater", me)
    }
}

pub fn start(plane: &Plane, options: Options, agents: &Arc<Agents>) -> Arc<InCluster> {
    let client = plane.client();
    let _inside = plane.runtime.enter();
    let agents = Arc::clone(agents) as Arc<dyn AgentReports>;
    InCluster::start(client, options, agents)
}

fn volume(name: &str, driver: &str, handle: &str, home: &str) -> String {
    format!(
        "{{apiVersion: v1, kind: PersistentVolume, metadata: {{name: {name}}}, spec: {{\
         capacity: {{storage: 1Gi}}, accessModes: [ReadWriteOnce], \
         claimRef: {{namespace: shop, name: data, uid: '1234'}}, \
         csi: {{driver: {driver}, volumeHandle: {handle}}}, \
         nodeAffinity: {{required: {{nodeSelectorTerms: [{{matchExpressions: [{{\
         key: topology.{driver}/home, operator: In, values: [{home}]}}]}}]}}}}}}}}"
    )
}

const OBJECTS: &str = "
{apiVersion: v1, kind: Namespace, metadata: {name: slackwater}}
---
{apiVersion: v1, kind: Namespace, metadata: {name: shop}}
---
{apiVersion: v1, kind: Node, metadata: {name: node-1, labels: {topology.csi.slackwater.dev/home: home-1}}}
---
{apiVersion: v1, kind: Node, metadata: {name: node-2, labels: {topology.csi.slackwater.dev/home: home-old}}}
---
apiVersion: v1
kind: PersistentVolumeClaim
metadata:
  name: data
  namespace: shop
  annotations: {volume.kubernetes.io/selected-node: node-2}
spec: {accessModes: [ReadWriteOnce], resources: {requests: {storage: 1Gi}}}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: agents-1, namespace: slackwater, labels: {kubernetes.io/service-name: agents}}
addressType: IPv4
ports: [{name: agent, port: 9820}, {name: metrics, port: 9810}]
endpoints:
  - {addresses: [10.0.0.1], nodeName: node-1, conditions: {ready: true}}
  - {addresses: [10.0.0.2], nodeName: node-2, conditions: {ready: false, serving: false}}
";

/// The part of that CRD that is read.
const CONTENTS: &str = "
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata:
  name: volumesnapshotcontents.snapshot.storage.k8s.io
  annotations: {api-approved.kubernetes.io: unapproved}
spec:
  group: snapshot.storage.k8s.io
  scope: Cluster
  names: {kind: VolumeSnapshotContent, plural: volumesnapshotcontents, singular: volumesnapshotcontent}
  versions:
    - name: v1
      served: true
      storage: true
      schema: {openAPIV3Schema: {type: object, x-kubernetes-preserve-unknown-fields: true}}
";

#[test]
fn a_router_in_its_cluster() {
    let Some(mut plane) = Plane::start("the router's cluster on a real API server") else {
        return;
    };
    plane.apply(include_str!("../../../deploy/chart/crds/pools.yaml"));
    plane.kubectl(&[
        "wait",
        "--for=condition=Established",
        "crd/pools.slackwater.dev",
    ]);
    plane.apply(OBJECTS);
    plane.apply(&volume("pv-1", DRIVER, "pool.volume", "home-1"));
    plane.apply(&volume("pv-other", "other.example", "pool.other", "home-1"));
    let agents = Arc::<Agents>::default();
    let cluster = start(&plane, options("router-a"), &agents);
    follows(&plane, &cluster, &agents);
    leads(&plane, &cluster);
    let pool = pools(&plane, &cluster, &agents);
    labels(&plane, &cluster, &agents);
    events(&plane, &cluster, &pool);
    orphans(&plane, &cluster, &agents);
    is_gone(&mut plane, &cluster);
    hands_over(&plane, &cluster, &agents);
}

fn follows(plane: &Plane, cluster: &InCluster, agents: &Agents) {
    eventually("all is read", || {
        cluster.is_complete() && cluster.problem().is_none()
    });
    assert_eq!(
        cluster.claim_of("pool.volume").as_deref(),
        Some("shop/data")
    );
    assert_eq!(cluster.claim_of("pool.other"), None, "another driver's");
    assert_eq!(cluster.names_volume("pool.volume"), Some(true));
    assert_eq!(cluster.names_volume("pool.nobody"), Some(false));
    let selected = |claim: &str| {
        plane
            .runtime
            .block_on(cluster.selected_node(claim))
            .unwrap()
    };
    assert_eq!(selected("shop/data").as_deref(), Some("node-2"));
    assert_eq!(selected("shop/none"), None);
    let has = |node: &str| plane.runtime.block_on(cluster.has_node(node)).unwrap();
    assert!(has("node-1") && !has("node-9"));
    let placed = |node: &str| {
        agents
            .placed
            .lock()
            .unwrap()
            .get(node)
            .map(ToString::to_string)
    };
    assert_eq!(placed("node-1").as_deref(), Some("10.0.0.1:9820"));
    assert_eq!(
        placed("node-2").as_deref(),
        Some("10.0.0.2:9820"),
        "not ready, but known"
    );
    plane.apply(&volume("pv-2", DRIVER, "pool.second", "home-1"));
    eventually("a new volume is known", || {
        cluster.claim_of("pool.second").is_some()
    });
    plane.kubectl(&["delete", "pv", "pv-2", "--wait=false"]);
    plane.kubectl(&[
        "patch",
        "pv",
        "pv-2",
        "--type=merge",
        "-p",
        r#"{"metadata":{"finalizers":null}}"#,
    ]);
    eventually("the volume is gone", || {
        cluster.claim_of("pool.second").is_none()
    });
}

fn leads(plane: &Plane, cluster: &InCluster) {
    eventually("the only one leads", || cluster.is_leader());
    let holder = ["get", "lease", "slackwater-router", "-n", "slackwater"];
    let holder = [&holder[..], &["-o", "jsonpath={.spec.holderIdentity}"]].concat();
    assert_eq!(plane.kubectl(&holder), "router-a");
}

fn pools(plane: &Plane, cluster: &InCluster, agents: &Agents) -> ObjectRef {
    agents.say("node-1", "home-1", &[POOL]);
    let field = |path: &str| {
        let path = format!("jsonpath={{{path}}}");
        plane
            .try_kubectl(&["get", "pool", POOL, "-o", &path])
            .unwrap_or_default()
    };
    eventually("a Pool object", || field(".status.health") == "Healthy");
    let table = plane.kubectl(&["get", "pools"]);
    eprintln!("{table}");
    for word in [
        "NODE",
        "node-1",
        "default",
        "file",
        "100Gi",
        "60Gi",
        "Healthy",
        "LAST SEEN",
    ] {
        assert!(table.contains(word), "{word}:\n{table}");
    }
    let id = POOL.parse().unwrap();
    eventually("the pool is remembered", || {
        cluster.known_pools().len() == 1
    });
    let known = cluster.known_pools().remove(0);
    assert_eq!(
        (known.node.as_str(), known.home.as_str()),
        ("node-1", "home-1")
    );
    agents.silence("node-1");
    eventually("its agent's silence is written", || {
        field(".status.health") == "Unreachable"
    });
    assert!(field(".status.message").contains("connection refused"));
    assert!(!cluster.is_lost(id));
    let lost = |lost: bool| format!(r#"{{"spec":{{"lost":{lost}}}}}"#);
    plane.kubectl(&["patch", "pool", POOL, "--type=merge", "-p", &lost(true)]);
    eventually("the pool is lost", || cluster.is_lost(id));
    eventually("its status is Lost", || field(".status.health") == "Lost");
    agents.say("node-1", "home-1", &[POOL]);
    eventually("the pool returns", || {
        field(".status.health") == "Quarantined"
    });
    let counted = |health| cluster.status().unwrap().pools.unwrap()[health];
    eventually("it is counted", || counted("Quarantined") == 1);
    assert_eq!(counted("Healthy"), 0);
    plane.kubectl(&["patch", "pool", POOL, "--type=merge", "-p", &lost(false)]);
    eventually("the pool is healthy again", || {
        field(".status.health") == "Healthy"
    });
    assert_eq!(field(".status.nodeGoneSince"), "");
    eprintln!("{}", plane.kubectl(&["describe", "pool", POOL]));
    ObjectRef::Pool(id)
}

fn labels(plane: &Plane, cluster: &InCluster, agents: &Agents) {
    let label = |node: &str| {
        let path = r"jsonpath={.metadata.labels.topology\.csi\.slackwater\.dev/home}";
        plane.kubectl(&["get", "node", node, "-o", path])
    };
    agents.say("node-2", "home-2", &[]);
    eventually("a stale label is mended", || label("node-2") == "home-2");
    // A volume's node affinity names node-1's label.
    agents.say("node-1", "home-new", &[]);
    eventually("a conflict is counted", || {
        cluster.status().unwrap().label_conflicts == 1
    });
    eventually("an event is recorded", || {
        plane
            .kubectl(&["events", "--for=node/node-1"])
            .contains("HomeConflict")
    });
    assert_eq!(label("node-1"), "home-1");
    agents.say("node-1", "home-1", &[POOL]);
    eventually("the disks return", || {
        cluster.status().unwrap().label_conflicts == 0
    });
}

fn events(plane: &Plane, cluster: &InCluster, pool: &ObjectRef) {
    let claim = ObjectRef::Claim("shop/data".into());
    for _ in 0..20 {
        cluster.record_event(
            &claim,
            true,
            "NoRoom",
            "pool default of node-1 is full".into(),
        );
    }
    cluster.record_event(
        &ObjectRef::Claim("shop/none".into()),
        true,
        "NoRoom",
        "nobody's".into(),
    );
    let all = || plane.kubectl(&["events", "--for=pvc/data", "-n", "shop", "--no-headers"]);
    eventually("an event on a claim", || all().contains("NoRoom"));
    assert_eq!(all().lines().count(), 1, "{}", all());
    let described = plane.kubectl(&["describe", "pvc", "data", "-n", "shop"]);
    assert!(
        described.contains("pool default of node-1 is full"),
        "{described}"
    );
    eventually(
        "an event for an object that does not exist is dropped",
        || cluster.status().unwrap().dropped_events > 0,
    );
    let ObjectRef::Pool(id) = pool else { panic!() };
    let output = plane.kubectl(&["events", &format!("--for=pool/{id}")]);
    for word in [
        "PoolUnreachable",
        "PoolLost",
        "PoolQuarantined",
        "PoolHealthy",
    ] {
        assert!(output.contains(word), "{word}:\n{output}");
    }
}

/// Volumes without an object are reported after a delay.
fn orphans(plane: &Plane, cluster: &InCluster, agents: &Agents) {
    let counted = || cluster.status().unwrap().orphans;
    let count = |volumes, snapshots| Some(Orphans { volumes, snapshots });
    eventually("none yet", || counted() == count(0, None));
    let texts = |ids: &[&str]| ids.iter().map(ToString::to_string).collect();
    let has = |volumes: &[&str], snapshots: &[&str]| {
        *agents.stored.lock().unwrap() = vec![Stored {
            pool: POOL.parse().unwrap(),
            node: "node-1".into(),
            volumes: texts(volumes),
            snapshots: texts(snapshots)
                .into_iter()
                .map(|id| orphans::StoredSnapshot {
                    id,
                    source: String::new(),
                    group: None,
                })
                .collect(),
        }];
    };
    has(
        &["pool.volume", "pool.lost", "pool.new"],
        &["pool.snap", "pool.stray"],
    );
    eventually("two volumes without an object", || {
        counted() == count(2, None)
    });
    // One of them was only being created; and now the cluster has the snapshot CRDs.
    plane.apply(&volume("pv-new", DRIVER, "pool.new", "home-1"));
    plane.apply(CONTENTS);
    let crd = "crd/volumesnapshotcontents.snapshot.storage.k8s.io";
    plane.kubectl(&["wait", "--for=condition=Established", crd]);
    let content = format!(
        "{{apiVersion: snapshot.storage.k8s.io/v1, kind: VolumeSnapshotContent, metadata: \
         {{name: snap}}, spec: {{driver: {DRIVER}}}, status: {{snapshotHandle: pool.snap}}}}"
    );
    eventually("a content", || {
        let file = plane.path("content");
        std::fs::write(&file, &content).unwrap();
        plane
            .try_kubectl(&["apply", "-f", file.to_str().unwrap()])
            .is_ok()
    });
    eventually("one of each", || counted() == count(1, Some(1)));
    eventually("each is reported", || {
        let output = plane.kubectl(&["events", &format!("--for=pool/{POOL}")]);
        ["volume pool.lost", "snapshot pool.stray"]
            .iter()
            .all(|words| output.contains(words))
    });
    delete_orphans(plane, agents);
    has(&["pool.volume"], &["pool.snap"]);
    eventually("none is left", || counted() == count(0, Some(0)));
}

/// An orphan is deleted on request; one that is used, and a volume that is no orphan, are not.
fn delete_orphans(plane: &Plane, agents: &Agents) {
    let pool =
        |path: &str| plane.kubectl(&["get", "pool", POOL, &format!("-o=jsonpath={{{path}}}")]);
    let listed = ".status.orphans.listed[*].id";
    eventually("the status lists the orphans", || {
        let ids = pool(listed);
        ids.contains("pool.lost") && ids.contains("pool.stray")
    });
    assert_eq!(
        pool(".status.orphans.listed[*].volume"),
        r#"{"claim":"shop/data","fileSystem":"xfs","sizeBytes":7}"#,
        "what its agent reports of the volume, and nothing else"
    );
    agents.stored.lock().unwrap()[0]
        .volumes
        .push("pool.used".into());
    let request = |ids: &str| {
        let fields = format!("{{\"spec\":{{\"deleteOrphans\":{ids}}}}}");
        plane.kubectl(&["patch", "pool", POOL, "--type=merge", "-p", &fields])
    };
    request(r#"["pool.lost", "pool.used", "pool.volume"]"#);
    eventually("the volume with an object is kept and named", || {
        let events = plane.kubectl(&["events", &format!("--for=pool/{POOL}")]);
        events.contains("pool.volume is not deleted: it is no orphan")
    });
    eventually("the status says when", || {
        !pool(".status.orphans.listed[*].deleteAt").is_empty()
    });
    eventually(
        "one is deleted, and the request of the other one stays",
        || {
            *agents.deleted.lock().unwrap() == ["pool.lost"]
                && pool(".spec.deleteOrphans") == r#"["pool.used"]"#
        },
    );
    eventually("events", || {
        let events = plane.kubectl(&["events", &format!("--for=pool/{POOL}")]);
        events.contains("deleted pool.lost, as requested") && events.contains("it is staged")
    });
    assert!(
        agents.stored.lock().unwrap()[0]
            .volumes
            .contains(&"pool.volume".into())
    );
    request("null");
}

fn is_gone(plane: &mut Plane, cluster: &InCluster) {
    assert!(plane.runtime.block_on(cluster.answers()));
    plane.stop_api();
    assert!(
        !plane.runtime.block_on(cluster.answers()),
        "sidecars wait for the router"
    );
    eventually("a router that cannot renew its Lease does not lead", || {
        !cluster.is_leader()
    });
    assert_eq!(
        cluster.claim_of("pool.volume").as_deref(),
        Some("shop/data")
    );
    assert!(!cluster.is_lost(POOL.parse().unwrap()));
    assert!(
        cluster.is_complete(),
        "known objects are served from memory"
    );
    assert_eq!(cluster.known_pools().len(), 1);
    let asked = plane.runtime.block_on(cluster.selected_node("shop/data"));
    assert!(asked.is_err(), "an unknown object is an error: {asked:?}");
    let asked = plane.runtime.block_on(cluster.has_node("node-9"));
    assert!(
        asked.is_err(),
        "never \"absent\" because the server does not answer: {asked:?}"
    );
    assert!(plane.runtime.block_on(cluster.has_node("node-1")).unwrap());
    cluster.record_event(
        &ObjectRef::Node("node-2".into()),
        true,
        "Meanwhile",
        "told while it was gone".into(),
    );
    eventually("the problem is reported", || {
        let problem = cluster.problem().unwrap_or_default();
        problem.contains("watching")
    });
    eprintln!("{}", cluster.problem().unwrap_or_default());
    plane.start_api();
    eventually("it is watched again", || cluster.problem().is_none());
    eventually("the router leads again", || cluster.is_leader());
    assert!(plane.runtime.block_on(cluster.answers()));
    plane.apply(&volume("pv-3", DRIVER, "pool.third", "home-1"));
    eventually("new objects are seen", || {
        cluster.claim_of("pool.third").is_some()
    });
    eventually("the delayed event arrives", || {
        plane
            .kubectl(&["events", "--for=node/node-2"])
            .contains("told while it was gone")
    });
}

fn hands_over(plane: &Plane, first: &InCluster, agents: &Arc<Agents>) {
    let with_policy = Options {
        lost_after: Some(Duration::from_secs(2)),
        ..options("router-b")
    };
    let second = start(plane, with_policy, agents);
    eventually("another one follows", || second.is_complete());
    for _ in 0..50 {
        assert!(!(first.is_leader() && second.is_leader()), "two lead");
        std::thread::sleep(Duration::from_millis(100));
    }
    assert!(first.is_leader() && !second.is_leader());
    plane.runtime.block_on(first.shut_down());
    assert!(!first.is_leader());
    eventually("the other one leads", || second.is_leader());
    std::thread::sleep(Duration::from_secs(2));
    assert!(
        !first.is_leader(),
        "a router that has resigned does not lead again"
    );
    loses(plane, &second, agents);
    plane.runtime.block_on(second.shut_down());
}

/// By policy: if both the Node and the agent are gone, and not if only one of them is.
fn loses(plane: &Plane, cluster: &InCluster, agents: &Agents) {
    let id = POOL.parse().unwrap();
    agents.silence("node-1");
    eventually("the agent is missed", || {
        let health = ["get", "pool", POOL, "-o", "jsonpath={.status.health}"];
        plane.kubectl(&health) == "Unreachable"
    });
    std::thread::sleep(Duration::from_secs(4));
    assert!(!cluster.is_lost(id), "its Node exists");
    plane.kubectl(&["delete", "node", "node-1"]);
    eventually("the policy marks it as lost", || cluster.is_lost(id));
    let reason = ["get", "pool", POOL, "-o", "jsonpath={.spec.lostReason}"];
    let reason = plane.kubectl(&reason);
    assert!(
        reason.contains("node node-1 and its agent have been gone"),
        "{reason}"
    );
}

/// The number of requests of a kind that the API server has counted.
fn requests(plane: &Plane) -> BTreeMap<String, f64> {
    let mut all = BTreeMap::new();
    for line in plane.kubectl(&["get", "--raw", "/metrics"]).lines() {
        let Some(rest) = line.strip_prefix("apiserver_request_total{") else {
            continue;
        };
        let (labels, value) = rest.rsplit_once("} ").unwrap();
        let label = |name: &str| {
            let from = labels
                .split(&format!("{name}=\""))
                .nth(1)
                .unwrap_or_default();
            from.split('"').next().unwrap_or_default().to_string()
        };
        let key = format!("{} {} {}", label("verb"), label("group"), label("resource"));
        *all.entry(key).or_default() += value.parse::<f64>().unwrap();
    }
    all
}

#[test]
fn requests_to_the_api_server_in_a_minute_are_bounded() {
    const NODES: usize = 200;
    let what = "requests to the API server in a minute";
    let Some(plane) = Plane::start(what) else {
        return;
    };
    plane.apply(include_str!("../../../deploy/chart/crds/pools.yaml"));
    plane.kubectl(&[
        "wait",
        "--for=condition=Established",
        "crd/pools.slackwater.dev",
    ]);
    plane.apply(OBJECTS);
    let agents = Arc::<Agents>::default();
    for n in 0..NODES {
        let id = format!("11111111-2222-4333-8444-{n:012}");
        agents.say(&format!("agent-{n}"), &format!("home-{n}"), &[&id]);
    }
    let usual = |me: &str| Options {
        agent_service: Some(("slackwater".into(), "agents".into())),
        ..Options::new(DRIVER, "slackwater", me)
    };
    let first = start(&plane, usual("router-a"), &agents);
    eventually("all agents have a Pool object", || {
        first.known_pools().len() == NODES
    });
    let second = start(&plane, usual("router-b"), &agents);
    eventually("the second one follows", || second.is_complete());
    std::thread::sleep(Duration::from_secs(60));
    let before = requests(&plane);
    std::thread::sleep(Duration::from_secs(60));
    let after = requests(&plane);
    let mut ours = BTreeMap::new();
    for (key, count) in after {
        let count = count - before.get(&key).copied().unwrap_or(0.0);
        // The API server makes requests of its own: for its Leases, and for its decisions.
        if count > 0.0 {
            eprintln!("{key}: {count} a minute");
            ours.insert(key, count);
        }
    }
    let of = |key: &str| ours.get(key).copied().unwrap_or(0.0);
    let written = of("PATCH slackwater.dev pools");
    assert!(
        written <= 2.0 * NODES as f64,
        "each Pool is written once a minute: {written}"
    );
    assert!(of("LIST slackwater.dev pools") <= 2.0, "nothing is polled");
    assert!(of("LIST  persistentvolumes") <= 4.0 && of("LIST  nodes") <= 4.0);
    plane.runtime.block_on(first.shut_down());
    plane.runtime.block_on(second.shut_down());
}
