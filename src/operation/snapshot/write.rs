//! Thick volumes in pools that reserve their blocks by writing them: at a bounded rate, with progress
//! that is durable, like copies.

use std::sync::Arc;

use super::begun::{find_begun, is_written};
use super::copies::Copying;
use super::copy::Filling;
use super::fill::what_fills;
use super::restore::{Content, undo_volume};
use super::running::{CopyKind, CopyOf};
use crate::backend::Image;
use crate::error::{Error, Result};
use crate::model::size::image_bytes;
use crate::operation::pools::capacity::admit;
use crate::operation::{Pool, Snapshots};
use crate::record::{CopyProgress, GrowthProgress, VolumeRecord};

impl Snapshots {
    /// Creates a thick volume whose blocks are reserved by writing them. A repeat continues what a
    /// stop or a crash interrupted. On another error nothing is left, or the error is
    /// [`Error::RollbackFailed`].
    pub(in crate::operation) fn write_volume(
        &self,
        pool: &Arc<Pool>,
        planned: VolumeRecord,
        content: Option<&Content>,
    ) -> Result<VolumeRecord> {
        self.copies.ask(planned.uuid, self.host.now());
        let of = what_fills(pool, &planned, content);
        let copying = self.begin_copy(of, None, [pool.id(); 2])?;
        let begin = CopyProgress {
            copied: 0,
            source_modified: content.map_or(0, Content::identity),
            base: None,
        };
        let begun = find_begun(pool, &planned, begin.source_modified)?;
        let planned = VolumeRecord {
            copy: Some(begin),
            ..planned
        };
        let record = match (begun, content) {
            (Some(begun), _) => begun,
            (None, Some(content)) => self.share(pool, &planned, content)?,
            (None, None) => {
                let ended = pool.backend.volumes.delete_unanswered(planned.uuid);
                ended.map_err(Error::into_indeterminate)?;
                self.before_bases(pool, || {
                    pool.backend.prepare(&planned, &|space| {
                        admit(pool, space, planned.allocation, 0, planned.size)
                    })
                })?;
                planned
            }
        };
        let written = self.write_all(&copying, pool, &record);
        match written.and_then(|()| pool.backend.complete(&record)) {
            // What was written stays for a repeat.
            Err(Error::Stopping) => Err(Error::Stopping),
            done => done.map_err(|first| undo_volume(pool, &record, first)),
        }
    }

    /// Writes the blocks of a volume that are not written yet according to its record.
    fn write_all(&self, copying: &Copying<'_>, pool: &Pool, record: &VolumeRecord) -> Result<()> {
        let image = Image::Volume(record.uuid);
        let target = pool.backend.open_image(image)?;
        let begun = record.copy.unwrap_or(CopyProgress {
            copied: 0,
            source_modified: 0,
            base: None,
        });
        let filling = Filling {
            image,
            source: None,
            target: &target,
            reserves: true,
            range: begun.copied..target.bytes(),
        };
        self.fill(copying, filling, |copied| {
            let copy = Some(CopyProgress { copied, ..begun });
            let record = record.clone();
            pool.backend.update(&VolumeRecord { copy, ..record })
        })
    }

    /// Grows the image of a volume. A repeat continues what a stop or a crash interrupted.
    pub(in crate::operation) fn grow(
        &self,
        pool: &Pool,
        record: &VolumeRecord,
        size: u64,
    ) -> Result<()> {
        let (mut had, mut copying) = (record.size, None);
        if is_written(pool, record) {
            self.copies.ask(record.uuid, self.host.now());
            let of = CopyOf {
                kind: CopyKind::Growth,
                name: String::new(),
                ..what_fills(pool, record, None)
            };
            copying = Some(self.begin_copy(of, None, [pool.id(); 2])?);
            // These blocks are no longer free.
            had = record.growth.map_or(had, |growth| growth.written.max(had));
        }
        let admitted = |space: &_| admit(pool, space, record.allocation, had, size);
        self.before_bases(pool, || {
            let mut reserve = || match &copying {
                Some(copying) => self.write_beyond(copying, pool, record, image_bytes(size)),
                None => Ok(()),
            };
            let grown = pool.backend.grow(record, size, &admitted, &mut reserve);
            grown.map(drop)
        })
    }

    /// Writes blocks beyond the end of a volume, to which its users cannot write yet.
    fn write_beyond(
        &self,
        copying: &Copying<'_>,
        pool: &Pool,
        record: &VolumeRecord,
        end: u64,
    ) -> Result<()> {
        let (target, growth) = pool.backend.begin_growth(record, end)?;
        let filling = Filling {
            image: Image::Volume(record.uuid),
            source: None,
            target: &target,
            reserves: true,
            range: growth.written..end,
        };
        self.fill(copying, filling, |written| {
            let growth = GrowthProgress { written, ..growth };
            pool.backend.save_growth(record, growth)
        })
    }
}
