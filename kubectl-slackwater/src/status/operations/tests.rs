//! What is computed from each kind of object.

use serde_json::json;

use super::*;

const FROM: &str = "11111111-2222-4333-8444-000000000001";
const GIB: i64 = 1 << 30;

fn ago(minutes: i64) -> Timestamp {
    Timestamp::from_second(1_800_000_000 - 60 * minutes).unwrap()
}

fn object(value: Value) -> DynamicObject {
    serde_json::from_value(value).unwrap()
}

fn pool(seen: Option<Timestamp>) -> Pool {
    Pool {
        id: FROM.into(),
        node: "node-1".into(),
        name: "fast".into(),
        evacuate: true,
        left: Some(2),
        evacuation: "in it are 2 volumes of claims".into(),
        evacuation_since: Some(ago(30)),
        last_seen: seen,
        ..Pool::default()
    }
}

fn parts(pools: &[Pool]) -> Inputs<'_> {
    Inputs {
        pools: Some(pools),
        volumes: &[],
        are_all: true,
        now: ago(0),
    }
}

fn moved(name: &str, status: Value) -> DynamicObject {
    let mut object = object(
        json!({"apiVersion": "slackwater.dev/v1alpha1", "kind": "VolumeMove",
        "metadata": {"name": name, "namespace": "shop", "labels": {EVACUATES: FROM},
            "creationTimestamp": ago(20).to_string()},
        "spec": {"claim": name}, "status": status}),
    );
    object.data["status"]["from"] = json!({"pool": FROM, "node": "node-1"});
    object
}

fn source(claim: Value) -> DynamicObject {
    object(
        json!({"apiVersion": "slackwater.dev/v1alpha1", "kind": "HttpSource",
        "metadata": {"name": "base", "namespace": "shop"}, "status": {"claims": [claim]}}),
    )
}

fn filling(reported: i64) -> Value {
    json!({"namespace": "shop", "name": "vm", "phase": "Populating", "receivedBytes": 4 * GIB,
        "totalBytes": 8 * GIB, "since": ago(12).to_string(),
        "progressAt": ago(reported).to_string(), "progressSince": ago(11).to_string(),
        "progressSinceBytes": 3 * GIB})
}

#[test]
fn a_claim_is_filled_at_the_rate_of_its_attempt_until_its_pod_is_silent() {
    let of = |claim: Value| {
        let found = of_source(&object::HTTP_SOURCE, &source(claim));
        complete(found, &parts(&[]))
    };
    let work = of(filling(1)).remove(0);
    assert_eq!((work.seconds_left, work.outdated), (Some(4 * 600), false));
    let cells = work.cells(ago(0));
    assert_eq!(cells[1], "claim shop/vm is filled from HttpSource");
    assert_eq!(
        cells[2..7],
        ["Populating", "4 GiB of 8 GiB", "40m", "12m", "60s"]
    );
    let work = of(filling(4)).remove(0);
    let cells = work.cells(ago(0));
    assert_eq!(work.seconds_left, None);
    assert_eq!(cells[2], "outdated, was Populating");
    assert_eq!(cells[4..7], ["no estimate", "12m", "4m"]);
    for (phase, reason) in [
        ("Populated", "Populated"),
        ("Failed", "PopulateFailed"),
        ("Waiting", "WaitForFirstConsumer"),
    ] {
        let mut claim = filling(1);
        claim["phase"] = json!(phase);
        claim["reason"] = json!(reason);
        assert!(of(claim).is_empty(), "{phase}");
    }
}

