//! The start of a router in its cluster: client, agents and certificates.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use super::certificates::Certificates;
use super::orphans::{DescribedVolume, Orphan, Stored};
use super::pools::requests::progress::PoolRequest;
use super::pools::status::Report;
use super::{AgentReports, InCluster, Options, connect};
use crate::error::{Error, Result};
use crate::model::PoolId;
use crate::router::{Agents, TlsDial};
use crate::tls::Credentials;

/// The parts of a router that has started.
pub struct Begun {
    /// The agents of the Service, whose addresses are watched from now on.
    pub agents: Arc<Agents>,
    /// The cluster; to be ended with [`InCluster::shut_down`].
    pub cluster: Arc<InCluster>,
    /// The credentials that it presents to agents: those that were given, or its own.
    pub credentials: Arc<Credentials>,
}

/// Starts to watch the cluster. If no `credentials` are given, router and agents get theirs from an
/// authority that the routers keep in a Secret, and this waits until it exists; `account` is then the
/// service account of the nodes' pods. An error if no API server is configured: KUBECONFIG names one,
/// or the process runs in a pod.
pub async fn begin(
    options: Options,
    credentials: Option<Arc<Credentials>>,
    account: &str,
) -> Result<Begun> {
    let client = connect().await?;
    let driver = options.driver.clone();
    let later = Arc::<Later>::default();
    let cluster = InCluster::start(client, options, Arc::clone(&later) as Arc<dyn AgentReports>);
    let credentials = match credentials {
        Some(given) => given,
        None => Certificates::start(&cluster, account).own().await,
    };
    let dial = Arc::new(TlsDial::new(credentials.clone()));
    let agents = Arc::new(Agents::new(dial, &driver));
    later.are(Arc::clone(&agents));
    Ok(Begun {
        agents,
        cluster,
        credentials,
    })
}

/// Agents that cannot be asked before there are certificates. Their addresses are kept until then.
#[derive(Default)]
struct Later {
    agents: OnceLock<Arc<Agents>>,
    placed: Mutex<Option<BTreeMap<String, SocketAddr>>>,
}

impl Later {
    fn are(&self, agents: Arc<Agents>) {
        let mut placed = self.placed.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(placed) = placed.take() {
            agents.place(placed);
        }
        // Under the lock, so that no addresses are set in between.
        let _ = self.agents.set(agents);
    }
}

#[tonic::async_trait]
impl AgentReports for Later {
    fn place(&self, agents: BTreeMap<String, SocketAddr>) {
        let mut placed = self.placed.lock().unwrap_or_else(PoisonError::into_inner);
        match self.agents.get() {
            Some(there) => there.place(agents),
            None => *placed = Some(agents),
        }
    }

    fn reports(&self) -> Vec<Report> {
        let agents = self.agents.get();
        agents.map(|agents| agents.reports()).unwrap_or_default()
    }

    async fn stored(&self) -> Vec<Stored> {
        match self.agents.get() {
            Some(agents) => agents.stored().await,
            None => Vec::new(),
        }
    }

    async fn describe(&self, node: &str, volume_ids: Vec<String>) -> Result<Vec<DescribedVolume>> {
        match self.agents.get() {
            Some(agents) => agents.describe(node, volume_ids).await,
            None => Err(none_yet(node)),
        }
    }

    async fn delete(&self, orphan: &Orphan) -> Result<()> {
        match self.agents.get() {
            Some(agents) => agents.delete(orphan).await,
            None => Err(none_yet(&orphan.node)),
        }
    }

    async fn change_pool(&self, node: &str, pool: PoolId, request: PoolRequest) -> Result<()> {
        match self.agents.get() {
            Some(agents) => agents.change_pool(node, pool, request).await,
            None => Err(none_yet(node)),
        }
    }
}

fn none_yet(node: &str) -> Error {
    let what = format!("the agent of node {node}");
    Error::unreachable(what, "this router has no certificate yet")
}
