//! Loop devices: LOOP_CONFIGURE, LOOP_CLR_FD, autoclear, and the content of a device.

use std::path::{Path, PathBuf};

use nix::errno::Errno;

use super::content::{Content, ContentKind};
use super::disk::Ino;
use super::machine::{Machine, Opened, Opener, Process};
use super::mapped::Mapping;
use super::mounts::Shown;
use crate::error::{HostCause, HostError};
use crate::host::{Device, FileId, LoopDevice, LoopSpec, LoopStatus};
use crate::model::FsType;
use uuid::Uuid;

/// The backing file of a loop device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Backing {
    /// A file of the simulated disk.
    Image(Ino),
    /// A file of a foreign process.
    Foreign(FileId),
    /// A thin device, with its identity.
    Thin(Ino, FileId),
    /// Another block device, by its number.
    Lower(u32),
    /// A mapped device without a table.
    None,
}

impl Backing {
    pub(super) fn image(self) -> Option<Ino> {
        match self {
            Backing::Image(ino) | Backing::Thin(ino, _) => Some(ino),
            Backing::Foreign(_) | Backing::Lower(_) | Backing::None => None,
        }
    }

    pub(super) fn id(self) -> FileId {
        match self {
            Backing::Image(ino) => Machine::image_id(ino),
            Backing::Foreign(id) | Backing::Thin(_, id) => id,
            Backing::Lower(_) | Backing::None => FileId {
                device: 0,
                inode: 0,
            },
        }
    }
}

#[derive(Clone, Debug)]
pub(super) struct LoopDev {
    pub(super) backing: Backing,
    /// The path of its image when it was attached.
    pub(super) name: PathBuf,
    pub(super) bytes: u64,
    pub(super) offset: u64,
    pub(super) read_only: bool,
    pub(super) autoclear: bool,
    pub(super) direct_io: bool,
    pub(super) partscan: bool,
    /// discard_max_bytes is 0.
    pub(super) no_discard: bool,
    /// Attached by a foreign process.
    pub(super) is_foreign: bool,
    /// Its image is on an earlier mount of a file system that has died and was mounted again since.
    pub(super) dead: bool,
    /// It is a mapped device, not a loop device.
    pub(super) mapped: Option<Mapping>,
}

impl LoopDev {
    /// A writable device of the driver.
    pub(super) fn new(backing: Backing, name: &Path, bytes: u64) -> LoopDev {
        LoopDev {
            backing,
            name: name.into(),
            bytes,
            offset: 0,
            read_only: false,
            autoclear: false,
            direct_io: true,
            partscan: false,
            no_discard: false,
            is_foreign: false,
            dead: false,
            mapped: None,
        }
    }

    fn status(&self, number: u32) -> LoopStatus {
        LoopStatus {
            number,
            backing: self.backing.id(),
            offset: self.offset,
            size_limit: 0,
            read_only: self.read_only,
            autoclear: self.autoclear,
            direct_io: self.direct_io,
            partscan: self.partscan,
        }
    }
}

impl Machine {
    pub(super) fn loop_devices(&self, may_be: &dyn Fn(&Path) -> bool) -> Vec<LoopDevice> {
        let loops = self.loops.iter().filter(|(_, dev)| dev.mapped.is_none());
        let wanted = loops.filter(|(_, dev)| may_be(&dev.name));
        let device = |(number, dev): (&u32, &LoopDev)| LoopDevice {
            number: *number,
            image: dev.name.clone(),
            status: match self.ask_loop(*number) {
                Ok(()) => Ok(dev.status(*number)),
                Err(cause) => Err(HostError {
                    action: "ask for the image of",
                    subject: Device::of_loop(*number).path,
                    cause,
                }),
            },
        };
        wanted.map(device).collect()
    }

    /// The number of openers of a loop device.
    pub(super) fn openers_of(&self, number: u32) -> usize {
        let open = |opener: &&Opener| matches!(opener.what, Opened::Loop(n) | Opened::Claimed(n) if n == number);
        self.openers.values().filter(open).count()
            + usize::from(self.supers.contains_key(&number))
            + self.tables_above(number)
    }

