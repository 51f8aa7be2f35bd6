//! Chooses the node of a new volume.
//!
//! A restored or cloned volume is created where its source is, whatever topology was preferred,
//! unless its class says otherwise ([`super`]): the answer's topology names it, and the pod
//! follows. A volume whose PVC has a selected node is
//! created there or nowhere, so that the scheduler decides. For any other volume, the router first
//! looks for its name on every node where it could exist, and then tries one node after another,
//! continuing only after a definite refusal.

use std::collections::BTreeSet;
use std::sync::Arc;

use futures_util::StreamExt;
use tonic::Code;
use tonic::transport::Channel;
use uuid::Uuid;

use super::copy_between_nodes::{Make, Sent};
use super::pod_placement::Place;
use super::pod_placement::choose::Choice;
use crate::agent::FindRequest;
use crate::agent::find_request::Kind as Found;
use crate::csi::controller_client::ControllerClient;
use crate::csi::{CreateVolumeRequest, CreateVolumeResponse};
use crate::error::{Error, Result};
use crate::model::Restore;
use crate::model::VolumeId;
use crate::operation::{ContentSource, CreateVolume};
use crate::router::Router;
use crate::router::agents::Agent;
use crate::router::call::Call;
use crate::router::cluster::Unwanted;
use crate::router::find::AT_ONCE;
use crate::service::{request, status};

/// Keys that the provisioner adds to the parameters with `--extra-create-metadata`.
const CLAIM_NAMESPACE: &str = "csi.storage.k8s.io/pvc/namespace";
const CLAIM_NAME: &str = "csi.storage.k8s.io/pvc/name";

/// The answer of one node about a new volume.
enum Attempt {
    /// The volume was created.
    Created(CreateVolumeResponse),
    /// The volume cannot be created here and nothing of it exists here; contains the reason.
    Refused(String),
}

impl Router {
    /// CreateVolume without a content source. Two volumes never get the same name.
    pub(super) async fn place(
        &self,
        call: &Call<'_>,
        message: CreateVolumeRequest,
        asked: &CreateVolume,
    ) -> Result<CreateVolumeResponse> {
        self.agents.all_asked()?;
        let homes = homes(&message, asked, &self.topology_key());
        if let Some(node) = self.selected(&message).await?
            && let Some(home) = homes.first()
        {
            let selected = Place {
                node,
                home: home.clone(),
            };
            let choice = match asked.parameters.restore {
                Restore::Source | Restore::Pod => {
                    self.must_exist(&selected.node).await?;
                    Choice::new(&selected, "")
                }
                Restore::Auto => self.choose(call, asked, None, &selected).await?,
            };
            must_have_room(&choice)?;
            let at = (choice.place.home.as_str(), &Make::Here);
            return self.create_at(call, &message, asked, at).await;
        }
        let mut candidates = self.agents.all();
        candidates.retain(|agent| self.could_have(agent, &homes));
        if let Some(agent) = self.having(call, asked, candidates, &homes).await? {
            return self.create(call, &agent, message, asked, &Make::Here).await;
        }
        let homes = match homes.is_empty() {
            true => self.rendezvous(&asked.name),
            false => homes,
        };
        let mut refusals = Vec::new();
        for home in &homes {
            match self
                .try_home(call, &message, asked, (home, &Make::Here))
                .await?
            {
                Attempt::Created(created) => return Ok(created),
                Attempt::Refused(why) => refusals.push(why),
            }
        }
        Err(exhausted(&refusals))
    }

    /// Creates a volume in one topology segment or nowhere.
    pub(super) async fn create_at(
        &self,
        call: &Call<'_>,
        message: &CreateVolumeRequest,
        asked: &CreateVolume,
        at: (&str, &Make),
    ) -> Result<CreateVolumeResponse> {
        match self.try_home(call, message, asked, at).await? {
            Attempt::Created(created) => Ok(created),
            Attempt::Refused(why) => Err(exhausted(&[why])),
        }
    }

