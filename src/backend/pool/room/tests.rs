//! Compares the lower bound with what the maps of all images say.

use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;

/// An image: the block of the disk for each of its blocks.
#[derive(Clone, Debug)]
struct File {
    /// `None` if its record is damaged.
    lineage: Option<Uuid>,
    role: Role,
    thick: bool,
    /// The thick volume that must get blocks of its own before this image is complete.
    apart_from: Option<usize>,
    map: Vec<Option<u64>>,
    /// Blocks that it, or the volume from which it was copied, shared with a file of others.
    foreign: u64,
    /// It is such a file. The driver does not know it.
    is_foreign: bool,
}

/// A disk with images, as the driver creates them.
#[derive(Default)]
struct Disk {
    files: Vec<Option<File>>,
    next: u64,
}

/// An operation, with numbers that select the image and the block.
#[derive(Clone, Debug)]
enum Act {
    Create { blocks: usize, thick: bool },
    Import { blocks: usize, holes: usize },
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
        1 => (1usize..9, 0usize..3).prop_map(|(blocks, holes)| Act::Import { blocks, holes }),
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

    /// The n-th of the images that fit.
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

    /// Writes a block, to a new place if the block is shared or does not exist.
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
        let settled =
            |file: &File| file.lineage.is_some() && matches!(file.role, Role::Volume | Role::Thick);
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
                    foreign: 0,
                    is_foreign: false,
                }));
            }
            Act::Import { blocks, holes } => self.import(blocks, holes),
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
                    (file.lineage, file.foreign) = (None, 0);
                    if file.role == Role::Thick {
                        file.role = Role::Volume;
                    }
                }
            }
        }
    }

    /// A file of others, and a volume that shares its blocks.
    fn import(&mut self, blocks: usize, holes: usize) {
        let data = (0..blocks).map(|_| Some(self.block()));
        let map: Vec<_> = data.chain(vec![None; holes]).collect();
        let volume = File {
            lineage: Some(self.uuid()),
            role: Role::Volume,
            thick: false,
            apart_from: None,
            map,
            foreign: blocks as u64,
            is_foreign: false,
        };
        self.files.push(Some(File {
            lineage: None,
            role: Role::Snapshot,
            is_foreign: true,
            ..volume.clone()
        }));
        self.files.push(Some(volume));
    }

    fn uuid(&mut self) -> Uuid {
        Uuid::from_u128(u128::from(self.block()))
    }

    fn copy(&mut self, source: Option<usize>, snapshot: bool, thick: bool) {
        let Some((at, source)) = source.and_then(|at| Some((at, self.files[at].clone()?))) else {
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

    /// The image that gets blocks of its own before this one is complete: a thick volume after its
    /// snapshot; or the copy itself, if it is thick or a clone of a thick volume.
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
                (file.lineage, file.foreign) = (Some(new), 0);
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
                foreign: file.foreign,
            }
        };
        let known = self.alive().filter(|file| !file.is_foreign);
        known.map(held).collect()
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
            let bound = not_in_snapshots(&disk.held());
            prop_assert!(bound <= truth, "{bound} > {truth} after {act:?}: {:?}", disk.files);
        }
    }

    /// The guarantee of overcommit 1: if all sizes fit into the free space and the blocks that
    /// volumes have for themselves, every block of every volume can be written, in any order.
    #[test]
    fn what_fits_can_be_written(acts in prop::collection::vec(act(), 0..40), spare in 0u64..20, orders in prop::collection::vec((0usize..1000, 0usize..1000), 200)) {
        let mut disk = Disk::default();
        acts.iter().for_each(|act| disk.act(act));
        let used = disk.blocks(|_| true).len() as u64;
        let volumes = disk.alive().filter(|file| !is_snapshot(file.role));
        let promised: u64 = volumes.map(|file| file.map.len() as u64).sum();
        let free = promised.saturating_sub(not_in_snapshots(&disk.held())) + spare;
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
            foreign: 0,
        }).collect();
        prop_assert_eq!(not_in_snapshots(&images), sizes.iter().map(|(blocks, _)| blocks).sum::<u64>());
    }
}
