//! Ends of processes and of the machine.

use super::super::disk::{Disk, Ino, Node};
use super::super::machine::Machine;
use super::super::{MemoryHost, MemoryOptions, PoolSetup};

impl MemoryHost {
    /// Like [`MemoryHost::new`], with the size of the pool's disk in bytes.
    pub fn with_capacity(capacity: u64) -> MemoryHost {
        MemoryHost::with_options(MemoryOptions {
            capacity,
            ..MemoryOptions::default()
        })
    }

    /// Kills this process and starts another on the same machine: its loop holds, locks and pinned
    /// directories are released, and its further calls fail.
    pub fn restart_process(&self) -> MemoryHost {
        self.lock().kill(self.process);
        self.released.notify_all();
        self.another_process()
    }

    /// Ends all processes, removes mounts and loop devices, and starts a process in a new boot.
    /// With a power loss, everything that was not synced is lost.
    pub fn reboot(&self, power_loss: bool) -> MemoryHost {
        self.lock().reboot(power_loss);
        self.released.notify_all();
        self.another_process()
    }

    /// Changes how an administrator has set up a thin pool. A machine has a pool of each name, which
    /// no program has used, until this changes it.
    pub fn set_up_pool(&self, name: &str, change: impl FnOnce(&mut PoolSetup)) {
        self.lock().set_up_pool(name, change);
    }

    /// Two volume groups exchange their names.
    pub fn swap_pools(&self, one: &str, other: &str) {
        self.lock().swap_pools(one, other);
    }

    /// Whether this process is alive.
    pub fn is_alive(&self) -> bool {
        self.lock().is_alive(self.process)
    }
}

impl Machine {
    /// Ends mounts, loop devices and processes; the disk stays, and with it the files at CSI paths.
    fn reboot(&mut self, power_loss: bool) {
        if power_loss {
            self.disk.lose_power_below(None);
        } else {
            let mounted: Vec<u32> = self.supers.keys().copied().collect();
            for number in mounted {
                // As at any other time, data for which there is no space is lost.
                let _ = self.write_back(number);
            }
            for folder in &self.dead {
                self.disk.lose_power_below(Some(*folder));
            }
            self.disk.sync_all();
        }
        self.alive.clear();
        self.openers.clear();
        self.pins.clear();
        self.locks.clear();
        self.mounts.clear();
        self.supers.clear();
        self.frozen.clear();
        self.guard.sessions.clear();
        self.loops.clear();
        self.boot = self.uuid();
        self.mount_base();
        self.remove_unreferenced();
    }
}

impl Disk {
    /// A clean shutdown: everything becomes durable.
    fn sync_all(&mut self) {
        self.moves.clear();
        for node in self.nodes.values_mut() {
            match node {
                Node::Dir(dir) => dir.durable = dir.live.clone(),
                Node::File(file) => file.durable = file.live.clone(),
            }
        }
    }

    /// After a power loss, or the loss of the disk of one directory: drops everything there that
    /// was not durable.
    pub(super) fn lose_power_below(&mut self, folder: Option<Ino>) {
        let lost = folder.map(|folder| self.reach(&mut vec![folder], true));
        let is_lost = |ino: &Ino| lost.as_ref().is_none_or(|lost| lost.contains(ino));
        self.moves
            .retain(|one| !one.ends.iter().any(|(dir, _)| is_lost(dir)));
        let nodes = self.nodes.iter_mut();
        for (_, node) in nodes.filter(|(ino, _)| is_lost(ino)) {
            match node {
                Node::Dir(dir) => dir.live = dir.durable.clone(),
                Node::File(file) => file.live = file.durable.clone(),
            }
        }
    }
}
