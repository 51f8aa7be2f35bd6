//! CreateSnapshot, DeleteSnapshot, GetSnapshot.
//!
//! A snapshot is a group of one: prepared (in no list), cut, made durable, committed. What fails
//! in between is deleted before the answer, and a crash in between at the next start.

use std::sync::Arc;

use uuid::Uuid;

use super::capacity::admit_snapshot;
use super::cutting::{Source, Try};
use super::detach::CleanUp;
use super::lock::Key;
use super::pool::Owner;
use super::{CreateSnapshot, Driver, Pool, Snapshot};
use crate::backend::Image;
use crate::cut::{Outcome, Use};
use crate::error::{Error, Kind, Mismatch, Result, chain};
use crate::model::id::NameKind;
use crate::model::size::image_bytes;
use crate::model::{Allocation, GroupId, SnapshotId, VolumeId};
use crate::record::{SnapshotRecord, SnapshotState};

/// A snapshot that is being made, and its source.
pub(super) struct Prepared {
    pub(super) pool: Arc<Pool>,
    pub(super) record: SnapshotRecord,
}

impl Driver {
    /// CreateSnapshot. A crash leaves a snapshot that is in no list, which the next start or a
    /// repeat ends; on a pool that can't share blocks, a copy that a repeat goes on with.
    pub fn create_snapshot(&self, request: &CreateSnapshot) -> Result<Snapshot> {
        let name = &request.name;
        let _name = self.locks.acquire(Key::SnapshotName(name.clone()))?;
        if let Some((pool, record)) = self.find_snapshot_name(name)? {
            return self.same_source(&pool, &record, request);
        }
        let source = self.source(&request.source_volume_id)?;
        let home = self.home().to_string();
        if !request.requisite.is_empty() && !request.requisite.contains(&home) {
            return Err(Error::ElsewhereOnly { home });
        }
        let id = SnapshotId::of_name(source.pool.id(), NameKind::Snapshot, name);
        let _snapshot = self.locks.acquire(Key::Snapshot(id.uuid))?;
        if !source.pool.backend.shares_blocks() {
            return self.copy_snapshot(request, &source, id);
        }
        let ids = [request.source_volume_id.clone()];
        let made = self.tries(&format!("snapshot {name}"), &request.parameters, |now| {
            let (locks, sources) = self.lock_sources(&ids)?;
            let uses = self.uses_of(&sources)?;
            let Some(source) = sources.first() else {
                return Err(Error::Bug {
                    invariant: "one id is one source".into(),
                });
            };
            let record = self.plan_snapshot(source, id, name, self.host.random_uuid());
            let mut made =
                self.make_snapshots(&sources, &uses, vec![record], now, &request.parameters)?;
            // What follows takes long for thick volumes, and doesn't mind what is done to them.
            drop(locks);
            self.commit_snapshots(&mut made)?;
            Ok(made)
        })?;
        let each = made
            .first()
            .map(|one| self.snapshot(&one.pool, &one.record));
        each.ok_or_else(|| Error::Bug {
            invariant: "one source is one snapshot".into(),
        })
    }

    /// The answer to a repeat, unless it's of another volume.
    fn same_source(
        &self,
        pool: &Pool,
        record: &SnapshotRecord,
        request: &CreateSnapshot,
    ) -> Result<Snapshot> {
        let snapshot = self.snapshot(pool, record);
        let found = snapshot.source_volume_id.to_string();
        if found == request.source_volume_id {
            return Ok(snapshot);
        }
        Err(Error::Exists {
            kind: Kind::Snapshot,
            id: format!("{:?}", request.name),
            mismatch: Mismatch {
                field: "source_volume_id",
                found,
                wanted: request.source_volume_id.clone(),
            },
        })
    }

    pub(super) fn uses_of(&self, sources: &[Source]) -> Result<Vec<Use>> {
        let uses: Result<_> = sources.iter().map(|source| self.use_of(source)).collect();
        // What an earlier try has left is ended after this look.
        uses.map_err(Error::unseen)
    }

