//! The pod that fills a prime claim, and the configuration of the program in it (docs/populate.md).
//!
//! A ValidatingAdmissionPolicy of the chart (templates/populators-admission.yaml) refuses all pods of the
//! controller that have another form: a change here needs a change there.

use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod};
use serde_json::{Value, json};

use super::Settings;
use super::source::{Kind, Owner, Source, SourceSpec};
use super::state::{CLAIM_LABEL, Point, is_block, owner, prime_name, uid};

/// The program in its image.
const PROGRAM: &str = "/usr/local/bin/slackwater-populate";
/// The user and the group of the pod if the source has no `owner`.
const UNPRIVILEGED: Owner = Owner {
    uid: 65532,
    gid: 65532,
};
/// The capabilities that `preserveOwners` needs: to change owners, and after that modes and files of
/// other users. The baseline profile of Pod Security allows all of them.
const OWNER_CAPABILITIES: [&str; 4] = ["CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID"];
/// An attempt ends after a day (`limits.seconds` of the program). The kubelet ends a pod that does not
/// end by itself then.
const DEADLINE_SECONDS: i64 = 24 * 60 * 60 + 600;

/// What one attempt is made from.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Attempt {
    pub(super) kind: Kind,
    pub(super) source: Source,
    /// The origins to which the Secret may be sent.
    pub(super) origins: Vec<String>,
    /// Where an earlier attempt has come to.
    pub(super) resume: Option<Point>,
    /// The digest that the name of the image led to first.
    pub(super) digest: Option<String>,
}

/// Why a source cannot fill a claim, whatever is tried.
pub(super) fn check(
    kind: Kind,
    spec: &SourceSpec,
    claim: &PersistentVolumeClaim,
) -> Result<(), String> {
    let modes = claim
        .spec
        .as_ref()
        .and_then(|spec| spec.access_modes.as_ref());
    if modes.is_some_and(|modes| modes.iter().all(|mode| mode == "ReadOnlyMany")) {
        return Err(
            "a claim with the access mode ReadOnlyMany alone cannot be filled; add ReadWriteOnce"
                .into(),
        );
    }
    if !is_block(claim) {
        return Ok(());
    }
    let has_many_files = match kind {
        Kind::Http => false,
        Kind::Oci => spec.path.is_none(),
        Kind::S3 => spec.prefix.is_some(),
    };
    if has_many_files || spec.format.as_deref() == Some("tar") {
        return Err(
            "a block volume takes one disk (raw or qcow2); use volumeMode: Filesystem, or `path` or `key` of the source"
                .into(),
        );
    }
    Ok(())
}

/// The configuration of the program.
fn configuration(claim: &PersistentVolumeClaim, attempt: &Attempt, settings: &Settings) -> Value {
    let spec = &attempt.source.spec;
    let mut source = match attempt.kind {
        Kind::Http => json!({"http": {"url": spec.url}}),
        Kind::Oci => {
            let image = spec.image.clone().unwrap_or_default();
            let image = match &attempt.digest {
                Some(digest) if !image.contains('@') => format!("{image}@{digest}"),
                _ => image,
            };
            json!({"oci": {"image": image}})
        }
        Kind::S3 => json!({"s3": {"endpoint": spec.endpoint, "bucket": spec.bucket}}),
    };
    let inner = match attempt.kind {
        Kind::Http => &mut source["http"],
        Kind::Oci => &mut source["oci"],
        Kind::S3 => &mut source["s3"],
    };
    let optional = [
        ("path", &spec.path),
        ("region", &spec.region),
        ("key", &spec.key),
        ("prefix", &spec.prefix),
        ("sha256", &spec.sha256),
    ];
    for (key, value) in optional {
        if let Some(value) = value {
            inner[key] = json!(value);
        }
    }
    if let Some(platform) = &spec.platform {
        inner["platform"] = json!(platform);
    }
    if spec.unverified {
        inner["unverified"] = json!(true);
    }
    let mut all = json!({
        "source": source,
        "target": match is_block(claim) {
            true => json!({"block": "/dev/target"}),
            false => json!({"filesystem": "/target"}),
        },
        "network": without_nulls(json!({
            "privateNetworks": settings.private_networks,
            "refused": settings.refused,
            "proxy": settings.proxy,
            "certificates": settings.certificates,
        })),
    });
    if has_scratch(claim) {
        all["scratch"] = json!("/scratch");
    }
    if spec.preserve_owners {
        all["preserveOwners"] = json!(true);
    }
    if spec.secret_ref.is_some() {
        all["secret"] = json!({"directory": "/secret", "origins": attempt.origins});
    }
    for (key, value) in [("format", &spec.format), ("fileName", &spec.file_name)] {
        if let Some(value) = value {
            all[key] = json!(value);
        }
    }
    if let Some(point) = &attempt.resume {
        all["resume"] = json!({"bytes": point.bytes, "validator": point.validator});
    }
    all
}

