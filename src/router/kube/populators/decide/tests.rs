//! What is decided from each state that a crash can leave, and whole sequences in a model of a cluster.

mod cached;
mod turns;
mod world;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use serde_json::{Value, json};

use super::*;
use crate::router::kube::populators::source::SourceSpec;
use crate::router::kube::populators::state::{
    CLAIM_LABEL, CREATING, DURABLE, NODE, POD, SOURCE, STATE, VALIDATOR,
};

const DRIVER: &str = "csi.slackwater.dev";
const DIGEST: &str = "sha256:0000000000000000000000000000000000000000000000000000000000000000";

fn object<T: serde::de::DeserializeOwned>(value: Value) -> T {
    serde_json::from_value(value).unwrap()
}

fn time(seconds: i64) -> Timestamp {
    Timestamp::from_second(1_800_000_000 + seconds).unwrap()
}

fn source(generation: i64) -> (Kind, Source) {
    let mut source: Source = object(json!({
        "metadata": {"namespace": "shop", "name": "base", "uid": "s-1", "generation": generation}}));
    source.spec = SourceSpec {
        url: Some("https://images.example/base.img".into()),
        sha256: Some(format!("{generation:064}")),
        cache: Some("node".into()),
        ..SourceSpec::default()
    };
    (Kind::Http, source)
}

fn claim() -> PersistentVolumeClaim {
    object(json!({
        "metadata": {"namespace": "shop", "name": "data", "uid": "c-1", "resourceVersion": "1",
            "annotations": {SELECTED_NODE: "node-1"}},
        "spec": {"storageClassName": "local", "accessModes": ["ReadWriteOnce"],
            "dataSourceRef": {"apiGroup": "slackwater.dev", "kind": "HttpSource", "name": "base"}},
        "status": {"phase": "Pending"},
    }))
}

fn prime() -> PersistentVolumeClaim {
    object(json!({
        "metadata": {"namespace": "shop", "name": "prime-c-1", "uid": "q-1", "resourceVersion": "2",
            "labels": {CLAIM_LABEL: "c-1"},
            "annotations": {SELECTED_NODE: "node-1", NODE: "node-1", SOURCE: "s-1/1"},
            "ownerReferences": [{"apiVersion": "v1", "kind": "PersistentVolumeClaim", "name": "data",
                "uid": "c-1"}]},
        "spec": {"storageClassName": "local", "volumeName": "pv-1"},
        "status": {"phase": "Bound"},
    }))
}

fn volume() -> PersistentVolume {
    object(json!({
        "metadata": {"name": "pv-1", "uid": "v-1", "resourceVersion": "3"},
        "spec": {"csi": {"driver": DRIVER, "volumeHandle": "h"},
            "claimRef": {"namespace": "shop", "name": "prime-c-1", "uid": "q-1"}},
    }))
}

