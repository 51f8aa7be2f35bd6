//! What all agents have of a group, and the end of doubt about it.
//!
//! A group is its members' records, each on its node. Its first member decides: once that is
//! committed the others of its try are, and while it isn't, none is. So a doubt ends as soon as
//! the first member's agent answers, and is left alone until then: a member in doubt is in no
//! list, and a repeat of the call waits.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use tokio::time::timeout;

use super::agents::Agent;
use super::route::Route;
use super::{Router, Weak};
use crate::agent::group_member::State;
use crate::agent::{
    DeleteGroupRequest, DescribeResponse, GetGroupRequest, GetGroupResponse, GroupMember,
    SettleGroupRequest,
};
use crate::error::{Error, Result, chain};
use crate::model::{GroupId, PoolId, VolumeId};
use crate::operation::{Group, GroupMembership, Key, Snapshot, of_another_moment};

/// A look at records takes milliseconds; a delete of what is large longer.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(60);
/// How often members that a dead router has left in doubt are looked for.
const IN_DOUBT_POLL_INTERVAL: Duration = Duration::from_secs(10);
/// Looks and verdicts that a call takes part in before its caller is to come again.
const ROUNDS: usize = 3;

/// Groups of one agent that are settled at one look: it may name any number of them.
const MAX_RESOLVED_AT_ONCE: usize = 64;

/// Whose word about a group counts, beside that of its members' agents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Asked {
    /// Any agent's: its name may have been used for other volumes.
    All,
    /// Only that of agents that have the volumes or members which the caller names.
    Theirs,
}

/// Ids of an agent.
type Whose = BTreeMap<String, (Arc<Agent>, BTreeSet<String>)>;

/// Nodes by the group that they have an uncommitted member of.
pub(super) type InPart = BTreeMap<String, BTreeSet<String>>;

/// What all agents have of a group.
#[derive(Default)]
pub(super) struct GroupState {
    /// By id.
    members: BTreeMap<String, (Arc<Agent>, GroupMember)>,
    membership: Option<GroupMembership>,
    /// Agents at which something runs that is about it.
    busy: Vec<String>,
    /// Why there may be more of it somewhere; for who finds nothing.
    unseen: Option<Error>,
}

impl GroupState {
    /// What its members say of it.
    pub(super) fn membership(&self) -> Option<&GroupMembership> {
        self.membership.as_ref()
    }

    /// Ids of all that was found of it.
    pub(super) fn found(&self) -> impl Iterator<Item = &String> {
        self.members.keys()
    }

    /// Why there may be more of it somewhere.
    pub(super) fn fail_if_unknown(self) -> Result<()> {
        self.unseen.map_or(Ok(()), Err)
    }

    fn with(&self, state: State) -> impl Iterator<Item = &(Arc<Agent>, GroupMember)> {
        let members = self.members.values();
        members.filter(move |(_, member)| member.state() == state)
    }

    /// Whether it, or a part of it, was committed.
    pub(super) fn is_committed(&self) -> bool {
        self.with(State::Ready).next().is_some()
    }

    fn is_in_doubt(&self) -> bool {
        let unready = |(_, member): &&(Arc<Agent>, GroupMember)| member.state() != State::Ready;
        self.members.values().any(|member| unready(&member))
    }

    /// The attempt that its first member is committed by.
    fn committed(&self) -> Option<&str> {
        let lead = self.membership.as_ref()?.members.first()?;
        let (_, lead) = self.members.get(lead)?;
        (lead.state() == State::Ready).then_some(lead.attempt.as_str())
    }

    /// As answers tell it, in the order of its sources; an error if a member is missing, unless
    /// some may be.
    pub(super) fn group(&self, id: GroupId, some_may_be_gone: bool) -> Result<Group> {
        let missing = |member: &str| {
            Error::refused(
                format!("group snapshot {id}"),
                format!("its member {member} no longer exists; delete the group"),
            )
        };
        let members = self.membership.iter().flat_map(|of| &of.members);
        let mut snapshots = Vec::new();
        let mut attempts = BTreeSet::new();
        for member in members {
            let (agent, found) = match self.members.get(member) {
                None if some_may_be_gone => continue,
                found => found.ok_or_else(|| missing(member))?,
            };
            if found.state() != State::Ready {
                return Err(missing(member));
            }
            attempts.insert(&found.attempt);
            if attempts.len() > 1 {
                let subject = format!("group snapshot {id}");
                let why = of_another_moment(member);
                return Err(Error::refused(subject, format!("{why}; delete the group")));
            }
            let told = snapshot(id, found);
            snapshots.push(told.ok_or_else(|| agent.unreachable("it does not describe a member"))?);
        }
        let cut_at = snapshots.first().map_or(0, |one| one.cut_at);
        Ok(Group {
            id,
            snapshots,
            cut_at,
        })
    }
}

