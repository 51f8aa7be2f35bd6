//! What the leading router reports to people without changing anything: file systems that did not
//! grow, agents whose answers are refused, and a missing csi-snapshotter. Events are all that it
//! writes, so this is a loop of its own and no reconciler: it remembers what it has recorded.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crate::model::VolumeId;
use crate::router::cluster::{Cluster, ObjectRef};
use crate::router::kube::pools::status::Report;
use crate::router::kube::{API_TIMEOUT, InCluster};

/// Between two questions to the API server whether the cluster has snapshots.
const SNAPSHOT_API_CHECK_INTERVAL: Duration = Duration::from_secs(600);
/// The API of snapshots.
const SNAPSHOTS: &str = "snapshot.storage.k8s.io/v1";

/// A warning event to be recorded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Advice {
    about: ObjectRef,
    reason: &'static str,
    message: String,
    /// What it was recorded about, and is recorded again only after that has ended: a volume and why
    /// its file system is small. `None` if it is recorded in each pass; the API server gets one
    /// event with a count.
    once: Option<(String, String)>,
}

#[derive(Default)]
struct Memory {
    /// When the API server was asked about snapshots.
    asked: Option<Instant>,
    recorded: BTreeSet<(String, String)>,
}

impl Memory {
    /// What is to be recorded now.
    async fn list(&mut self, cluster: &InCluster) -> Vec<Advice> {
        let reports = cluster.agents.reports();
        let mut found: Vec<Advice> = self
            .missing_snapshotter(cluster)
            .await
            .into_iter()
            .collect();
        if cluster.has_read_objects() {
            found.extend(reports.iter().filter_map(refused));
        }
        found.extend(not_grown(cluster, &reports));
        unrecorded(&mut self.recorded, &mut found);
        found
    }

    /// A chart that was rendered without access to the cluster omits csi-snapshotter, and then
    /// nothing else reports that snapshots are never created.
    async fn missing_snapshotter(&mut self, cluster: &InCluster) -> Option<Advice> {
        let is_due = self
            .asked
            .is_none_or(|at| at.elapsed() >= SNAPSHOT_API_CHECK_INTERVAL);
        if cluster.options.has_snapshotter || !is_due {
            return None;
        }
        self.asked = Some(Instant::now());
        let found = cluster.client.list_api_group_resources(SNAPSHOTS);
        let found = tokio::time::timeout(API_TIMEOUT, found).await.ok()?;
        let missing = found.is_ok_and(|found| !found.resources.is_empty());
        cluster
            .snapshotter_missing
            .store(missing, Ordering::Relaxed);
        let message = "the cluster has the snapshot CRDs, but this installation of Slackwater has no csi-snapshotter, so VolumeSnapshots are never created: install it with the value snapshots=true";
        missing.then(|| {
            tracing::warn!(advice = message, "found no csi-snapshotter");
            Advice {
                about: ObjectRef::Router,
                reason: "NoSnapshotter",
                message: message.into(),
                once: None,
            }
        })
    }
}

/// Volumes that are in use with a smaller file system than they should have. A report counts if
/// it is of the node that has the volume's pool.
fn not_grown(cluster: &InCluster, reports: &[Report]) -> Vec<Advice> {
    let pools = cluster.known_pools();
    let mut found = Vec::new();
    for report in reports {
        let Some((_, answer)) = &report.seen else {
            continue;
        };
        for small in &answer.not_grown {
            let id = small.volume_id.parse::<VolumeId>();
            let is_its = id.is_ok_and(|id| {
                let mut of_node = pools.iter().filter(|pool| pool.node == report.node);
                of_node.any(|pool| pool.id == id.pool)
            });
            let claim = cluster.claim_of(&small.volume_id);
            found.extend(claim.filter(|_| is_its).map(|claim| Advice {
                about: ObjectRef::Claim(claim),
                reason: "FileSystemNotGrown",
                message: format!(
                    "the file system was not grown to the volume's size and is used at its current size: {}; it is tried again the next time the volume is staged, so delete the pods that use it",
                    small.reason
                ),
                once: Some((small.volume_id.clone(), small.reason.clone())),
            }));
        }
    }
    found
}

fn refused(report: &Report) -> Option<Advice> {
    report.is_refused.then(|| Advice {
        about: ObjectRef::Node(report.node.clone()),
        reason: "AnswerRefused",
        message: report.problem.clone().unwrap_or_default(),
        once: None,
    })
}

/// Omits events that were recorded, and forgets those whose cause has ended.
fn unrecorded(recorded: &mut BTreeSet<(String, String)>, found: &mut Vec<Advice>) {
    let now: BTreeSet<_> = found.iter().filter_map(|one| one.once.clone()).collect();
    recorded.retain(|one| now.contains(one));
    found.retain(|one| one.once.as_ref().is_none_or(|one| !recorded.contains(one)));
}

/// Records the events while this router leads, for ever.
pub(in crate::router::kube) async fn advise(cluster: Arc<InCluster>) {
    let mut memory = Memory::default();
    loop {
        tokio::time::sleep(cluster.options.poll_interval).await;
        let found = match cluster.is_leader() {
            true => memory.list(&cluster).await,
            false => Vec::new(),
        };
        // The leadership may also have ended since.
        if !cluster.is_leader() {
            memory = Memory::default();
            cluster.snapshotter_missing.store(false, Ordering::Relaxed);
            continue;
        }
        for advice in found {
            memory.recorded.extend(advice.once);
            cluster.record_event(&advice.about, true, advice.reason, advice.message);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn advice(node: &str, once: Option<&str>) -> Advice {
        Advice {
            about: ObjectRef::Node(node.into()),
            reason: "Test",
            message: "m".into(),
            once: once.map(|reason| (node.into(), reason.into())),
        }
    }

    #[test]
    fn what_was_recorded_is_recorded_again_only_after_it_has_ended() {
        let mut recorded = BTreeSet::new();
        let mut look = |found: &[Advice]| {
            let mut found = found.to_vec();
            unrecorded(&mut recorded, &mut found);
            recorded.extend(found.iter().filter_map(|one| one.once.clone()));
            found.len()
        };
        let (each, once) = (advice("a", None), advice("b", Some("full")));
        assert_eq!(look(&[each.clone(), once.clone()]), 2);
        assert_eq!(look(&[each.clone(), once.clone()]), 1);
        assert_eq!(look(&[advice("b", Some("busy"))]), 1, "another reason");
        assert_eq!(look(std::slice::from_ref(&once)), 1, "it had ended");
        assert_eq!(look(&[once]), 0);
    }
}
