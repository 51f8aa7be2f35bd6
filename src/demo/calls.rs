//! The calls of the demo, in the order in which a cluster's sidecars and the kubelet make them, and
//! their number.

use std::error::Error;
use std::path::Path;
use std::time::{Duration, Instant};

use tonic::{Code, Response, Status};

use super::client::{Client, at_least, block, endpoint, from_snapshot, members, mount, path_text};
use super::process::Process;
use super::{Failed, Result};
use crate::csi::{
    ControllerExpandVolumeRequest, ControllerPublishVolumeRequest,
    ControllerUnpublishVolumeRequest, GetPluginInfoRequest, ListSnapshotsRequest,
    NodeExpandVolumeRequest, VolumeCapability,
};
use crate::error::chain;
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

pub(super) struct Calls {
    client: Client,
    pub(super) count: u64,
}

/// The capability of a kind; `None` is a raw block device.
fn capability(kind: Option<FsType>) -> VolumeCapability {
    kind.map_or_else(block, |fs| mount(fs.name()))
}

fn reason(status: &Status) -> String {
    format!("{}: {}", code_name(status.code()), status.message())
}

impl Calls {
    /// Waits until the driver is ready.
    pub(super) async fn connect(socket: &Path, driver: &mut Process) -> Result<Calls> {
        const STEP: &str = "connect";
        let endpoint = endpoint(socket).map_err(|error| Failed::of(STEP, &error))?;
        let endpoint = endpoint.timeout(CALL_TIMEOUT);
        let begun = Instant::now();
        loop {
            if let Some(status) = driver.try_wait() {
                let cause = format!("the driver exited with {status}");
                return Err(Failed::new(STEP, cause));
            }
            let problem = match endpoint.connect().await.map(Client::over) {
                Ok(client) => match client.probe().await {
                    Ok(true) => return Ok(Calls { client, count: 1 }),
                    Ok(false) => "it is not ready".to_string(),
                    Err(status) => reason(&status),
                },
                Err(error) => chain(&error),
            };
            if begun.elapsed() > START_TIMEOUT {
                return Err(Failed::new(STEP, problem));
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }

    /// Counts a call, and names it in its failure.
    fn reply<T>(&mut self, call: &str, reply: Result<T, Status>) -> Result<T> {
        self.count += 1;
        reply.map_err(|status| Failed::new(call, reason(&status)))
    }

    /// The name and version of the driver.
    pub(super) async fn plugin(&mut self) -> Result<String> {
        let mut identity = self.client.identity();
        let reply = identity.get_plugin_info(GetPluginInfoRequest {}).await;
        let info = self.reply("GetPluginInfo", reply.map(Response::into_inner))?;
        Ok(format!("{} {}", info.name, info.vendor_version))
    }

    /// CreateVolume, from a snapshot if one is given; returns the ID. Repeated while the pool is not
    /// served, as a provisioner does: the records of a large pool of LVM may still be written.
    pub(super) async fn create(
        &mut self,
        name: &str,
        kind: Option<FsType>,
        bytes: u64,
        snapshot: Option<&str>,
    ) -> Result<String> {
        let begun = Instant::now();
        let reply = loop {
            let source = snapshot.map(from_snapshot);
            let created = (self.client).create_volume(name, bytes, capability(kind), source, &[]);
            match created.await {
                // A status with a source is of the connection: the driver has ended.
                Err(status)
                    if status.code() == Code::Unavailable
                        && status.source().is_none()
                        && begun.elapsed() < START_TIMEOUT =>
                {
                    tokio::time::sleep(POLL_INTERVAL).await;
                }
                reply => break reply,
            }
        };
        let volume = self.reply("CreateVolume", reply)?;
        Ok(volume.volume_id)
    }

    /// CreateVolumeGroupSnapshot with hooks; returns its ID and those of its members.
    pub(super) async fn group(
        &mut self,
        name: &str,
        volumes: &[String],
    ) -> Result<(String, Vec<String>)> {
        let parameters = [("consistency", "application")];
        let reply = self.client.group(name, volumes, &parameters).await;
        let group = self.reply("CreateVolumeGroupSnapshot", reply)?;
        Ok((group.group_snapshot_id.clone(), members(&group)))
    }

    /// DeleteVolumeGroupSnapshot.
    pub(super) async fn delete_group(&mut self, id: &str, members: &[String]) -> Result<()> {
        let reply = self.client.delete_group(id, members).await;
        self.reply("DeleteVolumeGroupSnapshot", reply)
    }

    /// ControllerPublish, NodeStage and NodePublish, as for a pod that starts.
    pub(super) async fn bring_up(&mut self, volume: Use<'_>) -> Result<()> {
        let capability = capability(volume.kind);
        let request = ControllerPublishVolumeRequest {
            volume_id: volume.id.into(),
            node_id: NODE.into(),
            volume_capability: Some(capability.clone()),
            ..Default::default()
        };
        let mut controller = self.client.controller();
        let reply = controller.controller_publish_volume(request).await;
        let attached = self.reply("ControllerPublishVolume", reply)?;
        let context = attached.into_inner().publish_context;
        if !context.is_empty() {
            let cause = "the driver's publish context is not empty, and would have to be passed on";
            return Err(Failed::new("ControllerPublishVolume", cause));
        }
        let (id, staging, target) = (volume.id, volume.staging, volume.target);
        let reply = self.client.stage(id, staging, capability.clone()).await;
        self.reply("NodeStageVolume", reply)?;
        let reply = self.client.publish(id, staging, target, capability, false);
        let reply = reply.await;
        self.reply("NodePublishVolume", reply)
    }

    /// The calls of a pod that ends: NodeUnpublish, NodeUnstage and ControllerUnpublish.
    pub(super) async fn take_down(&mut self, volume: Use<'_>) -> Result<()> {
        let reply = self.client.unpublish(volume.id, volume.target).await;
        self.reply("NodeUnpublishVolume", reply)?;
        let reply = self.client.unstage(volume.id, volume.staging).await;
        self.reply("NodeUnstageVolume", reply)?;
        let request = ControllerUnpublishVolumeRequest {
            volume_id: volume.id.into(),
            node_id: NODE.into(),
            ..Default::default()
        };
        let mut controller = self.client.controller();
        let reply = controller.controller_unpublish_volume(request).await;
        self.reply("ControllerUnpublishVolume", reply.map(drop))
    }

    /// NodeGetVolumeStats: (total, used) in bytes.
    pub(super) async fn stats(&mut self, volume: Use<'_>) -> Result<(u64, u64)> {
        let reply = self.client.stats(volume.id, volume.target).await;
        self.reply("NodeGetVolumeStats", reply)
    }

    /// ControllerExpand and NodeExpand.
    pub(super) async fn grow(&mut self, volume: Use<'_>, bytes: u64) -> Result<()> {
        let request = ControllerExpandVolumeRequest {
            volume_id: volume.id.into(),
            capacity_range: Some(at_least(bytes)),
            volume_capability: Some(capability(volume.kind)),
            ..Default::default()
        };
        let mut controller = self.client.controller();
        let reply = controller.controller_expand_volume(request).await;
        let grown = self.reply("ControllerExpandVolume", reply.map(Response::into_inner))?;
        if !grown.node_expansion_required {
            return Ok(());
        }
        let request = NodeExpandVolumeRequest {
            volume_id: volume.id.into(),
            volume_path: path_text(volume.target),
            staging_target_path: path_text(volume.staging),
            capacity_range: Some(at_least(bytes)),
            volume_capability: Some(capability(volume.kind)),
            ..Default::default()
        };
        let reply = self.client.node().node_expand_volume(request).await;
        self.reply("NodeExpandVolume", reply.map(drop))
    }

    /// DeleteVolume.
    pub(super) async fn delete(&mut self, id: &str) -> Result<()> {
        let reply = self.client.delete(id).await;
        self.reply("DeleteVolume", reply)
    }

    /// Deletes every listed volume, also volumes whose creation was not answered. The check at the
    /// end reports what cannot be deleted.
    pub(super) async fn delete_all(&mut self) {
        let reply = self.client.list().await;
        let Ok(volumes) = self.reply("ListVolumes", reply) else {
            return;
        };
        let mut controller = self.client.controller();
        let reply = controller.list_snapshots(ListSnapshotsRequest::default());
        let reply = reply.await.map(Response::into_inner);
        let snapshots = self.reply("ListSnapshots", reply).unwrap_or_default();
        let snapshots = snapshots.entries.into_iter();
        for snapshot in snapshots.filter_map(|entry| entry.snapshot) {
            let _ = self.delete_group(&snapshot.group_snapshot_id, &[]).await;
        }
        for id in volumes {
            let _ = self.delete(&id).await;
        }
    }
}