fn snapshot(group: GroupId, member: &GroupMember) -> Option<Snapshot> {
    Some(Snapshot {
        id: member.snapshot_id.parse().ok()?,
        source_volume_id: member.source_volume_id.parse().ok()?,
        size: u64::try_from(member.size_bytes).ok()?,
        cut_at: member.cut_at,
        level: crate::model::Level::of_word(&member.level)?,
        reason: member.reason.clone(),
        group: Some(group),
        independent: false,
        home: member.home.parse().ok()?,
    })
}

impl Router {
    /// Whose these ids are, of volumes or snapshots. Of pools that are lost, and of what isn't an
    /// id, nobody's. An error if one of the agents can't be reached.
    pub(super) async fn whose(&self, ids: &[String]) -> Result<Whose> {
        let mut routes: BTreeMap<PoolId, Route> = BTreeMap::new();
        let mut whose = Whose::new();
        for id in ids {
            let Ok(parsed) = id.parse::<VolumeId>() else {
                continue;
            };
            let route = match routes.get(&parsed.pool) {
                Some(route) => route.clone(),
                None => self.route(parsed.pool).await?,
            };
            routes.insert(parsed.pool, route.clone());
            if let Route::Agent(agent) = route {
                let node = agent.node().to_string();
                let (_, ids) = whose.entry(node).or_insert((agent, BTreeSet::new()));
                ids.insert(id.clone());
            }
        }
        Ok(whose)
    }

    /// A group without doubt: looked at, settled, looked at again. `ids` are of volumes or members
    /// whose agents must answer, beside those of all members that are found. ABORTED while
    /// something runs that is about it.
    pub(super) async fn settled(&self, group: GroupId, ids: &[String]) -> Result<GroupState> {
        self.resolve_and_look(group, ids, Asked::All).await
    }

    /// The same, with only some agents asked.
    pub(super) async fn resolve_and_look(
        &self,
        group: GroupId,
        ids: &[String],
        asked: Asked,
    ) -> Result<GroupState> {
        for _ in 0..ROUNDS {
            let look = self.look(group, ids, asked).await?;
            if !look.busy.is_empty() {
                let nodes = look.busy.join(", ");
                let what = format!("group snapshot {group} (node {nodes})");
                return Err(Error::Pending { what });
            }
            if !look.is_in_doubt() {
                return Ok(look);
            }
            self.settle(group, &look).await?;
        }
        let what = format!("group snapshot {group}");
        Err(Error::Pending { what })
    }

    /// What everybody has of it.
    async fn look(&self, group: GroupId, ids: &[String], asked: Asked) -> Result<GroupState> {
        self.agents.all_asked()?;
        let must = self.whose(ids).await?;
        let mut look = GroupState::default();
        let are_ids = || ids.iter().all(|id| id.parse::<VolumeId>().is_ok());
        let all = match asked {
            Asked::Theirs if !ids.is_empty() && are_ids() => {
                must.values().map(|(agent, _)| agent.clone()).collect()
            }
            Asked::Theirs | Asked::All => self.agents.all(),
        };
        let told = join_all(all.iter().map(|agent| async move {
            let told = match agent.check() {
                Ok(()) => self.group_at(agent, group, Vec::new()).await,
                Err(error) => Err(error),
            };
            (agent, told)
        }));
        for (agent, told) in told.await {
            let told = told.and_then(|told| self.group_of(agent, group, told));
            match told {
                Ok(told) => look.add(group, agent, told),
                Err(error) if must.contains_key(agent.node()) => return Err(error),
                Err(error) => look.unseen = Some(error),
            }
        }
        // Its members, each looked at by its id: one that isn't found then isn't there.
        let members = look.membership.iter().flat_map(|of| of.members.clone());
        let members: Vec<String> = members.collect();
        let whose = self.whose(&members).await?;
        let told = join_all(whose.into_values().map(|(agent, ids)| async move {
            let told = self.group_at(&agent, group, ids.into_iter().collect());
            (told.await, agent)
        }));
        for (told, agent) in told.await {
            look.add(group, &agent, self.group_of(&agent, group, told?)?);
        }
        Ok(look)
    }

    async fn group_at(
        &self,
        agent: &Agent,
        group: GroupId,
        snapshot_ids: Vec<String>,
    ) -> Result<GetGroupResponse> {
        let mut client = agent.client().await?;
        let question = client.get_group(GetGroupRequest {
            group_id: group.to_string(),
            snapshot_ids,
        });
        answered(agent, question).await
    }

    /// Tells those who have members in doubt what has become of them.
    async fn settle(&self, group: GroupId, look: &GroupState) -> Result<()> {
        let commit = look.committed().unwrap_or_default().to_string();
        let in_doubt = look.with(State::Cut).map(|(_, member)| &member.attempt);
        let undone: BTreeSet<String> = in_doubt
            .filter(|attempt| **attempt != commit)
            .cloned()
            .collect();
        let request = SettleGroupRequest {
            group_id: group.to_string(),
            attempt: commit,
            undone_attempts: undone.into_iter().collect(),
        };
        let unready = look.with(State::Cut).chain(look.with(State::Preparing));
        let agents: BTreeMap<&str, &Arc<Agent>> =
            unready.map(|(agent, _)| (agent.node(), agent)).collect();
        tracing::info!(%group, committed = %request.attempt, undone = ?request.undone_attempts, "resolving a group snapshot that is in doubt");
        let told = join_all(agents.values().map(|agent| async {
            let mut client = agent.client().await?;
            answered(agent, client.settle_group(request.clone())).await
        }));
        told.await.into_iter().try_for_each(|told| told.map(drop))
    }

