//! The steps of adoption, done at the API server.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use ::kube::Client;
use ::kube::api::{Api, DeleteParams, DynamicObject, ListParams, PostParams, Preconditions};
use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use serde_json::{Value, json};

use super::manifest::{Bound, Manifest, POLICY};
use super::step::{Step, next};
use super::{Done, Fate, Plan, all, note_key, noted, resource};
use crate::error::{Error, Result, chain};
use crate::router::cluster::ObjectRef;
use crate::router::kube::events::{self, EventBody};
use crate::router::kube::pool::Pool;
use crate::router::kube::reconcile::{
    Next, Outcome, POLL_INTERVAL, Reconciler, converge, patch, written,
};
use crate::router::kube::{API_TIMEOUT, ask, topology_key};

/// Moves PersistentVolumes to the home of their pool.
struct Adoption<'a, W> {
    volumes: Api<DynamicObject>,
    pools: Api<Pool>,
    plan: &'a Plan,
    key: String,
    /// Gets each step before it is done.
    watch: Mutex<W>,
}

/// A PersistentVolume that is being moved.
struct Moving {
    name: String,
    key: String,
    home: String,
    live: Option<Manifest>,
    /// The version that is stored at the Pool object.
    noted: Option<Manifest>,
}

impl fmt::Display for Moving {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PersistentVolume {}", self.name)
    }
}

pub(super) async fn run<W: FnMut(&str, Step) + Send>(
    client: &Client,
    plan: &Plan,
    patience: Duration,
    watch: W,
) -> Result<Done> {
    let adoption = Adoption {
        volumes: Api::all_with(client.clone(), &resource()),
        pools: Api::all(client.clone()),
        plan,
        key: topology_key(&plan.driver),
        watch: Mutex::new(watch),
    };
    let mut done = Done::default();
    let mut arrived = BTreeMap::new();
    for line in &plan.lines {
        let ended = match &line.fate {
            Fate::Left(why) => Err(why.clone()),
            Fate::Move | Fate::Finish => converge(&adoption, adoption.moving(&line.name)).await?,
        };
        match ended {
            Ok(moving) => arrived.extend(moving.live.map(|live| (line.name.clone(), live))),
            Err(why) => done.left.push((line.name.clone(), why)),
        }
    }
    adoption
        .settle(client, &mut arrived, patience, &mut done)
        .await?;
    Ok(done)
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

#[tonic::async_trait]
impl<W: FnMut(&str, Step) + Send> Reconciler for Adoption<'_, W> {
    type Object = Moving;
    type Step = Step;

    async fn observe(&self, moving: Moving) -> Result<Moving> {
        let live = ask(&moving.to_string(), self.volumes.get_opt(&moving.name)).await?;
        let id = self.plan.pool.id.to_string();
        let pool = ask(&format!("Pool {id}"), self.pools.get(&id)).await?;
        Ok(Moving {
            live: live.map(Manifest),
            noted: noted(&pool)?.remove(&moving.name),
            ..moving
        })
    }

    fn next(moving: &Moving) -> Next<Step> {
        let to = (moving.key.as_str(), moving.home.as_str());
        next(to, moving.live.as_ref(), moving.noted.as_ref())
    }

    /// Does one step of a PersistentVolume to its new home, where it still has the policy Retain.
    async fn execute(&self, moving: &Moving, step: Step) -> Result<Outcome> {
        {
            let mut watch = self.watch.lock().unwrap_or_else(PoisonError::into_inner);
            watch(&moving.name, step);
        }
        let done = match (step, &moving.live, &moving.noted) {
            (Step::Retain, Some(live), _) => self.retain(live).await,
            (Step::Note, Some(live), _) => self.note(live).await,
            (Step::Delete, Some(live), _) => self.delete(live).await,
            (Step::Release, Some(live), _) => self.release(live).await,
            (Step::Restore, Some(live), _) => self.restore(live).await,
            (Step::Make, _, Some(noted)) => self.make(&noted.at(&moving.key, &moving.home)).await,
            (Step::Strike, ..) => self.annotate(&moving.name, Value::Null).await,
            (_, None, _) | (Step::Make, _, None) => Ok(Outcome::Stale),
        };
        done.map_err(|error| match error {
            Error::Unreachable { what, reason } => Error::unreachable(
                what,
                format!("{reason}; run the command again, and it continues where it stopped"),
            ),
            error => error,
        })
    }
}

