//! What a VolumeMove does with its source: a fence that keeps everything else from the volume,
//! snapshots that the other node copies, and the deletion at its end.
//!
//! The router orders each step, and every step may be repeated. The fence is in the record of the
//! volume, so it survives any crash; it is set only while nothing uses the volume.

use uuid::Uuid;

use crate::error::{Error, Result, chain};
use crate::model::id::NameKind;
use crate::model::{
    Allocation, CapacityRange, Level, SnapshotId, SnapshotParameters, VolumeParameters,
};
use crate::operation::lock::Key;
use crate::operation::pools::lookup::PoolLookup;
use crate::operation::snapshot::begun::is_filled;
use crate::operation::snapshot::outgoing::identity;
use crate::operation::{CreateSnapshot, CreateVolume, Pool, Snapshot, SnapshotState, Volumes};
use crate::record::{CopyProgress, VolumeRecord, VolumeState};

/// The name of a snapshot that a move copies: one of those before the fence, or the last one, which is
/// taken under the fence.
pub fn snapshot_name(move_uid: Uuid, round: Option<u32>) -> String {
    match round {
        Some(round) => format!("move-{move_uid}-{round}"),
        None => format!("move-{move_uid}"),
    }
}

/// What a move has to know of one of its volumes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VolumeMoveStatus {
    pub state: MovingState,
    /// Its size in bytes.
    pub size: u64,
    /// Bytes of its image that are filled, while it is being filled.
    pub copied: u64,
    /// The move that has fenced it.
    pub fenced: Option<Uuid>,
    /// The last move whose fence was lifted.
    pub lifted: Option<Uuid>,
    /// What uses it; `None` if nothing does.
    pub user: Option<String>,
    /// With what it is being filled.
    pub content: Option<MoveContentStatus>,
    /// The requested snapshots that exist.
    pub snapshots: Vec<MoveSnapshotStatus>,
}

/// A snapshot that a move copies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MoveSnapshotStatus {
    pub id: String,
    pub is_ready: bool,
    /// A number that is another one if it was deleted and created again.
    pub identity: u64,
}

/// The snapshot with whose content a volume is being filled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MoveContentStatus {
    pub identity: u64,
    /// It has the whole content.
    pub is_whole: bool,
}

/// Whether a volume exists.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MovingState {
    #[default]
    Absent,
    /// It is being created.
    Filling,
    Ready,
}

impl Volumes {
    /// Fences a volume for a move, durably. It is refused while the volume is in use.
    pub fn fence_volume(&self, volume_id: &str, move_uid: Uuid) -> Result<()> {
        let (pool, id, _) = self.pools.get_volume_for(volume_id, Some(move_uid))?;
        let _lock = self.pools.locks.acquire(Key::Volume(id.uuid))?;
        let (_, _, record) = self.pools.get_volume_for(volume_id, Some(move_uid))?;
        if record.fenced.is_some() {
            return Ok(());
        }
        if record.ephemeral {
            let reason = "it is an inline volume, which is deleted with its pod";
            return Err(Error::refused(format!("volume {volume_id}"), reason));
        }
        // It would be copied as if it had been taken under this fence.
        let last = snapshot_name(move_uid, None);
        let last = SnapshotId::of_name(pool.id(), NameKind::Snapshot, &last);
        if pool.backend.snapshots.get(last.uuid)?.is_some() {
            let reason = format!("snapshot {last} of an earlier fence of this move exists");
            return Err(Error::refused(format!("volume {volume_id}"), reason));
        }
        self.refuse_if_used(&pool, &record, volume_id)?;
        pool.backend.update(&VolumeRecord {
            fenced: Some(move_uid),
            ..record
        })
    }

    /// Lifts the fence of a move, durably and for good: a request for a fence that was delayed on its
    /// way has no effect any more. A volume that does not exist has none.
    pub fn lift_fence(&self, volume_id: &str, move_uid: Uuid) -> Result<()> {
        let PoolLookup::Pool(pool, id) = self.pools.owner(volume_id)? else {
            return Ok(());
        };
        let _lock = self.pools.locks.acquire(Key::Volume(id.uuid))?;
        let Some(record) = pool.backend.volumes.get(id.uuid)? else {
            return Ok(());
        };
        let others = record.fenced.filter(|fenced| *fenced != move_uid);
        if record.fenced == others && record.lifted == Some(move_uid) {
            return Ok(());
        }
        pool.backend.update(&VolumeRecord {
            fenced: others,
            lifted: Some(move_uid),
            ..record
        })
    }

