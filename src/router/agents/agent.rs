//! One agent: its connection, its last description, and when it last answered.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use tokio::sync::{Notify, OnceCell, Semaphore, watch};
use tokio::time::timeout;
use tonic::transport::Channel;
use tonic::{Code, Status, TimeoutExpired};

use super::{DESCRIBE_TIMEOUT, Dial, MAX_STATUS_AGE, POLL_INTERVAL};
use crate::agent::agent_client::AgentClient;
use crate::agent::{DescribeRequest, DescribeResponse};
use crate::csi::controller_client::ControllerClient;
use crate::csi::snapshot_metadata_client::SnapshotMetadataClient;
use crate::error::{Error, Result, chain};
use crate::model::PoolId;
use crate::router::checked;

/// Maximum size of an answer: a page of 5000 volumes has about 1.5 MB; descriptions of groups and
/// stream messages are smaller.
const ANSWER_BYTES: usize = 16 << 20;

/// What is known of an agent.
#[derive(Clone, Debug, Default)]
pub struct Seen {
    /// When the last request began that was answered, or failed.
    asked: Option<Instant>,
    /// When it last answered.
    pub answered: Option<Instant>,
    /// Its description at that time.
    pub description: Option<Arc<DescribeResponse>>,
    /// Its pools whose IDs are known, at that time.
    pub pools: Arc<[ShownPool]>,
    /// Why it cannot be reached now; none if it can.
    pub problem: Option<String>,
    /// The problem is that its description was refused.
    pub is_refused: bool,
}

impl Seen {
    /// Whether it has answered or failed at its present address.
    pub fn is_asked(&self) -> bool {
        self.asked.is_some()
    }

    /// Whether the last request was answered.
    pub fn is_reachable(&self) -> bool {
        self.is_asked() && self.problem.is_none()
    }
}

/// A pool as an agent last reported it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShownPool {
    pub id: PoolId,
    /// Its name in the agent's configuration.
    pub name: String,
    /// Whether it is served.
    pub served: bool,
    /// Removed by `pool forget`: its IDs are permanently invalid.
    pub forgotten: bool,
}

/// One agent: its address, its last description, and its channels.
pub struct Agent {
    node: String,
    address: String,
    dial: Arc<dyn Dial>,
    channel: OnceCell<Channel>,
    /// A channel used only for cuts.
    cuts: OnceCell<Channel>,
    seen: watch::Sender<Seen>,
    wanted: Notify,
    refusals: AtomicU64,
}

impl Agent {
    pub(super) fn new(
        node: &str,
        address: &str,
        dial: Arc<dyn Dial>,
        before: Option<Seen>,
    ) -> Agent {
        let before = before.unwrap_or_default();
        let seen = Seen {
            asked: None,
            ..before
        };
        Agent {
            node: node.to_string(),
            address: address.to_string(),
            dial,
            channel: OnceCell::new(),
            cuts: OnceCell::new(),
            seen: watch::channel(seen).0,
            wanted: Notify::new(),
            refusals: AtomicU64::default(),
        }
    }

    /// Counts an answer that was refused.
    pub(in crate::router) fn refused(&self) {
        self.refusals.fetch_add(1, Ordering::Relaxed);
    }

    /// Number of its answers that were refused, at this address.
    pub fn refusals(&self) -> u64 {
        self.refusals.load(Ordering::Relaxed)
    }

    /// The name of its node.
    pub fn node(&self) -> &str {
        &self.node
    }

    /// "host:port".
    pub fn address(&self) -> &str {
        &self.address
    }

    /// What is known of it now.
    pub fn seen(&self) -> Seen {
        self.seen.borrow().clone()
    }

    /// The topology segment that it last reported; empty if it reported none.
    pub fn home(&self) -> String {
        let seen = self.seen.borrow();
        let description = seen.description.as_ref();
        description
            .map(|description| description.home.clone())
            .unwrap_or_default()
    }

    /// How it last reported a pool.
    pub fn shown(&self, pool: PoolId) -> Option<ShownPool> {
        let seen = self.seen.borrow();
        seen.pools.iter().find(|shown| shown.id == pool).cloned()
    }

    /// The pool on it that a class selects, by its last report: the named one, the one named
    /// `default`, or the only one.
    pub fn meant(&self, class: Option<&str>) -> Option<crate::agent::Pool> {
        let seen = self.seen.borrow();
        let pools = &seen.description.as_ref()?.pools;
        let mut configured = pools.iter().filter(|pool| !pool.forgotten);
        let wanted = class.unwrap_or("default");
        let named = configured.clone().find(|pool| pool.name == wanted);
        let only = match (configured.next(), configured.next()) {
            (only, None) if class.is_none() => only,
            _ => None,
        };
        named.or(only).cloned()
    }

