//! `revert`: creates a VolumeRevert, and waits until the claims have the content of their snapshots.

use kube::api::{DynamicObject, ListParams};
use serde_json::json;

use crate::change::{
    Need, Progress, confirm, create, follow, mark, name_prefix, print_lines, require,
};
use crate::cli::RevertArguments;
use crate::cluster::object::{self, Fields};
use crate::cluster::{Cluster, Scope};
use crate::failure::{Failure, Result};
use crate::listing::{self, Column, column, table};
use crate::model::snapshot::Snapshot;
use crate::model::{self, Volume};
use crate::restore::source::{self, Source};
use crate::text::{after_colon, time};

const COLUMNS: [Column; 5] = [
    column("CLAIM"),
    column("SNAPSHOT"),
    column("LEVEL"),
    column("CUT AT"),
    column("PODS"),
];

/// A claim, and the snapshot whose content it gets.
struct Member {
    volume: Volume,
    snapshot: Snapshot,
}

/// Creates the VolumeRevert.
pub async fn run(cluster: &Cluster, arguments: &RevertArguments) -> Result<()> {
    let (title, members) = members(cluster, arguments).await?;
    refuse_others(cluster, arguments, &members).await?;
    let needs = ["create", "get"].map(|verb| Need {
        verb,
        kind: &object::REVERT,
        namespace: &cluster.namespace,
        name: "",
    });
    require(cluster, &needs).await?;
    for note in listing::note_lines(&cluster.take_notes()) {
        eprintln!("{note}");
    }
    let plan = plan(&cluster.namespace, arguments, &title, &members);
    confirm(&arguments.change, &plan)?;
    let made = create(
        cluster,
        &arguments.change,
        &object::REVERT,
        &cluster.namespace,
        manifest(arguments),
    )
    .await?;
    let name = made.name().to_string();
    print_lines(&format!(
        "volumerevert.slackwater.dev/{name} created{}",
        mark(&arguments.change)
    ));
    let what = format!("VolumeRevert {name}");
    follow(&arguments.wait, &arguments.change, &what, || {
        progress(cluster, &name)
    })
    .await
}

/// What is reverted: the snapshots as a message names them, and the claims. Refuses what the controller
/// would refuse.
async fn members(cluster: &Cluster, arguments: &RevertArguments) -> Result<(String, Vec<Member>)> {
    let which = match (&arguments.to, &arguments.group) {
        (Some(snapshot), _) => format!("volumesnapshot/{snapshot}"),
        (None, group) => format!(
            "volumegroupsnapshot/{}",
            group.as_deref().unwrap_or_default()
        ),
    };
    let Source { title, members } = source::get(cluster, &which).await?;
    let scope = Scope::Namespace(cluster.namespace.clone());
    let volumes = model::volumes(cluster, &scope, None).await?;
    let mut found = Vec::new();
    for snapshot in members {
        let claim = arguments.claim.as_deref().unwrap_or(&snapshot.claim);
        let volume = volumes.iter().find(|volume| volume.claim == claim);
        refuse(cluster, claim, volume, &snapshot)?;
        found.extend(volume.map(|volume| Member {
            volume: volume.clone(),
            snapshot,
        }));
    }
    Ok((title, found))
}

fn refuse(
    cluster: &Cluster,
    claim: &str,
    volume: Option<&Volume>,
    snapshot: &Snapshot,
) -> Result<()> {
    let refuse = |why: String| Err(Failure::failed(why));
    let title = format!("VolumeSnapshot {}/{}", snapshot.namespace, snapshot.name);
    let place = format!("claim {}/{claim}", cluster.namespace);
    if claim.is_empty() {
        return refuse(format!(
            "{title} names no claim: revert single claims, with the claim and --to"
        ));
    }
    if !snapshot.claim.is_empty() && snapshot.claim != claim {
        return refuse(format!(
            "{title} is one of claim {}, not of {place}: a claim can be reverted only to its own snapshots. `kubectl slackwater restore` creates a claim from it",
            snapshot.claim
        ));
    }
    let Some(volume) = volume else {
        return refuse(format!(
            "{place} does not exist, or is not of the driver {}: `kubectl slackwater restore` creates a claim from {title}",
            cluster.driver
        ));
    };
    if volume.status != "Bound" {
        return refuse(format!(
            "{place} is {}: only a claim that is bound to a volume can be reverted",
            volume.status
        ));
    }
    // Pools are not known to a user who may not list PersistentVolumes or contents.
    let is_known = !volume.pool.is_empty() && !snapshot.pool.is_empty();
    if is_known && volume.pool != snapshot.pool {
        return refuse(format!(
            "{title} is in another pool than the volume of {place}: `kubectl slackwater restore` creates a claim from it"
        ));
    }
    Ok(())
}

