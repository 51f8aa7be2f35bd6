//! The visible state of a simulation, read without the driver.

use std::collections::BTreeMap;
use std::path::Path;

use slackwater::error::chain;
use slackwater::host::mapper::UUID_PREFIX;
use slackwater::host::memory::MemoryHost;
use slackwater::host::{Device, Host};
use slackwater::model::size::image_bytes;
use slackwater::model::{AccessType, Allocation, Capability, FsType, PoolId, Wipe};
use slackwater::operation::pools::inventory;
use slackwater::record::{
    ContentSource, Formatted, FormattedAs, SnapshotRecord, SnapshotState, VolumeState,
};
use uuid::Uuid;

use crate::simulation::remote::remote_snapshot;
use crate::simulation::{POOL, VolumeConfig, staging, target};
use crate::state_machine::Run;
use crate::state_machine::acts::{GROUPS, INLINE, NAMES, SNAPSHOTS};
use crate::state_machine::cuts::{SnapshotView, Source};
use crate::state_machine::model::{Observation, VolumeView};

/// The complete and the begun formatting.
fn formatted_as(formatted: Option<&Formatted>) -> (Option<FormattedAs>, Option<FormattedAs>) {
    match formatted {
        Some(formatted) if formatted.complete => (Some(formatted.kind), None),
        Some(formatted) => (None, Some(formatted.kind)),
        None => (None, None),
    }
}

fn how_of(
    capabilities: &[Capability],
    allocation: Allocation,
    wipe: Wipe,
) -> Result<VolumeConfig, String> {
    let [capability] = capabilities else {
        return Err(format!("a volume for {capabilities:?}"));
    };
    let fs = match &capability.access_type {
        AccessType::Mount { fs_type, .. } => *fs_type,
        AccessType::Block => None,
    };
    Ok(VolumeConfig {
        fs,
        allocation,
        wipe,
        read_only: false,
    })
}

