//! The cases. Each returns INVALID_ARGUMENT.

use slackwater::csi::volume_capability::access_mode::Mode;
use slackwater::csi::volume_capability::{AccessMode, AccessType, MountVolume};
use slackwater::csi::volume_content_source::Type as Source;
use slackwater::csi::*;

use crate::service::calls::Call;
use crate::service::harness::*;

/// A refusal: the error in the request, and the call.
pub type Case = (&'static str, Call);

pub fn all() -> Vec<Case> {
    let mut all = creating();
    all.extend(controlling());
    all.extend(cutting());
    all.extend(grouping());
    all.extend(on_the_node());
    all
}

pub(super) fn created(change: impl FnOnce(&mut CreateVolumeRequest)) -> Call {
    let mut request = create("pvc-1");
    change(&mut request);
    request.into()
}

fn created_as(capability: VolumeCapability) -> Call {
    created(|request| request.volume_capabilities = vec![capability])
}

fn with_mode(mode: i32) -> VolumeCapability {
    VolumeCapability {
        access_mode: Some(AccessMode { mode }),
        ..mount()
    }
}

/// Any ID: these requests are refused before the volume is looked up.
const ID: &str = "some-volume";

fn creating() -> Vec<Case> {
    let group = MountVolume {
        volume_mount_group: "1000".to_string(),
        ..Default::default()
    };
    let group = VolumeCapability {
        access_type: Some(AccessType::Mount(group)),
        ..mount()
    };
    let from = |source: Option<Source>| {
        created(|r| r.volume_content_source = Some(VolumeContentSource { r#type: source }))
    };
    vec![
        ("no name", created(|r| r.name.clear())),
        ("a name of 129 bytes", created(|r| r.name = "x".repeat(129))),
        (
            "a control character",
            created(|r| r.name = "a\u{85}b".into()),
        ),
        ("no capability", created(|r| r.volume_capabilities.clear())),
        (
            "no access type",
            created_as(VolumeCapability {
                access_type: None,
                ..mount()
            }),
        ),
        (
            "no access mode",
            created_as(VolumeCapability {
                access_mode: None,
                ..mount()
            }),
        ),
        (
            "a mode of many nodes",
            created_as(with_mode(Mode::MultiNodeMultiWriter.into())),
        ),
        (
            "read-only on many nodes",
            created_as(with_mode(Mode::MultiNodeReaderOnly.into())),
        ),
        ("a mode of a later CSI", created_as(with_mode(99))),
        (
            "block and mount",
            created(|r| r.volume_capabilities = vec![block(), mount()]),
        ),
        (
            "two file systems",
            created(|r| r.volume_capabilities = vec![mount_as("xfs", &[]), mount_as("ext4", &[])]),
        ),
        ("an unknown file system", created_as(mount_as("ntfs", &[]))),
        (
            "a mount option that moves",
            created_as(mount_as("ext4", &["remount"])),
        ),
        (
            "two options in one word",
            created_as(mount_as("ext4", &["noatime,ro"])),
        ),
        (
            "more than 4 KiB of options",
            created_as(mount_as("ext4", &["noatime"; 600])),
        ),
        ("a mount group", created_as(group)),
        ("a source of no kind", from(None)),
        ("a snapshot without an id", from(Some(from_snapshot("")))),
        ("a volume without an id", from(Some(from_volume("")))),
        (
            "a negative size",
            created(|r| r.capacity_range = at_least(-1)),
        ),
        (
            "a negative limit",
            created(|r| r.capacity_range = range(1, -1)),
        ),
        (
            "a limit below the size",
            created(|r| r.capacity_range = range(2, 1)),
        ),
        (
            "an unknown parameter",
            created(|r| r.parameters = map([("alocation", "thin")])),
        ),
        (
            "an unknown value",
            created(|r| r.parameters = map([("allocation", "fat")])),
        ),
        (
            "an unknown pool",
            created(|r| r.parameters = map([("pool", "fast")])),
        ),
        (
            "an invalid pool name",
            created(|r| r.parameters = map([("pool", "../etc")])),
        ),
        (
            "more than 4 KiB of parameters",
            created(|r| r.parameters = map([("mkfsOptions", "-m 1 ".repeat(900).as_str())])),
        ),
        (
            "mkfs onto another device",
            created(|r| r.parameters = map([("mkfsOptions", "-J device=/dev/sdb")])),
        ),
        (
            "mkfs options of another file system",
            created(|r| {
                r.parameters = map([("mkfsOptions", "-O encrypt")]);
                r.volume_capabilities = vec![mount_as("xfs", &[])];
            }),
        ),
        (
            "an immutable parameter",
            created(|r| r.mutable_parameters = map([("allocation", "thick")])),
        ),
    ]
}

fn controlling() -> Vec<Case> {
    let attach = ControllerPublishVolumeRequest {
        volume_id: ID.into(),
        node_id: NODE.into(),
        volume_capability: Some(mount()),
        ..Default::default()
    };
    let validate = ValidateVolumeCapabilitiesRequest {
        volume_id: ID.into(),
        volume_capabilities: vec![mount()],
        ..Default::default()
    };
    let grow = ControllerExpandVolumeRequest {
        volume_id: ID.into(),
        capacity_range: at_least(GIB),
        ..Default::default()
    };
    let long = "x".repeat(257);
    let none = String::new;
    vec![
        ("no id", DeleteVolumeRequest::default().into()),
        (
            "no id",
            ControllerPublishVolumeRequest {
                volume_id: none(),
                ..attach.clone()
            }
            .into(),
        ),
        (
            "no node",
            ControllerPublishVolumeRequest {
                node_id: none(),
                ..attach.clone()
            }
            .into(),
        ),
        (
            "a node id of 257 bytes",
            ControllerPublishVolumeRequest {
                node_id: long,
                ..attach.clone()
            }
            .into(),
        ),
        (
            "no capability",
            ControllerPublishVolumeRequest {
                volume_capability: None,
                ..attach.clone()
            }
            .into(),
        ),
        (
            "read-only",
            ControllerPublishVolumeRequest {
                readonly: true,
                ..attach
            }
            .into(),
        ),
        ("no id", ControllerUnpublishVolumeRequest::default().into()),
        (
            "no id",
            ValidateVolumeCapabilitiesRequest {
                volume_id: none(),
                ..validate.clone()
            }
            .into(),
        ),
        (
            "no capability",
            ValidateVolumeCapabilitiesRequest {
                volume_capabilities: vec![],
                ..validate.clone()
            }
            .into(),
        ),
        (
            "half a capability",
            ValidateVolumeCapabilitiesRequest {
                volume_capabilities: vec![mount(), VolumeCapability::default()],
                ..validate
            }
            .into(),
        ),
        (
            "a negative bound",
            ListVolumesRequest {
                max_entries: -1,
                ..Default::default()
            }
            .into(),
        ),
        (
            "no id",
            ControllerExpandVolumeRequest {
                volume_id: none(),
                ..grow.clone()
            }
            .into(),
        ),
        (
            "no size",
            ControllerExpandVolumeRequest {
                capacity_range: None,
                ..grow.clone()
            }
            .into(),
        ),
        (
            "an empty size",
            ControllerExpandVolumeRequest {
                capacity_range: range(0, 0),
                ..grow.clone()
            }
            .into(),
        ),
        (
            "half a capability",
            ControllerExpandVolumeRequest {
                volume_capability: Some(VolumeCapability::default()),
                ..grow
            }
            .into(),
        ),
        ("no id", ControllerModifyVolumeRequest::default().into()),
        (
            "an unknown parameter",
            ControllerModifyVolumeRequest {
                volume_id: ID.into(),
                mutable_parameters: map([("XXX_FakeKey", "x")]),
                ..Default::default()
            }
            .into(),
        ),
    ]
}

fn cutting() -> Vec<Case> {
    let cut = |change: &dyn Fn(&mut CreateSnapshotRequest)| {
        let mut request = snapshot("snapshot-1", ID);
        change(&mut request);
        Call::from(request)
    };
    let class = |key: &str, value: &str| cut(&|r| r.parameters = map([(key, value)]));
    vec![
        ("no name", cut(&|r| r.name.clear())),
        ("a name of 129 bytes", cut(&|r| r.name = "x".repeat(129))),
        ("a control character", cut(&|r| r.name = "a\u{0}b".into())),
        ("no source", cut(&|r| r.source_volume_id.clear())),
        ("an unknown parameter", class("freezetimeout", "1s")),
        ("an unknown level", class("consistency", "total")),
        (
            "an unknown failure policy",
            class("onQuiesceFailure", "retry"),
        ),
        ("a freeze timeout of zero", class("freezeTimeout", "0s")),
        ("a freeze that is too long", class("freezeTimeout", "31s")),
        ("a time without a unit", class("quiesceTimeout", "30")),
        ("a negative number", class("retries", "-1")),
        ("an unknown unit", class("retryInterval", "1h")),
        ("an unknown share", class("sharedVolume", "some")),
        ("no extents at all", class("maxExtents", "0")),
        ("a parameter of groups", class("members", "independent")),
        (
            "more than 4 KiB of parameters",
            class("csi.storage.k8s.io/volumesnapshot/name", &"x".repeat(5000)),
        ),
        ("no id", DeleteSnapshotRequest::default().into()),
        (
            "a negative bound",
            ListSnapshotsRequest {
                max_entries: -1,
                ..Default::default()
            }
            .into(),
        ),
    ]
}

fn grouping() -> Vec<Case> {
    let cut = |change: &dyn Fn(&mut CreateVolumeGroupSnapshotRequest)| {
        let mut request = group("group-1", &[ID, "another"]);
        change(&mut request);
        Call::from(request)
    };
    vec![
        ("no name", cut(&|r| r.name.clear())),
        ("a name of 129 bytes", cut(&|r| r.name = "x".repeat(129))),
        ("no sources", cut(&|r| r.source_volume_ids.clear())),
        (
            "an unknown deletion of members",
            cut(&|r| r.parameters = map([("members", "alone")])),
        ),
        ("an empty source", cut(&|r| r.source_volume_ids[1].clear())),
        (
            "a source twice",
            cut(&|r| r.source_volume_ids.push(ID.into())),
        ),
        (
            "an unknown parameter",
            cut(&|r| r.parameters = map([("quiesce", "1s")])),
        ),
        (
            "more than 4 KiB of parameters",
            cut(&|r| {
                let key = "csi.storage.k8s.io/volumegroupsnapshot/name";
                r.parameters = map([(key, "x".repeat(5000).as_str())]);
            }),
        ),
        ("no id", DeleteVolumeGroupSnapshotRequest::default().into()),
        ("no id", GetVolumeGroupSnapshotRequest::default().into()),
    ]
}

fn on_the_node() -> Vec<Case> {
    let none = String::new;
    let inline = |attributes: &[(&str, &str)]| {
        let mut request = publish("csi-0123", TARGET);
        let given = attributes
            .iter()
            .map(|(k, v)| (k.to_string(), v.to_string()));
        request.volume_context = given.collect();
        let flag = (
            "csi.storage.k8s.io/ephemeral".to_string(),
            "true".to_string(),
        );
        request.volume_context.extend([flag]);
        Call::from(request)
    };
    vec![
        (
            "no id",
            NodeStageVolumeRequest {
                volume_id: none(),
                ..stage(ID)
            }
            .into(),
        ),
        (
            "no path",
            NodeStageVolumeRequest {
                staging_target_path: none(),
                ..stage(ID)
            }
            .into(),
        ),
        (
            "no capability",
            NodeStageVolumeRequest {
                volume_capability: None,
                ..stage(ID)
            }
            .into(),
        ),
        (
            "a path outside the kubelet's folders",
            NodeStageVolumeRequest {
                staging_target_path: "/etc/x".into(),
                ..stage(ID)
            }
            .into(),
        ),
        (
            "a path with ..",
            NodeStageVolumeRequest {
                staging_target_path: "/var/lib/kubelet/../x".into(),
                ..stage(ID)
            }
            .into(),
        ),
        ("no id", NodeUnstageVolumeRequest::default().into()),
        (
            "no path",
            NodeUnstageVolumeRequest {
                volume_id: ID.into(),
                ..Default::default()
            }
            .into(),
        ),
        (
            "no id",
            NodePublishVolumeRequest {
                volume_id: none(),
                ..publish(ID, TARGET)
            }
            .into(),
        ),
        ("no path", publish(ID, "").into()),
        (
            "no capability",
            NodePublishVolumeRequest {
                volume_capability: None,
                ..publish(ID, TARGET)
            }
            .into(),
        ),
        ("a relative path", publish(ID, "some/path").into()),
        ("an inline volume without a size", inline(&[])),
        (
            "an inline volume with an invalid size",
            inline(&[("size", "1 gig")]),
        ),
        (
            "an unknown attribute",
            inline(&[("size", "1Gi"), ("colour", "red")]),
        ),
        ("no id", NodeUnpublishVolumeRequest::default().into()),
        (
            "no path",
            NodeUnpublishVolumeRequest {
                volume_id: ID.into(),
                ..Default::default()
            }
            .into(),
        ),
        ("no id", NodeGetVolumeStatsRequest::default().into()),
        (
            "no path",
            NodeGetVolumeStatsRequest {
                volume_id: ID.into(),
                ..Default::default()
            }
            .into(),
        ),
        ("no id", NodeExpandVolumeRequest::default().into()),
        (
            "no path",
            NodeExpandVolumeRequest {
                volume_id: ID.into(),
                ..Default::default()
            }
            .into(),
        ),
    ]
}
