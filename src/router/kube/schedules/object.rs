//! The SnapshotSchedule objects. The CRD is deploy/chart/crds/snapshotschedules.yaml.
//!
//! People write `spec`; the leading router writes `status`.

use std::collections::BTreeMap;

use ::kube::ResourceExt;
use ::kube::api::{ObjectMeta, TypeMeta};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::router::kube::custom_resource::own_kind;

/// A schedule of snapshots of claims in its namespace.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(in crate::router::kube) struct SnapshotSchedule {
    /// Absent from objects in lists.
    #[serde(flatten, default)]
    pub(super) types: Option<TypeMeta>,
    pub(super) metadata: ObjectMeta,
    pub(super) spec: ScheduleSpec,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) status: Option<ScheduleStatus>,
}

/// What is to be snapshotted, when, and what is kept.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct ScheduleSpec {
    /// The claims of which each slot makes one group snapshot.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) selector: Option<Selector>,
    /// The claims of each of which each slot makes a snapshot.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) claims: Option<Vec<String>>,
    /// Whether the snapshots are one group snapshot. It only confirms what `selector` or `claims` means.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) group: Option<bool>,
    /// The VolumeGroupSnapshotClass or VolumeSnapshotClass.
    pub(super) class: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) cron: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) every: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) time_zone: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) keep: Option<KeepSpec>,
    pub(super) suspend: bool,
    /// One more slot, besides those of `cron` or `every`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) run_at: Option<String>,
    /// A slot that could not be executed for this long is skipped.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) starting_deadline: Option<String>,
    /// What checks that its sets can be restored.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) check: Option<CheckSpec>,
}

/// What checks that the sets of a schedule can be restored.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct CheckSpec {
    /// A CronJob in the namespace of the schedule.
    pub(super) cron_job: String,
    /// How long ago the last check that succeeded may have ended.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) max_age: Option<String>,
}

/// Labels of claims.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct Selector {
    pub(super) match_labels: BTreeMap<String, String>,
    /// Not supported. It is read so that a schedule with it is refused.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) match_expressions: Vec<Value>,
}

/// Which sets are kept.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct KeepSpec {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) last: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) hourly: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) daily: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) weekly: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) max_age: Option<String>,
}

/// What a schedule has done. `None` is written as null, which removes the field.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct ScheduleStatus {
    /// The last slot that was executed, or is not executed any more.
    pub(super) last_slot: Option<Time>,
    /// The next one. A text, because kubectl shows no times of the future.
    pub(super) next_slot: Option<String>,
    /// The slot of the newest good set; with several claims, the oldest of these.
    pub(super) last_cut_slot: Option<Time>,
    /// When this set was created.
    pub(super) last_cut: Option<Time>,
    /// Its consistency level.
    pub(super) level: Option<String>,
    /// How long after its slot it was created.
    pub(super) delay: Option<String>,
    /// The first slot after it that has no good set, although its time has come.
    pub(super) overdue_since: Option<Time>,
    /// The number of slots that were skipped, because they could not be executed in time.
    pub(super) missed: u64,
    /// The newest slots that are known to have been skipped, the oldest first: those that are counted, and
    /// those that passed while no router executed the schedule.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) skipped_slots: Vec<Time>,
    /// Since when each claim must have sets. This alone is no reason to write the status: the
    /// CustomResourceDefinition of an earlier release drops it.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) needed_since: Vec<Since>,
    /// The sets that are not to be kept, in the order in which they are deleted. `None` before that is
    /// known.
    pub(super) deletions: Option<Vec<Due>>,
    /// The sets that `maxAge` has removed last, or is about to remove.
    pub(super) expired: Vec<Expired>,
    pub(super) conditions: Vec<Condition>,
}

/// A set that is not to be kept.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct Due {
    /// The name of the set.
    pub(super) name: String,
    /// Why it is not to be kept.
    pub(super) reason: String,
    /// Why it is not deleted yet; empty if it is only its turn that it waits for.
    pub(super) waits: String,
}

/// A set that is too old. One such set is removed after each new good set.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Expired {
    /// The claim; empty for groups.
    #[serde(default)]
    pub(super) claim: String,
    /// The name of the set.
    pub(super) name: String,
    /// The slot of the good set that was the newest one.
    pub(super) after: Time,
}

