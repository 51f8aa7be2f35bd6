//! Room of a pool: what is there, what is promised, and what volumes surely have for themselves.
//!
//! Where images share blocks, what a volume's image has may be a snapshot's as well, and then it's
//! no room for the volume's promise: a write to it needs another block. Which blocks are shared
//! only the maps of all images could say; [`own`] is a bound from below that needs one stat of
//! each (docs/adr/0017).

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;
use std::sync::PoisonError;

use uuid::Uuid;

use super::FileBackend;
use super::record_store::{Entry, StoredRecord};
use crate::backend::{Admit, PoolSpace};
use crate::error::{ErrorContext, Result};
use crate::host::{FileStat, Space};
use crate::model::Allocation;
use crate::model::size::image_bytes;
use crate::record::{SnapshotRecord, VolumeRecord};

/// Bytes promised to growths that are running.
pub(super) type Growing = HashMap<Uuid, u64>;

/// What an image is, as far as sharing goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    /// A volume that may share all it has with whatever has its lineage.
    Volume,
    /// A copy that isn't complete: it may share with its source, also with a thick one.
    Filling,
    /// A thick volume: all it has is its own, but for copies and snapshots that are being made.
    Thick,
    /// A snapshot that was answered: what it shares with a thick volume was un-shared before.
    Snapshot,
    /// One that is being made.
    Cutting,
}

/// One image.
#[derive(Clone, Copy, Debug)]
struct Held {
    /// None where the record can't be read.
    lineage: Option<Uuid>,
    role: Role,
    /// Bytes of its blocks, shared or not.
    blocks: u64,
}

/// An image before it's looked at.
struct Look {
    path: PathBuf,
    /// Its length, where a record says it.
    bytes: Option<u64>,
    lineage: Option<Uuid>,
    role: Role,
    /// A copy or thick volume that is being made, or a thick one's snapshot: it takes blocks for
    /// all of its length.
    to_be_filled: bool,
    /// Of a snapshot whose cut is still to come: the volume whose blocks it gets.
    gets: Option<Uuid>,
}

impl FileBackend {
    /// Room now.
    pub(super) fn measure_room(&self) -> Result<PoolSpace> {
        let growing = self.growing.lock().unwrap_or_else(PoisonError::into_inner);
        self.measure(&growing, true, None)
    }

    pub(super) fn measure_disk(&self) -> Result<Space> {
        let root = &self.folder.root;
        self.folder.host.space(root).context(|| self.measuring())
    }

    /// Judges what takes room, and then has `taken` note it: one after another. Judges by what is
    /// known without a look at every image, and looks only if that refuses: what images fill
    /// already makes the room for promises larger, never smaller.
    pub(super) fn admit(&self, admit: Admit<'_>, taken: impl FnOnce(&mut Growing)) -> Result<()> {
        self.admit_beside(None, admit, taken)
    }

    /// The same beside a snapshot that is planned, which is judged as if its cut had been made.
    pub(super) fn admit_beside(
        &self,
        planned: Option<&SnapshotRecord>,
        admit: Admit<'_>,
        taken: impl FnOnce(&mut Growing),
    ) -> Result<()> {
        let mut growing = self.growing.lock().unwrap_or_else(PoisonError::into_inner);
        if admit(&self.measure(&growing, false, planned)?).is_err() {
            admit(&self.measure(&growing, true, planned)?)?;
        }
        taken(&mut growing);
        Ok(())
    }

    /// Without `each`, no image whose record says its size is looked at.
    fn measure(
        &self,
        growing: &Growing,
        each: bool,
        planned: Option<&SnapshotRecord>,
    ) -> Result<PoolSpace> {
        let there = self.measure_disk()?;
        let mut space = PoolSpace {
            total: there.total,
            available: there.available,
            promised: growing.values().sum(),
            ..PoolSpace::default()
        };
        let mut held = Vec::new();
        let mut filled = HashMap::new();
        let volumes = self
            .volumes
            .map(|uuid, entry| (uuid, self.volume_look(uuid, entry)));
        for (uuid, look) in volumes {
            let image = self.look(&look, each)?;
            let blocks = image.map_or(0, |image| image.allocated);
            space.allocated += blocks;
            // What can't be read is counted as long as its image is.
            let length = || image.map_or(0, |image| image.size);
            space.promised += look.bytes.unwrap_or_else(length);
            space.claimed += self.claim(&look, blocks);
            held.push(look.held(blocks));
            filled.insert(uuid, blocks);
        }
        let snapshots = self
            .snapshots
            .map(|uuid, entry| self.snapshot_look(uuid, entry));
        let gets = |look: &Look| {
            let volume = look.gets.and_then(|volume| filled.get(&volume));
            volume.copied().unwrap_or(0)
        };
        for look in snapshots {
            let blocks = self.look(&look, each)?.map_or(0, |image| image.allocated);
            space.snapshots += blocks;
            let claim = self.claim(&look, blocks);
            space.claimed += claim;
            if self.shares_blocks {
                held.push(look.held(blocks.max(claim).max(gets(&look))));
            } else {
                space.promised += claim;
            }
        }
        if let Some(record) = planned {
            let look = self.look_at_snapshot(record);
            let claim = self.claim(&look, 0);
            if self.shares_blocks {
                held.push(look.held(claim.max(gets(&look))));
            } else {
                space.promised += claim;
            }
        }
        space.own = match (each, self.shares_blocks) {
            (false, _) => 0,
            (true, false) => space.allocated,
            (true, true) => own(&held),
        };
        Ok(space)
    }

