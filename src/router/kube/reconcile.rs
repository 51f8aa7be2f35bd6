//! The reconciler: the one pattern of what the leading router does in loops. Two loops have no object and
//! no state, so they are simpler: `resolve/reported.rs` resolves the groups that agents report as in
//! doubt, and `events/warnings.rs` records events.
//!
//! A [`Reconciler`] brings objects of one kind into the state that they should have. It has three
//! parts: `observe` reads an object, `next` decides what is to be done, and `execute` does that one
//! step. [`run`] is the loop of the leading router over all objects that a [`Controller`] lists;
//! [`converge`] is the loop of a command that a person runs, over one object and to its end.
//!
//! Rules for a reconciler:
//!
//! - `next` is a pure function of the observed object. It remembers nothing, reads no clock, and
//!   sends no request. So a router or a command that was interrupted anywhere is continued by the
//!   next one, and each decision is tested without a cluster. Orphans are found by comparing all
//!   pools with all that names their contents; so their pure function, `plan` in
//!   `orphans/deletion.rs`, decides in `list`, and what it decides are the objects.
//! - `execute` does one step. It may go on with the next one if it observes the object again and
//!   decides by `next`. A step may be interrupted at any point and may be done twice, because
//!   the router can crash or lose its leadership during it. A step that would do harm if its object
//!   has changed since it was observed names the object by uid and version ([`written`]).
//! - An object that has changed or is gone when its step arrives is no error ([`Outcome::Stale`]):
//!   it is observed again.
//! - What cannot be observed completely is not decided: `list` returns `None` until all that it
//!   needs has been read, and an error of `observe` is a failed step.
//! - State of a later step is kept in objects and records, never in the reconciler. A reconciler
//!   may keep what is only for people: since when something is so, and which events it has
//!   recorded. It may also wait until it has seen something itself for some time, as the controllers
//!   of fences do: a new leader then waits for the whole time again, which is always safe.
//! - A status is written as a step too, by [`write_status`], with conditions of
//!   [`with_transitions`].
//!
//! What [`run`] provides:
//!
//! - **Leadership.** Only the leader lists and executes. Leadership is checked again immediately
//!   before each step. When it is lost, steps in progress are dropped at the next pass, and all that
//!   the loop remembers is forgotten. A controller that polls every 5 s so stops 25 s after its last
//!   renewal of the Lease; another router takes the Lease over after 30 s.
//! - **When.** It makes a pass over all objects once per poll interval, and half a second after a
//!   change of watched objects, if the controller has a channel of changes.
//! - **A lock for each object.** While a step of an object is in progress, no other is begun. Steps of
//!   different objects run at the same time, at most [`MAX_STEPS_AT_ONCE`].
//! - **Failures.** An object whose step fails is tried again, first in the next pass, then after
//!   pauses that double up to a minute. No other object waits for it. One warning per pass names the
//!   first failure and the number of others.
//!
//! | file | content |
//! |---|---|
//! | `lease` | the election of the leading router |
//! | `watches`, `crd_watch` | watches that keep objects in memory |
//! | `conditions` | conditions of a status |
//! | `retry` | requests that are repeated while the API server does not answer |

mod conditions;
pub(super) mod crd_watch;
pub mod lease;
pub(super) mod retry;
#[cfg(test)]
mod tests;
pub mod watches;

use std::collections::{BTreeMap, HashMap};
use std::fmt::{Debug, Display};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ::kube::Error as KubeError;
use ::kube::api::{Api, DeleteParams, Patch, PatchParams, Preconditions};
use k8s_openapi::jiff::Timestamp;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokio::sync::{Semaphore, watch};
use tokio::task::{Id, JoinError, JoinSet};
use tokio::time::{MissedTickBehavior, interval_at, sleep};

use super::ask;
use crate::error::{Result, chain};
pub(super) use conditions::with_transitions;

/// Steps of one controller that run at the same time.
const MAX_STEPS_AT_ONCE: usize = 8;
/// The longest pause before the failed step of an object is tried again.
const MAX_RETRY_DELAY: Duration = Duration::from_secs(60);
/// From a change to the pass that it causes, so that many changes at once cause one pass.
const CHANGE_DELAY: Duration = Duration::from_millis(500);
/// A PersistentVolume needs seven steps to be adopted. Sidecars change it in between, and then some
/// steps are done again.
const MAX_STEPS: usize = 100;
/// Between two observations by a command of something that another process has to do.
pub(super) const POLL_INTERVAL: Duration = Duration::from_millis(500);

/// What is to be done about an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Next<S> {
    Step(S),
    /// Nothing, until something else has happened.
    Wait,
    /// Nothing: the object is as it should be.
    Done,
    /// Nothing, although the object is not as it should be, for this reason.
    Refused(String),
}

