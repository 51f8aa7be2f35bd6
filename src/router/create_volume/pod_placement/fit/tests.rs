//! Each condition of the scheduler that is evaluated, and those that are not.

use serde_json::{Value, json};

use super::*;

fn node() -> Value {
    json!({
        "metadata": {"name": "a", "labels": {"disk": "ssd", "rank": "5"}},
        "spec": {"taints": [{"key": "soft", "effect": "PreferNoSchedule"}]},
        "status": {
            "conditions": [{"type": "Ready", "status": "True"}],
            "allocatable": {"cpu": "4", "memory": "8Gi", "pods": "3"},
        },
    })
}

fn pod() -> Value {
    json!({
        "metadata": {"name": "db-0", "namespace": "shop", "labels": {"app": "db"}},
        "spec": {"containers": [
            {"name": "db", "resources": {"requests": {"cpu": "1", "memory": "4Gi"}}},
        ]},
    })
}

/// A pod on the node.
fn other() -> Value {
    json!({
        "metadata": {"name": "web", "namespace": "shop"},
        "spec": {"nodeName": "a", "containers": [
            {"name": "web", "resources": {"requests": {"cpu": "2500m", "memory": "1Gi"}}},
        ]},
        "status": {"phase": "Running"},
    })
}

fn volume() -> Value {
    affine(&json!([{"matchExpressions": [{"key": "disk", "operator": "In", "values": ["ssd"]}]}]))
}

fn affine(terms: &Value) -> Value {
    json!({"metadata": {"name": "pv"}, "spec": {"nodeAffinity": {"required": {
        "nodeSelectorTerms": terms}}}})
}

/// What is examined: pod, volume, node, and the other pod.
type Case = [Value; 4];

fn examine([pod, volume, node, other]: &Case) -> Fit {
    let read = |value: &Value| serde_json::from_value(value.clone());
    let pod = serde_json::from_value(pod.clone()).unwrap();
    let volume = serde_json::from_value(volume.clone()).unwrap();
    let node = serde_json::from_value(node.clone()).unwrap();
    fits(&pod, &[volume], &node, (&[read(other).unwrap()], None))
}

fn case() -> Case {
    [pod(), volume(), node(), other()]
}

fn changed(which: usize, path: &str, value: Value) -> Case {
    let mut case = case();
    let (parent, key) = path.rsplit_once('/').unwrap();
    case[which].pointer_mut(parent).unwrap()[key] = value;
    case
}

const POD: usize = 0;
const NODE: usize = 2;
const OTHER: usize = 3;

#[track_caller]
fn is_against(which: usize, path: &str, value: Value, why: &str) {
    let found = examine(&changed(which, path, value)).unwrap_err();
    assert!(found.contains(why), "{path}: {found}");
}

#[track_caller]
fn is_fine(which: usize, path: &str, value: Value) {
    assert_eq!(examine(&changed(which, path, value)), Ok(()), "{path}");
}

#[test]
fn a_pod_that_fits_may_run() {
    assert_eq!(examine(&case()), Ok(()));
}

#[test]
fn a_node_must_be_ready_and_not_cordoned() {
    let ready = |status: &str| json!([{"type": "Ready", "status": status}]);
    is_against(NODE, "/status/conditions", ready("False"), "not Ready");
    is_against(NODE, "/status/conditions", ready("Unknown"), "not Ready");
    is_against(NODE, "/status/conditions", json!([]), "not Ready");
    is_against(NODE, "/spec/unschedulable", json!(true), "cordoned");
    is_fine(NODE, "/spec/unschedulable", json!(false));
}

