//! The real host: this kernel, its disks and its programs.
//!
//! One match over [`Effect`] calls the modules. `sys` contains all `unsafe` code of the crate;
//! `program` starts the driver's programs, and `session` the programs that an administrator
//! configures; `mounts` makes all mounts.

mod backing_fs;
mod blocks;
mod check;
mod clone;
pub mod device_mapper;
pub mod expedite;
mod features;
mod files;
mod foreign_file;
mod format;
pub mod freeze;
mod fsid;
mod growth;
mod image;
mod import_source;
mod import_tree;
mod in_place;
mod linear;
mod loop_device;
mod lvm;
mod map;
mod missing;
mod mounts;
mod program;
mod range;
mod scratch_image;
pub mod seqpacket;
mod session;
mod superblock;
mod sys;
mod target_path;
mod thin;
mod trim;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use uuid::Uuid;

use super::{
    Account, BackingFs, Device, DeviceHold, Done, Effect, Extent, FileId, FileStat, FolderMount,
    ForeignFile, Host, Kept, Known, LinearTable, LoopDevice, LoopHold, LoopStatus, MappedDevice,
    Mount, MountRoot, Piece, PreparedThinSnapshot, Result, Signature, Space, ThinPoolStatus,
    ThinSnapshot, VolumeGroup,
};
use crate::error::HostError;
use crate::fault;
use crate::model::FsType;
use target_path::Folders;

pub use features::version;
pub use import_source::ImportSource;
pub use import_tree::{ImportTree, LISTED, TreeContent, TreeProgress};
pub use missing::{SYS_ADMIN, SYS_RESOURCE, effective_capabilities, has_capability};
pub use scratch_image::ScratchImage;

/// The kernel and disks of this node.
pub struct LinuxHost {
    folders: Folders,
    /// Pinned directories by their `/proc/self/fd` path, with the paths that error messages show.
    pinned: Mutex<BTreeMap<PathBuf, PathBuf>>,
}

impl LinuxHost {
    /// Creates a host with the directories below which CSI paths may lie (`--allowed-path`).
    pub fn new(allowed: Vec<PathBuf>) -> LinuxHost {
        LinuxHost {
            folders: Folders {
                allowed,
                own: Vec::new(),
            },
            pinned: Mutex::default(),
        }
    }

    /// Adds a directory of the driver itself, for private mounts: effects may use paths in it, CSI
    /// calls may not.
    #[must_use]
    pub fn with_own_folder(mut self, folder: PathBuf) -> LinuxHost {
        self.folders.own.push(folder);
        self
    }

    /// Replaces the path of a pinned directory in an error by its real path.
    fn with_real_paths<T>(&self, result: Result<T>) -> Result<T> {
        result.map_err(|mut error| {
            let named = self.pinned().iter().find_map(|(pinned, path)| {
                let rest = error.subject.strip_prefix(pinned).ok()?;
                Some(path.join(rest))
            });
            if let Some(named) = named {
                error.subject = named;
            }
            error
        })
    }

