//! Which claims of lost nodes are deleted, so that their StatefulSet creates them again on another node.
//! Pure functions of what was read.
//!
//! All claims of a replica go through the same steps together: the claims are marked, the
//! PersistentVolumes get the policy Retain for this mark, the claims and the pod are deleted. Until the
//! first claim is deleted, everything is undone as soon as a condition does not hold any more: the marks
//! are removed, then the policies are restored. From the first deletion on, the other claims are deleted
//! too: a replica with a new and an old volume would be worse than a new one.
//!
//! Each mark is another one, and each step names the version of its object. So a router that has lost
//! its leadership without noticing cannot delete a claim after its mark was removed, and cannot restore
//! a policy for a claim that was marked again.

mod replicas;

use std::collections::{BTreeMap, BTreeSet};

use ::kube::ResourceExt;
use k8s_openapi::api::apps::v1::StatefulSet;
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod};
use k8s_openapi::jiff::{SignedDuration, Timestamp};

use crate::model::PoolId;
use crate::router::kube::adopt::manifest::Manifest;
use replicas::{Replicas, owner};

/// The annotation of a claim, and the parameter of its class, that request this.
pub(super) const ON_NODE_LOST: &str = "slackwater.dev/on-node-lost";
/// The value of both that requests it.
pub(super) const RECREATE: &str = "recreate";
/// The value of both that does not.
const KEEP: &str = "keep";
/// The label of a claim that is about to be deleted: the version that it had before. A label, because
/// marked claims must be found wherever they are.
pub(super) const MARK: &str = "slackwater.dev/node-lost";

/// Why the node of a volume is certainly lost, or what is missing for that.
pub(super) type Loss = Result<String, String>;

/// A PersistentVolume whose pool no agent reports, or that is about to be in quarantine.
#[derive(Clone, Debug)]
pub(super) struct Volume {
    pub(super) live: Manifest,
    pub(super) pool: PoolId,
    /// The node that had the pool last.
    pub(super) node: String,
    pub(super) loss: Loss,
}

/// What has to be known of a namespace.
#[derive(Clone, Debug)]
pub(super) struct Seen {
    pub(super) driver: String,
    pub(super) now: Timestamp,
    /// How long the other replicas must have been Ready.
    pub(super) ready_for: SignedDuration,
    pub(super) claims: Vec<PersistentVolumeClaim>,
    /// By name.
    pub(super) volumes: BTreeMap<String, Volume>,
    pub(super) pods: Vec<Pod>,
    pub(super) sets: Vec<StatefulSet>,
    /// Nodes of pods that are Ready and not out of service.
    pub(super) nodes: BTreeSet<String>,
    /// Names of claims that are moved, with the names of the moves.
    pub(super) moving: BTreeMap<String, String>,
    /// Names of classes whose claims are created again.
    pub(super) classes: BTreeSet<String>,
}

/// One change of an object, in exactly the version that was read.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Change {
    /// The claim gets a mark.
    Mark {
        claim: PersistentVolumeClaim,
        /// The name and the pool of its PersistentVolume.
        volume: (String, PoolId),
        why: String,
    },
    /// The PersistentVolume gets the policy Retain, because of this claim and mark.
    Retain {
        live: Manifest,
        from: String,
        /// The policy that is restored if this is undone.
        before: String,
    },
    DeleteClaim {
        claim: PersistentVolumeClaim,
        /// The pool whose node must still be lost then.
        pool: Option<PoolId>,
    },
    /// The pod is deleted, in the usual way: Kubernetes ends pods of nodes that are gone or out of
    /// service itself.
    DeletePod { name: String, uid: String },
    /// The claim loses the mark.
    Unmark(PersistentVolumeClaim),
    /// The PersistentVolume gets back its policy.
    Restore(Manifest),
}

/// What is done in a namespace.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Plan {
    /// In this order; those after one that was not done are not done either.
    pub(super) changes: Vec<Change>,
    /// Names of claims that stay, with what is missing.
    pub(super) waiting: Vec<(String, String)>,
}

/// Whether a claim is to be created again.
#[derive(Clone, Debug, PartialEq, Eq)]
enum OnNodeLost {
    Keep,
    Recreate,
    Unknown(String),
}

/// Whether something is done or reported about a claim, if its node is lost.
pub(super) fn is_concerned(claim: &PersistentVolumeClaim, classes: &BTreeSet<String>) -> bool {
    on_node_lost(claim, classes) != OnNodeLost::Keep || is_marked(claim)
}

/// Whether a claim is about to be deleted.
pub(super) fn is_marked(claim: &PersistentVolumeClaim) -> bool {
    claim.labels().contains_key(MARK)
}

