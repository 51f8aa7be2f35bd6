//! Which bytes of volumes are shared with other images, and which bytes only snapshots have.
//!
//! Images share blocks only within a lineage. Where the store can read extent maps, the maps of all images of a
//! lineage are compared; otherwise the sizes of the images give bounds.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Range;

use uuid::Uuid;

use super::PoolBackend;
use crate::backend::Image;
use crate::backend::records::{Entry, StoredRecord};
use crate::error::{ErrorContext, Result};

/// Maximum number of extents of a lineage that are compared: each needs 16 bytes, and 2 x 56 bytes while
/// they are sorted, so about 130 MiB in all. Of more, the sizes are used.
const MAX_EXTENTS: usize = 1 << 20;
/// Number of extents that are read at a time.
const PAGE: usize = 16 << 10;

/// The bytes of a volume.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VolumeBytes {
    /// Blocks that no other image has.
    pub own: u64,
    /// Blocks that another image has, too.
    pub shared: u64,
    /// Blocks that snapshots of the volume have, and the volume has not.
    pub snapshots: u64,
}

/// The blocks of an image, in the order of the disk.
type Blocks = Vec<Range<u64>>;

/// The images of one lineage, which may share blocks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Family {
    /// The volumes.
    pub volumes: BTreeSet<Uuid>,
    /// The snapshots and bases, each with its volume, unless that was deleted.
    pub snapshots: BTreeMap<Uuid, Option<Uuid>>,
}

impl PoolBackend {
    /// The lineages that have a volume, from memory. Damaged records are left out.
    pub fn families(&self) -> BTreeMap<Uuid, Family> {
        let mut families = BTreeMap::<Uuid, Family>::new();
        let mut incarnations = HashMap::new();
        let volumes = self.volumes.map(|uuid, entry| match entry {
            Entry::Known(record) if record.is_ready() => {
                Some((uuid, record.incarnation, record.lineage()))
            }
            Entry::Known(_) | Entry::Damaged(_) => None,
        });
        for (uuid, incarnation, lineage) in volumes.into_iter().flatten() {
            families.entry(lineage).or_default().volumes.insert(uuid);
            incarnations.insert(uuid, incarnation);
        }
        let snapshots = self.snapshots.map(|uuid, entry| match entry {
            Entry::Known(record) if record.is_ready() || record.is_base() => {
                let source = (record.source, record.source_incarnation);
                Some((uuid, source, record.lineage()))
            }
            Entry::Known(_) | Entry::Damaged(_) => None,
        });
        for (uuid, (source, incarnation), lineage) in snapshots.into_iter().flatten() {
            if let Some(family) = families.get_mut(&lineage) {
                let is_there = incarnations.get(&source) == Some(&incarnation);
                family.snapshots.insert(uuid, is_there.then_some(source));
            }
        }
        families
    }

    /// Measures the volumes of a family. It reads the maps of all its images, and writes back their dirty
    /// pages, if there are several images. An error if an image is deleted at the same time.
    pub fn measure_family(&self, family: &Family) -> Result<BTreeMap<Uuid, VolumeBytes>> {
        if self.facts.shares_blocks
            && family.volumes.len() + family.snapshots.len() > 1
            && let Some(maps) = self.maps(family)?
        {
            return Ok(compare(family, maps));
        }
        let snapshots = family.snapshots.keys().map(|uuid| Image::Snapshot(*uuid));
        let volumes = family.volumes.iter().map(|uuid| Image::Volume(*uuid));
        let images: Vec<Image> = volumes.chain(snapshots).collect();
        let sizes = self.store().sizes(&images);
        let sizes = sizes.context(|| self.comparing())?.into_iter();
        let sizes = sizes.map(|size| size.map_or(0, |size| size.allocated));
        let sizes: HashMap<Image, u64> = images.into_iter().zip(sizes).collect();
        Ok(estimate(family, &sizes, self.facts.shares_blocks))
    }

    /// The blocks of each image, in the order of the disk; `None` if there are too many, or if the store
    /// cannot read maps.
    fn maps(&self, family: &Family) -> Result<Option<Vec<(Owner, Blocks)>>> {
        let volumes = family.volumes.iter();
        let volumes = volumes.map(|uuid| (Owner::Volume(*uuid), Image::Volume(*uuid)));
        let snapshots = family.snapshots.iter();
        let snapshots =
            snapshots.map(|(uuid, of)| (Owner::SnapshotOf(*of), Image::Snapshot(*uuid)));
        let mut left = MAX_EXTENTS;
        let mut maps = Vec::new();
        for (owner, image) in volumes.chain(snapshots) {
            let Some(map) = self.map_of(image, &mut left)? else {
                return Ok(None);
            };
            maps.push((owner, map));
        }
        Ok(Some(maps))
    }

