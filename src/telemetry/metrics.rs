//! Metrics for Prometheus, described in `docs/metrics.md`.
//!
//! Calls are counted when they end. The state of pools is read during a scrape, on a blocking
//! thread; if the disk of a pool hangs, the metrics become old (`slackwater_status_age_seconds`),
//! but the scrape never hangs.

use std::fmt;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::{ConstCounter, Counter};
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::{Registry, Unit};

use super::http::Readiness;
use super::populations::Populations;
use super::router::RouterCounts;
use crate::operation::{Driver, PoolStatus, VolumeReport};

/// Upper limits of the latency buckets in seconds: most calls take milliseconds, and callers give
/// up between 10 s and 3 minutes.
const BUCKETS: [f64; 14] = [
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 30.0, 120.0,
];

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct CallLabels {
    method: &'static str,
    code: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct MethodLabel {
    method: &'static str,
}

/// All metrics of this process.
pub struct Metrics {
    registry: Registry,
    calls: Family<CallLabels, Counter>,
    durations: Family<MethodLabel, Histogram, fn() -> Histogram>,
    router: RouterCounts,
    populations: Populations,
    shared: Arc<Shared>,
}

/// State that the collectors read.
#[derive(Default)]
struct Shared {
    driver: OnceLock<Arc<Driver>>,
    seen: Mutex<Option<Seen>>,
    /// Held while the state of storage is being read.
    looking: Mutex<()>,
    readiness: Readiness,
    certificate: OnceLock<Expiry>,
    refused: OnceLock<Box<dyn Fn() -> u64 + Send + Sync>>,
}

/// Returns when the certificate in use expires, in seconds since 1970.
type Expiry = Box<dyn Fn() -> Option<u64> + Send + Sync>;

/// The state of storage at the last read.
#[derive(Clone)]
struct Seen {
    at: Instant,
    pools: Vec<PoolStatus>,
    /// `None` if they are not reported.
    volumes: Option<Vec<VolumeReport>>,
    formats: u64,
    loop_devices: Option<usize>,
}

impl Default for Metrics {
    fn default() -> Metrics {
        Metrics::new()
    }
}

impl Metrics {
    /// All metrics at zero, without a driver.
    pub fn new() -> Metrics {
        let mut registry = Registry::with_prefix("slackwater");
        let version = vec![("version", env!("CARGO_PKG_VERSION"))];
        registry.register(
            "build",
            "Version of the running program",
            Info::new(version),
        );
        let calls = Family::default();
        registry.register("calls", "Calls that have finished", calls.clone());
        let durations = Family::new_with_constructor((|| Histogram::new(BUCKETS)) as fn() -> _);
        registry.register_with_unit(
            "call_duration",
            "Duration of calls, in seconds",
            Unit::Seconds,
            durations.clone(),
        );
        let router = RouterCounts::register(&mut registry);
        let populations = Populations::register(&mut registry);
        let shared = Arc::new(Shared::default());
        registry.register_collector(Box::new(Storage(shared.clone())));
        registry.register_collector(Box::new(Certificate(shared.clone())));
        Metrics {
            registry,
            calls,
            durations,
            router,
            populations,
            shared,
        }
    }

    /// Reports the metrics of this driver from now on. Only the first call has an effect.
    pub fn observe(&self, driver: Arc<Driver>) {
        let _ = self.shared.driver.set(driver);
    }

    /// The driver whose metrics are reported.
    pub fn driver(&self) -> Option<&Arc<Driver>> {
        self.shared.driver.get()
    }

    /// Reports from now on when the certificate of this process expires; `expires` is called at
    /// each scrape and returns seconds since 1970. Only the first call has an effect.
    pub fn show_certificate(&self, expires: impl Fn() -> Option<u64> + Send + Sync + 'static) {
        let _ = self.shared.certificate.set(Box::new(expires));
    }

    /// Reports the number of refused connections from now on; `count` is called at each scrape.
    /// Only the first call has an effect.
    pub fn show_refused_connections(&self, count: impl Fn() -> u64 + Send + Sync + 'static) {
        let _ = self.shared.refused.set(Box::new(count));
    }

    /// Counts of a router; nothing is reported if there is no router.
    pub fn router(&self) -> &RouterCounts {
        &self.router
    }

    /// Counts of the controller of data sources; nothing is reported in other processes.
    pub fn populations(&self) -> &Populations {
        &self.populations
    }

    /// Whether calls are served.
    pub fn readiness(&self) -> &Readiness {
        &self.shared.readiness
    }

    /// Counts a call that has ended. Both labels are from fixed lists.
    pub fn call_ended(&self, method: &'static str, code: &'static str, took: Duration) {
        self.calls.get_or_create(&CallLabels { method, code }).inc();
        self.durations
            .get_or_create(&MethodLabel { method })
            .observe(took.as_secs_f64());
    }

    /// Reads the state of storage, unless another thread is reading it (a disk may hang). Blocks.
    pub fn refresh(&self) {
        let Some(driver) = self.driver() else { return };
        let _looking = match self.shared.looking.try_lock() {
            Ok(guard) => guard,
            Err(TryLockError::Poisoned(guard)) => guard.into_inner(),
            Err(TryLockError::WouldBlock) => return,
        };
        let seen = Seen {
            pools: driver.pool_status(),
            volumes: driver.volume_usage(),
            formats: driver.volumes.formats(),
            loop_devices: driver.volumes.attached_devices().ok(),
            at: Instant::now(),
        };
        *self
            .shared
            .seen
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = Some(seen);
    }

    /// OpenMetrics text of the last state.
    pub fn render(&self) -> Result<String, fmt::Error> {
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &self.registry)?;
        Ok(text)
    }
}

