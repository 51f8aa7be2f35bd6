//! Annotations that configure hooks.

use std::collections::BTreeMap;
use std::time::Duration;

use ::kube::ResourceExt;
use k8s_openapi::api::core::v1::{Pod, PodSpec};

use crate::hook::definition::{filled, timeout};

/// The program and its arguments: a JSON array of words.
const SESSION: &str = "hooks.slackwater.dev/session";
/// The container in which the program is started; by default the first one.
const CONTAINER: &str = "hooks.slackwater.dev/container";
/// The session's own timeout, such as "30s".
const TIMEOUT: &str = "hooks.slackwater.dev/timeout";
/// "true" disables hooks, on a pod or a PVC.
const SKIP: &str = "hooks.slackwater.dev/skip";
/// Common prefix of all annotations.
const PREFIX: &str = "hooks.slackwater.dev/";

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PodHook {
    /// The container in which it is started.
    pub(super) container: String,
    /// Program and arguments, with the timeout inserted.
    pub(super) command: Vec<String>,
    /// The session's own timeout.
    pub(super) timeout: Duration,
}

impl PodHook {
    /// The hook of a pod, if it has one. The error is a sentence that names the annotation.
    pub(super) fn of(pod: &Pod) -> Result<Option<PodHook>, String> {
        let annotations = pod.annotations();
        for name in annotations.keys().filter(|name| name.starts_with(PREFIX)) {
            if ![SESSION, CONTAINER, TIMEOUT, SKIP].contains(&name.as_str()) {
                return Err(format!(
                    "annotation {name} is unknown; known annotations are {SESSION}, {CONTAINER}, {TIMEOUT} and {SKIP}"
                ));
            }
        }
        if has_skip(annotations)? {
            return Ok(None);
        }
        let Some(session) = annotations.get(SESSION) else {
            return Ok(None);
        };
        let words = words(session)?;
        let deadline = timeout(annotations.get(TIMEOUT).map(String::as_str))
            .map_err(|problem| format!("annotation {TIMEOUT}: {problem}"))?;
        Ok(Some(PodHook {
            container: container(pod, annotations.get(CONTAINER).map(String::as_str))?,
            command: filled(&words, deadline),
            timeout: deadline,
        }))
    }
}

/// Whether annotations contain `skip`.
pub(super) fn has_skip(annotations: &BTreeMap<String, String>) -> Result<bool, String> {
    match annotations.get(SKIP).map(String::as_str) {
        None | Some("false") => Ok(false),
        Some("true") => Ok(true),
        Some(other) => Err(format!(
            "annotation {SKIP} is {other:?}; give \"true\" or \"false\""
        )),
    }
}

fn words(session: &str) -> Result<Vec<String>, String> {
    let wrong = |problem: &str| {
        Err(format!(
            "annotation {SESSION} {problem}; give a JSON array of strings, such as [\"/bin/hold\", \"--seconds={{seconds}}\"]"
        ))
    };
    let Ok(words) = serde_json::from_str::<Vec<String>>(session) else {
        return wrong("is not a JSON array of strings");
    };
    match words.first() {
        None => wrong("contains no program"),
        Some(program) if program.trim().is_empty() => wrong("has an empty program name"),
        Some(_) if words.iter().any(|word| word.contains('\0')) => wrong("contains a zero byte"),
        Some(_) => Ok(words),
    }
}

/// The container with a name, or the first; init containers that keep running (sidecars) are also
/// found.
fn container(pod: &Pod, wanted: Option<&str>) -> Result<String, String> {
    let spec = pod.spec.as_ref();
    let names: Vec<&str> = spec.map(containers).unwrap_or_default();
    match (wanted, names.first()) {
        (Some(wanted), _) if names.contains(&wanted) => Ok(wanted.into()),
        (Some(wanted), _) => Err(format!(
            "annotation {CONTAINER} names {wanted:?}; the containers of the pod are {}",
            names.join(", ")
        )),
        (None, Some(first)) => Ok((*first).into()),
        (None, None) => Err("the pod has no container".into()),
    }
}

fn containers(spec: &PodSpec) -> Vec<&str> {
    let stays = |init: &&k8s_openapi::api::core::v1::Container| {
        init.restart_policy.as_deref() == Some("Always")
    };
    let early = spec.init_containers.iter().flatten().filter(stays);
    let all = spec.containers.iter().chain(early);
    all.map(|container| container.name.as_str()).collect()
}

/// Whether a pod is running and uses a PVC, by its name or as a generic ephemeral volume.
pub(super) fn uses(pod: &Pod, claim: &str) -> bool {
    let phase = pod
        .status
        .as_ref()
        .and_then(|status| status.phase.as_deref());
    if phase != Some("Running") {
        return false;
    }
    let volumes = pod.spec.iter().filter_map(|spec| spec.volumes.as_ref());
    volumes.flatten().any(|volume| {
        if let Some(source) = &volume.persistent_volume_claim {
            return source.claim_name == claim;
        }
        // The PVC of a generic ephemeral volume is named after its pod.
        volume.ephemeral.is_some() && format!("{}-{}", pod.name_any(), volume.name) == claim
    })
}
