//! The router's connections.

use std::io;
use std::sync::Arc;

use tokio::net::TcpListener;

use super::Endpoint;
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
    tls::Incoming::new(listener, credentials, refusals)
}

/// Creates the listener of `--agent-listen`.
pub async fn listen(address: std::net::SocketAddr) -> io::Result<TcpListener> {
    TcpListener::bind(address).await
}
