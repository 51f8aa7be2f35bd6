//! Performs effects one after another, under one lock.

use std::path::{Path, PathBuf};

use nix::errno::Errno;

use super::content::{Content, ContentKind};
use super::disk::{Disk, Ino};
use super::machine::{Machine, Process};
use super::mapped::number_of;
use crate::error::HostCause;
use crate::host::{Checked, Device, Effect, mapped_path};
use crate::model::FsType;

/// The result of an effect: an open loop device with the key of its hold, or the number of cloned
/// extents.
#[derive(Clone, Debug)]
pub(super) enum Acted {
    Plain,
    Loop { number: u32, key: u64 },
    Cloned(u64),
    Checked(Checked),
}

/// The object of an effect.
pub(super) fn subject<'a>(effect: &'a Effect<'a>) -> std::borrow::Cow<'a, Path> {
    match effect {
        Effect::MakeDir { path }
        | Effect::WriteFile { path, .. }
        | Effect::SyncFile { path }
        | Effect::SyncDir { path }
        | Effect::RemoveFile { path }
        | Effect::RemoveDir { path }
        | Effect::Allocate { path, .. }
        | Effect::WriteInPlace { path }
        | Effect::MakeLike { path, .. }
        | Effect::Truncate { path, .. }
        | Effect::Zero { path }
        | Effect::HintExtents { path, .. }
        | Effect::Discard { path, .. }
        | Effect::Trim { path }
        | Effect::Unshare { path, .. }
        | Effect::MakeTarget { path, .. }
        | Effect::RemoveTarget { path } => (*path).into(),
        Effect::SyncAll { paths } => paths.first().map_or(Path::new(""), PathBuf::as_path).into(),
        Effect::Rename { to, .. } => (*to).into(),
        Effect::CloneWhole { target, .. }
        | Effect::ClonePreFreeze { target, .. }
        | Effect::CloneDelta { target, .. }
        | Effect::CopyRange { target, .. }
        | Effect::WriteRange { target, .. } => (*target).into(),
        Effect::RenewFsId { image, .. } => (*image).into(),
        Effect::TrimVolume { root, .. } => (&root.device.path).into(),
        Effect::AttachLoop(spec) => spec.image.into(),
        Effect::DetachLoop { number, .. }
        | Effect::DetachDeadLoop { number, .. }
        | Effect::ResizeLoop { number }
        | Effect::SetDirectIo { number }
        | Effect::RecreateLoop { number } => Device::of_loop(*number).path.into(),
        Effect::Format { device, .. }
        | Effect::CheckFs { device, .. }
        | Effect::DisableDiscard { device }
        | Effect::WriteBlocks { device, .. }
        | Effect::FillWithZeros { device, .. }
        | Effect::Rewrite { device, .. }
        | Effect::GrowFs { device, .. }
        | Effect::GrowUnmounted { device } => (&device.path).into(),
        Effect::Mount(spec) => spec.target.into(),
        Effect::Bind { target, .. }
        | Effect::BindDevice { target, .. }
        | Effect::Unmount { target } => (*target).into(),
        Effect::ThinMessage { pool, .. } => Path::new(*pool).into(),
        Effect::CreateThinSnapshot { prepared } => Path::new(&prepared.snapshot.pool).into(),
        Effect::CreateMapped { uuid }
        | Effect::LoadTable { uuid, .. }
        | Effect::LoadLinear { uuid, .. }
        | Effect::ResumeMapped { uuid }
        | Effect::ClearTable { uuid }
        | Effect::RemoveMapped { uuid } => mapped_path(uuid).into(),
        Effect::StartSession(spec) => spec.program.into(),
    }
}

fn no_programs() -> HostCause {
    HostCause::Unexpected("no programs are simulated".into())
}

