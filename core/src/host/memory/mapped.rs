//! Simulated mapped devices, which show the thin devices of [`thin`](super::thin).

use std::collections::BTreeSet;
use std::path::Path;

use nix::errno::Errno;

use super::disk::Ino;
use super::loops::{Backing, LoopDev};
use super::machine::Machine;
use super::mounts::Shown;
use crate::error::HostCause;
use crate::host::mapper::{FILLING_SUFFIX, ThinPoolMode, UNKNOWN_THIN_ID, UUID_PREFIX};
use crate::host::{Device, FileId, MappedDevice, ThinTable, mapped_path};

/// The major number of mapped devices. The kernel chooses it when it starts.
pub(super) const MAPPER_MAJOR: u64 = 253;
/// Block devices are found by number: loop devices by their minor number, mapped devices by their
/// minor number plus this. A minor number has 20 bits.
const MAPPED: u32 = 1 << 20;
/// The minor number of the first mapped device. Smaller ones are thin pools.
const FIRST_MINOR: u32 = 64;

/// What a mapped device shows.
#[derive(Clone, Debug)]
pub(super) enum Table {
    Thin(ThinTable),
    /// Another block device, by its number.
    Linear {
        lower: u32,
        bytes: u64,
    },
}

impl Table {
    fn thin(&self) -> Option<&ThinTable> {
        match self {
            Table::Thin(table) => Some(table),
            Table::Linear { .. } => None,
        }
    }
}

/// What a mapped device has beyond a loop device.
#[derive(Clone, Debug, Default)]
pub(super) struct Mapping {
    uuid: String,
    pub(super) table: Option<Table>,
    /// The table that the next resume switches to, and whether it is read-only.
    pub(super) loaded: Option<(Table, bool)>,
    pub(super) is_suspended: bool,
    /// The session of the guard that has suspended it.
    session: Option<u64>,
}

/// The number of a block device; `None` if it is neither a loop device nor a mapped device.
pub(super) fn number_of(device: &Device) -> Option<u32> {
    let minor = nix::sys::stat::minor(device.rdev) as u32;
    match nix::sys::stat::major(device.rdev) {
        crate::host::LOOP_MAJOR => Some(minor),
        MAPPER_MAJOR => Some(MAPPED + minor),
        _ => None,
    }
}

impl Machine {
    /// The block device with a number.
    pub(super) fn device(&self, number: u32) -> Device {
        let mapping = self.loops.get(&number).and_then(|dev| dev.mapped.as_ref());
        match number.checked_sub(MAPPED) {
            None => Device::of_loop(number),
            Some(minor) => Device {
                path: match mapping {
                    Some(mapping) => mapped_path(&mapping.uuid),
                    None => format!("/dev/dm-{minor}").into(),
                },
                rdev: nix::sys::stat::makedev(MAPPER_MAJOR, u64::from(minor)),
            },
        }
    }

    /// The number of the mapped device with a UUID.
    pub(super) fn mapped(&self, uuid: &str) -> Option<u32> {
        let is_it = |dev: &LoopDev| dev.mapped.as_ref().is_some_and(|it| it.uuid == uuid);
        let mut all = self.loops.iter();
        all.find(|(_, dev)| is_it(dev)).map(|(number, _)| *number)
    }

    /// The same, if it has a table: the kernel registers no block device before.
    pub(super) fn registered(&self, uuid: &str) -> Option<u32> {
        let number = self.mapped(uuid)?;
        let mapping = self.loops.get(&number)?.mapped.as_ref()?;
        mapping.table.is_some().then_some(number)
    }

    /// The content of `dm/uuid` or `size` in /sys/dev/block/MAJOR:MINOR.
    pub(super) fn device_attribute(&self, path: &Path) -> Option<Vec<u8>> {
        let (number, attribute) = self.loops.keys().find_map(|number| {
            let rdev = self.device(*number).rdev;
            let (major, minor) = (nix::sys::stat::major(rdev), nix::sys::stat::minor(rdev));
            let folder = format!("/sys/dev/block/{major}:{minor}");
            Some((number, path.strip_prefix(folder).ok()?))
        })?;
        let device = self.loops.get(number)?;
        let value = match attribute.to_str()? {
            "size" => (device.bytes / 512).to_string(),
            "dm/uuid" => device.mapped.as_ref()?.uuid.clone(),
            _ => return None,
        };
        Some(format!("{value}\n").into_bytes())
    }

