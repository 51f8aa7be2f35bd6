//! Who has a turn, who is next, and what is remembered while the watch of claims is late.

use serde_json::{Value, json};

use super::super::state::{CLAIM_LABEL, CREATING, STATE, owner};
use super::*;

fn object<T: serde::de::DeserializeOwned>(value: Value) -> T {
    serde_json::from_value(value).unwrap()
}

fn time(seconds: i64) -> Timestamp {
    Timestamp::from_second(1_800_000_000 + seconds).unwrap()
}

fn claim(namespace: &str, number: i64) -> PersistentVolumeClaim {
    object(json!({
        "metadata": {"namespace": namespace, "name": format!("data-{number}"),
            "uid": format!("{namespace}-{number}"), "creationTimestamp": time(number).to_string()},
        "spec": {"dataSourceRef": {"apiGroup": "slackwater.dev", "kind": "HttpSource", "name": "x"}},
    }))
}

fn prime(
    claim: &PersistentVolumeClaim,
    created_at: i64,
    pod: Option<&str>,
) -> PersistentVolumeClaim {
    object(json!({
        "metadata": {"namespace": claim.metadata.namespace, "name": prime_name(claim), "uid": "q",
            "labels": {CLAIM_LABEL: uid(claim)}, "annotations": pod.map(|pod| json!({POD: pod})),
            "ownerReferences": [owner(claim)], "creationTimestamp": time(created_at).to_string()},
        "status": {"phase": "Pending"},
    }))
}

fn turns(all: usize, in_namespace: usize, taken: &[(&str, usize)]) -> Turns {
    let mut turns = Turns::new(Limits { all, in_namespace });
    for (namespace, count) in taken {
        for number in 0..*count {
            turns.take(namespace, &format!("taken-{number}"));
        }
    }
    turns
}

fn next(turns: &Turns) -> Vec<&str> {
    turns.next().into_iter().collect()
}

#[test]
fn the_oldest_claim_of_the_namespace_with_the_fewest_pods_is_next() {
    let mut turns = turns(8, 4, &[("a", 3), ("b", 1)]);
    for number in [3, 1, 2] {
        turns.wait(&claim("a", number));
        turns.wait(&claim("b", 10 + number));
    }
    // One more of a, and all of b.
    assert_eq!(next(&turns), ["a-1", "b-11", "b-12", "b-13"]);
    turns.limits.all = 6;
    assert_eq!(next(&turns), ["b-11", "b-12"]);
    turns.wait(&claim("c", 100));
    assert_eq!(next(&turns), ["b-11", "c-100"]);
    turns.limits.all = 4;
    assert!(next(&turns).is_empty());
    turns.limits.all = 3;
    assert!(next(&turns).is_empty(), "it was lowered");
}

#[test]
fn a_refusal_names_the_limit_that_is_reached() {
    let full = turns(8, 4, &[("a", 4)]);
    let why = full.refusal(&claim("a", 1)).unwrap();
    assert!(
        why.contains("4 pods may fill volumes of namespace a")
            && why.contains("maxPodsPerNamespace"),
        "{why}"
    );
    assert_eq!(full.refusal(&claim("b", 1)), None);
    let full = turns(4, 4, &[("a", 2), ("b", 2)]);
    let why = full.refusal(&claim("a", 1)).unwrap();
    assert!(
        why.contains("4 pods may fill volumes at the same time (populators.maxPods)"),
        "{why}"
    );
    let mut has = full.clone();
    has.take("a", "a-1");
    assert_eq!(has.refusal(&claim("a", 1)), None, "it has its turn");
    // An older one waits.
    let mut one = turns(1, 1, &[]);
    one.wait(&claim("b", 1));
    assert!(one.refusal(&claim("a", 2)).is_some());
    assert_eq!(one.refusal(&claim("a", 0)), None);
}

/// Users can create claims that look like prime claims.
#[test]
fn a_namespace_takes_no_more_turns_than_it_may_have() {
    let turns = turns(8, 4, &[("a", 1000)]);
    assert_eq!(turns.refusal(&claim("b", 1)), None);
}