    /// The node that was selected for the PVC of a volume.
    pub(super) async fn selected(&self, message: &CreateVolumeRequest) -> Result<Option<String>> {
        let parameters = &message.parameters;
        match (parameters.get(CLAIM_NAMESPACE), parameters.get(CLAIM_NAME)) {
            (Some(namespace), Some(name)) => {
                let claim = format!("{namespace}/{name}");
                self.cluster.selected_node(&claim).await
            }
            _ => Ok(None),
        }
    }

    /// A node that was removed from the cluster gets no new volumes, even if its agent still
    /// answers: this code makes the scheduler select again.
    pub(super) async fn must_exist(&self, node: &str) -> Result<()> {
        match self.cluster.has_node(node).await? {
            true => Ok(()),
            false => Err(exhausted(&[gone(node)])),
        }
    }

    /// Creates a volume on the node of a topology segment, if that is possible.
    async fn try_home(
        &self,
        call: &Call<'_>,
        message: &CreateVolumeRequest,
        asked: &CreateVolume,
        (home, make): (&str, &Make),
    ) -> Result<Attempt> {
        let agent = match self.at_home(home).await?.as_slice() {
            [] => return self.unknown_home(home),
            [agent] => agent.clone(),
            [first, second, ..] => {
                let (first, second) = (first.node(), second.node());
                let reason = format!("the agents of nodes {first} and {second} both report it");
                return Err(not_at_home(home, reason));
            }
        };
        if !self.cluster.has_node(agent.node()).await? {
            // What a copy has begun there is deleted first, if its agent still answers.
            if let Make::From { what, .. } = make {
                if agent.reachable().await.is_ok() {
                    let why = Unwanted::Node(gone(agent.node()));
                    let ended = self.end_copy(call, &agent, (message, what), why).await;
                    if let Err(error) = ended
                        && !error.is_final()
                    {
                        return Err(error);
                    }
                }
                if let Sent::Volume(it) = what {
                    self.end_for_clone(it).await;
                }
            }
            return Ok(Attempt::Refused(gone(agent.node())));
        }
        if self.is_written_off(&agent) {
            let node = agent.node();
            return Ok(Attempt::Refused(format!(
                "the pools of node {node} are marked as lost"
            )));
        }
        agent.reachable().await?;
        let class = asked.parameters.pool.as_deref();
        if self.usable_pool(&agent, class).is_none() && self.is_known_class(class) {
            let pool = class.unwrap_or("default");
            let node = agent.node();
            return Ok(Attempt::Refused(format!(
                "node {node} has no usable pool {pool}"
            )));
        }
        let created = self.create(call, &agent, message.clone(), asked, make);
        match created.await {
            Ok(created) => Ok(Attempt::Created(created)),
            Err(error) => {
                let status = status(call.rpc(), &error);
                match status.code() {
                    Code::ResourceExhausted => {
                        let (node, why) = (agent.node(), status.message());
                        Ok(Attempt::Refused(format!("node {node}: {why}")))
                    }
                    _ => Err(error),
                }
            }
        }
    }

    /// The agents of a topology segment. If the cluster knows which nodes have the segment, only
    /// their agents: agents report their segment themselves, and volumes of a segment must not be
    /// created on another node.
    pub(in crate::router) async fn at_home(&self, home: &str) -> Result<Vec<Arc<Agent>>> {
        let mut agents = self.agents.of_home(home);
        let known = self.cluster.known_pools().into_iter();
        let known = known.filter(|pool| pool.home == home && !pool.node.is_empty());
        let known = known.filter(|pool| !pool.lost && !self.cluster.is_lost(pool.id));
        let mut nodes: BTreeSet<String> = known.map(|pool| pool.node).collect();
        if nodes.is_empty() || agents.iter().all(|agent| nodes.contains(agent.node())) {
            return Ok(agents);
        }
        for node in nodes.clone() {
            if !self.cluster.has_node(&node).await? {
                nodes.remove(&node);
            }
        }
        let claiming = agents.first().map(|agent| agent.node().to_string());
        if !nodes.is_empty() {
            agents.retain(|agent| nodes.contains(agent.node()));
        }
        match (claiming, nodes.first()) {
            (Some(claiming), Some(node)) if agents.is_empty() => {
                let reason =
                    format!("it belongs to node {node}, but node {claiming} reports it too");
                Err(not_at_home(home, reason))
            }
            _ => Ok(agents),
        }
    }

