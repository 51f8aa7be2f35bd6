//! The home of a node, as its Node object has it.
//!
//! The kubelet writes the label when a driver registers, and refuses one whose value differs from
//! what is there: then nothing is mounted or unmounted on that node. Nobody takes away what is
//! stale; so this does, where nothing can still mean the old value.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::jiff::Timestamp;

use super::pool_status::Report;

/// What is to be done about a node's label.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Act {
    /// It gets this value in place of that.
    Overwrite {
        /// The node.
        node: String,
        /// What it says.
        old: String,
        /// What its agent says.
        new: String,
    },
    /// It's wrong, and stays: PersistentVolumes refer to it.
    Conflict {
        /// The node.
        node: String,
        /// Words for people.
        message: String,
    },
}

/// What is to be done. `nodes` has each Node object's label; `volumes_at` counts the
/// PersistentVolumes that may only be used at a home.
pub fn acts(
    reports: &[Report],
    nodes: &BTreeMap<String, Option<String>>,
    volumes_at: impl Fn(&str) -> usize,
    now: Timestamp,
) -> Vec<Act> {
    let homes: BTreeMap<&str, &str> = reports
        .iter()
        .filter_map(|report| Some((report.node.as_str(), report.home(now)?)))
        .collect();
    let elsewhere = |home: &str, node: &str| {
        let mut others = homes
            .iter()
            .filter(|(other, its)| **its == home && **other != node);
        others.next().is_some()
    };
    // A home that two agents claim is no reason for anything.
    let mut doubled = BTreeSet::new();
    let mut once = BTreeSet::new();
    for home in homes.values() {
        if !once.insert(*home) {
            doubled.insert(*home);
        }
    }
    let each = nodes.iter().filter_map(|(node, label)| {
        let old = label.as_deref()?;
        let new = *homes.get(node.as_str())?;
        if old == new || doubled.contains(new) {
            return None;
        }
        let volumes = volumes_at(old);
        if volumes == 0 || (elsewhere(old, node) && !doubled.contains(old)) {
            return Some(Act::Overwrite {
                node: node.clone(),
                old: old.into(),
                new: new.into(),
            });
        }
        Some(Act::Conflict {
            node: node.clone(),
            message: format!(
                "this node is labeled with home {old}, but its disks have home {new}; {volumes} PersistentVolumes use {old}, so the label is not changed, and the kubelet rejects the driver. Bring the disks of {old} back, or mark their pools as lost and delete those PersistentVolumes"
            ),
        })
    });
    each.collect()
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
        let acts = acts(&reports, &nodes, at, Timestamp::now());
        let texts = acts.into_iter().map(|act| match act {
            Act::Overwrite { node, old, new } => format!("{node}: {old} -> {new}"),
            Act::Conflict { node, message } => {
                assert!(message.contains("PersistentVolumes use"), "{message}");
                format!("{node}: conflict")
            }
        });
        texts.collect()
    }

    #[test]
    fn a_label_is_mended_only_where_nothing_means_the_old_value() {
        let none: [String; 0] = [];
        // All is well; nothing is there yet (the kubelet writes it); no agent answers.
        assert_eq!(decided(&[("a", "1")], &[("a", "1")], &["1"]), none);
        assert_eq!(decided(&[("a", "1")], &[("a", "")], &[]), none);
        assert_eq!(decided(&[], &[("a", "1")], &[]), none);
        assert_eq!(decided(&[("a", "")], &[("a", "1")], &[]), none);
        assert_eq!(decided(&[("gone", "1")], &[("a", "1")], &[]), none);
        // New disks under an old name.
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
        // Swapped.
        let swapped = [("a", "1"), ("b", "2")];
        assert_eq!(
            decided(&moved, &swapped, &["1", "2"]),
            ["a: 1 -> 2", "b: 2 -> 1"]
        );
        // Two that claim one home prove nothing.
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
        assert_eq!(acts(&[gone], &nodes, |_| 0, Timestamp::now()), []);
    }
}
