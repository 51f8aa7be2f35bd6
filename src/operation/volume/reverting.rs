//! What a VolumeRevert does with a volume: a fence that keeps everything else from it, a new image with
//! the content of a snapshot, and the switch to that image. Until the switch, snapshots of the volume can
//! still be taken.
//!
//! The router orders each step, and every step may be repeated. A step names the UID of its revert, and
//! is refused once that revert has ended. The fence is in the record of the volume, so it survives any
//! crash; it is set only while nothing uses the volume. A new image that is whole survives as well:
//! the other volumes of a group may have switched.

use std::collections::BTreeSet;
use std::sync::Arc;

use uuid::Uuid;

use crate::backend::Leftover;
use crate::error::{Error, Result, chain};
use crate::model::{SnapshotId, VolumeId};
use crate::operation::lock::{Key, LockGuard};
use crate::operation::pools::capacity::check_setup;
use crate::operation::pools::lookup::{PoolLookup, check_fence};
use crate::operation::snapshot::begun::is_written;
use crate::operation::snapshot::restore::Content;
use crate::operation::{Pool, Volumes};
use crate::record::{
    ContentSource, Reverted, Reverting, SnapshotRecord, Spare, VolumeRecord, VolumeState,
};

/// The namespace of digests of members, a random UUID.
const DIGESTS: Uuid = Uuid::from_u128(0x3f7b_52c1_9a0e_4d86_b1c4_67e2_08d5_93fa);

/// Which volumes a revert has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Members {
    /// Their number; 0 if it is not known.
    pub count: u32,
    /// A digest of their IDs; `None` if it is not known, as from a router of an earlier release. The IDs
    /// themselves would be in the record of each volume, and in each report of its agent.
    pub digest: Option<Uuid>,
}

impl Members {
    /// These volumes, in any order.
    pub fn of<'a>(ids: impl Iterator<Item = &'a str>) -> Members {
        let ids: BTreeSet<&str> = ids.collect();
        let text = ids.iter().copied().collect::<Vec<_>>().join("\n");
        Members {
            count: u32::try_from(ids.len()).unwrap_or(u32::MAX),
            digest: Some(Uuid::new_v5(&DIGESTS, text.as_bytes())),
        }
    }
}

/// Their number alone, as from a router of an earlier release.
impl From<u32> for Members {
    fn from(count: u32) -> Members {
        Members {
            count,
            digest: None,
        }
    }
}

/// The beginning of a revert of one volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BeginRevert {
    pub volume_id: String,
    pub uid: Uuid,
    /// "namespace/name" of the VolumeRevert, for messages.
    pub name: String,
    pub snapshot_id: String,
    /// How many reverts of the volume had ended when this one was planned.
    pub number: u64,
    /// The volumes of the revert, with this one.
    pub members: Members,
}

/// What a revert has to know of a volume.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VolumeRevertStatus {
    pub exists: bool,
    /// How many of its reverts have ended.
    pub number: u64,
    /// The UID of the revert that has fenced it.
    pub fenced: Option<Uuid>,
    /// Its new image is whole.
    pub is_prepared: bool,
    /// It has its new image.
    pub is_switched: bool,
    /// The last revert that has ended, and whether the volume has got the content of its snapshot.
    pub ended: Option<(Uuid, bool)>,
    /// What uses it, or keeps it from being reverted; `None` if nothing does, and if it is fenced.
    pub user: Option<String>,
    /// Why it cannot get the content of the snapshot in the question; `None` if it can.
    pub unfit: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RevertFence {
    pub volume: VolumeId,
    pub uid: Uuid,
    /// How many reverts of the volume have ended.
    pub number: u64,
    /// The volumes of the revert.
    pub members: Members,
    /// It has its new image.
    pub is_switched: bool,
}

