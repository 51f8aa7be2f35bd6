//! What is adopted, and what is refused with which reason.

use serde_json::json;

use super::*;

const DRIVER: &str = "csi.slackwater.dev";
const POOL: &str = "11111111-2222-4333-8444-000000000001";
const UUID: &str = "00000000-0000-4000-8000-000000000091";
const CHECKED: &str = "2026-11-27T12:00:00Z";

fn id() -> String {
    format!("{POOL}.{UUID}")
}

fn object(value: Value) -> DynamicObject {
    serde_json::from_value(value).unwrap()
}

fn place(namespace: &str, name: &str) -> NamespacedName {
    NamespacedName {
        namespace: namespace.into(),
        name: name.into(),
    }
}

fn arguments() -> AdoptArguments {
    AdoptArguments {
        adopt: Some(id()),
        new_claim: Some(place("shop", "data")),
        ..AdoptArguments::default()
    }
}

fn of_snapshot() -> AdoptArguments {
    AdoptArguments {
        adopt: Some(id()),
        new_snapshot: Some(place("shop", "before")),
        ..AdoptArguments::default()
    }
}

/// A pool with an orphan.
fn pool_object() -> Value {
    json!({"metadata": {"name": POOL}, "spec": {}, "status": {
        "node": "node-1", "name": "fast", "health": "Healthy", "home": "home-1", "agentVersion": "0.1.0",
        "orphans": {"checked": CHECKED, "count": 1, "listed": [{
            "id": id(), "kind": "Volume", "since": CHECKED, "volume": {
                "sizeBytes": 10i64 << 30, "fileSystem": "xfs", "claim": "shop/old",
            },
        }]},
    }})
}

fn view() -> View {
    View {
        driver: DRIVER.into(),
        now: CHECKED.parse::<Timestamp>().unwrap() + SignedDuration::from_mins(5),
        pools: vec![object(pool_object())],
        owners: Vec::new(),
        moves: Vec::new(),
    }
}

/// A view whose pool differs in one field.
fn with(pointer: &str, value: Value) -> View {
    let mut pool = pool_object();
    let (parent, field) = pointer.rsplit_once('/').unwrap();
    pool.pointer_mut(parent).unwrap()[field] = value;
    View {
        pools: vec![object(pool)],
        ..view()
    }
}

fn volume_object(name: &str, handle: &str, reference: Value) -> DynamicObject {
    object(json!({"metadata": {"name": name}, "spec": {
        "csi": {"driver": DRIVER, "volumeHandle": handle}, "claimRef": reference,
        "capacity": {"storage": "10Gi"}, "accessModes": ["ReadWriteOnce"],
        "volumeMode": "Filesystem", "storageClassName": "slackwater",
    }}))
}

fn with_volume(name: &str, handle: &str, reference: Value) -> View {
    View {
        owners: vec![volume_object(name, handle, reference)],
        ..view()
    }
}

fn own_name() -> String {
    format!("adopted-{UUID}")
}

fn own_reference() -> Value {
    json!({"namespace": "shop", "name": "data"})
}

#[track_caller]
fn is_refused(arguments: &AdoptArguments, view: &View, why: &str) {
    match get_adoption(arguments, view) {
        Err(failure) => assert!(failure.message.contains(why), "{}", failure.message),
        Ok(adoption) => panic!("{why}: {adoption:?}"),
    }
}

