//! What is recorded of the population of a claim: an annotation of the claim with what has to survive
//! its attempts, and annotations of the prime claim, which has one attempt after the other.

use ::kube::Resource;
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{OwnerReference, Time};
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};

use super::source::Source;

/// The annotation of the claim: a [`State`] as JSON.
pub(super) const STATE: &str = "slackwater.dev/populate";
/// The beginning of the names of prime claims and their pods.
pub(super) const PRIME_PREFIX: &str = "prime-";
/// The label of prime claims and pods: the UID of the claim.
pub(super) const CLAIM_LABEL: &str = "slackwater.dev/populates";
/// An annotation of prime claims: the UID and the generation of the source.
pub(super) const SOURCE: &str = "slackwater.dev/populate-source";
/// An annotation of prime claims: the UID of the pod of the attempt, or [`CREATING`].
pub(super) const POD: &str = "slackwater.dev/populate-pod";
/// A pod is created, and its UID is not known yet.
pub(super) const CREATING: &str = "creating";
/// An annotation of prime claims: the node that was selected when it was copied from the claim.
pub(super) const NODE: &str = "slackwater.dev/populate-node";
/// Annotations of prime claims: where another attempt can continue.
pub(super) const DURABLE: &str = "slackwater.dev/populate-durable";
pub(super) const VALIDATOR: &str = "slackwater.dev/populate-validator";
/// The annotation by which the scheduler selects the node of a claim, and a provisioner gives it back.
pub(super) const SELECTED_NODE: &str = "volume.kubernetes.io/selected-node";

/// The reason of claims that wait for their turn.
pub(super) const WAITS_FOR_TURN: &str = "WaitForTurn";

/// After this number of failures, only a change of the source begins another attempt.
pub(super) const MAX_FAILURES: u32 = 10;
/// The pause after the first failure, and the longest one.
const FIRST_PAUSE: SignedDuration = SignedDuration::from_secs(10);
const MAX_PAUSE: SignedDuration = SignedDuration::from_mins(10);

/// The population of a claim, across its attempts.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct State {
    /// UID and generation of the source that the rest is about.
    pub(super) source: String,
    #[serde(skip_serializing_if = "is_zero")]
    pub(super) failures: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) failed_at: Option<Time>,
    /// The UID of a pod that has failed, after which the attempt continues on the same prime claim.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) failed_pod: Option<String>,
    /// The UID of the prime claim that is given up.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) given_up: Option<String>,
    /// No other attempt is made before the source is changed.
    #[serde(skip_serializing_if = "is_false")]
    pub(super) is_final: bool,
    /// Why the last attempt has failed.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub(super) message: String,
    /// The digest that the name of an image led to first.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) digest: Option<String>,
    /// Progress, and when it was written.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) received_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) total_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) progress_at: Option<Time>,
    /// When the first progress of the attempt was written, and how many bytes had been received by then.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) progress_since: Option<Time>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) progress_since_bytes: Option<u64>,
    /// A cached snapshot could not be used for the claim, so a pod fills its volume.
    #[serde(skip_serializing_if = "is_false")]
    pub(super) is_uncached: bool,
    /// The claim is bound to its volume, and nothing else is left.
    #[serde(skip_serializing_if = "is_false")]
    pub(super) is_done: bool,
}

fn is_zero(number: &u32) -> bool {
    *number == 0
}

fn is_false(value: &bool) -> bool {
    !value
}

/// A point at which another attempt can continue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Point {
    pub(super) bytes: u64,
    /// A strong ETag.
    pub(super) validator: String,
}

impl State {
    /// That of a claim. What cannot be read counts as nothing, and the attempts are counted from the
    /// beginning: only users who may change the claim can cause that.
    pub(super) fn of(claim: &PersistentVolumeClaim) -> State {
        let text = annotation(claim, STATE);
        text.and_then(|text| serde_json::from_str(text).ok())
            .unwrap_or_default()
    }

    /// The first one of a source.
    pub(super) fn new(source: String) -> State {
        State {
            source,
            ..State::default()
        }
    }