#[test]
fn a_turn_is_from_the_creation_of_the_prime_claim_to_the_end_of_its_pod() {
    let mut claim = claim("a", 1);
    let has = |claim: &PersistentVolumeClaim, prime: &PersistentVolumeClaim, now| {
        has_turn(claim, prime, time(now))
    };
    let new = prime(&claim, 0, None);
    assert!(has(&claim, &new, 0) && has(&claim, &new, 299));
    assert!(!has(&claim, &new, 300), "its volume is not created");
    for pod in [CREATING, "p-1"] {
        assert!(has(&claim, &prime(&claim, 0, Some(pod)), 86_400), "{pod}");
    }
    let mut other = new.clone();
    other.metadata.owner_references = None;
    assert!(!has(&claim, &other, 0));
    let mut restored = new.clone();
    restored.spec = object(json!({"dataSource": {"apiGroup": "snapshot.storage.k8s.io",
        "kind": "VolumeSnapshot", "name": "cache-1"}}));
    assert!(!has(&claim, &restored, 0), "it needs no pod");
    // The pod has failed, and another one continues later.
    let state = json!({"source": "s/1", "failures": 1, "failedPod": "p-1"}).to_string();
    claim.metadata.annotations = Some([(STATE.to_string(), state)].into());
    assert!(!has(&claim, &prime(&claim, 0, Some("p-1")), 1));
    assert!(has(&claim, &prime(&claim, 0, Some("p-2")), 1));
    claim.spec.as_mut().unwrap().volume_name = Some("pv-1".into());
    claim.status = object(json!({"phase": "Bound"}));
    assert!(
        !has(&claim, &prime(&claim, 0, Some("p-2")), 1),
        "it is filled"
    );
}

#[test]
fn what_was_begun_counts_before_the_watch_shows_it() {
    let (a, b) = (claim("shop", 1), claim("shop", 2));
    let path = |claim: &PersistentVolumeClaim| {
        let meta = &claim.metadata;
        format!("shop/{}", meta.name.as_deref().unwrap())
    };
    let mut all = BTreeMap::from([(path(&a), a.clone()), (path(&b), b.clone())]);
    let mut memory = TurnMemory::default();
    let waiting = BTreeSet::from([uid(&b).to_string()]);
    let limits = Limits {
        all: 1,
        in_namespace: 1,
    };
    let counted = |memory: &mut TurnMemory, all: &BTreeMap<_, _>, is_own: bool| {
        let turns = count(limits, all, memory, &waiting, |_| is_own);
        (turns.count("shop"), turns.waiting.len())
    };
    assert_eq!(counted(&mut memory, &all, true), (0, 1));
    let begun = (None, Instant::now());
    memory.begun.insert(uid(&a).into(), begun);
    assert_eq!(counted(&mut memory, &all, true), (1, 1));
    assert_eq!(
        counted(&mut memory, &all, false),
        (0, 0),
        "of other drivers"
    );
    // From the time that the watch shows the prime claim, its own state counts.
    let shown = prime(&a, 0, Some("p-1"));
    all.insert(path(&shown), shown.clone());
    assert_eq!(counted(&mut memory, &all, true), (1, 1));
    assert!(memory.begun.is_empty());
    all.remove(&path(&shown));
    assert_eq!(counted(&mut memory, &all, true), (0, 1));
    // An attempt that continues: the same prime claim, until another pod is recorded.
    let state = json!({"source": "s/1", "failures": 1, "failedPod": "p-1"}).to_string();
    let mut failed = a.clone();
    failed.metadata.annotations = Some([(STATE.to_string(), state)].into());
    all.insert(path(&a), failed);
    all.insert(path(&shown), shown.clone());
    assert_eq!(counted(&mut memory, &all, true), (0, 1));
    let begun = (Some(mark(&shown)), Instant::now());
    memory.begun.insert(uid(&a).into(), begun.clone());
    assert_eq!(counted(&mut memory, &all, true), (1, 1));
    memory.give_back(uid(&a));
    assert_eq!(counted(&mut memory, &all, true), (0, 1));
    let Some(long_ago) = begun.1.checked_sub(BEGIN_INTERVAL) else {
        return;
    };
    memory.begun.insert(uid(&a).into(), (begun.0, long_ago));
    assert_eq!(counted(&mut memory, &all, true), (0, 1), "it was not done");
}
