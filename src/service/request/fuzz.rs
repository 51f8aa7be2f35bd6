//! Fuzzing of every request message: bytes are decoded as the server decodes them, then parsed.

use prost::Message;
use slackwater_testkit::fuzz::fuzz;

use super::*;
use crate::csi::*;

const KEY: &str = "example.com/node";
const ID: &str = "6f1a2b3c-0000-4000-8000-000000000001.6f1a2b3c-0000-4000-8000-000000000002";

fn map(pairs: &[(&str, &str)]) -> HashMap<String, String> {
    let pairs = pairs.iter();
    pairs
        .map(|(key, value)| (key.to_string(), value.to_string()))
        .collect()
}

fn mount() -> VolumeCapability {
    use volume_capability::access_mode::Mode;
    VolumeCapability {
        access_type: Some(volume_capability::AccessType::Mount(
            volume_capability::MountVolume {
                fs_type: "ext4".into(),
                mount_flags: vec!["noatime".into()],
                ..Default::default()
            },
        )),
        access_mode: Some(volume_capability::AccessMode {
            mode: Mode::SingleNodeWriter.into(),
        }),
    }
}

fn topology() -> TopologyRequirement {
    let node = Topology {
        segments: map(&[(KEY, "node-1")]),
    };
    TopologyRequirement {
        requisite: vec![node.clone()],
        preferred: vec![node],
    }
}

/// Fuzzes one message. `planted` is a bug that only a request reaches which is parsed to its end.
fn message<M: Message + Default, T>(
    name: &str,
    valid: &M,
    parse: impl Fn(&M) -> Result<T>,
    planted: impl Fn(T) -> bool,
) {
    assert!(parse(valid).is_ok(), "{name}: the seed is valid");
    let seeds = [valid.encode_to_vec()];
    let read = |bytes: &[u8]| parse(&M::decode(bytes).ok()?).ok();
    let target = |bytes: &[u8]| drop(read(bytes));
    fuzz(name, &seeds, target, |bytes| {
        assert!(!read(bytes).is_some_and(&planted));
    });
}

#[test]
fn fuzz_create_volume() {
    let valid = CreateVolumeRequest {
        name: "pvc-1".into(),
        capacity_range: Some(csi::CapacityRange {
            required_bytes: 1 << 30,
            limit_bytes: 1 << 31,
        }),
        volume_capabilities: vec![mount()],
        parameters: map(&[
            ("pool", "default"),
            ("allocation", "thin"),
            ("mkfsOptions", "-m 1"),
        ]),
        mutable_parameters: map(&[("wipe", "zero")]),
        volume_content_source: Some(VolumeContentSource {
            r#type: Some(volume_content_source::Type::Snapshot(
                volume_content_source::SnapshotSource {
                    snapshot_id: ID.into(),
                },
            )),
        }),
        accessibility_requirements: Some(topology()),
        ..Default::default()
    };
    let parse = |request: &CreateVolumeRequest| create_volume(request, KEY);
    message("CreateVolume", &valid, parse, |parsed| {
        parsed.requisite.is_empty() && parsed.content_source.is_some()
    });
}

#[test]
fn fuzz_other_requests_of_the_controller() {
    let id = || ID.to_string();
    let is_other = |parsed: String| parsed != ID;
    let valid = DeleteVolumeRequest {
        volume_id: id(),
        ..Default::default()
    };
    message("DeleteVolume", &valid, delete_volume, is_other);
    let valid = ControllerPublishVolumeRequest {
        volume_id: id(),
        node_id: "node-1".into(),
        volume_capability: Some(mount()),
        ..Default::default()
    };
    message("ControllerPublishVolume", &valid, attach, |parsed| {
        parsed.node_id != "node-1"
    });
    let valid = ControllerUnpublishVolumeRequest {
        volume_id: id(),
        ..Default::default()
    };
    message("ControllerUnpublishVolume", &valid, detach, |()| true);
    let valid = ValidateVolumeCapabilitiesRequest {
        volume_id: id(),
        volume_capabilities: vec![mount()],
        parameters: map(&[("pool", "default")]),
        ..Default::default()
    };
    message("ValidateVolumeCapabilities", &valid, validate, |_| true);
    let valid = ListVolumesRequest {
        max_entries: 10,
        starting_token: "3".into(),
    };
    message("ListVolumes", &valid, list_volumes, |_| true);
    let valid = ControllerGetVolumeRequest { volume_id: id() };
    message("ControllerGetVolume", &valid, get_volume, is_other);
    let valid = GetCapacityRequest {
        volume_capabilities: vec![mount()],
        parameters: map(&[("pool", "default")]),
        accessible_topology: topology().requisite.pop(),
    };
    let parse = |request: &GetCapacityRequest| capacity(request, KEY);
    message("GetCapacity", &valid, parse, |parsed| parsed.is_none());
    let valid = ControllerExpandVolumeRequest {
        volume_id: id(),
        capacity_range: Some(csi::CapacityRange {
            required_bytes: 1 << 30,
            limit_bytes: 0,
        }),
        volume_capability: Some(mount()),
        ..Default::default()
    };
    message("ControllerExpandVolume", &valid, expand_volume, |_| true);
    let valid = ControllerModifyVolumeRequest {
        volume_id: id(),
        mutable_parameters: map(&[("wipe", "zero")]),
        ..Default::default()
    };
    message("ControllerModifyVolume", &valid, modify_volume, |_| true);
}

