//! The replicas of a StatefulSet: which of them are Ready, and which have claims of a lost node.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use ::kube::ResourceExt;
use k8s_openapi::api::apps::v1::StatefulSet;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use k8s_openapi::jiff::SignedDuration;

use super::{Candidate, Change, OnNodeLost, Seen, is_leaving, volume_of};
use crate::router::kube::placement::pod_claims::claims_of;

/// A StatefulSet with claims of lost nodes.
pub(super) struct Replicas<'a> {
    set: &'a StatefulSet,
    /// Its pods, by ordinal.
    pods: BTreeMap<u32, &'a Pod>,
    /// The replicas that have been Ready for long enough.
    ready: BTreeSet<u32>,
    /// The claims of replicas whose node may be lost, by ordinal.
    pub(super) lost: BTreeMap<u32, Vec<&'a Candidate<'a>>>,
}

/// An ordinal as Kubernetes writes it.
fn parse(text: &str) -> Option<u32> {
    let ordinal = text.parse::<u32>().ok()?;
    (ordinal.to_string() == text).then_some(ordinal)
}

/// The names of the templates of a StatefulSet's claims.
fn templates(set: &StatefulSet) -> impl Iterator<Item = String> + '_ {
    let templates = set.spec.iter();
    let templates = templates.flat_map(|spec| spec.volume_claim_templates.iter().flatten());
    templates.map(ResourceExt::name_any)
}

/// The StatefulSet that creates a claim with this name, and the ordinal of its replica.
pub(super) fn owner<'a>(seen: &'a Seen, claim: &str) -> Result<(&'a StatefulSet, u32), String> {
    let each = seen.sets.iter().flat_map(|set| {
        let name = set.name_any();
        let ordinals = templates(set).filter_map(move |template| {
            let rest = claim.strip_prefix(&template)?.strip_prefix('-')?;
            parse(rest.strip_prefix(&name)?.strip_prefix('-')?)
        });
        ordinals.map(move |ordinal| (set, ordinal))
    });
    let mut each = each;
    match (each.next(), each.next()) {
        (Some(found), None) => Ok(found),
        (None, _) => Err(
            "no StatefulSet has it as a claim of its volumeClaimTemplates, so that nothing would create it again"
                .into(),
        ),
        (Some(_), Some(_)) => Err("several StatefulSets would create a claim of this name".into()),
    }
}

fn range(set: &StatefulSet) -> Range<u32> {
    let spec = set.spec.as_ref();
    let start = spec.and_then(|spec| spec.ordinals.as_ref()?.start);
    let replicas = spec.and_then(|spec| spec.replicas);
    let start = u32::try_from(start.unwrap_or(0)).unwrap_or(0);
    // The default of the API server is 1.
    let replicas = u32::try_from(replicas.unwrap_or(1)).unwrap_or(0);
    start..start.saturating_add(replicas)
}

fn is_controller(owner: &OwnerReference, set: &StatefulSet) -> bool {
    owner.controller == Some(true) && Some(&owner.uid) == set.metadata.uid.as_ref()
}

/// A duration such as "300 s".
fn in_seconds(time: SignedDuration) -> String {
    format!("{} s", time.as_secs())
}

/// Whether a pod has been Ready for long enough, on a node that is. The time of the kubelet's clock is
/// compared, and that of the API server too, in case the former is wrong.
fn is_ready(seen: &Seen, pod: &Pod) -> bool {
    let status = pod.status.as_ref();
    let conditions = status.iter().flat_map(|status| &status.conditions);
    let mut conditions = conditions.flatten();
    let ready = conditions.find(|one| one.type_ == "Ready" && one.status == "True");
    let since = ready.and_then(|ready| ready.last_transition_time.as_ref());
    let is_old = |at: &k8s_openapi::apimachinery::pkg::apis::meta::v1::Time| {
        seen.now.duration_since(at.0) >= seen.ready_for
    };
    let created = pod.metadata.creation_timestamp.as_ref();
    let node = pod.spec.as_ref().and_then(|spec| spec.node_name.as_ref());
    pod.metadata.deletion_timestamp.is_none()
        && since.is_some_and(is_old)
        && created.is_some_and(is_old)
        && node.is_some_and(|node| seen.nodes.contains(node))
}

