//! A schedule while routers take the leadership from each other in the middle of a pass, while two of them
//! lead, and while clocks jump. The API server is a real one; the test does the work of the snapshot
//! controller and of csi-snapshotter.
//!
//! Each slot has one set at most, whichever routers execute it, and no set is deleted before there are as
//! many newer good ones as are kept.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use http::Method;
use k8s_openapi::jiff::tz::TimeZone;
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use kube::api::{Api, DynamicObject, ListParams, Patch, PatchParams, PostParams};
use kube::core::{ApiResource, GroupVersionKind};
use serde_json::json;
use slackwater::router::Cluster;
use slackwater::router::kube::reconcile::lease::Pace;
use slackwater::router::kube::{AgentReports, InCluster, Options};

use super::POOL;
use super::link::Link;
use crate::kube::api::{Agents, DRIVER, eventually, options};
use crate::kube::plane::Plane;

/// The interval of the slots, in seconds.
const EVERY: i64 = 300;
/// The number of sets that are kept.
const KEPT: usize = 3;
/// How far clocks are set back at most: a schedule takes a settled slot that is more than an hour ahead for
/// one of a wrong clock.
const MAX_BACK: i64 = 40 * 60;

/// How far all clocks are ahead, in seconds.
static WORLD: AtomicI64 = AtomicI64::new(0);
/// How far the clocks of the routers are ahead of that.
static ROUTERS: AtomicI64 = AtomicI64::new(0);

fn world() -> i64 {
    WORLD.load(Ordering::SeqCst)
}

fn router_clock() -> Timestamp {
    let ahead = world() + ROUTERS.load(Ordering::SeqCst);
    Timestamp::now() + SignedDuration::from_secs(ahead)
}

/// What is known of the sets.
#[derive(Default)]
struct Sets {
    good: BTreeSet<String>,
    deleted: BTreeSet<String>,
    wrong: Vec<String>,
}

impl Sets {
    /// A router is about to delete a set.
    fn delete(&mut self, name: &str) {
        let newer = self.good.range(name.to_string()..);
        let newer = newer
            .filter(|one| *one != name && !self.deleted.contains(*one))
            .count();
        if newer < KEPT {
            self.wrong
                .push(format!("{name} is deleted, with {newer} newer ones"));
        }
        self.deleted.insert(name.into());
    }
}

struct Router {
    link: Arc<Link>,
    cluster: Arc<InCluster>,
}

struct World {
    plane: Plane,
    agents: Arc<Agents>,
    sets: Arc<Mutex<Sets>>,
    routers: Vec<Router>,
    started: u32,
    finished: u128,
    /// The greatest value that [`WORLD`] has had.
    farthest: i64,
}

impl World {
    fn start() -> Option<World> {
        let plane = Plane::start("schedules of several routers")?;
        for crd in [
            include_str!("../../../../deploy/chart/crds/pools.yaml"),
            include_str!("../../../../deploy/chart/crds/snapshotschedules.yaml"),
        ] {
            plane.apply(crd);
        }
        plane.apply_snapshot_crds();
        for name in ["pools", "snapshotschedules"] {
            let name = format!("crd/{name}.slackwater.dev");
            plane.kubectl(&["wait", "--for=condition=Established", &name]);
        }
        for namespace in ["slackwater", "shop"] {
            plane.kubectl(&["create", "namespace", namespace]);
        }
        let class = json!({"apiVersion": "snapshot.storage.k8s.io/v1", "kind": "VolumeSnapshotClass",
            "metadata": {"name": "c"}, "driver": DRIVER, "deletionPolicy": "Delete"});
        plane.apply(&class.to_string());
        let schedule = json!({"apiVersion": "slackwater.dev/v1alpha1", "kind": "SnapshotSchedule",
            "metadata": {"name": "s", "namespace": "shop"}, "spec": {"claims": ["data"], "class": "c",
                "every": "5m", "keep": {"last": KEPT}}});
        plane.apply(&schedule.to_string());
        let agents = Arc::<Agents>::default();
        agents.say("node-1", "home-1", &[POOL]);
        // Half a day ago, so that all jumps end before the present: the creation of an object has the
        // real time of the API server.
        WORLD.store(-12 * 60 * 60, Ordering::SeqCst);
        let mut world = World {
            plane,
            agents,
            sets: Arc::default(),
            routers: Vec::new(),
            started: 0,
            finished: 0,
            farthest: world(),
        };
        world.add_router();
        world.add_router();
        Some(world)
    }

