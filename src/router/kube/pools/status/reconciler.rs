//! Writes what was decided about pools to their objects.

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError};

use ::kube::ResourceExt;
use ::kube::api::{Api, PostParams};
use k8s_openapi::jiff::Timestamp;
use serde_json::json;

use super::{Change, ObservedPool, PoolStatuses};
use crate::error::Result;
use crate::model::PoolId;
use crate::router::cluster::{Cluster, ObjectRef};
use crate::router::kube::pools::disk_users;
use crate::router::kube::pools::object::{Health, Pool};
use crate::router::kube::reconcile::{
    Controller, Next, Outcome, Reconciler, patch, write_status, written,
};
use crate::router::kube::{InCluster, POOLS, ask};

/// Maintains the Pool objects.
pub(in crate::router::kube) struct PoolController(pub(in crate::router::kube) Arc<InCluster>);

impl InCluster {
    /// The Pool objects, as far as their names are IDs.
    pub(in crate::router::kube) fn pool_objects(&self) -> BTreeMap<PoolId, Pool> {
        let pools = self.pools.read().unwrap_or_else(PoisonError::into_inner);
        let all = pools.now().values();
        all.filter_map(|pool| Some((pool.id()?, pool.clone())))
            .collect()
    }

    /// The number of Pool objects with each health, if this router leads and has read them.
    pub(in crate::router::kube) fn count_pools(&self) -> Option<BTreeMap<&'static str, u64>> {
        let is_known = self.is_leader() && self.following.is_complete(POOLS);
        is_known.then(|| {
            let pools = self.pools.read().unwrap_or_else(PoisonError::into_inner);
            count_by_health(pools.now().values())
        })
    }
}

/// The number of pools with each health, also of those that no pool has.
fn count_by_health<'a>(pools: impl Iterator<Item = &'a Pool>) -> BTreeMap<&'static str, u64> {
    let mut counts: BTreeMap<_, _> = Health::ALL.map(|health| (health.as_str(), 0)).into();
    for pool in pools {
        let health = pool.status.as_ref().map(|status| status.health);
        *counts
            .entry(health.unwrap_or_default().as_str())
            .or_default() += 1;
    }
    counts
}

#[tonic::async_trait]
impl Controller for PoolController {
    const NAME: &'static str = "pools";

    async fn list(&self, leads_since: Timestamp) -> Option<Vec<ObservedPool>> {
        let cluster = &self.0;
        if !cluster.has_read_objects() {
            return None;
        }
        let reports = cluster.agents.reports();
        let look = PoolStatuses {
            pods: disk_users::named(cluster, &reports).await,
            reports,
            pools: cluster.pool_objects(),
            homes: cluster.volumes.homes(),
            nodes: cluster.node_labels().into_keys().collect(),
            evacuations: cluster.evacuations(),
            requests: cluster.pool_requests(),
            orphans: cluster.orphans.shown(),
            lost_after: cluster.options.lost_after,
            unreachable_after: cluster.options.unreachable_after,
            leads_since,
            now: Timestamp::now(),
        };
        Some(look.observed())
    }
}

#[tonic::async_trait]
impl Reconciler for PoolController {
    type Object = ObservedPool;
    type Step = Box<Change>;

    fn next(pool: &ObservedPool) -> Next<Box<Change>> {
        match pool.all.change(pool.id, &pool.reported) {
            Some(change) => Next::Step(Box::new(change)),
            None => Next::Done,
        }
    }

    async fn execute(&self, pool: &ObservedPool, change: Box<Change>) -> Result<Outcome> {
        let cluster = &self.0;
        let api = Api::<Pool>::all(cluster.client.clone());
        let (what, name) = (pool.to_string(), change.id.to_string());
        let object = ObjectRef::Pool(change.id);
        if change.is_new {
            let pool = Pool::new(change.id, &cluster.options.driver);
            written(&what, api.create(&PostParams::default(), &pool)).await?;
        }
        if let Some(reason) = &change.lose {
            // Only over the version for which that was decided: a person may have just handed the
            // pool over.
            let seen = pool.all.pools.get(&change.id);
            let lost = json!({
                "metadata": { "resourceVersion": seen.and_then(|seen| seen.resource_version()) },
                "spec": { "lost": true, "lostReason": reason },
            });
            if patch(&api, &what, &name, lost).await? == Outcome::Stale {
                return Ok(Outcome::Stale);
            }
            tracing::warn!(pool = name, reason, "marked a pool as lost");
            cluster.record_event(&object, true, "PoolLost", reason.clone());
        }
        let mut status = json!(change.status);
        if change.status.evacuation.is_none() {
            // Null removes it.
            status["evacuation"] = json!(null);
        }
        if change.status.orphans.is_none() {
            status["orphans"] = json!(null);
        }
        if change.status.frozen.is_empty() {
            status["frozen"] = json!(null);
        }
        if change.status.copies.is_none() {
            status["copies"] = json!(null);
        }
        if change.status.full_at.is_none() {
            status["fullAt"] = json!(null);
        }
        if write_status(&api, &what, &name, &status).await? == Outcome::Stale {
            return Ok(Outcome::Stale);
        }
        if change.handed_over && remove_mark(&api, &what, &change).await? == Outcome::Done {
            let message = format!("the pool was handed over to node {}", change.status.node);
            tracing::info!(pool = name, message, "handed over a pool");
            cluster.record_event(&object, false, "PoolHandedOver", message);
        }
        if change.turned {
            let health = change.status.health;
            let is_well = health == Health::Healthy;
            let message = match is_well {
                true => format!(
                    "pool {} of node {} is served",
                    change.status.name, change.status.node
                ),
                false => change.status.message.clone(),
            };
            tracing::info!(
                pool = name,
                health = health.as_str(),
                message,
                "recorded a change of a pool's health"
            );
            cluster.record_event(&object, !is_well, health.event_reason(), message);
        }
        Ok(Outcome::Done)
    }
}

/// Removes the mark with which a person has handed a pool over, now that its status names the node.
/// A mark that the person has changed in the meantime stays.
async fn remove_mark(api: &Api<Pool>, what: &str, change: &Change) -> Result<Outcome> {
    let name = change.id.to_string();
    let now = ask(what, api.get_opt(&name)).await?;
    let now = now.filter(|now| now.spec.node.as_ref() == Some(&change.status.node));
    let Some(now) = now else {
        return Ok(Outcome::Stale);
    };
    // Only over the version that was read.
    let fields = json!({
        "metadata": { "resourceVersion": now.metadata.resource_version },
        "spec": { "node": null },
    });
    patch(api, what, &name, fields).await
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::router::kube::pools::object::PoolStatus;

    fn pool(health: Option<Health>) -> Pool {
        let status = health.map(|health| PoolStatus {
            health,
            ..PoolStatus::default()
        });
        Pool {
            status,
            ..Pool::default()
        }
    }

    /// An alert ends only if the value of its series becomes 0.
    #[test]
    fn every_health_is_counted_even_if_no_pool_has_it() {
        let pools = [
            pool(Some(Health::Degraded)),
            pool(Some(Health::Degraded)),
            pool(Some(Health::Other)),
            pool(None),
        ];
        let counts = count_by_health(pools.iter());
        assert_eq!(counts.len(), Health::ALL.len());
        assert_eq!(
            (counts["Degraded"], counts["Unknown"], counts["Quarantined"]),
            (2, 2, 0)
        );
    }
}
