//! The cache, with the real snapshot controller. The test does the work of csi-snapshotter.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::{CACHE_CLASS, Fixture};
use crate::kube::api::eventually;

/// Claims of one source that are created at once.
const CLAIMS: usize = 20;

fn claims() -> impl Iterator<Item = String> {
    (1..=CLAIMS).map(|number| format!("twin-{number}"))
}

fn prime_of(fixture: &Fixture, claim: &str) -> String {
    let uid = fixture.get(&format!("pvc/{claim}"), ".metadata.uid");
    format!("prime-{uid}")
}

/// Creates all of them with one request of the user, for a pod of the same node.
fn create(fixture: &Fixture) {
    let claim = |name: String| {
        json!({"apiVersion": "v1", "kind": "PersistentVolumeClaim",
            "metadata": {"name": name, "namespace": "shop",
                "annotations": {"volume.kubernetes.io/selected-node": "node-1"}},
            "spec": {"storageClassName": "local", "accessModes": ["ReadWriteOnce"],
                "resources": {"requests": {"storage": "1Gi"}},
                "dataSourceRef": {"apiGroup": "slackwater.dev", "kind": "HttpSource",
                    "name": "cached"}}})
    };
    let items: Vec<Value> = claims().map(claim).collect();
    let list = json!({"apiVersion": "v1", "kind": "List", "items": items});
    fixture.plane.apply(&list.to_string());
}

/// Those of the claims that have a prime claim.
fn begun(fixture: &Fixture) -> Vec<String> {
    let path = "jsonpath={range .items[*]}{.metadata.name}={.metadata.uid} {end}";
    let all = fixture
        .plane
        .kubectl(&["get", "pvc", "-n", "shop", "-o", path]);
    let all: BTreeMap<&str, &str> = all
        .split_whitespace()
        .filter_map(|one| one.split_once('='))
        .collect();
    let has_prime = |claim: &String| {
        let uid = all.get(claim.as_str());
        uid.is_some_and(|uid| all.contains_key(format!("prime-{uid}").as_str()))
    };
    claims().filter(has_prime).collect()
}

fn reasons(fixture: &Fixture) -> String {
    fixture.get("httpsource/cached", ".status.claims[*].reason")
}

/// The snapshots with the label of the cache, by a field.
fn snapshots(fixture: &Fixture, field: &str) -> String {
    let path = format!("jsonpath={{.items[*]{field}}}");
    let label = "--selector=slackwater.dev/cache";
    let words = ["get", "volumesnapshots", "-n", "shop", label, "-o", &path];
    fixture.plane.kubectl(&words)
}

/// Creates the snapshot as the driver does.
fn cut(fixture: &Fixture, content: &str) {
    let status = json!({"status": {"readyToUse": true, "restoreSize": 1_073_741_824,
        "snapshotHandle": "snapshot-1", "creationTime": 1_800_000_000_000_000_000_i64}});
    let (name, status) = (
        format!("volumesnapshotcontent/{content}"),
        status.to_string(),
    );
    let words = [
        "patch",
        &name,
        "--type=merge",
        "--subresource=status",
        "-p",
        &status,
    ];
    fixture.plane.kubectl(&words);
}

