//! Validates the answers of agents: each is compared with what the router knows or can compute.
//!
//! A certificate proves to which node an agent belongs, and nothing else. IDs are derived from the
//! pool and the request's name, so the router can compute them; a pool belongs to one node at a
//! time; and a member of a group is derived from the group and its source. An answer that
//! contradicts this is refused: the caller gets UNAVAILABLE, the Node an event, and a metric counts
//! it. So a compromised or faulty agent can harm only volumes of its own node.

mod copies;

use std::collections::BTreeSet;
use std::time::Instant;

use k8s_openapi::jiff::Timestamp;

use super::Router;
use super::agents::Agent;
use super::cluster::ObjectRef;
use super::route::Route;
use crate::agent::cut_response::Begun;
use crate::agent::describe_response::LongFreeze;
use crate::agent::{DescribeResponse, GetGroupResponse, GroupMember, ImageUsage, Pool};
use crate::csi;
use crate::error::{Error, Result};
use crate::model::id::NameKind;
use crate::model::{GroupId, PoolId, SnapshotId, VolumeId};
use crate::operation::{CreateVolume, member_of};

/// Maximum number of pods of a pool that are named.
const MAX_PODS: usize = 16;
/// Maximum number of devices of a pool that are named because another process changed their
/// settings.
const MAX_CHANGED_DEVICES: usize = 16;
/// Maximum number of pools of one agent. Each becomes a Pool object.
pub(super) const MAX_POOLS: usize = 64;
/// Maximum number of groups that an agent may report as unresolved.
const MAX_GROUPS: usize = 10_000;
/// Maximum number of volumes that an agent may report as not grown.
const MAX_NOT_GROWN: usize = 64;
/// Maximum number of fenced volumes that an agent may report.
const MAX_FENCES: usize = 256;
/// Maximum number of freezes that an agent may report.
const MAX_LONG_FREEZES: usize = 64;
/// Maximum number of volumes of a pool that an agent may report as those that grew most.
const MAX_GROWN: usize = 10;
/// Maximum number of members of a group, and of missing prerequisites of a host.
const MAX_PARTS: usize = 10_000;
/// Maximum length of a name, or of a version.
const NAME_BYTES: usize = 253;
/// Maximum length of a label's value.
const LABEL_BYTES: usize = 63;
/// Maximum length of a message, and of a path.
const TEXT_BYTES: usize = 4096;

/// The reason why an answer is refused.
type Validation<T = ()> = std::result::Result<T, String>;

impl Router {
    /// The error of an agent whose answer is refused; it is counted, and recorded as an event.
    pub(super) fn refuse(&self, agent: &Agent, why: &str) -> Error {
        agent.refused();
        let node = agent.node();
        tracing::warn!(node, reason = why, "rejected an answer of an agent");
        let message = format!("an answer of this node's agent was rejected: {why}");
        let about = ObjectRef::Node(node.to_string());
        self.cluster
            .record_event(&about, true, "AnswerRefused", message);
        agent.unreachable(&format!("its answer was rejected: {why}"))
    }

    /// Returns a valid answer, or refuses the agent's answer.
    pub(super) fn checked<T>(&self, agent: &Agent, verdict: Validation<T>) -> Result<T> {
        verdict.map_err(|why| self.refuse(agent, &why))
    }

    /// Refuses the answer of an agent that names a pool which is not its own.
    async fn must_have(&self, agent: &Agent, pool: PoolId) -> Result<()> {
        if agent.shown(pool).is_none() {
            // The pool may have just been created.
            agent.ask_since(Instant::now()).await;
        }
        let has = match self.route(pool).await? {
            Route::Agent(owner) => owner.node() == agent.node(),
            Route::Lost(_) => false,
        };
        match has {
            true => Ok(()),
            false => Err(self.refuse(
                agent,
                &format!("it names pool {pool}, which belongs to another node"),
            )),
        }
    }

    /// Checks a volume that an agent reports to have created.
    pub(super) async fn check_created_volume(
        &self,
        agent: &Agent,
        asked: &CreateVolume,
        source: Option<&csi::VolumeContentSource>,
        answer: csi::CreateVolumeResponse,
    ) -> Result<csi::CreateVolumeResponse> {
        let parsed = answer.volume.as_ref().map(|volume| &*volume.volume_id);
        let id = self.checked(agent, named(parsed, NameKind::Volume, &asked.name))?;
        self.must_have(agent, id.pool).await?;
        let verdict = volume(
            &answer,
            asked,
            source,
            (&self.topology_key(), &agent.home()),
        );
        self.checked(agent, verdict)?;
        Ok(answer)
    }

