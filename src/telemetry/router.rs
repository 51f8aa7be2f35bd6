//! Metrics of a router: its agents, and the calls that it forwards.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::{ConstCounter, Counter};
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};

use super::volumes::VolumeClaim;
use crate::operation::CutCounts;

/// Upper limits of the buckets of the time that a router adds, in seconds: usually a fraction of a
/// millisecond.
const BUCKETS: [f64; 10] = [
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.1, 1.0, 10.0,
];

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Labels {
    agent: String,
    code: &'static str,
}

/// The state of an agent in its router.
#[derive(Clone, Debug)]
pub struct AgentStatus {
    /// The name of its node.
    pub node: String,
    /// Whether it answered the last request.
    pub up: bool,
    /// Time since its last answer, if there was one.
    pub silent: Option<Duration>,
    /// Number of pools that it serves.
    pub pools: u64,
    /// Number of pools that it serves and that belong to another node: no call is sent there.
    pub pools_of_other_nodes: u64,
    /// Number of its answers that were refused.
    pub refused: u64,
}

/// The state of the cluster in its router.
#[derive(Clone, Debug, Default)]
pub struct ClusterStatus {
    /// Why calls cannot be served yet.
    pub missing: Option<String>,
    /// This router is the leader.
    pub leads: bool,
    /// Number of watches of the API server that fail now.
    pub failing_watches: u64,
    /// Number of events that were not recorded: too many at once, or refused.
    pub dropped_events: u64,
    /// Number of Nodes whose label has another value than their disks, where PersistentVolumes need
    /// the label.
    pub label_conflicts: u64,
    /// The cluster has the snapshot CRDs, and this installation has no csi-snapshotter.
    pub snapshotter_missing: bool,
    /// Objects without a reference; `None` if another router is the leader, or before the first
    /// check.
    pub orphans: Option<Orphans>,
    /// The number of Pool objects with each health; `None` if another router is the leader.
    pub pools: Option<BTreeMap<&'static str, u64>>,
    /// The number of VolumeMoves in each phase; `None` if another router is the leader.
    pub moves: Option<BTreeMap<&'static str, u64>>,
    /// The number of VolumeReverts in each phase; `None` if another router is the leader, or before they are
    /// read.
    pub reverts: Option<BTreeMap<&'static str, u64>>,
    /// The number of volumes in quarantine; `None` if another router is the leader.
    pub quarantined: Option<u64>,
    /// The SnapshotSchedules, by "namespace/name"; `None` if another router is the leader, or if they are
    /// not executed.
    pub schedules: Option<BTreeMap<String, ScheduleStatus>>,
}

/// The state of a SnapshotSchedule.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ScheduleStatus {
    /// The slot of its newest good set, in seconds since 1970.
    pub last_cut: Option<i64>,
    /// How long a slot has been due that has no good set, nor a later one.
    pub overdue_seconds: i64,
    /// The number of slots that were skipped.
    pub missed: u64,
    /// Its conditions that report a problem.
    pub failing: Vec<String>,
}

/// Objects of agents that no object of the cluster references.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Orphans {
    /// Volumes without a PersistentVolume.
    pub volumes: u64,
    /// Snapshots without a VolumeSnapshotContent; `None` if the cluster has no snapshot CRDs.
    pub snapshots: Option<u64>,
}

/// What is read from a router at each scrape.
pub trait RouterView: Send + Sync + 'static {
    fn agents(&self) -> Vec<AgentStatus>;
    /// The cluster; none if agents are configured by address.
    fn cluster(&self) -> Option<ClusterStatus>;
    /// The claims of volumes, if it leads and reports them.
    fn volume_claims(&self) -> Option<Vec<VolumeClaim>> {
        None
    }
    /// Results of the cuts that it has coordinated.
    fn cuts(&self) -> &CutCounts;
    /// Why it cannot serve calls yet; empty if it can.
    fn missing(&self) -> Vec<String>;
}

#[derive(Clone)]
pub struct RouterCounts {
    forwarded: Family<Labels, Counter>,
    added: Histogram,
    view: Arc<OnceLock<Arc<dyn RouterView>>>,
}

