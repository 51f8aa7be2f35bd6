//! Short methods of the CSI client for snapshots, groups and volumes created from them.

use std::collections::HashMap;

use slackwater::csi::group_controller_client::GroupControllerClient;
use slackwater::csi::snapshot_metadata_client::SnapshotMetadataClient;
use slackwater::csi::volume_content_source::{SnapshotSource, Type, VolumeSource};
use slackwater::csi::{self, CapacityRange, VolumeCapability, VolumeContentSource};
use tonic::Status;
use tonic::transport::Channel;

use super::Client;

fn map(pairs: &[(&str, &str)]) -> HashMap<String, String> {
    pairs
        .iter()
        .map(|(key, value)| (key.to_string(), value.to_string()))
        .collect()
}

/// A snapshot as a source.
pub fn from_snapshot(id: &str) -> VolumeContentSource {
    let snapshot_id = id.to_string();
    VolumeContentSource {
        r#type: Some(Type::Snapshot(SnapshotSource { snapshot_id })),
    }
}

/// A volume as a source.
pub fn from_volume(id: &str) -> VolumeContentSource {
    let volume_id = id.to_string();
    VolumeContentSource {
        r#type: Some(Type::Volume(VolumeSource { volume_id })),
    }
}

impl Client {
    /// The group controller's stub.
    pub fn groups(&self) -> GroupControllerClient<Channel> {
        GroupControllerClient::new(self.channel.clone())
    }

    /// The stub of change tracking.
    pub fn metadata(&self) -> SnapshotMetadataClient<Channel> {
        SnapshotMetadataClient::new(self.channel.clone())
    }

    /// CreateSnapshot.
    pub async fn snapshot(
        &self,
        name: &str,
        volume: &str,
        parameters: &[(&str, &str)],
    ) -> Result<csi::Snapshot, Status> {
        let request = csi::CreateSnapshotRequest {
            name: name.into(),
            source_volume_id: volume.into(),
            parameters: map(parameters),
            ..Default::default()
        };
        let answer = self.controller().create_snapshot(request).await?;
        Ok(answer.into_inner().snapshot.unwrap())
    }

    /// Snapshots of volumes one after the other, each at a moment of its own, in the form of a group
    /// without an ID. This is what a group must not be: tests that check the order of writes must
    /// find it wrong.
    pub async fn in_sequence(&self, name: &str, volumes: &[String]) -> csi::VolumeGroupSnapshot {
        let mut snapshots = Vec::new();
        for (n, volume) in volumes.iter().enumerate() {
            let snapshot = self.snapshot(&format!("{name}-{n}"), volume, &[]).await;
            snapshots.push(snapshot.unwrap());
        }
        csi::VolumeGroupSnapshot {
            snapshots,
            ..Default::default()
        }
    }

    /// Deletes a group, or snapshots that were created in sequence.
    pub async fn delete_all_of(&self, group: &csi::VolumeGroupSnapshot) {
        let members = members(group);
        if !group.group_snapshot_id.is_empty() {
            let deleted = self.delete_group(&group.group_snapshot_id, &members);
            return deleted.await.unwrap();
        }
        for snapshot in members {
            self.delete_snapshot(&snapshot).await.unwrap();
        }
    }

    /// CreateSnapshot by a caller that does not wait for locks.
    pub async fn snapshot_at_once(&self, name: &str, volume: &str) -> Result<(), Status> {
        let mut request = tonic::Request::new(csi::CreateSnapshotRequest {
            name: name.into(),
            source_volume_id: volume.into(),
            ..Default::default()
        });
        request.set_timeout(std::time::Duration::from_secs(5));
        self.controller().create_snapshot(request).await.map(drop)
    }

    /// DeleteSnapshot.
    pub async fn delete_snapshot(&self, id: &str) -> Result<(), Status> {
        let request = csi::DeleteSnapshotRequest {
            snapshot_id: id.into(),
            ..Default::default()
        };
        self.controller().delete_snapshot(request).await.map(drop)
    }

    /// ListSnapshots. Returns the IDs; of one volume if one is given.
    pub async fn snapshots(&self, of: &str) -> Result<Vec<String>, Status> {
        let request = csi::ListSnapshotsRequest {
            source_volume_id: of.into(),
            ..Default::default()
        };
        let page = self.controller().list_snapshots(request).await?;
        let entries = page.into_inner().entries.into_iter();
        Ok(entries
            .map(|entry| entry.snapshot.unwrap().snapshot_id)
            .collect())
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
        let request = csi::CreateVolumeRequest {
            name: name.into(),
            capacity_range: Some(CapacityRange {
                required_bytes: size as i64,
                limit_bytes: 0,
            }),
            volume_capabilities: vec![capability],
            parameters: map(parameters),
            volume_content_source: Some(source),
            ..Default::default()
        };
        let answer = self.controller().create_volume(request).await?;
        Ok(answer.into_inner().volume.unwrap())
    }

    /// CreateVolumeGroupSnapshot.
    pub async fn group(
        &self,
        name: &str,
        volumes: &[String],
        parameters: &[(&str, &str)],
    ) -> Result<csi::VolumeGroupSnapshot, Status> {
        let request = csi::CreateVolumeGroupSnapshotRequest {
            name: name.into(),
            source_volume_ids: volumes.to_vec(),
            parameters: map(parameters),
            ..Default::default()
        };
        let answer = self.groups().create_volume_group_snapshot(request).await?;
        Ok(answer.into_inner().group_snapshot.unwrap())
    }

    /// GetVolumeGroupSnapshot.
    pub async fn get_group(
        &self,
        id: &str,
        members: &[String],
    ) -> Result<csi::VolumeGroupSnapshot, Status> {
        let request = csi::GetVolumeGroupSnapshotRequest {
            group_snapshot_id: id.into(),
            snapshot_ids: members.to_vec(),
            ..Default::default()
        };
        let answer = self.groups().get_volume_group_snapshot(request).await?;
        Ok(answer.into_inner().group_snapshot.unwrap())
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
pub fn members(group: &csi::VolumeGroupSnapshot) -> Vec<String> {
    let each = group.snapshots.iter();
    each.map(|snapshot| snapshot.snapshot_id.clone()).collect()
}
