//! Snapshots, groups, restores and clones in a world: how they are asked for, and what must be in
//! them.
//!
//! Before every try the world notes what the source holds: all that its users have written, and
//! what of it has reached the image. A snapshot must be what was noted at one of its tries, to
//! the token.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::OnceLock;

use slackwater::error::{Result, chain};
use slackwater::host::memory::{MemoryHost, STRANGE_TOKEN};
use slackwater::host::{Freezer, Host};
use slackwater::model::id::NameKind;
use slackwater::model::size::image_bytes;
use slackwater::model::{GroupId, Level, PoolId, SnapshotId, SnapshotParameters};
use slackwater::operation::{
    CreateGroup, CreateSnapshot, CreateVolume, Driver, ListSnapshots, NamedGroup, Snapshot,
};
use slackwater::record::{self, ContentSource, SnapshotRecord, SnapshotState};

use super::{How, POOL, Step, World, create, range, staging, target};

/// What a source held at a try.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Held {
    /// What its users had written.
    written: Vec<u64>,
    /// What of it was in the image.
    synced: Vec<u64>,
}

/// What strangers wrote into the sources of a group.
#[derive(Default)]
struct Strange {
    /// Number of their writes before the call that cut it.
    before: BTreeMap<&'static str, usize>,
    /// Those that they wrote into during that call; `None` before its end.
    touched: Option<BTreeSet<&'static str>>,
}

/// What must be in snapshots and clones.
#[derive(Default)]
pub struct Cuts {
    pool: OnceLock<PoolId>,
    /// By request name and id of the source.
    held: BTreeMap<(String, String), Vec<Held>>,
    /// Names of single snapshots that may be there.
    snapshots: BTreeSet<&'static str>,
    groups: BTreeSet<&'static str>,
    /// Ids of members, as they were or will be answered.
    members: BTreeMap<&'static str, Vec<String>>,
    /// By group.
    strange: BTreeMap<&'static str, Strange>,
    /// When those that were answered were cut, by id.
    cut_at: BTreeMap<String, u64>,
    /// What was wrong with an answer.
    wrong: Vec<String>,
}

/// Without what a stranger wrote.
fn ours(tokens: Vec<u64>) -> Vec<u64> {
    tokens
        .into_iter()
        .filter(|token| *token != STRANGE_TOKEN)
        .collect()
}

impl World {
    /// Asked for once: a status measures the pool.
    pub(super) fn pool_id(&self) -> Option<PoolId> {
        if let Some(known) = self.cuts.pool.get() {
            return Some(*known);
        }
        let found = self.driver().ok()?.pool_status().first()?.id?;
        Some(*self.cuts.pool.get_or_init(|| found))
    }

    pub fn snapshot_id(&self, name: &str) -> String {
        let of = |pool| SnapshotId::of_name(pool, NameKind::Snapshot, name).to_string();
        self.pool_id().map_or_else(|| name.into(), of)
    }

    fn group_id(&self, name: &str) -> String {
        let home = self.driver().map(|driver| driver.home());
        home.map_or_else(
            |_| name.into(),
            |home| GroupId::of_name(home, name).to_string(),
        )
    }

    /// What the users of a volume have written, and what its image has.
    fn holds(&self, volume: &str) -> Held {
        let synced = ours(self.image_tokens("volumes", &self.id(volume)));
        let places = [staging(volume), target(volume, 0), target(volume, 1)];
        let mounted = places.iter().find_map(|at| self.host.tokens(at).ok());
        let written = mounted.map_or_else(|| synced.clone(), ours);
        Held { written, synced }
    }

    pub(super) fn image(part: &str, id: &str) -> String {
        let uuid = id.split_once('.').map_or(id, |(_, uuid)| uuid);
        format!("{POOL}/{part}/{uuid}/data.img")
    }

    fn image_tokens(&self, part: &str, id: &str) -> Vec<u64> {
        let image = World::image(part, id);
        self.host
            .image_tokens(Path::new(&image))
            .unwrap_or_default()
    }

