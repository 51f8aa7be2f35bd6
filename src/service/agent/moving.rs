//! The requests of a VolumeMove: the fence of its source, its snapshots, and the end of the source.

use std::collections::HashMap;

use prost::Message;
use tonic::Status;
use uuid::Uuid;

use crate::agent::look_for_move_response::{Snapshot as Found, State};
use crate::agent::{
    DeleteMovedRequest, DeleteMovedResponse, FenceRequest, FenceResponse, LookForMoveRequest,
    LookForMoveResponse, SnapshotForMoveRequest, SnapshotForMoveResponse,
};
use crate::csi;
use crate::csi::volume_capability::access_mode::Mode;
use crate::csi::volume_capability::{
    AccessMode as CsiMode, AccessType as CsiType, BlockVolume, MountVolume,
};
use crate::error::{Error, Result};
use crate::model::{AccessMode, AccessType, Capability};
use crate::operation::{CreateVolume, MovingState, VolumeMoveStatus};
use crate::service::reply::bytes;
use crate::service::{Rpc, Service};

/// The UID of a move, and the volume that a request is about.
pub(super) fn of_move(volume_id: &str, uid: &str) -> Result<(String, Uuid)> {
    let uid = uid.parse();
    let uid = uid.map_err(|_| Error::invalid("move_uid", "is not a UUID"))?;
    Ok((volume_id.to_string(), uid))
}

impl Service {
    pub(super) async fn handle_fence(&self, asked: FenceRequest) -> Result<FenceResponse, Status> {
        let args = of_move(&asked.volume_id, &asked.move_uid);
        self.run(Rpc::ControllerModifyVolume, args, move |driver, args| {
            let (volume_id, move_uid) = args;
            match asked.lift {
                true => driver.volumes.lift_fence(volume_id, *move_uid),
                false => driver.volumes.fence_volume(volume_id, *move_uid),
            }
        })
        .await?;
        Ok(FenceResponse {})
    }

    pub(super) async fn handle_snapshot_for_move(
        &self,
        asked: SnapshotForMoveRequest,
    ) -> Result<SnapshotForMoveResponse, Status> {
        let args = of_move(&asked.volume_id, &asked.move_uid);
        let round = (asked.round > 0).then_some(asked.round);
        let base = asked.base_round;
        let made = self
            .run(Rpc::CreateSnapshot, args, move |driver, args| {
                let (volume_id, move_uid) = args;
                let volumes = &driver.volumes;
                let (made, like) = volumes.snapshot_for_move(volume_id, *move_uid, round)?;
                let changed = match base {
                    0 => 0,
                    base => volumes.changed_for_move(&made, *move_uid, base)?,
                };
                Ok((made, like, changed))
            })
            .await?;
        let (snapshot, like, changed_bytes) = made;
        Ok(SnapshotForMoveResponse {
            snapshot_id: snapshot.id.to_string(),
            create: message(&like).encode_to_vec(),
            changed_bytes,
        })
    }

    pub(super) async fn handle_delete_moved(
        &self,
        asked: DeleteMovedRequest,
    ) -> Result<DeleteMovedResponse, Status> {
        let args = of_move(&asked.volume_id, &asked.move_uid);
        self.run(Rpc::DeleteVolume, args, |driver, (volume_id, move_uid)| {
            driver.volumes.delete_moved(volume_id, *move_uid)
        })
        .await?;
        Ok(DeleteMovedResponse {})
    }

    pub(super) async fn handle_look_for_move(
        &self,
        asked: LookForMoveRequest,
    ) -> Result<LookForMoveResponse, Status> {
        let found = self
            .run(Rpc::ControllerGetVolume, Ok(asked), |driver, asked| {
                let snapshots = &asked.snapshot_ids;
                driver.volumes.move_status(&asked.volume_id, snapshots)
            })
            .await?;
        Ok(response(found))
    }
}

fn response(found: VolumeMoveStatus) -> LookForMoveResponse {
    let state = match found.state {
        MovingState::Absent => State::Absent,
        MovingState::Filling => State::Filling,
        MovingState::Ready => State::Ready,
    };
    let text = |uid: Option<Uuid>| uid.map_or_else(String::new, |uid| uid.to_string());
    let snapshots = found.snapshots.into_iter();
    let snapshots = snapshots.map(|one| Found {
        snapshot_id: one.id,
        ready: one.is_ready,
        identity: one.identity,
    });
    LookForMoveResponse {
        state: state.into(),
        size_bytes: found.size,
        copied_bytes: found.copied,
        fenced_by: text(found.fenced),
        user: found.user.unwrap_or_default(),
        snapshots: snapshots.collect(),
        lifted_for: text(found.lifted),
        content_identity: found.content.map_or(0, |content| content.identity),
        content_is_whole: found.content.is_some_and(|content| content.is_whole),
    }
}

