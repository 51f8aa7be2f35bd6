//! Metrics of single volumes (`--metrics-per-volume`): of a node, what each one takes and its last cut; of
//! the leading router, its claim.

use std::fmt;

use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Unit;

use crate::operation::VolumeReport;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VolumeClaim {
    /// The ID of the volume.
    pub volume: String,
    pub namespace: String,
    pub claim: String,
}

/// Writes the numbers of the volumes of a node.
#[expect(clippy::cast_precision_loss, reason = "metrics are floats")]
pub(super) fn encode(encoder: &mut DescriptorEncoder<'_>, volumes: &[VolumeReport]) -> fmt::Result {
    type Value = fn(&VolumeReport) -> Option<u64>;
    let gauges: [(&str, &str, Value); 3] = [
        (
            "volume_own",
            "Bytes of blocks of the volume that no other image has",
            |volume| Some(volume.bytes?.exclusive),
        ),
        (
            "volume_shared",
            "Bytes of blocks that the volume shares with snapshots or other volumes",
            |volume| Some(volume.bytes?.shared),
        ),
        (
            "volume_snapshots",
            "Bytes of blocks that snapshots of the volume have and the volume has not",
            |volume| Some(volume.bytes?.snapshots),
        ),
    ];
    for (name, help, value) in gauges {
        let unit = Some(&Unit::Bytes);
        let mut metric = encoder.encode_descriptor(name, help, unit, MetricType::Gauge)?;
        for volume in volumes {
            let Some(value) = value(volume) else { continue };
            let id = volume.id.to_string();
            let labels = [("volume", id.as_str()), ("pool", volume.pool.as_str())];
            ConstGauge::new(value as f64).encode(metric.encode_family(&labels)?)?;
        }
    }
    let help =
        "Time of the last cut of the volume, in seconds since 1970, with the level that it reached";
    let name = "volume_last_cut_timestamp_seconds";
    let mut metric = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
    for volume in volumes {
        let Some(cut) = volume.last_cut else { continue };
        let id = volume.id.to_string();
        let labels = [
            ("volume", id.as_str()),
            ("pool", volume.pool.as_str()),
            ("level", cut.level.as_str()),
        ];
        let seconds = cut.at as f64 / 1e9;
        ConstGauge::new(seconds).encode(metric.encode_family(&labels)?)?;
    }
    Ok(())
}

/// Writes the claims of volumes. Their names come from the API server; the encoder escapes them.
pub(super) fn encode_claims(
    encoder: &mut DescriptorEncoder<'_>,
    claims: &[VolumeClaim],
) -> fmt::Result {
    let help = "The claim that a volume is bound to; always 1";
    let name = "volume_info";
    let mut metric = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
    for claim in claims {
        let labels = [
            ("volume", claim.volume.as_str()),
            ("claim_namespace", claim.namespace.as_str()),
            ("persistentvolumeclaim", claim.claim.as_str()),
        ];
        ConstGauge::new(1.0).encode(metric.encode_family(&labels)?)?;
    }
    Ok(())
}