    fn measuring(&self) -> String {
        format!("measure pool {}", self.folder.path.display())
    }

    fn look(&self, look: &Look, each: bool) -> Result<Option<FileStat>> {
        match look.bytes {
            Some(_) if !each => Ok(None),
            Some(_) | None => self.folder.stat(&look.path, || self.measuring()),
        }
    }

    /// What an image that is being made will still take. Blocks that are there may be shared, and
    /// then another is taken for each.
    fn claim(&self, look: &Look, blocks: u64) -> u64 {
        let there = if self.shares_blocks { 0 } else { blocks };
        let bytes = look.bytes.filter(|_| look.to_be_filled).unwrap_or(0);
        bytes.saturating_sub(there)
    }

    fn volume_look(&self, uuid: Uuid, entry: &Entry<VolumeRecord>) -> Look {
        let record = match entry {
            Entry::Known(record) => Some(record),
            Entry::Damaged(_) => None,
        };
        let role = match record {
            Some(record) if !record.is_ready() => Role::Filling,
            Some(record) if record.allocation == Allocation::Thick => Role::Thick,
            Some(_) | None => Role::Volume,
        };
        Look {
            path: self.volumes.image(uuid),
            bytes: record.map(|record| image_bytes(record.size)),
            lineage: record.map(|record| record.lineage()),
            to_be_filled: role == Role::Filling
                && record.is_some_and(|record| {
                    record.allocation == Allocation::Thick || record.copy.is_some()
                }),
            role,
            gets: None,
        }
    }

    fn snapshot_look(&self, uuid: Uuid, entry: &Entry<SnapshotRecord>) -> Look {
        match entry {
            Entry::Known(record) => self.look_at_snapshot(record),
            Entry::Damaged(_) => Look {
                path: self.snapshots.image(uuid),
                bytes: None,
                lineage: None,
                role: Role::Snapshot,
                to_be_filled: false,
                gets: None,
            },
        }
    }

    fn look_at_snapshot(&self, record: &SnapshotRecord) -> Look {
        let unready = !record.is_ready();
        let grows = record.allocation == Allocation::Thick || record.copy.is_some();
        Look {
            path: self.snapshots.image(record.uuid),
            bytes: Some(image_bytes(record.size)),
            lineage: Some(record.lineage()),
            role: if unready {
                Role::Cutting
            } else {
                Role::Snapshot
            },
            to_be_filled: unready && grows,
            gets: unready.then_some(record.source),
        }
    }
}

impl Look {
    fn held(&self, blocks: u64) -> Held {
        Held {
            lineage: self.lineage,
            role: self.role,
            blocks,
        }
    }
}

/// Blocks of one lineage.
#[derive(Default)]
struct Family {
    /// The largest of the images that may share.
    largest: u64,
    filling: u64,
    thick: u64,
    snapshots: u64,
    cutting: u64,
}

/// Bytes of blocks, at least, that volumes have and no snapshot: each counted once, however many
/// volumes have it. Images of two lineages share nothing. Those of one have at least the blocks
/// of the largest, and its snapshots at most the sum of theirs; a thick volume shares only with
/// what is being made of it.
fn own(held: &[Held]) -> u64 {
    let mut families: BTreeMap<Uuid, Family> = BTreeMap::new();
    // Snapshots of nobody knows what: they may have anybody's blocks.
    let mut unknown = 0;
    for image in held {
        let blocks = image.blocks;
        let Some(lineage) = image.lineage else {
            unknown += match image.role {
                Role::Snapshot | Role::Cutting => blocks,
                // May share with anybody; nothing is made of it.
                Role::Volume | Role::Filling | Role::Thick => 0,
            };
            continue;
        };
        let family = families.entry(lineage).or_default();
        match image.role {
            Role::Volume => family.largest = family.largest.max(blocks),
            Role::Filling => {
                family.largest = family.largest.max(blocks);
                family.filling += blocks;
            }
            Role::Thick => family.thick += blocks,
            Role::Snapshot => family.snapshots += blocks,
            Role::Cutting => family.cutting += blocks,
        }
    }
    let each = families.values().map(|family| {
        let thin = family
            .largest
            .saturating_sub(family.snapshots + family.cutting);
        let thick = family.thick.saturating_sub(family.filling + family.cutting);
        thin + thick
    });
    each.sum::<u64>().saturating_sub(unknown)
}

#[cfg(test)]
mod tests;
