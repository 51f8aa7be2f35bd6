//! The replacement of a volume's image by that of a spare, which a VolumeRevert has filled.
//!
//! One write of the volume's record decides which image is the volume's. Everything before it leaves
//! the volume as it was, and everything after it is repeated until it is done: the spare gets the
//! former image and is deleted, so that its blocks are wiped as its record says.

use uuid::Uuid;

use super::PoolBackend;
use crate::backend::Image;
use crate::backend::records::{Entry, TRASH, VOLUMES};
use crate::error::{Error, ErrorContext, Result};
use crate::model::size::image_bytes;
use crate::record::{Reverting, VolumeRecord};

impl PoolBackend {
    /// The spare of a volume, if it has its whole content and could become the volume's image now.
    pub fn find_whole_spare(&self, record: &VolumeRecord) -> Result<Option<VolumeRecord>> {
        let Some(reverting) = &record.reverting else {
            return Ok(None);
        };
        let spare = self.volumes.get(reverting.spare)?;
        let is_whole = |it: &VolumeRecord| {
            let of = it.spare.filter(|spare| spare.is_whole);
            of.is_some_and(|spare| spare.of == record.uuid) && it.size == record.size
        };
        let Some(spare) = spare.filter(is_whole) else {
            return Ok(None);
        };
        let length = self.find_length(Image::Volume(spare.uuid))?;
        let is_long = length.is_some_and(|length| length >= image_bytes(record.size));
        Ok(is_long.then_some(spare))
    }

    /// Makes the image of a whole spare that of the volume: one write of the record. After an error it
    /// is unknown which of both the volume has, and a repeat completes it. No device may be attached to
    /// the volume.
    pub fn switch(&self, record: &VolumeRecord, spare: &VolumeRecord) -> Result<()> {
        let Some(reverting) = record.reverting.clone() else {
            return Err(Error::bug("a volume without a revert is not switched"));
        };
        let switched = VolumeRecord {
            image: spare.image,
            formatted: spare.formatted.clone(),
            lineage: spare.lineage.or(record.lineage),
            foreign_bytes: spare.foreign_bytes,
            growth: None,
            reverting: Some(Reverting {
                is_switched: true,
                image: record.image,
                ..reverting
            }),
            ..record.clone()
        };
        let written = self.volumes.update(&switched);
        written.map_err(Error::into_indeterminate)
    }

    /// Completes the switch of a volume, and moves its former image into the trash. Does nothing to a
    /// volume that has not switched. A repeat continues after any failure.
    pub fn end_switch(&self, volume: Uuid) -> Result<()> {
        let record = self.volumes.get(volume)?;
        let reverting = record.and_then(|record| record.reverting);
        let Some(reverting) = reverting.filter(|it| it.is_switched) else {
            return Ok(());
        };
        let spare = reverting.spare;
        if let Some(its) = self.volumes.get(spare)? {
            if its.image != reverting.image {
                let image = reverting.image;
                self.volumes.update(&VolumeRecord { image, ..its })?;
            }
            let taken = self.store().take_image(volume, spare);
            taken.context(|| format!("replace the image of volume {volume}"))?;
            self.volumes.hide(spare)?;
        }
        self.folder.sync(TRASH)?;
        self.folder.sync(VOLUMES)?;
        let placed = self.store().place_image(volume);
        placed.context(|| format!("replace the image of volume {volume}"))
    }

    /// Moves a spare into the trash, durably. Its blocks are left to [`PoolBackend::clean_up`], so that
    /// no fence waits for a wipe.
    pub fn hide_spare(&self, spare: Uuid) -> Result<()> {
        self.volumes.hide(spare)?;
        self.folder.sync(TRASH)?;
        self.folder.sync(VOLUMES)
    }

    /// Volumes that have switched, and whose revert has not ended.
    pub(super) fn switched(&self) -> Vec<Uuid> {
        let each = self.volumes.map(|uuid, entry| match entry {
            Entry::Known(record) => {
                let reverting = record.reverting.as_ref();
                reverting.is_some_and(|it| it.is_switched).then_some(uuid)
            }
            Entry::Damaged(_) => None,
        });
        each.into_iter().flatten().collect()
    }

    /// Whole spares whose volume is gone or does not name them, according to the memory of this
    /// process. Nothing of this driver leaves one behind.
    pub(super) fn unnamed_spares(&self) -> Vec<Uuid> {
        let each = self.volumes.map(|uuid, entry| match entry {
            Entry::Known(record) => {
                let spare = record.spare.filter(|spare| spare.is_whole);
                spare.map(|spare| (uuid, spare.of))
            }
            Entry::Damaged(_) => None,
        });
        let spares = each.into_iter().flatten();
        let unnamed = spares.filter(|(spare, of)| matches!(self.is_named(*spare, *of), Ok(false)));
        unnamed.map(|(spare, _)| spare).collect()
    }

    fn is_named(&self, spare: Uuid, volume: Uuid) -> Result<bool> {
        let record = self.volumes.get(volume)?;
        let reverting = record.and_then(|record| record.reverting);
        Ok(reverting.is_some_and(|it| it.spare == spare))
    }

    /// Deletes a spare whose volume does not name it, and returns whether it was one.
    pub(super) fn delete_unnamed_spare(&self, spare: Uuid) -> Result<bool> {
        let record = self.volumes.get(spare)?;
        let Some(of) = record.and_then(|record| record.spare) else {
            return Ok(false);
        };
        if self.is_named(spare, of.of)? {
            return Ok(false);
        }
        self.volumes.delete(spare).map(|()| true)
    }
}