    fn map_of(&self, image: Image, left: &mut usize) -> Result<Option<Blocks>> {
        let (mut map, mut from) = (Vec::new(), 0);
        loop {
            let page = self.store().extents(image, from, PAGE);
            let Some(page) = page.context(|| self.comparing())? else {
                return Ok(None);
            };
            let Some(last) = page.last() else { break };
            from = last.logical.saturating_add(last.length);
            let Some(rest) = left.checked_sub(page.len()) else {
                return Ok(None);
            };
            *left = rest;
            map.extend(
                page.iter()
                    .map(|one| one.physical..one.physical.saturating_add(one.length)),
            );
        }
        Ok(Some(merged(map)))
    }

    fn comparing(&self) -> String {
        let pool = self.folder.path.display();
        format!("compare the images of volumes of pool {pool}")
    }
}

/// Ranges in ascending order, none of which touch.
fn merged(mut ranges: Blocks) -> Blocks {
    ranges.sort_unstable_by_key(|range| range.start);
    let mut found: Blocks = Vec::with_capacity(ranges.len());
    for range in ranges {
        match found.last_mut() {
            Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
            _ => found.push(range),
        }
    }
    found
}

/// Whose image has a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Owner {
    Volume(Uuid),
    /// A snapshot of this volume, if it still exists.
    SnapshotOf(Option<Uuid>),
}

/// What has a certain block of the disk.
#[derive(Default)]
struct Holders {
    /// The number of images.
    images: usize,
    volumes: BTreeSet<Uuid>,
    /// The number of snapshots of each volume.
    snapshots: BTreeMap<Uuid, usize>,
}

impl Holders {
    fn change(&mut self, owner: Owner, begins: bool) {
        match begins {
            true => self.images += 1,
            false => self.images -= 1,
        }
        match (owner, begins) {
            (Owner::Volume(uuid), true) => drop(self.volumes.insert(uuid)),
            (Owner::Volume(uuid), false) => drop(self.volumes.remove(&uuid)),
            (Owner::SnapshotOf(Some(uuid)), true) => *self.snapshots.entry(uuid).or_default() += 1,
            (Owner::SnapshotOf(Some(uuid)), false) => {
                if let Some(count) = self.snapshots.get_mut(&uuid) {
                    *count -= 1;
                    if *count == 0 {
                        self.snapshots.remove(&uuid);
                    }
                }
            }
            (Owner::SnapshotOf(None), _) => {}
        }
    }

    fn count(&self, length: u64, found: &mut BTreeMap<Uuid, VolumeBytes>) {
        for uuid in &self.volumes {
            let bytes = found.entry(*uuid).or_default();
            match self.images {
                1 => bytes.own += length,
                _ => bytes.shared += length,
            }
        }
        for uuid in self
            .snapshots
            .keys()
            .filter(|uuid| !self.volumes.contains(uuid))
        {
            found.entry(*uuid).or_default().snapshots += length;
        }
    }
}

/// Walks over the disk once, from each place where the map of an image begins or ends to the next.
fn compare(family: &Family, maps: Vec<(Owner, Blocks)>) -> BTreeMap<Uuid, VolumeBytes> {
    let mut edges: Vec<(u64, bool, Owner)> = Vec::new();
    for (owner, map) in maps {
        for range in map {
            edges.push((range.start, true, owner));
            edges.push((range.end, false, owner));
        }
    }
    edges.sort_unstable();
    let mut found: BTreeMap<_, _> = nothing(family);
    let mut holders = Holders::default();
    let mut at = 0;
    for (place, begins, owner) in edges {
        if place > at && holders.images > 0 {
            holders.count(place - at, &mut found);
        }
        at = place;
        holders.change(owner, begins);
    }
    found
}

fn nothing(family: &Family) -> BTreeMap<Uuid, VolumeBytes> {
    let each = family.volumes.iter();
    each.map(|uuid| (*uuid, VolumeBytes::default())).collect()
}

/// Bounds by the sizes of images: a lower one of what is the volume's own, and upper ones of the rest.
fn estimate(
    family: &Family,
    sizes: &HashMap<Image, u64>,
    shares_blocks: bool,
) -> BTreeMap<Uuid, VolumeBytes> {
    let all: u64 = sizes.values().sum();
    let size = |image: Image| sizes.get(&image).copied().unwrap_or(0);
    let mut found = nothing(family);
    for (uuid, bytes) in &mut found {
        let allocated = size(Image::Volume(*uuid));
        let others = if shares_blocks { all - allocated } else { 0 };
        bytes.own = allocated.saturating_sub(others);
        bytes.shared = allocated - bytes.own;
        let snapshots = family.snapshots.iter();
        let its = snapshots.filter(|(_, of)| **of == Some(*uuid));
        bytes.snapshots = its
            .map(|(snapshot, _)| size(Image::Snapshot(*snapshot)))
            .sum();
    }
    found
}

#[cfg(test)]
mod tests;