impl fmt::Debug for Metrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Metrics").finish_non_exhaustive()
    }
}

/// Reports when the certificate expires, and how many connections were refused.
struct Certificate(Arc<Shared>);

impl fmt::Debug for Certificate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Certificate")
    }
}

impl Collector for Certificate {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        if let Some(refused) = self.0.refused.get() {
            let help = "Connections to the agent that were refused";
            let name = "connections_refused";
            let metric = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
            ConstCounter::new(refused()).encode(metric)?;
        }
        let Some(expires) = self.0.certificate.get().and_then(|expires| expires()) else {
            return Ok(());
        };
        #[expect(clippy::cast_precision_loss, reason = "metrics are floats")]
        let expires = expires as f64;
        gauge(
            &mut encoder,
            "certificate_expiry",
            "Expiry of the certificate that is presented to peers, in seconds since 1970",
            Some(&Unit::Seconds),
            expires,
        )
    }
}

/// Reports [`Shared`] at each scrape.
struct Storage(Arc<Shared>);

impl fmt::Debug for Storage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Storage")
    }
}

/// A gauge of a pool: name, help, unit, and the field.
type PoolGauge = (
    &'static str,
    &'static str,
    Option<Unit>,
    fn(&PoolStatus) -> Option<u64>,
);

const POOL_GAUGES: [PoolGauge; 15] = [
    (
        "pool_served",
        "1 if the pool is served, 0 if it is not",
        None,
        |pool| Some(u64::from(pool.refusal.is_none())),
    ),
    ("pool_volumes", "Volumes of the pool", None, |pool| {
        Some(pool.volumes)
    }),
    ("pool_snapshots", "Snapshots of the pool", None, |pool| {
        Some(pool.snapshots)
    }),
    (
        "pool_bases",
        "Deleted snapshots that stay as hidden bases of volumes of the pool",
        None,
        |pool| Some(pool.bases),
    ),
    (
        "pool_damaged_records",
        "Records of the pool that cannot be read",
        None,
        |pool| Some(pool.damaged),
    ),
    (
        "pool_changed_devices",
        "Published raw block volumes whose loop devices were changed by their users",
        None,
        |pool| Some(pool.changed.len() as u64),
    ),
    (
        "pool_total",
        "Size of the pool, in bytes",
        Some(Unit::Bytes),
        |pool| pool.space.map(|space| space.total),
    ),
    (
        "pool_available",
        "Space that is available in the pool, in bytes",
        Some(Unit::Bytes),
        |pool| pool.space.map(|space| space.available),
    ),
    (
        "pool_allocated",
        "Space that is allocated to volumes, in bytes",
        Some(Unit::Bytes),
        |pool| pool.space.map(|space| space.allocated),
    ),
    (
        "pool_snapshots_allocated",
        "Space that is allocated to snapshots, in bytes; blocks shared by several snapshots count for each",
        Some(Unit::Bytes),
        |pool| pool.space.map(|space| space.snapshots),
    ),
    (
        "pool_bases_allocated",
        "Space that is allocated to hidden bases, in bytes; blocks shared with other images count as well",
        Some(Unit::Bytes),
        |pool| pool.space.map(|space| space.bases),
    ),
    (
        "pool_own",
        "Lower bound of the space that is allocated to volumes and not shared with snapshots, in bytes",
        Some(Unit::Bytes),
        |pool| pool.space.map(|space| space.not_in_snapshots),
    ),
    (
        "pool_promised",
        "Sum of the sizes of all volumes, thin and thick, in bytes",
        Some(Unit::Bytes),
        |pool| pool.space.map(|space| space.provisioned),
    ),
    (
        "pool_metadata_total",
        "Size of the metadata of the thin pool, in bytes",
        Some(Unit::Bytes),
        |pool| Some(pool.space?.metadata?.total),
    ),
    (
        "pool_metadata_available",
        "Free space in the metadata of the thin pool, without what thick volumes and their snapshots may still take, in bytes",
        Some(Unit::Bytes),
        |pool| Some(pool.space?.metadata?.available()),
    ),
];

