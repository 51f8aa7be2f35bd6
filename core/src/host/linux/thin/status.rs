//! The lines in which the kernel describes a thin pool.

use nix::sys::stat::makedev;

use super::SECTOR;
use crate::host::mapper::Usage;
use crate::host::{ThinPoolMode, ThinPoolStatus};

/// The size of a block of a thin pool's metadata.
const METADATA_BLOCK: u64 = 4096;

/// A thin pool, as its table and its status describe it.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Pool {
    pub(super) status: ThinPoolStatus,
    /// The device number of the metadata.
    pub(super) metadata: u64,
}

/// Reads the lines of Documentation/admin-guide/device-mapper/thin-provisioning.rst.
pub(super) fn pool_of(rdev: u64, table: &str, status: &str) -> Option<Pool> {
    let table: Vec<&str> = table.split_ascii_whitespace().collect();
    let &[metadata, _, block, _, ref features @ ..] = table.as_slice() else {
        return None;
    };
    let block_bytes = block.parse::<u64>().ok()?.checked_mul(SECTOR)?;
    let words: Vec<&str> = status.split_ascii_whitespace().collect();
    let unreadable = |mode| ThinPoolStatus {
        transaction_id: 0,
        data: Usage::default(),
        metadata: Usage::default(),
        rdev,
        block_bytes,
        mode,
        zeroes_blocks: !features.contains(&"skip_block_zeroing"),
        errors_when_full: features.contains(&"error_if_no_space"),
        needs_check: false,
        holds_metadata: false,
    };
    let metadata = number(metadata)?;
    let &[
        transaction_id,
        used_metadata,
        used_data,
        held,
        mode,
        ref rest @ ..,
    ] = words.as_slice()
    else {
        // The kernel answers one word if it cannot read the metadata: Fail or Error.
        let status = unreadable(ThinPoolMode::Failed);
        return matches!(words.as_slice(), ["Fail" | "Error"]).then_some(Pool { status, metadata });
    };
    let mode = match mode {
        "rw" => ThinPoolMode::ReadWrite,
        "out_of_data_space" => ThinPoolMode::OutOfData,
        "ro" => ThinPoolMode::ReadOnly,
        _ => return None,
    };
    let status = ThinPoolStatus {
        transaction_id: transaction_id.parse().ok()?,
        metadata: usage(used_metadata, METADATA_BLOCK)?,
        data: usage(used_data, block_bytes)?,
        needs_check: rest.contains(&"needs_check"),
        holds_metadata: held != "-",
        ..unreadable(mode)
    };
    Some(Pool { status, metadata })
}

/// Blocks in use, and all blocks: `USED/TOTAL`.
fn usage(words: &str, block: u64) -> Option<Usage> {
    let (used, total) = words.split_once('/')?;
    let bytes = |count: &str| count.parse::<u64>().ok()?.checked_mul(block);
    Some(Usage {
        used: bytes(used)?,
        total: bytes(total)?,
    })
}

/// A device number as tables have it: `MAJOR:MINOR`.
pub(in crate::host::linux) fn number(text: &str) -> Option<u64> {
    let (major, minor) = text.split_once(':')?;
    Some(makedev(major.parse().ok()?, minor.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: &str = "254:0 254:1 128 0 1 error_if_no_space";

    fn status(line: &str) -> Option<ThinPoolStatus> {
        pool_of(makedev(254, 2), TABLE, line).map(|pool| pool.status)
    }

    #[test]
    fn the_status_of_a_pool_is_read() {
        let line = "7 21/1024 300/16384 - rw discard_passdown error_if_no_space - 256";
        let expected = ThinPoolStatus {
            transaction_id: 7,
            metadata: Usage {
                used: 21 * 4096,
                total: 1024 * 4096,
            },
            data: Usage {
                used: 300 << 16,
                total: 16384 << 16,
            },
            rdev: makedev(254, 2),
            block_bytes: 64 << 10,
            mode: ThinPoolMode::ReadWrite,
            zeroes_blocks: true,
            errors_when_full: true,
            needs_check: false,
            holds_metadata: false,
        };
        assert_eq!(status(line), Some(expected));
        let line = "7 21/1024 300/16384 40 ro discard_passdown queue_if_no_space needs_check 256";
        let found = status(line).unwrap();
        assert_eq!(found.mode, ThinPoolMode::ReadOnly);
        assert!(found.needs_check && found.holds_metadata);
        assert_eq!(status("Fail").unwrap().mode, ThinPoolMode::Failed);
    }

    #[test]
    fn the_features_of_a_pool_are_read_from_its_table() {
        let line = "7 21/1024 300/16384 - rw no_discard_passdown queue_if_no_space - 256";
        let pool = pool_of(1, "254:0 254:1 128 0 1 skip_block_zeroing", line).unwrap();
        assert_eq!(pool.metadata, makedev(254, 0));
        assert!(!pool.status.zeroes_blocks && !pool.status.errors_when_full);
    }

    #[test]
    fn fuzz_the_status_of_a_pool() {
        let seeds = [
            "7 21/1024 300/16384 - rw discard_passdown error_if_no_space - 256",
            "Fail",
        ];
        crate::fuzz::fuzz_text("thin pool", &seeds, status);
    }
}
