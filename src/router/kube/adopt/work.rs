//! The steps, done at the API server.

use std::collections::BTreeMap;
use std::future::Future;
use std::time::{Duration, Instant};

use ::kube::api::{
    Api, DeleteParams, DynamicObject, ListParams, Patch, PatchParams, PostParams, Preconditions,
};
use ::kube::{Client, Error as KubeError};
use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use serde_json::{Value, json};

use super::manifest::{Bound, Manifest, POLICY};
use super::step::{Next, Step, next};
use super::{Done, Fate, Plan, all, note_key, noted, resource};
use crate::error::{Error, Result, chain};
use crate::router::cluster::ObjectRef;
use crate::router::kube::events::{self, EventBody};
use crate::router::kube::pool::Pool;
use crate::router::kube::{API_TIMEOUT, ask, topology_key};

/// One PersistentVolume needs seven steps; sidecars change it in between, and then some are done
/// again.
const MAX_STEPS: usize = 100;
/// Between two looks at what somebody else has to do.
const POLL_INTERVAL: Duration = Duration::from_millis(500);

/// How one PersistentVolume ended.
enum End {
    Arrived(Box<Manifest>),
    Gone,
    Left(String),
}

/// An answer that says that what was looked at has changed since.
enum Write {
    Done,
    Stale,
}

struct Work<'a, W> {
    volumes: Api<DynamicObject>,
    pools: Api<Pool>,
    plan: &'a Plan,
    key: String,
    watch: W,
}

pub(super) async fn run<W: FnMut(&str, Step) + Send>(
    client: &Client,
    plan: &Plan,
    patience: Duration,
    watch: W,
) -> Result<Done> {
    let mut work = Work {
        volumes: Api::all_with(client.clone(), &resource()),
        pools: Api::all(client.clone()),
        plan,
        key: topology_key(&plan.driver),
        watch,
    };
    let mut done = Done::default();
    let mut arrived = BTreeMap::new();
    for line in &plan.lines {
        let ended = match &line.fate {
            Fate::Left(why) => End::Left(why.clone()),
            Fate::Move | Fate::Finish => work.bring(&line.name).await?,
        };
        match ended {
            End::Arrived(manifest) => drop(arrived.insert(line.name.clone(), *manifest)),
            End::Gone => {}
            End::Left(why) => done.left.push((line.name.clone(), why)),
        }
    }
    work.settle(client, &mut arrived, patience, &mut done)
        .await?;
    Ok(done)
}

/// What somebody has changed in between is looked at again; anything else is an error.
async fn written<T>(
    what: &str,
    write: impl Future<Output = Result<T, KubeError>> + Send,
) -> Result<Write> {
    let reason = match tokio::time::timeout(API_TIMEOUT, write).await {
        Ok(Ok(_)) => return Ok(Write::Done),
        Ok(Err(KubeError::Api(status))) if status.code == 409 || status.code == 404 => {
            return Ok(Write::Stale);
        }
        Ok(Err(error)) => chain(&error),
        Err(_) => "no answer; run the command again, and it continues where it stopped".into(),
    };
    Err(Error::Unreachable {
        what: what.into(),
        reason,
    })
}

/// Changes that very version of it, or nothing.
fn only(manifest: &Manifest, metadata: Value, spec: Value) -> Patch<Value> {
    let mut metadata = metadata;
    metadata["uid"] = json!(manifest.uid());
    metadata["resourceVersion"] = json!(manifest.version());
    let mut patch = json!({ "metadata": metadata });
    if !spec.is_null() {
        patch["spec"] = spec;
    }
    Patch::Merge(patch)
}

