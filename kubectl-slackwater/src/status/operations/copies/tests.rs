//! Copies as parts of work, and alone.

use k8s_openapi::jiff::Timestamp;
use kube::api::DynamicObject;
use serde_json::{Value, json};

use super::super::{complete, of_move, of_revert};
use super::*;

const POOL: &str = "11111111-2222-4333-8444-000000000001";
const GIB: i64 = 1 << 30;

fn ago(minutes: i64) -> Timestamp {
    Timestamp::from_second(1_800_000_000 - 60 * minutes).unwrap()
}

fn object(value: Value) -> DynamicObject {
    serde_json::from_value(value).unwrap()
}

fn id(n: u32) -> String {
    format!("{POOL}.11111111-2222-4333-8444-{n:012}")
}

/// A copy that has done 1 of 3 GiB in 10 minutes, and 1 GiB before that.
fn copy(n: u32, kind: &str) -> Value {
    json!({"kind": kind, "id": id(n), "since": ago(11).to_string(), "bytesDone": 2 * GIB,
        "bytesTotal": 4 * GIB, "bytesBefore": GIB})
}

fn pool(reported: i64, copies: &[Value]) -> Pool {
    let copies = json!({"reportedAt": ago(reported).to_string(), "running": copies});
    Pool::of(&object(
        json!({"apiVersion": "slackwater.dev/v1alpha1", "kind": "Pool", "metadata": {"name": POOL},
        "status": {"node": "node-1", "name": "fast", "health": "Healthy", "copies": copies,
            "lastSeen": ago(0).to_string()}}),
    ))
}

fn volume(n: u32, claim: &str) -> Volume {
    Volume {
        namespace: "shop".into(),
        claim: claim.into(),
        handle: id(n),
        size_bytes: 4 * GIB,
        ..Volume::default()
    }
}

fn work(
    found: Vec<Operation>,
    scope: &Scope,
    pools: &[Pool],
    volumes: &[Volume],
) -> Vec<Operation> {
    let parts = Inputs {
        pools: Some(pools),
        volumes,
        are_all: true,
        now: ago(0),
    };
    complete(merge_copies(found, scope, &parts), &parts)
}

#[test]
fn a_copy_that_is_no_part_of_other_work_is_a_line_of_its_own() {
    let mut restore = copy(2, "Restore");
    restore["claim"] = json!("shop/new");
    restore["sourceNode"] = json!("node-2");
    let pools = [pool(1, &[copy(1, "Growth"), restore, copy(3, "Export")])];
    let volumes = [volume(1, "data")];
    let found = work(Vec::new(), &Scope::All, &pools, &volumes);
    let cells: Vec<_> = found.iter().map(|one| one.cells(ago(0))).collect();
    assert_eq!(cells[0][1], format!("export of snapshot {}", id(3)));
    assert_eq!(cells[1][1], "growth of claim shop/data");
    let expected = [
        "",
        "restore of claim shop/new from node node-2",
        "Copying",
        "2 GiB of 4 GiB",
        "20m",
        "11m",
        "60s",
        "",
    ];
    assert_eq!(cells[2], expected);
    assert_eq!((found[2].resource, found[2].name.as_str()), ("pools", POOL));
}

/// The name of a claim is that of its PersistentVolume, whatever the agent reports.
#[test]
fn every_kind_is_named() {
    let kinds = [
        "Restore", "Clone", "Move", "Revert", "Import", "Export", "Snapshot", "Write", "Growth",
        "Copy", "Later",
    ];
    let mut names = Vec::new();
    for kind in kinds {
        let mut known = copy(1, kind);
        known["claim"] = json!("bank/secret");
        let pools = [pool(1, &[known, copy(2, kind)])];
        let found = merge_copies(
            Vec::new(),
            &Scope::All,
            &Inputs {
                pools: Some(&pools),
                volumes: &[volume(1, "data")],
                are_all: true,
                now: ago(0),
            },
        );
        names.extend(found.iter().map(|one| one.what.replace(&id(2), "ID")));
    }
    insta::assert_snapshot!(names.join("\n"));
}