    /// Deletes these members, and whatever else their agents have of the group.
    pub(super) async fn delete_group_members(&self, group: GroupId, whose: Whose) -> Result<()> {
        let ended = join_all(whose.into_values().map(|(agent, ids)| async move {
            let mut client = agent.client().await?;
            let request = DeleteGroupRequest {
                group_id: group.to_string(),
                snapshot_ids: ids.into_iter().collect(),
            };
            answered(&agent, client.delete_group(request)).await
        }));
        ended
            .await
            .into_iter()
            .try_for_each(|ended| ended.map(drop))
    }

    /// Groups of which an agent, as it said last, has members that aren't committed, each with the
    /// nodes whose agents say so. All of one are committed one after the other: until then it's in
    /// no list.
    pub(super) fn groups_in_part(&self) -> InPart {
        let mut groups = InPart::new();
        for told in self.told() {
            for group in told.busy_groups.iter().chain(&told.unsettled_groups) {
                let nodes = groups.entry(group.clone()).or_default();
                nodes.insert(told.node_name.clone());
            }
        }
        groups
    }

    /// Whether one of these nodes has a part in the group of a member. Who has none may say what
    /// it likes about it.
    pub(super) async fn has_part(
        &self,
        (group, member): (&str, &str),
        nodes: &BTreeSet<String>,
    ) -> bool {
        let members = match group.parse() {
            Ok(group) => self.look(group, &[member.to_string()], Asked::Theirs).await,
            Err(_) => return false,
        };
        let members = members.ok().and_then(|look| look.membership);
        let Some(membership) = members else {
            return true;
        };
        match self.whose(&membership.members).await {
            Ok(whose) => whose.keys().any(|node| nodes.contains(node)),
            Err(_) => true,
        }
    }

    /// What all agents said last.
    fn told(&self) -> Vec<Arc<DescribeResponse>> {
        let all = self.agents.all().into_iter();
        all.filter_map(|agent| agent.seen().told).collect()
    }

    /// Settles what agents have said that nobody has settled.
    async fn settle_unsettled(&self) {
        let told = self.told();
        let groups = told
            .iter()
            .flat_map(|told| told.unsettled_groups.iter().take(MAX_RESOLVED_AT_ONCE));
        let groups: BTreeSet<GroupId> = groups.filter_map(|group| group.parse().ok()).collect();
        for group in groups {
            let Ok(_lock) = self.cuts.locks.acquire(Key::Group(group.0)) else {
                continue;
            };
            match self.settled(group, &[]).await {
                // Somebody is at it.
                Ok(_) | Err(Error::Pending { .. }) => {}
                Err(error) => {
                    tracing::warn!(%group, error = %chain(&error), "failed to resolve a group snapshot that is in doubt");
                }
            }
        }
    }
}

/// Settles what agents say that nobody has settled, while this router leads, until all clones of
/// it are gone.
pub(super) async fn resolve_periodically(router: Weak) {
    loop {
        tokio::time::sleep(IN_DOUBT_POLL_INTERVAL).await;
        match router.upgrade() {
            Some(router) if router.cluster.is_leader() => router.settle_unsettled().await,
            Some(_) => {}
            None => return,
        }
    }
}

impl GroupState {
    fn add(&mut self, group: GroupId, agent: &Arc<Agent>, told: GetGroupResponse) {
        let node = agent.node().to_string();
        if told.busy && !self.busy.contains(&node) {
            self.busy.push(node);
        }
        if !told.unseen.is_empty() {
            self.unseen = Some(agent.unreachable(&told.unseen));
        }
        let is_ready = told.members.iter().any(|one| one.state() == State::Ready);
        if !told.all_member_ids.is_empty() && (is_ready || self.membership.is_none()) {
            self.membership = Some(GroupMembership {
                id: group.0,
                members: told.all_member_ids,
                sources: told.all_source_volume_ids,
                asked: (!told.asked.is_empty()).then_some(told.asked),
                independent: told.independent,
            });
        }
        for member in told.members {
            let id = member.snapshot_id.clone();
            self.members.insert(id, (agent.clone(), member));
        }
    }
}

/// An agent's answer, waited for as long as one that is there and well needs at most.
pub(super) async fn answered<T>(
    agent: &Agent,
    question: impl Future<Output = std::result::Result<tonic::Response<T>, tonic::Status>>,
) -> Result<T> {
    match timeout(REQUEST_TIMEOUT, question).await {
        Ok(answer) => answer
            .map(tonic::Response::into_inner)
            .map_err(|status| agent.error(&status)),
        Err(_) => Err(agent.unreachable("it does not answer in time")),
    }
}
