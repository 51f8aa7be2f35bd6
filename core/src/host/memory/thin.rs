//! Simulated thin pools and mapped devices, with the rules of the kernel's dm-thin.
//!
//! A thin device is a file without a name on the simulated disk, so blocks, contents and flaws are
//! those of image files. A mapped device is a block device like a loop device, and differs in how it
//! is attached. A thin pool has its own space, as large as the pool's disk unless a test changes it.

use std::collections::BTreeMap;
use std::path::Path;

use nix::errno::Errno;

use super::disk::{BLOCK, Ino};
use super::machine::Machine;
use super::mapped::MAPPER_MAJOR;
use super::pool_setup::PoolSetup;
use crate::error::HostCause;
use crate::host::mapper::{MAX_THIN_ID, ThinPoolMode, Usage};
use crate::host::{Effect, ThinMessage, ThinPoolStatus, ThinSnapshot};
use crate::thin_metadata::MIN_PER_MAPPING;

/// Metadata that one thin device takes, and that each block of a map takes. Maps share no nodes.
const METADATA_PER_DEVICE: u64 = BLOCK;
const METADATA_PER_BLOCK: u64 = MIN_PER_MAPPING;
/// The share of its data that is the default size of the metadata of a pool: 64 bytes for each block,
/// as LVM does it.
const DATA_PER_METADATA: u64 = POOL_BLOCK / 64;

/// The default size of a block of a pool.
const POOL_BLOCK: u64 = 64 << 10;

const NOT_SUSPENDED: &str = "it was created from an active thin device that was not suspended";

/// A thin pool, which an administrator has created with LVM.
#[derive(Clone, Debug)]
pub(super) struct ThinPool {
    pub(super) transaction_id: u64,
    pub(super) minor: u32,
    /// The directory with the records of the pool, which is on the same disk.
    folder: Option<Ino>,
    pub(super) devices: BTreeMap<u32, Ino>,
    pub(super) data_bytes: u64,
    pub(super) metadata_bytes: u64,
    /// What a test has changed of the state that an administrator creates.
    pub(super) setup: PoolSetup,
}

impl Machine {
    /// A thin pool. Each name is that of a pool that an administrator has just created.
    pub(super) fn thin_pool(&mut self, name: &str) -> &mut ThinPool {
        let data_bytes = self.disk.capacity;
        let minor = self.thin_pools.len() as u32;
        let folder = self.find(0, &Path::new(super::POOLS).join(name));
        let pools = &mut self.thin_pools;
        pools.entry(name.into()).or_insert_with(|| ThinPool {
            transaction_id: 0,
            minor,
            folder: folder.ok().flatten(),
            devices: BTreeMap::new(),
            data_bytes,
            metadata_bytes: data_bytes / DATA_PER_METADATA,
            setup: PoolSetup::default(),
        })
    }

    /// Fails if the disk of a thin pool is dead.
    pub(super) fn check_thin_pool(&mut self, name: &str) -> Result<(), Errno> {
        match self.thin_pool(name).folder {
            Some(folder) => self.check_alive(folder),
            None => Ok(()),
        }
    }

    /// Whether a file is a thin device on the disk of a directory.
    pub(super) fn is_thin_below(&self, folder: Ino, ino: Ino) -> bool {
        let is_it = |pool: &ThinPool| pool.devices.values().any(|it| *it == ino);
        let mut on_it = self.thin_pools.values();
        on_it.any(|pool| pool.folder == Some(folder) && is_it(pool))
    }

    /// Whether the disk of a thin pool hangs.
    pub(super) fn is_hung_pool(&self, name: &str) -> bool {
        let folder = self.thin_pools.get(name).and_then(|pool| pool.folder);
        folder.is_some_and(|folder| self.hung.contains(&folder))
    }

