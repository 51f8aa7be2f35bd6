//! A pod that has the copies, runs a check, and is deleted.

use std::cell::Cell;
use std::time::Duration;

use kube::api::DynamicObject;
use serde_json::{Value, json};

use super::plan::Copy;
use crate::change::{Progress, create, delete, until_end};
use crate::cli::{Change, Check, RestoreArguments, Wait};
use crate::cluster::Cluster;
use crate::cluster::object::{self, Fields};
use crate::failure::{Failure, Result, TIMED_OUT};
use crate::text::{after_colon, escaped};

/// Where the volumes are in the pod, each in a directory (or as a device) with the name of the claim of
/// which its snapshot was taken.
const MOUNTS: &str = "/restored";
const DEVICES: &str = "/dev/restored";
/// The annotation of the pod with the UIDs of the claims, and whether they are writable.
const CHECK: &str = "slackwater.dev/check";
/// The time after which a check is ended if the user has given none. [`run`] waits as long, too: a pod
/// that no node can run has no deadline.
const DEFAULT_LIMIT: Duration = Duration::from_secs(3600);

/// The check, in a sentence of the plan.
pub fn plan(check: &Check) -> String {
    let image = check.verify_image.as_deref().unwrap_or_default();
    let command = check.verify.as_deref().unwrap_or_default();
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
            "claim {} is a raw block volume, which cannot be read-only in a pod: --verify could change it; check copies that are deleted then, with --discard and without --to-namespace",
            copy.claim
        ))),
    }
}

/// Lets the API server check the pod before the first claim is created: a policy of the namespace may
/// refuse it.
pub async fn check_with_dry_run(
    cluster: &Cluster,
    arguments: &RestoreArguments,
    copies: &[Copy],
) -> Result<()> {
    if arguments.check.verify.is_none() {
        return Ok(());
    }
    let mut pod = manifest(&arguments.check, DEFAULT_LIMIT, copies);
    // Claims that do not exist yet have no UID, and a pod of an earlier run may have the real name.
    pod["metadata"]["name"] = json!("slackwater-verify-new");
    create(
        cluster,
        &Change::DRY_RUN,
        &object::POD,
        &cluster.namespace,
        pod,
    )
    .await?;
    Ok(())
}

