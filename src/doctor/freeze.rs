//! The freeze: where its journal lies, and whether it works, by one on a throw-away file system.
//!
//! The trial goes through the guard, as a cut does: it thaws whatever becomes of this process.
//! Nobody else sees the file system or writes to it.

use std::path::{Path, PathBuf};
use std::time::Duration;

use super::{Check, Patient, kernel};
use crate::error::{Doing, Error, Result, chain};
use crate::host::freezer::FreezeLimits;
use crate::host::{
    Device, Done, Effect, FileKind, FileStat, FreezeMember, Freezer, Host, LoopSpec, MountSpec,
    NodeKind,
};
use crate::model::{FsType, PoolPlace};

/// An ext4 of this size is made in a moment; its file has holes.
const TRIAL_BYTES: u64 = 16 << 20;
/// Only a hang takes so long.
const LIMITS: FreezeLimits = FreezeLimits {
    sync: Duration::from_secs(5),
    freeze: Duration::from_secs(5),
};
/// What is gone after a boot, as freezes are.
const FORGETFUL: [&str; 2] = ["tmpfs", "ramfs"];
/// Name of the member in journal and logs.
const MEMBER: &str = "doctor";

pub(super) fn examine(host: &dyn Host, freezer: &dyn Freezer, patient: &Patient) -> Vec<Check> {
    let state = state_dir(host, patient);
    let usable = state.level != super::Level::Fail;
    let mut checks = vec![state];
    if usable {
        checks.push(trial(host, freezer, patient));
    }
    checks
}

/// The folder of the journal: not on what may be frozen, best on what a boot empties.
fn state_dir(host: &dyn Host, patient: &Patient) -> Check {
    let path = &patient.state_dir;
    let subject = format!("state dir {}", path.display());
    let on_a_pool = patient.pools.iter().find(|pool| match &pool.place {
        PoolPlace::File { path: folder } => path.starts_with(folder),
        PoolPlace::Memory => false,
    });
    let elsewhere = "give another with --state-dir, such as /run/slackwater/state";
    if let Some(pool) = on_a_pool {
        let found = format!("it lies on pool {}", pool.name);
        return Check::fail(subject, found, elsewhere);
    }
    let mut there = None;
    for folder in path.ancestors() {
        match host.stat(folder) {
            Ok(Some(stat)) if stat.kind == FileKind::File => {
                let found = format!("{} is a file", folder.display());
                return Check::fail(subject, found, elsewhere);
            }
            Ok(Some(_)) => {
                there = Some(folder);
                break;
            }
            Ok(None) => {}
            Err(error) => return Check::fail(subject, chain(&error), elsewhere),
        }
    }
    let made = match there {
        Some(folder) if folder == path => "",
        Some(_) | None => ", not made yet",
    };
    match host.ground(there.unwrap_or(path)) {
        Ok(ground) if FORGETFUL.contains(&ground.fs_name.as_str()) => Check::ok(
            subject,
            format!("on {}, as it should be{made}", ground.fs_name),
        ),
        Ok(ground) => Check::warn(
            subject,
            format!(
                "on {}: the journal of freezes outlives the boot that they end with{made}",
                ground.fs_name
            ),
            "put it on a tmpfs, such as /run",
        ),
        Err(error) => Check::warn(subject, chain(&error), elsewhere),
    }
}

fn trial(host: &dyn Host, freezer: &dyn Freezer, patient: &Patient) -> Check {
    let fix = "see what is said of rights, programs and loop devices; until then snapshots of mounted volumes need consistency: crash";
    let not_tried = |why: &str| Check::warn("freeze", format!("not tried: {why}"), fix);
    match kernel::may_mount(host) {
        Some(true) => {}
        Some(false) | None => return not_tried("it needs CAP_SYS_ADMIN"),
    }
    if !kernel::is_there(host, &patient.programs, "mkfs.ext4") {
        return not_tried("mkfs.ext4 is missing");
    }
    match in_folder(host, freezer, &patient.trial_dir) {
        Ok(true) => Check::ok(
            "freeze",
            "a throw-away ext4 was frozen and thawed by the guard",
        ),
        Ok(false) => Check::warn(
            "freeze",
            "a throw-away ext4 was thawed early by somebody else",
            "find the program that thaws what it did not freeze: cuts are thrown away because of it",
        ),
        Err(error) => Check::warn("freeze", chain(&error), fix),
    }
}