#[test]
fn taints_must_be_tolerated() {
    for effect in ["NoSchedule", "NoExecute"] {
        let tainted = json!([{"key": "gpu", "value": "yes", "effect": effect}]);
        is_against(NODE, "/spec/taints", tainted.clone(), "taint gpu");
        for (toleration, is_enough) in [
            (
                json!({"key": "gpu", "value": "yes", "effect": effect}),
                true,
            ),
            (
                json!({"key": "gpu", "operator": "Equal", "value": "yes"}),
                true,
            ),
            (json!({"key": "gpu", "operator": "Exists"}), true),
            (json!({"operator": "Exists"}), true),
            (json!({"key": "gpu", "value": "no"}), false),
            (json!({"key": "other", "operator": "Exists"}), false),
            (
                json!({"key": "gpu", "operator": "Exists", "effect": "PreferNoSchedule"}),
                false,
            ),
            (
                json!({"key": "gpu", "operator": "Later", "value": "yes"}),
                false,
            ),
        ] {
            let mut case = changed(NODE, "/spec/taints", tainted.clone());
            case[POD]["spec"]["tolerations"] = json!([toleration]);
            assert_eq!(examine(&case).is_ok(), is_enough, "{toleration}");
        }
    }
}

#[test]
fn node_selectors_and_required_node_affinity_must_match() {
    is_fine(POD, "/spec/nodeSelector", json!({"disk": "ssd"}));
    is_against(
        POD,
        "/spec/nodeSelector",
        json!({"disk": "hdd"}),
        "node selector",
    );
    is_against(
        POD,
        "/spec/nodeSelector",
        json!({"zone": "1"}),
        "node selector",
    );
    let expression = |key: &str, operator: &str, values: &[&str]| json!([{"matchExpressions": [{"key": key, "operator": operator, "values": values}]}]);
    let name = |name: &str| json!([{"matchFields": [{"key": "metadata.name", "operator": "In", "values": [name]}]}]);
    for (terms, matches) in [
        (expression("disk", "In", &["hdd", "ssd"]), true),
        (expression("disk", "In", &["hdd"]), false),
        (expression("disk", "NotIn", &["hdd"]), true),
        (expression("zone", "NotIn", &["1"]), true),
        (expression("disk", "NotIn", &["ssd"]), false),
        (expression("disk", "Exists", &[]), true),
        (expression("zone", "Exists", &[]), false),
        (expression("zone", "DoesNotExist", &[]), true),
        (expression("disk", "DoesNotExist", &[]), false),
        (expression("rank", "Gt", &["4"]), true),
        (expression("rank", "Gt", &["5"]), false),
        (expression("rank", "Lt", &["6"]), true),
        (expression("rank", "Lt", &["5"]), false),
        (expression("disk", "Near", &["ssd"]), false),
        (name("a"), true),
        (name("b"), false),
        (json!([{}]), false),
        (
            json!([{}, {"matchExpressions": [{"key": "disk", "operator": "Exists"}]}]),
            true,
        ),
    ] {
        let required = json!({"nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}});
        let of_pod = examine(&changed(POD, "/spec/affinity", required));
        assert_eq!(of_pod.is_ok(), matches, "{terms}: {of_pod:?}");
        let mut case = case();
        case[1] = affine(&terms);
        let of_volume = examine(&case);
        assert_eq!(of_volume.is_ok(), matches, "{terms}: {of_volume:?}");
    }
}

#[test]
fn conditions_about_other_pods_are_not_evaluated() {
    let term = json!([{"topologyKey": "kubernetes.io/hostname", "labelSelector": {}}]);
    let required =
        |kind: &str| json!({kind: {"requiredDuringSchedulingIgnoredDuringExecution": term}});
    is_against(
        POD,
        "/spec/affinity",
        required("podAffinity"),
        "required pod affinity",
    );
    is_against(
        POD,
        "/spec/affinity",
        required("podAntiAffinity"),
        "required pod anti-affinity",
    );
    let preferred = json!({"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [
        {"weight": 1, "podAffinityTerm": term[0]}]}});
    is_fine(POD, "/spec/affinity", preferred);
    let spread =
        |then: &str| json!([{"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": then}]);
    is_against(
        POD,
        "/spec/topologySpreadConstraints",
        spread("DoNotSchedule"),
        "spread",
    );
    is_fine(
        POD,
        "/spec/topologySpreadConstraints",
        spread("ScheduleAnyway"),
    );
    is_against(
        POD,
        "/spec/resourceClaims",
        json!([{"name": "gpu"}]),
        "resource claims",
    );
    let ports = json!([{"containerPort": 80, "hostPort": 80}]);
    is_against(POD, "/spec/containers/0/ports", ports, "host ports");
    is_against(POD, "/spec/nodeName", json!("b"), "another node");
    is_fine(POD, "/spec/nodeName", json!("a"));
}

