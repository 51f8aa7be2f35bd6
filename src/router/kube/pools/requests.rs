//! Pools that a node is to adopt or to forget (`spec.adopt` and `spec.forget` of a Pool object), as a
//! controller: the agent of the node is asked, and the field is removed when its report shows that it has
//! done so.
//!
//! Nothing follows from the answer of a request: a pool is adopted when the node serves it, and forgotten
//! when the node reports that. So a request may be sent twice, or by a router that is killed before it
//! has the answer. A pool that was adopted is handed over to the node by `spec.node`, in the write that
//! removes `spec.adopt` (see [`hand_over`](super::hand_over)).

mod decide;
pub mod progress;

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ::kube::ResourceExt;
use ::kube::api::Api;
use k8s_openapi::jiff::Timestamp;
use serde_json::json;

use super::object::Pool;
use crate::error::{Result, chain};
use crate::router::cluster::{Cluster, ObjectRef};
use crate::router::kube::reconcile::{Controller, Next, Outcome, Reconciler, patch};
use crate::router::kube::{InCluster, ask};
use decide::{Decision, Look, Seen, decide};
use progress::{PoolRequest, PoolRequests, RequestProgress};

/// Sends the requests.
pub(in crate::router::kube) struct PoolRequestController {
    cluster: Arc<InCluster>,
    /// Why agents have refused requests, for people.
    refusals: Mutex<PoolRequests>,
}

/// A request about a pool.
pub(in crate::router::kube) struct RequestedPool(Seen);

impl fmt::Display for RequestedPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Seen { id, node, .. } = &self.0;
        match self.0.request {
            PoolRequest::Adopt => write!(f, "the adoption of pool {id} by node {node}"),
            PoolRequest::Forget => write!(f, "the request that node {node} forgets pool {id}"),
        }
    }
}

impl PoolRequestController {
    pub(in crate::router::kube) fn new(cluster: Arc<InCluster>) -> PoolRequestController {
        PoolRequestController {
            cluster,
            refusals: Mutex::default(),
        }
    }

    fn refusals(&self) -> MutexGuard<'_, PoolRequests> {
        let refusals = self.refusals.lock();
        refusals.unwrap_or_else(PoisonError::into_inner)
    }

    /// How far a request is, as its condition shows it.
    fn progress(&self, seen: &Seen) -> RequestProgress {
        let generation = seen.pool.metadata.generation;
        let (reason, message) = match decide(seen) {
            Decision::Wait(reason, message) => (reason, message),
            Decision::Complete { .. } => ("Completing", "the node has done it".to_string()),
            Decision::Ask => {
                let key = (seen.id, seen.request);
                let refusals = self.refusals();
                let refusal = refusals.get(&key).cloned();
                if let Some(refusal) = refusal.filter(|one| one.generation == generation) {
                    return refusal;
                }
                let node = &seen.node;
                ("Requested", format!("the agent of node {node} is asked"))
            }
        };
        RequestProgress {
            generation,
            reason,
            message,
        }
    }
}

#[tonic::async_trait]
impl Controller for PoolRequestController {
    const NAME: &'static str = "pool requests";

    async fn list(&self, _leads_since: Timestamp) -> Option<Vec<RequestedPool>> {
        let cluster = &self.cluster;
        if !cluster.is_complete() {
            return None;
        }
        let look = Arc::new(Look {
            reports: cluster.agents.reports(),
            nodes: cluster.node_labels().into_keys().collect(),
            silent_since: Timestamp::now() - cluster.options.unreachable_after,
        });
        let mut found = Vec::new();
        for (id, pool) in cluster.pool_objects() {
            for request in PoolRequest::ALL {
                let Some(node) = request.node(&pool.spec).map(str::to_string) else {
                    continue;
                };
                found.push(Seen {
                    id,
                    request,
                    node,
                    pool: pool.clone(),
                    look: Arc::clone(&look),
                });
            }
        }
        let is_requested = |key: &(_, _)| found.iter().any(|one| (one.id, one.request) == *key);
        self.refusals().retain(|key, _| is_requested(key));
        let progress = found.iter().map(|one| {
            let progress = self.progress(one);
            ((one.id, one.request), progress)
        });
        cluster.set_pool_requests(progress.collect());
        Some(found.into_iter().map(RequestedPool).collect())
    }

    fn reset(&self) {
        self.refusals().clear();
        self.cluster.set_pool_requests(PoolRequests::new());
    }
}

#[tonic::async_trait]
impl Reconciler for PoolRequestController {
    type Object = RequestedPool;
    type Step = Decision;

    fn next(pool: &RequestedPool) -> Next<Decision> {
        match decide(&pool.0) {
            Decision::Wait(..) => Next::Wait,
            step => Next::Step(step),
        }
    }

    async fn execute(&self, pool: &RequestedPool, step: Decision) -> Result<Outcome> {
        let seen = &pool.0;
        let api = Api::<Pool>::all(self.cluster.client.clone());
        let (what, name) = (format!("pool {}", seen.id), seen.id.to_string());
        let now = ask(&what, api.get_opt(&name)).await?;
        // A person may have changed the spec since.
        let now = now.filter(|now| {
            now.uid() == seen.pool.uid() && now.metadata.generation == seen.pool.metadata.generation
        });
        let now = now.filter(|now| seen.request.node(&now.spec) == Some(&seen.node));
        let (Some(now), true) = (now, self.cluster.is_leader()) else {
            return Ok(Outcome::Stale);
        };
        match step {
            Decision::Wait(..) => Ok(Outcome::Stale),
            Decision::Ask => self.send(pool).await,
            Decision::Complete { hand_over } => {
                let mut spec = match seen.request {
                    PoolRequest::Adopt => json!({ "adopt": null }),
                    PoolRequest::Forget => json!({ "forget": null }),
                };
                if hand_over {
                    spec["node"] = json!(seen.node);
                }
                // Only over the version that was read.
                let version = now.metadata.resource_version;
                let fields = json!({ "metadata": { "resourceVersion": version }, "spec": spec });
                let outcome = patch(&api, &what, &name, fields).await?;
                if outcome == Outcome::Done {
                    self.report(seen);
                }
                Ok(outcome)
            }
        }
    }
}

impl PoolRequestController {
    async fn send(&self, pool: &RequestedPool) -> Result<Outcome> {
        let seen = &pool.0;
        let agents = &self.cluster.agents;
        let answer = agents.change_pool(&seen.node, seen.id, seen.request).await;
        let key = (seen.id, seen.request);
        let mut refusals = self.refusals();
        match answer {
            Ok(()) => {
                refusals.remove(&key);
                Ok(Outcome::Done)
            }
            Err(error) => {
                let refusal = RequestProgress {
                    generation: seen.pool.metadata.generation,
                    reason: "Refused",
                    message: chain(&error).to_string(),
                };
                refusals.insert(key, refusal);
                Err(error)
            }
        }
    }

    /// Reports that a request is done.
    fn report(&self, seen: &Seen) {
        let node = &seen.node;
        let (reason, message) = match seen.request {
            PoolRequest::Adopt => ("PoolAdopted", format!("node {node} has adopted the pool")),
            PoolRequest::Forget => (
                "PoolForgotten",
                format!("node {node} has forgotten the pool"),
            ),
        };
        tracing::info!(pool = %seen.id, node, message, "completed spec.adopt or spec.forget of a pool");
        let object = ObjectRef::Pool(seen.id);
        self.cluster.record_event(&object, false, reason, message);
    }
}