/// Creates the pod, waits for its end, and deletes it, also if it failed. Returns the last line of the progress.
pub async fn run(
    cluster: &Cluster,
    arguments: &RestoreArguments,
    copies: &[Copy],
) -> Result<String> {
    let (check, change) = (&arguments.check, &arguments.change);
    let limit = arguments.wait.timeout.unwrap_or(DEFAULT_LIMIT);
    let pod = manifest(check, limit, copies);
    let name = name(copies);
    let namespace = &cluster.namespace;
    // One of an earlier run that was interrupted can be the same check.
    let pod = match cluster.find_one(&object::POD, namespace, &name).await? {
        Some(found) if is_same_check(&found, &pod) => found,
        Some(_) => return Err(other_check(namespace, &name)),
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
    let own = pod.uid();
    let deleted = delete(cluster, change, &object::POD, namespace, &name, (own, None)).await;
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

/// One step of a check, which is repeated until the end: creates the pod, waits for its end, or deletes
/// it then. A pod of an earlier run that was interrupted can be the same check.
async fn step(
    cluster: &Cluster,
    arguments: &RestoreArguments,
    copies: &[Copy],
) -> Result<Progress> {
    let limit = arguments.wait.timeout.unwrap_or(DEFAULT_LIMIT);
    let (pod, name) = (manifest(&arguments.check, limit, copies), name(copies));
    let (namespace, change) = (&cluster.namespace, &arguments.change);
    let Some(found) = cluster.find_one(&object::POD, namespace, &name).await? else {
        create(cluster, change, &object::POD, namespace, pod).await?;
        return Ok(Progress::Running("the check waits for its volumes".into()));
    };
    if found.is_being_deleted() {
        let line = format!("pod {namespace}/{name} of an earlier check is being deleted");
        return Ok(Progress::Running(line));
    }
    if !is_same_check(&found, &pod) {
        return Err(other_check(namespace, &name));
    }
    let progress = progress_of(&found);
    if let Progress::Ended(_) = progress {
        let which = (found.uid(), None);
        delete(cluster, change, &object::POD, namespace, &name, which).await?;
    }
    Ok(progress)
}

/// Takes one [`step`], and records in `is_checked` that the check has succeeded. `None` if it has.
pub async fn until_success(
    cluster: &Cluster,
    arguments: &RestoreArguments,
    copies: &[Copy],
    is_checked: &Cell<bool>,
) -> Result<Option<Progress>> {
    Ok(match step(cluster, arguments, copies).await? {
        Progress::Ended(Ok(line)) => {
            eprintln!("{}", escaped(&line));
            is_checked.set(true);
            None
        }
        other => Some(other),
    })
}

fn other_check(namespace: &str, name: &str) -> Failure {
    Failure::failed(format!(
        "pod {namespace}/{name} is of another check of these claims, or is being deleted: delete it, and run the command again when it is gone"
    ))
}

/// The name of the pod.
pub fn name(copies: &[Copy]) -> String {
    let uid = copies.first().map_or("", |copy| copy.uid.as_str());
    format!("slackwater-verify-{uid}")
}

/// Whether a pod that exists is the same check of the same claims.
fn is_same_check(found: &DynamicObject, pod: &Value) -> bool {
    let volumes = |volumes: &[Value]| -> Vec<_> {
        // Admission plugins can add others.
        let of_claims = volumes
            .iter()
            .filter(|it| !it["persistentVolumeClaim"].is_null());
        let claim = |it: &Value| {
            let claim = it["persistentVolumeClaim"]["claimName"].clone();
            (it["name"].clone(), claim)
        };
        of_claims.map(claim).collect()
    };
    let container = &pod["spec"]["containers"][0];
    let other = found.list("/spec/containers").first();
    let other = other.unwrap_or(&Value::Null);
    let wanted = pod["spec"]["volumes"].as_array();
    !found.is_being_deleted()
        && pod["metadata"]["annotations"][CHECK] == found.annotation(CHECK)
        && ["image", "command"]
            .iter()
            .all(|key| container[key] == other[key])
        && found.at("/spec/securityContext/runAsUser")
            == &pod["spec"]["securityContext"]["runAsUser"]
        && volumes(found.list("/spec/volumes")) == volumes(wanted.map_or(&[], Vec::as_slice))
}

fn manifest(check: &Check, limit: Duration, copies: &[Copy]) -> Value {
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
    let uids: Vec<_> = copies.iter().map(|copy| copy.uid.as_str()).collect();
    let what = json!({"discard": check.discard, "claims": uids}).to_string();
    json!({
        "apiVersion": "v1",
        "kind": object::POD.kind,
        "metadata": {
            "name": name(copies),
            // A pod with a sidecar does not end.
            "labels": {"app.kubernetes.io/name": "slackwater-verify", "sidecar.istio.io/inject": "false"},
            "annotations": {"linkerd.io/inject": "disabled", "sidecar.istio.io/inject": "false", CHECK: what},
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
    let pod = cluster.find_one(&object::POD, &cluster.namespace, name);
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
    let message = after_colon(&message);
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
    fn only_a_pod_of_the_same_check_is_used_again() {
        let check = |more: &[&str]| {
            use clap::Parser;
            let words = [
                "x",
                "restore",
                "s",
                "--verify",
                "true",
                "--verify-image",
                "i",
            ];
            match crate::cli::Cli::parse_from(words.iter().chain(more)).command {
                crate::cli::Command::Restore(arguments) => {
                    manifest(&arguments.check, DEFAULT_LIMIT, &[])
                }
                other => panic!("{other:?}"),
            }
        };
        let found = |pod: Value| serde_json::from_value::<DynamicObject>(pod).unwrap();
        assert!(is_same_check(&found(check(&[])), &check(&[])));
        let others = [&["--discard"][..], &["--verify-user", "5"]];
        for other in others {
            assert!(
                !is_same_check(&found(check(other)), &check(&[])),
                "{other:?}"
            );
        }
        let mut pods = vec![check(&[]); 5];
        pods[0]["spec"]["containers"][0]["image"] = json!("other");
        pods[1]["spec"]["containers"][0]["command"][2] = json!("false");
        pods[2]["metadata"]["deletionTimestamp"] = json!("2026-01-02T00:00:00Z");
        pods[3]["metadata"]["annotations"][CHECK] = json!("{}");
        pods[4]["spec"]["volumes"] =
            json!([{"name": "copy-0", "persistentVolumeClaim": {"claimName": "x"}}]);
        for pod in pods {
            assert!(!is_same_check(&found(pod.clone()), &check(&[])), "{pod}");
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
