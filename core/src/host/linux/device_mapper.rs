//! The ioctls of the kernel's device mapper (linux/dm-ioctl.h), on `/dev/mapper/control`.
//!
//! Every call uses the one buffer that [`DeviceMapper::open`] or [`DeviceMapper::small`] allocates.
//! So the calls that take numbers and return numbers allocate nothing, and work while the disk that
//! the kernel would swap to or write back to is suspended.
//!
//! No call waits for udev: a created, resumed or removed device gets the flags by which the rules
//! of the distribution ignore it, and no cookie, so that there is no semaphore.

mod parse;

use std::fs::{File, OpenOptions};
use std::path::Path;
use std::sync::Arc;

use nix::errno::Errno;
use nix::sys::stat::{major, makedev, minor};

pub use self::parse::{Listed, Target};
use super::files::failed;
use super::sys;
use crate::host::Result;

/// The node of the device mapper. A kernel without device mapper does not have it.
pub const CONTROL: &str = "/dev/mapper/control";

/// The size of `struct dm_ioctl`. The data of a call follows it.
const HEADER: usize = 312;
/// The bytes of the buffer. Each call copies all of it to the kernel and back. The longest answer is
/// the list of all devices: of those with the longest names and UUIDs, this is enough for 13; the buffer
/// grows if there are more.
const BUFFER: usize = 4 << 10;
/// The words of the smallest buffer: the header, and the zeros behind it.
const SMALL: usize = HEADER / 8 + 8;
/// The largest buffer.
const BUFFER_MAX: usize = 16 << 20;
/// The offsets and sizes of the texts in `struct dm_ioctl`. Each text ends with a zero.
const NAME: usize = 48;
const UUID: usize = NAME + NAME_SIZE;
const NAME_SIZE: usize = 128;
const UUID_SIZE: usize = 129;

/// The version of the interface: the kernel compares the first number alone.
const VERSION: u32 = 4;
/// The second number of the first version whose list of devices has UUIDs (Linux 5.13).
const MINOR_WITH_UUIDS: u32 = 45;

const LIST_DEVICES: u8 = 2;
const DEV_CREATE: u8 = 3;
const DEV_REMOVE: u8 = 4;
const DEV_SUSPEND: u8 = 6;
const DEV_STATUS: u8 = 7;
const TABLE_LOAD: u8 = 9;
const TABLE_CLEAR: u8 = 10;
const TABLE_DEPS: u8 = 11;
const TABLE_STATUS: u8 = 12;
const TARGET_MSG: u8 = 14;

const READONLY: u32 = 1 << 0;
const SUSPEND: u32 = 1 << 1;
const PERSISTENT_DEV: u32 = 1 << 3;
const STATUS_TABLE: u32 = 1 << 4;
const ACTIVE_PRESENT: u32 = 1 << 5;
const INACTIVE_PRESENT: u32 = 1 << 6;
const BUFFER_FULL: u32 = 1 << 8;
const SKIP_LOCKFS: u32 = 1 << 10;
const NOFLUSH: u32 = 1 << 11;
const UUIDS: u32 = 1 << 14;
const DEFERRED_REMOVE: u32 = 1 << 17;

/// What the rules of udev read from the upper half of the event number: no rules for subsystems, for
/// disks and of other packages, and the event is that of the device's own change.
const UDEV: u32 = (0x02 | 0x04 | 0x08 | 0x40) << 16;

/// Which device a call is for.
#[derive(Clone, Copy, Debug)]
pub enum Selector<'a> {
    Name(&'a str),
    Uuid(&'a str),
    /// Its device number, as st_rdev has it.
    Number(u64),
}

/// How a device is suspended.
#[derive(Clone, Copy, Debug, Default)]
pub struct Suspend {
    /// Does not freeze the file system that is mounted from the device.
    pub skip_lockfs: bool,
    /// Does not wait for I/O that is on its way.
    pub no_flush: bool,
}

/// What the kernel answers to every call about one device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Info {
    /// The device number, as st_rdev has it.
    pub rdev: u64,
    pub open_count: i32,
    pub event: u32,
    pub suspended: bool,
    /// It has a table in use.
    pub has_table: bool,
    /// It has a table that the next resume switches to.
    pub has_inactive_table: bool,
    pub read_only: bool,
    pub deferred_remove: bool,
}

