//! One agent.

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

/// Largest answer that is taken: a page of 5000 volumes has some 1.5 MB, and descriptions of
/// groups and streams less.
const ANSWER_BYTES: usize = 16 << 20;

/// What is known of an agent.
#[derive(Clone, Debug, Default)]
pub struct Seen {
    /// When the last question began that was answered, or failed.
    asked: Option<Instant>,
    /// When it answered last.
    pub answered: Option<Instant>,
    /// What it said then.
    pub told: Option<Arc<DescribeResponse>>,
    /// Its pools whose ids are known, as it said then.
    pub pools: Arc<[ShownPool]>,
    /// Why it can't be asked now; none if it can.
    pub problem: Option<String>,
    /// The problem is what it said of itself, which was refused.
    pub is_refused: bool,
}

impl Seen {
    /// Whether it has answered or failed at its present address.
    pub fn is_asked(&self) -> bool {
        self.asked.is_some()
    }

    /// Whether the last question was answered.
    pub fn is_reachable(&self) -> bool {
        self.is_asked() && self.problem.is_none()
    }
}

/// A pool as an agent showed it last.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShownPool {
    /// Its id.
    pub id: PoolId,
    /// Its name in the agent's configuration.
    pub name: String,
    /// Whether it's served.
    pub served: bool,
    /// Ended by `pool forget`: its ids lead nowhere, for good.
    pub forgotten: bool,
}

/// One agent: an address, what it said last, and a channel.
pub struct Agent {
    node: String,
    address: String,
    dial: Arc<dyn Dial>,
    channel: OnceCell<Channel>,
    /// Of cuts alone.
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

    /// An answer of it was refused.
    pub(in crate::router) fn refused(&self) {
        self.refusals.fetch_add(1, Ordering::Relaxed);
    }

    /// How many answers of it were refused, at this address.
    pub fn refusals(&self) -> u64 {
        self.refusals.load(Ordering::Relaxed)
    }

    /// Its node's name.
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

    /// The home that it said last; empty if it said none.
    pub fn home(&self) -> String {
        let seen = self.seen.borrow();
        let told = seen.told.as_ref();
        told.map(|told| told.home.clone()).unwrap_or_default()
    }

    /// How it showed a pool last.
    pub fn shown(&self, pool: PoolId) -> Option<ShownPool> {
        let seen = self.seen.borrow();
        seen.pools.iter().find(|shown| shown.id == pool).cloned()
    }

    /// The pool that a class means on it, as it said last: the named one, the one named `default`,
    /// or the only one.
    pub fn meant(&self, class: Option<&str>) -> Option<crate::agent::Pool> {
        let seen = self.seen.borrow();
        let pools = &seen.told.as_ref()?.pools;
        let mut configured = pools.iter().filter(|pool| !pool.forgotten);
        let wanted = class.unwrap_or("default");
        let named = configured.clone().find(|pool| pool.name == wanted);
        let only = match (configured.next(), configured.next()) {
            (only, None) if class.is_none() => only,
            _ => None,
        };
        named.or(only).cloned()
    }

    /// Fails at once if it couldn't be reached the last time that it was asked.
    pub fn check(&self) -> Result<()> {
        match &self.seen.borrow().problem {
            Some(problem) => Err(self.unreachable(problem)),
            None => Ok(()),
        }
    }

    /// As [`Agent::check`], after asking it again if that was a while ago: an agent that has just
    /// come back is not refused.
    pub async fn reachable(&self) -> Result<()> {
        if self.seen.borrow().is_reachable() {
            return Ok(());
        }
        self.ask().await;
        self.check()
    }

    /// The error that says that it can't be reached.
    pub fn unreachable(&self, problem: &str) -> Error {
        Error::Unreachable {
            what: format!("the agent of node {}", self.node),
            reason: format!("{problem} ({})", self.address),
        }
    }

    /// Asks it to describe itself, unless it was asked just now, and waits for the answer or the
    /// failure: at most some seconds.
    pub async fn ask(&self) {
        let now = Instant::now();
        self.ask_since(now.checked_sub(MAX_STATUS_AGE).unwrap_or(now))
            .await;
    }

    /// The same, unless it was asked since a moment.
    pub(in crate::router) async fn ask_since(&self, moment: Instant) {
        let mut seen = self.seen.subscribe();
        let is_new = |seen: &Seen| seen.asked >= Some(moment);
        if is_new(&seen.borrow()) {
            return;
        }
        self.wanted.notify_one();
        // Long enough for the question before, and for this one. Nobody asks any more after the
        // agent was taken from the set.
        let _ = timeout(2 * DESCRIBE_TIMEOUT, seen.wait_for(is_new)).await;
    }