impl Volumes {
    /// Fences a volume for a revert, durably. It is refused while the volume is in use, and if the
    /// snapshot is not one of this volume.
    pub fn begin_revert(&self, asked: &BeginRevert) -> Result<()> {
        let volume_id = &asked.volume_id;
        let (pool, id, _) = self.pools.get_volume_even_if_fenced(volume_id)?;
        let _lock = self.pools.locks.acquire(Key::Volume(id.uuid))?;
        let (_, _, record) = self.pools.get_volume_even_if_fenced(volume_id)?;
        match stage(volume_id, &record, asked.uid)? {
            Stage::Begun(reverting) => return check_members(volume_id, reverting, asked.members),
            Stage::Done => return Ok(()),
            Stage::Other => {}
        }
        check_fence(volume_id, &record, None)?;
        let refuse = |reason: &str| Err(Error::refused(format!("volume {volume_id}"), reason));
        if record.reverts() != asked.number {
            return refuse(
                "another VolumeRevert of it has ended since this one was planned; create a new one",
            );
        }
        if record.ephemeral {
            return refuse("it is an inline volume, which is deleted with its pod");
        }
        let snapshot = self.snapshot_to_revert_to(&pool, &record, &asked.snapshot_id)?;
        if self.snapshots.copies.has(id.uuid) {
            return Err(Error::pending(format!("a copy of volume {volume_id}")));
        }
        self.refuse_if_used(&pool, &record, volume_id)?;
        // Blocks beyond the end of the volume belong to the image that it has now.
        pool.backend.clean_up(&Leftover::Growth(id.uuid))?;
        let (_, _, record) = self.pools.get_volume_even_if_fenced(volume_id)?;
        pool.backend.update(&VolumeRecord {
            reverting: Some(Reverting {
                uid: asked.uid,
                name: asked.name.clone(),
                snapshot: snapshot.uuid,
                incarnation: snapshot.incarnation,
                members: Some(asked.members.count).filter(|count| *count != 0),
                members_digest: asked.members.digest,
                spare: self.host.random_uuid(),
                is_switched: false,
                image: 0,
            }),
            ..record
        })
    }

    /// Fills the new image of a volume that this revert has fenced. A crash leaves nothing, or the whole
    /// image, or a copy that a repeat continues. Space is checked as for a restored volume.
    pub fn prepare_revert(&self, volume_id: &str, uid: Uuid) -> Result<()> {
        let (pool, id, _) = self.pools.get_volume_even_if_fenced(volume_id)?;
        let _lock = self.pools.locks.acquire(Key::Volume(id.uuid))?;
        let (_, _, record) = self.pools.get_volume_even_if_fenced(volume_id)?;
        let reverting = match stage(volume_id, &record, uid)? {
            Stage::Begun(reverting) if reverting.is_switched => return Ok(()),
            Stage::Begun(reverting) => reverting,
            Stage::Done => return Ok(()),
            Stage::Other => return Err(not_fenced(volume_id, uid)),
        };
        let _spare = self.pools.locks.acquire(Key::Volume(reverting.spare))?;
        if pool.backend.find_whole_spare(&record)?.is_some() {
            return Ok(());
        }
        check_setup(&pool)?;
        let snapshot = SnapshotId {
            pool: pool.id(),
            uuid: reverting.snapshot,
        };
        let source = ContentSource::Snapshot(snapshot.to_string());
        let content = self.snapshots.content(&source)?;
        let Content::Snapshot { record: from, .. } = &content else {
            return Err(Error::bug("the content of a revert is a snapshot"));
        };
        if from.incarnation != reverting.incarnation {
            let reason = "it was deleted and created again since the revert has begun";
            return Err(Error::refused(format!("snapshot {snapshot}"), reason));
        }
        let planned = self.plan_spare(&record, reverting, from, source);
        // A repeat after a crash plans the same record but for what is new in each.
        match is_written(&pool, &planned) && content.shares_with(&pool) {
            true => {
                let made = self.snapshots.write_volume(&pool, planned, Some(&content));
                made.map(drop)
            }
            false => {
                let made = self.snapshots.make_from(&pool, planned, &content);
                made.map(drop)
            }
        }
    }