/// An open `/dev/mapper/control`, with the buffer for its calls.
#[derive(Debug)]
pub struct DeviceMapper {
    control: Arc<File>,
    /// Words, because the kernel's structure has the alignment of one.
    buffer: Vec<u64>,
}

/// The result of a call: an errno without its context, because making a text allocates.
type Call<T> = std::result::Result<T, Errno>;

impl DeviceMapper {
    /// ENOENT on a kernel without device mapper.
    pub fn open() -> Result<DeviceMapper> {
        let path = Path::new(CONTROL);
        let control = OpenOptions::new().read(true).write(true).open(path);
        Ok(DeviceMapper {
            control: Arc::new(control.map_err(failed("open", path))?),
            buffer: vec![0; BUFFER / 8],
        })
    }

    /// The same open file with a buffer of its own, in which only the calls have room that take
    /// numbers and return numbers. So each thread can have one, in memory that is locked.
    #[must_use]
    pub fn small(&self) -> DeviceMapper {
        DeviceMapper {
            control: self.control.clone(),
            buffer: vec![0; SMALL],
        }
    }

    /// The state of a device; `None` if there is none. Allocates nothing.
    pub fn info(&mut self, device: Selector<'_>) -> Call<Option<Info>> {
        self.prepare(device, 0, 0)?;
        match self.call(DEV_STATUS) {
            Ok(()) => Ok(Some(self.answer())),
            Err(Errno::ENXIO) => Ok(None),
            Err(errno) => Err(errno),
        }
    }

    /// The name of the device of the last call. Allocates nothing.
    pub fn name(&mut self) -> &str {
        parse::text(self.bytes(), NAME, NAME_SIZE)
    }

    /// The UUID of the device of the last call, which is empty if it has none. Allocates nothing.
    pub fn uuid(&mut self) -> &str {
        parse::text(self.bytes(), UUID, UUID_SIZE)
    }

    /// Creates a device without a table, with this number or the lowest free one. EBUSY if one with
    /// this name or this UUID exists, ENXIO if the number is in use.
    pub fn create(&mut self, name: &str, uuid: &str, number: Option<u64>) -> Call<Info> {
        let persistent = number.map_or(0, |_| PERSISTENT_DEV);
        self.prepare(Selector::Name(name), persistent, UDEV)?;
        if let Some(rdev) = number {
            self.put_number(rdev);
        }
        self.put_text(UUID, UUID_SIZE, uuid)?;
        self.call(DEV_CREATE)?;
        Ok(self.answer())
    }

    /// Loads a table of one or more targets, which the device uses from its next resume on.
    pub fn load(&mut self, device: Selector<'_>, table: &[Target], read_only: bool) -> Call<()> {
        self.prepare(device, if read_only { READONLY } else { 0 }, 0)?;
        let count = u32::try_from(table.len()).map_err(|_| Errno::E2BIG)?;
        self.put(20, count);
        let mut at = HEADER;
        for target in table {
            let spec = target.to_bytes();
            let room = self.bytes().get_mut(at..at + spec.len());
            room.ok_or(Errno::E2BIG)?.copy_from_slice(&spec);
            at += spec.len();
        }
        self.call(TABLE_LOAD)
    }

    /// Drops the table that the next resume would switch to.
    pub fn clear(&mut self, device: Selector<'_>) -> Call<Info> {
        self.prepare(device, 0, 0)?;
        self.call(TABLE_CLEAR)?;
        Ok(self.answer())
    }

    /// Makes new I/O wait, after the I/O that is on its way. EINTR if a signal came first: the
    /// device is not suspended then. Success if it is suspended already. Allocates nothing.
    pub fn suspend(&mut self, device: Selector<'_>, how: Suspend) -> Call<Info> {
        let skip_lockfs = if how.skip_lockfs { SKIP_LOCKFS } else { 0 };
        let no_flush = if how.no_flush { NOFLUSH } else { 0 };
        self.prepare(device, SUSPEND | skip_lockfs | no_flush, 0)?;
        self.call(DEV_SUSPEND)?;
        Ok(self.answer())
    }

