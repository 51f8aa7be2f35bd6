//! Reads a group's state from all agents, and resolves members in doubt.
//!
//! A group consists of its members' records, each on its node. The first member decides: once it is
//! committed, the other members of its attempt are committed too, and while it is not, none of them
//! is. So a member in doubt is resolved as soon as the first member's agent answers, and stays in
//! doubt until then: it is in no list, and a repeated call waits.

pub(super) mod reported;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use tokio::time::timeout;

use super::Router;
use super::agents::Agent;
use super::route::Route;
use crate::agent::group_member::State;
use crate::agent::{
    DeleteGroupRequest, DescribeResponse, GetGroupRequest, GetGroupResponse, GroupMember,
    SettleGroupRequest,
};
use crate::error::{Error, Result};
use crate::model::{GroupId, PoolId, VolumeId};
use crate::operation::{Group, GroupMembership, Snapshot, of_another_moment};

/// Reading records takes milliseconds; deleting a large snapshot takes longer.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(60);
/// How many rounds of reading and resolving a call makes before its caller must retry.
const MAX_ROUNDS: usize = 3;

/// The agents whose answers about a group count, besides those of its members' agents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Asked {
    /// All agents: the group's name may have been used for other volumes.
    All,
    /// Only the agents that have the volumes or members that the caller names.
    Theirs,
}

/// Agents by node, each with some of its IDs.
type IdsByNode = BTreeMap<String, (Arc<Agent>, BTreeSet<String>)>;

/// For each group, the nodes that have an uncommitted member of it.
pub(super) type InPart = BTreeMap<String, BTreeSet<String>>;

/// What all agents report about a group.
#[derive(Default)]
pub(super) struct GroupState {
    /// Members by ID.
    members: BTreeMap<String, (Arc<Agent>, GroupMember)>,
    membership: Option<GroupMembership>,
    /// What each attempt consists of, with the node that reported it first.
    attempts: BTreeMap<String, (String, GroupMembership)>,
    /// Two nodes that report the same attempt with different members.
    contradiction: Option<(String, String)>,
    /// Nodes on which an operation about the group is running.
    busy: Vec<String>,
    /// Why an agent may have more of the group; returned if nothing is found.
    unseen: Option<Error>,
}

impl GroupState {
    /// The group's definition, from one of its members.
    pub(super) fn membership(&self) -> Option<&GroupMembership> {
        self.membership.as_ref()
    }

    /// IDs of all members that were found.
    pub(super) fn found(&self) -> impl Iterator<Item = &String> {
        self.members.keys()
    }

    /// Fails if an agent may have more of the group.
    pub(super) fn fail_if_unknown(self) -> Result<()> {
        self.unseen.map_or(Ok(()), Err)
    }

    fn with(&self, state: State) -> impl Iterator<Item = &(Arc<Agent>, GroupMember)> {
        let members = self.members.values();
        members.filter(move |(_, member)| member.state() == state)
    }

    /// Whether the group, or a part of it, was committed.
    pub(super) fn is_committed(&self) -> bool {
        self.with(State::Ready).next().is_some()
    }

    fn is_in_doubt(&self) -> bool {
        let unready = |(_, member): &&(Arc<Agent>, GroupMember)| member.state() != State::Ready;
        self.members.values().any(|member| unready(&member))
    }

    /// Whether an attempt is committed: whether its first member is. Each attempt is decided by its own
    /// definition, so that what a node reports of another attempt decides nothing about it.
    fn is_committed_attempt(&self, attempt: &str) -> bool {
        let own = self.attempts.get(attempt).map(|(_, own)| own);
        let lead = own
            .or(self.membership.as_ref())
            .and_then(|of| of.members.first());
        let lead = lead.and_then(|lead| self.members.get(lead));
        lead.is_some_and(|(_, lead)| lead.state() == State::Ready && lead.attempt == attempt)
    }

    /// All members of all definitions.
    fn all_members(&self) -> Vec<String> {
        let own = self.attempts.values().map(|(_, own)| own);
        let members = own.chain(&self.membership).flat_map(|of| &of.members);
        let members: BTreeSet<&String> = members.collect();
        members.into_iter().cloned().collect()
    }

    /// Fails if two nodes define the group differently: one of them lies or has a false record, and
    /// only its administrator can know which.
    pub(super) fn check_agreement(&self, id: GroupId) -> Result<()> {
        match &self.contradiction {
            None => Ok(()),
            Some((one, other)) => Err(Error::refused(
                format!("group snapshot {id}"),
                format!(
                    "nodes {one} and {other} report different members of it; \
                     remove the node that is not to be trusted, or delete the group"
                ),
            )),
        }
    }