/// A claim with such a PersistentVolume.
#[derive(Clone, Debug)]
struct Candidate<'a> {
    claim: &'a PersistentVolumeClaim,
    volume: &'a Volume,
    on_node_lost: OnNodeLost,
}

fn is_leaving(claim: &PersistentVolumeClaim) -> bool {
    claim.metadata.deletion_timestamp.is_some()
}

/// The PersistentVolume of a claim that has one.
pub(super) fn volume_of(claim: &PersistentVolumeClaim) -> Option<&str> {
    let name = claim.spec.as_ref()?.volume_name.as_deref();
    name.filter(|name| !name.is_empty())
}

/// The class of a claim.
pub(super) fn class_of(claim: &PersistentVolumeClaim) -> Option<&String> {
    claim.spec.as_ref()?.storage_class_name.as_ref()
}

impl Candidate<'_> {
    fn name(&self) -> &str {
        self.claim.metadata.name.as_deref().unwrap_or_default()
    }

    fn uid(&self) -> Option<&str> {
        self.claim.metadata.uid.as_deref()
    }

    /// Its UID and its mark, if it has one.
    fn mark(&self) -> Option<String> {
        let mark = self.claim.labels().get(MARK)?;
        Some(format!("{}/{mark}", self.uid()?))
    }

    /// It is marked, and its data stays if it is deleted.
    fn is_kept(&self) -> bool {
        let live = &self.volume.live;
        let mark = self.mark();
        live.policy() == "Retain"
            && live.policy_before_quarantine().is_some()
            && mark.is_some()
            && live.quarantined_from() == mark.as_deref()
    }

    /// The policy of its PersistentVolume is to be restored, once it has no mark.
    fn has_policy_before(&self) -> bool {
        let from = self.volume.live.quarantined_from();
        let uid = from.and_then(|from| Some(from.split_once('/')?.0));
        uid.is_some() && uid == self.uid()
    }

    fn policy_before(&self) -> &str {
        let live = &self.volume.live;
        let before = live.policy_before_quarantine();
        let before = before.filter(|_| self.has_policy_before());
        before.unwrap_or(live.policy())
    }

    /// Something has been done about it that is completed or undone.
    fn has_begun(&self) -> bool {
        self.mark().is_some() || self.has_policy_before()
    }

    /// Why it is not deleted, if that follows from itself.
    fn check(&self, seen: &Seen) -> Result<String, String> {
        let Volume { live, node, .. } = self.volume;
        let name = self.name();
        match &self.on_node_lost {
            OnNodeLost::Recreate => {}
            OnNodeLost::Keep => {
                return Err(format!(
                    "claim {name} of the same pod is on node {node} too, and neither it nor its class has onNodeLost: recreate"
                ));
            }
            OnNodeLost::Unknown(value) => {
                return Err(format!(
                    "the annotation {ON_NODE_LOST} of claim {name} is {value:?}; valid are {RECREATE} and {KEEP}"
                ));
            }
        }
        let why = self.volume.loss.clone()?;
        if is_leaving(self.claim) {
            return Err(format!("claim {name} is being deleted"));
        }
        if let Some(other) = seen.moving.get(name) {
            return Err(format!("VolumeMove {other} moves the volume"));
        }
        let refuse = |what: &str| Err(format!("PersistentVolume {} {what}", live.name()));
        if live.handle(&seen.driver).is_none() {
            return refuse("is of another driver");
        }
        if live.is_leaving() || live.policy_before().is_some() {
            return refuse("is being deleted or exchanged");
        }
        let bound = live.bound().map(|bound| bound.uid);
        if live.phase() != "Bound" || self.uid().is_none() || bound.as_deref() != self.uid() {
            return refuse(&format!("is not bound to claim {name}"));
        }
        Ok(why)
    }
}

fn on_node_lost(claim: &PersistentVolumeClaim, classes: &BTreeSet<String>) -> OnNodeLost {
    match claim.annotations().get(ON_NODE_LOST).map(String::as_str) {
        Some(RECREATE) => return OnNodeLost::Recreate,
        Some(KEEP) => return OnNodeLost::Keep,
        Some(other) => return OnNodeLost::Unknown(other.into()),
        None => {}
    }
    let class = class_of(claim);
    match class.is_some_and(|class| classes.contains(class)) {
        true => OnNodeLost::Recreate,
        false => OnNodeLost::Keep,
    }
}

fn candidates(seen: &Seen) -> Vec<Candidate<'_>> {
    let each = seen.claims.iter().filter_map(|claim| {
        let volume = seen.volumes.get(volume_of(claim)?)?;
        // One of an ephemeral volume is deleted with its pod.
        let mut owners = claim.owner_references().iter();
        let is_of_pod = owners.any(|owner| owner.kind == "Pod");
        (!is_of_pod).then(|| Candidate {
            claim,
            volume,
            on_node_lost: on_node_lost(claim, &seen.classes),
        })
    });
    each.collect()
}