/// A qcow2 image for a block volume is received into a temporary file. On a file system, the program
/// uses the volume itself.
fn has_scratch(claim: &PersistentVolumeClaim) -> bool {
    is_block(claim)
}

fn without_nulls(mut value: Value) -> Value {
    if let Some(fields) = value.as_object_mut() {
        fields.retain(|_, value| !value.is_null());
    }
    value
}

/// The container of an attempt, and the volumes that it mounts.
fn container(
    claim: &PersistentVolumeClaim,
    attempt: &Attempt,
    settings: &Settings,
) -> (Value, Vec<Value>) {
    let spec = &attempt.source.spec;
    let added: &[&str] = match spec.preserve_owners {
        true => &OWNER_CAPABILITIES,
        false => &[],
    };
    let mut volumes =
        vec![json!({"name": "target", "persistentVolumeClaim": {"claimName": prime_name(claim)}})];
    let (mut mounts, mut devices) = (Vec::new(), Vec::new());
    match is_block(claim) {
        true => devices.push(json!({"name": "target", "devicePath": "/dev/target"})),
        false => mounts.push(json!({"name": "target", "mountPath": "/target"})),
    }
    if has_scratch(claim) {
        let size = &settings.scratch_size;
        volumes.push(json!({"name": "scratch", "emptyDir": {"sizeLimit": size}}));
        mounts.push(json!({"name": "scratch", "mountPath": "/scratch"}));
    }
    if let Some(secret) = &spec.secret_ref {
        volumes.push(
            json!({"name": "secret", "secret": {"secretName": secret.name, "defaultMode": 0o440}}),
        );
        mounts.push(json!({"name": "secret", "mountPath": "/secret", "readOnly": true}));
    }
    let container = json!({
        "name": "populate",
        "image": settings.image,
        "imagePullPolicy": "IfNotPresent",
        "command": [PROGRAM],
        "env": [{"name": "SLACKWATER_POPULATE",
            "value": configuration(claim, attempt, settings).to_string()}],
        "terminationMessagePolicy": "File",
        "resources": {"requests": {"cpu": "50m", "memory": "64Mi"}, "limits": {"memory": "512Mi"}},
        "securityContext": {
            "allowPrivilegeEscalation": false, "readOnlyRootFilesystem": true,
            "capabilities": {"drop": ["ALL"], "add": added},
        },
        "volumeMounts": mounts,
        "volumeDevices": devices,
    });
    (container, volumes)
}

