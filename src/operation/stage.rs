//! NodeStage and NodeUnstage: attach the device, make the file system once, mount it.
//!
//! Never formatted twice: the record says "begun" before mkfs starts and "complete" before the
//! first mount, so mkfs runs only on what nobody has ever seen. Whether a mounted volume is
//! staged, the mount table says; a block volume's stage is in its record, valid for one boot.

use std::path::Path;
use std::sync::atomic::Ordering;

use uuid::Uuid;

use super::lock::Key;
use super::pool::{Owner, Pool};
use super::{Driver, StageVolume, usage};
use crate::backend::{AttachMode, Attached};
use crate::error::{Doing, Error, Kind, Mismatch, Result, chain};
use crate::host::{Effect, MountSpec, NodeKind, Signature};
use crate::model::{AccessType, Capability, FsType, mount_option};
use crate::record::{Formatted, FormattedAs, LastStage, VolumeRecord};

/// What is to be done with a device before it's mounted.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Plan {
    /// Run mkfs: nobody has ever seen the volume.
    Format(Uuid),
    /// Mount what is there.
    Keep,
}

impl Driver {
    /// NodeStageVolume. A crash leaves at most an attached device, which vanishes with the
    /// process (autoclear), or a finished stage, which a repeat finds.
    pub fn stage_volume(&self, request: &StageVolume) -> Result<()> {
        let staging = self.new_caller_path("staging_target_path", &request.staging_path)?;
        let (pool, id, _) = self.find(&request.volume_id)?;
        let _lock = self.locks.acquire(Key::Volume(id.uuid))?;
        // Read again: it may have been deleted before the lock was ours.
        let (_, _, record) = self.find(&request.volume_id)?;
        let Some(fs) = wanted_fs(&record, &request.capability) else {
            return self.stage_block(&pool, record, request);
        };
        self.refuse_other_access(&record, "mount")?;
        if self.is_staged(&pool, &record, request, &staging)? {
            return Ok(());
        }
        let mut record = record;
        let stage = LastStage {
            staging_path: request.staging_path.clone(),
            capability: request.capability.clone(),
            boot: None,
        };
        self.mount_volume(
            &pool,
            &mut record,
            fs,
            &staging,
            &request.capability,
            Some(stage),
            false,
        )
    }

