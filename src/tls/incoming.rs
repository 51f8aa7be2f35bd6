//! The end that listens: handshakes on their own, so that a client that never ends its handshake
//! holds up nobody.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc::{Receiver, Sender, channel};
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{sleep, timeout};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tokio_stream::Stream;

use super::Credentials;

/// A connection whose other end has proven to be the router.
pub type Secured = TlsStream<TcpStream>;

/// One takes a few milliseconds, and a round trip or two.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// Handshakes at a time. With one more the oldest is given up: a router's is done long before so
/// many strangers have come.
const HANDSHAKES: usize = 64;
/// After a connection that can't be taken (no descriptors left, mostly).
const PAUSE: Duration = Duration::from_millis(100);

/// Connections of the router, as they come. Dropped, it stops listening.
pub struct Incoming {
    ready: Receiver<Secured>,
    accepting: AbortHandle,
}

impl Incoming {
    /// On a listener; to be called within a tokio runtime.
    pub fn new(listener: TcpListener, credentials: Arc<Credentials>) -> Incoming {
        let (send, ready) = channel(HANDSHAKES);
        let accepting = tokio::spawn(accept(listener, credentials, send)).abort_handle();
        Incoming { ready, accepting }
    }
}

impl Stream for Incoming {
    type Item = std::io::Result<Secured>;

    fn poll_next(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<std::io::Result<Secured>>> {
        self.ready.poll_recv(context).map(|secured| secured.map(Ok))
    }
}

impl Drop for Incoming {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

async fn accept(listener: TcpListener, credentials: Arc<Credentials>, ready: Sender<Secured>) {
    // Dropped with this, and all that is in it ends.
    let mut handshakes = JoinSet::new();
    let mut running: VecDeque<AbortHandle> = VecDeque::new();
    loop {
        let (stream, from) = tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok(accepted) => accepted,
                Err(error) => {
                    tracing::warn!(%error, "can't take a connection");
                    sleep(PAUSE).await;
                    continue;
                }
            },
            Some(_) = handshakes.join_next() => continue,
        };
        running.retain(|handshake| !handshake.is_finished());
        if running.len() >= HANDSHAKES
            && let Some(oldest) = running.pop_front()
        {
            oldest.abort();
        }
        let (credentials, ready) = (credentials.clone(), ready.clone());
        running.push_back(handshakes.spawn(async move {
            if let Some(secured) = shake_hands(stream, from, &credentials).await {
                // Nobody takes it any more once we're told to stop.
                let _ = ready.send(secured).await;
            }
        }));
    }
}

async fn shake_hands(
    stream: TcpStream,
    from: SocketAddr,
    credentials: &Credentials,
) -> Option<Secured> {
    // Without it answers of a few bytes would wait for the other end's acknowledgement.
    let _ = stream.set_nodelay(true);
    let Some(current) = credentials.now() else {
        tracing::warn!(%from, "a connection is refused: there is no certificate yet");
        return None;
    };
    let acceptor = TlsAcceptor::from(current.server.clone());
    match timeout(HANDSHAKE, acceptor.accept(stream)).await {
        Ok(Ok(secured)) => Some(secured),
        // Somebody who looks whether the port is open.
        Ok(Err(error)) if error.kind() == std::io::ErrorKind::UnexpectedEof => {
            tracing::debug!(%from, "a connection ended before its handshake");
            None
        }
        Ok(Err(error)) => {
            tracing::warn!(%from, %error, "a connection is refused");
            None
        }
        Err(_) => {
            tracing::warn!(%from, "a connection is refused: its handshake takes too long");
            None
        }
    }
}
