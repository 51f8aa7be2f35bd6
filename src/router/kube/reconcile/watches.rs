//! Watches that never end. The objects are kept in memory, from where they are available while the API
//! server is away.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use ::kube::api::ListParams;
use ::kube::runtime::WatchStreamExt;
use ::kube::runtime::utils::Backoff;
use ::kube::runtime::watcher::{self, Event, watcher};
use ::kube::{Api, Resource};
use futures_util::StreamExt;
use serde::de::DeserializeOwned;
use tokio::time::timeout;

use crate::error::chain;
use crate::router::kube::API_TIMEOUT;

/// The first and the longest pause after an error. The watch resumes within seconds after the API server
/// returns, and an overloaded API server gets at most 6 requests a minute from each watch.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(10));
/// An outage is reported after this time. The restart of an API server is shorter.
const FAILURE_LOG_DELAY: Duration = Duration::from_secs(30);

/// Between two looks for a CRD that the cluster does not have.
const CRD_INTERVAL: Duration = Duration::from_secs(60);

/// Waits until the cluster has the CRD of a kind, which Helm does not install with an upgrade.
pub(in crate::router::kube) async fn until_served<K>(api: &Api<K>, what: &str)
where
    K: Clone + DeserializeOwned + Debug,
{
    let first = ListParams::default().limit(1);
    let mut is_reported = false;
    while !matches!(timeout(API_TIMEOUT, api.list(&first)).await, Ok(Ok(_))) {
        if !std::mem::replace(&mut is_reported, true) {
            tracing::info!(
                what,
                "waiting until they can be listed; their CRD is in the folder crds of the chart"
            );
        }
        tokio::time::sleep(CRD_INTERVAL).await;
    }
}

