//! The cache: what is decided while a snapshot is created, and about prime claims that were created from one.

use kube::api::DynamicObject;

use super::*;
use crate::router::kube::populators::cache::{
    CacheSeen, CachedSnapshot, ContentSeen, Key, NODE_OF, NONE, RECORD, SNAPSHOT, SOURCE_LABEL,
};

/// A cached snapshot of node-1, and whether it is being deleted.
pub(super) fn snapshot(
    name: &str,
    uid: &str,
    (created, is_leaving): (i64, bool),
    is_ready: bool,
    content: Option<String>,
) -> DynamicObject {
    let leaving = is_leaving.then(|| time(created).to_string());
    object(json!({
        "apiVersion": "snapshot.storage.k8s.io/v1", "kind": "VolumeSnapshot",
        "metadata": {"namespace": "shop", "name": name, "uid": uid,
            "labels": {SOURCE_LABEL: "s-1"}, "annotations": {NODE_OF: "node-1"},
            "creationTimestamp": time(created).to_string(), "deletionTimestamp": leaving},
        "status": {"readyToUse": is_ready, "restoreSize": "0",
            "boundVolumeSnapshotContentName": content},
    }))
}

/// Its VolumeSnapshotContent, `sc-UID`.
pub(super) fn content(uid: &str, volume: &str, record: Option<&str>) -> DynamicObject {
    let annotations = record.map(|key| json!({RECORD: key}));
    object(json!({
        "apiVersion": "snapshot.storage.k8s.io/v1", "kind": "VolumeSnapshotContent",
        "metadata": {"name": format!("sc-{uid}"), "resourceVersion": "7", "annotations": annotations},
        "spec": {"driver": DRIVER, "volumeSnapshotRef": {"uid": uid},
            "source": {"volumeHandle": volume}},
    }))
}

fn key() -> Key {
    let (kind, source) = source(1);
    Key::of((kind, &source), &claim(), "class-1", Some("node-1")).unwrap()
}

fn cache() -> CacheSeen {
    CacheSeen {
        key: key(),
        most: 2,
        snapshots: Vec::new(),
        content: None,
        is_shared: false,
        receiver: None,
    }
}

fn name() -> String {
    key().snapshot_name()
}

/// A snapshot with the name of the key, with or without its record.
fn with_snapshot(seen: &mut Seen, is_ready: bool, record: Option<&str>) {
    let named = snapshot(
        &name(),
        "sn-1",
        (-60, false),
        is_ready,
        Some("sc-sn-1".into()),
    );
    let cache = seen.cache.as_mut().unwrap();
    cache.snapshots = vec![CachedSnapshot {
        is_own: true,
        ..CachedSnapshot::read(&named)
    }];
    cache.content = Some(ContentSeen::read(&content("sn-1", "h", record)));
}

/// A claim whose pod has succeeded.
fn filled() -> Seen {
    Seen {
        cache: Some(cache()),
        ..with_pod("Succeeded", Some(0))
    }
}

/// One whose snapshot is recorded at the prime claim.
fn cut(is_ready: bool, record: Option<&str>) -> Seen {
    let mut seen = filled();
    annotate(seen.prime.as_mut().unwrap(), SNAPSHOT, Some("sn-1"));
    with_snapshot(&mut seen, is_ready, record);
    seen
}

fn others(count: usize) -> Vec<CachedSnapshot> {
    let each = (0..count).map(|number| {
        let name = format!("cache-{number}");
        let uid = format!("sn-other-{number}");
        let age = i64::try_from(number).unwrap();
        CachedSnapshot::read(&snapshot(&name, &uid, (-age, false), true, None))
    });
    each.collect()
}

