//! The IDs of new thin devices. They count upward, so that the ID of a deleted device, which a
//! forgotten table or an old record may still name, is not used again before all 2^24 were.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use nix::errno::Errno;

use super::{FIRST_ID, TRIAL_ID, recorded_ids};
use crate::error::{Error, ErrorContext, HostError, Result};
use crate::host::{self, Effect, Host};

/// The file with the ID above all IDs whose devices were deleted. It is written before the newest
/// device is deleted: until then, records and devices show the highest ID.
const FILE: &str = "next-id";
const NEW_FILE: &str = "next-id.new";

/// How far new IDs are from the known ones while a record cannot be read, whose ID is unknown: a
/// pool has fewer records than this.
const UNKNOWN_NUMBERS: u32 = 1 << 16;

/// An upper bound for an image whose record cannot be read: the blocks of all thin devices that no
/// record names.
pub(super) fn unnamed(
    host: &dyn Host,
    root: &Path,
    devices: &BTreeMap<u32, u64>,
) -> host::Result<u64> {
    let recorded = recorded_ids(host, root)?;
    let unnamed = devices.iter().filter(|(id, _)| !recorded.ids.contains(id));
    Ok(unnamed.map(|(_, bytes)| bytes).sum())
}

#[derive(Debug, Default)]
pub(super) struct Numbers {
    /// IDs that are in use or were used since the start.
    taken: BTreeSet<u32>,
    /// The next ID while they count upward.
    next: u32,
    /// The content of the file.
    mark: u32,
    /// A record could not be read, so an ID that nothing else has may be in use.
    is_incomplete: bool,
    /// Whether it was logged that the file cannot be written.
    has_warned: bool,
}

impl Numbers {
    /// `taken` are the IDs of all devices, tables and readable records.
    pub(super) fn read(
        host: &dyn Host,
        root: &Path,
        taken: BTreeSet<u32>,
        is_incomplete: bool,
    ) -> host::Result<Numbers> {
        let path = root.join(FILE);
        let mark = match host.read_file(&path)? {
            None => FIRST_ID,
            Some(bytes) => serde_json::from_slice(&bytes)
                .map_err(|error| HostError::unexpected("read", path, error.to_string()))?,
        };
        let mut numbers = Numbers {
            taken,
            next: 0,
            mark,
            is_incomplete,
            has_warned: false,
        };
        let unknown = if is_incomplete { UNKNOWN_NUMBERS } else { 0 };
        numbers.next = numbers.above_all().saturating_add(unknown);
        Ok(numbers)
    }

    fn above_all(&self) -> u32 {
        let mut regular = self.taken.range(..TRIAL_ID);
        let above = regular.next_back().map_or(0, |highest| highest + 1);
        above.max(self.mark).max(FIRST_ID)
    }

    /// The next ID. At the end of the range, the lowest that is neither taken nor `shown` by a
    /// device. Fails if there is none, or if one cannot be known to be free. `pool` is for the error.
    pub(super) fn take(
        &mut self,
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

    /// Makes durable that an ID was used, before its device is deleted.
    pub(super) fn keep(&mut self, host: &dyn Host, root: &Path, id: u32) -> host::Result<()> {
        if id < self.mark || id >= TRIAL_ID {
            return Ok(());
        }
        let mark = self.above_all().max(id + 1);
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
        let mut each = effects.iter();
        match each.try_for_each(|effect| host.perform(effect).map(drop)) {
            // Deletes work on a full disk, so the ID may be used again after a restart.
            Err(error) if error.code() == Some(Errno::ENOSPC) => {
                if !std::mem::replace(&mut self.has_warned, true) {
                    tracing::warn!(path = %path.display(), id, "failed to record the highest ID of a thin device, because the disk of the records is full: after a restart of the driver, new volumes may get IDs of deleted ones");
                }
                return host.perform(&Effect::RemoveFile { path: new }).map(drop);
            }
            written => written?,
        }
        self.mark = mark;
        Ok(())
    }
}
