//! Exchanges one PersistentVolume for a copy that differs in its home: the requests to the API server.
//! Moves use it too. The PersistentVolume is stored in an annotation of a Pool object before it is
//! deleted, so the annotation's prefix says who completes what was begun.

use ::kube::Client;
use ::kube::api::{Api, DeleteParams, DynamicObject, PostParams, Preconditions};
use serde_json::{Value, json};

use super::manifest::{Goal, Manifest, POLICY};
use super::note_key;
use super::step::Step;
use super::{noted, resource};
use crate::error::{Error, Result};
use crate::model::PoolId;
use crate::router::kube::ask;
use crate::router::kube::pools::object::Pool;
use crate::router::kube::reconcile::{Outcome, patch, written};

/// Exchanges PersistentVolumes for others, which belong to one pool.
pub(in crate::router::kube) struct Exchange {
    volumes: Api<DynamicObject>,
    pools: Api<Pool>,
    /// The Pool object at which they are stored.
    pool: PoolId,
    /// The prefix of the annotations.
    prefix: &'static str,
}

impl Exchange {
    pub(in crate::router::kube) fn new(
        client: &Client,
        pool: PoolId,
        prefix: &'static str,
    ) -> Exchange {
        Exchange {
            volumes: Api::all_with(client.clone(), &resource()),
            pools: Api::all(client.clone()),
            pool,
            prefix,
        }
    }

    /// All PersistentVolumes.
    pub(super) fn volumes(&self) -> &Api<DynamicObject> {
        &self.volumes
    }

    /// A PersistentVolume as it is now, and as it is stored.
    pub(in crate::router::kube) async fn read(
        &self,
        name: &str,
    ) -> Result<(Option<Manifest>, Option<Manifest>)> {
        let what = format!("PersistentVolume {name}");
        let live = ask(&what, self.volumes.get_opt(name)).await?;
        let id = self.pool.to_string();
        let pool = ask(&format!("Pool {id}"), self.pools.get(&id)).await?;
        let stored = noted(&pool, self.prefix)?.remove(name);
        Ok((live.map(Manifest), stored))
    }

    /// Does one step of a PersistentVolume, which still has the policy Retain after the last one but
    /// `Restore`.
    pub(in crate::router::kube) async fn execute(
        &self,
        step: Step,
        goal: Goal<'_>,
        (name, live, noted): (&str, Option<&Manifest>, Option<&Manifest>),
    ) -> Result<Outcome> {
        match (step, live, noted) {
            (Step::Retain, Some(live), _) => self.retain(live).await,
            (Step::Note, Some(live), _) => self.note(live).await,
            (Step::Delete, Some(live), _) => self.delete(live).await,
            (Step::Release, Some(live), _) => self.release(live).await,
            (Step::Restore, Some(live), _) => self.restore(live).await,
            (Step::Make, _, Some(noted)) => self.make(&noted.at(goal)).await,
            (Step::Strike, ..) => self.annotate(name, Value::Null).await,
            (_, None, _) | (Step::Make, _, None) => Ok(Outcome::Stale),
        }
    }

    async fn retain(&self, live: &Manifest) -> Result<Outcome> {
        let before = live.policy();
        let metadata = json!({ "annotations": { POLICY: before } });
        let spec = json!({ "persistentVolumeReclaimPolicy": "Retain" });
        self.patch(live, only(live, metadata, spec)).await
    }

    async fn release(&self, live: &Manifest) -> Result<Outcome> {
        let metadata = json!({ "finalizers": null });
        self.patch(live, only(live, metadata, Value::Null)).await
    }

    async fn restore(&self, live: &Manifest) -> Result<Outcome> {
        let metadata = json!({ "annotations": { POLICY: null } });
        let spec = json!({ "persistentVolumeReclaimPolicy": live.policy_before() });
        self.patch(live, only(live, metadata, spec)).await
    }

    async fn patch(&self, live: &Manifest, fields: Value) -> Result<Outcome> {
        patch(&self.volumes, &what(live), live.name(), fields).await
    }

    async fn delete(&self, live: &Manifest) -> Result<Outcome> {
        let params = DeleteParams {
            preconditions: Some(Preconditions {
                uid: live.uid().map(Into::into),
                resource_version: live.version().map(Into::into),
            }),
            ..DeleteParams::default()
        };
        written(&what(live), self.volumes.delete(live.name(), &params)).await
    }

    async fn make(&self, manifest: &Manifest) -> Result<Outcome> {
        let params = PostParams::default();
        let create = self.volumes.create(&params, &manifest.0);
        written(&what(manifest), create).await
    }

    /// Stores it. The next observation verifies that it is stored.
    async fn note(&self, live: &Manifest) -> Result<Outcome> {
        let text = serde_json::to_string(&live.plain().0);
        let text = text.map_err(|error| Error::refused(what(live), error.to_string()))?;
        self.annotate(live.name(), json!(text)).await
    }

    async fn annotate(&self, name: &str, text: Value) -> Result<Outcome> {
        let id = self.pool.to_string();
        let annotations = json!({ note_key(self.prefix, name): text });
        let fields = json!({ "metadata": { "annotations": annotations } });
        patch(&self.pools, &format!("Pool {id}"), &id, fields).await
    }
}

/// Fields of a patch that changes exactly this version of a PersistentVolume, or nothing.
fn only(manifest: &Manifest, metadata: Value, spec: Value) -> Value {
    let mut metadata = metadata;
    metadata["uid"] = json!(manifest.uid());
    metadata["resourceVersion"] = json!(manifest.version());
    let mut fields = json!({ "metadata": metadata });
    if !spec.is_null() {
        fields["spec"] = spec;
    }
    fields
}

fn what(manifest: &Manifest) -> String {
    format!("PersistentVolume {}", manifest.name())
}