    /// Checks a snapshot that an agent reports to have created of one of its volumes.
    pub(super) fn check_created_snapshot(
        &self,
        agent: &Agent,
        asked: (&str, &str),
        answer: csi::CreateSnapshotResponse,
    ) -> Result<csi::CreateSnapshotResponse> {
        self.checked(agent, snapshot(asked, &answer))?;
        Ok(answer)
    }

    /// Checks the object that an agent reports for a name.
    pub(super) async fn found(
        &self,
        agent: &Agent,
        (kind, name): (NameKind, &str),
        id: &str,
    ) -> Result<Option<VolumeId>> {
        if id.is_empty() {
            return Ok(None);
        }
        let id = self.checked(agent, named(Some(id), kind, name))?;
        if self.cluster.is_lost(id.pool) {
            return Ok(None);
        }
        self.must_have(agent, id.pool).await?;
        Ok(Some(id))
    }

    /// Checks an agent's report about a group: its members must be on pools of the agent and have
    /// sources on the agent.
    pub(super) fn group_of(
        &self,
        agent: &Agent,
        group: GroupId,
        answer: GetGroupResponse,
    ) -> Result<GetGroupResponse> {
        let has = |pool: PoolId| {
            let owner = self.last_node(pool);
            agent.shown(pool).is_some() && owner.is_none_or(|owner| owner == agent.node())
        };
        self.checked(agent, share(group, &answer, has))?;
        Ok(answer)
    }

    /// Checks that the members that an agent reports as in use are among those that it was asked to
    /// cut.
    pub(super) fn begun(&self, agent: &Agent, sources: &[String], begun: Begun) -> Result<Begun> {
        let mut left: BTreeSet<&String> = sources.iter().collect();
        let other = begun
            .targets
            .iter()
            .find(|target| !left.remove(&target.volume_id));
        let verdict = other.map_or(Ok(()), |other| {
            Err(format!(
                "{:?} is not a volume that it was asked to cut",
                short(&other.volume_id)
            ))
        });
        self.checked(agent, verdict)?;
        Ok(begun)
    }
}

/// The UID of the object that fences a volume, a move or a revert; `None` if the text is empty.
pub(super) fn fence_uid(text: &str, kind: &str) -> Validation<Option<uuid::Uuid>> {
    let text = Some(text).filter(|text| !text.is_empty());
    let uid = text.map(str::parse).transpose();
    uid.map_err(|_| format!("it reports a fence of no {kind}"))
}

/// Checks that an ID is the one that a name has on the pool in the ID.
pub(super) fn named(id: Option<&str>, kind: NameKind, name: &str) -> Validation<VolumeId> {
    let id = id.unwrap_or_default();
    let parsed = id.parse::<VolumeId>();
    let parsed = parsed.map_err(|_| format!("{:?} is not a valid ID", short(id)))?;
    match parsed == VolumeId::of_name(parsed.pool, kind, name) {
        true => Ok(parsed),
        false => Err(format!("{id} is not the ID of {name:?}")),
    }
}

/// Checks that the answer about one object names that object.
pub(super) fn same(asked: &str, answered: Option<&str>) -> Validation {
    match answered {
        Some(answered) if answered == asked => Ok(()),
        other => Err(format!(
            "the request was about {asked}, but the answer is about {:?}",
            short(other.unwrap_or_default())
        )),
    }
}

/// Checks that the answer names an object on the same pool as the request.
pub(super) fn same_pool(asked: &str, answered: Option<&str>) -> Validation {
    let pool = |id: &str| id.parse::<VolumeId>().ok().map(|id| id.pool);
    match answered.and_then(pool) {
        Some(found) if pool(asked) == Some(found) => Ok(()),
        _ => same(asked, answered),
    }
}

fn volume(
    answer: &csi::CreateVolumeResponse,
    asked: &CreateVolume,
    source: Option<&csi::VolumeContentSource>,
    (key, home): (&str, &str),
) -> Validation {
    let Some(created) = &answer.volume else {
        return Err("it contains no volume".into());
    };
    let at_home = |topology: &csi::Topology| {
        topology.segments.len() == 1 && topology.segments.get(key).is_some_and(|at| at == home)
    };
    if created.accessible_topology.len() != 1 || !created.accessible_topology.iter().all(at_home) {
        return Err(format!(
            "the topology of volume {} is not its home {home}",
            created.volume_id
        ));
    }
    if created.content_source.as_ref() != source {
        return Err(format!(
            "volume {} has a different content source",
            created.volume_id
        ));
    }
    let size = u64::try_from(created.capacity_bytes).unwrap_or(0);
    let range = &asked.capacity;
    if size < range.required || (range.limit > 0 && size > range.limit) {
        return Err(format!(
            "volume {} has a wrong size of {size} bytes",
            created.volume_id
        ));
    }
    let texts = created.volume_context.iter();
    let length: usize = texts.map(|(key, value)| key.len() + value.len()).sum();
    match length > TEXT_BYTES {
        true => Err(format!(
            "the context of volume {} is too long",
            created.volume_id
        )),
        false => Ok(()),
    }
}