    /// Locks a volume that is being reverted; `None` if the revert has ended.
    fn lock_reverting(&self, volume_id: &str, uid: Uuid) -> Result<Option<LockedRevert>> {
        let (pool, id, _) = self.pools.get_volume_even_if_fenced(volume_id)?;
        let lock = self.pools.locks.acquire(Key::Volume(id.uuid))?;
        let (_, _, record) = self.pools.get_volume_even_if_fenced(volume_id)?;
        let reverting = match stage(volume_id, &record, uid)? {
            Stage::Begun(reverting) => reverting.clone(),
            Stage::Done => return Ok(None),
            Stage::Other => return Err(not_fenced(volume_id, uid)),
        };
        Ok(Some((pool, lock, record, reverting)))
    }

    /// Gives a volume its new image, with one write of its record. The fence stays. The former image is
    /// in the trash then, for the cleanup: other members of the group wait for this one. If
    /// `members` are others than it was fenced for, the volume is not switched.
    pub fn switch_revert(&self, volume_id: &str, uid: Uuid, members: Members) -> Result<()> {
        let Some((pool, _lock, record, reverting)) = self.lock_reverting(volume_id, uid)? else {
            return Ok(());
        };
        check_members(volume_id, &reverting, members)?;
        // Once the former image is in the trash, its wipe keeps the lock for as long as it takes.
        let _spare = match pool.backend.volumes.get(reverting.spare)? {
            Some(_) => Some(self.pools.locks.acquire(Key::Volume(reverting.spare))?),
            None => None,
        };
        if !reverting.is_switched {
            let Some(whole) = pool.backend.find_whole_spare(&record)? else {
                let reason = "its new image is not complete";
                return Err(Error::refused(format!("volume {volume_id}"), reason));
            };
            // A copy that began before would delay the whole group, and the next one again.
            self.snapshots.copies.cancel(record.uuid);
            if self.snapshots.copies.has(record.uuid) {
                return Err(Error::pending(format!("a copy of volume {volume_id}")));
            }
            // A device of another program would keep showing the former image.
            self.refuse_if_used(&pool, &record, volume_id)?;
            pool.backend.switch(&record, &whole)?;
        }
        let ended = pool.backend.end_switch(record.uuid);
        ended.map_err(Error::into_indeterminate)?;
        self.usage.clear_not_grown(record.uuid);
        Ok(())
    }

    /// Lifts the fence of a revert whose volume has its new image, durably and for good.
    pub fn end_revert(&self, volume_id: &str, uid: Uuid) -> Result<()> {
        let Some((pool, _lock, record, reverting)) = self.lock_reverting(volume_id, uid)? else {
            return Ok(());
        };
        if !reverting.is_switched {
            let reason = "it does not have its new image yet";
            return Err(Error::refused(format!("volume {volume_id}"), reason));
        }
        let ended = pool.backend.end_switch(record.uuid);
        ended.map_err(Error::into_indeterminate)?;
        pool.backend.update(&ended_by(&record, uid, true))
    }