impl Run {
    /// The file systems on the devices of raw volumes, and those that the driver has found there.
    pub fn shown(&self) -> Result<BTreeMap<&'static str, FsType>, String> {
        let host = &self.sim.host;
        let read = |host: &MemoryHost| {
            inventory::read(host, "default", PoolId(Uuid::nil()), Path::new(POOL))
        };
        let found = host.without_faults(read).map_err(|error| chain(&error))?;
        let mut shown = BTreeMap::new();
        for record in found.volumes.into_iter().map(|found| found.record) {
            let name = NAMES.iter().find(|name| **name == record.name);
            let is_found = record.formatted.as_ref().is_some_and(|it| it.found);
            let (Some(name), true) = (name, record.is_raw() || is_found) else {
                continue;
            };
            let image = self.sim.image("volumes", &record.uuid.to_string());
            if let Ok(Some(fs)) = host.file_system_in(Path::new(&image)) {
                shown.insert(*name, fs);
            }
        }
        Ok(shown)
    }

    /// The visible state, read without the driver.
    pub fn observe(&self) -> Result<Observation, String> {
        self.sim.host.without_faults(|host| self.observe_by(host))
    }

    fn observe_by(&self, host: &MemoryHost) -> Result<Observation, String> {
        let message = |error: &dyn std::error::Error| chain(error);
        let mounts = host.mounts().map_err(|error| message(&error))?;
        let loops = host.loops().map_err(|error| message(&error))?;
        let mapped = host.mapped_devices("default", "SLACKWATER-");
        let mapped = mapped.map_err(|error| message(&error))?;
        let boot = host.boot_id().map_err(|error| message(&error))?;
        let pool = PoolId(Uuid::nil());
        let found = inventory::read(host, "default", pool, Path::new(POOL))
            .map_err(|error| message(&error))?;
        let mut seen = Observation::default();
        for record in found.volumes.into_iter().map(|found| found.record) {
            if record.state != VolumeState::Ready {
                continue;
            }
            let known = NAMES
                .iter()
                .chain(&INLINE)
                .find(|name| **name == record.name);
            let name = *known.ok_or_else(|| format!("an unknown volume named {}", record.name))?;
            let at = |path: &Path| mounts.iter().rev().find(|mount| mount.mount_point == path);
            if record.ephemeral {
                let mounted = at(&target(name, 0)).is_some();
                seen.inline.insert(name, mounted);
                continue;
            }
            let file = format!("/run/slackwater/state/staged/{}.json", record.uuid);
            let entry = host
                .read_file(Path::new(&file))
                .map_err(|error| message(&error))?;
            let entry: Option<serde_json::Value> =
                entry.and_then(|bytes| serde_json::from_slice(&bytes).ok());
            let block = entry.is_some_and(|entry| {
                entry["boot"] == boot.to_string() && entry["stage"].is_object()
            });
            let linear = format!("{UUID_PREFIX}linear-{}", record.uuid);
            let linear = host
                .linear_device(&linear)
                .map_err(|error| message(&error))?;
            let mut published = BTreeMap::new();
            for n in 0..2 {
                if let Some(mount) = at(&target(name, n)) {
                    let is_of = |path: &Path| path.file_name() == mount.root.file_name();
                    let of_loop = loops
                        .iter()
                        .find(|found| is_of(&Device::of_loop(found.number).path));
                    let of_mapped = mapped.iter().find(|found| is_of(&found.device.path));
                    let device = of_loop.map(|found| found.read_only);
                    let device = device.or(of_mapped.map(|found| found.read_only));
                    let of_linear = linear.iter().find(|found| is_of(&found.device.path));
                    let device = device.or(of_linear.map(|found| found.read_only));
                    let read_only = device.unwrap_or_else(|| mount.is_read_only());
                    published.insert(n, read_only);
                }
            }
            let (formatted, begun) = formatted_as(record.formatted.as_ref());
            let view = VolumeView {
                config: how_of(&record.capabilities, record.allocation, record.created_wipe)?,
                source: self.source_of(record.content_source.as_ref())?,
                size: record.size,
                wipe: record.wipe,
                formatted,
                begun,
                staged: block || at(&staging(name)).is_some(),
                grown: host
                    .fs_bytes(&staging(name))
                    .is_ok_and(|bytes| bytes >= image_bytes(record.size)),
                published,
            };
            seen.volumes.insert(name, view);
        }
        self.observe_cuts(&mut seen)?;
        Ok(seen)
    }

    fn source_of(&self, source: Option<&ContentSource>) -> Result<Option<Source>, String> {
        let found = match source {
            None => return Ok(None),
            Some(ContentSource::Snapshot(id)) if id == remote_snapshot() => Some(Source::Remote),
            Some(ContentSource::Snapshot(id)) => SNAPSHOTS
                .into_iter()
                .find(|name| self.sim.snapshot_id(name) == *id)
                .map(Source::Snapshot),
            Some(ContentSource::Volume(id)) => self.volume_named(id).map(Source::Volume),
        };
        let unknown = || format!("a volume with an unknown source: {source:?}");
        found.map(Some).ok_or_else(unknown)
    }

    fn volume_named(&self, id: &str) -> Option<&'static str> {
        let ends = |name: &&'static str| self.sim.id(name).ends_with(id);
        NAMES.into_iter().find(ends)
    }

    /// Snapshots that are committed, or whose group is.
    fn observe_cuts(&self, seen: &mut Observation) -> Result<(), String> {
        let records = self.sim.snapshot_records();
        for record in &records {
            let unknown = || format!("a snapshot that was never requested: {record:?}");
            let source = self.volume_named(&record.source.to_string());
            let (formatted, begun) = formatted_as(record.formatted.as_ref());
            let view = SnapshotView {
                source: source.ok_or_else(unknown)?,
                size: record.size,
                formatted,
                begun,
                min_level: record.min_level,
            };
            let named =
                |names: &[&'static str]| names.iter().copied().find(|name| *name == record.name);
            if !is_committed(record, &records) {
                continue;
            }
            let Some(membership) = &record.group else {
                let name = named(&SNAPSHOTS).ok_or_else(unknown)?;
                seen.snapshots.insert(name, view);
                continue;
            };
            let group = seen
                .groups
                .entry(named(&GROUPS).ok_or_else(unknown)?)
                .or_default();
            group.members.insert(view.source, view);
            for id in &membership.sources {
                group
                    .sources
                    .insert(self.volume_named(id).ok_or_else(unknown)?);
            }
        }
        Ok(())
    }
}

/// A member in state `Cut` is committed by the first member.
fn is_committed(record: &SnapshotRecord, all: &[SnapshotRecord]) -> bool {
    let lead = record
        .group
        .as_ref()
        .and_then(|group| group.members.first());
    let commits = |lead: &String| {
        let same = |one: &&SnapshotRecord| lead.ends_with(&one.uuid.to_string());
        let found = all.iter().find(same);
        found.is_some_and(|one| one.state == SnapshotState::Ready && one.attempt == record.attempt)
    };
    match record.state {
        SnapshotState::Ready => true,
        SnapshotState::Cut => lead.is_some_and(commits),
        SnapshotState::Preparing => false,
    }
}
