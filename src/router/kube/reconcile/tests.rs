//! The loops with objects that fail, hang, disappear and are refused.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use ::kube::core::Status;

use super::*;
use crate::error::Error;

/// Only a test that hangs takes this long.
const TIMEOUT: Duration = Duration::from_secs(60);
const EVERY: Duration = Duration::from_millis(20);

/// A counter that is to reach a goal.
#[derive(Clone, Debug)]
struct Thing {
    name: &'static str,
    count: u32,
    goal: u32,
}

impl fmt::Display for Thing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}

/// The world of a test, and its controller.
#[derive(Default)]
struct World {
    things: Mutex<BTreeMap<&'static str, Thing>>,
    /// Steps of these fail.
    failing: Mutex<BTreeSet<&'static str>>,
    /// Steps of these never end.
    hung: Mutex<BTreeSet<&'static str>>,
    /// Steps of these panic.
    panicking: Mutex<BTreeSet<&'static str>>,
    /// These disappear before their step.
    vanishing: Mutex<BTreeSet<&'static str>>,
    /// Names of all steps that began.
    begun: Mutex<Vec<&'static str>>,
    in_progress: AtomicUsize,
    leads: AtomicBool,
    passes: AtomicUsize,
    resets: AtomicUsize,
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl World {
    fn new(goals: &[(&'static str, u32)]) -> Arc<World> {
        let world = World::default();
        world.leads.store(true, Ordering::Relaxed);
        for (name, goal) in goals {
            let (name, goal) = (*name, *goal);
            let thing = Thing {
                name,
                count: 0,
                goal,
            };
            lock(&world.things).insert(name, thing);
        }
        Arc::new(world)
    }

    fn count(&self, name: &str) -> u32 {
        lock(&self.things).get(name).map_or(0, |thing| thing.count)
    }

    fn begun(&self, name: &str) -> usize {
        lock(&self.begun).iter().filter(|one| **one == name).count()
    }

    fn passes(&self) -> usize {
        self.passes.load(Ordering::Relaxed)
    }
}

/// Counts a step in progress, even if it is dropped.
struct InProgress<'a>(&'a AtomicUsize);

impl Drop for InProgress<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

#[tonic::async_trait]
impl Reconciler for World {
    type Object = Thing;
    type Step = u32;

    async fn observe(&self, thing: Thing) -> Result<Thing> {
        Ok(lock(&self.things).get(thing.name).cloned().unwrap_or(thing))
    }

    fn next(thing: &Thing) -> Next<u32> {
        match thing.count < thing.goal {
            true => Next::Step(thing.count + 1),
            false => Next::Done,
        }
    }

    async fn execute(&self, thing: &Thing, count: u32) -> Result<Outcome> {
        lock(&self.begun).push(thing.name);
        self.in_progress.fetch_add(1, Ordering::Relaxed);
        let _in_progress = InProgress(&self.in_progress);
        let is_among = |names: &Mutex<BTreeSet<_>>| lock(names).contains(thing.name);
        if is_among(&self.hung) {
            std::future::pending::<()>().await;
        }
        assert!(!is_among(&self.panicking), "as the test wants it");
        if is_among(&self.failing) {
            return Err(Error::refused("a step", "the test wants it"));
        }
        if is_among(&self.vanishing) {
            lock(&self.things).remove(thing.name);
        }
        match lock(&self.things).get_mut(thing.name) {
            Some(thing) => thing.count = count,
            None => return Ok(Outcome::Stale),
        }
        Ok(Outcome::Done)
    }
}

#[tonic::async_trait]
impl Controller for World {
    const NAME: &'static str = "things";

    async fn list(&self, _leads_since: Timestamp) -> Option<Vec<Thing>> {
        self.passes.fetch_add(1, Ordering::Relaxed);
        Some(lock(&self.things).values().cloned().collect())
    }

    fn reset(&self) {
        self.resets.fetch_add(1, Ordering::Relaxed);
    }
}

fn begin(world: &Arc<World>, every: Duration, changes: Option<watch::Receiver<()>>) -> JoinSet<()> {
    let of = Arc::clone(world);
    let is_leader = move || of.leads.load(Ordering::Relaxed);
    let mut running = JoinSet::new();
    running.spawn(run(Arc::clone(world), is_leader, Pace { every, changes }));
    running
}

async fn eventually(what: &str, mut check: impl FnMut() -> bool) {
    let began = Instant::now();
    while !check() {
        assert!(began.elapsed() < TIMEOUT, "not within {TIMEOUT:?}: {what}");
        sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test]
async fn an_object_that_fails_again_and_again_stops_no_other() {
    let world = World::new(&[("bad", 1), ("good", 5)]);
    lock(&world.failing).insert("bad");
    let _running = begin(&world, EVERY, None);
    eventually("the good one is done", || world.count("good") == 5).await;
    eventually("many passes", || world.passes() >= 60).await;
    let tried = world.begun("bad");
    assert!((3..=20).contains(&tried), "with growing pauses: {tried}");
    assert_eq!(world.begun("good"), 5);
    lock(&world.failing).clear();
    eventually("it recovers", || world.count("bad") == 1).await;
}

#[tokio::test]
async fn a_step_that_panics_is_a_failed_step() {
    let world = World::new(&[("bad", 1), ("good", 1)]);
    lock(&world.panicking).insert("bad");
    let _running = begin(&world, EVERY, None);
    eventually("it is tried again", || world.begun("bad") >= 3).await;
    assert_eq!(world.count("good"), 1);
    lock(&world.panicking).clear();
    eventually("it recovers", || world.count("bad") == 1).await;
}

#[tokio::test]
async fn a_router_that_loses_its_leadership_during_a_step_drops_it() {
    let world = World::new(&[("slow", 1)]);
    lock(&world.hung).insert("slow");
    let _running = begin(&world, EVERY, None);
    eventually("its step began", || world.begun("slow") == 1).await;
    let passes = world.passes();
    eventually("many passes", || world.passes() >= passes + 10).await;
    assert_eq!(world.begun("slow"), 1, "it is locked while its step runs");
    world.leads.store(false, Ordering::Relaxed);
    eventually("the step is dropped", || {
        world.in_progress.load(Ordering::Relaxed) == 0
    })
    .await;
    lock(&world.hung).clear();
    let resets = || world.resets.load(Ordering::Relaxed);
    eventually("nothing but resets", || resets() >= 10).await;
    assert_eq!(world.begun("slow"), 1);
    world.leads.store(true, Ordering::Relaxed);
    eventually("it leads again, and the lock is gone", || {
        world.count("slow") == 1
    })
    .await;
}

#[tokio::test]
async fn leadership_is_checked_between_decision_and_step() {
    let world = World::new(&[("a", 1)]);
    let thing = lock(&world.things)["a"].clone();
    let checks = AtomicUsize::new(0);
    let has_lost = || {
        checks.fetch_add(1, Ordering::Relaxed);
        false
    };
    step(world.as_ref(), thing, has_lost).await.unwrap();
    assert_eq!((checks.into_inner(), world.begun("a")), (1, 0));
}

#[tokio::test]
async fn an_object_that_disappears_before_its_step_is_no_failure() {
    let world = World::new(&[("gone", 1), ("good", 3)]);
    lock(&world.vanishing).insert("gone");
    let _running = begin(&world, EVERY, None);
    eventually("the other one is done", || world.count("good") == 3).await;
    eventually("more passes", || world.passes() >= 10).await;
    assert_eq!(world.begun("gone"), 1);
    // One of the same name is a new one.
    lock(&world.vanishing).clear();
    let thing = Thing {
        name: "gone",
        count: 0,
        goal: 2,
    };
    lock(&world.things).insert("gone", thing);
    eventually("it is done too", || world.count("gone") == 2).await;
}

#[test]
fn an_object_that_is_gone_is_forgotten_with_its_failures() {
    let mut progress = Progress::new(Duration::from_secs(5));
    let now = Instant::now();
    progress.failing.insert("a".into(), (9, now + TIMEOUT));
    assert!(progress.due(vec!["a"], now).is_empty(), "it is too early");
    assert_eq!(progress.due(vec!["a"], now + TIMEOUT).len(), 1);
    assert!(progress.due(Vec::<&str>::new(), now).is_empty());
    assert_eq!(progress.due(vec!["a"], now).len(), 1, "a new one");
}

#[tokio::test]
async fn a_change_causes_a_pass_before_the_next_poll() {
    let world = World::new(&[("a", 1)]);
    let (changes, receiver) = watch::channel(());
    let _running = begin(&world, 100 * TIMEOUT, Some(receiver));
    sleep(EVERY).await;
    assert_eq!(world.passes(), 0);
    for _ in 0..100 {
        changes.send_replace(());
    }
    eventually("it is done", || world.count("a") == 1).await;
    sleep(2 * CHANGE_DELAY).await;
    assert_eq!(world.passes(), 1, "a hundred changes at once are one pass");
}

#[tokio::test]
async fn what_the_api_server_rejects_as_outdated_is_no_error() {
    let rejected = async |code: u16| {
        let status = Status::failure("as the test wants it", "Reason").with_code(code);
        let error = KubeError::Api(status.boxed());
        written("an object", async { Err::<(), _>(error) }).await
    };
    assert_eq!(rejected(404).await.unwrap(), Outcome::Stale);
    assert_eq!(rejected(409).await.unwrap(), Outcome::Stale);
    assert!(rejected(403).await.is_err());
    let written = written("an object", async { Ok(()) }).await;
    assert_eq!(written.unwrap(), Outcome::Done);
}

/// Decisions in their order, each after one more observation.
struct Script(Vec<Next<()>>);

struct Scripted {
    at: usize,
    next: Next<()>,
}

impl fmt::Display for Scripted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.at)
    }
}

