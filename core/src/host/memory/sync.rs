//! fsync of files and directories.

use std::path::{Path, PathBuf};

use nix::errno::Errno;

use super::disk::{Disk, Ino};
use super::machine::{Machine, Process};
use crate::error::HostCause;

impl Machine {
    pub(super) fn sync(
        &mut self,
        process: Process,
        path: &Path,
        sync: fn(&mut Disk, Ino) -> Result<(), Errno>,
    ) -> Result<(), HostCause> {
        let ino = self.must_find(process, path)?;
        Ok(sync(&mut self.disk, ino)?)
    }

    /// Syncs files and directories until one of them fails.
    pub(super) fn sync_all(
        &mut self,
        process: Process,
        paths: &[PathBuf],
    ) -> Result<(), HostCause> {
        paths.iter().try_for_each(|path| {
            let ino = self.must_find(process, path)?;
            match self.disk.dir(ino) {
                Ok(_) => self.disk.sync_dir(ino)?,
                Err(_) => self.disk.sync_file(ino)?,
            }
            Ok(())
        })
    }

    /// Syncs some of them: a disk writes in any order. Every second one from the first one on becomes
    /// durable, or all the others, depending on the number of effects before.
    pub(super) fn cut_off_sync(&mut self, process: Process, paths: &[PathBuf]) {
        let from = self.faults.log.len() % 2;
        let some: Vec<PathBuf> = paths.iter().skip(from).step_by(2).cloned().collect();
        let _ = self.sync_all(process, &some);
    }
}