    /// The record of a new snapshot.
    pub(super) fn plan_snapshot(
        &self,
        source: &Source,
        id: SnapshotId,
        name: &str,
        attempt: Uuid,
    ) -> SnapshotRecord {
        let record = &source.record;
        SnapshotRecord {
            uuid: id.uuid,
            name: name.to_string(),
            incarnation: self.host.random_uuid(),
            state: SnapshotState::Preparing,
            attempt,
            source: record.uuid,
            source_incarnation: record.incarnation,
            size: record.size,
            block_size: record.block_size,
            allocation: record.allocation,
            formatted: record.formatted.clone(),
            capabilities: record.capabilities.clone(),
            wipe: record.wipe,
            lineage: None,
            cut_at: 0,
            level: crate::model::Level::Crash,
            reason: String::new(),
            group: None,
            copy: None,
        }
    }

    /// One try: prepares the snapshots, cuts them together, and makes them durable; not committed.
    /// On an error none is left.
    pub(super) fn make_snapshots(
        &self,
        sources: &[Source],
        uses: &[Use],
        records: Vec<SnapshotRecord>,
        now: &Try<'_>,
        parameters: &crate::model::SnapshotParameters,
    ) -> Result<Vec<Prepared>> {
        self.refuse_without_barrier(sources, uses, now.level, parameters)?;
        let mut made: Vec<Prepared> = Vec::new();
        for (source, record) in sources.iter().zip(records) {
            let prepared = self.prepare_snapshot(&source.pool, &record);
            if let Err(first) = prepared {
                return Err(self.undo_snapshots(&made, first));
            }
            let pool = source.pool.clone();
            made.push(Prepared { pool, record });
        }
        let copies: Vec<_> = made
            .iter()
            .map(|one| Image::Snapshot(one.record.uuid))
            .collect();
        let cut = self
            .cut(sources, uses, &copies, now, parameters)
            .and_then(|outcome| self.keep_cut(&mut made, &outcome));
        match cut {
            Ok(()) => Ok(made),
            Err(first) => Err(self.undo_snapshots(&made, first)),
        }
    }

    fn prepare_snapshot(&self, pool: &Pool, record: &SnapshotRecord) -> Result<()> {
        // One that an earlier try has left, whose clean-up failed: it was never answered.
        pool.backend
            .delete_snapshot(record.uuid)
            .map_err(Error::unseen)?;
        pool.backend
            .prepare_snapshot(record, &|space| admit_snapshot(pool, space, record))
    }

    /// Makes what was cut durable, image first. A single one stays `preparing` until it's
    /// committed; members of a group are `cut` from now on.
    fn keep_cut(&self, made: &mut [Prepared], outcome: &Outcome) -> Result<()> {
        for one in made {
            one.pool.backend.sync_snapshot(one.record.uuid)?;
            one.record.cut_at = outcome.cut_at;
            one.record.level = outcome.level;
            one.record.reason = outcome.reason.clone();
            if one.record.group.is_some() {
                one.record.state = SnapshotState::Cut;
                one.pool.backend.update_snapshot(&one.record)?;
            }
        }
        Ok(())
    }

    /// Commits: the first one's record decides for a group, so that after a crash the others are
    /// rolled forward with it, or all back. On an error before that none is left.
    pub(super) fn commit_snapshots(&self, made: &mut [Prepared]) -> Result<()> {
        let unshared = made.iter().try_for_each(|one| self.unshare_source(one));
        let first = unshared.and_then(|()| match made.first_mut() {
            Some(first) => ready(first),
            None => Ok(()),
        });
        if let Err(first) = first {
            return Err(self.undo_snapshots(made, first));
        }
        // From here on it's committed: what fails is finished by a repeat or the next start.
        made.iter_mut().skip(1).try_for_each(|one| {
            ready(one).map_err(|first| Error::Undo {
                first: Box::new(first),
                undo: "a member of the group is not committed yet".into(),
            })
        })
    }

