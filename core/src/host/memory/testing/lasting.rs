//! Disks of a simulated machine that die or hang, until a test ends that.

use std::path::Path;
use std::sync::PoisonError;
use std::time::Duration;

use nix::errno::Errno;

use super::super::MemoryHost;
use super::super::disk::Ino;
use super::super::lasting::Delayed;
use super::super::machine::Machine;
use super::super::user::Answer;

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

/// Effects that wait, until this is dropped.
pub struct Delay {
    host: MemoryHost,
}

impl Delay {
    /// Waits until one of the effects waits, and returns whether one does after a minute at the latest.
    pub fn is_reached(&self) -> bool {
        let machine = self.host.lock();
        let is_due = |machine: &mut Machine| {
            let delayed = machine.delayed.as_ref();
            delayed.is_some_and(|delayed| !delayed.is_reached)
        };
        let minute = Duration::from_secs(60);
        let waited = self
            .host
            .released
            .wait_timeout_while(machine, minute, is_due);
        !waited.unwrap_or_else(PoisonError::into_inner).1.timed_out()
    }
}

impl Drop for Delay {
    fn drop(&mut self) {
        self.host.lock().delayed = None;
        self.host.released.notify_all();
    }
}

impl Machine {
    /// The directory of a disk, which is no longer dead.
    fn revive(&mut self, folder: &Path) -> Answer<Ino> {
        let dead = std::mem::take(&mut self.dead);
        let ino = self.find(0, folder)?.ok_or(Errno::ENOENT)?;
        self.dead = dead.into_iter().filter(|other| *other != ino).collect();
        Ok(ino)
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
    pub fn mount_disk_again(&self, folder: &Path) -> Answer<()> {
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

    /// Effects of this name wait until the returned value is dropped, except for the next `passes`; all
    /// others do not, as on a disk that is slow.
    pub fn delay_effects(&self, name: &str, passes: usize) -> Delay {
        self.lock().delayed = Some(Delayed {
            name: name.into(),
            passes,
            is_reached: false,
        });
        Delay { host: self.clone() }
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
