//! Claims of nodes that are lost for good, as a controller: with `onNodeLost: recreate`, a claim and its
//! pod are deleted, so that their StatefulSet creates both again on another node, where a replicating
//! application rebuilds its replica. The volume stays, in quarantine: its PersistentVolume has the policy
//! Retain and no claim.
//!
//! [`decide`] has all decisions, about one namespace at a time. What must not be forgotten is in labels
//! of the claims and in annotations of their PersistentVolumes.

mod decide;
mod observe;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use ::kube::ResourceExt;
use ::kube::api::{Api, DynamicObject};
use ::kube::core::PartialObjectMeta;
use ::kube::runtime::watcher;
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod};
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use serde_json::{Value, json};

use crate::error::Result;
use crate::model::PoolId;
use crate::router::cluster::{Cluster, ObjectRef};
use crate::router::kube::InCluster;
use crate::router::kube::adopt::manifest::{Manifest, POLICY_BEFORE_QUARANTINE, QUARANTINED_FROM};
use crate::router::kube::adopt::resource;
use crate::router::kube::reconcile::watches::Store;
use crate::router::kube::reconcile::{Controller, Next, Outcome, Reconciler, only, patch, written};
use decide::{Change, MARK, Plan, Seen, decide};

/// The name of the watch in messages.
const MARKED: &str = "marked PersistentVolumeClaims";

/// A namespace with claims of nodes that may be lost.
pub(super) struct Namespace {
    name: String,
    /// The PersistentVolumes of these claims, and whether they are about to be in quarantine. Those of
    /// marked claims may be missing.
    volumes: BTreeMap<String, bool>,
    /// `None` before it is observed, and if none of the claims is to be created again.
    seen: Option<Box<Seen>>,
}

impl fmt::Display for Namespace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the claims of namespace {} on lost nodes", self.name)
    }
}

/// Deletes claims of lost nodes.
struct LostNodeController {
    cluster: Arc<InCluster>,
    /// The claims with a mark.
    marked: Arc<RwLock<Store<()>>>,
    /// How long the other replicas must have been Ready.
    ready_for: SignedDuration,
}

impl InCluster {
    /// Deletes claims of lost nodes from now on, while this router leads, if the other replicas have been
    /// Ready for this time.
    pub fn recreate_claims(self: &Arc<InCluster>, ready_for: Duration) {
        let marked = Arc::<RwLock<Store<()>>>::default();
        let api = Api::<PartialObjectMeta<PersistentVolumeClaim>>::all(self.client.clone());
        let config = watcher::Config::default().labels(MARK);
        let store = Arc::clone(&marked);
        self.watch(api, config, MARKED, move |event| {
            let mut store = store.write().unwrap_or_else(PoisonError::into_inner);
            store.take(event, |_| Some(()), |(), ()| true);
        });
        let controller = LostNodeController {
            cluster: Arc::clone(self),
            marked,
            ready_for: SignedDuration::try_from(ready_for).unwrap_or(SignedDuration::MAX),
        };
        let every = self.options.poll_interval * 3;
        self.control(Arc::new(controller), every, None);
    }
}

#[tonic::async_trait]
impl Controller for LostNodeController {
    const NAME: &'static str = "claims of lost nodes";

    async fn list(&self, leads_since: Timestamp) -> Option<Vec<Namespace>> {
        let cluster = &self.cluster;
        // An agent that this router has not asked yet may be well.
        let age = Timestamp::now().duration_since(leads_since);
        let is_known = cluster.has_read_objects() && cluster.following.is_complete(MARKED);
        if !is_known || age < cluster.options.unreachable_after {
            return None;
        }
        let pools = observe::silent_pools(cluster);
        let mut all = cluster.volumes.at_risk(&pools);
        {
            let marked = self.marked.read().unwrap_or_else(PoisonError::into_inner);
            let paths = marked.now().keys().filter_map(|path| path.split_once('/'));
            for (namespace, _) in paths {
                all.entry(namespace.into()).or_default();
            }
        }
        let each = all.into_iter().map(|(name, volumes)| Namespace {
            name,
            volumes,
            seen: None,
        });
        Some(each.collect())
    }
}

#[tonic::async_trait]
impl Reconciler for LostNodeController {
    type Object = Namespace;
    type Step = Plan;

    /// Everything is read again: what is in memory may be out of date.
    async fn observe(&self, namespace: Namespace) -> Result<Namespace> {
        let seen = observe::observe(&self.cluster, self.ready_for, &namespace).await?;
        let seen = seen.map(Box::new);
        Ok(Namespace { seen, ..namespace })
    }

    fn next(namespace: &Namespace) -> Next<Plan> {
        let Some(seen) = &namespace.seen else {
            return Next::Done;
        };
        let plan = decide(seen);
        match plan == Plan::default() {
            true => Next::Wait,
            false => Next::Step(plan),
        }
    }