impl Machine {
    pub(super) fn act(
        &mut self,
        process: Process,
        effect: &Effect<'_>,
    ) -> Result<Acted, HostCause> {
        match effect {
            Effect::MakeDir { path } => self.make_dir(process, path)?,
            Effect::WriteFile { path, bytes } => self.write_file(process, path, bytes)?,
            Effect::SyncFile { path } => self.sync(process, path, Disk::sync_file)?,
            Effect::SyncDir { path } => self.sync(process, path, Disk::sync_dir)?,
            Effect::SyncAll { paths } => self.sync_all(process, paths)?,
            Effect::Rename { from, to } => self.rename(process, from, to)?,
            Effect::RemoveFile { path } => self.remove_file(process, path)?,
            Effect::RemoveDir { path } => self.remove_dir(process, path)?,
            Effect::Allocate {
                path,
                size,
                reserve,
            } => self.allocate(process, path, *size, *reserve)?,
            Effect::Truncate { path, size } => self.shorten(process, path, *size)?,
            Effect::TrimVolume { root, .. } => {
                self.trim_volume(number_of(&root.device).ok_or(Errno::ENOTBLK)?)?;
            }
            Effect::Zero { path } => self.erase(process, path, true)?,
            Effect::Discard { path, from: 0 } => self.erase(process, path, false)?,
            Effect::Discard { path, from } => self.discard_from(process, path, *from)?,
            Effect::CloneWhole { .. }
            | Effect::ClonePreFreeze { .. }
            | Effect::CloneDelta { .. }
            | Effect::Unshare { .. }
            | Effect::CopyRange { .. }
            | Effect::WriteRange { .. }
            | Effect::RenewFsId { .. }
            | Effect::MakeLike { .. } => return self.act_on_copy(process, effect),
            Effect::AttachLoop(spec) => {
                let (number, key) = self.attach(process, spec)?;
                return Ok(Acted::Loop { number, key });
            }
            Effect::DetachLoop { number, backing } => self.detach(*number, *backing)?,
            Effect::DetachDeadLoop { number, name } => self.detach_dead(*number, name)?,
            Effect::ResizeLoop { number } => self.resize_loop(*number)?,
            Effect::SetDirectIo { number } => self.dev_mut(*number)?.direct_io = true,
            // Free devices of the simulation have no limits that a re-creation would clear; all
            // images are of one kind; and no disk below supports discard.
            Effect::RecreateLoop { .. }
            | Effect::WriteInPlace { .. }
            | Effect::HintExtents { .. }
            | Effect::Trim { .. } => {}
            Effect::Format { .. }
            | Effect::CheckFs { .. }
            | Effect::GrowFs { .. }
            | Effect::GrowUnmounted { .. } => return self.act_on_fs(effect),
            Effect::MakeTarget { path, kind } => self.make_target(path, *kind)?,
            Effect::RemoveTarget { path } => self.remove_target(path)?,
            Effect::Mount(spec) => self.mount(spec)?,
            Effect::Bind {
                source,
                target,
                read_only,
            } => self.bind(source, target, *read_only)?,
            Effect::BindDevice { device, target } => self.bind_device(device, target)?,
            Effect::Unmount { target } => self.unmount(target)?,
            Effect::StartSession(_) => return Err(no_programs()),
            other => self.act_on_device(process, other)?,
        }
        Ok(Acted::Plain)
    }

    fn act_on_device(&mut self, process: Process, effect: &Effect<'_>) -> Result<(), HostCause> {
        match effect {
            Effect::WriteBlocks {
                device,
                offset,
                bytes,
            } => self.write_blocks(process, device, *offset as usize, bytes),
            Effect::FillWithZeros { device, from } => self.fill_with_zeros(device, *from),
            Effect::Rewrite { device, range } => self.rewrite(device, range),
            Effect::DisableDiscard { device } => {
                let number = number_of(device).ok_or(Errno::ENOTBLK)?;
                self.dev_mut(number)?.no_discard = true;
                Ok(())
            }
            other => self.act_on_mapped(other),
        }
    }

    fn act_on_fs(&mut self, effect: &Effect<'_>) -> Result<Acted, HostCause> {
        match effect {
            Effect::Format {
                device,
                fs,
                uuid,
                keep_blocks,
                options: _,
            } => {
                let number = number_of(device).ok_or(Errno::ENOTBLK)?;
                self.format(number, *fs, *uuid, *keep_blocks)?;
            }
            Effect::CheckFs { device, fs, how } => {
                return self.check_fs(device, *fs, *how).map(Acted::Checked);
            }
            Effect::GrowFs {
                device,
                mount_point,
                fs,
            } => self.grow_fs(device, mount_point, *fs)?,
            Effect::GrowUnmounted { device } => self.grow_unmounted(device)?,
            _ => return Err(Errno::ENOSYS.into()),
        }
        Ok(Acted::Plain)
    }

    pub(super) fn must_find(&self, process: Process, path: &Path) -> Result<Ino, Errno> {
        self.find(process, path)?.ok_or(Errno::ENOENT)
    }

    fn make_dir(&mut self, process: Process, path: &Path) -> Result<(), HostCause> {
        if self
            .find(process, path)?
            .is_some_and(|ino| self.disk.dir(ino).is_ok())
        {
            return Ok(());
        }
        let slot = self.slot(process, path)?;
        if self.full && self.is_of_pool(path) {
            return Err(Errno::ENOSPC.into());
        }
        self.disk.make_dir(&slot)?;
        Ok(())
    }

    /// On a full disk the old content is lost and the new content is not written.
    fn write_file(&mut self, process: Process, path: &Path, bytes: &[u8]) -> Result<(), HostCause> {
        let slot = self.slot(process, path)?;
        let ino = self.disk.make_file(&slot)?;
        *self.data_mut(ino)? = super::disk::Data::default();
        let available = match self.is_of_pool(path) {
            true => self.available(),
            false => u64::MAX,
        };
        let data = self.data_mut(ino)?;
        data.bytes = bytes.to_vec();
        data.size = bytes.len() as u64;
        if data.allocated() > available {
            *data = super::disk::Data::default();
            return Err(Errno::ENOSPC.into());
        }
        self.disk.changed(ino, 0)?;
        Ok(())
    }

