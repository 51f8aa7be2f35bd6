//! The space of a pool: what is free, what is provisioned, and what volumes certainly have for
//! themselves.
//!
//! Where images share blocks, a snapshot may have the blocks of a volume's image as well. Such
//! blocks are not space for the volume's promise, because a write to them needs another block. Only
//! the extent maps of all images would show which blocks are shared. [`not_in_snapshots`] is a lower bound that
//! needs one stat of each image (docs/adr/0017).

use std::collections::{BTreeMap, HashMap};
use std::sync::PoisonError;

use uuid::Uuid;

use super::PoolBackend;
use super::metadata::{MapOf, Maps};
use crate::backend::records::{Entry, StoredRecord};
use crate::backend::store::{DeletedImage, ImageSize};
use crate::backend::{Admit, Image, MetadataSpace, PoolSpace};
use crate::error::{ErrorContext, Result};
use crate::host::Space;
use crate::model::Allocation;
use crate::model::size::image_bytes;
use crate::record::{SnapshotRecord, VolumeRecord};

/// A growth in progress.
#[derive(Clone, Copy, Debug)]
pub(super) struct Growth {
    /// Bytes by which the volume grows, which are provisioned.
    pub(super) more: u64,
    /// The offset from which on it writes blocks beyond the end of the volume, if it does.
    pub(super) from: Option<u64>,
}

/// The growths in progress, by volume.
pub(super) type Growing = HashMap<Uuid, Growth>;

/// Bytes of blocks that the growth of a volume has written beyond its end. They are no longer free, and
/// they are provisioned for the growth.
fn grown(growing: &Growing, record: &VolumeRecord) -> u64 {
    let growth = growing.get(&record.uuid);
    let from = growth.and_then(|growth| growth.from);
    match (growth, from, record.growth) {
        (Some(growth), Some(from), Some(progress)) => {
            progress.written.saturating_sub(from).min(growth.more)
        }
        _ => 0,
    }
}

/// The role of an image in the sharing of blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    /// A volume that may share all its blocks with any image of its lineage.
    Volume,
    /// A copy that is not complete. It may share blocks with its source, even if that is thick.
    Filling,
    /// A thick volume. It shares blocks only with copies and snapshots of it that are in progress.
    Thick,
    /// A snapshot that was acknowledged. Blocks that it shared with a thick volume were un-shared
    /// before.
    Snapshot,
    /// A deleted snapshot that stays as the hidden base of its volume. It shares blocks like any
    /// other.
    Base,
    /// A snapshot in progress.
    Cutting,
}

/// The blocks of one image.
#[derive(Clone, Copy, Debug)]
struct Held {
    /// `None` if the record cannot be read.
    lineage: Option<Uuid>,
    role: Role,
    /// Bytes of its blocks, including shared ones.
    blocks: u64,
    /// Bytes of blocks that a file of others may have as well.
    foreign: u64,
}

impl Held {
    /// The blocks that a deleted image still occupies. Like one in progress, it may share them with a
    /// thick volume.
    fn of_deleted(image: &DeletedImage) -> Held {
        Held {
            lineage: image.lineage,
            role: match image.lineage {
                Some(_) => Role::Cutting,
                None => Role::Snapshot,
            },
            blocks: match image.allocation {
                // All blocks of a thick volume are mapped, and it may not have been un-shared.
                Allocation::Thick => image.blocks.max(image.length),
                Allocation::Thin => image.blocks,
            },
            foreign: 0,
        }
    }
}

/// What is known of an image before it is queried.
struct PlannedImage {
    image: Image,
    /// Its length, if a record states it.
    bytes: Option<u64>,
    /// Bytes of blocks that its growth has written beyond its end.
    grown: u64,
    lineage: Option<Uuid>,
    foreign: u64,
    role: Role,
    /// A copy or thick volume in progress, or a snapshot of a thick volume in progress: it will
    /// have blocks for its whole length.
    to_be_filled: bool,
    /// The volume whose blocks it shares or will share: of a snapshot whose cut is still to come, and
    /// of one of a thick volume that cannot be un-shared.
    gets: Option<Uuid>,
}

impl PoolBackend {
    /// Measures the space of the pool.
    pub fn space(&self) -> Result<PoolSpace> {
        let growing = self.growing.lock().unwrap_or_else(PoisonError::into_inner);
        self.measure(&growing, true, None)
    }

