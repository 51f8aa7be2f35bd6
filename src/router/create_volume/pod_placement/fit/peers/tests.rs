//! Two zones with two nodes each: a and b in east, c and d in west.

use serde_json::{Value, json};

use super::*;
use crate::router::create_volume::pod_placement::fit::fits;

const NODES: [(&str, &str); 4] = [("a", "east"), ("b", "east"), ("c", "west"), ("d", "west")];

fn node(name: &str, zone: &str) -> Node {
    let node = json!({
        "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name, "zone": zone}},
        "status": {
            "conditions": [{"type": "Ready", "status": "True"}],
            "allocatable": {"pods": "10"},
        },
    });
    serde_json::from_value(node).unwrap()
}

fn pod(name: &str, app: &str, spec: Value) -> Pod {
    let mut all = json!({"containers": []});
    all.as_object_mut()
        .unwrap()
        .extend(spec.as_object().unwrap().clone());
    let pod = json!({
        "metadata": {"name": name, "namespace": "shop", "labels": {"app": app, "set": "new"}},
        "spec": all, "status": {"phase": "Running"},
    });
    serde_json::from_value(pod).unwrap()
}

fn term(app: &str, key: &str) -> Value {
    json!({"topologyKey": key, "labelSelector": {"matchLabels": {"app": app}}})
}