/// The state of each watch.
#[derive(Debug, Default)]
pub struct WatchStates(Mutex<BTreeMap<&'static str, Watch>>);

#[derive(Debug, Default)]
struct Watch {
    /// All objects have been read once.
    is_complete: bool,
    failing: Option<(Instant, String)>,
}

impl WatchStates {
    /// Why the objects in memory may be outdated or incomplete; `None` if they are not.
    pub fn problem(&self) -> Option<String> {
        let watches = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        watches.iter().find_map(|(what, watch)| {
            let failing = watch.failing.as_ref();
            let long = failing.filter(|(since, _)| since.elapsed() >= FAILURE_LOG_DELAY);
            match (long, failing, watch.is_complete) {
                (Some((since, error)), _, _) => Some(format!(
                    "watching {what} has failed for {} s: {error}",
                    since.elapsed().as_secs()
                )),
                (None, Some((_, error)), false) => Some(format!("cannot read {what}: {error}")),
                (None, None, false) => Some(format!("{what} are not completely read yet")),
                (None, _, true) => None,
            }
        })
    }

    /// Whether all objects of this kind have been read once.
    pub fn is_complete(&self, what: &'static str) -> bool {
        let watches = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        watches.get(what).is_some_and(|watch| watch.is_complete)
    }

    /// The number of watches that are failing now.
    pub fn failing(&self) -> usize {
        let watches = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        watches
            .values()
            .filter(|watch| watch.failing.is_some())
            .count()
    }

    /// Takes the result of a request, of a watch or of something else that is reported with them.
    pub(in crate::router::kube) fn record_answer(
        &self,
        what: &'static str,
        answer: Result<(), String>,
    ) {
        let mut watches = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let watch = watches.entry(what).or_default();
        match answer {
            Ok(()) => {
                if let Some((since, _)) = watch.failing.take() {
                    let seconds = since.elapsed().as_secs();
                    tracing::info!(resource = what, seconds, "resumed watching the API server");
                }
            }
            Err(error) => {
                if watch.failing.is_none() {
                    tracing::warn!(resource = what, error, "failed to watch the API server");
                }
                let since = watch
                    .failing
                    .take()
                    .map_or_else(Instant::now, |(since, _)| since);
                watch.failing = Some((since, error));
            }
        }
    }

    pub(in crate::router::kube) fn completed(&self, what: &'static str) {
        let mut watches = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        watches.entry(what).or_default().is_complete = true;
    }
}

/// Pauses between errors, each twice as long as the one before. After a success they are short again.
struct ErrorBackoff(Duration);

impl Iterator for ErrorBackoff {
    type Item = Duration;

    fn next(&mut self) -> Option<Duration> {
        let pause = self.0;
        self.0 = (pause * 2).min(BACKOFF.1);
        Some(pause)
    }
}

impl Backoff for ErrorBackoff {
    fn reset(&mut self) {
        self.0 = BACKOFF.0;
    }
}

/// Watches objects for ever. `take` gets each change. Between `Init` and `InitDone` it gets all objects
/// that exist; an object that is not among them is gone.
pub(in crate::router::kube) async fn watch<K>(
    api: Api<K>,
    config: watcher::Config,
    what: &'static str,
    following: Arc<WatchStates>,
    mut take: impl FnMut(Event<K>),
) where
    K: Resource + Clone + DeserializeOwned + Debug + Send + 'static,
{
    following
        .0
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .entry(what)
        .or_default();
    let mut changes = std::pin::pin!(watcher(api, config).backoff(ErrorBackoff(BACKOFF.0)));
    while let Some(change) = changes.next().await {
        match change {
            Ok(event) => {
                // `Init` only means that a list is about to be requested.
                if !matches!(event, Event::Init) {
                    following.record_answer(what, Ok(()));
                }
                let is_complete = matches!(event, Event::InitDone);
                take(event);
                if is_complete {
                    following.completed(what);
                }
            }
            Err(error) => following.record_answer(what, Err(chain(&error))),
        }
    }
}

/// The objects of a watch, by name, or by "namespace/name".
#[derive(Debug)]
pub(in crate::router::kube) struct Store<T> {
    now: BTreeMap<String, T>,
    /// The part of a new list that was read so far.
    coming: Option<BTreeMap<String, T>>,
}

impl<T> Default for Store<T> {
    fn default() -> Store<T> {
        Store {
            now: BTreeMap::new(),
            coming: None,
        }
    }
}

impl<T> Store<T> {
    /// Takes a change. `read` returns what is kept of an object; `None` for an object that is not
    /// kept. Returns whether an object was added, removed, or differs by `is_same` from what was
    /// kept of it; after a new list always true.
    pub(in crate::router::kube) fn take<K: Resource>(
        &mut self,
        event: Event<K>,
        mut read: impl FnMut(K) -> Option<T>,
        is_same: impl Fn(&T, &T) -> bool,
    ) -> bool {
        let name = |object: &K| {
            let meta = object.meta();
            let name = meta.name.clone().unwrap_or_default();
            match &meta.namespace {
                Some(namespace) => format!("{namespace}/{name}"),
                None => name,
            }
        };
        match event {
            Event::Init => self.coming = Some(BTreeMap::new()),
            Event::InitApply(object) => {
                let key = name(&object);
                if let (Some(coming), Some(value)) = (self.coming.as_mut(), read(object)) {
                    coming.insert(key, value);
                }
            }
            Event::InitDone => {
                if let Some(coming) = self.coming.take() {
                    self.now = coming;
                }
                return true;
            }
            Event::Apply(object) => {
                let key = name(&object);
                let Some(value) = read(object) else {
                    return self.now.remove(&key).is_some();
                };
                let is_known = self.now.get(&key).is_some_and(|old| is_same(old, &value));
                self.now.insert(key, value);
                return !is_known;
            }
            Event::Delete(object) => return self.now.remove(&name(&object)).is_some(),
        }
        false
    }

    /// The objects.
    pub(in crate::router::kube) fn now(&self) -> &BTreeMap<String, T> {
        &self.now
    }
}