    fn pinned(&self) -> MutexGuard<'_, BTreeMap<PathBuf, PathBuf>> {
        self.pinned.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Performs an effect, without injected faults.
    fn act(&self, effect: &Effect<'_>) -> Result<Done> {
        let folders = &self.folders;
        match *effect {
            Effect::MakeDir { path } => files::make_dir(path),
            Effect::WriteFile { path, bytes } => files::write_file(path, bytes),
            Effect::SyncFile { path } => files::sync_file(path),
            Effect::SyncDir { path } => files::sync_dir(path),
            Effect::SyncAll { paths } => files::sync_all(paths),
            Effect::Rename { from, to } => files::rename(from, to),
            Effect::RemoveFile { path } => files::remove_file(path),
            Effect::RemoveDir { path } => files::remove_dir(path),
            Effect::Allocate {
                path,
                size,
                reserve,
            } => image::allocate(path, size, reserve),
            Effect::Truncate { path, size } => image::shorten(path, size),
            Effect::Zero { path } => image::zero(path),
            Effect::HintExtents { path, bytes } => image::hint_extents(path, bytes),
            Effect::Discard { path, from } => image::discard(path, from),
            Effect::Trim { path } => trim::trim(path),
            Effect::TrimVolume { root, least } => trim::trim_volume(root, least),
            Effect::WriteInPlace { .. }
            | Effect::MakeLike { .. }
            | Effect::CloneWhole { .. }
            | Effect::ClonePreFreeze { .. }
            | Effect::CloneDelta { .. }
            | Effect::Unshare { .. }
            | Effect::CopyRange { .. }
            | Effect::WriteRange { .. } => return act_on_copy(effect),
            Effect::RenewFsId { image, uuid } => fsid::renew(image, uuid),
            Effect::AttachLoop(ref spec) => return loop_device::attach(spec).map(Done::Loop),
            Effect::DetachLoop { number, backing } => loop_device::detach(number, backing),
            Effect::DetachDeadLoop { number, name } => loop_device::detach_dead(number, name),
            Effect::ResizeLoop { number } => loop_device::resize(number),
            Effect::SetDirectIo { number } => loop_device::set_direct_io(number),
            Effect::DisableDiscard { device } => loop_device::forbid_discard(device),
            Effect::RecreateLoop { number } => loop_device::renew(number),
            Effect::Format { .. }
            | Effect::CheckFs { .. }
            | Effect::GrowFs { .. }
            | Effect::GrowUnmounted { .. } => return self.act_on_fs(effect),
            Effect::MakeTarget { path, kind } => folders.place("make", path)?.make(kind),
            Effect::RemoveTarget { path } => folders.remove(path),
            Effect::Mount(ref spec) => mounts::mount(folders, spec),
            Effect::Bind {
                source,
                target,
                read_only,
            } => mounts::bind(folders, source, target, read_only),
            Effect::BindDevice { device, target } => mounts::bind_device(folders, device, target),
            Effect::Unmount { target } => mounts::unmount(folders, target),
            Effect::WriteBlocks { .. } | Effect::FillWithZeros { .. } | Effect::Rewrite { .. } => {
                act_on_blocks(effect)
            }
            Effect::CreateThinSnapshot { prepared } => thin::create_snapshot(prepared),
            Effect::ThinMessage { .. }
            | Effect::CreateMapped { .. }
            | Effect::LoadTable { .. }
            | Effect::LoadLinear { .. }
            | Effect::ResumeMapped { .. }
            | Effect::ClearTable { .. }
            | Effect::RemoveMapped { .. } => thin::act(effect),
            Effect::StartSession(ref spec) => return session::start(spec),
        }
        .map(|()| Done::Plain)
    }

    /// Performs effects on whole file systems, most of which run a program.
    fn act_on_fs(&self, effect: &Effect<'_>) -> Result<Done> {
        match *effect {
            Effect::Format {
                device,
                fs,
                uuid,
                options,
                keep_blocks,
            } => format::format(device, fs, uuid, options, keep_blocks),
            Effect::CheckFs { device, fs, how } => {
                return check::check(device, fs, how).map(Done::Checked);
            }
            Effect::GrowFs {
                device,
                mount_point,
                fs,
            } => growth::grow(&self.folders, device, mount_point, fs),
            Effect::GrowUnmounted { device } => growth::grow_unmounted(device),
            _ => Err(HostError::unexpected(
                "perform",
                effect.name(),
                "it changes no file system",
            )),
        }
        .map(|()| Done::Plain)
    }
}

impl Host for LinuxHost {
    fn perform(&self, effect: &Effect<'_>) -> Result<Done> {
        self.with_real_paths(fault::effect(effect.name(), || self.act(effect)))
    }

    fn pin_dir(&self, path: &Path) -> Result<(PathBuf, Kept)> {
        let (folder, pinned) = files::pin_dir(path)?;
        self.pinned().insert(pinned.clone(), path.to_path_buf());
        Ok((pinned, Kept(Box::new(folder))))
    }

    fn try_lock_file(&self, path: &Path) -> Result<Option<Kept>> {
        let lock = self.with_real_paths(files::try_lock(path))?;
        Ok(lock.map(|lock| Kept(Box::new(lock))))
    }

    fn read_file(&self, path: &Path) -> Result<Option<Vec<u8>>> {
        self.with_real_paths(files::read_file(path))
    }

