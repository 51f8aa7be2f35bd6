//! The listening end: handshakes run separately, so that a client that never finishes its handshake
//! delays no other. Refused connections are counted, and logged at most once a minute.

use std::collections::VecDeque;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc::{Receiver, Sender, channel};
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{sleep, timeout};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tokio_stream::Stream;

use super::{Audience, Credentials};

/// A connection whose peer has proven to be of the audience.
pub type Secured = TlsStream<TcpStream>;

/// A handshake takes a few milliseconds, and one or two round trips.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum number of concurrent handshakes. For one more, the oldest of the address that has most
/// is aborted.
const MAX_HANDSHAKES: usize = 64;
/// Maximum number of concurrent handshakes of one address. For one more, its oldest is aborted, so
/// that an address that keeps opening connections cannot block others.
const MAX_HANDSHAKES_OF_ONE_ADDRESS: usize = 8;
/// Minimum time between two log lines about refused connections.
const REFUSAL_LOG_INTERVAL: Duration = Duration::from_secs(60);
/// Pause after a connection could not be accepted, usually because no descriptors are left.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(100);

/// Counts refused connections.
#[derive(Debug, Default)]
pub struct Refusals {
    count: AtomicU64,
    /// When they were last logged, and their number then.
    last_logged: Mutex<Option<(Instant, u64)>>,
}

impl Refusals {
    /// Number of refused connections.
    pub fn count(&self) -> u64 {
        self.count.load(Ordering::Relaxed)
    }

    /// Counts one more; returns the number since the last log line if a line should be logged now.
    fn add(&self, now: Instant) -> Option<u64> {
        let count = self.count.fetch_add(1, Ordering::Relaxed) + 1;
        let mut last_logged = self
            .last_logged
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let (at, before) = last_logged.map_or((None, 0), |(at, before)| (Some(at), before));
        if at.is_some_and(|at| now.duration_since(at) < REFUSAL_LOG_INTERVAL) {
            return None;
        }
        *last_logged = Some((now, count));
        Some(count.saturating_sub(before))
    }

    fn refused(&self, from: SocketAddr, why: &dyn std::fmt::Display) {
        if let Some(since) = self.add(Instant::now()) {
            tracing::warn!(%from, reason = %why, connections = since, "refused connections");
        }
    }
}

/// Accepted connections of an audience. Dropping this stops listening.
pub struct Incoming {
    ready: Receiver<Secured>,
    accepting: AbortHandle,
}

impl Incoming {
    /// Creates it for a listener; must be called within a tokio runtime.
    pub fn new(
        listener: TcpListener,
        (credentials, audience): (Arc<Credentials>, Audience),
        refusals: Arc<Refusals>,
    ) -> Incoming {
        let (send, ready) = channel(MAX_HANDSHAKES);
        let accepting = accept(listener, (credentials, audience), refusals, send);
        let accepting = tokio::spawn(accepting).abort_handle();
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

async fn accept(
    listener: TcpListener,
    (credentials, audience): (Arc<Credentials>, Audience),
    refusals: Arc<Refusals>,
    ready: Sender<Secured>,
) {
    // Dropping the set aborts all handshakes in it.
    let mut handshakes = JoinSet::new();
    let mut running: VecDeque<(IpAddr, AbortHandle)> = VecDeque::new();
    loop {
        let (stream, from) = tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok(accepted) => accepted,
                Err(error) => {
                    tracing::warn!(%error, "failed to accept a connection");
                    sleep(ACCEPT_RETRY_DELAY).await;
                    continue;
                }
            },
            Some(_) = handshakes.join_next() => continue,
        };
        running.retain(|(_, handshake)| !handshake.is_finished());
        if let Some(ip) = busiest_address(&running, from.ip())
            && let Some(at) = running.iter().position(|(one, _)| *one == ip)
            && let Some((_, oldest)) = running.remove(at)
        {
            refusals.refused(from, &"too many concurrent handshakes, dropping the oldest");
            oldest.abort();
        }
        let (credentials, ready) = (credentials.clone(), ready.clone());
        let refusals = refusals.clone();
        let handshake = handshakes.spawn(async move {
            if let Some(secured) =
                shake_hands(stream, from, (&credentials, audience), &refusals).await
            {
                // After the stop is requested, no task receives it.
                let _ = ready.send(secured).await;
            }
        });
        running.push_back((from.ip(), handshake));
    }
}

/// The address whose oldest handshake must be aborted before a new one of `from` begins.
fn busiest_address(running: &VecDeque<(IpAddr, AbortHandle)>, from: IpAddr) -> Option<IpAddr> {
    let count = |ip: IpAddr| running.iter().filter(|(one, _)| *one == ip).count();
    if count(from) >= MAX_HANDSHAKES_OF_ONE_ADDRESS {
        return Some(from);
    }
    let most = running.iter().max_by_key(|(ip, _)| count(*ip));
    most.filter(|_| running.len() >= MAX_HANDSHAKES)
        .map(|(ip, _)| *ip)
}

async fn shake_hands(
    stream: TcpStream,
    from: SocketAddr,
    (credentials, audience): (&Credentials, Audience),
    refusals: &Refusals,
) -> Option<Secured> {
    // Otherwise answers of a few bytes would wait for the acknowledgment of the other end.
    let _ = stream.set_nodelay(true);
    let Some(current) = credentials.now() else {
        refusals.refused(from, &"this process has no certificate yet");
        return None;
    };
    let config = match audience {
        Audience::Controller => &current.server,
        Audience::Agents => &current.server_of_agents,
    };
    let acceptor = TlsAcceptor::from(config.clone());
    match timeout(HANDSHAKE_TIMEOUT, acceptor.accept(stream)).await {
        Ok(Ok(secured)) => Some(secured),
        // A client that only checks whether the port is open.
        Ok(Err(error)) if error.kind() == std::io::ErrorKind::UnexpectedEof => {
            tracing::debug!(%from, "closed a connection that ended before its handshake");
            None
        }
        Ok(Err(error)) => {
            refusals.refused(from, &error);
            None
        }
        Err(_) => {
            refusals.refused(from, &"its handshake takes too long");
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refused_connections_are_logged_once_a_minute_with_their_number() {
        let refusals = Refusals::default();
        let begun = Instant::now();
        let at = |seconds| begun + Duration::from_secs(seconds);
        assert_eq!(refusals.add(at(0)), Some(1));
        for second in 1..60 {
            assert_eq!(refusals.add(at(second)), None);
        }
        assert_eq!(refusals.add(at(60)), Some(60));
        assert_eq!(refusals.count(), 61);
    }
}