#[test]
fn an_evacuation_is_one_line_with_its_volumes_and_bytes() {
    let volume = |pool: &str, claim: &str| Volume {
        pool: pool.into(),
        claim: claim.into(),
        size_bytes: 2 * GIB,
        ..Volume::default()
    };
    let volumes = [
        volume(FROM, "a"),
        volume(FROM, "b"),
        volume(FROM, ""),
        volume("", "c"),
    ];
    let pools = [pool(Some(ago(1)))];
    let copying = json!({"phase": "Copying", "bytesDone": GIB, "bytesTotal": 2 * GIB});
    let done = json!({"phase": "Done", "bytesTotal": 4 * GIB, "switchedAt": ago(5).to_string()});
    let moves = [moved("a", copying), moved("gone", done)];
    let parts = Inputs {
        volumes: &volumes,
        ..parts(&pools)
    };
    let work = |moves: &[DynamicObject], parts: &Inputs<'_>| {
        let found = of_pool(&pools[0], Some(moves), parts);
        complete(found.into_iter().collect(), parts).remove(0)
    };
    let cells = work(&moves, &parts).cells(ago(0));
    assert_eq!(cells[1], "evacuation of pool node-1/fast");
    let expected = ["2 left", "1 of 3 volumes, 5 GiB of 8 GiB", "12m", "30m", ""];
    assert_eq!(cells[2..7], expected, "5 GiB in 20 minutes");
    let waits = json!({"phase": "Waiting", "bytesDone": GIB, "bytesTotal": 2 * GIB});
    let cells = work(&[moved("a", waits)], &parts).cells(ago(0));
    assert_eq!(cells[4], "no estimate");
    let one_namespace = Inputs {
        are_all: false,
        ..parts
    };
    let cells = work(&moves, &one_namespace).cells(ago(0));
    assert_eq!(cells[3], "", "not all volumes are seen");
}

#[test]
fn work_is_outdated_with_the_agent_that_reports_it() {
    let moved = moved(
        "a",
        json!({"phase": "Copying", "bytesDone": GIB, "bytesTotal": 2 * GIB,
        "preCopy": {"round": 1, "begunAt": ago(10).to_string()}}),
    );
    let with = |seen: Option<Timestamp>, health: &str| {
        let pool = Pool {
            health: health.into(),
            ..pool(seen)
        };
        let found = of_move(&moved).into_iter().collect();
        complete(found, &parts(&[pool])).remove(0)
    };
    let work = with(Some(ago(1)), "Healthy");
    assert_eq!((work.outdated, work.seconds_left), (false, Some(600)));
    let work = with(Some(ago(4)), "Unreachable");
    assert_eq!((work.outdated, work.seconds_left), (true, None));
    assert_eq!(work.reported_at, Some(ago(4)));
    assert!(with(None, "Healthy").outdated);
    assert!(!with(Some(ago(9)), "Lost").outdated);
}

#[test]
fn a_revert_has_its_claims_and_its_deadline() {
    let revert = |phase: &str, deadline: &str| {
        let member = |state: &str| json!({"state": state, "handle": format!("{FROM}.{FROM}")});
        let revert = object(
            json!({"apiVersion": "slackwater.dev/v1alpha1", "kind": "VolumeRevert",
            "metadata": {"name": "back", "namespace": "shop",
                "creationTimestamp": ago(20).to_string()},
            "spec": {"groupSnapshot": "nightly", "deadline": deadline},
            "status": {"phase": phase, "members": [member("Prepared"), member("Switched")]}}),
        );
        of_revert(&revert).map(|work| work.cells(ago(0)))
    };
    let cells = revert("Preparing", "1h").unwrap();
    assert_eq!(cells[1], "revert to snapshot nightly");
    assert_eq!(
        cells[3..5],
        ["1 of 2 volumes", "fails in 40m unless it switches"]
    );
    let cells = revert("Switching", "1h").unwrap();
    assert_eq!(cells[3..5], ["1 of 2 volumes", "no estimate"]);
    for wrong in ["ü", "h", "99999999999999999999d"] {
        assert_eq!(revert("Waiting", wrong).unwrap()[4], "no estimate");
    }
    assert_eq!(revert("Failed", ""), None);
}

#[test]
fn evacuations_are_first_then_what_makes_progress() {
    let of = |resource: &'static str, name: &str, rate: Option<i64>| Operation {
        resource,
        name: name.into(),
        bytes_done: 1,
        bytes_total: 2,
        rate: rate.map(|minutes| (ago(minutes), 0)),
        ..Operation::default()
    };
    let mut all = vec![
        of("pools", "a", None),
        of("s3sources", "b", Some(1)),
        of("volumemoves", "c", Some(1)),
        of("volumemoves", "d", Some(1)),
        of("httpsources", "e", None),
    ];
    for _ in 0..all.len() {
        all.rotate_left(1);
        let names = complete(all.clone(), &parts(&[]));
        let names: String = names.iter().map(|one| one.name.as_str()).collect();
        assert_eq!(names, "abcde");
    }
}
