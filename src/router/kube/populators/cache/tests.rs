//! Keys, which snapshots are used, and which claim receives content for others.

use serde_json::json;

use super::super::source::SourceSpec;
use super::super::state::{CLAIM_LABEL, STATE};
use super::*;

const DRIVER: &str = "csi.slackwater.dev";

fn object<T: serde::de::DeserializeOwned>(value: Value) -> T {
    serde_json::from_value(value).unwrap()
}

fn time(seconds: i64) -> Timestamp {
    Timestamp::from_second(1_800_000_000 + seconds).unwrap()
}

fn source() -> Source {
    let mut source: Source = object(json!({
        "metadata": {"namespace": "shop", "name": "base", "uid": "s-1", "generation": 1}}));
    source.spec = SourceSpec {
        url: Some("https://images.example/base.img".into()),
        sha256: Some("0A".repeat(32)),
        cache: Some("node".into()),
        ..SourceSpec::default()
    };
    source
}

fn claim(number: usize) -> PersistentVolumeClaim {
    object(json!({
        "metadata": {"namespace": "shop", "name": format!("data-{number}"),
            "uid": format!("c-{number}"), "annotations": {SELECTED_NODE: "node-1"}},
        "spec": {"storageClassName": "local", "accessModes": ["ReadWriteOnce"],
            "resources": {"requests": {"storage": "10Gi"}},
            "dataSourceRef": {"apiGroup": "slackwater.dev", "kind": "HttpSource", "name": "base"}},
        "status": {"phase": "Pending"},
    }))
}

fn prime_of(claim: &PersistentVolumeClaim, seconds: i64) -> PersistentVolumeClaim {
    object(json!({
        "metadata": {"namespace": "shop", "name": format!("prime-{}", uid(claim)), "uid": "q",
            "creationTimestamp": time(seconds).to_string(),
            "labels": {CLAIM_LABEL: uid(claim)},
            "annotations": {SELECTED_NODE: "node-1", SOURCE: "s-1/1"},
            "ownerReferences": [{"apiVersion": "v1", "kind": "PersistentVolumeClaim",
                "name": claim.name_any(), "uid": uid(claim)}]},
    }))
}

fn key(source: &Source, claim: &PersistentVolumeClaim) -> Option<Key> {
    Key::of((Kind::Http, source), claim, "class-1", Some("node-1"))
}

#[test]
fn a_key_differs_in_everything_that_makes_another_content() {
    let own = key(&source(), &claim(1)).unwrap();
    assert_eq!(
        Some(&own),
        key(&source(), &claim(2)).as_ref(),
        "of another claim"
    );
    let name = own.snapshot_name();
    assert!(
        name.len() == 46 && own.to_string().starts_with(&name[6..]),
        "{name}"
    );

    let mut moved = source();
    moved.spec.url = Some("https://mirror.example/base.img".into());
    moved.spec.sha256 = Some("0a".repeat(32));
    moved.metadata.generation = Some(2);
    let from_a_mirror = key(&moved, &claim(1));
    assert_eq!(
        from_a_mirror.as_ref(),
        Some(&own),
        "the same bytes from elsewhere"
    );

    let changes: [fn(&mut Source); 7] = [
        |source| source.metadata.uid = Some("s-2".into()),
        |source| source.spec.sha256 = Some("0b".repeat(32)),
        |source| source.spec.format = Some("raw".into()),
        |source| source.spec.file_name = Some("base.img".into()),
        |source| source.spec.preserve_owners = true,
        |source| source.spec.owner = Some(object(json!({"uid": 1000, "gid": 1000}))),
        |source| source.spec.owner = Some(object(json!({"uid": 1000, "gid": 1001}))),
    ];
    let mut all = vec![own.to_string()];
    for change in changes {
        let mut other = source();
        change(&mut other);
        all.push(key(&other, &claim(1)).unwrap().to_string());
    }
    let mut block = claim(1);
    block.spec.as_mut().unwrap().volume_mode = Some("Block".into());
    all.push(key(&source(), &block).unwrap().to_string());
    for (class, node) in [
        ("class-2", Some("node-1")),
        ("class-1", Some("node-2")),
        ("class-1", None),
    ] {
        let other = Key::of((Kind::Http, &source()), &claim(1), class, node);
        all.push(other.unwrap().to_string());
    }
    let count = all.len();
    all.sort();
    all.dedup();
    assert_eq!(all.len(), count);
}