    /// Whether it is about a source, in whatever version.
    pub(super) fn is_of(&self, source: &Source) -> bool {
        let its = self.source.split_once('/').map(|(uid, _)| uid);
        its.is_some() && its == source.metadata.uid.as_deref()
    }

    /// How much of the content was received, as far as both numbers are known. The pod has written both,
    /// so they can be anything.
    pub(super) fn percent(&self) -> Option<u8> {
        let (received, total) = (self.received_bytes?, self.total_bytes?);
        if received > total {
            return None;
        }
        let percent = u128::from(received) * 100 / u128::from(total.max(1));
        u8::try_from(percent).ok()
    }

    /// When the next attempt begins.
    pub(super) fn retry_at(&self) -> Option<Timestamp> {
        let failed_at = self.failed_at.as_ref()?.0;
        let doublings = self.failures.saturating_sub(1).min(16);
        let pause = FIRST_PAUSE.checked_mul(1 << doublings).unwrap_or(MAX_PAUSE);
        failed_at.checked_add(pause.min(MAX_PAUSE)).ok()
    }

    /// Whether an attempt may begin.
    pub(super) fn is_due(&self, now: Timestamp) -> bool {
        self.retry_at().is_none_or(|at| at <= now)
    }
}

/// The name of the prime claim of a claim, and of the pod that fills it.
pub(super) fn prime_name(claim: &PersistentVolumeClaim) -> String {
    format!("{PRIME_PREFIX}{}", uid(claim))
}

pub(super) fn uid<K: Resource>(object: &K) -> &str {
    object.meta().uid.as_deref().unwrap_or_default()
}

pub(super) fn annotation<'a, K: Resource>(object: &'a K, key: &str) -> Option<&'a str> {
    let all = object.meta().annotations.as_ref()?;
    all.get(key).map(String::as_str)
}

pub(super) fn is_leaving<K: Resource>(object: &K) -> bool {
    object.meta().deletion_timestamp.is_some()
}

/// Whether a prime claim or a pod was created for a claim, and not by a user who has given it the name.
pub(super) fn is_of<K: Resource>(object: &K, claim: &PersistentVolumeClaim) -> bool {
    let labels = object.meta().labels.as_ref();
    let label = labels.and_then(|labels| labels.get(CLAIM_LABEL));
    let mut owners = object.meta().owner_references.iter().flatten();
    label.is_some_and(|label| label == uid(claim)) && owners.any(|owner| owner.uid == uid(claim))
}

/// The reference by which prime claim and pod are deleted with the claim.
pub(super) fn owner(claim: &PersistentVolumeClaim) -> OwnerReference {
    OwnerReference {
        api_version: "v1".into(),
        kind: "PersistentVolumeClaim".into(),
        name: claim.metadata.name.clone().unwrap_or_default(),
        uid: uid(claim).into(),
        ..OwnerReference::default()
    }
}

pub(super) fn volume_name(claim: &PersistentVolumeClaim) -> Option<&str> {
    let name = claim.spec.as_ref()?.volume_name.as_deref();
    name.filter(|name| !name.is_empty())
}

pub(super) fn phase(claim: &PersistentVolumeClaim) -> &str {
    let status = claim.status.as_ref();
    status
        .and_then(|status| status.phase.as_deref())
        .unwrap_or_default()
}

pub(super) fn is_bound(claim: &PersistentVolumeClaim) -> bool {
    phase(claim) == "Bound" && volume_name(claim).is_some()
}

pub(super) fn is_block(claim: &PersistentVolumeClaim) -> bool {
    let spec = claim.spec.as_ref();
    spec.and_then(|spec| spec.volume_mode.as_deref()) == Some("Block")
}

pub(super) fn pod_phase(pod: &Pod) -> &str {
    let status = pod.status.as_ref();
    status
        .and_then(|status| status.phase.as_deref())
        .unwrap_or_default()
}

