//! Responses about snapshots and groups of snapshots.

use prost_types::Timestamp;

use super::{bytes, topology};
use crate::csi;
use crate::csi::group_controller_service_capability::rpc::Type as GroupCan;
use crate::csi::volume_content_source::{SnapshotSource, Type as Source, VolumeSource};
use crate::operation::{ContentSource, Group, Snapshot, SnapshotPage};

pub(crate) fn group_capabilities() -> csi::GroupControllerGetCapabilitiesResponse {
    use csi::group_controller_service_capability::{Rpc, Type};
    let can = GroupCan::CreateDeleteGetVolumeGroupSnapshot;
    csi::GroupControllerGetCapabilitiesResponse {
        capabilities: vec![csi::GroupControllerServiceCapability {
            r#type: Some(Type::Rpc(Rpc { r#type: can.into() })),
        }],
    }
}

/// A snapshot is returned only when it is complete, so it is ready. A member that may be deleted
/// individually is returned without its group, because callers never delete a snapshot that has
/// one. `key` is set if snapshots report their topology.
pub(in crate::service) fn snapshot(snapshot: &Snapshot, key: Option<&str>) -> csi::Snapshot {
    let group = snapshot.group.filter(|_| !snapshot.independent);
    let group = group.map(|group| group.to_string());
    csi::Snapshot {
        size_bytes: bytes(snapshot.size),
        snapshot_id: snapshot.id.to_string(),
        source_volume_id: snapshot.source_volume_id.to_string(),
        creation_time: Some(time(snapshot.cut_at)),
        ready_to_use: true,
        group_snapshot_id: group.unwrap_or_default(),
        accessible_topology: key
            .map(|key| topology(key, snapshot.home))
            .into_iter()
            .collect(),
    }
}

pub(in crate::service) fn snapshots(
    page: SnapshotPage,
    key: Option<&str>,
) -> csi::ListSnapshotsResponse {
    let entry = |listed: &Snapshot| csi::list_snapshots_response::Entry {
        snapshot: Some(snapshot(listed, key)),
    };
    csi::ListSnapshotsResponse {
        entries: page.snapshots.iter().map(entry).collect(),
        next_token: page.next_token,
    }
}

/// A group is returned only when it is complete, so it is ready.
pub(crate) fn group(group: &Group, key: Option<&str>) -> csi::VolumeGroupSnapshot {
    let id = group.id.to_string();
    let member = |member: &Snapshot| csi::Snapshot {
        group_snapshot_id: id.clone(),
        ..snapshot(member, key)
    };
    csi::VolumeGroupSnapshot {
        snapshots: group.snapshots.iter().map(member).collect(),
        group_snapshot_id: id,
        creation_time: Some(time(group.cut_at)),
        ready_to_use: true,
    }
}

/// The source as it was requested.
pub(super) fn content_source(source: &ContentSource) -> csi::VolumeContentSource {
    let source = match source {
        ContentSource::Snapshot(id) => Source::Snapshot(SnapshotSource {
            snapshot_id: id.clone(),
        }),
        ContentSource::Volume(id) => Source::Volume(VolumeSource {
            volume_id: id.clone(),
        }),
    };
    csi::VolumeContentSource {
        r#type: Some(source),
    }
}

const SECOND: u64 = 1_000_000_000;

/// Converts nanoseconds since 1970; both parts fit for any number.
fn time(nanoseconds: u64) -> Timestamp {
    Timestamp {
        seconds: (nanoseconds / SECOND) as i64,
        nanos: (nanoseconds % SECOND) as i32,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_moment_keeps_its_nanoseconds() {
        for (nanoseconds, seconds, nanos) in [
            (1_794_000_000_123_456_789, 1_794_000_000, 123_456_789),
            (999_999_999, 0, 999_999_999),
            (u64::MAX, 18_446_744_073, 709_551_615),
        ] {
            assert_eq!(time(nanoseconds), Timestamp { seconds, nanos });
        }
    }
}
