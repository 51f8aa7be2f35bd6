//! `slackwater serve`: host, driver, socket, until a signal comes.

use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use tokio::runtime::{Builder, Runtime};

use super::{Failure, host_with_guard, real_host};
use crate::config::{self, Config, Given};
use crate::cut::Seams;
use crate::cut::guard::Guard;
use crate::hook::LocalHooks;
use crate::host::memory::{MemoryHost, MemoryOptions};
use crate::operation::{Driver, Settings};
use crate::server::{self, Options, Socket};
use crate::telemetry::{self, Metrics, http};

/// Frames of one node's sidecars and kubelet: one thread would do, a second one keeps answering
/// while the first is at work.
const WORKERS: usize = 2;
/// Operations that run at a time. More wait, and their callers come again.
const BLOCKING: usize = 64;
/// A thread that has nothing to do costs its stack.
const KEEP_ALIVE: Duration = Duration::from_secs(5);

/// Serves until SIGTERM or SIGINT.
pub(super) fn serve(file: Option<&Path>, flags: Given) -> Result<ExitCode, Failure> {
    let flags = flags.with_env(std::env::var("CSI_ENDPOINT").ok())?;
    let given = match file {
        Some(path) => flags.over(config::read_file(path)?),
        None => flags,
    };
    let config = given.finish()?;
    telemetry::init(config.log_format, None).map_err(|error| {
        // Only RUST_LOG can be wrong here.
        config::BadConfig(config::one_line(&error.to_string()))
    })?;
    let runtime = runtime().map_err(Failure::run)?;
    let ending = runtime.block_on(run(config));
    // What is still running after the drain is for the next start; waiting would take for ever.
    runtime.shutdown_background();
    ending.map(|()| ExitCode::SUCCESS)
}

fn runtime() -> std::io::Result<Runtime> {
    Builder::new_multi_thread()
        .worker_threads(WORKERS)
        .max_blocking_threads(BLOCKING)
        .thread_keep_alive(KEEP_ALIVE)
        .enable_all()
        .build()
}

async fn run(config: Config) -> Result<(), Failure> {
    // From here on a signal is an orderly end, also one that comes while pools are opened.
    let signal = server::signal().map_err(Failure::run)?;
    let metrics = Arc::new(Metrics::new());
    let (_ended, end) = tokio::sync::oneshot::channel::<()>();
    if let Some(address) = config.metrics_address {
        let listener = http::listen(address).await.map_err(|error| {
            let doing = format!("serve metrics on {address}: {error}");
            Failure::run(std::io::Error::new(error.kind(), doing))
        })?;
        let ended = async {
            // A sender that is dropped says it.
            let _ = end.await;
        };
        tokio::spawn(http::serve(listener, metrics.clone(), ended));
    }
    let alpha = config.alpha;
    let endpoint = config.endpoint.clone();
    let opening = tokio::task::spawn_blocking(move || open(config));
    let driver = opening.await.map_err(Failure::run)??;
    make_parent(&endpoint.0)?;
    let socket = Socket::bind(&endpoint.0).map_err(Failure::run)?;
    let options = Options {
        alpha,
        metrics,
        ..Options::default()
    };
    let driver = Arc::new(driver);
    let served = server::serve(socket, driver.clone(), options, signal).await;
    let left = tokio::task::spawn_blocking(move || driver.leave()).await;
    served
        .and(left.map_err(std::io::Error::other))
        .map_err(Failure::run)
}

/// The driver on its host.
fn open(config: Config) -> Result<Driver, Failure> {
    let seams = if config.is_simulated() {
        let options = MemoryOptions {
            allowed: config.allowed_paths,
            ..MemoryOptions::default()
        };
        // Applications are real, also beside simulated volumes: as their tests want it.
        let programs = real_host(&[], &[]);
        Seams {
            hooks: Arc::new(LocalHooks::new(config.hooks, programs)),
            ..Seams::simulated(MemoryHost::with_options(options))
        }
    } else {
        let host = host_with_guard(&config.allowed_paths, &config.pools, &config.state_dir);
        Seams {
            hooks: Arc::new(LocalHooks::new(config.hooks, host.clone())),
            freezer: Arc::new(Guard::new(host.clone(), config.state_dir)),
            host,
        }
    };
    let settings = Settings {
        node_name: config.node_name,
        driver_name: config.driver_name,
        pools: config.pools,
        node_record: config.node_record,
    };
    Ok(Driver::start(settings, seams)?)
}

/// The folder of the socket; nothing else ever lies in it.
fn make_parent(socket: &Path) -> Result<(), Failure> {
    let Some(parent) = socket.parent().filter(|parent| !parent.exists()) else {
        return Ok(());
    };
    let made = DirBuilder::new().recursive(true).mode(0o700).create(parent);
    made.map_err(|error| {
        let doing = format!("make the folder {}: {error}", parent.display());
        Failure::run(std::io::Error::new(error.kind(), doing))
    })
}