/// The point that is recorded at a prime claim.
pub(super) fn point_of(prime: &PersistentVolumeClaim) -> Option<Point> {
    let bytes = annotation(prime, DURABLE)?.parse().ok()?;
    let validator = annotation(prime, VALIDATOR)?;
    is_strong(validator.as_bytes()).then(|| Point {
        bytes,
        validator: validator.into(),
    })
}

/// Whether bytes are a strong ETag of a usual length: printable ASCII in quotation marks.
pub(super) fn is_strong(validator: &[u8]) -> bool {
    let [b'"', inside @ .., b'"'] = validator else {
        return false;
    };
    inside.len() <= 1024
        && inside
            .iter()
            .all(|byte| (0x21..0x7f).contains(byte) && *byte != b'"')
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::formats::check_with;

    #[test]
    fn the_state_of_a_claim_keeps_its_format() {
        let time: Time = serde_json::from_str("\"2026-01-02T03:04:05Z\"").unwrap();
        let failed = State {
            source: "s-1/3".into(),
            failures: 2,
            failed_at: Some(time.clone()),
            failed_pod: Some("p-1".into()),
            given_up: Some("c-1".into()),
            is_final: true,
            message: "ChecksumMismatch: x".into(),
            digest: Some("sha256:00".into()),
            received_bytes: Some(5),
            total_bytes: Some(10),
            progress_at: Some(time.clone()),
            is_done: true,
            ..State::default()
        };
        let filling = State {
            received_bytes: Some(9),
            progress_at: Some(time.clone()),
            progress_since: Some(time),
            progress_since_bytes: Some(5),
            ..State::new("s-1/3".into())
        };
        let uncached = State {
            is_uncached: true,
            ..State::new("s-1/3".into())
        };
        let expected = vec![
            ("new.json", State::new("s-1/3".into())),
            ("failed.json", failed),
            ("uncached.json", uncached),
            ("filling.json", filling),
        ];
        let read = |bytes: &[u8]| serde_json::from_slice::<State>(bytes).unwrap();
        let write = |state: &State| serde_json::to_vec(state).unwrap();
        check_with("populate-state", expected, read, write);
    }

    #[test]
    fn pauses_grow_from_ten_seconds_to_ten_minutes() {
        let pause = |failures| {
            let state = State {
                failures,
                failed_at: Some(Time(Timestamp::UNIX_EPOCH)),
                ..State::default()
            };
            state.retry_at().unwrap().as_second()
        };
        let pauses: Vec<_> = (1..=10).map(pause).collect();
        assert_eq!(pauses, [10, 20, 40, 80, 160, 320, 600, 600, 600, 600]);
        assert_eq!(pause(u32::MAX), 600);
        assert!(State::default().is_due(Timestamp::UNIX_EPOCH));
    }

    #[test]
    fn a_percentage_is_known_if_both_numbers_are_and_can_be() {
        let percent = |received, total| {
            let state = State {
                received_bytes: received,
                total_bytes: total,
                ..State::default()
            };
            state.percent()
        };
        assert_eq!(percent(Some(0), Some(10)), Some(0));
        assert_eq!(percent(Some(9_999), Some(10_000)), Some(99));
        assert_eq!(percent(Some(u64::MAX), Some(u64::MAX)), Some(100));
        assert_eq!(percent(Some(0), Some(0)), Some(0));
        for (received, total) in [
            (None, Some(10)),
            (Some(5), None),
            (Some(u64::MAX), Some(1)),
            (Some(11), Some(10)),
            (Some(1), Some(0)),
        ] {
            assert_eq!(percent(received, total), None, "{received:?} {total:?}");
        }
    }

    #[test]
    fn only_strong_validators_are_believed() {
        assert!(is_strong(b"\"5ef-1\"") && is_strong(b"\"\""));
        for wrong in [&b"W/\"e\""[..], b"e", b"\"", b"\"a\nb\"", b"\"a\"b\"", b""] {
            assert!(!is_strong(wrong), "{wrong:?}");
        }
        assert!(!is_strong(format!("\"{}\"", "x".repeat(1025)).as_bytes()));
    }
}
