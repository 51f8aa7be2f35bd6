//! The controller of orphans: checks, reports, and deletions that are requested.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Instant;

use ::kube::ResourceExt;
use ::kube::api::Api;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use serde_json::{Value, json};

use super::deletion::{is_due, kind, plan};
use super::described::described;
use super::named::named;
use super::{Memory, Orphan, OrphanKind, Stored, lock, snapshot_handles, unnamed};
use crate::error::{Result, chain};
use crate::model::PoolId;
use crate::router::cluster::{Cluster, ObjectRef};
use crate::router::kube::pools::object::{Pool, PoolOrphan};
use crate::router::kube::reconcile::{Controller, Next, Outcome, Reconciler, patch};
use crate::router::kube::{InCluster, VOLUMES, ask};
use crate::telemetry::router::Orphans;

/// The reason of the event about an orphan that is not deleted, although that was requested.
const NOT_DELETED: &str = "OrphanNotDeleted";

/// Reports orphans.
pub(in crate::router::kube) struct OrphanController {
    pub(in crate::router::kube) cluster: Arc<InCluster>,
    pub(in crate::router::kube) memory: Mutex<Memory>,
}

impl OrphanController {
    fn memory(&self) -> MutexGuard<'_, Memory> {
        lock(&self.memory)
    }

    fn set_counts(&self, counts: Option<Orphans>) {
        *lock(&self.cluster.orphans.counts) = counts;
    }
}

/// What is to be done after a check.
#[derive(Debug)]
pub(in crate::router::kube) enum Found {
    /// An orphan that was not reported yet.
    New(Orphan),
    /// An orphan that is to be deleted.
    Due(Orphan),
    /// IDs that are removed from the `spec.deleteOrphans` of a pool, and why those that exist are not
    /// deleted.
    Settled(Box<Pool>, BTreeMap<String, Option<String>>),
}

impl fmt::Display for Found {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Found::New(orphan) => orphan.fmt(f),
            Found::Due(orphan) => write!(f, "deletion of orphan {}", orphan.id),
            Found::Settled(pool, _) => write!(f, "orphans of pool {}", pool.name_any()),
        }
    }
}

#[tonic::async_trait]
impl Controller for OrphanController {
    const NAME: &'static str = "orphans";

    async fn list(&self, _leads_since: Timestamp) -> Option<Vec<Found>> {
        let cluster = &self.cluster;
        // Pools are read first, and the objects that name their contents afterwards, so that an
        // object that is created in between is named.
        let stored = cluster.agents.stored().await;
        let snapshots = match snapshot_handles(&cluster.client, &cluster.options.driver).await {
            Ok(snapshots) => snapshots,
            Err(error) => {
                tracing::debug!(error = %chain(&error), "failed to look for orphans");
                return None;
            }
        };
        if !cluster.following.is_complete(VOLUMES) || cluster.problem().is_some() {
            self.set_counts(None);
            return None;
        }
        let (age, now) = (cluster.options.orphans.age, Instant::now());
        let moved = cluster.ids_of_moves();
        let snapshots = snapshots.map(|named| &named | &moved);
        let names = |id: &str| cluster.volumes.names(id) || moved.contains(id);
        let unnamed = unnamed(&stored, names, snapshots.as_ref());
        let known = snapshots.is_some();
        let requested = self.requested(&stored, &unnamed, known).await;
        let mut memory = self.memory();
        memory.take(&stored, unnamed, now);
        let count =
            |what: OrphanKind| memory.old(age, now).filter(|one| one.what == what).count() as u64;
        self.set_counts(Some(Orphans {
            volumes: count(OrphanKind::Volume),
            snapshots: snapshots.map(|_| count(OrphanKind::Snapshot)),
        }));
        let new = memory.unreported(age, now).into_iter().map(Found::New);
        Some(new.chain(requested).collect())
    }

    fn reset(&self) {
        *self.memory() = Memory::default();
        self.set_counts(None);
        lock(&self.cluster.orphans.shown).clear();
    }
}

impl OrphanController {
    /// What follows from requests for deletions. What the status of the pools is to show is stored.
    async fn requested(
        &self,
        stored: &[Stored],
        unnamed: &BTreeSet<Orphan>,
        knows_snapshots: bool,
    ) -> Vec<Found> {
        let now = whole_now();
        let (mut found, mut shown) = (Vec::new(), BTreeMap::new());
        for (id, pool) in self.cluster.pool_objects() {
            // What another node reports of the pool says nothing.
            let node = pool.status.as_ref().map(|status| status.node.clone());
            let is_its = |pool: PoolId, by: &String| pool == id && Some(by) == node.as_ref();
            let mut there = stored.iter().filter(|one| is_its(one.pool, &one.node));
            let Some(there) = there.next() else {
                continue;
            };
            let its = unnamed.iter().filter(|one| is_its(one.pool, &one.node));
            let its: Vec<&Orphan> = its.collect();
            let waits = self.cluster.options.orphans.deletion;
            let mut plan = plan(&pool, &its, waits, now);
            if let Some(orphans) = &mut plan.shown {
                self.describe(&there.node, &mut orphans.listed).await;
            }
            shown.insert(id, (Time(now), plan.shown));
            found.extend(plan.due.into_iter().map(Found::Due));
            let mut settled = BTreeMap::new();
            for id in plan.settled {
                let is_snapshot = there.snapshots.iter().any(|one| one.id == id);
                // While it is not known what names snapshots, a request is neither executed nor removed.
                if !is_snapshot || knows_snapshots {
                    let is_there = is_snapshot || there.volumes.contains(&id);
                    let why = "it is no orphan, or its request was made long ago";
                    settled.insert(id, is_there.then(|| why.to_string()));
                }
            }
            if !settled.is_empty() {
                found.push(Found::Settled(Box::new(pool), settled));
            }
        }
        *lock(&self.cluster.orphans.shown) = shown;
        found
    }

