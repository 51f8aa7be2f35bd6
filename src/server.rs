//! What is listened on: the unix socket of kubelet or sidecars, and an agent's address; served
//! until told to stop, and then left clean.
//!
//! *Expected flow*: [`Socket::bind`], then [`serve`], [`serve_node`] or [`serve_router`] with [`signal`] as its
//! shutdown.
//!
//! *Guarantees*: nobody but root can connect to the socket, from the first moment, and nobody but
//! the router to an agent. A socket that another process answers on is left to it. After the
//! shutdown no new connection is taken, operations that run have [`DRAIN`] to finish, the socket's
//! file is gone, and no other file was ever beside it.

pub mod admin;
mod secured;
mod socket;
mod watch;
mod work;

use std::future::Future;
use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::{TcpListener, UnixListener, UnixStream};
use tokio::signal::unix::{SignalKind, signal as unix_signal};
use tokio::sync::watch::{Receiver, Sender, channel};
use tokio::time::{Instant, sleep, sleep_until};
use tokio_stream::wrappers::UnixListenerStream;
use tokio_stream::{Stream, StreamExt};
use tonic::transport::Server;
use tower::layer::util::{self, Stack};

use crate::agent::admin_server::AdminServer;
use crate::agent::agent_server::AgentServer;
use crate::csi::controller_server::{Controller, ControllerServer};
use crate::csi::group_controller_server::{GroupController, GroupControllerServer};
use crate::csi::identity_server::{Identity, IdentityServer};
use crate::csi::node_server::NodeServer;
use crate::csi::snapshot_metadata_server::{SnapshotMetadata, SnapshotMetadataServer};
use crate::model::Alpha;
use crate::operation::Driver;
use crate::router::Router;
use crate::service::Service;
use crate::telemetry::Metrics;
use crate::tls::{Credentials, PING_INTERVAL, PING_TIMEOUT};

pub use secured::listen;
pub use socket::{BindError, Socket};
use work::{Calls, Work};

/// How long running operations may take to end after a shutdown, unless said: the kubelet's
/// default grace period is 30 s. What isn't done by then is found and finished by the next start.
pub const DRAIN: Duration = Duration::from_secs(25);

/// Largest request. Maps are bounded to 4 KiB, but a topology requirement of a large cluster has
/// some hundred bytes for each node.
const REQUEST_BYTES: usize = 4 << 20;

/// Calls of the router at a time, the streams of cuts among them; more wait for their turn.
const STREAMS: u32 = 1024;

/// Each call is seen by [`watch`].
type Watched = Stack<watch::Watch, util::Identity>;

/// A service that takes requests of [`REQUEST_BYTES`].
macro_rules! sized {
    ($server:ident, $service:expr) => {
        $server::new($service.clone()).max_decoding_message_size(REQUEST_BYTES)
    };
}

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

/// Where a node's agent is reached, by the router alone.
pub struct Endpoint {
    /// Of [`listen`].
    pub listener: TcpListener,
    /// Our certificate, and who is trusted.
    pub credentials: Arc<Credentials>,
}

/// Serves every CSI service of one node until `shutdown`, and then ends as the module says. The
/// error is one of the transport.
pub async fn serve(
    socket: Socket,
    driver: Arc<Driver>,
    options: Options,
    shutdown: impl Future<Output = ()>,
) -> io::Result<()> {
    let service = Service::new(driver.clone(), options.alpha);
    let life = Life::new(socket, &options);
    let server = builder(&options.metrics, &life.calls);
    let server = with_controllers(server, &service, &options)
        .add_service(sized!(NodeServer, service))
        .add_service(sized!(AdminServer, service))
        .serve_with_incoming_shutdown(connections(life.listener), wait_for_stop(&life.stop));
    live(server, life.ending, Work::Driver(driver), shutdown).await
}

/// Serves a node of a cluster: the kubelet's calls on the socket, the router's at the endpoint.
/// Both end together, as the module says.
pub async fn serve_node(
    socket: Socket,
    endpoint: Endpoint,
    driver: Arc<Driver>,
    options: Options,
    shutdown: impl Future<Output = ()>,
) -> io::Result<()> {
    let service = Service::new(driver.clone(), options.alpha);
    let life = Life::new(socket, &options);
    let kubelet = builder(&options.metrics, &life.calls)
        .add_service(sized!(IdentityServer, service))
        .add_service(sized!(NodeServer, service))
        .add_service(sized!(AdminServer, service))
        .serve_with_incoming_shutdown(connections(life.listener), wait_for_stop(&life.stop));
    let address = endpoint.listener.local_addr()?;
    let router = builder(&options.metrics, &life.calls)
        // A freeze ends with the router's stream: so its end must be noticed.
        .http2_keepalive_interval(Some(PING_INTERVAL))
        .http2_keepalive_timeout(Some(PING_TIMEOUT))
        .max_concurrent_streams(Some(STREAMS));
    let router = with_controllers(router, &service, &options)
        .add_service(sized!(AgentServer, service))
        .serve_with_incoming_shutdown(
            secured::connections(endpoint, &options.metrics),
            wait_for_stop(&life.stop),
        );
    tracing::info!(%address, "listening for the controller");
    let both = async { tokio::try_join!(kubelet, router).map(drop) };
    live(both, life.ending, Work::Driver(driver), shutdown).await
}

