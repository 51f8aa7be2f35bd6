//! `pool lose`, `pool evacuate` and `pool hand-over`: fields of the Pool object.

use kube::api::DynamicObject;
use serde_json::json;

use crate::change::{Progress, check_stored, confirm, patch, print_lines};
use crate::cli::Change;
use crate::cluster::Cluster;
use crate::cluster::object::{self, Fields};
use crate::failure::{Failure, Result};
use crate::model::Pool;
use crate::pools::object::{describe_claims, may_patch, print_done, refuse_lost};

pub async fn lose(
    cluster: &Cluster,
    object: &DynamicObject,
    pool: &Pool,
    reason: &str,
    force: bool,
    change: &Change,
) -> Result<()> {
    // Of a pool in conflict, several nodes have a disk.
    let is_served = matches!(pool.health.as_str(), "Healthy" | "Degraded" | "Conflict");
    if is_served && !force {
        return Err(Failure::failed(format!(
            "pool {} is {}: node {} serves it. Shut the node down or remove the disk first, or give --force",
            pool.title(),
            pool.health,
            pool.node
        )));
    }
    if pool.lost && pool.lost_reason == reason {
        print_lines(&format!("Pool {} is marked as lost already.", pool.title()));
        return Ok(());
    }
    may_patch(cluster, pool).await?;
    let volumes = describe_claims(cluster, pool).await?;
    let plan = format!(
        "Pool {} ({}) will be marked as lost. From then on its {} volumes and {} snapshots count as deleted.{}",
        pool.title(),
        pool.id,
        pool.volumes,
        pool.snapshots,
        volumes
    );
    confirm(change, &plan)?;
    let fields = json!({"spec": {"lost": true, "lostReason": reason}});
    patch(cluster, change, &object::POOL, object, fields).await?;
    print_done(pool, "lost", change);
    Ok(())
}

pub async fn unmark_lost(
    cluster: &Cluster,
    object: &DynamicObject,
    pool: &Pool,
    change: &Change,
) -> Result<()> {
    if !pool.lost {
        print_lines(&format!("Pool {} is not marked as lost.", pool.title()));
        return Ok(());
    }
    may_patch(cluster, pool).await?;
    let plan = format!(
        "Pool {} ({}) will not be marked as lost any more. If its disk is there, its volumes are used again.",
        pool.title(),
        pool.id
    );
    confirm(change, &plan)?;
    let fields = json!({"spec": {"lost": false, "lostReason": null}});
    patch(cluster, change, &object::POOL, object, fields).await?;
    print_done(pool, "not lost", change);
    Ok(())
}

pub async fn evacuate(
    cluster: &Cluster,
    object: &DynamicObject,
    pool: &Pool,
    wanted: bool,
    change: &Change,
) -> Result<()> {
    if pool.lost {
        return Err(Failure::failed(format!(
            "pool {} is marked as lost: nothing can be moved from it",
            pool.title()
        )));
    }
    if pool.evacuate == wanted {
        let already = match wanted {
            true => "is being emptied already",
            false => "is not being emptied",
        };
        print_lines(&format!("Pool {} {already}.", pool.title()));
        return Ok(());
    }
    may_patch(cluster, pool).await?;
    let plan = match wanted {
        true => format!(
            "Pool {} ({}) will be emptied: it gets no new volumes, and a VolumeMove is created for each of its claims. A volume is moved when its pods have ended.",
            pool.title(),
            pool.id
        ),
        false => format!(
            "Pool {} ({}) will not be emptied any more. Its VolumeMoves are deleted, and those that have not switched are undone.",
            pool.title(),
            pool.id
        ),
    };
    confirm(change, &plan)?;
    let fields = json!({"spec": {"evacuate": wanted}});
    let now = patch(cluster, change, &object::POOL, object, fields).await?;
    check_stored(
        now.is_true("/spec/evacuate") == wanted,
        "spec.evacuate",
        "pools.yaml",
    )?;
    let done = match wanted {
        true => "evacuating",
        false => "not evacuating",
    };
    print_done(pool, done, change);
    Ok(())
}

/// What is left in a pool that is being emptied.
pub async fn evacuation_progress(cluster: &Cluster, pool: &Pool) -> Result<Progress> {
    let object = cluster.get(&object::POOL, "", &pool.id).await?;
    if !object.is_true("/spec/evacuate") {
        return Ok(Progress::Ended(Err(Failure::failed(format!(
            "spec.evacuate of pool {} was set to false by another user",
            pool.title()
        )))));
    }
    let conditions = object.conditions();
    let evacuated = conditions.iter().find(|[kind, ..]| *kind == "Evacuated");
    // A condition of an earlier spec is not about this one.
    let is_current = object.list("/status/conditions").iter().any(|one| {
        one["type"] == "Evacuated"
            && one["observedGeneration"].as_i64() == object.metadata.generation
    });
    let evacuated = evacuated.filter(|_| is_current);
    if evacuated.is_some_and(|[_, status, ..]| *status == "True") {
        return Ok(Progress::Ended(Ok(format!(
            "Pool {} is empty.",
            pool.title()
        ))));
    }
    let message = evacuated.map_or("the controller has not begun", |[_, _, _, message]| message);
    let counted = ["claims", "sources", "snapshots", "unclaimed", "orphans"].map(|list| {
        let left = object.list(&format!("/status/evacuation/{list}")).len();
        (left > 0).then(|| format!("{left} {list}"))
    });
    let counted: Vec<_> = counted.into_iter().flatten().collect();
    Ok(Progress::Running(match counted.is_empty() {
        true => message.into(),
        false => format!("left: {} ({message})", counted.join(", ")),
    }))
}

pub async fn hand_over(
    cluster: &Cluster,
    object: &DynamicObject,
    pool: &Pool,
    node: &str,
    change: &Change,
) -> Result<()> {
    refuse_lost(pool)?;
    let marked = match object.text("/spec/node") {
        "" => &pool.node,
        marked => marked,
    };
    if marked == node {
        print_lines(&format!("Pool {} has node {} already.", pool.title(), node));
        return Ok(());
    }
    cluster.get(&object::NODE, "", node).await?;
    may_patch(cluster, pool).await?;
    let plan = format!(
        "Pool {} ({}) will belong to node {node}, and not to node {} any more.",
        pool.title(),
        pool.id,
        pool.node
    );
    confirm(change, &plan)?;
    let fields = json!({"spec": {"node": node}});
    let now = patch(cluster, change, &object::POOL, object, fields).await?;
    check_stored(now.text("/spec/node") == node, "spec.node", "pools.yaml")?;
    print_done(pool, &format!("handed over to {node}"), change);
    Ok(())
}
