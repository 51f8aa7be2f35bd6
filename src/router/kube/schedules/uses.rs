//! Members, levels and uses of sets: what must be known before one is deleted. Pure functions of what was
//! read.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use ::kube::ResourceExt;
use ::kube::api::DynamicObject;
use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use serde_json::Value;

use super::retention::State;
use super::sets::{Set, level_of, text, volumes_of};
use crate::model::{Level, PoolId, SnapshotId};

/// The label or annotation with which people keep a set.
const KEEP: &str = "slackwater.dev/keep";
/// Finalizers that external-snapshotter puts on every snapshot. One of anything else says that it is
/// needed.
const USUAL_FINALIZERS: [&str; 2] = [
    "snapshot.storage.kubernetes.io/",
    "groupsnapshot.storage.kubernetes.io/",
];

/// What is read to learn whether sets of one namespace are used.
#[derive(Clone, Debug, Default)]
pub(super) struct World {
    /// What is in the namespace.
    pub(super) namespace: Arc<Namespace>,
    /// What is the same for all schedules.
    pub(super) shared: Arc<Shared>,
    /// UUIDs of snapshots that agents report as being read; `None` for a pool whose agent does not answer.
    pub(super) readers: BTreeMap<PoolId, Option<BTreeSet<String>>>,
}

/// What is read of one namespace.
#[derive(Clone, Debug, Default)]
pub(super) struct Namespace {
    /// Its VolumeSnapshots.
    pub(super) snapshots: Vec<DynamicObject>,
    /// The group snapshots of its schedules.
    pub(super) groups: Vec<DynamicObject>,
}

/// What is read of the whole cluster.
#[derive(Clone, Debug, Default)]
pub(super) struct Shared {
    /// All VolumeSnapshotContents, by name.
    pub(super) contents: BTreeMap<String, DynamicObject>,
    /// All VolumeGroupSnapshotContents, by name.
    pub(super) group_contents: BTreeMap<String, DynamicObject>,
    /// Namespaces and names of the snapshots that unbound claims name, with the claims.
    pub(super) wanted: BTreeMap<(String, String), String>,
}

/// The snapshots that an unbound claim names as its source.
pub(super) fn wanted(claim: &PersistentVolumeClaim) -> Vec<((String, String), String)> {
    let phase = claim.status.as_ref().and_then(|it| it.phase.as_deref());
    let Some(spec) = claim.spec.as_ref().filter(|_| phase != Some("Bound")) else {
        return Vec::new();
    };
    let own = claim.namespace().unwrap_or_default();
    let path = format!("{own}/{}", claim.name_any());
    let mut found = Vec::new();
    if let Some(source) = spec.data_source.as_ref().filter(|it| it.kind == SNAPSHOT) {
        found.push(((own.clone(), source.name.clone()), path.clone()));
    }
    if let Some(source) = spec
        .data_source_ref
        .as_ref()
        .filter(|it| it.kind == SNAPSHOT)
    {
        let namespace = source.namespace.clone().unwrap_or(own);
        found.push(((namespace, source.name.clone()), path));
    }
    found
}

const SNAPSHOT: &str = "VolumeSnapshot";

/// Where a content has the ID of its snapshot or group.
fn handles<'a>(content: &'a DynamicObject, kind: &str) -> Vec<&'a str> {
    let paths = [format!("/status/{kind}"), format!("/spec/source/{kind}")];
    let each = paths.iter().filter_map(|path| text(content, path));
    each.filter(|handle| !handle.is_empty()).collect()
}

impl World {
    /// Fills in what is not known of a set.
    pub(super) fn complete(&self, set: &mut Set, namespace: &str, requested: Level) {
        let is_group = set.claim.is_empty();
        let members = self.members(set);
        let contents = match is_group {
            true => &self.shared.group_contents,
            false => &self.shared.contents,
        };
        let content = set.content.as_ref().and_then(|name| contents.get(name));
        let content = content.filter(|it| it.metadata.deletion_timestamp.is_none());
        set.volumes = content.map(volumes_of).unwrap_or_default();
        set.set_level(content.and_then(level_of), requested);
        if set.is_good() && is_group && !self.has_all_members(content, &members) {
            set.state = State::Partial;
        }
        if set.is_good() && content.is_none() {
            set.state = State::Partial;
        }
        let object = is_group.then(|| {
            self.namespace
                .groups
                .iter()
                .find(|it| it.name_any() == set.name)
        });
        set.used = match object {
            Some(None) => Some("it has changed".into()),
            Some(Some(object)) => held(object).or_else(|| self.used(object, &members, namespace)),
            None => match members.first() {
                Some(member) => self.used(member, &members, namespace),
                None => Some("it has changed".into()),
            },
        };
        if is_group && set.used.is_none() {
            set.used = content.and_then(|content| self.group_used(content));
        }
        // No other set is known to have the same data.
        let has_data = matches!(set.state, State::Good { .. } | State::Partial);
        if set.used.is_none() && has_data && set.volumes.is_empty() {
            set.used = Some("its volumes are not known".into());
        }
    }