#[test]
fn only_content_with_a_digest_of_the_own_namespace_is_cached() {
    let changes: [fn(&mut Source); 5] = [
        |source| source.spec.cache = None,
        |source| source.spec.cache = Some("cluster".into()),
        |source| source.spec.sha256 = None,
        |source| source.spec.unverified = true,
        |source| source.metadata.namespace = Some("bank".into()),
    ];
    for change in changes {
        let mut other = source();
        change(&mut other);
        assert_eq!(key(&other, &claim(1)), None, "{:?}", other.spec);
    }
    let image = |image: &str, path: Option<&str>, platform: Option<&str>| {
        let mut image_source = source();
        image_source.spec.sha256 = None;
        image_source.spec.image = Some(image.into());
        image_source.spec.path = path.map(str::to_string);
        image_source.spec.platform =
            platform.map(|one| object(json!({"os": "linux", "architecture": one})));
        Key::of(
            (Kind::Oci, &image_source),
            &claim(1),
            "class-1",
            Some("node-1"),
        )
    };
    let digest = format!("registry.example/base@sha256:{}", "0a".repeat(32));
    let tagged = digest.replace('@', ":1@");
    assert_eq!(
        image("registry.example/base:1", None, None),
        None,
        "a tag alone"
    );
    assert!(image(&digest, None, None).is_some());
    assert_eq!(image(&digest, None, None), image(&tagged, None, None));
    assert_ne!(
        image(&digest, None, None),
        image(&digest, Some("disk"), None)
    );
    assert_ne!(
        image(&digest, None, Some("amd64")),
        image(&digest, None, Some("arm64"))
    );
}

/// A ready snapshot with a recorded VolumeSnapshotContent.
fn cached(key: &Key) -> (Value, Value) {
    let name = key.snapshot_name();
    let snapshot = json!({
        "apiVersion": "snapshot.storage.k8s.io/v1", "kind": "VolumeSnapshot",
        "metadata": {"namespace": "shop", "name": name, "uid": "sn-1",
            "creationTimestamp": time(0).to_string(), "labels": {SOURCE_LABEL: "s-1"},
            "annotations": {NODE_OF: "node-1"}},
        "status": {"readyToUse": true, "restoreSize": "10Gi", "boundVolumeSnapshotContentName": "sc-1"},
    });
    let content = json!({
        "apiVersion": "snapshot.storage.k8s.io/v1", "kind": "VolumeSnapshotContent",
        "metadata": {"name": "sc-1", "uid": "x", "annotations": {RECORD: key.to_string()}},
        "spec": {"driver": DRIVER, "volumeSnapshotRef": {"uid": "sn-1"},
            "source": {"volumeHandle": "h"}},
    });
    (snapshot, content)
}

fn seen(key: &Key, snapshot: Value, content: Value) -> CacheSeen {
    CacheSeen {
        key: key.clone(),
        most: 2,
        snapshots: vec![CachedSnapshot::read(&object(snapshot))],
        content: Some(ContentSeen::read(&object(content))),
        is_shared: false,
        receiver: None,
    }
}

#[test]
fn only_a_snapshot_whose_content_has_the_record_is_used() {
    let key = key(&source(), &claim(1)).unwrap();
    let (snapshot, content) = cached(&key);
    let is_used = |snapshot: &Value, content: &Value, claim: &PersistentVolumeClaim| {
        let seen = seen(&key, snapshot.clone(), content.clone());
        seen.find_usable(claim, DRIVER).is_some()
    };
    assert!(is_used(&snapshot, &content, &claim(1)));
    let with = |object: &Value, pointer: &str, value: Value| {
        let mut object = object.clone();
        *object.pointer_mut(pointer).unwrap() = value;
        object
    };
    for (pointer, value) in [
        ("/metadata/name", json!("cache-other")),
        ("/metadata/uid", json!("sn-2")),
        ("/status/readyToUse", json!(false)),
        ("/status/restoreSize", json!("11Gi")),
        ("/status/restoreSize", Value::Null),
        ("/status/boundVolumeSnapshotContentName", json!("sc-2")),
        (
            "/metadata",
            with(&snapshot, "/metadata/labels", Value::Null)["metadata"].clone(),
        ),
    ] {
        let is_label = pointer == "/metadata";
        let other = with(&snapshot, pointer, value);
        assert_eq!(is_used(&other, &content, &claim(1)), is_label, "{pointer}");
    }
    let mut leaving = snapshot.clone();
    leaving["metadata"]["deletionTimestamp"] = json!(time(1).to_string());
    assert!(!is_used(&leaving, &content, &claim(1)));
    for (pointer, value) in [
        ("/spec/driver", json!("other.example")),
        ("/spec/volumeSnapshotRef/uid", json!("sn-2")),
        ("/metadata/annotations", json!({})),
        ("/metadata/annotations", json!({RECORD: "0".repeat(64)})),
        ("/metadata/name", json!("sc-2")),
    ] {
        let other = with(&content, pointer, value);
        assert!(!is_used(&snapshot, &other, &claim(1)), "{pointer}");
    }
    let sized = |size: &str| {
        let mut other = claim(1);
        let spec = other.spec.as_mut().unwrap();
        spec.resources = Some(object(json!({"requests": {"storage": size}})));
        is_used(&snapshot, &content, &other)
    };
    assert!(sized("20Gi") && sized("10Gi") && !sized("9Gi"));
}

