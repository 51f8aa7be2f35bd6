//! Implements [`Host`] for a process of a simulated machine.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::errno::Errno;
use uuid::Uuid;

use super::content::Health;
use super::disk::{Data, ROOT};
use super::machine::Machine;
use super::perform::Acted;
use super::{Closes, EPOCH, MemoryHost, POOLS, mapped, perform};
use crate::error::HostCause;
use crate::host::{
    BackingFs, Device, DeviceHold, Done, Effect, FileId, FileKind, FileStat, FolderMount, Host,
    LoopHold,
};
use crate::host::{Extent, ForeignFile, Known, MountRoot};
use crate::host::{Kept, LoopDevice, Mount, Piece, Result, Signature, Space, VolumeGroup};
use crate::host::{
    LinearTable, MappedDevice, PreparedThinSnapshot, ThinPoolStatus, ThinSnapshot, mapped_path,
};
use crate::model::FsType;
use crate::model::size::MIB;

impl Host for MemoryHost {
    fn perform(&self, effect: &Effect<'_>) -> Result<Done> {
        let subject = perform::subject(effect);
        let acted = self.counted(
            effect.name(),
            &subject,
            |machine| machine.cut_off(self.process, effect),
            |machine| {
                machine.watch_window(self.process, effect);
                machine.act(self.process, effect)
            },
            |machine, acted| {
                if let Acted::Loop { key, .. } = acted {
                    machine.openers.remove(key);
                }
            },
        )?;
        if self.lock().turns {
            std::thread::yield_now();
        }
        Ok(match acted {
            Acted::Plain => Done::Plain,
            Acted::Loop { number, key } => Done::Loop(self.hold(number, key)),
            Acted::Cloned(extents) => Done::Cloned(extents),
            Acted::Checked(checked) => Done::Checked(checked),
        })
    }

    fn pin_dir(&self, path: &Path) -> Result<(PathBuf, Kept)> {
        let (pinned, fd) = self.look("open", path, |machine| {
            let ino = machine.find(self.process, path)?.ok_or(Errno::ENOENT)?;
            machine.disk.dir(ino)?;
            Ok(machine.pin(self.process, ino))
        })?;
        Ok((pinned, self.kept(Closes::Pin(fd))))
    }

    fn try_lock_file(&self, path: &Path) -> Result<Option<Kept>> {
        let locked = self.look("lock", path, |machine| {
            let slot = machine.slot(self.process, path)?;
            let ino = machine.disk.make_file(&slot)?;
            Ok(machine.try_lock(self.process, ino).then_some(ino))
        })?;
        Ok(locked.map(|ino| self.kept(Closes::Lock(self.process, ino))))
    }

    fn read_file(&self, path: &Path) -> Result<Option<Vec<u8>>> {
        self.look("read", path, |machine| {
            if path.starts_with("/sys/dev/block") {
                return Ok(machine.device_attribute(path));
            }
            match machine.find(self.process, path)? {
                Some(ino) => Ok(Some(machine.read(ino)?)),
                None => Ok(None),
            }
        })
    }

    fn list_dir(&self, path: &Path) -> Result<Option<Vec<String>>> {
        self.look("list", path, |machine| {
            match machine.find(self.process, path)? {
                Some(ino) => Ok(Some(machine.disk.dir(ino)?.live.keys().cloned().collect())),
                None => Ok(None),
            }
        })
    }

    fn stat(&self, path: &Path) -> Result<Option<FileStat>> {
        self.look("stat", path, |machine| {
            let Some(ino) = machine.find(self.process, path)? else {
                return Ok(None);
            };
            let data = machine.disk.file(ino).ok().map(|file| &file.live);
            Ok(Some(FileStat {
                id: Machine::image_id(ino),
                kind: data.map_or(FileKind::Dir, |_| FileKind::File),
                size: data.map_or(0, |data| data.size),
                allocated: data.map_or(0, Data::allocated),
                rdev: 0,
                modified: data.map_or(0, |data| EPOCH * 1_000_000_000 + data.modified),
            }))
        })
    }

    fn shares_blocks(&self, path: &Path) -> Result<bool> {
        self.look("map", path, |machine| {
            let ino = machine.find(self.process, path)?.ok_or(Errno::ENOENT)?;
            let blocks = machine.disk.file(ino)?.live.map.len();
            Ok((0..blocks).any(|index| machine.shares(ino, index)))
        })
    }

    fn open_foreign(&self, top: &Path, below: &Path) -> Result<Box<dyn ForeignFile>> {
        self.open_file_of_others(top, below)
    }

    fn extents(&self, path: &Path, from: u64, limit: usize) -> Result<Vec<Extent>> {
        self.look("map", path, |machine| {
            let mut runs = machine.map(self.process, path)?;
            runs.retain(|run| run.logical + run.length > from);
            runs.truncate(limit);
            Ok(runs)
        })
    }

