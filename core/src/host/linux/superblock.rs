//! Parses the few superblock fields that the driver needs from the first MiB of a device, without
//! I/O.

use uuid::Uuid;

use crate::crc32c::crc32c;

/// The fields of an ext4 superblock that growth needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ext4 {
    pub(super) block_size: u64,
    pub(super) blocks: u64,
    first_block: u64,
    blocks_per_group: u64,
    inode_blocks_per_group: u64,
    /// Blocks at the start of a group that has a copy of the superblock: the superblock, the
    /// descriptors, and blocks reserved for more descriptors.
    backup_blocks: u64,
    /// Size of a group descriptor in bytes, and number of blocks reserved after the descriptors for
    /// more of them.
    descriptor: u64,
    reserved: u64,
    /// Descriptors lie in the groups that they describe (meta_bg).
    meta_groups: bool,
    sparse: bool,
    /// Blocks per cluster (bigalloc), otherwise 1.
    cluster: u64,
    /// s_state.
    state: u64,
}

/// The file system was unmounted cleanly, or has a journal (EXT4_VALID_FS).
const STATE_VALID: u64 = 1;
/// The kernel found an error in it (EXT4_ERROR_FS).
const STATE_ERROR: u64 = 2;

fn le16(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u16::from_le_bytes(bytes.get(at..at + 2)?.try_into().ok()?).into())
}

fn le32(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?).into())
}

fn le64(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?))
}

/// Size in bytes of the file system that blkid calls `name`.
pub(super) fn bytes(name: &str, head: &[u8]) -> Option<u64> {
    match name {
        "ext2" | "ext3" | "ext4" => {
            let found = ext4(head)?;
            found.blocks.checked_mul(found.block_size)
        }
        "xfs" => {
            let block = u32::from_be_bytes(head.get(4..8)?.try_into().ok()?);
            let blocks = u64::from_be_bytes(head.get(8..16)?.try_into().ok()?);
            (head.get(..4)? == b"XFSB").then_some(blocks.checked_mul(block.into())?)
        }
        "btrfs" => {
            let block = head.get(0x1_0000..0x1_1000)?;
            (block.get(0x40..0x48)? == b"_BHRfS_M").then_some(le64(block, 0x70)?)
        }
        _ => None,
    }
}

/// Parses an ext4 superblock; `None` if there is none.
pub(super) fn ext4(head: &[u8]) -> Option<Ext4> {
    let sb = head.get(1024..2048)?;
    if le16(sb, 0x38)? != 0xEF53 {
        return None;
    }
    let block_size = 1024u64
        .checked_shl(le32(sb, 0x18)? as u32)
        .filter(|size| (1024..=65536).contains(size))?;
    let wide = le32(sb, 0x60)? & 0x80 != 0;
    let blocks = le32(sb, 4)? | if wide { le32(sb, 0x150)? << 32 } else { 0 };
    let first_block = le32(sb, 0x14)?;
    let blocks_per_group = le32(sb, 0x20)?.max(1);
    let descriptor = if wide { le16(sb, 0xFE)?.max(32) } else { 32 };
    let groups = blocks
        .saturating_sub(first_block)
        .div_ceil(blocks_per_group);
    let compat = le32(sb, 0x64)?;
    let meta_groups = le32(sb, 0x60)? & 0x10 != 0;
    let descriptors = if meta_groups {
        1
    } else {
        groups.saturating_mul(descriptor).div_ceil(block_size)
    };
    Some(Ext4 {
        block_size,
        blocks,
        first_block,
        blocks_per_group,
        inode_blocks_per_group: (le32(sb, 0x28)? * le16(sb, 0x58)?.max(128)).div_ceil(block_size),
        backup_blocks: 1 + descriptors + le16(sb, 0xCE)?,
        descriptor,
        reserved: le16(sb, 0xCE)?,
        meta_groups,
        sparse: compat & 1 != 0,
        state: le16(sb, 0x3A)?,
        cluster: (1u64 << le32(sb, 0x1C)?.saturating_sub(le32(sb, 0x18)?).min(32)).max(1),
    })
}

impl Ext4 {
    /// Whether the file system should be checked before it is mounted. A journal that must be
    /// replayed is no reason, because the mount replays it.
    pub(super) fn is_unclean(&self) -> bool {
        self.state & STATE_VALID == 0 || self.state & STATE_ERROR != 0
    }