    /// Asks it for ever: every few seconds, and when it's wanted.
    pub(super) async fn poll(
        &self,
        driver_name: &str,
        asking: &Semaphore,
        changed: &watch::Sender<u64>,
    ) {
        loop {
            // It's never closed.
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
            let verified = |told| self.verify(told, driver_name);
            let (described, is_refused) = match described.map(verified) {
                Ok(Err(why)) => {
                    self.refused();
                    (Err(format!("its description was rejected: {why}")), true)
                }
                Ok(told) => (told, false),
                Err(problem) => (Err(problem), false),
            };
            if self.learn(asked, described, is_refused) {
                changed.send_modify(|rounds| *rounds += 1);
            }
            // Spread, so that they aren't all asked in the same moment.
            let pause = POLL_INTERVAL.mul_f64(0.9 + 0.2 * spread(&self.node));
            let _ = timeout(pause, self.wanted.notified()).await;
        }
    }

    async fn describe(&self) -> Result<DescribeResponse, String> {
        let client = self.client().await.map_err(|error| chain(&error));
        let answer = client?.describe(DescribeRequest {}).await;
        answer
            .map(|answer| answer.into_inner())
            .map_err(|status| said(&status))
    }

    /// A stranger at the address is not asked for volumes.
    fn verify(
        &self,
        told: DescribeResponse,
        driver_name: &str,
    ) -> Result<DescribeResponse, String> {
        if told.node_name != self.node {
            return Err(format!("it reports to be node {:?}", told.node_name));
        }
        if told.driver_name != driver_name {
            let theirs = &told.driver_name;
            return Err(format!(
                "it belongs to driver {theirs:?} instead of {driver_name:?}"
            ));
        }
        checked::description(told)
    }

    /// Whether that is news.
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
            let Ok(told) = described else { return };
            seen.answered = Some(Instant::now());
            if seen.told.as_deref() != Some(&told) {
                news = true;
                seen.pools = told.pools.iter().filter_map(shown).collect();
                seen.told = Some(Arc::new(told));
            }
        });
        news
    }

    /// A channel to it, made at the first call. It connects by itself, and again.
    pub async fn channel(&self) -> Result<Channel> {
        let dial = || self.dial.dial(&self.node, &self.address);
        self.channel.get_or_try_init(dial).await.cloned()
    }

    /// What it's asked beside CSI.
    pub async fn client(&self) -> Result<AgentClient<Channel>> {
        let client = AgentClient::new(self.channel().await?);
        Ok(client.max_decoding_message_size(ANSWER_BYTES))
    }

    /// The same for cuts, over a connection of their own: a long list, on its way over a slow one,
    /// would hold up the order to thaw.
    pub async fn cuts(&self) -> Result<AgentClient<Channel>> {
        let dial = || self.dial.dial(&self.node, &self.address);
        let channel = self.cuts.get_or_try_init(dial).await?.clone();
        Ok(AgentClient::new(channel).max_decoding_message_size(ANSWER_BYTES))
    }

    /// Its CSI controller.
    pub async fn controller(&self) -> Result<ControllerClient<Channel>> {
        let client = ControllerClient::new(self.channel().await?);
        Ok(client.max_decoding_message_size(ANSWER_BYTES))
    }

    /// Its CSI SnapshotMetadata.
    pub async fn metadata(&self) -> Result<SnapshotMetadataClient<Channel>> {
        let client = SnapshotMetadataClient::new(self.channel().await?);
        Ok(client.max_decoding_message_size(ANSWER_BYTES))
    }

    /// What it answered with, or what became of the way to it, for the caller of a CSI call.
    ///
    /// What the connection says (its end in the middle of a call, say) must not be taken for the
    /// agent's word: some of its codes are final for callers, who would forget what was made. So
    /// it's UNAVAILABLE, and so are codes that no agent gives.
    pub fn error(&self, status: &Status) -> Error {
        let from_connection = std::error::Error::source(status).is_some();
        match status.code() {
            Code::Unknown | Code::DataLoss | Code::PermissionDenied | Code::Unauthenticated => {
                self.unreachable(&said(status))
            }
            // The deadline of the call itself. A connection that is closed in the middle of a
            // call is CANCELLED as well.
            Code::Cancelled if from_connection && !beneath::<TimeoutExpired>(status) => {
                self.wanted.notify_one();
                self.unreachable(&said(status))
            }
            Code::Cancelled | Code::DeadlineExceeded => answered(status),
            _ if from_connection => {
                // Look now, not at the next poll.
                self.wanted.notify_one();
                self.unreachable(&said(status))
            }
            _ => answered(status),
        }
    }
}

/// Whether a status comes of such an error.
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

/// A status in words, with what is beneath it.
fn said(status: &Status) -> String {
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

/// From 0 to 1, the same for the same name.
fn spread(name: &str) -> f64 {
    let sum = name.bytes().fold(7u32, |sum, byte| {
        sum.wrapping_mul(31).wrapping_add(u32::from(byte))
    });
    f64::from(sum % 1000) / 1000.0
}
