//! The sets of a schedule: each is a group snapshot, or a snapshot of a single claim.

use std::collections::BTreeSet;

use ::kube::ResourceExt;
use ::kube::api::DynamicObject;
use jiff::{SignedDuration, Timestamp};
use serde_json::{Value, json};

use super::names::Names;
use super::object::SnapshotSchedule;
use super::retention::State;
use super::spec::ScheduleTarget;
use crate::model::Level;

/// The label of a set: the UID of its schedule.
pub(super) const SCHEDULE_UID: &str = "slackwater.dev/schedule-uid";
/// The annotation of a set: the name of its schedule.
const SCHEDULE: &str = "slackwater.dev/schedule";

/// A set that was created longer before its slot is one of a wrong clock: it has not what it is named for.
const MAX_EARLY: SignedDuration = SignedDuration::from_mins(1);

/// A set of a schedule.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Set {
    pub(super) name: String,
    /// The claim; empty for a group.
    pub(super) claim: String,
    pub(super) slot: Timestamp,
    pub(super) uid: String,
    pub(super) version: String,
    pub(super) created: Timestamp,
    /// The VolumeSnapshotContent or VolumeGroupSnapshotContent.
    pub(super) content: Option<String>,
    /// Good means ready, until the members are read.
    pub(super) state: State,
    /// What snapshot-controller or csi-snapshotter has reported.
    pub(super) error: Option<String>,
    /// The level that was reached, once it is read.
    pub(super) level: Option<Level>,
    /// The handles of its volumes, once they are read.
    pub(super) volumes: BTreeSet<String>,
    /// Why it must stay, once that is read.
    pub(super) used: Option<String>,
}

/// A text in an object.
pub(super) fn text<'a>(object: &'a DynamicObject, path: &str) -> Option<&'a str> {
    object.data.pointer(path).and_then(Value::as_str)
}

impl Set {
    /// A set of the schedule with these names; `None` for any other object, whatever its labels say.
    pub(super) fn read(object: &DynamicObject, names: &Names, is_group: bool) -> Option<Set> {
        if object.labels().get(SCHEDULE_UID) != Some(&names.uid) {
            return None;
        }
        let claim = text(object, "/spec/source/persistentVolumeClaimName");
        // A group that was not taken by a schedule may have no selector.
        if is_group && object.data.pointer("/spec/source/selector").is_none() {
            return None;
        }
        let claim = match is_group {
            true => "",
            false => claim.filter(|claim| !claim.is_empty())?,
        };
        let name = object.metadata.name.clone()?;
        let slot = names.slot(&name, claim)?;
        let bound = match is_group {
            true => "/status/boundVolumeGroupSnapshotContentName",
            false => "/status/boundVolumeSnapshotContentName",
        };
        let created = object.metadata.creation_timestamp.as_ref()?.0;
        if slot.duration_since(created) > MAX_EARLY {
            return None;
        }
        let content = text(object, bound).filter(|name| !name.is_empty());
        let ready = object.data.pointer("/status/readyToUse");
        let state = match ready.and_then(Value::as_bool) {
            _ if object.metadata.deletion_timestamp.is_some() => State::Leaving,
            Some(true) if content.is_some() => State::Good { is_at_level: true },
            _ => State::Unready,
        };
        Some(Set {
            claim: claim.into(),
            slot,
            uid: object.metadata.uid.clone()?,
            version: object.metadata.resource_version.clone()?,
            created,
            content: content.map(String::from),
            state,
            error: text(object, "/status/error/message").map(String::from),
            level: None,
            volumes: BTreeSet::new(),
            used: None,
            name,
        })
    }

    pub(super) fn is_good(&self) -> bool {
        matches!(self.state, State::Good { .. })
    }

    /// Takes what the content of a good set says of its level.
    pub(super) fn set_level(&mut self, level: Option<Level>, requested: Level) {
        self.level = level;
        if self.is_good() {
            // A set whose level is not known displaces none.
            let is_at_level = level.is_some_and(|level| level >= requested);
            self.state = State::Good { is_at_level };
        }
    }
}

/// The handles of the volumes of a content.
pub(super) fn volumes_of(content: &DynamicObject) -> BTreeSet<String> {
    let single = text(content, "/spec/source/volumeHandle").into_iter();
    let group = content.data.pointer("/spec/source/volumeHandles");
    let group = group.and_then(Value::as_array).into_iter().flatten();
    let all = single.chain(group.filter_map(Value::as_str));
    all.map(String::from).collect()
}

/// The level in the annotations of a content.
pub(super) fn level_of(content: &DynamicObject) -> Option<Level> {
    Level::parse(content.annotations().get("slackwater.dev/level")?)
}

/// The objects of a slot, with the kind and version that they have.
pub(super) fn objects(
    schedule: &SnapshotSchedule,
    names: &Names,
    what: &ScheduleTarget,
    slot: Timestamp,
) -> Vec<Value> {
    let metadata = |claim: &str| {
        json!({
            "name": names.name(slot, claim),
            "namespace": schedule.namespace(),
            "labels": { SCHEDULE_UID: names.uid },
            "annotations": { SCHEDULE: schedule.name_any() },
        })
    };
    let class = &schedule.spec.class;
    match what {
        ScheduleTarget::Group(labels) => vec![json!({
            "metadata": metadata(""),
            "spec": {
                "volumeGroupSnapshotClassName": class,
                "source": { "selector": { "matchLabels": labels } },
            },
        })],
        ScheduleTarget::Claims(claims) => {
            let each = claims.iter().map(|claim| {
                json!({
                    "metadata": metadata(claim),
                    "spec": {
                        "volumeSnapshotClassName": class,
                        "source": { "persistentVolumeClaimName": claim },
                    },
                })
            });
            each.collect()
        }
    }
}