/// A gauge without labels.
fn gauge(
    encoder: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    unit: Option<&Unit>,
    value: f64,
) -> fmt::Result {
    let metric = encoder.encode_descriptor(name, help, unit, MetricType::Gauge)?;
    ConstGauge::new(value).encode(metric)
}

impl Collector for Storage {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let encoder = &mut encoder;
        let Some(driver) = self.0.driver.get() else {
            return Ok(());
        };
        #[expect(clippy::cast_precision_loss, reason = "metrics are floats")]
        let running = driver.running() as f64;
        gauge(
            encoder,
            "operations_running",
            "Operations that are running, including those whose caller no longer waits",
            None,
            running,
        )?;
        super::cuts::encode(encoder, driver)?;
        let seen = self.0.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(seen) = seen.clone() else {
            return Ok(());
        };
        gauge(
            encoder,
            "status_age",
            "Age of the values about pools and devices, in seconds",
            Some(&Unit::Seconds),
            seen.at.elapsed().as_secs_f64(),
        )?;
        if let Some(devices) = seen.loop_devices {
            #[expect(clippy::cast_precision_loss, reason = "metrics are floats")]
            let devices = devices as f64;
            gauge(
                encoder,
                "loop_devices",
                "Loop devices attached to images of served pools",
                None,
                devices,
            )?;
        }
        let formats = encoder.encode_descriptor(
            "formats",
            "File systems created since the start of the process",
            None,
            MetricType::Counter,
        )?;
        ConstCounter::new(seen.formats).encode(formats)?;
        encode_pools(encoder, &seen.pools)?;
        match &seen.volumes {
            Some(volumes) => super::volumes::encode(encoder, volumes),
            None => Ok(()),
        }
    }
}

fn encode_pools(encoder: &mut DescriptorEncoder<'_>, pools: &[PoolStatus]) -> fmt::Result {
    for (name, help, unit, value) in POOL_GAUGES {
        let mut metric = encoder.encode_descriptor(name, help, unit.as_ref(), MetricType::Gauge)?;
        for pool in pools {
            let Some(value) = value(pool) else { continue };
            #[expect(clippy::cast_precision_loss, reason = "metrics are floats")]
            let value = ConstGauge::new(value as f64);
            value.encode(metric.encode_family(&[("pool", pool.name.as_str())])?)?;
        }
    }
    let mut metric = encoder.encode_descriptor(
        "recovered",
        "Objects left behind by a previous process that were found at startup, by kind",
        None,
        MetricType::Gauge,
    )?;
    for pool in pools {
        let found = pool.leftovers;
        for (kind, count) in [
            ("half_made", found.half_made),
            ("trash", found.trash),
            ("loop", found.loops),
            ("ephemeral", found.ephemeral),
            ("snapshot", found.snapshots),
        ] {
            #[expect(clippy::cast_precision_loss, reason = "metrics are floats")]
            let value = ConstGauge::new(count as f64);
            let labels = [("pool", pool.name.as_str()), ("kind", kind)];
            value.encode(metric.encode_family(&labels)?)?;
        }
    }
    Ok(())
}
