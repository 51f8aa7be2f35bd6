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
use crate::error::{Error, ErrorContext, Result};

/// Maximum number of extents of a lineage that are compared: each needs 16 bytes, and 2 x 24 bytes while
/// they are sorted, so about 64 MiB in all. Of more, the sizes are used.
const MAX_EXTENTS: usize = 1 << 20;
/// Number of extents that are read at a time. A cut of the volume waits that long at most.
const PAGE: usize = 4 << 10;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VolumeBytes {
    /// Blocks that no other image has.
    pub exclusive: u64,
    /// Blocks that another image has, too.
    pub shared: u64,
    /// Blocks that snapshots of the volume have, and the volume has not.
    pub snapshots: u64,
}

/// The bytes of a lineage. In the sums, each block counts once.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LineageBytes {
    pub volumes: BTreeMap<Uuid, VolumeBytes>,
    /// Blocks that a volume has, and no other image.
    pub exclusive: u64,
    /// Blocks that a volume has, and another image, too.
    pub shared: u64,
    /// Blocks that only snapshots and bases have.
    pub snapshots: u64,
    /// An upper bound of the blocks of images that may share some and were not compared. Then the other
    /// sums are 0.
    pub undivided: u64,
    /// The bytes that are attributed to each volume; `None` if the images were not compared. Of the
    /// volumes that have a block, or that have a snapshot with it, that is the oldest. So a write adds to
    /// the volume that was written, and a snapshot adds nothing.
    pub attributed: Option<BTreeMap<Uuid, u64>>,
}

/// The blocks of an image, in the order of the disk.
type Blocks = Vec<Range<u64>>;

/// The images of one lineage, which may share blocks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Family {
    /// The volumes, and when each was created, in seconds since 1970.
    pub volumes: BTreeMap<Uuid, u64>,
    /// The snapshots and bases, each with its volume, unless that was deleted.
    pub snapshots: BTreeMap<Uuid, Option<Uuid>>,
}

/// Whether an image may be read now.
pub type MayRead<'a> = &'a dyn Fn(Image) -> bool;

impl PoolBackend {
    /// All lineages, from memory. Damaged records are left out.
    pub fn lineages(&self) -> BTreeMap<Uuid, Family> {
        let mut lineages = BTreeMap::<Uuid, Family>::new();
        let mut incarnations = HashMap::new();
        let volumes = self.volumes.map(|uuid, entry| match entry {
            Entry::Known(record) if record.is_ready() => {
                let created = (record.incarnation, record.created_at);
                Some((uuid, created, record.lineage()))
            }
            Entry::Known(_) | Entry::Damaged(_) => None,
        });
        for (uuid, (incarnation, at), lineage) in volumes.into_iter().flatten() {
            let family = lineages.entry(lineage).or_default();
            family.volumes.insert(uuid, at);
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
            let family = lineages.entry(lineage).or_default();
            let is_there = incarnations.get(&source) == Some(&incarnation);
            family.snapshots.insert(uuid, is_there.then_some(source));
        }
        lineages
    }

    /// Compares the images of a family. It reads the maps of all of them, and writes back their dirty pages.
    /// `None` if only their sizes are to be used. An error if an image is deleted at the same time, or may
    /// not be read.
    pub fn compare_lineage(
        &self,
        family: &Family,
        may_read: MayRead<'_>,
    ) -> Result<Option<LineageBytes>> {
        if !self.facts.shares_blocks || family.volumes.len() + family.snapshots.len() < 2 {
            return Ok(None);
        }
        let maps = self.maps(family, may_read)?;
        Ok(maps.map(|maps| compare(family, maps)))
    }

