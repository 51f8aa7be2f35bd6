//! The router's connections in the form that tonic requires.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpListener;
use tokio_stream::{Stream, StreamExt};
use tonic::transport::server::Connected;

use super::Endpoint;
use crate::telemetry::Metrics;
use crate::tls;

/// A connection from the router.
pub(super) struct Secured(tls::Secured);

/// Accepted connections to an agent.
pub(super) fn connections(
    endpoint: Endpoint,
    metrics: &Metrics,
) -> impl Stream<Item = io::Result<Secured>> {
    let Endpoint {
        listener,
        credentials,
    } = endpoint;
    let refusals = Arc::<tls::Refusals>::default();
    let counted = refusals.clone();
    metrics.show_refused_connections(move || counted.count());
    let incoming = tls::Incoming::new(listener, credentials, refusals);
    incoming.map(|accepted| accepted.map(Secured))
}

/// Creates the listener of `--agent-listen`.
pub async fn listen(address: std::net::SocketAddr) -> io::Result<TcpListener> {
    TcpListener::bind(address).await
}

impl Connected for Secured {
    type ConnectInfo = ();

    fn connect_info(&self) {}
}

impl AsyncRead for Secured {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_read(context, into)
    }
}

impl AsyncWrite for Secured {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write_vectored(context, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.0.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(context)
    }
}
