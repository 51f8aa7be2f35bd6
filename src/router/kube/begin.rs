//! A router's beginning in its cluster: client, agents, certificates.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use super::certificates::Certificates;
use super::orphans::Stored;
use super::pool_status::Report;
use super::{AgentReports, InCluster, Options, connect};
use crate::error::Result;
use crate::router::{Agents, TlsDial};
use crate::tls::Credentials;

/// What a router is made of.
pub struct Begun {
    /// Those of the Service, which are followed from now on.
    pub agents: Arc<Agents>,
    /// The cluster; to be ended with [`InCluster::shut_down`].
    pub cluster: Arc<InCluster>,
    /// What it shows to agents: those that were given, or its own.
    pub credentials: Arc<Credentials>,
}

/// Begins to follow the cluster. Where no `credentials` are given, router and agents get theirs
/// from an authority that the routers keep in a Secret, and this waits until there is one;
/// `account` is then the service account of the nodes' pods. An error if there is no API server
/// to talk to at all: it's named by KUBECONFIG, or this is a pod.
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

/// Agents that can't be asked before there are certificates.
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
        // Under the lock, so that nothing is placed in between.
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
}