    /// The thin device that is reached by the path of a mapped device. Tests reach each thin device,
    /// also one that is not active, by the path /thin/POOL/ID.
    pub(super) fn thin_at(&self, path: &Path) -> Option<Ino> {
        if let Ok(below) = path.strip_prefix("/thin") {
            let (pool, id) = below.to_str()?.split_once('/')?;
            return self
                .thin_pools
                .get(pool)?
                .devices
                .get(&id.parse().ok()?)
                .copied();
        }
        let shows = |dev: &&LoopDev| {
            let mapping = dev.mapped.as_ref();
            mapping.is_some_and(|mapping| mapped_path(&mapping.uuid) == path)
        };
        self.loops.values().find(shows)?.backing.image()
    }

    pub(super) fn create_mapped(&mut self, uuid: &str) -> Result<(), Errno> {
        if self.mapped(uuid).is_some() {
            return Err(Errno::EBUSY);
        }
        let is_shown = |n: u32| self.mounts.iter().any(|on| on.shown == Shown::Node(n));
        let is_free = |n: &u32| !self.loops.contains_key(n) && !is_shown(*n);
        let number = (MAPPED + FIRST_MINOR..).find(is_free);
        let mapping = Mapping {
            uuid: uuid.into(),
            ..Mapping::default()
        };
        let device = LoopDev {
            mapped: Some(mapping),
            ..LoopDev::new(Backing::None, &mapped_path(uuid), 0)
        };
        self.loops.insert(number.ok_or(Errno::EBUSY)?, device);
        Ok(())
    }

    pub(super) fn load_table(
        &mut self,
        uuid: &str,
        table: &ThinTable,
        ro: bool,
    ) -> Result<(), HostCause> {
        let number = self.mapped(uuid).ok_or(Errno::ENXIO)?;
        self.check_running_pool(&table.pool)?;
        let ino = self.thin_pool(&table.pool).devices.get(&table.id).copied();
        let ino = ino.ok_or(Errno::ENODATA)?;
        let is_second = uuid.ends_with(FILLING_SUFFIX);
        if !is_second && self.loops_on(ino).iter().any(|other| *other != number) {
            self.violation(format!("{uuid} maps a thin device that is mapped already"));
        }
        let mapping = self.dev_mut(number)?.mapped.as_mut();
        mapping.ok_or(Errno::ENXIO)?.loaded = Some((Table::Thin(table.clone()), ro));
        Ok(())
    }

    pub(super) fn suspend(&mut self, number: u32, session: Option<u64>) {
        let mapping = self
            .loops
            .get_mut(&number)
            .and_then(|it| it.mapped.as_mut());
        if let Some(mapping) = mapping.filter(|mapping| !mapping.is_suspended) {
            (mapping.is_suspended, mapping.session) = (true, session);
        }
    }

    /// Resumes a device that a session of the guard has suspended; returns whether it has.
    pub(super) fn resume_of_session(&mut self, number: u32, session: u64) -> bool {
        let mapping = self
            .loops
            .get_mut(&number)
            .and_then(|it| it.mapped.as_mut());
        let Some(mapping) = mapping.filter(|it| it.session == Some(session)) else {
            return false;
        };
        (mapping.is_suspended, mapping.session) = (false, None);
        true
    }

    /// Checks that the guard may suspend a device: it is a mapped device of the driver, and neither
    /// suspended nor about to get another table.
    pub(super) fn check_resumed(&self, number: u32) -> Result<(), Errno> {
        let mapping = self.dev(number)?.mapped.as_ref();
        let mapping = mapping.filter(|it| it.uuid.starts_with(UUID_PREFIX));
        let mapping = mapping.ok_or(Errno::EPERM)?;
        match mapping.is_suspended || mapping.loaded.is_some() {
            true => Err(Errno::EBUSY),
            false => Ok(()),
        }
    }

    fn sessions_that_suspend(&self) -> impl Iterator<Item = u64> {
        let mapped = self.loops.values().filter_map(|dev| dev.mapped.as_ref());
        mapped.filter_map(|mapping| mapping.session)
    }

    /// Whether one of these sessions has suspended a device.
    pub(super) fn is_any_suspended_by(&self, sessions: &[u64]) -> bool {
        self.sessions_that_suspend()
            .any(|id| sessions.contains(&id))
    }

    /// Whether any other session than these has suspended a device.
    pub(super) fn is_any_suspended_by_others(&self, sessions: &[u64]) -> bool {
        self.sessions_that_suspend()
            .any(|id| !sessions.contains(&id))
    }

    /// The UUID of a mapped device.
    pub(super) fn uuid_of(&self, number: u32) -> Option<String> {
        let mapping = self.loops.get(&number)?.mapped.as_ref()?;
        Some(mapping.uuid.clone())
    }

