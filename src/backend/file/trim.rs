//! Telling the pool's disk which blocks are free, once for many deletes: a trim (FITRIM) goes
//! through all free blocks of the file system, under locks that writers need as well, and the file
//! system does not remember what an earlier one has told. And the note of when the volumes were
//! trimmed, which give their blocks to the pool.

use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::TRASH;
use super::folder::Folder;
use crate::error::{ErrorContext, Result};
use crate::host::Effect;

/// In the trash: blocks were freed of which the disk has not been told yet. Earlier releases leave
/// it alone.
const UNTOLD: &str = "untrimmed";
/// In the trash: seconds since 1970, in digits. Earlier releases leave it alone, too.
const TRIMMED: &str = "trimmed";
/// From the begin of one trim to the next one.
const TRIM_INTERVAL: Duration = Duration::from_secs(60);

/// Of one pool: whether its disk has to be told, and when it was told last.
#[derive(Default)]
pub(super) struct Untold(Mutex<State>);

#[derive(Default)]
struct State {
    /// The mark is there, durably.
    marked: bool,
    /// Images whose blocks were freed.
    freed: u64,
    last: Option<Instant>,
}

/// When the volumes of one pool were trimmed last, as far as this process knows.
#[derive(Default)]
pub(super) struct Trimmed(Mutex<Option<u64>>);

impl Untold {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn is_due(last: Option<Instant>, now: Instant) -> bool {
    last.is_none_or(|last| now.saturating_duration_since(last) >= TRIM_INTERVAL)
}

impl Folder {
    fn untold_mark(&self) -> PathBuf {
        self.root.join(TRASH).join(UNTOLD)
    }

    /// Finds what an earlier process has left to be told.
    pub(super) fn find_untold(&self) -> Result<()> {
        let mark = self.stat(&self.untold_mark(), || {
            "look up the marker for freed blocks".into()
        })?;
        self.untold.state().marked = mark.is_some();
        Ok(())
    }

    /// Marks durably that blocks were freed. Their image must be there until then: after a crash
    /// it is what tells that they were to be discarded.
    pub(super) fn mark_untold(&self) -> Result<()> {
        let mut state = self.untold.state();
        if !state.marked {
            let path = self.untold_mark();
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

    /// Tells the disk, if blocks were freed since it was told, and that was not just now.
    pub(super) fn tell_disk(&self) -> Result<()> {
        let freed = {
            let mut state = self.untold.state();
            let now = Instant::now();
            if !state.marked || !is_due(state.last, now) {
                return Ok(());
            }
            state.last = Some(now);
            state.freed
        };
        let path = self.root.join(TRASH);
        self.perform(Effect::Trim { path: &path }, || {
            format!("discard the free blocks of pool {}", self.path.display())
        })?;
        let mut state = self.untold.state();
        // What was freed meanwhile may have been missed: it is told by the next one.
        if state.freed == freed {
            let path = self.untold_mark();
            self.perform(Effect::RemoveFile { path: &path }, || {
                "remove the marker for freed blocks".into()
            })?;
            state.marked = false;
        }
        Ok(())
    }

    /// A note that is damaged is none: then they are trimmed once too often.
    pub(super) fn trimmed(&self) -> Result<Option<u64>> {
        let mut known = self.last_trim();
        if known.is_none() {
            let read = self.host.read_file(&self.root.join(TRASH).join(TRIMMED));
            let read = read.context(|| "read the time of the last trim".into())?;
            let text = read.and_then(|bytes| String::from_utf8(bytes).ok());
            *known = text.and_then(|text| text.trim().parse().ok());
        }
        Ok(*known)
    }

    /// This process knows it also where the disk has no room for the note.
    pub(super) fn note_trimmed(&self, at: u64) -> Result<()> {
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
    fn a_disk_is_told_at_once_and_then_at_most_once_a_minute() {
        let now = Instant::now() + TRIM_INTERVAL;
        assert!(is_due(None, now));
        assert!(!is_due(Some(now), now));
        let almost = TRIM_INTERVAL.saturating_sub(Duration::from_millis(1));
        assert!(!is_due(now.checked_sub(almost), now));
        assert!(is_due(now.checked_sub(TRIM_INTERVAL), now));
    }
}
