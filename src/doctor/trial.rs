//! Temporary file systems: each kind is created and mounted like a volume, and removed again, so
//! that a kernel that cannot mount what the installed mkfs creates is detected before a volume
//! fails.

use std::path::{Path, PathBuf};

use super::{Check, Subject, kernel};
use crate::error::{Error, ErrorContext, Result, chain};
use crate::host::{
    Device, Effect, FileKind, FileStat, Host, LoopSpec, MountSpec, NodeKind, attach_loop,
};
use crate::model::FsType;

/// Unless its kind requires more; creating a file system of this size is fast, and its image is
/// sparse.
const TRIAL_BYTES: u64 = 16 << 20;

/// A file system that is mounted for a trial.
pub(super) struct Mounted<'a> {
    pub(super) target: &'a Path,
    pub(super) device: &'a Device,
    pub(super) image: &'a FileStat,
}

/// One trial of each kind.
pub(super) fn examine(host: &dyn Host, examined: &Subject) -> Vec<Check> {
    let kinds = FsType::ALL.into_iter();
    kinds.map(|fs| trial(host, examined, fs)).collect()
}

fn trial(host: &dyn Host, examined: &Subject, fs: FsType) -> Check {
    let program = format!("mkfs.{fs}");
    let not_tried =
        |why: String, fix: &str| Check::warn(fs.name(), format!("not tried: {why}"), fix);
    if kernel::may_mount(host) != Some(true) {
        let why = "it needs CAP_SYS_ADMIN".into();
        return not_tried(why, "run it as root; in a container, as privileged");
    }
    if !kernel::is_there(host, &examined.programs, &program) {
        let fix = format!("without it there are no {fs} volumes; see the check of programs");
        return not_tried(format!("{program} is missing"), &fix);
    }
    // Each has its own directory, so that a trial that cannot be removed does not disturb the next.
    let mut folder = examined.trial_dir.clone().into_os_string();
    folder.push(format!("-{fs}"));
    match on_mounted(host, Path::new(&folder), fs, |_| Ok(()), || {}) {
        Ok(()) => Check::ok(fs.name(), "a temporary file system was created and mounted"),
        Err(error) => Check::warn(
            fs.name(),
            chain(&error),
            format!(
                "no {fs} volume can be used on this node until this is fixed: use a kernel with {fs} (modprobe {fs}) that mounts what {program} creates, or keep {fs} volumes on other nodes"
            ),
        ),
    }
}

/// Creates and mounts a file system in a directory that is created for it, calls `act`, and removes
/// everything again, including what `act` or `end`, which is called last, has left in the
/// directory. What cannot be unmounted is left, and the error names it.
pub(super) fn on_mounted<T>(
    host: &dyn Host,
    folder: &Path,
    fs: FsType,
    act: impl FnOnce(&Mounted<'_>) -> Result<T>,
    end: impl FnOnce(),
) -> Result<T> {
    let mut made = TemporaryDirs {
        host,
        folders: Vec::new(),
    };
    made.folders_to(folder)?;
    let mut is_mounted = false;
    let tried = on_image(host, folder, fs, act, &mut is_mounted);
    end();
    if is_mounted {
        return tried;
    }
    let removed = remove(host, folder);
    let tried = tried?;
    removed.map(|()| tried)
}

/// Removes a directory with its content.
fn remove(host: &dyn Host, folder: &Path) -> Result<()> {
    let doing = || format!("clear {}", folder.display());
    for name in host.list_dir(folder).context(doing)?.unwrap_or_default() {
        let path = folder.join(name);
        match host.stat(&path).context(doing)?.map(|found| found.kind) {
            Some(FileKind::Dir) => remove(host, &path)?,
            Some(_) => perform(host, &Effect::RemoveFile { path: &path })?,
            None => {}
        }
    }
    perform(host, &Effect::RemoveDir { path: folder })
}

fn doing() -> String {
    "try a temporary file system".into()
}

fn perform(host: &dyn Host, effect: &Effect<'_>) -> Result<()> {
    host.perform(effect).map(drop).context(doing)
}

/// Directories that are removed when this is dropped, the last one first; those in use by others
/// then are left.
struct TemporaryDirs<'a> {
    host: &'a dyn Host,
    folders: Vec<PathBuf>,
}

impl TemporaryDirs<'_> {
    fn folder(&mut self, path: &Path) -> Result<()> {
        // Recorded first, because an effect that reports a failure may have been performed.
        self.folders.push(path.to_path_buf());
        perform(self.host, &Effect::MakeDir { path })
    }

    /// Creates the directory, and the missing ones above it.
    fn folders_to(&mut self, path: &Path) -> Result<()> {
        let mut missing = Vec::new();
        for folder in path.ancestors() {
            if self.host.stat(folder).context(doing)?.is_some() {
                break;
            }
            missing.push(folder);
        }
        missing
            .into_iter()
            .rev()
            .try_for_each(|folder| self.folder(folder))
    }
}

impl Drop for TemporaryDirs<'_> {
    fn drop(&mut self) {
        for path in self.folders.iter().rev() {
            let _ = self.host.perform(&Effect::RemoveDir { path });
        }
    }
}

fn scratch(host: &dyn Host, image: &Path, size: u64) -> Result<FileStat> {
    let allocate = Effect::Allocate {
        path: image,
        size,
        reserve: false,
    };
    perform(host, &allocate)?;
    let gone = || Error::refused(image.display(), "the temporary image has disappeared");
    host.stat(image).context(doing)?.ok_or_else(gone)
}

fn on_image<T>(
    host: &dyn Host,
    folder: &Path,
    fs: FsType,
    act: impl FnOnce(&Mounted<'_>) -> Result<T>,
    is_mounted: &mut bool,
) -> Result<T> {
    let image = &folder.join("trial.img");
    let file = scratch(host, image, TRIAL_BYTES.max(fs.minimum_bytes()))?;
    // With autoclear the device is detached when it is unmounted.
    let spec = LoopSpec {
        image,
        backing: file.id,
        block_size: 512,
        autoclear: true,
        read_only: false,
    };
    let hold = attach_loop(host, spec).context(doing)?;
    let device = hold.device();
    let format = Effect::Format {
        device: &device,
        fs,
        uuid: host.random_uuid(),
        options: &[],
        keep_blocks: false,
    };
    perform(host, &format)?;
    let target = folder.join("mounted");
    let make = Effect::MakeTarget {
        path: &target,
        kind: NodeKind::Dir,
    };
    perform(host, &make)?;
    let mount = MountSpec {
        device: &device,
        target: &target,
        fs,
        options: &[],
        read_only: false,
    };
    let mounted = perform(host, &Effect::Mount(mount));
    *is_mounted = mounted.is_ok();
    let acted = mounted.and_then(|()| {
        act(&Mounted {
            target: &target,
            device: &device,
            image: &file,
        })
    });
    // Also after a failed mount, which may have been performed.
    let unmounted = perform(host, &Effect::Unmount { target: &target });
    drop(hold);
    if unmounted.is_err() && *is_mounted {
        return unmounted.and(acted);
    }
    *is_mounted = false;
    let removed = perform(host, &Effect::RemoveTarget { path: &target });
    let acted = acted?;
    removed.map(|()| acted)
}
