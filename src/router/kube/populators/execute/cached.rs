//! The steps of the cache. A step that fails is not tried again: the claim is bound without the cache.

use std::collections::BTreeMap;
use std::time::Instant;

use ::kube::Error as KubeError;
use ::kube::api::{DynamicObject, PostParams};
use k8s_openapi::jiff::Timestamp;
use serde_json::{Value, json};

use super::{Executor, MAX_RECORD_TRIES, absent, only, parsed};
use crate::error::{Result, chain};
use crate::router::kube::ask;
use crate::router::kube::custom_resource::{GROUP, VERSION};
use crate::router::kube::populators::cache::{
    NODE_OF, NONE, POOL_OF, RECORD, SNAPSHOT, SNAPSHOT_GROUP, SOURCE_LABEL, node_of, pool_of,
};
use crate::router::kube::populators::decide::Step;
use crate::router::kube::populators::snapshots;
use crate::router::kube::populators::state::{NODE, SELECTED_NODE, annotation, uid};
use crate::router::kube::reconcile::{Outcome, patch, written};

/// The `dataSource` of a prime claim that is created from a snapshot.
pub(super) fn reference(snapshot: &str) -> Value {
    json!({"apiGroup": SNAPSHOT_GROUP, "kind": "VolumeSnapshot", "name": snapshot})
}

