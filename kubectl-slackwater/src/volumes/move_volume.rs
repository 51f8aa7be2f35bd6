//! `move`: creates a VolumeMove, and waits until pods can use the volume at its new place.

use serde_json::{Value, json};

use crate::change::{
    Need, Progress, confirm, create, follow, mark, name_prefix, print_lines, require,
};
use crate::cli::MoveArguments;
use crate::cluster::object::{self, Fields};
use crate::cluster::{Cluster, Scope};
use crate::failure::{Failure, Result};
use crate::model::{self, Move, Volume};
use crate::text::{after_colon, percent, size};

/// Creates the VolumeMove.
pub async fn run(cluster: &Cluster, arguments: &MoveArguments) -> Result<()> {
    let claim = &arguments.claim;
    refuse(cluster, arguments).await?;
    let needs = ["create", "get"].map(|verb| Need {
        verb,
        kind: &object::MOVE,
        namespace: &cluster.namespace,
        name: "",
    });
    require(cluster, &needs).await?;
    let to = |what: &str, value: &Option<String>| value.as_ref().map(|it| format!("{what} {it}"));
    let target = [
        to("node", &arguments.target.to_node),
        to("pool", &arguments.target.to_pool),
    ];
    let target: Vec<_> = target.into_iter().flatten().collect();
    let when = match arguments.when.as_str() {
        "now" => "its pods are evicted",
        _ => "when its pods have ended",
    };
    let plan = format!(
        "The volume of claim {}/{claim} will be moved to {}, {when}. The old volume is kept for {}.",
        cluster.namespace,
        target.join(", "),
        arguments.keep_source
    );
    confirm(&arguments.change, &plan)?;
    let made = create(
        cluster,
        &arguments.change,
        &object::MOVE,
        &cluster.namespace,
        manifest(arguments),
    )
    .await?;
    let name = made.name().to_string();
    print_lines(&format!(
        "volumemove.slackwater.dev/{name} created{}",
        mark(&arguments.change)
    ));
    let what = format!("VolumeMove {name}");
    follow(&arguments.wait, &arguments.change, &what, || {
        progress(cluster, &name)
    })
    .await
}

/// What the controller would refuse later, or never do.
async fn refuse(cluster: &Cluster, arguments: &MoveArguments) -> Result<()> {
    let claim = &arguments.claim;
    let scope = Scope::Namespace(cluster.namespace.clone());
    let object = cluster
        .get(&object::CLAIM, &cluster.namespace, claim)
        .await?;
    let place = format!("claim {}/{claim}", cluster.namespace);
    if object.text("/status/phase") != "Bound" {
        return Err(Failure::failed(format!("{place} is not bound to a volume")));
    }
    let volumes = model::volumes(cluster, &scope, None).await?;
    let Some(volume) = volumes.iter().find(|volume| volume.claim == *claim) else {
        return Err(Failure::failed(format!(
            "{place} is not of the driver {}",
            cluster.driver
        )));
    };
    if is_at(
        volume,
        arguments.target.to_pool.as_deref(),
        arguments.target.to_node.as_deref(),
    ) {
        return Err(Failure::failed(format!(
            "the volume of {place} is on node {} in pool {} already",
            volume.node, volume.pool_name
        )));
    }
    let moves = model::moves(cluster, &scope).await?;
    let running = moves
        .iter()
        .find(|one| one.claim == *claim && !one.has_ended());
    if let Some(one) = running {
        // Once the PersistentVolume is exchanged, nothing is undone any more.
        let advice = match one.phase.as_str() {
            "Switched" => "wait for its end, which keepSource delays",
            _ => "delete it to undo that",
        };
        return Err(Failure::failed(format!(
            "VolumeMove {} moves the volume of {place} already (phase {}); {advice}",
            one.name, one.phase
        )));
    }
    // A wrong name is reported now, and not by the controller, if the user may read nodes.
    if let Some(node) = &arguments.target.to_node {
        match cluster.get(&object::NODE, "", node).await {
            Err(failure) if failure.code != crate::failure::DENIED => return Err(failure),
            Ok(_) | Err(_) => {}
        }
    }
    Ok(())
}

fn manifest(arguments: &MoveArguments) -> Value {
    let mut to = json!({});
    if let Some(node) = &arguments.target.to_node {
        to["node"] = json!(node);
    }
    if let Some(pool) = &arguments.target.to_pool {
        to["pool"] = json!(pool);
    }
    json!({
        "apiVersion": "slackwater.dev/v1alpha1",
        "kind": object::MOVE.kind,
        "metadata": {"generateName": name_prefix(&arguments.claim)},
        "spec": {"claim": arguments.claim, "to": to, "when": arguments.when,
            "keepSource": arguments.keep_source},
    })
}

async fn progress(cluster: &Cluster, name: &str) -> Result<Progress> {
    let object = cluster.get(&object::MOVE, &cluster.namespace, name).await?;
    let one = Move::of(&object);
    // The phase is Switched before the PersistentVolume is exchanged.
    let has_switched = !object.text("/status/switchedAt").is_empty();
    Ok(match one.phase.as_str() {
        "Switched" | "Done" if has_switched => {
            let still = match object.number("/status/stillMs") {
                0 => String::new(),
                still => format!(" No pod could use it for {still} ms."),
            };
            Progress::Ended(Ok(format!(
                "The volume of claim {} is on node {} now.{still}",
                one.claim, one.to
            )))
        }
        "Aborted" => Progress::Ended(Err(Failure::failed(format!(
            "VolumeMove {name} was undone: {}",
            one.message
        )))),
        _ => Progress::Running(line(&one)),
    })
}

/// One line for each phase, message and tenth of the copy.
fn line(one: &Move) -> String {
    let copied = percent(one.bytes_done, one.bytes_total).map(|copied| copied / 10 * 10);
    let copied = copied.map_or(String::new(), |copied| {
        format!(" {copied}% of {}", size(one.bytes_total))
    });
    let message = after_colon(&one.message);
    format!("{}{copied}{message}", one.phase)
}

/// Whether a volume is in this pool, or on a node of this name.
fn is_at(volume: &Volume, pool: Option<&str>, node: Option<&str>) -> bool {
    let is_pool = |pool: &str| volume.pool == pool || volume.pool_name == pool;
    let is_there = node.is_none_or(|node| volume.node == node) && pool.is_none_or(is_pool);
    is_there && (node.is_some() || pool.is_some_and(|pool| volume.pool == pool))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_progress_of_a_copy_is_a_line_for_each_tenth() {
        let at = |bytes_done| {
            line(&Move {
                phase: "Copying".into(),
                bytes_done,
                bytes_total: 10 << 30,
                ..Move::default()
            })
        };
        assert_eq!(at(1 << 30), "Copying 10% of 10 GiB");
        assert_eq!(at((2 << 30) - 1), at(1 << 30));
        let waiting = Move {
            phase: "Waiting".into(),
            message: "pod pg-0 uses it".into(),
            ..Move::default()
        };
        assert_eq!(line(&waiting), "Waiting: pod pg-0 uses it");
    }
}