    /// The group as returned to callers, in the order of its sources. It fails if a member is
    /// missing, unless `some_may_be_gone` is set.
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
            let answer = snapshot(id, found);
            snapshots
                .push(answer.ok_or_else(|| agent.unreachable("it does not describe a member"))?);
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
        level: crate::model::Level::parse(&member.level)?,
        reason: member.reason.clone(),
        group: Some(group),
        independent: false,
        frozen: None,
        home: member.home.parse().ok()?,
    })
}

impl Router {
    /// The agents that have these IDs of volumes or snapshots. Invalid IDs and IDs on lost pools
    /// are left out. It fails if one of the agents cannot be reached.
    pub(super) async fn ids_by_node(&self, ids: &[String]) -> Result<IdsByNode> {
        let mut routes: BTreeMap<PoolId, Route> = BTreeMap::new();
        let mut ids_by_node = IdsByNode::new();
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
                let (_, ids) = ids_by_node.entry(node).or_insert((agent, BTreeSet::new()));
                ids.insert(id.clone());
            }
        }
        Ok(ids_by_node)
    }

    /// The state of a group without doubt: read, resolved if necessary, and read again. `ids` are
    /// volumes or members whose agents must answer, besides the agents of all members that are
    /// found. ABORTED while an operation about the group is running.
    pub(super) async fn settled(&self, group: GroupId, ids: &[String]) -> Result<GroupState> {
        self.resolve_and_read(group, ids, Asked::All).await
    }

    /// Like `settled`, with a choice of the agents to ask.
    pub(super) async fn resolve_and_read(
        &self,
        group: GroupId,
        ids: &[String],
        asked: Asked,
    ) -> Result<GroupState> {
        let state = self.resolve_if_agreed(group, ids, asked).await?;
        if state.is_in_doubt() {
            state.check_agreement(group)?;
        }
        Ok(state)
    }

    /// Like `resolve_and_read`, but if two nodes define the group differently, its members may
    /// still be in doubt. Then it can only be deleted.
    pub(super) async fn resolve_if_agreed(
        &self,
        group: GroupId,
        ids: &[String],
        asked: Asked,
    ) -> Result<GroupState> {
        for _ in 0..MAX_ROUNDS {
            let state = self.read_group(group, ids, asked).await?;
            if !state.busy.is_empty() {
                let nodes = state.busy.join(", ");
                let what = format!("group snapshot {group} (node {nodes})");
                return Err(Error::pending(what));
            }
            // A false definition would name another first member, which decides about the others.
            if !state.is_in_doubt() || state.check_agreement(group).is_err() {
                return Ok(state);
            }
            self.settle(group, &state).await?;
        }
        let what = format!("group snapshot {group}");
        Err(Error::pending(what))
    }

    /// Reads what the agents have of the group.
    async fn read_group(&self, group: GroupId, ids: &[String], asked: Asked) -> Result<GroupState> {
        self.agents.all_asked()?;
        let must = self.ids_by_node(ids).await?;
        let mut state = GroupState::default();
        let are_ids = || ids.iter().all(|id| id.parse::<VolumeId>().is_ok());
        let all = match asked {
            Asked::Theirs if !ids.is_empty() && are_ids() => {
                must.values().map(|(agent, _)| agent.clone()).collect()
            }
            Asked::Theirs | Asked::All => self.agents.all(),
        };
        let answers = join_all(all.iter().map(|agent| async move {
            let answer = match agent.check() {
                Ok(()) => self.group_at(agent, group, Vec::new()).await,
                Err(error) => Err(error),
            };
            (agent, answer)
        }));
        for (agent, answer) in answers.await {
            let answer = answer.and_then(|answer| self.group_of(agent, group, answer));
            match answer {
                Ok(answer) => state.add(group, agent, answer),
                Err(error) if must.contains_key(agent.node()) => return Err(error),
                Err(error) => state.unseen = Some(error),
            }
        }
        // Each member is looked up by its ID: a member that is not found then does not exist.
        let ids_by_node = self.ids_by_node(&state.all_members()).await?;
        let answers = join_all(ids_by_node.into_values().map(|(agent, ids)| async move {
            let answer = self.group_at(&agent, group, ids.into_iter().collect());
            (answer.await, agent)
        }));
        for (answer, agent) in answers.await {
            state.add(group, &agent, self.group_of(&agent, group, answer?)?);
        }
        Ok(state)
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

    /// Sends the decision to the agents that have members in doubt.
    async fn settle(&self, group: GroupId, state: &GroupState) -> Result<()> {
        let in_doubt = state.with(State::Cut).map(|(_, member)| &member.attempt);
        let in_doubt: BTreeSet<&String> = in_doubt.collect();
        let (committed, undone): (Vec<&String>, Vec<&String>) = in_doubt
            .into_iter()
            .partition(|attempt| state.is_committed_attempt(attempt));
        // Another one is committed in the next round.
        let committed = committed.first().map(|attempt| attempt.to_string());
        let request = SettleGroupRequest {
            group_id: group.to_string(),
            attempt: committed.unwrap_or_default(),
            undone_attempts: undone.into_iter().cloned().collect(),
        };
        let unready = state.with(State::Cut).chain(state.with(State::Preparing));
        let agents: BTreeMap<&str, &Arc<Agent>> =
            unready.map(|(agent, _)| (agent.node(), agent)).collect();
        tracing::info!(%group, committed = %request.attempt, undone = ?request.undone_attempts, "resolving a group snapshot that is in doubt");
        let answers = join_all(agents.values().map(|agent| async {
            let mut client = agent.client().await?;
            answered(agent, client.settle_group(request.clone())).await
        }));
        answers
            .await
            .into_iter()
            .try_for_each(|answer| answer.map(drop))
    }

    /// Deletes these members, and everything else that their agents have of the group.
    pub(super) async fn delete_group_members(
        &self,
        group: GroupId,
        ids_by_node: IdsByNode,
    ) -> Result<()> {
        let ended = join_all(ids_by_node.into_values().map(|(agent, ids)| async move {
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

    /// Groups of which an agent last reported uncommitted members, each with the nodes whose agents
    /// reported that. The members of a group are committed one after the other; until all are, the
    /// group is in no list.
    pub(super) fn uncommitted_groups(&self) -> InPart {
        let mut groups = InPart::new();
        for description in self.descriptions() {
            for group in description
                .busy_groups
                .iter()
                .chain(&description.unsettled_groups)
            {
                let nodes = groups.entry(group.clone()).or_default();
                nodes.insert(description.node_name.clone());
            }
        }
        groups
    }

    /// Whether one of these nodes has members of the group to which a snapshot belongs. The report
    /// of an agent that has none is ignored.
    pub(super) async fn has_part(
        &self,
        (group, member): (&str, &str),
        nodes: &BTreeSet<String>,
    ) -> bool {
        let members = match group.parse() {
            Ok(group) => {
                self.read_group(group, &[member.to_string()], Asked::Theirs)
                    .await
            }
            Err(_) => return false,
        };
        let members = members.ok().and_then(|state| state.membership);
        let Some(membership) = members else {
            return true;
        };
        match self.ids_by_node(&membership.members).await {
            Ok(ids_by_node) => ids_by_node.keys().any(|node| nodes.contains(node)),
            Err(_) => true,
        }
    }

    /// The last descriptions of all agents.
    pub(super) fn descriptions(&self) -> Vec<Arc<DescribeResponse>> {
        let all = self.agents.all().into_iter();
        all.filter_map(|agent| agent.seen().description).collect()
    }
}

impl GroupState {
    fn add(&mut self, group: GroupId, agent: &Arc<Agent>, answer: GetGroupResponse) {
        let node = agent.node().to_string();
        if answer.busy && !self.busy.contains(&node) {
            self.busy.push(node.clone());
        }
        if !answer.unseen.is_empty() {
            self.unseen = Some(agent.unreachable(&answer.unseen));
        }
        let is_ready = answer.members.iter().any(|one| one.state() == State::Ready);
        if !answer.all_member_ids.is_empty() {
            let mut membership = GroupMembership {
                id: group.0,
                members: answer.all_member_ids,
                sources: answer.all_source_volume_ids,
                asked: (!answer.asked.is_empty()).then_some(answer.asked),
                independent: answer.independent,
            };
            // It is from the record of a member that is committed, or else from one that is cut.
            let state = if is_ready { State::Ready } else { State::Cut };
            let of = answer.members.iter().filter(|one| one.state() == state);
            let attempts: BTreeSet<&String> = of.map(|one| &one.attempt).collect();
            if let Some(attempt) = attempts.first().filter(|_| attempts.len() == 1) {
                let reported = (node.clone(), membership.clone());
                let (first, definition) =
                    self.attempts.entry(attempt.to_string()).or_insert(reported);
                if (&definition.members, &definition.sources)
                    != (&membership.members, &membership.sources)
                {
                    self.contradiction = Some((first.clone(), node));
                }
                // One that does not know this property protects the members of the others.
                definition.independent &= membership.independent;
                membership.independent = definition.independent;
            }
            if is_ready || self.membership.is_none() {
                self.membership = Some(membership);
            }
        }
        for member in answer.members {
            let id = member.snapshot_id.clone();
            self.members.insert(id, (agent.clone(), member));
        }
    }
}

/// Awaits an agent's answer, for the longest time that a healthy agent needs.
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

#[cfg(test)]
mod tests;
