//! The header of a pool of LVM, on thin device [`HEADER_ID`](crate::backend::thin::HEADER_ID): whose
//! pool it is, and how far its creation has come.
//!
//! It is stored in two slots, which are written in turn, so a write that a crash cuts off leaves the
//! header before it. All numbers are little-endian:
//!
//! | offset | bytes | |
//! |---|---|---|
//! | 0 | 16 | [`MAGIC`] |
//! | 16 | 4 | version |
//! | 20 | 4 | state: 1 claimed, 2 ready |
//! | 24 | 8 | number of the write; the slot with the larger one counts |
//! | 32 | 16 | UUID of the pool |
//! | 48 | 16 | UUID of its home |
//! | 64 | 16 | UUID of the file system with the records |
//! | 80 | 8 | bytes of the device with the records |
//! | 4092 | 4 | CRC-32C of all bytes before it |

use uuid::Uuid;

use crate::crc32c::crc32c;
use crate::model::{HomeId, PoolId};

/// Bytes of a slot. A disk with sectors of 4096 bytes writes a slot as a whole.
pub const SLOT_BYTES: usize = 4096;
/// Bytes of both slots.
pub const SLOTS_BYTES: usize = 2 * SLOT_BYTES;

const MAGIC: &[u8; 16] = b"SLACKWATER POOL\n";
const VERSION: u32 = 1;
const CHECKSUM_OFFSET: usize = SLOT_BYTES - 4;

/// How far the creation of the pool has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeaderState {
    /// The file system with the records is not complete, and has never been mounted.
    Claimed = 1,
    /// It is complete, and is never created again.
    Ready = 2,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolHeader {
    pub state: HeaderState,
    /// The number of the write.
    pub written: u64,
    pub id: PoolId,
    /// The machine to which the pool belongs.
    pub home: HomeId,
    /// UUID of the file system with the records.
    pub fs: Uuid,
    /// The length of the device with the records.
    pub records_bytes: u64,
}

/// What the two slots contain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FoundHeader {
    /// No header was ever written completely: only zeros, or a part of the first write.
    Incomplete,
    Header(PoolHeader),
    /// A header of a newer program, with its version.
    Newer(u32),
}

impl PoolHeader {
    /// The slot in which this header is stored, as its offset.
    pub fn offset(&self) -> u64 {
        (self.written % 2) * SLOT_BYTES as u64
    }

    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = vec![0; SLOT_BYTES];
        let mut put = |at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
        put(0, MAGIC);
        put(16, &VERSION.to_le_bytes());
        put(20, &(self.state as u32).to_le_bytes());
        put(24, &self.written.to_le_bytes());
        put(32, self.id.0.as_bytes());
        put(48, self.home.0.as_bytes());
        put(64, self.fs.as_bytes());
        put(80, &self.records_bytes.to_le_bytes());
        let checksum = crc32c(&bytes[..CHECKSUM_OFFSET]);
        bytes[CHECKSUM_OFFSET..].copy_from_slice(&checksum.to_le_bytes());
        bytes
    }
}

/// Reads both slots.
pub fn decode(slots: &[u8]) -> FoundHeader {
    let found = slots.chunks_exact(SLOT_BYTES).filter_map(decode_slot);
    let mut newest = FoundHeader::Incomplete;
    for found in found {
        newest = match (newest, found) {
            (FoundHeader::Newer(version), _) | (_, FoundHeader::Newer(version)) => {
                FoundHeader::Newer(version)
            }
            (FoundHeader::Header(a), FoundHeader::Header(b)) if a.written > b.written => {
                FoundHeader::Header(a)
            }
            (_, found) => found,
        };
    }
    newest
}