    fn add_router(&mut self) {
        let sets = Arc::clone(&self.sets);
        let look = move |method: &Method, path: &str| {
            if let Some((_, name)) = path.split_once("/volumesnapshots/")
                && method == Method::DELETE
            {
                sets.lock().unwrap().delete(name);
            }
        };
        let link = Link::new(world, Box::new(look));
        self.started += 1;
        let options = Options {
            clock: router_clock,
            poll_interval: Duration::from_millis(100),
            // A router that cannot renew its Lease leads for long after another one has taken it over.
            pace: Pace {
                duration: Duration::from_secs(2),
                belief: Duration::from_secs(30),
                every: Duration::from_millis(200),
            },
            ..options(&format!("router-{}", self.started))
        };
        let _inside = self.plane.runtime.enter();
        let client = link.client(self.plane.client());
        let agents = Arc::clone(&self.agents) as Arc<dyn AgentReports>;
        let cluster = InCluster::start(client, options, agents);
        cluster.schedule_snapshots();
        self.routers.push(Router { link, cluster });
    }

    /// The place of a router that leads.
    fn leader(&self) -> usize {
        let leads = |router: &Router| router.cluster.is_leader() && !router.link.is_dead();
        eventually("one router leads", || self.routers.iter().any(leads));
        self.routers.iter().position(leads).unwrap_or_default()
    }

    /// Replaces a router that does not answer any more.
    fn replace(&mut self, place: usize) {
        let dead = self.routers.remove(place);
        dead.link.die_after(0);
        self.plane
            .runtime
            .spawn(async move { dead.cluster.shut_down().await });
        self.add_router();
    }

    fn api(&self, kind: &str) -> Api<DynamicObject> {
        let gvk = GroupVersionKind::gvk("snapshot.storage.k8s.io", "v1", kind);
        let (client, api) = (self.plane.client(), ApiResource::from_gvk(&gvk));
        match kind {
            "VolumeSnapshot" => Api::namespaced_with(client, "shop", &api),
            _ => Api::all_with(client, &api),
        }
    }

    /// All sets. None of them was deleted and is there again.
    fn all(&self) -> Vec<DynamicObject> {
        let api = self.api("VolumeSnapshot");
        let deleted = self.sets.lock().unwrap().deleted.clone();
        let listed = self
            .plane
            .runtime
            .block_on(api.list(&ListParams::default()));
        let listed = listed.unwrap().items;
        assert_eq!(self.sets.lock().unwrap().wrong, Vec::<String>::new());
        // The request for a deletion may be on its way. A set that is made again is not ready.
        let again = |it: &&DynamicObject| {
            let is_ready = it.data["status"]["readyToUse"] == json!(true);
            deleted.contains(it.metadata.name.as_ref().unwrap()) && !is_ready
        };
        let again: Vec<_> = listed.iter().filter(again).collect();
        assert!(again.is_empty(), "executed again: {again:?}");
        listed
    }

    /// All snapshots become ready.
    fn finish(&mut self) {
        for set in self.all() {
            if set.data["status"]["readyToUse"] == json!(true) {
                continue;
            }
            self.finished += 1;
            self.finish_one(&set);
        }
    }

