//! The client of CSI: the calls that a cluster's sidecars and kubelet make.

use std::error::Error;
use std::path::Path;
use std::time::{Duration, Instant};

use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Response, Status};

use super::process::Process;
use super::{Failed, Result};
use crate::csi::controller_client::ControllerClient;
use crate::csi::group_controller_client::GroupControllerClient;
use crate::csi::identity_client::IdentityClient;
use crate::csi::node_client::NodeClient;
use crate::csi::volume_capability::access_mode::Mode;
use crate::csi::volume_capability::{AccessMode, AccessType, BlockVolume, MountVolume};
use crate::csi::volume_content_source::{SnapshotSource, Type};
use crate::csi::{
    CapacityRange, ControllerExpandVolumeRequest, ControllerPublishVolumeRequest,
    ControllerUnpublishVolumeRequest, CreateVolumeGroupSnapshotRequest, CreateVolumeRequest,
    DeleteVolumeGroupSnapshotRequest, DeleteVolumeRequest, GetPluginInfoRequest,
    ListSnapshotsRequest, ListVolumesRequest, NodeExpandVolumeRequest, NodeGetVolumeStatsRequest,
    NodePublishVolumeRequest, NodeStageVolumeRequest, NodeUnpublishVolumeRequest,
    NodeUnstageVolumeRequest, ProbeRequest, VolumeCapability, VolumeContentSource, VolumeUsage,
};
use crate::model::FsType;
use crate::service::status::code_name;

/// Name of the demo's node.
pub(super) const NODE: &str = "demo";
/// Opening a pool with a few files takes milliseconds; the records of a new pool of LVM are written
/// first.
const START_TIMEOUT: Duration = Duration::from_secs(60);
/// The timeout of the sidecars; a driver that hangs must not keep the demo from cleaning up.
const CALL_TIMEOUT: Duration = Duration::from_secs(60);
const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// A volume and where it is used.
#[derive(Clone, Copy, Debug)]
pub(super) struct Use<'a> {
    pub(super) id: &'a str,
    pub(super) kind: Option<FsType>,
    pub(super) staging: &'a Path,
    pub(super) target: &'a Path,
}

pub(super) struct Client {
    identity: IdentityClient<Channel>,
    controller: ControllerClient<Channel>,
    node: NodeClient<Channel>,
    groups: GroupControllerClient<Channel>,
    pub(super) calls: u64,
}

/// The capability of a kind; `None` is a raw block device.
fn capability(kind: Option<FsType>) -> VolumeCapability {
    VolumeCapability {
        access_type: Some(match kind {
            Some(fs) => AccessType::Mount(MountVolume {
                fs_type: fs.name().into(),
                ..Default::default()
            }),
            None => AccessType::Block(BlockVolume {}),
        }),
        access_mode: Some(AccessMode {
            mode: Mode::SingleNodeWriter.into(),
        }),
    }
}

fn at_least(bytes: u64) -> Result<Option<CapacityRange>> {
    let required_bytes =
        i64::try_from(bytes).map_err(|error| Failed::of("capacity_range", &error))?;
    Ok(Some(CapacityRange {
        required_bytes,
        limit_bytes: 0,
    }))
}

fn text(path: &Path) -> String {
    path.display().to_string()
}