    /// Opens a loop device; returns the key with which it is closed.
    pub(super) fn open_loop(&mut self, process: Option<Process>, number: u32) -> u64 {
        self.open(process, Opened::Loop(number))
    }

    /// Opens a device exclusively.
    pub(super) fn claim(&mut self, process: Process, number: u32) -> Result<u64, Errno> {
        match self.is_claimed(number) {
            true => Err(Errno::EBUSY),
            false => Ok(self.open(Some(process), Opened::Claimed(number))),
        }
    }

    /// Whether a file system, a process or a mapped device has claimed a device.
    pub(super) fn is_claimed(&self, number: u32) -> bool {
        self.is_claimed_beside_tables(number) || self.tables_above(number) > 0
    }

    /// Whether a file system or a process has claimed a device. The kernel lets all tables of mapped
    /// devices claim it together.
    pub(super) fn is_claimed_beside_tables(&self, number: u32) -> bool {
        let claims =
            |opener: &Opener| matches!(opener.what, Opened::Claimed(other) if other == number);
        self.supers.contains_key(&number) || self.openers.values().any(claims)
    }

    pub(super) fn open(&mut self, process: Option<Process>, what: Opened) -> u64 {
        let key = self.fresh();
        self.openers.insert(key, Opener { process, what });
        key
    }

    /// Attaches the device at the lowest number that is free and that no mount still shows.
    pub(super) fn add_loop(&mut self, dev: LoopDev) -> u32 {
        let is_shown = |n: u32| self.mounts.iter().any(|on| on.shown == Shown::Node(n));
        let is_free = |n: &u32| !self.loops.contains_key(n) && !is_shown(*n);
        let number = (0..).find(is_free).unwrap_or(0);
        self.loops.insert(number, dev);
        number
    }

    pub(super) fn attach(
        &mut self,
        process: Process,
        spec: &LoopSpec<'_>,
    ) -> Result<(u32, u64), HostCause> {
        let ino = self.find(process, spec.image)?.ok_or(Errno::ENOENT)?;
        if Machine::image_id(ino) != spec.backing {
            return Err(HostCause::Unexpected(
                "the image is another file than it was".into(),
            ));
        }
        let data = &self.disk.file(ino)?.live;
        if !matches!(spec.block_size, 512 | 1024 | 2048 | 4096)
            || spec.block_size < self.options.sector
        {
            return Err(Errno::EINVAL.into());
        }
        let bytes = data.size - data.size % u64::from(spec.block_size);
        let others = self.loops_on(ino);
        if let Some(other) = others.first() {
            if others
                .iter()
                .all(|n| self.loops.get(n).is_some_and(|dev| !dev.is_foreign))
            {
                self.violation(format!(
                    "a second loop device on {}, beside loop{other}",
                    spec.image.display()
                ));
            }
            return Err(Errno::EBUSY.into());
        }
        if let Some(flaw) = data.flaw {
            self.violation(format!("{} is attached: {flaw}", spec.image.display()));
        }
        let number = self.add_loop(LoopDev {
            read_only: spec.read_only,
            autoclear: spec.autoclear,
            ..LoopDev::new(Backing::Image(ino), spec.image, bytes)
        });
        Ok((number, self.open_loop(Some(process), number)))
    }

    /// If there are other openers, the device is detached when the last of them closes it. A device
    /// with another backing file is left alone, because the one to be detached is already gone.
    pub(super) fn detach(&mut self, number: u32, backing: FileId) -> Result<(), HostCause> {
        self.ask_loop(number)?;
        self.clear(number, backing);
        Ok(())
    }

    fn clear(&mut self, number: u32, backing: FileId) {
        let open = self.openers_of(number) > 0;
        match self.loops.get_mut(&number) {
            Some(dev) if dev.backing.id() == backing && open => dev.autoclear = true,
            Some(dev) if dev.backing.id() == backing => {
                self.sync_loop(number);
                self.loops.remove(&number);
            }
            Some(_) | None => {}
        }
    }

