//! Chooses one node for all claims of a pod, if some of them are created from snapshots or volumes
//! of another node than the selected one ([ADR 0039](../../../docs/adr/0039-one-node-for-all-claims-of-a-pod.md)).
//!
//! The claims of a pod are created one after the other, or at once. The node is the same for each
//! of them, because each decision is about all of them, and because volumes that exist or are being
//! created decide first. The decision is a pure function, [`decide`], of what `choose` has observed.

pub(in crate::router) mod choose;
pub(in crate::router) mod fit;
mod observe;
pub(in crate::router) mod progress;
pub(in crate::router) mod quantity;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{PersistentVolume, Pod};

use crate::operation::ContentSource;

/// Whether something holds; `Err` has the reason why not, also if that cannot be determined.
pub type Fit = Result<(), String>;

/// What a cluster has recorded about the claims whose volumes must be on one node.
#[derive(Clone, Debug, Default)]
pub struct PodClaims {
    /// All claims of the pods that use the claim of the new volume, and that claim itself, even if
    /// it does not exist any more.
    pub claims: Vec<Claim>,
    /// The other claims of the controller of these pods.
    pub others: Vec<Claim>,
    /// The pods that have not ended. Without any, there is no node for which the scheduler waits.
    pub pods: Vec<Pod>,
    /// The PersistentVolumes to which claims of the pods are bound.
    pub volumes: Vec<PersistentVolume>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Claim {
    /// "namespace/name".
    pub path: String,
    /// Its UID, which is part of the name of its volume; empty if the claim does not exist.
    pub uid: String,
    /// The node that the scheduler has selected for it.
    pub selected: Option<String>,
    /// The requested size.
    pub bytes: u64,
    pub state: State,
}

/// Whether a claim has a volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum State {
    Bound(Tie),
    Unbound { class: Class, source: Source },
}

/// The node that a bound claim is tied to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Tie {
    /// Several nodes can use the volume.
    Loose,
    /// The nodes of a topology segment of this driver.
    Home(String),
    /// A node, by its name.
    Node(String),
}

/// The StorageClass of a claim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Class {
    /// Of this driver, with these parameters.
    Ours(BTreeMap<String, String>),
    /// Of another driver, or none.
    Others,
    /// It cannot be read; contains the reason.
    Unknown(String),
}

/// What a volume is created from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    None,
    Of(ContentSource),
    /// It cannot be determined; contains the reason.
    Unknown(String),
}

/// A node, and its topology segment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::router) struct Place {
    pub(in crate::router) node: String,
    pub(in crate::router) home: String,
}

/// What the decision needs to know of a claim of the pod.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Sibling {
    path: String,
    /// It is the claim whose volume is created now.
    is_own: bool,
    at: At,
}

/// Where a claim's volume is.
#[derive(Clone, Debug, PartialEq, Eq)]
enum At {
    Bound(Place),
    /// Its volume exists, or is being created.
    Begun(Place),
    /// It is bound, and several nodes can use its volume.
    Anywhere,
    Unbound {
        /// `Err` has the reason why this driver does not create its volume, or cannot.
        is_ours: Fit,
        source: SourceAt,
    },
}

/// Where the source of a claim's volume is.
#[derive(Clone, Debug, PartialEq, Eq)]
enum SourceAt {
    None,
    At(Place),
    Unknown(String),
}

/// Everything that decides.
#[derive(Clone, Debug)]
struct View {
    selected: Place,
    /// The pods that use the claims, "namespace/name".
    pods: Vec<String>,
    claims: Vec<Sibling>,
    /// What was observed of the node that has all sources; `None` if there is no such node.
    candidate: Option<Candidate>,
    /// `Err` has the reason why the selected node has no room for all claims.
    room: Fit,
}

/// The node that has all sources. Each `Err` has the reason against it.
#[derive(Clone, Debug)]
struct Candidate {
    /// The topology requirement of the call allows it.
    is_allowed: Fit,
    /// The pod could run there.
    fits: Fit,
    /// Its pools have room for all volumes.
    room: Fit,
    /// No other claim of the same controller has, or is getting, its volume there.
    is_alone: Fit,
}