    fn note_source(&mut self, name: &str, volume: &str) {
        let held = self.holds(volume);
        self.note_held((name.into(), self.id(volume)), held);
    }

    fn note_held(&mut self, key: (String, String), held: Held) {
        let tries = self.cuts.held.entry(key).or_default();
        if !tries.contains(&held) {
            tries.push(held);
        }
    }

    /// Before a call.
    pub fn note(&mut self, step: &Step) {
        match step {
            Step::Snapshot(name, volume, _) => {
                self.cuts.snapshots.insert(name);
                self.note_source(name, volume);
            }
            Step::Group(name, volumes) => {
                self.cuts.groups.insert(name);
                let members = self.member_ids(name, volumes);
                if !self.known_members(name).iter().any(|id| self.is_ready(id)) {
                    let writes = |volume: &&'static str| {
                        (*volume, self.strange("volumes", &self.id(volume)))
                    };
                    let strange = Strange {
                        before: volumes.iter().map(writes).collect(),
                        touched: None,
                    };
                    self.cuts.strange.insert(name, strange);
                }
                self.cuts.members.insert(name, members);
                for volume in *volumes {
                    self.note_source(name, volume);
                }
            }
            Step::Clone(name, volume, ..) => self.note_source(name, volume),
            Step::Restore(name, snapshot, ..) => {
                let id = self.snapshot_id(snapshot);
                if self.is_ready(&id) {
                    let written = ours(self.image_tokens("snapshots", &id));
                    let synced = written.clone();
                    self.note_held((name.to_string(), id), Held { written, synced });
                }
            }
            _ => {}
        }
    }

    /// After a call that was answered well.
    pub fn learn(&mut self, step: &Step) {
        match step {
            Step::Snapshot(name, ..) => {
                let id = self.snapshot_id(name);
                self.learn_time(&id);
            }
            Step::Group(name, volumes) => {
                self.learn_strange(name);
                for id in self.member_ids(name, volumes) {
                    self.learn_time(&id);
                }
            }
            Step::DeleteSnapshot(name) => {
                self.cuts.snapshots.remove(name);
                let id = self.snapshot_id(name);
                self.cuts.cut_at.remove(&id);
                self.cuts.held.retain(|(of, _), _| of != name);
            }
            Step::DeleteGroup(name) => {
                self.cuts.groups.remove(name);
                let mut known = std::mem::take(&mut self.cuts.cut_at);
                known.retain(|id, _| self.record_of(id).is_some());
                self.cuts.cut_at = known;
                self.cuts.held.retain(|(of, _), _| of != name);
            }
            Step::Restore(name, snapshot, how, _) => {
                let id = self.snapshot_id(snapshot);
                self.learn_copy(name, *how, id);
            }
            Step::Clone(name, volume, how, _) => {
                let id = self.id(volume);
                self.learn_copy(name, *how, id);
            }
            Step::Delete(name) => self.cuts.held.retain(|(of, _), _| of != name),
            _ => {}
        }
    }

    /// What was cut may be cut anew.
    pub fn forget_times(&mut self) {
        self.cuts.cut_at.clear();
    }

    /// An answer that was given once stays the same.
    fn learn_time(&mut self, id: &str) {
        let Some(record) = self.record_of(id) else {
            self.cuts
                .wrong
                .push(format!("snapshot {id} was answered and has no record"));
            return;
        };
        let known = *self.cuts.cut_at.entry(id.into()).or_insert(record.cut_at);
        if known != record.cut_at {
            let wrong = format!("snapshot {id}, cut at {known}, is now of {}", record.cut_at);
            self.cuts.wrong.push(wrong);
        }
    }

    /// A new volume begins with what its source held at one of the tries.
    fn learn_copy(&mut self, name: &'static str, how: How, source: String) {
        let tries = self.cuts.held.get(&(name.to_string(), source)).cloned();
        let tries = tries.unwrap_or_default().into_iter();
        let expected: Vec<_> = tries.map(|held| held.written).collect();
        let id = self.id(name);
        let found = ours(self.image_tokens("volumes", &id));
        if !expected.iter().any(|tokens| found.starts_with(tokens)) {
            let wrong = format!("{name} begins with {found:?} and not with one of {expected:?}");
            self.cuts.wrong.push(wrong);
        }
        self.ids.insert(name, id);
        self.hows.insert(name, how);
        self.tokens
            .entry(name)
            .or_insert_with(|| found.into_iter().collect());
    }

    fn member_ids(&self, group: &str, volumes: &[&str]) -> Vec<String> {
        let (group, pool) = (self.group_id(group), self.pool_id());
        let id = |volume: &&str| {
            let name = format!("{group}\n{}", self.id(volume));
            let of = |pool| SnapshotId::of_name(pool, NameKind::Member, &name).to_string();
            pool.map_or_else(String::new, of)
        };
        volumes.iter().map(id).collect()
    }

    fn record_of(&self, id: &str) -> Option<SnapshotRecord> {
        let uuid = id.split_once('.').map_or(id, |(_, uuid)| uuid);
        let path = format!("{POOL}/snapshots/{uuid}/record.json");
        let load = |host: &MemoryHost| record::load(host, Path::new(&path));
        self.host.aside(load).ok().flatten()
    }

    /// The members of a group: as they're listed, or else as they would be answered.
    fn known_members(&self, group: &str) -> Vec<String> {
        let id = self.group_id(group);
        let records = self.snapshot_records().into_iter();
        let mut listed = records
            .filter(|record| record.state == SnapshotState::Ready)
            .filter_map(|record| record.group)
            .filter(|of| GroupId(of.id).to_string() == id);
        let noted = || self.cuts.members.get(group).cloned().unwrap_or_default();
        listed.next().map_or_else(noted, |of| of.members)
    }

    /// The caller begins anew with what it was never told the end of.
    pub fn forget_unanswered(&mut self) {
        let mut known = std::mem::take(&mut self.cuts.cut_at);
        known.retain(|id, _| self.is_ready(id));
        self.cuts.cut_at = known;
    }

    fn is_ready(&self, id: &str) -> bool {
        let record = self.record_of(id);
        record.is_some_and(|record| record.state == SnapshotState::Ready)
    }

    /// One of the calls of this file.
    pub(super) fn call_cut(&self, driver: &Driver, step: &Step) -> Result<String> {
        let done = |()| String::from("done");
        let told = |snapshot: &Snapshot| {
            let (id, source) = (snapshot.id, snapshot.source_volume_id);
            let (size, level, group) = (snapshot.size, snapshot.level, snapshot.group);
            format!("{id} of {source}, {size} bytes, {level}, {group:?}")
        };
        let parameters = |consistency| SnapshotParameters {
            consistency,
            ..SnapshotParameters::default()
        };
        match step {
            Step::Snapshot(name, volume, level) => driver
                .create_snapshot(&CreateSnapshot {
                    name: name.to_string(),
                    source_volume_id: self.id(volume),
                    parameters: parameters(*level),
                    requisite: Vec::new(),
                })
                .map(|snapshot| told(&snapshot)),
            Step::DeleteSnapshot(name) => driver.delete_snapshot(&self.snapshot_id(name)).map(done),
            Step::Restore(name, snapshot, how, size) => {
                let from = ContentSource::Snapshot(self.snapshot_id(snapshot));
                create_from(driver, name, *how, *size, from)
            }
            Step::Clone(name, volume, how, size) => {
                let from = ContentSource::Volume(self.id(volume));
                create_from(driver, name, *how, *size, from)
            }
            Step::Group(name, volumes) => driver
                .create_group(&CreateGroup {
                    name: name.to_string(),
                    source_volume_ids: volumes.iter().map(|volume| self.id(volume)).collect(),
                    parameters: parameters(Level::Filesystem),
                })
                .map(|group| {
                    let members: Vec<String> = group.snapshots.iter().map(told).collect();
                    format!("{}: {}", group.id, members.join("; "))
                }),
            Step::DeleteGroup(name) => driver
                .delete_group(&NamedGroup {
                    group_id: self.group_id(name),
                    snapshot_ids: self.known_members(name),
                })
                .map(done),
            other => panic!("{other:?} makes no cut"),
        }
    }

    /// Records of snapshots, as they are on the pool.
    pub fn snapshot_records(&self) -> Vec<SnapshotRecord> {
        let folder = format!("{POOL}/snapshots");
        let names = self.host.aside(|host| host.list_dir(Path::new(&folder)));
        let names = names.ok().flatten().unwrap_or_default();
        names
            .iter()
            .filter_map(|name| self.record_of(name))
            .collect()
    }

    pub(super) fn snapshot_lines(&self) -> Vec<String> {
        let ready = self.snapshot_records().into_iter();
        let ready = ready.filter(|record| record.state == SnapshotState::Ready);
        ready.map(|record| format!("{record:?}")).collect()
    }

    /// Nothing is left frozen, and no answer was wrong.
    pub(super) fn check_freezes(&self) -> std::result::Result<(), String> {
        if let Some(wrong) = self.cuts.wrong.first() {
            return Err(wrong.clone());
        }
        let frozen = self.host.frozen();
        if frozen.iter().any(|(_, by_stranger)| !by_stranger) {
            return Err(format!("still frozen: {frozen:?}"));
        }
        let journalled = self.host.aside(|host| host.journalled());
        let journalled = journalled.map_err(|error| chain(&error))?;
        match journalled.is_empty() {
            true => Ok(()),
            false => Err(format!("still journalled: {journalled:?}")),
        }
    }

    /// What must hold of snapshots at any time when nothing runs.
    pub(super) fn check_cuts(&self, driver: &Driver) -> std::result::Result<(), String> {
        let page = driver.list_snapshots(&ListSnapshots::default());
        let listed = page.map_err(|error| chain(&error))?.snapshots;
        let records = self.snapshot_records().into_iter();
        let (ready, unready): (Vec<_>, Vec<_>) =
            records.partition(|record| record.state == SnapshotState::Ready);
        // A group is listed as a whole, or not at all.
        let group = |record: &SnapshotRecord| record.group.as_ref().map(|group| group.id);
        let in_part: BTreeSet<_> = unready.iter().filter_map(group).collect();
        let is_whole =
            |record: &&SnapshotRecord| !group(record).is_some_and(|group| in_part.contains(&group));
        if listed.len() != ready.iter().filter(is_whole).count() {
            return Err(format!("{listed:?} are listed, and ready are {ready:?}"));
        }
        for snapshot in &listed {
            let id = snapshot.id.to_string();
            let found = driver.get_snapshot(&id).map_err(|error| chain(&error))?;
            let record = ready.iter().find(|record| record.uuid == snapshot.id.uuid);
            let record = record.filter(is_whole);
            let record = record.ok_or_else(|| format!("{id} is listed, ready or whole isn't"))?;
            if found != *snapshot {
                return Err(format!("{snapshot:?} {found:?}"));
            }
            self.check_snapshot(snapshot, record)?;
        }
        check_groups(&ready)
    }

    /// A snapshot that is served.
    fn check_snapshot(
        &self,
        snapshot: &Snapshot,
        record: &SnapshotRecord,
    ) -> std::result::Result<(), String> {
        let id = snapshot.id.to_string();
        let image = World::image("snapshots", &id);
        let image = Path::new(&image);
        if let Some(flaw) = self.host.flaw(image) {
            return Err(format!("{id} is served: {flaw}"));
        }
        let stat = self.host.stat(image).map_err(|error| error.to_string())?;
        if stat.is_none_or(|stat| stat.size < image_bytes(snapshot.size)) {
            return Err(format!("{snapshot:?} has an image of {stat:?}"));
        }
        if record.cut_at == 0 || snapshot.cut_at != record.cut_at || record.copy.is_some() {
            return Err(format!("{record:?}"));
        }
        let key = (record.name.clone(), snapshot.source_volume_id.to_string());
        let Some(tries) = self.cuts.held.get(&key) else {
            return Err(format!("{key:?} was never asked for"));
        };
        let found = ours(self.image_tokens("snapshots", &id));
        let fits = |held: &Held| match record.level {
            Level::Crash => found.starts_with(&held.synced) && held.written.starts_with(&found),
            Level::Filesystem | Level::Application => found == held.written,
        };
        match tries.iter().any(fits) {
            true => Ok(()),
            false => Err(format!(
                "{id} ({}) has {found:?}, of {tries:?}",
                record.level
            )),
        }
    }

    /// What strangers had written into an image.
    fn strange(&self, part: &str, id: &str) -> usize {
        let tokens = self.image_tokens(part, id).into_iter();
        tokens.filter(|token| *token == STRANGE_TOKEN).count()
    }

    /// After a call that may have cut a group: where strangers have written meanwhile.
    pub fn learn_strange(&mut self, group: &str) {
        let whole = self.known_members(group).iter().any(|id| self.is_ready(id));
        let cut_off = !self.is_up();
        let Some(strange) = self.cuts.strange.get(group) else {
            return;
        };
        if strange.touched.is_some() || !(whole || cut_off) {
            return;
        }
        let grown = |(volume, before): (&&'static str, &usize)| {
            let now = self.strange("volumes", &self.id(volume));
            // A call that is cut off has no stranger.
            (now > *before && !cut_off).then_some(*volume)
        };
        let touched = strange.before.iter().filter_map(grown).collect();
        if let Some(strange) = self.cuts.strange.get_mut(group) {
            strange.touched = Some(touched);
        }
    }

    /// Whether what a stranger wrote, who thawed in the window, is in all members of a group into
    /// whose sources it was written, or in none.
    pub fn check_order(&self, group: &str, volumes: &[&str]) -> std::result::Result<(), String> {
        let Some(strange) = self.cuts.strange.get(group) else {
            return Err(format!("group {group} was never asked for"));
        };
        let touched = strange.touched.clone().unwrap_or_default();
        let ids = self.member_ids(group, volumes);
        let members = volumes.iter().zip(&ids);
        let members = members.filter(|(volume, _)| touched.contains(*volume));
        let more = |(volume, id): (&&str, &String)| {
            let before = strange.before.get(volume).copied().unwrap_or(0);
            self.strange("snapshots", id).saturating_sub(before)
        };
        let written: Vec<usize> = members.map(more).collect();
        match written.windows(2).all(|two| two[0] == two[1]) {
            true => Ok(()),
            false => Err(format!(
                "writes are in some members of {group} and not in others: {written:?}"
            )),
        }
    }

    /// Deletes every snapshot, twice.
    pub(super) fn finish_cuts(&mut self) -> std::result::Result<(), String> {
        let snapshots = self
            .cuts
            .snapshots
            .clone()
            .into_iter()
            .map(Step::DeleteSnapshot);
        let groups = self.cuts.groups.clone().into_iter().map(Step::DeleteGroup);
        for step in snapshots.chain(groups).collect::<Vec<_>>() {
            for _ in 0..2 {
                let done = self.run(&step);
                done.map_err(|error| format!("in the end, {step:?}: {}", chain(&error)))?;
            }
        }
        Ok(())
    }
}

/// Members of one group that are served are of one try and one moment.
fn check_groups(ready: &[SnapshotRecord]) -> std::result::Result<(), String> {
    for one in ready {
        let same = |other: &&SnapshotRecord| {
            other.group.as_ref().map(|group| group.id) == one.group.as_ref().map(|group| group.id)
        };
        let differs = |other: &SnapshotRecord| {
            (other.attempt, other.cut_at) != (one.attempt, one.cut_at) || other.group != one.group
        };
        if one.group.is_some()
            && let Some(other) = ready.iter().filter(same).find(|other| differs(other))
        {
            return Err(format!("members of two tries: {one:?} {other:?}"));
        }
    }
    Ok(())
}

fn create_from(
    driver: &Driver,
    name: &str,
    how: How,
    size: u64,
    from: ContentSource,
) -> Result<String> {
    let request = CreateVolume {
        capacity: range(size),
        content_source: Some(from),
        ..create(name, how)
    };
    let volume = driver.create_volume(&request)?;
    Ok(format!("{volume:?}"))
}
