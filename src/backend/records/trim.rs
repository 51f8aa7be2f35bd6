//! Discards the free blocks of the pool's disk, once for many deletions: a trim (FITRIM) goes
//! through all free blocks of the file system, under locks that writers need as well, and the file
//! system does not remember which blocks an earlier trim has discarded. This module also records
//! when the volumes were trimmed, which returns their free blocks to the pool.

use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::TRASH;
use super::folder::Folder;
use crate::error::{ErrorContext, Result};
use crate::host::Effect;

/// A file in the trash: blocks were freed that are not discarded yet. Earlier releases ignore it.
const UNDISCARDED_FILE: &str = "untrimmed";
/// A file in the trash: seconds since 1970, in digits. Earlier releases ignore it, too.
const TRIMMED: &str = "trimmed";
/// The minimum time from the start of one trim to the next one.
const TRIM_INTERVAL: Duration = Duration::from_secs(60);

/// Whether a pool needs a trim, and when the last one was.
#[derive(Default)]
pub(super) struct Undiscarded(Mutex<State>);

#[derive(Default)]
struct State {
    /// The file exists durably.
    marked: bool,
    /// The number of images whose blocks were freed.
    freed: u64,
    last: Option<Instant>,
}

/// When the volumes of a pool were trimmed last, as far as this process knows.
#[derive(Default)]
pub(super) struct Trimmed(Mutex<Option<u64>>);

impl Undiscarded {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn is_due(last: Option<Instant>, now: Instant) -> bool {
    last.is_none_or(|last| now.saturating_duration_since(last) >= TRIM_INTERVAL)
}

impl Folder {
    fn undiscarded_mark(&self) -> PathBuf {
        self.root.join(TRASH).join(UNDISCARDED_FILE)
    }

    /// Reads whether an earlier process has left blocks to be discarded.
    pub(super) fn read_undiscarded_mark(&self) -> Result<()> {
        let marked = self.is_there(&self.undiscarded_mark(), || {
            "look up the marker for freed blocks".into()
        })?;
        self.undiscarded.state().marked = marked;
        Ok(())
    }

    /// Records durably that blocks were freed. Their image must exist until then, because after a
    /// crash its record is the only trace that its blocks were to be discarded.
    pub(super) fn mark_undiscarded(&self) -> Result<()> {
        let mut state = self.undiscarded.state();
        if !state.marked {
            let path = self.undiscarded_mark();
            let mark = Effect::WriteFile {
                path: &path,
                bytes: &[],
            };
            self.perform(mark, || "write the marker for freed blocks".into())?;
            self.sync(TRASH)?;
            state.marked = true;
        }
        state.freed += 1;
        Ok(())
    }

    /// Discards the blocks that deletions with `wipe: discard` have freed, with one trim for all of
    /// them. Does nothing if there are none, or if the last trim was less than [`TRIM_INTERVAL`]
    /// ago.
    pub fn discard_freed(&self) -> Result<()> {
        let freed = {
            let mut state = self.undiscarded.state();
            let now = Instant::now();
            if !state.marked || !is_due(state.last, now) {
                return Ok(());
            }
            state.last = Some(now);
            state.freed
        };
        let trimmed = self.store.trim();
        trimmed.context(|| format!("discard the free blocks of pool {}", self.path.display()))?;
        let mut state = self.undiscarded.state();
        // The trim may have missed blocks that were freed while it ran. The next trim discards
        // them.
        if state.freed == freed {
            let path = self.undiscarded_mark();
            self.perform(Effect::RemoveFile { path: &path }, || {
                "remove the marker for freed blocks".into()
            })?;
            state.marked = false;
        }
        Ok(())
    }

    /// When the volumes of this pool were trimmed last, in seconds since 1970; `None` if this is
    /// not known. A damaged file counts as none, so that the volumes are trimmed once more than
    /// needed.
    pub fn trimmed(&self) -> Result<Option<u64>> {
        let mut known = self.last_trim();
        if known.is_none() {
            let read = self.host.read_file(&self.root.join(TRASH).join(TRIMMED));
            let read = read.context(|| "read the time of the last trim".into())?;
            let text = read.and_then(|bytes| String::from_utf8(bytes).ok());
            *known = text.and_then(|text| text.trim().parse().ok());
        }
        Ok(*known)
    }

    /// Records when the volumes were trimmed; an error if the time could not be stored for a later
    /// process. It stays in memory even if the disk has no space for the file.
    pub fn note_trimmed(&self, at: u64) -> Result<()> {
        *self.last_trim() = Some(at);
        let doing = || "record the time of the last trim".to_string();
        let path = self.root.join(TRASH).join(TRIMMED);
        let bytes = at.to_string().into_bytes();
        let note = Effect::WriteFile {
            path: &path,
            bytes: &bytes,
        };
        self.perform(note, doing)?;
        self.perform(Effect::SyncFile { path: &path }, doing)?;
        self.sync(TRASH)
    }

    fn last_trim(&self) -> MutexGuard<'_, Option<u64>> {
        self.trimmed
            .0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_gets_discards_at_once_and_then_at_most_once_a_minute() {
        let now = Instant::now() + TRIM_INTERVAL;
        assert!(is_due(None, now));
        assert!(!is_due(Some(now), now));
        let almost = TRIM_INTERVAL.saturating_sub(Duration::from_millis(1));
        assert!(!is_due(now.checked_sub(almost), now));
        assert!(is_due(now.checked_sub(TRIM_INTERVAL), now));
    }
}