/// What a step came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    /// It was done.
    Done,
    /// It was not done, because the object has changed since it was observed, or is gone.
    Stale,
}

/// Brings objects of one kind into the state that they should have.
#[tonic::async_trait]
pub(super) trait Reconciler: Send + Sync {
    /// An object, and everything that is known for the decision about it. It is displayed as its
    /// name, which its lock and the log go by.
    type Object: Display + Send + Sync;
    /// A change.
    type Step: Send;

    /// Reads what is not known of an object yet, or may have changed. Without an implementation,
    /// the object is as it was listed.
    async fn observe(&self, object: Self::Object) -> Result<Self::Object> {
        Ok(object)
    }

    /// Decides what is to be done.
    fn next(object: &Self::Object) -> Next<Self::Step>;

    /// Does a step.
    async fn execute(&self, object: &Self::Object, step: Self::Step) -> Result<Outcome>;
}

/// A reconciler that the leading router runs.
#[tonic::async_trait]
pub(super) trait Controller:
    Reconciler<Object: 'static, Step: 'static> + Sized + 'static
{
    /// Its name in the log.
    const NAME: &'static str;

    /// All objects of its kind; `None` while they are not known completely. `leads_since` is the
    /// first pass of this router as the leader.
    async fn list(&self, leads_since: Timestamp) -> Option<Vec<Self::Object>>;

    /// Reports that nothing is done about an object, and why.
    async fn refuse(&self, _object: &Self::Object, _why: String) -> Result<()> {
        Ok(())
    }

    /// Resets the state that only a leader has. Called while this router is not the leader.
    fn reset(&self) {}
}

/// When a controller makes a pass.
pub(super) struct Pace {
    /// The poll interval.
    pub(super) every: Duration,
    /// Changes that cause a pass before the next poll.
    pub(super) changes: Option<watch::Receiver<()>>,
}

impl Pace {
    async fn changed(&mut self) {
        if let Some(changes) = &mut self.changes
            && changes.changed().await.is_ok()
        {
            // The change is not forgotten if this is dropped during the delay.
            changes.mark_changed();
            sleep(CHANGE_DELAY).await;
            changes.mark_unchanged();
            return;
        }
        std::future::pending::<()>().await;
    }
}

/// Runs a controller for ever.
pub(super) async fn run<C: Controller>(
    controller: Arc<C>,
    is_leader: impl Fn() -> bool + Clone + Send + Sync + 'static,
    mut pace: Pace,
) {
    let mut leads_since = None;
    let mut progress = Progress::new(pace.every);
    let mut steps = JoinSet::new();
    let permits = Arc::new(Semaphore::new(MAX_STEPS_AT_ONCE));
    let mut poll = interval_at((Instant::now() + pace.every).into(), pace.every);
    poll.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            Some(ended) = steps.join_next_with_id() => {
                progress.ended(ended);
                continue;
            }
            _ = poll.tick() => {}
            () = pace.changed() => {}
        }
        if !is_leader() {
            steps.shutdown().await;
            progress = Progress::new(pace.every);
            leads_since = None;
            controller.reset();
            continue;
        }
        progress.log_failures(C::NAME);
        let since = *leads_since.get_or_insert_with(Timestamp::now);
        let Some(objects) = controller.list(since).await else {
            continue;
        };
        for (name, object) in progress.due(objects, Instant::now()) {
            let controller = Arc::clone(&controller);
            let (permits, is_leader) = (Arc::clone(&permits), is_leader.clone());
            let step = steps.spawn(async move {
                // The semaphore is never closed.
                let _permit = permits.acquire().await;
                step(controller.as_ref(), object, is_leader).await
            });
            progress.busy.insert(step.id(), name);
        }
    }
}

/// Observes one object, and does what is to be done about it.
async fn step<C: Controller>(
    controller: &C,
    object: C::Object,
    is_leader: impl Fn() -> bool + Send + Sync,
) -> Result<()> {
    let object = controller.observe(object).await?;
    match C::next(&object) {
        Next::Step(step) if is_leader() => controller.execute(&object, step).await.map(drop),
        Next::Refused(why) if is_leader() => controller.refuse(&object, why).await,
        Next::Step(_) | Next::Refused(_) | Next::Wait | Next::Done => Ok(()),
    }
}

/// What the loop remembers of objects, by their names.
struct Progress {
    every: Duration,
    /// Those with a step in progress.
    busy: HashMap<Id, String>,
    /// Those whose last step has failed: how many times in a row, and when to try again.
    failing: BTreeMap<String, (u32, Instant)>,
    /// Names and errors since the last pass.
    failures: Vec<(String, String)>,
}