#[test]
fn a_filled_volume_is_snapshotted_before_its_claim_is_bound() {
    assert_eq!(step(&filled()), Some(Step::CreateSnapshot(name())));
    // Created, and not ready.
    let mut waits = cut(false, None);
    assert_eq!(reason(&waits), "Caching");
    waits.cache.as_mut().unwrap().content = None;
    assert_eq!(reason(&waits), "Caching");
    let record = Step::RecordSnapshot("sc-sn-1".into(), Some("7".into()));
    assert_eq!(step(&cut(true, None)), Some(record));
    assert_eq!(step(&cut(true, Some(&key().to_string()))), Some(Step::Bind));
    // No other end of the pod leads there.
    for phase in ["Pending", "Running", "Failed"] {
        let mut seen = with_pod(phase, None);
        seen.cache = Some(cache());
        assert!(
            !matches!(step(&seen), Some(Step::CreateSnapshot(_))),
            "{phase}"
        );
    }
}

#[test]
fn a_snapshot_that_cannot_be_made_does_not_keep_the_claim_from_its_volume() {
    let give_up = || Some(Step::GiveUpSnapshot(name(), "sn-1".into()));
    let mut late = cut(false, None);
    late.now = time(0);
    assert_eq!(reason(&late), "Caching");
    late.now = time(1);
    assert_eq!(step(&late), give_up());
    late.cache.as_mut().unwrap().snapshots[0].is_leaving = true;
    assert_eq!(step(&late), Some(Step::Bind));
    late.cache.as_mut().unwrap().snapshots.clear();
    assert_eq!(step(&late), Some(Step::Bind));
    // It could not be created.
    let mut none = filled();
    annotate(none.prime.as_mut().unwrap(), SNAPSHOT, Some(NONE));
    assert_eq!(step(&none), Some(Step::Bind));
    let mut off = filled();
    off.cache.as_mut().unwrap().most = 0;
    assert_eq!(step(&off), Some(Step::Bind));
    // It is a snapshot of another volume.
    let mut other = cut(true, None);
    let of_another = ContentSeen::read(&content("sn-1", "h-2", None));
    other.cache.as_mut().unwrap().content = Some(of_another);
    other.now = time(1);
    assert_eq!(step(&other), give_up());
}

#[test]
fn nothing_is_cached_of_a_volume_that_another_pod_uses() {
    let mut shared = filled();
    shared.cache.as_mut().unwrap().is_shared = true;
    assert_eq!(step(&shared), Some(Step::Bind));
    for is_ready in [false, true] {
        let mut shared = cut(is_ready, None);
        shared.cache.as_mut().unwrap().is_shared = true;
        let give_up = Step::GiveUpSnapshot(name(), "sn-1".into());
        assert_eq!(step(&shared), Some(give_up));
    }
}

/// An attempt goes on when its source is changed. Then its content is not that of the key.
#[test]
fn nothing_is_cached_after_a_change_of_the_source() {
    for mut seen in [filled(), cut(true, None)] {
        seen.source = Ok(source(2));
        assert_eq!(step(&seen), Some(Step::Bind));
    }
}

#[test]
fn a_snapshot_that_is_not_recorded_at_the_prime_claim_is_not_used_and_not_replaced() {
    for record in [None, Some(key().to_string())] {
        let mut seen = filled();
        with_snapshot(&mut seen, true, record.as_deref());
        assert_eq!(step(&seen), Some(Step::Bind));
    }
    // Another one than the recorded one has the name.
    let mut other = cut(true, None);
    annotate(other.prime.as_mut().unwrap(), SNAPSHOT, Some("sn-0"));
    assert_eq!(step(&other), Some(Step::Bind));
}

#[test]
fn the_oldest_of_too_many_snapshots_is_deleted_first() {
    let mut full = filled();
    full.cache.as_mut().unwrap().snapshots = others(2);
    let oldest = Step::DeleteSnapshot("cache-1".into(), "sn-other-1".into());
    assert_eq!(step(&full), Some(oldest));
    full.cache.as_mut().unwrap().snapshots[1].is_leaving = true;
    assert_eq!(step(&full), Some(Step::CreateSnapshot(name())));
}

