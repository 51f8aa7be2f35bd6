//! Arbitrary requests: the parsers either accept them, or refuse them and name the field.

use std::collections::{HashMap, HashSet};

use proptest::prelude::*;
use prost::Message;
use slackwater::csi::volume_capability::{AccessMode, AccessType, BlockVolume, MountVolume};
use slackwater::csi::*;
use slackwater::error::{Error, Result};
use slackwater::operation::ContentSource;
use slackwater::service::request;

use crate::service::harness::{from_snapshot, from_volume};

const KEY: &str = "topology.csi.slackwater.dev/home";

/// The permitted answers of a parser: the request is invalid, and the error names the field.
fn judged<T>(answer: Result<T>) -> std::result::Result<Option<T>, TestCaseError> {
    match answer {
        Ok(value) => Ok(Some(value)),
        Err(Error::Invalid { field, problem } | Error::OutOfRange { field, problem }) => {
            prop_assert!(!field.is_empty() && !problem.is_empty());
            Ok(None)
        }
        Err(other) => Err(TestCaseError::fail(format!("{other:?}"))),
    }
}

fn text() -> impl Strategy<Value = String> {
    prop_oneof![
        3 => Just(String::new()),
        3 => "[a-z0-9-]{1,12}",
        1 => any::<String>(),
        1 => "\\PC{0,200}",
        1 => Just("x".repeat(5000)),
    ]
}

fn words() -> impl Strategy<Value = String> {
    prop_oneof![
        text(),
        prop::sample::select(vec![
            "ext4", "xfs", "btrfs", "thin", "thick", "none", "zero", "1Gi", "crash", "fail", "10s",
            "7"
        ])
        .prop_map(str::to_string),
    ]
}

fn maps() -> impl Strategy<Value = HashMap<String, String>> {
    let keys = prop_oneof![
        text(),
        prop::sample::select(vec![
            "pool",
            "allocation",
            "blockSize",
            "mkfsOptions",
            "wipe",
            "size",
            KEY,
            "consistency",
            "onQuiesceFailure",
            "freezeTimeout",
            "retries",
            "maxExtents",
            "members",
            "deletionPolicy",
            "csi.storage.k8s.io/pvc/name",
            "csi.storage.k8s.io/pvc/namespace",
            "csi.storage.k8s.io/volumesnapshot/name",
            "csi.storage.k8s.io/ephemeral",
            "csi.storage.k8s.io/fstype",
        ])
        .prop_map(str::to_string),
    ];
    let values = prop_oneof![words(), Just("true".to_string())];
    prop::collection::hash_map(keys, values, 0..4)
}

prop_compose! {
    fn capabilities()(
        kind in 0..3,
        fs_type in words(),
        mount_flags in prop::collection::vec(words(), 0..3),
        volume_mount_group in prop_oneof![4 => Just(String::new()), 1 => text()],
        mode in prop::option::of(-1..10),
    ) -> VolumeCapability {
        VolumeCapability {
            access_type: match kind {
                0 => None,
                1 => Some(AccessType::Block(BlockVolume {})),
                _ => Some(AccessType::Mount(MountVolume { fs_type, mount_flags, volume_mount_group })),
            },
            access_mode: mode.map(|mode| AccessMode { mode }),
        }
    }
}

prop_compose! {
    fn ranges()(required_bytes in -2i64.., limit_bytes in prop_oneof![Just(0), any::<i64>()])
        -> CapacityRange
    {
        CapacityRange { required_bytes, limit_bytes }
    }
}

prop_compose! {
    fn creates()(
        name in text(),
        range in prop::option::of(ranges()),
        volume_capabilities in prop::collection::vec(capabilities(), 0..3),
        parameters in maps(),
        mutable_parameters in maps(),
        accessibility_requirements in topologies(),
        volume_content_source in prop::option::of(sources()),
    ) -> CreateVolumeRequest {
        CreateVolumeRequest {
            name,
            capacity_range: range,
            volume_capabilities,
            parameters,
            mutable_parameters,
            volume_content_source,
            accessibility_requirements,
            ..Default::default()
        }
    }
}

fn topologies() -> impl Strategy<Value = Option<TopologyRequirement>> {
    let requirement = prop::collection::vec(maps(), 0..3).prop_map(|each| TopologyRequirement {
        requisite: each
            .into_iter()
            .map(|segments| Topology { segments })
            .collect(),
        preferred: vec![],
    });
    prop::option::of(requirement)
}