fn required(kind: &str, term: Value) -> Value {
    json!({"affinity": {kind: {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}})
}

fn spread(key: &str, more: Value) -> Value {
    let mut constraint = json!({"maxSkew": 1, "whenUnsatisfiable": "DoNotSchedule",
        "topologyKey": key, "labelSelector": {"matchLabels": {"app": "db"}}});
    constraint
        .as_object_mut()
        .unwrap()
        .extend(more.as_object().unwrap().clone());
    json!({"topologySpreadConstraints": [constraint]})
}

/// The nodes on which a pod could be, and the reason of the first on which it could not.
fn examine(pod: &Pod, others: &[(Pod, &str)]) -> (String, String) {
    let peers = Peers {
        pods: others
            .iter()
            .map(|(pod, node)| (pod.clone(), node.to_string()))
            .collect(),
        nodes: NODES
            .map(|(name, zone)| (name.to_string(), node(name, zone)))
            .into(),
    };
    let (mut allowed, mut why) = (String::new(), String::new());
    for (name, node) in &peers.nodes {
        match fits(pod, &[], node, (&[], Some(&peers))) {
            Ok(()) => allowed += name,
            Err(reason) if why.is_empty() => why = reason,
            Err(_) => {}
        }
    }
    (allowed, why)
}

fn allowed(spec: Value, others: &[(Pod, &str)]) -> String {
    examine(&pod("db-0", "db", spec), others).0
}

fn db(name: &str) -> Pod {
    pod(name, "db", json!({}))
}

const HOST: &str = "kubernetes.io/hostname";

#[test]
fn a_pod_keeps_away_from_pods_that_its_anti_affinity_means() {
    let apart = |key| required("podAntiAffinity", term("db", key));
    assert_eq!(allowed(apart(HOST), &[]), "abcd");
    assert_eq!(allowed(apart(HOST), &[(db("db-1"), "a")]), "bcd");
    assert_eq!(allowed(apart("zone"), &[(db("db-1"), "a")]), "cd");
    let web = pod("web", "web", json!({}));
    assert_eq!(allowed(apart("zone"), &[(web, "a")]), "abcd");
    let mut ended = db("db-1");
    ended.status.as_mut().unwrap().phase = Some("Succeeded".into());
    assert_eq!(allowed(apart(HOST), &[(ended, "a")]), "abcd");
    // Of another namespace, unless that is named, or all are.
    let mut foreign = db("db-1");
    foreign.metadata.namespace = Some("other".into());
    let at_a = [(foreign, "a")];
    assert_eq!(allowed(apart(HOST), &at_a), "abcd");
    for (key, value) in [
        ("namespaces", json!(["other"])),
        ("namespaceSelector", json!({})),
    ] {
        let mut named = term("db", HOST);
        named[key] = value;
        assert_eq!(
            allowed(required("podAntiAffinity", named), &at_a),
            "bcd",
            "{key}"
        );
    }
    let why = examine(&pod("db-0", "db", apart(HOST)), &[(db("db-1"), "a")]).1;
    assert!(
        why.contains("db-1") && why.contains("anti-affinity"),
        "{why}"
    );
}

#[test]
fn a_pod_keeps_away_from_pods_whose_anti_affinity_means_it() {
    for (key, expected) in [(HOST, "bcd"), ("zone", "cd")] {
        let other = pod("lone", "lone", required("podAntiAffinity", term("db", key)));
        // Only a pod with a condition of its own is examined with the others.
        assert_eq!(allowed(json!({}), &[(other, "a")]), expected);
    }
    let other = pod(
        "lone",
        "lone",
        required("podAntiAffinity", term("web", HOST)),
    );
    assert_eq!(allowed(json!({}), &[(other, "a")]), "abcd");
}

#[test]
fn a_pod_stays_with_the_pods_that_its_affinity_means() {
    let with = |app, key| required("podAffinity", term(app, key));
    let web = || pod("web", "web", json!({}));
    assert_eq!(allowed(with("web", HOST), &[(web(), "c")]), "c");
    assert_eq!(allowed(with("web", "zone"), &[(web(), "c")]), "cd");
    assert_eq!(allowed(with("web", HOST), &[]), "");
    // The first one of a group that means itself.
    assert_eq!(allowed(with("db", HOST), &[]), "abcd");
    assert_eq!(allowed(with("db", HOST), &[(db("db-1"), "d")]), "d");
    assert_eq!(allowed(with("web", "rack"), &[(web(), "c")]), "");
    let why = examine(&pod("db-0", "db", with("web", "rack")), &[]).1;
    assert!(why.contains("label rack"), "{why}");
}

#[test]
fn what_is_not_evaluated_is_a_reason() {
    let mut by_labels = term("db", HOST);
    by_labels["namespaceSelector"] = json!({"matchLabels": {"team": "a"}});
    let mut by_keys = term("db", HOST);
    by_keys["matchLabelKeys"] = json!(["set"]);
    for term in [by_labels, by_keys] {
        for kind in ["podAffinity", "podAntiAffinity"] {
            let (allowed, why) = examine(&pod("db-0", "db", required(kind, term.clone())), &[]);
            assert_eq!(allowed, "");
            assert!(why.contains("not evaluated"), "{why}");
        }
    }
    let taints = spread(HOST, json!({"nodeTaintsPolicy": "Honor"}));
    assert_eq!(allowed(taints, &[]), "");
    let soft = spread(
        HOST,
        json!({"whenUnsatisfiable": "ScheduleAnyway", "nodeTaintsPolicy": "Honor"}),
    );
    assert_eq!(allowed(soft, &[]), "abcd");
}

#[test]
fn a_spread_constraint_allows_the_domains_with_the_fewest_pods() {
    let one = [(db("db-1"), "a")];
    let two = [(db("db-1"), "a"), (db("db-2"), "c")];
    assert_eq!(allowed(spread(HOST, json!({})), &one), "bcd");
    assert_eq!(allowed(spread("zone", json!({})), &one), "cd");
    assert_eq!(allowed(spread("zone", json!({})), &two), "abcd");
    assert_eq!(allowed(spread("zone", json!({"maxSkew": 2})), &one), "abcd");
    // More domains are wanted than there are, so the fewest pods of a domain count as none.
    assert_eq!(allowed(spread("zone", json!({"minDomains": 3})), &two), "");
    assert_eq!(
        allowed(spread("zone", json!({"minDomains": 2})), &two),
        "abcd"
    );
    // One without the constraint's label does not count itself.
    let own = pod("x", "x", spread("zone", json!({})));
    assert_eq!(examine(&own, &one).0, "abcd");
    // Pods that leave, and pods of an older generation, do not count.
    let mut leaving = db("db-1");
    leaving.metadata.deletion_timestamp =
        serde_json::from_value(json!("2026-01-02T00:00:00Z")).unwrap();
    assert_eq!(
        allowed(spread("zone", json!({})), &[(leaving, "a")]),
        "abcd"
    );
    let mut old = db("db-1");
    old.metadata
        .labels
        .as_mut()
        .unwrap()
        .insert("set".into(), "old".into());
    let keys = json!({"matchLabelKeys": ["set"]});
    assert_eq!(
        allowed(spread("zone", json!({})), &[(old.clone(), "a")]),
        "cd"
    );
    assert_eq!(allowed(spread("zone", keys), &[(old, "a")]), "abcd");
}

#[test]
fn nodes_that_the_pod_cannot_use_are_no_domains_unless_the_constraint_says_so() {
    // Only a and b: a has one pod more than b, and c and d have none.
    let mut only_east = spread(HOST, json!({}));
    only_east["nodeSelector"] = json!({"zone": "east"});
    let others = [(db("db-1"), "a"), (db("db-2"), "b")];
    assert_eq!(allowed(only_east.clone(), &others), "ab");
    only_east["topologySpreadConstraints"][0]["nodeAffinityPolicy"] = json!("Ignore");
    assert_eq!(allowed(only_east, &others), "");
}
