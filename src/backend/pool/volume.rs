//! The life cycle of a volume's image: an intent is recorded before it is created, and a completed
//! record afterwards; it is filled and grown.

use std::sync::{MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use uuid::Uuid;

use super::PoolBackend;
use super::room::{Growing, Growth};
use crate::backend::records::{Entry, StoredRecord};
use crate::backend::store::NewImage;
use crate::backend::{Admit, Image, ImageHandle};
use crate::error::{Error, ErrorContext, Kind, Result};
use crate::model::size::{MIB, image_bytes};
use crate::model::{Allocation, VolumeId};
use crate::record::{ContentSource, GrowthProgress, Spare, VolumeRecord, VolumeState};

/// The bytes that one call un-shares. This takes some tenths of a second, after which the process
/// can be stopped or can log progress.
const UNSHARE_STEP: u64 = 256 * MIB;
/// How often a long operation logs its progress.
const PROGRESS_LOG_INTERVAL: Duration = Duration::from_secs(10);

impl PoolBackend {
    /// What is wrong with the length or the blocks of the image, for reports of its health; `None`
    /// if nothing is. Shared blocks count as present, because those of a thick volume are un-shared
    /// before its snapshot is acknowledged.
    pub fn image_problem(&self, record: &VolumeRecord) -> Result<Option<String>> {
        let image = self.store().size(Image::Volume(record.uuid));
        let image = image.context(|| format!("find the image of volume {}", record.uuid))?;
        let bytes = image_bytes(record.size);
        Ok(match image {
            None => Some("the image is missing".into()),
            Some(image) if image.length < bytes => Some(format!(
                "the image has {} instead of {bytes} bytes",
                image.length
            )),
            Some(image) if record.allocation == Allocation::Thick && image.allocated < bytes => {
                Some(format!(
                    "only {} of {bytes} bytes are still reserved",
                    image.allocated
                ))
            }
            Some(_) => None,
        })
    }

    /// Replaces the record of a volume durably. The backend sets the number of the image, so it
    /// stays whatever the caller's record contains.
    pub fn update(&self, record: &VolumeRecord) -> Result<()> {
        let before = self.volumes.get(record.uuid)?;
        self.volumes.update(&VolumeRecord {
            image: before.map_or(record.image, |before| before.image),
            ..record.clone()
        })
    }

    /// Creates a volume: intent, image, completed record. In a pool that reserves blocks by writing
    /// them, a thick volume must be prepared, written and completed instead. `admit` decides whether there is enough
    /// space. It runs before anything is changed, and its input includes the promises of all
    /// operations in progress. On an error everything is undone durably, or the error is
    /// [`Error::RollbackFailed`]. A crash leaves an intent, which [`PoolBackend::clean_up`] or
    /// [`RecordStore::delete`](crate::backend::records::RecordStore::delete) removes.
    pub fn create(&self, record: VolumeRecord, admit: Admit<'_>) -> Result<VolumeRecord> {
        let reserve = record.allocation == Allocation::Thick;
        let mut record = self.begin_image(record, reserve, admit)?;
        record.state = VolumeState::Ready;
        let made = self
            .volumes
            .sync_image(record.uuid)
            .and_then(|()| self.volumes.update(&record));
        self.volumes.or_delete(record.uuid, made)?;
        Ok(record)
    }

    /// Creates a volume that is to be filled: an intent recorded as `creating`, and an image of
    /// full length without blocks. The caller fills it with [`PoolBackend::copier`],
    /// [`PoolBackend::clone_file`] or [`ImageHandle::copy_to`](crate::backend::ImageHandle::copy_to),
    /// and then calls [`PoolBackend::complete`] or deletes it. A crash leaves an intent, and a copy that can be
    /// continued if the record has `copy`. On an error nothing is left, or the error is
    /// [`Error::RollbackFailed`]. The object that `content_source` names must exist if it is on
    /// this pool.
    pub fn prepare(&self, record: &VolumeRecord, admit: Admit<'_>) -> Result<()> {
        let (lineage, foreign_bytes) = self.origin_of_blocks(record)?;
        let record = VolumeRecord {
            lineage,
            foreign_bytes,
            ..record.clone()
        };
        self.begin_image(record, false, admit).map(drop)
    }

    /// The lineage and the foreign bytes of a new volume: those of its source, or its own if it will
    /// share no blocks with a source.
    fn origin_of_blocks(&self, record: &VolumeRecord) -> Result<(Option<Uuid>, Option<u64>)> {
        let Some(source) = self.shared_source(record) else {
            return Ok((None, record.foreign_bytes));
        };
        let (kind, uuid, origin) = match source {
            Image::Volume(uuid) => {
                let source = self.volumes.get(uuid)?;
                let origin = source.map(|source| (source.lineage(), source.foreign_bytes));
                (Kind::Volume, uuid, origin)
            }
            Image::Snapshot(uuid) => {
                let source = self.snapshots.get(uuid)?;
                let origin = source.map(|source| (source.lineage(), source.foreign_bytes));
                (Kind::Snapshot, uuid, origin)
            }
        };
        let id = VolumeId {
            pool: self.record.id,
            uuid,
        };
        let (lineage, foreign_bytes) = origin.ok_or_else(|| Error::NotFound {
            kind,
            id: id.to_string(),
        })?;
        Ok((Some(lineage), foreign_bytes))
    }

    /// The image with which a volume will share blocks. A copy shares none, even if its source is in
    /// this pool: a volume that moves here may have been created from it before.
    fn shared_source(&self, record: &VolumeRecord) -> Option<Image> {
        if record.copy.is_some() {
            return None;
        }
        match record.content_source.as_ref()? {
            ContentSource::Volume(id) => self.sharing(id).map(Image::Volume),
            ContentSource::Snapshot(id) => self.sharing(id).map(Image::Snapshot),
        }
    }

    /// Whether a volume will share blocks with a thick volume, or with a snapshot of one.
    pub fn has_thick_source(&self, record: &VolumeRecord) -> Result<bool> {
        let allocation = match self.shared_source(record) {
            Some(Image::Volume(uuid)) => self.volumes.get(uuid)?.map(|it| it.allocation),
            Some(Image::Snapshot(uuid)) => self.snapshots.get(uuid)?.map(|it| it.allocation),
            None => None,
        };
        Ok(allocation == Some(Allocation::Thick))
    }

    /// The UUID in an ID, if the object with this ID can share blocks with images of this pool.
    fn sharing(&self, id: &str) -> Option<Uuid> {
        let id = id.parse::<VolumeId>().ok()?;
        (self.facts.shares_blocks && id.pool == self.record.id).then_some(id.uuid)
    }

    /// Everything before the completed record. On an error nothing is left.
    fn begin_image(
        &self,
        mut record: VolumeRecord,
        reserve: bool,
        admit: Admit<'_>,
    ) -> Result<VolumeRecord> {
        record.state = VolumeState::Creating;
        self.admit(admit, |_| {
            record.image = self.store().allocate_id()?;
            self.volumes.remember(&record);
            Ok(())
        })?;
        let begun = self.volumes.begin(std::slice::from_ref(&record));
        let made = begun.and_then(|()| {
            let new = NewImage {
                like: self.shared_source(&record),
                length: image_bytes(record.size),
                reserve,
            };
            let created = self.store().create(Image::Volume(record.uuid), new);
            created.context(|| format!("create volume {}", record.uuid))?;
            match record.copy {
                // A copy that continues after a crash needs its image.
                Some(_) => self.volumes.sync(record.uuid),
                None => Ok(()),
            }
        });
        self.volumes.or_delete(record.uuid, made)?;
        Ok(record)
    }

    /// Extends a filled image to its full length, syncs it and records it as `ready`, or as whole if it
    /// is a spare. A thick volume is first reserved and un-shared completely, or the caller has written
    /// all of it. A clone of a thick volume is un-shared as well, so that no write to the source can
    /// fail; for this, the call of `prepare` must have checked that the size of the clone is free. After an error the caller may
    /// continue, or deletes the volume.
    pub fn complete(&self, record: &VolumeRecord) -> Result<VolumeRecord> {
        let (image, length) = (Image::Volume(record.uuid), image_bytes(record.size));
        let prepared = self.volumes.get(record.uuid)?;
        let number = prepared.as_ref().map_or(record.image, |it| it.image);
        let (lineage, foreign_bytes) = prepared.map_or((None, None), |prepared| {
            (prepared.lineage, prepared.foreign_bytes)
        });
        let thick = record.allocation == Allocation::Thick;
        // A clone has the length of its source.
        let lengthened = self.store().lengthen(image, length, thick);
        lengthened.context(|| format!("create volume {}", record.uuid))?;
        let apart = self.facts.shares_blocks
            && self.facts.unshares
            && (thick || self.is_of_thick(record)?);
        if apart {
            self.unshare_unsynced(image, length)?;
        }
        self.volumes.sync_image(record.uuid)?;
        let spare = record.spare.map(|spare| Spare {
            is_whole: true,
            ..spare
        });
        let complete = VolumeRecord {
            state: match spare {
                None => VolumeState::Ready,
                Some(_) => VolumeState::Creating,
            },
            spare,
            copy: None,
            lineage: lineage.filter(|_| !apart && !thick),
            foreign_bytes: foreign_bytes.filter(|_| !apart && !thick),
            image: number,
            ..record.clone()
        };
        self.volumes.update(&complete)?;
        Ok(complete)
    }

    /// Records that a prepared volume shares the blocks of its source now and is to be written. A
    /// crash before leaves an intent, and after it a volume that can be continued.
    pub fn begin_writing(&self, record: &VolumeRecord) -> Result<VolumeRecord> {
        let prepared = self.volumes.get(record.uuid)?;
        let begun = VolumeRecord {
            lineage: prepared.as_ref().and_then(|prepared| prepared.lineage),
            foreign_bytes: prepared
                .as_ref()
                .and_then(|prepared| prepared.foreign_bytes),
            image: prepared.map_or(record.image, |prepared| prepared.image),
            ..record.clone()
        };
        self.volumes.update(&begun)?;
        Ok(begun)
    }

    /// The volumes whose blocks may be those of a file of others, too.
    pub fn with_foreign_bytes(&self) -> Vec<Uuid> {
        let found = self.volumes.map(|uuid, entry| match entry {
            Entry::Known(record) if record.is_ready() => record.foreign_bytes.map(|_| uuid),
            Entry::Known(_) | Entry::Damaged(_) => None,
        });
        found.into_iter().flatten().collect()
    }

    /// Counts the blocks of a volume as its own if it shares none any more. Returns whether it does.
    pub fn end_sharing(&self, uuid: Uuid) -> Result<bool> {
        let Some(record) = self.volumes.get(uuid)? else {
            return Ok(false);
        };
        let shares = self.store().shares_blocks(Image::Volume(uuid));
        let shares = shares.context(|| format!("find shared blocks of volume {uuid}"))?;
        if shares || record.foreign_bytes.is_none() {
            return Ok(false);
        }
        let foreign_bytes = None;
        self.volumes.update(&VolumeRecord {
            foreign_bytes,
            ..record
        })?;
        Ok(true)
    }

    /// Whether the volume was cloned directly from a thick volume. The thick volume could not
    /// overwrite shared blocks on a full pool. Snapshots of a thick volume no longer share blocks
    /// with it.
    fn is_of_thick(&self, record: &VolumeRecord) -> Result<bool> {
        let Some(ContentSource::Volume(id)) = &record.content_source else {
            return Ok(false);
        };
        let source = match self.sharing(id) {
            Some(source) => self.volumes.get(source)?,
            None => None,
        };
        Ok(source.is_some_and(|source| source.allocation == Allocation::Thick))
    }

    /// Un-shares the first `bytes` of an image durably and in steps, and logs the progress. This is
    /// safe while the image is being written to. A repeat passes quickly over the part that is
    /// done.
    pub fn unshare(&self, image: Image, bytes: u64) -> Result<()> {
        self.unshare_unsynced(image, bytes)?;
        // Until the image is synced, a power loss restores the shared blocks.
        let synced = self.store().sync(image);
        synced.context(|| format!("sync the image of {image}"))
    }

    fn unshare_unsynced(&self, image: Image, bytes: u64) -> Result<()> {
        let mut logged_at = Instant::now();
        for offset in (0..bytes).step_by(UNSHARE_STEP as usize) {
            if logged_at.elapsed() >= PROGRESS_LOG_INTERVAL {
                logged_at = Instant::now();
                tracing::info!(pool = %self.record.name, ?image, done = offset, of = bytes, "unsharing blocks");
            }
            let length = UNSHARE_STEP.min(bytes - offset);
            let unshared = self.store().unshare(image, offset, length);
            unshared.context(|| format!("unshare blocks of the image of {image}"))?;
        }
        Ok(())
    }

    /// Grows the image, then updates the record. `reserve` writes the blocks of a thick volume beyond
    /// its end, in a pool that reserves blocks in this way; after [`Error::Stopping`] they stay for a
    /// repeat. On another error the image has its old length again, or the error is
    /// [`Error::RollbackFailed`].
    pub fn grow(
        &self,
        record: &VolumeRecord,
        size: u64,
        admit: Admit<'_>,
        reserve: &mut dyn FnMut() -> Result<()>,
    ) -> Result<VolumeRecord> {
        let more = image_bytes(size).saturating_sub(image_bytes(record.size));
        self.admit(admit, |growing| {
            growing.insert(record.uuid, Growth { more, from: None });
            Ok(())
        })?;
        let grown = self.grow_admitted(record, size, reserve);
        self.growing().remove(&record.uuid);
        grown
    }

    fn growing(&self) -> MutexGuard<'_, Growing> {
        self.growing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn grow_admitted(
        &self,
        record: &VolumeRecord,
        size: u64,
        reserve: &mut dyn FnMut() -> Result<()>,
    ) -> Result<VolumeRecord> {
        let doing = || format!("grow volume {}", record.uuid);
        let (store, image) = (self.store(), Image::Volume(record.uuid));
        // The image may be longer than its record says, after a growth whose record could not be
        // written. A device maps all of it, and a file system may have been grown to all of it.
        let before = store.length(image).context(doing)?.unwrap_or(0);
        let is_thick = record.allocation == Allocation::Thick;
        let longer = store
            .lengthen(image, image_bytes(size), is_thick)
            .context(doing)
            .and_then(|()| reserve())
            .and_then(|()| self.volumes.sync_image(record.uuid));
        match longer {
            Ok(()) => {}
            Err(Error::Stopping) => return Err(Error::Stopping),
            Err(first) => {
                let undo = store
                    .shorten(image, before.max(image_bytes(record.size)))
                    .context(doing)
                    .and_then(|()| self.volumes.sync_image(record.uuid))
                    .and_then(|()| self.abort_growth(record.uuid).map(drop));
                return Err(first.with_undo(undo));
            }
        }
        // A growth that wanted more has left blocks, which are freed when no call asks for them.
        let end = image_bytes(size);
        let growth = self.volumes.get(record.uuid)?.and_then(|it| it.growth);
        let grown = VolumeRecord {
            size,
            growth: growth.filter(|growth| growth.end > end),
            ..record.clone()
        };
        // After an error it is unknown whether the new record is durable, so the image keeps its
        // new length. A repeat completes the growth. An image shorter than its record would have
        // lost its end.
        self.volumes
            .update(&grown)
            .map_err(|first| Error::RollbackFailed {
                first: Box::new(first),
                undo: "the image is longer than its record states".into(),
            })?;
        Ok(grown)
    }

    /// Opens the image of a volume to write blocks beyond what its users can write, up to `end`, and
    /// records that durably. Returns it with the progress, which is continued.
    pub fn begin_growth(
        &self,
        record: &VolumeRecord,
        end: u64,
    ) -> Result<(ImageHandle, GrowthProgress)> {
        let image = Image::Volume(record.uuid);
        let (opened, from) = self.store().open_beyond(image, end)?;
        let begun = record.growth;
        let growth = GrowthProgress {
            end: begun.map_or(end, |begun| begun.end.max(end)),
            written: begun.map_or(from, |begun| begun.written.max(from)),
        };
        self.save_growth(record, growth)?;
        if let Some(running) = self.growing().get_mut(&record.uuid) {
            running.from = Some(growth.written);
        }
        Ok((opened, growth))
    }

    /// Records how far the blocks beyond the end of a volume are written durably.
    pub fn save_growth(&self, record: &VolumeRecord, growth: GrowthProgress) -> Result<()> {
        self.volumes.update(&VolumeRecord {
            growth: Some(growth),
            ..record.clone()
        })
    }

    /// Frees the blocks that an unfinished growth has left beyond the end of a volume, and returns
    /// whether there was one. No record ever states blocks that were freed, or omits some that were
    /// not. A copy of the volume would share these blocks, and no space is reserved for the volume to
    /// write them then.
    pub fn abort_growth(&self, uuid: Uuid) -> Result<bool> {
        let record = self.volumes.get(uuid)?;
        let Some((GrowthProgress { end, .. }, record)) =
            record.and_then(|it| Some((it.growth?, it)))
        else {
            return Ok(false);
        };
        let image = Image::Volume(uuid);
        let (opened, from) = self.store().open_beyond(image, end)?;
        if from < end {
            self.save_growth(&record, GrowthProgress { end, written: 0 })?;
            let freed = opened.discard(from);
            freed.context(|| format!("free the blocks beyond the end of {image}"))?;
        }
        let growth = None;
        self.volumes.update(&VolumeRecord { growth, ..record })?;
        Ok(true)
    }
}
