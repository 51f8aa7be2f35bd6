//! The VolumeMove objects, by which administrators move volumes to other pools. The CRD is
//! deploy/chart/crds/volumemoves.yaml.
//!
//! People write `spec`; the leading router writes `status`, which has what a move must not forget:
//! its source and its target. A finalizer keeps the object until the move is aborted or has ended.

use std::collections::BTreeMap;
use std::time::Duration;

use ::kube::ResourceExt;
use ::kube::api::{ObjectMeta, TypeMeta};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use serde::{Deserialize, Serialize};

use crate::router::kube::custom_resource::duration::duration;
use crate::router::kube::custom_resource::{own_kind, with_finalizer};

/// The finalizer of moves that have begun.
pub(in crate::router::kube) const FINALIZER: &str = "slackwater.dev/move";
/// How long the source of a move is kept if `keepSource` does not say otherwise.
const KEEP_SOURCE: Duration = Duration::from_secs(24 * 60 * 60);

/// A move of the volume of one claim.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct VolumeMove {
    /// Absent from objects in lists.
    #[serde(flatten, default)]
    pub types: Option<TypeMeta>,
    pub metadata: ObjectMeta,
    /// What is to be done.
    pub spec: MoveSpec,
    /// How far it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub status: Option<MoveStatus>,
}

/// What a move is to do.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct MoveSpec {
    /// The claim, in the namespace of the move.
    pub claim: String,
    /// Where its volume goes.
    #[serde(default)]
    pub to: MoveTo,
    /// When its pods end.
    #[serde(default)]
    pub when: When,
    /// How long the source is kept after the move, such as 24h.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keep_source: Option<String>,
}

/// Where a volume goes: all that is given must be true of its new pool.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct MoveTo {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
    /// The UUID of a pool, or its name on its node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pool: Option<String>,
    /// Labels of the node.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub node_selector: BTreeMap<String, String>,
}

/// When the pods of a claim end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum When {
    /// An administrator ends them, for example with `kubectl drain`.
    #[default]
    Drained,
    /// The router evicts them.
    Now,
}

/// How far a move is. `None` is written as null, which removes the field.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct MoveStatus {
    pub phase: Phase,
    /// What it waits for, or what has failed; empty if it proceeds. Why it was undone, if it was.
    pub message: String,
    /// Why it is undone. The message can be about a step of that.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub abort_reason: Option<String>,
    /// The PersistentVolume.
    pub volume: Option<String>,
    /// Its UID when the move began. What is stored of another one is not of this move.
    pub volume_uid: Option<String>,
    /// The UID of the claim. One that was created again is another one.
    pub claim_uid: Option<String>,
    pub from: Option<Place>,
    pub to: Option<Place>,
    pub bytes_done: u64,
    pub bytes_total: u64,
    /// The copies before the fence.
    #[serde(skip_serializing_if = "PreCopy::is_none")]
    pub pre_copy: PreCopy,
    /// Since when no pod uses the volume, because it is fenced.
    pub fenced_at: Option<Time>,
    /// Since when the PersistentVolume names the copy.
    pub switched_at: Option<Time>,
    /// How long the volume could not be used, in milliseconds.
    pub still_ms: Option<u64>,
    pub conditions: Vec<Condition>,
}

/// The copies of a volume while it is in use. Each is a round: a snapshot is taken, and what differs
/// from the one before is copied.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct PreCopy {
    /// The round that was begun last, from 1 on.
    pub round: u32,
    /// When that was.
    pub begun_at: Option<Time>,
    /// Bytes in which its snapshot differs from the one before; `None` before it is taken.
    pub bytes: Option<u64>,
    /// Why it was given up.
    pub problem: Option<String>,
}

impl PreCopy {
    /// No round was begun.
    fn is_none(&self) -> bool {
        self.round == 0
    }
}

/// A volume, and where it is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Place {
    pub node: String,
    pub home: String,
    /// The UUID of the pool.
    pub pool: String,
    /// The name of the pool on its node.
    pub pool_name: String,
    /// The ID of the volume.
    pub handle: String,
}

/// The phase of a move.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Phase {
    /// Its target is not chosen yet.
    #[default]
    Pending,
    /// Its target is chosen, and the volume is copied while it is in use.
    Copying,
    /// The pods of the claim must end.
    Waiting,
    /// Nothing else can use the volume any more.
    Fenced,
    /// The volume is copied.
    LastCopy,
    /// The PersistentVolume is being exchanged, or names the copy already; the source is kept.
    Switched,
    /// The source is deleted.
    Done,
    /// It is being undone.
    Aborting,
    /// Everything is as it was before.
    Aborted,
    /// A value of a later release.
    #[serde(other, skip_serializing)]
    Other,
}

impl Phase {
    /// Whether nothing is left to be done.
    pub(in crate::router::kube) fn is_final(self) -> bool {
        matches!(self, Phase::Done | Phase::Aborted)
    }

    /// The value in the API.
    pub(in crate::router::kube) fn as_str(self) -> &'static str {
        match self {
            Phase::Pending => "Pending",
            Phase::Copying => "Copying",
            Phase::Waiting => "Waiting",
            Phase::Fenced => "Fenced",
            Phase::LastCopy => "LastCopy",
            Phase::Switched => "Switched",
            Phase::Done => "Done",
            Phase::Aborting => "Aborting",
            Phase::Aborted => "Aborted",
            Phase::Other => "Other",
        }
    }
}

