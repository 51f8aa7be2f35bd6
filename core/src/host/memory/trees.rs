//! File systems of the driver itself: what is mounted below [`OWN_MOUNTS`] shows files and
//! directories, which the driver reaches by their paths. Other file systems show only what users
//! write.

use std::ops::Range;
use std::path::{Path, PathBuf};

use nix::errno::Errno;

use super::clones::within;
use super::content::ContentKind;
use super::disk::{Ino, ROOT};
use super::machine::{Machine, Opened};
use super::mapped::number_of;
use super::{OWN_MOUNTS, machine::Process};
use crate::error::HostCause;
use crate::host::{Device, FileKind};

/// The folder in which the simulated disk stores the files of each such file system.
const TREES: &str = "/.trees";

fn is_own(path: &Path) -> bool {
    path.starts_with(OWN_MOUNTS) && path != Path::new(OWN_MOUNTS)
}

impl Machine {
    /// Refuses a mount point that is neither of a caller nor of the driver.
    pub(super) fn allow_mount(&mut self, path: &Path) -> Result<(), HostCause> {
        match is_own(path) {
            true => Ok(()),
            false => self.allow(path),
        }
    }

    pub(super) fn kind_of_mount_point(&self, path: &Path) -> Option<FileKind> {
        match is_own(path) {
            true => {
                let found = self.find(0, path).ok().flatten();
                found.and_then(|ino| self.disk.dir(ino).ok().map(|_| FileKind::Dir))
            }
            false => self.kind_at(path),
        }
    }

    /// The directory and the names below it that a path reaches through a mount of the driver.
    pub(super) fn tree_at(&self, path: &Path) -> Option<(Ino, Vec<String>)> {
        if !is_own(path) {
            return None;
        }
        let mut above = path.ancestors();
        let number = above.find_map(|at| self.top(at).and_then(|on| on.shown.fs()))?;
        let point = path.ancestors().find(|at| self.top(at).is_some())?;
        let tree = self.tree_of(self.image_of(number).ok()?)?;
        let rest = path.strip_prefix(point).ok()?;
        let names = rest.iter().map(|name| name.to_string_lossy().into_owned());
        Some((tree, names.collect()))
    }

    /// The root directory of the file system on a thin device.
    fn tree_of(&self, ino: Ino) -> Option<Ino> {
        let trees = self.disk.dir(ROOT).ok()?.live.get(&TREES[1..])?;
        let found = self.disk.dir(*trees).ok()?.live.get(&ino.to_string());
        found.copied()
    }

    /// Creates the root directory of a file system that is mounted for the first time. It must not
    /// give blocks back, which it would need on a full pool.
    pub(super) fn make_tree(&mut self, number: u32, target: &Path) -> Result<(), HostCause> {
        if !is_own(target) {
            return Ok(());
        }
        let ino = self.image_of(number)?;
        let dev = self.dev(number)?.clone();
        if !dev.no_discard || self.disk.file(ino)?.live.reserved < dev.bytes {
            self.violation(format!("{} has blocks to lose", target.display()));
        }
        if self.tree_of(ino).is_none() {
            self.make_folder(&PathBuf::from(TREES).join(ino.to_string()))?;
        }
        Ok(())
    }

    /// mkfs removes all files.
    pub(super) fn clear_tree(&mut self, ino: Ino) -> Result<(), Errno> {
        if self.tree_of(ino).is_some() {
            let trees = self.make_folder(Path::new(TREES))?;
            self.disk.replace(&(trees, ino.to_string()), None)?;
        }
        Ok(())
    }

    /// Whether a process has a file or directory below a mount of the driver open.
    pub(super) fn is_tree_open(&self, target: &Path) -> bool {
        let Some((tree, _)) = self.tree_at(target) else {
            return false;
        };
        let pinned = self.pins.values().map(|(_, ino)| *ino);
        let mut open = pinned.chain(self.locks.keys().copied());
        open.any(|ino| self.disk.is_below(tree, ino))
    }

    pub(super) fn read_blocks(
        &self,
        number: u32,
        offset: usize,
        length: usize,
    ) -> Result<Vec<u8>, Errno> {
        let data = &self.disk.file(self.image_of(number)?)?.live;
        if (offset + length) as u64 > data.size {
            return Err(Errno::EIO);
        }
        let stored = data.bytes.iter().copied().chain(std::iter::repeat(0));
        Ok(stored.skip(offset).take(length).collect())
    }

