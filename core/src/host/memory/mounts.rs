//! The simulated mount table, as /proc/self/mountinfo of Linux would show it.

use std::path::Path;

use nix::errno::Errno;

use super::content::Health;
use super::machine::{Machine, Opened};
use super::mapped::number_of;
use super::targets::callers_device;
use crate::error::HostCause;
use crate::host::{Device, FileKind, Mount, MountSpec};
use crate::model::{FsType, mount_option};

/// What a mount shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Shown {
    /// A file system on a loop device.
    Fs(u32),
    /// The node of a loop device.
    Node(u32),
    /// A mount that exists since boot.
    Base,
}

impl Shown {
    pub(super) fn fs(self) -> Option<u32> {
        match self {
            Shown::Fs(number) => Some(number),
            Shown::Node(_) | Shown::Base => None,
        }
    }
}

#[derive(Clone, Debug)]
pub(super) struct Mounted {
    pub(super) shown: Shown,
    pub(super) line: Mount,
}

/// The superblock of a mounted file system, shared by all its mounts.
#[derive(Clone, Debug)]
pub(super) struct Super {
    pub(super) fs: FsType,
    /// st_dev of its files: an anonymous number on btrfs.
    pub(super) device: u64,
    pub(super) read_only: bool,
    pub(super) options: String,
    /// Tokens that users have written and that were not written back yet: they are not in the
    /// image.
    pub(super) dirty: Vec<u64>,
}

/// st_dev of /dev.
pub(super) fn dev_device() -> u64 {
    nix::sys::stat::makedev(0, 6)
}

/// Options that belong to a single mount; all others belong to the file system.
const OF_A_MOUNT: [&str; 9] = [
    "nosuid",
    "nodev",
    "noexec",
    "noatime",
    "nodiratime",
    "relatime",
    "strictatime",
    "ro",
    "rw",
];

impl Machine {
    /// The root, /dev and the pool's disk.
    pub(super) fn mount_base(&mut self) {
        let base = [
            (callers_device(), "/", "ext4", "/dev/nvme0n1p1"),
            (dev_device(), "/dev", "devtmpfs", "udev"),
            (
                super::machine::pool_device(),
                super::POOLS,
                "xfs",
                "/dev/nvme0n1p2",
            ),
        ];
        for (device, point, fs_name, source) in base {
            let line = Mount {
                id: 0,
                parent: 0,
                device,
                disk: None,
                root: "/".into(),
                mount_point: point.into(),
                options: vec!["rw".into(), "relatime".into()],
                fs_name: fs_name.into(),
                source: source.into(),
                super_options: "rw".into(),
                node: None,
            };
            self.add_mount(Shown::Base, line);
        }
    }

    fn add_mount(&mut self, shown: Shown, mut line: Mount) {
        line.id = self.fresh() as u32;
        let covers = |mounted: &&Mounted| line.mount_point.starts_with(&mounted.line.mount_point);
        let depth = |mounted: &&Mounted| mounted.line.mount_point.components().count();
        // Of equally deep mounts, the last is on top.
        line.parent = self
            .mounts
            .iter()
            .filter(covers)
            .max_by_key(depth)
            .map_or(1, |parent| parent.line.id);
        self.mounts.push(Mounted { shown, line });
    }

    /// The topmost mount at a path.
    pub(super) fn top(&self, path: &Path) -> Option<&Mounted> {
        self.mounts
            .iter()
            .rev()
            .find(|mounted| mounted.line.mount_point == path)
    }

    pub(super) fn mount(&mut self, spec: &MountSpec<'_>) -> Result<(), HostCause> {
        self.allow_mount(spec.target)?;
        match self.kind_of_mount_point(spec.target) {
            None => return Err(Errno::ENOENT.into()),
            Some(FileKind::Dir) => {}
            Some(_) => return Err(Errno::ENOTDIR.into()),
        }
        let number = number_of(spec.device).ok_or(Errno::ENOTBLK)?;
        let read_only = spec.read_only || mount_option::is_read_only(spec.options);
        if self.dev(number)?.read_only && !read_only {
            return Err(Errno::EACCES.into());
        }
        self.make_super(number, spec, read_only)?;
        self.make_tree(number, spec.target)?;
        let of_a_mount = |word: &&String| OF_A_MOUNT.contains(&word.as_str());
        let mut options = vec![if read_only { "ro" } else { "rw" }.to_string()];
        options.extend(
            spec.options
                .iter()
                .filter(of_a_mount)
                .filter(|word| !matches!(word.as_str(), "ro" | "rw"))
                .cloned(),
        );
        let found = self.supers.get(&number).ok_or(Errno::EIO)?;
        let line = Mount {
            id: 0,
            parent: 0,
            device: found.device,
            disk: (spec.fs == FsType::Btrfs).then_some(spec.device.rdev),
            root: "/".into(),
            mount_point: spec.target.to_path_buf(),
            options,
            fs_name: spec.fs.name().into(),
            source: spec.device.path.clone(),
            super_options: found.options.clone(),
            node: None,
        };
        self.add_mount(Shown::Fs(number), line);
        Ok(())
    }