impl VolumeMove {
    /// "namespace/name" of its claim.
    pub(in crate::router::kube) fn claim(&self) -> String {
        format!(
            "{}/{}",
            self.namespace().unwrap_or_default(),
            self.spec.claim
        )
    }

    /// How long its source is kept, or why that is not known.
    pub(super) fn keep_source(&self) -> Result<Duration, String> {
        let Some(text) = &self.spec.keep_source else {
            return Ok(KEEP_SOURCE);
        };
        duration(text).ok_or_else(|| {
            format!(
                "keepSource {text:?} is not a duration of at most 365 days; give one such as 24h"
            )
        })
    }
}

own_kind!(VolumeMove, "volumemoves", NamespaceResourceScope);
with_finalizer!(VolumeMove, FINALIZER);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::formats::check_with;

    const PHASES: [Phase; 9] = [
        Phase::Pending,
        Phase::Copying,
        Phase::Waiting,
        Phase::Fenced,
        Phase::LastCopy,
        Phase::Switched,
        Phase::Done,
        Phase::Aborting,
        Phase::Aborted,
    ];

    fn place(node: &str) -> Place {
        Place {
            node: node.into(),
            home: format!("home-of-{node}"),
            pool: "11111111-2222-4333-8444-555555555555".into(),
            pool_name: "default".into(),
            handle: format!("volume-on-{node}"),
        }
    }

    fn pre_copy(phase: Phase, time: &Time) -> PreCopy {
        match phase {
            Phase::Copying => PreCopy {
                round: 3,
                begun_at: Some(time.clone()),
                bytes: Some(1 << 20),
                problem: Some("no space".into()),
            },
            _ => PreCopy::default(),
        }
    }

    fn condition(time: &Time) -> Condition {
        Condition {
            last_transition_time: time.clone(),
            message: "node-2: it is cordoned".into(),
            observed_generation: Some(1),
            reason: "NoTarget".into(),
            status: "False".into(),
            type_: "TargetFound".into(),
        }
    }

    #[test]
    fn move_objects_keep_their_format() {
        let time: Time = serde_json::from_str("\"2026-01-02T03:04:05Z\"").unwrap();
        let new = VolumeMove {
            types: Some(TypeMeta::resource::<VolumeMove>()),
            metadata: ObjectMeta {
                name: Some("move".into()),
                namespace: Some("shop".into()),
                ..ObjectMeta::default()
            },
            spec: MoveSpec {
                claim: "data".into(),
                ..MoveSpec::default()
            },
            status: None,
        };
        let spec = MoveSpec {
            claim: "data".into(),
            to: MoveTo {
                node: Some("node-2".into()),
                pool: Some("default".into()),
                node_selector: [("disk".to_string(), "ssd".to_string())].into(),
            },
            when: When::Now,
            keep_source: Some("30m".into()),
        };
        let status = |phase| MoveStatus {
            phase,
            abort_reason: None,
            message: "delete pod db-0".into(),
            volume: Some("pv".into()),
            volume_uid: Some("pv-1".into()),
            claim_uid: Some("claim-1".into()),
            from: Some(place("node-1")),
            to: Some(place("node-2")),
            bytes_done: 1 << 20,
            bytes_total: 1 << 30,
            pre_copy: pre_copy(phase, &time),
            fenced_at: Some(time.clone()),
            switched_at: Some(time.clone()),
            still_ms: Some(1500),
            conditions: vec![condition(&time)],
        };
        let names = PHASES.map(|phase| format!("{}.json", phase.as_str().to_lowercase()));
        let mut expected = vec![("new.json", new.clone())];
        expected.extend(names.iter().zip(PHASES).map(|(name, phase)| {
            let moved = VolumeMove {
                spec: spec.clone(),
                status: Some(status(phase)),
                ..new.clone()
            };
            (name.as_str(), moved)
        }));
        let undone = MoveStatus {
            abort_reason: Some("the snapshot was deleted".into()),
            ..status(Phase::Aborting)
        };
        let undone = VolumeMove {
            spec,
            status: Some(undone),
            ..new
        };
        expected.push(("undone.json", undone));
        let read = |bytes: &[u8]| serde_json::from_slice::<VolumeMove>(bytes).unwrap();
        let write = |object: &VolumeMove| serde_json::to_vec_pretty(object).unwrap();
        check_with("move-object", expected, read, write);
    }

    #[test]
    fn the_source_is_kept_for_a_day_unless_the_move_says_otherwise() {
        let keeps = |text: Option<&str>| {
            let mut moved = VolumeMove::default();
            moved.spec.keep_source = text.map(String::from);
            moved.keep_source().map(|time| time.as_secs())
        };
        assert_eq!(keeps(None), Ok(86_400));
        assert_eq!(keeps(Some("90s")), Ok(90));
        assert_eq!(keeps(Some("0s")), Ok(0));
        assert_eq!(keeps(Some("7d")), Ok(7 * 86_400));
        for wrong in [
            "soon",
            "",
            "h",
            "24",
            "-1h",
            "366d",
            "99999999999999999999s",
            "ü",
        ] {
            assert!(keeps(Some(wrong)).is_err(), "{wrong}");
        }
    }
}
