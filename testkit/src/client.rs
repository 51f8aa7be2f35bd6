//! The demo's client of CSI, with further calls that tests often make. The demo is part of the
//! released program, which the testkit is not; so what both need is there.

use std::ops::Deref;
use std::path::Path;
use std::time::{Duration, Instant};

use slackwater::csi;
use slackwater::demo::client::{self, at_least, endpoint, parameters, path_text};
use tonic::transport::Channel;
use tonic::{Code, Status};

use super::WAIT_TIMEOUT;

pub use client::{block, capability, mount};

/// A client of one socket.
#[derive(Clone)]
pub struct Client(client::Client);

impl Deref for Client {
    type Target = client::Client;

    fn deref(&self) -> &client::Client {
        &self.0
    }
}

impl Client {
    /// Connects at the first call.
    pub fn new(socket: &Path) -> Client {
        Client::over(endpoint(socket).unwrap().connect_lazy())
    }

    /// Uses a channel of the caller.
    pub fn over(channel: Channel) -> Client {
        Client(client::Client::over(channel))
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
            capacity_range: Some(at_least(size)),
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
            volume_path: path_text(path),
            ..Default::default()
        };
        Ok(self
            .node()
            .node_expand_volume(request)
            .await?
            .into_inner()
            .capacity_bytes as u64)
    }

    /// NodePublishVolume of an inline volume.
    pub async fn publish_inline(
        &self,
        id: &str,
        target: &Path,
        fs: &str,
        attributes: &[(&str, &str)],
    ) -> Result<(), Status> {
        let mut context = parameters(attributes);
        context.insert("csi.storage.k8s.io/ephemeral".into(), "true".into());
        let request = csi::NodePublishVolumeRequest {
            volume_id: id.into(),
            target_path: path_text(target),
            volume_capability: Some(mount(fs)),
            volume_context: context,
            ..Default::default()
        };
        self.node().node_publish_volume(request).await.map(drop)
    }

    /// GetCapacity of the default pool.
    pub async fn capacity(&self, parameters: &[(&str, &str)]) -> Result<u64, Status> {
        let request = csi::GetCapacityRequest {
            parameters: client::parameters(parameters),
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
