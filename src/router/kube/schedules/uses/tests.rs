//! What makes a set incomplete, and what keeps it in use.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use serde_json::{Value, json};
use uuid::Uuid;

use super::*;
use crate::router::kube::schedules::names::Names;

const POOL: &str = "11111111-2222-4333-8444-000000000001";
const SCHEDULE: &str = "0a1b2c3d-1111-4222-8333-444444444444";
const GROUP: &str = "pg-20261122-1100-0a1b2";

fn handle(number: u128) -> String {
    format!("{POOL}.{}", Uuid::from_u128(number))
}

fn gone() -> Time {
    serde_json::from_value(json!("2026-11-22T12:00:00Z")).unwrap()
}

fn object(value: Value) -> DynamicObject {
    serde_json::from_value(value).unwrap()
}

fn content(name: &str, number: u128) -> DynamicObject {
    object(json!({
        "metadata": {"name": name, "finalizers": ["snapshot.storage.kubernetes.io/volumesnapshotcontent-bound-protection"]},
        "spec": {"deletionPolicy": "Delete"}, "status": {"snapshotHandle": handle(number)},
    }))
}

/// A group with two members that nothing uses.
fn world() -> World {
    let member = |name: &str| {
        object(json!({
            "metadata": {"name": name, "namespace": "shop", "uid": name,
                "finalizers": ["snapshot.storage.kubernetes.io/volumesnapshot-in-group-protection"]},
            "status": {"volumeGroupSnapshotName": GROUP, "readyToUse": true,
                "boundVolumeSnapshotContentName": format!("content-{name}")},
        }))
    };
    let group = object(json!({
        "metadata": {"name": GROUP, "namespace": "shop", "uid": "g", "resourceVersion": "7",
            "creationTimestamp": "2026-11-22T11:00:09Z", "labels": {"slackwater.dev/schedule-uid": SCHEDULE},
            "finalizers": ["groupsnapshot.storage.kubernetes.io/volumegroupsnapshot-bound-protection"]},
        "spec": {"source": {"selector": {"matchLabels": {"app": "pg"}}}},
        "status": {"readyToUse": true, "boundVolumeGroupSnapshotContentName": "group-content"},
    }));
    let of_group = object(json!({
        "metadata": {"name": "group-content", "annotations": {"slackwater.dev/level": "application"}},
        "spec": {"deletionPolicy": "Delete", "source": {"volumeHandles": ["v1", "v2"]}},
        "status": {"volumeGroupSnapshotHandle": "g1"},
    }));
    let contents = [content("content-m1", 1), content("content-m2", 2)];
    World {
        namespace: Arc::new(Namespace {
            snapshots: vec![member("m1"), member("m2")],
            groups: vec![group],
        }),
        shared: Arc::new(Shared {
            contents: contents.into_iter().map(|it| (it.name_any(), it)).collect(),
            group_contents: [("group-content".to_string(), of_group)].into(),
            wanted: BTreeMap::new(),
        }),
        readers: [(POOL.parse().unwrap(), Some(BTreeSet::new()))].into(),
    }
}

fn namespace(world: &mut World) -> &mut Namespace {
    Arc::get_mut(&mut world.namespace).unwrap()
}

/// The state of the group, and why it is used.
fn completed(world: &World) -> (State, Option<String>) {
    let schedule = serde_json::from_value(json!({
        "metadata": {"name": "pg", "namespace": "shop", "uid": SCHEDULE}, "spec": {},
    }))
    .unwrap();
    let names = Names::of(&schedule).unwrap();
    // As it was listed at the beginning of the pass.
    let mut set = Set::read(&self::world().namespace.groups[0], &names, true).unwrap();
    world.complete(&mut set, "shop", Level::Filesystem);
    (set.state, set.used)
}

const GOOD: State = State::Good { is_at_level: true };

