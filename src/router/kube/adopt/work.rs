//! `slackwater pool adopt --cluster`: exchanges all PersistentVolumes of a pool, one after the other.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use ::kube::Client;
use ::kube::api::{Api, ListParams};
use k8s_openapi::api::core::v1::PersistentVolumeClaim;

use super::exchange::Exchange;
use super::manifest::{Bound, Goal, Manifest};
use super::step::{Step, next};
use super::{Done, NOTE, Plan, VolumeAction};
use crate::error::{Error, Result, chain};
use crate::router::cluster::ObjectRef;
use crate::router::kube::events::{self, EventBody};
use crate::router::kube::lists::all;
use crate::router::kube::reconcile::{Next, Outcome, POLL_INTERVAL, Reconciler, converge};
use crate::router::kube::{API_TIMEOUT, ask, topology_key};

/// Moves PersistentVolumes to the home of their pool.
struct Adoption<'a, W> {
    exchange: Exchange,
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

impl Moving {
    fn goal(&self) -> Goal<'_> {
        Goal {
            key: &self.key,
            home: &self.home,
            handle: None,
        }
    }
}

impl fmt::Display for Moving {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PersistentVolume {}", self.name)
    }
}

pub(super) async fn run<W: FnMut(&str, Step) + Send>(
    client: &Client,
    plan: &Plan,
    max_wait: Duration,
    watch: W,
) -> Result<Done> {
    let adoption = Adoption {
        exchange: Exchange::new(client, plan.pool.id, NOTE),
        plan,
        key: topology_key(&plan.driver),
        watch: Mutex::new(watch),
    };
    let mut done = Done::default();
    let mut arrived = BTreeMap::new();
    for line in &plan.lines {
        let ended = match &line.action {
            VolumeAction::Left(why) => Err(why.clone()),
            VolumeAction::Move | VolumeAction::Finish => {
                converge(&adoption, adoption.moving(&line.name)).await?
            }
        };
        match ended {
            Ok(moving) => arrived.extend(moving.live.map(|live| (line.name.clone(), live))),
            Err(why) => done.left.push((line.name.clone(), why)),
        }
    }
    adoption
        .settle(client, &mut arrived, max_wait, &mut done)
        .await?;
    Ok(done)
}

#[tonic::async_trait]
impl<W: FnMut(&str, Step) + Send> Reconciler for Adoption<'_, W> {
    type Object = Moving;
    type Step = Step;

    async fn observe(&self, moving: Moving) -> Result<Moving> {
        let (live, noted) = self.exchange.read(&moving.name).await?;
        Ok(Moving {
            live,
            noted,
            ..moving
        })
    }

    fn next(moving: &Moving) -> Next<Step> {
        next(moving.goal(), moving.live.as_ref(), moving.noted.as_ref())
    }

    /// Does one step of a PersistentVolume to its new home, where it still has the policy Retain.
    async fn execute(&self, moving: &Moving, step: Step) -> Result<Outcome> {
        {
            let mut watch = self.watch.lock().unwrap_or_else(PoisonError::into_inner);
            watch(&moving.name, step);
        }
        let manifests = (
            moving.name.as_str(),
            moving.live.as_ref(),
            moving.noted.as_ref(),
        );
        let done = self.exchange.execute(step, moving.goal(), manifests).await;
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

    /// Waits until they are bound again, and restores their policies.
    async fn settle(
        &self,
        client: &Client,
        arrived: &mut BTreeMap<String, Manifest>,
        max_wait: Duration,
        done: &mut Done,
    ) -> Result<()> {
        let mut since = Instant::now();
        while !arrived.is_empty() {
            let claims = claims(client, arrived).await?;
            let live = all(
                "PersistentVolumes",
                self.exchange.volumes(),
                ListParams::default(),
            )
            .await?;
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
            if since.elapsed() > max_wait {
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
