//! Orders the steps of a VolumeRevert from the agents that have its volumes.

use std::time::Duration;

use uuid::Uuid;

use super::{RevertStep, RevertingVolumes};
use crate::agent::revert_request::Step;
use crate::agent::{LookForRevertRequest, LookForRevertResponse, RevertRequest};
use crate::error::{Error, Result};
use crate::model::{SnapshotId, VolumeId};
use crate::operation::{Members, VolumeRevertStatus};
use crate::router::Router;
use crate::router::call::within;
use crate::router::checked::fence_uid;
use crate::router::resolve::answered;
use crate::router::route::Owner;

/// How long one call lasts. A copy, and the wipe of a former image, continue afterwards, and the next
/// call finds what they have done.
const STEP_TIMEOUT: Duration = Duration::from_secs(60);

#[tonic::async_trait]
impl RevertingVolumes for Router {
    async fn look(&self, volume: VolumeId, snapshot: SnapshotId) -> Result<VolumeRevertStatus> {
        let Owner::Agent(agent) = self.owner(&volume.to_string()).await? else {
            return Ok(VolumeRevertStatus::default());
        };
        let asked = LookForRevertRequest {
            volume_id: volume.to_string(),
            snapshot_id: snapshot.to_string(),
        };
        let mut client = agent.client().await?;
        let found = answered(&agent, client.look_for_revert(within(asked, STEP_TIMEOUT))).await?;
        self.checked(&agent, seen(found))
    }

    async fn step(&self, volume: VolumeId, uid: Uuid, step: RevertStep) -> Result<()> {
        let volume_id = volume.to_string();
        let Owner::Agent(agent) = self.owner(&volume_id).await? else {
            return match step {
                // Nothing is left of it.
                RevertStep::Abort { .. } | RevertStep::End => Ok(()),
                _ => Err(Error::no_volume(volume_id)),
            };
        };
        let mut asked = RevertRequest {
            volume_id,
            revert_uid: uid.to_string(),
            ..RevertRequest::default()
        };
        let kind = match step {
            RevertStep::Begin {
                name,
                snapshot,
                number,
                members,
            } => {
                (asked.name, asked.snapshot_id) = (name, snapshot.to_string());
                asked.number = number;
                set_members(&mut asked, members);
                Step::Begin
            }
            RevertStep::Prepare => Step::Prepare,
            RevertStep::Switch { members } => {
                set_members(&mut asked, members);
                Step::Switch
            }
            RevertStep::End => Step::End,
            RevertStep::Abort { number } => {
                asked.number = number;
                Step::Abort
            }
        };
        asked.step = kind.into();
        let mut client = agent.client().await?;
        answered(&agent, client.revert(within(asked, STEP_TIMEOUT)))
            .await
            .map(drop)
    }
}

fn set_members(asked: &mut RevertRequest, members: Members) {
    asked.members = members.count;
    asked.members_digest = members.digest.map(|it| it.to_string()).unwrap_or_default();
}

fn seen(found: LookForRevertResponse) -> std::result::Result<VolumeRevertStatus, String> {
    let fenced = fence_uid(&found.fenced_by, "revert")?;
    let ended = fence_uid(&found.ended, "revert")?;
    let text = |text: String| Some(text).filter(|text| !text.is_empty());
    Ok(VolumeRevertStatus {
        exists: found.exists,
        number: found.number,
        fenced,
        is_prepared: found.prepared,
        is_switched: found.switched,
        ended: ended.map(|ended| (ended, found.ended_done)),
        user: text(found.user),
        unfit: text(found.unfit),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_read_whole_and_one_without_sense_is_refused() {
        let uid = Uuid::from_u128(7);
        let sent = LookForRevertResponse {
            exists: true,
            number: 3,
            fenced_by: uid.to_string(),
            prepared: true,
            ended: uid.to_string(),
            ended_done: true,
            user: "a pod".into(),
            ..LookForRevertResponse::default()
        };
        let read = VolumeRevertStatus {
            exists: true,
            number: 3,
            fenced: Some(uid),
            is_prepared: true,
            is_switched: false,
            ended: Some((uid, true)),
            user: Some("a pod".into()),
            unfit: None,
        };
        assert_eq!(seen(sent), Ok(read));
        let wrong = LookForRevertResponse {
            fenced_by: "no UUID".into(),
            ..LookForRevertResponse::default()
        };
        assert!(seen(wrong).is_err());
    }
}