impl Progress {
    fn new(every: Duration) -> Progress {
        Progress {
            every,
            busy: HashMap::new(),
            failing: BTreeMap::new(),
            failures: Vec::new(),
        }
    }

    /// Those of all objects that have no step in progress and are not to be tried again later. An
    /// object that is gone is forgotten.
    fn due<O: Display>(&mut self, objects: Vec<O>, now: Instant) -> BTreeMap<String, O> {
        let objects = objects.into_iter();
        let mut objects: BTreeMap<String, O> =
            objects.map(|object| (object.to_string(), object)).collect();
        self.failing.retain(|name, _| objects.contains_key(name));
        for name in self.busy.values() {
            objects.remove(name);
        }
        let later = |name: &String| self.failing.get(name).is_some_and(|(_, at)| *at > now);
        objects.retain(|name, _| !later(name));
        objects
    }

    fn ended(&mut self, ended: std::result::Result<(Id, Result<()>), JoinError>) {
        let (step, problem) = match ended {
            Ok((step, Ok(()))) => (step, None),
            Ok((step, Err(error))) => (step, Some(chain(&error))),
            Err(error) => (error.id(), Some(chain(&error))),
        };
        let Some(name) = self.busy.remove(&step) else {
            return;
        };
        let Some(problem) = problem else {
            self.failing.remove(&name);
            return;
        };
        let times = self.failing.get(&name).map_or(0, |(times, _)| *times);
        // The first time half an interval, so that it is tried again at the next poll.
        let delay = self.every / 2 * 2_u32.saturating_pow(times.min(16));
        let retry_at = Instant::now() + delay.min(MAX_RETRY_DELAY.max(self.every));
        self.failing.insert(name.clone(), (times + 1, retry_at));
        self.failures.push((name, problem));
    }

    fn log_failures(&mut self, controller: &'static str) {
        let failures = std::mem::take(&mut self.failures);
        if let Some((object, error)) = failures.first() {
            let more = failures.len() - 1;
            tracing::warn!(
                controller,
                object,
                error,
                more,
                "failed to reconcile objects"
            );
        }
    }
}

/// Takes one object as far as it can be taken, without any leadership, for a person who waits: the
/// object as it is when nothing is left to be done, or the reason why something is. An error of a
/// step ends it.
pub(super) async fn converge<R: Reconciler>(
    reconciler: &R,
    mut object: R::Object,
) -> Result<Result<R::Object, String>> {
    let mut was_refused = false;
    for _ in 0..MAX_STEPS {
        object = reconciler.observe(object).await?;
        let outcome = match R::next(&object) {
            Next::Step(step) => reconciler.execute(&object, step).await?,
            Next::Done => return Ok(Ok(object)),
            Next::Refused(why) if was_refused => return Ok(Err(why)),
            // Another process may have done a step between the reads of one observation.
            Next::Refused(_) => {
                was_refused = true;
                Outcome::Stale
            }
            Next::Wait => Outcome::Stale,
        };
        if outcome == Outcome::Stale {
            sleep(POLL_INTERVAL).await;
        }
    }
    Ok(Err(
        "it keeps being changed by someone else; run the command again".into(),
    ))
}

/// Does a write of a step. The API server answers that an object has another version, exists
/// already or is gone: then what was observed has changed.
pub(super) async fn written<T>(
    what: &str,
    write: impl Future<Output = Result<T, KubeError>> + Send,
) -> Result<Outcome> {
    let write = async {
        match write.await {
            Ok(_) => Ok(Outcome::Done),
            Err(KubeError::Api(status)) if status.code == 409 || status.code == 404 => {
                Ok(Outcome::Stale)
            }
            Err(error) => Err(error),
        }
    };
    ask(what, write).await
}

/// Deletes only this object, and only in this version.
pub(super) fn only(uid: Option<String>, resource_version: Option<String>) -> DeleteParams {
    DeleteParams {
        preconditions: Some(Preconditions {
            uid,
            resource_version,
        }),
        ..DeleteParams::default()
    }
}

/// Writes fields of an object.
pub(super) async fn patch<K: Clone + Debug + DeserializeOwned>(
    api: &Api<K>,
    what: &str,
    name: &str,
    fields: Value,
) -> Result<Outcome> {
    let (params, patch) = (PatchParams::default(), Patch::Merge(fields));
    written(what, api.patch(name, &params, &patch)).await
}

/// Writes the status of an object. The rest of the object stays as it is.
pub(super) async fn write_status<K: Clone + Debug + DeserializeOwned>(
    api: &Api<K>,
    what: &str,
    name: &str,
    status: &(impl Serialize + Sync),
) -> Result<Outcome> {
    let patch = Patch::Merge(json!({ "status": status }));
    let params = PatchParams::default();
    written(what, api.patch_status(name, &params, &patch)).await
}