#[test]
fn fuzz_requests_of_the_node() {
    let id = || ID.to_string();
    let path = || "/var/lib/kubelet/plugins/globalmount".to_string();
    let valid = NodeStageVolumeRequest {
        volume_id: id(),
        staging_target_path: path(),
        volume_capability: Some(mount()),
        ..Default::default()
    };
    message("NodeStageVolume", &valid, stage, |parsed| {
        parsed.volume_id != ID
    });
    let valid = NodeUnstageVolumeRequest {
        volume_id: id(),
        staging_target_path: path(),
    };
    message("NodeUnstageVolume", &valid, unstage, |(id, _)| id != ID);
    let valid = NodePublishVolumeRequest {
        volume_id: id(),
        staging_target_path: path(),
        target_path: path() + "/mount",
        volume_capability: Some(mount()),
        volume_context: map(&[
            ("csi.storage.k8s.io/ephemeral", "true"),
            ("csi.storage.k8s.io/pod.name", "web-0"),
            ("size", "1Gi"),
        ]),
        ..Default::default()
    };
    message("NodePublishVolume", &valid, publish, |_| true);
    let valid = NodeUnpublishVolumeRequest {
        volume_id: id(),
        target_path: path(),
    };
    message("NodeUnpublishVolume", &valid, unpublish, |(id, _)| id != ID);
    let valid = NodeGetVolumeStatsRequest {
        volume_id: id(),
        volume_path: path(),
        ..Default::default()
    };
    message("NodeGetVolumeStats", &valid, stats, |_| true);
    let valid = NodeExpandVolumeRequest {
        volume_id: id(),
        volume_path: path(),
        ..Default::default()
    };
    message("NodeExpandVolume", &valid, expand_node, |_| true);
}

#[test]
fn fuzz_requests_about_snapshots() {
    let id = || ID.to_string();
    let parameters = || {
        map(&[
            ("consistency", "application"),
            ("quiesceTimeout", "30s"),
            ("onQuiesceFailure", "filesystem"),
        ])
    };
    let valid = CreateSnapshotRequest {
        source_volume_id: id(),
        name: "snapshot-1".into(),
        parameters: parameters(),
        ..Default::default()
    };
    let parse = |request: &CreateSnapshotRequest| create_snapshot(request, Some(KEY));
    message("CreateSnapshot", &valid, parse, |parsed| {
        parsed.args.source_volume_id != ID
    });
    let valid = DeleteSnapshotRequest {
        snapshot_id: id(),
        ..Default::default()
    };
    message("DeleteSnapshot", &valid, delete_snapshot, |parsed| {
        parsed != ID
    });
    let valid = GetSnapshotRequest {
        snapshot_id: id(),
        ..Default::default()
    };
    message("GetSnapshot", &valid, get_snapshot, |parsed| parsed != ID);
    let valid = ListSnapshotsRequest {
        max_entries: 10,
        starting_token: "3".into(),
        source_volume_id: id(),
        ..Default::default()
    };
    message("ListSnapshots", &valid, list_snapshots, |_| true);
    let valid = CreateVolumeGroupSnapshotRequest {
        name: "group-1".into(),
        source_volume_ids: vec![id(), ID.replace("0001", "0003")],
        parameters: parameters(),
        ..Default::default()
    };
    message(
        "CreateVolumeGroupSnapshot",
        &valid,
        create_group,
        |parsed| parsed.args.source_volume_ids.len() == 1,
    );
    let valid = DeleteVolumeGroupSnapshotRequest {
        group_snapshot_id: id(),
        snapshot_ids: vec![id()],
        ..Default::default()
    };
    message("DeleteVolumeGroupSnapshot", &valid, delete_group, |_| true);
    let valid = GetVolumeGroupSnapshotRequest {
        group_snapshot_id: id(),
        snapshot_ids: vec![id()],
        ..Default::default()
    };
    message("GetVolumeGroupSnapshot", &valid, get_group, |_| true);
}

#[test]
fn fuzz_requests_about_blocks() {
    let id = || ID.to_string();
    let valid = GetMetadataAllocatedRequest {
        snapshot_id: id(),
        starting_offset: 4096,
        max_results: 10,
        ..Default::default()
    };
    message("GetMetadataAllocated", &valid, metadata::allocated, |_| {
        true
    });
    let valid = GetMetadataDeltaRequest {
        base_snapshot_id: id(),
        target_snapshot_id: ID.replace("0001", "0003"),
        starting_offset: 4096,
        ..Default::default()
    };
    message("GetMetadataDelta", &valid, metadata::delta, |_| true);
}