    /// What the sizes of images show of their lineages, in the order of these. The sizes are read
    /// together, because a thin pool has them all in one place.
    pub fn estimate_lineages(&self, lineages: &[(Uuid, Family)]) -> Result<Vec<LineageBytes>> {
        let images = lineages.iter().flat_map(|(_, family)| {
            let snapshots = family.snapshots.keys().map(|uuid| Image::Snapshot(*uuid));
            let volumes = family.volumes.keys().map(|uuid| Image::Volume(*uuid));
            volumes.chain(snapshots)
        });
        let images: Vec<Image> = images.collect();
        let sizes = self.store().sizes(&images);
        let sizes = sizes.context(|| self.comparing())?.into_iter();
        let sizes = sizes.map(|size| size.map_or(0, |size| size.allocated));
        let sizes: HashMap<Image, u64> = images.into_iter().zip(sizes).collect();
        let shares_blocks = self.facts.shares_blocks;
        let each = lineages.iter();
        Ok(each
            .map(|(_, family)| estimate(family, &sizes, shares_blocks))
            .collect())
    }

    /// The blocks of each image, in the order of the disk; `None` if there are too many, or if the store
    /// cannot read maps.
    fn maps(&self, family: &Family, may_read: MayRead<'_>) -> Result<Option<Vec<(Owner, Blocks)>>> {
        let volumes = family.volumes.keys();
        let volumes = volumes.map(|uuid| (Owner::Volume(*uuid), Image::Volume(*uuid)));
        let snapshots = family.snapshots.iter();
        let snapshots =
            snapshots.map(|(uuid, of)| (Owner::SnapshotOf(*of), Image::Snapshot(*uuid)));
        let mut left = MAX_EXTENTS;
        let mut maps = Vec::new();
        for (owner, image) in volumes.chain(snapshots) {
            let Some(map) = self.map_of(image, &mut left, may_read)? else {
                return Ok(None);
            };
            maps.push((owner, map));
        }
        Ok(Some(maps))
    }

