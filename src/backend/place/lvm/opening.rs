//! The steps of opening a pool of LVM. Each step accepts that it was done before a crash.

use std::path::Path;
use std::time::Duration;

use nix::errno::Errno;

use super::checks::{find_previous_use, foreign_id, group_problem, recovery_advice};
use super::header::{FoundHeader, HeaderState, PoolHeader};
use super::{
    HeaderDevice, OpenRecords, claim_header, folder, gone, mapped_device, newer, thin_pool, usable,
};
use crate::backend::mapped::{create_mapped, suspended_by_others};
use crate::backend::place::make::make_folders;
use crate::backend::place::{FoundMount, find_mount};
use crate::backend::records::{LOCK_FILE, write_lock};
use crate::backend::thin::{HEADER_ID, RECORDS_ID, TRANSACTION_ID, records_device};
use crate::error::{Error, ErrorContext, Result};
use crate::host::{
    Check, Device, DeviceHold, Effect, Host, Mount, MountSpec, Signature, ThinMessage,
    ThinPoolStatus, ThinTable, mapped_path,
};
use crate::model::size::{HumanBytes, MIB};
use crate::model::{FsType, HomeId, PoolDefinition, PoolId, ThinPoolName};

/// The least size of the device with the records: room for some 20,000 volumes and snapshots.
const MIN_RECORDS_BYTES: u64 = 256 * MIB;
/// The share of a pool that is the size of the device with the records.
const RECORDS_DIVISOR: u64 = 256;

/// No file on it is a program or a device node of this machine, no program reads access times, and
/// no block is given back.
const OPTIONS: [&str; 5] = ["nosuid", "nodev", "noexec", "noatime", "nodiscard"];

/// Whether a pool may be created.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CreatePolicy {
    /// The machine that opens the pool, which becomes the home of a new one.
    pub home: HomeId,
    /// A pool that was never used may be taken.
    pub init: bool,
    /// The node record has a pool there.
    pub is_known: bool,
}

/// Opens the pool of a definition: mounts its records, after it has completed what a crash has
/// interrupted. Creates the pool if there is none and `create` allows it. `None` if there is none.
/// Waits for `max_wait` while another process opens it.
///
/// # Errors
///
/// [`Error::Unreachable`] if the thin pool is not active, or is set up in a way that loses data;
/// [`Error::Refused`] if another program uses it or it belongs to another machine;
/// [`Error::Locked`] while another process opens it; [`Error::Damaged`] if the header or the records
/// are not what they were; a failure of the host. No error loses data or formats anything.
pub fn open(
    host: &dyn Host,
    pool: &PoolDefinition,
    create: CreatePolicy,
    max_wait: Duration,
) -> Result<Option<OpenRecords>> {
    let name = thin_pool(pool)?;
    let status = usable(host, pool, name)?;
    let opening = LvmOpener {
        host,
        pool,
        name,
        mapped: name.mapped(),
        status,
        create,
    };
    if !opening.claim_pool()? {
        return Ok(None);
    }
    if !opening.make_header_device()? {
        return Ok(None);
    }
    let device = claim_header(host, pool, opening.mapped, &status, max_wait)?;
    let opened = opening.open_records(&device);
    device.close();
    opened
}

struct LvmOpener<'a> {
    host: &'a dyn Host,
    pool: &'a PoolDefinition,
    name: &'a ThinPoolName,
    mapped: &'a str,
    status: ThinPoolStatus,
    create: CreatePolicy,
}

