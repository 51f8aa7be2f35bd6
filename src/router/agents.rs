//! The agents that the router knows: which exist, what each last reported, and how each is called.
//!
//! A separate task asks each agent for its description every few seconds, and at once when a call
//! needs it. The last description of an agent stays valid until the agent sends another: an agent
//! that cannot be reached still owns its pools.

mod agent;
#[cfg(test)]
pub(super) mod tests;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use tokio::sync::{Semaphore, watch};
use tokio::task::AbortHandle;
use tonic::transport::{Channel, Endpoint};

use crate::error::{Error, Result};
use crate::model::PoolId;
use crate::tls::{PING_INTERVAL, PING_TIMEOUT};

pub(super) use agent::beneath;
pub use agent::{Agent, Seen, ShownPool};

/// How often an agent is asked for its description.
pub const POLL_INTERVAL: Duration = Duration::from_secs(5);
/// Time limit of that request: twice as long as an agent itself waits for a disk.
const DESCRIBE_TIMEOUT: Duration = Duration::from_secs(4);
/// A description younger than this is not requested again, so that many simultaneous calls cause
/// one request.
const MAX_STATUS_AGE: Duration = Duration::from_secs(1);
/// Number of agents that are asked at a time. An agent that hangs occupies its place for
/// [`DESCRIBE_TIMEOUT`].
const MAX_ASKED_AT_ONCE: usize = 64;
/// Time limit of a connection, including TLS.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
/// Connects to agents.
#[tonic::async_trait]
pub trait Dial: Send + Sync + 'static {
    /// Returns a channel to the agent of a node. The channel may connect lazily, and must reconnect
    /// by itself; this is called once for each agent and address. An error is one of the
    /// configuration. [`endpoint`] returns the settings that the channel should have.
    async fn dial(&self, node: &str, address: &str) -> Result<Channel>;
}

/// The settings of a channel: its connection timeout, and the keepalive that detects a dead
/// connection. `address` is "host:port". The scheme is plain; the caller adds TLS.
pub fn endpoint(address: &str) -> Result<Endpoint> {
    let endpoint = Endpoint::from_shared(format!("http://{address}"))
        .map_err(|error| Error::invalid("agent", format!("{address:?}: {error}")))?;
    Ok(endpoint
        .connect_timeout(CONNECT_TIMEOUT)
        .tcp_nodelay(true)
        .http2_keep_alive_interval(PING_INTERVAL)
        .keep_alive_timeout(PING_TIMEOUT)
        .keep_alive_while_idle(true))
}

/// An agent and the task that polls it.
struct Polled {
    agent: Arc<Agent>,
    task: AbortHandle,
}

impl Drop for Polled {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// All agents. Dropping this ends the polling.
pub struct Agents {
    dial: Arc<dyn Dial>,
    driver_name: String,
    /// Agents by node; `None` until [`Agents::set`] is called.
    polled: RwLock<Option<BTreeMap<String, Polled>>>,
    asking: Arc<Semaphore>,
    changed: watch::Sender<u64>,
    /// The node that served a pool when all agents had answered and no other served it.
    served: Mutex<BTreeMap<PoolId, String>>,
}

impl Agents {
    /// Creates an empty set. `driver_name` is the driver to which the agents must belong.
    pub fn new(dial: Arc<dyn Dial>, driver_name: &str) -> Agents {
        Agents {
            dial,
            driver_name: driver_name.to_string(),
            polled: RwLock::new(None),
            asking: Arc::new(Semaphore::new(MAX_ASKED_AT_ONCE)),
            changed: watch::channel(0).0,
            served: Mutex::default(),
        }
    }

    /// Remembers that only one node serves a pool. While an agent cannot be reached nothing is
    /// remembered, because it may be the one that has the pool.
    pub(super) fn serves(&self, pool: PoolId, agent: &Agent) {
        if self.all().iter().all(|agent| agent.seen().is_reachable()) {
            let mut served = self.served.lock().unwrap_or_else(PoisonError::into_inner);
            served.insert(pool, agent.node().to_string());
        }
    }

