//! The connecting end: to an agent at an address, which must prove its node's name.

use std::io::{self, Cursor};
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use http::Uri;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncReadExt, Chain, Join, ReadHalf, WriteHalf, join, split};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tower::Service;

use super::{Credentials, Name};

type Secured = TlsStream<TcpStream>;

/// A connection to an agent that has proven its node's name, and has accepted the certificate of
/// this process.
pub type Connection = TokioIo<Join<Chain<Cursor<[u8; 1]>, ReadHalf<Secured>>, WriteHalf<Secured>>>;

/// Connects to one agent, whatever URI is requested. It has no timeout of its own.
#[derive(Clone, Debug)]
pub struct Connector {
    credentials: Arc<Credentials>,
    name: Name,
    address: SocketAddr,
}

impl Connector {
    /// Creates a connector to the agent with `name` at an address.
    pub fn new(credentials: Arc<Credentials>, name: Name, address: SocketAddr) -> Connector {
        Connector {
            credentials,
            name,
            address,
        }
    }

    async fn dial(self) -> io::Result<Connection> {
        let stream = TcpStream::connect(self.address).await?;
        // Otherwise requests of a few bytes would wait for the acknowledgment of the other end.
        let _ = stream.set_nodelay(true);
        let none = || io::Error::other("there is no certificate of this process yet");
        let current = self.credentials.now().ok_or_else(none)?;
        let connector = TlsConnector::from(current.client.clone());
        let mut secured = connector.connect(self.name.0, stream).await?;
        // In TLS 1.3 the connecting end is finished before the agent has seen its certificate. In
        // HTTP/2 the agent sends first: its first byte, or its refusal, is awaited here, so that a
        // refusal is an error of the connection and not of a call.
        let first = secured.read_u8().await?;
        let (read, write) = split(secured);
        Ok(TokioIo::new(join(Cursor::new([first]).chain(read), write)))
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
