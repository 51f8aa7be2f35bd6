//! Hidden snapshots for clones on other nodes: a volume that may change cannot be sent, so a snapshot of
//! it is. The router deletes it when the clone is complete or given up.
//!
//! Its name follows from that of the clone, so that every call for the clone gets the same snapshot. If
//! no router deletes it, the agent does, once no call has named it for an hour, as it deletes a copy
//! that nothing continues.

use crate::error::{Error, Kind, Result, chain};
use crate::model::id::NameKind;
use crate::model::{SnapshotId, SnapshotParameters, VolumeId};
use crate::operation::{CreateSnapshot, DeleteSnapshotOptions, Pool, Snapshot, Snapshots};
use crate::record::SnapshotRecord;

/// A snapshot of a user can have the same name.
const ONLY_FOR_CLONE: DeleteSnapshotOptions = DeleteSnapshotOptions {
    of_any_group: false,
    settled: None,
    for_clone: true,
};

/// The name of the snapshot for the clone with this request name.
fn snapshot_name_for_clone(clone: &str) -> String {
    format!("clone-{clone}")
}

/// The ID of the snapshot for a clone, whether or not it was taken.
pub fn snapshot_id_for_clone(volume: &VolumeId, clone: &str) -> SnapshotId {
    let name = snapshot_name_for_clone(clone);
    SnapshotId::of_name(volume.pool, NameKind::Snapshot, &name)
}

impl Snapshots {
    /// Takes the snapshot for a clone, unless it exists. It is taken as a clone on this node is: the
    /// file system of a volume in use is frozen.
    pub fn snapshot_for_clone(&self, volume_id: &str, clone: &str) -> Result<Snapshot> {
        let made = self.create_snapshot(&request_for_clone(volume_id, clone))?;
        self.copies.ask(made.id.uuid, self.host.now());
        Ok(made)
    }

    /// Deletes the snapshot for a clone, if there is one.
    pub fn end_for_clone(&self, volume_id: &str, clone: &str) -> Result<SnapshotId> {
        let volume = volume_id.parse();
        let volume = volume.map_err(|_| Error::not_found(Kind::Volume, volume_id))?;
        let id = snapshot_id_for_clone(&volume, clone);
        self.delete_one(&id.to_string(), &ONLY_FOR_CLONE)?;
        Ok(id)
    }

    /// Deletes the snapshots of a pool for clones that no call has named for an hour.
    pub(in crate::operation) fn clean_up_for_clones(&self, pool: &Pool) {
        let of_clone = |record: &SnapshotRecord| record.for_clone.then_some(record.uuid);
        for uuid in pool.backend.snapshots.filter_map_ready(of_clone) {
            if !self.copies.is_forgotten(uuid, self.host.now()) {
                continue;
            }
            let id = SnapshotId {
                pool: pool.id(),
                uuid,
            };
            match self.delete_one(&id.to_string(), &ONLY_FOR_CLONE) {
                Ok(_) => {
                    tracing::info!(snapshot = %id, "deleted the snapshot for a clone that no call has asked for");
                }
                // It is being read, or in use by another call.
                Err(error) => {
                    tracing::debug!(snapshot = %id, error = %chain(&error), "failed to delete the snapshot for a clone");
                }
            }
        }
    }
}

pub fn request_for_clone(volume_id: &str, clone: &str) -> CreateSnapshot {
    CreateSnapshot {
        name: snapshot_name_for_clone(clone),
        source_volume_id: volume_id.to_string(),
        parameters: SnapshotParameters {
            for_clone: true,
            ..SnapshotParameters::default()
        },
        requisite: Vec::new(),
    }
}

#[cfg(test)]
mod tests;