#[test]
fn a_pod_on_the_node_may_not_allow_the_pod_beside_it() {
    let apart = |term: Value| json!({"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}});
    let key = "kubernetes.io/hostname";
    let ours = json!({"matchLabels": {"app": "db"}});
    for (term, is_apart) in [
        (json!({"topologyKey": key, "labelSelector": ours}), true),
        (json!({"topologyKey": key, "labelSelector": {}}), true),
        (
            json!({"topologyKey": key, "labelSelector": {"matchLabels": {"app": "web"}}}),
            false,
        ),
        (
            json!({"topologyKey": key, "labelSelector": {"matchExpressions": [
            {"key": "app", "operator": "NotIn", "values": ["web"]}]}}),
            true,
        ),
        (
            json!({"topologyKey": key, "labelSelector": ours, "namespaces": ["other"]}),
            false,
        ),
        (
            json!({"topologyKey": key, "labelSelector": ours, "namespaces": ["shop"]}),
            true,
        ),
        (
            json!({"topologyKey": key, "labelSelector": ours, "namespaceSelector": {}}),
            true,
        ),
        (json!({"topologyKey": key}), false),
    ] {
        let found = examine(&changed(OTHER, "/spec/affinity", apart(term.clone())));
        assert_eq!(found.is_err(), is_apart, "{term}");
    }
    let mut ended = changed(
        OTHER,
        "/spec/affinity",
        apart(json!({"topologyKey": key, "labelSelector": ours})),
    );
    ended[OTHER]["status"]["phase"] = json!("Succeeded");
    assert_eq!(examine(&ended), Ok(()));
}

#[test]
fn everything_that_the_pod_requests_must_be_free() {
    let requests = "/spec/containers/0/resources/requests";
    is_fine(POD, requests, json!({"cpu": "1500m", "memory": "7Gi"}));
    is_against(POD, requests, json!({"cpu": "1501m"}), "little cpu");
    is_against(POD, requests, json!({"memory": "7.1Gi"}), "little memory");
    is_against(
        POD,
        requests,
        json!({"example.com/gpu": "1"}),
        "example.com/gpu",
    );
    is_fine(POD, requests, json!({"example.com/gpu": "0"}));
    is_against(POD, requests, json!({"cpu": "much"}), "not a quantity");
    is_against(POD, "/spec/overhead", json!({"cpu": "1"}), "little cpu");
    is_against(
        POD,
        "/spec/resources",
        json!({"requests": {"cpu": "2"}}),
        "little cpu",
    );
    is_against(NODE, "/status/allocatable/pods", json!("1"), "little pods");
    // A pod that has ended occupies nothing.
    let mut ended = changed(POD, requests, json!({"cpu": "4"}));
    ended[OTHER]["status"]["phase"] = json!("Failed");
    assert_eq!(examine(&ended), Ok(()));
}

#[test]
fn init_containers_run_one_after_the_other_beside_their_sidecars() {
    let init = |cpu: &str, policy: Option<&str>| json!({"name": "i", "restartPolicy": policy, "resources": {"requests": {"cpu": cpu}}});
    let inits = "/spec/initContainers";
    is_fine(
        POD,
        inits,
        json!([init("1500m", None), init("1500m", None)]),
    );
    is_against(POD, inits, json!([init("1600m", None)]), "little cpu");
    // A sidecar runs beside the containers and beside later init containers.
    is_fine(
        POD,
        inits,
        json!([init("500m", Some("Always")), init("1", None)]),
    );
    is_against(
        POD,
        inits,
        json!([init("600m", Some("Always"))]),
        "little cpu",
    );
    is_against(
        POD,
        inits,
        json!([init("500m", Some("Always")), init("1100m", None)]),
        "little cpu",
    );
    is_fine(
        POD,
        inits,
        json!([init("1100m", None), init("500m", Some("Always"))]),
    );
}