    /// Number of blocks to which the kernel would grow the file system on a device of
    /// `device_bytes`: it leaves out a last group that is too small for its own tables.
    pub(super) fn blocks_on(&self, device_bytes: u64) -> u64 {
        /// Free blocks that mke2fs and resize2fs require in the last group.
        const SPARE: u64 = 50;
        let blocks = device_bytes / self.block_size / self.cluster * self.cluster;
        let Some(counted) = blocks.checked_sub(self.first_block) else {
            return 0;
        };
        let (last, rest) = (
            counted / self.blocks_per_group,
            counted % self.blocks_per_group,
        );
        let backup = if self.has_backup(last) {
            self.backup_blocks
        } else {
            0
        };
        let least = backup + 2 + self.inode_blocks_per_group + SPARE.max(self.cluster);
        if rest > 0 && rest <= least && last > 0 {
            return self.first_block + last * self.blocks_per_group;
        }
        blocks
    }

    /// Whether growth to a device of `device_bytes` moves nothing.
    pub(super) fn can_grow_in_place(&self, device_bytes: u64) -> bool {
        let descriptors = |blocks: u64| {
            let groups = blocks
                .saturating_sub(self.first_block)
                .div_ceil(self.blocks_per_group);
            groups
                .saturating_mul(self.descriptor)
                .div_ceil(self.block_size)
        };
        let more = descriptors(self.blocks_on(device_bytes))
            - descriptors(self.blocks).min(descriptors(self.blocks_on(device_bytes)));
        self.cluster == 1 && (self.meta_groups || more <= self.reserved)
    }

    fn has_backup(&self, group: u64) -> bool {
        let power_of = |base: u64| {
            let mut power = base;
            while power < group {
                power = power.saturating_mul(base);
            }
            power == group
        };
        !self.sparse || group <= 1 || [3, 5, 7].into_iter().any(power_of)
    }
}

/// The fields of a btrfs superblock that a new fsid needs.
pub(super) struct Btrfs {
    bytes: Vec<u8>,
}

/// Whether the checksum of a superblock is valid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Checksum {
    /// It matches.
    Good,
    /// It does not match.
    Bad,
    /// Its type is not crc32c, so it is not computed here.
    Foreign,
}

/// BTRFS_FEATURE_INCOMPAT_METADATA_UUID.
const METADATA_UUID: u64 = 1 << 10;
/// BTRFS_SUPER_FLAG_SEEDING, _CHANGING_FSID, _CHANGING_FSID_V2.
const NOT_TO_BE_CHANGED: u64 = 1 << 32 | 1 << 35 | 1 << 36;

impl Btrfs {
    pub(super) const BYTES: usize = 4096;
    const FSID: usize = 0x20;
    const INCOMPAT: usize = 0xbc;
    const METADATA: usize = 0x23b;

