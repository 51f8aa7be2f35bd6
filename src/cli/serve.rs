//! `slackwater serve`: starts the host, the driver or router, and the sockets, and serves until a
//! signal arrives.

use std::fs::DirBuilder;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::num::NonZeroU16;
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use tokio::runtime::{Builder, Runtime};

use super::{Failure, host_with_guard, real_host, router};
use crate::config::{self, AgentConfig, BadConfig, Config, Given, NodeConfig, RoleConfig};
use crate::cut::CutInterfaces;
use crate::cut::guard::GuardClient;
use crate::error::chain;
use crate::hook::{HookDefinition, LocalHooks};
use crate::host::memory::{MemoryHost, MemoryOptions};
use crate::operation::{Driver, Settings};
use crate::router::{InCluster, StatusSource};
use crate::server::{self, Endpoint, Options, Socket};
use crate::telemetry::{self, Metrics, http, page};
use crate::tls::{Credentials, Files, Name, TlsError};

/// Threads for async tasks. One would suffice for the calls of a node's sidecars and kubelet; a
/// second one keeps answering while the first is busy.
const WORKERS: usize = 2;
/// Threads for blocking work. Long work and queries are limited far below this number
/// ([`WorkClass`](crate::operation::WorkClass)): the rest is for the kubelet's calls, one for each volume.
const MAX_BLOCKING_THREADS: usize = 512;
/// An idle thread occupies memory for its stack.
const THREAD_IDLE_TIMEOUT: Duration = Duration::from_secs(5);

/// Serves until SIGTERM or SIGINT.
pub(super) fn serve(file: Option<&Path>, flags: Given) -> Result<ExitCode, Failure> {
    let flags = flags.with_env(std::env::var("CSI_ENDPOINT").ok())?;
    let config = flags.over_file(file)?.finish()?;
    telemetry::init(config.log_format, None).map_err(|error| {
        // Only RUST_LOG can be invalid here.
        BadConfig(config::one_line(&error.to_string()))
    })?;
    let runtime = runtime().map_err(Failure::run)?;
    let ending = runtime.block_on(run(config));
    // The next start completes what is still running after the drain; waiting could take forever.
    runtime.shutdown_background();
    ending.map(|()| ExitCode::SUCCESS)
}

fn runtime() -> io::Result<Runtime> {
    Builder::new_multi_thread()
        .worker_threads(WORKERS)
        .max_blocking_threads(MAX_BLOCKING_THREADS)
        .thread_keep_alive(THREAD_IDLE_TIMEOUT)
        .enable_all()
        .build()
}

async fn run(config: Config) -> Result<(), Failure> {
    // From here on a signal causes an orderly shutdown, even while pools are being opened.
    let signal = server::signal().map_err(Failure::run)?;
    let options = Options {
        alpha: config.alpha,
        metrics: Arc::new(Metrics::new()),
        ..Options::default()
    };
    let (_ended, end) = tokio::sync::oneshot::channel::<()>();
    if let Some(address) = config.metrics_address {
        let listener = http::listen(address).await;
        let listener = listener.map_err(|error| failed("serve metrics on", address, error))?;
        let ended = async {
            // Dropping the sender completes this.
            let _ = end.await;
        };
        tokio::spawn(http::serve(listener, options.metrics.clone(), ended));
    }
    let endpoint = config.endpoint.0;
    match config.role {
        RoleConfig::All { node, hooks } => {
            let driver = start(config.driver_name, node, Some(hooks)).await?;
            let socket = bind(&endpoint)?;
            leave(
                &driver,
                server::serve(socket, driver.clone(), options, signal),
            )
            .await
        }
        RoleConfig::Node { node, agent } => {
            let AgentConfig {
                listen,
                peer_listen,
                name,
                tls,
            } = agent;
            // The kubelet's calls need no certificate: after a reboot of the node, volumes become
            // available even while no certificate can be issued.
            let credentials = checked(Credentials::of_files_to_come(name, tls))?;
            show_expiry(&options.metrics, &credentials);
            let driver = start(config.driver_name, node, None).await?;
            let for_router = listen_at(listen, &credentials).await?;
            let for_agents = match peer_listen {
                Some(address) => Some(listen_at(address, &credentials).await?),
                None => None,
            };
            let endpoints = (for_router, for_agents);
            let socket = bind(&endpoint)?;
            let served = server::serve_node(socket, endpoints, driver.clone(), options, signal);
            leave(&driver, served).await
        }
        RoleConfig::Controller(controller) => {
            let page_port = controller.page_port;
            // The start may wait for certificates.
            let mut signal = Box::pin(signal);
            let started = tokio::select! {
                started = router::start(config.driver_name, controller, &options) => started?,
                () = &mut signal => return Ok(()),
            };
            let (router, cluster) = started;
            show(page_port, cluster.as_ref()).await?;
            let socket = bind(&endpoint)?;
            let served = server::serve_router(socket, router, options, signal).await;
            if let Some(cluster) = cluster {
                cluster.shut_down().await;
            }
            served.map_err(Failure::run)
        }
    }
}

