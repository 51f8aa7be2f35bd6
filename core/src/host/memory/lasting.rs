//! Disks that die or hang while they are in use, until a test ends that.

use std::path::Path;

use nix::errno::Errno;

use super::MemoryHost;
use super::disk::Ino;
use super::machine::{Machine, Process};
use super::user::Answer;
use crate::error::HostCause;
use crate::host::Device;

/// A disk that hangs, until this is dropped.
pub struct Hung {
    host: MemoryHost,
    ino: Ino,
}

impl Drop for Hung {
    fn drop(&mut self) {
        self.host.lock().hung.remove(&self.ino);
        self.host.released.notify_all();
    }
}

impl Machine {
    /// Whether an inode lies on a dead disk.
    pub(super) fn is_dead(&self, ino: Ino) -> bool {
        self.is_on(ino, self.dead.iter())
    }

    /// The directory of a disk, which is no longer dead.
    fn revive(&mut self, folder: &Path) -> Answer<Ino> {
        let dead = std::mem::take(&mut self.dead);
        let ino = self.find(0, folder)?.ok_or(Errno::ENOENT)?;
        self.dead = dead.into_iter().filter(|other| *other != ino).collect();
        Ok(ino)
    }

    fn is_on<'a>(&self, ino: Ino, mut disks: impl Iterator<Item = &'a Ino>) -> bool {
        disks.any(|folder| self.disk.is_below(*folder, ino))
    }

    /// Why the status of a loop device cannot be read, according to the file system of its image.
    pub(super) fn ask_loop(&self, number: u32) -> Result<(), HostCause> {
        let Some(dev) = self.loops.get(&number).filter(|_| !self.faults.aside) else {
            return Ok(());
        };
        let image = dev.backing.image();
        if dev.dead || image.is_some_and(|ino| self.is_dead(ino)) {
            return Err(Errno::EIO.into());
        }
        match self.is_hung_loop(number) {
            true => Err(HostCause::NoAnswer),
            false => Ok(()),
        }
    }

    pub(super) fn is_hung_loop(&self, number: u32) -> bool {
        let image = self.loops.get(&number).and_then(|dev| dev.backing.image());
        image.is_some_and(|ino| self.is_on(ino, self.hung.iter()))
    }

    /// Whether an action of a process waits for a disk that hangs. Opening or detaching a loop device
    /// does not wait, because the driver asks that with a time limit. The last unmount of a file
    /// system waits, because it writes back.
    pub(super) fn waits(&self, process: Process, action: &str, subject: &Path) -> bool {
        if self.hung.is_empty() || self.faults.aside {
            return false;
        }
        if action == "unmount" {
            let shown = self.top(subject).and_then(|mounted| mounted.shown.fs());
            let shows = |number: &u32| {
                let all = self.mounts.iter();
                all.filter(|mounted| mounted.shown.fs() == Some(*number))
                    .count()
                    == 1
            };
            return shown.filter(shows).is_some_and(|n| self.is_hung_loop(n));
        }
        let is_of = |number: &u32| Device::of_loop(*number).path == subject;
        if let Some(number) = self.loops.keys().copied().find(is_of) {
            let has_limit = matches!(action, "open" | "detach_loop" | "detach_dead_loop");
            return !has_limit && self.is_hung_loop(number);
        }
        let mut folders = subject.ancestors();
        let found = folders.find_map(|folder| self.find(process, folder).ok().flatten());
        found.is_some_and(|ino| self.is_on(ino, self.hung.iter()))
    }
}

impl MemoryHost {
    /// The disk of a directory dies: its file system is shut down, and from now on every access by
    /// any path or loop device fails with EIO.
    pub fn kill_disk(&self, folder: &Path) -> Answer<()> {
        let mut machine = self.lock();
        let ino = machine.find(0, folder)?.ok_or(Errno::ENOENT)?;
        machine.dead.insert(ino);
        Ok(())
    }

    /// Replaces a dead disk by one with the same content. Loop devices on it answer again, as if it
    /// had never failed.
    pub fn replace_disk(&self, folder: &Path) -> Answer<()> {
        self.lock().revive(folder).map(drop)
    }

    /// Mounts the file system of a dead disk again at its directory. Data that was not synced is
    /// lost. Loop devices and pinned directories of the earlier mount stay dead.
    pub fn mount_disk_anew(&self, folder: &Path) -> Answer<()> {
        let mut machine = self.lock();
        let ino = machine.revive(folder)?;
        let Machine {
            disk,
            loops,
            pins,
            dead_pins,
            ..
        } = &mut *machine;
        let on_it = pins.iter().filter(|(_, (_, on))| disk.is_below(ino, *on));
        dead_pins.extend(on_it.map(|(fd, _)| *fd));
        for dev in loops.values_mut() {
            let image = dev.backing.image();
            dev.dead |= image.is_some_and(|image| disk.is_below(ino, image));
        }
        disk.lose_power_below(Some(ino));
        Ok(())
    }

    /// Whether unmounting the mount at a path waits for a disk that hangs.
    pub fn unmount_waits(&self, mount_point: &Path) -> bool {
        self.lock().waits(self.process, "unmount", mount_point)
    }

    /// The disk of a directory hangs: every access waits until the returned value is dropped.
    pub fn hang_disk(&self, folder: &Path) -> Answer<Hung> {
        let mut machine = self.lock();
        let ino = machine.find(0, folder)?.ok_or(Errno::ENOENT)?;
        machine.hung.insert(ino);
        drop(machine);
        Ok(Hung {
            host: self.clone(),
            ino,
        })
    }
}