#[test]
fn an_orphan_gets_a_volume_and_a_claim_with_what_its_agent_reports() {
    let adoption = get_adoption(&arguments(), &view()).unwrap();
    let expected = json!({
        "apiVersion": "v1", "kind": "PersistentVolume",
        "metadata": {"name": own_name(), "annotations": {"pv.kubernetes.io/provisioned-by": DRIVER}},
        "spec": {
            "capacity": {"storage": "10Gi"}, "accessModes": ["ReadWriteOnce"],
            "volumeMode": "Filesystem", "persistentVolumeReclaimPolicy": "Retain",
            "storageClassName": "slackwater", "claimRef": own_reference(),
            "csi": {"driver": DRIVER, "volumeHandle": id(), "fsType": "xfs"},
            "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [
                {"key": "topology.csi.slackwater.dev/home", "operator": "In", "values": ["home-1"]},
            ]}]}},
        },
    });
    assert_eq!(adoption.pair.owner, expected);
    let expected = json!({
        "apiVersion": "v1", "kind": "PersistentVolumeClaim",
        "metadata": {"namespace": "shop", "name": "data"},
        "spec": {
            "accessModes": ["ReadWriteOnce"], "volumeMode": "Filesystem",
            "storageClassName": "slackwater", "volumeName": own_name(),
            "resources": {"requests": {"storage": "10Gi"}},
        },
    });
    assert_eq!(adoption.pair.user, expected);
    let describe_objects = MissingObjects {
        owner: true,
        user: true,
    };
    assert_eq!(missing_objects(&adoption, None).unwrap(), describe_objects);
}

#[test]
fn block_volumes_and_copies_for_readers_keep_their_modes() {
    let path = "/status/orphans/listed/0/volume";
    let raw = with(path, json!({"sizeBytes": 4097}));
    let adoption = get_adoption(&arguments(), &raw).unwrap();
    let spec = &adoption.pair.owner["spec"];
    assert_eq!(spec["volumeMode"], "Block");
    assert_eq!(spec["capacity"]["storage"], "4097");
    assert!(spec["csi"]["fsType"].is_null());
    assert_eq!(adoption.pair.user["spec"]["volumeMode"], "Block");
    let readers = json!({"sizeBytes": 4096, "fileSystem": "ext4", "forReaders": true});
    let adoption = get_adoption(&arguments(), &with(path, readers)).unwrap();
    for object in [&adoption.pair.owner, &adoption.pair.user] {
        assert_eq!(object["spec"]["accessModes"], json!(["ReadOnlyMany"]));
    }
}

#[test]
fn without_a_claim_it_is_the_one_for_which_the_volume_was_created() {
    let mut arguments = arguments();
    arguments.new_claim = None;
    let adoption = get_adoption(&arguments, &view()).unwrap();
    assert_eq!(adoption.place, place("shop", "old"));
    assert!(adoption.is_recorded);
    let path = "/status/orphans/listed/0/volume/claim";
    is_refused(
        &arguments,
        &with(path, json!(null)),
        "give --claim NAMESPACE/NAME",
    );
}

#[test]
fn a_snapshot_gets_a_content_and_a_volume_snapshot() {
    let snapshot = with("/status/orphans/listed/0/kind", json!("Snapshot"));
    let adoption = get_adoption(&of_snapshot(), &snapshot).unwrap();
    let spec = &adoption.pair.owner["spec"];
    assert_eq!(spec["source"], json!({"snapshotHandle": id()}));
    assert_eq!(spec["deletionPolicy"], "Retain");
    assert_eq!(
        spec["volumeSnapshotRef"],
        json!({"namespace": "shop", "name": "before"})
    );
    let source = json!({"volumeSnapshotContentName": own_name()});
    assert_eq!(adoption.pair.user["spec"], json!({"source": source}));
    is_refused(&arguments(), &snapshot, "give --snapshot NAMESPACE/NAME");
    is_refused(&of_snapshot(), &view(), "is a volume: give --claim");
}

