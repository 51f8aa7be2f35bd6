//! What thick volumes and their snapshots may still take of the metadata of a thin pool.
//!
//! A map is a B-tree. Snapshots share its nodes until one side is written, and a write to a thick
//! volume must not fail then. So each thick volume and each snapshot of one has space for a map of
//! its own, in which every block is mapped.

use std::collections::{BTreeMap, BTreeSet};

use uuid::Uuid;

use crate::backend::MetadataSpace;
use crate::model::Allocation;
use crate::model::size::image_bytes;
use crate::record::{VolumeRecord, VolumeState};

/// The map of a volume.
#[derive(Clone, Copy, Debug)]
pub struct MapOf {
    allocation: Allocation,
    lineage: Uuid,
    /// If the volume is thick: all its blocks are mapped.
    is_mapped: bool,
    /// The size of the volume.
    bytes: u64,
    /// The bytes by which the volume is growing.
    more: u64,
}

impl MapOf {
    /// The map of a volume that is growing by `more` bytes.
    pub fn volume(record: &VolumeRecord, more: u64) -> MapOf {
        MapOf {
            allocation: record.allocation,
            lineage: record.lineage(),
            is_mapped: record.state == VolumeState::Ready,
            bytes: image_bytes(record.size),
            more,
        }
    }
}

/// The maps of a pool.
#[derive(Debug, Default)]
pub struct Maps {
    /// The sizes in bytes of thick volumes and of their snapshots.
    thick: Vec<u64>,
    /// Bytes of thick volumes whose blocks are all mapped, by lineage.
    mapped: BTreeMap<Uuid, u64>,
    /// Lineages with a thin volume or a snapshot of one.
    thin: BTreeSet<Uuid>,
    /// There is an image of unknown lineage.
    is_incomplete: bool,
}

impl Maps {
    pub fn add_volume(&mut self, map: &MapOf) {
        if map.allocation == Allocation::Thin {
            self.thin.insert(map.lineage);
            return;
        }
        self.thick.push(map.bytes + map.more);
        if map.is_mapped {
            *self.mapped.entry(map.lineage).or_default() += map.bytes;
        }
    }

    pub fn add_snapshot(&mut self, allocation: Allocation, lineage: Uuid, bytes: u64) {
        match allocation {
            Allocation::Thick => self.thick.push(bytes),
            Allocation::Thin => drop(self.thin.insert(lineage)),
        }
    }

    /// A volume or snapshot whose record cannot be read, with the bytes of its blocks. It may be
    /// thick.
    pub fn add_damaged(&mut self, bytes: u64) {
        self.thick.push(bytes);
        self.is_incomplete = true;
    }

    /// Bytes of metadata to be kept free: the worst case of each map, without what the maps of thick
    /// volumes have at least. A thin copy may keep the nodes that it shares with a thick volume when
    /// the volume gets others, so nothing is subtracted there.
    pub fn reserved(&self, space: &MetadataSpace) -> u64 {
        let worst: u64 = self.thick.iter().map(|bytes| space.worst(*bytes)).sum();
        let alone = |(lineage, _): &(&Uuid, &u64)| !self.thin.contains(*lineage);
        let each = self.mapped.iter().filter(alone);
        let present: u64 = match self.is_incomplete {
            true => 0,
            false => each.map(|(_, bytes)| space.least(*bytes)).sum(),
        };
        worst.saturating_sub(present)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::size::MIB;

    const SPACE: MetadataSpace = MetadataSpace {
        total: MIB,
        free: MIB,
        reserved: 0,
        block_bytes: 64 << 10,
    };
    const BYTES: u64 = 64 * MIB;
    /// The metadata of a volume of this size at most, and of what is mapped at least: of 1024 blocks.
    const WORST: u64 = (16 + 48) << 10;
    const LEAST: u64 = 16 << 10;

    fn map(allocation: Allocation, lineage: u128) -> MapOf {
        MapOf {
            allocation,
            lineage: Uuid::from_u128(lineage),
            is_mapped: true,
            bytes: BYTES,
            more: 0,
        }
    }

    #[test]
    fn only_thick_volumes_and_their_snapshots_have_metadata_reserved() {
        let mut maps = Maps::default();
        maps.add_volume(&map(Allocation::Thin, 2));
        maps.add_snapshot(Allocation::Thin, Uuid::from_u128(2), BYTES);
        assert_eq!(maps.reserved(&SPACE), 0);
        maps.add_volume(&MapOf {
            is_mapped: false,
            ..map(Allocation::Thick, 1)
        });
        assert_eq!(maps.reserved(&SPACE), WORST);
        maps.add_snapshot(Allocation::Thick, Uuid::from_u128(1), BYTES);
        assert_eq!(maps.reserved(&SPACE), 2 * WORST);
    }

    #[test]
    fn what_a_thick_volume_has_mapped_is_not_reserved_again_unless_a_thin_copy_may_keep_it() {
        let mut maps = Maps::default();
        maps.add_volume(&map(Allocation::Thick, 1));
        assert_eq!(maps.reserved(&SPACE), WORST - LEAST);
        maps.add_volume(&MapOf {
            more: BYTES,
            ..map(Allocation::Thick, 2)
        });
        let larger = WORST + (48 << 10);
        assert_eq!(maps.reserved(&SPACE), WORST + larger - 2 * LEAST);
        let without_copies = maps.reserved(&SPACE);
        // Of a thin copy that was deleted.
        let mut snapshots = Maps::default();
        snapshots.add_volume(&map(Allocation::Thick, 1));
        snapshots.add_snapshot(Allocation::Thin, Uuid::from_u128(1), BYTES);
        assert_eq!(snapshots.reserved(&SPACE), WORST);
        maps.add_volume(&map(Allocation::Thin, 1));
        assert_eq!(maps.reserved(&SPACE), without_copies + LEAST);
        maps.add_damaged(BYTES);
        assert_eq!(maps.reserved(&SPACE), 2 * WORST + larger);
    }
}