    /// Ends a revert before its switch, durably and for good: the volume keeps its content, and a
    /// request that was delayed on its way has no effect any more. `number` is that of the plan. A
    /// volume that does not exist has no revert. The cleanup frees the new image; a crash before the
    /// fence is lifted leaves the volume fenced for a repeat.
    pub fn abort_revert(&self, volume_id: &str, uid: Uuid, number: u64) -> Result<()> {
        let PoolLookup::Pool(pool, id) = self.pools.owner(volume_id)? else {
            return Ok(());
        };
        let of = |record: &VolumeRecord| {
            let reverting = record.reverting.clone();
            reverting.filter(|reverting| reverting.uid == uid)
        };
        let found = pool.backend.volumes.get(id.uuid)?;
        if let Some(reverting) = found.as_ref().and_then(of) {
            // The copy into it would keep the lock to its end.
            self.snapshots.stop_copy(&spare_name(&reverting));
        }
        let _lock = self.pools.locks.acquire(Key::Volume(id.uuid))?;
        let found = pool.backend.volumes.get(id.uuid)?;
        let Some(record) = found.filter(|record| record.state == VolumeState::Ready) else {
            return Ok(());
        };
        let switched = || {
            let reason = "it has its new image already, so its revert cannot be aborted";
            Err(Error::refused(format!("volume {volume_id}"), reason))
        };
        match (of(&record), record.reverted) {
            (Some(reverting), _) if reverting.is_switched => switched(),
            (Some(reverting), _) => {
                // Without the lock of the spare: what may hold it only deletes the spare, and its wipe
                // must not keep the fence.
                let hidden = pool.backend.hide_spare(reverting.spare);
                hidden.map_err(Error::into_indeterminate)?;
                pool.backend.update(&ended_by(&record, uid, false))
            }
            (None, Some(ended)) if ended.uid == uid && ended.is_done => switched(),
            (None, Some(ended)) if ended.uid == uid => Ok(()),
            // It cannot begin any more: the end of the other one changes the number.
            (None, _) if record.reverting.is_some() || record.reverts() != number => Ok(()),
            (None, _) => pool.backend.update(&ended_by(&record, uid, false)),
        }
    }

    /// The state of a volume for a revert to this snapshot.
    pub fn revert_status(&self, volume_id: &str, snapshot_id: &str) -> Result<VolumeRevertStatus> {
        let mut found = VolumeRevertStatus::default();
        let PoolLookup::Pool(pool, id) = self.pools.owner(volume_id)? else {
            return Ok(found);
        };
        let record = pool.backend.volumes.get(id.uuid)?;
        let Some(record) = record.filter(|record| record.state == VolumeState::Ready) else {
            return Ok(found);
        };
        found.exists = true;
        found.number = record.reverts();
        found.ended = record.reverted.map(|ended| (ended.uid, ended.is_done));
        if let Some(reverting) = &record.reverting {
            found.fenced = Some(reverting.uid);
            found.is_switched = reverting.is_switched;
            let whole = pool.backend.find_whole_spare(&record)?;
            found.is_prepared = !reverting.is_switched && whole.is_some();
            return Ok(found);
        }
        found.user = match check_fence(volume_id, &record, None) {
            Ok(()) => self.user_of(volume_id)?,
            Err(fenced) => Some(chain(&fenced)),
        };
        found.unfit = match self.snapshot_to_revert_to(&pool, &record, snapshot_id) {
            Ok(_) => None,
            Err(unfit @ (Error::Refused { .. } | Error::NotFound { .. })) => Some(chain(&unfit)),
            Err(error) => return Err(error),
        };
        Ok(found)
    }

    /// The snapshot of a revert: one of this very volume, in its pool.
    fn snapshot_to_revert_to(
        &self,
        pool: &Pool,
        record: &VolumeRecord,
        snapshot_id: &str,
    ) -> Result<SnapshotRecord> {
        let (on, _, snapshot) = self.pools.get_snapshot(snapshot_id)?;
        let refuse = |reason: &str| Err(Error::refused(format!("snapshot {snapshot_id}"), reason));
        if on.id() != pool.id() {
            return refuse("it is in another pool than the volume; create a new volume from it");
        }
        let of = (snapshot.source, snapshot.source_incarnation);
        if of != (record.uuid, record.incarnation) {
            return refuse("it is a snapshot of another volume; create a new volume from it");
        }
        if snapshot.size > record.size || snapshot.block_size != record.block_size {
            return refuse("it does not fit into the volume; create a new volume from it");
        }
        Ok(snapshot)
    }

