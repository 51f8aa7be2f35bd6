//! How an administrator sets up a thin pool with LVM, and the states into which it gets.

use nix::errno::Errno;

use super::machine::Machine;
use crate::host::VolumeGroup;
use crate::host::mapper::ThinPoolMode;

/// How an administrator has created a pool, and what has happened to it since.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolSetup {
    /// LVM has activated it.
    pub active: bool,
    pub mode: ThinPoolMode,
    pub zeroes_blocks: bool,
    pub errors_when_full: bool,
    pub needs_check: bool,
    pub holds_metadata: bool,
    /// Commits of its metadata fail. The kernel reports no error to the sender of a message then, but
    /// takes the message back, and makes the pool read-only.
    pub fails_commits: bool,
    /// LVM has suspended it, as it does while it extends a pool.
    pub suspended: bool,
    /// The volume groups that LVM lists with the name of the pool's group.
    pub groups: Vec<VolumeGroup>,
}

impl Default for PoolSetup {
    fn default() -> PoolSetup {
        PoolSetup {
            active: true,
            mode: ThinPoolMode::ReadWrite,
            zeroes_blocks: true,
            errors_when_full: true,
            needs_check: false,
            holds_metadata: false,
            fails_commits: false,
            suspended: false,
            groups: Vec::new(),
        }
    }
}

impl Machine {
    /// The volume groups with a name, as LVM lists them.
    pub(super) fn volume_groups(&self, name: &str) -> Vec<VolumeGroup> {
        let prefix = &format!("{name}-");
        let mut pools = self.thin_pools.iter();
        let found = pools.find(|(pool, _)| pool.starts_with(prefix));
        found.map_or(Vec::new(), |(_, pool)| pool.setup.groups.clone())
    }

    /// Whether LVM has activated a pool. LVM has a device of this name only if it uses the pool
    /// itself, as a test must have said.
    pub(super) fn is_active_pool(&self, name: &str) -> bool {
        match self.thin_pools.get(name) {
            Some(pool) => pool.setup.active,
            None => !name.ends_with("-tpool"),
        }
    }

    /// Fails if the disk of a thin pool is dead, and while LVM has suspended the pool.
    pub(super) fn check_running_pool(&mut self, name: &str) -> Result<(), Errno> {
        self.check_thin_pool(name)?;
        match self.thin_pool(name).setup.suspended {
            true => Err(Errno::EAGAIN),
            false => Ok(()),
        }
    }

    /// Exchanges the names of two pools. Devices stay on their pools.
    #[cfg(any(test, feature = "testing"))]
    pub(super) fn swap_pools(&mut self, one: &str, other: &str) {
        let [first, second] = [one, other].map(|name| self.thin_pool(name).clone());
        self.thin_pools.insert(one.into(), second);
        self.thin_pools.insert(other.into(), first);
    }

    /// Changes what an administrator has set up.
    #[cfg(any(test, feature = "testing"))]
    pub(super) fn set_up_pool(&mut self, name: &str, change: impl FnOnce(&mut PoolSetup)) {
        change(&mut self.thin_pool(name).setup);
    }
}
