//! The life cycle of a volume's image: an intent is recorded before it is created, and a completed
//! record afterwards; it is filled and grown.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use uuid::Uuid;

use super::FileBackend;
use crate::backend::{Admit, Image, ImageHandle};
use crate::error::{Error, Kind, Result, chain};
use crate::host::{Effect, FileStat};
use crate::model::size::{MIB, image_bytes};
use crate::model::{Allocation, VolumeId};
use crate::record::{ContentSource, VolumeRecord, VolumeState};

/// The bytes that one call un-shares. This takes some tenths of a second, after which the process
/// can be stopped or can log progress.
const UNSHARE_STEP: u64 = 256 * MIB;
/// How often a long operation logs its progress.
const PROGRESS_LOG_INTERVAL: Duration = Duration::from_secs(10);

impl FileBackend {
    /// Reports an image that is missing, too short, or reserved and lacks blocks. Shared blocks
    /// count as present, because those of a thick volume are un-shared before its snapshot is
    /// acknowledged.
    pub(super) fn judge_image(&self, record: &VolumeRecord) -> Result<Option<String>> {
        let path = self.volumes.image(record.uuid);
        let image = self.folder.stat(&path, || {
            format!("find the image of volume {}", record.uuid)
        })?;
        let bytes = image_bytes(record.size);
        Ok(match image {
            None => Some("the image is missing".into()),
            Some(image) if image.size < bytes => Some(format!(
                "the image has {} instead of {bytes} bytes",
                image.size
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

    pub(super) fn create_image(
        &self,
        record: VolumeRecord,
        admit: Admit<'_>,
    ) -> Result<VolumeRecord> {
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

    pub(super) fn prepare_image(&self, record: &VolumeRecord, admit: Admit<'_>) -> Result<()> {
        let record = VolumeRecord {
            lineage: self.origin(record)?,
            ..record.clone()
        };
        self.begin_image(record, false, admit).map(drop)
    }

    /// The lineage of a copy's source; `None` if the copy will share no blocks with it.
    fn origin(&self, record: &VolumeRecord) -> Result<Option<Uuid>> {
        let (kind, id, lineage) = match &record.content_source {
            Some(ContentSource::Volume(id)) => match self.sharing(id) {
                Some(source) => (
                    Kind::Volume,
                    id,
                    self.volumes.get(source)?.map(|found| found.lineage()),
                ),
                None => return Ok(None),
            },
            Some(ContentSource::Snapshot(id)) => match self.sharing(id) {
                Some(source) => (
                    Kind::Snapshot,
                    id,
                    self.snapshots.get(source)?.map(|found| found.lineage()),
                ),
                None => return Ok(None),
            },
            None => return Ok(None),
        };
        let gone = || Error::NotFound {
            kind,
            id: id.clone(),
        };
        lineage.map(Some).ok_or_else(gone)
    }

    /// The image with which a volume will share blocks.
    fn shared_image(&self, record: &VolumeRecord) -> Option<PathBuf> {
        match record.content_source.as_ref()? {
            ContentSource::Volume(id) => Some(self.volumes.image(self.sharing(id)?)),
            ContentSource::Snapshot(id) => Some(self.snapshots.image(self.sharing(id)?)),
        }
    }

    /// Creates an image that can share blocks with another one of this pool.
    pub(super) fn make_like(&self, path: &Path, source: &Path) -> Result<()> {
        if self.fs_name != "btrfs" {
            return Ok(());
        }
        self.folder.perform(Effect::MakeLike { path, source }, || {
            "create an image".into()
        })
    }

    /// The UUID in an ID, if the object with this ID can share blocks with images of this pool.
    fn sharing(&self, id: &str) -> Option<Uuid> {
        let id = id.parse::<VolumeId>().ok()?;
        (self.shares_blocks && id.pool == self.pool.id).then_some(id.uuid)
    }

    /// Everything before the completed record. On an error nothing is left.
    fn begin_image(
        &self,
        mut record: VolumeRecord,
        reserve: bool,
        admit: Admit<'_>,
    ) -> Result<VolumeRecord> {
        record.state = VolumeState::Creating;
        self.admit(admit, |_| self.volumes.remember(&record))?;
        let made = self.volumes.begin(&record).and_then(|()| {
            if let Some(source) = self.shared_image(&record) {
                self.make_like(&self.volumes.image(record.uuid), &source)?;
            }
            if let Some(bytes) = self.extent {
                let path = &self.volumes.image(record.uuid);
                self.folder
                    .perform(Effect::HintExtents { path, bytes }, || {
                        "create an image".into()
                    })?;
            }
            self.lengthen(&record, reserve)?;
            match record.copy {
                // A copy that continues after a crash needs its image.
                Some(_) => self.volumes.sync(record.uuid),
                None => Ok(()),
            }
        });
        self.volumes.or_delete(record.uuid, made)?;
        Ok(record)
    }

    fn lengthen(&self, record: &VolumeRecord, reserve: bool) -> Result<()> {
        let image = Effect::Allocate {
            path: &self.volumes.image(record.uuid),
            size: image_bytes(record.size),
            reserve,
        };
        self.folder
            .perform(image, || format!("create volume {}", record.uuid))
    }

    /// Makes the image durable before its record says that it is complete.
    pub(super) fn complete_image(&self, record: &VolumeRecord) -> Result<VolumeRecord> {
        let lineage = self
            .volumes
            .get(record.uuid)?
            .and_then(|prepared| prepared.lineage);
        let thick = record.allocation == Allocation::Thick;
        // A clone has the length of its source.
        self.lengthen(record, thick)?;
        let apart = self.shares_blocks && (thick || self.is_of_thick(record)?);
        if apart {
            self.unshare_image(Image::Volume(record.uuid), image_bytes(record.size))?;
        }
        self.volumes.sync_image(record.uuid)?;
        let complete = VolumeRecord {
            state: VolumeState::Ready,
            copy: None,
            lineage: lineage.filter(|_| !apart),
            ..record.clone()
        };
        self.volumes.update(&complete)?;
        Ok(complete)
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

    pub(super) fn open_image(&self, image: Image) -> Result<ImageHandle> {
        let (path, found) = self.find_image(image)?;
        Ok(ImageHandle {
            host: self.folder.host.clone(),
            path,
            bytes: found.size,
            modified: found.modified,
        })
    }

    /// The file of an image that must exist.
    pub(super) fn find_image(&self, image: Image) -> Result<(PathBuf, FileStat)> {
        let path = self.image_of(image);
        let found = self
            .folder
            .stat(&path, || format!("find the image of {image}"))?;
        match found {
            Some(found) => Ok((path, found)),
            None => Err(Error::Damaged {
                path,
                problem: "the image is missing".into(),
            }),
        }
    }

    pub(super) fn lengthen_image(&self, image: Image, bytes: u64) -> Result<()> {
        let path = &self.image_of(image);
        let longer = Effect::Allocate {
            path,
            size: bytes,
            reserve: false,
        };
        self.folder
            .perform(longer, || format!("extend the image of {image}"))
    }

    /// Works in steps, so that it can log progress.
    pub(super) fn unshare_image(&self, image: Image, bytes: u64) -> Result<()> {
        let path = self.image_of(image);
        let mut told = Instant::now();
        for offset in (0..bytes).step_by(UNSHARE_STEP as usize) {
            if told.elapsed() >= PROGRESS_LOG_INTERVAL {
                told = Instant::now();
                tracing::info!(pool = %self.pool.name, ?image, done = offset, of = bytes, "unsharing blocks");
            }
            let step = Effect::Unshare {
                path: &path,
                offset,
                length: UNSHARE_STEP.min(bytes - offset),
            };
            self.folder
                .perform(step, || format!("unshare blocks of the image of {image:?}"))?;
        }
        Ok(())
    }

    pub(super) fn grow_image(
        &self,
        record: &VolumeRecord,
        size: u64,
        admit: Admit<'_>,
    ) -> Result<VolumeRecord> {
        let more = image_bytes(size).saturating_sub(image_bytes(record.size));
        self.admit(admit, |growing| {
            growing.insert(record.uuid, more);
        })?;
        let grown = self.grow_admitted(record, size);
        self.growing
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
            .remove(&record.uuid);
        grown
    }

    fn grow_admitted(&self, record: &VolumeRecord, size: u64) -> Result<VolumeRecord> {
        let doing = || format!("grow volume {}", record.uuid);
        let path = self.volumes.image(record.uuid);
        // The image may be longer than its record says, after a growth whose record could not be
        // written. A device maps all of it, and a file system may have been grown to all of it.
        let before = self
            .folder
            .stat(&path, doing)?
            .map_or(0, |image| image.size);
        let longer = Effect::Allocate {
            path: &path,
            size: image_bytes(size),
            reserve: record.allocation == Allocation::Thick,
        };
        let longer = self
            .folder
            .perform(longer, doing)
            .and_then(|()| self.volumes.sync_image(record.uuid));
        if let Err(first) = longer {
            let shorter = Effect::Truncate {
                path: &path,
                size: before.max(image_bytes(record.size)),
            };
            let undo = self
                .folder
                .perform(shorter, doing)
                .and_then(|()| self.volumes.sync_image(record.uuid));
            return Err(match undo {
                Ok(()) => first,
                Err(undo) => Error::RollbackFailed {
                    first: Box::new(first),
                    undo: chain(&undo),
                },
            });
        }
        let grown = VolumeRecord {
            size,
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
}
