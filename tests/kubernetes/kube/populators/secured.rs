//! Pods under the profiles of Pod Security that a namespace may enforce, with the real API server.

use serde_json::{Value, json};

use super::{Fixture, granted};
use crate::kube::api::eventually;

const LABEL: &str = "pod-security.kubernetes.io/enforce";

fn enforce(fixture: &Fixture, level: &str) {
    let label = format!("{LABEL}={level}");
    let words = ["label", "namespace", "shop", &label, "--overwrite"];
    fixture.plane.kubectl(&words);
}

fn source(fixture: &Fixture, name: &str, more: &Value) {
    let mut spec = json!({"url": "https://images.example/base.tar", "unverified": true});
    for (key, value) in more.as_object().unwrap() {
        spec[key] = value.clone();
    }
    fixture.plane.apply(
        &json!({"apiVersion": "slackwater.dev/v1alpha1", "kind": "HttpSource",
            "metadata": {"name": name, "namespace": "shop"}, "spec": spec})
        .to_string(),
    );
}

/// A claim whose volume is created. Returns its prime claim.
fn provisioned(fixture: &Fixture, name: &str, from: &str) -> String {
    fixture.create_claim(name, "local", from);
    fixture.select_node(name, Some("node-1"));
    let uid = fixture.get(&format!("pvc/{name}"), ".metadata.uid");
    let prime = format!("prime-{uid}");
    eventually("the prime claim is created", || {
        !fixture.is_gone(&format!("pvc/{prime}"))
    });
    fixture.provision(&prime);
    prime
}

#[test]
fn preserve_owners_needs_the_baseline_profile_and_says_so() {
    let Some(fixture) = Fixture::with("the profiles of Pod Security", &[]) else {
        return;
    };
    let Fixture {
        plane, populators, ..
    } = &fixture;
    granted::allow(&fixture);
    enforce(&fixture, "restricted");
    source(&fixture, "base", &json!({"preserveOwners": true}));
    source(
        &fixture,
        "plain",
        &json!({"owner": {"uid": 1000, "gid": 1000}}),
    );
    let prime = provisioned(&fixture, "data", "base");
    let field = ".status.conditions[?(@.type==\"Proceeding\")]";
    eventually("the condition says what is needed", || {
        let message = fixture.source(&format!("{field}.message"));
        message.contains("violates PodSecurity \"restricted")
            && message.contains("the baseline profile of Pod Security")
    });
    assert_eq!(fixture.source(&format!("{field}.status")), "False");
    assert_eq!(fixture.source(&format!("{field}.reason")), "StepFailed");
    assert!(fixture.is_gone(&format!("pod/{prime}")));
    let events = fixture.events("data", "StepFailed");
    assert!(events.contains("the baseline profile"), "{events}");
    // Others need less.
    let plain = provisioned(&fixture, "plain", "plain");
    fixture.wait_for_pod(&plain);

    enforce(&fixture, "baseline");
    fixture.wait_for_pod(&prime);
    let pod = plane.kubectl(&["get", "pod", &prime, "-n", "shop", "-o", "json"]);
    let pod: Value = serde_json::from_str(&pod).unwrap();
    let container = &pod["spec"]["containers"][0]["securityContext"];
    let expected = json!({"allowPrivilegeEscalation": false, "readOnlyRootFilesystem": true,
        "capabilities": {"drop": ["ALL"], "add": ["CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID"]}});
    assert_eq!(*container, expected);
    let of_pod = json!({"runAsNonRoot": false, "runAsUser": 0, "runAsGroup": 0, "fsGroup": 0,
        "seccompProfile": {"type": "RuntimeDefault"}});
    assert_eq!(pod["spec"]["securityContext"], of_pod);
    eventually("the condition is True", || {
        fixture.source(&format!("{field}.status")) == "True"
    });
    plane.runtime.block_on(populators.shut_down());
}
