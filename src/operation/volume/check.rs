//! A file system that was not unmounted cleanly is checked before it is mounted. An administrator
//! can check any file system that is not in use.

use crate::backend::AttachMode;
use crate::error::{Error, ErrorContext, HostCause, HostError, Result, chain};
use crate::host::session::one_line_excerpt;
use crate::host::{Check, Checked, Device, Done, Effect};
use crate::model::{FsType, VolumeId};
use crate::operation::lock::Key;
use crate::operation::{Pool, Volumes};
use crate::record::{Formatted, VolumeRecord};

impl Volumes {
    /// Checks the file system of a volume that is not in use, and with `repair` repairs all errors.
    /// The volume is locked until the check ends: other calls for it return ABORTED.
    pub fn check_volume(&self, volume_id: &str, repair: bool) -> Result<Checked> {
        let (pool, id, _) = self.pools.get_volume(volume_id)?;
        let _lock = self.pools.locks.acquire(Key::Volume(id.uuid))?;
        if self.snapshots.copies.has(id.uuid) {
            return Err(Error::Pending {
                what: format!("a copy of volume {volume_id}"),
            });
        }
        let (_, _, mut record) = self.pools.get_volume(volume_id)?;
        let refuse = |reason: String| Err(Error::refused(format!("volume {volume_id}"), reason));
        let formatted = record.formatted.as_ref().filter(|it| it.complete);
        let Some(fs) = formatted.and_then(|it| it.kind.fs()) else {
            return refuse(
                "it has no file system that this driver created, so there is nothing to check"
                    .into(),
            );
        };
        if let Some(path) = self.usage.staged_as_block(&record)? {
            return refuse(format!("it is staged at {path}; unstage it first"));
        }
        let view = self.usage.view(&pool, &record)?;
        if let Some(mount) = view.uses().first() {
            let at = mount.mount_point.display();
            return refuse(format!(
                "it is mounted at {at}; delete the pods that use it first"
            ));
        }
        let mode = AttachMode {
            read_only: false,
            lasting: false,
        };
        let attached = pool.backend.devices().attach(&record, mode)?;
        let device = &attached.device;
        if let Some(claim) = self.usage.find_holder(device)? {
            return refuse(claim);
        }
        let how = if repair { Check::Repair } else { Check::Look };
        let checked = self.host.perform(&Effect::CheckFs { device, fs, how });
        let checked = checked.context(|| format!("check the file system of volume {volume_id}"))?;
        let Done::Checked(checked) = checked else {
            return Err(Error::Bug {
                invariant: "CheckFs returns a report".into(),
            });
        };
        if repair && checked.sound && record.formatted.as_ref().is_some_and(|it| it.growing) {
            self.unmark(&pool, &mut record);
        }
        Ok(checked)
    }

    /// Runs `e2fsck -p` on an ext4 that has recorded errors, or that has no journal and was not
    /// unmounted: if it were mounted as it is, each write would lose more data. An administrator
    /// must decide about errors that it cannot repair. The device must not be mounted.
    pub(in crate::operation) fn check_unclean(
        &self,
        pool: &Pool,
        record: &VolumeRecord,
        device: &Device,
        fs: FsType,
    ) -> Result<()> {
        let doing = || format!("check the file system of volume {}", record.uuid);
        if !self.host.is_unclean(device, fs).context(doing)? {
            return Ok(());
        }
        tracing::warn!(volume = %record.uuid, "checking a file system that was not cleanly unmounted before mounting it");
        self.repair(pool, record, device, fs, Check::Preen)
    }

    /// Repairs a file system that is not mounted, and refuses the volume if errors remain.
    pub(in crate::operation) fn repair(
        &self,
        pool: &Pool,
        record: &VolumeRecord,
        device: &Device,
        fs: FsType,
        how: Check,
    ) -> Result<()> {
        let why = match self.host.perform(&Effect::CheckFs { device, fs, how }) {
            Ok(Done::Checked(Checked {
                sound: false,
                report,
            })) => report,
            Ok(_) => return Ok(()),
            Err(HostError {
                cause:
                    HostCause::Tool {
                        program,
                        status,
                        stderr,
                    },
                ..
            }) => format!("{program} failed with {status}: {stderr}"),
            Err(error) => {
                return Err(error)
                    .context(|| format!("check the file system of volume {}", record.uuid));
            }
        };
        let id = VolumeId {
            pool: pool.id(),
            uuid: record.uuid,
        };
        let reason = format!(
            "its {fs} has errors that `e2fsck -p` cannot repair ({}), so it is not mounted; run `slackwater volumes check {id} --repair` on its node, or restore it",
            one_line_excerpt(&why)
        );
        Err(Error::refused(format!("volume {id}"), reason))
    }

    /// Clears the growth mark, with one retry. A failure is only logged, because a mark that stays
    /// costs nothing but an unnecessary repair.
    pub(in crate::operation) fn unmark(&self, pool: &Pool, record: &mut VolumeRecord) {
        let tried = self.mark_growing(pool, record, false);
        if let Err(error) = tried.or_else(|_| self.mark_growing(pool, record, false)) {
            tracing::warn!(volume = %record.uuid, error = %chain(&error), "failed to clear the growth marker; the next staging repairs the file system again");
        }
    }

    /// Sets or clears the growth mark in the record. If the write fails, `record` counts as
    /// unmarked: the growth was not begun, or has ended. If the mark is on disk nevertheless, the
    /// next stage runs an unnecessary repair.
    pub(in crate::operation) fn mark_growing(
        &self,
        pool: &Pool,
        record: &mut VolumeRecord,
        growing: bool,
    ) -> Result<()> {
        let mut marked = record.clone();
        marked.formatted = marked.formatted.map(|formatted| Formatted {
            growing,
            ..formatted
        });
        let written = pool.backend.update(&marked);
        if written.is_ok() || !growing {
            *record = marked;
        }
        written
    }
}
