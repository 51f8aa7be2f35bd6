//! Metrics of cuts: levels, failures, and how long writers and applications were blocked.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Unit;

use crate::model::Level;
use crate::operation::{CutCounts, Driver};

/// Writes the metrics of a node, including its copies and present freezes.
pub(super) fn encode(encoder: &mut DescriptorEncoder<'_>, driver: &Driver) -> fmt::Result {
    counts(encoder, driver.snapshots.cut_counts())?;
    let snapshots = &driver.snapshots;
    for (name, help, count) in [
        (
            "copied",
            "Bytes copied because blocks could not be shared, and bytes written to reserve blocks",
            snapshots.copied(),
        ),
        (
            "sent",
            "Bytes of snapshots that were sent to other nodes",
            snapshots.sent_bytes(),
        ),
        (
            "received",
            "Bytes of snapshots that were received from other nodes",
            snapshots.received(),
        ),
    ] {
        let unit = Some(&Unit::Bytes);
        let metric = encoder.encode_descriptor(name, help, unit, MetricType::Counter)?;
        ConstCounter::new(count).encode(metric)?;
    }
    let help = "Copies into volumes that are running";
    let mut copies = snapshots.copies();
    copies.retain(|copy| !copy.of.name.is_empty());
    gauge(encoder, "copies_running", help, copies.len())?;
    let help = "Copies of snapshots to other nodes that are running";
    gauge(encoder, "sends_running", help, snapshots.readers())?;
    frozen(encoder, driver)
}

/// Writes the counts of the component that has coordinated the cuts.
pub(super) fn counts(encoder: &mut DescriptorEncoder<'_>, counts: &CutCounts) -> fmt::Result {
    let help = "Cuts that were verified, by the consistency level that they reached";
    let mut metric = encoder.encode_descriptor("cuts", help, None, MetricType::Counter)?;
    for level in [Level::Application, Level::Filesystem, Level::Crash] {
        let value = ConstCounter::new(counts.reached(level));
        value.encode(metric.encode_family(&[("level", level.as_str())])?)?;
    }
    let help = "Failed attempts to cut, by reason";
    let mut metric = encoder.encode_descriptor("cut_failures", help, None, MetricType::Counter)?;
    for (reason, count) in [
        ("quiesce", &counts.quiesce_failed),
        ("lost", &counts.lost),
        ("other", &counts.failed),
    ] {
        let value = ConstCounter::new(load(count));
        value.encode(metric.encode_family(&[("reason", reason)])?)?;
    }
    let help = "Extents cloned for cuts, before the freeze (ahead) and during it (within)";
    let mut metric = encoder.encode_descriptor("cut_extents", help, None, MetricType::Counter)?;
    for (when, count) in [
        ("ahead", &counts.extents_ahead),
        ("within", &counts.extents_within),
    ] {
        let value = ConstCounter::new(load(count));
        value.encode(metric.encode_family(&[("when", when)])?)?;
    }
    counter(
        encoder,
        "release_problems",
        "Hooks that did not release their application by themselves after a cut",
        load(&counts.release_problems),
    )?;
    for (name, help, histogram) in [
        (
            "freeze_duration",
            "Time from the first freeze of a cut to its last thaw, in seconds",
            &counts.freeze,
        ),
        (
            "quiesce_duration",
            "Time until all hooks of a cut were ready, in seconds",
            &counts.quiesce,
        ),
        (
            "sync_duration",
            "Time to write back dirty data before the freeze of a cut, in seconds",
            &counts.sync,
        ),
    ] {
        let metric =
            encoder.encode_descriptor(name, help, Some(&Unit::Seconds), MetricType::Histogram)?;
        histogram.encode(metric)?;
    }
    Ok(())
}

/// The freezes in the journal, read from the state directory, which is on a tmpfs.
fn frozen(encoder: &mut DescriptorEncoder<'_>, driver: &Driver) -> fmt::Result {
    let Ok(count) = driver.snapshots.frozen() else {
        return Ok(());
    };
    let help = "File systems that are frozen or are being frozen";
    gauge(encoder, "frozen", help, count)
}

fn gauge(encoder: &mut DescriptorEncoder<'_>, name: &str, help: &str, value: usize) -> fmt::Result {
    let metric = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
    #[expect(clippy::cast_precision_loss, reason = "metrics are floats")]
    let value = ConstGauge::new(value as f64);
    value.encode(metric)
}

fn counter(encoder: &mut DescriptorEncoder<'_>, name: &str, help: &str, value: u64) -> fmt::Result {
    let metric = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
    ConstCounter::new(value).encode(metric)
}

fn load(counter: &AtomicU64) -> u64 {
    counter.load(Ordering::Relaxed)
}
