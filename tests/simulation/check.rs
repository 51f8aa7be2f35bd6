//! Invariants of a simulation, and what is visible from outside.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use slackwater::error::chain;
use slackwater::host::Host;
use slackwater::host::memory::MemoryHost;
use slackwater::model::Allocation;
use slackwater::model::size::image_bytes;
use slackwater::operation::ListVolumes;
use slackwater::operation::pools::inventory;
use slackwater::record::VolumeState;

use super::{CAPACITY, LastingFault, POOL, Simulation, Step, is_thin, staging, target};

/// Everything that is visible from outside.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObservedState {
    pub mounted: Vec<PathBuf>,
    pub targets: Vec<PathBuf>,
    pub loops: usize,
    pub files: Vec<String>,
}

impl ObservedState {
    /// Describes the difference to the expected state; `None` if there is none.
    pub fn differs(&self, expected: &ObservedState) -> Option<String> {
        let differ = |what: &str, now: String, then: String| {
            (now != then).then(|| format!("{what} {now} instead of {then}; "))
        };
        let parts = [
            differ(
                "mounted",
                format!("{:?}", self.mounted),
                format!("{:?}", expected.mounted),
            ),
            differ(
                "targets",
                format!("{:?}", self.targets),
                format!("{:?}", expected.targets),
            ),
            differ("loops", self.loops.to_string(), expected.loops.to_string()),
            differ(
                "files",
                format!("{:?}", self.files),
                format!("{:?}", expected.files),
            ),
        ];
        let text: String = parts.into_iter().flatten().collect();
        (!text.is_empty()).then_some(text)
    }
}

impl Simulation {
    pub fn observed_state(&self) -> ObservedState {
        let mut mounted = self.host.mounted();
        mounted.sort();
        let mut files = self
            .host
            .without_faults(|host| host.files_below(Path::new(POOL)));
        // A file that is being written is replaced by the next write; each start creates the lock.
        files.retain(|file| !file.ends_with(".new") && file != "lock" && file != "next-id");
        let mut targets = self.host.targets();
        targets.retain(|target| !target.ends_with("globalmount"));
        ObservedState {
            mounted,
            targets,
            loops: self.host.loop_numbers().len(),
            files,
        }
    }

    /// Invariants that hold at any time when no call runs.
    pub fn check(&self) -> std::result::Result<(), String> {
        let violations = self.host.violations();
        if !violations.is_empty() {
            return Err(format!("violations: {violations:?}"));
        }
        let Some(driver) = &self.driver else {
            return Ok(());
        };
        if driver.pools.locks_held() > 0 {
            return Err("a lock is still held".into());
        }
        let mut backings = BTreeSet::new();
        let loops = self.host.without_faults(|host| host.loops());
        for found in loops.map_err(|error| error.to_string())? {
            if !backings.insert(found.backing) {
                return Err(format!("two loop devices on one image: {found:?}"));
            }
        }
        self.check_freezes()?;
        // A driver's report about its volumes is checked only while it can see them all.
        if self.lasting_fault.as_ref().is_some_and(LastingFault::hides) {
            return Ok(());
        }
        for pool in driver.pool_status() {
            if pool.damaged > 0 {
                return Err("a record is damaged".into());
            }
        }
        let listed = driver
            .volumes
            .list_volumes(&ListVolumes::default())
            .map_err(|error| chain(&error))?;
        for volume in listed.volumes {
            let id = volume.id.to_string();
            let found = driver
                .volumes
                .get_volume(&id)
                .map_err(|error| chain(&error))?;
            let health = driver
                .volumes
                .volume_health(&id)
                .map_err(|error| chain(&error))?;
            if found != volume || !health.findings.is_empty() {
                return Err(format!("{volume:?} {found:?} {health:?}"));
            }
            let image = self.image("volumes", &volume.id.uuid.to_string());
            let image = self.host.stat(Path::new(&image));
            let size = image
                .map_err(|error| error.to_string())?
                .map(|stat| stat.size);
            if size.is_none_or(|size| !is_thin() && size < image_bytes(volume.size)) {
                return Err(format!("{volume:?} has an image of {size:?} bytes"));
            }
        }
        self.check_cuts(driver)
    }

    /// The records of lasting volumes and of snapshots.
    pub fn records(&self) -> Vec<String> {
        if self.driver.is_none() {
            return Vec::new();
        }
        let volumes = self.pool_id().into_iter().flat_map(|id| {
            let read = |host: &MemoryHost| inventory::read(host, "default", id, Path::new(POOL));
            let found = self.host.without_faults(read);
            found.map(|found| found.volumes).unwrap_or_default()
        });
        let records = volumes
            .map(|found| found.record)
            .filter(|record| !record.ephemeral && record.state == VolumeState::Ready);
        let records = records.map(|record| {
            let (size, wipe, mut formatted) = (record.size, record.wipe, record.formatted);
            // If two writes of the record have failed, the mark of a growth may come back, which
            // costs a needless repair.
            formatted.iter_mut().for_each(|it| it.growing = false);
            format!("{} {size} {wipe:?} {formatted:?}", record.uuid)
        });
        records.chain(self.snapshot_lines()).collect()
    }

