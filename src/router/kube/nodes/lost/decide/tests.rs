//! Which claims are deleted: each condition by itself, and whole sequences in a model of a cluster.

mod world;

use serde_json::{Value, json};

use super::*;
use crate::router::kube::adopt::manifest::tests::{DRIVER, volume};
use crate::router::kube::adopt::manifest::{POLICY, POLICY_BEFORE_QUARANTINE, QUARANTINED_FROM};

const HANDLE: &str = "11111111-2222-4333-8444-000000000001.bbbbbbbb-2222-4333-8444-555555555555";

fn object<T: serde::de::DeserializeOwned>(value: Value) -> T {
    serde_json::from_value(value).unwrap()
}

fn time(seconds: i64) -> Timestamp {
    Timestamp::from_second(1_800_000_000 + seconds).unwrap()
}

fn claim(name: &str, number: u64) -> PersistentVolumeClaim {
    object(json!({
        "metadata": {"name": name, "uid": format!("claim-{number}"), "resourceVersion": "5"},
        "spec": {"volumeName": format!("pv-{name}"), "storageClassName": "replicated"},
        "status": {"phase": "Bound"},
    }))
}

fn live(name: &str, number: u64) -> Manifest {
    let mut live = volume(&format!("pv-{name}"), HANDLE, "home");
    live.0.data["spec"]["claimRef"]["name"] = json!(name);
    live.0.data["spec"]["claimRef"]["uid"] = json!(format!("claim-{number}"));
    live.0.data["status"] = json!({"phase": "Bound"});
    live
}

fn pod(ordinal: u64, node: Option<&str>, is_ready: bool) -> Pod {
    let claims = ["data", "wal"].map(|one| {
        json!({"name": one, "persistentVolumeClaim": {"claimName": format!("{one}-db-{ordinal}")}})
    });
    let status = if is_ready { "True" } else { "False" };
    object(json!({
        "metadata": {"name": format!("db-{ordinal}"), "uid": format!("pod-{ordinal}"),
            "creationTimestamp": time(-1000).to_string(),
            "ownerReferences": [{"apiVersion": "apps/v1", "kind": "StatefulSet", "name": "db",
                "uid": "set", "controller": true}]},
        "spec": {"nodeName": node, "containers": [], "volumes": claims},
        "status": {"phase": "Running", "conditions": [{"type": "Ready", "status": status,
            "lastTransitionTime": time(-600).to_string()}]},
    }))
}

/// A StatefulSet of three replicas with two claims each, of which the last was on a node that is lost.
fn lost() -> Seen {
    let names = |ordinal: u64| ["data", "wal"].map(|one| format!("{one}-db-{ordinal}"));
    let claims = (0..3).flat_map(|ordinal| names(ordinal).map(|name| claim(&name, ordinal)));
    let volumes = names(2).map(|name| {
        let one = Volume {
            live: live(&name, 2),
            pool: HANDLE.parse::<crate::model::VolumeId>().unwrap().pool,
            node: "node-2".into(),
            loss: Ok("node node-2 does not exist any more".into()),
        };
        (format!("pv-{name}"), one)
    });
    let pods = [
        pod(0, Some("node-0"), true),
        pod(1, Some("node-1"), true),
        pod(2, None, false),
    ];
    let templates = ["data", "wal"].map(|one| json!({"metadata": {"name": one}, "spec": {}}));
    Seen {
        driver: DRIVER.into(),
        now: time(0),
        ready_for: SignedDuration::from_secs(300),
        claims: claims.collect(),
        volumes: volumes.into(),
        pods: pods.into(),
        sets: vec![object(json!({
            "metadata": {"name": "db", "uid": "set"},
            "spec": {"replicas": 3, "selector": {}, "serviceName": "db", "template": {},
                "volumeClaimTemplates": templates},
        }))],
        nodes: ["node-0".to_string(), "node-1".to_string()].into(),
        moving: BTreeMap::new(),
        classes: ["replicated".to_string()].into(),
    }
}

fn claim_of<'a>(seen: &'a mut Seen, name: &str) -> &'a mut PersistentVolumeClaim {
    let mut all = seen.claims.iter_mut();
    all.find(|one| one.name_any() == name).unwrap()
}

fn volume_named<'a>(seen: &'a mut Seen, claim: &str) -> &'a mut Volume {
    seen.volumes.get_mut(&format!("pv-{claim}")).unwrap()
}

fn mark(seen: &mut Seen, name: &str) {
    claim_of(seen, name)
        .labels_mut()
        .insert(MARK.into(), "5".into());
}

