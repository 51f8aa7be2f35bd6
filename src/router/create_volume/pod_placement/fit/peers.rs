//! Conditions of a pod about the other pods of the cluster: required affinity and anti-affinity, in both
//! directions, and spread constraints with DoNotSchedule.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1::{Node, Pod, PodAffinityTerm, PodSpec, TopologySpreadConstraint};

use super::{Labels, affinity, anti_affinity, has, is_running, meets_own};
use crate::router::create_volume::pod_placement::Fit;

/// The other pods of a cluster, and its nodes.
#[derive(Clone, Debug, Default)]
pub(in crate::router) struct Peers {
    /// Each with the node on which it is, or will be. The pod that is examined is not among them.
    pub(in crate::router) pods: Vec<(Pod, String)>,
    pub(in crate::router) nodes: BTreeMap<String, Node>,
}

impl Peers {
    /// Whether the pod could be on the node beside them.
    pub(super) fn allow(&self, pod: &Pod, spec: &PodSpec, node: &Node) -> Fit {
        let view = View {
            peers: self,
            pod,
            spec,
            name: node.metadata.name.as_deref().unwrap_or_default(),
            labels: node.metadata.labels.clone().unwrap_or_default(),
        };
        view.check_not_repelled()?;
        let terms = affinity(spec);
        terms.iter().try_for_each(|term| view.attracts(term))?;
        let spread = spec.topology_spread_constraints.iter().flatten();
        let mut spread = spread.filter(|one| one.when_unsatisfiable == "DoNotSchedule");
        spread.try_for_each(|one| view.spreads(one))
    }

    /// The value of a label of a node.
    fn value(&self, node: &str, key: &str) -> Option<&String> {
        let labels = self.nodes.get(node)?.metadata.labels.as_ref()?;
        labels.get(key)
    }

    /// Pods that run, with their nodes.
    fn running(&self) -> impl Iterator<Item = (&Pod, &str)> {
        let all = self.pods.iter().filter(|(pod, _)| is_running(pod));
        all.map(|(pod, node)| (pod, node.as_str()))
    }
}

struct View<'a> {
    peers: &'a Peers,
    pod: &'a Pod,
    spec: &'a PodSpec,
    /// The node, and its labels.
    name: &'a str,
    labels: Labels,
}

