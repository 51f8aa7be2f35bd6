//! Observes, decides, and records an event about the decision.

use std::sync::Arc;

use super::observe::Question;
use super::progress::InProgress;
use super::{At, Claim, Place, Sibling, View, decide, follow, place_of_sources};
use crate::error::Result;
use crate::operation::CreateVolume;
use crate::router::Router;
use crate::router::call::Call;
use crate::router::cluster::ObjectRef;

/// The reason of the event that states a decision.
const EVENT: &str = "NodeChosen";

/// The node of a new volume. Must be kept until its call ends.
pub(in crate::router) struct Choice {
    pub(in crate::router) place: Place,
    /// Why, as a clause.
    pub(in crate::router) reason: String,
    /// What the node lacks for all new volumes of the pod, of which none exists yet, or that the
    /// selected node is gone. Then the scheduler must select again.
    pub(in crate::router) lacks: Option<String>,
    _in_progress: Option<Arc<InProgress>>,
}

impl Router {
    /// The node of a new volume for which a node is selected. `source` is the place of its content
    /// source, if it has one.
    ///
    /// It fails while it cannot be determined whether a volume of the pod exists already: volumes
    /// of one pod on two nodes would never be usable together.
    pub(in crate::router) async fn choose(
        &self,
        call: &Call<'_>,
        asked: &CreateVolume,
        source: Option<&Place>,
        selected: &Place,
    ) -> Result<Choice> {
        let Some(claim) = &asked.parameters.claim else {
            return Ok(Choice::new(selected, "it is the selected node"));
        };
        let namespace = self.choices.namespace(claim);
        let mut begun = namespace.lock().await;
        let is_elsewhere = source.is_some_and(|source| source != selected);
        let pods = self
            .cluster
            .pod_claims(claim, asked.content_source.as_ref(), is_elsewhere);
        let node = &selected.node;
        let exists = self.cluster.has_node(node).await?;
        let gone = (!exists).then(|| format!("node {node} is no longer in the cluster"));
        let Some(pods) = pods.await? else {
            let mut choice = Choice::new(selected, "it is the selected node");
            choice.lacks = gone;
            return Ok(choice);
        };
        let question = Question {
            call,
            asked,
            claim,
            selected: Some((selected, exists)),
            pods: &pods,
            begun: &begun,
        };
        let decision = decide(&self.view(&question, selected).await?);
        if !decision.is_repeat {
            self.record_choice(claim, &decision.place, &decision.reason);
        }
        let in_progress = begun.insert(claim, &decision.place, namespace.clone());
        let mut choice = Choice::new(&decision.place, &decision.reason);
        // The scheduler must select again, unless there is something to continue.
        choice.lacks = gone.filter(|_| !decision.is_repeat).or(decision.lacks);
        choice._in_progress = Some(in_progress);
        Ok(choice)
    }

    /// The node of a volume with a source if no node is selected: that of the source, unless the
    /// claim was deleted after a node was selected and the creation began there.
    pub(in crate::router) async fn choose_source(
        &self,
        call: &Call<'_>,
        asked: &CreateVolume,
        source: &Place,
    ) -> Result<Choice> {
        let at_source = Choice::new(source, "its source is there, and no node is selected");
        let Some(claim) = &asked.parameters.claim else {
            return Ok(at_source);
        };
        let namespace = self.choices.namespace(claim);
        let begun = namespace.lock().await;
        let pods = self
            .cluster
            .pod_claims(claim, asked.content_source.as_ref(), true)
            .await?;
        let pods = pods.unwrap_or_default();
        let is_own = |one: &&Claim| one.path == *claim;
        let own = pods.claims.iter().find(is_own);
        if own.is_some_and(|own| own.uid.is_empty()) {
            let question = Question {
                call,
                asked,
                claim,
                selected: None,
                pods: &pods,
                begun: &begun,
            };
            let view = self.view(&question, source).await?;
            let decision = decide(&view);
            if decision.is_repeat {
                return Ok(Choice::new(&decision.place, &decision.reason));
            }
        }
        self.record_choice(claim, source, &at_source.reason);
        Ok(at_source)
    }

    async fn view(&self, question: &Question<'_>, selected: &Place) -> Result<View> {
        let siblings = self.siblings(question).await?;
        let pods = question.pods.pods.iter().map(|pod| {
            let name = pod.metadata.name.as_deref().unwrap_or_default();
            let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
            format!("{namespace}/{name}")
        });
        let is_new = |one: &&Sibling| matches!(one.at, At::Unbound { .. });
        let mut view = View {
            selected: selected.clone(),
            pods: pods.collect(),
            // A single volume is admitted by its agent, more exactly.
            room: match siblings.iter().filter(is_new).count() {
                0 | 1 => Ok(()),
                _ => self.room(question, &siblings, selected),
            },
            claims: siblings,
            candidate: None,
        };
        if follow(&view).is_none()
            && let Ok(place) = place_of_sources(&view.pods, &view.claims)
            && place != *selected
        {
            let examined = self.examine(question, &view.claims, &place).await;
            view.candidate = Some(examined);
        }
        Ok(view)
    }

    fn record_choice(&self, claim: &str, place: &Place, reason: &str) {
        let message = format!("the volume is created on node {}: {reason}", place.node);
        let about = ObjectRef::Claim(claim.to_string());
        self.cluster.record_event(&about, false, EVENT, message);
    }
}

impl Choice {
    pub(in crate::router) fn new(place: &Place, reason: &str) -> Choice {
        Choice {
            place: place.clone(),
            reason: reason.to_string(),
            lacks: None,
            _in_progress: None,
        }
    }
}