    /// Fails at once if its last request failed.
    pub fn check(&self) -> Result<()> {
        match &self.seen.borrow().problem {
            Some(problem) => Err(self.unreachable(problem)),
            None => Ok(()),
        }
    }

    /// Like [`Agent::check`], after asking it again if that was some time ago: an agent that has
    /// just become reachable again is not refused.
    pub async fn reachable(&self) -> Result<()> {
        if self.seen.borrow().is_reachable() {
            return Ok(());
        }
        self.ask().await;
        self.check()
    }

    /// The error that the agent cannot be reached.
    pub fn unreachable(&self, problem: &str) -> Error {
        Error::unreachable(
            format!("the agent of node {}", self.node),
            format!("{problem} ({})", self.address),
        )
    }

    /// Asks it for its description, unless it was asked just now, and waits for the answer or the
    /// failure: at most some seconds.
    pub async fn ask(&self) {
        let now = Instant::now();
        self.ask_since(now.checked_sub(MAX_STATUS_AGE).unwrap_or(now))
            .await;
    }

    /// Like [`Agent::ask`], unless it was asked since `moment`.
    pub(in crate::router) async fn ask_since(&self, moment: Instant) {
        let mut seen = self.seen.subscribe();
        let is_new = |seen: &Seen| seen.asked >= Some(moment);
        if is_new(&seen.borrow()) {
            return;
        }
        self.wanted.notify_one();
        // Long enough for the request before this one, and for this one. An agent that was removed
        // from the set is not asked any more.
        let _ = timeout(2 * DESCRIBE_TIMEOUT, seen.wait_for(is_new)).await;
    }

    /// Polls it: every few seconds, and when a description is requested.
    pub(super) async fn poll(
        &self,
        driver_name: &str,
        asking: &Semaphore,
        changed: &watch::Sender<u64>,
    ) {
        loop {
            // The semaphore is never closed.
            let turn = asking.acquire().await;
            let asked = Instant::now();
            let described = match timeout(DESCRIBE_TIMEOUT, self.describe()).await {
                Ok(described) => described,
                Err(_) => Err(format!(
                    "it did not answer within {} s",
                    DESCRIBE_TIMEOUT.as_secs()
                )),
            };
            drop(turn);
            let verified = |description| self.verify(description, driver_name);
            let (described, is_refused) = match described.map(verified) {
                Ok(Err(why)) => {
                    self.refused();
                    (Err(format!("its description was rejected: {why}")), true)
                }
                Ok(description) => (description, false),
                Err(problem) => (Err(problem), false),
            };
            if self.learn(asked, described, is_refused) {
                changed.send_modify(|rounds| *rounds += 1);
            }
            // Spread, so that agents are not all asked at the same time.
            let pause = POLL_INTERVAL.mul_f64(0.9 + 0.2 * spread(&self.node));
            let _ = timeout(pause, self.wanted.notified()).await;
        }
    }

    async fn describe(&self) -> Result<DescribeResponse, String> {
        let client = self.client().await.map_err(|error| chain(&error));
        let answer = client?.describe(DescribeRequest {}).await;
        answer
            .map(|answer| answer.into_inner())
            .map_err(|status| status_text(&status))
    }

    /// Another server at this address must not receive requests for volumes.
    fn verify(
        &self,
        description: DescribeResponse,
        driver_name: &str,
    ) -> Result<DescribeResponse, String> {
        if description.node_name != self.node {
            return Err(format!("it reports to be node {:?}", description.node_name));
        }
        if description.driver_name != driver_name {
            let other = &description.driver_name;
            return Err(format!(
                "it belongs to driver {other:?} instead of {driver_name:?}"
            ));
        }
        checked::description(description)
    }

    /// Stores the answer; returns whether it differs from the previous one.
    fn learn(
        &self,
        asked: Instant,
        described: Result<DescribeResponse, String>,
        is_refused: bool,
    ) -> bool {
        let mut news = false;
        self.seen.send_modify(|seen| {
            seen.asked = Some(asked);
            let problem = described.as_ref().err().cloned();
            news = seen.problem != problem;
            match (&seen.problem, &problem) {
                (None, Some(problem)) => {
                    tracing::warn!(node = self.node, problem, "lost contact with an agent");
                }
                (Some(_), None) => {
                    tracing::info!(node = self.node, "regained contact with an agent");
                }
                (None, None) | (Some(_), Some(_)) => {}
            }
            seen.problem = problem;
            seen.is_refused = is_refused;
            let Ok(description) = described else { return };
            seen.answered = Some(Instant::now());
            if seen.description.as_deref() != Some(&description) {
                news = true;
                seen.pools = description.pools.iter().filter_map(shown).collect();
                seen.description = Some(Arc::new(description));
            }
        });
        news
    }