    fn map_of(
        &self,
        image: Image,
        left: &mut usize,
        may_read: MayRead<'_>,
    ) -> Result<Option<Blocks>> {
        let (mut map, mut from) = (Vec::new(), 0);
        loop {
            if !may_read(image) {
                return Err(Error::pending(image));
            }
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

/// The owner of an image, with the index of a volume in [`Walk::volumes`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Holder {
    Volume(u32),
    SnapshotOf(u32),
    /// A snapshot of a volume that was deleted.
    Unowned,
}

/// A place on the disk, what has the blocks from there on, and what is counted of those before.
struct Walk {
    /// The oldest first.
    volumes: Vec<Uuid>,
    /// The number of images that have the blocks.
    images: usize,
    /// The volumes that have them.
    having: BTreeSet<u32>,
    /// The number of snapshots of each volume that have them.
    snapshots: BTreeMap<u32, usize>,
    counted: Vec<VolumeBytes>,
    attributed: Vec<u64>,
    sums: VolumeBytes,
}

impl Walk {
    fn new(family: &Family) -> Walk {
        let mut volumes: Vec<Uuid> = family.volumes.keys().copied().collect();
        volumes.sort_by_key(|uuid| (family.volumes[uuid], *uuid));
        Walk {
            images: 0,
            having: BTreeSet::new(),
            snapshots: BTreeMap::new(),
            counted: vec![VolumeBytes::default(); volumes.len()],
            attributed: vec![0; volumes.len()],
            sums: VolumeBytes::default(),
            volumes,
        }
    }

    fn holder(&self, owner: Owner) -> Holder {
        let index = |uuid: Uuid| {
            let at = self.volumes.iter().position(|one| *one == uuid);
            at.and_then(|at| u32::try_from(at).ok())
        };
        match owner {
            Owner::Volume(uuid) => index(uuid).map_or(Holder::Unowned, Holder::Volume),
            Owner::SnapshotOf(of) => of
                .and_then(index)
                .map_or(Holder::Unowned, Holder::SnapshotOf),
        }
    }

    fn pass(&mut self, holder: Holder, begins: bool) {
        match begins {
            true => self.images += 1,
            false => self.images -= 1,
        }
        match (holder, begins) {
            (Holder::Volume(at), true) => drop(self.having.insert(at)),
            (Holder::Volume(at), false) => drop(self.having.remove(&at)),
            (Holder::SnapshotOf(at), true) => *self.snapshots.entry(at).or_default() += 1,
            (Holder::SnapshotOf(at), false) => {
                if let Some(count) = self.snapshots.get_mut(&at) {
                    *count -= 1;
                    if *count == 0 {
                        self.snapshots.remove(&at);
                    }
                }
            }
            (Holder::Unowned, _) => {}
        }
    }

    fn count(&mut self, length: u64) {
        let is_own = self.images == 1;
        match (self.having.is_empty(), is_own) {
            (true, _) => self.sums.snapshots += length,
            (false, true) => self.sums.exclusive += length,
            (false, false) => self.sums.shared += length,
        }
        for at in &self.having {
            let bytes = &mut self.counted[*at as usize];
            match is_own {
                true => bytes.exclusive += length,
                false => bytes.shared += length,
            }
        }
        let snapshots = self.snapshots.keys();
        for at in snapshots.filter(|at| !self.having.contains(at)) {
            self.counted[*at as usize].snapshots += length;
        }
        let first = (self.having.first(), self.snapshots.keys().next());
        let oldest = match first {
            (Some(volume), Some(snapshot)) => Some(volume.min(snapshot)),
            (volume, snapshot) => volume.or(snapshot),
        };
        if let Some(at) = oldest {
            self.attributed[*at as usize] += length;
        }
    }

    fn end(self) -> LineageBytes {
        let volumes = self.volumes.iter().copied();
        LineageBytes {
            volumes: volumes.clone().zip(self.counted).collect(),
            exclusive: self.sums.exclusive,
            shared: self.sums.shared,
            snapshots: self.sums.snapshots,
            undivided: 0,
            attributed: Some(volumes.zip(self.attributed).collect()),
        }
    }
}

/// Walks over the disk once, from each place where the map of an image begins or ends to the next.
fn compare(family: &Family, maps: Vec<(Owner, Blocks)>) -> LineageBytes {
    let mut walk = Walk::new(family);
    let mut edges: Vec<(u64, bool, Holder)> = Vec::new();
    for (owner, map) in maps {
        let holder = walk.holder(owner);
        edges.reserve_exact(2 * map.len());
        for range in map {
            edges.push((range.start, true, holder));
            edges.push((range.end, false, holder));
        }
    }
    edges.sort_unstable();
    let mut at = 0;
    for (place, begins, holder) in edges {
        if place > at && walk.images > 0 {
            walk.count(place - at);
        }
        at = place;
        walk.pass(holder, begins);
    }
    walk.end()
}

/// From the sizes of images. If they may share blocks: for each volume, a lower bound of what is its own,
/// and upper ones of the rest.
fn estimate(family: &Family, sizes: &HashMap<Image, u64>, shares_blocks: bool) -> LineageBytes {
    let size = |image: Image| sizes.get(&image).copied().unwrap_or(0);
    let (volumes, snapshots) = (family.volumes.keys(), family.snapshots.keys());
    let of_volumes: u64 = volumes.map(|uuid| size(Image::Volume(*uuid))).sum();
    let of_snapshots: u64 = snapshots.map(|uuid| size(Image::Snapshot(*uuid))).sum();
    let all = of_volumes + of_snapshots;
    let is_exact = !shares_blocks || family.volumes.len() + family.snapshots.len() < 2;
    let mut found = LineageBytes::default();
    let mut attributed = BTreeMap::new();
    for uuid in family.volumes.keys() {
        let allocated = size(Image::Volume(*uuid));
        let others = if shares_blocks { all - allocated } else { 0 };
        let own = allocated.saturating_sub(others);
        let snapshots = family.snapshots.iter();
        let its = snapshots.filter(|(_, of)| **of == Some(*uuid));
        let its = its.map(|(snapshot, _)| size(Image::Snapshot(*snapshot)));
        let bytes = VolumeBytes {
            exclusive: own,
            shared: allocated - own,
            snapshots: its.sum(),
        };
        attributed.insert(*uuid, allocated + bytes.snapshots);
        found.exclusive += own;
        found.volumes.insert(*uuid, bytes);
    }
    match is_exact {
        true => {
            found.snapshots = of_snapshots;
            found.attributed = Some(attributed);
        }
        false => (found.exclusive, found.undivided) = (0, all),
    }
    found
}

#[cfg(test)]
mod tests;
