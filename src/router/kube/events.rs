//! Events, which people see with `kubectl describe`.
//!
//! They go through a bounded queue, so recording an event never waits for the API server. An event that
//! does not fit is counted and not sent. Equal messages about the same object are one event with a
//! count, which is updated at most once a minute.

pub(super) mod warnings;

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use ::kube::api::{Api, DynamicObject, Patch, PatchParams, PostParams};
use ::kube::core::{ApiResource, GroupVersionKind, PartialObjectMeta};
use ::kube::{Client, Error as KubeError};
use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::api::events::v1::{Event, EventSeries};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use k8s_openapi::jiff::Timestamp;
use tokio::sync::mpsc;

use super::{LEASE, Options, Unsent, retried};
use crate::router::cluster::ObjectRef;

/// The length of the queue: more events than one cut over many volumes records.
const QUEUE_LENGTH: usize = 512;
/// An event with a count is updated at most this often.
const REPEAT_INTERVAL: Duration = Duration::from_secs(60);
/// After this time an equal message is a new event. The API server deletes events after an hour.
const SERIES_TIMEOUT: Duration = Duration::from_secs(30 * 60);
/// The delays before a request is sent again after the API server did not answer.
const RETRY_DELAYS: [Duration; 4] = [
    Duration::from_secs(1),
    Duration::from_secs(5),
    Duration::from_secs(20),
    Duration::from_secs(60),
];
/// The API server refuses longer notes.
const NOTE_BYTES: usize = 1024;
/// The namespace of events about objects without a namespace.
const DEFAULT_NAMESPACE: &str = "default";

/// An event to be recorded.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct EventBody {
    pub(super) about: ObjectRef,
    pub(super) is_warning: bool,
    pub(super) reason: &'static str,
    pub(super) message: String,
}

/// The sending end of the queue.
pub struct EventRecorder {
    queue: mpsc::Sender<EventBody>,
    dropped: Arc<AtomicU64>,
}

/// The receiving end of the queue.
pub(super) struct EventQueue {
    body: mpsc::Receiver<EventBody>,
    dropped: Arc<AtomicU64>,
}

pub(super) fn queue() -> (EventRecorder, EventQueue) {
    let (queue, body) = mpsc::channel(QUEUE_LENGTH);
    let dropped = Arc::<AtomicU64>::default();
    let recorder = EventRecorder {
        queue,
        dropped: Arc::clone(&dropped),
    };
    (recorder, EventQueue { body, dropped })
}

impl EventRecorder {
    /// Never waits.
    pub(super) fn record_event(&self, body: EventBody) {
        if self.queue.try_send(body).is_err() {
            self.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// The number of events that were lost.
    pub fn dropped(&self) -> u64 {
        self.dropped.load(Ordering::Relaxed)
    }
}

/// The events that were recorded in the last [`SERIES_TIMEOUT`].
#[derive(Default)]
pub(super) struct Memory(HashMap<EventBody, Recorded>);

/// An event that was sent.
#[derive(Clone, Debug)]
struct Recorded {
    /// Its name and its namespace; `None` while it could not be sent.
    event: Option<(String, String)>,
    first: Instant,
    last: Instant,
    count: i32,
}

/// What is to be done about an event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum EventAction {
    /// Nothing, apart from counting it.
    Count,
    /// Create an object.
    Create,
    /// Set the count of the object with this name and namespace.
    Repeat(String, String, i32),
}

impl Memory {
    /// Decides what is to be done about an event that is recorded now.
    pub(super) fn act(&mut self, body: &EventBody, now: Instant) -> EventAction {
        self.0
            .retain(|_, event| now.duration_since(event.first) < SERIES_TIMEOUT);
        let Some(recorded) = self.0.get_mut(body) else {
            let recorded = Recorded {
                event: None,
                first: now,
                last: now,
                count: 1,
            };
            self.0.insert(body.clone(), recorded);
            return EventAction::Create;
        };
        recorded.count += 1;
        if now.duration_since(recorded.last) < REPEAT_INTERVAL {
            return EventAction::Count;
        }
        recorded.last = now;
        match &recorded.event {
            Some((name, namespace)) => {
                EventAction::Repeat(name.clone(), namespace.clone(), recorded.count)
            }
            None => EventAction::Create,
        }
    }

