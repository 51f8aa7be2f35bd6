//! Sources of other namespaces: what a ReferenceGrant allows, and what happens when it is removed. First with
//! a small API server, then with the real one and its feature gate.

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use slackwater::router::kube::reconcile::lease::Pace;
use slackwater::router::populators::{PopulatorOptions, Populators, Settings};
use slackwater::telemetry::Metrics;

use super::{Fixture, IMAGE};
use crate::kube::api::{DRIVER, eventually};
use crate::kube::kubelet::ApiServer;

const GATES: &[&str] = &["CrossNamespaceVolumeDataSource"];
const GRANTS: &str = "/apis/gateway.networking.k8s.io/v1beta1/namespaces/images/referencegrants";
const CLAIMS: &str = "/api/v1/namespaces/shop/persistentvolumeclaims";
const PODS: &str = "/api/v1/namespaces/shop/pods";
const SOURCE: &str = "/apis/slackwater.dev/v1alpha1/namespaces/images/httpsources/base";

fn list(api: &ApiServer, path: &str, kind: &str, items: Value) {
    api.put(
        path,
        json!({"kind": format!("{kind}List"), "apiVersion": "v1",
            "metadata": {"resourceVersion": "1"}, "items": items}),
    );
}

fn claim() -> Value {
    json!({"apiVersion": "v1", "kind": "PersistentVolumeClaim",
        "metadata": {"name": "data", "namespace": "shop", "uid": "c-1",
            "annotations": {"volume.kubernetes.io/selected-node": "node-1"}},
        "spec": {"storageClassName": "local", "accessModes": ["ReadWriteOnce"],
            "resources": {"requests": {"storage": "1Gi"}},
            "dataSourceRef": {"apiGroup": "slackwater.dev", "kind": "HttpSource",
                "name": "base", "namespace": "images"}},
        "status": {"phase": "Pending"}})
}

fn source() -> Value {
    json!({"apiVersion": "slackwater.dev/v1alpha1", "kind": "HttpSource",
        "metadata": {"name": "base", "namespace": "images", "uid": "s-1", "generation": 1},
        "spec": {"url": "https://images.example/base.img", "unverified": true}})
}

fn grant(from: &str) -> Value {
    json!({"apiVersion": "gateway.networking.k8s.io/v1beta1", "kind": "ReferenceGrant",
        "metadata": {"name": "claims", "namespace": "images"},
        "spec": {
            "from": [{"group": "", "kind": "PersistentVolumeClaim", "namespace": from}],
            "to": [{"group": "slackwater.dev", "kind": "HttpSource", "name": "base"}]}})
}

/// A claim of namespace shop that names a source of namespace images.
fn prepared() -> ApiServer {
    let api = ApiServer::new();
    api.put(&format!("{CLAIMS}/data"), claim());
    api.put(SOURCE, source());
    let claims = "/api/v1/persistentvolumeclaims";
    list(&api, claims, "PersistentVolumeClaim", json!([claim()]));
    let class = json!({"metadata": {"name": "local", "uid": "class-1"}, "provisioner": DRIVER,
        "volumeBindingMode": "WaitForFirstConsumer"});
    let classes = "/apis/storage.k8s.io/v1/storageclasses";
    list(&api, classes, "StorageClass", json!([class]));
    for (plural, kind, items) in [
        ("httpsources", "HttpSource", json!([source()])),
        ("ocisources", "OciSource", json!([])),
        ("s3sources", "S3Source", json!([])),
    ] {
        list(
            &api,
            &format!("/apis/slackwater.dev/v1alpha1/{plural}"),
            kind,
            items,
        );
    }
    let slices = "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices";
    list(&api, slices, "EndpointSlice", json!([]));
    api
}