    /// Switches to the table that was loaded, if there is one, and lets I/O continue. Does not freeze
    /// the file system that is mounted from the device: for a new table the kernel first suspends a
    /// device that runs, which would fail with EBUSY while another program has frozen the file
    /// system. Allocates nothing.
    pub fn resume(&mut self, device: Selector<'_>) -> Call<Info> {
        self.prepare(device, SKIP_LOCKFS, UDEV)?;
        self.call(DEV_SUSPEND)?;
        Ok(self.answer())
    }

    /// Removes a device; if it is open, when it is closed for the last time if `deferred` is set, and
    /// EBUSY otherwise.
    pub fn remove(&mut self, device: Selector<'_>, deferred: bool) -> Call<()> {
        self.prepare(device, if deferred { DEFERRED_REMOVE } else { 0 }, UDEV)?;
        self.call(DEV_REMOVE)
    }

    /// Sends a message to the only target of a device.
    pub fn message(&mut self, device: Selector<'_>, text: &str) -> Call<()> {
        self.prepare(device, 0, 0)?;
        // The sector for which the message is: that of the first target.
        let at = HEADER + size_of::<u64>();
        let room = self.bytes().get_mut(at..=at + text.len());
        let (last, room) = room
            .and_then(|room| room.split_last_mut())
            .ok_or(Errno::E2BIG)?;
        room.copy_from_slice(text.as_bytes());
        *last = 0;
        self.call(TARGET_MSG)
    }

    /// The state of a device and the table in use, which is empty if there is none; `None` if there is
    /// no such device. [`DeviceMapper::uuid`] returns its UUID afterwards.
    pub fn examine(&mut self, device: Selector<'_>) -> Call<Option<(Info, Vec<Target>)>> {
        match self.targets(device, STATUS_TABLE) {
            Ok(table) => Ok(Some((self.answer(), table))),
            Err(Errno::ENXIO) => Ok(None),
            Err(errno) => Err(errno),
        }
    }

    /// The table in use.
    pub fn table(&mut self, device: Selector<'_>) -> Call<Vec<Target>> {
        self.targets(device, STATUS_TABLE)
    }

    /// The numbers of the devices that the table in use refers to.
    pub fn dependencies(&mut self, device: Selector<'_>) -> Call<Vec<u64>> {
        self.with_room(|mapper| {
            mapper.prepare(device, 0, 0)?;
            mapper.call(TABLE_DEPS)
        })?;
        let list = self.bytes().get(HEADER..).unwrap_or_default();
        let count = parse::u32_at(list, 0).unwrap_or_default() as usize;
        let number = |n| parse::u64_at(list, 8 * (n + 1)).map(from_kernel);
        let numbers: Option<Vec<u64>> = (0..count).map(number).collect();
        numbers.ok_or(Errno::EBADMSG)
    }

    /// The status of each target. A pool does not commit its metadata for it, so it neither waits for
    /// a disk nor for a pool that is full.
    pub fn status(&mut self, device: Selector<'_>) -> Call<Vec<Target>> {
        self.targets(device, NOFLUSH)
    }

    fn targets(&mut self, device: Selector<'_>, flags: u32) -> Call<Vec<Target>> {
        self.with_room(|mapper| {
            mapper.prepare(device, flags, 0)?;
            mapper.call(TABLE_STATUS)
        })?;
        let count = self.get(20);
        parse::targets(self.bytes().get(HEADER..).unwrap_or_default(), count).ok_or(Errno::EBADMSG)
    }

    /// All devices.
    pub fn list(&mut self) -> Call<Vec<Listed>> {
        self.with_room(|mapper| {
            mapper.clear_header();
            mapper.put(28, UUIDS);
            mapper.call(LIST_DEVICES)
        })?;
        let has_uuids = self.get(4) >= MINOR_WITH_UUIDS;
        let list = self.bytes().get(HEADER..).unwrap_or_default();
        parse::devices(list, has_uuids).ok_or(Errno::EBADMSG)
    }

