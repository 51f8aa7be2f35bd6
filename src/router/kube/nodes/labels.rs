//! The topology label of Node objects as a controller: it becomes the home that the node's agent
//! reports.
//!
//! The kubelet writes the label when a driver registers, and refuses a driver whose value differs
//! from the label that is there: then nothing is mounted or unmounted on that node. Nothing in
//! Kubernetes removes an outdated label. So this controller overwrites it where no PersistentVolume
//! can still need the old value.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use ::kube::api::Api;
use ::kube::core::PartialObjectMeta;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::jiff::Timestamp;
use serde_json::json;

use crate::error::Result;
use crate::router::cluster::{Cluster, ObjectRef};
use crate::router::kube::pools::status::Report;
use crate::router::kube::reconcile::{Controller, Next, Outcome, Reconciler, patch};
use crate::router::kube::{InCluster, ask, topology_key};

/// A Node object whose label differs from the home that its agent reports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mislabeled {
    /// Its name.
    pub node: String,
    /// The label.
    pub old: String,
    /// The home that its agent reports, and no other agent does.
    pub new: String,
    /// How many PersistentVolumes may only be used at the old home.
    pub volumes: usize,
    /// The agent of one other node reports the old home, so these volumes are there.
    pub is_elsewhere: bool,
}

impl fmt::Display for Mislabeled {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "node {}", self.node)
    }
}

/// All Node objects whose label is wrong. `nodes` has the label of each Node object; `volumes_at`
/// counts the PersistentVolumes that may only be used at a home. A home that two agents report is no
/// reason for any change, and neither is an agent that cannot be reached and is silent since
/// `silent_since`.
pub fn mislabeled(
    reports: &[Report],
    nodes: &BTreeMap<String, Option<String>>,
    volumes_at: impl Fn(&str) -> usize,
    silent_since: Timestamp,
) -> Vec<Mislabeled> {
    let homes: BTreeMap<&str, &str> = reports
        .iter()
        .filter_map(|report| Some((report.node.as_str(), report.home(silent_since)?)))
        .collect();
    let mut duplicate = BTreeSet::new();
    let mut once = BTreeSet::new();
    for home in homes.values() {
        if !once.insert(*home) {
            duplicate.insert(*home);
        }
    }
    let is_elsewhere = |home: &str, node: &str| {
        let mut others = homes.iter();
        !duplicate.contains(home) && others.any(|(other, its)| *its == home && *other != node)
    };
    let each = nodes.iter().filter_map(|(node, label)| {
        let old = label.as_deref()?;
        let new = *homes.get(node.as_str())?;
        (old != new && !duplicate.contains(new)).then(|| Mislabeled {
            node: node.clone(),
            old: old.into(),
            new: new.into(),
            volumes: volumes_at(old),
            is_elsewhere: is_elsewhere(old, node),
        })
    });
    each.collect()
}

/// The step that overwrites the label.
#[derive(Debug, PartialEq, Eq)]
pub(in crate::router::kube) struct Overwrite;

/// Maintains the label.
pub(in crate::router::kube) struct LabelController(pub(in crate::router::kube) Arc<InCluster>);

#[tonic::async_trait]
impl Controller for LabelController {
    const NAME: &'static str = "labels";

    async fn list(&self, _leads_since: Timestamp) -> Option<Vec<Mislabeled>> {
        let cluster = &self.0;
        if !cluster.has_read_objects() {
            return None;
        }
        let volumes_at = |home: &str| cluster.volumes.at_home(home);
        let (reports, nodes) = (cluster.agents.reports(), cluster.node_labels());
        let silent_since = Timestamp::now() - cluster.options.unreachable_after;
        let found = mislabeled(&reports, &nodes, volumes_at, silent_since);
        let is_refused = |node: &&Mislabeled| matches!(Self::next(node), Next::Refused(_));
        let conflicts = found.iter().filter(is_refused).count();
        cluster.conflicts.store(conflicts as u64, Ordering::Relaxed);
        Some(found)
    }

    async fn refuse(&self, node: &Mislabeled, why: String) -> Result<()> {
        let about = ObjectRef::Node(node.node.clone());
        self.0.record_event(&about, true, "HomeConflict", why);
        Ok(())
    }

    /// Only the leader counts conflicts, so that the metrics of two routers do not add up.
    fn reset(&self) {
        self.0.conflicts.store(0, Ordering::Relaxed);
    }
}

#[tonic::async_trait]
impl Reconciler for LabelController {
    type Object = Mislabeled;
    type Step = Overwrite;

    fn next(node: &Mislabeled) -> Next<Overwrite> {
        let Mislabeled {
            old, new, volumes, ..
        } = node;
        if *volumes == 0 || node.is_elsewhere {
            return Next::Step(Overwrite);
        }
        Next::Refused(format!(
            "this node is labeled with home {old}, but its disks have home {new}; {volumes} PersistentVolumes use {old}, so the label is not changed, and the kubelet rejects the driver. Bring the disks of {old} back, or mark their pools as lost and delete those PersistentVolumes"
        ))
    }