impl<'a> Replicas<'a> {
    pub(super) fn new(seen: &'a Seen, set: &'a StatefulSet) -> Replicas<'a> {
        let prefix = format!("{}-", set.name_any());
        let range = range(set);
        let own = seen.pods.iter().filter_map(|pod| {
            let mut owners = pod.owner_references().iter();
            let name = pod.metadata.name.as_ref()?;
            let ordinal = parse(name.strip_prefix(&prefix)?)?;
            let is_own = owners.any(|owner| is_controller(owner, set)) && range.contains(&ordinal);
            is_own.then_some((ordinal, pod))
        });
        let pods: BTreeMap<u32, &Pod> = own.collect();
        let ready = pods.iter().filter(|(_, pod)| is_ready(seen, pod));
        Replicas {
            set,
            ready: ready.map(|(ordinal, _)| *ordinal).collect(),
            pods,
            lost: BTreeMap::new(),
        }
    }

    pub(super) fn add(&mut self, ordinal: u32, candidate: &'a Candidate<'a>) {
        self.lost.entry(ordinal).or_default().push(candidate);
    }

    pub(super) fn pod_name(&self, ordinal: u32) -> String {
        format!("{}-{ordinal}", self.set.name_any())
    }

    fn claims(&self, ordinal: u32) -> Vec<String> {
        let pod = self.pod_name(ordinal);
        let claims = templates(self.set).map(|template| format!("{template}-{pod}"));
        claims.collect()
    }

    /// The first claim of a replica that does not exist, is being deleted, or is not bound.
    fn find_unbound(&self, seen: &Seen, ordinal: u32) -> Option<String> {
        self.claims(ordinal).into_iter().find(|name| {
            let claim = seen.claims.iter().find(|one| one.name_any() == *name);
            claim.is_none_or(|claim| is_leaving(claim) || volume_of(claim).is_none())
        })
    }

    pub(super) fn has_all_claims(&self, seen: &Seen, ordinal: u32) -> bool {
        self.find_unbound(seen, ordinal).is_none()
    }

    /// The pod of a replica, if it uses these claims and is not being deleted.
    pub(super) fn pod_to_be_deleted(&self, ordinal: u32, its: &[&Candidate<'_>]) -> Option<Change> {
        let pod = *self.pods.get(&ordinal)?;
        let is_new = pod.metadata.deletion_timestamp.is_none();
        let used = claims_of(pod);
        let mut names = its.iter().map(|one| one.name());
        let uses = names.any(|name| used.iter().any(|one| one == name));
        (is_new && uses).then(|| Change::DeletePod {
            name: pod.name_any(),
            uid: pod.metadata.uid.clone().unwrap_or_default(),
        })
    }

    /// Why the claims of a replica are deleted, or what is missing for that.
    pub(super) fn check(
        &self,
        seen: &Seen,
        ordinal: u32,
        its: &[&Candidate<'_>],
    ) -> Result<String, String> {
        let mut why = String::new();
        // Those that request it come first, because their reasons are the ones to be shown.
        let (keep, wanted): (Vec<_>, Vec<_>) = its
            .iter()
            .copied()
            .partition(|one| one.on_node_lost == OnNodeLost::Keep);
        for one in wanted.into_iter().chain(keep) {
            why = one.check(seen)?;
        }
        let (set, range) = (self.set.name_any(), range(self.set));
        if self.set.metadata.deletion_timestamp.is_some() {
            return Err(format!("StatefulSet {set} is being deleted"));
        }
        let replicas = range.len();
        if !range.contains(&ordinal) {
            return Err(format!(
                "it is not of one of the {replicas} replicas of StatefulSet {set}, so that nothing would create it again"
            ));
        }
        if let Some(claim) = self.find_unbound(seen, ordinal) {
            return Err(format!("claim {claim} of the same pod is not bound"));
        }
        let own = self.pod_name(ordinal);
        let names = self.claims(ordinal);
        for pod in &seen.pods {
            let is_own = self
                .pods
                .get(&ordinal)
                .is_some_and(|its| its.metadata.uid == pod.metadata.uid);
            if !is_own && claims_of(pod).iter().any(|name| names.contains(name)) {
                return Err(format!(
                    "pod {} uses it, which is not pod {own} of StatefulSet {set}",
                    pod.name_any()
                ));
            }
        }
        self.check_others(seen, ordinal, range)?;
        Ok(why)
    }

    /// Whether the other replicas can do without this one, and none of them is being rebuilt.
    fn check_others(&self, seen: &Seen, ordinal: u32, range: Range<u32>) -> Result<(), String> {
        let set = self.set.name_any();
        let replicas = range.len();
        let ready = self.ready.iter().filter(|one| **one != ordinal).count();
        let long = in_seconds(seen.ready_for);
        if ready * 2 <= replicas {
            return Err(format!(
                "only {ready} of the {replicas} replicas of StatefulSet {set} have been Ready for {long} on nodes that are Ready, and that is not more than half"
            ));
        }
        let is_lost = |other: &u32| {
            let its = self.lost.get(other).into_iter().flatten();
            let mut its = its;
            its.any(|one| one.volume.loss.is_ok() && !one.has_begun())
        };
        let mut others = range.filter(|other| *other != ordinal && !self.ready.contains(other));
        match others.find(|other| !is_lost(other)) {
            Some(other) => Err(format!(
                "pod {} of StatefulSet {set} has not been Ready for {long}, and one replica is created again at a time",
                self.pod_name(other)
            )),
            None => Ok(()),
        }
    }
}
