//! Snapshots, groups, restores and clones in a simulation: their calls, and their expected content.
//!
//! Before every try, the simulation records the content of the source: all tokens that its users
//! have written, and those that have reached the image. The content of a snapshot must equal, token
//! by token, what was recorded at one of its tries.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::OnceLock;

use slackwater::error::{Result, chain};
use slackwater::host::memory::{FOREIGN_TOKEN, MemoryHost};
use slackwater::host::{Freezer, Host};
use slackwater::model::id::NameKind;
use slackwater::model::size::image_bytes;
use slackwater::model::{GroupId, Level, PoolId, SnapshotId, SnapshotParameters, VolumeId};
use slackwater::operation::{
    BeginRevert, CreateGroup, CreateSnapshot, CreateVolume, Driver, ListSnapshots, NamedGroup,
    Snapshot,
};
use slackwater::record::{self, ContentSource, SnapshotRecord, SnapshotState};
use uuid::Uuid;

use super::remote::{self, REMOTE_TOKENS, remote_snapshot};
use super::{
    POOL, Simulation, Step, VolumeConfig, create, import_file, is_thin, range, staging, target,
};

/// The content of a source at a try.
#[derive(Clone, Debug, PartialEq, Eq)]
struct SourceContent {
    /// All tokens that its users had written.
    written: Vec<u64>,
    /// The tokens that were in the image.
    synced: Vec<u64>,
}

/// Foreign writes into the sources of a group.
#[derive(Default)]
struct ForeignWrites {
    /// The number of foreign writes before the call that cut the group.
    before: BTreeMap<&'static str, usize>,
    /// The sources that were written during that call; `None` before its end.
    written_during_call: Option<BTreeSet<&'static str>>,
}

/// The expected content of snapshots and clones.
#[derive(Default)]
pub struct Cuts {
    pool: OnceLock<PoolId>,
    /// By request name and ID of the source.
    content: BTreeMap<(String, String), Vec<SourceContent>>,
    /// Names of single snapshots that may exist.
    snapshots: BTreeSet<&'static str>,
    groups: BTreeSet<&'static str>,
    /// IDs of members, as they were or will be answered.
    members: BTreeMap<&'static str, Vec<String>>,
    /// By group.
    foreign_writes: BTreeMap<&'static str, ForeignWrites>,
    /// What hidden bases must have, by the name of the snapshot and the ID of its source.
    bases: BTreeMap<(String, String), Vec<SourceContent>>,
    /// The time of the cut of each answered snapshot, by ID.
    cut_at: BTreeMap<String, u64>,
    /// Errors in answers.
    errors: Vec<String>,
}

impl Cuts {
    /// Whether there may be a snapshot or copy, or has been one.
    pub(super) fn may_share(&self) -> bool {
        !self.content.is_empty() || !self.bases.is_empty()
    }
}

/// The class of these snapshots keeps them as bases.
pub const KEPT: [&str; 2] = ["t", "u"];

/// Removes foreign writes.
fn without_foreign(tokens: Vec<u64>) -> Vec<u64> {
    tokens
        .into_iter()
        .filter(|token| *token != FOREIGN_TOKEN)
        .collect()
}

