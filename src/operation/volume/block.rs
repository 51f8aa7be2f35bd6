//! Raw block volumes: stage and publish.
//!
//! The device is attached when the volume is published, because only then is it known whether it
//! may be written. So a stage is only an entry (`block_stage.rs`) that is valid for one boot, and
//! the mount table shows where the volume is published.

use std::path::Path;

use uuid::Uuid;

use super::capability::{same_capability, staged_at};
use crate::backend::{AttachMode, FoundDevice};
use crate::error::{Error, Result, chain};
use crate::host::{Effect, NodeKind};
use crate::operation::usage::view::View;
use crate::operation::{Pool, PublishVolume, StageVolume, Volumes};
use crate::record::{Formatted, LastStage, VolumeRecord};

impl Volumes {
    /// NodeStageVolume of a block volume: from now on its content belongs to the user.
    pub(in crate::operation) fn stage_block(
        &self,
        pool: &Pool,
        mut record: VolumeRecord,
        request: &StageVolume,
    ) -> Result<()> {
        self.refuse_other_access(&record, "block")?;
        if let Some(stage) = self
            .usage
            .block_stage(&record)
            .map_err(Error::into_indeterminate)?
        {
            if stage.staging_path != request.staging_path {
                return Err(staged_at(request, &stage.staging_path));
            }
            return same_capability(Some(&stage), request);
        }
        self.check_raw_block(pool)?;
        let raw = Formatted::raw();
        // A record or entry whose write failed may be on disk nevertheless, so the caller must
        // still unstage the volume.
        let unsure = |first| Error::RollbackFailed {
            first: Box::new(first),
            undo: "it is unknown whether its staging was recorded".into(),
        };
        // From now on the user may write any content, so the volume counts as formatted forever.
        if record.formatted.as_ref() != Some(&raw) {
            record.formatted = Some(raw);
            pool.backend.update(&record).map_err(unsure)?;
        }
        let stage = LastStage {
            staging_path: request.staging_path.clone(),
            capability: request.capability.clone(),
            boot: None,
        };
        self.usage
            .begin_block_stage(pool, record, stage)
            .map_err(unsure)
    }

    /// NodePublishVolume of a block volume. A read-only publish uses a loop device that cannot
    /// write. It is only possible if the volume is not published for writing at the same time: two
    /// devices on one image would corrupt it.
    pub(in crate::operation) fn publish_block(
        &self,
        pool: &Pool,
        record: &VolumeRecord,
        request: &PublishVolume,
        view: &View,
        target: &Path,
        read_only: bool,
    ) -> Result<()> {
        let usage = &self.usage;
        let stage = usage
            .block_stage(record)
            .map_err(Error::into_indeterminate)?;
        refuse_unless_staged(stage.as_ref(), request)?;
        if usage.is_published(request, view, target, read_only)? {
            return Ok(());
        }
        usage.close_published(record.uuid)?;
        usage.refuse_changed(&request.volume_id, record.uuid)?;
        let own = [usage.table_path(target)?];
        usage.refuse_second_writer(stage.as_ref(), request, view, &own)?;
        let mut devices = view.devices.iter();
        if let Some(found) = devices.find(|found| found.read_only != read_only) {
            if !view.uses().is_empty() {
                let (has, wants) = match read_only {
                    true => ("for writing", "read-only"),
                    false => ("read-only", "for writing"),
                };
                let reason = format!(
                    "it is already published {has} and cannot be published {wants} as well: a second device on the same image would corrupt it"
                );
                return Err(Error::refused(
                    format!("volume {}", request.volume_id),
                    reason,
                ));
            }
            pool.backend.devices().detach(record.uuid, &found.device)?;
        }
        let mode = AttachMode {
            read_only,
            lasting: true,
        };
        let attached = match pool.backend.devices().attach(record, mode) {
            Err(first @ Error::Host { .. }) => {
                let first = usage.undo_target(target, first);
                return Err(self.undo_devices(pool, record.uuid, &view.devices, first));
            }
            attached => attached?,
        };
        let doing = || {
            let target = target.display();
            format!("publish volume {} at {target}", request.volume_id)
        };
        let device = attached.device.clone();
        let watched = pool.backend.devices().watch(record.uuid, attached);
        let kept = watched.and_then(|watched| {
            let bind = Effect::BindDevice {
                device: &device,
                target,
            };
            usage.show(target, NodeKind::File, bind, doing)?;
            usage.keep_published(pool, record.uuid, watched);
            Ok(())
        });
        kept.map_err(|first| self.undo_devices(pool, record.uuid, &view.devices, first))
    }

    /// Detaches a device that was attached for an attempt that failed.
    fn undo_devices(&self, pool: &Pool, uuid: Uuid, before: &[FoundDevice], first: Error) -> Error {
        match self.usage.free_devices(pool, uuid, before) {
            Ok(()) => first,
            Err(undo) => Error::RollbackFailed {
                first: Box::new(first),
                undo: chain(&undo),
            },
        }
    }
}

fn refuse_unless_staged(stage: Option<&LastStage>, request: &PublishVolume) -> Result<()> {
    let wanted = &request.staging_path;
    let reason = match stage.map(|stage| &stage.staging_path) {
        Some(path) if path == wanted => return Ok(()),
        Some(path) => format!("it is staged at {path}, not at {wanted}"),
        None => format!("it is not staged at {wanted} as a block volume; stage it there first"),
    };
    Err(Error::refused(
        format!("volume {}", request.volume_id),
        reason,
    ))
}