    fn list_dir(&self, path: &Path) -> Result<Option<Vec<String>>> {
        self.with_real_paths(files::list_dir(path))
    }

    fn stat(&self, path: &Path) -> Result<Option<FileStat>> {
        self.with_real_paths(files::stat(path))
    }

    fn shares_blocks(&self, path: &Path) -> Result<bool> {
        self.with_real_paths(map::shares_blocks(path))
    }

    fn open_foreign(&self, top: &Path, below: &Path) -> Result<Box<dyn ForeignFile>> {
        Ok(Box::new(foreign_file::open(top, below)?))
    }

    fn extents(&self, path: &Path, from: u64, limit: usize) -> Result<Vec<Extent>> {
        self.with_real_paths(map::extents(path, from, limit))
    }

    fn read_range(&self, path: &Path, offset: u64, length: u64) -> Result<Vec<Piece>> {
        self.with_real_paths(range::read(path, offset, length))
    }

    fn verify_copy(&self, copy: &Path, known: &Known) -> Result<bool> {
        self.with_real_paths(clone::verify_copy(copy, known))
    }

    fn extent_count(&self, path: &Path) -> Result<u64> {
        self.with_real_paths(map::extent_count(path))
    }

    fn open_mount_root(
        &self,
        mount_point: &Path,
        device: &Device,
        fs: FsType,
    ) -> Result<MountRoot> {
        freeze::open_mount_root(mount_point, device, fs)
    }

    fn space(&self, path: &Path) -> Result<Space> {
        self.with_real_paths(files::space(path))
    }

    fn mount_of(&self, folder: &Path) -> Result<FolderMount> {
        self.with_real_paths(backing_fs::mount_of(folder))
    }

    fn backing_fs(&self, path: &Path) -> Result<BackingFs> {
        backing_fs::backing_fs(path)
    }

    fn mounts(&self) -> Result<Vec<Mount>> {
        mounts::table_for_callers(&self.folders)
    }

    fn loop_devices(&self, may_be: &dyn Fn(&Path) -> bool) -> Result<Vec<LoopDevice>> {
        loop_device::list(may_be)
    }

    fn loop_status(&self, number: u32) -> Result<Option<LoopStatus>> {
        loop_device::status(number)
    }

    fn hold_loop(&self, number: u32, backing: FileId) -> Result<Option<LoopHold>> {
        loop_device::hold(number, backing)
    }

    fn thin_pool(&self, name: &str) -> Result<Option<ThinPoolStatus>> {
        thin::pool(name)
    }

    fn thin_devices(&self, pool: &str) -> Result<BTreeMap<u32, u64>> {
        thin::thin_devices(pool)
    }

    fn is_listed_by_lvm(&self, uuid: &str, ignore_nothing: bool) -> Result<bool> {
        lvm::lists(uuid, ignore_nothing)
    }

    fn volume_groups(&self, name: &str) -> Result<Option<Vec<VolumeGroup>>> {
        lvm::groups(name)
    }

    fn prepare_thin_snapshot(&self, snapshot: ThinSnapshot) -> Result<PreparedThinSnapshot> {
        thin::prepare_snapshot(snapshot)
    }

    fn mapped_devices(&self, pool: &str, prefix: &str) -> Result<Vec<MappedDevice>> {
        thin::devices(pool, prefix)
    }

    fn mapped_devices_of(
        &self,
        pool: (&str, u64),
        prefix: &str,
        own: &[&str],
    ) -> Result<Vec<MappedDevice>> {
        thin::devices_of(pool, prefix, own)
    }

    fn has_device_mapper(&self) -> Result<bool> {
        Ok(linear::open_mapper()?.is_some())
    }

    fn linear_device(&self, uuid: &str) -> Result<Option<MappedDevice<LinearTable>>> {
        linear::find(uuid)
    }

    fn hold_mapped(&self, uuid: &str) -> Result<Option<DeviceHold>> {
        thin::hold(uuid)
    }

    fn claim_mapped(&self, uuid: &str) -> Result<Option<DeviceHold>> {
        thin::claim(uuid)
    }