    pub(super) fn thin_pool_status(&mut self, name: &str) -> ThinPoolStatus {
        let pool = self.thin_pool(name).clone();
        // The kernel answers one word, without any number.
        let has_failed = pool.setup.mode == ThinPoolMode::Failed;
        ThinPoolStatus {
            transaction_id: if has_failed { 0 } else { pool.transaction_id },
            data: Usage {
                used: self.thin_used(&pool),
                total: match self.full {
                    true => self.thin_used(&pool),
                    false => pool.data_bytes,
                },
            },
            metadata: Usage {
                used: self.metadata_used(&pool),
                total: pool.metadata_bytes,
            },
            rdev: nix::sys::stat::makedev(MAPPER_MAJOR, u64::from(pool.minor)),
            block_bytes: POOL_BLOCK,
            mode: pool.setup.mode,
            zeroes_blocks: pool.setup.zeroes_blocks,
            errors_when_full: pool.setup.errors_when_full,
            needs_check: pool.setup.needs_check,
            holds_metadata: pool.setup.holds_metadata,
        }
    }

    pub(super) fn thin_devices(&mut self, pool: &str) -> BTreeMap<u32, u64> {
        let devices = self.thin_pool(pool).devices.clone();
        let mapped = |ino| self.disk.file(ino).map_or(0, |file| file.live.allocated());
        let each = devices.into_iter();
        each.map(|(id, ino)| (id, mapped(ino))).collect()
    }

    /// The files of all thin devices, which have no name.
    pub(super) fn thin_inodes(&self) -> impl Iterator<Item = Ino> {
        let pools = self.thin_pools.values();
        pools.flat_map(|pool| pool.devices.values().copied())
    }

    fn thin_used(&self, pool: &ThinPool) -> u64 {
        self.disk.used_by(pool.devices.values().copied())
    }

    fn metadata_used(&self, pool: &ThinPool) -> u64 {
        let mapped = |ino: &Ino| self.disk.file(*ino).map_or(0, |file| file.live.allocated());
        let blocks = |ino: &Ino| mapped(ino).div_ceil(POOL_BLOCK);
        let blocks: u64 = pool.devices.values().map(blocks).sum();
        pool.devices.len() as u64 * METADATA_PER_DEVICE + blocks * METADATA_PER_BLOCK
    }

    /// Leaves this many bytes of data free in each thin pool.
    #[cfg(any(test, feature = "testing"))]
    pub(super) fn leave_thin_available(&mut self, bytes: u64) {
        let mut pools = std::mem::take(&mut self.thin_pools);
        for pool in pools.values_mut() {
            pool.data_bytes = self.thin_used(pool) + bytes;
        }
        self.thin_pools = pools;
    }

    /// The bytes in use where a file has its blocks, and how many may be in use: on the pool's disk,
    /// or in its thin pool.
    pub(super) fn room_of(&self, ino: Ino) -> (u64, u64) {
        let mut pools = self.thin_pools.values();
        let thin = pools.find(|pool| pool.devices.values().any(|it| *it == ino));
        let (used, total) = match thin {
            Some(pool) => (self.thin_used(pool), pool.data_bytes),
            None => (self.used(), self.disk.capacity),
        };
        (used, if self.full { used } else { total.max(used) })
    }

    /// Performs the effects on thin pools and mapped devices.
    pub(super) fn act_on_mapped(&mut self, effect: &Effect<'_>) -> Result<(), HostCause> {
        match *effect {
            Effect::ThinMessage { pool, message } => self.thin_message(pool, message)?,
            Effect::CreateMapped { uuid } => self.create_mapped(uuid)?,
            Effect::LoadTable {
                uuid,
                table,
                read_only,
            } => self.load_table(uuid, table, read_only)?,
            Effect::LoadLinear {
                uuid,
                table,
                read_only,
            } => self.load_linear(uuid, table, read_only)?,
            Effect::CreateThinSnapshot { prepared } => {
                self.create_thin_snapshot(&prepared.snapshot)?;
            }
            Effect::ResumeMapped { uuid } => self.resume_mapped(uuid)?,
            Effect::ClearTable { uuid } => self.clear_table(uuid)?,
            Effect::RemoveMapped { uuid } => self.remove_mapped(uuid),
            _ => return Err(Errno::ENOSYS.into()),
        }
        Ok(())
    }

