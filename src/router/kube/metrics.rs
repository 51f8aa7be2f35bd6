//! What a router in a cluster reports in metrics.

use std::sync::atomic::Ordering;

use super::{InCluster, VOLUMES};
use crate::router::cluster::Cluster;
use crate::telemetry::router::ClusterStatus;
use crate::telemetry::volumes::VolumeClaim;

impl InCluster {
    /// The state of this router and, if it leads, of the objects that it maintains.
    pub(super) fn numbers(&self) -> ClusterStatus {
        let missing = (!self.is_complete()).then(|| self.problem()).flatten();
        ClusterStatus {
            missing,
            leads: self.is_leader(),
            failing_watches: self.following.failing() as u64,
            dropped_events: self.recorder.dropped(),
            label_conflicts: self.conflicts.load(Ordering::Relaxed),
            snapshotter_missing: self.snapshotter_missing.load(Ordering::Relaxed),
            orphans: self.orphans.counts(),
            pools: self.count_pools(),
            moves: self.count_moves(),
            reverts: self.count_reverts(),
            quarantined: self.count_quarantined(),
            schedules: self.schedule_numbers(),
        }
    }

    /// The claims of all volumes, if this router leads, has read them and reports them.
    pub(super) fn reported_claims(&self) -> Option<Vec<VolumeClaim>> {
        let is_known = self.options.metrics_per_volume
            && self.is_leader()
            && self.following.is_complete(VOLUMES);
        is_known.then(|| self.volumes.claims())
    }
}
