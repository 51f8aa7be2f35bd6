//! The requests of a VolumeRevert: the steps of one volume, and its state.

use tonic::Status;
use uuid::Uuid;

use crate::agent::revert_request::Step;
use crate::agent::{LookForRevertRequest, LookForRevertResponse, RevertRequest, RevertResponse};
use crate::error::{Error, Result};
use crate::operation::{BeginRevert, Members, VolumeRevertStatus};
use crate::service::{Rpc, Service};

/// A longer name is not one of an object of Kubernetes.
const MAX_NAME_BYTES: usize = 512;

/// A request with its parsed fields.
pub(super) fn parsed(asked: &RevertRequest) -> Result<(Step, BeginRevert)> {
    let uid = asked.revert_uid.parse();
    let uid = uid.map_err(|_| Error::invalid("revert_uid", "is not a UUID"))?;
    if asked.name.len() > MAX_NAME_BYTES || asked.name.chars().any(char::is_control) {
        return Err(Error::invalid("name", "is not the name of a VolumeRevert"));
    }
    let step = match asked.step() {
        Step::Unknown => {
            let why = "is not a step that this agent supports";
            return Err(Error::invalid("step", why));
        }
        step => step,
    };
    let begin = BeginRevert {
        volume_id: asked.volume_id.clone(),
        uid,
        name: asked.name.clone(),
        snapshot_id: asked.snapshot_id.clone(),
        number: asked.number,
        members: Members {
            count: asked.members,
            digest: digest(&asked.members_digest)?,
        },
    };
    Ok((step, begin))
}

fn digest(text: &str) -> Result<Option<Uuid>> {
    let digest = (!text.is_empty()).then(|| text.parse());
    let digest = digest.transpose();
    digest.map_err(|_| Error::invalid("members_digest", "is not a UUID"))
}

impl Service {
    pub(super) async fn handle_revert(
        &self,
        asked: RevertRequest,
    ) -> Result<RevertResponse, Status> {
        let rpc = match asked.step() {
            // It needs space, and may copy.
            Step::Prepare => Rpc::CreateVolume,
            _ => Rpc::ControllerModifyVolume,
        };
        self.run(rpc, parsed(&asked), |driver, (step, asked)| {
            let volumes = &driver.volumes;
            let (volume_id, uid) = (&asked.volume_id, asked.uid);
            match step {
                Step::Begin => volumes.begin_revert(asked),
                Step::Prepare => volumes.prepare_revert(volume_id, uid),
                Step::Switch => volumes.switch_revert(volume_id, uid, asked.members),
                Step::End => volumes.end_revert(volume_id, uid),
                Step::Abort => volumes.abort_revert(volume_id, uid, asked.number),
                Step::Unknown => Err(Error::bug("the step is known")),
            }
        })
        .await?;
        Ok(RevertResponse {})
    }

    pub(super) async fn handle_look_for_revert(
        &self,
        asked: LookForRevertRequest,
    ) -> Result<LookForRevertResponse, Status> {
        let found = self
            .run(Rpc::ControllerGetVolume, Ok(asked), |driver, asked| {
                let volumes = &driver.volumes;
                volumes.revert_status(&asked.volume_id, &asked.snapshot_id)
            })
            .await?;
        Ok(response(found))
    }
}

fn response(found: VolumeRevertStatus) -> LookForRevertResponse {
    let text = |uid: Option<Uuid>| uid.map_or_else(String::new, |uid| uid.to_string());
    LookForRevertResponse {
        exists: found.exists,
        number: found.number,
        fenced_by: text(found.fenced),
        prepared: found.is_prepared,
        switched: found.is_switched,
        ended: text(found.ended.map(|(uid, _)| uid)),
        ended_done: found.ended.is_some_and(|(_, is_done)| is_done),
        user: found.user.unwrap_or_default(),
        unfit: found.unfit.unwrap_or_default(),
    }
}