    /// Adds what PersistentVolumes of the listed volumes have to contain, as far as their agent reports it.
    async fn describe(&self, node: &str, listed: &mut [PoolOrphan]) {
        let volumes = listed
            .iter()
            .filter(|one| one.kind == kind(OrphanKind::Volume));
        let ids: Vec<String> = volumes.map(|one| one.id.clone()).collect();
        if ids.is_empty() {
            return;
        }
        match self.cluster.agents.describe(node, ids).await {
            Ok(answer) => described(listed, answer),
            Err(error) => {
                let problem = chain(&error);
                tracing::debug!(node, problem, "failed to describe the orphans of a pool");
            }
        }
    }

    fn report(&self, orphan: &Orphan) {
        self.memory().reported(orphan);
        let message = orphan.to_string();
        tracing::warn!(
            id = orphan.id,
            node = orphan.node,
            message,
            "found an orphan"
        );
        let pool = ObjectRef::Pool(orphan.pool);
        self.cluster.record_event(&pool, true, "Orphan", message);
    }

    /// Deletes an orphan, unless something names it by now, or the request was taken back. Its agent
    /// refuses to delete what is used.
    async fn delete(&self, orphan: &Orphan) -> Result<Outcome> {
        let pool = ObjectRef::Pool(orphan.pool);
        let client = &self.cluster.client;
        let named = match named(client, orphan).await {
            Ok(named) => named,
            Err(error) => {
                let why = format!("{} is not deleted yet: {}", orphan.id, chain(&error));
                self.cluster.record_event(&pool, true, NOT_DELETED, why);
                return Err(error);
            }
        };
        let api = Api::<Pool>::all(client.clone());
        let name = orphan.pool.to_string();
        let object = ask(&format!("pool {name}"), api.get_opt(&name)).await?;
        let waits = self.cluster.options.orphans.deletion;
        let object = object.filter(|pool| is_due(pool, orphan, waits, whole_now()));
        let (Some(object), true) = (object, self.cluster.is_leader()) else {
            return Ok(Outcome::Stale);
        };
        if let Some(named) = named {
            let settled = [(orphan.id.clone(), Some(format!("{named} names it")))];
            return self.settle(&object, &settled.into()).await;
        }
        let deleted = self.cluster.agents.delete(orphan).await;
        let (is_warning, reason, message) = match &deleted {
            Ok(()) => (
                false,
                "OrphanDeleted",
                format!("deleted {}, as requested", orphan.id),
            ),
            Err(error) => {
                let why = chain(error);
                (
                    true,
                    NOT_DELETED,
                    format!("{} is not deleted: {why}", orphan.id),
                )
            }
        };
        tracing::info!(
            id = orphan.id,
            node = orphan.node,
            message,
            "deletion of an orphan"
        );
        self.cluster
            .record_event(&pool, is_warning, reason, message);
        deleted.map(|()| Outcome::Done)
    }

    /// Removes IDs from `spec.deleteOrphans`, unless a person has changed the pool since.
    async fn settle(
        &self,
        pool: &Pool,
        settled: &BTreeMap<String, Option<String>>,
    ) -> Result<Outcome> {
        let mut left = pool.spec.delete_orphans.clone();
        left.retain(|id| !settled.contains_key(id));
        let api = Api::<Pool>::all(self.cluster.client.clone());
        let name = pool.name_any();
        let fields = json!({
            "metadata": { "resourceVersion": pool.metadata.resource_version },
            "spec": { "deleteOrphans": if left.is_empty() { Value::Null } else { json!(left) } },
        });
        let outcome = patch(&api, &format!("pool {name}"), &name, fields).await?;
        if let (Outcome::Done, Some(id)) = (&outcome, pool.id()) {
            for (orphan, why) in settled {
                if let Some(why) = why {
                    let message = format!("{orphan} is not deleted: {why}");
                    let about = ObjectRef::Pool(id);
                    self.cluster
                        .record_event(&about, true, NOT_DELETED, message);
                }
            }
        }
        Ok(outcome)
    }
}

#[tonic::async_trait]
impl Reconciler for OrphanController {
    type Object = Found;
    type Step = ();

    fn next(_: &Found) -> Next<()> {
        Next::Step(())
    }

    async fn execute(&self, found: &Found, (): ()) -> Result<Outcome> {
        match found {
            Found::New(orphan) => self.report(orphan),
            Found::Due(orphan) => return self.delete(orphan).await,
            Found::Settled(pool, settled) => return self.settle(pool, settled).await,
        }
        Ok(Outcome::Done)
    }
}

/// The time in whole seconds, as objects have it, so that what is read is what was written.
fn whole_now() -> Timestamp {
    let now = Timestamp::now();
    Timestamp::from_second(now.as_second()).unwrap_or(now)
}