    /// Whether every token that was synced is present in the volume, which is staged or published.
    pub fn check_tokens(&self, name: &str) -> std::result::Result<(), String> {
        let Some(expected) = self.tokens.get(name) else {
            return Ok(());
        };
        let found = match self.config(name).fs {
            Some(_) if self.ids.contains_key(name) => self.host.tokens(&staging(name)),
            Some(_) => self.host.tokens(&target(name, 0)),
            None => self.host.block_tokens(&target(name, 0)),
        };
        let found: BTreeSet<u64> = found
            .map_err(|errno| format!("tokens of {name}: {errno}"))?
            .into_iter()
            .collect();
        match expected.difference(&found).next() {
            Some(lost) => Err(format!("token {lost} of {name} is lost")),
            None => Ok(()),
        }
    }

    /// A thick volume accepts every write on a full pool, also after fstrim.
    fn check_thick(&self, name: &str) -> std::result::Result<(), String> {
        if self.config(name).allocation != Allocation::Thick || self.config(name).read_only {
            return Ok(());
        }
        let path = staging(name);
        // The trim should be refused.
        let _ = self.host.trim(&path);
        self.host.leave_available(self.kept_free(name)?);
        let written = match self.config(name).fs {
            Some(_) => self.host.write_token(&path, u64::MAX),
            None => self.host.write_block_token(&target(name, 0), u64::MAX),
        };
        self.host.set_capacity(CAPACITY);
        written.map_err(|errno| format!("{name} is thick, and the pool is full: {errno}"))
    }

    /// The bytes that the pool keeps free for a thick volume: in a thin pool, each block that it may
    /// share needs another one.
    fn kept_free(&self, name: &str) -> std::result::Result<u64, String> {
        if !is_thin() || !self.cuts.may_share() {
            return Ok(0);
        }
        let driver = self.driver().map_err(|error| chain(&error))?;
        let volume = driver.volumes.get_volume(&self.id(name));
        volume
            .map(|volume| volume.size)
            .map_err(|error| chain(&error))
    }

    /// Deletes every volume, with calls that must succeed at the first try, and verifies that
    /// nothing is left behind.
    pub fn finish(&mut self) -> std::result::Result<(), String> {
        for step in std::mem::take(&mut self.unanswered) {
            let done = self.run(&step);
            done.map_err(|error| {
                format!("while deleting everything, {step:?}: {}", chain(&error))
            })?;
        }
        let names: Vec<&'static str> = self.configs.keys().copied().collect();
        for name in names {
            for step in self.last_steps(name)? {
                if let Step::Delete(_) | Step::UnpublishInline(_) = step {
                    self.check()?;
                }
                self.run(&step).map_err(|error| {
                    format!("while deleting everything, {step:?}: {}", chain(&error))
                })?;
                if matches!(step, Step::Stage(_) if self.config(name).fs.is_some())
                    || matches!(step, Step::Publish(..) if self.config(name).fs.is_none())
                {
                    self.check_tokens(name)?;
                    self.check_thick(name)?;
                }
            }
            self.host
                .remove_leaf(&staging(name))
                .map_err(|errno| format!("{name} is still staged: {errno}"))?;
        }
        self.finish_cuts()?;
        self.check()?;
        // Blocks that `wipe: discard` has freed are discarded later. After that, the marks of it
        // are gone.
        let driver = self.driver().map_err(|error| chain(&error))?;
        for pool in driver.served() {
            driver.discard_freed(pool);
        }
        let mut files = self.host.files_below(Path::new(POOL));
        // The count of the IDs of thin devices stays.
        files.retain(|file| !file.starts_with("next-id"));
        let left = self.observed_state();
        let nothing_left = left.mounted.is_empty()
            && left.targets.is_empty()
            && left.loops == 0
            && files == ["lock", "pool.json", "snapshots", "trash", "volumes"];
        match nothing_left {
            true => Ok(()),
            false => Err(format!("left at the end: {left:?} {files:?}")),
        }
    }

    /// The steps that delete a volume from its present state.
    fn last_steps(&self, name: &'static str) -> std::result::Result<Vec<Step>, String> {
        let Some(id) = self.ids.get(name) else {
            return Ok(vec![Step::UnpublishInline(name)]);
        };
        let driver = self.driver().map_err(|error| chain(&error))?;
        let mut steps = Vec::new();
        if driver.volumes.get_volume(id).is_ok() {
            steps.push(Step::Stage(name));
            if self.config(name).fs.is_none() {
                // It cannot be published read-only and writable at once.
                steps.push(Step::Unpublish(name, 0));
                steps.push(Step::Unpublish(name, 1));
                steps.push(Step::Publish(name, 0, false));
            }
        }
        steps.extend([
            Step::Unpublish(name, 0),
            Step::Unpublish(name, 1),
            Step::Unstage(name),
            Step::Delete(name),
            Step::Delete(name),
        ]);
        Ok(steps)
    }
}