    fn created(&mut self, body: &EventBody, name: String, namespace: String) {
        if let Some(recorded) = self.0.get_mut(body) {
            recorded.event = Some((name, namespace));
        }
    }
}

/// Sends the events of a queue, for ever.
pub(super) async fn send(client: Client, options: Options, mut queue: EventQueue) {
    let (driver, me, own) = (options.driver, options.me, options.namespace);
    let mut memory = Memory::default();
    while let Some(body) = queue.body.recv().await {
        let act = memory.act(&body, Instant::now());
        let send = || one(&client, (&driver, &me, &own), &body, &act);
        match retried(&RETRY_DELAYS, send).await {
            Ok(Some((name, namespace))) => memory.created(&body, name, namespace),
            Ok(None) => {}
            Err(problem) => {
                queue.dropped.fetch_add(1, Ordering::Relaxed);
                match problem {
                    // The object does not exist, its namespace is being deleted, or it is not
                    // allowed. A later event about it is tried again.
                    Unsent::Rejected(error) => {
                        tracing::debug!(event = ?body, error, "failed to record an event, which the API server rejected");
                    }
                    Unsent::Unanswered(error) => {
                        tracing::warn!(event = ?body, error, "failed to record an event");
                    }
                }
            }
        }
    }
}

/// Sends one event; returns the name and namespace of an object that was created.
pub(super) async fn one(
    client: &Client,
    (driver, me, own): (&str, &str, &str),
    body: &EventBody,
    act: &EventAction,
) -> Result<Option<(String, String)>, KubeError> {
    match act {
        EventAction::Count => Ok(None),
        EventAction::Repeat(name, namespace, count) => {
            let series = EventSeries {
                count: *count,
                last_observed_time: MicroTime(Timestamp::now()),
            };
            let patch = Patch::Merge(serde_json::json!({ "series": series }));
            let api = Api::<Event>::namespaced(client.clone(), namespace);
            api.patch(name, &PatchParams::default(), &patch).await?;
            Ok(None)
        }
        EventAction::Create => {
            let object = reference(client, own, &body.about).await?;
            let namespace = object
                .namespace
                .clone()
                .unwrap_or_else(|| DEFAULT_NAMESPACE.into());
            let event = event(body, object, driver, me);
            let api = Api::<Event>::namespaced(client.clone(), &namespace);
            let created = api.create(&PostParams::default(), &event).await?;
            let name = created.metadata.name.unwrap_or_default();
            Ok(Some((name, namespace)))
        }
    }
}

fn event(body: &EventBody, object: ObjectReference, driver: &str, me: &str) -> Event {
    let namespace = object
        .namespace
        .clone()
        .unwrap_or_else(|| DEFAULT_NAMESPACE.into());
    let type_ = if body.is_warning { "Warning" } else { "Normal" };
    let stem: String = object
        .name
        .as_deref()
        .unwrap_or_default()
        .chars()
        .take(200)
        .collect();
    Event {
        metadata: ::kube::api::ObjectMeta {
            name: Some(format!("{stem}.{}", uuid::Uuid::new_v4().simple())),
            namespace: Some(namespace),
            ..Default::default()
        },
        action: Some(body.reason.into()),
        reason: Some(body.reason.into()),
        note: Some(cut(&body.message, NOTE_BYTES)),
        type_: Some(type_.into()),
        event_time: Some(MicroTime(Timestamp::now())),
        regarding: Some(object),
        reporting_controller: Some(driver.into()),
        reporting_instance: Some(me.into()),
        ..Event::default()
    }
}

/// Shortens a text to a number of bytes, between characters.
fn cut(text: &str, bytes: usize) -> String {
    if text.len() <= bytes {
        return text.into();
    }
    let room = bytes - "...".len();
    let end = (0..=room).rev().find(|at| text.is_char_boundary(*at));
    format!("{}...", &text[..end.unwrap_or(0)])
}

/// The reference to the object in an event. It contains the UID, without which `kubectl describe` does
/// not show the event.
async fn reference(
    client: &Client,
    own: &str,
    about: &ObjectRef,
) -> Result<ObjectReference, KubeError> {
    let (api_version, kind) = match about {
        ObjectRef::Claim(_) => ("v1", "PersistentVolumeClaim"),
        ObjectRef::Snapshot(_) => ("snapshot.storage.k8s.io/v1", "VolumeSnapshot"),
        ObjectRef::Group(_) => (
            "groupsnapshot.storage.k8s.io/v1beta1",
            "VolumeGroupSnapshot",
        ),
        ObjectRef::Node(_) => ("v1", "Node"),
        ObjectRef::Pool(_) => ("slackwater.dev/v1alpha1", "Pool"),
        ObjectRef::Schedule(_) => ("slackwater.dev/v1alpha1", "SnapshotSchedule"),
        ObjectRef::Revert(_) => ("slackwater.dev/v1alpha1", "VolumeRevert"),
        ObjectRef::Router => ("coordination.k8s.io/v1", "Lease"),
    };
    let (namespace, name) = match about {
        ObjectRef::Claim(path)
        | ObjectRef::Snapshot(path)
        | ObjectRef::Group(path)
        | ObjectRef::Schedule(path)
        | ObjectRef::Revert(path) => path.split_once('/').unwrap_or(("", path)),
        ObjectRef::Node(name) => ("", name.as_str()),
        ObjectRef::Pool(id) => ("", &*id.to_string()),
        ObjectRef::Router => (own, LEASE),
    };
    let (group, version) = api_version.split_once('/').unwrap_or(("", api_version));
    let resource = ApiResource::from_gvk(&GroupVersionKind::gvk(group, version, kind));
    type Any = PartialObjectMeta<DynamicObject>;
    let api = match namespace {
        "" => Api::<Any>::all_with(client.clone(), &resource),
        _ => Api::<Any>::namespaced_with(client.clone(), namespace, &resource),
    };
    let meta = api.get(name).await?.metadata;
    Ok(ObjectReference {
        api_version: Some(api_version.into()),
        kind: Some(kind.into()),
        name: Some(name.into()),
        namespace: Some(namespace).filter(|n| !n.is_empty()).map(Into::into),
        uid: meta.uid,
        ..ObjectReference::default()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn body(message: &str) -> EventBody {
        EventBody {
            about: ObjectRef::Claim("shop/db".into()),
            is_warning: true,
            reason: "NoRoom",
            message: message.into(),
        }
    }

    #[test]
    fn the_same_words_are_one_event_and_sent_once_a_minute() {
        let mut memory = Memory::default();
        let begun = Instant::now();
        let at = |seconds| begun + Duration::from_secs(seconds);
        assert_eq!(memory.act(&body("a"), at(0)), EventAction::Create);
        memory.created(&body("a"), "db.1".into(), "shop".into());
        assert_eq!(
            memory.act(&body("b"), at(0)),
            EventAction::Create,
            "another message"
        );
        for second in 1..60 {
            assert_eq!(memory.act(&body("a"), at(second)), EventAction::Count);
        }
        let repeat = EventAction::Repeat("db.1".into(), "shop".into(), 61);
        assert_eq!(memory.act(&body("a"), at(60)), repeat);
        assert_eq!(memory.act(&body("a"), at(61)), EventAction::Count);
        // An event that could not be sent is created later, not more often.
        assert_eq!(memory.act(&body("b"), at(30)), EventAction::Count);
        assert_eq!(memory.act(&body("b"), at(60)), EventAction::Create);
        assert_eq!(memory.act(&body("a"), at(60 * 60)), EventAction::Create);
        assert_eq!(memory.0.len(), 1, "what is old is forgotten");
    }

    #[test]
    fn what_does_not_fit_is_counted_and_no_call_waits() {
        let (recorder, _queue) = queue();
        for n in 0..QUEUE_LENGTH + 3 {
            recorder.record_event(body(&n.to_string()));
        }
        assert_eq!(recorder.dropped(), 3);
    }

    #[test]
    fn long_words_are_cut_between_characters() {
        assert_eq!(cut("short", 8), "short");
        assert_eq!(cut("ääääää", 8), "ää...");
        assert_eq!(cut(&"x".repeat(2000), NOTE_BYTES).len(), NOTE_BYTES);
    }
}
