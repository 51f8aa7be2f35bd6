//! What the router that leads writes: Pool objects and Node labels.
//!
//! All of it is worked out from memory, and only what differs is written; each write is harmless
//! when it's done twice or cut off.

use std::collections::BTreeSet;
use std::future::Future;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use ::kube::Error as KubeError;
use ::kube::api::{Api, Patch, PatchParams, PostParams};
use ::kube::core::PartialObjectMeta;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::jiff::Timestamp;

use super::label::{self, Act};
use super::pods;
use super::pool::{Health, Pool};
use super::pool_status::{Change, PoolStatuses, Report};
use super::{
    API_TIMEOUT, AgentReports, InCluster, NODES, POOLS, VOLUMES, ask, names, topology_key,
};
use crate::error::chain;
use crate::model::VolumeId;
use crate::router::cluster::{Cluster, ObjectRef};

/// Between two looks whether the cluster has snapshots.
const SNAPSHOT_API_CHECK_INTERVAL: Duration = Duration::from_secs(600);
/// The API of snapshots.
const SNAPSHOTS: &str = "snapshot.storage.k8s.io/v1";

/// Looks every few seconds, for ever.
pub(super) async fn run(cluster: &InCluster, fleet: &dyn AgentReports) {
    let mut leads_since = None;
    let mut snapshots: Option<Instant> = None;
    let mut small = BTreeSet::new();
    loop {
        tokio::time::sleep(cluster.options.look_every).await;
        if !cluster.is_leader() {
            leads_since = None;
            // Only one says it, so that numbers of two routers don't add up.
            cluster.conflicts.store(0, Ordering::Relaxed);
            cluster.snapshotter_missing.store(false, Ordering::Relaxed);
            snapshots = None;
            small.clear();
            continue;
        }
        if snapshots.is_none_or(|at| at.elapsed() >= SNAPSHOT_API_CHECK_INTERVAL) {
            snapshots = Some(Instant::now());
            look_for_snapshots(cluster).await;
        }
        let since = *leads_since.get_or_insert_with(Timestamp::now);
        let reports = fleet.reports();
        let failed = reconcile(cluster, &reports, since).await;
        tell_not_grown(cluster, &reports, &mut small);
        // Each fails for itself: what one agent says must not keep the others from being written.
        if let Some((what, error)) = failed.first() {
            let more = failed.len() - 1;
            tracing::warn!(what, error, more, "failed to update Pool or Node objects");
        }
    }
}

/// A chart that was rendered without the cluster leaves csi-snapshotter out, and nothing else says
/// that snapshots are then never made.
async fn look_for_snapshots(cluster: &InCluster) {
    if cluster.options.has_snapshotter {
        return;
    }
    let found = cluster.client.list_api_group_resources(SNAPSHOTS);
    let Ok(found) = tokio::time::timeout(API_TIMEOUT, found).await else {
        return;
    };
    let missing = found.is_ok_and(|found| !found.resources.is_empty());
    cluster
        .snapshotter_missing
        .store(missing, Ordering::Relaxed);
    if missing {
        let message = "the cluster has the snapshot CRDs, but this installation of Slackwater has no csi-snapshotter, so VolumeSnapshots are never created: install it with the value snapshots=true";
        tracing::warn!(advice = message, "found no csi-snapshotter");
        cluster.record_event(&ObjectRef::Router, true, "NoSnapshotter", message.into());
    }
}

/// Tells at its claim, once for each reason, that a volume is used with a smaller file system than
/// it should have. `told` are those of the last look; a volume counts for the node that has its pool.
fn tell_not_grown(cluster: &InCluster, reports: &[Report], told: &mut BTreeSet<(String, String)>) {
    let pools = cluster.known_pools();
    let mut now = BTreeSet::new();
    for report in reports {
        let Some((_, answer)) = &report.seen else {
            continue;
        };
        for small in &answer.not_grown {
            let id = small.volume_id.parse::<VolumeId>();
            let is_its = id.is_ok_and(|id| {
                let mut of_it = pools.iter().filter(|pool| pool.node == report.node);
                of_it.any(|pool| pool.id == id.pool)
            });
            let Some(claim) = cluster.claim_of(&small.volume_id).filter(|_| is_its) else {
                continue;
            };
            let known = (small.volume_id.clone(), small.reason.clone());
            if !told.contains(&known) {
                let message = format!(
                    "the file system was not grown to the volume's size and is used at its current size: {}; it is tried again the next time the volume is staged, so delete the pods that use it",
                    small.reason
                );
                cluster.record_event(
                    &ObjectRef::Claim(claim),
                    true,
                    "FileSystemNotGrown",
                    message,
                );
            }
            now.insert(known);
        }
    }
    *told = now;
}