impl Executor<'_> {
    /// Whether no other claim has just begun to receive the same content.
    pub(super) fn begins(&self) -> bool {
        let cache = self.seen.cache.as_ref();
        // Without a snapshot of it, each claim receives the content for itself.
        let Some(cache) = cache.filter(|cache| cache.most > 0) else {
            return true;
        };
        let (name, claim) = (cache.key.snapshot_name(), uid(&self.seen.claim));
        let mut memory = self.populators.memory();
        memory.cache.begins(&name, claim, Instant::now())
    }

    pub(super) async fn cache(&self, step: Step) -> Result<Outcome> {
        let done = match &step {
            Step::CreateSnapshot(name) => self.create_snapshot(name).await,
            Step::RecordSnapshot(content, version) => {
                self.record_snapshot(content, version.as_deref()).await
            }
            Step::DeleteSnapshot(name, uid) => self.delete_snapshot(name, uid).await,
            Step::MakeRoom { name, uid, node } => {
                self.delete_snapshot(name, uid).await?;
                let again = json!({SNAPSHOT: NONE, SELECTED_NODE: node, NODE: node});
                return self.annotate_prime(&again).await;
            }
            Step::GiveUpSnapshot(name, uid) => {
                self.set_broken("a snapshot could not be used");
                self.delete_snapshot(name, uid).await
            }
            _ => Err(absent("the step of the cache")),
        };
        match done {
            Ok(outcome) => Ok(outcome),
            Err(error) => {
                self.set_broken(&chain(&error));
                self.mark_prime(NONE).await
            }
        }
    }

    fn set_broken(&self, why: &str) {
        let namespace = self.namespace();
        tracing::warn!(namespace, claim = %self.name, why, "failed to cache a filled volume");
        let mut memory = self.populators.memory();
        memory.cache.set_broken(namespace, Instant::now());
    }

    fn namespace(&self) -> &str {
        let namespace = self.seen.claim.metadata.namespace.as_deref();
        namespace.unwrap_or_default()
    }

    /// Creates a snapshot of the volume of the prime claim, and records its UID there. One that is not
    /// recorded is never used, and deleted later.
    async fn create_snapshot(&self, name: &str) -> Result<Outcome> {
        let source = self.seen.source.as_ref();
        let (kind, source) = source.map_err(|_| absent("the source"))?;
        let spec = self.seen.volume.as_ref().and_then(|one| one.spec.as_ref());
        let handle = spec.and_then(|spec| Some(spec.csi.as_ref()?.volume_handle.as_str()));
        let node = node_of(&self.seen.claim, self.seen.prime.as_ref()).map(str::to_string);
        let places = [(NODE_OF, node), (POOL_OF, handle.and_then(pool_of))];
        let places = places
            .into_iter()
            .filter_map(|(key, place)| Some((key, place?)));
        let snapshot: DynamicObject = parsed(json!({
            "apiVersion": "snapshot.storage.k8s.io/v1",
            "kind": "VolumeSnapshot",
            "metadata": {
                "name": name,
                "labels": {SOURCE_LABEL: uid(source), "app.kubernetes.io/name": "slackwater",
                    "app.kubernetes.io/component": "cache",
                    "app.kubernetes.io/managed-by": "slackwater"},
                "annotations": places.collect::<BTreeMap<_, _>>(),
                // It is deleted with the source.
                "ownerReferences": [{"apiVersion": format!("{GROUP}/{VERSION}"),
                    "kind": kind.as_str(), "name": source.metadata.name, "uid": uid(source)}],
            },
            "spec": {
                "volumeSnapshotClassName": self.populators.options.settings.cache_class,
                "source": {"persistentVolumeClaimName": self.name},
            },
        }))?;
        let api = snapshots::api(&self.populators.client, self.namespace());
        let params = PostParams::default();
        let created = async {
            match api.create(&params, &snapshot).await {
                Ok(created) => Ok(Some(created)),
                // Another claim, or a user, has created one with this name.
                Err(KubeError::Api(status)) if status.code == 409 => Ok(None),
                Err(error) => Err(error),
            }
        };
        let created = ask(&format!("VolumeSnapshot {name}"), created).await?;
        if let Some(created) = &created {
            let mut memory = self.populators.memory();
            let cache = &mut memory.cache;
            cache.set_created(self.namespace(), uid(created), Instant::now());
        }
        self.mark_prime(created.as_ref().map_or(NONE, uid)).await
    }

    /// Records at the prime claim which snapshot its volume has. The binder and the snapshot controller
    /// write to it at the same time, so this is tried again with other versions.
    async fn mark_prime(&self, snapshot: &str) -> Result<Outcome> {
        let uid_of_prime = uid(self.prime()?);
        let before = annotation(self.prime()?, SNAPSHOT);
        for _ in 0..MAX_RECORD_TRIES {
            let what = format!("claim {}", self.name);
            let now = ask(&what, self.claims.get_opt(&self.name)).await?;
            let is_same =
                |prime: &_| uid(prime) == uid_of_prime && annotation(prime, SNAPSHOT) == before;
            let Some(now) = now.filter(is_same) else {
                break;
            };
            let annotations = json!({SNAPSHOT: snapshot});
            if self.annotate(&now, &annotations).await? == Outcome::Done {
                return Ok(Outcome::Done);
            }
        }
        Ok(Outcome::Stale)
    }

    async fn record_snapshot(&self, content: &str, version: Option<&str>) -> Result<Outcome> {
        let cache = self.seen.cache.as_ref();
        let cache = cache.ok_or_else(|| absent("the cache"))?;
        let api = snapshots::contents(&self.populators.client);
        let fields = json!({"metadata": {"resourceVersion": version,
            "annotations": {RECORD: cache.key.to_string()}}});
        let what = format!("VolumeSnapshotContent {content}");
        self.set_used();
        patch(&api, &what, content, fields).await
    }

    /// The snapshot of the claim is used now.
    pub(super) fn set_used(&self) {
        let cache = self.seen.cache.as_ref();
        if let Some(snapshot) = cache.and_then(|cache| cache.find_named()) {
            let mut memory = self.populators.memory();
            let cache = &mut memory.cache;
            cache.set_used(self.namespace(), &snapshot.uid, Timestamp::now());
        }
    }

    async fn delete_snapshot(&self, name: &str, uid: &str) -> Result<Outcome> {
        let api = snapshots::api(&self.populators.client, self.namespace());
        let params = only(uid, None);
        let deleted = api.delete(name, &params);
        written(&format!("VolumeSnapshot {name}"), deleted).await
    }
}
