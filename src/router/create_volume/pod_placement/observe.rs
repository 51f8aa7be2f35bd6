//! What decides on the node of a restored volume, as the agents report it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use tonic::Code;

use super::progress::Begun;
use super::{
    At, Candidate, Claim, Class, Fit, Place, PodClaims, Sibling, Source, SourceAt, State, Tie,
};
use crate::agent::FindRequest;
use crate::agent::find_request::Kind as Found;
use crate::error::{Error, Result, chain};
use crate::model::{Restore, VolumeParameters};
use crate::operation::{ContentSource, CreateVolume};
use crate::router::Router;
use crate::router::agents::Agent;
use crate::router::call::Call;
use crate::router::find::AT_ONCE;
use crate::router::route::Owner;

/// The time within which the cluster is read for the examination of a node. If it passes, the node
/// is not used.
const EXAMINATION_TIMEOUT: Duration = Duration::from_secs(15);

/// What a call needs to know.
pub(super) struct Question<'a> {
    pub(super) call: &'a Call<'a>,
    pub(super) asked: &'a CreateVolume,
    /// The claim of the new volume.
    pub(super) claim: &'a str,
    /// The selected node, and whether it is still in the cluster; `None` if no node is selected.
    pub(super) selected: Option<(&'a Place, bool)>,
    pub(super) pods: &'a PodClaims,
    pub(super) begun: &'a Begun,
}

impl Question<'_> {
    /// What the name of each volume begins with: the provisioner appends the UID of the claim.
    fn prefix(&self) -> Option<&str> {
        let mut claims = self.pods.claims.iter();
        let own = claims.find(|claim| claim.path == self.claim)?;
        let prefix = self.asked.name.strip_suffix(&own.uid);
        prefix.filter(|_| !own.uid.is_empty())
    }

    /// The parameters of an unbound claim's class; `Err` has the reason why this driver cannot create
    /// its volume.
    fn class(&self, claim: &Claim) -> std::result::Result<VolumeParameters, String> {
        let path = &claim.path;
        if *path == self.claim {
            return Ok(self.asked.parameters.clone());
        }
        let State::Unbound { class, .. } = &claim.state else {
            return Err(format!("claim {path} is bound"));
        };
        match class {
            Class::Ours(parameters) => {
                let parsed = VolumeParameters::parse("parameters", parameters);
                parsed.map_err(|error| format!("the class of claim {path}: {error}"))
            }
            Class::Unknown(why) => Err(format!("the class of claim {path} is not known: {why}")),
            Class::Others => Err(format!(
                "the volume of claim {path} is not created by this driver"
            )),
        }
    }

    /// The name of the volume of a claim.
    fn name(&self, claim: &Claim) -> Option<String> {
        if claim.path == self.claim {
            return Some(self.asked.name.clone());
        }
        let prefix = self.prefix().filter(|_| !claim.uid.is_empty())?;
        Some(format!("{prefix}{}", claim.uid))
    }
}

impl Router {
    /// The claims of the pod, with their places.
    pub(super) async fn siblings(&self, question: &Question<'_>) -> Result<Vec<Sibling>> {
        let mut siblings = Vec::new();
        for claim in &question.pods.claims {
            let at = match &claim.state {
                State::Bound(tie) => self.tied(tie).map_or(At::Anywhere, At::Bound),
                State::Unbound { source, .. } => {
                    let source = self.place_of(source).await?;
                    unbound(question, claim, source)
                }
            };
            siblings.push(Sibling {
                path: claim.path.clone(),
                is_own: claim.path == question.claim,
                at,
            });
        }
        let agents = self.possible(question.selected, &siblings);
        let claims = question.pods.claims.iter();
        for (claim, sibling) in claims.zip(&mut siblings) {
            if !matches!(sibling.at, At::Unbound { .. }) {
                continue;
            }
            let begun = match question.begun.place(&claim.path) {
                Some(place) => Some(place),
                None => self.begun_at(question, claim, &agents).await?,
            };
            if let Some(place) = begun {
                sibling.at = At::Begun(place);
            }
        }
        Ok(siblings)
    }

    /// The place of a bound volume; `None` if it does not decide on a node of this driver.
    fn tied(&self, tie: &Tie) -> Option<Place> {
        match tie {
            Tie::Loose => None,
            Tie::Home(home) => {
                let agents = self.agents.of_home(home);
                let node = agents.first().map(|agent| agent.node().to_string());
                let known = || {
                    let known = self.cluster.known_pools().into_iter();
                    let mut known = known.filter(|pool| pool.home == *home);
                    known.next().map(|pool| pool.node)
                };
                let home = home.clone();
                Some(Place {
                    node: node.or_else(known).unwrap_or_else(|| home.clone()),
                    home,
                })
            }
            Tie::Node(node) => place(&self.agents.of_node(node)?),
        }
    }