fn keep(seen: &mut Seen, name: &str) {
    let live = &mut volume_named(seen, name).live;
    live.0.data["spec"]["persistentVolumeReclaimPolicy"] = json!("Retain");
    let annotations = live.0.metadata.annotations.get_or_insert_default();
    annotations.insert(QUARANTINED_FROM.into(), "claim-2/5".into());
    annotations.insert(POLICY_BEFORE_QUARANTINE.into(), "Delete".into());
}

fn leave(seen: &mut Seen, name: &str) {
    claim_of(seen, name).metadata.deletion_timestamp = object(json!(time(0).to_string()));
}

/// The changes in words.
fn words(plan: &Plan) -> Vec<String> {
    let each = plan.changes.iter().map(|change| match change {
        Change::Mark { claim, .. } => format!("mark {}", claim.name_any()),
        Change::Retain { live, from, before } => format!("retain {} {from} {before}", live.name()),
        Change::DeleteClaim { claim, pool } => {
            let checked = if pool.is_some() {
                "delete"
            } else {
                "delete anyway"
            };
            format!("{checked} {}", claim.name_any())
        }
        Change::DeletePod { name, .. } => format!("delete pod {name}"),
        Change::Unmark(claim) => format!("unmark {}", claim.name_any()),
        Change::Restore(live) => format!("restore {}", live.name()),
    });
    each.collect()
}

const BOTH: [&str; 2] = ["data-db-2", "wal-db-2"];

#[test]
fn all_claims_of_a_replica_go_through_the_steps_together() {
    let mut seen = lost();
    assert_eq!(words(&decide(&seen)), ["mark data-db-2", "mark wal-db-2"]);
    mark(&mut seen, "data-db-2");
    assert_eq!(words(&decide(&seen)), ["mark wal-db-2"]);
    mark(&mut seen, "wal-db-2");
    let retain = |name: &str| format!("retain pv-{name} claim-2/5 Delete");
    assert_eq!(words(&decide(&seen)), BOTH.map(retain));
    keep(&mut seen, "wal-db-2");
    assert_eq!(words(&decide(&seen)), [retain("data-db-2")]);
    keep(&mut seen, "data-db-2");
    assert_eq!(
        words(&decide(&seen)),
        ["delete data-db-2", "delete wal-db-2", "delete pod db-2"]
    );
    assert!(decide(&seen).waiting.is_empty());
    // After the first deletion, whatever the node does.
    leave(&mut seen, "data-db-2");
    for name in BOTH {
        volume_named(&mut seen, name).loss = Err("it answers".into());
    }
    let rest = ["delete anyway wal-db-2", "delete pod db-2"];
    assert_eq!(words(&decide(&seen)), rest);
    let mut gone = seen.clone();
    gone.claims.retain(|one| one.name_any() != "data-db-2");
    gone.volumes.remove("pv-data-db-2");
    assert_eq!(words(&decide(&gone)), rest);
    // The new claim has no volume yet.
    let mut new = claim("data-db-2", 9);
    new.spec.as_mut().unwrap().volume_name = None;
    gone.claims.push(new);
    assert_eq!(words(&decide(&gone)), rest);
    leave(&mut seen, "wal-db-2");
    assert_eq!(words(&decide(&seen)), ["delete pod db-2"]);
    seen.pods[2].metadata.deletion_timestamp = object(json!(time(0).to_string()));
    assert_eq!(decide(&seen), Plan::default());
}

#[test]
fn nothing_is_done_for_claims_that_do_not_request_it() {
    let mut seen = lost();
    seen.classes.clear();
    assert_eq!(decide(&seen), Plan::default());
    let on_node_lost = |seen: &mut Seen, name: &str, value: &str| {
        let annotations = claim_of(seen, name).annotations_mut();
        annotations.insert(ON_NODE_LOST.into(), value.into());
    };
    // Its other claim would keep the pod where it is.
    on_node_lost(&mut seen, "data-db-2", "recreate");
    let plan = decide(&seen);
    assert!(plan.changes.is_empty());
    assert_eq!(plan.waiting.len(), 1);
    assert!(plan.waiting[0].1.contains("claim wal-db-2 of the same pod"));
    on_node_lost(&mut seen, "wal-db-2", "recreate");
    assert_eq!(decide(&seen).changes.len(), 2);
    // The claim's own annotation is stronger than its class.
    seen.classes.insert("replicated".into());
    on_node_lost(&mut seen, "data-db-2", "keep");
    on_node_lost(&mut seen, "wal-db-2", "keep");
    assert_eq!(decide(&seen), Plan::default());
    on_node_lost(&mut seen, "data-db-2", "yes");
    let plan = decide(&seen);
    assert!(plan.changes.is_empty() && plan.waiting[0].1.contains("\"yes\""));
}