    /// The space of the disk, from one query that reads no image.
    pub fn disk(&self) -> Result<Space> {
        self.store().space().context(|| self.measuring())
    }

    /// Decides whether an operation may take space, and then calls `taken` to record it, both under
    /// one lock. It decides first without reading every image, and reads all of them only if that
    /// refuses: blocks that images already have can only increase the space for promises.
    pub(super) fn admit(
        &self,
        admit: Admit<'_>,
        taken: impl FnOnce(&mut Growing) -> Result<()>,
    ) -> Result<()> {
        self.admit_with_planned(None, admit, taken)
    }

    /// Like [`PoolBackend::admit`], for a planned snapshot, which is counted as if it had been cut.
    pub(super) fn admit_with_planned(
        &self,
        planned: Option<&SnapshotRecord>,
        admit: Admit<'_>,
        taken: impl FnOnce(&mut Growing) -> Result<()>,
    ) -> Result<()> {
        let mut growing = self.growing.lock().unwrap_or_else(PoisonError::into_inner);
        if admit(&self.measure(&growing, false, planned)?).is_err() {
            admit(&self.measure(&growing, true, planned)?)?;
        }
        taken(&mut growing)
    }

    /// Unless `each` is set, images whose length is in a record are not queried.
    fn measure(
        &self,
        growing: &Growing,
        each: bool,
        planned: Option<&SnapshotRecord>,
    ) -> Result<PoolSpace> {
        let volumes = self
            .volumes
            .map(|uuid, entry| self.entry_of_volume(growing, uuid, entry));
        let of_snapshot = |uuid, entry: &_| self.entry_of_snapshot(uuid, entry);
        let snapshots = self.snapshots.map(of_snapshot);
        // Read after the progress of growths, so that no block counts as written and as free.
        let there = self.disk()?;
        let mut space = PoolSpace {
            total: there.total,
            available: there.available,
            provisioned: growing.values().map(|growth| growth.more).sum(),
            ..PoolSpace::default()
        };
        let (metadata, deleted) = self.reserve_maps(growing)?;
        space.metadata = metadata;
        let (mut held, mut filled) = (Vec::new(), HashMap::new());
        let grown: u64 = volumes.iter().map(|volume| volume.grown).sum();
        let sizes = self.sizes_of(volumes.iter().chain(&snapshots), each)?;
        for occupant in volumes {
            let image = sizes.get(&occupant.image);
            let blocks = occupant.blocks(image);
            space.allocated += blocks;
            let length = image.map_or(0, |image| image.length);
            space.provisioned += occupant.bytes.unwrap_or(length);
            space.pending_bytes += self.pending_bytes_of(&occupant, blocks);
            held.push(occupant.held(blocks));
            filled.insert(occupant.image.uuid(), blocks);
        }
        let gets = |occupant: &PlannedImage| {
            let volume = occupant.gets.and_then(|volume| filled.get(&volume));
            volume.copied().unwrap_or(0)
        };
        for occupant in snapshots {
            let image = sizes.get(&occupant.image);
            let blocks = image.map_or(0, |image| image.allocated);
            match occupant.role {
                Role::Base => space.bases += blocks.max(gets(&occupant)),
                _ => space.snapshots += blocks,
            }
            let pending = self.pending_bytes_of(&occupant, blocks);
            space.pending_bytes += pending;
            if self.facts.shares_blocks {
                held.push(occupant.held(blocks.max(pending).max(gets(&occupant))));
            } else {
                space.provisioned += pending;
            }
        }
        if let Some(record) = planned {
            let occupant = self.snapshot_usage(record);
            let pending = self.pending_bytes_of(&occupant, 0);
            if self.facts.shares_blocks {
                held.push(occupant.held(pending.max(gets(&occupant))));
            } else {
                space.provisioned += pending;
            }
        }
        held.extend(deleted.iter().map(Held::of_deleted));
        if each {
            space.not_in_snapshots = self.not_in_snapshots(&held, space.allocated) + grown;
            held.retain(|image| image.role != Role::Base);
            space.not_in_snapshots_or_bases = self.not_in_snapshots(&held, space.allocated) + grown;
        }
        Ok(space)
    }

