//! The listening sockets: the Unix socket for the kubelet or the sidecars, and an agent's address.
//! They are served until the shutdown, and then removed.
//!
//! *Expected flow*: [`Socket::bind`], then [`serve`], [`serve_node`] or [`serve_router`] with
//! [`signal`] as its shutdown.
//!
//! *Guarantees*: only root can connect to the socket, from the first moment, and only the router to
//! an agent. A socket on which another process answers is left to it. After the shutdown no new
//! connection is accepted, running operations have [`DRAIN_TIMEOUT`] to finish, the socket's file is
//! removed, and no other file was ever created next to it.

pub mod admin;
mod secured;
mod socket;
mod watch;
mod work;

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
use crate::agent::peer_server::PeerServer;
use crate::csi::controller_server::{Controller, ControllerServer};
use crate::csi::group_controller_server::{GroupController, GroupControllerServer};
use crate::csi::identity_server::{Identity, IdentityServer};
use crate::csi::node_server::NodeServer;
use crate::csi::snapshot_metadata_server::{SnapshotMetadata, SnapshotMetadataServer};
use crate::model::Alpha;
use crate::operation::Driver;
use crate::router::{Router, TlsDial};
use crate::service::{PeerService, Peers, Service};
use crate::telemetry::Metrics;
use crate::tls::{COPY_PING_TIMEOUT, Credentials, PING_INTERVAL, PING_TIMEOUT};

pub use secured::listen;
pub use socket::{BindError, Socket};
use work::{Calls, Work};

/// Default time for running operations to end after a shutdown: the kubelet's default grace period
/// is 30 s. The next start completes what is not finished by then.
pub const DRAIN_TIMEOUT: Duration = Duration::from_secs(25);

/// Maximum size of a request. Maps are limited to 4 KiB, but a topology requirement of a large
/// cluster has some hundred bytes for each node.
const REQUEST_BYTES: usize = 4 << 20;

/// Maximum number of concurrent calls of the router, including the streams of cuts; further calls
/// wait.
const MAX_CONCURRENT_STREAMS: u32 = 1024;

/// Each call passes through [`watch`].
type Watched = Stack<watch::Watch, util::Identity>;

/// A service that accepts requests of [`REQUEST_BYTES`].
macro_rules! sized {
    ($server:ident, $service:expr) => {
        $server::new($service.clone()).max_decoding_message_size(REQUEST_BYTES)
    };
}

/// Pause after a connection could not be accepted, usually because no descriptors are left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Configuration of [`serve`] besides the driver.
#[derive(Clone, Debug)]
pub struct Options {
    /// Alpha features to serve.
    pub alpha: Alpha,
    /// Counts calls, and reports whether the driver is ready.
    pub metrics: Arc<Metrics>,
    /// How long running operations may take to end after the shutdown.
    pub drain: Duration,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            alpha: Alpha::default(),
            metrics: Arc::default(),
            drain: DRAIN_TIMEOUT,
        }
    }
}

/// The endpoint of a node's agent, for the router only.
pub struct Endpoint {
    /// The result of [`listen`].
    pub listener: TcpListener,
    /// The certificate of this process, and the trusted CAs.
    pub credentials: Arc<Credentials>,
}

/// Serves every CSI service of one node until `shutdown`, and then ends as described for this
/// module. An error is one of the transport.
pub async fn serve(
    socket: Socket,
    driver: Arc<Driver>,
    options: Options,
    shutdown: impl Future<Output = ()>,
) -> io::Result<()> {
    let service = Service::new(driver.clone(), options.alpha);
    let parts = ServerParts::new(socket, &options);
    let server = builder(&options.metrics, &parts.calls);
    let server = with_controllers(server, &service, &options)
        .add_service(sized!(NodeServer, service))
        .add_service(sized!(AdminServer, service))
        .serve_with_incoming_shutdown(connections(parts.listener), wait_for_stop(&parts.stop));
    run_until_shutdown(server, parts.shutdown, Work::Driver(driver), shutdown).await
}

