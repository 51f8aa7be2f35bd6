//! Short methods of the CSI client for snapshots, groups and volumes created from them.

use slackwater::csi;
use slackwater::csi::snapshot_metadata_client::SnapshotMetadataClient;
use slackwater::demo::client;
use tonic::Status;
use tonic::transport::Channel;

use super::Client;

pub use client::{from_snapshot, from_volume, members};

impl Client {
    /// The stub of change tracking.
    pub fn metadata(&self) -> SnapshotMetadataClient<Channel> {
        SnapshotMetadataClient::new(self.channel())
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
            parameters: client::parameters(parameters),
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
}
