//! A pod that has the copies, runs a check, and is deleted.

use std::time::Duration;

use kube::api::DynamicObject;
use serde_json::{Value, json};

use super::plan::Copy;
use crate::change::{Progress, create, delete, until_end};
use crate::cli::{Check, RestoreArguments, Wait};
use crate::cluster::Cluster;
use crate::failure::{Failure, Result, TIMED_OUT};
use crate::object::{self, Fields};

/// Where the volumes are in the pod, each in a directory (or as a device) with the name of the claim of
/// which its snapshot was taken.
const MOUNTS: &str = "/restored";
const DEVICES: &str = "/dev/restored";
/// The time after which a check is ended if the user has given none. The program waits as long, too: a
/// pod that no node can run has no deadline.
const DEFAULT_LIMIT: Duration = Duration::from_secs(3600);

/// What a plan says about the check.
pub fn plan(check: &Check, command: &str) -> String {
    let image = check.verify_image.as_deref().unwrap_or_default();
    match check.discard {
        false => format!(
            "A pod of the image {image} will run `{command}` with the volumes below {MOUNTS}, read-only, and is deleted then."
        ),
        true => format!(
            "A pod of the image {image} will run `{command}` with the volumes below {MOUNTS}. Then the pod and the claims are deleted."
        ),
    }
}

/// Refuses what a check could change.
pub fn refuse(check: &Check, copies: &[Copy]) -> Result<()> {
    let block = copies.iter().find(|copy| copy.mode == "Block");
    match block.filter(|_| check.verify.is_some() && !check.discard) {
        None => Ok(()),
        Some(copy) => Err(Failure::failed(format!(
            "claim {} is a raw block volume, which cannot be read-only in a pod: --verify could change it; give --discard to check copies that are deleted then",
            copy.claim
        ))),
    }
}

/// Creates the pod, waits for its end, and deletes it, also if it failed. Returns its last words.
pub async fn run(
    cluster: &Cluster,
    arguments: &RestoreArguments,
    copies: &[Copy],
    uid: &str,
) -> Result<String> {
    let (check, change) = (&arguments.check, &arguments.change);
    let limit = arguments.wait.timeout.unwrap_or(DEFAULT_LIMIT);
    let pod = manifest(check, limit, copies, uid);
    let name = pod["metadata"]["name"]
        .as_str()
        .unwrap_or_default()
        .to_string();
    let namespace = &cluster.namespace;
    // One of an earlier run that was interrupted is the same check.
    let pod = match cluster.get_one(&object::POD, namespace, &name).await? {
        Some(pod) => pod,
        None => create(cluster, change, &object::POD, namespace, pod).await?,
    };
    if change.dry_run {
        return Ok("the check is tried (server dry run)".into());
    }
    let wait = Wait {
        wait: true,
        timeout: Some(limit),
    };
    let done = until_end(&wait, "the check", || progress(cluster, &name)).await;
    let own = pod.metadata.uid.clone().unwrap_or_default();
    let deleted = delete(
        cluster,
        change,
        &object::POD,
        namespace,
        &name,
        (&own, None),
    )
    .await;
    let done = done.map_err(|failure| match failure.code {
        TIMED_OUT => Failure {
            message: "the check has not ended within --timeout (an hour, if it is not given); its pod was deleted"
                .into(),
            ..failure
        },
        _ => failure,
    })?;
    deleted.map(|()| done)
}

fn manifest(check: &Check, limit: Duration, copies: &[Copy], uid: &str) -> Value {
    let image = check.verify_image.as_deref().unwrap_or_default();
    let command = check.verify.as_deref().unwrap_or_default();
    let (mut volumes, mut mounts, mut devices) = (Vec::new(), Vec::new(), Vec::new());
    for (n, copy) in copies.iter().enumerate() {
        let name = format!("copy-{n}");
        let base = copy.snapshot.base();
        match copy.mode.as_str() {
            "Block" => {
                devices.push(json!({"name": name, "devicePath": format!("{DEVICES}/{base}")}));
            }
            _ => mounts.push(
                json!({"name": name, "mountPath": format!("{MOUNTS}/{base}"),
                "readOnly": !check.discard}),
            ),
        }
        let claim = json!({"claimName": copy.claim});
        volumes.push(json!({"name": name, "persistentVolumeClaim": claim}));
    }
    let mut context = json!({"seccompProfile": {"type": "RuntimeDefault"}});
    if let Some(user) = check.verify_user {
        context["runAsUser"] = json!(user);
        context["runAsGroup"] = json!(user);
        context["runAsNonRoot"] = json!(user != 0);
    }
    json!({
        "apiVersion": "v1",
        "kind": object::POD.kind,
        "metadata": {
            "name": format!("slackwater-verify-{uid}"),
            // A pod with a sidecar does not end.
            "labels": {"app.kubernetes.io/name": "slackwater-verify", "sidecar.istio.io/inject": "false"},
            "annotations": {"linkerd.io/inject": "disabled", "sidecar.istio.io/inject": "false"},
        },
        "spec": {
            "restartPolicy": "Never",
            "activeDeadlineSeconds": limit.as_secs().max(1),
            "automountServiceAccountToken": false,
            "enableServiceLinks": false,
            "securityContext": context,
            "containers": [{
                "name": "check",
                "image": image,
                "command": ["sh", "-c", command],
                // Its last lines are in its status, so no right to read logs is needed.
                "terminationMessagePolicy": "FallbackToLogsOnError",
                "securityContext": {"allowPrivilegeEscalation": false, "capabilities": {"drop": ["ALL"]}},
                "volumeMounts": mounts,
                "volumeDevices": devices,
            }],
            "volumes": volumes,
        },
    })
}