    /// Attach, format once, mount, grow. On an error the mount is gone again and the device
    /// vanishes with its last opener.
    #[expect(
        clippy::too_many_arguments,
        reason = "one step with two callers: stage and inline publish"
    )]
    pub(super) fn mount_volume(
        &self,
        pool: &Pool,
        record: &mut VolumeRecord,
        fs: FsType,
        target: &Path,
        capability: &Capability,
        stage: Option<LastStage>,
        read_only: bool,
    ) -> Result<()> {
        let attached = pool.backend.attach(
            record,
            AttachMode {
                read_only: false,
                lasting: false,
            },
        )?;
        if !self.is_mounted(&attached)?
            && self
                .host
                .is_claimed(&attached.device)
                .doing(|| "look at the device".into())?
        {
            return Err(Error::Busy {
                subject: format!("volume {}", record.uuid),
                holder: format!(
                    "{} has a file system that is not mounted here (frozen, or in another mount namespace)",
                    attached.device.path.display()
                ),
            });
        }
        self.format_once(pool, record, &attached, fs, stage)?;
        let AccessType::Mount { mount_flags, .. } = &capability.access_type else {
            return Err(Error::Bug {
                invariant: "only a mount capability is mounted".into(),
            });
        };
        let read_only = read_only || mount_option::is_read_only(mount_flags);
        self.host
            .perform(&Effect::MakeTarget {
                path: target,
                kind: NodeKind::Dir,
            })
            .doing(|| format!("make {}", target.display()))?;
        let spec = MountSpec {
            device: &attached.device,
            target,
            fs,
            options: mount_flags,
            read_only,
        };
        self.host
            .perform(&Effect::Mount(spec))
            .doing(|| format!("mount volume {} at {}", record.uuid, target.display()))?;
        if read_only {
            return Ok(());
        }
        self.grow_mounted(&attached, target, fs)
            .map_err(|first| self.undo_mount(target, first))
    }

    fn undo_mount(&self, target: &Path, first: Error) -> Error {
        match self.host.perform(&Effect::Unmount { target }) {
            Ok(_) => first,
            Err(undo) => Error::Undo {
                first: Box::new(first),
                undo: chain(&undo),
            },
        }
    }

    fn is_mounted(&self, attached: &Attached) -> Result<bool> {
        let mounts = self.host.mounts().doing(|| "read the mount table".into())?;
        Ok(!usage::of_device(&mounts, &attached.device).is_empty())
    }

    /// Grows a mounted file system that is smaller than its device: nobody calls NodeExpand for
    /// a volume that grew while it was not staged.
    pub(super) fn grow_mounted(
        &self,
        attached: &Attached,
        mount_point: &Path,
        fs: FsType,
    ) -> Result<()> {
        let doing = || format!("grow {fs} at {}", mount_point.display());
        if self
            .host
            .wants_growth(&attached.device, mount_point, fs)
            .doing(doing)?
        {
            self.host
                .perform(&Effect::GrowFs {
                    device: &attached.device,
                    mount_point,
                    fs,
                })
                .doing(doing)?;
        }
        Ok(())
    }

    /// Runs mkfs if and only if nobody has ever seen the volume, and records the stage.
    fn format_once(
        &self,
        pool: &Pool,
        record: &mut VolumeRecord,
        attached: &Attached,
        fs: FsType,
        stage: Option<LastStage>,
    ) -> Result<()> {
        let device = &attached.device;
        let signature = self
            .host
            .signature(device)
            .doing(|| format!("probe volume {}", record.uuid))?;
        let fresh = self.host.random_uuid();
        match plan(record, &signature, fs, fresh)? {
            Plan::Format(uuid) => {
                record.formatted = Some(Formatted {
                    kind: fs.into(),
                    uuid,
                    complete: false,
                });
                pool.backend.update(record)?;
                let keep_blocks = record.allocation == crate::model::Allocation::Thick;
                let effect = Effect::Format {
                    device,
                    fs,
                    uuid,
                    options: &record.mkfs_options,
                    keep_blocks,
                };
                self.host
                    .perform(&effect)
                    .doing(|| format!("format volume {} as {fs}", record.uuid))?;
                self.formats.fetch_add(1, Ordering::Relaxed);
                record.formatted = Some(Formatted {
                    kind: fs.into(),
                    uuid,
                    complete: true,
                });
            }
            Plan::Keep if record.last_stage == stage || stage.is_none() => return Ok(()),
            Plan::Keep => {}
        }
        if stage.is_some() {
            record.last_stage = stage;
        }
        pool.backend.update(record)
    }

    /// Whether the volume is staged at this path as asked. Staged otherwise is an error.
    fn is_staged(
        &self,
        pool: &Pool,
        record: &VolumeRecord,
        request: &StageVolume,
        staging: &Path,
    ) -> Result<bool> {
        let mounts = self.host.mounts().doing(|| "read the mount table".into())?;
        let here = self.table_path(staging)?;
        let at_path = usage::at(&mounts, &here);
        let devices = pool.backend.devices(record.uuid)?;
        let ours = |mount: &crate::host::Mount| {
            devices
                .iter()
                .any(|found| usage::shows(mount, &found.device))
        };
        match at_path.last() {
            Some(top) if ours(top) => {
                let found = record.last_stage.as_ref().map(|stage| &stage.capability);
                match found {
                    Some(found) if *found != request.capability => Err(Error::Exists {
                        kind: Kind::Volume,
                        id: request.volume_id.clone(),
                        mismatch: Mismatch {
                            field: "volume_capability",
                            found: super::create::say(std::slice::from_ref(found)),
                            wanted: super::create::say(std::slice::from_ref(&request.capability)),
                        },
                    }),
                    Some(_) | None => Ok(true),
                }
            }
            Some(top) => Err(Error::refused(
                request.staging_path.as_str(),
                format!(
                    "something else is mounted there ({} of {})",
                    top.fs_name,
                    top.source.display()
                ),
            )),
            None => {
                let elsewhere = record
                    .last_stage
                    .as_ref()
                    .filter(|stage| stage.staging_path != request.staging_path);
                let elsewhere = match elsewhere {
                    Some(stage) => {
                        // The old path may be gone, or outside of what is allowed by now.
                        let old = self
                            .table_path(Path::new(&stage.staging_path))
                            .unwrap_or_else(|_| stage.staging_path.clone().into());
                        usage::at(&mounts, &old)
                            .into_iter()
                            .find(|mount| ours(mount))
                    }
                    None => None,
                };
                match elsewhere {
                    Some(mount) => Err(Error::refused(
                        format!("volume {}", request.volume_id),
                        format!(
                            "it is staged at {}; unstage it there first",
                            mount.mount_point.display()
                        ),
                    )),
                    None => Ok(false),
                }
            }
        }
    }

    /// A block volume's device is attached when it is published, because only then is it known
    /// whether it may be written; its stage is a line in its record.
    fn stage_block(
        &self,
        pool: &Pool,
        mut record: VolumeRecord,
        request: &StageVolume,
    ) -> Result<()> {
        self.refuse_other_access(&record, "block")?;
        if let Some(path) = self.staged_as_block(&record)? {
            if path != request.staging_path {
                return Err(Error::refused(
                    format!("volume {}", request.volume_id),
                    format!("it is staged at {path}; unstage it there first"),
                ));
            }
            let mismatch = record
                .last_stage
                .as_ref()
                .filter(|stage| stage.capability != request.capability)
                .map(|stage| Mismatch {
                    field: "volume_capability",
                    found: super::create::say(std::slice::from_ref(&stage.capability)),
                    wanted: super::create::say(std::slice::from_ref(&request.capability)),
                });
            return match mismatch {
                Some(mismatch) => Err(Error::Exists {
                    kind: Kind::Volume,
                    id: request.volume_id.clone(),
                    mismatch,
                }),
                None => Ok(()),
            };
        }
        let boot = self.host.boot_id().doing(|| "read the boot id".into())?;
        // From now on the user writes what they like: it counts as formatted for ever.
        record.formatted = Some(Formatted {
            kind: FormattedAs::Raw,
            uuid: Uuid::nil(),
            complete: true,
        });
        record.last_stage = Some(LastStage {
            staging_path: request.staging_path.clone(),
            capability: request.capability.clone(),
            boot: Some(boot),
        });
        pool.backend.update(&record)
    }

    /// Where a block volume is staged, in this boot.
    pub(super) fn staged_as_block(&self, record: &VolumeRecord) -> Result<Option<String>> {
        let Some(LastStage {
            staging_path,
            boot: Some(boot),
            ..
        }) = &record.last_stage
        else {
            return Ok(None);
        };
        let now = self.host.boot_id().doing(|| "read the boot id".into())?;
        Ok((now == *boot).then(|| staging_path.clone()))
    }

    /// Refuses a volume that has been used with the other access type.
    fn refuse_other_access(&self, record: &VolumeRecord, wanted: &str) -> Result<()> {
        let Some(formatted) = record
            .formatted
            .as_ref()
            .filter(|formatted| formatted.complete)
        else {
            return Ok(());
        };
        if (formatted.kind == FormattedAs::Raw) == (wanted == "block") {
            return Ok(());
        }
        Err(Error::refused(
            format!("volume {}", record.uuid),
            format!(
                "it has been used as {}, access type {wanted} would destroy that",
                formatted.kind.word()
            ),
        ))
    }

    /// NodeUnstageVolume. Works from the mount table also when the pool isn't served. Nothing
    /// there is success; targets that are still published keep the file system alive.
    pub fn unstage_volume(&self, volume_id: &str, staging_path: &str) -> Result<()> {
        let staging = self.caller_path("staging_target_path", staging_path)?;
        let owner = self.owner(volume_id);
        let key = match &owner {
            Ok(Owner::Pool(_, id)) => Key::Volume(id.uuid),
            Ok(Owner::Nobody) | Err(_) => volume_id
                .parse::<crate::model::VolumeId>()
                .map_or(Key::Path(staging_path.into()), |id| Key::Volume(id.uuid)),
        };
        let _lock = self.locks.acquire(key)?;
        let owned = match &owner {
            Ok(Owner::Pool(pool, id)) => Some((pool.as_ref(), id.uuid)),
            Ok(Owner::Nobody) | Err(_) => None,
        };
        self.unmount_all(owned, &staging)?;
        let Some((pool, uuid)) = owned else {
            return Ok(());
        };
        if let Ok(Some(mut record)) = pool.backend.volume(uuid)
            && self
                .staged_as_block(&record)?
                .is_some_and(|path| path == staging_path)
        {
            record.last_stage = None;
            pool.backend.update(&record)?;
        }
        self.free_devices(pool, uuid)
    }

    /// Unmounts what is ours at a path, however often it's mounted there. With the pool served
    /// "ours" is this volume's device; without, any loop device.
    pub(super) fn unmount_all(&self, owned: Option<(&Pool, Uuid)>, path: &Path) -> Result<()> {
        let here = self.table_path(path)?;
        let devices = match owned {
            Some((pool, uuid)) => pool.backend.devices(uuid)?,
            None => Vec::new(),
        };
        let known = owned.is_some_and(|(pool, uuid)| {
            pool.backend
                .volume(uuid)
                .is_ok_and(|record| record.is_some())
        });
        loop {
            let mounts = self.host.mounts().doing(|| "read the mount table".into())?;
            let Some(top) = usage::at(&mounts, &here).last().copied() else {
                return Ok(());
            };
            let ours = devices.iter().any(|found| usage::shows(top, &found.device))
                || (!known && usage::is_of_loop(top));
            if !ours {
                return Err(Error::refused(
                    path.display(),
                    format!(
                        "what is mounted there ({} of {}) is not this volume",
                        top.fs_name,
                        top.source.display()
                    ),
                ));
            }
            self.host
                .perform(&Effect::Unmount { target: path })
                .doing(|| format!("unmount {}", path.display()))?;
        }
    }

    /// Ends devices of a volume that nothing uses any more. One with a claim (another mount
    /// namespace, a frozen file system) or an opener stays until that ends.
    pub(super) fn free_devices(&self, pool: &Pool, uuid: Uuid) -> Result<()> {
        let found = pool.backend.devices(uuid)?;
        if found.is_empty() {
            return Ok(());
        }
        let mounts = self.host.mounts().doing(|| "read the mount table".into())?;
        for found in found
            .iter()
            .filter(|found| usage::of_device(&mounts, &found.device).is_empty())
        {
            if self
                .host
                .is_claimed(&found.device)
                .doing(|| "look at the device".into())?
            {
                tracing::warn!(volume = %uuid, device = %found.device.path.display(), "unmounted here, but a file system still holds the device");
                continue;
            }
            pool.backend.detach(uuid, &found.device)?;
        }
        Ok(())
    }
}