    /// The place of a source. Fails while its agent cannot be reached: its claim cannot get a
    /// volume, and may have been given one before.
    async fn place_of(&self, source: &Source) -> Result<SourceAt> {
        Ok(match source {
            Source::None => SourceAt::None,
            Source::Unknown(why) => SourceAt::Unknown(why.clone()),
            Source::Of(ContentSource::Snapshot(id) | ContentSource::Volume(id)) => {
                match self.owner(id).await? {
                    Owner::Agent(agent) => match place(&agent) {
                        Some(place) => SourceAt::At(place),
                        None => {
                            let node = agent.node();
                            SourceAt::Unknown(format!("node {node} has pools of several homes"))
                        }
                    },
                    Owner::Nowhere(_) => SourceAt::Unknown("it does not exist any more".into()),
                }
            }
        })
    }

    /// The agents that may have begun to create volumes of the pod, and whether they must answer:
    /// those of the selected node, if it exists, and of the sources must. While a source is not
    /// known, all others that can be reached are asked too. If no node is selected any more, all
    /// must answer.
    fn possible(
        &self,
        selected: Option<(&Place, bool)>,
        siblings: &[Sibling],
    ) -> Vec<(Arc<Agent>, bool)> {
        let Some((selected, exists)) = selected else {
            let mut agents = self.agents.all();
            agents.retain(|agent| !self.is_written_off(agent));
            return agents.into_iter().map(|agent| (agent, true)).collect();
        };
        let mut places = BTreeSet::new();
        if exists {
            places.insert(selected.node.as_str());
        }
        // A node that is gone may have begun, if its agent still answers.
        let mut is_known = exists;
        for sibling in siblings {
            match &sibling.at {
                At::Unbound {
                    source: SourceAt::At(place),
                    ..
                } => drop(places.insert(&place.node)),
                At::Unbound {
                    source: SourceAt::Unknown(_),
                    ..
                } => is_known = false,
                _ => {}
            }
        }
        let agents = self.agents.all().into_iter();
        let agents = agents.map(|agent| {
            let must_answer = places.contains(agent.node());
            (agent, must_answer)
        });
        agents
            .filter(|(_, must_answer)| *must_answer || !is_known)
            .collect()
    }

    /// Where the volume of a claim exists or is being created. An operation on its name that is
    /// running counts as its creation.
    async fn begun_at(
        &self,
        question: &Question<'_>,
        claim: &Claim,
        agents: &[(Arc<Agent>, bool)],
    ) -> Result<Option<Place>> {
        let (Some(name), Ok(class)) = (question.name(claim), question.class(claim)) else {
            return Ok(None);
        };
        let looks = agents.iter().cloned().map(|(agent, must_answer)| {
            let asked = FindRequest {
                kind: Found::Volume.into(),
                name: name.clone(),
                pool: class.pool.clone().unwrap_or_default(),
            };
            async move {
                let found = self.find(question.call, agent.clone(), asked).await;
                (found, agent, must_answer)
            }
        });
        let looks = futures_util::stream::iter(looks).buffer_unordered(AT_ONCE);
        let (mut there, mut unknown) = (BTreeMap::new(), None);
        for (found, agent, must_answer) in looks.collect::<Vec<_>>().await {
            let is_running = match found {
                Ok(None) => continue,
                Ok(Some(_)) => false,
                Err(error) if is_pending(&error) => true,
                Err(error) => {
                    unknown = unknown.or(must_answer.then_some(error));
                    continue;
                }
            };
            if let Some(place) = place(&agent) {
                there.insert((is_running, place.node.clone()), place);
            }
        }
        match (there.into_values().next(), unknown) {
            (Some(place), _) => Ok(Some(place)),
            (None, Some(error)) => Err(error),
            (None, None) => Ok(None),
        }
    }