    /// Creates the volume on an agent, which must answer with an ID and a topology of its own.
    pub(super) async fn create(
        &self,
        call: &Call<'_>,
        agent: &Arc<Agent>,
        message: CreateVolumeRequest,
        asked: &CreateVolume,
        make: &Make,
    ) -> Result<CreateVolumeResponse> {
        self.must_not_be_evacuated(call, agent, asked, make).await?;
        let source = message.volume_content_source.clone();
        let ask = async |mut client: ControllerClient<Channel>, request| {
            client.create_volume(request).await
        };
        let answer = match make {
            Make::Here => call.forward(agent, message, ask).await?,
            Make::From { source, what } => {
                let asked = (&message, asked);
                self.receive_from(call, agent, asked, (source, what))
                    .await?
            }
        };
        self.check_created_volume(agent, asked, source.as_ref(), answer)
            .await
    }

    /// A pool that is being emptied gets no new volumes. What was created or begun there before is
    /// completed: the caller may not know of it.
    async fn must_not_be_evacuated(
        &self,
        call: &Call<'_>,
        agent: &Arc<Agent>,
        asked: &CreateVolume,
        make: &Make,
    ) -> Result<()> {
        let class = asked.parameters.pool.as_deref();
        let of_source = match (class, make, &asked.content_source) {
            // Without a pool of its own, it is created in that of its source.
            (None, Make::Here, Some(ContentSource::Snapshot(id) | ContentSource::Volume(id))) => {
                id.parse::<VolumeId>().ok().map(|id| id.pool)
            }
            _ => None,
        };
        let meant = || agent.meant(class)?.id.parse().ok();
        let Some(pool) = of_source.or_else(meant) else {
            return Ok(());
        };
        if !self.cluster.is_evacuated(pool) {
            return Ok(());
        }
        let question = FindRequest {
            kind: Found::Volume.into(),
            name: asked.name.clone(),
            pool: class.unwrap_or_default().to_string(),
        };
        if self
            .find(call, Arc::clone(agent), question)
            .await?
            .is_some()
        {
            return Ok(());
        }
        let why = format!("its pool {pool} is being emptied (spec.evacuate of the Pool object)");
        Err(exhausted(&[format!("node {}: {why}", agent.node())]))
    }

    /// A topology segment that no agent reports: an agent that has never answered may have it.
    fn unknown_home(&self, home: &str) -> Result<Attempt> {
        let known = self.cluster.known_pools();
        let mut of_home = known.iter().filter(|pool| pool.home == home);
        if let Some(pool) = of_home.find(|pool| !pool.lost && !self.cluster.is_lost(pool.id)) {
            return Err(self.unreported(pool.id));
        }
        let agents = self.agents.all();
        let silent = agents
            .iter()
            .find(|agent| agent.seen().description.is_none());
        if let Some(agent) = silent {
            agent.check()?;
        }
        Ok(Attempt::Refused(format!("no node has the home {home}")))
    }

    /// Whether a volume in one of these segments (none given: in any) could exist on an agent. An
    /// agent that has never answered may have a segment that no other agent reports.
    fn could_have(&self, agent: &Agent, homes: &[String]) -> bool {
        let home = agent.home();
        let is_meant = match home.is_empty() {
            true => homes
                .iter()
                .any(|home| self.agents.of_home(home).is_empty()),
            false => homes.contains(&home),
        };
        (is_meant || homes.is_empty()) && !self.is_written_off(agent)
    }