fn sources() -> impl Strategy<Value = VolumeContentSource> {
    let source = prop_oneof![
        Just(None),
        text().prop_map(|id| Some(from_snapshot(&id))),
        text().prop_map(|id| Some(from_volume(&id))),
    ];
    source.prop_map(|r#type| VolumeContentSource { r#type })
}

fn source(given: volume_content_source::Type) -> ContentSource {
    use volume_content_source::Type;
    match given {
        Type::Snapshot(source) => ContentSource::Snapshot(source.snapshot_id),
        Type::Volume(source) => ContentSource::Volume(source.volume_id),
    }
}

/// Bytes as a message, or the default message if they are not one.
fn decoded<M: Message + Default>(bytes: &[u8]) -> M {
    M::decode(bytes).unwrap_or_default()
}

proptest! {
    #[test]
    fn any_create_is_accepted_or_refused(given in creates()) {
        if let Some(args) = judged(request::create_volume(&given, KEY))? {
            prop_assert!((1..=128).contains(&args.name.len()));
            prop_assert_eq!(args.capabilities.len(), given.volume_capabilities.len());
            prop_assert!(!args.capabilities.is_empty());
            prop_assert!(args.capacity.limit == 0 || args.capacity.required <= args.capacity.limit);
            let asked = given.accessibility_requirements.map_or(0, |r| r.requisite.len());
            prop_assert_eq!(args.requisite.len(), asked, "no topology gets lost");
            let given = given.volume_content_source.map(|source| source.r#type.unwrap());
            prop_assert_eq!(args.content_source, given.map(source), "no source gets lost");
        }
    }

    #[test]
    fn any_snapshot_is_accepted_or_refused(
        name in text(),
        source_volume_id in text(),
        parameters in maps(),
        accessibility_requirements in topologies(),
    ) {
        let given = CreateSnapshotRequest {
            name,
            source_volume_id,
            parameters,
            accessibility_requirements,
            ..Default::default()
        };
        let asked = given.accessibility_requirements.as_ref().map_or(0, |r| r.requisite.len());
        let with = judged(request::create_snapshot(&given, Some(KEY)))?;
        let without = judged(request::create_snapshot(&given, None))?;
        prop_assert_eq!(with.is_some(), without.is_some());
        if let (Some(with), Some(without)) = (with, without) {
            prop_assert!((1..=128).contains(&with.args.name.len()));
            prop_assert_eq!(&with.args.source_volume_id, &given.source_volume_id);
            prop_assert_eq!(with.args.requisite.len(), asked, "no topology gets lost");
            prop_assert!(without.args.requisite.is_empty());
            prop_assert_eq!(with.slip, given.parameters.contains_key("deletionPolicy"));
        }
    }

    #[test]
    fn any_group_is_accepted_or_refused(
        name in text(),
        source_volume_ids in prop::collection::vec(text(), 0..5),
        parameters in maps(),
    ) {
        let given = CreateVolumeGroupSnapshotRequest {
            name,
            source_volume_ids,
            parameters,
            ..Default::default()
        };
        if let Some(request::WithClassWarning { args, .. }) = judged(request::create_group(&given))? {
            prop_assert_eq!(&args.source_volume_ids, &given.source_volume_ids, "in their order");
            let each: HashSet<_> = args.source_volume_ids.iter().collect();
            prop_assert_eq!(each.len(), given.source_volume_ids.len(), "each source once");
            prop_assert!(!each.is_empty() && args.source_volume_ids.iter().all(|id| !id.is_empty()));
        }
    }

    #[test]
    fn any_publish_is_accepted_or_refused(
        volume_id in text(),
        staging_target_path in text(),
        target_path in text(),
        capability in prop::option::of(capabilities()),
        volume_context in maps(),
        readonly: bool,
    ) {
        let given = NodePublishVolumeRequest {
            volume_id,
            staging_target_path,
            target_path,
            volume_capability: capability,
            volume_context,
            readonly,
            ..Default::default()
        };
        match judged(request::publish(&given))? {
            Some(request::Publish::Persistent(args)) => {
                prop_assert_eq!(args.volume_id, given.volume_id);
                prop_assert_eq!(args.read_only, readonly);
            }
            Some(request::Publish::Ephemeral(args)) => prop_assert!(args.attributes.size > 0),
            None => {}
        }
    }

    #[test]
    fn any_validation_and_capacity_request_is_accepted_or_refused(
        volume_id in text(),
        volume_capabilities in prop::collection::vec(capabilities(), 0..3),
        parameters in maps(),
        mutable_parameters in maps(),
        segments in prop::option::of(maps()),
    ) {
        let capacity = GetCapacityRequest {
            volume_capabilities: volume_capabilities.clone(),
            parameters: parameters.clone(),
            accessible_topology: segments.map(|segments| Topology { segments }),
        };
        judged(request::capacity(&capacity, KEY))?;
        let count = volume_capabilities.len();
        let validate = ValidateVolumeCapabilitiesRequest {
            volume_id,
            volume_capabilities,
            parameters,
            mutable_parameters,
            ..Default::default()
        };
        if let Some(args) = judged(request::validate(&validate))? {
            prop_assert!(args.capabilities.len() >= count);
        }
    }

    #[test]
    fn any_growth_is_accepted_or_refused(
        volume_id in text(),
        volume_path in text(),
        range in prop::option::of(ranges()),
        capability in prop::option::of(capabilities()),
    ) {
        let controller = ControllerExpandVolumeRequest {
            volume_id: volume_id.clone(),
            capacity_range: range,
            volume_capability: capability.clone(),
            ..Default::default()
        };
        if let Some(args) = judged(request::expand_volume(&controller))? {
            prop_assert!(args.capacity.required > 0 || args.capacity.limit > 0);
        }
        let node = NodeExpandVolumeRequest {
            volume_id,
            volume_path,
            capacity_range: range,
            volume_capability: capability,
            ..Default::default()
        };
        judged(request::expand_node(&node))?;
    }

    #[test]
    fn any_bytes_are_parsed_without_a_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        judged(request::create_volume(&decoded(&bytes), KEY))?;
        judged(request::attach(&decoded(&bytes)))?;
        judged(request::validate(&decoded(&bytes)))?;
        let list: ListVolumesRequest = decoded(&bytes);
        judged(request::page(list.max_entries, &list.starting_token, Ok(None)))?;
        judged(request::create_snapshot(&decoded(&bytes), Some(KEY)))?;
        judged(request::list_snapshots(&decoded(&bytes), Ok(None)))?;
        judged(request::create_group(&decoded(&bytes)))?;
        judged(request::delete_group(&decoded(&bytes)))?;
        judged(request::get_group(&decoded(&bytes)))?;
        judged(request::expand_volume(&decoded(&bytes)))?;
        judged(request::modify_volume(&decoded(&bytes)))?;
        judged(request::stage(&decoded(&bytes)))?;
        judged(request::publish(&decoded(&bytes)))?;
        judged(request::stats(&decoded(&bytes)))?;
        judged(request::expand_node(&decoded(&bytes)))?;
    }
}