impl<W: FnMut(&str, Step) + Send> Work<'_, W> {
    async fn live(&self, name: &str) -> Result<Option<Manifest>> {
        let what = format!("PersistentVolume {name}");
        Ok(ask(&what, self.volumes.get_opt(name)).await?.map(Manifest))
    }

    async fn noted(&self, name: &str) -> Result<Option<Manifest>> {
        let id = self.plan.pool.id.to_string();
        let pool = ask(&format!("Pool {id}"), self.pools.get(&id)).await?;
        Ok(noted(&pool)?.remove(name))
    }

    /// Brings one to its new home, still with the policy Retain.
    async fn bring(&mut self, name: &str) -> Result<End> {
        let mut refused = false;
        for _ in 0..MAX_STEPS {
            let (live, noted) = (self.live(name).await?, self.noted(name).await?);
            let home = self.plan.pool.home.as_str();
            let next = next((&self.key, home), live.as_ref(), noted.as_ref());
            if let Some(step) = next.step() {
                (self.watch)(name, step);
            }
            let written = match (next, live) {
                (Next::Arrived, Some(live)) => return Ok(End::Arrived(Box::new(live))),
                (Next::Arrived | Next::Gone, _) => return Ok(End::Gone),
                (Next::Refuse(why), _) if refused => return Ok(End::Left(why)),
                // Another run may have done a step between the two looks.
                (Next::Refuse(_), _) => {
                    refused = true;
                    Write::Stale
                }
                (Next::Retain, Some(live)) => self.retain(&live).await?,
                (Next::Note, Some(live)) => self.note(&live).await?,
                (Next::Delete, Some(live)) => self.delete(&live).await?,
                (Next::Release, Some(live)) => self.release(&live).await?,
                (Next::Make(manifest), _) => self.make(&manifest).await?,
                (Next::Strike, _) => self.strike(name).await?,
                (Next::Wait | Next::Retain | Next::Note | Next::Delete | Next::Release, _) => {
                    Write::Stale
                }
            };
            if matches!(written, Write::Stale) {
                tokio::time::sleep(POLL_INTERVAL).await;
            }
        }
        Ok(End::Left(
            "it keeps being changed by someone else; run the command again".into(),
        ))
    }

    async fn retain(&self, live: &Manifest) -> Result<Write> {
        let metadata = json!({ "annotations": { POLICY: live.policy() } });
        let spec = json!({ "persistentVolumeReclaimPolicy": "Retain" });
        self.patch(live, &only(live, metadata, spec)).await
    }

    async fn release(&self, live: &Manifest) -> Result<Write> {
        let metadata = json!({ "finalizers": null });
        self.patch(live, &only(live, metadata, Value::Null)).await
    }

    async fn patch(&self, live: &Manifest, patch: &Patch<Value>) -> Result<Write> {
        let params = PatchParams::default();
        let what = format!("PersistentVolume {}", live.name());
        written(&what, self.volumes.patch(live.name(), &params, patch)).await
    }

    async fn delete(&self, live: &Manifest) -> Result<Write> {
        let params = DeleteParams {
            preconditions: Some(Preconditions {
                uid: live.uid().map(Into::into),
                resource_version: live.version().map(Into::into),
            }),
            ..DeleteParams::default()
        };
        let what = format!("PersistentVolume {}", live.name());
        written(&what, self.volumes.delete(live.name(), &params)).await
    }

    async fn make(&self, manifest: &Manifest) -> Result<Write> {
        let what = format!("PersistentVolume {}", manifest.name());
        let params = PostParams::default();
        written(&what, self.volumes.create(&params, &manifest.0)).await
    }

    /// Writes it down, and looks that it's written.
    async fn note(&self, live: &Manifest) -> Result<Write> {
        let text = serde_json::to_string(&live.plain().0);
        let text = text.map_err(|error| {
            Error::refused(
                format!("PersistentVolume {}", live.name()),
                error.to_string(),
            )
        })?;
        self.annotate(live.name(), json!(text)).await
    }

    async fn strike(&self, name: &str) -> Result<Write> {
        self.annotate(name, Value::Null).await
    }

    async fn annotate(&self, name: &str, text: Value) -> Result<Write> {
        let id = self.plan.pool.id.to_string();
        let annotations = json!({ note_key(name): text });
        let patch = Patch::Merge(json!({ "metadata": { "annotations": annotations } }));
        let params = PatchParams::default();
        written(
            &format!("Pool {id}"),
            self.pools.patch(&id, &params, &patch),
        )
        .await
    }

    /// Waits until they're bound again, and restores their policies.
    async fn settle(
        &mut self,
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
                if let Some(policy) = now.policy_before() {
                    (self.watch)(&name, Step::Restore);
                    let metadata = json!({ "annotations": { POLICY: null } });
                    let spec = json!({ "persistentVolumeReclaimPolicy": policy });
                    let written = self.patch(now, &only(now, metadata, spec)).await?;
                    if matches!(written, Write::Stale) {
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
                return Err(Error::Unreachable {
                    what: "the PersistentVolume controller of Kubernetes".into(),
                    reason: format!(
                        "PersistentVolumes {} were recreated with the reclaim policy Retain, but are not bound yet; run the command again once they are bound",
                        names.join(", ")
                    ),
                });
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
        Ok(())
    }

    /// Kubernetes has told the claim's owner meanwhile that all data is lost.
    async fn record_event(&self, client: &Client, now: &Manifest) {
        let Some(Bound { claim, .. }) = now.bound() else {
            return;
        };
        let words = EventBody {
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
        // Nothing is told of the routers here, so their namespace isn't needed.
        let from = (self.plan.driver.as_str(), "slackwater-pool-adopt", "");
        let sent = events::one(client, from, &words, &events::EventAction::Create);
        if let Ok(Err(error)) = tokio::time::timeout(API_TIMEOUT, sent).await {
            tracing::debug!(error = %chain(&error), "failed to create an event for a claim");
        }
    }
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

/// Whether its own policy may do again what it does. A claim that is gone, or another one now, is
/// waited for by nobody.
fn is_settled(now: &Manifest, claims: &BTreeMap<Bound, String>) -> bool {
    let Some(bound) = now.bound() else {
        return true;
    };
    match claims.get(&bound) {
        Some(phase) => phase == "Bound" && now.phase() == "Bound",
        None => true,
    }
}