type Doubt = fn(&mut Seen);

/// What prevents a deletion, and the words that report it.
const DOUBTS: &[(&str, Doubt)] = &[
    ("without the taint", |seen| {
        volume_named(seen, "wal-db-2").loss = Err("without the taint".into());
    }),
    ("VolumeMove pg moves", |seen| {
        seen.moving.insert("data-db-2".into(), "pg".into());
    }),
    ("is being deleted", |seen| leave(seen, "wal-db-2")),
    ("of another driver", |seen| seen.driver = "other".into()),
    ("deleted or exchanged", |seen| {
        let live = &mut volume_named(seen, "data-db-2").live;
        live.0.metadata.deletion_timestamp = object(json!(time(0).to_string()));
    }),
    ("deleted or exchanged", |seen| {
        let live = &mut volume_named(seen, "data-db-2").live;
        let annotations = live.0.metadata.annotations.get_or_insert_default();
        annotations.insert(POLICY.into(), "Delete".into());
    }),
    ("is not bound to claim", |seen| {
        volume_named(seen, "data-db-2").live.0.data["spec"]["claimRef"]["uid"] = json!("other");
    }),
    ("is not bound to claim", |seen| {
        volume_named(seen, "data-db-2").live.0.data["status"]["phase"] = json!("Released");
    }),
    ("no StatefulSet has it", |seen| seen.sets.clear()),
    ("no StatefulSet has it", |seen| {
        let spec = seen.sets[0].spec.as_mut().unwrap();
        spec.volume_claim_templates = None;
    }),
    ("several StatefulSets", |seen| {
        let mut other = seen.sets[0].clone();
        other.metadata.uid = Some("other".into());
        seen.sets.push(other);
    }),
    ("StatefulSet db is being deleted", |seen| {
        seen.sets[0].metadata.deletion_timestamp = object(json!(time(0).to_string()));
    }),
    ("not of one of the 2 replicas", |seen| {
        seen.sets[0].spec.as_mut().unwrap().replicas = Some(2);
    }),
    ("not of one of the 3 replicas", |seen| {
        seen.sets[0].spec.as_mut().unwrap().ordinals = object(json!({"start": 3}));
    }),
    ("only 2 of the 4 replicas", |seen| {
        seen.sets[0].spec.as_mut().unwrap().replicas = Some(4);
    }),
    ("pod other uses it", |seen| {
        let mut other = seen.pods[2].clone();
        other.metadata.name = Some("other".into());
        other.metadata.uid = Some("other".into());
        seen.pods.push(other);
    }),
    ("pod db-2 uses it, which is not pod db-2", |seen| {
        seen.pods[2].metadata.owner_references = None;
    }),
    ("only 1 of the 3 replicas", |seen| {
        seen.pods.remove(0);
    }),
    ("only 1 of the 3 replicas", |seen| {
        seen.pods[0] = pod(0, Some("node-0"), false);
    }),
    ("only 1 of the 3 replicas", |seen| {
        seen.nodes.remove("node-1");
    }),
    ("only 1 of the 3 replicas", |seen| {
        seen.pods[1].metadata.deletion_timestamp = object(json!(time(0).to_string()));
    }),
    ("only 1 of the 3 replicas", |seen| {
        seen.pods[1].metadata.creation_timestamp = object(json!(time(-299).to_string()));
    }),
    ("only 1 of the 3 replicas", |seen| {
        seen.pods[1].metadata.owner_references.as_mut().unwrap()[0].uid = "other".into();
    }),
    ("have been Ready for 300 s", |seen| {
        let status = seen.pods[0].status.as_mut().unwrap();
        let ready = &mut status.conditions.as_mut().unwrap()[0];
        ready.last_transition_time = object(json!(time(-299).to_string()));
    }),
    ("claim data-db-2 of the same pod is not bound", |seen| {
        claim_of(seen, "data-db-2")
            .spec
            .as_mut()
            .unwrap()
            .volume_name = None;
        seen.volumes.remove("pv-data-db-2");
    }),
];

#[test]
fn a_claim_stays_if_any_condition_does_not_hold() {
    for (words, doubt) in DOUBTS {
        let mut seen = lost();
        doubt(&mut seen);
        let plan = decide(&seen);
        assert!(plan.changes.is_empty(), "{words}: {:?}", plan.changes);
        let is_reported = |(_, why): &(String, String)| why.contains(words);
        assert!(plan.waiting.iter().any(is_reported), "{words}: {plan:?}");
    }
}