    fn rename(&mut self, process: Process, from: &Path, to: &Path) -> Result<(), HostCause> {
        let (from_slot, to_slot) = (self.slot(process, from)?, self.slot(process, to)?);
        let file = self
            .disk
            .find(&from_slot)?
            .and_then(|ino| self.disk.file(ino).ok());
        if file.is_some_and(|file| file.live != file.durable) {
            self.violation(format!(
                "rename of {}, which was not synced",
                from.display()
            ));
        }
        if let Some(replaced) = self.disk.find(&to_slot)?
            && self
                .unreadable
                .get(&replaced)
                .is_some_and(|it| it.is_hidden)
        {
            let to = to.display();
            self.violation(format!("{to} was replaced while it could not be read"));
        }
        self.disk.rename(&from_slot, &to_slot)?;
        Ok(())
    }

    fn remove_dir(&mut self, process: Process, path: &Path) -> Result<(), HostCause> {
        if let Some(slot) = absent_is_none(self.slot(process, path))? {
            self.disk.remove_dir(&slot)?;
        }
        Ok(())
    }

    fn remove_file(&mut self, process: Process, path: &Path) -> Result<(), HostCause> {
        let Some(slot) = absent_is_none(self.slot(process, path))? else {
            return Ok(());
        };
        if let Some(ino) = self.disk.find(&slot)?
            && self
                .loops_on(ino)
                .iter()
                .any(|number| self.supers.contains_key(number))
        {
            self.violation(format!("{} was removed while it's mounted", path.display()));
        }
        self.disk.remove_file(&slot)?;
        Ok(())
    }

    /// On a full disk the length has grown and nothing is reserved.
    fn allocate(
        &mut self,
        process: Process,
        path: &Path,
        size: u64,
        reserve: bool,
    ) -> Result<(), HostCause> {
        let slot = self.slot(process, path)?;
        let ino = self.disk.make_file(&slot)?;
        let available = self.available();
        let data = self.data_mut(ino)?;
        data.size = data.size.max(size);
        if reserve {
            let more = data.size.saturating_sub(data.allocated());
            if more > available {
                return Err(Errno::ENOSPC.into());
            }
            data.reserved = data.size;
        }
        self.disk.changed(ino, 0)?;
        Ok(())
    }

    fn shorten(&mut self, process: Process, path: &Path, size: u64) -> Result<(), HostCause> {
        let ino = self.must_find(process, path)?;
        let data = self.data_mut(ino)?;
        data.size = data.size.min(size);
        data.reserved = data.reserved.min(size);
        let cut = data.content.fs().is_some_and(|fs| fs.bytes > size);
        if cut {
            self.violation(format!(
                "{} was cut back below its file system",
                path.display()
            ));
        }
        self.disk.changed(ino, 0)?;
        Ok(())
    }

    /// Overwrites all blocks with zeros, or frees them.
    fn erase(&mut self, process: Process, path: &Path, keep_blocks: bool) -> Result<(), HostCause> {
        let ino = self.must_find(process, path)?;
        // The process that discards a mapped device has it open.
        let own = usize::from(path.starts_with("/dev/mapper"));
        let openers = |number: &u32| self.openers_of(*number) > own;
        if self.loops_on(ino).iter().any(openers) {
            self.violation(format!(
                "{} was erased while its loop device is open",
                path.display()
            ));
        }
        let data = self.data_mut(ino)?;
        let used_before = data.content.used_before || data.content.kind != ContentKind::Blank;
        data.reserved = if keep_blocks { data.allocated() } else { 0 };
        data.content = Content {
            used_before,
            ..Content::default()
        };
        self.disk.changed(ino, 0)?;
        if keep_blocks {
            self.disk.sync_file(ino)?;
        }
        Ok(())
    }

    fn grow_fs(
        &mut self,
        device: &Device,
        mount_point: &Path,
        fs: FsType,
    ) -> Result<(), HostCause> {
        self.allow(mount_point)?;
        let number = number_of(device).ok_or(Errno::ENOTBLK)?;
        let mounted = self.top(mount_point).ok_or(Errno::ENOENT)?;
        if mounted.shown.fs() != Some(number) {
            return Err(HostCause::Unexpected(
                "another file system is mounted there".into(),
            ));
        }
        if mounted.line.is_read_only()
            || self
                .supers
                .get(&number)
                .is_some_and(|found| found.read_only)
        {
            return Err(Errno::EROFS.into());
        }
        if self.frozen.contains_key(&number) {
            return Err(Errno::EBUSY.into());
        }
        if fs == FsType::Ext4 && self.refuses_ext4_growth {
            return Err(Errno::EPERM.into());
        }
        let bytes = self.dev(number)?.bytes;
        let content = self
            .content_mut(number)?
            .fs_mut()
            .filter(|content| content.fs == fs);
        let content = content.ok_or(Errno::EINVAL)?;
        content.bytes = content.bytes.max(bytes);
        self.sync_loop(number);
        Ok(())
    }
}

/// A missing parent means that the object does not exist.
fn absent_is_none<T>(result: Result<T, Errno>) -> Result<Option<T>, Errno> {
    match result {
        Ok(found) => Ok(Some(found)),
        Err(Errno::ENOENT) => Ok(None),
        Err(errno) => Err(errno),
    }
}