/// The node of a new volume.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Decision {
    place: Place,
    /// Why, as a clause.
    reason: String,
    /// Whether the volume itself exists there or is being created: nothing is decided any more.
    is_repeat: bool,
    /// What the node lacks for the volumes of all claims, of which none has been created yet.
    lacks: Option<String>,
}

/// Decides by three rules; the first that applies is used.
fn decide(view: &View) -> Decision {
    if let Some(decision) = follow(view) {
        return decision;
    }
    match beside_sources(view) {
        Ok(place) => Decision {
            reason: format!(
                "all sources of the new volumes of pod {} are there, and the pod can run there",
                view.pods.join(", ")
            ),
            is_repeat: false,
            lacks: None,
            place,
        },
        Err(why) => Decision {
            place: view.selected.clone(),
            reason: format!("it is the selected node, and {why}"),
            is_repeat: false,
            lacks: view.room.clone().err(),
        },
    }
}

/// Rule (a): a volume of the pod that exists, or is being created, decides. The volume itself comes
/// first, because it cannot be created a second time.
fn follow(view: &View) -> Option<Decision> {
    let rank = |claim: &&Sibling| match &claim.at {
        At::Begun(_) if claim.is_own => Some(0),
        At::Bound(_) => Some(1),
        At::Begun(_) => Some(2),
        At::Anywhere | At::Unbound { .. } => None,
    };
    let having = view.claims.iter().filter(|claim| rank(claim).is_some());
    let first = having.min_by_key(|claim| (rank(claim), &claim.path))?;
    let (At::Bound(place) | At::Begun(place)) = &first.at else {
        return None;
    };
    let path = &first.path;
    let reason = match (first.is_own, &first.at) {
        (true, _) => "its creation has begun there".into(),
        (false, At::Bound(_)) => format!("the volume of claim {path} of the same pod is there"),
        (false, _) => format!("the volume of claim {path} of the same pod is created there"),
    };
    Some(Decision {
        place: place.clone(),
        reason,
        is_repeat: first.is_own,
        lacks: None,
    })
}

/// Rule (b): the node of the sources; or the reason why not.
fn beside_sources(view: &View) -> Result<Place, String> {
    let place = place_of_sources(&view.pods, &view.claims)?;
    if place == view.selected {
        return Ok(place);
    }
    let missing = || format!("node {} was not examined", place.node);
    let candidate = view.candidate.clone().ok_or_else(missing)?;
    candidate.is_allowed?;
    candidate.fits?;
    candidate.room?;
    candidate.is_alone?;
    Ok(place)
}

/// The node that has the sources of all unbound claims of the only pod that uses them.
fn place_of_sources(pods: &[String], claims: &[Sibling]) -> Result<Place, String> {
    if pods.is_empty() {
        return Err("no pod uses the claim".into());
    }
    if let [first, second, ..] = pods {
        return Err(format!("the claims are used by pods {first} and {second}"));
    }
    let mut found: Option<(&str, &Place)> = None;
    for claim in claims {
        let At::Unbound { is_ours, source } = &claim.at else {
            continue;
        };
        let path = &claim.path;
        is_ours.clone()?;
        match (source, found) {
            (SourceAt::None, _) => {}
            (SourceAt::Unknown(why), _) => {
                return Err(format!("the source of claim {path} is not known: {why}"));
            }
            (SourceAt::At(place), Some((other, elsewhere))) if place != elsewhere => {
                let (here, there) = (&place.node, &elsewhere.node);
                return Err(format!(
                    "the sources of claims {other} and {path} are on nodes {there} and {here}"
                ));
            }
            (SourceAt::At(place), _) => found = Some((path, place)),
        }
    }
    let place = found.map(|(_, place)| place.clone());
    place.ok_or_else(|| "no claim of the pod has a source".into())
}
