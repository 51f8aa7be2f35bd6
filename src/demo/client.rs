//! A client of CSI, with a method for each call that a sidecar or the kubelet makes.
//!
//! Tests and benchmarks use it too, through the testkit: the demo is part of the released program,
//! which the testkit is not.

use std::collections::HashMap;
use std::path::Path;
use std::time::Duration;

use tonic::transport::{Channel, Endpoint, Error};
use tonic::{Response, Status};

use crate::csi;
use crate::csi::controller_client::ControllerClient;
use crate::csi::group_controller_client::GroupControllerClient;
use crate::csi::identity_client::IdentityClient;
use crate::csi::node_client::NodeClient;
use crate::csi::volume_capability::access_mode::Mode;
use crate::csi::volume_capability::{AccessMode, AccessType, BlockVolume, MountVolume};
use crate::csi::volume_content_source::{SnapshotSource, Type, VolumeSource};
use crate::csi::{
    CapacityRange, VolumeCapability, VolumeContentSource, VolumeGroupSnapshot, VolumeUsage,
};

/// A running driver answers Probe at once.
const PROBE_TIMEOUT: Duration = Duration::from_secs(10);

/// A client of one driver.
#[derive(Clone, Debug)]
pub struct Client {
    channel: Channel,
}

/// A capability to mount; "" selects the driver's default file system.
pub fn mount(fs: &str) -> VolumeCapability {
    let mount = MountVolume {
        fs_type: fs.into(),
        ..Default::default()
    };
    capability(AccessType::Mount(mount), Mode::SingleNodeWriter)
}

/// A capability for a raw block device.
pub fn block() -> VolumeCapability {
    capability(AccessType::Block(BlockVolume {}), Mode::SingleNodeWriter)
}

/// A capability with any access type and mode.
pub fn capability(access_type: AccessType, mode: Mode) -> VolumeCapability {
    VolumeCapability {
        access_type: Some(access_type),
        access_mode: Some(AccessMode { mode: mode.into() }),
    }
}

/// A snapshot as the source of a volume.
pub fn from_snapshot(id: &str) -> VolumeContentSource {
    let snapshot_id = id.to_string();
    VolumeContentSource {
        r#type: Some(Type::Snapshot(SnapshotSource { snapshot_id })),
    }
}

/// A volume as the source of another.
pub fn from_volume(id: &str) -> VolumeContentSource {
    let volume_id = id.to_string();
    VolumeContentSource {
        r#type: Some(Type::Volume(VolumeSource { volume_id })),
    }
}

/// The map of a request's parameters.
pub fn parameters(pairs: &[(&str, &str)]) -> HashMap<String, String> {
    let pairs = pairs.iter();
    pairs
        .map(|(key, value)| (key.to_string(), value.to_string()))
        .collect()
}

/// A range with a lower limit only.
pub fn at_least(bytes: u64) -> CapacityRange {
    CapacityRange {
        required_bytes: i64::try_from(bytes).unwrap_or(i64::MAX),
        limit_bytes: 0,
    }
}

/// A path in a request.
pub fn path_text(path: &Path) -> String {
    path.display().to_string()
}

/// The endpoint of a driver's socket.
pub fn endpoint(socket: &Path) -> Result<Endpoint, Error> {
    Endpoint::from_shared(format!("unix://{}", socket.display()))
}

impl Client {
    /// Uses a channel of the caller.
    pub fn over(channel: Channel) -> Client {
        Client { channel }
    }

    /// The channel that the client uses.
    pub fn channel(&self) -> Channel {
        self.channel.clone()
    }

    /// The client of the controller's service.
    pub fn controller(&self) -> ControllerClient<Channel> {
        ControllerClient::new(self.channel())
    }

    /// The client of the node's service.
    pub fn node(&self) -> NodeClient<Channel> {
        NodeClient::new(self.channel())
    }

    /// The client of the identity service.
    pub fn identity(&self) -> IdentityClient<Channel> {
        IdentityClient::new(self.channel())
    }

    /// The client of the group controller's service.
    pub fn groups(&self) -> GroupControllerClient<Channel> {
        GroupControllerClient::new(self.channel())
    }

    /// Whether Probe reports readiness, within ten seconds.
    pub async fn probe(&self) -> Result<bool, Status> {
        let mut identity = self.identity();
        let probe = tokio::time::timeout(PROBE_TIMEOUT, identity.probe(csi::ProbeRequest {}));
        let late = |_| Status::deadline_exceeded("no reply within ten seconds");
        let reply = probe.await.map_err(late)??;
        Ok(reply.get_ref().ready != Some(false))
    }

    /// Whether Probe reports readiness within ten seconds.
    pub async fn is_ready(&self) -> bool {
        self.probe().await.unwrap_or(false)
    }

    /// CreateVolume. Returns the ID.
    pub async fn create(
        &self,
        name: &str,
        size: u64,
        capability: VolumeCapability,
        parameters: &[(&str, &str)],
    ) -> Result<String, Status> {
        let created = self.create_volume(name, size, capability, None, parameters);
        created.await.map(|volume| volume.volume_id)
    }

    /// CreateVolume from a source.
    pub async fn create_from(
        &self,
        name: &str,
        size: u64,
        capability: VolumeCapability,
        source: VolumeContentSource,
        parameters: &[(&str, &str)],
    ) -> Result<csi::Volume, Status> {
        self.create_volume(name, size, capability, Some(source), parameters)
            .await
    }