/// Serves the status page until the runtime ends, if there is one.
async fn show(port: Option<NonZeroU16>, cluster: Option<&Arc<InCluster>>) -> Result<(), Failure> {
    let (Some(port), Some(cluster)) = (port.map(NonZeroU16::get), cluster) else {
        return Ok(());
    };
    let listener = page::listen(port).await;
    let address = (Ipv4Addr::LOCALHOST, port).into();
    let listener = listener.map_err(|error| failed("serve the status page on", address, error))?;
    let source = Arc::new(StatusSource(Arc::clone(cluster)));
    tokio::spawn(page::serve(listener, source, std::future::pending()));
    tracing::info!(%address, "serving the status page");
    Ok(())
}

async fn listen_at(address: SocketAddr, with: &Arc<Credentials>) -> Result<Endpoint, Failure> {
    let listener = server::listen(address).await;
    Ok(Endpoint {
        listener: listener.map_err(|error| failed("listen on", address, error))?,
        credentials: with.clone(),
    })
}

/// Serves, and then closes the driver's pools, even after an error.
async fn leave(
    driver: &Arc<Driver>,
    served: impl Future<Output = io::Result<()>>,
) -> Result<(), Failure> {
    let served = served.await;
    let driver = driver.clone();
    let left = tokio::task::spawn_blocking(move || driver.leave()).await;
    served
        .and(left.map_err(io::Error::other))
        .map_err(Failure::run)
}

/// Starts the driver on a blocking thread.
async fn start(
    driver_name: String,
    node: NodeConfig,
    hooks: Option<Vec<HookDefinition>>,
) -> Result<Arc<Driver>, Failure> {
    let opening = tokio::task::spawn_blocking(move || open(driver_name, node, hooks));
    opening.await.map_err(Failure::run)?.map(Arc::new)
}

/// Opens the driver on its host. Without hooks it is a node of a cluster: its guard is a container
/// next to it, and the router quiesces applications.
fn open(
    driver_name: String,
    node: NodeConfig,
    hooks: Option<Vec<HookDefinition>>,
) -> Result<Driver, Failure> {
    let is_alone = hooks.is_some();
    let hooks = hooks.unwrap_or_default();
    let interfaces = if node.is_simulated() {
        let options = MemoryOptions {
            allowed: node.allowed_paths.clone(),
            ..MemoryOptions::default()
        };
        // Hooks quiesce real applications even if volumes are simulated, because applications need
        // that in their tests.
        let programs = real_host(&[], &[]);
        CutInterfaces {
            hooks: Arc::new(LocalHooks::new(hooks, programs)),
            ..CutInterfaces::simulated(MemoryHost::with_options(options))
        }
    } else {
        let host = host_with_guard(&node.allowed_paths, &node.pools, &node.state_dir);
        let guard = GuardClient::new(host.clone(), node.state_dir.clone())
            .with_grace_periods(node.grace_periods);
        CutInterfaces {
            hooks: Arc::new(LocalHooks::new(hooks, host.clone())),
            freezer: Arc::new(if is_alone {
                guard.check_program().map_err(Failure::run)?;
                guard
            } else {
                guard.started_by_others()
            }),
            host,
        }
    };
    let settings = Settings {
        node_name: node.name,
        driver_name,
        pools: node.pools,
        node_record: node.node_record,
        state_dir: node.state_dir,
        alone: is_alone,
        allowed_paths: node.allowed_paths,
        max_volumes: node.max_volumes,
        inline_max_size: node.inline_max_size,
        copy_rate: node.copy_rate,
        import_paths: node.import_paths,
        metrics_per_volume: node.metrics_per_volume,
    };
    Ok(Driver::start(settings, interfaces)?)
}

/// Invalid certificates at the start are a configuration error; later, the last valid ones stay in
/// use.
pub(super) fn credentials(name: Name, files: Files) -> Result<Arc<Credentials>, Failure> {
    checked(Credentials::of_files(name, files))
}

fn checked(read: Result<Credentials, TlsError>) -> Result<Arc<Credentials>, Failure> {
    let read =
        read.map_err(|error| BadConfig(config::one_line(&format!("--tls-*: {}", chain(&error)))))?;
    Ok(Arc::new(read))
}

/// Reports in a metric when the certificate in use expires.
pub(super) fn show_expiry(metrics: &Metrics, credentials: &Arc<Credentials>) {
    let credentials = credentials.clone();
    metrics.show_certificate(move || credentials.expires());
}

fn failed(doing: &str, address: SocketAddr, error: io::Error) -> Failure {
    let text = format!("{doing} {address}: {error}");
    Failure::run(io::Error::new(error.kind(), text))
}

fn bind(endpoint: &Path) -> Result<Socket, Failure> {
    make_parent(endpoint)?;
    Socket::bind(endpoint).map_err(Failure::run)
}

/// Creates the directory of the socket; no other file is ever created in it.
fn make_parent(socket: &Path) -> Result<(), Failure> {
    let Some(parent) = socket.parent().filter(|parent| !parent.exists()) else {
        return Ok(());
    };
    let created = DirBuilder::new().recursive(true).mode(0o700).create(parent);
    created.map_err(|error| {
        let doing = format!("create the directory {}: {error}", parent.display());
        Failure::run(io::Error::new(error.kind(), doing))
    })
}