fn snapshot((name, source): (&str, &str), answer: &csi::CreateSnapshotResponse) -> Validation {
    let Some(created) = &answer.snapshot else {
        return Err("it contains no snapshot".into());
    };
    let id = named(Some(&created.snapshot_id), NameKind::Snapshot, name)?;
    let of = source.parse::<VolumeId>();
    let is_here = of.is_ok_and(|of| of.pool == id.pool);
    if !is_here || created.source_volume_id != source {
        return Err(format!("{id} is not a snapshot of volume {source}"));
    }
    match created.group_snapshot_id.is_empty() && created.size_bytes >= 0 {
        true => Ok(()),
        false => Err(format!("{id} is a member of a group")),
    }
}

/// Checks one page of a list: it must contain IDs in ascending order, after `last`, and only those of
/// the pool, if the list is that of one pool.
pub(super) fn page(
    pool: Option<PoolId>,
    last: Option<VolumeId>,
    most: usize,
    (ids, goes_on): (&[String], bool),
) -> Validation<Option<VolumeId>> {
    if ids.len() > most || (goes_on && ids.is_empty()) {
        return Err(format!(
            "a page has {} entries although at most {most} were requested",
            ids.len()
        ));
    }
    let mut last = last;
    for text in ids {
        let id = text.parse::<VolumeId>().ok();
        let id = id.filter(|id| pool.is_none_or(|pool| id.pool == pool));
        let id = id.filter(|id| last.is_none_or(|last| last < *id));
        let out_of_place = || match pool {
            Some(pool) => format!(
                "{:?} is out of order in the list of pool {pool}",
                short(text)
            ),
            None => format!("{:?} is out of order in the list", short(text)),
        };
        last = Some(id.ok_or_else(out_of_place)?);
    }
    Ok(last)
}

fn share(group: GroupId, answer: &GetGroupResponse, has: impl Fn(PoolId) -> bool) -> Validation {
    let (members, sources) = (&answer.all_member_ids, &answer.all_source_volume_ids);
    if members.len() != sources.len() || members.len().max(answer.members.len()) > MAX_PARTS {
        return Err("the members of a group do not match its sources".into());
    }
    let is_member = |member: &str, source: &str| -> Validation<SnapshotId> {
        let source = source.parse::<VolumeId>();
        let id = source.map(|source| member_of(group, source));
        let id = id.ok().filter(|id| id.to_string() == member);
        id.ok_or_else(|| format!("{:?} is not a member of group {group}", short(member)))
    };
    let mut shares = members.is_empty();
    for (member, source) in members.iter().zip(sources) {
        shares |= has(is_member(member, source)?.pool);
    }
    if !shares {
        return Err(format!(
            "it reports members of group {group} but has none of them"
        ));
    }
    for member in &answer.members {
        let id = is_member(&member.snapshot_id, &member.source_volume_id)?;
        let known = |text: &String| members.is_empty() || members.contains(text);
        if !has(id.pool) || !known(&member.snapshot_id) || !is_bounded(member) {
            return Err(format!("{id} is not a member on this node"));
        }
    }
    Ok(())
}

fn is_bounded(member: &GroupMember) -> bool {
    let texts = [&member.level, &member.attempt, &member.home];
    texts.iter().all(|text| text.len() <= NAME_BYTES) && member.reason.len() <= TEXT_BYTES
}