/// Serves a whole cluster to the sidecars, by a router, and ends as the module says.
pub async fn serve_router(
    socket: Socket,
    router: Router,
    options: Options,
    shutdown: impl Future<Output = ()>,
) -> io::Result<()> {
    let life = Life::new(socket, &options);
    let server = builder(&options.metrics, &life.calls);
    let server = with_controllers(server, &router, &options)
        .add_service(sized!(AdminServer, router))
        .serve_with_incoming_shutdown(connections(life.listener), wait_for_stop(&life.stop));
    let work = Work::Router(life.calls, router);
    live(server, life.ending, work, shutdown).await
}

/// What a server begins with.
struct Life {
    listener: UnixListener,
    stop: Receiver<()>,
    calls: Calls,
    ending: Ending,
}

/// What its end needs.
struct Ending {
    file: socket::SocketFile,
    stop: Sender<()>,
    metrics: Arc<Metrics>,
    drain: Duration,
}

impl Life {
    fn new(socket: Socket, options: &Options) -> Life {
        let (listener, file) = socket.into_parts();
        let (tell, stop) = channel(());
        let ending = Ending {
            file,
            stop: tell,
            metrics: options.metrics.clone(),
            drain: options.drain,
        };
        Life {
            listener,
            stop,
            calls: Calls::default(),
            ending,
        }
    }
}

/// Until there's nobody any more who could say something else.
fn wait_for_stop(stop: &Receiver<()>) -> impl Future<Output = ()> + use<> {
    let mut stop = stop.clone();
    async move { while stop.changed().await.is_ok() {} }
}

fn builder(metrics: &Arc<Metrics>, calls: &Calls) -> Server<Watched> {
    Server::builder().layer(watch::Watch::new(metrics.clone(), calls.clone()))
}

/// What sidecars call, and the router of an agent. More can be added.
fn with_controllers<S>(
    mut server: Server<Watched>,
    service: &S,
    options: &Options,
) -> tonic::transport::server::Router<Watched>
where
    S: Identity + Controller + GroupController + SnapshotMetadata + Clone,
{
    let metadata = options.alpha.snapshot_metadata;
    server
        .add_service(sized!(IdentityServer, service))
        .add_service(sized!(ControllerServer, service))
        .add_service(sized!(GroupControllerServer, service))
        .add_optional_service(metadata.then(|| sized!(SnapshotMetadataServer, service)))
}

/// Ends what an earlier process has left, for some seconds at most, serves until the shutdown, and
/// ends in order.
async fn live(
    servers: impl Future<Output = Result<(), tonic::transport::Error>>,
    ending: Ending,
    work: Work,
    shutdown: impl Future<Output = ()>,
) -> io::Result<()> {
    let Ending {
        file,
        stop,
        metrics,
        drain,
    } = ending;
    let (mut servers, mut shutdown) = (pin!(servers), pin!(shutdown));
    work.observe(&metrics);
    let ended = tokio::select! {
        () = work.begin() => {
            metrics.readiness().set(true);
            tracing::info!(endpoint = %file.path().display(), "serving");
            tokio::select! {
                ended = &mut servers => Some(ended),
                () = work.refresh_pools() => None,
                () = &mut shutdown => None,
            }
        }
        () = &mut shutdown => None,
    };
    metrics.readiness().set(false);
    work.stop();
    if let Some(ended) = ended {
        return ended.map_err(io::Error::other);
    }

    tracing::info!(operations = work.running(), "stopping");
    let deadline = Instant::now() + drain;
    drop(stop);
    let drained = tokio::select! {
        ended = async { let ended = servers.await; work.idle().await; ended } => Some(ended),
        () = async { work.idle().await; sleep(CONNECTION_CLOSE_TIMEOUT).await } => Some(Ok(())),
        () = sleep_until(deadline) => None,
    };
    drop(file);
    match drained {
        Some(ended) => ended.map_err(io::Error::other),
        None => {
            let operations = work.running();
            tracing::warn!(
                operations,
                "stopping before all operations have finished; the next start completes them"
            );
            Ok(())
        }
    }
}

/// Connections as they come.
fn connections(listener: UnixListener) -> impl Stream<Item = io::Result<UnixStream>> {
    UnixListenerStream::new(listener).then(|accepted| async {
        if let Err(error) = &accepted {
            tracing::warn!(%error, "failed to accept a connection");
            sleep(ACCEPT_PAUSE).await;
        }
        accepted
    })
}

/// Once nothing runs, a client that doesn't read has this long to take its last answers: an idle
/// connection of a sidecar that hangs must not hold up the next driver.
const CONNECTION_CLOSE_TIMEOUT: Duration = Duration::from_secs(1);

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