fn start(api: &ApiServer) -> Arc<Populators> {
    let options = PopulatorOptions {
        poll_interval: Duration::from_millis(100),
        pace: Pace {
            every: Duration::from_millis(100),
            ..Pace::default()
        },
        ..PopulatorOptions::new(Settings::new(DRIVER, IMAGE), "slackwater", "populators-a")
    };
    let client = api.client();
    let _inside = api.runtime.enter();
    Populators::start(client, options, Arc::new(Metrics::new()))
}

/// How many changes have this method and path, and this text.
fn changes(api: &ApiServer, method: &str, path: &str, text: &str) -> usize {
    let objects = api.objects.lock().unwrap();
    let is_it = |(m, p, body): &&(String, String, Value)| {
        m == method && p.contains(path) && body.to_string().contains(text)
    };
    objects.changes.iter().filter(is_it).count()
}

/// Whether the status of the source has the claim, for its owner.
fn is_shown(api: &ApiServer) -> bool {
    let objects = api.objects.lock().unwrap();
    let mut all = objects.changes.iter().rev();
    let last = all.find(|(_, path, _)| *path == format!("{SOURCE}/status"));
    last.is_some_and(|(_, _, body)| body.to_string().contains("\"data\""))
}

/// The provisioner creates the volume of the prime claim, and the binder binds it.
fn provision(api: &ApiServer) {
    let mut objects = api.objects.lock().unwrap();
    let prime = objects.at.get_mut(&format!("{CLAIMS}/prime-c-1")).unwrap();
    prime["spec"]["volumeName"] = json!("pv-1");
    prime["status"] = json!({"phase": "Bound"});
    let uid = prime["metadata"]["uid"].clone();
    objects.at.insert(
        "/api/v1/persistentvolumes/pv-1".into(),
        json!({"apiVersion": "v1", "kind": "PersistentVolume",
            "metadata": {"name": "pv-1", "uid": "v-1"},
            "spec": {"csi": {"driver": DRIVER, "volumeHandle": "h"},
                "claimRef": {"namespace": "shop", "name": "prime-c-1", "uid": uid}}}),
    );
}

#[test]
fn a_source_of_another_namespace_is_used_while_it_is_granted() {
    let api = prepared();
    let populators = start(&api);
    let kind = "ReferenceGrant";
    eventually("the cluster has no ReferenceGrants", || {
        changes(&api, "POST", "/events", "\"NotGranted\"") == 1
    });
    list(&api, GRANTS, kind, json!([grant("bank")]));
    let asked = api.asked(GRANTS);
    eventually("the grant of another namespace is read twice", || {
        api.asked(GRANTS) > asked + 2
    });
    assert_eq!(changes(&api, "POST", CLAIMS, "prime"), 0);
    assert_eq!(changes(&api, "PATCH", &format!("{CLAIMS}/data"), ""), 0);
    assert!(!is_shown(&api), "it is not allowed to write there");

    list(&api, GRANTS, kind, json!([grant("shop")]));
    eventually("the prime claim is created", || {
        changes(&api, "POST", CLAIMS, "prime-c-1") == 1
    });
    eventually("the owner of the source sees the claim", || is_shown(&api));
    // It is removed before there is a pod.
    list(&api, GRANTS, kind, json!([]));
    provision(&api);
    eventually("it is refused again", || !is_shown(&api));
    assert_eq!(changes(&api, "POST", PODS, ""), 0);
    list(&api, GRANTS, kind, json!([grant("shop")]));
    let record = "slackwater.dev/populate-pod\":\"uid-";
    let prime = format!("{CLAIMS}/prime-c-1");
    eventually("the pod is created and recorded", || {
        changes(&api, "PATCH", &prime, record) == 1
    });

    // It is removed after the attempt has begun, which ends as it would have.
    list(&api, GRANTS, kind, json!([]));
    let asked = api.asked(GRANTS);
    eventually("it is read that there is no grant", || {
        api.asked(GRANTS) > asked + 2
    });
    {
        let mut objects = api.objects.lock().unwrap();
        let pod = objects.at.get_mut(&format!("{PODS}/prime-c-1")).unwrap();
        pod["status"] = json!({"phase": "Succeeded"});
    }
    eventually("the volume is bound to the claim", || {
        changes(&api, "PATCH", "/persistentvolumes/pv-1", "\"c-1\"") == 1
    });
    assert_eq!(changes(&api, "POST", PODS, ""), 1);
    api.runtime.block_on(populators.shut_down());
}