    fn finish_one(&self, set: &DynamicObject) {
        let name = set.metadata.name.clone().unwrap();
        let contents = self.api("VolumeSnapshotContent");
        let content: DynamicObject = serde_json::from_value(json!({
            "apiVersion": "snapshot.storage.k8s.io/v1", "kind": "VolumeSnapshotContent",
            "metadata": {"name": format!("content-{name}"),
                "annotations": {"slackwater.dev/level": "filesystem"}},
            "spec": {"deletionPolicy": "Delete", "driver": DRIVER,
                "source": {"volumeHandle": format!("{POOL}.{POOL}")},
                "volumeSnapshotRef": {"namespace": "shop", "name": name}},
        }))
        .unwrap();
        let handle = format!("{POOL}.{}", uuid::Uuid::from_u128(self.finished));
        let of_content = json!({"status": {"snapshotHandle": handle, "readyToUse": true}});
        let bound = format!("content-{name}");
        let of_set =
            json!({"status": {"boundVolumeSnapshotContentName": bound, "readyToUse": true}});
        let snapshots = self.api("VolumeSnapshot");
        // It is good before a router can see that it is.
        self.sets.lock().unwrap().good.insert(name.clone());
        self.plane.runtime.block_on(async {
            contents
                .create(&PostParams::default(), &content)
                .await
                .unwrap();
            let params = PatchParams::default();
            let patch = Patch::Merge(of_content);
            contents
                .patch_status(&bound, &params, &patch)
                .await
                .unwrap();
            let patch = Patch::Merge(of_set);
            // It may have been deleted by now, which is an error that deletions are checked for.
            let _ = snapshots.patch_status(&name, &params, &patch).await;
        });
    }

    /// Sets all clocks to a minute after the next slot of the time until which they have come, when it is due
    /// for every schedule. Returns the beginning of the name of its set.
    fn next_slot(&mut self) -> String {
        let now = Timestamp::now().as_second();
        let slot = (now + self.farthest).div_euclid(EVERY) * EVERY + EVERY;
        self.farthest = slot + 61 - now;
        WORLD.store(self.farthest, Ordering::SeqCst);
        let slot = Timestamp::from_second(slot)
            .unwrap()
            .to_zoned(TimeZone::UTC);
        slot.strftime("s-%Y%m%d-%H%M-").to_string()
    }

    fn sets_of(&self, slot: &str) -> usize {
        let all = self.all();
        let its = all.iter().filter_map(|it| it.metadata.name.as_ref());
        its.filter(|name| name.starts_with(slot)).count()
    }

    #[track_caller]
    fn is_executed(&self, slot: &str) {
        eventually(&format!("the set {slot} is there"), || {
            self.sets_of(slot) == 1
        });
    }

    fn reason(&self, condition: &str) -> String {
        let path = format!("jsonpath={{.status.conditions[?(@.type==\"{condition}\")].reason}}");
        let what = "snapshotschedules.slackwater.dev/s";
        let words = ["get", "-n", "shop", what, "-o", &path];
        self.plane.try_kubectl(&words).unwrap_or_default()
    }

    /// Waits until one pass has begun and ended since, also if two routers lead.
    fn wait_for_a_pass(&self) {
        let asked = || -> usize {
            let links = self.routers.iter().map(|router| &router.link);
            links.map(|link| link.asked(&Method::GET, "/version")).sum()
        };
        let before = asked();
        eventually("passes with the present clocks", || asked() > before + 4);
    }

    /// Only the sets that are kept are left.
    fn settles(&mut self) {
        self.finish();
        eventually("only what is to be kept is left", || {
            self.all().len() == KEPT
        });
    }
}

/// Numbers that look random, from a seed that is printed.
struct Numbers(u64);

impl Numbers {
    fn new() -> Numbers {
        let seed = std::env::var("PROPTEST_RNG_SEED").ok();
        let seed = seed.and_then(|seed| seed.parse().ok());
        let seed = seed.unwrap_or_else(|| Timestamp::now().as_millisecond().unsigned_abs());
        eprintln!("PROPTEST_RNG_SEED={seed}");
        Numbers(seed)
    }

    fn below(&mut self, most: i64) -> i64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33).cast_signed() % most
    }
}

#[test]
fn each_slot_has_one_set_whichever_routers_execute_it() {
    let Some(mut world) = World::start() else {
        return;
    };
    eventually("the schedule is read", || {
        world.reason("Scheduling") == "Scheduled"
    });
    let mut numbers = Numbers::new();
    a_router_dies_after_each_request(&mut world, &mut numbers);
    two_routers_lead(&mut world);
    nothing_is_deleted_by_clocks_that_differ(&mut world);
    missed_slots_have_one_set(&mut world);
    anything_happens(&mut world, &mut numbers);
    let runtime = &world.plane.runtime;
    for router in &world.routers {
        runtime.block_on(router.cluster.shut_down());
    }
}

