//! The VolumeRevert objects, by which claims get the content of one of their snapshots. The CRD is
//! deploy/chart/crds/volumereverts.yaml.
//!
//! People write `spec`, which cannot be changed; the leading router writes `status`, which has what a
//! revert must not forget: its members, and the phase, from which there is no way back. A finalizer keeps
//! the object until the fences of all members are lifted.

use std::time::Duration;

use ::kube::api::{ObjectMeta, TypeMeta};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use serde::{Deserialize, Serialize};

use crate::router::kube::custom_resource::duration::duration;
use crate::router::kube::custom_resource::{own_kind, with_finalizer};

/// The finalizer of reverts that have begun.
pub(super) const FINALIZER: &str = "slackwater.dev/revert";
/// Until when a revert must have begun to switch if `deadline` does not say otherwise.
const DEFAULT_DEADLINE: Duration = Duration::from_secs(10 * 60);

/// A revert of claims to snapshots of their volumes.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct VolumeRevert {
    /// Absent from objects in lists.
    #[serde(flatten, default)]
    pub types: Option<TypeMeta>,
    pub metadata: ObjectMeta,
    /// What is to be done.
    pub spec: RevertSpec,
    /// How far it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub status: Option<RevertStatus>,
}

/// What a revert is to do: claim and snapshot, or a group of both.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct RevertSpec {
    /// A claim in the namespace of the revert.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub claim: Option<String>,
    /// The VolumeSnapshot of this claim.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub snapshot: Option<String>,
    /// A VolumeGroupSnapshot, for all of its members.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub group_snapshot: Option<String>,
    /// Make VolumeSnapshots of the content before the revert.
    pub keep_old: bool,
    /// What has not begun to switch within this time fails for good, such as 10m.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub deadline: Option<String>,
}

/// How far a revert is. `None` is written as null, which removes the field.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct RevertStatus {
    pub phase: RevertPhase,
    /// What it waits for, or why it has failed; empty if it proceeds.
    pub message: String,
    /// The claims, once they are known.
    pub members: Vec<RevertMember>,
    /// When all members had their new content.
    pub finished_at: Option<Time>,
    pub conditions: Vec<Condition>,
}

/// One claim of a revert.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct RevertMember {
    pub claim: String,
    /// One that was created again is another one.
    pub claim_uid: String,
    /// The PersistentVolume.
    pub volume: String,
    /// The ID of the volume.
    pub handle: String,
    /// The VolumeSnapshot.
    pub snapshot: String,
    /// The ID of the snapshot.
    pub snapshot_handle: String,
    /// The class of the VolumeSnapshot, also for that of the old content.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub class: Option<String>,
    /// How many reverts of the volume had ended when this one was planned.
    pub number: u64,
    pub state: MemberState,
    /// The VolumeSnapshot with the content before the revert.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub old: Option<String>,
}

/// How far a member is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum MemberState {
    /// It is as it was.
    #[default]
    Waiting,
    /// Nothing else can use it.
    Fenced,
    /// Its new image is complete.
    Prepared,
    /// It has its new content, and is still fenced.
    Switched,
    /// It has its new content.
    Reverted,
    /// It has kept its content, for good.
    Kept,
    /// Its volume does not exist any more.
    Lost,
    /// A value of a later release.
    #[serde(other, skip_serializing)]
    Other,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum RevertPhase {
    /// Its members are not known yet.
    #[default]
    Pending,
    /// The pods of its claims must end.
    Waiting,
    /// Its members are being fenced.
    Fencing,
    /// VolumeSnapshots of the old content are made.
    Keeping,
    /// It has begun: the new images are filled.
    Preparing,
    /// All members get their new content. There is no way back.
    Switching,
    /// All members have their new content.
    Done,
    /// It is being undone.
    Aborting,
    /// All members have kept their content.
    Failed,
    /// A member is lost, or its content is not known. All others have their new content.
    Incomplete,
    /// A value of a later release.
    #[serde(other, skip_serializing)]
    Other,
}