impl View<'_> {
    /// The value of the node's label that names a domain.
    fn domain(&self, key: &str, of: &str) -> Result<&String, String> {
        let value = self.labels.get(key);
        value.ok_or_else(|| {
            format!(
                "node {} does not have the label {key}, which {of} of the pod names",
                self.name
            )
        })
    }

    /// A term of the pod, and one of another pod that means it.
    fn check_not_repelled(&self) -> Fit {
        for term in anti_affinity(self.spec) {
            check_evaluated(term)?;
            let Some(value) = self.labels.get(&term.topology_key) else {
                continue;
            };
            let mut beside = self.in_domain(&term.topology_key, value);
            if let Some((other, _)) = beside.find(|(other, _)| means(term, self.pod, other)) {
                return Err(self.not_beside("its required anti-affinity", other));
            }
        }
        for (other, node) in self.peers.running() {
            let terms = other.spec.as_ref().map(anti_affinity).unwrap_or_default();
            for term in terms.iter().filter(|term| means(term, other, self.pod)) {
                let key = &term.topology_key;
                if self.labels.contains_key(key)
                    && self.labels.get(key) == self.peers.value(node, key)
                {
                    return Err(self.not_beside("the other's required anti-affinity", other));
                }
            }
        }
        Ok(())
    }

    fn not_beside(&self, why: &str, other: &Pod) -> String {
        let other = other.metadata.name.as_deref().unwrap_or_default();
        format!(
            "the pod cannot be on node {} beside pod {other}: {why}",
            self.name
        )
    }

    /// Whether a term of the required affinity is satisfied. The first pod of a group, which means
    /// itself, may be anywhere.
    fn attracts(&self, term: &PodAffinityTerm) -> Fit {
        check_evaluated(term)?;
        let value = self.domain(&term.topology_key, "the required affinity")?;
        let meant = |other: &Pod| means(term, self.pod, other);
        if self
            .in_domain(&term.topology_key, value)
            .any(|(other, _)| meant(other))
        {
            return Ok(());
        }
        let is_first = !self.peers.running().any(|(other, _)| meant(other)) && meant(self.pod);
        match is_first {
            true => Ok(()),
            false => Err(format!(
                "no pod that the required affinity of the pod names is at {}={value}",
                term.topology_key
            )),
        }
    }

    fn in_domain<'a>(
        &'a self,
        key: &'a str,
        value: &'a String,
    ) -> impl Iterator<Item = (&'a Pod, &'a str)> {
        let is_there = move |node: &str| self.peers.value(node, key) == Some(value);
        self.peers.running().filter(move |(_, node)| is_there(node))
    }

    /// Whether the domains of a constraint are not more unequal with the pod than it allows.
    fn spreads(&self, constraint: &TopologySpreadConstraint) -> Fit {
        let key = &constraint.topology_key;
        let value = self.domain(key, "a topology spread constraint")?;
        if constraint.node_taints_policy.as_deref() == Some("Honor") {
            return Err("the pod has a topology spread constraint with nodeTaintsPolicy, which is not evaluated".into());
        }
        let honors = constraint.node_affinity_policy.as_deref() != Some("Ignore");
        let counts = |node: &Node| !honors || meets_own(self.spec, node);
        let eligible = self.peers.nodes.iter().filter(|(_, node)| counts(node));
        let eligible: BTreeSet<&str> = eligible.map(|(name, _)| name.as_str()).collect();
        let each = eligible
            .iter()
            .filter_map(|node| self.peers.value(node, key));
        let mut domains: BTreeMap<&String, i64> = each.map(|value| (value, 0)).collect();
        for (other, node) in self.peers.running() {
            let is_leaving = other.metadata.deletion_timestamp.is_some();
            let is_own = other.metadata.namespace == self.pod.metadata.namespace;
            if is_leaving || !is_own || !eligible.contains(node) || !self.counted(constraint, other)
            {
                continue;
            }
            if let Some(count) = self
                .peers
                .value(node, key)
                .and_then(|value| domains.get_mut(value))
            {
                *count += 1;
            }
        }
        let few = constraint
            .min_domains
            .is_some_and(|least| (domains.len() as i64) < i64::from(least));
        let least = if few {
            0
        } else {
            domains.values().copied().min().unwrap_or(0)
        };
        let own = i64::from(self.counted(constraint, self.pod));
        let skew = domains.get(value).copied().unwrap_or(0) + own - least;
        match skew <= i64::from(constraint.max_skew) {
            true => Ok(()),
            false => Err(format!(
                "with the pod at {key}={value}, a topology spread constraint of it would have a skew of {skew}"
            )),
        }
    }

    fn counted(&self, constraint: &TopologySpreadConstraint, other: &Pod) -> bool {
        let none = Labels::new();
        let [own, its] = [self.pod, other].map(|pod| pod.metadata.labels.as_ref().unwrap_or(&none));
        let mut keys = constraint.match_label_keys.iter().flatten();
        let selector = constraint.label_selector.as_ref();
        selector.is_some_and(|selector| has(selector, its))
            && keys.all(|key| own.get(key).is_none_or(|value| its.get(key) == Some(value)))
    }
}

/// Terms that depend on labels of namespaces, or on labels that are not in their selector.
fn check_evaluated(term: &PodAffinityTerm) -> Fit {
    let by_labels = term.namespace_selector.as_ref().is_some_and(|selector| {
        let labels = selector.match_labels.iter().flatten().count();
        labels + selector.match_expressions.iter().flatten().count() > 0
    });
    let keys = [&term.match_label_keys, &term.mismatch_label_keys];
    let has_keys = keys.into_iter().flatten().any(|keys| !keys.is_empty());
    match by_labels || has_keys {
        true => Err("the pod has a required pod affinity with a namespaceSelector, matchLabelKeys or mismatchLabelKeys, which is not evaluated".into()),
        false => Ok(()),
    }
}

/// Whether a term of `whose` means another pod.
fn means(term: &PodAffinityTerm, whose: &Pod, other: &Pod) -> bool {
    let named = term.namespaces.as_deref().unwrap_or_default();
    let namespace = other.metadata.namespace.as_ref();
    let is_there = match (&term.namespace_selector, named.is_empty()) {
        // An empty one selects all. One of the pod that selects by labels was refused, and one of
        // another pod counts as if it selected all.
        (Some(_), _) => true,
        (None, true) => whose.metadata.namespace.as_ref() == namespace,
        (None, false) => namespace.is_some_and(|namespace| named.contains(namespace)),
    };
    let none = Labels::new();
    let labels = other.metadata.labels.as_ref().unwrap_or(&none);
    let selector = term.label_selector.as_ref();
    is_there && selector.is_some_and(|selector| has(selector, labels))
}

#[cfg(test)]
mod tests;
