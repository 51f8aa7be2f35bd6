//! Connections of the router, and of other agents.

use std::io;
use std::sync::Arc;

use tokio::net::TcpListener;
use tonic::Extensions;
use tonic::transport::Channel;
use tonic::transport::server::Connected;

use super::Endpoint;
use crate::error::Result;
use crate::router::TlsDial;
use crate::router::agents::endpoint;
use crate::service::{Callers, PeerDial};
use crate::telemetry::Metrics;
use crate::tls;

/// Accepted connections to an agent.
pub(super) fn connections(endpoint: Endpoint, metrics: &Metrics) -> tls::Incoming {
    let Endpoint {
        listener,
        credentials,
    } = endpoint;
    let refusals = Arc::<tls::Refusals>::default();
    let counted = refusals.clone();
    metrics.show_refused_connections(move || counted.count());
    tls::Incoming::new(listener, (credentials, tls::Audience::Controller), refusals)
}

/// Accepted connections of the agents of other nodes.
pub(super) fn connections_of_agents(endpoint: Endpoint) -> tls::Incoming {
    let Endpoint {
        listener,
        credentials,
    } = endpoint;
    let audience = (credentials, tls::Audience::Agents);
    tls::Incoming::new(listener, audience, Arc::default())
}

/// Bytes that may arrive before they are read: two messages of a snapshot that is copied, so that one
/// is received while the one before is written. hyper's 2 MiB are less than one.
const WINDOW_BYTES: u32 = 2 * (4 << 20);

/// Connects to the agents of other nodes with the certificate of this process.
pub(super) struct AgentDial(pub(super) TlsDial);

#[tonic::async_trait]
impl PeerDial for AgentDial {
    async fn dial(&self, node: &str, address: &str) -> Result<Channel> {
        let settings = endpoint(address)?
            .initial_stream_window_size(WINDOW_BYTES)
            .initial_connection_window_size(WINDOW_BYTES)
            .keep_alive_timeout(tls::COPY_PING_TIMEOUT);
        self.0.channel(node, address, &settings)
    }
}

/// The names in the certificates of callers.
pub(super) struct Certificates;

impl Callers for Certificates {
    fn is_agent_of(&self, caller: &Extensions, node: &str) -> bool {
        let connection = caller.get::<<tls::Secured as Connected>::ConnectInfo>();
        let chain = connection.and_then(|connection| connection.peer_certs());
        let leaf = chain.as_ref().and_then(|chain| chain.first());
        leaf.is_some_and(|leaf| tls::is_of_node(leaf, node))
    }
}

/// Creates the listener of `--agent-listen`, or of `--peer-listen`.
pub async fn listen(address: std::net::SocketAddr) -> io::Result<TcpListener> {
    TcpListener::bind(address).await
}