impl RevertPhase {
    /// Whether nothing is left to be done.
    pub(in crate::router::kube) fn is_final(self) -> bool {
        matches!(
            self,
            RevertPhase::Done | RevertPhase::Failed | RevertPhase::Incomplete
        )
    }

    /// The value in the API.
    pub(in crate::router::kube) fn as_str(self) -> &'static str {
        match self {
            RevertPhase::Pending => "Pending",
            RevertPhase::Waiting => "Waiting",
            RevertPhase::Fencing => "Fencing",
            RevertPhase::Keeping => "Keeping",
            RevertPhase::Preparing => "Preparing",
            RevertPhase::Switching => "Switching",
            RevertPhase::Done => "Done",
            RevertPhase::Aborting => "Aborting",
            RevertPhase::Failed => "Failed",
            RevertPhase::Incomplete => "Incomplete",
            RevertPhase::Other => "Other",
        }
    }
}

impl VolumeRevert {
    /// Until when it must have begun to switch, after its creation; or why that is not known.
    pub(in crate::router::kube) fn deadline(&self) -> Result<Duration, String> {
        let Some(text) = &self.spec.deadline else {
            return Ok(DEFAULT_DEADLINE);
        };
        duration(text).ok_or_else(|| {
            format!("deadline {text:?} is not a duration of at most 365 days; give one such as 10m")
        })
    }
}

own_kind!(VolumeRevert, "volumereverts", NamespaceResourceScope);
with_finalizer!(VolumeRevert, FINALIZER);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::formats::check_with;

    #[test]
    fn revert_objects_keep_their_format() {
        let time: Time = serde_json::from_str("\"2026-01-02T03:04:05Z\"").unwrap();
        let condition = Condition {
            last_transition_time: time.clone(),
            message: String::new(),
            observed_generation: Some(1),
            reason: "Reverted".into(),
            status: "True".into(),
            type_: "Complete".into(),
        };
        let new = VolumeRevert {
            types: Some(TypeMeta::resource::<VolumeRevert>()),
            metadata: ObjectMeta {
                name: Some("back".into()),
                namespace: Some("shop".into()),
                ..ObjectMeta::default()
            },
            spec: RevertSpec {
                claim: Some("data".into()),
                snapshot: Some("today".into()),
                ..RevertSpec::default()
            },
            status: None,
        };
        let member = RevertMember {
            claim: "data".into(),
            claim_uid: "claim-1".into(),
            volume: "pv".into(),
            handle: "volume".into(),
            snapshot: "today".into(),
            snapshot_handle: "snapshot".into(),
            class: Some("fast".into()),
            number: 3,
            state: MemberState::Reverted,
            old: Some("before".into()),
        };
        let done = VolumeRevert {
            spec: RevertSpec {
                group_snapshot: Some("nightly".into()),
                keep_old: true,
                deadline: Some("30m".into()),
                ..RevertSpec::default()
            },
            status: Some(RevertStatus {
                phase: RevertPhase::Done,
                message: String::new(),
                members: vec![member],
                finished_at: Some(time),
                conditions: vec![condition],
            }),
            ..new.clone()
        };
        let expected = vec![("new.json", new), ("done.json", done)];
        let read = |bytes: &[u8]| serde_json::from_slice(bytes).unwrap();
        let write = |object: &VolumeRevert| serde_json::to_vec_pretty(object).unwrap();
        check_with("revert-object", expected, read, write);
    }

    #[test]
    fn a_phase_of_a_later_release_is_read() {
        let status: RevertStatus =
            serde_json::from_str(r#"{"phase": "Dreaming", "members": [{"state": "Floating"}]}"#)
                .unwrap();
        assert_eq!(status.phase, RevertPhase::Other);
        assert_eq!(status.members[0].state, MemberState::Other);
    }
}
