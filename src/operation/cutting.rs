//! What single snapshots, groups and clones of volumes in use share: how a volume is used, and
//! the tries of a cut.
//!
//! A try takes the locks of all its volumes, so that nobody stages, publishes, grows or deletes
//! one meanwhile; between two tries they are free.

use std::path::Path;
use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::Duration;

use super::lock::{Guard, Key};
use super::publish::View;
use super::{Driver, Pool, usage};
use crate::backend::Image;
use crate::cut::pause::Pauses;
use crate::cut::{self, HookTarget, Member, Outcome, Use};
use crate::error::{Doing, Error, Result, chain};
use crate::model::{FsType, Level, OnQuiesceFailure, SnapshotParameters, VolumeId};
use crate::record::VolumeRecord;

/// How often a stop of the driver is looked for while a retry waits.
const NAP: Duration = Duration::from_millis(100);

/// A volume that something is made from.
pub(super) struct Source {
    /// Its id, as given.
    pub(super) text: String,
    pub(super) pool: Arc<Pool>,
    pub(super) id: VolumeId,
    pub(super) record: VolumeRecord,
}

/// How a cut is tried now.
pub(super) struct Try<'a> {
    /// The level of this try.
    pub(super) level: Level,
    /// Why it's lower than what was asked for; empty if it isn't.
    pub(super) why: &'a str,
}

impl Driver {
    /// The volume of an id, which must exist.
    pub(super) fn source(&self, volume_id: &str) -> Result<Source> {
        let (pool, id, record) = self.find(volume_id)?;
        let text = volume_id.to_string();
        Ok(Source {
            text,
            pool,
            id,
            record,
        })
    }