/// The claim for which the first one waits.
fn found(claims: Vec<PersistentVolumeClaim>, seconds: i64) -> Option<String> {
    let (source, own) = (source(), claim(1));
    let named = claims
        .into_iter()
        .map(|one| (format!("shop/{}", one.name_any()), one));
    let same = |claim: &PersistentVolumeClaim, _: &PersistentVolumeClaim| {
        key(&source, claim) == key(&source, &own)
    };
    find_receiver(&named.collect(), &own, &source, time(seconds), same)
}

fn other() -> (PersistentVolumeClaim, PersistentVolumeClaim) {
    (claim(2), prime_of(&claim(2), 0))
}

#[test]
fn a_claim_waits_for_another_one_that_receives_the_same_for_itself() {
    let own = claim(1);
    let pair = |(claim, prime)| vec![claim, prime];
    assert_eq!(found(pair(other()), 599), Some("data-2".into()));
    assert_eq!(found(pair(other()), 600), None, "without progress");
    assert_eq!(found(vec![claim(2)], 1), None, "it has not begun");
    assert_eq!(
        found(vec![own.clone(), prime_of(&own, 0)], 1),
        None,
        "its own attempt"
    );

    let (mut receives, prime) = other();
    let state = |state: &State| [(STATE.to_string(), serde_json::to_string(state).unwrap())].into();
    let progress = State {
        progress_at: Some(k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(time(
            300,
        ))),
        ..State::default()
    };
    receives.metadata.annotations = Some(state(&progress));
    assert!(found(vec![receives.clone(), prime.clone()], 899).is_some());
    assert!(found(vec![receives.clone(), prime.clone()], 900).is_none());
    let given_up = State {
        given_up: Some("q".into()),
        ..progress
    };
    receives.metadata.annotations = Some(state(&given_up));
    assert_eq!(found(vec![receives, prime], 301), None);
}

#[test]
fn a_claim_does_not_wait_for_other_content_or_for_what_has_ended() {
    type Change = fn(&mut PersistentVolumeClaim, &mut PersistentVolumeClaim);
    let changes: [Change; 8] = [
        |claim, _| {
            claim
                .spec
                .as_mut()
                .unwrap()
                .data_source_ref
                .as_mut()
                .unwrap()
                .name = "b".into();
        },
        |claim, _| claim.spec.as_mut().unwrap().volume_mode = Some("Block".into()),
        |claim, _| {
            let spec = claim.spec.as_mut().unwrap();
            spec.resources = Some(object(json!({"requests": {"storage": "11Gi"}})));
        },
        |claim, _| claim.metadata.deletion_timestamp = object(json!(time(0).to_string())),
        |_, prime| prime.metadata.deletion_timestamp = object(json!(time(0).to_string())),
        |_, prime| prime.metadata.labels = None,
        |_, prime| {
            let annotations = prime.metadata.annotations.as_mut().unwrap();
            annotations.insert(SOURCE.into(), "s-1/0".into());
        },
        |_, prime| {
            let from = json!({"dataSourceRef": {"kind": "VolumeSnapshot", "name": "cache-x"}});
            prime.spec = object(from);
        },
    ];
    for (number, change) in changes.into_iter().enumerate() {
        let (mut claim, mut prime) = other();
        change(&mut claim, &mut prime);
        assert_eq!(found(vec![claim, prime], 1), None, "change {number}");
    }
}

#[test]
fn one_claim_begins_to_receive_content_and_another_one_if_nothing_is_seen_of_it() {
    let mut memory = CacheMemory::default();
    let start = Instant::now();
    assert!(memory.begins("cache-a", "c-1", start));
    assert!(!memory.begins("cache-a", "c-2", start));
    assert!(memory.begins("cache-b", "c-2", start));
    assert!(memory.begins("cache-a", "c-1", start + BEGIN_INTERVAL / 2));
    assert!(memory.begins("cache-a", "c-2", start + BEGIN_INTERVAL));
}