    /// The node that this process remembers as the one that served a pool, if it still has an
    /// agent.
    pub(super) fn served_by(&self, pool: PoolId) -> Option<String> {
        let served = self.served.lock().unwrap_or_else(PoisonError::into_inner);
        let node = served.get(&pool).cloned();
        drop(served);
        node.filter(|node| self.of_node(node).is_some())
    }

    /// Sets the agents, each by its node's name and "host:port". An agent that stays is polled as
    /// before; if its address is new, its last description stays valid. Must be called within a
    /// tokio runtime.
    pub fn set(&self, list: impl IntoIterator<Item = (String, String)>) {
        let mut polled = self.polled.write().unwrap_or_else(PoisonError::into_inner);
        let mut before = polled.take().unwrap_or_default();
        let mut now = BTreeMap::new();
        for (node, address) in list {
            let one = match before.remove(&node) {
                Some(same) if same.agent.address() == address => same,
                other => self.begin(&node, &address, other.map(|other| other.agent.seen())),
            };
            now.insert(node, one);
        }
        *polled = Some(now);
        drop(polled);
        self.changed.send_modify(|rounds| *rounds += 1);
    }

    fn begin(&self, node: &str, address: &str, before: Option<Seen>) -> Polled {
        let agent = Arc::new(Agent::new(node, address, self.dial.clone(), before));
        let (asked, asking) = (agent.clone(), self.asking.clone());
        let (driver_name, changed) = (self.driver_name.clone(), self.changed.clone());
        let poll = async move { asked.poll(&driver_name, &asking, &changed).await };
        Polled {
            agent,
            task: tokio::spawn(poll).abort_handle(),
        }
    }

    /// All agents, ordered by node name.
    pub fn all(&self) -> Vec<Arc<Agent>> {
        let polled = self.polled.read().unwrap_or_else(PoisonError::into_inner);
        let each = polled.iter().flatten();
        each.map(|(_, one)| one.agent.clone()).collect()
    }

    pub fn of_node(&self, node: &str) -> Option<Arc<Agent>> {
        let polled = self.polled.read().unwrap_or_else(PoisonError::into_inner);
        polled.as_ref()?.get(node).map(|one| one.agent.clone())
    }

    /// Agents that last reported this topology segment. There are two only while a segment moves to
    /// another node.
    pub fn of_home(&self, home: &str) -> Vec<Arc<Agent>> {
        let mut all = self.all();
        all.retain(|agent| !home.is_empty() && agent.home() == home);
        all
    }

    /// Agents that last reported a pool, with the state in which they reported it.
    pub fn showing(&self, pool: PoolId) -> Vec<(Arc<Agent>, ShownPool)> {
        let all = self.all().into_iter();
        all.filter_map(|agent| {
            let shown = agent.shown(pool)?;
            Some((agent, shown))
        })
        .collect()
    }

    /// Fails if not everything is known yet: the agents have not been set, or one has neither
    /// answered nor failed. Once it returns `Ok` it stays so, except for new agents.
    pub fn all_asked(&self) -> Result<()> {
        let unknown = |what: String, reason: &str| {
            let reason = reason.to_string();
            Err(Error::unreachable(what, reason))
        };
        let polled = self.polled.read().unwrap_or_else(PoisonError::into_inner);
        let Some(polled) = polled.as_ref() else {
            return unknown("the cluster".into(), "its agents are not known yet");
        };
        let unasked = polled.values().find(|one| !one.agent.seen().is_asked());
        match unasked {
            Some(one) => unknown(
                format!("the agent of node {}", one.agent.node()),
                "it has not answered yet",
            ),
            None => Ok(()),
        }
    }

    /// Asks all agents for their description, except those asked just now, and waits for their
    /// answers or failures.
    pub async fn ask_all(&self) {
        join_all(self.all().iter().map(|agent| agent.ask())).await;
    }

    /// Like [`Agents::ask_all`], but requests a new description from all.
    pub async fn ask_all_now(&self) {
        let now = Instant::now();
        join_all(self.all().iter().map(|agent| agent.ask_since(now))).await;
    }

    /// Changes whenever an agent appears or disappears, reports something new, or becomes reachable
    /// or unreachable.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.changed.subscribe()
    }
}