/// Since when a claim must have sets.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Since {
    /// The claim; empty for groups.
    #[serde(default)]
    pub(super) claim: String,
    /// Slots after this time count.
    pub(super) after: Time,
}

impl ScheduleStatus {
    /// Whether nothing differs that is a reason to write.
    pub(super) fn is_shown_by(&self, written: &ScheduleStatus) -> bool {
        let needed_since = written.needed_since.clone();
        *written
            == ScheduleStatus {
                needed_since,
                ..self.clone()
            }
    }
}

impl SnapshotSchedule {
    /// Its namespace and name.
    pub(super) fn key(&self) -> (String, String) {
        (self.namespace().unwrap_or_default(), self.name_any())
    }

    /// "namespace/name".
    pub(super) fn path(&self) -> String {
        let (namespace, name) = self.key();
        format!("{namespace}/{name}")
    }
}

own_kind!(
    SnapshotSchedule,
    "snapshotschedules",
    NamespaceResourceScope
);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::formats::check_with;

    fn time(text: &str) -> Time {
        serde_json::from_value(Value::from(text)).unwrap()
    }

    /// A status with everything that one can have.
    fn full_status(slot: &Time) -> ScheduleStatus {
        let condition = Condition {
            last_transition_time: slot.clone(),
            message: String::new(),
            observed_generation: Some(1),
            reason: "Created".into(),
            status: "True".into(),
            type_: "Ready".into(),
        };
        ScheduleStatus {
            last_slot: Some(slot.clone()),
            next_slot: Some("2026-01-02T04:00:00Z".into()),
            last_cut_slot: Some(slot.clone()),
            last_cut: Some(time("2026-01-02T03:00:05Z")),
            level: Some("application".into()),
            delay: Some("5s".into()),
            overdue_since: Some(slot.clone()),
            missed: 1,
            skipped_slots: vec![time("2026-01-02T02:00:00Z")],
            needed_since: vec![Since {
                claim: "data".into(),
                after: slot.clone(),
            }],
            deletions: Some(vec![Due {
                name: "nightly-1".into(),
                reason: "a newer one is kept".into(),
                waits: "it is being restored".into(),
            }]),
            expired: vec![Expired {
                claim: "data".into(),
                name: "nightly-0".into(),
                after: slot.clone(),
            }],
            conditions: vec![condition],
        }
    }

    /// A schedule of groups that has not run, and one of single claims with everything that a status
    /// can have.
    #[test]
    fn schedule_objects_keep_their_format() {
        let slot = time("2026-01-02T03:00:00Z");
        let new = SnapshotSchedule {
            types: Some(TypeMeta::resource::<SnapshotSchedule>()),
            metadata: ObjectMeta {
                name: Some("nightly".into()),
                namespace: Some("shop".into()),
                ..ObjectMeta::default()
            },
            spec: ScheduleSpec {
                selector: Some(Selector {
                    match_labels: [("app".into(), "db".into())].into(),
                    match_expressions: Vec::new(),
                }),
                group: Some(true),
                class: "groups".into(),
                cron: Some("0 3 * * *".into()),
                time_zone: Some("Europe/Berlin".into()),
                keep: Some(KeepSpec {
                    last: Some(1),
                    hourly: Some(2),
                    daily: Some(7),
                    weekly: Some(4),
                    max_age: Some("90d".into()),
                }),
                ..ScheduleSpec::default()
            },
            status: None,
        };
        let run = SnapshotSchedule {
            spec: ScheduleSpec {
                claims: Some(vec!["data".into()]),
                class: "snapshots".into(),
                every: Some("1h".into()),
                suspend: true,
                run_at: Some("2026-01-02T03:04:05Z".into()),
                starting_deadline: Some("30m".into()),
                check: Some(CheckSpec {
                    cron_job: "restores".into(),
                    max_age: Some("2d".into()),
                }),
                ..ScheduleSpec::default()
            },
            status: Some(full_status(&slot)),
            ..new.clone()
        };
        let expected = vec![("new.json", new), ("run.json", run)];
        let read = |bytes: &[u8]| serde_json::from_slice(bytes).unwrap();
        let write = |object: &SnapshotSchedule| serde_json::to_vec_pretty(object).unwrap();
        check_with("schedule-object", expected, read, write);
    }
}