#[test]
fn a_complete_group_that_nothing_uses_may_be_deleted() {
    assert_eq!(completed(&world()), (GOOD, None));
    let mut below = world();
    let content = Arc::make_mut(&mut below.shared)
        .group_contents
        .get_mut("group-content")
        .unwrap();
    content
        .annotations_mut()
        .insert("slackwater.dev/level".into(), "crash".into());
    assert_eq!(completed(&below).0, State::Good { is_at_level: false });
    let content = Arc::make_mut(&mut below.shared)
        .group_contents
        .get_mut("group-content")
        .unwrap();
    content.annotations_mut().clear();
    assert_eq!(completed(&below).0, State::Good { is_at_level: false });
}

#[test]
fn a_group_without_one_of_its_members_is_incomplete() {
    type Change = fn(&mut World);
    let changes: [Change; 8] = [
        |world| drop(namespace(world).snapshots.pop()),
        |world| namespace(world).snapshots[0].data["status"]["readyToUse"] = json!(false),
        |world| {
            drop(
                Arc::make_mut(&mut world.shared)
                    .contents
                    .remove("content-m2"),
            );
        },
        |world| Arc::make_mut(&mut world.shared).group_contents.clear(),
        |world| {
            let content = Arc::make_mut(&mut world.shared)
                .group_contents
                .get_mut("group-content")
                .unwrap();
            content.data["spec"]["source"] = json!({});
        },
        |world| {
            namespace(world).snapshots[1].metadata.deletion_timestamp = Some(gone());
        },
        |world| {
            let content = Arc::make_mut(&mut world.shared)
                .contents
                .get_mut("content-m1")
                .unwrap();
            content.metadata.deletion_timestamp = Some(gone());
        },
        |world| {
            let content = Arc::make_mut(&mut world.shared)
                .group_contents
                .get_mut("group-content")
                .unwrap();
            content.metadata.deletion_timestamp = Some(gone());
        },
    ];
    for (number, change) in changes.into_iter().enumerate() {
        let mut world = world();
        change(&mut world);
        assert_eq!(completed(&world).0, State::Partial, "change {number}");
    }
}

type Change = fn(&mut World);

/// Uses of the group, with parts of the reasons.
const USES: [(Change, &str); 15] = [
    (|world| namespace(world).groups.clear(), "has changed"),
    (
        |world| {
            drop(
                namespace(world).groups[0]
                    .labels_mut()
                    .insert(KEEP.into(), "true".into()),
            );
        },
        "pg-20261122-1100-0a1b2 has slackwater.dev/keep",
    ),
    (
        |world| {
            drop(
                namespace(world).snapshots[1]
                    .annotations_mut()
                    .insert(KEEP.into(), String::new()),
            );
        },
        "m2 has slackwater.dev/keep",
    ),
    (
        |world| {
            namespace(world).groups[0]
                .finalizers_mut()
                .push("example.com/x".into());
        },
        "has the finalizer example.com/x",
    ),
    (
        |world| {
            let finalizer = "provisioner.storage.kubernetes.io/volumesnapshot-as-source-protection";
            namespace(world).snapshots[0]
                .finalizers_mut()
                .push(finalizer.into());
        },
        "m1 has the finalizer provisioner",
    ),
    (
        |world| {
            let content = Arc::make_mut(&mut world.shared)
                .contents
                .get_mut("content-m2")
                .unwrap();
            content.finalizers_mut().push("velero.io/x".into());
        },
        "content-m2 has the finalizer velero.io/x",
    ),
    (
        |world| {
            let content = Arc::make_mut(&mut world.shared)
                .contents
                .get_mut("content-m1")
                .unwrap();
            content.data["spec"]["deletionPolicy"] = json!("Retain");
        },
        "content-m1 has the deletionPolicy Retain",
    ),
    (
        |world| {
            let content = Arc::make_mut(&mut world.shared)
                .group_contents
                .get_mut("group-content")
                .unwrap();
            content.data["spec"]["deletionPolicy"] = json!("Retain");
        },
        "group-content has the deletionPolicy Retain",
    ),
    (
        |world| {
            let place = ("shop".into(), "m2".into());
            Arc::make_mut(&mut world.shared)
                .wanted
                .insert(place, "shop/restored".into());
        },
        "claim shop/restored, which is not bound",
    ),
    (
        |world| {
            drop(
                Arc::make_mut(&mut world.shared)
                    .contents
                    .insert("other".into(), content("other", 2)),
            );
        },
        "VolumeSnapshotContent other has the same snapshot",
    ),
    (
        |world| {
            let mut other = content("other", 9);
            other.data = json!({"spec": {"source": {"snapshotHandle": handle(1)}}});
            Arc::make_mut(&mut world.shared)
                .contents
                .insert("other".into(), other);
        },
        "VolumeSnapshotContent other has the same snapshot",
    ),
    (
        |world| {
            let other = json!({"metadata": {"name": "other"},
                    "status": {"volumeGroupSnapshotHandle": "g1"}});
            Arc::make_mut(&mut world.shared)
                .group_contents
                .insert("other".into(), object(other));
        },
        "VolumeGroupSnapshotContent other has the same group",
    ),
    (
        |world| {
            let read = [Uuid::from_u128(2).to_string()].into();
            world.readers.insert(POOL.parse().unwrap(), Some(read));
        },
        "is being read",
    ),
    (|world| world.readers.clear(), "no agent reports"),
    (
        |world| Arc::make_mut(&mut world.shared).group_contents.clear(),
        "its volumes are not known",
    ),
];

