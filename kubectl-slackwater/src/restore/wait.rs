//! Waits until the volumes of copies exist. A class may create a volume only when a pod uses its claim;
//! such claims are not waited for.

use std::cell::RefCell;
use std::collections::BTreeSet;

use kube::api::{DynamicObject, ListParams};
use serde_json::json;

use super::plan::{Copy, SELECTED_NODE, State, is_copy};
use super::storage_class::{Classes, is_immediate};
use crate::change::{Progress, patch, until_end};
use crate::cli::{Change, Wait};
use crate::cluster::object::{self, Fields};
use crate::cluster::{Cluster, Scope};
use crate::failure::{Failure, Result, TIMED_OUT};

/// How far the volume of a claim is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Volume {
    Exists,
    Coming,
    /// It is created when a pod uses the claim.
    Unwanted,
}

fn volume_of(claim: &DynamicObject, is_immediate: bool) -> Volume {
    match claim.text("/status/phase") {
        "Bound" => Volume::Exists,
        _ if is_immediate || !claim.annotation(SELECTED_NODE).is_empty() => Volume::Coming,
        _ => Volume::Unwanted,
    }
}

/// Takes the steps of a restore until it has ended, with or without `--wait`.
pub async fn until_end_of_steps<A>(given: &Wait, step: impl FnMut() -> A) -> Result<String>
where
    A: Future<Output = Result<Progress>>,
{
    let wait = Wait {
        wait: true,
        timeout: given.timeout,
    };
    let done = until_end(&wait, "the restore", step).await;
    done.map_err(|failure| match failure.code {
        TIMED_OUT => Failure {
            message:
                "the restore has not ended within --timeout; run the command again to continue it"
                    .into(),
            ..failure
        },
        _ => failure,
    })
}

/// Reads how far the copies are.
pub async fn progress(cluster: &Cluster, copies: &[Copy], classes: &Classes) -> Result<Progress> {
    let (mut exist, mut unwanted) = (0, 0);
    let mut coming = String::new();
    for copy in copies {
        let claim = cluster.find_one(&object::CLAIM, &cluster.namespace, &copy.claim);
        let claim = claim.await?.filter(|claim| is_copy(claim, &copy.snapshot));
        let lost = |why: &str| {
            let title = format!("claim {}/{}", cluster.namespace, copy.claim);
            Ok(Progress::Ended(Err(Failure::failed(format!(
                "{title} {why}"
            )))))
        };
        let Some(claim) = claim else {
            return lost("was deleted or replaced by another user");
        };
        if claim.text("/status/phase") == "Lost" {
            return lost("has lost its volume");
        }
        match volume_of(&claim, is_immediate(classes, copy)) {
            Volume::Exists => exist += 1,
            Volume::Unwanted => unwanted += 1,
            Volume::Coming if coming.is_empty() => coming.clone_from(&copy.claim),
            Volume::Coming => {}
        }
    }
    if coming.is_empty() {
        return Ok(Progress::Ended(Ok(ended(exist, unwanted))));
    }
    let message = last_event(cluster, &coming).await?;
    Ok(Progress::Running(format!(
        "{exist} of {} volumes exist; claim {coming}: {message}",
        copies.len()
    )))
}

/// Writes to the copies which volumes exist.
pub async fn refresh(cluster: &Cluster, copies: &mut [Copy]) -> Result<()> {
    for copy in copies {
        let claim = cluster.find_one(&object::CLAIM, &cluster.namespace, &copy.claim);
        let claim = claim.await?.filter(|claim| is_copy(claim, &copy.snapshot));
        if let Some(claim) = claim.filter(|claim| claim.text("/status/phase") == "Bound") {
            copy.state = State::Bound;
            copy.volume = claim.text("/spec/volumeName").into();
        }
    }
    Ok(())
}

fn ended(exist: usize, unwanted: usize) -> String {
    let volumes = match exist {
        0 => String::new(),
        1 => "1 volume exists. ".into(),
        exist => format!("{exist} volumes exist. "),
    };
    let pending = match unwanted {
        0 => "",
        1 => {
            "1 claim stays Pending until a pod uses it: then its volume is created on the node of the pod, if possible that of the snapshot."
        }
        _ => {
            "The other claims stay Pending until a pod uses them: then their volumes are created on the node of the pod, if possible that of the snapshots."
        }
    };
    let pending = match exist {
        0 => pending.replace("The other claims", &format!("{unwanted} claims")),
        _ => pending.to_string(),
    };
    format!("{volumes}{pending}").trim_end().to_string()
}

/// Chooses the node on which the volume of a claim is created. One that was chosen by this run already and is
/// not there any more was given up by the provisioner, and is not chosen again and again.
pub async fn select_node(
    cluster: &Cluster,
    chosen: &RefCell<BTreeSet<String>>,
    claim: &DynamicObject,
    node: &str,
) -> Result<()> {
    let (namespace, name) = (&cluster.namespace, claim.name());
    if !chosen.borrow_mut().insert(name.into()) {
        let why = last_event(cluster, name).await?;
        return Err(Failure::failed(format!(
            "the volume of claim {namespace}/{name} cannot be created on node {node} now ({why}); run the command again to try it again, or give a --storage-class with volumeBindingMode Immediate after you have deleted the claim"
        )));
    }
    let fields = json!({"metadata": {"annotations": {SELECTED_NODE: node}}});
    let done = patch(cluster, &Change::CONFIRMED, &object::CLAIM, claim, fields).await;
    if done.is_err() {
        // It is read again.
        chosen.borrow_mut().remove(name);
    }
    done.map(drop)
}

/// The text of the last event of a claim.
pub async fn last_event(cluster: &Cluster, claim: &str) -> Result<String> {
    let scope = Scope::Namespace(cluster.namespace.clone());
    let params = ListParams::default().fields(&format!("regarding.name={claim}"));
    let events = cluster.find(&object::EVENT, &scope, &params).await?;
    let of_claim = |event: &&DynamicObject| event.text("/regarding/kind") == object::CLAIM.kind;
    let time = |event: &&DynamicObject| {
        let times = [
            "/series/lastObservedTime",
            "/eventTime",
            "/deprecatedLastTimestamp",
        ];
        times.into_iter().find_map(|pointer| event.time(pointer))
    };
    let last = events.iter().flatten().filter(of_claim).max_by_key(time);
    let text = last.map_or("", |event| event.text("/note"));
    Ok(match text {
        "" => "its volume is being created".into(),
        text => text.into(),
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn only_a_volume_that_is_being_created_is_waited_for() {
        let claim = |phase: &str, node: &str| -> DynamicObject {
            let claim = json!({"metadata": {"name": "x", "annotations": {SELECTED_NODE: node}},
                "status": {"phase": phase}});
            serde_json::from_value(claim).unwrap()
        };
        assert_eq!(volume_of(&claim("Pending", ""), false), Volume::Unwanted);
        assert_eq!(volume_of(&claim("Pending", ""), true), Volume::Coming);
        assert_eq!(
            volume_of(&claim("Pending", "node-1"), false),
            Volume::Coming
        );
        assert_eq!(volume_of(&claim("Bound", ""), false), Volume::Exists);
        assert_eq!(ended(2, 0), "2 volumes exist.");
        let text = ended(1, 2);
        assert!(
            text.starts_with("1 volume exists. The other claims stay"),
            "{text}"
        );
        let text = ended(0, 3);
        assert!(text.starts_with("3 claims stay Pending"), "{text}");
        assert!(ended(0, 1).starts_with("1 claim stays Pending"));
    }
}
