//! What a crash left: half-made volumes and snapshots, trash, loop devices that nothing holds.

use std::collections::HashSet;

use uuid::Uuid;

use super::{FileBackend, TRASH};
use crate::backend::Leftovers;
use crate::error::{Doing, Result, chain};
use crate::host::{Device, Effect, FileId};

impl FileBackend {
    /// Runs before the first call is served. One thing that can't be ended doesn't hold up the
    /// others: it's logged, and tried again at the next start, trash by the next `end_trash`.
    pub(super) fn end_leftovers(&self, in_use: &dyn Fn(&Device) -> bool) -> Result<Leftovers> {
        let mut ended = Leftovers::default();
        let each = |what: &str, count: &mut u64, result: Result<()>| match result {
            Ok(()) => {
                *count += 1;
                tracing::info!(pool = %self.pool.name, "ended a leftover: {what}");
            }
            Err(error) => {
                tracing::error!(pool = %self.pool.name, error = %chain(&error), "can't end a leftover: {what}");
            }
        };
        for number in self.idle_loops(in_use)? {
            let (device, result) = self.free_loop(number);
            each(&device, &mut ended.loops, result);
        }
        for uuid in self.volumes.abandoned()? {
            each(
                &format!("half-made volume {uuid}"),
                &mut ended.half_made,
                self.volumes.delete(uuid),
            );
        }
        for uuid in self.snapshots.abandoned()? {
            each(
                &format!("half-made snapshot {uuid}"),
                &mut ended.snapshots,
                self.snapshots.delete(uuid),
            );
        }
        for name in self.folder.list(TRASH)? {
            let synced = self.folder.sync_all();
            let result = synced.and_then(|()| self.folder.empty_trash(&name));
            let uuid = name.split('.').next().map(Uuid::try_parse);
            if let (Err(_), Some(Ok(uuid))) = (&result, uuid) {
                self.folder.note_delete(uuid, false);
            }
            each(&format!("trash {name}"), &mut ended.trash, result);
        }
        Ok(ended)
    }

    /// Loops on images of this pool that are neither mounted, bound nor claimed.
    fn idle_loops(&self, in_use: &dyn Fn(&Device) -> bool) -> Result<Vec<(u32, FileId)>> {
        let doing = || "look at loop devices".to_string();
        let pool_device = self
            .folder
            .host
            .stat(&self.folder.root.join(super::POOL_FILE))
            .doing(doing)?
            .map(|stat| stat.id.device);
        let mut loops = self.folder.host.loops().doing(doing)?;
        loops.retain(|found| Some(found.backing.device) == pool_device);
        if loops.is_empty() {
            return Ok(Vec::new());
        }
        let mut images = HashSet::new();
        let snapshots = self.snapshots.images()?;
        for path in self.volumes.images()?.into_iter().chain(snapshots) {
            images.extend(self.folder.stat(&path, doing)?.map(|image| image.id));
        }
        let mut idle = Vec::new();
        for found in loops
            .into_iter()
            .filter(|found| images.contains(&found.backing))
        {
            let device = Device::of_loop(found.number);
            if !in_use(&device) && !self.folder.host.is_claimed(&device).doing(doing)? {
                idle.push((found.number, found.backing));
            }
        }
        Ok(idle)
    }

    fn free_loop(&self, (number, backing): (u32, FileId)) -> (String, Result<()>) {
        let name = format!("loop device /dev/loop{number}");
        let result = self
            .folder
            .perform(Effect::DetachLoop { number, backing }, || {
                format!("detach {name}")
            });
        (name, result)
    }
}
