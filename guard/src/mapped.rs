//! A mapped device that is suspended for a session: the same for the guard, which suspends and
//! resumes it, and for the driver, which resumes it if the guard cannot.
//!
//! The device is held open by a descriptor. An open device is not removed, so its number always
//! names this device. All calls but those that create a value work without allocating, because they
//! happen while file systems are frozen and devices are suspended.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use nix::errno::Errno;
use nix::sys::stat::{major, minor};

use slackwater_core::host::linux::device_mapper::{DeviceMapper, Info, Selector, Suspend};
use slackwater_core::host::mapper::UUID_PREFIX;

type Result<T> = std::result::Result<T, Errno>;

/// The device mapper of this machine, opened when it is first found.
#[derive(Debug, Default)]
pub(super) struct Mapper(OnceLock<DeviceMapper>);

impl Mapper {
    /// Opens the device mapper if that has not been done. EOPNOTSUPP if there is none.
    pub(super) fn open(&self) -> Result<&DeviceMapper> {
        if self.0.get().is_none() {
            let opened = DeviceMapper::open().map_err(|error| match error.code() {
                Some(Errno::ENOENT | Errno::ENODEV | Errno::ENXIO) | None => Errno::EOPNOTSUPP,
                Some(errno) => errno,
            })?;
            // Its large buffer is for lists, which are not needed here, and would be locked in memory.
            let _ = self.0.set(opened.small());
        }
        self.0.get().ok_or(Errno::EOPNOTSUPP)
    }
}

/// A device of a session.
#[derive(Debug)]
pub(super) struct Mapped {
    device: OwnedFd,
    rdev: u64,
    mapper: Mutex<DeviceMapper>,
    /// Its statistics, if they can be read: `/sys/dev/block/MAJOR:MINOR/stat`.
    statistics: Option<File>,
}

/// A device that was suspended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Suspended {
    /// How many writes it had completed.
    writes: Option<u64>,
}

impl AsFd for Mapped {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.device.as_fd()
    }
}

impl Mapped {
    /// Takes an open device. ENOTBLK if it is not a block device.
    pub(super) fn new(mapper: &DeviceMapper, device: OwnedFd) -> Result<Mapped> {
        let file = File::from(device);
        let found = file.metadata().map_err(|_| Errno::EBADF)?;
        if !found.file_type().is_block_device() {
            return Err(Errno::ENOTBLK);
        }
        let rdev = found.rdev();
        let path = format!("/sys/dev/block/{}:{}/stat", major(rdev), minor(rdev));
        let mapped = Mapped {
            device: file.into(),
            rdev,
            mapper: Mutex::new(mapper.small()),
            statistics: File::open(path).ok(),
        };
        // The kernel allocates its buffer at the first read, and keeps it while the file is open.
        mapped.writes();
        Ok(mapped)
    }

    /// Its number, as st_rdev has it.
    pub(super) fn rdev(&self) -> u64 {
        self.rdev
    }

    fn mapper(&self) -> MutexGuard<'_, DeviceMapper> {
        self.mapper.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn selector(&self) -> Selector<'static> {
        Selector::Number(self.rdev)
    }

    fn info(&self) -> Result<Info> {
        self.mapper().info(self.selector())?.ok_or(Errno::ENXIO)
    }

    /// Checks that the device is one of the driver, and that no other program has suspended it or
    /// loaded a table that a resume would switch to. Returns its UUID. EPERM and EBUSY if not.
    pub(super) fn check(&self) -> Result<String> {
        let mut mapper = self.mapper();
        let info = mapper.info(self.selector())?.ok_or(Errno::EPERM)?;
        let uuid = mapper.uuid().to_string();
        match uuid.starts_with(UUID_PREFIX) {
            false => Err(Errno::EPERM),
            true if is_touched(info) => Err(Errno::EBUSY),
            true => Ok(uuid),
        }
    }

    /// Makes new I/O wait, after the I/O that is on its way; the file system on it is not frozen
    /// again. EBUSY if another program has suspended it, or has loaded a table. EINTR if it was
    /// interrupted: it is not suspended then.
    pub(super) fn suspend(&self) -> Result<Suspended> {
        // The kernel reports success if the device is suspended already.
        if is_touched(self.info()?) {
            return Err(Errno::EBUSY);
        }
        let how = Suspend {
            skip_lockfs: true,
            no_flush: false,
        };
        self.mapper().suspend(self.selector(), how)?;
        Ok(Suspended {
            writes: self.writes(),
        })
    }

    /// Whether it is suspended, by whatever program.
    pub(super) fn is_suspended(&self) -> Result<bool> {
        Ok(self.info()?.suspended)
    }

    /// Whether no other program has resumed it since it was suspended.
    pub(super) fn is_still(&self, since: Suspended) -> bool {
        let writes = self.writes();
        // Where the kernel does not count, the numbers are equal.
        self.is_suspended() == Ok(true) && (writes.is_none() || writes == since.writes)
    }

    /// Lets its I/O continue, if it is suspended. EAGAIN if it is suspended afterwards.
    pub(super) fn resume(&self) -> Result<()> {
        resume(&mut self.mapper(), self.selector())
    }

    /// Like [`Mapped::resume`], but fails with EBUSY instead of waiting for another thread that is
    /// resuming it.
    pub(super) fn try_resume(&self) -> Result<()> {
        match self.mapper.try_lock() {
            Ok(mut mapper) => resume(&mut mapper, self.selector()),
            Err(_) => Err(Errno::EBUSY),
        }
    }

    /// How many writes it has completed, if the kernel counts them: the fifth number. It does not
    /// change while the device is suspended.
    fn writes(&self) -> Option<u64> {
        let mut text = [0; 512];
        let length = self.statistics.as_ref()?.read_at(&mut text, 0).ok()?;
        let text = str::from_utf8(text.get(..length)?).ok()?;
        text.split_ascii_whitespace().nth(4)?.parse().ok()
    }
}

/// Whether another program is about to change the device.
fn is_touched(info: Info) -> bool {
    info.suspended || info.has_inactive_table
}

/// Resumes a device that a session has suspended. A table that another program has loaded in the
/// meantime is dropped, because the resume would switch to it. EAGAIN if the device is suspended
/// afterwards.
pub(super) fn resume(mapper: &mut DeviceMapper, device: Selector<'_>) -> Result<()> {
    let Some(info) = mapper.info(device)? else {
        return Ok(());
    };
    if !info.suspended {
        return Ok(());
    }
    if info.has_inactive_table {
        mapper.clear(device)?;
    }
    mapper.resume(device)?;
    match mapper.info(device)? {
        Some(info) if info.suspended => Err(Errno::EAGAIN),
        Some(_) | None => Ok(()),
    }
}