/// What the controller uses of ReferenceGrants, whose definition is in the Gateway API.
const CRD: &str = r#"{
    "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
    "metadata": {"name": "referencegrants.gateway.networking.k8s.io",
        "annotations": {"api-approved.kubernetes.io": "unapproved, for a test"}},
    "spec": {"group": "gateway.networking.k8s.io", "scope": "Namespaced",
        "names": {"kind": "ReferenceGrant", "plural": "referencegrants"},
        "versions": [{"name": "v1beta1", "served": true, "storage": true,
            "schema": {"openAPIV3Schema": {"type": "object",
                "x-kubernetes-preserve-unknown-fields": true}}}]}}"#;

/// The owner of namespace shop allows the controller.
pub fn allow(fixture: &Fixture) {
    let role = "slackwater-populators-namespace";
    let words = [
        "create",
        "rolebinding",
        role,
        "-n",
        "shop",
        "--clusterrole",
        role,
    ];
    let account = "--serviceaccount=slackwater:slackwater-populators";
    fixture.plane.kubectl(&[&words[..], &[account]].concat());
}

#[test]
fn a_real_api_server_with_the_feature_gate_passes_the_namespace_on() {
    let what = "sources of other namespaces";
    let Some(fixture) = Fixture::with(what, GATES) else {
        return;
    };
    let Fixture {
        plane, populators, ..
    } = &fixture;
    plane.apply(CRD);
    let crd = "crd/referencegrants.gateway.networking.k8s.io";
    plane.kubectl(&["wait", "--for=condition=Established", crd]);
    plane.kubectl(&["create", "namespace", "images"]);
    allow(&fixture);
    let mut source = source();
    let fields = source["metadata"].as_object_mut().unwrap();
    fields.retain(|key, _| ["name", "namespace"].contains(&key.as_str()));
    plane.apply(&source.to_string());
    let mut claim = claim();
    claim["metadata"].as_object_mut().unwrap().remove("uid");
    claim.as_object_mut().unwrap().remove("status");
    plane.apply(&claim.to_string());
    assert_eq!(
        fixture.get("pvc/data", ".spec.dataSourceRef.namespace"),
        "images"
    );
    eventually("the claim is refused", || {
        let message = fixture.events("data", "NotGranted");
        message
            .contains("namespace images has no ReferenceGrant that allows claims of namespace shop")
    });
    let prime = format!("prime-{}", fixture.get("pvc/data", ".metadata.uid"));
    assert!(fixture.is_gone(&format!("pvc/{prime}")));

    plane.apply(&grant("shop").to_string());
    eventually("the prime claim is created", || {
        !fixture.is_gone(&format!("pvc/{prime}"))
    });
    let revoke = ["delete", "referencegrant", "claims", "-n", "images"];
    plane.kubectl(&revoke);
    fixture.provision(&prime);
    eventually("it is refused again", || {
        let path = "jsonpath={.status.claims[*].name}";
        let words = ["get", "httpsource/base", "-n", "images", "-o", path];
        plane.kubectl(&words).is_empty()
    });
    assert!(fixture.is_gone(&format!("pod/{prime}")));
    plane.apply(&grant("shop").to_string());
    fixture.wait_for_pod(&prime);
    plane.kubectl(&revoke);
    fixture.end_pod(&prime, "Succeeded", 0, "");
    eventually("the claim is bound", || {
        fixture.get("pvc/data", ".status.phase") == "Bound"
    });
    plane.runtime.block_on(populators.shut_down());
}
