//! What single snapshots, groups and clones of volumes in use share: how a volume is used, and
//! the tries of a cut.
//!
//! A try takes the locks of all its volumes, so that nobody stages, publishes, grows or deletes
//! one meanwhile; between two tries they are free.

use std::path::Path;
use std::sync::Arc;

use crate::cut::Use;
use crate::error::{Error, Result};
use crate::model::{FsType, VolumeId};
use crate::operation::lock::{Key, LockGuard};
use crate::operation::usage::view::View;
use crate::operation::{Driver, Pool, usage};
use crate::record::VolumeRecord;

/// A volume that something is made from.
pub(in crate::operation) struct Source {
    /// Its id, as given.
    pub(in crate::operation) text: String,
    pub(in crate::operation) pool: Arc<Pool>,
    pub(in crate::operation) id: VolumeId,
    pub(in crate::operation) record: VolumeRecord,
}

impl Driver {
    /// The volume of an id, which must exist.
    pub(in crate::operation) fn source(&self, volume_id: &str) -> Result<Source> {
        let (pool, id, record) = self.find(volume_id)?;
        let text = volume_id.to_string();
        Ok(Source {
            text,
            pool,
            id,
            record,
        })
    }

    /// That a volume still is what was planned with before its lock was had: a stage may have
    /// formatted it meanwhile, and an expansion made it longer.
    pub(in crate::operation) fn check_unchanged(&self, source: &Source) -> Result<()> {
        if self.source(&source.text)?.record == source.record {
            return Ok(());
        }
        Err(Error::Pending {
            what: format!("volume {}", source.text),
        })
    }

    /// Takes the locks of volumes, and reads them again under these.
    pub(in crate::operation) fn lock_sources(
        &self,
        volume_ids: &[String],
    ) -> Result<(Vec<LockGuard>, Vec<Source>)> {
        let mut locks = Vec::new();
        let mut sources = Vec::new();
        for volume_id in volume_ids {
            let (_, id, _) = self.find(volume_id)?;
            locks.push(self.locks.acquire(Key::Volume(id.uuid))?);
            sources.push(self.source(volume_id)?);
        }
        Ok((locks, sources))
    }

    /// How a volume is used now; its lock is held. A device that nothing shows is ended first:
    /// who has it open could still write.
    pub(in crate::operation) fn use_of(&self, source: &Source) -> Result<Use> {
        let (pool, record) = (&source.pool, &source.record);
        let busy = |holder: String| {
            Err(Error::Busy {
                subject: format!("volume {}", source.text),
                holder,
            })
        };
        self.let_go(record.uuid)?;
        let view = View::of(self, pool, record)?;
        let Some(found) = view.devices.first() else {
            return Ok(Use::Quiet);
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
        if !uses.is_empty() || self.is_claimed(&found.device)? {
            return busy(format!(
                "{name} has a file system that is not fully mounted here (it is frozen, or mounted in another mount namespace){}",
                self.holders(&found.device)
            ));
        }
        pool.backend.detach(record.uuid, &found.device)?;
        match self.lingering(pool, record.uuid)? {
            None => Ok(Use::Quiet),
            Some(device) => busy(format!("a process has {} open", device.path.display())),
        }
    }

    /// A volume whose file system carries a pool can't be frozen for a cut: the clones of that
    /// pool would wait for the thaw, and nothing of it could be served meanwhile.
    fn refuse_beneath_a_pool(&self, source: &Source, device: u64) -> Result<()> {
        for pool in self.serving() {
            // A pool whose disk fails is no reason not to cut others.
            let place = self.host.stat(&pool.backend.path()).ok().flatten();
            if place.is_some_and(|place| place.id.device == device) {
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
        // What an earlier try has left is ended after this look.
        uses.map_err(Error::into_indeterminate)
    }
}
