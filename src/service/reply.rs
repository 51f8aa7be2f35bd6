//! Converts the results of operations to protobuf.

mod snapshot;

use std::collections::HashMap;
use std::num::NonZeroU16;

use super::request::EPHEMERAL;
use crate::csi;
use crate::csi::controller_service_capability::rpc::Type as ControllerCan;
use crate::csi::node_get_storage_health_response::StorageBackendHealth;
use crate::csi::node_service_capability::rpc::Type as NodeCan;
use crate::csi::plugin_capability::service::Type as PluginCan;
use crate::csi::plugin_capability::volume_expansion::Type as Expansion;
use crate::csi::volume_health::VolumeHealthEntry;
use crate::csi::volume_usage::Unit;
use crate::csi::{StorageHealthErrorType, VolumeHealthErrorType};
use crate::model::{Alpha, HomeId};
use crate::operation::{
    Capacity, Finding, Severity, Stats, Volume, VolumeHealth, VolumePage, VolumeUsage,
};

pub(crate) use snapshot::{group, group_capabilities};
pub(super) use snapshot::{snapshot, snapshots};

/// Converts to the signed type of the protocol. No pool is larger than that.
pub(super) fn bytes(bytes: u64) -> i64 {
    i64::try_from(bytes).unwrap_or(i64::MAX)
}

pub(crate) fn plugin_info(name: String) -> csi::GetPluginInfoResponse {
    csi::GetPluginInfoResponse {
        name,
        vendor_version: env!("CARGO_PKG_VERSION").to_string(),
        manifest: [("csi".to_string(), "1.13.0".to_string())].into(),
    }
}