    /// The superblock of a device: the existing one, or a new one.
    fn make_super(
        &mut self,
        number: u32,
        spec: &MountSpec<'_>,
        read_only: bool,
    ) -> Result<(), HostCause> {
        let content = self.content(number)?;
        let fs = content
            .fs()
            .filter(|found| found.fs == spec.fs && !content.reads_blank)
            .ok_or(Errno::EINVAL)?;
        let (uuid, health) = (fs.uuid, fs.health);
        self.check_flaw(number);
        if let Some(found) = self.supers.get(&number) {
            return if found.read_only == read_only {
                Ok(())
            } else {
                Err(Errno::EBUSY.into())
            };
        }
        if spec.fs == FsType::Ext4 && health != Health::Sound {
            self.violation(format!("loop{number} was mounted {health:?}, unchecked"));
        }
        let twin = |other: &u32| {
            self.content(*other)
                .ok()
                .and_then(|c| c.fs())
                .is_some_and(|fs| fs.uuid == uuid)
        };
        let nouuid = spec.options.iter().any(|word| word == "nouuid");
        match spec.fs {
            FsType::Xfs if !nouuid && self.supers.keys().any(twin) => {
                return Err(Errno::EINVAL.into());
            }
            FsType::Btrfs if self.supers.keys().any(twin) => return Err(Errno::EEXIST.into()),
            FsType::Ext4 | FsType::Xfs | FsType::Btrfs => {}
        }
        let mut options = vec![if read_only { "ro" } else { "rw" }.to_string()];
        options.extend(
            spec.options
                .iter()
                .filter(|word| !OF_A_MOUNT.contains(&word.as_str()))
                .cloned(),
        );
        let device = match spec.fs {
            FsType::Btrfs => nix::sys::stat::makedev(0, self.fresh()),
            FsType::Ext4 | FsType::Xfs => spec.device.rdev,
        };
        self.content_mut(number)?.used_before = true;
        self.supers.insert(
            number,
            Super {
                fs: spec.fs,
                device,
                read_only,
                options: options.join(","),
                dirty: Vec::new(),
            },
        );
        if !read_only {
            // Mounting recovers the log and marks the superblock.
            let ino = self.image_of(number)?;
            self.disk.changed(ino, 0)?;
        }
        Ok(())
    }

    /// A mapped device of an unfinished copy may exist while the copy is made, but must not be used.
    fn check_flaw(&mut self, number: u32) {
        let dev = self.loops.get(&number).filter(|dev| dev.mapped.is_some());
        let ino = dev.and_then(|dev| dev.backing.image());
        let file = ino.and_then(|ino| self.disk.file(ino).ok());
        if let Some(flaw) = file.and_then(|file| file.live.flaw) {
            let device = self.device(number).path;
            self.violation(format!("{} is used: {flaw}", device.display()));
        }
    }

    pub(super) fn bind(
        &mut self,
        source: &Path,
        target: &Path,
        read_only: bool,
    ) -> Result<(), HostCause> {
        self.allow(source)?;
        self.allow(target)?;
        let kind = self.kind_at(target).ok_or(Errno::ENOENT)?;
        let shown = self.kind_at(source).ok_or(Errno::ENOENT)?;
        if (shown == FileKind::Dir) != (kind == FileKind::Dir) {
            return Err(Errno::ENOTDIR.into());
        }
        let Some(Mounted { shown, line }) = self.top(source).cloned() else {
            self.violation(format!(
                "bind of {}, where nothing is mounted",
                source.display()
            ));
            return Err(Errno::EINVAL.into());
        };
        let mut line = Mount {
            mount_point: target.to_path_buf(),
            ..line
        };
        if read_only {
            line.options = std::iter::once("ro".into())
                .chain(
                    line.options
                        .into_iter()
                        .filter(|word| word != "rw" && word != "ro"),
                )
                .collect();
        }
        self.add_mount(shown, line);
        Ok(())
    }

    pub(super) fn bind_device(&mut self, device: &Device, target: &Path) -> Result<(), HostCause> {
        self.allow(target)?;
        match self.kind_at(target) {
            None => return Err(Errno::ENOENT.into()),
            Some(FileKind::Dir) => return Err(Errno::ENOTDIR.into()),
            Some(_) => {}
        }
        let number = number_of(device).ok_or(Errno::ENOTBLK)?;
        self.check_flaw(number);
        if device.path != self.device(number).path {
            return Err(HostCause::Unexpected(
                "the node has another device number".into(),
            ));
        }
        let line = Mount {
            id: 0,
            parent: 0,
            device: dev_device(),
            disk: None,
            root: Path::new("/").join(device.path.file_name().unwrap_or_default()),
            mount_point: target.to_path_buf(),
            options: vec!["rw".into(), "nosuid".into(), "relatime".into()],
            fs_name: "devtmpfs".into(),
            source: "udev".into(),
            super_options: "rw,size=8137936k,nr_inodes=2034484,mode=755".into(),
            node: Some(device.rdev),
        };
        self.add_mount(Shown::Node(number), line);
        Ok(())
    }

    pub(super) fn unmount(&mut self, target: &Path) -> Result<(), HostCause> {
        self.allow_mount(target)?;
        let Some(index) = self
            .mounts
            .iter()
            .rposition(|mounted| mounted.line.mount_point == target)
        else {
            return Err(if self.targets.contains_key(target) {
                Errno::EINVAL
            } else {
                Errno::ENOENT
            }
            .into());
        };
        let id = self.mounts[index].line.id;
        let held = self
            .openers
            .values()
            .any(|opener| matches!(opener.what, Opened::OnMount(on) if on == id));
        let covered = self.mounts.iter().any(|other| other.line.parent == id);
        if held || covered || self.is_tree_open(target) {
            return Err(Errno::EBUSY.into());
        }
        self.mounts.remove(index);
        Ok(())
    }
}