#[test]
fn every_use_keeps_a_set() {
    for (change, reason) in USES {
        let mut world = world();
        change(&mut world);
        let used = completed(&world).1.unwrap_or_default();
        assert!(used.contains(reason), "{reason}: {used}");
    }
}

#[test]
fn what_does_not_concern_a_set_does_not_keep_it() {
    let mut world = world();
    Arc::make_mut(&mut world.shared)
        .contents
        .insert("other".into(), content("other", 3));
    Arc::make_mut(&mut world.shared)
        .wanted
        .insert(("other".into(), "m1".into()), "other/x".into());
    namespace(&mut world).groups[0]
        .labels_mut()
        .insert(KEEP.into(), "false".into());
    let read = [Uuid::from_u128(9).to_string()].into();
    world.readers.insert(POOL.parse().unwrap(), Some(read));
    assert_eq!(completed(&world), (GOOD, None));
}

#[test]
fn unbound_claims_name_their_sources_in_both_fields() {
    let claim = |spec: Value, phase: &str| {
        let claim = json!({"metadata": {"name": "x", "namespace": "shop"}, "spec": spec,
            "status": {"phase": phase}});
        let found = wanted(&serde_json::from_value(claim).unwrap());
        found
            .into_iter()
            .map(|(place, _)| place)
            .collect::<Vec<_>>()
    };
    let source =
        json!({"kind": "VolumeSnapshot", "apiGroup": "snapshot.storage.k8s.io", "name": "s"});
    let mut elsewhere = source.clone();
    elsewhere["namespace"] = json!("backup");
    let place = |namespace: &str| (namespace.to_string(), "s".to_string());
    assert_eq!(
        claim(json!({"dataSource": source}), "Pending"),
        [place("shop")]
    );
    assert_eq!(
        claim(json!({"dataSourceRef": source}), "Lost"),
        [place("shop")]
    );
    assert_eq!(
        claim(json!({"dataSourceRef": elsewhere}), "Pending"),
        [place("backup")]
    );
    assert_eq!(claim(json!({"dataSource": source}), "Bound"), []);
    let other = json!({"kind": "PersistentVolumeClaim", "name": "s"});
    assert_eq!(claim(json!({"dataSource": other}), "Pending"), []);
}