/// Twenty claims of one source are created at once. One is filled by a pod, and the others from its snapshot.
pub fn twenty_claims_receive_content_once(fixture: &Fixture) {
    fixture.plane.apply(
        &json!({"apiVersion": "slackwater.dev/v1alpha1", "kind": "HttpSource",
            "metadata": {"name": "cached", "namespace": "shop"},
            "spec": {"url": "https://images.example/base.img", "sha256": "0a".repeat(32),
                "cache": "node"}})
        .to_string(),
    );
    create(fixture);
    eventually("one begins, and the others wait", || {
        begun(fixture).len() == 1 && reasons(fixture).matches("WaitForCache").count() == CLAIMS - 1
    });
    let first = &begun(fixture)[0];
    let prime = prime_of(fixture, first);
    let volume = fixture.provision(&prime);
    fixture.wait_for_pod(&prime);
    assert_eq!(
        snapshots(fixture, ".metadata.name"),
        "",
        "before the pod has ended"
    );
    fixture.end_pod(&prime, "Succeeded", 0, "");
    let mut content = String::new();
    eventually("the volume is snapshotted", || {
        content = snapshots(fixture, ".status.boundVolumeSnapshotContentName");
        !content.is_empty()
    });
    assert_eq!(
        fixture.get(&format!("pvc/{first}"), ".status.phase"),
        "Pending"
    );
    let source = fixture.get("httpsource/cached", ".metadata.uid");
    let labels = snapshots(fixture, ".metadata.labels");
    assert!(
        labels.contains(&source) && labels.contains("managed-by"),
        "{labels}"
    );
    assert_eq!(
        snapshots(fixture, ".spec.volumeSnapshotClassName"),
        CACHE_CLASS
    );
    let of = fixture.get(
        &format!("volumesnapshotcontent/{content}"),
        ".spec.source.volumeHandle",
    );
    let handle = fixture.get(&format!("pv/{volume}"), ".spec.csi.volumeHandle");
    assert_eq!(of, handle);
    cut(fixture, &content);
    eventually("the first claim is bound", || {
        fixture.get(&format!("pvc/{first}"), ".status.phase") == "Bound"
    });
    let record = r".metadata.annotations.slackwater\.dev/cache-key";
    let record = fixture.get(&format!("volumesnapshotcontent/{content}"), record);
    assert_eq!(record.len(), 64, "{record:?}");
    from_the_snapshot(fixture, first);
    let text = fixture.metrics.render().unwrap();
    assert!(
        text.contains(&format!(
            "slackwater_population_cache_hits_total {}\n",
            CLAIMS - 1
        )),
        "{text}"
    );
    assert!(
        text.contains("slackwater_population_cache_snapshots 1"),
        "{text}"
    );
    is_deleted_with_the_field(fixture);
}

fn from_the_snapshot(fixture: &Fixture, first: &str) {
    let snapshot = snapshots(fixture, ".metadata.name");
    for claim in &claims().filter(|claim| claim != first).collect::<Vec<_>>() {
        let prime = prime_of(fixture, claim);
        eventually("the prime claim names the snapshot", || {
            fixture.get(&format!("pvc/{prime}"), ".spec.dataSource.name") == snapshot
        });
        // The controller may delete the prime claim before it is seen as bound.
        fixture.provision(&prime);
        eventually("the claim is bound", || {
            fixture.get(&format!("pvc/{claim}"), ".status.phase") == "Bound"
        });
        assert!(
            fixture.events(claim, "Populating").is_empty(),
            "no pod was there"
        );
        eventually("nothing is left", || {
            fixture.is_gone(&format!("pvc/{prime}")) && fixture.is_gone(&format!("pod/{prime}"))
        });
    }
}

fn is_deleted_with_the_field(fixture: &Fixture) {
    let none = json!({"spec": {"cache": null}});
    fixture.patch("httpsource/cached", &none, &[]);
    eventually(
        "the snapshot is deleted with the field of its source",
        || {
            let names = snapshots(fixture, ".metadata.name");
            names.is_empty() || !snapshots(fixture, ".metadata.deletionTimestamp").is_empty()
        },
    );
}

/// Objects for the policies: a snapshot as the controller creates it, and a VolumeSnapshotContent.
pub fn snapshot() -> Value {
    json!({"apiVersion": "snapshot.storage.k8s.io/v1", "kind": "VolumeSnapshot",
        "metadata": {"name": "cache-0", "namespace": "shop", "labels": {"slackwater.dev/cache": "u"},
            "ownerReferences": [{"apiVersion": "slackwater.dev/v1alpha1", "kind": "HttpSource",
                "name": "base", "uid": "u"}]},
        "spec": {"volumeSnapshotClassName": CACHE_CLASS,
            "source": {"persistentVolumeClaimName": "prime-0"}}})
}

pub fn content(name: &str, driver: &str, snapshot: &str) -> Value {
    json!({"apiVersion": "snapshot.storage.k8s.io/v1", "kind": "VolumeSnapshotContent",
        "metadata": {"name": name},
        "spec": {"driver": driver, "deletionPolicy": "Retain", "source": {"volumeHandle": "h"},
            "volumeSnapshotRef": {"namespace": "shop", "name": snapshot, "uid": "u"}}})
}
