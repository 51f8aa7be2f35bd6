//! The source volumes of snapshots and clones, and how they are used.
//!
//! An attempt of a cut locks all its volumes, so that no call stages, publishes, expands or deletes
//! one while it runs. Between two attempts they are not locked.

use std::path::Path;
use std::sync::Arc;

use uuid::Uuid;

use crate::cut::Use;
use crate::error::{Error, Result};
use crate::model::{FsType, VolumeId};
use crate::operation::lock::{Key, LockGuard};
use crate::operation::{Pool, Snapshots, usage};
use crate::record::VolumeRecord;

/// The source volume of a snapshot or clone.
pub(in crate::operation) struct Source {
    /// Its ID, as the caller gave it.
    pub(in crate::operation) text: String,
    pub(in crate::operation) pool: Arc<Pool>,
    pub(in crate::operation) id: VolumeId,
    pub(in crate::operation) record: VolumeRecord,
    /// The move that reads it, whose fence does not count.
    move_uid: Option<Uuid>,
}

impl Snapshots {
    /// The volume of an ID, which must exist.
    pub(in crate::operation) fn source(
        &self,
        volume_id: &str,
        move_uid: Option<Uuid>,
    ) -> Result<Source> {
        let (pool, id, record) = self.pools.get_volume_to_read(volume_id, move_uid)?;
        let text = volume_id.to_string();
        Ok(Source {
            text,
            pool,
            id,
            record,
            move_uid,
        })
    }

    /// Checks that a volume has not changed between the plan and its lock: a stage may have
    /// formatted it, and an expansion may have grown it.
    pub(in crate::operation) fn check_unchanged(&self, source: &Source) -> Result<()> {
        if self.source(&source.text, source.move_uid)?.record == source.record {
            return Ok(());
        }
        Err(Error::Pending {
            what: format!("volume {}", source.text),
        })
    }

    /// Locks volumes, and reads their records again under the locks.
    pub(in crate::operation) fn lock_sources(
        &self,
        volume_ids: &[String],
        move_uid: Option<Uuid>,
    ) -> Result<(Vec<LockGuard>, Vec<Source>)> {
        let mut locks = Vec::new();
        let mut sources = Vec::new();
        for volume_id in volume_ids {
            let (_, id, _) = self.pools.get_volume_to_read(volume_id, move_uid)?;
            locks.push(self.pools.locks.acquire(Key::Volume(id.uuid))?);
            sources.push(self.source(volume_id, move_uid)?);
        }
        Ok((locks, sources))
    }

    /// How a volume is used now. The caller holds its lock. A device that is neither mounted nor
    /// published is detached first, because a process that has it open could still write.
    pub(in crate::operation) fn use_of(&self, source: &Source) -> Result<Use> {
        let (pool, record) = (&source.pool, &source.record);
        let busy = |holder: String| {
            Err(Error::Busy {
                subject: format!("volume {}", source.text),
                holder,
            })
        };
        self.usage.close_published(record.uuid)?;
        let view = self.usage.view(pool, record)?;
        let Some(found) = view.devices.first() else {
            return Ok(Use::Unused);
        };
        let name = found.device.path.display();
        if view.devices.len() > 1 || !found.whole {
            return busy(format!(
                "{name} is attached to its image, but it is not the only device or does not map the whole image"
            ));
        }
        let uses = view.uses();
        let whole =
            |mount: &&&crate::host::Mount| !usage::is_node(mount) && mount.root == Path::new("/");
        if let Some(mount) = uses.iter().find(|mount| whole(mount)) {
            let Some(fs) = FsType::ALL
                .into_iter()
                .find(|fs| fs.name() == mount.fs_name)
            else {
                return busy(format!("{name} is mounted as {}", mount.fs_name));
            };
            self.refuse_beneath_a_pool(source, mount.device)?;
            return Ok(Use::Mounted {
                device: found.device.clone(),
                fs,
                mount_point: mount.mount_point.clone(),
            });
        }
        if uses.iter().any(|mount| usage::is_node(mount)) {
            return Ok(Use::Raw);
        }
        if !uses.is_empty() || self.usage.is_claimed(&found.device)? {
            return busy(format!(
                "{name} has a file system that is not fully mounted here (it is frozen, or mounted in another mount namespace){}",
                self.usage.holders(&found.device)
            ));
        }
        pool.backend.devices().detach(record.uuid, &found.device)?;
        match self.usage.lingering(pool, record.uuid)? {
            None => Ok(Use::Unused),
            Some(device) => busy(format!("a process has {} open", device.path.display())),
        }
    }

    /// Refuses a volume whose file system contains a pool: while it is frozen for a cut, the clones
    /// of that pool would wait for the thaw, and the pool could serve nothing.
    fn refuse_beneath_a_pool(&self, source: &Source, device: u64) -> Result<()> {
        for pool in self.pools.serving() {
            if pool.device == device {
                return Err(Error::refused(
                    format!("volume {}", source.text),
                    format!(
                        "pool {} is stored on it, and freezing the volume would block that pool; move the pool to a separate disk",
                        pool.definition.name
                    ),
                ));
            }
        }
        Ok(())
    }

    pub(in crate::operation) fn uses_of(&self, sources: &[Source]) -> Result<Vec<Use>> {
        let uses: Result<_> = sources.iter().map(|source| self.use_of(source)).collect();
        // What an earlier attempt left is cleaned up after this check.
        uses.map_err(Error::into_indeterminate)
    }
}
