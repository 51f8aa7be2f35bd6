//! A CSI client with short methods for the calls that tests often make.

use std::collections::HashMap;
use std::path::Path;
use std::time::{Duration, Instant};

use slackwater::csi::controller_client::ControllerClient;
use slackwater::csi::identity_client::IdentityClient;
use slackwater::csi::node_client::NodeClient;
use slackwater::csi::volume_capability::access_mode::Mode;
use slackwater::csi::volume_capability::{AccessMode, AccessType, BlockVolume, MountVolume};
use slackwater::csi::{self, CapacityRange, VolumeCapability};
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Status};

use super::WAIT_TIMEOUT;

/// A client of one socket.
#[derive(Clone)]
pub struct Client {
    pub(super) channel: Channel,
}

/// A mount capability; "" selects the driver's default file system.
pub fn mount(fs: &str) -> VolumeCapability {
    capability(
        AccessType::Mount(MountVolume {
            fs_type: fs.into(),
            ..Default::default()
        }),
        Mode::SingleNodeWriter,
    )
}

/// A block capability.
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

fn text(path: &Path) -> String {
    path.to_str().unwrap().to_string()
}

impl Client {
    /// Connects at the first call.
    pub fn new(socket: &Path) -> Client {
        let endpoint = Endpoint::from_shared(format!("unix://{}", socket.display()));
        let channel = endpoint.unwrap().connect_lazy();
        Client { channel }
    }

    /// Uses a channel of the caller.
    pub fn over(channel: Channel) -> Client {
        Client { channel }
    }

    /// The controller's stub.
    pub fn controller(&self) -> ControllerClient<Channel> {
        ControllerClient::new(self.channel.clone())
    }

    /// The node's stub.
    pub fn node(&self) -> NodeClient<Channel> {
        NodeClient::new(self.channel.clone())
    }

    /// The identity's stub.
    pub fn identity(&self) -> IdentityClient<Channel> {
        IdentityClient::new(self.channel.clone())
    }

    /// Whether Probe reports readiness within ten seconds.
    pub async fn is_ready(&self) -> bool {
        let mut identity = self.identity();
        let probe = identity.probe(csi::ProbeRequest {});
        matches!(tokio::time::timeout(Duration::from_secs(10), probe).await, Ok(Ok(answer)) if answer.get_ref().ready != Some(false))
    }

    /// CreateVolume. Returns the ID.
    pub async fn create(
        &self,
        name: &str,
        size: u64,
        capability: VolumeCapability,
        parameters: &[(&str, &str)],
    ) -> Result<String, Status> {
        let request = csi::CreateVolumeRequest {
            name: name.into(),
            capacity_range: Some(CapacityRange {
                required_bytes: size as i64,
                limit_bytes: 0,
            }),
            volume_capabilities: vec![capability],
            parameters: parameters
                .iter()
                .map(|(k, v)| (k.to_string(), v.to_string()))
                .collect(),
            ..Default::default()
        };
        let answer = self.controller().create_volume(request).await?.into_inner();
        Ok(answer.volume.unwrap().volume_id)
    }

    /// DeleteVolume.
    pub async fn delete(&self, id: &str) -> Result<(), Status> {
        let request = csi::DeleteVolumeRequest {
            volume_id: id.into(),
            ..Default::default()
        };
        self.controller().delete_volume(request).await.map(drop)
    }

    /// DeleteVolume of a volume that is no longer in use. A process that copied the mount table in
    /// the meantime, as a container does when it starts, may hold its device for a while.
    pub async fn delete_unused(&self, id: &str) {
        let start = Instant::now();
        while let Err(status) = self.delete(id).await {
            let is_held = status.code() == Code::FailedPrecondition;
            assert!(is_held && start.elapsed() < WAIT_TIMEOUT, "{status}");
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    }

    /// ControllerExpandVolume.
    pub async fn expand(&self, id: &str, size: u64) -> Result<u64, Status> {
        let request = csi::ControllerExpandVolumeRequest {
            volume_id: id.into(),
            capacity_range: Some(CapacityRange {
                required_bytes: size as i64,
                limit_bytes: 0,
            }),
            ..Default::default()
        };
        Ok(self
            .controller()
            .controller_expand_volume(request)
            .await?
            .into_inner()
            .capacity_bytes as u64)
    }

    /// NodeExpandVolume.
    pub async fn expand_node(&self, id: &str, path: &Path) -> Result<u64, Status> {
        let request = csi::NodeExpandVolumeRequest {
            volume_id: id.into(),
            volume_path: text(path),
            ..Default::default()
        };
        Ok(self
            .node()
            .node_expand_volume(request)
            .await?
            .into_inner()
            .capacity_bytes as u64)
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
            staging_target_path: text(staging),
            volume_capability: Some(capability),
            ..Default::default()
        };
        self.node().node_stage_volume(request).await.map(drop)
    }

    /// NodeUnstageVolume.
    pub async fn unstage(&self, id: &str, staging: &Path) -> Result<(), Status> {
        let request = csi::NodeUnstageVolumeRequest {
            volume_id: id.into(),
            staging_target_path: text(staging),
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
            staging_target_path: text(staging),
            target_path: text(target),
            volume_capability: Some(capability),
            readonly,
            ..Default::default()
        };
        self.node().node_publish_volume(request).await.map(drop)
    }

    /// NodePublishVolume of an inline volume.
    pub async fn publish_inline(
        &self,
        id: &str,
        target: &Path,
        fs: &str,
        attributes: &[(&str, &str)],
    ) -> Result<(), Status> {
        let mut context: HashMap<String, String> = attributes
            .iter()
            .map(|(k, v)| (k.to_string(), v.to_string()))
            .collect();
        context.insert("csi.storage.k8s.io/ephemeral".into(), "true".into());
        let request = csi::NodePublishVolumeRequest {
            volume_id: id.into(),
            target_path: text(target),
            volume_capability: Some(mount(fs)),
            volume_context: context,
            ..Default::default()
        };
        self.node().node_publish_volume(request).await.map(drop)
    }

    /// NodeUnpublishVolume.
    pub async fn unpublish(&self, id: &str, target: &Path) -> Result<(), Status> {
        let request = csi::NodeUnpublishVolumeRequest {
            volume_id: id.into(),
            target_path: text(target),
        };
        self.node().node_unpublish_volume(request).await.map(drop)
    }

    /// NodeGetVolumeStats: (total, used) in bytes.
    pub async fn stats(&self, id: &str, path: &Path) -> Result<(u64, u64), Status> {
        let request = csi::NodeGetVolumeStatsRequest {
            volume_id: id.into(),
            volume_path: text(path),
            ..Default::default()
        };
        let usage = self
            .node()
            .node_get_volume_stats(request)
            .await?
            .into_inner()
            .usage;
        Ok((usage[0].total as u64, usage[0].used as u64))
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
            ids.extend(
                page.entries
                    .into_iter()
                    .filter_map(|entry| entry.volume)
                    .map(|volume| volume.volume_id),
            );
            token = page.next_token;
            if token.is_empty() {
                return Ok(ids);
            }
        }
    }

    /// GetCapacity of the default pool.
    pub async fn capacity(&self, parameters: &[(&str, &str)]) -> Result<u64, Status> {
        let parameters = parameters
            .iter()
            .map(|(k, v)| (k.to_string(), v.to_string()))
            .collect();
        let request = csi::GetCapacityRequest {
            parameters,
            ..Default::default()
        };
        Ok(self
            .controller()
            .get_capacity(request)
            .await?
            .into_inner()
            .available_capacity as u64)
    }
}