/// The leader dies before one of the requests of a slot or of the deletion that follows, and another router
/// goes on. The seed decides whether that is every second one from the first one on, or the others.
fn a_router_dies_after_each_request(world: &mut World, numbers: &mut Numbers) {
    for requests in (numbers.below(2)..16).step_by(2) {
        world.finish();
        let leader = world.leader();
        let slot = world.next_slot();
        world.routers[leader].link.die_after(requests);
        eventually("the leader is dead", || {
            world.routers[leader].link.is_dead()
        });
        world.replace(leader);
        world.is_executed(&slot);
    }
    world.settles();
}

/// The Lease of a router that goes on working is taken over.
fn two_routers_lead(world: &mut World) {
    for _ in 0..2 {
        let leader = world.leader();
        for method in [Method::GET, Method::PUT] {
            world.routers[leader].link.deny(method, "/leases/");
        }
        let lead = || {
            world
                .routers
                .iter()
                .filter(|one| one.cluster.is_leader())
                .count()
        };
        eventually("two routers lead", || lead() == 2);
        for _ in 0..3 {
            let slot = world.next_slot();
            world.is_executed(&slot);
            world.finish();
        }
        world.routers[leader].link.allow_all();
        eventually("one of them leads", || {
            let lead = world.routers.iter().filter(|one| one.cluster.is_leader());
            lead.count() == 1
        });
    }
    world.settles();
}

fn nothing_is_deleted_by_clocks_that_differ(world: &mut World) {
    let slot = world.next_slot();
    world.is_executed(&slot);
    ROUTERS.store(90, Ordering::SeqCst);
    world.wait_for_a_pass();
    let before = world.sets.lock().unwrap().deleted.len();
    world.finish();
    eventually("the difference is reported", || {
        world.reason("Retention") == "ClocksDiffer"
    });
    // The clock that is behind counts, so the next slot is not due for a router that is behind.
    ROUTERS.store(-90, Ordering::SeqCst);
    let slot = world.next_slot();
    world.wait_for_a_pass();
    assert_eq!(world.sets_of(&slot), 0);
    assert_eq!(world.sets.lock().unwrap().deleted.len(), before);
    ROUTERS.store(0, Ordering::SeqCst);
    world.is_executed(&slot);
    world.settles();
}

fn missed_slots_have_one_set(world: &mut World) {
    for place in [0, 0] {
        world.replace(place);
        world.routers.last().unwrap().link.die_after(0);
    }
    let before = world.all().len();
    let slots: Vec<String> = (0..6).map(|_| world.next_slot()).collect();
    for place in [0, 0] {
        world.replace(place);
    }
    world.is_executed(&slots[5]);
    assert_eq!(world.all().len(), before + 1);
    assert!(slots[..5].iter().all(|slot| world.sets_of(slot) == 0));
    world.settles();
}

/// Clocks jump, routers die and lead at once, in an order that the seed decides.
fn anything_happens(world: &mut World, numbers: &mut Numbers) {
    for _ in 0..30 {
        match numbers.below(8) {
            0 | 1 => drop(world.next_slot()),
            2 => {
                let back = world.farthest - numbers.below(MAX_BACK);
                WORLD.store(back, Ordering::SeqCst);
            }
            3 | 4 => world.finish(),
            5 => {
                let leader = world.leader();
                world.routers[leader].link.die_after(numbers.below(12));
                std::thread::sleep(Duration::from_millis(500));
                world.replace(leader);
            }
            6 => {
                let leader = world.leader();
                for router in &world.routers {
                    router.link.allow_all();
                }
                world.routers[leader].link.deny(Method::PUT, "/leases/");
            }
            _ => ROUTERS.store(numbers.below(300) - 150, Ordering::SeqCst),
        }
        std::thread::sleep(Duration::from_millis(numbers.below(1000).unsigned_abs()));
        world.all();
    }
    ROUTERS.store(0, Ordering::SeqCst);
    for router in &world.routers {
        router.link.allow_all();
    }
    for _ in 0..KEPT {
        let slot = world.next_slot();
        world.is_executed(&slot);
        world.finish();
    }
    world.settles();
}
