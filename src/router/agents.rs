//! The agents that the router knows: who they are, what each said last, and how it's asked.
//!
//! Each agent is asked to describe itself every few seconds, by a task of its own, and at once
//! when somebody needs to know. What an agent said last stays true until it says something else:
//! one that can't be reached still owns its pools.

mod agent;
#[cfg(test)]
mod tests;

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

/// How often an agent is asked to describe itself.
pub const POLL_INTERVAL: Duration = Duration::from_secs(5);
/// How long that may take: twice as long as an agent itself waits for a disk.
const DESCRIBE_TIMEOUT: Duration = Duration::from_secs(4);
/// What an agent said so long ago isn't asked for again: a crowd of calls is one question.
const MAX_STATUS_AGE: Duration = Duration::from_secs(1);
/// Agents that are asked at a time. Those that hang take their place for [`DESCRIBE_TIMEOUT`].
const AT_ONCE: usize = 64;
/// How long a connection may take, with its TLS.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
/// How agents are reached.
#[tonic::async_trait]
pub trait Dial: Send + Sync + 'static {
    /// A channel to the agent of a node. It may connect lazily, and must connect again by itself;
    /// it's asked for once for each agent and address. The error is one of the configuration.
    /// [`endpoint`] has the settings that it should have.
    async fn dial(&self, node: &str, address: &str) -> Result<Channel>;
}

/// A channel's settings: the time that a connection may take, and what finds out that it's dead.
/// `address` is "host:port". The scheme is plain; what is around the connection is the caller's
/// business.
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

/// An agent and the task that asks it.
struct Polled {
    agent: Arc<Agent>,
    task: AbortHandle,
}

impl Drop for Polled {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// All agents. Dropped, nobody is asked any more.
pub struct Agents {
    dial: Arc<dyn Dial>,
    driver_name: String,
    /// By node; `None` until [`Agents::set`] is called.
    polled: RwLock<Option<BTreeMap<String, Polled>>>,
    asking: Arc<Semaphore>,
    changed: watch::Sender<u64>,
    /// The node that served a pool when all agents answered and no other served it.
    served: Mutex<BTreeMap<PoolId, String>>,
}

impl Agents {
    /// None are known yet. `driver_name` is what they must be agents of.
    pub fn new(dial: Arc<dyn Dial>, driver_name: &str) -> Agents {
        Agents {
            dial,
            driver_name: driver_name.to_string(),
            polled: RwLock::new(None),
            asking: Arc::new(Semaphore::new(AT_ONCE)),
            changed: watch::channel(0).0,
            served: Mutex::default(),
        }
    }

    /// Remembers that a node alone serves a pool. While an agent can't be reached nothing is
    /// remembered: it may be the one that has the pool.
    pub(super) fn serves(&self, pool: PoolId, agent: &Agent) {
        if self.all().iter().all(|agent| agent.seen().is_reachable()) {
            let mut served = self.served.lock().unwrap_or_else(PoisonError::into_inner);
            served.insert(pool, agent.node().to_string());
        }
    }

    /// The node that served a pool as far as this process remembers, if it still has an agent.
    pub(super) fn served_by(&self, pool: PoolId) -> Option<String> {
        let served = self.served.lock().unwrap_or_else(PoisonError::into_inner);
        let node = served.get(&pool).cloned();
        drop(served);
        node.filter(|node| self.of_node(node).is_some())
    }

    /// From now on the agents are these, each a node's name and "host:port", and no others. One
    /// that stays is asked on as before; of one whose address is new, what it said last is still
    /// believed. To be called within a tokio runtime.
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

    /// All of them, in the order of their nodes' names.
    pub fn all(&self) -> Vec<Arc<Agent>> {
        let polled = self.polled.read().unwrap_or_else(PoisonError::into_inner);
        let each = polled.iter().flatten();
        each.map(|(_, one)| one.agent.clone()).collect()
    }

    /// The agent of a node.
    pub fn of_node(&self, node: &str) -> Option<Arc<Agent>> {
        let polled = self.polled.read().unwrap_or_else(PoisonError::into_inner);
        polled.as_ref()?.get(node).map(|one| one.agent.clone())
    }

    /// Agents that said last that this is their home. Two only while a home moves.
    pub fn of_home(&self, home: &str) -> Vec<Arc<Agent>> {
        let mut all = self.all();
        all.retain(|agent| !home.is_empty() && agent.home() == home);
        all
    }

    /// Agents that showed a pool last, with how they showed it.
    pub fn showing(&self, pool: PoolId) -> Vec<(Arc<Agent>, ShownPool)> {
        let all = self.all().into_iter();
        all.filter_map(|agent| {
            let shown = agent.shown(pool)?;
            Some((agent, shown))
        })
        .collect()
    }

    /// Why not everything is known that could be: nobody has said who the agents are, or one has
    /// neither answered nor failed yet. Once it's `Ok` it stays so but for new agents.
    pub fn all_asked(&self) -> Result<()> {
        let unknown = |what: String, reason: &str| {
            let reason = reason.to_string();
            Err(Error::Unreachable { what, reason })
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

    /// Asks all of them, unless they were asked just now, and waits for their answers or failures.
    pub async fn ask_all(&self) {
        join_all(self.all().iter().map(|agent| agent.ask())).await;
    }

    /// The same, and what they said before this call doesn't count.
    pub async fn ask_all_now(&self) {
        let now = Instant::now();
        join_all(self.all().iter().map(|agent| agent.ask_since(now))).await;
    }

    /// Changes whenever an agent is new or gone, or says something else than before, or can't be
    /// reached any more, or can again.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.changed.subscribe()
    }
}
