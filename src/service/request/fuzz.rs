//! Fuzzing of every request message: bytes are decoded as the server decodes them, then parsed.

use slackwater_core::fuzz::fuzz_message;

use super::*;
use crate::agent::CheckVolumeRequest;
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
    fuzz_message("CreateVolume", &valid, parse);
}

#[test]
fn fuzz_other_requests_of_the_controller() {
    let id = || ID.to_string();
    let valid = DeleteVolumeRequest {
        volume_id: id(),
        ..Default::default()
    };
    let parse = |request: &DeleteVolumeRequest| volume_id(&request.volume_id);
    fuzz_message("DeleteVolume", &valid, parse);
    let valid = ControllerPublishVolumeRequest {
        volume_id: id(),
        node_id: "node-1".into(),
        volume_capability: Some(mount()),
        ..Default::default()
    };
    fuzz_message("ControllerPublishVolume", &valid, attach);
    let valid = ControllerUnpublishVolumeRequest {
        volume_id: id(),
        ..Default::default()
    };
    fuzz_message("ControllerUnpublishVolume", &valid, detach);
    let valid = ValidateVolumeCapabilitiesRequest {
        volume_id: id(),
        volume_capabilities: vec![mount()],
        parameters: map(&[("pool", "default")]),
        ..Default::default()
    };
    fuzz_message("ValidateVolumeCapabilities", &valid, validate);
    let valid = ListVolumesRequest {
        max_entries: 10,
        starting_token: "3".into(),
    };
    let parse =
        |request: &ListVolumesRequest| page(request.max_entries, &request.starting_token, Ok(None));
    fuzz_message("ListVolumes", &valid, parse);
    let valid = ControllerGetVolumeRequest { volume_id: id() };
    let parse = |request: &ControllerGetVolumeRequest| volume_id(&request.volume_id);
    fuzz_message("ControllerGetVolume", &valid, parse);
    let valid = ControllerGetVolumeHealthRequest {
        volume_id: id(),
        ..Default::default()
    };
    let parse = |request: &ControllerGetVolumeHealthRequest| volume_id(&request.volume_id);
    fuzz_message("ControllerGetVolumeHealth", &valid, parse);
    let valid = ControllerListVolumeHealthRequest {
        max_entries: 10,
        starting_token: "3".into(),
        ..Default::default()
    };
    let parse = |request: &ControllerListVolumeHealthRequest| {
        page(request.max_entries, &request.starting_token, Ok(None))
    };
    fuzz_message("ControllerListVolumeHealth", &valid, parse);
}

#[test]
fn fuzz_requests_about_space_and_parameters() {
    let id = || ID.to_string();
    let valid = GetCapacityRequest {
        volume_capabilities: vec![mount()],
        parameters: map(&[("pool", "default")]),
        accessible_topology: topology().requisite.pop(),
    };
    let parse = |request: &GetCapacityRequest| capacity(request, KEY);
    fuzz_message("GetCapacity", &valid, parse);
    let valid = ControllerExpandVolumeRequest {
        volume_id: id(),
        capacity_range: Some(csi::CapacityRange {
            required_bytes: 1 << 30,
            limit_bytes: 0,
        }),
        volume_capability: Some(mount()),
        ..Default::default()
    };
    fuzz_message("ControllerExpandVolume", &valid, expand_volume);
    let valid = ControllerModifyVolumeRequest {
        volume_id: id(),
        mutable_parameters: map(&[("wipe", "zero")]),
        ..Default::default()
    };
    fuzz_message("ControllerModifyVolume", &valid, modify_volume);
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
    fuzz_message("NodeStageVolume", &valid, stage);
    let valid = NodeUnstageVolumeRequest {
        volume_id: id(),
        staging_target_path: path(),
    };
    fuzz_message("NodeUnstageVolume", &valid, unstage);
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
    fuzz_message("NodePublishVolume", &valid, publish);
    let valid = NodeUnpublishVolumeRequest {
        volume_id: id(),
        target_path: path(),
    };
    fuzz_message("NodeUnpublishVolume", &valid, unpublish);
    let valid = NodeGetVolumeStatsRequest {
        volume_id: id(),
        volume_path: path(),
        ..Default::default()
    };
    fuzz_message("NodeGetVolumeStats", &valid, stats);
    let valid = NodeGetVolumeHealthRequest {
        volume_id: id(),
        ..Default::default()
    };
    let parse = |request: &NodeGetVolumeHealthRequest| volume_id(&request.volume_id);
    fuzz_message("NodeGetVolumeHealth", &valid, parse);
    let valid = NodeExpandVolumeRequest {
        volume_id: id(),
        volume_path: path(),
        ..Default::default()
    };
    fuzz_message("NodeExpandVolume", &valid, expand_node);
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
    fuzz_message("CreateSnapshot", &valid, parse);
    let valid = DeleteSnapshotRequest {
        snapshot_id: id(),
        ..Default::default()
    };
    let parse = |request: &DeleteSnapshotRequest| snapshot_id(&request.snapshot_id);
    fuzz_message("DeleteSnapshot", &valid, parse);
    let valid = GetSnapshotRequest {
        snapshot_id: id(),
        ..Default::default()
    };
    let parse = |request: &GetSnapshotRequest| snapshot_id(&request.snapshot_id);
    fuzz_message("GetSnapshot", &valid, parse);
    let valid = ListSnapshotsRequest {
        max_entries: 10,
        starting_token: "3".into(),
        source_volume_id: id(),
        ..Default::default()
    };
    let parse = |request: &ListSnapshotsRequest| list_snapshots(request, Ok(None));
    fuzz_message("ListSnapshots", &valid, parse);
    let valid = CreateVolumeGroupSnapshotRequest {
        name: "group-1".into(),
        source_volume_ids: vec![id(), ID.replace("0001", "0003")],
        parameters: parameters(),
        ..Default::default()
    };
    fuzz_message("CreateVolumeGroupSnapshot", &valid, create_group);
    let valid = DeleteVolumeGroupSnapshotRequest {
        group_snapshot_id: id(),
        snapshot_ids: vec![id()],
        ..Default::default()
    };
    fuzz_message("DeleteVolumeGroupSnapshot", &valid, delete_group);
    let valid = GetVolumeGroupSnapshotRequest {
        group_snapshot_id: id(),
        snapshot_ids: vec![id()],
        ..Default::default()
    };
    fuzz_message("GetVolumeGroupSnapshot", &valid, get_group);
}

#[test]
fn fuzz_requests_of_an_administrator() {
    let valid = CheckVolumeRequest {
        volume_id: ID.into(),
        repair: true,
    };
    let parse = |request: &CheckVolumeRequest| volume_id(&request.volume_id);
    fuzz_message("CheckVolume", &valid, parse);
    let valid = crate::agent::DeleteSnapshotRequest {
        snapshot_id: ID.into(),
    };
    let parse = |request: &crate::agent::DeleteSnapshotRequest| snapshot_id(&request.snapshot_id);
    fuzz_message("Admin.DeleteSnapshot", &valid, parse);
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
    fuzz_message("GetMetadataAllocated", &valid, metadata::allocated);
    let valid = GetMetadataDeltaRequest {
        base_snapshot_id: id(),
        target_snapshot_id: ID.replace("0001", "0003"),
        starting_offset: 4096,
        ..Default::default()
    };
    fuzz_message("GetMetadataDelta", &valid, metadata::delta);
}