/// The watch shows a prime claim late, and passes over all claims go on in the meantime.
#[test]
fn of_a_thousand_claims_at_once_one_receives_the_content_for_all() {
    let (source, mut memory) = (source(), CacheMemory::default());
    let (clock, claims) = (Instant::now(), (1..=1000).map(claim).collect::<Vec<_>>());
    let path = |one: &PersistentVolumeClaim| (format!("shop/{}", one.name_any()), one.clone());
    let mut watched: BTreeMap<_, _> = claims.iter().map(path).collect();
    let mut pass = |watched: &BTreeMap<_, _>, seconds: i64| {
        let now = clock + Duration::from_secs(seconds.unsigned_abs());
        let begins = |own: &&PersistentVolumeClaim| {
            let own_key = key(&source, own);
            let same = |other: &PersistentVolumeClaim, _: &PersistentVolumeClaim| {
                key(&source, other) == own_key
            };
            let waits = find_receiver(watched, own, &source, time(seconds), same).is_some();
            let name = own_key.clone().unwrap().snapshot_name();
            !waits && memory.begins(&name, uid(*own), now)
        };
        claims
            .iter()
            .filter(begins)
            .map(|one| one.name_any())
            .collect::<Vec<_>>()
    };
    for seconds in 0..25 {
        assert_eq!(pass(&watched, seconds), ["data-1"], "after {seconds} s");
    }
    // Its next step is another one, because it has a prime claim now.
    let (prime_path, prime) = path(&prime_of(&claims[0], 0));
    watched.insert(prime_path.clone(), prime);
    for seconds in (25..600).step_by(25) {
        let others = pass(&watched, seconds);
        assert!(
            others.iter().all(|name| name == "data-1"),
            "{others:?} after {seconds} s"
        );
    }
    // Its attempt has failed, and one claim begins again.
    watched.remove(&prime_path);
    watched.remove("shop/data-1");
    let claims_left = pass(&watched, 700);
    assert_eq!(claims_left.len(), 1, "{claims_left:?}");
}

#[test]
fn after_a_failure_no_claim_of_the_namespace_waits() {
    let mut memory = CacheMemory::default();
    let start = Instant::now();
    memory.set_broken("shop", start);
    assert!(memory.is_broken("shop", start) && !memory.is_broken("bank", start));
    assert!(!memory.is_broken("shop", start + BROKEN_INTERVAL));
}

#[test]
fn the_snapshot_that_was_not_used_for_the_longest_time_is_deleted_first() {
    let key = key(&source(), &claim(1)).unwrap();
    let (snapshot, content) = cached(&key);
    let mut seen = seen(&key, snapshot, content);
    let mut newer = seen.snapshots[0].clone();
    newer.uid = "sn-2".into();
    newer.name = "cache-2".into();
    newer.created_at = time(5);
    newer.node = Some("node-2".into());
    seen.snapshots.insert(0, newer);
    let oldest = |seen: &CacheSeen, node| seen.find_oldest(node).map(|one| one.uid.clone());
    assert_eq!(oldest(&seen, None).as_deref(), Some("sn-1"));
    assert_eq!(oldest(&seen, Some("node-2")).as_deref(), Some("sn-2"));
    assert_eq!(oldest(&seen, Some("node-3")), None);
    let mut memory = CacheMemory::default();
    memory.set_used("shop", "sn-1", time(9));
    memory.fill_in("shop", &mut seen.snapshots);
    assert_eq!(oldest(&seen, None).as_deref(), Some("sn-2"));
    memory.set_snapshots("shop", &seen.snapshots);
    memory.set_snapshots("bank", &seen.snapshots[..1]);
    assert_eq!(memory.count(), 3);
    memory.retain_namespaces(|one| one == "bank");
    assert_eq!(memory.count(), 1);
    memory.set_snapshots("bank", &[]);
    assert_eq!(memory.count(), 0);
    assert!(!seen.snapshots[0].is_own);
    memory.set_created("shop", &seen.snapshots[0].uid, Instant::now());
    memory.fill_in("shop", &mut seen.snapshots);
    assert!(seen.snapshots[0].is_own && !seen.snapshots[1].is_own);
    assert!(seen.is_full());
    seen.snapshots[0].is_leaving = true;
    assert!(!seen.is_full());
}