    pub(super) async fn create_volume(
        &self,
        name: &str,
        size: u64,
        capability: VolumeCapability,
        source: Option<VolumeContentSource>,
        pairs: &[(&str, &str)],
    ) -> Result<csi::Volume, Status> {
        let request = csi::CreateVolumeRequest {
            name: name.into(),
            capacity_range: Some(at_least(size)),
            volume_capabilities: vec![capability],
            volume_content_source: source,
            parameters: parameters(pairs),
            ..Default::default()
        };
        let answer = self.controller().create_volume(request).await?.into_inner();
        answer.volume.ok_or_else(|| incomplete("volume"))
    }

    /// DeleteVolume.
    pub async fn delete(&self, id: &str) -> Result<(), Status> {
        let request = csi::DeleteVolumeRequest {
            volume_id: id.into(),
            ..Default::default()
        };
        self.controller().delete_volume(request).await.map(drop)
    }

    /// NodeStageVolume.
    pub async fn stage(
        &self,
        id: &str,
        staging: &Path,
        capability: VolumeCapability,
    ) -> Result<(), Status> {
        let request = csi::NodeStageVolumeRequest {
            volume_id: id.into(),
            staging_target_path: path_text(staging),
            volume_capability: Some(capability),
            ..Default::default()
        };
        self.node().node_stage_volume(request).await.map(drop)
    }

    /// NodeUnstageVolume.
    pub async fn unstage(&self, id: &str, staging: &Path) -> Result<(), Status> {
        let request = csi::NodeUnstageVolumeRequest {
            volume_id: id.into(),
            staging_target_path: path_text(staging),
        };
        self.node().node_unstage_volume(request).await.map(drop)
    }

    /// NodePublishVolume.
    pub async fn publish(
        &self,
        id: &str,
        staging: &Path,
        target: &Path,
        capability: VolumeCapability,
        readonly: bool,
    ) -> Result<(), Status> {
        let request = csi::NodePublishVolumeRequest {
            volume_id: id.into(),
            staging_target_path: path_text(staging),
            target_path: path_text(target),
            volume_capability: Some(capability),
            readonly,
            ..Default::default()
        };
        self.node().node_publish_volume(request).await.map(drop)
    }

    /// NodeUnpublishVolume.
    pub async fn unpublish(&self, id: &str, target: &Path) -> Result<(), Status> {
        let request = csi::NodeUnpublishVolumeRequest {
            volume_id: id.into(),
            target_path: path_text(target),
        };
        self.node().node_unpublish_volume(request).await.map(drop)
    }

    /// NodeGetVolumeStats: (total, used) in bytes.
    pub async fn stats(&self, id: &str, path: &Path) -> Result<(u64, u64), Status> {
        let request = csi::NodeGetVolumeStatsRequest {
            volume_id: id.into(),
            volume_path: path_text(path),
            ..Default::default()
        };
        let answer = self.node().node_get_volume_stats(request).await;
        let bytes = |usage: VolumeUsage| {
            let total = u64::try_from(usage.total).ok()?;
            Some((total, u64::try_from(usage.used).ok()?))
        };
        let usage = answer.map(Response::into_inner)?.usage.into_iter().next();
        usage.and_then(bytes).ok_or_else(|| incomplete("usage"))
    }

    /// ListVolumes with all pages. Returns the IDs.
    pub async fn list(&self) -> Result<Vec<String>, Status> {
        let (mut ids, mut token) = (Vec::new(), String::new());
        loop {
            let request = csi::ListVolumesRequest {
                max_entries: 0,
                starting_token: token,
            };
            let page = self.controller().list_volumes(request).await?.into_inner();
            let volumes = page.entries.into_iter().filter_map(|entry| entry.volume);
            ids.extend(volumes.map(|volume| volume.volume_id));
            token = page.next_token;
            if token.is_empty() {
                return Ok(ids);
            }
        }
    }

    /// CreateVolumeGroupSnapshot.
    pub async fn group(
        &self,
        name: &str,
        volumes: &[String],
        pairs: &[(&str, &str)],
    ) -> Result<VolumeGroupSnapshot, Status> {
        let request = csi::CreateVolumeGroupSnapshotRequest {
            name: name.into(),
            source_volume_ids: volumes.to_vec(),
            parameters: parameters(pairs),
            ..Default::default()
        };
        let answer = self.groups().create_volume_group_snapshot(request).await?;
        let group = answer.into_inner().group_snapshot;
        group.ok_or_else(|| incomplete("group_snapshot"))
    }

    /// DeleteVolumeGroupSnapshot.
    pub async fn delete_group(&self, id: &str, members: &[String]) -> Result<(), Status> {
        let request = csi::DeleteVolumeGroupSnapshotRequest {
            group_snapshot_id: id.into(),
            snapshot_ids: members.to_vec(),
            ..Default::default()
        };
        let mut groups = self.groups();
        groups.delete_volume_group_snapshot(request).await.map(drop)
    }
}

/// The IDs of a group's members.
pub fn members(group: &VolumeGroupSnapshot) -> Vec<String> {
    let each = group.snapshots.iter();
    each.map(|snapshot| snapshot.snapshot_id.clone()).collect()
}

fn incomplete(field: &str) -> Status {
    Status::internal(format!("the reply of the driver has no {field}"))
}