    /// Examines the node that has all sources.
    pub(super) async fn examine(
        &self,
        question: &Question<'_>,
        siblings: &[Sibling],
        place: &Place,
    ) -> Candidate {
        let requisite = &question.asked.requisite;
        let is_allowed = match requisite.is_empty() || requisite.contains(&place.home) {
            true => Ok(()),
            false => Err(format!("node {} is not among the allowed ones", place.node)),
        };
        let fits = self.cluster.check_node(question.pods, &place.node);
        let fits = tokio::time::timeout(EXAMINATION_TIMEOUT, fits).await;
        Candidate {
            is_allowed,
            fits: fits.unwrap_or_else(|_| {
                let seconds = EXAMINATION_TIMEOUT.as_secs();
                Err(format!(
                    "node {} could not be examined within {seconds} s",
                    place.node
                ))
            }),
            room: self.room(question, siblings, place),
            is_alone: self.check_alone(question, place).await,
        }
    }

    /// Whether the pools of a node have room for the volumes of all claims of the pod, by its last
    /// report.
    pub(super) fn room(&self, question: &Question<'_>, siblings: &[Sibling], place: &Place) -> Fit {
        let node = &place.node;
        let agent = self.agents.of_node(node);
        let agent = agent.ok_or_else(|| format!("node {node} has no agent"))?;
        let mut wanted = BTreeMap::<String, (u64, u64)>::new();
        for (claim, sibling) in question.pods.claims.iter().zip(siblings) {
            if !matches!(
                &sibling.at,
                At::Unbound {
                    is_ours: Ok(()),
                    ..
                }
            ) {
                continue;
            }
            let class = question.class(claim)?.pool;
            let usable = agent
                .meant(class.as_deref())
                .filter(|pool| pool.refusal.is_empty() && !self.cluster.is_closed(&pool.id));
            let usable = usable.ok_or_else(|| {
                let class = class.as_deref().unwrap_or("default");
                format!("node {node} has no usable pool {class}")
            })?;
            let free = u64::try_from(usable.promisable_bytes).unwrap_or(0);
            let (sum, _) = wanted.entry(usable.name).or_insert((0, free));
            *sum = sum.saturating_add(claim.bytes);
        }
        match wanted.iter().find(|(_, (sum, free))| sum > free) {
            Some((pool, (sum, free))) => Err(format!(
                "pool {pool} of node {node} has room for {free} bytes, and the new volumes of the pod need {sum}"
            )),
            None => Ok(()),
        }
    }

    /// Whether no other claim of the controller has, or is getting, its volume on a node.
    async fn check_alone(&self, question: &Question<'_>, place: &Place) -> Fit {
        let node = &place.node;
        let agents: Vec<_> = self
            .agents
            .of_node(node)
            .map(|agent| (agent, true))
            .into_iter()
            .collect();
        for other in &question.pods.others {
            let path = &other.path;
            let has = format!("claim {path} of the same controller has its volume on node {node}");
            let gets =
                format!("claim {path} of the same controller gets its volume on node {node}");
            match &other.state {
                State::Bound(tie) if self.tied(tie).as_ref() == Some(place) => return Err(has),
                State::Bound(_) => continue,
                State::Unbound { .. } => {}
            }
            match question.begun.place(path) {
                Some(there) if there == *place => return Err(gets),
                Some(_) => continue,
                None if other.selected.as_ref() == Some(node) => return Err(gets),
                None => {}
            }
            match self.begun_at(question, other, &agents).await {
                Ok(None) => {}
                Ok(Some(_)) => return Err(gets),
                Err(error) => return Err(format!("the volume of claim {path}: {}", chain(&error))),
            }
        }
        Ok(())
    }
}

/// Where the volume of an unbound claim is or must be created, if its class decides.
fn unbound(question: &Question<'_>, claim: &Claim, source: SourceAt) -> At {
    let path = &claim.path;
    let class = question.class(claim);
    let restore = class.as_ref().map(|class| class.restore);
    let is_ours = match (restore, &source) {
        (Ok(Restore::Source), SourceAt::At(place)) => return At::Begun(place.clone()),
        (Ok(Restore::Source | Restore::Pod), _) => Err(format!(
            "the class of claim {path} does not have restore: auto"
        )),
        (Ok(Restore::Auto), _) if question.name(claim).is_none() => Err(format!(
            "the name of the volume of claim {path} is not known"
        )),
        (Ok(Restore::Auto), _) => Ok(()),
        (Err(why), _) => Err(why.clone()),
    };
    At::Unbound { is_ours, source }
}

fn place(agent: &Arc<Agent>) -> Option<Place> {
    let (node, home) = (agent.node().to_string(), agent.home());
    (!home.is_empty()).then_some(Place { node, home })
}

/// The agent has an operation on the name.
fn is_pending(error: &Error) -> bool {
    matches!(error, Error::Forwarded { code, .. } if *code == Code::Aborted as i32)
}