fn pod(uid: &str, phase: &str, exit_code: Option<i32>) -> Pod {
    let statuses: Vec<Value> = exit_code
        .map(|code| {
            json!({"name": "populate", "image": "", "imageID": "", "ready": false,
                "restartCount": 0, "state": {"terminated": {"exitCode": code,
                    "message": r#"{"reason": "Why", "message": "because"}"#}}})
        })
        .into_iter()
        .collect();
    object(json!({
        "metadata": {"namespace": "shop", "name": "prime-c-1", "uid": uid,
            "labels": {CLAIM_LABEL: "c-1"},
            "ownerReferences": [{"apiVersion": "v1", "kind": "PersistentVolumeClaim", "name": "data",
                "uid": "c-1"}]},
        "status": {"phase": phase, "containerStatuses": statuses},
    }))
}

fn annotate(claim: &mut PersistentVolumeClaim, key: &str, value: Option<&str>) {
    let annotations = claim.metadata.annotations.get_or_insert_default();
    match value {
        Some(value) => drop(annotations.insert(key.into(), value.into())),
        None => drop(annotations.remove(key)),
    }
}

fn set_state(seen: &mut Seen, state: &State) {
    let text = serde_json::to_string(state).unwrap();
    annotate(&mut seen.claim, STATE, Some(&text));
}

fn begun() -> State {
    State::new("s-1/1".into())
}

/// A claim whose population has begun, without anything that was created for it.
fn seen() -> Seen {
    let mut seen = Seen {
        now: time(0),
        driver: DRIVER.into(),
        claim: claim(),
        class: Class::Own { waits: true },
        source: Ok(source(1)),
        origins: Ok(Vec::new()),
        prime: None,
        volume: None,
        pod: PodSeen::Absent,
        numbers: None,
        cache: None,
        waits_for_turn: None,
    };
    set_state(&mut seen, &begun());
    seen
}

/// One whose volume was created.
fn provisioned() -> Seen {
    Seen {
        prime: Some(prime()),
        volume: Some(volume()),
        ..seen()
    }
}

/// One with a pod that is recorded.
fn with_pod(phase: &str, exit_code: Option<i32>) -> Seen {
    let mut seen = provisioned();
    annotate(seen.prime.as_mut().unwrap(), POD, Some("p-1"));
    seen.pod = PodSeen::Here(Box::new(pod("p-1", phase, exit_code)));
    seen
}

fn step(seen: &Seen) -> Option<Step> {
    decide(seen).step
}

#[track_caller]
fn reason(seen: &Seen) -> &'static str {
    let decision = decide(seen);
    assert_eq!(decision.step, None);
    decision.shown.unwrap().reason
}

/// The state that a failure is recorded with.
#[track_caller]
fn failure(seen: &Seen) -> State {
    match step(seen) {
        Some(Step::Note(state)) => *state,
        other => panic!("{other:?}"),
    }
}

fn bind_to(seen: &mut Seen, name: &str, uid: &str) {
    let volume = seen.volume.as_mut().unwrap();
    let reference = volume.spec.as_mut().unwrap().claim_ref.as_mut().unwrap();
    reference.name = Some(name.into());
    reference.uid = Some(uid.into());
}

fn set_bound(claim: &mut PersistentVolumeClaim, volume: &str) {
    claim.spec.as_mut().unwrap().volume_name = Some(volume.into());
    claim.status.as_mut().unwrap().phase = Some("Bound".into());
}

#[test]
fn claims_of_other_drivers_are_left_alone_in_every_state() {
    for mut seen in [seen(), provisioned(), with_pod("Succeeded", Some(0))] {
        seen.class = Class::Foreign;
        assert_eq!(decide(&seen), Decision::default());
    }
}

#[test]
fn a_claim_that_is_being_deleted_is_left_to_the_garbage_collector() {
    let mut seen = with_pod("Succeeded", Some(0));
    seen.claim.metadata.deletion_timestamp = object(json!(time(0).to_string()));
    assert_eq!(decide(&seen), Decision::default());
}

#[test]
fn nothing_is_created_before_source_class_and_node_are_there() {
    let mut fresh = seen();
    annotate(&mut fresh.claim, STATE, None);
    assert_eq!(failure(&fresh), begun(), "its source is recorded first");
    let mut missing = fresh.clone();
    missing.source = Err(("SourceMissing", String::new()));
    assert_eq!(reason(&missing), "SourceMissing");
    let mut waiting = seen();
    annotate(&mut waiting.claim, SELECTED_NODE, None);
    assert_eq!(reason(&waiting), "WaitForFirstConsumer");
    waiting.class = Class::Own { waits: false };
    let create = |node: Option<&str>| {
        let node = node.map(str::to_string);
        Some(Step::CreatePrime {
            node,
            from: None,
            keeps_no_snapshot: false,
        })
    };
    assert_eq!(step(&waiting), create(None));
    assert_eq!(step(&seen()), create(Some("node-1")));
}

#[test]
fn a_namespace_that_does_not_allow_pods_gets_nothing() {
    for mut seen in [seen(), provisioned()] {
        seen.pod = PodSeen::Forbidden("bind the role".into());
        let decision = decide(&seen);
        assert_eq!(decision.step, None);
        let shown = decision.shown.unwrap();
        assert!(
            shown.is_problem && shown.reason == "NotAllowed",
            "{shown:?}"
        );
        assert_eq!(shown.message, "bind the role");
    }
}

#[test]
fn a_secret_that_cannot_be_used_or_an_unsuitable_source_creates_nothing() {
    for mut seen in [seen(), provisioned()] {
        seen.origins = Err(("SecretRefused", String::new()));
        assert_eq!(reason(&seen), "SecretRefused");
    }
    let mut tar = seen();
    tar.source.as_mut().unwrap().1.spec.format = Some("tar".into());
    tar.claim.spec.as_mut().unwrap().volume_mode = Some("Block".into());
    assert_eq!(reason(&tar), "Unsuitable");
}

#[test]
fn objects_of_users_with_these_names_are_not_touched() {
    let mut taken = provisioned();
    taken.prime.as_mut().unwrap().metadata.owner_references = None;
    assert_eq!(reason(&taken), "NameTaken");
    let mut taken = with_pod("Succeeded", Some(0));
    if let PodSeen::Here(pod) = &mut taken.pod {
        pod.metadata.labels = None;
    }
    assert_eq!(reason(&taken), "NameTaken");
}

#[test]
fn a_node_that_the_provisioner_gives_back_is_passed_on() {
    let mut seen = provisioned();
    let prime = seen.prime.as_mut().unwrap();
    prime.spec.as_mut().unwrap().volume_name = None;
    prime.status.as_mut().unwrap().phase = Some("Pending".into());
    assert_eq!(reason(&seen), "Provisioning");
    let set = |seen: &mut Seen, key, value| annotate(seen.prime.as_mut().unwrap(), key, value);
    set(&mut seen, SELECTED_NODE, None);
    assert_eq!(step(&seen), Some(Step::DropNode));
    annotate(&mut seen.claim, SELECTED_NODE, None);
    assert_eq!(step(&seen), Some(Step::ForgetNode));
    set(&mut seen, NODE, None);
    assert_eq!(
        reason(&seen),
        "Provisioning",
        "the scheduler selects a node"
    );
    annotate(&mut seen.claim, SELECTED_NODE, Some("node-2"));
    assert_eq!(step(&seen), Some(Step::SelectNode("node-2".into())));
    // It has selected another node before the first one was forgotten.
    set(&mut seen, NODE, Some("node-1"));
    assert_eq!(step(&seen), Some(Step::SelectNode("node-2".into())));
}

#[test]
fn the_pod_is_created_when_the_volume_is_there() {
    let attempt = |seen: &Seen| match step(seen) {
        Some(Step::CreatePod(attempt)) => *attempt,
        other => panic!("{other:?}"),
    };
    let mut seen = provisioned();
    assert_eq!(attempt(&seen).resume, None);
    let digest = Some(DIGEST.to_string());
    let state = State {
        digest: digest.clone(),
        ..begun()
    };
    set_state(&mut seen, &state);
    assert_eq!(attempt(&seen).digest, digest);
    seen.source = Err(("SourceMissing", String::new()));
    assert_eq!(reason(&seen), "SourceMissing");
}

/// The controller was interrupted after it had created the pod.
#[test]
fn a_pod_that_is_not_recorded_is_not_believed() {
    for phase in ["Pending", "Running", "Succeeded"] {
        for record in [None, Some(CREATING), Some("p-0")] {
            let mut seen = with_pod(phase, None);
            annotate(seen.prime.as_mut().unwrap(), POD, record);
            let state = failure(&seen);
            assert_eq!(state.given_up.as_deref(), Some("q-1"), "{phase} {record:?}");
            assert!(!state.is_final);
        }
    }
    // It was created, and is gone already.
    let mut seen = provisioned();
    annotate(seen.prime.as_mut().unwrap(), POD, Some(CREATING));
    assert_eq!(failure(&seen).given_up.as_deref(), Some("q-1"));
}

#[test]
fn a_recorded_pod_that_is_gone_is_a_failed_attempt() {
    let mut seen = with_pod("Running", None);
    seen.pod = PodSeen::Absent;
    let point = prime_with_point(&mut seen);
    let state = failure(&seen);
    assert_eq!(
        state.given_up.as_deref(),
        Some("q-1"),
        "not certain to have ended: {point}"
    );
    assert_eq!(
        (state.failures, state.failed_at),
        (1, object(json!(time(0).to_string())))
    );
}

fn prime_with_point(seen: &mut Seen) -> &'static str {
    let prime = seen.prime.as_mut().unwrap();
    annotate(prime, DURABLE, Some("4096"));
    annotate(prime, VALIDATOR, Some("\"e\""));
    "\"e\""
}

#[test]
fn exit_codes_decide_what_follows() {
    let failed = |code: Option<i32>, has_point: bool| {
        let mut seen = with_pod("Failed", code);
        if has_point {
            prime_with_point(&mut seen);
        }
        let state = failure(&seen);
        assert_eq!(state.failures, 1);
        match (
            state.is_final,
            state.failed_pod.is_some(),
            state.given_up.is_some(),
        ) {
            (true, false, true) => "none",
            (false, true, false) => "same",
            (false, false, true) => "new",
            other => panic!("{other:?}"),
        }
    };
    for (code, has_point, expected) in [
        (Some(10), false, "none"),
        (Some(10), true, "none"),
        (Some(11), false, "same"),
        (Some(11), true, "same"),
        (Some(12), false, "new"),
        (Some(12), true, "new"),
        (Some(137), false, "new"),
        (Some(137), true, "same"),
        (None, false, "new"),
        (None, true, "new"),
    ] {
        assert_eq!(failed(code, has_point), expected, "{code:?} {has_point}");
    }
    let state = failure(&with_pod("Failed", Some(10)));
    assert_eq!(state.message, "Why: because");
}

#[test]
fn a_failure_is_recorded_before_anything_is_deleted_and_counted_once() {
    let mut seen = with_pod("Failed", Some(12));
    let state = failure(&seen);
    set_state(&mut seen, &state);
    assert_eq!(step(&seen), Some(Step::DeletePod("p-1".into())));
    if let PodSeen::Here(pod) = &mut seen.pod {
        pod.metadata.deletion_timestamp = object(json!(time(0).to_string()));
    }
    assert_eq!(reason(&seen), "CleaningUp");
    seen.pod = PodSeen::Absent;
    assert_eq!(step(&seen), Some(Step::DeletePrime));
    seen.prime.as_mut().unwrap().metadata.deletion_timestamp = object(json!(time(0).to_string()));
    assert_eq!(reason(&seen), "CleaningUp");
    seen.prime = None;
    assert_eq!(reason(&seen), "AttemptFailed");
    seen.now = time(9);
    assert_eq!(reason(&seen), "AttemptFailed");
    seen.now = time(10);
    assert!(matches!(step(&seen), Some(Step::CreatePrime { .. })));
}

#[test]
fn an_attempt_that_can_continue_does_so_on_the_same_volume() {
    let mut seen = with_pod("Failed", Some(11));
    prime_with_point(&mut seen);
    let state = failure(&seen);
    set_state(&mut seen, &state);
    assert_eq!(step(&seen), Some(Step::DeletePod("p-1".into())));
    seen.pod = PodSeen::Absent;
    assert_eq!(reason(&seen), "AttemptFailed");
    seen.now = time(10);
    let Some(Step::CreatePod(attempt)) = step(&seen) else {
        panic!("{:?}", step(&seen));
    };
    let point = attempt.resume.unwrap();
    assert_eq!((point.bytes, point.validator.as_str()), (4096, "\"e\""));
    // Another version of the source is not mixed with it.
    seen.source = Ok(source(2));
    assert_eq!(step(&seen), Some(Step::DeletePrime));
}

#[test]
fn ten_failures_or_a_final_one_need_another_version_of_the_source() {
    let mut seen = with_pod("Failed", Some(11));
    let state = State {
        failures: 9,
        ..begun()
    };
    set_state(&mut seen, &state);
    let state = failure(&seen);
    assert!(state.is_final && state.failures == 10 && state.given_up.is_some());
    for (state, expected) in [
        (state, "AttemptsExhausted"),
        (failure(&with_pod("Failed", Some(10))), "PopulateFailed"),
    ] {
        let mut seen = self::seen();
        set_state(&mut seen, &state);
        seen.now = time(1_000_000);
        assert_eq!(reason(&seen), expected);
        assert_eq!(decide(&seen).shown.unwrap().phase, Phase::Failed);
        seen.source = Ok(source(2));
        assert_eq!(failure(&seen), State::new("s-1/2".into()));
    }
}

#[test]
fn an_attempt_that_has_begun_is_not_disturbed_by_a_change_of_the_source() {
    let mut seen = with_pod("Running", None);
    seen.source = Ok(source(2));
    assert_eq!(reason(&seen), "Populating");
    // Its failure is one of the version that it was begun with.
    let mut seen = with_pod("Failed", Some(10));
    seen.source = Ok(source(2));
    assert_eq!(failure(&seen).source, "s-1/1");
    // A pod that waits, for example for a Secret that does not exist, is replaced.
    let mut seen = with_pod("Pending", None);
    seen.source = Ok(source(2));
    assert_eq!(step(&seen), Some(Step::DeletePod("p-1".into())));
}

#[test]
fn what_the_next_attempt_needs_is_recorded_before_the_end_of_the_pod() {
    let mut seen = with_pod("Failed", Some(11));
    let digest = [0_u8; 32];
    let line = json!({"received": 9, "durable": 8, "validator": [34, 101, 34], "digest": digest});
    seen.numbers = Numbers::parse(&line.to_string());
    let Some(Step::Keep(point)) = step(&seen) else {
        panic!("{:?}", step(&seen));
    };
    assert_eq!((point.bytes, point.validator.as_str()), (8, "\"e\""));
    prime_with_point(&mut seen);
    let state = failure(&seen);
    assert_eq!((state.digest.as_deref(), state.failures), (Some(DIGEST), 0));
    set_state(&mut seen, &state);
    let state = failure(&seen);
    assert_eq!((state.digest.as_deref(), state.failures), (Some(DIGEST), 1));
}

#[test]
fn progress_is_recorded_every_fifteen_seconds() {
    let mut seen = with_pod("Running", None);
    seen.numbers = Numbers::parse(r#"{"received": 7, "total": 9}"#);
    let state = failure(&seen);
    assert_eq!(
        (state.received_bytes, state.total_bytes),
        (Some(7), Some(9))
    );
    assert_eq!(state.failures, 0);
    set_state(&mut seen, &state);
    seen.numbers = Numbers::parse(r#"{"received": 8, "total": 9}"#);
    seen.now = time(14);
    assert_eq!(reason(&seen), "Populating");
    seen.now = time(15);
    assert_eq!(failure(&seen).received_bytes, Some(8));
    seen.numbers = Numbers::parse(r#"{"received": 7, "total": 9}"#);
    assert_eq!(reason(&seen), "Populating", "nothing has changed");
}

#[test]
fn the_rate_of_an_attempt_begins_with_its_first_number() {
    let mut seen = with_pod("Running", None);
    // Of an attempt before, which this one continues.
    let state = State {
        received_bytes: None,
        progress_since: Some(Time(time(-90))),
        progress_since_bytes: Some(1),
        ..begun()
    };
    set_state(&mut seen, &state);
    let mut at = |seconds: i64, received: u64| {
        seen.numbers = Numbers::parse(&format!("{{\"received\": {received}}}"));
        seen.now = time(seconds);
        let state = failure(&seen);
        set_state(&mut seen, &state);
        let since = state.progress_since.clone().unwrap();
        (since.0, state.progress_since_bytes, state.progress_at)
    };
    let (first, second) = (Some(Time(time(0))), Some(Time(time(20))));
    assert_eq!(at(0, 5), (time(0), Some(5), first));
    assert_eq!(at(20, 9), (time(0), Some(5), second));
    // The content has changed, and is received again.
    assert_eq!(at(40, 4), (time(40), Some(4), Some(Time(time(40)))));
    let mut seen = with_pod("Failed", Some(12));
    let state = State {
        progress_since: Some(Time(time(0))),
        progress_since_bytes: Some(1),
        ..begun()
    };
    set_state(&mut seen, &state);
    let state = failure(&seen);
    assert_eq!(
        (state.progress_since, state.progress_since_bytes),
        (None, None)
    );
}

#[test]
fn progress_is_shown_in_percent_and_bytes_and_ends_with_its_attempt() {
    let show = |received: Option<u64>, total: Option<u64>| {
        let mut seen = with_pod("Running", None);
        let state = State {
            received_bytes: received,
            total_bytes: total,
            ..begun()
        };
        set_state(&mut seen, &state);
        let shown = decide(&seen).shown.unwrap();
        (shown.message, shown.percent)
    };
    let of = |what: &str, percent| (format!("the pod fills the volume{what}"), percent);
    assert_eq!(show(None, None), of("", None));
    assert_eq!(show(Some(5 << 20), None), of(": 5 MiB received", None));
    let half = of(": 25 %, 5 MiB of 20 MiB received", Some(25));
    assert_eq!(show(Some(5 << 20), Some(20 << 20)), half);
    assert_eq!(show(Some(2), Some(1)), of(": 2 B received", None));
    // The next attempt begins with no byte.
    let mut seen = with_pod("Failed", Some(12));
    let state = State {
        received_bytes: Some(19),
        total_bytes: Some(20),
        ..begun()
    };
    set_state(&mut seen, &state);
    let state = failure(&seen);
    assert_eq!((state.received_bytes, state.total_bytes), (None, None));
}

/// What an event is recorded for.
#[test]
fn another_reason_another_problem_and_each_quarter_are_news() {
    let shown = |reason, message: &str, is_problem, percent| Shown {
        phase: Phase::Populating,
        reason,
        message: message.into(),
        is_problem,
        percent,
    };
    let at = |percent| shown("Populating", "x", false, percent);
    assert!(at(None).is_news_after(None));
    assert!(!shown("Populating", "y", false, None).is_news_after(Some(&at(None))));
    assert!(shown("Populating", "y", true, None).is_news_after(Some(&at(None))));
    assert!(shown("Binding", "x", false, None).is_news_after(Some(&at(None))));
    for (before, now, is_news) in [
        (None, Some(24), false),
        (None, Some(25), true),
        (Some(24), Some(49), true),
        (Some(25), Some(49), false),
        (Some(49), Some(50), true),
        (Some(74), Some(75), true),
        (Some(99), Some(100), true),
        (Some(100), Some(100), false),
        (Some(60), Some(10), false),
    ] {
        let news = at(now).is_news_after(Some(&at(before)));
        assert_eq!(news, is_news, "{before:?} {now:?}");
    }
}

#[test]
fn a_volume_is_bound_only_after_the_recorded_pod_has_succeeded() {
    let seen = with_pod("Succeeded", Some(0));
    assert_eq!(step(&seen), Some(Step::Bind));
    for (key, value) in [("driver", "other"), ("claim", "x"), ("name", "pv-2")] {
        let mut seen = with_pod("Succeeded", Some(0));
        let volume = seen.volume.as_mut().unwrap();
        let spec = volume.spec.as_mut().unwrap();
        match key {
            "driver" => spec.csi.as_mut().unwrap().driver = value.into(),
            "claim" => spec.claim_ref.as_mut().unwrap().uid = Some(value.into()),
            _ => volume.metadata.name = Some(value.into()),
        }
        assert_eq!(reason(&seen), "VolumeChanged", "{key}");
    }
}

#[test]
fn after_the_binding_everything_else_is_deleted_and_the_volume_is_not() {
    let mut seen = with_pod("Succeeded", Some(0));
    bind_to(&mut seen, "data", "c-1");
    assert_eq!(reason(&seen), "Binding");
    set_bound(&mut seen.claim, "pv-1");
    assert_eq!(step(&seen), Some(Step::DeletePod("p-1".into())));
    seen.pod = PodSeen::Absent;
    assert_eq!(step(&seen), Some(Step::DeletePrime));
    let mut not_moved = seen.clone();
    bind_to(&mut not_moved, "prime-c-1", "q-1");
    assert_eq!(
        step(&not_moved),
        None,
        "its deletion would delete the volume"
    );
    seen.prime = None;
    seen.volume = None;
    let state = failure(&seen);
    assert!(state.is_done);
    set_state(&mut seen, &state);
    assert_eq!(reason(&seen), "Populated");
}

#[test]
fn a_claim_that_a_user_has_bound_is_left_alone() {
    let mut seen = seen();
    annotate(&mut seen.claim, STATE, None);
    set_bound(&mut seen.claim, "pv-9");
    assert_eq!(decide(&seen), Decision::default());
    seen.claim.status.as_mut().unwrap().phase = Some("Pending".into());
    assert_eq!(reason(&seen), "Binding");
    // What was begun before is deleted, with its own volume.
    let mut seen = with_pod("Running", None);
    set_bound(&mut seen.claim, "pv-9");
    assert_eq!(step(&seen), Some(Step::DeletePod("p-1".into())));
    seen.pod = PodSeen::Absent;
    assert_eq!(step(&seen), Some(Step::DeletePrime));
}

#[test]
fn a_prime_claim_that_was_deleted_or_has_lost_its_volume_is_replaced() {
    let mut lost = provisioned();
    lost.prime.as_mut().unwrap().status.as_mut().unwrap().phase = Some("Lost".into());
    lost.volume = None;
    assert_eq!(step(&lost), Some(Step::DeletePrime));
    let mut leaving = with_pod("Running", None);
    leaving.prime.as_mut().unwrap().metadata.deletion_timestamp =
        object(json!(time(0).to_string()));
    assert_eq!(step(&leaving), Some(Step::DeletePod("p-1".into())));
    let mut left = seen();
    left.pod = PodSeen::Here(Box::new(pod("p-1", "Succeeded", Some(0))));
    assert_eq!(step(&left), Some(Step::DeletePod("p-1".into())));
}

#[test]
fn a_state_that_cannot_be_read_begins_again() {
    let mut seen = seen();
    annotate(&mut seen.claim, STATE, Some("{"));
    assert_eq!(failure(&seen), begun());
}
