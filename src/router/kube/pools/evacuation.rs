//! Pools that are being emptied (`spec.evacuate` of a Pool object), as a controller: a VolumeMove for
//! each claim of the pool, two copies at a time, and what is left.
//!
//! The moves have the label [`EVACUATES`], by which they are found again: setting `spec.evacuate` to
//! false deletes them, which undoes those that have not switched yet. What is left is kept in memory, and
//! shown by the controller of the Pool objects, which writes their status.

mod decide;
pub(in crate::router::kube) mod remaining;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use ::kube::api::{Api, PostParams};
use k8s_openapi::jiff::Timestamp;

use super::object::Pool;
use crate::error::Result;
use crate::model::PoolId;
use crate::router::kube::InCluster;
use crate::router::kube::moves::MOVES;
use crate::router::kube::moves::object::VolumeMove;
use crate::router::kube::reconcile::{Controller, Next, Outcome, Reconciler, only, written};
use decide::{Change, Seen, decide, left};
use remaining::Checked;

/// The label of moves that were created for a pool: its UUID.
pub(in crate::router::kube) const EVACUATES: &str = "slackwater.dev/evacuates";

/// A pool that is to be emptied, or for which there are moves.
pub(in crate::router::kube) struct EvacuatedPool {
    id: PoolId,
    seen: Seen,
}

impl fmt::Display for EvacuatedPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the evacuation of pool {}", self.id)
    }
}

/// Empties pools.
pub(in crate::router::kube) struct EvacuationController(pub(in crate::router::kube) Arc<InCluster>);

#[tonic::async_trait]
impl Controller for EvacuationController {
    const NAME: &'static str = "evacuations";

    async fn list(&self, _leads_since: Timestamp) -> Option<Vec<EvacuatedPool>> {
        let cluster = &self.0;
        if !cluster.has_read_objects() || !cluster.following.is_complete(MOVES) {
            return None;
        }
        let is_evacuated = |pool: &Pool| pool.spec.evacuate;
        // Agents are asked first, so that what is created in between is named by an object.
        let stored = match cluster.pool_objects().values().any(is_evacuated) {
            true => cluster.agents.stored().await,
            false => Vec::new(),
        };
        let (pools, moves) = (cluster.pool_objects(), cluster.moves());
        let named = cluster.ids_of_moves();
        let (mut found, mut checked) = (Vec::new(), BTreeMap::new());
        for (id, pool) in pools {
            let label = id.to_string();
            let is_its = |one: &&VolumeMove| {
                let labels = one.metadata.labels.as_ref();
                labels.and_then(|labels| labels.get(EVACUATES)) == Some(&label)
            };
            let its: Vec<VolumeMove> = moves.values().filter(is_its).cloned().collect();
            if !pool.spec.evacuate && its.is_empty() {
                continue;
            }
            let seen = Seen {
                id,
                is_evacuated: pool.spec.evacuate,
                volumes: cluster.volumes.of_pool(id),
                stored: stored.iter().find(|one| one.pool == id).cloned(),
                its,
                all: moves.values().cloned().collect(),
                named: named.clone(),
                now: Timestamp::now(),
            };
            if pool.spec.evacuate {
                let generation = pool.metadata.generation;
                let found = left(&seen);
                checked.insert(id, Checked { generation, found });
            }
            found.push(EvacuatedPool { id, seen });
        }
        cluster.set_evacuations(checked);
        Some(found)
    }

    fn reset(&self) {
        self.0.set_evacuations(BTreeMap::new());
    }
}

#[tonic::async_trait]
impl Reconciler for EvacuationController {
    type Object = EvacuatedPool;
    type Step = Change;

    fn next(pool: &EvacuatedPool) -> Next<Change> {
        let change = decide(&pool.seen);
        match change.is_empty() {
            true => Next::Wait,
            false => Next::Step(change),
        }
    }

    async fn execute(&self, _: &EvacuatedPool, change: Change) -> Result<Outcome> {
        let api = |namespace: &Option<String>| {
            let namespace = namespace.as_deref().unwrap_or_default();
            Api::<VolumeMove>::namespaced(self.0.client.clone(), namespace)
        };
        // One that fails stops no other, in whatever namespace it is.
        let mut failed = None;
        for object in change.delete {
            let (api, name) = (
                api(&object.metadata.namespace),
                object.metadata.name.clone().unwrap_or_default(),
            );
            let params = only(object.metadata.uid.clone(), None);
            let what = format!("VolumeMove {}", object.path());
            let deleted = written(&what, api.delete(&name, &params)).await;
            failed = failed.or(deleted.err());
        }
        let mut created = 0;
        for object in change.create {
            if created == change.at_most {
                break;
            }
            let api = api(&object.metadata.namespace);
            let params = PostParams::default();
            let answer = api.create(&params, &object);
            match written(&format!("VolumeMove {}", object.path()), answer).await {
                Ok(_) => created += 1,
                Err(error) => failed = failed.or(Some(error)),
            }
        }
        failed.map_or(Ok(Outcome::Done), Err)
    }
}
