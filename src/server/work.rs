//! Work for callers, even if they no longer wait, and background tasks.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use futures_util::future::join_all;
use tokio::task::JoinHandle;
use tokio::time::{Interval, MissedTickBehavior, interval, sleep, timeout};

use crate::error::chain;
use crate::model::PoolId;
use crate::operation::Driver;
use crate::router::Router;
use crate::telemetry::Metrics;

/// How often pools that are not served are tried again, and how often leftovers of calls are
/// cleaned up: a disk that is mounted late, or becomes writable again, must not require a restart.
const POOL_POLL_INTERVAL: Duration = Duration::from_secs(10);

/// How long the first call waits for the cleanup after a killed process. Later, calls that conflict
/// with the cleanup are repeated by their callers.
const CLEAN_UP_TIMEOUT: Duration = Duration::from_secs(5);

/// Counts calls that have not been answered.
#[derive(Clone, Debug, Default)]
pub(super) struct Calls(Arc<AtomicUsize>);

/// A counted call, until this is dropped.
pub(super) struct Begun(Calls);

impl Calls {
    pub(super) fn begin(&self) -> Begun {
        self.0.fetch_add(1, Ordering::SeqCst);
        Begun(self.clone())
    }
}

impl Drop for Begun {
    fn drop(&mut self) {
        self.0.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// The component that does the work.
pub(super) enum Work {
    /// The operations of a node count themselves.
    Driver(Arc<Driver>),
    /// What a router has forwarded ends with its call; its cuts continue.
    Router(Calls, Router),
}

impl Work {
    /// Registers its metrics.
    pub(super) fn observe(&self, metrics: &Metrics) {
        match self {
            Work::Driver(driver) => metrics.observe(driver.clone()),
            // The router was registered when it was created.
            Work::Router(..) => {}
        }
    }

    /// Number of running operations.
    pub(super) fn running(&self) -> usize {
        match self {
            Work::Driver(driver) => driver.running(),
            Work::Router(calls, router) => {
                calls.0.load(Ordering::SeqCst).max(router.cuts_running())
            }
        }
    }

    /// Starts no new operations.
    pub(super) fn stop(&self) {
        match self {
            Work::Driver(driver) => driver.stop(),
            Work::Router(_, router) => router.stop_cuts(),
        }
    }

    /// Cleans up what calls of an earlier process have left, except what must be overwritten; work
    /// that takes longer continues concurrently with the first calls.
    pub(super) async fn begin(&self) {
        let Work::Driver(driver) = self else { return };
        let tasks: [fn(&Driver, PoolId); 2] = [Driver::resolve_groups, Driver::clean];
        let served = driver.served();
        let each = served.iter().flat_map(|pool| {
            let one = |task| run_counted(driver.clone(), task, *pool);
            tasks.map(one)
        });
        // Reaching the time limit is not an error.
        let _ = timeout(CLEAN_UP_TIMEOUT, join_all(each)).await;
    }

    /// Opens pools, and cleans up what calls have left, until it is dropped.
    pub(super) async fn refresh_pools(&self) {
        let driver = match self {
            Work::Driver(driver) => driver,
            Work::Router(..) => return std::future::pending().await,
        };
        // These run concurrently: overwriting takes long, and a query may wait for a disk.
        let sweep = run_periodically(driver, "sweep of freezes", |driver| {
            driver.snapshots.sweep_freezes();
        });
        let refresh = run_periodically(driver, "check of the node", Driver::refresh_node);
        let pools = probe_pools(driver);
        let groups = clean(driver, Driver::resolve_groups);
        let leftovers = clean(driver, Driver::clean);
        let wipes = clean(driver, Driver::wipe);
        let trims = run_uncounted(driver, |driver, pool| driver.volumes.trim_volumes(pool));
        let disks = run_uncounted(driver, Driver::discard_freed);
        let numbers = run_uncounted(driver, Driver::measure_volumes);
        tokio::join!(
            sweep, refresh, pools, groups, leftovers, wipes, disks, trims, numbers
        );
    }

    /// Waits for work whose callers have disconnected.
    pub(super) async fn idle(&self) {
        const POLL_INTERVAL: Duration = Duration::from_millis(20);
        while self.running() > 0 {
            sleep(POLL_INTERVAL).await;
        }
    }
}

async fn run_periodically(driver: &Arc<Driver>, what: &str, task: fn(&Driver)) {
    let mut ticks = ticks();
    ticks.tick().await;
    loop {
        ticks.tick().await;
        let driver = driver.clone();
        if let Err(error) = tokio::task::spawn_blocking(move || task(&driver)).await {
            tracing::error!(%error, task = what, "failed to run a periodic task");
        }
    }
}

/// Tries all pools concurrently: the attempt for a pool whose disk hangs may end only with its
/// disk.
async fn probe_pools(driver: &Arc<Driver>) {
    let mut ticks = ticks();
    ticks.tick().await;
    let mut running: HashMap<String, JoinHandle<()>> = HashMap::new();
    loop {
        ticks.tick().await;
        running.retain(|_, one| !one.is_finished());
        for pool in &driver.pools.settings().pools {
            let (driver, name) = (driver.clone(), pool.name.clone());
            let begin = || tokio::task::spawn_blocking(move || driver.probe_pool(&name));
            running.entry(pool.name.clone()).or_insert_with(begin);
        }
    }
}

/// Runs a task for every pool that is served: the pools concurrently, so that a disk that hangs
/// delays nothing else.
async fn for_pools(driver: &Arc<Driver>, begin: impl Fn(PoolId) -> JoinHandle<()>) {
    let mut ticks = ticks();
    let mut running: HashMap<PoolId, JoinHandle<()>> = HashMap::new();
    loop {
        ticks.tick().await;
        running.retain(|_, one| !one.is_finished());
        for pool in driver.served() {
            running.entry(pool).or_insert_with(|| begin(pool));
        }
    }
}

/// Cleans up what calls have left; groups, whose first member may be on another pool, concurrently
/// with the rest. This counts as an operation: a shutdown waits for running cleanups, and starts no
/// others.
async fn clean(driver: &Arc<Driver>, task: fn(&Driver, PoolId)) {
    for_pools(driver, |pool| {
        tokio::spawn(run_counted(driver.clone(), task, pool))
    })
    .await;
}

/// Discards free blocks on disks or images. A shutdown does not wait for it: nothing depends on it,
/// and it is repeated.
async fn run_uncounted(driver: &Arc<Driver>, task: fn(&Driver, PoolId)) {
    let begin = |pool| {
        let driver = driver.clone();
        tokio::task::spawn_blocking(move || task(&driver, pool))
    };
    for_pools(driver, begin).await;
}

async fn run_counted(driver: Arc<Driver>, task: fn(&Driver, PoolId), pool: PoolId) {
    let done = driver.run_blocking(move |driver| {
        task(driver, pool);
        Ok(())
    });
    if let Err(error) = done.await {
        tracing::debug!(error = %chain(&error), "postponed the cleanup of interrupted calls");
    }
}

fn ticks() -> Interval {
    let mut ticks = interval(POOL_POLL_INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    ticks
}