impl Client {
    /// Waits until the driver is ready.
    pub(super) async fn connect(socket: &Path, driver: &mut Process) -> Result<Client> {
        const STEP: &str = "connect";
        let endpoint = Endpoint::from_shared(format!("unix://{}", socket.display()));
        let endpoint = endpoint
            .map_err(|error| Failed::of(STEP, &error))?
            .timeout(CALL_TIMEOUT);
        let begun = Instant::now();
        loop {
            if let Some(status) = driver.try_wait() {
                return Err(Failed::new(
                    STEP,
                    format!("the driver exited with {status}"),
                ));
            }
            let problem = match endpoint.connect().await {
                Ok(channel) => {
                    let mut client = Client {
                        identity: IdentityClient::new(channel.clone()),
                        controller: ControllerClient::new(channel.clone()),
                        node: NodeClient::new(channel.clone()),
                        groups: GroupControllerClient::new(channel),
                        calls: 0,
                    };
                    match client.is_ready().await {
                        Ok(true) => return Ok(client),
                        Ok(false) => "it is not ready".to_string(),
                        Err(failed) => failed.to_string(),
                    }
                }
                Err(error) => crate::error::chain(&error),
            };
            if begun.elapsed() > START_TIMEOUT {
                return Err(Failed::new(STEP, problem));
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }

    fn answer<T>(
        &mut self,
        call: &str,
        answer: std::result::Result<Response<T>, Status>,
    ) -> Result<T> {
        self.calls += 1;
        answer.map(Response::into_inner).map_err(|status| {
            let cause = format!("{}: {}", code_name(status.code()), status.message());
            Failed::new(call, cause)
        })
    }

    async fn is_ready(&mut self) -> Result<bool> {
        let answer = self.identity.probe(ProbeRequest {}).await;
        Ok(self.answer("Probe", answer)?.ready.unwrap_or(true))
    }

    /// The name and version of the driver.
    pub(super) async fn plugin(&mut self) -> Result<String> {
        let answer = self.identity.get_plugin_info(GetPluginInfoRequest {}).await;
        let info = self.answer("GetPluginInfo", answer)?;
        Ok(format!("{} {}", info.name, info.vendor_version))
    }

    /// CreateVolume, from a snapshot if one is given; returns the ID. Repeated while the pool is not
    /// served, as a provisioner does: the records of a large pool of LVM may still be written.
    pub(super) async fn create(
        &mut self,
        name: &str,
        kind: Option<FsType>,
        bytes: u64,
        snapshot: Option<String>,
    ) -> Result<String> {
        let source = snapshot.map(|snapshot_id| VolumeContentSource {
            r#type: Some(Type::Snapshot(SnapshotSource { snapshot_id })),
        });
        let request = CreateVolumeRequest {
            name: name.into(),
            capacity_range: at_least(bytes)?,
            volume_capabilities: vec![capability(kind)],
            volume_content_source: source,
            ..Default::default()
        };
        let begun = Instant::now();
        let answer = loop {
            match self.controller.create_volume(request.clone()).await {
                // A status with a source is of the connection: the driver has ended.
                Err(status)
                    if status.code() == Code::Unavailable
                        && status.source().is_none()
                        && begun.elapsed() < START_TIMEOUT =>
                {
                    tokio::time::sleep(POLL_INTERVAL).await;
                }
                answer => break answer,
            }
        };
        let created = self.answer("CreateVolume", answer)?.volume;
        created
            .map(|volume| volume.volume_id)
            .ok_or_else(|| Failed::new("CreateVolume", "the answer has no volume"))
    }

    /// CreateVolumeGroupSnapshot with hooks; returns its ID and those of its members.
    pub(super) async fn group(
        &mut self,
        name: &str,
        volumes: Vec<String>,
    ) -> Result<(String, Vec<String>)> {
        let request = CreateVolumeGroupSnapshotRequest {
            name: name.into(),
            source_volume_ids: volumes,
            parameters: [("consistency".to_string(), "application".to_string())].into(),
            ..Default::default()
        };
        let answer = self.groups.create_volume_group_snapshot(request).await;
        let created = self.answer("CreateVolumeGroupSnapshot", answer)?;
        let created = created.group_snapshot.unwrap_or_default();
        let members = created
            .snapshots
            .into_iter()
            .map(|member| member.snapshot_id);
        Ok((created.group_snapshot_id, members.collect()))
    }

    /// DeleteVolumeGroupSnapshot.
    pub(super) async fn delete_group(&mut self, id: &str, members: Vec<String>) -> Result<()> {
        let request = DeleteVolumeGroupSnapshotRequest {
            group_snapshot_id: id.into(),
            snapshot_ids: members,
            ..Default::default()
        };
        let answer = self.groups.delete_volume_group_snapshot(request).await;
        self.answer("DeleteVolumeGroupSnapshot", answer).map(drop)
    }

    /// ControllerPublish, NodeStage and NodePublish, as for a pod that starts.
    pub(super) async fn bring_up(&mut self, volume: Use<'_>) -> Result<()> {
        let request = ControllerPublishVolumeRequest {
            volume_id: volume.id.into(),
            node_id: NODE.into(),
            volume_capability: Some(capability(volume.kind)),
            ..Default::default()
        };
        let answer = self.controller.controller_publish_volume(request).await;
        let attached = self.answer("ControllerPublishVolume", answer)?;
        let publish_context = attached.publish_context;
        let request = NodeStageVolumeRequest {
            volume_id: volume.id.into(),
            publish_context: publish_context.clone(),
            staging_target_path: text(volume.staging),
            volume_capability: Some(capability(volume.kind)),
            ..Default::default()
        };
        let answer = self.node.node_stage_volume(request).await;
        self.answer("NodeStageVolume", answer)?;
        let request = NodePublishVolumeRequest {
            volume_id: volume.id.into(),
            publish_context,
            staging_target_path: text(volume.staging),
            target_path: text(volume.target),
            volume_capability: Some(capability(volume.kind)),
            ..Default::default()
        };
        let answer = self.node.node_publish_volume(request).await;
        self.answer("NodePublishVolume", answer).map(drop)
    }

    /// The calls of a pod that ends: NodeUnpublish, NodeUnstage and ControllerUnpublish.
    pub(super) async fn take_down(&mut self, volume: Use<'_>) -> Result<()> {
        let request = NodeUnpublishVolumeRequest {
            volume_id: volume.id.into(),
            target_path: text(volume.target),
        };
        let answer = self.node.node_unpublish_volume(request).await;
        self.answer("NodeUnpublishVolume", answer)?;
        let request = NodeUnstageVolumeRequest {
            volume_id: volume.id.into(),
            staging_target_path: text(volume.staging),
        };
        let answer = self.node.node_unstage_volume(request).await;
        self.answer("NodeUnstageVolume", answer)?;
        let request = ControllerUnpublishVolumeRequest {
            volume_id: volume.id.into(),
            node_id: NODE.into(),
            ..Default::default()
        };
        let answer = self.controller.controller_unpublish_volume(request).await;
        self.answer("ControllerUnpublishVolume", answer).map(drop)
    }

    /// NodeGetVolumeStats; returns the bytes.
    pub(super) async fn stats(&mut self, volume: Use<'_>) -> Result<VolumeUsage> {
        let request = NodeGetVolumeStatsRequest {
            volume_id: volume.id.into(),
            volume_path: text(volume.target),
            ..Default::default()
        };
        let answer = self.node.node_get_volume_stats(request).await;
        let stats = self.answer("NodeGetVolumeStats", answer)?;
        let bytes = stats.usage.into_iter().next();
        bytes.ok_or_else(|| Failed::new("NodeGetVolumeStats", "the answer has no usage"))
    }

    /// ControllerExpand and NodeExpand.
    pub(super) async fn grow(&mut self, volume: Use<'_>, bytes: u64) -> Result<()> {
        let request = ControllerExpandVolumeRequest {
            volume_id: volume.id.into(),
            capacity_range: at_least(bytes)?,
            volume_capability: Some(capability(volume.kind)),
            ..Default::default()
        };
        let answer = self.controller.controller_expand_volume(request).await;
        let grown = self.answer("ControllerExpandVolume", answer)?;
        if !grown.node_expansion_required {
            return Ok(());
        }
        let request = NodeExpandVolumeRequest {
            volume_id: volume.id.into(),
            volume_path: text(volume.target),
            staging_target_path: text(volume.staging),
            capacity_range: at_least(bytes)?,
            volume_capability: Some(capability(volume.kind)),
            ..Default::default()
        };
        let answer = self.node.node_expand_volume(request).await;
        self.answer("NodeExpandVolume", answer).map(drop)
    }

    /// DeleteVolume.
    pub(super) async fn delete(&mut self, id: &str) -> Result<()> {
        let request = DeleteVolumeRequest {
            volume_id: id.into(),
            ..Default::default()
        };
        let answer = self.controller.delete_volume(request).await;
        self.answer("DeleteVolume", answer).map(drop)
    }

    /// Deletes every listed volume, also volumes whose creation was not answered. The check at the
    /// end reports what cannot be deleted.
    pub(super) async fn delete_all(&mut self) {
        let answer = self
            .controller
            .list_volumes(ListVolumesRequest::default())
            .await;
        let Ok(list) = self.answer("ListVolumes", answer) else {
            return;
        };
        let answer = self
            .controller
            .list_snapshots(ListSnapshotsRequest::default())
            .await;
        let snapshots = self.answer("ListSnapshots", answer).unwrap_or_default();
        for snapshot in snapshots
            .entries
            .into_iter()
            .filter_map(|entry| entry.snapshot)
        {
            let _ = self
                .delete_group(&snapshot.group_snapshot_id, Vec::new())
                .await;
        }
        for volume in list.entries.into_iter().filter_map(|entry| entry.volume) {
            let _ = self.delete(&volume.volume_id).await;
        }
    }
}
