//! If several agents report one pool: whose report counts.

use super::PoolStatuses;
use super::observation::Observation;
use crate::agent::pool::Presence;

impl PoolStatuses {
    /// The reports of a pool that count, and the nodes of others that serve it. The node that had
    /// the pool last keeps it, as long as its agent reports it or cannot be asked.
    pub(super) fn shows<'a>(
        &self,
        last: Option<&str>,
        by: &'a [Observation],
    ) -> (Vec<&'a Observation>, Vec<&'a str>) {
        // A node that has forgotten the pool does not count. Calls go to a node that serves the
        // pool, although a node that misses the pool's disk reports it too.
        let mut shows: Vec<_> = by
            .iter()
            .filter(|observation| !observation.pool().forgotten)
            .collect();
        if let Some(last) = last {
            let is_its = |observation: &&Observation| observation.answer.node_name == last;
            if shows.iter().any(is_its) || !self.has_given_up(last) {
                let claims = shows.iter().filter(|observation| !is_its(observation));
                let claims = claims.filter(|observation| observation.pool().refusal.is_empty());
                let claims = claims
                    .map(|observation| &*observation.answer.node_name)
                    .collect();
                shows.retain(is_its);
                return (shows, claims);
            }
        }
        let is_absent = |one: &&Observation| one.pool().presence() == Presence::Absent;
        if !shows.iter().all(is_absent) {
            shows.retain(|one| !is_absent(one));
        }
        if shows
            .iter()
            .any(|observation| observation.pool().refusal.is_empty())
        {
            shows.retain(|observation| observation.pool().refusal.is_empty());
        }
        (shows, Vec::new())
    }

    /// Whether the node that had a pool is gone, or its agent answers and knows the ids of all its
    /// pools, without this one among them.
    fn has_given_up(&self, node: &str) -> bool {
        let its = self.reports.iter().find(|report| report.node == node);
        let reachable = its.filter(|report| report.problem.is_none());
        let fresh = reachable.and_then(|report| report.fresh(self.now - self.unreachable_after));
        let knows_all = fresh.is_some_and(|(_, answer)| {
            let mut pools = answer.pools.iter();
            pools.all(|pool| !pool.id.is_empty())
        });
        knows_all || !self.nodes.contains(node)
    }
}