#[test]
fn what_is_not_certainly_an_orphan_is_refused() {
    let refused = |pointer: &str, value: Value, why: &str| {
        is_refused(&arguments(), &with(pointer, value), why);
    };
    let keep = format!("orphans --keep {} --yes", id());
    refused("/spec/deleteOrphans", json!([id()]), &keep);
    refused("/spec/lost", json!(true), "pool lose");
    refused("/spec/node", json!("node-2"), "handed over to node node-2");
    for health in [
        "Unreachable",
        "NotServed",
        "Conflict",
        "Forgotten",
        "Lost",
        "Quarantined",
        "",
    ] {
        refused("/status/health", json!(health), "is not served");
    }
    refused("/status/home", json!(""), "has no home");
    refused(
        "/status/orphans/listed",
        json!([]),
        "not among the 0 orphans",
    );
    let none = json!({"checked": CHECKED, "count": 0, "listed": []});
    refused("/status/orphans", none, "does not list it");
    refused("/status/orphans", json!(null), "does not list it");
    refused("/status/orphans/checked", json!(null), "not known when");
    for checked in ["2026-11-27T11:34:59Z", "2026-11-27T12:35:01Z"] {
        refused("/status/orphans/checked", json!(checked), "30 minutes");
    }
    let of_volume = |field: &str| format!("/status/orphans/listed/0/{field}");
    refused(
        &of_volume("volume"),
        json!(null),
        "agent of node node-1 has not reported them (release \"0.1.0\")",
    );
    refused(&of_volume("volume/sizeBytes"), json!(-1), "are not known");
    refused(&of_volume("volume/fileSystem"), json!("nfs"), "\"nfs\"");
    refused(
        &of_volume("volume/problem"),
        json!("VolumeRevert a/b"),
        "VolumeRevert a/b",
    );
}

#[test]
fn a_check_of_exactly_half_an_hour_ago_is_believed() {
    let view = with("/status/orphans/checked", json!("2026-11-27T11:35:00Z"));
    assert!(get_adoption(&arguments(), &view).is_ok());
}

#[test]
fn ids_of_other_pools_and_drivers_are_refused() {
    let named = |id: &str| AdoptArguments {
        adopt: Some(id.into()),
        ..arguments()
    };
    is_refused(&named("x"), &view(), "is no ID of a volume");
    let other = id().replace("0001.", "0002.");
    is_refused(&named(&other), &view(), "no pool of csi.slackwater.dev");
    let empty = View {
        pools: Vec::new(),
        ..view()
    };
    is_refused(&arguments(), &empty, "singleNode: true");
}

#[test]
fn what_something_names_is_refused() {
    let refused = |view: View, why: &str| is_refused(&arguments(), &view, why);
    let reference = json!({"namespace": "other", "name": "data"});
    let other = with_volume("pvc-1", &id(), own_reference());
    refused(
        other,
        "PersistentVolume pvc-1 names it, for PersistentVolumeClaim shop/data",
    );
    let other = with_volume(&own_name(), &id(), reference);
    refused(other, "for PersistentVolumeClaim other/data");
    let other = with_volume(&own_name(), "another", own_reference());
    refused(other, "is of something else; give another --name");
    let mut two = with_volume(&own_name(), &id(), own_reference());
    two.owners.push(volume_object("pvc-1", &id(), json!({})));
    refused(two, "several PersistentVolumes name it");
    let annotated = json!({"metadata": {"name": "x", "annotations": {"slackwater.dev/x": id()}}});
    let mut exchanged = view();
    exchanged.pools.push(object(annotated.clone()));
    refused(exchanged, "annotation of Pool x");
    let mut exchanged = view();
    exchanged.owners.push(object(annotated));
    refused(exchanged, "annotation of x");
    let moved = |phase: &str| View {
        moves: vec![object(
            json!({"metadata": {"namespace": "shop", "name": "away"},
            "status": {"phase": phase, "from": {"handle": id()}}}),
        )],
        ..view()
    };
    refused(moved("Copying"), "VolumeMove shop/away");
    assert!(get_adoption(&arguments(), &moved("Aborted")).is_ok());
}

#[test]
fn a_volume_of_another_driver_with_the_same_handle_names_nothing() {
    let mut view = with_volume("pvc-1", &id(), own_reference());
    view.owners[0].data["spec"]["csi"]["driver"] = json!("other.example.com");
    assert!(get_adoption(&arguments(), &view).is_ok());
}