    /// Takes the locks of volumes, and reads them again under these.
    pub(super) fn lock_sources(&self, volume_ids: &[String]) -> Result<(Vec<Guard>, Vec<Source>)> {
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
    pub(super) fn use_of(&self, source: &Source) -> Result<Use> {
        let (pool, record) = (&source.pool, &source.record);
        let busy = |holder: String| {
            Err(Error::Busy {
                subject: format!("volume {}", source.text),
                holder,
            })
        };
        let view = View::of(self, pool, record)?;
        let Some(found) = view.devices.first() else {
            return Ok(Use::Quiet);
        };
        let name = found.device.path.display();
        if view.devices.len() > 1 || !found.whole {
            return busy(format!(
                "{name} stands on its image, and isn't a device of ours alone"
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
                "{name} has a file system of which no whole mount is here (frozen, or in another mount namespace)"
            ));
        }
        pool.backend.detach(record.uuid, &found.device)?;
        match self.lingering(pool, record.uuid)? {
            None => Ok(Use::Quiet),
            Some(device) => busy(format!("a process has {} open", device.path.display())),
        }
    }

    /// What the cut needs of each volume; `copies` are the files that become their copies.
    pub(super) fn members(
        &self,
        sources: &[Source],
        uses: &[Use],
        copies: &[Image],
    ) -> Result<Vec<Member>> {
        let each = sources.iter().zip(uses).zip(copies);
        each.map(|((source, in_use), copy)| {
            let path = source
                .pool
                .backend
                .image_path(Image::Volume(source.id.uuid));
            let stat = self
                .host
                .stat(&path)
                .doing(|| format!("find the image of volume {}", source.text))?;
            let Some(stat) = stat else {
                return Err(Error::Damaged {
                    path: source.pool.backend.path(),
                    problem: format!("the image of volume {} is missing", source.text),
                });
            };
            Ok(Member {
                target: HookTarget {
                    volume_id: source.text.clone(),
                    claim: source.record.claim.clone(),
                },
                source: path,
                image: stat.id,
                copy: source.pool.backend.image_path(*copy),
                in_use: in_use.clone(),
                in_series: source.pool.backend.clones_in_series(),
            })
        })
        .collect()
    }

    /// Several volumes in use need a moment at which all stand still.
    pub(super) fn refuse_without_barrier(
        &self,
        sources: &[Source],
        uses: &[Use],
        level: Level,
        parameters: &SnapshotParameters,
    ) -> Result<()> {
        let used: Vec<_> = sources
            .iter()
            .zip(uses)
            .filter(|(_, in_use)| **in_use != Use::Quiet)
            .collect();
        if used.len() < 2 {
            return Ok(());
        }
        let crash = |key: &str| {
            Err(Error::invalid(
                format!("parameters.{key}"),
                "\"crash\" has no moment that several volumes in use share; give filesystem",
            ))
        };
        if level == Level::Crash {
            return crash("consistency");
        }
        if parameters.on_quiesce_failure == OnQuiesceFailure::Degrade(Level::Crash) {
            return crash("onQuiesceFailure");
        }
        match used.iter().find(|(_, in_use)| **in_use == Use::Raw) {
            None => Ok(()),
            Some((source, _)) => Err(Error::refused(
                format!("volume {}", source.text),
                "it is published as a raw block device, which can't be made to stand still together with other volumes in use; snapshot it alone, or unpublish it first",
            )),
        }
    }

    /// Cuts, on prepared copies, with the sources' locks held.
    pub(super) fn cut(
        &self,
        sources: &[Source],
        uses: &[Use],
        copies: &[Image],
        now: &Try<'_>,
        parameters: &SnapshotParameters,
    ) -> Result<Outcome> {
        let members = self.members(sources, uses, copies)?;
        let attempt = cut::attempt(&self.seams, &members, now.level, parameters);
        self.count_cut(&attempt);
        let mut outcome = attempt?;
        if !now.why.is_empty() {
            outcome.reason = now.why.to_string();
        }
        Ok(outcome)
    }

    /// Tries a cut as often as its class says, then at the lower level that it allows. A set of
    /// tries that has failed is remembered under `key`: until its pause is over, a repeat gets
    /// the same failure, and nobody is disturbed.
    pub(super) fn tries<T>(
        &self,
        key: &str,
        parameters: &SnapshotParameters,
        mut once: impl FnMut(&Try<'_>) -> Result<T>,
    ) -> Result<T> {
        self.pauses().check(key, self.host.now())?;
        let (mut level, mut why) = (parameters.consistency, String::new());
        let mut failed = 0;
        loop {
            let error = match once(&Try { level, why: &why }) {
                Err(error) if is_failed_try(&error) => error,
                Err(error) => return Err(error),
                Ok(done) => {
                    self.pauses().forget(key);
                    return Ok(done);
                }
            };
            tracing::warn!(name = key, level = %level, failed = failed + 1, error = %chain(&error), "a try of a cut has failed");
            match parameters.on_quiesce_failure {
                _ if failed < parameters.retries => {
                    failed += 1;
                    self.wait(parameters.retry_interval)?;
                }
                OnQuiesceFailure::Degrade(lower) if lower < level && is_quiesce_failure(&error) => {
                    why = format!("{level} was asked for: {}", chain(&error));
                    (level, failed) = (lower, 0);
                }
                OnQuiesceFailure::Degrade(_) | OnQuiesceFailure::Fail => {
                    return self.give_up(key, error);
                }
            }
        }
    }

    /// Remembers a set of tries that has failed; its error, with the pause that it begins.
    fn give_up<T>(&self, key: &str, error: Error) -> Result<T> {
        let now = self.host.now();
        let mut pauses = self.pauses();
        let last = pauses.failed(key, error, now);
        pauses.check(key, now)?;
        Err(Error::Paused {
            seconds: 0,
            sets: 1,
            last,
        })
    }

    fn pauses(&self) -> MutexGuard<'_, Pauses> {
        self.pauses.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sleeps, unless the driver stops.
    fn wait(&self, time: Duration) -> Result<()> {
        let mut left = time;
        while !left.is_zero() {
            if self.in_flight.is_stopping() {
                return Err(Error::Stopping);
            }
            let nap = NAP.min(left);
            self.host.pause(nap);
            left -= nap;
        }
        Ok(())
    }
}

/// Whether a try was made and lost, so that another may win.
fn is_failed_try(error: &Error) -> bool {
    matches!(error, Error::QuiesceFailed { .. } | Error::CutLost { .. })
}

fn is_quiesce_failure(error: &Error) -> bool {
    matches!(error, Error::QuiesceFailed { .. })
}