    /// The VolumeSnapshots of a set.
    fn members(&self, set: &Set) -> Vec<&DynamicObject> {
        let is_member = |snapshot: &&DynamicObject| match set.claim.is_empty() {
            true => text(snapshot, "/status/volumeGroupSnapshotName") == Some(set.name.as_str()),
            false => snapshot.metadata.uid.as_ref() == Some(&set.uid),
        };
        self.namespace.snapshots.iter().filter(is_member).collect()
    }

    fn content_of(&self, member: &DynamicObject) -> Option<&DynamicObject> {
        let contents = &self.shared.contents;
        contents.get(text(member, "/status/boundVolumeSnapshotContentName")?)
    }

    fn is_there(&self, member: &DynamicObject) -> bool {
        let content = self.content_of(member);
        content.is_some_and(|it| it.metadata.deletion_timestamp.is_none())
    }

    /// Whether each volume of a group has a member that is ready.
    fn has_all_members(&self, content: Option<&DynamicObject>, members: &[&DynamicObject]) -> bool {
        let volumes = content.and_then(|it| it.data.pointer("/spec/source/volumeHandles"));
        let volumes = volumes.and_then(Value::as_array).map_or(0, Vec::len);
        let is_ready = |member: &&&DynamicObject| {
            let ready = member.data.pointer("/status/readyToUse");
            let is_leaving = member.metadata.deletion_timestamp.is_some();
            ready.and_then(Value::as_bool) == Some(true) && !is_leaving && self.is_there(member)
        };
        volumes > 0 && members.iter().filter(is_ready).count() == volumes
    }

    /// Why a set must stay because of one of its members.
    fn used(
        &self,
        object: &DynamicObject,
        members: &[&DynamicObject],
        namespace: &str,
    ) -> Option<String> {
        held(object).or_else(|| {
            let mut each = members.iter();
            each.find_map(|member| self.member_used(member, namespace))
        })
    }

    fn member_used(&self, member: &DynamicObject, namespace: &str) -> Option<String> {
        if let Some(why) = held(member) {
            return Some(why);
        }
        let name = member.name_any();
        let claim = self.shared.wanted.get(&(namespace.into(), name.clone()));
        if let Some(claim) = claim {
            return Some(format!(
                "claim {claim}, which is not bound, is restored from {name}"
            ));
        }
        let content = self.content_of(member)?;
        if let Some(why) = held(content).or_else(|| retained(content)) {
            return Some(why);
        }
        let handles = handles(content, "snapshotHandle");
        let mut others = self.shared.contents.values();
        let other = others.find(|other| {
            let mut its = self::handles(other, "snapshotHandle").into_iter();
            other.name_any() != content.name_any() && its.any(|it| handles.contains(&it))
        });
        if let Some(other) = other {
            return Some(format!(
                "VolumeSnapshotContent {} has the same snapshot",
                other.name_any()
            ));
        }
        handles
            .into_iter()
            .find_map(|handle| self.being_read(handle))
    }

    fn group_used(&self, content: &DynamicObject) -> Option<String> {
        if let Some(why) = held(content).or_else(|| retained(content)) {
            return Some(why);
        }
        let handles = handles(content, "volumeGroupSnapshotHandle");
        let mut others = self.shared.group_contents.values();
        let other = others.find(|other| {
            let mut its = self::handles(other, "volumeGroupSnapshotHandle").into_iter();
            other.name_any() != content.name_any() && its.any(|it| handles.contains(&it))
        })?;
        Some(format!(
            "VolumeGroupSnapshotContent {} has the same group",
            other.name_any()
        ))
    }

    /// Why a snapshot must stay, by what the agent of its pool reports.
    fn being_read(&self, handle: &str) -> Option<String> {
        let Ok(SnapshotId { pool, uuid, .. }) = handle.parse() else {
            return Some(format!("{handle} is not an ID of this driver"));
        };
        match self.readers.get(&pool) {
            Some(Some(read)) => {
                let is_read = read.contains(&uuid.to_string());
                is_read.then(|| format!("snapshot {handle} is being read"))
            }
            Some(None) | None => Some(format!(
                "no agent reports whether snapshot {handle} is being read"
            )),
        }
    }
}

/// Why an object must stay, by what is written at it.
fn held(object: &DynamicObject) -> Option<String> {
    let name = object.name_any();
    let marks = [object.labels().get(KEEP), object.annotations().get(KEEP)];
    if marks.into_iter().flatten().any(|value| value != "false") {
        return Some(format!("{name} has {KEEP}"));
    }
    let mut finalizers = object.finalizers().iter();
    let is_foreign = |one: &&String| !USUAL_FINALIZERS.iter().any(|usual| one.starts_with(usual));
    let foreign = finalizers.find(is_foreign)?;
    Some(format!("{name} has the finalizer {foreign}"))
}

/// Why deleting the object of a content would not free anything.
fn retained(content: &DynamicObject) -> Option<String> {
    let policy = text(content, "/spec/deletionPolicy");
    let name = content.name_any();
    (policy != Some("Delete")).then(|| format!("{name} has the deletionPolicy Retain"))
}

#[cfg(test)]
mod tests;
