//! Reads everything that the decision about a revert needs.

use std::collections::BTreeMap;

use ::kube::ResourceExt;
use ::kube::api::Api;
use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use k8s_openapi::jiff::Timestamp;

use super::decide::{MemberSeen, Observed, Old, old_name};
use super::object::{RevertMember, RevertPhase, VolumeRevert};
use super::read::{Reader, is_ready, parsed, snapshots_api, text};
use super::{Revert, RevertController};
use crate::error::{Error, Result, chain};
use crate::model::{SnapshotId, VolumeId};
use crate::operation::VolumeRevertStatus;
use crate::router::kube::ask;

/// The annotation of a VolumeSnapshot with old content: the UID of the revert.
pub(super) const UID_ANNOTATION: &str = "slackwater.dev/revert-uid";

/// Reads a revert and everything that it depends on.
pub(super) async fn observe(controller: &RevertController, revert: Revert) -> Result<Revert> {
    let reader = Reader {
        controller,
        namespace: revert.object.namespace().unwrap_or_default(),
    };
    let client = controller.cluster.client.clone();
    let api = Api::<VolumeRevert>::namespaced(client, &reader.namespace);
    let now = ask(&revert.to_string(), api.get_opt(&revert.object.name_any())).await?;
    let now = now.filter(|now| now.metadata.uid == revert.object.metadata.uid);
    let Some(object) = now else {
        return Ok(Revert {
            seen: None,
            ..revert
        });
    };
    let mut seen = Observed {
        object: object.clone(),
        now: Timestamp::now(),
        proposal: None,
        members: Vec::new(),
    };
    let status = object.status.clone().unwrap_or_default();
    if status.phase.is_final() {
        // Only its finalizer is removed.
    } else if status.members.is_empty() {
        seen.proposal = Some(reader.propose(&object).await?);
    } else {
        // Once it is decided, nothing but the volumes may delay the steps: they are fenced.
        let is_open = status.phase < RevertPhase::Switching;
        let pods = match is_open {
            true => reader.pods().await?,
            false => BTreeMap::new(),
        };
        for (n, member) in status.members.iter().enumerate() {
            let (is_bound, old) = match is_open {
                true => reader.objects(&object, n, member).await?,
                false => (true, Old::Absent),
            };
            seen.members.push(MemberSeen {
                is_bound,
                volume: reader.volume(&object, member).await?,
                old,
                pods: pods.get(&member.claim).cloned().unwrap_or_default(),
            });
        }
    }
    let seen = Some(Box::new(seen));
    Ok(Revert { object, seen })
}

impl Reader<'_> {
    /// Whether the claim of a member is the same as at the beginning, and its old content.
    async fn objects(
        &self,
        object: &VolumeRevert,
        n: usize,
        member: &RevertMember,
    ) -> Result<(bool, Old)> {
        let claim = self.claim(&member.claim).await?;
        let same = |claim: &PersistentVolumeClaim| {
            let volume = claim.spec.as_ref().and_then(|it| it.volume_name.as_ref());
            claim.metadata.uid.as_ref() == Some(&member.claim_uid) && volume == Some(&member.volume)
        };
        let is_bound = match claim.is_some_and(|claim| same(&claim)) {
            true => {
                let handle = self.handle(&member.volume, &member.claim_uid).await?;
                handle.as_ref() == Some(&member.handle)
            }
            false => false,
        };
        let old = match object.spec.keep_old {
            true => self.old(object, n, &member.claim).await?,
            false => Old::Absent,
        };
        Ok((is_bound, old))
    }

    /// The volume of a member, or why it is not known.
    async fn volume(
        &self,
        object: &VolumeRevert,
        member: &RevertMember,
    ) -> Result<std::result::Result<VolumeRevertStatus, String>> {
        let volume: VolumeId = parsed(&member.handle)?;
        let snapshot: SnapshotId = parsed(&member.snapshot_handle)?;
        let namespace = object.namespace().unwrap_or_default();
        let foreign = self
            .controller
            .cluster
            .foreign_claim(&member.handle, &namespace);
        let looked = self.controller.volumes.look(volume, snapshot).await;
        let uid = object.uid();
        let is_own = |seen: &VolumeRevertStatus| uid.is_some() && seen.fenced == uid;
        let looked = match (looked, foreign) {
            // The status of an object in a namespace is not trusted. The fence of this revert proves that the
            // volume was one of its members, also if its claim has changed since.
            (Ok(seen), Some(claim)) if !is_own(&seen) => Err(Error::refused(
                format!("volume {}", member.handle),
                format!("it is the volume of claim {claim}"),
            )),
            (looked, _) => looked,
        };
        Ok(looked.map_err(|error| chain(&error)))
    }

    /// The VolumeSnapshot with the old content of a member.
    async fn old(&self, object: &VolumeRevert, n: usize, claim: &str) -> Result<Old> {
        let name = old_name(object, n);
        let api = self.namespaced(&snapshots_api());
        let found = ask(&format!("VolumeSnapshot {name}"), api.get_opt(&name)).await?;
        let Some(found) = found else {
            return Ok(Old::Absent);
        };
        let of = text(&found, "/spec/source/persistentVolumeClaimName");
        let is_own = found.annotations().get(UID_ANNOTATION) == object.metadata.uid.as_ref();
        if !is_own || of != Some(claim) {
            return Ok(Old::Foreign);
        }
        if is_ready(&found) {
            return Ok(Old::Ready);
        }
        let error = text(&found, "/status/error/message");
        let error = error.map_or_else(String::new, |error| format!(": {error}"));
        Ok(Old::Pending(format!(
            "VolumeSnapshot {name} is not ready{error}"
        )))
    }
}
