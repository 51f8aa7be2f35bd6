//! The end that dials: an agent at an address, proven by its node's name.

use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use http::Uri;
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tower::Service;

use super::{Credentials, Name};

/// A connection to an agent that has proven its node's name.
pub type Connection = TokioIo<TlsStream<TcpStream>>;

/// Dials one agent, whatever URI it's asked for. It has no timeout of its own
/// ([`super::DIAL_PATIENCE`]).
#[derive(Clone, Debug)]
pub struct Connector {
    credentials: Arc<Credentials>,
    name: Name,
    address: SocketAddr,
}

impl Connector {
    /// To the agent that has `name`, at an address.
    pub fn new(credentials: Arc<Credentials>, name: Name, address: SocketAddr) -> Connector {
        Connector {
            credentials,
            name,
            address,
        }
    }

    async fn dial(self) -> io::Result<Connection> {
        let stream = TcpStream::connect(self.address).await?;
        // Without it requests of a few bytes would wait for the other end's acknowledgement.
        let _ = stream.set_nodelay(true);
        let connector = TlsConnector::from(self.credentials.now().client.clone());
        let secured = connector.connect(self.name.0, stream).await?;
        Ok(TokioIo::new(secured))
    }
}

impl Service<Uri> for Connector {
    type Response = Connection;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = io::Result<Connection>> + Send>>;

    fn poll_ready(&mut self, _context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _uri: Uri) -> Self::Future {
        Box::pin(self.clone().dial())
    }
}