/// The claim of the orphan, as this command creates it, with other fields.
fn claim(more: Value) -> DynamicObject {
    let mut claim = json!({"metadata": {"name": "data", "namespace": "shop", "uid": "claim"},
        "spec": {"volumeName": own_name(), "storageClassName": "slackwater",
            "volumeMode": "Filesystem", "accessModes": ["ReadWriteOnce"],
            "resources": {"requests": {"storage": "10Gi"}}},
        "status": {"phase": "Pending"}});
    for (pointer, value) in more.as_object().unwrap() {
        let (parent, field) = pointer.rsplit_once('/').unwrap();
        claim.pointer_mut(parent).unwrap()[field] = value.clone();
    }
    object(claim)
}

#[track_caller]
fn todo_of(view: &View, user: Option<DynamicObject>) -> std::result::Result<(bool, bool), String> {
    let adoption = get_adoption(&arguments(), view).unwrap();
    let left = missing_objects(&adoption, user.as_ref()).map_err(|failure| failure.message)?;
    Ok((left.owner, left.user))
}

#[test]
fn what_an_earlier_run_has_begun_is_completed() {
    let begun = with_volume(&own_name(), &id(), own_reference());
    assert_eq!(todo_of(&begun, None), Ok((false, true)));
    let claim_of = get_adoption(&arguments(), &begun).unwrap().pair.user;
    assert_eq!(
        claim_of,
        get_adoption(&arguments(), &view()).unwrap().pair.user
    );
    assert_eq!(todo_of(&begun, Some(claim(json!({})))), Ok((false, false)));
    // A controller has bound it between the two reads.
    let annotations = json!({"pv.kubernetes.io/bind-completed": "yes"});
    let bound = json!({"/metadata/annotations": annotations, "/status/phase": "Bound"});
    assert_eq!(
        todo_of(&begun, Some(claim(bound.clone()))),
        Ok((false, false))
    );
    let mut reference = own_reference();
    reference["uid"] = json!("claim");
    let done = with_volume(&own_name(), &id(), reference);
    assert_eq!(todo_of(&done, Some(claim(bound))), Ok((false, false)));
    // The list of the pool does not have it any more.
    let mut unlisted = with("/status/orphans", json!(null));
    unlisted.owners = begun.owners;
    assert_eq!(todo_of(&unlisted, None), Ok((false, true)));
}

#[test]
fn a_volume_that_another_claim_has_left_is_refused() {
    let mut reference = own_reference();
    reference["uid"] = json!("gone");
    let released = with_volume(&own_name(), &id(), reference);
    for user in [None, Some(claim(json!({})))] {
        let why = todo_of(&released, user).unwrap_err();
        assert!(why.contains("it is no orphan"), "{why}");
    }
}

#[test]
fn a_claim_that_exists_is_used_only_if_it_waits_for_this_volume() {
    assert_eq!(todo_of(&view(), Some(claim(json!({})))), Ok((true, false)));
    let smaller = claim(json!({"/spec/resources/requests/storage": "1Gi"}));
    assert_eq!(todo_of(&view(), Some(smaller)), Ok((true, false)));
    let refused = |more: Value, why: &str| {
        let found = todo_of(&view(), Some(claim(more))).unwrap_err();
        assert!(
            found.contains(why) && found.contains("shop/data"),
            "{found}"
        );
    };
    refused(
        json!({"/spec/volumeName": null}),
        "does not name PersistentVolume",
    );
    refused(
        json!({"/spec/volumeName": "pvc-1"}),
        "with PersistentVolume pvc-1",
    );
    refused(
        json!({"/metadata/deletionTimestamp": CHECKED}),
        "is being deleted",
    );
    refused(
        json!({"/spec/storageClassName": "other"}),
        "its field storageClassName does not fit",
    );
    refused(
        json!({"/spec/volumeMode": "Block"}),
        "its field volumeMode does not fit",
    );
    refused(
        json!({"/spec/accessModes": ["ReadWriteMany"]}),
        "its field accessModes does not fit",
    );
    refused(
        json!({"/spec/resources/requests/storage": "11Gi"}),
        "its field size does not fit",
    );
    let annotations = json!({"pv.kubernetes.io/bind-completed": "yes"});
    refused(
        json!({"/metadata/annotations": annotations}),
        "has lost its PersistentVolume",
    );
}