#[tonic::async_trait]
impl Reconciler for Script {
    type Object = Scripted;
    type Step = ();

    async fn observe(&self, object: Scripted) -> Result<Scripted> {
        let Some(next) = self.0.get(object.at).cloned() else {
            return Err(Error::refused("an observation", "the script is over"));
        };
        let at = object.at + 1;
        Ok(Scripted { at, next })
    }

    fn next(object: &Scripted) -> Next<()> {
        object.next.clone()
    }

    async fn execute(&self, _: &Scripted, (): ()) -> Result<Outcome> {
        Ok(Outcome::Done)
    }
}

#[tokio::test]
async fn a_command_takes_an_object_to_its_end() {
    let ends = async |script: Vec<Next<()>>| {
        let begin = Scripted {
            at: 0,
            next: Next::Wait,
        };
        let end = converge(&Script(script), begin).await;
        end.map(|end| end.map(|object| object.at))
    };
    let refused = || Next::Refused("why".to_string());
    let (step, done) = (|| Next::Step(()), || Next::Done);
    let end = ends(vec![step(), Next::Wait, step(), done()]).await;
    assert_eq!(end.unwrap(), Ok(4));
    // What was refused is observed once more.
    let end = ends(vec![refused(), step(), done()]).await;
    assert_eq!(end.unwrap(), Ok(3));
    let end = ends(vec![refused(), refused(), done()]).await;
    assert_eq!(end.unwrap(), Err("why".to_string()));
    assert!(ends(vec![step()]).await.is_err(), "an error ends it");
    let end = ends(std::iter::repeat_with(step).take(MAX_STEPS + 1).collect()).await;
    assert!(end.unwrap().unwrap_err().contains("keeps being changed"));
}
