//! The SnapshotSchedule objects. The CRD is deploy/chart/crds/snapshotschedules.yaml.
//!
//! People write `spec`; the leading router writes `status`.

use std::collections::BTreeMap;

use ::kube::ResourceExt;
use ::kube::api::{ObjectMeta, TypeMeta};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::router::kube::own_kind::own_kind;

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