impl Simulation {
    /// Queried once, because a status measures the pool.
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
        let home = self.driver().map(|driver| driver.pools.home());
        home.map_or_else(
            |_| name.into(),
            |home| GroupId::of_name(home, name).to_string(),
        )
    }

    /// What the users of a volume have written, and what its image has.
    fn content_of(&self, volume: &str) -> SourceContent {
        let synced = without_foreign(self.image_tokens("volumes", &self.id(volume)));
        let places = [staging(volume), target(volume, 0), target(volume, 1)];
        let mounted = places.iter().find_map(|at| self.host.tokens(at).ok());
        let written = mounted.map_or_else(|| synced.clone(), without_foreign);
        SourceContent { written, synced }
    }

    /// The path of an image, also of a thin device.
    pub fn image(&self, part: &str, id: &str) -> String {
        let uuid = id.split_once('.').map_or(id, |(_, uuid)| uuid);
        let dir = format!("{POOL}/{part}/{uuid}");
        let path = format!("{dir}/record.json");
        let read = self
            .host
            .without_faults(|host| host.read_file(Path::new(&path)));
        let bytes = read.ok().flatten().unwrap_or_default();
        let record: Option<serde_json::Value> = serde_json::from_slice(&bytes).ok();
        match record.as_ref().and_then(|record| record["image"].as_u64()) {
            Some(number) => format!("/thin/default/{number}"),
            None => format!("{dir}/data.img"),
        }
    }

    fn image_tokens(&self, part: &str, id: &str) -> Vec<u64> {
        self.image_tokens_at(&self.image(part, id))
    }

    fn image_tokens_at(&self, image: &str) -> Vec<u64> {
        let tokens = self.host.image_tokens(Path::new(image));
        tokens.unwrap_or_default()
    }

    fn record_source(&mut self, name: &str, volume: &str) {
        let content = self.content_of(volume);
        self.record_content((name.into(), self.id(volume)), content);
    }

    fn record_content(&mut self, key: (String, String), content: SourceContent) {
        let tries = self.cuts.content.entry(key).or_default();
        if !tries.contains(&content) {
            tries.push(content);
        }
    }

    /// Records the expected content before a call.
    pub fn before_call(&mut self, step: &Step) {
        match step {
            Step::Snapshot(name, volume, _) => {
                self.cuts.snapshots.insert(name);
                self.record_source(name, volume);
            }
            Step::Group(name, volumes) => {
                self.cuts.groups.insert(name);
                let members = self.member_ids(name, volumes);
                if !self.known_members(name).iter().any(|id| self.is_ready(id)) {
                    let writes = |volume: &&'static str| {
                        (*volume, self.count_foreign("volumes", &self.id(volume)))
                    };
                    let writes = ForeignWrites {
                        before: volumes.iter().map(writes).collect(),
                        written_during_call: None,
                    };
                    self.cuts.foreign_writes.insert(name, writes);
                }
                self.cuts.members.insert(name, members);
                for volume in *volumes {
                    self.record_source(name, volume);
                }
            }
            Step::Clone(name, volume, ..) => self.record_source(name, volume),
            Step::Receive(name, ..) => {
                let (written, synced) = (REMOTE_TOKENS.to_vec(), REMOTE_TOKENS.to_vec());
                let key = (name.to_string(), remote_snapshot().to_string());
                self.record_content(key, SourceContent { written, synced });
            }
            Step::ImportFile(name, _) => {
                let written = self.image_tokens_at(import_file::IMAGE);
                let synced = written.clone();
                let key = (name.to_string(), import_file::IMAGE.to_string());
                self.record_content(key, SourceContent { written, synced });
            }
            Step::Restore(name, snapshot, ..) => {
                let id = self.snapshot_id(snapshot);
                if self.is_ready(&id) {
                    let written = without_foreign(self.image_tokens("snapshots", &id));
                    let synced = written.clone();
                    self.record_content((name.to_string(), id), SourceContent { written, synced });
                }
            }
            _ => {}
        }
    }

    /// Records the result of a call that succeeded.
    pub fn after_call(&mut self, step: &Step) {
        match step {
            Step::Snapshot(name, ..) => {
                let id = self.snapshot_id(name);
                self.record_cut_time(&id);
            }
            Step::Group(name, volumes) => {
                self.record_foreign_writes(name);
                for id in self.member_ids(name, volumes) {
                    self.record_cut_time(&id);
                }
            }
            Step::DeleteSnapshot(name) => {
                self.cuts.snapshots.remove(name);
                let id = self.snapshot_id(name);
                self.cuts.cut_at.remove(&id);
                let ended = self.cuts.content.extract_if(.., |(of, _), _| of == name);
                let ended: Vec<_> = ended.collect();
                self.cuts.bases.extend(ended);
            }
            Step::DeleteGroup(name) => {
                self.cuts.groups.remove(name);
                let mut known = std::mem::take(&mut self.cuts.cut_at);
                known.retain(|id, _| self.record_of(id).is_some());
                self.cuts.cut_at = known;
                self.cuts.content.retain(|(of, _), _| of != name);
            }
            Step::Restore(name, snapshot, config, _) => {
                let id = self.snapshot_id(snapshot);
                self.record_copy(name, *config, id);
            }
            Step::Revert(name, snapshot) => self.record_revert(name, snapshot),
            Step::Receive(name, config, _) => {
                self.record_copy(name, *config, remote_snapshot().to_string());
            }
            Step::ImportFile(name, _) => {
                self.record_copy(name, VolumeConfig::BLOCK, import_file::IMAGE.into());
            }
            Step::Clone(name, volume, config, _) => {
                let id = self.id(volume);
                self.record_copy(name, *config, id);
            }
            Step::Delete(name) => self.cuts.content.retain(|(of, _), _| of != name),
            _ => {}
        }
    }

    /// A snapshot may be cut again, at another time.
    pub fn forget_cut_times(&mut self) {
        self.cuts.cut_at.clear();
    }

    /// An answer must stay the same once it was given.
    fn record_cut_time(&mut self, id: &str) {
        let Some(record) = self.record_of(id) else {
            self.cuts
                .errors
                .push(format!("snapshot {id} was answered, but has no record"));
            return;
        };
        let known = *self.cuts.cut_at.entry(id.into()).or_insert(record.cut_at);
        if known != record.cut_at {
            let message = format!(
                "snapshot {id} was cut at {known}, and now reports {}",
                record.cut_at
            );
            self.cuts.errors.push(message);
        }
    }

    /// A new volume begins with the content of its source at one of the tries.
    fn record_copy(&mut self, name: &'static str, config: VolumeConfig, source: String) {
        let tries = self.cuts.content.get(&(name.to_string(), source)).cloned();
        let tries = tries.unwrap_or_default().into_iter();
        let expected: Vec<_> = tries.map(|content| content.written).collect();
        let id = self.id(name);
        let found = without_foreign(self.image_tokens("volumes", &id));
        if !expected.iter().any(|tokens| found.starts_with(tokens)) {
            let message = format!("{name} begins with {found:?} instead of one of {expected:?}");
            self.cuts.errors.push(message);
        }
        self.ids.insert(name, id);
        self.configs.insert(name, config.of_pool());
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
        self.host.without_faults(load).ok().flatten()
    }

    /// The members of a group: as listed, or as they would be answered.
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

    /// The caller starts over with calls whose end was not reported to it.
    pub fn forget_unanswered(&mut self) {
        let mut known = std::mem::take(&mut self.cuts.cut_at);
        known.retain(|id, _| self.is_ready(id));
        self.cuts.cut_at = known;
    }

    fn is_ready(&self, id: &str) -> bool {
        let record = self.record_of(id);
        record.is_some_and(|record| record.state == SnapshotState::Ready)
    }

    /// Makes one of the calls of this module.
    pub(super) fn call_cut(&self, driver: &Driver, step: &Step) -> Result<String> {
        let done = |()| String::from("done");
        let describe = |snapshot: &Snapshot| {
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
                .snapshots
                .create_snapshot(&CreateSnapshot {
                    name: name.to_string(),
                    source_volume_id: self.id(volume),
                    parameters: SnapshotParameters {
                        keep_base: KEPT.contains(name),
                        ..parameters(*level)
                    },
                    requisite: Vec::new(),
                })
                .map(|snapshot| describe(&snapshot)),
            Step::DeleteSnapshot(name) => driver
                .snapshots
                .delete_snapshot(&self.snapshot_id(name))
                .map(done),
            Step::Restore(name, snapshot, config, size) => {
                let from = ContentSource::Snapshot(self.snapshot_id(snapshot));
                create_from(driver, name, *config, *size, from)
            }
            Step::Receive(name, config, size) => remote::receive(driver, name, *config, *size),
            Step::ImportFile(name, size) => import_file::import(&self.host, driver, name, *size),
            Step::Clone(name, volume, config, size) => {
                let from = ContentSource::Volume(self.id(volume));
                create_from(driver, name, *config, *size, from)
            }
            Step::Revert(name, snapshot) => self.revert(driver, name, snapshot).map(done),
            Step::AbortRevert(name, snapshot) => {
                self.abort_revert(driver, name, snapshot).map(done)
            }
            Step::Group(name, volumes) => driver
                .snapshots
                .create_group(&CreateGroup {
                    name: name.to_string(),
                    source_volume_ids: volumes.iter().map(|volume| self.id(volume)).collect(),
                    parameters: parameters(Level::Filesystem),
                })
                .map(|group| {
                    let members: Vec<String> = group.snapshots.iter().map(describe).collect();
                    format!("{}: {}", group.id, members.join("; "))
                }),
            Step::DeleteGroup(name) => driver
                .snapshots
                .delete_group(&NamedGroup {
                    group_id: self.group_id(name),
                    snapshot_ids: self.known_members(name),
                })
                .map(done),
            other => panic!("{other:?} does not create a snapshot"),
        }
    }

    /// All steps of a revert, which is the same one in each call; then what the process does by itself.
    fn revert(&self, driver: &Driver, volume: &str, snapshot: &str) -> Result<()> {
        let (volumes, uid) = (&driver.volumes, Uuid::from_u128(1));
        let begin = self.begin_revert(driver, volume, snapshot, uid)?;
        volumes.begin_revert(&begin)?;
        volumes.prepare_revert(&begin.volume_id, uid)?;
        volumes.switch_revert(&begin.volume_id, uid, begin.members)?;
        volumes.end_revert(&begin.volume_id, uid)?;
        self.clean()
    }

    /// The same up to the switch; then its abort, which alone is repeated once it was done.
    fn abort_revert(&self, driver: &Driver, volume: &str, snapshot: &str) -> Result<()> {
        let (volumes, uid) = (&driver.volumes, Uuid::from_u128(2));
        let begin = self.begin_revert(driver, volume, snapshot, uid)?;
        let found = volumes.revert_status(&begin.volume_id, &begin.snapshot_id)?;
        if found.ended != Some((uid, false)) {
            volumes.begin_revert(&begin)?;
            volumes.prepare_revert(&begin.volume_id, uid)?;
        }
        volumes.abort_revert(&begin.volume_id, uid, begin.number)?;
        self.clean()
    }

    fn begin_revert(
        &self,
        driver: &Driver,
        volume: &str,
        snapshot: &str,
        uid: Uuid,
    ) -> Result<BeginRevert> {
        let (volume_id, snapshot_id) = (self.id(volume), self.snapshot_id(snapshot));
        let found = driver.volumes.revert_status(&volume_id, &snapshot_id)?;
        Ok(BeginRevert {
            volume_id,
            uid,
            name: "namespace/revert".into(),
            snapshot_id,
            number: found.number,
            members: 1_u32.into(),
        })
    }

    /// A reverted volume has what its snapshot has.
    fn record_revert(&mut self, name: &'static str, snapshot: &str) {
        let id = self.snapshot_id(snapshot);
        let expected = without_foreign(self.image_tokens("snapshots", &id));
        let found = without_foreign(self.image_tokens("volumes", &self.id(name)));
        if found != expected {
            let message = format!("{name} has {found:?} instead of {expected:?} of {snapshot}");
            self.cuts.errors.push(message);
        }
        self.tokens.insert(name, found.into_iter().collect());
    }

    /// The records of snapshots on the pool.
    pub fn snapshot_records(&self) -> Vec<SnapshotRecord> {
        let folder = format!("{POOL}/snapshots");
        let names = self
            .host
            .without_faults(|host| host.list_dir(Path::new(&folder)));
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
        if let Some(error) = self.cuts.errors.first() {
            return Err(error.clone());
        }
        let frozen = self.host.frozen();
        if frozen.iter().any(|(_, by_foreign)| !by_foreign) {
            return Err(format!("still frozen: {frozen:?}"));
        }
        let journaled = self.host.without_faults(|host| host.list_journaled());
        let journaled = journaled.map_err(|error| chain(&error))?;
        match journaled.is_empty() {
            true => Ok(()),
            false => Err(format!("still in the journal: {journaled:?}")),
        }
    }

    /// Invariants of snapshots at any time when no call runs.
    pub(super) fn check_cuts(&self, driver: &Driver) -> std::result::Result<(), String> {
        let page = driver.snapshots.list_snapshots(&ListSnapshots::default());
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
            return Err(format!("listed: {listed:?}, ready: {ready:?}"));
        }
        for snapshot in &listed {
            let id = snapshot.id.to_string();
            let found = driver
                .snapshots
                .get_snapshot(&id)
                .map_err(|error| chain(&error))?;
            let record = ready.iter().find(|record| record.uuid == snapshot.id.uuid);
            let record = record.filter(is_whole);
            let record = record.ok_or_else(|| {
                format!("{id} is listed, but is not ready, or its group is incomplete")
            })?;
            if found != *snapshot {
                return Err(format!("{snapshot:?} {found:?}"));
            }
            self.check_snapshot(snapshot, record)?;
        }
        let bases: Vec<_> = unready.iter().filter(|one| one.is_base()).collect();
        for base in &bases {
            self.check_base(driver, base)?;
            if bases.iter().filter(|one| one.source == base.source).count() > 1 {
                return Err(format!("two bases of one volume: {bases:?}"));
            }
        }
        check_groups(&ready)
    }

    /// A base is a whole snapshot that was deleted, of a volume that exists.
    fn check_base(
        &self,
        driver: &Driver,
        record: &SnapshotRecord,
    ) -> std::result::Result<(), String> {
        let pool = self.pool_id().ok_or("no pool")?;
        let (uuid, source) = (record.uuid, record.source);
        let source = VolumeId { pool, uuid: source }.to_string();
        if let Err(error) = driver.volumes.get_volume(&source) {
            return Err(format!("{record:?} without its volume: {}", chain(&error)));
        }
        let image = self.image("snapshots", &uuid.to_string());
        if let Some(flaw) = self.host.flaw(Path::new(&image)) {
            return Err(format!("{record:?} is a base although {flaw}"));
        }
        let key = (record.name.clone(), source);
        let tries = [self.cuts.bases.get(&key), self.cuts.content.get(&key)];
        let found = without_foreign(self.image_tokens("snapshots", &uuid.to_string()));
        let mut tries = tries.into_iter().flatten().flatten();
        let is_cut = |content: &SourceContent| {
            found.starts_with(&content.synced) && content.written.starts_with(&found)
        };
        match KEPT.contains(&record.name.as_str()) && tries.any(is_cut) {
            true => Ok(()),
            false => Err(format!("{record:?} has {found:?}")),
        }
    }

    /// Checks a snapshot that is served.
    fn check_snapshot(
        &self,
        snapshot: &Snapshot,
        record: &SnapshotRecord,
    ) -> std::result::Result<(), String> {
        let id = snapshot.id.to_string();
        let image = self.image("snapshots", &id);
        let image = Path::new(&image);
        if let Some(flaw) = self.host.flaw(image) {
            return Err(format!("{id} is served although {flaw}"));
        }
        let stat = self.host.stat(image).map_err(|error| error.to_string())?;
        if stat.is_none_or(|stat| !is_thin() && stat.size < image_bytes(snapshot.size)) {
            return Err(format!("{snapshot:?} has an image of {stat:?}"));
        }
        if record.cut_at == 0 || snapshot.cut_at != record.cut_at || record.copy.is_some() {
            return Err(format!("{record:?}"));
        }
        let key = (record.name.clone(), snapshot.source_volume_id.to_string());
        let Some(tries) = self.cuts.content.get(&key) else {
            return Err(format!("{key:?} was never requested"));
        };
        let found = without_foreign(self.image_tokens("snapshots", &id));
        let fits = |content: &SourceContent| match record.level {
            Level::Crash => {
                found.starts_with(&content.synced) && content.written.starts_with(&found)
            }
            Level::Filesystem | Level::Application => found == content.written,
        };
        match tries.iter().any(fits) {
            true => Ok(()),
            false => Err(format!(
                "{id} ({}) has {found:?}, expected one of {tries:?}",
                record.level
            )),
        }
    }

    /// The number of foreign writes in an image.
    fn count_foreign(&self, part: &str, id: &str) -> usize {
        let tokens = self.image_tokens(part, id).into_iter();
        tokens.filter(|token| *token == FOREIGN_TOKEN).count()
    }

    /// Records, after a call that may have cut a group, which sources were written by a foreign
    /// process during the call.
    pub fn record_foreign_writes(&mut self, group: &str) {
        let whole = self.known_members(group).iter().any(|id| self.is_ready(id));
        let is_cut_off = !self.is_up();
        let Some(writes) = self.cuts.foreign_writes.get(group) else {
            return;
        };
        if writes.written_during_call.is_some() || !(whole || is_cut_off) {
            return;
        }
        let has_grown = |(volume, before): (&&'static str, &usize)| {
            let now = self.count_foreign("volumes", &self.id(volume));
            // A call that is cut off has no foreign writes.
            (now > *before && !is_cut_off).then_some(*volume)
        };
        let written_during_call = writes.before.iter().filter_map(has_grown).collect();
        if let Some(writes) = self.cuts.foreign_writes.get_mut(group) {
            writes.written_during_call = Some(written_during_call);
        }
    }

    /// Checks that a foreign write, made after a foreign thaw in the freeze window, is either in
    /// all members whose sources it was written to, or in none.
    pub fn check_order(&self, group: &str, volumes: &[&str]) -> std::result::Result<(), String> {
        let Some(writes) = self.cuts.foreign_writes.get(group) else {
            return Err(format!("group {group} was never requested"));
        };
        let written_during_call = writes.written_during_call.clone().unwrap_or_default();
        let ids = self.member_ids(group, volumes);
        let members = volumes.iter().zip(&ids);
        let members = members.filter(|(volume, _)| written_during_call.contains(*volume));
        let more = |(volume, id): (&&str, &String)| {
            let before = writes.before.get(volume).copied().unwrap_or(0);
            self.count_foreign("snapshots", id).saturating_sub(before)
        };
        let written: Vec<usize> = members.map(more).collect();
        match written.windows(2).all(|pair| pair[0] == pair[1]) {
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
                done.map_err(|error| {
                    format!("while deleting everything, {step:?}: {}", chain(&error))
                })?;
            }
        }
        Ok(())
    }
}

/// All served members of a group must come from the same attempt and have the same time.
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
            return Err(format!("members of two attempts: {one:?} {other:?}"));
        }
    }
    Ok(())
}

fn create_from(
    driver: &Driver,
    name: &str,
    config: VolumeConfig,
    size: u64,
    from: ContentSource,
) -> Result<String> {
    let request = CreateVolume {
        capacity: range(size),
        content_source: Some(from),
        ..create(name, config)
    };
    let volume = driver.volumes.create_volume(&request)?;
    Ok(format!("{volume:?}"))
}
