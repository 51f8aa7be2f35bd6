//! Mounts a volume at a path of a CSI request, and undoes what a failed attempt did there.

use std::path::Path;

use super::view::View;
use crate::error::{Error, ErrorContext, Kind, Mismatch, Result, chain};
use crate::host::{Effect, NodeKind};
use crate::model::AccessMode;
use crate::operation::{PublishVolume, Usage, usage};
use crate::record::LastStage;

impl Usage {
    /// Creates the target and mounts on it. If the mount fails, the target is removed again.
    pub(in crate::operation) fn show(
        &self,
        target: &Path,
        kind: NodeKind,
        mount: Effect<'_>,
        doing: impl Fn() -> String,
    ) -> Result<()> {
        self.make_target("target_path", target, kind)
            .and_then(|()| self.host.perform(&mount).map(drop).context(&doing))
            .map_err(|first| self.undo_target(target, self.undo_mount(target, first)))
    }

    /// Removes the target that a failed attempt has created.
    pub(in crate::operation) fn undo_target(&self, target: &Path, first: Error) -> Error {
        if matches!(first, Error::Invalid { .. } | Error::RollbackFailed { .. }) {
            return first;
        }
        match self.host.perform(&Effect::RemoveTarget { path: target }) {
            Ok(_) => first,
            Err(undo) => Error::RollbackFailed {
                first: Box::new(first),
                undo: chain(&undo),
            },
        }
    }

    /// Whether the target already shows the volume as requested. Another mount there, or the volume
    /// in another mode, is an error.
    pub(in crate::operation) fn is_published(
        &self,
        request: &PublishVolume,
        view: &View,
        target: &Path,
        read_only: bool,
    ) -> Result<bool> {
        let here = self.table_path(target)?;
        let Some(top) = usage::at(&view.mounts, &here).last().copied() else {
            return Ok(false);
        };
        let Some(found) = view
            .devices
            .iter()
            .find(|found| usage::shows(top, &found.device))
        else {
            return Err(usage::foreign_mount(target, top));
        };
        let bound_node = usage::is_node(top);
        let differ = |field, found: &str, wanted: &str| {
            let there = format!("{} at {}", request.volume_id, request.target_path);
            let mismatch = Mismatch::new(field, found, wanted);
            Err(Error::exists(Kind::Volume, there, mismatch))
        };
        let found_type = if bound_node { "block" } else { "mount" };
        if found_type != request.capability.access_type.as_str() {
            return differ(
                "volume_capability",
                found_type,
                request.capability.access_type.as_str(),
            );
        }
        let found_ro = if bound_node {
            found.read_only
        } else {
            top.is_read_only()
        };
        if found_ro != read_only {
            return differ("readonly", &found_ro.to_string(), &read_only.to_string());
        }
        Ok(true)
    }

    /// Refuses a second target path of a volume with access mode SINGLE_NODE_SINGLE_WRITER.
    pub(in crate::operation) fn refuse_second_writer(
        &self,
        stage: Option<&LastStage>,
        request: &PublishVolume,
        view: &View,
        own: &[std::path::PathBuf],
    ) -> Result<()> {
        let single = AccessMode::SingleNodeSingleWriter;
        let staged_as = stage.map(|stage| stage.capability.access_mode);
        if request.capability.access_mode != single && staged_as != Some(single) {
            return Ok(());
        }
        match view
            .uses()
            .into_iter()
            .find(|mount| !own.contains(&mount.mount_point))
        {
            None => Ok(()),
            Some(other) => Err(Error::refused(
                format!("volume {}", request.volume_id),
                format!(
                    "access mode {} allows one target path, but it is published at {}",
                    single.name(),
                    other.mount_point.display()
                ),
            )),
        }
    }

    /// Unmounts what a failed attempt may have mounted at a path where nothing was mounted before.
    /// The error of a mount does not show whether it took effect.
    pub(in crate::operation) fn undo_mount(&self, target: &Path, first: Error) -> Error {
        let unmounted = self.mount_at(target).and_then(|mounted| match mounted {
            None => Ok(()),
            Some(_) => self
                .host
                .perform(&Effect::Unmount { target })
                .map(drop)
                .context(|| format!("unmount {}", target.display())),
        });
        match unmounted {
            Ok(()) => first,
            Err(undo) => Error::RollbackFailed {
                first: Box::new(first),
                undo: chain(&undo),
            },
        }
    }
}