#[test]
fn a_claim_is_created_from_a_recorded_snapshot_or_waits_for_the_claim_that_makes_it() {
    let created = |seen: &Seen| match step(seen) {
        Some(Step::CreatePrime {
            node,
            from,
            keeps_no_snapshot,
        }) => (node, from, keeps_no_snapshot),
        other => panic!("{other:?}"),
    };
    let mut seen = Seen {
        cache: Some(cache()),
        ..seen()
    };
    let node = Some("node-1".to_string());
    assert_eq!(created(&seen), (node.clone(), None, false));
    with_snapshot(&mut seen, true, None);
    // No claim waits for the next one: there is no place for its snapshot.
    assert_eq!(
        created(&seen),
        (node.clone(), None, true),
        "without a record"
    );
    seen.cache.as_mut().unwrap().receiver = Some("first".into());
    assert_eq!(reason(&seen), "WaitForCache");
    with_snapshot(&mut seen, true, Some(&key().to_string()));
    assert_eq!(created(&seen), (node.clone(), Some(name()), false));
    let uncached = State {
        is_uncached: true,
        ..begun()
    };
    set_state(&mut seen, &uncached);
    assert_eq!(
        created(&seen),
        (node, None, true),
        "it could not be used once"
    );
}

/// A claim whose prime claim was created from the snapshot, and whose volume is there.
fn restored() -> Seen {
    let mut seen = Seen {
        cache: Some(cache()),
        ..provisioned()
    };
    with_snapshot(&mut seen, true, Some(&key().to_string()));
    let prime = seen.prime.as_mut().unwrap();
    prime.metadata.creation_timestamp = object(json!(time(-30).to_string()));
    prime.spec.as_mut().unwrap().data_source_ref = object(json!({
        "apiGroup": "snapshot.storage.k8s.io", "kind": "VolumeSnapshot", "name": name()}));
    let volume = seen.volume.as_mut().unwrap();
    volume.metadata.creation_timestamp = object(json!(time(-30).to_string()));
    seen
}

fn unbound(seen: &mut Seen) {
    let prime = seen.prime.as_mut().unwrap();
    prime.spec.as_mut().unwrap().volume_name = None;
    prime.status.as_mut().unwrap().phase = Some("Pending".into());
    seen.volume = None;
}

#[test]
fn a_volume_from_a_snapshot_is_bound_without_a_pod() {
    assert_eq!(step(&restored()), Some(Step::Bind));
    let mut waits = restored();
    unbound(&mut waits);
    assert_eq!(reason(&waits), "Provisioning");
    // Afterwards, as after a pod.
    let mut bound = restored();
    bind_to(&mut bound, "data", "c-1");
    assert_eq!(reason(&bound), "Binding");
    set_bound(&mut bound.claim, "pv-1");
    assert_eq!(step(&bound), Some(Step::DeletePrime));
}