pub(crate) fn plugin_capabilities(alpha: Alpha) -> csi::GetPluginCapabilitiesResponse {
    use csi::plugin_capability::{Service, Type, VolumeExpansion};
    let service = |can: PluginCan| Type::Service(Service { r#type: can.into() });
    let expansion = VolumeExpansion {
        r#type: Expansion::Online.into(),
    };
    let mut all = vec![
        service(PluginCan::ControllerService),
        service(PluginCan::VolumeAccessibilityConstraints),
        service(PluginCan::GroupControllerService),
        Type::VolumeExpansion(expansion),
    ];
    if alpha.snapshot_topology {
        all.push(service(PluginCan::SnapshotAccessibilityConstraints));
    }
    if alpha.snapshot_metadata {
        all.push(service(PluginCan::SnapshotMetadataService));
    }
    let capability = |can: Type| csi::PluginCapability { r#type: Some(can) };
    csi::GetPluginCapabilitiesResponse {
        capabilities: all.into_iter().map(capability).collect(),
    }
}

/// PUBLISH_READONLY and LIST_VOLUMES_PUBLISHED_NODES are deliberately absent, because attachments
/// have no state.
pub(crate) fn controller_capabilities(alpha: Alpha) -> csi::ControllerGetCapabilitiesResponse {
    use csi::controller_service_capability::{Rpc, Type};
    let mut all = vec![
        ControllerCan::CreateDeleteVolume,
        ControllerCan::PublishUnpublishVolume,
        ControllerCan::ListVolumes,
        ControllerCan::GetCapacity,
        ControllerCan::CreateDeleteSnapshot,
        ControllerCan::ListSnapshots,
        ControllerCan::CloneVolume,
        ControllerCan::ExpandVolume,
        ControllerCan::ModifyVolume,
        ControllerCan::SingleNodeMultiWriter,
    ];
    if alpha.get_volume {
        all.push(ControllerCan::GetVolume);
    }
    if alpha.get_snapshot {
        all.push(ControllerCan::GetSnapshot);
    }
    if alpha.health {
        all.extend([
            ControllerCan::GetVolumeHealth,
            ControllerCan::ListVolumeHealth,
        ]);
    }
    let capability = |can: ControllerCan| csi::ControllerServiceCapability {
        r#type: Some(Type::Rpc(Rpc { r#type: can.into() })),
    };
    csi::ControllerGetCapabilitiesResponse {
        capabilities: all.into_iter().map(capability).collect(),
    }
}

/// VOLUME_MOUNT_GROUP is deliberately absent, because the kubelet would then not change the group
/// itself.
pub(super) fn node_capabilities(alpha: Alpha) -> csi::NodeGetCapabilitiesResponse {
    use csi::node_service_capability::{Rpc, Type};
    let mut all = vec![
        NodeCan::StageUnstageVolume,
        NodeCan::GetVolumeStats,
        NodeCan::ExpandVolume,
        NodeCan::SingleNodeMultiWriter,
    ];
    if alpha.health {
        all.extend([NodeCan::GetVolumeHealth, NodeCan::GetStorageHealth]);
    }
    let capability = |can: NodeCan| csi::NodeServiceCapability {
        r#type: Some(Type::Rpc(Rpc { r#type: can.into() })),
    };
    csi::NodeGetCapabilitiesResponse {
        capabilities: all.into_iter().map(capability).collect(),
    }
}

pub(super) fn node(
    node_id: String,
    max_volumes: Option<NonZeroU16>,
    (key, home): (&str, HomeId),
) -> csi::NodeGetInfoResponse {
    csi::NodeGetInfoResponse {
        node_id,
        // 0 means no limit: loop devices are created as needed.
        max_volumes_per_node: max_volumes.map_or(0, |most| most.get().into()),
        accessible_topology: Some(topology(key, home)),
    }
}

fn topology(key: &str, home: HomeId) -> csi::Topology {
    csi::Topology {
        segments: [(key.to_string(), home.to_string())].into(),
    }
}

fn volume(volume: &Volume, key: &str) -> csi::Volume {
    csi::Volume {
        capacity_bytes: bytes(volume.size),
        volume_id: volume.id.to_string(),
        content_source: volume.content_source.as_ref().map(snapshot::content_source),
        accessible_topology: vec![topology(key, volume.home)],
        // The same key that the kubelet uses: only the pod refers to such a volume in the cluster.
        volume_context: match volume.ephemeral {
            true => [(EPHEMERAL.to_string(), "true".to_string())].into(),
            false => HashMap::new(),
        },
    }
}

pub(super) fn created(created: &Volume, key: &str) -> csi::CreateVolumeResponse {
    csi::CreateVolumeResponse {
        volume: Some(volume(created, key)),
    }
}

pub(super) fn get_volume(got: &Volume, key: &str) -> csi::ControllerGetVolumeResponse {
    csi::ControllerGetVolumeResponse {
        volume: Some(volume(got, key)),
        status: Some(csi::controller_get_volume_response::VolumeStatus::default()),
    }
}

pub(super) fn volumes(page: VolumePage, key: &str) -> csi::ListVolumesResponse {
    let entry = |listed: &Volume| csi::list_volumes_response::Entry {
        volume: Some(volume(listed, key)),
        status: None,
    };
    csi::ListVolumesResponse {
        entries: page.volumes.iter().map(entry).collect(),
        next_token: page.next_token,
    }
}

/// Confirms the request literally, or returns a message with the reason of the refusal.
pub(super) fn validated(
    asked: csi::ValidateVolumeCapabilitiesRequest,
    verdict: Result<(), String>,
) -> csi::ValidateVolumeCapabilitiesResponse {
    use csi::validate_volume_capabilities_response::Confirmed;
    match verdict {
        Ok(()) => csi::ValidateVolumeCapabilitiesResponse {
            confirmed: Some(Confirmed {
                volume_context: asked.volume_context,
                volume_capabilities: asked.volume_capabilities,
                parameters: asked.parameters,
                mutable_parameters: asked.mutable_parameters,
            }),
            message: String::new(),
        },
        Err(message) => csi::ValidateVolumeCapabilitiesResponse {
            confirmed: None,
            message,
        },
    }
}

pub(crate) fn capacity(capacity: Capacity) -> csi::GetCapacityResponse {
    csi::GetCapacityResponse {
        available_capacity: bytes(capacity.available),
        maximum_volume_size: Some(bytes(capacity.maximum)),
        minimum_volume_size: (capacity.minimum > 0).then(|| bytes(capacity.minimum)),
    }
}

pub(super) fn stats(stats: Stats) -> csi::NodeGetVolumeStatsResponse {
    let usage = |usage: VolumeUsage, unit: Unit| csi::VolumeUsage {
        available: bytes(usage.available.unwrap_or(0)),
        total: bytes(usage.total),
        used: bytes(usage.used.unwrap_or(0)),
        unit: unit.into(),
    };
    let inodes = stats.inodes.map(|inodes| usage(inodes, Unit::Inodes));
    csi::NodeGetVolumeStatsResponse {
        usage: std::iter::once(usage(stats.bytes, Unit::Bytes))
            .chain(inodes)
            .collect(),
    }
}

pub(super) fn volume_health(health: VolumeHealth) -> csi::VolumeHealth {
    let entry = |finding: Finding| VolumeHealthEntry {
        status: match finding.severity {
            Severity::Degraded => VolumeHealthErrorType::Degraded,
            Severity::Inaccessible => VolumeHealthErrorType::Inaccessible,
            Severity::DataLoss => VolumeHealthErrorType::DataLoss,
        }
        .into(),
        reason: finding.reason.to_string(),
        message: finding.message,
    };
    csi::VolumeHealth {
        volume_id: health.id.to_string(),
        health_statuses: health.findings.into_iter().map(entry).collect(),
    }
}

/// CSI has two states for storage; lost data is reported for single volumes.
pub(super) fn storage_health(findings: Vec<Finding>) -> csi::NodeGetStorageHealthResponse {
    let entry = |finding: Finding| StorageBackendHealth {
        status: match finding.severity {
            Severity::Degraded | Severity::DataLoss => StorageHealthErrorType::StorageDegraded,
            Severity::Inaccessible => StorageHealthErrorType::StorageUnreachable,
        }
        .into(),
        reason: finding.reason.to_string(),
        message: finding.message,
        volume_capability: None,
    };
    csi::NodeGetStorageHealthResponse {
        backend_health: findings.into_iter().map(entry).collect(),
    }
}
