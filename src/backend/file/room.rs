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
use super::shelf::{Entry, Shelved};
use crate::backend::{Admit, PoolSpace};
use crate::error::{Doing, Result};
use crate::host::FileStat;
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
}

impl FileBackend {
    /// Room now.
    pub(super) fn measure_room(&self) -> Result<PoolSpace> {
        let growing = self.growing.lock().unwrap_or_else(PoisonError::into_inner);
        self.measure(&growing, true)
    }

    /// Judges what takes room, and then has `taken` note it: one after another. Judges by what is
    /// known without a look at every image, and looks only if that refuses: what images fill
    /// already makes the room for promises larger, never smaller.
    pub(super) fn admit(&self, admit: Admit<'_>, taken: impl FnOnce(&mut Growing)) -> Result<()> {
        let mut growing = self.growing.lock().unwrap_or_else(PoisonError::into_inner);
        if admit(&self.measure(&growing, false)?).is_err() {
            admit(&self.measure(&growing, true)?)?;
        }
        taken(&mut growing);
        Ok(())
    }

    /// Without `each`, no image whose record says its size is looked at.
    fn measure(&self, growing: &Growing, each: bool) -> Result<PoolSpace> {
        let root = &self.folder.root;
        let there = self.folder.host.space(root).doing(|| self.measuring())?;
        let mut space = PoolSpace {
            total: there.total,
            available: there.available,
            promised: growing.values().sum(),
            ..PoolSpace::default()
        };
        let mut held = Vec::new();
        let volumes = self
            .volumes
            .map(|uuid, entry| self.volume_look(uuid, entry));
        for look in volumes {
            let image = self.look(&look, each)?;
            let blocks = image.map_or(0, |image| image.allocated);
            space.allocated += blocks;
            // What can't be read is counted as long as its image is.
            let length = || image.map_or(0, |image| image.size);
            space.promised += look.bytes.unwrap_or_else(length);
            space.claimed += self.claim(&look, blocks);
            held.push(look.held(blocks));
        }
        let snapshots = self
            .snapshots
            .map(|uuid, entry| self.snapshot_look(uuid, entry));
        for look in snapshots {
            let blocks = self.look(&look, each)?.map_or(0, |image| image.allocated);
            space.snapshots += blocks;
            let claim = self.claim(&look, blocks);
            space.claimed += claim;
            if self.shares_blocks {
                held.push(look.held(blocks.max(claim)));
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
        }
    }

    fn snapshot_look(&self, uuid: Uuid, entry: &Entry<SnapshotRecord>) -> Look {
        let record = match entry {
            Entry::Known(record) => Some(record),
            Entry::Damaged(_) => None,
        };
        let unready = record.is_some_and(|record| !record.is_ready());
        let grows = |record: &SnapshotRecord| {
            record.allocation == Allocation::Thick || record.copy.is_some()
        };
        Look {
            path: self.snapshots.image(uuid),
            bytes: record.map(|record| image_bytes(record.size)),
            lineage: record.map(|record| record.lineage()),
            role: if unready {
                Role::Cutting
            } else {
                Role::Snapshot
            },
            to_be_filled: unready && record.is_some_and(|record| grows(record)),
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
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    /// An image, block by block: which of the disk's each is.
    #[derive(Clone, Debug)]
    struct File {
        /// None where its record is damaged.
        lineage: Option<Uuid>,
        role: Role,
        thick: bool,
        /// The thick volume that has to get blocks of its own before this is complete.
        apart_from: Option<usize>,
        map: Vec<Option<u64>>,
    }

    /// A disk with images, as the driver makes them.
    #[derive(Default)]
    struct Disk {
        files: Vec<Option<File>>,
        next: u64,
    }

    /// What happens, with numbers that choose the image and the block.
    #[derive(Clone, Debug)]
    enum Act {
        Create { blocks: usize, thick: bool },
        Write { file: usize, block: usize },
        Snapshot { file: usize },
        Copy { file: usize, thick: bool },
        Unshare { file: usize, block: usize },
        Finish { file: usize },
        Delete { file: usize },
        Damage { file: usize },
    }

    fn act() -> impl Strategy<Value = Act> {
        let n = 0usize..1000;
        prop_oneof![
            2 => (1usize..9, any::<bool>()).prop_map(|(blocks, thick)| Act::Create { blocks, thick }),
            8 => (n.clone(), n.clone()).prop_map(|(file, block)| Act::Write { file, block }),
            3 => n.clone().prop_map(|file| Act::Snapshot { file }),
            3 => (n.clone(), any::<bool>()).prop_map(|(file, thick)| Act::Copy { file, thick }),
            2 => (n.clone(), n.clone()).prop_map(|(file, block)| Act::Unshare { file, block }),
            3 => n.clone().prop_map(|file| Act::Finish { file }),
            2 => n.clone().prop_map(|file| Act::Delete { file }),
            1 => n.prop_map(|file| Act::Damage { file }),
        ]
    }

    impl Disk {
        fn block(&mut self) -> u64 {
            self.next += 1;
            self.next
        }

        fn alive(&self) -> impl Iterator<Item = &File> {
            self.files.iter().flatten()
        }

        /// The n-th of those that fit.
        fn pick(&self, n: usize, fits: impl Fn(&File) -> bool) -> Option<usize> {
            let fitting: Vec<usize> = (0..self.files.len())
                .filter(|at| self.files[*at].as_ref().is_some_and(&fits))
                .collect();
            (!fitting.is_empty()).then(|| fitting[n % fitting.len()])
        }

        fn is_shared(&self, block: u64) -> bool {
            let holders = self.alive().flat_map(|file| file.map.iter().flatten());
            holders.filter(|held| **held == block).count() > 1
        }

        /// A write: elsewhere, where the block is shared or not there.
        fn write(&mut self, at: usize, n: usize) {
            let Some(file) = self.files[at].clone() else {
                return;
            };
            let n = n % file.map.len();
            if file.map[n].is_none_or(|block| self.is_shared(block)) {
                let new = self.block();
                if let Some(file) = &mut self.files[at] {
                    file.map[n] = Some(new);
                }
            }
        }

        fn write_all(&mut self, at: usize) {
            let blocks = self.files[at].as_ref().map_or(0, |file| file.map.len());
            (0..blocks).for_each(|n| self.write(at, n));
        }

        fn act(&mut self, act: &Act) {
            let settled = |file: &File| {
                file.lineage.is_some() && matches!(file.role, Role::Volume | Role::Thick)
            };
            let is_volume = |file: &File| !matches!(file.role, Role::Snapshot | Role::Cutting);
            let unfinished = |file: &File| matches!(file.role, Role::Filling | Role::Cutting);
            match *act {
                Act::Create { blocks, thick } => {
                    let map = (0..blocks).map(|_| thick.then(|| self.block())).collect();
                    let lineage = Some(self.uuid());
                    self.files.push(Some(File {
                        lineage,
                        role: if thick { Role::Thick } else { Role::Volume },
                        thick,
                        apart_from: None,
                        map,
                    }));
                }
                Act::Write { file, block } => {
                    if let Some(at) = self.pick(file, |file| is_volume(file) && !unfinished(file)) {
                        self.write(at, block);
                    }
                }
                Act::Snapshot { file } => self.copy(self.pick(file, settled), true, false),
                Act::Copy { file, thick } => {
                    let whole = |file: &File| {
                        file.role == Role::Snapshot && file.lineage.is_some() || settled(file)
                    };
                    self.copy(self.pick(file, whole), false, thick);
                }
                Act::Unshare { file, block } => {
                    if let Some(at) = self.pick(file, unfinished)
                        && let Some(apart) = self.apart(at)
                    {
                        self.write(apart, block);
                    }
                }
                Act::Finish { file } => {
                    if let Some(at) = self.pick(file, unfinished) {
                        self.finish(at);
                    }
                }
                Act::Delete { file } => {
                    if let Some(at) = self.pick(file, |_| true) {
                        self.files[at] = None;
                    }
                }
                Act::Damage { file } => {
                    let at = self.pick(file, |file| !unfinished(file));
                    if let Some(file) = at.and_then(|at| self.files[at].as_mut()) {
                        file.lineage = None;
                        if file.role == Role::Thick {
                            file.role = Role::Volume;
                        }
                    }
                }
            }
        }

        fn uuid(&mut self) -> Uuid {
            Uuid::from_u128(u128::from(self.block()))
        }

        fn copy(&mut self, source: Option<usize>, snapshot: bool, thick: bool) {
            let Some((at, source)) = source.and_then(|at| Some((at, self.files[at].clone()?)))
            else {
                return;
            };
            let (role, thick) = match snapshot {
                true => (Role::Cutting, source.thick),
                false => (Role::Filling, thick),
            };
            self.files.push(Some(File {
                role,
                thick,
                apart_from: (source.role == Role::Thick).then_some(at),
                ..source
            }));
        }

        /// Which image gets blocks of its own before this one is complete: a thick volume after
        /// its snapshot; a copy that is thick, or of a thick volume itself.
        fn apart(&self, at: usize) -> Option<usize> {
            let file = self.files[at].as_ref()?;
            match file.role {
                Role::Cutting => file.apart_from.filter(|of| self.files[*of].is_some()),
                _ => (file.thick || file.apart_from.is_some()).then_some(at),
            }
        }

        fn finish(&mut self, at: usize) {
            let apart = self.apart(at);
            if let Some(apart) = apart {
                self.write_all(apart);
            }
            let new = self.uuid();
            if let Some(file) = &mut self.files[at] {
                if file.role == Role::Filling && apart.is_some() {
                    file.lineage = Some(new);
                }
                file.role = match (file.role, file.thick) {
                    (Role::Cutting, _) => Role::Snapshot,
                    (_, true) => Role::Thick,
                    (_, false) => Role::Volume,
                };
                file.apart_from = None;
            }
        }

        fn held(&self) -> Vec<Held> {
            let held = |file: &File| {
                let blocks = file.map.iter().flatten().count() as u64;
                let full = file.role == Role::Cutting && file.thick;
                Held {
                    lineage: file.lineage,
                    role: file.role,
                    blocks: if full { file.map.len() as u64 } else { blocks },
                }
            };
            self.alive().map(held).collect()
        }

        fn blocks(&self, of: impl Fn(Role) -> bool) -> BTreeSet<u64> {
            let files = self.alive().filter(|file| of(file.role));
            files
                .flat_map(|file| file.map.iter().flatten().copied())
                .collect()
        }
    }

    fn is_snapshot(role: Role) -> bool {
        matches!(role, Role::Snapshot | Role::Cutting)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]

        #[test]
        fn what_volumes_have_for_themselves_is_never_overstated(acts in prop::collection::vec(act(), 0..60)) {
            let mut disk = Disk::default();
            for act in &acts {
                disk.act(act);
                let snapshots = disk.blocks(is_snapshot);
                let volumes = disk.blocks(|role| !is_snapshot(role));
                let truth = volumes.difference(&snapshots).count() as u64;
                let bound = own(&disk.held());
                prop_assert!(bound <= truth, "{bound} > {truth} after {act:?}: {:?}", disk.files);
            }
        }

        /// The promise of overcommit 1: if all sizes fit into what is free and what volumes have
        /// for themselves, every block of every volume can be written, in any order.
        #[test]
        fn what_fits_can_be_written(acts in prop::collection::vec(act(), 0..40), spare in 0u64..20, orders in prop::collection::vec((0usize..1000, 0usize..1000), 200)) {
            let mut disk = Disk::default();
            acts.iter().for_each(|act| disk.act(act));
            let used = disk.blocks(|_| true).len() as u64;
            let volumes = disk.alive().filter(|file| !is_snapshot(file.role));
            let promised: u64 = volumes.map(|file| file.map.len() as u64).sum();
            let free = promised.saturating_sub(own(&disk.held())) + spare;
            for (file, block) in orders {
                if let Some(at) = disk.pick(file, |file| !is_snapshot(file.role)) {
                    disk.write(at, block);
                }
                prop_assert!(disk.blocks(|_| true).len() as u64 <= used + free);
            }
        }

        #[test]
        fn without_snapshots_and_copies_everything_is_a_volumes_own(sizes in prop::collection::vec((0u64..1 << 40, any::<bool>()), 0..20)) {
            let images: Vec<Held> = sizes.iter().enumerate().map(|(n, (blocks, thick))| Held {
                lineage: Some(Uuid::from_u128(n as u128)),
                role: if *thick { Role::Thick } else { Role::Volume },
                blocks: *blocks,
            }).collect();
            prop_assert_eq!(own(&images), sizes.iter().map(|(blocks, _)| blocks).sum::<u64>());
        }
    }
}