    /// The record of the new image of a volume.
    fn plan_spare(
        &self,
        record: &VolumeRecord,
        reverting: &Reverting,
        from: &SnapshotRecord,
        source: ContentSource,
    ) -> VolumeRecord {
        VolumeRecord {
            uuid: reverting.spare,
            name: spare_name(reverting),
            incarnation: self.host.random_uuid(),
            state: VolumeState::Creating,
            formatted: from.formatted.clone(),
            last_stage: None,
            created_at: self.host.now(),
            content_source: Some(source),
            copy: None,
            growth: None,
            lineage: None,
            image: 0,
            fenced: None,
            lifted: None,
            imported: None,
            reverting: None,
            reverted: None,
            spare: Some(Spare {
                of: record.uuid,
                is_whole: false,
            }),
            ..record.clone()
        }
    }
}

/// The pool, the lock and the record of a volume that is being reverted.
type LockedRevert = (Arc<Pool>, LockGuard, VolumeRecord, Reverting);

/// How far a revert of a volume is.
enum Stage<'a> {
    Begun(&'a Reverting),
    /// It has ended, and the volume has its new content.
    Done,
    /// It has not begun.
    Other,
}

/// An error if the revert was aborted: it never begins again.
fn stage<'a>(volume_id: &str, record: &'a VolumeRecord, uid: Uuid) -> Result<Stage<'a>> {
    match (&record.reverting, record.reverted) {
        (Some(reverting), _) if reverting.uid == uid => Ok(Stage::Begun(reverting)),
        (_, Some(ended)) if ended.uid == uid && ended.is_done => Ok(Stage::Done),
        (_, Some(ended)) if ended.uid == uid => {
            let reason = format!("the VolumeRevert with UID {uid} was aborted for good");
            Err(Error::refused(format!("volume {volume_id}"), reason))
        }
        (_, _) => Ok(Stage::Other),
    }
}

/// Refuses a step of a revert with other members than the volume was fenced for. What one side does not know
/// is not compared.
fn check_members(volume_id: &str, fenced: &Reverting, members: Members) -> Result<()> {
    let refuse = |why: String| {
        let reason = format!("{why}; check the members in the status of the VolumeRevert");
        Err(Error::refused(format!("volume {volume_id}"), reason))
    };
    let counts = (fenced.members, members.count);
    if let (Some(fenced), count @ 1..) = counts
        && fenced != count
    {
        return refuse(format!(
            "it was fenced for a VolumeRevert of {fenced} volumes, and this one has {count}"
        ));
    }
    match (fenced.members_digest, members.digest) {
        (Some(fenced), Some(digest)) if fenced != digest => {
            refuse("it was fenced for a VolumeRevert of other volumes".into())
        }
        _ => Ok(()),
    }
}

fn not_fenced(volume_id: &str, uid: Uuid) -> Error {
    let reason = format!("the VolumeRevert with UID {uid} has not fenced it");
    Error::refused(format!("volume {volume_id}"), reason)
}

/// The record of a volume whose revert has ended.
fn ended_by(record: &VolumeRecord, uid: Uuid, is_done: bool) -> VolumeRecord {
    VolumeRecord {
        reverting: None,
        reverted: Some(Reverted {
            uid,
            is_done,
            number: record.reverts() + 1,
        }),
        ..record.clone()
    }
}

fn spare_name(reverting: &Reverting) -> String {
    format!("revert-{}", reverting.spare)
}

pub(in crate::operation) fn fences_of(pool: &Arc<Pool>) -> Vec<RevertFence> {
    let of = |uuid| VolumeId {
        pool: pool.id(),
        uuid,
    };
    pool.backend.volumes.filter_map_ready(|record| {
        let reverting = record.reverting.as_ref()?;
        Some(RevertFence {
            volume: of(record.uuid),
            uid: reverting.uid,
            number: record.reverts(),
            members: Members {
                count: reverting.members.unwrap_or(0),
                digest: reverting.members_digest,
            },
            is_switched: reverting.is_switched,
        })
    })
}

#[cfg(test)]
mod tests;
