//! Whether a pod that waits for its volumes could run on a node. A pure function of API objects.
//!
//! It answers "yes" only if the scheduler would. What it does not evaluate counts as "no": then the
//! volumes are created on the node for which the scheduler has evaluated everything.

pub(in crate::router) mod peers;

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{
    Container, Node, NodeSelectorRequirement, NodeSelectorTerm, PersistentVolume, Pod,
    PodAffinityTerm, PodSpec, Taint, Toleration,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;

use super::Fit;
use super::quantity::thousandths;
use peers::Peers;

/// Resources by name, in thousandths.
type Amounts = BTreeMap<String, i128>;
type Labels = BTreeMap<String, String>;

/// Whether the pod could run on the node. `volumes` are those to which claims of the pod are bound,
/// and `here` are the pods that are on the node now. Without the other pods of the cluster, `peers`,
/// conditions about them count as not satisfied.
pub(in crate::router) fn fits(
    pod: &Pod,
    volumes: &[PersistentVolume],
    node: &Node,
    (here, peers): (&[Pod], Option<&Peers>),
) -> Fit {
    let spec = pod.spec.as_ref().ok_or("the pod has no specification")?;
    let name = node.metadata.name.as_deref().unwrap_or_default();
    if spec.node_name.as_deref().is_some_and(|its| its != name) {
        return Err("the pod is on another node already".into());
    }
    accepts(node, name)?;
    tolerates(spec, node, name)?;
    selects(spec, volumes, node, name)?;
    match peers {
        Some(peers) => peers.allow(pod, spec, node)?,
        None => depends_on_no_others(spec)?,
    }
    check_claims_evaluated(spec)?;
    let repels = |other: &&Pod| is_running(other) && repels(other, pod);
    if let Some(other) = here.iter().find(repels) {
        let other = other.metadata.name.as_deref().unwrap_or_default();
        return Err(format!(
            "pod {other} on node {name} does not allow the pod beside it"
        ));
    }
    check_resources(spec, node, name, here)
}

/// The node is Ready and not cordoned.
pub(in crate::router) fn accepts(node: &Node, name: &str) -> Fit {
    let conditions = node.status.iter().flat_map(|status| &status.conditions);
    let mut conditions = conditions.flatten();
    if !conditions.any(|one| one.type_ == "Ready" && one.status == "True") {
        return Err(format!("node {name} is not Ready"));
    }
    let spec = node.spec.as_ref();
    if spec.and_then(|spec| spec.unschedulable) == Some(true) {
        return Err(format!("node {name} is cordoned"));
    }
    Ok(())
}

fn tolerates(spec: &PodSpec, node: &Node, name: &str) -> Fit {
    let taints = node.spec.iter().flat_map(|spec| &spec.taints).flatten();
    let mut taints = taints.filter(|taint| taint.effect != "PreferNoSchedule");
    let tolerations = || spec.tolerations.iter().flatten();
    match taints.find(|taint| !tolerations().any(|one| is_tolerated(taint, one))) {
        Some(taint) => {
            let key = &taint.key;
            Err(format!(
                "the pod does not tolerate the taint {key} of node {name}"
            ))
        }
        None => Ok(()),
    }
}

pub(in crate::router) fn is_tolerated(taint: &Taint, toleration: &Toleration) -> bool {
    let text = |value: &Option<String>| value.clone().unwrap_or_default();
    let (effect, key) = (text(&toleration.effect), text(&toleration.key));
    let is_meant = effect.is_empty() || effect == taint.effect;
    let is_same = match text(&toleration.operator).as_str() {
        "Exists" => key.is_empty() || key == taint.key,
        "" | "Equal" => key == taint.key && text(&toleration.value) == text(&taint.value),
        _ => false,
    };
    is_meant && is_same
}

/// The node is also matched by the volumes that the pod has already.
fn selects(spec: &PodSpec, volumes: &[PersistentVolume], node: &Node, name: &str) -> Fit {
    selects_itself(spec, node, name)?;
    let none = Labels::new();
    let labels = node.metadata.labels.as_ref().unwrap_or(&none);
    for volume in volumes {
        let matches =
            |terms: &[NodeSelectorTerm]| terms.iter().any(|term| meets(term, labels, name));
        let spec = volume.spec.as_ref();
        let affinity = spec.and_then(|spec| spec.node_affinity.as_ref());
        let required = affinity.and_then(|affinity| affinity.required.as_ref());
        if required.is_some_and(|required| !matches(&required.node_selector_terms)) {
            let volume = volume.metadata.name.as_deref().unwrap_or_default();
            return Err(format!(
                "PersistentVolume {volume} cannot be used on node {name}"
            ));
        }
    }
    Ok(())
}

/// The node is matched by the pod's node selector and required node affinity.
fn selects_itself(spec: &PodSpec, node: &Node, name: &str) -> Fit {
    let none = Labels::new();
    let labels = node.metadata.labels.as_ref().unwrap_or(&none);
    let mut selector = spec.node_selector.iter().flatten();
    if !selector.all(|(key, value)| labels.get(key) == Some(value)) {
        return Err(format!(
            "node {name} is not matched by the pod's node selector"
        ));
    }
    let affinity = spec.affinity.as_ref();
    let affinity = affinity.and_then(|affinity| affinity.node_affinity.as_ref());
    let required = affinity.and_then(|affinity| {
        let required = &affinity.required_during_scheduling_ignored_during_execution;
        required.as_ref()
    });
    let matches = |terms: &[NodeSelectorTerm]| terms.iter().any(|term| meets(term, labels, name));
    if required.is_some_and(|required| !matches(&required.node_selector_terms)) {
        return Err(format!(
            "node {name} is not matched by the pod's required node affinity"
        ));
    }
    Ok(())
}

fn meets_own(spec: &PodSpec, node: &Node) -> bool {
    let name = node.metadata.name.as_deref().unwrap_or_default();
    selects_itself(spec, node, name).is_ok()
}

fn meets(term: &NodeSelectorTerm, labels: &Labels, node: &str) -> bool {
    let labels_asked = term.match_expressions.iter().flatten();
    let fields_asked = term.match_fields.iter().flatten();
    let is_empty = labels_asked.clone().next().is_none() && fields_asked.clone().next().is_none();
    let by_labels = |asked: &NodeSelectorRequirement| {
        let values = asked.values.as_deref().unwrap_or_default();
        holds(
            &asked.operator,
            labels.get(&asked.key).map(String::as_str),
            values,
        )
    };
    let by_fields = |asked: &NodeSelectorRequirement| {
        let values = asked.values.as_deref().unwrap_or_default();
        asked.key == "metadata.name" && holds(&asked.operator, Some(node), values)
    };
    !is_empty && labels_asked.clone().all(by_labels) && fields_asked.clone().all(by_fields)
}

/// Whether a value, `None` if there is none, satisfies an operator of a selector.
fn holds(operator: &str, value: Option<&str>, wanted: &[String]) -> bool {
    let is_wanted = value.is_some_and(|value| wanted.iter().any(|one| one == value));
    let compared = || {
        let wanted: i64 = wanted.first()?.parse().ok()?;
        Some(value?.parse::<i64>().ok()?.cmp(&wanted))
    };
    match operator {
        "In" => is_wanted,
        "NotIn" => !is_wanted,
        "Exists" => value.is_some(),
        "DoesNotExist" => value.is_none(),
        "Gt" => compared().is_some_and(std::cmp::Ordering::is_gt),
        "Lt" => compared().is_some_and(std::cmp::Ordering::is_lt),
        _ => false,
    }
}

/// The pod has no condition whose evaluation needs the other pods of the cluster.
pub(in crate::router) fn depends_on_no_others(spec: &PodSpec) -> Fit {
    if !affinity(spec).is_empty() {
        return Err("the pod has a required pod affinity".into());
    }
    if !anti_affinity(spec).is_empty() {
        return Err("the pod has a required pod anti-affinity".into());
    }
    let mut spread = spec.topology_spread_constraints.iter().flatten();
    if spread.any(|one| one.when_unsatisfiable == "DoNotSchedule") {
        return Err("the pod has a topology spread constraint with DoNotSchedule".into());
    }
    Ok(())
}

/// The pod has no condition whose evaluation needs objects that the router does not read.
fn check_claims_evaluated(spec: &PodSpec) -> Fit {
    let claims = spec.resource_claims.as_ref();
    if claims.is_some_and(|claims| !claims.is_empty()) {
        return Err("the pod has resource claims, which are not evaluated".into());
    }
    let init = spec.init_containers.iter().flatten();
    let ports = spec.containers.iter().chain(init);
    let mut ports = ports.flat_map(|one| one.ports.iter().flatten());
    if ports.any(|port| port.host_port.is_some_and(|port| port != 0)) {
        return Err("the pod has host ports, which are not evaluated".into());
    }
    Ok(())
}

fn affinity(spec: &PodSpec) -> &[PodAffinityTerm] {
    let affinity = spec.affinity.as_ref();
    let with = affinity.and_then(|affinity| affinity.pod_affinity.as_ref());
    let required = with.and_then(|with| {
        let required = &with.required_during_scheduling_ignored_during_execution;
        required.as_deref()
    });
    required.unwrap_or_default()
}

fn anti_affinity(spec: &PodSpec) -> &[PodAffinityTerm] {
    let affinity = spec.affinity.as_ref();
    let apart = affinity.and_then(|affinity| affinity.pod_anti_affinity.as_ref());
    let required = apart.and_then(|apart| {
        let required = &apart.required_during_scheduling_ignored_during_execution;
        required.as_deref()
    });
    required.unwrap_or_default()
}

/// Whether a pod has a required anti-affinity that may mean another one. Namespaces that are
/// selected by their labels count as meant.
fn repels(other: &Pod, pod: &Pod) -> bool {
    let Some(spec) = &other.spec else {
        return false;
    };
    let namespace = pod.metadata.namespace.as_ref();
    let none = Labels::new();
    let labels = pod.metadata.labels.as_ref().unwrap_or(&none);
    anti_affinity(spec).iter().any(|term| {
        let named = term.namespaces.as_deref().unwrap_or_default();
        let is_meant = match (named.is_empty(), &term.namespace_selector) {
            (_, Some(_)) => true,
            (true, None) => other.metadata.namespace.as_ref() == namespace,
            (false, None) => namespace.is_some_and(|namespace| named.contains(namespace)),
        };
        is_meant
            && term
                .label_selector
                .as_ref()
                .is_some_and(|one| has(one, labels))
    })
}

fn has(selector: &LabelSelector, labels: &Labels) -> bool {
    let mut equal = selector.match_labels.iter().flatten();
    let mut asked = selector.match_expressions.iter().flatten();
    equal.all(|(key, value)| labels.get(key) == Some(value))
        && asked.all(|asked| {
            let values = asked.values.as_deref().unwrap_or_default();
            holds(
                &asked.operator,
                labels.get(&asked.key).map(String::as_str),
                values,
            )
        })
}

/// Everything that the pod requests, CPU and memory and others, is free on the node.
fn check_resources(spec: &PodSpec, node: &Node, name: &str, here: &[Pod]) -> Fit {
    let asked = requests(spec)?;
    let allocatable = node
        .status
        .as_ref()
        .and_then(|status| status.allocatable.as_ref());
    let mut free = amounts(allocatable)?;
    for other in here.iter().filter(|other| is_running(other)) {
        if let Some(spec) = &other.spec {
            for (resource, amount) in requests(spec)? {
                *free.entry(resource).or_default() -= amount;
            }
        }
    }
    let is_short = |resource: &String, amount: i128| {
        amount > 0 && free.get(resource).copied().unwrap_or(0) < amount
    };
    match asked
        .iter()
        .find(|(resource, amount)| is_short(resource, **amount))
    {
        Some((resource, _)) => Err(format!("node {name} has too little {resource} for the pod")),
        None => Ok(()),
    }
}

/// The resources that a pod occupies until it has ended.
fn requests(spec: &PodSpec) -> Result<Amounts, String> {
    let of = |container: &Container| {
        let resources = container.resources.as_ref();
        amounts(resources.and_then(|resources| resources.requests.as_ref()))
    };
    // Init containers run one after the other, beside the sidecars that were started before them.
    let (mut sidecars, mut peak) = (Amounts::new(), Amounts::new());
    for container in spec.init_containers.iter().flatten() {
        let mut during = sidecars.clone();
        add(&mut during, &of(container)?);
        if container.restart_policy.as_deref() == Some("Always") {
            sidecars.clone_from(&during);
        }
        for (resource, amount) in during {
            let peak = peak.entry(resource).or_default();
            *peak = amount.max(*peak);
        }
    }
    let mut asked = sidecars;
    for container in &spec.containers {
        add(&mut asked, &of(container)?);
    }
    for (resource, amount) in peak {
        let asked = asked.entry(resource).or_default();
        *asked = amount.max(*asked);
    }
    let whole = spec.resources.as_ref();
    asked.extend(amounts(whole.and_then(|whole| whole.requests.as_ref()))?);
    add(&mut asked, &amounts(spec.overhead.as_ref())?);
    asked.insert("pods".into(), 1_000);
    Ok(asked)
}

fn add(sum: &mut Amounts, more: &Amounts) {
    for (resource, amount) in more {
        *sum.entry(resource.clone()).or_default() += amount;
    }
}

fn amounts(given: Option<&BTreeMap<String, Quantity>>) -> Result<Amounts, String> {
    let each = given.into_iter().flatten().map(|(resource, quantity)| {
        let amount = thousandths(quantity);
        let amount = amount.ok_or_else(|| format!("{:?} is not a quantity", quantity.0))?;
        Ok((resource.clone(), amount))
    });
    each.collect()
}

/// A pod that has ended occupies nothing.
fn is_running(pod: &Pod) -> bool {
    let phase = pod
        .status
        .as_ref()
        .and_then(|status| status.phase.as_deref());
    !matches!(phase, Some("Succeeded" | "Failed"))
}

#[cfg(test)]
mod tests;