    /// The agent that already has a volume with this name. It fails if that cannot be determined,
    /// because an agent that could have the volume cannot be reached.
    async fn having(
        &self,
        call: &Call<'_>,
        asked: &CreateVolume,
        candidates: Vec<Arc<Agent>>,
        homes: &[String],
    ) -> Result<Option<Arc<Agent>>> {
        let question = || FindRequest {
            kind: Found::Volume.into(),
            name: asked.name.clone(),
            pool: asked.parameters.pool.clone().unwrap_or_default(),
        };
        let looks = candidates.into_iter().map(|agent| {
            let question = question();
            async move { (self.find(call, agent.clone(), question).await, agent) }
        });
        let mut looks = futures_util::stream::iter(looks).buffer_unordered(AT_ONCE);
        let mut unknown = None;
        while let Some((found, agent)) = looks.next().await {
            match found {
                Ok(Some(_)) => return Ok(Some(agent)),
                Ok(None) => {}
                Err(error) => unknown = Some(error),
            }
        }
        if let Some(error) = unknown {
            return Err(error);
        }
        // Pools that existed, and are not reported now.
        let gone = self.cluster.known_pools().into_iter().find(|pool| {
            let is_lost = pool.lost || self.cluster.is_lost(pool.id);
            let is_shown = || !self.agents.showing(pool.id).is_empty();
            let class = asked.parameters.pool.as_ref();
            let is_meant = class.is_none_or(|class| *class == pool.name)
                && (homes.is_empty() || homes.contains(&pool.home));
            !is_lost && is_meant && !is_shown()
        });
        gone.map_or(Ok(None), |pool| Err(self.unreported(pool.id)))
    }

    /// All topology segments, ordered by a hash of segment and name: the same for each attempt and
    /// each router, however many nodes are added or removed.
    fn rendezvous(&self, name: &str) -> Vec<String> {
        let homes: BTreeSet<String> = self.agents.all().iter().map(|agent| agent.home()).collect();
        let mut ranked: Vec<_> = homes
            .into_iter()
            .filter(|home| !home.is_empty())
            .map(|home| {
                let rank = Uuid::new_v5(&Uuid::NAMESPACE_OID, format!("{home}\n{name}").as_bytes());
                (rank, home)
            })
            .collect();
        ranked.sort();
        ranked.into_iter().map(|(_, home)| home).collect()
    }

    /// The pool on an agent that a class selects, if volumes can be created there.
    pub(super) fn usable_pool(&self, agent: &Agent, class: Option<&str>) -> Option<String> {
        let pool = agent.meant(class)?;
        let id = pool.id.parse();
        let is_lost = id.is_ok_and(|id| self.cluster.is_lost(id));
        (!is_lost).then_some(pool.name)
    }

    /// Whether an agent has a pool in which new volumes of a class are created.
    pub(in crate::router) fn takes_volumes(&self, agent: &Agent, class: Option<&str>) -> bool {
        let pool = agent.meant(class);
        pool.is_some_and(|pool| !self.cluster.is_closed(&pool.id))
    }

    /// Whether any agent has a pool that the class selects.
    pub(in crate::router) fn is_known_class(&self, class: Option<&str>) -> bool {
        let agents = self.agents.all();
        agents.iter().any(|agent| agent.meant(class).is_some())
    }
}

/// Topology segments in the order of preference, each once: the preferred ones, then all that are
/// allowed. Empty means any.
pub(super) fn homes(message: &CreateVolumeRequest, asked: &CreateVolume, key: &str) -> Vec<String> {
    let preferred = message.accessibility_requirements.iter();
    let preferred = preferred
        .flat_map(|requirement| &requirement.preferred)
        .map(|topology| request::segment(topology, key));
    let mut seen = BTreeSet::new();
    let all = preferred.chain(asked.requisite.iter().cloned());
    all.filter(|home| seen.insert(home.clone())).collect()
}

/// Before the first volume of a pod is created, its node must have room for all of them.
pub(super) fn must_have_room(choice: &Choice) -> Result<()> {
    match &choice.lacks {
        Some(lacks) => Err(exhausted(std::slice::from_ref(lacks))),
        None => Ok(()),
    }
}

fn not_at_home(home: &str, reason: String) -> Error {
    Error::unreachable(format!("the home {home}"), reason)
}

fn gone(node: &str) -> String {
    format!("node {node} is no longer in the cluster")
}

/// The error that makes the scheduler select again.
fn exhausted(refusals: &[String]) -> Error {
    let message = match refusals {
        [] => "no node is known that could provide it".to_string(),
        refusals => refusals.join("; "),
    };
    Error::Forwarded {
        code: Code::ResourceExhausted as i32,
        message,
    }
}