/// The file system that a stage means: what it says, else what the volume was made for.
fn wanted_fs(record: &VolumeRecord, capability: &Capability) -> Option<FsType> {
    match &capability.access_type {
        AccessType::Block => None,
        AccessType::Mount {
            fs_type: Some(fs), ..
        } => Some(*fs),
        AccessType::Mount { fs_type: None, .. } => {
            let made_as = record
                .formatted
                .as_ref()
                .and_then(|formatted| formatted.kind.fs());
            let asked = record
                .capabilities
                .iter()
                .find_map(|capability| capability.access_type.fs());
            Some(made_as.or(asked).unwrap_or(FsType::Ext4))
        }
    }
}

/// Decides about mkfs. The record outranks the device: what was ever complete is never formatted
/// again, however blank it reads.
fn plan(record: &VolumeRecord, signature: &Signature, fs: FsType, fresh: Uuid) -> Result<Plan> {
    let refuse = |reason: String| Err(Error::refused(format!("volume {}", record.uuid), reason));
    match (&record.formatted, signature) {
        (None, Signature::None) => Ok(Plan::Format(fresh)),
        (None, found) => refuse(format!(
            "it was never formatted by this driver, yet {} is on it; it is left as it is",
            name(found)
        )),
        // mkfs was cut off; nobody has ever mounted what it left.
        (
            Some(Formatted {
                complete: false, ..
            }),
            _,
        ) => Ok(Plan::Format(fresh)),
        (Some(formatted), _) if formatted.kind != FormattedAs::from(fs) => refuse(format!(
            "it is {}, and {fs} is asked for",
            formatted.kind.word()
        )),
        (Some(_), Signature::Fs { name, .. }) if name == fs.name() => Ok(Plan::Keep),
        (Some(formatted), found) => refuse(format!(
            "it was formatted as {}, but {} is found on it; it is never formatted again, repair or restore it",
            formatted.kind.word(),
            name(found)
        )),
    }
}

fn name(signature: &Signature) -> String {
    match signature {
        Signature::None => "nothing".into(),
        Signature::Fs { name, .. } => name.clone(),
        Signature::Other(what) => what.clone(),
    }
}