    /// A thick volume has blocks of its own again before its snapshot is answered, so that it
    /// takes every write on a full pool. It may be used, grown and even deleted meanwhile.
    fn unshare_source(&self, one: &Prepared) -> Result<()> {
        if one.record.allocation != Allocation::Thick {
            return Ok(());
        }
        match one.pool.backend.volume(one.record.source)? {
            Some(volume) if volume.incarnation == one.record.source_incarnation => {
                let image = Image::Volume(volume.uuid);
                one.pool.backend.unshare(image, image_bytes(volume.size))
            }
            Some(_) | None => Ok(()),
        }
    }

    /// Deletes what a failed try has made.
    pub(super) fn undo_snapshots(&self, made: &[Prepared], first: Error) -> Error {
        let _clean_up = CleanUp::after(&first);
        // The first one decides about its group: if it can't be deleted it may be committed, and
        // the others are to follow it.
        let undone = made
            .iter()
            .try_for_each(|one| one.pool.backend.delete_snapshot(one.record.uuid));
        match undone {
            Ok(()) => first,
            Err(undo) => Error::Undo {
                first: Box::new(first),
                undo: chain(&undo),
            },
        }
    }

    /// The snapshot of a name, wherever on this machine it is.
    fn find_snapshot_name(&self, name: &str) -> Result<Option<(Arc<Pool>, SnapshotRecord)>> {
        for pool in self.serving() {
            let id = SnapshotId::of_name(pool.id(), NameKind::Snapshot, name);
            if let Some(record) = pool
                .backend
                .snapshot(id.uuid)?
                .filter(|record| record.state == SnapshotState::Ready)
            {
                return Ok(Some((pool, record)));
            }
        }
        Ok(None)
    }

    /// DeleteSnapshot. What isn't there is deleted; a member goes with its group alone. What was
    /// restored from it stays.
    pub fn delete_snapshot(&self, snapshot_id: &str) -> Result<()> {
        let Owner::Pool(pool, id) = self.owner(snapshot_id)? else {
            return Ok(());
        };
        let _lock = self.locks.acquire(Key::Snapshot(id.uuid))?;
        if let Some(group) = pool
            .backend
            .snapshot(id.uuid)?
            .and_then(|record| record.group)
        {
            return Err(Error::invalid(
                "snapshot_id",
                format!(
                    "{snapshot_id} is a member of the group snapshot {}, and is deleted with it (DeleteVolumeGroupSnapshot)",
                    group.id
                ),
            ));
        }
        pool.backend.delete_snapshot(id.uuid)
    }

    /// GetSnapshot.
    pub fn get_snapshot(&self, snapshot_id: &str) -> Result<Snapshot> {
        let (pool, _, record) = self.find_snapshot(snapshot_id)?;
        Ok(self.snapshot(&pool, &record))
    }

    /// The pool and record of a snapshot that must exist: committed.
    pub(super) fn find_snapshot(
        &self,
        snapshot_id: &str,
    ) -> Result<(Arc<Pool>, SnapshotId, SnapshotRecord)> {
        let absent = || Error::NotFound {
            kind: Kind::Snapshot,
            id: snapshot_id.to_string(),
        };
        let Owner::Pool(pool, id) = self.owner(snapshot_id)? else {
            return Err(absent());
        };
        match pool.backend.snapshot(id.uuid)? {
            Some(record) if record.state == SnapshotState::Ready => Ok((pool, id, record)),
            Some(_) | None => Err(absent()),
        }
    }

    /// As answers tell it.
    pub(super) fn snapshot(&self, pool: &Pool, record: &SnapshotRecord) -> Snapshot {
        let id = |uuid| VolumeId {
            pool: pool.id(),
            uuid,
        };
        Snapshot {
            id: id(record.uuid),
            source_volume_id: id(record.source),
            size: record.size,
            cut_at: record.cut_at,
            level: record.level,
            reason: record.reason.clone(),
            group: record.group.as_ref().map(|group| GroupId(group.id)),
            home: self.home(),
        }
    }
}

/// Commits one.
fn ready(one: &mut Prepared) -> Result<()> {
    one.record.state = SnapshotState::Ready;
    one.pool.backend.update_snapshot(&one.record)
}