    async fn execute(&self, namespace: &Namespace, plan: Plan) -> Result<Outcome> {
        for (claim, why) in plan.waiting {
            let claim = ObjectRef::Claim(format!("{}/{claim}", namespace.name));
            let message = format!("the claim is not created again on another node: {why}");
            self.cluster
                .record_event(&claim, true, "NodeLostWaits", message);
        }
        for change in plan.changes {
            let outcome = self.change(&namespace.name, change).await?;
            if outcome == Outcome::Stale || !self.cluster.is_leader() {
                return Ok(Outcome::Stale);
            }
        }
        Ok(Outcome::Done)
    }
}

impl LostNodeController {
    async fn change(&self, namespace: &str, change: Change) -> Result<Outcome> {
        match change {
            Change::Mark { claim, volume, why } => {
                let mark = json!(claim.metadata.resource_version);
                let outcome = self.label(namespace, &claim, mark).await?;
                if outcome == Outcome::Done {
                    self.report(namespace, &claim.name_any(), volume, &why);
                }
                Ok(outcome)
            }
            Change::Unmark(claim) => self.label(namespace, &claim, Value::Null).await,
            Change::Retain { live, from, before } => {
                let annotations =
                    json!({ QUARANTINED_FROM: from, POLICY_BEFORE_QUARANTINE: before });
                self.volume(&live, annotations, Some("Retain")).await
            }
            Change::Restore(live) => {
                let annotations = json!({ QUARANTINED_FROM: null, POLICY_BEFORE_QUARANTINE: null });
                let before = live.policy_before_quarantine();
                self.volume(&live, annotations, before).await
            }
            Change::DeleteClaim { claim, pool } => self.delete(namespace, &claim, pool).await,
            Change::DeletePod { name, uid } => {
                let api = Api::<Pod>::namespaced(self.cluster.client.clone(), namespace);
                let params = only(Some(uid), None);
                let what = format!("pod {namespace}/{name}");
                let outcome = written(&what, api.delete(&name, &params)).await?;
                tracing::info!(namespace, pod = name, "deleted the pod of a lost node");
                Ok(outcome)
            }
        }
    }

    fn claims(&self, namespace: &str) -> Api<PersistentVolumeClaim> {
        Api::namespaced(self.cluster.client.clone(), namespace)
    }

    async fn label(
        &self,
        namespace: &str,
        claim: &PersistentVolumeClaim,
        mark: Value,
    ) -> Result<Outcome> {
        let name = claim.name_any();
        let metadata = &claim.metadata;
        let fields = json!({ "metadata": {
            "uid": metadata.uid,
            "resourceVersion": metadata.resource_version,
            "labels": { MARK: mark },
        }});
        let what = format!("claim {namespace}/{name}");
        patch(&self.claims(namespace), &what, &name, fields).await
    }

    async fn volume(
        &self,
        live: &Manifest,
        annotations: Value,
        policy: Option<&str>,
    ) -> Result<Outcome> {
        let mut fields = json!({ "metadata": {
            "uid": live.uid(), "resourceVersion": live.version(), "annotations": annotations,
        }});
        if let Some(policy) = policy {
            fields["spec"]["persistentVolumeReclaimPolicy"] = json!(policy);
        }
        let api = Api::<DynamicObject>::all_with(self.cluster.client.clone(), &resource());
        let what = format!("PersistentVolume {}", live.name());
        patch(&api, &what, live.name(), fields).await
    }

    async fn delete(
        &self,
        namespace: &str,
        claim: &PersistentVolumeClaim,
        pool: Option<PoolId>,
    ) -> Result<Outcome> {
        // The node may have returned since. Its return afterwards costs a rebuild, but no data.
        if let Some(pool) = pool
            && observe::loss(&self.cluster, pool).await?.1.is_err()
        {
            return Ok(Outcome::Stale);
        }
        let name = claim.name_any();
        let version = claim.metadata.resource_version.clone();
        let params = only(claim.metadata.uid.clone(), version);
        let what = format!("claim {namespace}/{name}");
        let outcome = written(&what, self.claims(namespace).delete(&name, &params)).await?;
        if outcome == Outcome::Done {
            tracing::info!(namespace, claim = name, "deleted the claim of a lost node");
        }
        Ok(outcome)
    }

    /// Events at the claim, and at the pool, whose events stay.
    fn report(&self, namespace: &str, claim: &str, (volume, pool): (String, PoolId), why: &str) {
        let path = format!("{namespace}/{claim}");
        tracing::warn!(
            claim = path,
            volume,
            why,
            "the claim of a lost node is to be deleted"
        );
        let message = format!(
            "{why}: the claim and its pod are deleted, so that they are created again on another node; PersistentVolume {volume} keeps the data"
        );
        let about = ObjectRef::Claim(path.clone());
        self.cluster.record_event(&about, true, "NodeLost", message);
        let message = format!(
            "{why}: claim {path} is deleted, and PersistentVolume {volume} keeps its volume, which is not used if the node returns"
        );
        let about = ObjectRef::Pool(pool);
        self.cluster
            .record_event(&about, true, "VolumeQuarantined", message);
    }
}