async fn reconcile(
    cluster: &InCluster,
    reports: &[Report],
    leads_since: Timestamp,
) -> Vec<(String, String)> {
    let knows = |what| cluster.following.is_complete(what);
    let mut failed = Vec::new();
    if !knows(NODES) || !knows(POOLS) || !knows(VOLUMES) {
        return failed;
    }
    for report in reports.iter().filter(|report| report.is_refused) {
        let about = ObjectRef::Node(report.node.clone());
        let problem = report.problem.clone().unwrap_or_default();
        cluster.record_event(&about, true, "AnswerRefused", problem);
    }
    let nodes = cluster.node_labels();
    let picture = PoolStatuses {
        pods: &pods::named(cluster, reports).await,
        reports,
        pools: &cluster.pool_objects(),
        homes: &cluster.volumes.homes(),
        nodes: &names(&nodes),
        lost_after: cluster.options.lost_after,
        leads_since,
        now: Timestamp::now(),
    };
    for change in picture.changes() {
        if let Err(error) = write(cluster, &change).await {
            failed.push((format!("pool {}", change.id), error));
        }
    }
    let volumes_at = |home: &str| cluster.volumes.at_home(home);
    let acts = label::acts(reports, &nodes, volumes_at, Timestamp::now());
    let conflicts = acts
        .iter()
        .filter(|act| matches!(act, Act::Conflict { .. }))
        .count();
    cluster.conflicts.store(conflicts as u64, Ordering::Relaxed);
    for act in acts {
        let (Act::Conflict { node, .. } | Act::Overwrite { node, .. }) = &act;
        let what = format!("node {node}");
        if let Err(error) = apply(cluster, act).await {
            failed.push((what, error));
        }
    }
    failed
}

/// A write that somebody else has made needless is no error.
async fn done<T>(
    doing: &str,
    write: impl Future<Output = Result<T, KubeError>>,
) -> Result<(), String> {
    match tokio::time::timeout(API_TIMEOUT, write).await {
        Ok(Ok(_)) => Ok(()),
        Ok(Err(KubeError::Api(status))) if status.code == 409 || status.code == 404 => Ok(()),
        Ok(Err(error)) => Err(format!("{doing}: {}", chain(&error))),
        Err(_) => Err(format!("{doing}: no answer from the API server")),
    }
}

async fn write(cluster: &InCluster, change: &Change) -> Result<(), String> {
    if !cluster.is_leader() {
        return Err("another router is the leader now".into());
    }
    let api = Api::<Pool>::all(cluster.client.clone());
    let name = change.id.to_string();
    let object = ObjectRef::Pool(change.id);
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
        tracing::warn!(pool = name, reason, "marked a pool as lost");
        cluster.record_event(&object, true, "PoolLost", reason.clone());
    }
    let patch = Patch::Merge(serde_json::json!({ "status": change.status }));
    done(
        "update a Pool's status",
        api.patch_status(&name, &params, &patch),
    )
    .await?;
    if change.handed_over {
        let patch = Patch::Merge(serde_json::json!({ "spec": { "node": null } }));
        done(
            "clear spec.node of a Pool",
            api.patch(&name, &params, &patch),
        )
        .await?;
        let message = format!("the pool was handed over to node {}", change.status.node);
        tracing::info!(pool = name, message, "handed over a pool");
        cluster.record_event(&object, false, "PoolHandedOver", message);
    }
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
            "recorded a change of a pool's health"
        );
        cluster.record_event(&object, !is_well, reason(health), message);
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
            cluster.record_event(&ObjectRef::Node(node), true, "HomeConflict", message);
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
            done(
                "update the label of a Node",
                api.patch(&node, &params, &patch),
            )
            .await?;
            let message = format!(
                "label {key} was changed from {old}, which no PersistentVolume of this node uses any more, to {new}, the home of the node's disks"
            );
            tracing::info!(node, old, new, "updated the label of a node");
            cluster.record_event(&ObjectRef::Node(node), false, "HomeRelabelled", message);
            Ok(())
        }
    }
}
