//! What the router that leads writes: Pool objects and Node labels.
//!
//! All of it is worked out from memory, and only what differs is written; each write is harmless
//! when it's done twice or cut off.

use std::future::Future;
use std::sync::atomic::Ordering;

use ::kube::Error as KubeError;
use ::kube::api::{Api, Patch, PatchParams, PostParams};
use ::kube::core::PartialObjectMeta;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::jiff::Timestamp;

use super::label::{self, Act};
use super::picture::{Change, Picture, Report};
use super::pool::{Health, Pool};
use super::{Fleet, InCluster, NODES, PATIENCE, POOLS, VOLUMES, ask, names, topology_key};
use crate::error::chain;
use crate::router::cluster::{About, Cluster};

/// Looks every few seconds, for ever.
pub(super) async fn run(cluster: &InCluster, fleet: &dyn Fleet) {
    let mut leads_since = None;
    loop {
        tokio::time::sleep(cluster.options.look_every).await;
        if !cluster.is_leader() {
            leads_since = None;
            // Only one says it, so that numbers of two routers don't add up.
            cluster.conflicts.store(0, Ordering::Relaxed);
            continue;
        }
        let since = *leads_since.get_or_insert_with(Timestamp::now);
        if let Err(error) = look(cluster, &fleet.reports(), since).await {
            tracing::warn!(error, "what agents report can't be written down");
        }
    }
}

async fn look(
    cluster: &InCluster,
    reports: &[Report],
    leads_since: Timestamp,
) -> Result<(), String> {
    let knows = |what| cluster.following.is_complete(what);
    if !knows(NODES) || !knows(POOLS) || !knows(VOLUMES) {
        return Ok(());
    }
    let nodes = cluster.node_labels();
    let picture = Picture {
        reports,
        pools: &cluster.pool_objects(),
        homes: &cluster.volumes.homes(),
        nodes: &names(&nodes),
        lost_after: cluster.options.lost_after,
        leads_since,
        now: Timestamp::now(),
    };
    for change in picture.changes() {
        write(cluster, &change).await?;
    }
    let volumes_at = |home: &str| cluster.volumes.at_home(home);
    let acts = label::acts(reports, &nodes, volumes_at, Timestamp::now());
    let conflicts = acts
        .iter()
        .filter(|act| matches!(act, Act::Conflict { .. }))
        .count();
    cluster.conflicts.store(conflicts as u64, Ordering::Relaxed);
    for act in acts {
        apply(cluster, act).await?;
    }
    Ok(())
}

/// A write that somebody else has made needless is no error; one that isn't allowed or that
/// doesn't get through ends this look.
async fn done<T>(
    doing: &str,
    write: impl Future<Output = Result<T, KubeError>>,
) -> Result<(), String> {
    match tokio::time::timeout(PATIENCE, write).await {
        Ok(Ok(_)) => Ok(()),
        Ok(Err(KubeError::Api(status))) if status.code == 409 || status.code == 404 => Ok(()),
        Ok(Err(error)) => Err(format!("{doing}: {}", chain(&error))),
        Err(_) => Err(format!("{doing}: no answer")),
    }
}

async fn write(cluster: &InCluster, change: &Change) -> Result<(), String> {
    if !cluster.is_leader() {
        return Err("another router leads now".into());
    }
    let api = Api::<Pool>::all(cluster.client.clone());
    let name = change.id.to_string();
    if change.is_new {
        let pool = Pool::new(change.id, &cluster.options.driver);
        let params = PostParams::default();
        done("create a Pool", api.create(&params, &pool)).await?;
    }
    let params = PatchParams::default();
    if let Some(reason) = &change.lose {
        let patch = serde_json::json!({ "spec": { "lost": true, "lostReason": reason } });
        let patch = Patch::Merge(patch);
        done("mark a Pool as lost", api.patch(&name, &params, &patch)).await?;
        tracing::warn!(pool = name, reason, "a pool is marked as lost");
        cluster.tell(&About::Pool(change.id), true, "PoolLost", reason.clone());
    }
    let patch = Patch::Merge(serde_json::json!({ "status": change.status }));
    done(
        "write a Pool's status",
        api.patch_status(&name, &params, &patch),
    )
    .await?;
    if change.turned {
        let health = change.status.health;
        let is_well = health == Health::Healthy;
        let message = match is_well {
            true => format!(
                "pool {} of node {} is served",
                change.status.name, change.status.node
            ),
            false => change.status.message.clone(),
        };
        tracing::info!(
            pool = name,
            health = health.word(),
            message,
            "a pool's health"
        );
        cluster.tell(&About::Pool(change.id), !is_well, reason(health), message);
    }
    Ok(())
}

/// The event that tells of a pool's health.
fn reason(health: Health) -> &'static str {
    match health {
        Health::Healthy => "PoolHealthy",
        Health::Degraded => "PoolDegraded",
        Health::NotServed => "PoolNotServed",
        Health::Unreachable => "PoolUnreachable",
        Health::Conflict => "PoolConflict",
        Health::Forgotten => "PoolForgotten",
        Health::Lost => "PoolLost",
        Health::Quarantined => "PoolQuarantined",
        Health::Unknown | Health::Other => "PoolUnknown",
    }
}

async fn apply(cluster: &InCluster, act: Act) -> Result<(), String> {
    match act {
        Act::Conflict { node, message } => {
            cluster.tell(&About::Node(node), true, "HomeConflict", message);
            Ok(())
        }
        Act::Overwrite { node, old, new } => {
            let key = topology_key(&cluster.options.driver);
            let api = Api::<PartialObjectMeta<Node>>::all(cluster.client.clone());
            let now = ask("a Node", api.get_opt(&node))
                .await
                .map_err(|error| chain(&error))?;
            let Some(now) = now.map(|now| now.metadata) else {
                return Ok(());
            };
            if now.labels.as_ref().and_then(|labels| labels.get(&key)) != Some(&old) {
                return Ok(());
            }
            // Only over the version that was looked at.
            let patch = Patch::Merge(serde_json::json!({ "metadata": {
                "resourceVersion": now.resource_version,
                "labels": { &key: new },
            }}));
            let params = PatchParams::default();
            done("mend a Node's label", api.patch(&node, &params, &patch)).await?;
            let message = format!(
                "label {key} was {old}, to which no PersistentVolume of this node refers any \
                 more; it's now {new}, the home of the node's disks"
            );
            tracing::info!(node, old, new, "a node's label is mended");
            cluster.tell(&About::Node(node), false, "HomeRelabelled", message);
            Ok(())
        }
    }
}
