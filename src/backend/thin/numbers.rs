//! The IDs of new thin devices. They count upward, so that the ID of a deleted device, which a
//! forgotten table or an old record may still name, is not used again before all 2^24 were.

use std::collections::BTreeSet;
use std::path::Path;

use super::{FIRST_ID, TRIAL_ID};
use crate::error::{Error, ErrorContext, HostError, Result};
use crate::host::{self, Effect, Host};

/// The file with an ID that no device has reached yet. It is written before one reaches it, so that
/// deletions need not write: they work with a full disk.
const FILE: &str = "next-id";
const NEW_FILE: &str = "next-id.new";

/// How many IDs are reserved with one write of the file. A restart skips those that were not used.
const RESERVED: u32 = 64;

/// How far the first new ID is from the known ones if the file does not exist, which earlier releases
/// did not write, and a record cannot be read, whose ID is unknown: a pool has fewer records than this.
const UNKNOWN_NUMBERS: u32 = 1 << 16;

#[derive(Debug, Default)]
pub(super) struct ThinIdAllocator {
    /// IDs that are in use or were used since the start.
    taken: BTreeSet<u32>,
    /// The next ID while they count upward.
    next: u32,
    /// The content of the file.
    mark: u32,
    /// A record could not be read, so an ID that nothing else has may be in use.
    is_incomplete: bool,
}

impl ThinIdAllocator {
    /// `taken` are the IDs of all devices, tables and readable records.
    pub(super) fn read(
        host: &dyn Host,
        root: &Path,
        taken: BTreeSet<u32>,
        is_incomplete: bool,
    ) -> host::Result<ThinIdAllocator> {
        let path = root.join(FILE);
        let (mark, unknown) = match host.read_file(&path)? {
            None if is_incomplete => (FIRST_ID, UNKNOWN_NUMBERS),
            None => (FIRST_ID, 0),
            Some(bytes) => {
                let mark = serde_json::from_slice(&bytes);
                let unclear = |error: serde_json::Error| {
                    HostError::unexpected("read", path, error.to_string())
                };
                (mark.map_err(unclear)?, 0)
            }
        };
        let highest = taken.range(..TRIAL_ID).next_back();
        let above_all = highest.map_or(FIRST_ID, |highest| highest + 1).max(mark);
        Ok(ThinIdAllocator {
            taken,
            next: above_all.saturating_add(unknown),
            mark,
            is_incomplete,
        })
    }

    /// The next ID. At the end of the range, the lowest that is neither taken nor `shown` by a
    /// device. Fails if there is none, or if one cannot be known to be free, or if the file cannot be
    /// written. `pool` is for the error.
    pub(super) fn take(
        &mut self,
        (host, root): (&dyn Host, &Path),
        pool: &str,
        shown: impl FnOnce() -> host::Result<BTreeSet<u32>>,
    ) -> Result<u32> {
        let refuse = |reason| {
            let subject = format!("a new thin device of {pool}");
            Err(Error::refused(subject, reason))
        };
        let mut upward = self.next..TRIAL_ID;
        let number = match upward.find(|id| !self.taken.contains(id)) {
            Some(number) => {
                let reserved = self.reserve(host, root, number);
                reserved.context(|| format!("reserve IDs of thin devices of {pool}"))?;
                self.next = number + 1;
                number
            }
            None if self.is_incomplete => {
                return refuse(
                    "all IDs of thin devices were used once, and a record that could not be read may have any that is free now; correct the record that `slackwater doctor` names, and restart the driver",
                );
            }
            None => {
                let shown = shown().context(|| format!("find a free ID for {pool}"))?;
                let is_free = |id: &u32| !self.taken.contains(id) && !shown.contains(id);
                let Some(number) = (FIRST_ID..TRIAL_ID).find(is_free) else {
                    return refuse(
                        "all 16777212 IDs of thin devices are in use, or were used since the driver started; delete volumes or snapshots, and restart the driver",
                    );
                };
                number
            }
        };
        self.taken.insert(number);
        Ok(number)
    }

    /// Makes durable that an ID and those after it may be used. A crash leaves the old file or the new
    /// one.
    fn reserve(&mut self, host: &dyn Host, root: &Path, id: u32) -> host::Result<()> {
        if id < self.mark {
            return Ok(());
        }
        let mark = id.saturating_add(RESERVED).min(TRIAL_ID);
        let (path, new) = (&root.join(FILE), &root.join(NEW_FILE));
        let bytes = mark.to_string();
        let write = Effect::WriteFile {
            path: new,
            bytes: bytes.as_bytes(),
        };
        let rename = Effect::Rename {
            from: new,
            to: path,
        };
        let effects = [
            write,
            Effect::SyncFile { path: new },
            rename,
            Effect::SyncDir { path: root },
        ];
        for effect in &effects {
            host.perform(effect)?;
        }
        self.mark = mark;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::memory::MemoryHost;
    use crate::record::formats::{check_with, files};

    const ROOT: &str = "/pool";

    /// What is read from a file.
    fn read(bytes: &[u8]) -> host::Result<(MemoryHost, ThinIdAllocator)> {
        let host = MemoryHost::new();
        let root = Path::new(ROOT);
        host.make_folder(root).unwrap();
        host.put_file(&root.join(FILE), bytes).unwrap();
        let numbers = ThinIdAllocator::read(&host, root, BTreeSet::new(), false)?;
        Ok((host, numbers))
    }

    #[test]
    fn the_file_keeps_its_format() {
        let write = |mark: &u32| {
            let (host, mut numbers) = read(b"0").unwrap();
            let root = Path::new(ROOT);
            numbers.reserve(&host, root, mark - RESERVED).unwrap();
            host.read_file(&root.join(FILE)).unwrap().unwrap()
        };
        let read = |bytes: &[u8]| read(bytes).unwrap().1.mark;
        let expected = vec![("first", 67), ("last", TRIAL_ID)];
        check_with("next-id", expected, read, write);
    }

    #[test]
    fn fuzz_the_file() {
        let seeds: Vec<_> = files("next-id").into_values().collect();
        let mark = |bytes: &[u8]| read(bytes).ok().map(|(_, numbers)| numbers.mark);
        let valid: Vec<_> = seeds.iter().map(|seed| mark(seed)).collect();
        let target = |bytes: &[u8]| {
            if let Ok((host, mut numbers)) = read(bytes) {
                let shown = || Ok(BTreeSet::new());
                let taken = numbers.take((&host, Path::new(ROOT)), "the pool", shown);
                assert!((FIRST_ID..TRIAL_ID).contains(&taken.unwrap()));
            }
        };
        slackwater_core::fuzz::fuzz("next-id", &seeds, target, |bytes| {
            let mark = mark(bytes);
            assert!(mark.is_none() || valid.contains(&mark));
        });
    }
}
