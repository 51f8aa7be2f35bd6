//! The demo's writers. A volume that cannot be opened is a panic here, and a write that fails is printed.

use std::ops::Deref;
use std::path::Path;

use slackwater::demo::writers;

pub use writers::{WRITERS, is_consistent};

/// Running writers. They end when this is dropped.
pub struct Writers(writers::Writers);

impl Deref for Writers {
    type Target = writers::Writers;

    fn deref(&self) -> &writers::Writers {
        &self.0
    }
}

impl Drop for Writers {
    fn drop(&mut self) {
        if let Some(error) = self.failure() {
            eprintln!("a writer has ended: {error}");
        }
    }
}

impl Writers {
    /// Starts writers that write to these volumes in this order.
    pub fn start(volumes: &[impl AsRef<Path>]) -> Writers {
        Writers(writers::Writers::start(volumes, None).unwrap())
    }

    /// Verifies that the writers make progress: no volume is frozen.
    #[track_caller]
    pub fn assert_flowing(&self, context: &str) {
        let before = self.counts();
        super::eventually(&format!("{context}: the writers get on"), || {
            self.counts() > before + 10
        });
    }
}

/// The count of each writer in a volume, or in a copy of it.
pub fn counts_in(volume: &Path) -> [u64; WRITERS] {
    writers::counts_in(volume).unwrap()
}