    /// A channel to the agent, created at the first call. It connects and reconnects by itself.
    pub async fn channel(&self) -> Result<Channel> {
        let dial = || self.dial.dial(&self.node, &self.address);
        self.channel.get_or_try_init(dial).await.cloned()
    }

    /// The client of the agent's own service, besides CSI.
    pub async fn client(&self) -> Result<AgentClient<Channel>> {
        let client = AgentClient::new(self.channel().await?);
        Ok(client.max_decoding_message_size(ANSWER_BYTES))
    }

    /// Like [`Agent::client`] for cuts, over a separate connection: on a shared slow connection, a
    /// long list would delay the request to thaw.
    pub async fn cuts(&self) -> Result<AgentClient<Channel>> {
        let dial = || self.dial.dial(&self.node, &self.address);
        let channel = self.cuts.get_or_try_init(dial).await?.clone();
        Ok(AgentClient::new(channel).max_decoding_message_size(ANSWER_BYTES))
    }

    /// Client of its CSI Controller service.
    pub async fn controller(&self) -> Result<ControllerClient<Channel>> {
        let client = ControllerClient::new(self.channel().await?);
        Ok(client.max_decoding_message_size(ANSWER_BYTES))
    }

    /// Client of its CSI SnapshotMetadata service.
    pub async fn metadata(&self) -> Result<SnapshotMetadataClient<Channel>> {
        let client = SnapshotMetadataClient::new(self.channel().await?);
        Ok(client.max_decoding_message_size(ANSWER_BYTES))
    }

    /// The error of a CSI call: the agent's answer, or the failure of the connection.
    ///
    /// A status that comes from the connection (which may break in the middle of a call) must not
    /// be taken for the agent's answer: some codes are final for callers, which would then forget
    /// what was created. So it becomes UNAVAILABLE, as do codes that an agent never returns.
    pub fn error(&self, status: &Status) -> Error {
        let from_connection = std::error::Error::source(status).is_some();
        match status.code() {
            Code::Unknown | Code::DataLoss | Code::PermissionDenied | Code::Unauthenticated => {
                self.unreachable(&status_text(status))
            }
            // The deadline of the call itself. A connection that is closed in the middle of a call
            // gives CANCELLED as well.
            Code::Cancelled if from_connection && !beneath::<TimeoutExpired>(status) => {
                self.wanted.notify_one();
                self.unreachable(&status_text(status))
            }
            Code::Cancelled | Code::DeadlineExceeded => answered(status),
            _ if from_connection => {
                // Poll it now, not at the next interval.
                self.wanted.notify_one();
                self.unreachable(&status_text(status))
            }
            _ => answered(status),
        }
    }
}

/// Whether a status was caused by such an error.
pub(in crate::router) fn beneath<E: std::error::Error + 'static>(status: &Status) -> bool {
    let mut source = std::error::Error::source(status);
    while let Some(cause) = source {
        if cause.is::<E>() {
            return true;
        }
        source = cause.source();
    }
    false
}

fn answered(status: &Status) -> Error {
    Error::Forwarded {
        code: status.code() as i32,
        message: status.message().to_string(),
    }
}

/// The text of a status, with its causes.
fn status_text(status: &Status) -> String {
    let mut text = status.message().to_string();
    let mut source = std::error::Error::source(status);
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text.push_str(": ");
            text.push_str(&cause_text);
        }
        source = cause.source();
    }
    text
}

fn shown(pool: &crate::agent::Pool) -> Option<ShownPool> {
    Some(ShownPool {
        id: pool.id.parse().ok()?,
        name: pool.name.clone(),
        served: pool.refusal.is_empty(),
        forgotten: pool.forgotten,
    })
}

/// A number from 0 to 1, always the same for the same name.
fn spread(name: &str) -> f64 {
    let sum = name.bytes().fold(7u32, |sum, byte| {
        sum.wrapping_mul(31).wrapping_add(u32::from(byte))
    });
    f64::from(sum % 1000) / 1000.0
}