    pub(super) fn detach_dead(&mut self, number: u32, name: &Path) -> Result<(), HostCause> {
        let found = self
            .loops
            .get(&number)
            .filter(|dev| dev.name.ends_with(name));
        if let Some(backing) = found.map(|dev| dev.backing.id())
            && let Err(HostCause::Errno(Errno::EIO)) = self.ask_loop(number)
        {
            self.clear(number, backing);
        }
        Ok(())
    }

    pub(super) fn resize_loop(&mut self, number: u32) -> Result<(), HostCause> {
        let ino = self.image_of(number)?;
        let size = self.disk.file(ino)?.live.size;
        self.dev_mut(number)?.bytes = size;
        Ok(())
    }

    pub(super) fn dev(&self, number: u32) -> Result<&LoopDev, Errno> {
        self.loops.get(&number).ok_or(Errno::ENXIO)
    }

    pub(super) fn dev_mut(&mut self, number: u32) -> Result<&mut LoopDev, Errno> {
        self.loops.get_mut(&number).ok_or(Errno::ENXIO)
    }

    /// The image of a loop device.
    pub(super) fn image_of(&self, number: u32) -> Result<Ino, Errno> {
        if let Err(HostCause::Errno(errno)) = self.ask_loop(number) {
            return Err(errno);
        }
        match self.dev(number)?.backing {
            Backing::Lower(lower) => self.image_of(lower),
            backing => backing.image().ok_or(Errno::ENXIO),
        }
    }

    /// The identity of the image that a device shows.
    pub(super) fn image_id_of(&self, number: u32) -> Result<FileId, Errno> {
        match self.dev(number)?.backing {
            Backing::Lower(lower) => self.image_id_of(lower),
            backing => Ok(backing.id()),
        }
    }

    pub(super) fn content(&self, number: u32) -> Result<&Content, Errno> {
        Ok(&self.disk.file(self.image_of(number)?)?.live.content)
    }

    pub(super) fn content_mut(&mut self, number: u32) -> Result<&mut Content, Errno> {
        let ino = self.image_of(number)?;
        Ok(&mut self.data_mut(ino)?.content)
    }

    /// fsync of the device, which reaches its image.
    pub(super) fn sync_loop(&mut self, number: u32) {
        if let Ok(ino) = self.image_of(number)
            && self.disk.sync_file(ino).is_err()
        {
            self.violation(format!("loop{number} stands on a directory"));
        }
    }

    /// Simulates mkfs: refuses small and claimed devices, discards unless `keep_blocks` is set, and
    /// syncs at its end.
    pub(super) fn format(
        &mut self,
        number: u32,
        fs: FsType,
        uuid: Uuid,
        keep_blocks: bool,
    ) -> Result<(), HostCause> {
        let refuse = |stderr: String| HostCause::Tool {
            program: format!("mkfs.{fs}"),
            status: "exit status: 1".into(),
            stderr,
        };
        let dev = self.dev(number)?.clone();
        let ino = self.image_of(number)?;
        if self.supers.contains_key(&number) {
            self.violation(format!("mkfs of loop{number}, which is mounted"));
            return Err(refuse(format!("/dev/loop{number} is mounted")));
        }
        if dev.read_only {
            return Err(refuse(format!("/dev/loop{number} is read-only")));
        }
        if dev.bytes < fs.minimum_bytes() {
            return Err(refuse(format!("{} bytes are too few for {fs}", dev.bytes)));
        }
        let content = &self.content(number)?;
        if content.used_before || matches!(content.kind, ContentKind::Raw(_)) {
            self.violation(format!(
                "mkfs of loop{number}: its image was in use before, its data is lost"
            ));
        }
        let fresh = Content::fresh(fs, uuid, dev.bytes);
        let (used, limit) = self.room_of(ino);
        let data = self.data_mut(ino)?;
        let before = data.allocated();
        if !keep_blocks && !dev.no_discard {
            data.reserved = 0;
        }
        if fresh.used() > limit - used + before {
            return Err(refuse("No space left on device".into()));
        }
        data.content = fresh;
        self.clear_tree(ino)?;
        self.disk.changed(ino, usize::MAX)?;
        self.sync_loop(number);
        Ok(())
    }
}

impl From<Errno> for HostCause {
    fn from(errno: Errno) -> HostCause {
        HostCause::Errno(errno)
    }
}