/// Serves a node of a cluster: the kubelet's calls on the socket, the router's at the endpoint, and
/// those of other agents at the second endpoint, if there is one. They end together, as described
/// for this module.
pub async fn serve_node(
    socket: Socket,
    (endpoint, of_agents): (Endpoint, Option<Endpoint>),
    driver: Arc<Driver>,
    options: Options,
    shutdown: impl Future<Output = ()>,
) -> io::Result<()> {
    let port = match &of_agents {
        Some(of_agents) => Some(of_agents.listener.local_addr()?.port()),
        None => None,
    };
    let dial = secured::AgentDial(TlsDial::new(endpoint.credentials.clone()));
    let service = Service::new(driver.clone(), options.alpha).with_peers(Peers {
        dial: Arc::new(dial),
        port,
    });
    let parts = ServerParts::new(socket, &options);
    let kubelet = builder(&options.metrics, &parts.calls)
        .add_service(sized!(IdentityServer, service))
        .add_service(sized!(NodeServer, service))
        .add_service(sized!(AdminServer, service))
        .serve_with_incoming_shutdown(connections(parts.listener), wait_for_stop(&parts.stop));
    let address = endpoint.listener.local_addr()?;
    let router = agent_builder(&options.metrics, &parts.calls);
    let router = with_controllers(router, &service, &options)
        .add_service(sized!(AgentServer, service))
        .serve_with_incoming_shutdown(
            secured::connections(endpoint, &options.metrics),
            wait_for_stop(&parts.stop),
        );
    tracing::info!(%address, "listening for the controller");
    let of_driver = driver.clone();
    let agents = async {
        let Some(of_agents) = of_agents else {
            return Ok(());
        };
        let service = PeerService::new(of_driver, Arc::new(secured::Certificates));
        let stop = wait_for_stop(&parts.stop);
        agent_builder(&options.metrics, &parts.calls)
            .http2_keepalive_timeout(Some(COPY_PING_TIMEOUT))
            .add_service(PeerServer::new(service))
            .serve_with_incoming_shutdown(secured::connections_of_agents(of_agents), stop)
            .await
    };
    let all = async { tokio::try_join!(kubelet, router, agents).map(drop) };
    run_until_shutdown(all, parts.shutdown, Work::Driver(driver), shutdown).await
}

/// Serves a whole cluster to the sidecars with a router, and ends as described for this module.
pub async fn serve_router(
    socket: Socket,
    router: Router,
    options: Options,
    shutdown: impl Future<Output = ()>,
) -> io::Result<()> {
    let parts = ServerParts::new(socket, &options);
    let server = builder(&options.metrics, &parts.calls);
    let server = with_controllers(server, &router, &options)
        .add_service(sized!(AdminServer, router))
        .serve_with_incoming_shutdown(connections(parts.listener), wait_for_stop(&parts.stop));
    let work = Work::Router(parts.calls, router);
    run_until_shutdown(server, parts.shutdown, work, shutdown).await
}

/// What a server needs to start.
struct ServerParts {
    listener: UnixListener,
    stop: Receiver<()>,
    calls: Calls,
    shutdown: ShutdownParts,
}

/// What a server needs to end.
struct ShutdownParts {
    file: socket::SocketFile,
    stop: Sender<()>,
    metrics: Arc<Metrics>,
    drain: Duration,
}

impl ServerParts {
    fn new(socket: Socket, options: &Options) -> ServerParts {
        let (listener, file) = socket.into_parts();
        let (stop_sender, stop) = channel(());
        let shutdown = ShutdownParts {
            file,
            stop: stop_sender,
            metrics: options.metrics.clone(),
            drain: options.drain,
        };
        ServerParts {
            listener,
            stop,
            calls: Calls::default(),
            shutdown,
        }
    }
}

/// Completes once the sender is dropped.
fn wait_for_stop(stop: &Receiver<()>) -> impl Future<Output = ()> + use<> {
    let mut stop = stop.clone();
    async move { while stop.changed().await.is_ok() {} }
}

fn builder(metrics: &Arc<Metrics>, calls: &Calls) -> Server<Watched> {
    Server::builder().layer(watch::Watch::new(metrics.clone(), calls.clone()))
}

/// For connections over the network.
fn agent_builder(metrics: &Arc<Metrics>, calls: &Calls) -> Server<Watched> {
    builder(metrics, calls)
        // The end of the router's stream ends a freeze, and the end of a reader's the copy of a
        // snapshot, so both must be detected.
        .http2_keepalive_interval(Some(PING_INTERVAL))
        .http2_keepalive_timeout(Some(PING_TIMEOUT))
        .max_concurrent_streams(Some(MAX_CONCURRENT_STREAMS))
}

/// The services that sidecars and an agent's router call. More can be added.
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

/// Cleans up what an earlier process has left, for a limited time, serves until the shutdown, and
/// ends in order.
async fn run_until_shutdown(
    servers: impl Future<Output = Result<(), tonic::transport::Error>>,
    parts: ShutdownParts,
    work: Work,
    shutdown: impl Future<Output = ()>,
) -> io::Result<()> {
    let ShutdownParts {
        file,
        stop,
        metrics,
        drain,
    } = parts;
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

/// Accepted connections.
fn connections(listener: UnixListener) -> impl Stream<Item = io::Result<UnixStream>> {
    UnixListenerStream::new(listener).then(|accepted| async {
        if let Err(error) = &accepted {
            tracing::warn!(%error, "failed to accept a connection");
            sleep(ACCEPT_PAUSE).await;
        }
        accepted
    })
}

/// Once nothing is running, a client that does not read has this long to receive its last answers:
/// an idle connection of a hanging sidecar must not delay the next driver.
const CONNECTION_CLOSE_TIMEOUT: Duration = Duration::from_secs(1);

/// Completes at the first SIGTERM or SIGINT after this call.
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
