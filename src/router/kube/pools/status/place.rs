//! What decides whether orphans of a pool may be deleted: how long it has been in its place, and what the
//! last check has found.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::SignedDuration;

use super::{PoolStatuses, whole};
use crate::model::PoolId;
use crate::router::kube::pools::object::{Health, PoolOrphans, PoolStatus};

/// A disk that was away for longer may have been in another machine.
const MAX_AWAY: SignedDuration = SignedDuration::from_hours(1);

impl PoolStatuses {
    /// What the status shows of the orphans of a pool.
    pub(super) fn shown_orphans(
        &self,
        id: PoolId,
        old: Option<&PoolStatus>,
    ) -> Option<PoolOrphans> {
        // A check of a router that has led before another one is older than what that has written.
        let last = old.and_then(|old| old.orphans.as_ref());
        let is_newer = |at: &Time| last.is_none_or(|last| last.checked.0 < at.0);
        match self.orphans.get(&id) {
            Some((at, now)) if is_newer(at) => now.clone(),
            Some(_) | None => last.cloned(),
        }
    }

    /// Since when a pool has been where its status says.
    pub(super) fn placed_since(
        &self,
        status: &PoolStatus,
        old: Option<&PoolStatus>,
        is_shown: bool,
    ) -> Option<Time> {
        let before = old.and_then(|old| old.placed_since.clone());
        match old {
            _ if !is_shown => before,
            Some(old) if self.stays(status, old) => before.or(Some(whole(self.now))),
            Some(_) | None => Some(whole(self.now)),
        }
    }

    /// Whether a pool is certainly where it was. If it is not known which node has it, that is not decided
    /// yet.
    fn stays(&self, status: &PoolStatus, old: &PoolStatus) -> bool {
        let is_same = status.node == old.node && status.home == old.home;
        let was_away = !matches!(old.health, Health::Healthy | Health::Degraded);
        let since = old.since.as_ref().map(|since| since.0);
        let is_back = status.health != old.health
            && was_away
            && since.is_none_or(|since| self.now.duration_since(since) > MAX_AWAY);
        status.node.is_empty() || (is_same && !is_back)
    }
}
