//! Watches that never end: what they bring is kept in memory, and goes on being answered from
//! there while the API server is gone.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use ::kube::runtime::WatchStreamExt;
use ::kube::runtime::utils::Backoff;
use ::kube::runtime::watcher::{self, Event, watcher};
use ::kube::{Api, Resource};
use futures_util::StreamExt;
use serde::de::DeserializeOwned;

use crate::error::chain;

/// First and longest pause after an error: an API server that returns is found within seconds,
/// and one that is overloaded isn't asked more than 6 times a minute by each watch.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(10));
/// A restart of an API server isn't worth a word.
const FAILURE_LOG_DELAY: Duration = Duration::from_secs(30);

/// How well each watch follows.
#[derive(Debug, Default)]
pub struct WatchStates(Mutex<BTreeMap<&'static str, Watch>>);

#[derive(Debug, Default)]
struct Watch {
    /// It has seen everything once.
    is_complete: bool,
    failing: Option<(Instant, String)>,
}

impl WatchStates {
    /// Why what is in memory may be old or not whole; `None` if it isn't.
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

    /// Whether everything of this kind has been seen once.
    pub fn is_complete(&self, what: &'static str) -> bool {
        let watches = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        watches.get(what).is_some_and(|watch| watch.is_complete)
    }

    /// Watches that don't get through now.
    pub fn failing(&self) -> usize {
        let watches = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        watches
            .values()
            .filter(|watch| watch.failing.is_some())
            .count()
    }

    /// A request outside of a watch has gone through, or not.
    pub(super) fn heard(&self, what: &'static str, answer: Result<(), String>) {
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

    pub(super) fn completed(&self, what: &'static str) {
        let mut watches = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        watches.entry(what).or_default().is_complete = true;
    }
}

/// Pauses between errors, each twice as long as the one before. Something that comes through
/// makes them short again.
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

/// Follows objects for ever. `take` gets each change; between `Init` and `InitDone` come all
/// objects there are, and what isn't among them is gone.
pub(super) async fn watch<K>(
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
                // `Init` only says that a list is about to be asked for.
                if !matches!(event, Event::Init) {
                    following.heard(what, Ok(()));
                }
                let is_complete = matches!(event, Event::InitDone);
                take(event);
                if is_complete {
                    following.completed(what);
                }
            }
            Err(error) => following.heard(what, Err(chain(&error))),
        }
    }
}

/// Objects by name, as a watch brings them.
#[derive(Debug)]
pub(super) struct Store<T> {
    now: BTreeMap<String, T>,
    /// What a new list has brought so far.
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
    /// Takes a change. `read` gives what is kept of an object; nothing of one that isn't ours.
    pub(super) fn take<K: Resource>(
        &mut self,
        event: Event<K>,
        mut read: impl FnMut(K) -> Option<T>,
    ) {
        let name = |object: &K| object.meta().name.clone().unwrap_or_default();
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
            }
            Event::Apply(object) => {
                let key = name(&object);
                match read(object) {
                    Some(value) => self.now.insert(key, value),
                    None => self.now.remove(&key),
                };
            }
            Event::Delete(object) => drop(self.now.remove(&name(&object))),
        }
    }

    /// What there is.
    pub(super) fn now(&self) -> &BTreeMap<String, T> {
        &self.now
    }
}
