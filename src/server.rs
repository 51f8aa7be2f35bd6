//! The socket: bound for this driver alone, served until told to stop, and then left clean.
//!
//! *Expected flow*: [`Socket::bind`], then [`serve`] with [`signal`] as its shutdown.
//!
//! *Guarantees*: nobody but root can connect, from the first moment. A socket that another
//! process answers on is left to it. After the shutdown no new connection is taken, operations
//! that run have [`DRAIN`] to finish, the socket's file is gone, and no other file was ever
//! beside it.

mod socket;
mod watch;

use std::future::Future;
use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::{UnixListener, UnixStream};
use tokio::signal::unix::{SignalKind, signal as unix_signal};
use tokio::sync::oneshot;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep, sleep_until};
use tokio_stream::wrappers::UnixListenerStream;
use tokio_stream::{Stream, StreamExt};
use tonic::transport::Server;

use crate::csi::controller_server::ControllerServer;
use crate::csi::group_controller_server::GroupControllerServer;
use crate::csi::identity_server::IdentityServer;
use crate::csi::node_server::NodeServer;
use crate::csi::snapshot_metadata_server::SnapshotMetadataServer;
use crate::model::Alpha;
use crate::operation::Driver;
use crate::service::Service;
use crate::telemetry::Metrics;

pub use socket::{BindError, Socket};

/// How long running operations may take to end after a shutdown, unless said: the kubelet's
/// default grace period is 30 s. What isn't done by then is found and finished by the next start.
pub const DRAIN: Duration = Duration::from_secs(25);

/// How often pools that aren't served are looked at again: a disk that is mounted late should
/// not need a restart.
const LOOK_AGAIN: Duration = Duration::from_secs(10);

/// Largest request. Maps are bounded to 4 KiB, but a topology requirement of a large cluster has
/// some hundred bytes for each node.
const REQUEST_BYTES: usize = 4 << 20;

/// After a connection that can't be taken (no descriptors left, mostly).
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// What [`serve`] needs beside a driver.
#[derive(Clone, Debug)]
pub struct Options {
    /// Alpha parts to serve.
    pub alpha: Alpha,
    /// Where calls are counted, and who is told that the driver is ready.
    pub metrics: Arc<Metrics>,
    /// How long running operations may take to end after the shutdown.
    pub drain: Duration,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            alpha: Alpha::default(),
            metrics: Arc::default(),
            drain: DRAIN,
        }
    }
}

/// Serves every CSI service of one node until `shutdown`, and then ends as the module says. The
/// error is one of the transport.
pub async fn serve(
    socket: Socket,
    driver: Arc<Driver>,
    options: Options,
    shutdown: impl Future<Output = ()>,
) -> io::Result<()> {
    let Options {
        alpha,
        metrics,
        drain,
    } = options;
    metrics.observe(driver.clone());
    let service = Service::new(driver.clone(), alpha);
    let (listener, file) = socket.into_parts();
    let (stop, stopped) = oneshot::channel::<()>();
    let metadata = alpha.snapshot_metadata.then(|| {
        SnapshotMetadataServer::new(service.clone()).max_decoding_message_size(REQUEST_BYTES)
    });
    let server = Server::builder()
        .layer(watch::Watch::new(metrics.clone()))
        .add_service(IdentityServer::new(service.clone()).max_decoding_message_size(REQUEST_BYTES))
        .add_service(
            ControllerServer::new(service.clone()).max_decoding_message_size(REQUEST_BYTES),
        )
        .add_service(
            GroupControllerServer::new(service.clone()).max_decoding_message_size(REQUEST_BYTES),
        )
        .add_optional_service(metadata)
        .add_service(NodeServer::new(service).max_decoding_message_size(REQUEST_BYTES))
        .serve_with_incoming_shutdown(connections(listener), async {
            // A sender that is dropped says it as well.
            let _ = stopped.await;
        });
    let mut server = pin!(server);

    metrics.readiness().set(true);
    tracing::info!(endpoint = %file.path().display(), "serving");
    let ended = tokio::select! {
        ended = &mut server => Some(ended),
        () = look_again(&driver) => None,
        () = shutdown => None,
    };
    metrics.readiness().set(false);
    driver.stop();
    if let Some(ended) = ended {
        return ended.map_err(io::Error::other);
    }

    tracing::info!(operations = driver.running(), "stopping");
    let deadline = Instant::now() + drain;
    let _ = stop.send(());
    let drained = tokio::select! {
        ended = async { let ended = server.await; idle(&driver).await; ended } => Some(ended),
        () = async { idle(&driver).await; sleep(FAREWELL).await } => Some(Ok(())),
        () = sleep_until(deadline) => None,
    };
    drop(file);
    match drained {
        Some(ended) => ended.map_err(io::Error::other),
        None => {
            let operations = driver.running();
            tracing::warn!(
                operations,
                "not all ended in time; the next start finishes them"
            );
            Ok(())
        }
    }
}

/// Connections as they come.
fn connections(listener: UnixListener) -> impl Stream<Item = io::Result<UnixStream>> {
    UnixListenerStream::new(listener).then(|accepted| async {
        if let Err(error) = &accepted {
            tracing::warn!(%error, "can't take a connection");
            sleep(ACCEPT_PAUSE).await;
        }
        accepted
    })
}

/// Once nothing runs, a client that doesn't read has this long to take its last answers: an idle
/// connection of a sidecar that hangs must not hold up the next driver.
const FAREWELL: Duration = Duration::from_secs(1);

/// Looks at pools that aren't served, for ever.
async fn look_again(driver: &Arc<Driver>) {
    let mut ticks = interval(LOOK_AGAIN);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    ticks.tick().await;
    loop {
        ticks.tick().await;
        let driver = driver.clone();
        if let Err(error) = tokio::task::spawn_blocking(move || driver.look_again()).await {
            tracing::error!(%error, "looking at pools again failed");
        }
    }
}

/// Waits for operations whose callers went away.
async fn idle(driver: &Driver) {
    const POLL: Duration = Duration::from_millis(20);
    while driver.running() > 0 {
        sleep(POLL).await;
    }
}

/// Ends at the first SIGTERM or SIGINT after this call.
pub fn signal() -> io::Result<impl Future<Output = ()> + Send> {
    let mut terminate = unix_signal(SignalKind::terminate())?;
    let mut interrupt = unix_signal(SignalKind::interrupt())?;
    Ok(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    })
}
