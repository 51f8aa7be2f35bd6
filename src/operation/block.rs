//! Raw block volumes: stage and publish.
//!
//! The device is attached when the volume is published, because only then is it known whether it
//! may be written. So the stage is a line in the record, valid for one boot, and what is
//! published is what the mount table says.

use std::path::Path;

use uuid::Uuid;

use super::publish::View;
use super::stage::{same_capability, staged_at};
use super::{Driver, Pool, PublishVolume, StageVolume};
use crate::backend::{AttachMode, FoundDevice};
use crate::error::{Doing, Error, Result, chain};
use crate::host::{Effect, NodeKind};
use crate::model::{AccessType, Capability};
use crate::record::{Formatted, FormattedAs, LastStage, VolumeRecord};

impl Driver {
    /// NodeStageVolume of a block volume: from now on its content is the user's.
    pub(super) fn stage_block(
        &self,
        pool: &Pool,
        mut record: VolumeRecord,
        request: &StageVolume,
    ) -> Result<()> {
        self.refuse_other_access(&record, "block")?;
        if let Some(path) = self.staged_as_block(&record).map_err(Error::unseen)? {
            if path != request.staging_path {
                return Err(staged_at(request, &path));
            }
            return same_capability(&record, request);
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
        // The stage is nothing but this record, and an unwritten one may be there all the same:
        // the caller must not forget it.
        pool.backend.update(&record).map_err(|first| Error::Undo {
            first: Box::new(first),
            undo: "whether its stage is recorded isn't known".into(),
        })
    }

    /// Where a block volume is staged, in this boot.
    pub(super) fn staged_as_block(&self, record: &VolumeRecord) -> Result<Option<String>> {
        let Some(LastStage {
            staging_path,
            boot: Some(boot),
            capability:
                Capability {
                    access_type: AccessType::Block,
                    ..
                },
        }) = &record.last_stage
        else {
            return Ok(None);
        };
        let now = self.host.boot_id().doing(|| "read the boot id".into())?;
        Ok((now == *boot).then(|| staging_path.clone()))
    }

    /// Read-only is real: a loop device that can't write, which is only possible where nobody
    /// else has the volume open for writing (two devices on one image would destroy it).
    pub(super) fn publish_block(
        &self,
        pool: &Pool,
        record: &VolumeRecord,
        request: &PublishVolume,
        view: &View,
        target: &Path,
        read_only: bool,
    ) -> Result<()> {
        let refuse = |reason: String| {
            Err(Error::refused(
                format!("volume {}", request.volume_id),
                reason,
            ))
        };
        self.refuse_unless_staged(record, request)?;
        if self.is_published(request, view, target, read_only)? {
            return Ok(());
        }
        self.refuse_second_writer(record, request, view, &[self.table_path(target)?])?;
        if let Some(found) = view
            .devices
            .iter()
            .find(|found| found.read_only != read_only)
        {
            if !view.uses().is_empty() {
                let (has, wants) = if read_only {
                    ("for writing", "read-only")
                } else {
                    ("read-only", "for writing")
                };
                return refuse(format!(
                    "it is published {has} already, and can't be published {wants} beside that: a second device on one image would destroy it"
                ));
            }
            pool.backend.detach(record.uuid, &found.device)?;
        }
        let mode = AttachMode {
            read_only,
            lasting: true,
        };
        let attached = match pool.backend.attach(record, mode) {
            Err(first @ Error::Host { .. }) => {
                let first = self.undo_target(target, first);
                return Err(self.undo_devices(pool, record.uuid, &view.devices, first));
            }
            attached => attached?,
        };
        let bind = Effect::BindDevice {
            device: &attached.device,
            target,
        };
        let shown = self.show(target, NodeKind::File, bind, || {
            format!(
                "publish volume {} at {}",
                request.volume_id,
                target.display()
            )
        });
        drop(attached.hold);
        shown.map_err(|first| self.undo_devices(pool, record.uuid, &view.devices, first))
    }

    /// Ends a device that was attached for nothing.
    fn undo_devices(&self, pool: &Pool, uuid: Uuid, before: &[FoundDevice], first: Error) -> Error {
        match self.free_devices(pool, uuid, before) {
            Ok(()) => first,
            Err(undo) => Error::Undo {
                first: Box::new(first),
                undo: chain(&undo),
            },
        }
    }

    fn refuse_unless_staged(&self, record: &VolumeRecord, request: &PublishVolume) -> Result<()> {
        let wanted = &request.staging_path;
        let reason = match self.staged_as_block(record).map_err(Error::unseen)? {
            Some(path) if path == *wanted => return Ok(()),
            Some(path) => format!("it is staged at {path}, not at {wanted}"),
            None => format!("it is not staged at {wanted} as block; stage it there first"),
        };
        Err(Error::refused(
            format!("volume {}", request.volume_id),
            reason,
        ))
    }
}