fn decode_slot(slot: &[u8]) -> Option<FoundHeader> {
    let u32_at = |at: usize| Some(u32::from_le_bytes(slot.get(at..at + 4)?.try_into().ok()?));
    let u64_at = |at: usize| Some(u64::from_le_bytes(slot.get(at..at + 8)?.try_into().ok()?));
    let uuid_at = |at: usize| Uuid::from_slice(slot.get(at..at + 16)?).ok();
    let is_whole =
        slot.starts_with(MAGIC) && u32_at(CHECKSUM_OFFSET)? == crc32c(slot.get(..CHECKSUM_OFFSET)?);
    if !is_whole {
        return None;
    }
    let state = match (u32_at(16)?, u32_at(20)?) {
        (VERSION, 1) => HeaderState::Claimed,
        (VERSION, 2) => HeaderState::Ready,
        (version, _) => return Some(FoundHeader::Newer(version)),
    };
    Some(FoundHeader::Header(PoolHeader {
        state,
        written: u64_at(24)?,
        id: PoolId(uuid_at(32)?),
        home: HomeId(uuid_at(48)?),
        fs: uuid_at(64)?,
        records_bytes: u64_at(80)?,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::formats::check_with;

    fn header(written: u64) -> PoolHeader {
        PoolHeader {
            state: HeaderState::Claimed,
            written,
            id: PoolId(Uuid::from_u128(1)),
            home: HomeId(Uuid::from_u128(2)),
            fs: Uuid::from_u128(3),
            records_bytes: 256 << 20,
        }
    }

    fn slots(headers: &[PoolHeader]) -> Vec<u8> {
        let mut bytes = vec![0; SLOTS_BYTES];
        for header in headers {
            let at = header.offset() as usize;
            bytes[at..at + SLOT_BYTES].copy_from_slice(&header.encode());
        }
        bytes
    }

    #[test]
    fn the_last_complete_write_counts() {
        assert_eq!(decode(&slots(&[])), FoundHeader::Incomplete);
        for last in 1..4 {
            let all: Vec<_> = (0..=last).map(header).collect();
            let mut bytes = slots(&all);
            assert_eq!(decode(&bytes), FoundHeader::Header(header(last)));
            bytes[header(last).offset() as usize + 100] ^= 1;
            assert_eq!(decode(&bytes), FoundHeader::Header(header(last - 1)));
        }
    }

    #[test]
    fn headers_keep_their_format() {
        let ready = PoolHeader {
            state: HeaderState::Ready,
            ..header(258)
        };
        let expected = vec![("claimed.bin", header(1)), ("ready.bin", ready)];
        let read = |slot: &[u8]| match decode(slot) {
            FoundHeader::Header(header) => header,
            other => panic!("{other:?}"),
        };
        check_with("lvm-header", expected, read, PoolHeader::encode);
    }

    #[test]
    fn each_changed_bit_of_a_header_is_noticed() {
        let bytes = slots(&[header(0)]);
        for bit in 0..SLOT_BYTES * 8 {
            let mut bytes = bytes.clone();
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(decode(&bytes), FoundHeader::Incomplete, "bit {bit}");
        }
    }

    #[test]
    fn a_header_of_a_newer_program_is_not_overwritten_as_incomplete() {
        let mut slot = header(0).encode();
        slot[16] = 2;
        let checksum = crc32c(&slot[..CHECKSUM_OFFSET]);
        slot[CHECKSUM_OFFSET..].copy_from_slice(&checksum.to_le_bytes());
        slot.resize(SLOTS_BYTES, 0);
        assert_eq!(decode(&slot), FoundHeader::Newer(2));
    }

    /// The planted bug is to use the older header: only a damage of the newer one shows it.
    #[test]
    fn fuzz_headers_of_pools() {
        let (old, new) = (header(0), header(1));
        let seed = slots(&[old.clone(), new]);
        let target = |bytes: &[u8]| {
            decode(bytes);
        };
        slackwater_core::fuzz::fuzz("header of a pool", &[seed], target, |bytes| {
            assert_ne!(decode(bytes), FoundHeader::Header(old.clone()));
        });
    }
}