    /// `None` if the bytes are not a btrfs superblock, or not the one of this offset.
    pub(super) fn read(bytes: Vec<u8>, place: u64) -> Option<Btrfs> {
        let fits = bytes.len() == Btrfs::BYTES
            && bytes.get(0x40..0x48)? == b"_BHRfS_M"
            && le64(&bytes, 0x30)? == place;
        fits.then_some(Btrfs { bytes })
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    pub(super) fn fsid(&self) -> Uuid {
        Uuid::from_slice(&self.bytes[Btrfs::FSID..Btrfs::FSID + 16]).unwrap_or_default()
    }

    /// Whether a log tree written by fsync must be replayed.
    pub(super) fn has_log(&self) -> bool {
        self.number(0x60) != 0
    }

    fn number(&self, at: usize) -> u64 {
        le64(&self.bytes, at).unwrap_or_default()
    }

    /// Returns the reason if the fsid cannot be changed.
    pub(super) fn check(&self) -> Result<(), String> {
        let devices = self.number(0x88);
        if devices != 1 {
            return Err(format!("its btrfs has {devices} devices"));
        }
        if self.number(0x38) & NOT_TO_BE_CHANGED != 0 {
            return Err("its fsid is being changed, or it is a seed device".into());
        }
        Ok(())
    }

    fn crc(&self) -> [u8; 4] {
        crc32c(&self.bytes[Btrfs::FSID..]).to_le_bytes()
    }

    pub(super) fn checksum(&self) -> Checksum {
        match le16(&self.bytes, 0xc4) {
            Some(0) if self.bytes[..4] == self.crc() => Checksum::Good,
            Some(0) => Checksum::Bad,
            _ => Checksum::Foreign,
        }
    }

    /// Sets a new fsid; the original one stays as the metadata UUID.
    pub(super) fn renew(&mut self, uuid: Uuid) {
        let mut features = self.number(Btrfs::INCOMPAT);
        if features & METADATA_UUID == 0 {
            self.bytes
                .copy_within(Btrfs::FSID..Btrfs::FSID + 16, Btrfs::METADATA);
        }
        features |= METADATA_UUID;
        // If both are equal, the kernel requires that the feature is not set.
        if self.bytes[Btrfs::METADATA..Btrfs::METADATA + 16] == *uuid.as_bytes() {
            features &= !METADATA_UUID;
            self.bytes[Btrfs::METADATA..Btrfs::METADATA + 16].fill(0);
        }
        self.bytes[Btrfs::INCOMPAT..Btrfs::INCOMPAT + 8].copy_from_slice(&features.to_le_bytes());
        self.bytes[Btrfs::FSID..Btrfs::FSID + 16].copy_from_slice(uuid.as_bytes());
        let crc = self.crc();
        self.bytes[..4].copy_from_slice(&crc);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_new_fsid_keeps_the_first_as_the_metadatas() {
        let place = 65536u64;
        let first = Uuid::from_u128(1);
        let mut bytes = vec![0; Btrfs::BYTES];
        bytes[0x20..0x30].copy_from_slice(first.as_bytes());
        bytes[0x30..0x38].copy_from_slice(&place.to_le_bytes());
        bytes[0x40..0x48].copy_from_slice(b"_BHRfS_M");
        bytes[0x88] = 1;
        assert!(Btrfs::read(bytes.clone(), 0).is_none());
        let mut block = Btrfs::read(bytes, place).unwrap();
        assert_eq!(block.checksum(), Checksum::Bad);
        let first_metadata = |block: &Btrfs| block.bytes[0x23b..0x24b] == *first.as_bytes();
        for n in [2, 3] {
            block.renew(Uuid::from_u128(n));
            assert_eq!(block.fsid(), Uuid::from_u128(n));
            assert_eq!(block.checksum(), Checksum::Good);
            assert!(first_metadata(&block) && block.number(0xbc) == METADATA_UUID);
        }
        block.renew(first);
        assert!(!first_metadata(&block) && block.number(0xbc) == 0);
        assert_eq!(block.check(), Ok(()));
        block.bytes[0x88] = 2;
        assert!(block.check().is_err());
    }
    use crate::fuzz::fuzz;
    use proptest::prelude::*;

    /// The fields that are read, in a superblock of a file system of 128 MiB.
    fn ext4_head() -> Vec<u8> {
        let mut head = vec![0; 2048];
        let mut set = |at: usize, bytes: &[u8]| {
            head[1024 + at..1024 + at + bytes.len()].copy_from_slice(bytes);
        };
        for (at, number) in [
            (0, 32768u32),
            (4, 32768),
            (0x18, 2),
            (0x1c, 2),
            (0x20, 32768),
            (0x28, 8192),
            (0x60, 0x2c2),
            (0x64, 0x6b),
        ] {
            set(at, &number.to_le_bytes());
        }
        for (at, number) in [
            (0x38, 0xef53u16),
            (0x3a, 1),
            (0x58, 256),
            (0xce, 63),
            (0xfe, 64),
        ] {
            set(at, &number.to_le_bytes());
        }
        head
    }

    const DEVICES: [u64; 5] = [0, 4096, 1 << 27, 1 << 40, u64::MAX];

    #[test]
    fn fuzz_ext4() {
        let target = |head: &[u8]| {
            let _ = bytes("ext4", head);
            if let Some(found) = ext4(head) {
                for device in DEVICES {
                    let blocks = found.blocks_on(device);
                    assert!(blocks <= device / found.block_size, "beyond the device");
                    let _ = (found.is_unclean(), found.can_grow_in_place(device));
                }
            }
        };
        fuzz("ext4", &[ext4_head()], target, |head| {
            assert!(ext4(head).is_none_or(|found| found.block_size == 4096));
        });
    }

    #[test]
    fn an_ext4_superblock_with_an_impossible_block_size_is_none() {
        for log_block_size in [7u32, 53, 54, 60, 63, 64, u32::MAX] {
            let mut head = ext4_head();
            head[1024 + 0x18..1024 + 0x1c].copy_from_slice(&log_block_size.to_le_bytes());
            assert!(ext4(&head).is_none(), "{log_block_size}");
        }
    }

    #[test]
    fn fuzz_xfs() {
        let mut head = vec![0; 256];
        head[..4].copy_from_slice(b"XFSB");
        head[4..8].copy_from_slice(&4096u32.to_be_bytes());
        head[8..16].copy_from_slice(&32768u64.to_be_bytes());
        let size = |head: &[u8]| bytes("xfs", head);
        assert_eq!(size(&head), Some(1 << 27));
        let target = |head: &[u8]| {
            let _ = size(head);
        };
        fuzz("xfs", &[head], target, |head| {
            assert!(size(head).is_none_or(|size| size <= 1 << 27));
        });
    }

    #[test]
    fn fuzz_btrfs() {
        let mut block = vec![0; Btrfs::BYTES];
        block[0x40..0x48].copy_from_slice(b"_BHRfS_M");
        block[0x88] = 1;
        let target = |bytes: &[u8]| {
            if let Some(mut found) = Btrfs::read(bytes.to_vec(), 0) {
                let _ = (found.check(), found.checksum(), found.has_log());
                found.renew(Uuid::from_u128(7));
                assert_eq!(found.fsid(), Uuid::from_u128(7));
                assert_ne!(found.checksum(), Checksum::Bad);
            }
        };
        fuzz("btrfs", &[block], target, |bytes| {
            let found = Btrfs::read(bytes.to_vec(), 0);
            assert!(found.is_none_or(|found| found.check().is_ok()));
        });
    }

    fn plain() -> Ext4 {
        Ext4 {
            block_size: 4096,
            blocks: 32768,
            first_block: 0,
            blocks_per_group: 32768,
            inode_blocks_per_group: 512,
            backup_blocks: 1 + 1 + 1024,
            descriptor: 64,
            reserved: 1024,
            meta_groups: false,
            sparse: true,
            cluster: 1,
            state: STATE_VALID,
        }
    }

    #[test]
    fn a_last_group_without_space_for_its_tables_is_omitted() {
        let fs = plain();
        assert_eq!(fs.blocks_on((32768 + 100) * 4096), 32768);
        assert_eq!(fs.blocks_on((32768 + 5000) * 4096), 32768 + 5000);
        // Group 2 has no copy of the superblock, so it needs fewer blocks.
        assert_eq!(fs.blocks_on((65536 + 1000) * 4096), 65536 + 1000);
        assert_eq!(fs.blocks_on((3 * 32768 + 1000) * 4096), 3 * 32768);
    }

    #[test]
    fn ext4_is_unclean_without_the_valid_mark_or_with_the_one_for_errors() {
        let unclean = |state| Ext4 { state, ..plain() }.is_unclean();
        assert!(unclean(0) && unclean(STATE_ERROR) && unclean(STATE_VALID | STATE_ERROR));
        // The kernel marks orphan inodes, which its next mount removes.
        assert!(!unclean(STATE_VALID) && !unclean(STATE_VALID | 4));
    }

    #[test]
    fn growth_moves_no_blocks_while_there_is_space_for_descriptors() {
        let group = 32768 * 4096;
        // 64 descriptors of 64 bytes fit in a block, and one block already exists.
        let tight = Ext4 {
            reserved: 1,
            ..plain()
        };
        assert!(tight.can_grow_in_place(128 * group));
        assert!(!tight.can_grow_in_place(129 * group));
        assert!(tight.can_grow_in_place(group / 2), "it never shrinks");
        let meta = Ext4 {
            meta_groups: true,
            ..tight
        };
        assert!(meta.can_grow_in_place(1000 * group));
        assert!(
            !Ext4 {
                cluster: 16,
                ..plain()
            }
            .can_grow_in_place(2 * group)
        );
    }

    #[test]
    fn copies_of_the_super_block_lie_in_groups_of_powers() {
        let fs = plain();
        let groups: Vec<_> = (0..50).filter(|group| fs.has_backup(*group)).collect();
        assert_eq!(groups, [0, 1, 3, 5, 7, 9, 25, 27, 49]);
    }

    proptest! {
        #[test]
        fn any_bytes_are_parsed_without_a_panic(mut head in prop::collection::vec(any::<u8>(), 0..3000), size: u64) {
            if head.len() > 1100 {
                head[1024 + 0x38..1024 + 0x3a].copy_from_slice(&[0x53, 0xEF]);
            }
            if let Some(fs) = ext4(&head) {
                prop_assert!(fs.blocks_on(size) <= size / fs.block_size || fs.first_block > 0);
            }
            for name in ["ext4", "xfs", "btrfs", "vfat"] {
                let _ = bytes(name, &head);
            }
        }

        #[test]
        fn a_completed_growth_is_not_requested_again(bytes in 0u64..1 << 44) {
            let fs = plain();
            let grown = fs.blocks_on(bytes);
            prop_assert_eq!(fs.blocks_on(grown * fs.block_size), grown);
        }
    }
}