impl RouterCounts {
    pub(super) fn register(registry: &mut Registry) -> RouterCounts {
        let counts = RouterCounts {
            forwarded: Family::default(),
            added: Histogram::new(BUCKETS),
            view: Arc::default(),
        };
        registry.register_collector(Box::new(counts.clone()));
        counts
    }

    /// Reports the agents of this router, and counts its calls, from now on. Only the first call
    /// has an effect.
    pub fn observe(&self, view: Arc<dyn RouterView>) {
        let _ = self.view.set(view);
    }

    /// The router whose state is reported.
    pub fn view(&self) -> Option<&Arc<dyn RouterView>> {
        self.view.get()
    }

    /// Counts an answer of an agent with this code.
    pub fn forwarded(&self, agent: &str, code: &'static str) {
        let agent = agent.to_string();
        self.forwarded.get_or_create(&Labels { agent, code }).inc();
    }

    /// Records how much longer a call took in the router than in its agent.
    pub fn added(&self, time: Duration) {
        self.added.observe(time.as_secs_f64());
    }
}

impl fmt::Debug for RouterCounts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("RouterCounts")
    }
}

/// A gauge of an agent: name, help, unit, and the field.
type AgentGauge = (
    &'static str,
    &'static str,
    Option<Unit>,
    fn(&AgentStatus) -> Option<f64>,
);

#[expect(clippy::cast_precision_loss, reason = "metrics are floats")]
const AGENT_GAUGES: [AgentGauge; 4] = [
    (
        "agent_up",
        "1 if the agent answered the last request, 0 if it did not",
        None,
        |agent| Some(f64::from(u8::from(agent.up))),
    ),
    (
        "agent_silent",
        "Time since the agent's last answer, in seconds",
        Some(Unit::Seconds),
        |agent| agent.silent.map(|silent| silent.as_secs_f64()),
    ),
    (
        "agent_pools",
        "Pools that the agent serves, according to its last report",
        None,
        |agent| Some(agent.pools as f64),
    ),
    (
        "agent_pools_claimed",
        "Pools that the agent serves but that belong to another node; they receive no calls",
        None,
        |agent| Some(agent.pools_of_other_nodes as f64),
    ),
];

impl Collector for RouterCounts {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let Some(view) = self.view.get() else {
            return Ok(());
        };
        let agents = view.agents();
        for (name, help, unit, value) in AGENT_GAUGES {
            let mut metric =
                encoder.encode_descriptor(name, help, unit.as_ref(), MetricType::Gauge)?;
            for agent in &agents {
                let Some(value) = value(agent) else { continue };
                let labels = [("agent", agent.node.as_str())];
                ConstGauge::new(value).encode(metric.encode_family(&labels)?)?;
            }
        }
        let help = "Answers of the agent that were rejected because they name objects that it cannot know or own";
        let mut metric =
            encoder.encode_descriptor("agent_answers_refused", help, None, MetricType::Counter)?;
        for agent in &agents {
            let labels = [("agent", agent.node.as_str())];
            ConstCounter::new(agent.refused).encode(metric.encode_family(&labels)?)?;
        }
        if let Some(cluster) = view.cluster() {
            encode_cluster(&mut encoder, &cluster)?;
        }
        if let Some(claims) = view.volume_claims() {
            super::volumes::encode_claims(&mut encoder, &claims)?;
        }
        let help = "Answers of agents to forwarded calls";
        let metric =
            encoder.encode_descriptor("forwarded_calls", help, None, MetricType::Counter)?;
        self.forwarded.encode(metric)?;
        let help = "Time that forwarding a call to an agent added to the call, in seconds";
        let unit = Some(&Unit::Seconds);
        let metric =
            encoder.encode_descriptor("router_added", help, unit, MetricType::Histogram)?;
        self.added.encode(metric)?;
        super::cuts::counts(&mut encoder, view.cuts())
    }
}

