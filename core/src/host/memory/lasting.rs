//! Disks that die or hang while they are in use, until a test ends that.

use std::path::Path;

use nix::errno::Errno;

use super::MemoryHost;
use super::disk::Ino;
use super::loops::Backing;
use super::machine::{Machine, Process};
use crate::error::HostCause;

/// Effects of one name that wait until a test ends that.
#[derive(Debug)]
pub(super) struct Delayed {
    pub(super) name: String,
    /// How many do not wait before.
    pub(super) passes: usize,
    /// One waits.
    pub(super) is_reached: bool,
}

impl MemoryHost {
    /// Whether an action waits until a test ends that.
    pub(super) fn is_delayed(&self, machine: &mut Machine, action: &str) -> bool {
        let delayed = machine.delayed.as_mut().filter(|it| it.name == action);
        let Some(delayed) = delayed.filter(|it| it.passes == 0) else {
            return false;
        };
        if !std::mem::replace(&mut delayed.is_reached, true) {
            self.released.notify_all();
        }
        true
    }
}

impl Machine {
    pub(super) fn pass_delayed(&mut self, action: &str) {
        if let Some(delayed) = self.delayed.as_mut().filter(|it| it.name == action) {
            delayed.passes = delayed.passes.saturating_sub(1);
        }
    }

    /// Whether an inode lies on a dead disk.
    pub(super) fn is_dead(&self, ino: Ino) -> bool {
        self.is_on(ino, self.dead.iter())
    }

    fn is_on<'a>(&self, ino: Ino, mut disks: impl Iterator<Item = &'a Ino>) -> bool {
        disks.any(|folder| self.disk.is_below(*folder, ino) || self.is_thin_below(*folder, ino))
    }

    /// Why the status of a loop device cannot be read, according to the file system of its image.
    pub(super) fn ask_loop(&self, number: u32) -> Result<(), HostCause> {
        let Some(dev) = self.loops.get(&number).filter(|_| !self.faults.is_exempt()) else {
            return Ok(());
        };
        if let Backing::Lower(lower) = dev.backing {
            return self.ask_loop(lower);
        }
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
        let backing = self.loops.get(&number).map(|dev| dev.backing);
        if let Some(Backing::Lower(lower)) = backing {
            return self.is_hung_loop(lower);
        }
        let image = backing.and_then(Backing::image);
        image.is_some_and(|ino| self.is_on(ino, self.hung.iter()))
    }

    /// Whether an action of a process waits for a disk that hangs. Opening or detaching a loop device
    /// does not wait, because the driver asks that with a time limit. The last unmount of a file
    /// system waits, because it writes back.
    pub(super) fn waits(&self, process: Process, action: &str, subject: &Path) -> bool {
        if self.hung.is_empty() || self.faults.is_exempt() {
            return false;
        }
        if let Some(pool) = subject.to_str().filter(|_| subject.is_relative()) {
            return self.is_hung_pool(pool);
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
        let is_of = |number: &u32| self.device(*number).path == subject;
        if let Some(number) = self.loops.keys().copied().find(is_of) {
            // The device mapper knows its tables without the disk.
            let has_limit = matches!(
                action,
                "open" | "detach_loop" | "detach_dead_loop" | "examine"
            );
            return !has_limit && self.is_hung_loop(number);
        }
        let mut folders = subject.ancestors();
        let found = folders.find_map(|folder| self.find(process, folder).ok().flatten());
        found.is_some_and(|ino| self.is_on(ino, self.hung.iter()))
    }
}