    fn read_blocks(&self, device: &Device, offset: u64, length: usize) -> Result<Vec<u8>> {
        blocks::read(device, offset, length)
    }

    fn is_claimed(&self, device: &Device) -> Result<bool> {
        loop_device::is_claimed(device)
    }

    fn device_bytes(&self, device: &Device) -> Result<u64> {
        loop_device::bytes(device)
    }

    fn signature(&self, device: &Device) -> Result<Signature> {
        format::signature(device)
    }

    fn is_unclean(&self, device: &Device, fs: FsType) -> Result<bool> {
        check::is_unclean(device, fs)
    }

    fn should_grow(&self, device: &Device, mount_point: &Path, fs: FsType) -> Result<bool> {
        growth::wanted(&self.folders, device, mount_point, fs)
    }

    fn can_grow_unmounted(&self, device: &Device) -> Result<bool> {
        growth::can_grow_unmounted(device)
    }

    fn check_path(&self, path: &Path) -> std::result::Result<(), String> {
        self.folders.check(path)
    }

    fn stat_csi_path(&self, path: &Path) -> Result<Option<FileStat>> {
        match self.folders.find("stat", path)? {
            Some(place) => place.stat(),
            None => Ok(None),
        }
    }

    fn space_csi_path(&self, path: &Path) -> Result<Space> {
        let place = self.folders.place("statfs", path)?;
        let (open, _) = place.open("statfs", &[crate::host::FileKind::Dir])?;
        files::space_of(open, path)
    }

    fn boot_id(&self) -> Result<Uuid> {
        let path = Path::new("/proc/sys/kernel/random/boot_id");
        let text = std::fs::read_to_string(path).map_err(files::failed("read", path))?;
        text.trim()
            .parse()
            .map_err(|_| HostError::unexpected("read", path, format!("{text:?} is not a UUID")))
    }

    fn random_uuid(&self) -> Uuid {
        Uuid::new_v4()
    }

    fn now(&self) -> u64 {
        SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .map_or(0, |since| since.as_secs())
    }

    fn now_nanos(&self) -> u64 {
        let since = SystemTime::now().duration_since(UNIX_EPOCH);
        // 64 bits suffice until the year 2554.
        since.map_or(0, |since| since.as_nanos() as u64)
    }

    fn account(&self, name: &str) -> Result<Account> {
        session::account(name)
    }
    fn missing(&self) -> Vec<String> {
        missing::list()
    }
}

/// Performs effects on the blocks of a device.
fn act_on_blocks(effect: &Effect<'_>) -> Result<()> {
    match *effect {
        Effect::WriteBlocks {
            device,
            offset,
            bytes,
        } => blocks::write(device, offset, bytes),
        Effect::FillWithZeros { device, from } => blocks::fill_with_zeros(device, from),
        Effect::Rewrite { device, range } => blocks::rewrite(device, range),
        _ => {
            let what = format!("{} does not write blocks", effect.name());
            Err(HostError::unexpected("act on", Path::new("/"), what))
        }
    }
}

/// Performs effects that copy images, or prepare for that.
fn act_on_copy(effect: &Effect<'_>) -> Result<Done> {
    match *effect {
        Effect::WriteInPlace { path } => in_place::of_folder(path),
        Effect::MakeLike { path, source } => in_place::make_like(path, source),
        Effect::CloneWhole { source, target } => return clone::whole(source, target),
        Effect::ClonePreFreeze { source, target } => return clone::ahead(source, target),
        Effect::CloneDelta {
            source,
            target,
            known,
        } => return clone::rest(source, target, known),
        Effect::Unshare {
            path,
            offset,
            length,
        } => clone::unshare(path, offset, length),
        Effect::CopyRange {
            source,
            target,
            offset,
            length,
        } => image::copy_range(source, target, offset, length),
        Effect::WriteRange {
            target,
            offset,
            length,
            pieces,
            zeros,
        } => range::write(target, offset..offset.saturating_add(length), pieces, zeros),
        _ => {
            let what = format!("{} does not copy", effect.name());
            Err(HostError::unexpected("act on", Path::new("/"), what))
        }
    }
    .map(|()| Done::Plain)
}