/// Refuses a second revert of a claim: it would begin after the first one, or fail at its deadline.
async fn refuse_others(
    cluster: &Cluster,
    arguments: &RevertArguments,
    members: &[Member],
) -> Result<()> {
    let scope = Scope::Namespace(cluster.namespace.clone());
    let all = ListParams::default();
    let reverts = cluster.find(&object::REVERT, &scope, &all).await?;
    let is_ours = |claim: &str| members.iter().any(|member| member.volume.claim == claim);
    for revert in reverts.iter().flatten() {
        let phase = revert.operation_phase();
        let mut its = revert.list("/status/members").iter();
        let is_other = is_ours(revert.text("/spec/claim"))
            || its.any(|member| member["claim"].as_str().is_some_and(is_ours))
            || (arguments.group.is_some()
                && arguments.group.as_deref() == Some(revert.text("/spec/groupSnapshot")));
        if is_other && !matches!(phase, "Done" | "Failed" | "Incomplete") {
            // From Switching on, deleting it does not undo it.
            let advice = match phase {
                "Switching" | "Aborting" => "wait for its end",
                _ => "wait for its end, or delete it to undo it",
            };
            return Err(Failure::failed(format!(
                "VolumeRevert {} reverts one of these claims already (phase {phase}); {advice}",
                revert.name()
            )));
        }
    }
    let moves = model::moves(cluster, &scope).await?;
    let mut moves = moves.iter();
    match moves.find(|one| is_ours(&one.claim) && !one.has_ended()) {
        None => Ok(()),
        Some(one) => Err(Failure::failed(format!(
            "VolumeMove {} moves the volume of claim {}/{} (phase {}); wait for its end",
            one.name, cluster.namespace, one.claim, one.phase
        ))),
    }
}

fn plan(namespace: &str, arguments: &RevertArguments, title: &str, members: &[Member]) -> String {
    let rows: Vec<_> = members
        .iter()
        .map(|Member { volume, snapshot }| {
            [
                volume.claim.clone(),
                snapshot.name.clone(),
                snapshot.cut.level.clone(),
                time(snapshot.cut.cut_at),
                volume.pods.join(", "),
            ]
        })
        .collect();
    let rows: Vec<&[String]> = rows.iter().map(|row| &row[..]).collect();
    let table = table(&COLUMNS, &rows, false, true);
    let old = match arguments.keep_old {
        true => {
            "What they have now is kept in VolumeSnapshots (if the chart has reverts.keepOld: true)."
        }
        false => "What was written since is lost; --keep-old keeps it in VolumeSnapshots.",
    };
    let mut lines = format!(
        "These claims of namespace {namespace} will get the content of {title} in place:\n{table}{old}"
    );
    let mut pods: Vec<_> = members
        .iter()
        .flat_map(|it| it.volume.pods.clone())
        .collect();
    pods.sort();
    pods.dedup();
    if !pods.is_empty() {
        lines.push_str(&format!(
            "\nThese pods use them, and must end within {}; otherwise nothing is reverted: {}",
            arguments.deadline,
            pods.join(", ")
        ));
    }
    lines
}

fn manifest(arguments: &RevertArguments) -> serde_json::Value {
    let named = arguments.claim.as_ref().or(arguments.group.as_ref());
    let prefix = name_prefix(named.map_or("", String::as_str));
    let mut spec = json!({"keepOld": arguments.keep_old, "deadline": arguments.deadline});
    match &arguments.group {
        Some(group) => spec["groupSnapshot"] = json!(group),
        None => {
            spec["claim"] = json!(arguments.claim);
            spec["snapshot"] = json!(arguments.to);
        }
    }
    json!({
        "apiVersion": "slackwater.dev/v1alpha1",
        "kind": object::REVERT.kind,
        "metadata": {"generateName": prefix},
        "spec": spec,
    })
}