    pub(super) fn resume_mapped(&mut self, uuid: &str) -> Result<(), HostCause> {
        let number = self.mapped(uuid).ok_or(Errno::ENXIO)?;
        let mapping = self.dev_mut(number)?.mapped.as_mut();
        let mapping = mapping.ok_or(Errno::ENXIO)?;
        if mapping.session.is_some() {
            self.violation(format!("{uuid} is resumed while the guard holds it"));
        }
        let mapping = self.dev_mut(number)?.mapped.as_mut();
        let mapping = mapping.ok_or(Errno::ENXIO)?;
        (mapping.is_suspended, mapping.session) = (false, None);
        let Some((table, read_only)) = mapping.loaded.take() else {
            return Ok(());
        };
        mapping.table = Some(table.clone());
        let (backing, bytes) = match table {
            Table::Thin(table) => (self.thin_backing(&table)?, table.bytes),
            Table::Linear { lower, bytes } => (Backing::Lower(lower), bytes),
        };
        let dev = self.dev_mut(number)?;
        dev.backing = backing;
        (dev.bytes, dev.read_only) = (bytes, read_only);
        // The kernel computes the limits of a device again from each table.
        dev.no_discard = false;
        Ok(())
    }

    fn thin_backing(&mut self, table: &ThinTable) -> Result<Backing, Errno> {
        let pool = self.thin_pool(&table.pool);
        let ino = *pool.devices.get(&table.id).ok_or(Errno::ENODATA)?;
        let id = thin_file_id(pool.minor, table.id);
        self.data_mut(ino)?.size = table.bytes;
        Ok(Backing::Thin(ino, id))
    }

    pub(super) fn clear_table(&mut self, uuid: &str) -> Result<(), Errno> {
        let number = self.mapped(uuid).ok_or(Errno::ENXIO)?;
        let mapping = self.dev_mut(number)?.mapped.as_mut();
        mapping.ok_or(Errno::ENXIO)?.loaded = None;
        Ok(())
    }

    pub(super) fn remove_mapped(&mut self, uuid: &str) {
        let Some(number) = self.mapped(uuid) else {
            return;
        };
        let is_open = self.openers_of(number) > 0;
        if let Some(dev) = self.loops.get_mut(&number).filter(|_| is_open) {
            dev.autoclear = true;
            return;
        }
        self.sync_loop(number);
        self.loops.remove(&number);
    }

    pub(super) fn mapped_devices(&self, pool: &str, prefix: &str) -> Vec<MappedDevice> {
        let all = self.loops.keys().filter_map(|number| {
            let found = self.mapped_device(*number)?;
            let table = found.table.as_ref().and_then(Table::thin).cloned();
            let wanted = match &table {
                Some(table) => table.pool == pool,
                None => found.table.is_none() && found.uuid.starts_with(prefix),
            };
            let has_failed = self.thin_pools.get(pool);
            let has_failed = has_failed.is_some_and(|it| it.setup.mode == ThinPoolMode::Failed);
            let id_of = |id| if has_failed { UNKNOWN_THIN_ID } else { id };
            let table = table.map(|table| ThinTable {
                id: id_of(table.id),
                ..table
            });
            wanted.then(|| found.with_table(table))
        });
        all.collect()
    }

    /// What is known of a mapped device, with its table of any kind.
    pub(super) fn mapped_device(&self, number: u32) -> Option<MappedDevice<Table>> {
        let dev = self.loops.get(&number)?;
        let mapping = dev.mapped.as_ref()?;
        Some(MappedDevice {
            device: self.device(number),
            uuid: mapping.uuid.clone(),
            table: mapping.table.clone(),
            read_only: dev.read_only,
            has_inactive_table: mapping.loaded.is_some(),
            suspended: mapping.is_suspended,
            deferred_remove: dev.autoclear,
        })
    }

    /// Whether writers of a device wait, because it is suspended.
    pub(super) fn is_suspended(&self, number: u32) -> bool {
        let mapping = self.loops.get(&number).and_then(|dev| dev.mapped.as_ref());
        mapping.is_some_and(|mapping| mapping.is_suspended)
    }

    /// The files of image files that are attached to loop devices.
    pub(super) fn looped_inodes(&self) -> BTreeSet<Ino> {
        let loops = self.loops.values().filter(|dev| dev.mapped.is_none());
        loops.filter_map(|dev| dev.backing.image()).collect()
    }
}

/// The identity of a thin device: the device number of its pool, and its ID.
fn thin_file_id(pool_minor: u32, id: u32) -> FileId {
    FileId {
        device: nix::sys::stat::makedev(MAPPER_MAJOR, u64::from(pool_minor)),
        inode: u64::from(id),
    }
}
