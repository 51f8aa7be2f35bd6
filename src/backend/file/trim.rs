//! Telling the pool's disk which blocks are free, once for many deletes: a trim (FITRIM) goes
//! through all free blocks of the file system, under locks that writers need as well, and the file
//! system does not remember what an earlier one has told.

use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::TRASH;
use super::folder::Folder;
use crate::error::Result;
use crate::host::Effect;

/// In the trash: blocks were freed of which the disk has not been told yet. Earlier releases leave
/// it alone.
const UNTOLD: &str = "untrimmed";
/// From the begin of one trim to the next one.
const EVERY: Duration = Duration::from_secs(60);

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

impl Untold {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn is_due(last: Option<Instant>, now: Instant) -> bool {
    last.is_none_or(|last| now.saturating_duration_since(last) >= EVERY)
}

impl Folder {
    fn untold_mark(&self) -> PathBuf {
        self.root.join(TRASH).join(UNTOLD)
    }

    /// Finds what an earlier process has left to be told.
    pub(super) fn find_untold(&self) -> Result<()> {
        let mark = self.stat(&self.untold_mark(), || "look for a mark".into())?;
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
            self.perform(mark, || "mark that blocks were freed".into())?;
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
            format!("tell the disk of pool {}", self.path.display())
        })?;
        let mut state = self.untold.state();
        // What was freed meanwhile may have been missed: it is told by the next one.
        if state.freed == freed {
            let path = self.untold_mark();
            self.perform(Effect::RemoveFile { path: &path }, || {
                "remove a mark".into()
            })?;
            state.marked = false;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_is_told_at_once_and_then_at_most_once_a_minute() {
        let now = Instant::now() + EVERY;
        assert!(is_due(None, now));
        assert!(!is_due(Some(now), now));
        let almost = EVERY.saturating_sub(Duration::from_millis(1));
        assert!(!is_due(now.checked_sub(almost), now));
        assert!(is_due(now.checked_sub(EVERY), now));
    }
}
