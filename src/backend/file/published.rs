//! Loop devices that a pod has: it may detach them or change their flags or their file, for which the
//! kernel requires no capability.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use uuid::Uuid;

use super::FileStore;
use crate::backend::store::{FindPublished, Watch, Watched};
use crate::backend::{Attached, Image};
use crate::error::{Error, ErrorContext, Result, chain};
use crate::host::{Device, Effect, FileId, Host, LoopStatus};

/// A loop device as it was when it was published.
struct LoopWatch {
    host: Arc<dyn Host>,
    volume: Uuid,
    number: u32,
    backing: FileId,
    read_only: bool,
    /// Whether the device should bypass the pool's page cache; false where that is not possible.
    direct_io: AtomicBool,
}

/// Whether a device number is that of a loop device without a file.
pub fn is_detached(host: &dyn Host, rdev: u64) -> bool {
    let number = Device::loop_number_of(rdev);
    number.is_some_and(|number| matches!(host.loop_status(number), Ok(None)))
}

impl FileStore {
    fn watch_loop(&self, volume: Uuid, now: &LoopStatus, direct_io: bool) -> Arc<dyn Watch> {
        Arc::new(LoopWatch {
            host: self.host.clone(),
            volume,
            number: now.number,
            backing: now.backing,
            read_only: now.read_only,
            direct_io: AtomicBool::new(direct_io),
        })
    }

    pub(super) fn watch_attached(&self, volume: Uuid, attached: Attached) -> Result<Watched> {
        let Attached { device, hold } = attached;
        let name = device.path.display();
        let found = device.loop_number().map(|n| self.host.loop_status(n));
        let found = found.transpose().context(|| format!("examine {name}"));
        let now = found.map_err(Error::into_indeterminate)?.flatten();
        let now = now.ok_or_else(|| Error::Pending {
            what: name.to_string(),
        })?;
        let watch = self.watch_loop(volume, &now, now.direct_io);
        Ok(Watched { hold, watch })
    }

    pub(super) fn find_published_among(&self, nodes: &[u64]) -> Option<FindPublished<'_>> {
        let numbers = nodes
            .iter()
            .filter_map(|rdev| Device::loop_number_of(*rdev));
        let shown = numbers.filter_map(|number| self.host.loop_status(number).ok().flatten());
        let shown: Vec<LoopStatus> = shown.collect();
        if shown.is_empty() {
            return None;
        }
        Some(Box::new(move |uuid| {
            let image = self.host.stat(&self.image(Image::Volume(uuid)));
            let image = image.context(|| format!("find the image of volume {uuid}"))?;
            let backing = image.map(|image| image.id);
            let Some(found) = shown.iter().find(|found| Some(found.backing) == backing) else {
                return Ok(None);
            };
            let held = self.host.hold_loop(found.number, found.backing);
            let held = held.context(|| format!("open /dev/loop{}", found.number))?;
            // What the pod changed before is unknown, so direct I/O is enabled.
            Ok(held.map(|hold| Watched {
                hold: hold.into(),
                watch: self.watch_loop(uuid, found, true),
            }))
        }))
    }
}

impl LoopWatch {
    fn status(&self) -> Result<Option<LoopStatus>> {
        let found = self.host.loop_status(self.number);
        found.context(|| format!("read the state of /dev/loop{}", self.number))
    }

    fn restore_direct_io(&self) {
        let (volume, number) = (self.volume, self.number);
        match self.host.perform(&Effect::SetDirectIo { number }) {
            Ok(_) => {
                tracing::warn!(%volume, number, "re-enabled direct I/O of a published device");
            }
            Err(error) => {
                tracing::warn!(%volume, number, error = %chain(&error), "failed to re-enable direct I/O of a published device");
                // Direct I/O is not possible; it is not tried again.
                self.direct_io.store(false, Ordering::Relaxed);
            }
        }
    }
}

impl Watch for LoopWatch {
    fn examine(&self) -> Result<Option<String>> {
        // While its descriptor is open the device is attached.
        let Some(now) = self.status()? else {
            return Ok(None);
        };
        let mut wrong = Vec::new();
        if now.backing != self.backing {
            wrong.push("is attached to another file");
        }
        if now.autoclear {
            wrong.push("was set to detach when it is closed");
        }
        if now.partscan {
            wrong.push("has partition scanning enabled");
        }
        if now.offset != 0 || now.size_limit != 0 {
            wrong.push("maps only a part of its image");
        }
        if now.read_only != self.read_only {
            wrong.push("has a different read-only state");
        }
        let wants_direct_io = self.direct_io.load(Ordering::Relaxed);
        if wants_direct_io && !now.direct_io && now.backing == self.backing {
            self.restore_direct_io();
        }
        Ok((!wrong.is_empty()).then(|| {
            format!(
                "its device /dev/loop{} {}; it was changed by the pod that uses it or by another process on the node",
                self.number,
                wrong.join(" and ")
            )
        }))
    }

    fn detach_changed(&self) -> Result<()> {
        let number = self.number;
        let detached = match self.host.loop_status(number) {
            Ok(Some(LoopStatus { backing, .. })) if backing != self.backing => {
                let detach = Effect::DetachLoop { number, backing };
                self.host.perform(&detach).map(drop)
            }
            // On a disk that is dead or hangs, the state of the device cannot be read.
            Err(error) if !error.is_lost_disk() && !error.is_no_answer() => Err(error),
            Ok(_) | Err(_) => Ok(()),
        };
        detached.context(|| format!("detach /dev/loop{number} if it has another file"))
    }
}
