//! Metrics of the controller of data sources.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::{Registry, Unit};

/// What is counted of one claim.
#[derive(Clone, Copy, Debug)]
pub struct Count {
    /// Its phase, from a fixed list.
    pub phase: &'static str,
    /// Bytes that were received in its attempt.
    pub received: u64,
    /// Bytes that its attempt will have received at its end; 0 if the server has not said that.
    pub expected: u64,
}

/// The claims that name a data source; nothing is reported before the first pass of a leader.
#[derive(Clone, Debug, Default)]
pub struct Populations(Arc<Mutex<Counts>>);

/// Why nothing can be decided; `None` if all is well.
type Problem = Box<dyn Fn() -> Option<String> + Send>;

#[derive(Default)]
struct Counts {
    problem: Option<Problem>,
    phases: Option<BTreeMap<&'static str, u64>>,
    received: u64,
    expected: u64,
    /// Failed attempts that are followed by another one, and those that are not.
    failures: (u64, u64),
    cache_hits: u64,
    cache_snapshots: usize,
}

impl fmt::Debug for Counts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Counts").finish_non_exhaustive()
    }
}

impl Populations {
    /// This process is a controller of data sources; `problem` says whether it is ready.
    pub fn observe(&self, problem: impl Fn() -> Option<String> + Send + 'static) {
        self.counts().problem = Some(Box::new(problem));
    }

    /// Why this controller of data sources is not ready, if the process is one.
    pub(super) fn problem(&self) -> Option<Option<String>> {
        self.counts().problem.as_ref().map(|problem| problem())
    }

    pub(super) fn register(registry: &mut Registry) -> Populations {
        let populations = Populations::default();
        registry.register_collector(Box::new(populations.clone()));
        populations
    }

    fn counts(&self) -> std::sync::MutexGuard<'_, Counts> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reports these claims from now on.
    pub fn set(&self, claims: impl Iterator<Item = Count>) {
        let (mut phases, mut received, mut expected) = (BTreeMap::new(), 0_u64, 0_u64);
        for claim in claims {
            *phases.entry(claim.phase).or_default() += 1;
            received = received.saturating_add(claim.received);
            expected = expected.saturating_add(claim.expected);
        }
        let mut counts = self.counts();
        counts.phases = Some(phases);
        (counts.received, counts.expected) = (received, expected);
    }

    /// Counts a failed attempt.
    pub fn failed(&self, is_final: bool) {
        let mut counts = self.counts();
        match is_final {
            true => counts.failures.1 += 1,
            false => counts.failures.0 += 1,
        }
    }

    /// Counts a claim that was filled from a cached snapshot.
    pub fn cache_hit(&self) {
        self.counts().cache_hits += 1;
    }

    /// Reports this number of cached snapshots from now on.
    pub fn set_cache_snapshots(&self, count: usize) {
        self.counts().cache_snapshots = count;
    }

    /// Another process is the leader.
    pub fn clear(&self) {
        self.counts().phases = None;
    }
}

impl Collector for Populations {
    #[expect(clippy::cast_precision_loss, reason = "metrics are floats")]
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let counts = self.counts();
        let Some(phases) = &counts.phases else {
            return Ok(());
        };
        let help = "Claims that name a data source, by their phase";
        let mut metric = encoder.encode_descriptor("populations", help, None, MetricType::Gauge)?;
        for (phase, count) in phases {
            let labels = [("phase", *phase)];
            ConstGauge::new(*count as f64).encode(metric.encode_family(&labels)?)?;
        }
        let help = "Bytes received so far by the attempts that are running";
        let (name, unit) = ("populations_received", Some(&Unit::Bytes));
        let metric = encoder.encode_descriptor(name, help, unit, MetricType::Gauge)?;
        ConstGauge::new(counts.received as f64).encode(metric)?;
        let help = "Bytes that the attempts that are running will have received at their end, as far as servers have said so";
        let (name, unit) = ("populations_expected", Some(&Unit::Bytes));
        let metric = encoder.encode_descriptor(name, help, unit, MetricType::Gauge)?;
        ConstGauge::new(counts.expected as f64).encode(metric)?;
        let help = "Attempts to fill a volume that have failed";
        let name = "population_failures";
        let mut metric = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
        for (next, count) in [("retry", counts.failures.0), ("none", counts.failures.1)] {
            let labels = [("next", next)];
            ConstCounter::new(count).encode(metric.encode_family(&labels)?)?;
        }
        let help = "Claims that were filled from a cached snapshot, without a download";
        let name = "population_cache_hits";
        let metric = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
        ConstCounter::new(counts.cache_hits).encode(metric)?;
        let help = "Cached snapshots of filled volumes";
        let name = "population_cache_snapshots";
        let metric = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
        ConstGauge::new(counts.cache_snapshots as f64).encode(metric)
    }
}