async fn progress(cluster: &Cluster, name: &str) -> Result<Progress> {
    let found = cluster.find_one(&object::REVERT, &cluster.namespace, name);
    Ok(match found.await? {
        Some(object) => stage(&object),
        None => Progress::Ended(Err(Failure::failed(format!(
            "VolumeRevert {name} was deleted: unless it had begun to switch, all claims have kept their content"
        )))),
    })
}

/// How far a VolumeRevert is.
fn stage(object: &DynamicObject) -> Progress {
    let members = object.list("/status/members");
    let texts = |key: &str| -> Vec<String> {
        let each = members.iter().filter_map(|member| member[key].as_str());
        each.map(str::to_string).collect()
    };
    let phase = object.operation_phase();
    let message = object.text("/status/message");
    match phase {
        "Done" => {
            let old = match texts("old") {
                old if old.is_empty() => String::new(),
                old => format!(" What they had before is in {}.", old.join(", ")),
            };
            let claims = texts("claim").join(", ");
            Progress::Ended(Ok(format!(
                "These claims have the content of their snapshots now: {claims}.{old}"
            )))
        }
        "Failed" | "Incomplete" => {
            let conditions = object.conditions();
            let complete = conditions.iter().find(|[kind, ..]| *kind == "Complete");
            let reason = complete.map_or("", |[_, _, reason, _]| reason);
            let what = match phase {
                "Failed" => "has failed, and all claims have kept their content",
                _ => "has ended without some of its claims",
            };
            let name = object.name();
            Progress::Ended(Err(Failure::failed(format!(
                "VolumeRevert {name} {what}: {reason}: {message}"
            ))))
        }
        _ => {
            let states: &[&str] = match phase {
                "Fencing" => &["Fenced"],
                "Preparing" => &["Prepared"],
                "Switching" => &["Switched", "Reverted"],
                _ => &[],
            };
            let is_done = |state: &&String| states.contains(&state.as_str());
            let done = texts("state").iter().filter(is_done).count();
            let count = match states.is_empty() || members.is_empty() {
                true => String::new(),
                false => format!(" {done} of {}", members.len()),
            };
            let message = after_colon(message);
            Progress::Running(format!("{phase}{count}{message}"))
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    fn at(status: Value) -> Progress {
        let object = json!({"metadata": {"name": "pg-x"}, "status": status});
        stage(&serde_json::from_value(object).unwrap())
    }

    #[track_caller]
    fn line(status: Value) -> String {
        match at(status) {
            Progress::Running(line) => line,
            Progress::Ended(_) => panic!("it has ended"),
        }
    }

    #[test]
    fn a_revert_ends_when_it_is_done_or_has_failed_for_good() {
        assert_eq!(line(json!({})), "Pending");
        let members =
            json!([{"claim": "a", "state": "Prepared"}, {"claim": "b", "state": "Fenced"}]);
        assert_eq!(
            line(json!({"phase": "Preparing", "members": members})),
            "Preparing 1 of 2"
        );
        let undone = json!({"phase": "Aborting", "message": "pods have come", "members": members});
        assert_eq!(line(undone), "Aborting: pods have come");
        let failed = json!({"phase": "Failed", "message": "pods use it: pg-0", "conditions": [
            {"type": "Complete", "status": "False", "reason": "DeadlineExceeded"}]});
        let Progress::Ended(Err(failure)) = at(failed) else {
            panic!("it goes on")
        };
        let end = "DeadlineExceeded: pods use it: pg-0";
        assert!(failure.message.ends_with(end), "{}", failure.message);
        let lost = json!({"phase": "Incomplete", "message": "pg-1 is lost"});
        let Progress::Ended(Err(failure)) = at(lost) else {
            panic!("it goes on")
        };
        assert!(
            !failure.message.contains("kept") && failure.message.ends_with("pg-1 is lost"),
            "{}",
            failure.message
        );
        let members = json!([{"claim": "a", "old": "before-revert-1"}, {"claim": "b"}]);
        let Progress::Ended(Ok(last)) = at(json!({"phase": "Done", "members": members})) else {
            panic!("it goes on")
        };
        assert!(
            last.contains("a, b") && last.contains("before-revert-1"),
            "{last}"
        );
    }
}