    fn not_in_snapshots(&self, held: &[Held], allocated: u64) -> u64 {
        match self.facts.shares_blocks {
            true => not_in_snapshots(held),
            false => allocated,
        }
    }

    /// The metadata of a thin pool, with what is reserved of it, and the deleted images. These are read
    /// after the records, so that an image that is deleted in between is in at least one of them.
    fn reserve_maps(
        &self,
        growing: &Growing,
    ) -> Result<(Option<MetadataSpace>, Vec<DeletedImage>)> {
        let metadata = self.store().metadata().context(|| self.measuring())?;
        let deleted = || self.store().deleted().context(|| self.measuring());
        let Some(mut space) = metadata else {
            return Ok((None, deleted()?));
        };
        let mut maps = Maps::default();
        let volumes = self.volumes.map(|uuid, entry| match entry {
            Entry::Known(record) => {
                let more = growing.get(&uuid).map_or(0, |growth| growth.more);
                Ok(MapOf::volume(record, more))
            }
            Entry::Damaged(_) => Err(Image::Volume(uuid)),
        });
        let snapshots = self.snapshots.map(|uuid, entry| match entry {
            Entry::Known(record) => {
                let bytes = image_bytes(record.size);
                Ok((record.allocation, record.lineage(), bytes))
            }
            Entry::Damaged(_) => Err(Image::Snapshot(uuid)),
        });
        let mut damaged = Vec::new();
        for volume in volumes {
            match volume {
                Ok(volume) => maps.add_volume(&volume),
                Err(image) => damaged.push(image),
            }
        }
        for snapshot in snapshots {
            match snapshot {
                Ok((allocation, lineage, bytes)) => maps.add_snapshot(allocation, lineage, bytes),
                Err(image) => damaged.push(image),
            }
        }
        let deleted = deleted()?;
        for deleted in &deleted {
            match deleted.lineage {
                Some(lineage) => maps.add_snapshot(deleted.allocation, lineage, deleted.length),
                None => maps.add_damaged(deleted.blocks),
            }
        }
        let sizes = self.store().sizes(&damaged);
        for size in sizes.context(|| self.measuring())? {
            maps.add_damaged(size.map_or(0, |size| size.allocated));
        }
        space.reserved = maps.reserved(&space);
        Ok((Some(space), deleted))
    }

    fn measuring(&self) -> String {
        format!("measure pool {}", self.folder.path.display())
    }

    /// The sizes of images that exist; unless `each` is set, only of those without a length in a record.
    fn sizes_of<'a>(
        &self,
        occupants: impl Iterator<Item = &'a PlannedImage>,
        each: bool,
    ) -> Result<HashMap<Image, ImageSize>> {
        let asked = occupants.filter(|it| each || it.bytes.is_none());
        let images: Vec<Image> = asked.map(|it| it.image).collect();
        let sizes = self.store().sizes(&images);
        let sizes = sizes.context(|| self.measuring())?;
        let found = images.into_iter().zip(sizes);
        Ok(found
            .filter_map(|(image, size)| Some((image, size?)))
            .collect())
    }

    /// Bytes that an image in progress will still take. Existing blocks may be shared, and then
    /// each needs another block.
    fn pending_bytes_of(&self, occupant: &PlannedImage, blocks: u64) -> u64 {
        let there = if self.facts.shares_blocks { 0 } else { blocks };
        let bytes = occupant
            .bytes
            .filter(|_| occupant.to_be_filled)
            .unwrap_or(0);
        bytes.saturating_sub(there)
    }

    fn entry_of_volume(
        &self,
        growing: &Growing,
        uuid: Uuid,
        entry: &Entry<VolumeRecord>,
    ) -> PlannedImage {
        let record = match entry {
            Entry::Known(record) => Some(record),
            Entry::Damaged(_) => None,
        };
        let role = match record {
            Some(record) if !record.is_ready() => Role::Filling,
            Some(record) if record.allocation == Allocation::Thick && self.facts.unshares => {
                Role::Thick
            }
            Some(_) | None => Role::Volume,
        };
        PlannedImage {
            image: Image::Volume(uuid),
            bytes: record.map(|record| image_bytes(record.size)),
            grown: record.map_or(0, |record| grown(growing, record)),
            lineage: record.map(|record| record.lineage()),
            foreign: record.and_then(|record| record.foreign_bytes).unwrap_or(0),
            to_be_filled: role == Role::Filling
                && record.is_some_and(|record| {
                    record.allocation == Allocation::Thick || record.copy.is_some()
                }),
            role,
            gets: None,
        }
    }

    fn entry_of_snapshot(&self, uuid: Uuid, entry: &Entry<SnapshotRecord>) -> PlannedImage {
        match entry {
            Entry::Known(record) => self.snapshot_usage(record),
            Entry::Damaged(_) => PlannedImage {
                image: Image::Snapshot(uuid),
                bytes: None,
                grown: 0,
                lineage: None,
                foreign: 0,
                role: Role::Snapshot,
                to_be_filled: false,
                gets: None,
            },
        }
    }

    fn snapshot_usage(&self, record: &SnapshotRecord) -> PlannedImage {
        let unready = !record.is_ready() && !record.is_base();
        let thick = record.allocation == Allocation::Thick;
        let grows = thick || record.copy.is_some();
        let keeps_sharing = thick && !self.facts.unshares;
        PlannedImage {
            image: Image::Snapshot(record.uuid),
            bytes: Some(image_bytes(record.size)),
            grown: 0,
            lineage: Some(record.lineage()),
            foreign: record.foreign_bytes.unwrap_or(0),
            role: match (unready, record.is_base()) {
                (true, _) => Role::Cutting,
                (false, true) => Role::Base,
                (false, false) => Role::Snapshot,
            },
            to_be_filled: unready && grows,
            gets: (unready || keeps_sharing).then_some(record.source),
        }
    }
}