impl<W: FnMut(&str, Step) + Send> Adoption<'_, W> {
    fn moving(&self, name: &str) -> Moving {
        Moving {
            name: name.into(),
            key: self.key.clone(),
            home: self.plan.pool.home.clone(),
            live: None,
            noted: None,
        }
    }

    async fn retain(&self, live: &Manifest) -> Result<Outcome> {
        let metadata = json!({ "annotations": { POLICY: live.policy() } });
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
        let id = self.plan.pool.id.to_string();
        let annotations = json!({ note_key(name): text });
        let fields = json!({ "metadata": { "annotations": annotations } });
        patch(&self.pools, &format!("Pool {id}"), &id, fields).await
    }

    /// Waits until they are bound again, and restores their policies.
    async fn settle(
        &self,
        client: &Client,
        arrived: &mut BTreeMap<String, Manifest>,
        patience: Duration,
        done: &mut Done,
    ) -> Result<()> {
        let mut since = Instant::now();
        while !arrived.is_empty() {
            let claims = claims(client, arrived).await?;
            let live = all("PersistentVolumes", &self.volumes, ListParams::default()).await?;
            let live = live.into_iter().map(Manifest);
            let live: BTreeMap<String, Manifest> =
                live.map(|one| (one.name().to_string(), one)).collect();
            let mut waiting = BTreeMap::new();
            for (name, before) in std::mem::take(arrived) {
                let Some(now) = live.get(&name) else {
                    continue;
                };
                if !is_settled(now, &claims) {
                    waiting.insert(name, before);
                    continue;
                }
                if now.policy_before().is_some() {
                    let moving = Moving {
                        live: Some(now.clone()),
                        ..self.moving(&name)
                    };
                    if self.execute(&moving, Step::Restore).await? == Outcome::Stale {
                        waiting.insert(name, before);
                        continue;
                    }
                }
                self.record_event(client, now).await;
                done.moved.push(name);
                since = Instant::now();
            }
            *arrived = waiting;
            if arrived.is_empty() {
                break;
            }
            if since.elapsed() > patience {
                let names: Vec<_> = arrived.keys().map(String::as_str).collect();
                return Err(Error::unreachable(
                    "the PersistentVolume controller of Kubernetes",
                    format!(
                        "PersistentVolumes {} were recreated with the reclaim policy Retain, but are not bound yet; run the command again once they are bound",
                        names.join(", ")
                    ),
                ));
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
        Ok(())
    }

    /// An event of Kubernetes has reported in the meantime that all data of the claim is lost.
    async fn record_event(&self, client: &Client, now: &Manifest) {
        let Some(Bound { claim, .. }) = now.bound() else {
            return;
        };
        let body = EventBody {
            about: ObjectRef::Claim(claim),
            is_warning: false,
            reason: "VolumeAdopted",
            message: format!(
                "PersistentVolume {} was moved with its pool to node {} (home {}); no data is lost, even if an earlier event says so",
                now.name(),
                self.plan.pool.node,
                self.plan.pool.home
            ),
        };
        // No event is about the routers here, so their namespace is not needed.
        let from = (self.plan.driver.as_str(), "slackwater-pool-adopt", "");
        let sent = events::one(client, from, &body, &events::EventAction::Create);
        if let Ok(Err(error)) = tokio::time::timeout(API_TIMEOUT, sent).await {
            tracing::debug!(error = %chain(&error), "failed to create an event for a claim");
        }
    }
}

fn what(manifest: &Manifest) -> String {
    format!("PersistentVolume {}", manifest.name())
}

/// Phases of claims, by "namespace/name" and uid.
async fn claims(
    client: &Client,
    arrived: &BTreeMap<String, Manifest>,
) -> Result<BTreeMap<Bound, String>> {
    let mut phases = BTreeMap::new();
    for bound in arrived.values().filter_map(Manifest::bound) {
        let Some((namespace, name)) = bound.claim.split_once('/') else {
            continue;
        };
        let api = Api::<PersistentVolumeClaim>::namespaced(client.clone(), namespace);
        let found = ask(&format!("claim {}", bound.claim), api.get_opt(name)).await?;
        let found = found.filter(|claim| claim.metadata.uid.as_deref() == Some(&bound.uid));
        if let Some(claim) = found {
            let phase = claim.status.and_then(|status| status.phase);
            phases.insert(bound, phase.unwrap_or_default());
        }
    }
    Ok(phases)
}

/// Whether its own policy may be in force again. A claim that is gone, or that was created again, is not
/// waited for.
fn is_settled(now: &Manifest, claims: &BTreeMap<Bound, String>) -> bool {
    let Some(bound) = now.bound() else {
        return true;
    };
    match claims.get(&bound) {
        Some(phase) => phase == "Bound" && now.phase() == "Bound",
        None => true,
    }
}