    pub(super) fn write_blocks(
        &mut self,
        process: Process,
        device: &Device,
        offset: usize,
        bytes: &[u8],
    ) -> Result<(), HostCause> {
        let number = number_of(device).ok_or(Errno::ENOTBLK)?;
        let mut openers = self.openers.values();
        let has_claimed = openers.any(|opener| {
            opener.process == Some(process)
                && matches!(opener.what, Opened::Claimed(other) if other == number)
        });
        if !has_claimed {
            self.violation(format!(
                "{} is written by a process that has not claimed it",
                device.path.display()
            ));
        }
        let ino = self.image_of(number)?;
        let data = self.data_mut(ino)?;
        let end = offset + bytes.len();
        if end as u64 > data.size {
            return Err(Errno::ENOSPC.into());
        }
        data.bytes.resize(data.bytes.len().max(end), 0);
        data.bytes[offset..end].copy_from_slice(bytes);
        self.disk.changed(ino, 0)?;
        self.sync_loop(number);
        Ok(())
    }

    pub(super) fn fill_with_zeros(&mut self, device: &Device, from: u64) -> Result<(), HostCause> {
        let number = number_of(device).ok_or(Errno::ENOTBLK)?;
        let ino = self.image_of(number)?;
        let bytes = self.dev(number)?.bytes;
        let content = self.content(number)?;
        if content.used_before {
            self.violation(format!("{} was in use before", device.path.display()));
        }
        if from > self.disk.file(ino)?.live.allocated() {
            self.violation(format!(
                "a part of {} is not allocated",
                device.path.display()
            ));
        }
        let (used, limit) = self.room_of(ino);
        let data = self.data_mut(ino)?;
        if bytes.saturating_sub(data.allocated()) > limit - used {
            return Err(Errno::ENOSPC.into());
        }
        data.reserved = bytes;
        data.content.kind = ContentKind::Blank;
        self.disk.changed(ino, 0)?;
        self.sync_loop(number);
        Ok(())
    }

    pub(super) fn rewrite(&mut self, device: &Device, range: &Range<u64>) -> Result<(), HostCause> {
        let number = number_of(device).ok_or(Errno::ENOTBLK)?;
        let ino = self.image_of(number)?;
        let (offset, end) = (range.start, range.end);
        if end > self.dev(number)?.bytes {
            return Err(Errno::ENOSPC.into());
        }
        if offset > self.disk.file(ino)?.live.allocated() {
            let path = device.path.display();
            self.violation(format!("{path} has no blocks before the rewritten ones"));
        }
        if self.is_shown_beyond(ino, offset, number) {
            let path = device.path.display();
            self.violation(format!("{path} is rewritten where its users can write"));
        }
        self.unshare_range(ino, offset, end)?;
        Ok(())
    }

    pub(super) fn discard_from(
        &mut self,
        process: Process,
        path: &Path,
        from: u64,
    ) -> Result<(), HostCause> {
        let ino = self.must_find(process, path)?;
        let own = self.loops_on(ino).into_iter();
        let own = own.max_by_key(|number| self.loops.get(number).map(|it| it.bytes));
        if own.is_some_and(|own| self.is_shown_beyond(ino, from, own)) {
            let path = path.display();
            self.violation(format!("{path} is discarded where its users can write"));
        }
        let data = self.data_mut(ino)?;
        data.reserved = data.reserved.min(from);
        self.disk.changed(ino, 0)?;
        Ok(())
    }

    /// Whether a user of another device of an image than this one can write beyond an offset.
    fn is_shown_beyond(&self, ino: Ino, offset: u64, own: u32) -> bool {
        let others = self.loops_on(ino).into_iter();
        let mut users = others.filter(|other| *other != own && self.is_used(*other));
        users.any(|other| self.loops.get(&other).is_some_and(|it| it.bytes > offset))
    }

    /// Gives a file blocks of its own in a range of bytes.
    fn unshare_range(&mut self, ino: Ino, from: u64, to: u64) -> Result<(), Errno> {
        let others = self.places_of_others(ino);
        self.within_room(ino, |machine, before| {
            let blocks = within(before.map.len(), from..to);
            let shared = blocks.filter(|index| others.contains(&before.map[*index]));
            machine.disk.place_again(ino, &shared.collect::<Vec<_>>())?;
            let data = machine.data_mut(ino)?;
            data.reserved = data.reserved.max(to);
            machine.disk.changed(ino, 0)
        })
    }
}