    /// Takes a snapshot of a volume for a move, without freezing its file system: only the last one
    /// becomes the content of the copy, and it is taken under the fence. Returns a request for a volume
    /// like this one, too.
    pub fn snapshot_for_move(
        &self,
        volume_id: &str,
        move_uid: Uuid,
        round: Option<u32>,
    ) -> Result<(Snapshot, CreateVolume)> {
        let (pool, _, record) = self.pools.get_volume_for(volume_id, Some(move_uid))?;
        let facts = &pool.backend.facts;
        let is_thick = record.allocation == Allocation::Thick;
        let is_full_copy = !facts.shares_blocks || (is_thick && facts.unshares);
        let reason = match round {
            None if record.fenced.is_none() => Some("the move has not fenced it"),
            Some(_) if is_full_copy => Some(
                "each of its snapshots is a full copy in its pool, so none is taken in advance",
            ),
            Some(_) | None => None,
        };
        if let Some(reason) = reason {
            return Err(Error::refused(format!("volume {volume_id}"), reason));
        }
        let request = CreateSnapshot {
            name: snapshot_name(move_uid, round),
            source_volume_id: volume_id.to_string(),
            parameters: SnapshotParameters {
                consistency: Level::Crash,
                ..SnapshotParameters::default()
            },
            requisite: Vec::new(),
        };
        let made = self
            .snapshots
            .create_snapshot_for(&request, Some(move_uid))?;
        Ok((made, like(record)))
    }

    /// The number of bytes in which a snapshot of a move before the fence may differ from another one.
    pub fn changed_for_move(&self, made: &Snapshot, move_uid: Uuid, base: u32) -> Result<u64> {
        let name = snapshot_name(move_uid, Some(base));
        let base = SnapshotId::of_name(made.id.pool, NameKind::Snapshot, &name);
        let (base, made) = (base.to_string(), made.id.to_string());
        self.snapshots.changed_bytes(&base, &made)
    }

    /// Deletes a volume that this move has fenced. One that does not exist counts as deleted.
    pub fn delete_moved(&self, volume_id: &str, move_uid: Uuid) -> Result<()> {
        if let PoolLookup::Pool(pool, id) = self.pools.owner(volume_id)?
            && let Some(record) = pool.backend.volumes.get(id.uuid)?
            && record.fenced != Some(move_uid)
        {
            let reason = format!("the VolumeMove with UID {move_uid} has not fenced it");
            return Err(Error::refused(format!("volume {volume_id}"), reason));
        }
        self.delete_for(volume_id, Some(move_uid))
    }

    /// The state of a volume that a move copies, or fills, and which of these snapshots exist.
    pub fn move_status(
        &self,
        volume_id: &str,
        snapshot_ids: &[String],
    ) -> Result<VolumeMoveStatus> {
        let mut found = VolumeMoveStatus::default();
        for snapshot_id in snapshot_ids {
            if let PoolLookup::Pool(pool, id) = self.pools.owner(snapshot_id)?
                && let Some(record) = pool.backend.snapshots.get(id.uuid)?
            {
                found.snapshots.push(MoveSnapshotStatus {
                    id: snapshot_id.clone(),
                    is_ready: record.state == SnapshotState::Ready,
                    identity: identity(&record),
                });
            }
        }
        let PoolLookup::Pool(pool, id) = self.pools.owner(volume_id)? else {
            return Ok(found);
        };
        let Some(record) = pool.backend.volumes.get(id.uuid)? else {
            return Ok(found);
        };
        found.size = record.size;
        found.copied = record.copy.map_or(0, |copy| copy.copied);
        found.fenced = record.fenced;
        found.lifted = record.lifted;
        found.content = content(&pool, &record)?;
        found.state = match record.state {
            VolumeState::Creating => MovingState::Filling,
            VolumeState::Ready => MovingState::Ready,
        };
        if record.state == VolumeState::Ready && record.fenced.is_none() {
            found.user = self.user_of(volume_id)?;
        }
        Ok(found)
    }

    /// What uses a volume; `None` if nothing does. It changes nothing that a user could notice.
    pub(super) fn user_of(&self, volume_id: &str) -> Result<Option<String>> {
        let (pool, id, _) = self.pools.get_volume(volume_id)?;
        let Ok(_lock) = self.pools.locks.acquire(Key::Volume(id.uuid)) else {
            return Ok(Some("an operation on it is running".into()));
        };
        let (_, _, record) = self.pools.get_volume(volume_id)?;
        match self.refuse_if_used(&pool, &record, volume_id) {
            Ok(()) => Ok(None),
            Err(used @ Error::InUse { .. }) => Ok(Some(chain(&used))),
            Err(error) => Err(error),
        }
    }
}

/// With what a volume is being filled.
fn content(pool: &Pool, record: &VolumeRecord) -> Result<Option<MoveContentStatus>> {
    let Some(copy) = record.copy else {
        return Ok(None);
    };
    let is_whole = is_filled(pool, record)?;
    let identity = match copy.base {
        None => copy.source_modified,
        Some(_) => CopyProgress::beside(copy.source_modified),
    };
    Ok(Some(MoveContentStatus { identity, is_whole }))
}

/// A request for a volume that keeps what this one has. Its present `wipe` counts, not the one that it
/// was created with.
fn like(record: VolumeRecord) -> CreateVolume {
    CreateVolume {
        name: record.name,
        capacity: CapacityRange {
            required: record.size,
            limit: 0,
        },
        capabilities: record.capabilities,
        parameters: VolumeParameters {
            allocation: record.allocation,
            block_size: record.asked_block_size,
            mkfs_options: record.mkfs_options,
            wipe: record.wipe,
            block_groups: record.block_groups,
            claim: record.claim,
            ..VolumeParameters::default()
        },
        requisite: Vec::new(),
        content_source: None,
    }
}

#[cfg(test)]
mod tests;