/// Tries it in a folder that is made for it, and removed with everything in it, what the guard
/// left there included. What can't be unmounted stays as it is, and the error names it.
fn in_folder(host: &dyn Host, freezer: &dyn Freezer, folder: &Path) -> Result<bool> {
    let mut made = Made {
        host,
        folders: Vec::new(),
    };
    made.folders_to(folder)?;
    let mut is_mounted = false;
    let image = folder.join("trial.img");
    let tried = on_image(host, freezer, folder, &image, &mut is_mounted);
    freezer.end();
    if is_mounted {
        return tried;
    }
    let removed = remove(host, folder);
    let tried = tried?;
    removed.map(|()| tried)
}

/// Removes a folder with all that is in it.
fn remove(host: &dyn Host, folder: &Path) -> Result<()> {
    let doing = || format!("clear {}", folder.display());
    for name in host.list_dir(folder).doing(doing)?.unwrap_or_default() {
        let path = folder.join(name);
        match host.stat(&path).doing(doing)?.map(|found| found.kind) {
            Some(FileKind::Dir) => remove(host, &path)?,
            Some(_) => perform(host, &Effect::RemoveFile { path: &path })?,
            None => {}
        }
    }
    perform(host, &Effect::RemoveDir { path: folder })
}

fn perform(host: &dyn Host, effect: &Effect<'_>) -> Result<()> {
    host.perform(effect)
        .map(drop)
        .doing(|| "try a freeze".into())
}

/// Folders that go when this does, the last first; those that others use by then stay.
struct Made<'a> {
    host: &'a dyn Host,
    folders: Vec<PathBuf>,
}

impl Made<'_> {
    fn folder(&mut self, path: &Path) -> Result<()> {
        // Before: what is told as failed may have been done.
        self.folders.push(path.to_path_buf());
        perform(self.host, &Effect::MakeDir { path })
    }

    /// The folder, and those above it that are missing.
    fn folders_to(&mut self, path: &Path) -> Result<()> {
        let mut missing = Vec::new();
        for folder in path.ancestors() {
            let found = self.host.stat(folder);
            if found.doing(|| "try a freeze".into())?.is_some() {
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

impl Drop for Made<'_> {
    fn drop(&mut self) {
        for path in self.folders.iter().rev() {
            let _ = self.host.perform(&Effect::RemoveDir { path });
        }
    }
}

fn on_image(
    host: &dyn Host,
    freezer: &dyn Freezer,
    folder: &Path,
    image: &Path,
    is_mounted: &mut bool,
) -> Result<bool> {
    let allocate = Effect::Allocate {
        path: image,
        size: TRIAL_BYTES,
        reserve: false,
    };
    perform(host, &allocate)?;
    let doing = || "try a freeze".to_string();
    let file = host
        .stat(image)
        .doing(doing)?
        .ok_or_else(|| Error::refused(image.display(), "the scratch image has gone"))?;
    // With autoclear the device goes with its mount.
    let spec = LoopSpec {
        image,
        backing: file.id,
        block_size: 512,
        autoclear: true,
        read_only: false,
    };
    let Done::Loop(hold) = host.perform(&Effect::AttachLoop(spec)).doing(doing)? else {
        return Err(Error::Bug {
            invariant: "AttachLoop gives a loop device".into(),
        });
    };
    let device = hold.device();
    let format = Effect::Format {
        device: &device,
        fs: FsType::Ext4,
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
        fs: FsType::Ext4,
        options: &[],
        read_only: false,
    };
    let mounted = perform(host, &Effect::Mount(mount));
    *is_mounted = mounted.is_ok();
    let frozen = mounted.and_then(|()| freeze(host, freezer, &target, &device, &file));
    // Also after a mount that failed: it may have been done.
    let unmounted = perform(host, &Effect::Unmount { target: &target });
    drop(hold);
    if unmounted.is_err() && *is_mounted {
        return unmounted.and(frozen);
    }
    *is_mounted = false;
    let removed = perform(host, &Effect::RemoveTarget { path: &target });
    let frozen = frozen?;
    removed.map(|()| frozen)
}

/// True if it was still frozen when it was thawed.
fn freeze(
    host: &dyn Host,
    freezer: &dyn Freezer,
    target: &Path,
    device: &Device,
    file: &FileStat,
) -> Result<bool> {
    let doing = || "try a freeze".to_string();
    let root = host
        .open_mount_root(target, device, FsType::Ext4)
        .doing(doing)?;
    let member = FreezeMember {
        volume_id: MEMBER.into(),
        namespace: None,
        image: file.id,
        fs: FsType::Ext4,
        root,
    };
    let session = freezer.begin(vec![member], LIMITS).doing(doing)?;
    session.sync().doing(doing)?;
    session.freeze().doing(doing)?;
    session.thaw(0).doing(doing)
}
