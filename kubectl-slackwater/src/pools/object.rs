//! What all changes of a pool have in common: its object, the permission, and its claims.

use kube::api::DynamicObject;

use crate::change::{Need, mark, print_lines, require};
use crate::cli::Change;
use crate::cluster::object::{self, Fields, pool_of};
use crate::cluster::{Cluster, Scope};
use crate::failure::{Failure, Result};
use crate::model::{Pool, pools_of};

/// Claims that a plan names.
const MAX_CLAIMS: usize = 20;

/// The pool with this ID, NODE/NAME, or name.
pub async fn get(cluster: &Cluster, which: &str) -> Result<(DynamicObject, Pool)> {
    let params = pools_of(&cluster.driver, None);
    let all = cluster.get_all(&object::POOL, &Scope::All, &params).await?;
    let mut found: Vec<_> = all
        .into_iter()
        .map(|object| (Pool::of(&object), object))
        .filter(|(pool, _)| pool.id == which || pool.name == which || pool.title() == which)
        .collect();
    match (found.len(), found.pop()) {
        (1, Some((pool, object))) => Ok((object, pool)),
        (0, _) => Err(Failure::failed(format!(
            "no pool of {} has the ID or the name {which}; `kubectl slackwater pools` lists them",
            cluster.driver
        ))),
        (_, last) => {
            let all = found.into_iter().chain(last);
            let titles: Vec<_> = all.map(|(pool, _)| pool.title()).collect();
            Err(Failure::failed(format!(
                "several pools have the name {which}: give one of {}, or an ID",
                titles.join(", ")
            )))
        }
    }
}

/// Fails if the user may not change the pool.
pub async fn may_patch(cluster: &Cluster, pool: &Pool) -> Result<()> {
    let need = Need {
        verb: "patch",
        kind: &object::POOL,
        namespace: "",
        name: &pool.id,
    };
    require(cluster, &[need]).await
}

/// Refuses a pool that is marked as lost.
pub fn refuse_lost(pool: &Pool) -> Result<()> {
    match pool.lost {
        false => Ok(()),
        true => Err(Failure::failed(format!(
            "pool {} is marked as lost; undo this first: kubectl slackwater pool lose {} --undo",
            pool.title(),
            pool.id
        ))),
    }
}

/// Prints what a change has done to a pool.
pub fn print_done(pool: &Pool, done: &str, change: &Change) {
    let mark = mark(change);
    print_lines(&format!("pool.slackwater.dev/{} {done}{mark}", pool.id));
}

/// The claims of a pool, as lines of a plan.
pub async fn describe_claims(cluster: &Cluster, pool: &Pool) -> Result<String> {
    let all = kube::api::ListParams::default();
    let found = cluster.find(&object::VOLUME, &Scope::All, &all).await?;
    let Some(volumes) = found else {
        return Ok(
            "\nWhich claims these are is not shown: you may not list persistentvolumes.".into(),
        );
    };
    let is_own = |volume: &&DynamicObject| {
        let handle = volume.text("/spec/csi/volumeHandle");
        volume.text("/spec/csi/driver") == cluster.driver && pool_of(handle) == Some(&pool.id)
    };
    let mut claims: Vec<_> = volumes
        .iter()
        .filter(is_own)
        .map(|volume| {
            let text = |field| volume.text(field);
            format!(
                "\n  {}/{}",
                text("/spec/claimRef/namespace"),
                text("/spec/claimRef/name")
            )
        })
        .collect();
    claims.sort();
    let rest = claims.len().saturating_sub(MAX_CLAIMS);
    claims.truncate(MAX_CLAIMS);
    if rest > 0 {
        claims.push(format!("\n  and {rest} more"));
    }
    Ok(match claims.is_empty() {
        true => String::new(),
        false => format!(" Their claims:{}", claims.concat()),
    })
}
