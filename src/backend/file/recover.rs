//! What a crash left: half-made volumes, trash, loop devices that nothing holds.

use std::collections::HashMap;

use uuid::Uuid;

use super::{Entry, FileBackend, TRASH, VOLUMES};
use crate::backend::Leftovers;
use crate::error::{Doing, Result, chain};
use crate::host::{Device, Effect, FileId};
use crate::record::VolumeState;

impl FileBackend {
    /// Runs before the first call is served. One thing that can't be ended doesn't hold up the
    /// others: it's logged, and tried again at the next start.
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
        for uuid in self.half_made()? {
            each(
                &format!("half-made volume {uuid}"),
                &mut ended.half_made,
                self.delete_volume(uuid),
            );
        }
        for name in self.list(TRASH)? {
            let result = self.sync_both().and_then(|()| self.empty_trash(&name));
            each(&format!("deleted volume {name}"), &mut ended.trash, result);
        }
        Ok(ended)
    }

    /// Directories with nothing but an intent, or not even that: never answered to anybody.
    fn half_made(&self) -> Result<Vec<Uuid>> {
        let mut found = Vec::new();
        for uuid in self
            .list(VOLUMES)?
            .iter()
            .filter_map(|name| Uuid::try_parse(name).ok())
        {
            let half = match self.index().entries.get(&uuid) {
                Some(Entry::Known(record)) => record.state == VolumeState::Creating,
                Some(Entry::Damaged(_)) => false,
                None => true,
            };
            if half {
                found.push(uuid);
            }
        }
        Ok(found)
    }

    /// Loops on images of this pool that are neither mounted, bound nor claimed.
    fn idle_loops(&self, in_use: &dyn Fn(&Device) -> bool) -> Result<Vec<(u32, FileId)>> {
        let doing = || "look at loop devices".to_string();
        let pool_device = self
            .host
            .stat(&self.root.join(super::POOL_FILE))
            .doing(doing)?
            .map(|stat| stat.id.device);
        let mut loops = self.host.loops().doing(doing)?;
        loops.retain(|found| Some(found.backing.device) == pool_device);
        if loops.is_empty() {
            return Ok(Vec::new());
        }
        let mut images = HashMap::new();
        for name in self
            .list(VOLUMES)?
            .iter()
            .filter_map(|name| Uuid::try_parse(name).ok())
        {
            if let Some(image) = self.host.stat(&self.image_path(name)).doing(doing)? {
                images.insert(image.id, name);
            }
        }
        let mut idle = Vec::new();
        for found in loops
            .into_iter()
            .filter(|found| images.contains_key(&found.backing))
        {
            let device = Device::of_loop(found.number);
            if !in_use(&device) && !self.host.is_claimed(&device).doing(doing)? {
                idle.push((found.number, found.backing));
            }
        }
        Ok(idle)
    }

    fn free_loop(&self, (number, backing): (u32, FileId)) -> (String, Result<()>) {
        let name = format!("loop device /dev/loop{number}");
        let result = self.perform(Effect::DetachLoop { number, backing }, || {
            format!("detach {name}")
        });
        (name, result)
    }
}