impl PlannedImage {
    /// Bytes of its blocks. Those beyond the end of a volume are counted by its growth, which may have
    /// ended since its progress was read.
    fn blocks(&self, image: Option<&ImageSize>) -> u64 {
        let blocks = image.map_or(0, |image| image.allocated);
        match self.bytes.filter(|_| self.grown > 0) {
            Some(bytes) => blocks.min(bytes),
            None => blocks,
        }
    }

    fn held(&self, blocks: u64) -> Held {
        Held {
            lineage: self.lineage,
            role: self.role,
            blocks,
            foreign: self.foreign,
        }
    }
}

/// The blocks of one lineage.
#[derive(Default)]
struct Family {
    /// The size of the largest image that may share blocks.
    largest: u64,
    filling: u64,
    thick: u64,
    snapshots: u64,
    cutting: u64,
    /// Bytes of blocks that a file of others may have as well: all images of the family originate from
    /// the same import.
    foreign: u64,
}

/// A lower bound of the bytes of blocks that volumes have and no snapshot has, each block counted
/// once, even if several volumes have it, and that no other file has either. Images of two lineages
/// share nothing. The images of one lineage have at least the blocks of the largest one, and its snapshots have at most the sum of
/// theirs. A thick volume shares only with copies and snapshots of it that are in progress.
fn not_in_snapshots(held: &[Held]) -> u64 {
    let mut lineages: BTreeMap<Uuid, Family> = BTreeMap::new();
    // Snapshots of unknown lineage: they may share blocks with any image.
    let mut unknown = 0;
    for image in held {
        let blocks = image.blocks;
        let Some(lineage) = image.lineage else {
            unknown += match image.role {
                Role::Snapshot | Role::Base | Role::Cutting => blocks,
                // It may share blocks with any image, and nothing is being made from it.
                Role::Volume | Role::Filling | Role::Thick => 0,
            };
            continue;
        };
        let family = lineages.entry(lineage).or_default();
        family.foreign = family.foreign.max(image.foreign);
        match image.role {
            Role::Volume => family.largest = family.largest.max(blocks),
            Role::Filling => {
                family.largest = family.largest.max(blocks);
                family.filling += blocks;
            }
            Role::Thick => family.thick += blocks,
            Role::Snapshot | Role::Base => family.snapshots += blocks,
            Role::Cutting => family.cutting += blocks,
        }
    }
    let each = lineages.values().map(|family| {
        let thin = family
            .largest
            .saturating_sub(family.snapshots + family.cutting + family.foreign);
        let thick = family.thick.saturating_sub(family.filling + family.cutting);
        thin + thick
    });
    each.sum::<u64>().saturating_sub(unknown)
}

#[cfg(test)]
mod tests;
