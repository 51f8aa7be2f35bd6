//! Files of others, from which volumes are imported.

use std::path::{Path, PathBuf};

use nix::errno::Errno;

use super::disk::Ino;
use super::{Closes, MemoryHost};
use crate::error::HostCause;
use crate::host::{ForeignFile, Kept, Result};

/// An open file. It is kept like a pinned directory.
struct OpenedFile {
    host: MemoryHost,
    path: PathBuf,
    ino: Ino,
    bytes: u64,
    allocated: u64,
    modified: u64,
    _open: Kept,
}

fn unexpected(what: &str) -> HostCause {
    HostCause::Unexpected(what.into())
}

impl MemoryHost {
    pub(super) fn open_file_of_others(
        &self,
        top: &Path,
        below: &Path,
    ) -> Result<Box<dyn ForeignFile>> {
        let path = top.join(below);
        let (ino, opened, fd, data) = self.look("import", &path, |machine| {
            let ino = machine.find(self.process, &path)?.ok_or(Errno::ENOENT)?;
            let Ok(file) = machine.disk.file(ino) else {
                return Err(unexpected("it is not a regular file"));
            };
            let data = file.live.clone();
            if machine.is_open_for_writing(ino) {
                return Err(unexpected("a loop device has it open for writing"));
            }
            if data.size == 0 {
                return Err(unexpected("it is empty"));
            }
            let (opened, fd) = machine.pin(self.process, ino);
            Ok((ino, opened, fd, data))
        })?;
        Ok(Box::new(OpenedFile {
            host: self.clone(),
            path: opened,
            ino,
            bytes: data.size,
            allocated: data.allocated(),
            modified: data.modified,
            _open: self.kept(Closes::Pin(fd)),
        }))
    }
}

impl super::machine::Machine {
    fn is_open_for_writing(&self, ino: Ino) -> bool {
        let loops = self.loops_on(ino);
        let mut devices = loops.iter().filter_map(|number| self.loops.get(number));
        devices.any(|device| !device.read_only)
    }
}

impl ForeignFile for OpenedFile {
    fn path(&self) -> &Path {
        &self.path
    }

    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn allocated(&self) -> u64 {
        self.allocated
    }

    fn block_size(&self) -> u32 {
        512
    }

    fn state(&self) -> String {
        format!("{} {}", self.ino, self.modified)
    }

    fn check_unchanged(&self) -> Result<()> {
        self.host.look("import", &self.path, |machine| {
            let modified = machine.disk.file(self.ino)?.live.modified;
            match modified == self.modified && !machine.is_open_for_writing(self.ino) {
                true => Ok(()),
                false => Err(unexpected("it was opened for writing, or changed")),
            }
        })
    }

    fn find_obstacle(&self, folder: &Path) -> Result<Option<String>> {
        self.host.look("clone a block to", folder, |machine| {
            let shares = machine.options.shares_blocks();
            Ok((!shares).then(|| "its file system cannot share blocks".into()))
        })
    }
}