    fn thin_message(&mut self, name: &str, message: ThinMessage) -> Result<(), Errno> {
        self.check_running_pool(name)?;
        if self.takes_back(name) {
            return Ok(());
        }
        let pool = self.thin_pool(name).clone();
        match message {
            ThinMessage::CreateThin { id } => {
                self.check_free(name, id)?;
                let ino = self.disk.make_unnamed();
                self.thin_pool(name).devices.insert(id, ino);
            }
            ThinMessage::Delete { id } => {
                let ino = *pool.devices.get(&id).ok_or(Errno::ENODATA)?;
                if !self.loops_on(ino).is_empty() {
                    return Err(Errno::EBUSY);
                }
                self.thin_pool(name).devices.remove(&id);
            }
            ThinMessage::SetTransactionId { from, to } => {
                if pool.transaction_id != from {
                    return Err(Errno::EINVAL);
                }
                self.thin_pool(name).transaction_id = to;
            }
            ThinMessage::ReleaseMetadata if !pool.setup.holds_metadata => {
                return Err(Errno::EINVAL);
            }
            ThinMessage::ReleaseMetadata => self.thin_pool(name).setup.holds_metadata = false,
        }
        self.commit(name)
    }

    /// Whether the pool takes a message back, because its commits fail.
    fn takes_back(&mut self, name: &str) -> bool {
        let setup = &mut self.thin_pool(name).setup;
        if setup.fails_commits {
            (setup.mode, setup.needs_check) = (ThinPoolMode::ReadOnly, true);
        }
        setup.fails_commits
    }

    /// Whether a thin device with this ID can be created.
    fn check_free(&mut self, name: &str, id: u32) -> Result<(), Errno> {
        let status = self.thin_pool_status(name);
        match id > MAX_THIN_ID {
            true => Err(Errno::EINVAL),
            false if self.thin_pool(name).devices.contains_key(&id) => Err(Errno::EEXIST),
            false if status.metadata.free() < METADATA_PER_DEVICE => Err(Errno::ENOSPC),
            false => Ok(()),
        }
    }

    fn create_thin_snapshot(&mut self, snapshot: &ThinSnapshot) -> Result<(), Errno> {
        let ThinSnapshot {
            pool, id, origin, ..
        } = snapshot;
        self.check_running_pool(pool)?;
        self.check_free(pool, *id)?;
        if self.takes_back(pool) {
            return Ok(());
        }
        let from = self.thin_pool(pool).devices.get(origin).copied();
        let ino = self.snapshot(from.ok_or(Errno::ENODATA)?)?;
        self.thin_pool(pool).devices.insert(*id, ino);
        self.commit(pool)
    }

    /// Each message commits the maps of all thin devices, and flushes their data before.
    fn commit(&mut self, name: &str) -> Result<(), Errno> {
        let devices = self.thin_pool(name).devices.clone();
        let mut devices = devices.into_values();
        devices.try_for_each(|ino| self.disk.sync_file(ino))
    }

    fn snapshot(&mut self, from: Ino) -> Result<Ino, Errno> {
        let origin = self.disk.file(from)?.live.clone();
        let active: Vec<_> = self.loops_on(from);
        let is_suspended = |number: &u32| {
            let mapping = self.loops.get(number).and_then(|dev| dev.mapped.as_ref());
            mapping.is_some_and(|mapping| mapping.is_suspended)
        };
        let waits = active.iter().all(is_suspended);
        if let Some(flaw) = origin.flaw {
            self.violation(format!("a snapshot of a thin device: {flaw}"));
        }
        let ino = self.disk.make_unnamed();
        let data = self.data_mut(ino)?;
        data.share(&origin);
        data.size = origin.size;
        data.flaw = origin.flaw.or((!waits).then_some(NOT_SUSPENDED));
        self.disk.changed(ino, 0)?;
        Ok(ino)
    }
}