    fn read_range(&self, path: &Path, offset: u64, length: u64) -> Result<Vec<Piece>> {
        self.look("read", path, |machine| {
            Ok(machine.read_range(self.process, path, offset, length)?)
        })
    }

    fn verify_copy(&self, copy: &Path, known: &Known) -> Result<bool> {
        self.look("map", copy, |machine| {
            let (runs, size) = machine.map_and_size(self.process, copy)?;
            let known = known.lock();
            Ok(known.verify_copy(runs.into_iter().map(Ok::<_, Errno>), size)?)
        })
    }

    fn extent_count(&self, path: &Path) -> Result<u64> {
        self.look("map", path, |machine| {
            Ok(machine.map(self.process, path)?.len() as u64)
        })
    }

    fn open_mount_root(
        &self,
        mount_point: &Path,
        device: &Device,
        fs: FsType,
    ) -> Result<MountRoot> {
        self.open_root(mount_point, device, fs)
    }

    fn space(&self, path: &Path) -> Result<Space> {
        self.look("statfs", path, |machine| {
            machine.find(self.process, path)?.ok_or(Errno::ENOENT)?;
            let free = machine.available();
            let inodes = machine.disk.capacity / (2 * MIB) + 1024;
            Ok(Space {
                total: machine.disk.capacity,
                available: free,
                free,
                inodes,
                inodes_free: inodes,
            })
        })
    }

    fn mount_of(&self, folder: &Path) -> Result<FolderMount> {
        self.look("statx", folder, |machine| {
            machine.find(self.process, folder)?.ok_or(Errno::ENOENT)?;
            let lines = machine.mounts.iter().map(|mounted| &mounted.line);
            let around = lines.filter(|line| folder.starts_with(&line.mount_point));
            let deepest = around.max_by_key(|line| line.mount_point.components().count());
            let mount = deepest.ok_or(Errno::ENOENT)?.clone();
            let is_mount_point = mount.mount_point == folder;
            Ok(FolderMount::new(mount, is_mount_point, ROOT))
        })
    }

    fn backing_fs(&self, path: &Path) -> Result<BackingFs> {
        self.look("statfs", path, |machine| {
            machine.find(self.process, path)?.ok_or(Errno::ENOENT)?;
            let options = &machine.options;
            Ok(BackingFs {
                fs_name: options.fs_name.clone(),
                mount_point: POOLS.into(),
                sector: options.sector,
                min_sector: options.sector,
                shares_blocks: options.shares_blocks(),
                in_place: true,
            })
        })
    }

    fn mounts(&self) -> Result<Vec<Mount>> {
        self.look("read", Path::new("/proc/self/mountinfo"), |machine| {
            Ok(machine
                .mounts
                .iter()
                .map(|mounted| mounted.line.clone())
                .collect())
        })
    }

    fn loop_devices(&self, may_be: &dyn Fn(&Path) -> bool) -> Result<Vec<LoopDevice>> {
        self.look("list", Path::new("/sys/block"), |machine| {
            Ok(machine.loop_devices(may_be))
        })
    }

    fn hold_loop(&self, number: u32, backing: FileId) -> Result<Option<LoopHold>> {
        let key = self.look("open", &Device::of_loop(number).path, |machine| {
            let stands = machine
                .loops
                .get(&number)
                .is_some_and(|dev| dev.backing.id() == backing);
            if stands {
                machine.ask_loop(number)?;
            }
            Ok(stands.then(|| machine.open_loop(Some(self.process), number)))
        })?;
        Ok(key.map(|key| self.hold(number, key)))
    }

    fn thin_pool(&self, name: &str) -> Result<Option<ThinPoolStatus>> {
        self.look("examine", Path::new(name), |machine| {
            if !machine.is_active_pool(name) {
                return Ok(None);
            }
            machine.check_thin_pool(name)?;
            Ok(Some(machine.thin_pool_status(name)))
        })
    }

    fn volume_groups(&self, name: &str) -> Result<Option<Vec<VolumeGroup>>> {
        self.look("examine", Path::new(name), |machine| {
            Ok(Some(machine.volume_groups(name)))
        })
    }

    fn thin_devices(&self, pool: &str) -> Result<BTreeMap<u32, u64>> {
        self.look("examine", Path::new(pool), |machine| {
            machine.check_thin_pool(pool)?;
            machine.faults.note_metadata_read();
            Ok(machine.thin_devices(pool))
        })
    }

    fn prepare_thin_snapshot(&self, snapshot: ThinSnapshot) -> Result<PreparedThinSnapshot> {
        self.look("examine", Path::new(&snapshot.pool), |machine| {
            machine.check_running_pool(&snapshot.pool)?;
            match machine.thin_pool_status(&snapshot.pool).rdev == snapshot.rdev {
                true => Ok(()),
                false => Err(HostCause::Unexpected(
                    "another thin pool has this name now".into(),
                )),
            }
        })?;
        Ok(PreparedThinSnapshot {
            snapshot,
            keep: Box::new(()),
        })
    }