    /// Repeats a call with a larger buffer until the answer fits.
    fn with_room(&mut self, call: impl Fn(&mut DeviceMapper) -> Call<()>) -> Call<()> {
        loop {
            call(self)?;
            if self.get(28) & BUFFER_FULL == 0 {
                return Ok(());
            }
            if self.buffer.len() * 8 >= BUFFER_MAX {
                return Err(Errno::EOVERFLOW);
            }
            self.buffer.resize(self.buffer.len() * 2, 0);
        }
    }

    fn call(&mut self, command: u8) -> Call<()> {
        sys::device_mapper(self.control.as_ref(), command, &mut self.buffer)
    }

    fn clear_header(&mut self) {
        // The zeros behind the header end the list of devices if there are none.
        self.buffer[..SMALL].fill(0);
        self.put(0, VERSION);
        let size = (self.buffer.len() * 8) as u32;
        self.put(12, size);
        self.put(16, HEADER as u32);
    }

    fn prepare(&mut self, device: Selector<'_>, flags: u32, event: u32) -> Call<()> {
        self.clear_header();
        self.put(28, flags);
        self.put(32, event);
        match device {
            Selector::Name(name) => self.put_text(NAME, NAME_SIZE, name),
            Selector::Uuid(uuid) => self.put_text(UUID, UUID_SIZE, uuid),
            Selector::Number(rdev) => {
                self.put_number(rdev);
                Ok(())
            }
        }
    }

    fn put_number(&mut self, rdev: u64) {
        self.bytes()[40..48].copy_from_slice(&to_kernel(rdev).to_ne_bytes());
    }

    /// EINVAL for an empty text, which the kernel would take for none, and for one that is too long.
    fn put_text(&mut self, at: usize, size: usize, text: &str) -> Call<()> {
        if text.is_empty() || text.len() >= size || text.contains(['\0', '/']) {
            return Err(Errno::EINVAL);
        }
        self.bytes()[at..at + text.len()].copy_from_slice(text.as_bytes());
        Ok(())
    }

    fn answer(&mut self) -> Info {
        let flags = self.get(28);
        let is = |flag| flags & flag != 0;
        Info {
            rdev: from_kernel(parse::u64_at(self.bytes(), 40).unwrap_or_default()),
            open_count: self.get(24) as i32,
            event: self.get(32),
            suspended: is(SUSPEND),
            has_table: is(ACTIVE_PRESENT),
            has_inactive_table: is(INACTIVE_PRESENT),
            read_only: is(READONLY),
            deferred_remove: is(DEFERRED_REMOVE),
        }
    }

    fn bytes(&mut self) -> &mut [u8] {
        sys::bytes_of(&mut self.buffer)
    }

    fn put(&mut self, at: usize, value: u32) {
        self.bytes()[at..at + 4].copy_from_slice(&value.to_ne_bytes());
    }

    fn get(&mut self, at: usize) -> u32 {
        parse::u32_at(self.bytes(), at).unwrap_or_default()
    }
}

/// A device number in the kernel's own encoding (`huge_encode_dev`).
fn to_kernel(rdev: u64) -> u64 {
    let (major, minor) = (major(rdev), minor(rdev));
    minor & 0xff | major << 8 | (minor & !0xff) << 12
}

fn from_kernel(number: u64) -> u64 {
    makedev(number >> 8 & 0xfff, number & 0xff | number >> 12 & 0xfff00)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn device_numbers_have_the_encoding_of_the_kernel() {
        for (major, minor) in [(253, 0), (253, 255), (253, 256), (253, 0xfffff), (7, 3)] {
            let rdev = makedev(major, minor);
            assert_eq!(from_kernel(to_kernel(rdev)), rdev);
        }
        assert_eq!(to_kernel(makedev(253, 0x12345)), 0x1230_fd45);
    }
}