/// The pod of an attempt.
pub(super) fn pod(
    claim: &PersistentVolumeClaim,
    attempt: &Attempt,
    settings: &Settings,
) -> Result<Pod, serde_json::Error> {
    let spec = &attempt.source.spec;
    let is_root = spec.preserve_owners || is_block(claim) && settings.root_for_block;
    let Owner { uid: user, gid } = match is_root {
        true => Owner { uid: 0, gid: 0 },
        false => spec.owner.unwrap_or(UNPRIVILEGED),
    };
    let group = spec.owner.map_or(gid, |owner| owner.gid);
    let (container, volumes) = container(claim, attempt, settings);
    serde_json::from_value(json!({
        "metadata": {
            "name": prime_name(claim),
            "namespace": claim.metadata.namespace,
            "labels": {CLAIM_LABEL: uid(claim), "sidecar.istio.io/inject": "false",
                "kuma.io/sidecar-injection": "disabled"},
            "annotations": {"sidecar.istio.io/inject": "false", "linkerd.io/inject": "disabled",
                "consul.hashicorp.com/connect-inject": "false",
                "cluster-autoscaler.kubernetes.io/safe-to-evict": "false"},
            "ownerReferences": [owner(claim)],
        },
        "spec": {
            "restartPolicy": "Never",
            "automountServiceAccountToken": false,
            "enableServiceLinks": false,
            "activeDeadlineSeconds": DEADLINE_SECONDS,
            "securityContext": {
                "runAsNonRoot": !is_root, "runAsUser": user, "runAsGroup": gid, "fsGroup": group,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [container],
            "volumes": volumes,
        },
    }))
}

/// Why the API server has refused a pod. Pod Security names fields alone, which users have not set.
pub(super) fn refusal(message: &str, pod: &Pod) -> String {
    let context = pod
        .spec
        .as_ref()
        .and_then(|spec| spec.security_context.as_ref());
    let is_root = context.is_some_and(|context| context.run_as_user == Some(0));
    match is_root && message.contains("violates PodSecurity") {
        true => format!(
            "{message}; pods for sources with preserveOwners, and for block volumes with populators.rootForBlock, need a namespace that allows the baseline profile of Pod Security"
        ),
        false => message.into(),
    }
}

/// How a pod has failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Ending {
    /// `None` if its node has not reported that the program has ended.
    pub(super) exit_code: Option<i32>,
    pub(super) message: String,
}

/// The longest message of a pod that is shown.
const MAX_MESSAGE_BYTES: usize = 512;

/// The end of a pod with the phase Failed. Its message is written by the program in it.
pub(super) fn ending(pod: &Pod) -> Ending {
    let status = pod.status.clone().unwrap_or_default();
    let containers = status.container_statuses.unwrap_or_default();
    let state = containers.into_iter().find_map(|one| one.state?.terminated);
    let exit_code = state.as_ref().map(|state| state.exit_code);
    let said = state.as_ref().and_then(|state| state.message.as_deref());
    let said = said.and_then(|text| serde_json::from_str::<Value>(text).ok());
    let word = |key: &str| said.as_ref()?.get(key)?.as_str().map(printable);
    let message = match (word("reason"), word("message")) {
        (Some(reason), Some(message)) => format!("{reason}: {message}"),
        _ => {
            let reason = status.reason.or(state.and_then(|state| state.reason));
            let reason = printable(&reason.unwrap_or_else(|| "the program was ended".into()));
            match exit_code {
                Some(code) => format!("{reason} (exit code {code})"),
                None => reason,
            }
        }
    };
    Ending { exit_code, message }
}

/// Text of a pod without control characters, and not too long.
fn printable(text: &str) -> String {
    let plain = text.chars().filter(|c| !c.is_control());
    plain.take(MAX_MESSAGE_BYTES).collect()
}

/// Why a pod has not begun yet.
pub(super) fn waits_for(pod: &Pod) -> Option<String> {
    let status = pod.status.as_ref()?;
    let containers = status.container_statuses.iter().flatten();
    let waiting = containers.filter_map(|one| one.state.as_ref()?.waiting.as_ref());
    let mut waiting =
        waiting.filter_map(|waiting| Some((waiting.reason.clone()?, &waiting.message)));
    if let Some((reason, message)) = waiting.next() {
        let message = message.as_deref().unwrap_or_default();
        return Some(printable(&format!("{reason} {message}")).trim().to_string());
    }
    let mut conditions = status.conditions.iter().flatten();
    let unscheduled =
        conditions.find(|one| one.type_ == "PodScheduled" && one.status == "False")?;
    unscheduled.message.as_deref().map(printable)
}

#[cfg(test)]
mod tests;