/// Checks an agent's description, and truncates its texts to a bounded length.
pub(super) fn description(mut description: DescribeResponse) -> Validation<DescribeResponse> {
    let groups = description
        .unsettled_groups
        .len()
        .max(description.busy_groups.len());
    let (pools, read) = (description.pools.len(), description.read_snapshots.len());
    if pools > MAX_POOLS || groups.max(read) > MAX_GROUPS {
        return Err(format!(
            "it reports {pools} pools, {groups} groups in doubt and {read} snapshots that are being read, which is too many"
        ));
    }
    if !is_label(&description.home) {
        return Err(format!(
            "{:?} is not a valid home",
            short(&description.home)
        ));
    }
    let mut ids = BTreeSet::new();
    for pool in &mut description.pools {
        let is_id = pool.id.is_empty() || pool.id.parse::<PoolId>().is_ok();
        let is_new = pool.id.is_empty() || ids.insert(pool.id.clone());
        if !is_id || !is_new || pool.name.len() > NAME_BYTES {
            let (name, id) = (short(&pool.name), short(&pool.id));
            return Err(format!("the pool {name:?} with the ID {id:?} is not valid"));
        }
        cut(&mut pool.place, TEXT_BYTES);
        cut(&mut pool.refusal, TEXT_BYTES);
        cut(&mut pool.file_system, NAME_BYTES);
        cut(&mut pool.mount, TEXT_BYTES);
        cut(&mut pool.without_mount, TEXT_BYTES);
        cut_lists(pool);
        keep_images(pool);
    }
    description.not_grown.retain(|small| {
        let pool = small.volume_id.parse::<VolumeId>().map(|id| id.pool);
        pool.is_ok_and(|pool| ids.contains(&pool.to_string()))
    });
    description.not_grown.truncate(MAX_NOT_GROWN);
    description
        .not_grown
        .iter_mut()
        .for_each(|small| cut(&mut small.reason, TEXT_BYTES));
    let is_fence = |volume_id: &str, uid: &str| {
        let pool = volume_id.parse::<VolumeId>().map(|id| id.pool);
        pool.is_ok_and(|pool| ids.contains(&pool.to_string())) && uid.parse::<uuid::Uuid>().is_ok()
    };
    let fences = &mut description.fences;
    fences.retain(|fence| is_fence(&fence.volume_id, &fence.move_uid));
    fences.truncate(MAX_FENCES);
    let fences = &mut description.revert_fences;
    fences.retain(|fence| is_fence(&fence.volume_id, &fence.revert_uid));
    fences.truncate(MAX_FENCES);
    keep_freezes(&mut description.long_freezes, &ids);
    copies::keep(&mut description.copies, &ids);
    description.missing.truncate(MAX_POOLS);
    description
        .missing
        .iter_mut()
        .for_each(|text| cut(text, TEXT_BYTES));
    cut(&mut description.home_problem, TEXT_BYTES);
    cut(&mut description.version, NAME_BYTES);
    Ok(description)
}

/// Cuts the lists of a pool, and their texts.
fn cut_lists(pool: &mut Pool) {
    pool.pods.retain(|uid| uid.parse::<uuid::Uuid>().is_ok());
    pool.pods.truncate(MAX_PODS);
    pool.changed_devices.truncate(MAX_CHANGED_DEVICES);
    let changed = pool.changed_devices.iter_mut();
    changed.for_each(|text| cut(text, TEXT_BYTES));
}

/// Keeps numbers that can be, and volumes of this pool.
fn keep_images(pool: &mut Pool) {
    let is_time = |seconds: i64| Timestamp::from_second(seconds).is_ok();
    let is_valid = |images: &ImageUsage| {
        let numbers = [
            images.own_bytes,
            images.shared_bytes,
            images.snapshot_bytes,
            images.undivided_bytes,
            images.unmeasured_volumes,
        ];
        numbers.iter().all(|number| *number >= 0) && is_time(images.measured_at)
    };
    pool.images.take_if(|images| !is_valid(images));
    let growth = pool
        .images
        .as_mut()
        .and_then(|images| images.growth.as_mut());
    if let Some(growth) = growth {
        growth.volumes.retain(|one| {
            let id = one.volume_id.parse::<VolumeId>();
            let is_its = id.is_ok_and(|id| id.pool.to_string() == pool.id);
            is_its && one.grown_bytes >= 0 && is_time(one.since)
        });
        growth.volumes.truncate(MAX_GROWN);
    }
}

/// Keeps freezes of volumes of these pools, with times that exist.
fn keep_freezes(freezes: &mut Vec<LongFreeze>, pools: &BTreeSet<String>) {
    let is_time = |seconds: i64| Timestamp::from_second(seconds).is_ok();
    freezes.retain(|one| {
        let pool = one.volume_id.parse::<VolumeId>().map(|id| id.pool);
        let is_its = pool.is_ok_and(|pool| pools.contains(&pool.to_string()));
        is_its && is_time(one.since) && is_time(one.until)
    });
    freezes.truncate(MAX_LONG_FREEZES);
}

/// Whether a text is empty or a valid label value.
fn is_label(text: &str) -> bool {
    let inner = |byte: u8| byte.is_ascii_alphanumeric() || b"-._".contains(&byte);
    let ends = |byte: Option<&u8>| byte.is_none_or(u8::is_ascii_alphanumeric);
    let bytes = text.as_bytes();
    text.len() <= LABEL_BYTES
        && bytes.iter().copied().all(inner)
        && ends(bytes.first())
        && ends(bytes.last())
}

fn cut(text: &mut String, bytes: usize) {
    text.truncate(text.floor_char_boundary(bytes));
}

/// Truncates an agent's text for a message.
fn short(text: &str) -> &str {
    &text[..text.floor_char_boundary(100)]
}

#[cfg(test)]
mod fuzz;