#[test]
fn what_was_begun_is_undone_if_a_condition_does_not_hold_any_more() {
    for (about, doubt) in DOUBTS {
        let mut seen = lost();
        BOTH.iter().for_each(|name| mark(&mut seen, name));
        BOTH.iter().for_each(|name| keep(&mut seen, name));
        doubt(&mut seen);
        let done = words(&decide(&seen));
        // A person has deleted one of the claims, or its claim is not there: the other one follows.
        if [
            "is being deleted",
            "claim data-db-2 of the same pod is not bound",
        ]
        .contains(about)
        {
            assert!(done[0].starts_with("delete anyway"), "{done:?}");
            continue;
        }
        assert_eq!(done, BOTH.map(|name| format!("unmark {name}")), "{about}");
        let mut seen = lost();
        BOTH.iter().for_each(|name| keep(&mut seen, name));
        doubt(&mut seen);
        let done = words(&decide(&seen));
        let all = BOTH.map(|name| format!("restore pv-{name}"));
        let restored: Vec<_> = all.into_iter().filter(|one| done.contains(one)).collect();
        assert_eq!(done, restored, "{about}");
        assert!(!done.is_empty(), "{about}");
    }
}

#[test]
fn an_earlier_mark_allows_no_deletion() {
    let mut seen = lost();
    for name in BOTH {
        claim_of(&mut seen, name)
            .labels_mut()
            .insert(MARK.into(), "8".into());
        keep(&mut seen, name);
    }
    let retain = |name: &str| format!("retain pv-{name} claim-2/8 Delete");
    assert_eq!(words(&decide(&seen)), BOTH.map(retain));
    // A quarantine that ended when a person bound the volume to another claim.
    for name in BOTH {
        let live = &mut volume_named(&mut seen, name).live;
        let annotations = live.0.metadata.annotations.get_or_insert_default();
        annotations.insert(QUARANTINED_FROM.into(), "claim-1/5".into());
    }
    let retain = |name: &str| format!("retain pv-{name} claim-2/8 Retain");
    assert_eq!(words(&decide(&seen)), BOTH.map(retain));
}

#[test]
fn one_replica_at_a_time() {
    let mut seen = lost();
    seen.sets[0].spec.as_mut().unwrap().replicas = Some(5);
    for ordinal in 3..5 {
        seen.pods.push(pod(ordinal, Some("node-3"), ordinal == 3));
        for name in ["data", "wal"].map(|one| format!("{one}-db-{ordinal}")) {
            seen.claims.push(claim(&name, ordinal));
        }
    }
    seen.nodes.insert("node-3".into());
    // The other replica is neither Ready nor of a lost node.
    let plan = decide(&seen);
    assert!(plan.changes.is_empty() && plan.waiting[0].1.contains("pod db-4"));
    for name in ["data-db-4", "wal-db-4"] {
        let volume = Volume {
            live: live(name, 4),
            ..volume_named(&mut seen, "data-db-2").clone()
        };
        seen.volumes.insert(format!("pv-{name}"), volume);
    }
    let plan = decide(&seen);
    assert_eq!(words(&plan), BOTH.map(|name| format!("mark {name}")));
    let other = |(name, why): &(String, String)| name.ends_with("-4") && why.contains("pod db-2");
    assert_eq!(plan.waiting.iter().filter(|one| other(one)).count(), 2);
    // The one that was begun goes first.
    mark(&mut seen, "wal-db-4");
    assert_eq!(words(&decide(&seen)), ["mark data-db-4"]);
    // The one that was begun and does not go on is undone before the other one begins.
    volume_named(&mut seen, "data-db-4").loss = Err("back".into());
    assert_eq!(words(&decide(&seen)), ["unmark wal-db-4"]);
    // It is being rebuilt.
    seen.claims.retain(|one| one.name_any() != "wal-db-4");
    seen.volumes.remove("pv-data-db-4");
    seen.volumes.remove("pv-wal-db-4");
    let plan = decide(&seen);
    assert!(plan.changes.is_empty() && plan.waiting[0].1.contains("pod db-4"));
}

#[test]
fn a_huge_number_of_replicas_costs_no_time() {
    let mut seen = lost();
    seen.sets[0].spec.as_mut().unwrap().replicas = Some(i32::MAX);
    assert!(decide(&seen).changes.is_empty());
}