    async fn execute(&self, object: &Mislabeled, _: Overwrite) -> Result<Outcome> {
        let Mislabeled { node, old, new, .. } = object;
        let key = topology_key(&self.0.options.driver);
        let api = Api::<PartialObjectMeta<Node>>::all(self.0.client.clone());
        let what = object.to_string();
        let Some(now) = ask(&what, api.get_opt(node)).await? else {
            return Ok(Outcome::Stale);
        };
        let now = now.metadata;
        if now.labels.as_ref().and_then(|labels| labels.get(&key)) != Some(old) {
            return Ok(Outcome::Stale);
        }
        // Only over the version that was read.
        let fields = json!({ "metadata": {
            "resourceVersion": now.resource_version,
            "labels": { &key: new },
        }});
        if patch(&api, &what, node, fields).await? == Outcome::Stale {
            return Ok(Outcome::Stale);
        }
        let message = format!(
            "label {key} was changed from {old}, which no PersistentVolume of this node uses any more, to {new}, the home of the node's disks"
        );
        tracing::info!(node, old, new, "updated the label of a node");
        let about = ObjectRef::Node(node.clone());
        self.0
            .record_event(&about, false, "HomeRelabelled", message);
        Ok(Outcome::Done)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::agent::DescribeResponse;
    use std::sync::Arc;

    fn report(node: &str, home: &str) -> Report {
        let answer = DescribeResponse {
            node_name: node.into(),
            home: home.into(),
            ..DescribeResponse::default()
        };
        Report {
            node: node.into(),
            seen: Some((Timestamp::now(), Arc::new(answer))),
            problem: None,
            is_refused: false,
        }
    }

    /// Reports and labels as ("node", "home"), homes of PersistentVolumes.
    fn decided(reports: &[(&str, &str)], labels: &[(&str, &str)], used: &[&str]) -> Vec<String> {
        let reports: Vec<_> = reports
            .iter()
            .map(|(node, home)| report(node, home))
            .collect();
        let label = |text: &str| Some(text.to_string()).filter(|text| !text.is_empty());
        let nodes = labels
            .iter()
            .map(|(node, home)| (node.to_string(), label(home)))
            .collect();
        let at = |home: &str| used.iter().filter(|its| **its == home).count();
        let found = mislabeled(&reports, &nodes, at, Timestamp::now());
        let texts = found.iter().map(|node| match LabelController::next(node) {
            Next::Step(Overwrite) => format!("{}: {} -> {}", node.node, node.old, node.new),
            Next::Refused(why) => {
                assert!(why.contains("PersistentVolumes use"), "{why}");
                format!("{}: conflict", node.node)
            }
            Next::Wait | Next::Done => panic!("{node}"),
        });
        texts.collect()
    }

    #[test]
    fn a_label_is_mended_only_where_nothing_means_the_old_value() {
        let none: [String; 0] = [];
        // The label is right; there is no label yet, because the kubelet writes it; no agent
        // answers.
        assert_eq!(decided(&[("a", "1")], &[("a", "1")], &["1"]), none);
        assert_eq!(decided(&[("a", "1")], &[("a", "")], &[]), none);
        assert_eq!(decided(&[], &[("a", "1")], &[]), none);
        assert_eq!(decided(&[("a", "")], &[("a", "1")], &[]), none);
        assert_eq!(decided(&[("gone", "1")], &[("a", "1")], &[]), none);
        // A node with new disks and an old name.
        assert_eq!(decided(&[("a", "2")], &[("a", "1")], &["2"]), ["a: 1 -> 2"]);
        assert_eq!(
            decided(&[("a", "2")], &[("a", "1")], &["1"]),
            ["a: conflict"]
        );
    }

    #[test]
    fn disks_that_are_seen_elsewhere_take_their_volumes_along() {
        let moved = [("a", "2"), ("b", "1")];
        let labels = [("a", "1"), ("b", "1")];
        assert_eq!(decided(&moved, &labels, &["1", "1"]), ["a: 1 -> 2"]);
        // Two nodes have swapped their disks.
        let swapped = [("a", "1"), ("b", "2")];
        assert_eq!(
            decided(&moved, &swapped, &["1", "2"]),
            ["a: 1 -> 2", "b: 2 -> 1"]
        );
        // Two agents report the same home, which is no reason for a change.
        let both = [("a", "1"), ("b", "1"), ("c", "3")];
        let labels = [("a", "4"), ("b", "1"), ("c", "1")];
        assert_eq!(decided(&both, &labels, &["1"]), ["c: conflict"]);
    }

    #[test]
    fn an_agent_that_went_silent_changes_nothing() {
        let mut gone = report("a", "2");
        let long_ago = Timestamp::from_second(1_700_000_000).unwrap();
        gone.seen = gone.seen.map(|(_, answer)| (long_ago, answer));
        gone.problem = Some("no route".into());
        let nodes = [("a".to_string(), Some("1".to_string()))].into();
        assert_eq!(mislabeled(&[gone], &nodes, |_| 0, Timestamp::now()), []);
    }
}