    fn mapped_devices(&self, pool: &str, prefix: &str) -> Result<Vec<MappedDevice>> {
        self.look("list", Path::new("/dev/mapper"), |machine| {
            Ok(machine.mapped_devices(pool, prefix))
        })
    }

    fn has_device_mapper(&self) -> Result<bool> {
        self.look("open", Path::new("/dev/mapper/control"), |machine| {
            Ok(machine.options.device_mapper)
        })
    }

    fn linear_device(&self, uuid: &str) -> Result<Option<MappedDevice<LinearTable>>> {
        self.look("examine", &mapped_path(uuid), |machine| {
            Ok(machine.linear_device(uuid))
        })
    }

    fn hold_mapped(&self, uuid: &str) -> Result<Option<DeviceHold>> {
        let held = self.look("open", &mapped_path(uuid), |machine| {
            let number = machine.registered(uuid);
            let open = |number| (number, machine.open_loop(Some(self.process), number));
            let held = number.map(open);
            Ok(held.map(|(number, key)| (machine.device(number), key)))
        })?;
        Ok(held.map(|(device, key)| DeviceHold {
            device,
            keep: Box::new(self.keep(Closes::Opener(key))),
        }))
    }

    fn claim_mapped(&self, uuid: &str) -> Result<Option<DeviceHold>> {
        let claimed = self.look("open", &mapped_path(uuid), |machine| {
            let Some(number) = machine.registered(uuid) else {
                return Ok(None);
            };
            let key = machine.claim(self.process, number)?;
            Ok(Some((machine.device(number), key)))
        })?;
        Ok(claimed.map(|(device, key)| DeviceHold {
            device,
            keep: Box::new(self.keep(Closes::Opener(key))),
        }))
    }

    fn read_blocks(&self, device: &Device, offset: u64, length: usize) -> Result<Vec<u8>> {
        self.look("read", &device.path, |machine| {
            let number = mapped::number_of(device).ok_or(Errno::ENOTBLK)?;
            Ok(machine.read_blocks(number, offset as usize, length)?)
        })
    }

    fn is_claimed(&self, device: &Device) -> Result<bool> {
        self.look("open", &device.path, |machine| {
            let number = mapped::number_of(device).ok_or(Errno::ENOTBLK)?;
            Ok(machine.is_claimed(number))
        })
    }

    fn device_bytes(&self, device: &Device) -> Result<u64> {
        self.look("open", &device.path, |machine| {
            let number = mapped::number_of(device).ok_or(Errno::ENOTBLK)?;
            Ok(machine.loops.get(&number).map_or(0, |dev| dev.bytes))
        })
    }

    fn signature(&self, device: &Device) -> Result<Signature> {
        self.look("probe", &device.path, |machine| {
            let number = mapped::number_of(device).ok_or(Errno::ENOTBLK)?;
            Ok(machine.content(number)?.signature())
        })
    }

    fn is_unclean(&self, device: &Device, fs: FsType) -> Result<bool> {
        self.look("read", &device.path, |machine| {
            let number = mapped::number_of(device).ok_or(Errno::ENOTBLK)?;
            let content = machine.content(number)?.fs();
            let health = content.map(|content| content.health).unwrap_or_default();
            Ok(fs == FsType::Ext4 && health != Health::Sound)
        })
    }

    fn should_grow(&self, device: &Device, mount_point: &Path, fs: FsType) -> Result<bool> {
        self.look("statfs", mount_point, |machine| {
            let number = mapped::number_of(device).ok_or(Errno::ENOTBLK)?;
            let bytes = machine.dev(number)?.bytes;
            let content = machine
                .content(number)?
                .fs()
                .filter(|content| content.fs == fs);
            Ok(content.ok_or(Errno::EINVAL)?.bytes < bytes)
        })
    }

    fn can_grow_unmounted(&self, _device: &Device) -> Result<bool> {
        Ok(true)
    }

    fn check_path(&self, path: &Path) -> std::result::Result<(), String> {
        self.lock().options.check(path)
    }

    fn stat_csi_path(&self, path: &Path) -> Result<Option<FileStat>> {
        self.look("stat", path, |machine| Ok(machine.stat_or_parent(path)))
    }

    fn space_csi_path(&self, path: &Path) -> Result<Space> {
        self.look("statfs", path, |machine| Ok(machine.space_target(path)?))
    }

    fn boot_id(&self) -> Result<Uuid> {
        self.look(
            "read",
            Path::new("/proc/sys/kernel/random/boot_id"),
            |machine| Ok(machine.boot),
        )
    }

    fn random_uuid(&self) -> Uuid {
        self.lock().uuid()
    }

    fn now(&self) -> u64 {
        self.lock().now().as_secs()
    }

    fn now_nanos(&self) -> u64 {
        u64::try_from(self.lock().now().as_nanos()).unwrap_or(u64::MAX)
    }

    fn pause(&self, time: Duration) {
        self.lock().passed += time;
    }

    fn missing(&self) -> Vec<String> {
        Vec::new()
    }
}