async fn progress(cluster: &Cluster, name: &str) -> Result<Progress> {
    let pod = cluster.get_one(&object::POD, &cluster.namespace, name);
    Ok(match pod.await? {
        Some(pod) => progress_of(&pod),
        None => Progress::Ended(Err(Failure::failed(format!(
            "pod {}/{name} was deleted before the check had ended",
            cluster.namespace
        )))),
    })
}

fn progress_of(pod: &DynamicObject) -> Progress {
    let container = pod.list("/status/containerStatuses").first();
    let state = container.map_or(&Value::Null, |container| &container["state"]);
    let text = |value: &Value| value.as_str().unwrap_or_default().trim().to_string();
    let message = text(&state["terminated"]["message"]);
    let message = match message.as_str() {
        "" => String::new(),
        message => format!(": {message}"),
    };
    match pod.text("/status/phase") {
        "Succeeded" => Progress::Ended(Ok(format!("The check succeeded{message}"))),
        "Failed" => {
            let code = state["terminated"]["exitCode"].as_i64();
            let why = match (pod.text("/status/reason"), code) {
                ("", Some(code)) => format!("exit code {code}{message}"),
                ("", None) => "its pod has no state of the container".into(),
                (reason, _) => format!("{reason}: {}", pod.text("/status/message")),
            };
            Progress::Ended(Err(Failure::failed(format!("the check failed: {why}"))))
        }
        "Running" => Progress::Running("the check runs".into()),
        _ => {
            let waiting = text(&state["waiting"]["message"]);
            let conditions = pod.conditions();
            let scheduled = conditions.iter().find(|[kind, ..]| *kind == "PodScheduled");
            let scheduled = scheduled.map_or("", |[_, _, _, message]| message);
            Progress::Running(match (waiting.as_str(), scheduled) {
                ("", "") => "the check waits for its volumes".into(),
                ("", message) | (message, _) => format!("the check waits: {message}"),
            })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ended(status: Value) -> std::result::Result<String, String> {
        let pod = json!({"metadata": {"name": "x"}, "status": status});
        match progress_of(&serde_json::from_value(pod).unwrap()) {
            Progress::Ended(result) => result.map_err(|failure| failure.message),
            Progress::Running(line) => Ok(format!("runs: {line}")),
        }
    }

    #[test]
    fn only_a_pod_that_succeeded_is_a_check_that_succeeded() {
        let container = |state: Value| json!([{"state": state}]);
        let done = |code: i64, message: &str| {
            container(json!({"terminated": {"exitCode": code, "message": message}}))
        };
        let good = ended(json!({"phase": "Succeeded", "containerStatuses": done(0, "7 tables\n")}));
        assert_eq!(good, Ok("The check succeeded: 7 tables".into()));
        let bad = ended(json!({"phase": "Failed", "containerStatuses": done(3, "torn")}));
        assert_eq!(bad, Err("the check failed: exit code 3: torn".into()));
        let late = json!({"phase": "Failed", "reason": "DeadlineExceeded", "message": "too long"});
        let message = "the check failed: DeadlineExceeded: too long";
        assert_eq!(ended(late), Err(message.into()));
        assert!(ended(json!({"phase": "Failed"})).is_err());
        for phase in ["Pending", "Running", "Unknown", ""] {
            let status = json!({"phase": phase, "containerStatuses": done(0, "")});
            let line = ended(status).unwrap();
            assert!(line.starts_with("runs: "), "{phase}: {line}");
        }
        let waits = json!({"phase": "Pending", "containerStatuses": container(json!({
            "waiting": {"reason": "ErrImagePull", "message": "no image"}}))});
        assert_eq!(ended(waits), Ok("runs: the check waits: no image".into()));
        let unscheduled = json!({"phase": "Pending", "conditions": [
            {"type": "PodScheduled", "status": "False", "message": "no node"}]});
        assert_eq!(
            ended(unscheduled),
            Ok("runs: the check waits: no node".into())
        );
    }
}