impl LvmOpener<'_> {
    fn perform(&self, effect: &Effect<'_>, doing: &str) -> Result<()> {
        self.host
            .perform(effect)
            .map(drop)
            .context(|| format!("{doing} of pool {}", self.pool.name))
    }

    fn send(&self, message: ThinMessage, doing: &str) -> Result<()> {
        let pool = self.mapped;
        self.perform(&Effect::ThinMessage { pool, message }, doing)
    }

    fn damaged(&self, problem: String) -> Error {
        Error::Damaged {
            path: self.name.to_string().into(),
            problem,
        }
    }

    fn busy(&self, holder: String) -> Error {
        Error::Busy {
            subject: format!("pool {}", self.pool.name),
            holder,
        }
    }

    fn refuse(&self, reason: String) -> Error {
        Error::refused(format!("pool {}", self.pool.name), reason)
    }

    fn may_create(&self) -> bool {
        self.create.init && !self.create.is_known
    }

    /// Makes LVM and other programs see that the pool is used. Returns whether it belongs to
    /// Slackwater.
    fn claim_pool(&self) -> Result<bool> {
        let previous_use = || find_previous_use(self.host, &self.status, self.mapped);
        match self.status.transaction_id {
            TRANSACTION_ID => return Ok(true),
            0 if self.create.is_known => match previous_use()? {
                None => return Ok(false),
                Some(_) => return Err(foreign_id(self.pool, self.name, 0, true)),
            },
            0 => {}
            found => {
                return Err(foreign_id(
                    self.pool,
                    self.name,
                    found,
                    self.create.is_known,
                ));
            }
        }
        if let Some(found) = previous_use()? {
            return Err(self.refuse(format!(
                "{} is in use: {found}; give a thin pool that was never used: lvcreate --type thin-pool --size SIZE --name NAME {} (if it was one of Slackwater before a repair: {})",
                self.name,
                self.name.group(),
                recovery_advice(self.name, 0)
            )));
        }
        if !self.may_create() {
            return Ok(false);
        }
        if let Some(problem) = group_problem(self.host, self.name)? {
            return Err(self.refuse(problem));
        }
        self.check_room()?;
        let message = ThinMessage::SetTransactionId {
            from: 0,
            to: TRANSACTION_ID,
        };
        self.send(message, "claim the thin pool")?;
        Ok(true)
    }

    fn records_bytes(&self) -> u64 {
        let share = self.status.data.total / RECORDS_DIVISOR;
        share.max(MIN_RECORDS_BYTES).next_multiple_of(MIB)
    }

    fn check_room(&self) -> Result<()> {
        let needed = self.records_bytes() + self.status.block_bytes;
        let free = self.status.data.free();
        match free >= needed {
            true => Ok(()),
            false => Err(self.refuse(format!(
                "{} has {} free, but its records need {}; run: lvextend --size +SIZE {}",
                self.name,
                HumanBytes(free),
                HumanBytes(needed),
                self.name
            ))),
        }
    }

    fn has_device(&self, id: u32) -> Result<bool> {
        let devices = self.host.thin_devices(self.mapped);
        let devices = devices.context(|| format!("list the thin devices of {}", self.name))?;
        if id == HEADER_ID && !devices.contains_key(&id) && !devices.is_empty() {
            return Err(self.damaged(
                "the thin device with its header is missing, but others exist; if lvconvert --repair has replaced its metadata, restore the metadata from before"
                    .into(),
            ));
        }
        Ok(devices.contains_key(&id))
    }

    /// Creates the thin device of the header, before any other. Returns whether it exists.
    fn make_header_device(&self) -> Result<bool> {
        if self.has_device(HEADER_ID)? {
            return Ok(true);
        }
        if !self.may_create() {
            return Ok(false);
        }
        let id = HEADER_ID;
        self.send(ThinMessage::CreateThin { id }, "create the header")?;
        Ok(true)
    }

    /// Reads the header, writes the first one if there is none, and mounts the records.
    fn open_records(&self, device: &HeaderDevice<'_>) -> Result<Option<OpenRecords>> {
        let doing = || format!("read the header of pool {}", self.pool.name);
        let header = match device.read().context(doing)? {
            FoundHeader::Header(header) => header,
            FoundHeader::Newer(version) => return Err(newer(self.name, version)),
            FoundHeader::Incomplete if self.has_device(RECORDS_ID)? => {
                return Err(self.damaged(
                    "its header cannot be read, but its records exist; they are not touched".into(),
                ));
            }
            FoundHeader::Incomplete if self.may_create() => {
                let header = self.new_header();
                let written = device.write(&header);
                written.context(|| format!("write the header of pool {}", self.pool.name))?;
                header
            }
            FoundHeader::Incomplete => return Ok(None),
        };
        if header.home != self.create.home {
            return Err(self.refuse(format!(
                "it belongs to another machine (its home is {}, but the home of this machine is {}); if it is meant to stay here: slackwater pool adopt {}",
                header.home,
                self.create.home,
                self.pool.plainly()
            )));
        }
        let (header, records) = match header.state {
            HeaderState::Claimed => self.complete(device, header)?,
            HeaderState::Ready => {
                let records = self.attach(&header)?;
                self.unmount_dead_records(&records.device, &folder(header.id))?;
                self.check_records(&header, &records.device)?;
                (header, records)
            }
        };
        let folder = folder(header.id);
        self.mount(&records.device, &folder)?;
        Ok(Some(OpenRecords { folder, header }))
    }

    fn new_header(&self) -> PoolHeader {
        PoolHeader {
            state: HeaderState::Claimed,
            written: 0,
            id: PoolId(self.host.random_uuid()),
            home: self.create.home,
            fs: self.host.random_uuid(),
            records_bytes: self.records_bytes(),
        }
    }

    /// Allocates all blocks of the records and creates their file system, which has never been
    /// mounted. The header becomes `ready` afterwards.
    fn complete(
        &self,
        device: &HeaderDevice<'_>,
        header: PoolHeader,
    ) -> Result<(PoolHeader, DeviceHold)> {
        if !self.has_device(RECORDS_ID)? {
            let id = RECORDS_ID;
            self.send(ThinMessage::CreateThin { id }, "create the records")?;
        }
        let records = self.attach(&header)?;
        let claimed = self.host.is_claimed(&records.device);
        if claimed.context(|| format!("examine {}", records.device.path.display()))? {
            let path = records.device.path.display();
            return Err(self.busy(format!("{path} is in use")));
        }
        self.allocate(&records.device, header.records_bytes)?;
        let format = Effect::Format {
            device: &records.device,
            fs: FsType::Ext4,
            uuid: header.fs,
            options: &[],
            keep_blocks: true,
        };
        self.perform(&format, "format the records")?;
        let ready = PoolHeader {
            state: HeaderState::Ready,
            written: header.written + 1,
            ..header
        };
        let written = device.write(&ready);
        written.context(|| format!("write the header of pool {}", self.pool.name))?;
        Ok((ready, records))
    }

    /// Allocates all blocks of the records, which takes minutes on a large pool on a slow disk. They
    /// are written in order, so those that an earlier attempt has allocated are the first ones. If
    /// they are not, all are written again.
    fn allocate(&self, device: &Device, bytes: u64) -> Result<()> {
        for is_again in [false, true] {
            let devices = self.host.thin_devices(self.mapped);
            let devices = devices.context(|| format!("list the thin devices of {}", self.name))?;
            let allocated = devices.get(&RECORDS_ID).copied().unwrap_or(0);
            if allocated >= bytes {
                return Ok(());
            }
            let from = if is_again { 0 } else { allocated };
            tracing::info!(pool = %self.pool.name, bytes, from, "allocating the records of a new pool");
            let zeros = Effect::FillWithZeros { device, from };
            self.perform(&zeros, "allocate the records")?;
        }
        Ok(())
    }

    /// The device with the records, which stays until `pool release`. It never gives blocks back.
    fn attach(&self, header: &PoolHeader) -> Result<DeviceHold> {
        let uuid = &records_device(header.id);
        let doing = || format!("attach the records of pool {}", self.pool.name);
        let table = ThinTable {
            pool: self.mapped.to_string(),
            id: RECORDS_ID,
            bytes: header.records_bytes,
        };
        let found = mapped_device(self.host, self.mapped, uuid).context(doing)?;
        match found {
            Some(found) if found.suspended => {
                return Err(self.busy(suspended_by_others(uuid)));
            }
            Some(found) if found.table.as_ref() == Some(&table) => {
                if found.has_inactive_table {
                    self.perform(&Effect::ClearTable { uuid }, "attach the records")?;
                }
            }
            Some(found) if found.table.is_some() => {
                return Err(self.busy(format!(
                    "{path} has another table than this driver gives it; if no program uses it: dmsetup remove {path}",
                    path = mapped_path(uuid).display()
                )));
            }
            found => {
                if found.is_some() {
                    self.perform(&Effect::RemoveMapped { uuid }, "attach the records")?;
                }
                self.show(uuid, &table)?;
            }
        }
        let hold = self.host.hold_mapped(uuid).context(doing)?;
        let hold = hold.ok_or_else(|| gone(uuid)).context(doing)?;
        let effect = Effect::DisableDiscard {
            device: &hold.device,
        };
        self.perform(&effect, "disable discard on the records")?;
        Ok(hold)
    }

    fn show(&self, uuid: &str, table: &ThinTable) -> Result<()> {
        create_mapped(self.host, uuid, table)
            .context(|| format!("attach the records of pool {}", self.pool.name))
    }

    fn check_records(&self, header: &PoolHeader, device: &Device) -> Result<()> {
        let doing = || format!("probe the records of pool {}", self.pool.name);
        match self.host.signature(device).context(doing)? {
            Signature::Fs { name, uuid, .. }
                if name == FsType::Ext4.name() && uuid == header.fs.to_string() => {}
            found => {
                return Err(self.damaged(format!(
                    "the ext4 {} was created for its records, but {found:?} was found; it is never formatted again, so repair or restore it",
                    header.fs
                )));
            }
        }
        let unclean = self.host.is_unclean(device, FsType::Ext4).context(doing)?;
        if unclean && !self.host.is_claimed(device).context(doing)? {
            let fs = FsType::Ext4;
            let how = Check::Preen;
            self.perform(&Effect::CheckFs { device, fs, how }, "check the records")?;
        }
        Ok(())
    }

    /// Unmounts the records if their file system is dead: the kernel makes it read-only after an error
    /// of the disk. When it is mounted again, its journal is replayed.
    fn unmount_dead_records(&self, device: &Device, target: &Path) -> Result<()> {
        let table = self.host.mounts();
        let table = table.context(|| "read the mount table".into())?;
        let shows = |mount: &Mount| mount.mount_point == target && mount.device == device.rdev;
        if !table.iter().any(shows) {
            return Ok(());
        }
        let answer = match self.host.stat(&target.join(LOCK_FILE)) {
            // The pool was not created yet.
            Ok(None) => return Ok(()),
            Ok(Some(_)) => write_lock(self.host, target),
            Err(error) => Err(error),
        };
        match answer {
            Err(error) if error.is_lost_disk() => {}
            Ok(()) | Err(_) => return Ok(()),
        }
        match self.host.perform(&Effect::Unmount { target }) {
            Err(error) if error.code() == Some(Errno::EBUSY) => Err(self.busy(
                "the file system of its records is dead, and operations on it have not ended yet"
                    .into(),
            )),
            done => done
                .map(drop)
                .context(|| format!("unmount {}", target.display())),
        }
    }

    /// Mounts the records unless they are mounted.
    fn mount(&self, device: &Device, target: &Path) -> Result<()> {
        make_folders(self.host, target)?;
        match find_mount(self.host, device, target)? {
            Some(FoundMount::Own) => return Ok(()),
            Some(FoundMount::Foreign(holder)) => return Err(self.busy(holder)),
            None => {}
        }
        let options = OPTIONS.map(str::to_string);
        let spec = MountSpec {
            device,
            target,
            fs: FsType::Ext4,
            options: &options,
            read_only: false,
        };
        self.perform(&Effect::Mount(spec), "mount the records")
    }
}
