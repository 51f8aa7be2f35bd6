//! The election of the leading router: a Lease, held by the pod whose name is in it.
//!
//! A holder leads only while its last renewal is recent, by its own monotonic clock and counted from
//! before the request was sent. Another router takes over only after it has seen no renewal for longer
//! than that, by its own clock. No clocks are compared.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use ::kube::api::{Api, PostParams};
use ::kube::{Client, Error as KubeError};
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use k8s_openapi::jiff::Timestamp;

use super::watches::WatchStates;
use crate::error::chain;

/// A Lease that was not renewed for this time is taken over.
const LEASE_DURATION: Duration = Duration::from_secs(30);
/// A router leads for this time after a renewal. It is shorter than the time above, so that work which
/// it has begun ends before another router leads.
const RENEW_DEADLINE: Duration = Duration::from_secs(20);
/// Between two renewals, and between two reads by a router that does not lead. The leader sends 12
/// requests a minute, every other router 6.
const RETRY_PERIOD: Duration = Duration::from_secs(10);
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);
/// The name of the Lease among the watches.
const WHAT: &str = "the Lease";

/// A candidate.
pub struct Leadership {
    api: Api<Lease>,
    name: String,
    me: String,
    pace: Pace,
    following: Arc<WatchStates>,
    state: Mutex<State>,
}

/// Times, which are shorter in tests.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    /// A Lease that was not renewed for this time is taken over.
    pub duration: Duration,
    /// A router leads for this time after a renewal; less than `duration`.
    pub belief: Duration,
    /// Between two renewals, and between two reads.
    pub every: Duration,
}

impl Default for Pace {
    fn default() -> Pace {
        Pace {
            duration: LEASE_DURATION,
            belief: RENEW_DEADLINE,
            every: RETRY_PERIOD,
        }
    }
}

#[derive(Default)]
struct State {
    /// The time before the last successful renewal was sent.
    renewed: Option<Instant>,
    /// The Lease of another holder, and since when it has been unchanged.
    seen: Option<(LeaseSpec, Instant)>,
    has_ended: bool,
}

impl Leadership {
    /// A candidate named `me` for the Lease `name` in `namespace`.
    pub fn new(
        client: Client,
        (namespace, name): (&str, &str),
        me: &str,
        pace: Pace,
        following: Arc<WatchStates>,
    ) -> Leadership {
        Leadership {
            api: Api::namespaced(client, namespace),
            name: name.into(),
            me: me.into(),
            pace,
            following,
            state: Mutex::default(),
        }
    }

    /// Whether this router leads: its last renewal is recent.
    pub fn is_leader(&self) -> bool {
        let state = self.state();
        !state.has_ended
            && state
                .renewed
                .is_some_and(|at| at.elapsed() < self.pace.belief)
    }

    /// Renews the Lease or waits for it, until [`Leadership::resign`].
    pub async fn run(&self) {
        while !self.state().has_ended {
            let was = self.is_leader();
            let answer = tokio::time::timeout(REQUEST_TIMEOUT, self.step()).await;
            let answer = match answer {
                Ok(answer) => answer.map_err(|error| chain(&error)),
                Err(_) => Err(format!("no answer within {} s", REQUEST_TIMEOUT.as_secs())),
            };
            if answer.is_ok() {
                self.following.completed(WHAT);
            }
            self.following.record_answer(WHAT, answer);
            match (was, self.is_leader()) {
                (false, true) => tracing::info!(identity = self.me, "became the leader"),
                (true, false) => tracing::warn!(identity = self.me, "lost the leadership"),
                (true, true) | (false, false) => {}
            }
            tokio::time::sleep(self.pace.every).await;
        }
    }

    /// Releases the Lease, so that another router does not have to wait. This one never leads again.
    pub async fn resign(&self) {
        let led = self.is_leader();
        self.state().has_ended = true;
        if !led {
            return;
        }
        let given_up = async {
            let mut lease = self.api.get(&self.name).await?;
            let spec = lease.spec.get_or_insert_default();
            if spec.holder_identity.as_deref() == Some(self.me.as_str()) {
                spec.holder_identity = Some(String::new());
                spec.renew_time = Some(MicroTime(Timestamp::now()));
                self.api
                    .replace(&self.name, &PostParams::default(), &lease)
                    .await?;
            }
            Ok::<_, KubeError>(())
        };
        // If this fails, the Lease expires.
        let _ = tokio::time::timeout(REQUEST_TIMEOUT, given_up).await;
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn step(&self) -> Result<(), KubeError> {
        let begun = Instant::now();
        let Some(mut lease) = self.api.get_opt(&self.name).await? else {
            let lease = Lease {
                metadata: ::kube::api::ObjectMeta {
                    name: Some(self.name.clone()),
                    ..Default::default()
                },
                spec: Some(self.mine(None)),
            };
            return match self.api.create(&PostParams::default(), &lease).await {
                Ok(_) => self.won(begun),
                Err(error) => lost_a_race(error),
            };
        };
        let spec = lease.spec.clone().unwrap_or_default();
        if !self.may_take(&spec, begun) {
            return Ok(());
        }
        lease.spec = Some(self.mine(Some(&spec)));
        // Only over the version that was read.
        match self
            .api
            .replace(&self.name, &PostParams::default(), &lease)
            .await
        {
            Ok(_) => self.won(begun),
            Err(error) => lost_a_race(error),
        }
    }

    fn won(&self, begun: Instant) -> Result<(), KubeError> {
        let mut state = self.state();
        state.renewed = Some(begun);
        state.seen = None;
        Ok(())
    }

    /// Whether the Lease is this router's, has no holder, or was not renewed for too long.
    fn may_take(&self, spec: &LeaseSpec, now: Instant) -> bool {
        let holder = spec.holder_identity.as_deref().unwrap_or_default();
        if holder.is_empty() || holder == self.me {
            return true;
        }
        let mut state = self.state();
        state.renewed = None;
        let since = match &state.seen {
            Some((seen, since)) if seen == spec => *since,
            Some(_) | None => now,
        };
        state.seen = Some((spec.clone(), since));
        // A holder of another release may have other times.
        let its = spec
            .lease_duration_seconds
            .and_then(|s| u64::try_from(s).ok());
        let its = Duration::from_secs(its.unwrap_or(0));
        now.duration_since(since) > self.pace.duration.max(its)
    }

    fn mine(&self, before: Option<&LeaseSpec>) -> LeaseSpec {
        let now = MicroTime(Timestamp::now());
        let same = before.filter(|spec| spec.holder_identity.as_deref() == Some(self.me.as_str()));
        let changes = before.and_then(|spec| spec.lease_transitions).unwrap_or(0);
        LeaseSpec {
            holder_identity: Some(self.me.clone()),
            lease_duration_seconds: i32::try_from(self.pace.duration.as_secs().max(1)).ok(),
            acquire_time: same.map_or_else(|| Some(now.clone()), |spec| spec.acquire_time.clone()),
            lease_transitions: Some(changes + i32::from(before.is_some() && same.is_none())),
            renew_time: Some(now),
            ..LeaseSpec::default()
        }
    }
}

/// It is no error that another router was faster.
fn lost_a_race(error: KubeError) -> Result<(), KubeError> {
    match error {
        KubeError::Api(status) if status.code == 409 => Ok(()),
        error => Err(error),
    }
}