#[expect(clippy::cast_precision_loss, reason = "metrics are floats")]
fn encode_cluster(encoder: &mut DescriptorEncoder<'_>, cluster: &ClusterStatus) -> fmt::Result {
    let gauges = [
        (
            "router_leads",
            "1 if this router is the leader, which maintains Pool objects, labels and certificates",
            u64::from(cluster.leads),
        ),
        (
            "cluster_watches_failing",
            "Watches of the API server that are failing; calls are served from memory",
            cluster.failing_watches,
        ),
        (
            "node_label_conflicts",
            "Nodes whose label does not match the home of their disks but is referenced by volumes",
            cluster.label_conflicts,
        ),
    ];
    for (name, help, value) in gauges {
        let metric = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
        ConstGauge::new(value as f64).encode(metric)?;
    }
    let help = "1 if the cluster has snapshot CRDs but this installation has no csi-snapshotter";
    let name = "snapshotter_missing";
    let metric = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
    ConstGauge::new(f64::from(u8::from(cluster.snapshotter_missing))).encode(metric)?;
    if let Some(orphans) = cluster.orphans {
        let help = "Volumes and snapshots on agents that no object in the cluster references";
        let mut metric = encoder.encode_descriptor("orphans", help, None, MetricType::Gauge)?;
        let kinds = [
            ("volume", Some(orphans.volumes)),
            ("snapshot", orphans.snapshots),
        ];
        for (kind, count) in kinds {
            let Some(count) = count else { continue };
            let labels = [("kind", kind)];
            ConstGauge::new(count as f64).encode(metric.encode_family(&labels)?)?;
        }
    }
    encode_counts(encoder, cluster)?;
    if let Some(count) = cluster.quarantined {
        let help = "Volumes in quarantine, whose claims were deleted because their node was lost";
        let name = "quarantined_volumes";
        let metric = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
        ConstGauge::new(count as f64).encode(metric)?;
    }
    if let Some(schedules) = &cluster.schedules {
        encode_schedules(encoder, schedules)?;
    }
    let help = "Kubernetes events that were not recorded, because there were too many or the API server rejected them";
    let metric = encoder.encode_descriptor("events_dropped", help, None, MetricType::Counter)?;
    ConstCounter::new(cluster.dropped_events).encode(metric)
}

/// Writes the numbers of objects in each state.
#[expect(clippy::cast_precision_loss, reason = "metrics are floats")]
fn encode_counts(encoder: &mut DescriptorEncoder<'_>, cluster: &ClusterStatus) -> fmt::Result {
    for (name, help, label, counts) in [
        (
            "pools",
            "Pool objects, by their health",
            "health",
            &cluster.pools,
        ),
        (
            "volume_moves",
            "VolumeMoves, by their phase",
            "phase",
            &cluster.moves,
        ),
        (
            "volume_reverts",
            "VolumeReverts, by their phase",
            "phase",
            &cluster.reverts,
        ),
    ] {
        let Some(counts) = counts else { continue };
        let mut metric = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
        for (value, count) in counts {
            let labels = [(label, *value)];
            ConstGauge::new(*count as f64).encode(metric.encode_family(&labels)?)?;
        }
    }
    Ok(())
}

fn encode_schedules(
    encoder: &mut DescriptorEncoder<'_>,
    schedules: &BTreeMap<String, ScheduleStatus>,
) -> Result<(), std::fmt::Error> {
    type Value = fn(&ScheduleStatus) -> Option<f64>;
    let gauges: [(&str, &str, Value); 3] = [
        (
            "schedule_last_cut_timestamp_seconds",
            "Slot of the newest complete and ready set of a SnapshotSchedule",
            |one| one.last_cut.map(|slot| slot as f64),
        ),
        (
            "schedule_overdue_seconds",
            "How long a slot of a SnapshotSchedule has been due for which there is no set, nor a later one",
            |one| Some(one.overdue_seconds as f64),
        ),
        (
            "schedule_missed_slots",
            "Slots of a SnapshotSchedule that were skipped, because startingDeadline had passed",
            |one| Some(one.missed as f64),
        ),
    ];
    for (name, help, value) in gauges {
        let mut metric = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
        for (schedule, status) in schedules {
            let Some(value) = value(status) else { continue };
            let labels = [("schedule", schedule.as_str())];
            ConstGauge::new(value).encode(metric.encode_family(&labels)?)?;
        }
    }
    let help = "Conditions of SnapshotSchedules that report a problem";
    let name = "schedule_failing";
    let mut metric = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
    for (schedule, status) in schedules {
        for condition in &status.failing {
            let labels = [
                ("schedule", schedule.as_str()),
                ("condition", condition.as_str()),
            ];
            ConstGauge::new(1.0).encode(metric.encode_family(&labels)?)?;
        }
    }
    Ok(())
}