#[test]
fn a_later_copy_of_a_move_has_its_bytes_and_its_time_left() {
    let moved = object(
        json!({"apiVersion": "slackwater.dev/v1alpha1", "kind": "VolumeMove",
        "metadata": {"name": "away", "namespace": "shop"}, "spec": {"claim": "data"},
        "status": {"phase": "LastCopy", "bytesDone": 4 * GIB, "bytesTotal": 4 * GIB,
            "preCopy": {"round": 2}, "to": {"pool": POOL, "node": "node-1", "handle": id(1)}}}),
    );
    let pools = [pool(1, &[copy(1, "Move")])];
    let found = work(
        of_move(&moved).into_iter().collect(),
        &Scope::All,
        &pools,
        &[],
    );
    assert_eq!(found.len(), 1, "the copy has no other line");
    let cells = found[0].cells(ago(0));
    assert_eq!(
        cells[2..7],
        ["LastCopy", "2 GiB of 4 GiB", "20m", "", "60s"]
    );
    let without = work(of_move(&moved).into_iter().collect(), &Scope::All, &[], &[]);
    assert_eq!(
        without[0].cells(ago(0))[3..5],
        ["4 GiB of 4 GiB", "no estimate"]
    );
}

#[test]
fn the_copies_of_a_revert_are_added_with_what_waits_and_what_is_done() {
    let member = |n: u32, state: &str| json!({"state": state, "handle": id(n)});
    let revert = object(
        json!({"apiVersion": "slackwater.dev/v1alpha1", "kind": "VolumeRevert",
        "metadata": {"name": "back", "namespace": "shop",
            "creationTimestamp": ago(1).to_string()}, "spec": {"groupSnapshot": "nightly"},
        "status": {"phase": "Preparing", "members": [member(1, "Fenced"), member(2, "Fenced"),
            member(3, "Fenced"), member(4, "Prepared")]}}),
    );
    let volumes = [1, 2, 3, 4].map(|n| volume(n, &format!("data-{n}")));
    let pools = [pool(1, &[copy(1, "Revert"), copy(2, "Revert")])];
    let found = of_revert(&revert).into_iter().collect();
    let found = work(found, &Scope::All, &pools, &volumes);
    assert_eq!(found.len(), 1);
    // 2 of 4 GiB twice, 4 GiB that wait, and 4 GiB that are done; 2 GiB in 10 minutes.
    let cells = found[0].cells(ago(0));
    assert_eq!(cells[3], "1 of 4 volumes, 8 GiB of 16 GiB");
    assert_eq!(cells[4], "40m, fails in 9m unless it switches");
}

#[test]
fn copies_of_other_namespaces_and_of_pools_that_are_gone_are_not_shown() {
    let mut restore = copy(2, "Restore");
    restore["claim"] = json!("shop/new");
    let mut pools = [pool(1, &[copy(1, "Growth"), restore, copy(3, "Export")])];
    let volumes = [volume(1, "data")];
    let count = |pools: &[Pool], namespace: &str| {
        let scope = Scope::Namespace(namespace.into());
        work(Vec::new(), &scope, pools, &volumes).len()
    };
    assert_eq!((count(&pools, "shop"), count(&pools, "bank")), (2, 0));
    pools[0].health = "Lost".into();
    assert_eq!(count(&pools, "shop"), 0);
}

#[test]
fn what_was_not_reported_for_minutes_is_outdated() {
    let cells = |reported: i64| {
        let pools = [pool(reported, &[copy(1, "Import")])];
        let found = work(Vec::new(), &Scope::All, &pools, &[]);
        found[0].cells(ago(0))[2..5].to_vec()
    };
    assert_eq!(cells(3), ["Copying", "2 GiB of 4 GiB", "16m"]);
    let expected = ["outdated, was Copying", "2 GiB of 4 GiB", "no estimate"];
    assert_eq!(cells(4), expected);
}

/// A status can have anything.
#[test]
fn what_cannot_be_read_is_left_out() {
    let most = json!({"kind": 7, "id": id(1), "bytesDone": i64::MAX, "bytesTotal": i64::MAX,
        "bytesBefore": -5, "since": "yesterday"});
    let pools = [pool(
        1,
        &[most, json!({"kind": "Move"}), json!(5), json!(null)],
    )];
    let found = work(Vec::new(), &Scope::All, &pools, &[]);
    assert_eq!(found.len(), 1);
    assert_eq!(found[0].seconds_left, None);
    let odd = Pool::of(&object(
        json!({"apiVersion": "slackwater.dev/v1alpha1", "kind": "Pool", "metadata": {"name": POOL},
        "status": {"copies": [1, 2]}}),
    ));
    assert!(work(Vec::new(), &Scope::All, &[odd], &[]).is_empty());
}