/// Decides what is done in a namespace.
pub(super) fn decide(seen: &Seen) -> Plan {
    let candidates = candidates(seen);
    let mut plan = Plan::default();
    let mut of_sets = BTreeMap::<String, Replicas<'_>>::new();
    for candidate in &candidates {
        match owner(seen, candidate.name()) {
            Ok((set, ordinal)) => {
                let replicas = of_sets.entry(set.name_any());
                let replicas = replicas.or_insert_with(|| Replicas::new(seen, set));
                replicas.add(ordinal, candidate);
            }
            Err(why) => plan.stay(candidate, &why),
        }
    }
    for replicas in of_sets.values() {
        of_set(seen, replicas, &mut plan);
    }
    plan
}

/// Decides about the claims of a StatefulSet: at most one replica at a time.
fn of_set(seen: &Seen, replicas: &Replicas<'_>, plan: &mut Plan) {
    let has_begun = |its: &[&Candidate<'_>]| its.iter().any(|one| one.has_begun());
    let mut one = replicas
        .lost
        .iter()
        .find_map(|(ordinal, its)| has_begun(its).then_some(*ordinal));
    for (&ordinal, its) in &replicas.lost {
        if is_committed(seen, replicas, ordinal, its) {
            one = Some(ordinal);
            let rest = its.iter().filter(|one| one.is_kept());
            let rest = rest.filter(|one| !is_leaving(one.claim));
            plan.changes.extend(rest.map(|one| one.delete(None)));
            plan.changes
                .extend(replicas.pod_to_be_deleted(ordinal, its));
            continue;
        }
        let checked = match one {
            Some(other) if other != ordinal => Err(format!(
                "pod {} is created again first",
                replicas.pod_name(other)
            )),
            _ => replicas.check(seen, ordinal, its),
        };
        match checked {
            Ok(why) => {
                one = Some(ordinal);
                plan.advance(replicas, ordinal, its, &why);
            }
            Err(why) => its.iter().for_each(|one| plan.stay(one, &why)),
        }
    }
}

/// Whether a claim of the replica was deleted already, so that the others follow whatever has changed.
/// Nothing is begun before all claims of a replica are bound.
fn is_committed(
    seen: &Seen,
    replicas: &Replicas<'_>,
    ordinal: u32,
    its: &[&Candidate<'_>],
) -> bool {
    its.iter().any(|one| one.is_kept()) && !replicas.has_all_claims(seen, ordinal)
}

impl Candidate<'_> {
    fn delete(&self, pool: Option<PoolId>) -> Change {
        Change::DeleteClaim {
            claim: self.claim.clone(),
            pool,
        }
    }
}

impl Plan {
    /// The next step of the claims of a replica.
    fn advance(
        &mut self,
        replicas: &Replicas<'_>,
        ordinal: u32,
        its: &[&Candidate<'_>],
        why: &str,
    ) {
        let unmarked = its.iter().filter(|one| one.mark().is_none());
        let unmarked = unmarked.map(|one| Change::Mark {
            claim: one.claim.clone(),
            volume: (one.volume.live.name().into(), one.volume.pool),
            why: why.into(),
        });
        let unkept = its.iter().filter(|one| !one.is_kept());
        let unkept = unkept.map(|one| Change::Retain {
            live: one.volume.live.clone(),
            from: one.mark().unwrap_or_default(),
            before: one.policy_before().into(),
        });
        let steps: [Vec<Change>; 2] = [unmarked.collect(), unkept.collect()];
        match steps.into_iter().find(|step| !step.is_empty()) {
            Some(step) => self.changes.extend(step),
            None => {
                let deleted = its.iter().map(|one| one.delete(Some(one.volume.pool)));
                self.changes.extend(deleted);
                self.changes
                    .extend(replicas.pod_to_be_deleted(ordinal, its));
            }
        }
    }

    /// A claim is not deleted, for this reason. What was begun is undone.
    fn stay(&mut self, one: &Candidate<'_>, why: &str) {
        if !is_leaving(one.claim) {
            if one.mark().is_some() {
                self.changes.push(Change::Unmark(one.claim.clone()));
            } else if one.has_policy_before() {
                let live = one.volume.live.clone();
                self.changes.push(Change::Restore(live));
            }
        }
        if one.on_node_lost != OnNodeLost::Keep {
            self.waiting.push((one.name().into(), why.into()));
        }
    }
}

#[cfg(test)]
mod tests;