/// The claim is filled by a pod then, at once, and does not count as failed.
#[test]
fn a_snapshot_that_is_not_certainly_the_source_of_the_volume_is_given_up() {
    #[track_caller]
    fn given_up(seen: &Seen) {
        let state = failure(seen);
        let what = (state.given_up.as_deref(), state.is_uncached, state.failures);
        assert_eq!(what, (Some("q-1"), true, 0));
        let mut next = seen.clone();
        set_state(&mut next, &state);
        next.pod = PodSeen::Absent;
        assert_eq!(step(&next), Some(Step::DeletePrime));
        next.prime = None;
        let again = matches!(step(&next), Some(Step::CreatePrime { from: None, .. }));
        assert!(again, "{:?}", step(&next));
    }
    let changes: [fn(&mut Seen); 7] = [
        |seen| seen.cache = None,
        |seen| seen.cache.as_mut().unwrap().snapshots.clear(),
        |seen| with_snapshot(seen, true, None),
        // It was created after the volume: a user has replaced it.
        |seen| seen.cache.as_mut().unwrap().snapshots[0].created_at = time(-30),
        |seen| {
            let spec = seen.prime.as_mut().unwrap().spec.as_mut().unwrap();
            spec.data_source_ref.as_mut().unwrap().name = "mine".into();
        },
        |seen| seen.prime.as_mut().unwrap().metadata.creation_timestamp = None,
        |seen| seen.pod = PodSeen::Here(Box::new(pod("p-1", "Succeeded", Some(0)))),
    ];
    for change in changes {
        for is_bound in [true, false] {
            let mut seen = restored();
            change(&mut seen);
            if !is_bound {
                unbound(&mut seen);
            }
            given_up(&seen);
        }
    }
    // The node lacks space, or nothing happens.
    let mut given_back = restored();
    unbound(&mut given_back);
    annotate(given_back.prime.as_mut().unwrap(), SELECTED_NODE, None);
    given_up(&given_back);
    let mut late = restored();
    unbound(&mut late);
    late.now = time(270);
    assert_eq!(reason(&late), "Provisioning");
    late.now = time(271);
    // Another claim would wait for it as long.
    let give_up = Step::GiveUpSnapshot(name(), "sn-1".into());
    assert_eq!(step(&late), Some(give_up));
    late.cache.as_mut().unwrap().snapshots[0].is_leaving = true;
    given_up(&late);
    late.volume = restored().volume;
    set_bound(late.prime.as_mut().unwrap(), "pv-1");
    assert_eq!(step(&late), Some(Step::Bind), "its volume is there");
}

#[test]
fn only_a_volume_that_was_created_for_the_prime_claim_is_bound() {
    let mut old = restored();
    let volume = old.volume.as_mut().unwrap();
    volume.metadata.creation_timestamp = object(json!(time(-31).to_string()));
    assert!(failure(&old).is_uncached);
    old.volume.as_mut().unwrap().metadata.creation_timestamp = None;
    assert!(failure(&old).is_uncached);
    // A user has created the prime claim from something else.
    for (group, namespace) in [
        ("example.com", None),
        ("snapshot.storage.k8s.io", Some("bank")),
    ] {
        let mut other = restored();
        other
            .prime
            .as_mut()
            .unwrap()
            .spec
            .as_mut()
            .unwrap()
            .data_source_ref = object(json!({
            "apiGroup": group, "kind": "VolumeSnapshot", "name": name(), "namespace": namespace}));
        assert_eq!(step(&other), Some(Step::DeletePrime), "{group}");
    }
    // A snapshot that is being deleted is still the one that was recorded.
    let mut leaving = restored();
    leaving.cache.as_mut().unwrap().snapshots[0].is_leaving = true;
    assert_eq!(step(&leaving), Some(Step::Bind));
}

#[test]
fn a_snapshot_that_a_user_has_recorded_at_the_prime_claim_is_deleted() {
    let mut seen = cut(true, None);
    seen.cache.as_mut().unwrap().snapshots[0].is_own = false;
    let delete = Step::DeleteSnapshot(name(), "sn-1".into());
    assert_eq!(step(&seen), Some(delete));
}

#[test]
fn what_is_cached_on_a_node_without_space_is_deleted_before_the_node_is_given_back() {
    let mut seen = provisioned();
    unbound(&mut seen);
    annotate(seen.prime.as_mut().unwrap(), SELECTED_NODE, None);
    seen.cache = Some(cache());
    assert_eq!(step(&seen), Some(Step::DropNode));
    seen.cache.as_mut().unwrap().snapshots = others(2);
    let room = Step::MakeRoom {
        name: "cache-1".into(),
        uid: "sn-other-1".into(),
        node: "node-1".into(),
    };
    assert_eq!(step(&seen), Some(room));
    let mut again = seen.clone();
    annotate(again.prime.as_mut().unwrap(), SNAPSHOT, Some(NONE));
    assert_eq!(step(&again), Some(Step::DropNode), "once is enough");
    for one in &mut seen.cache.as_mut().unwrap().snapshots {
        one.node = Some("node-2".into());
    }
    assert_eq!(step(&seen), Some(Step::DropNode));
}