/// A request as a message, without its name.
fn message(asked: &CreateVolume) -> csi::CreateVolumeRequest {
    let of = &asked.parameters;
    let mut parameters: HashMap<String, String> = [
        ("allocation", of.allocation.as_str().to_string()),
        ("wipe", of.wipe.as_str().to_string()),
        ("blockGroups", of.block_groups.to_string()),
    ]
    .map(|(key, value)| (key.to_string(), value))
    .into();
    let mut add = |key: &str, value: String| drop(parameters.insert(key.to_string(), value));
    if let Some(size) = of.block_size {
        add("blockSize", size.to_string());
    }
    if !of.mkfs_options.is_empty() {
        add("mkfsOptions", of.mkfs_options.join(" "));
    }
    let claim = of.claim.as_deref();
    if let Some((namespace, name)) = claim.and_then(|claim| claim.split_once('/')) {
        add("csi.storage.k8s.io/pvc/namespace", namespace.to_string());
        add("csi.storage.k8s.io/pvc/name", name.to_string());
    }
    csi::CreateVolumeRequest {
        parameters,
        volume_capabilities: asked.capabilities.iter().map(capability).collect(),
        capacity_range: Some(csi::CapacityRange {
            required_bytes: bytes(asked.capacity.required),
            limit_bytes: 0,
        }),
        ..csi::CreateVolumeRequest::default()
    }
}

fn capability(capability: &Capability) -> csi::VolumeCapability {
    let access_type = match &capability.access_type {
        AccessType::Block => CsiType::Block(BlockVolume {}),
        AccessType::Mount {
            fs_type,
            mount_flags,
        } => CsiType::Mount(MountVolume {
            fs_type: fs_type.map_or_else(String::new, |fs| fs.name().to_string()),
            mount_flags: mount_flags.clone(),
            volume_mount_group: String::new(),
        }),
    };
    let mode = match capability.access_mode {
        AccessMode::SingleNodeWriter => Mode::SingleNodeWriter,
        AccessMode::SingleNodeReaderOnly => Mode::SingleNodeReaderOnly,
        AccessMode::SingleNodeSingleWriter => Mode::SingleNodeSingleWriter,
        AccessMode::SingleNodeMultiWriter => Mode::SingleNodeMultiWriter,
        AccessMode::MultiNodeReaderOnly => Mode::MultiNodeReaderOnly,
    };
    csi::VolumeCapability {
        access_type: Some(access_type),
        access_mode: Some(CsiMode { mode: mode.into() }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{Allocation, CapacityRange, FsType, VolumeParameters, Wipe};
    use crate::service::request;

    #[test]
    fn the_request_for_a_copy_has_everything_of_its_volume() {
        let mode = AccessMode::SingleNodeMultiWriter;
        let xfs = AccessType::Mount {
            fs_type: Some(FsType::Xfs),
            mount_flags: vec!["noatime".into()],
        };
        for (access_type, block_size) in [(xfs, Some(4096)), (AccessType::Block, None)] {
            let asked = CreateVolume {
                name: "move".into(),
                capacity: CapacityRange::new(3 << 30, 0).unwrap(),
                capabilities: vec![Capability {
                    access_type: access_type.clone(),
                    access_mode: mode,
                }],
                parameters: VolumeParameters {
                    allocation: Allocation::Thick,
                    block_size,
                    mkfs_options: match access_type {
                        AccessType::Block => Vec::new(),
                        AccessType::Mount { .. } => vec!["-i".into(), "size=512".into()],
                    },
                    wipe: Wipe::Discard,
                    block_groups: false,
                    claim: Some("shop/data".into()),
                    ..VolumeParameters::default()
                },
                requisite: Vec::new(),
                content_source: None,
            };
            let mut sent = message(&asked);
            sent.name = "move".into();
            let parsed = request::create_volume(&sent, "key").unwrap();
            assert_eq!(parsed.capabilities, asked.capabilities);
            assert_eq!(parsed.capacity.required, asked.capacity.required);
            assert_eq!(parsed.parameters, asked.parameters);
        }
    }
}
