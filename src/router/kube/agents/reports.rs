//! What controllers request of agents: their reports, their volumes, deletions of orphans and changes
//! of pools. Implements [`AgentReports`] with calls to agents.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use futures_util::stream::{self, StreamExt};
use k8s_openapi::jiff::Timestamp;
use tonic::Code;

use crate::agent::{AdoptPoolRequest, DescribeVolumesRequest, ForgetPoolRequest};
use crate::csi::{DeleteSnapshotRequest, DeleteVolumeRequest};
use crate::error::{Error, Result, chain};
use crate::model::PoolId;
use crate::router::agents::{Agent, Agents};
use crate::router::call::within;
use crate::router::kube::AgentReports;
use crate::router::kube::orphans::{self, DescribedVolume, Orphan, OrphanKind, Stored};
use crate::router::kube::pools::requests::progress::PoolRequest;
use crate::router::kube::pools::status::Report;

/// The timeout of one page. A page of a thousand entries takes milliseconds, but a disk may hang.
const LIST_TIMEOUT: Duration = Duration::from_secs(30);
/// How long an agent may take for all its pools, so that one that hangs delays the others only once.
const AGENT_TIMEOUT: Duration = Duration::from_secs(120);
/// Number of agents that are asked at a time.
const MAX_ASKED_AT_ONCE: usize = 16;
/// Maximum number of volumes and snapshots of a node that are kept: more than a node can serve, and some
/// 50 MB.
const MAX_STORED: usize = 200_000;
/// The driver may overwrite blocks with zeros, or wait for a disk. It goes on after this time, and the next
/// pass repeats the request.
const CHANGE_TIMEOUT: Duration = Duration::from_secs(60);

#[tonic::async_trait]
impl AgentReports for Agents {
    fn place(&self, agents: BTreeMap<String, SocketAddr>) {
        let each = agents.into_iter();
        self.set(each.map(|(node, address)| (node, address.to_string())));
    }

    fn reports(&self) -> Vec<Report> {
        let each = self.all().into_iter();
        each.map(|agent| {
            let seen = agent.seen();
            let at = seen.answered.and_then(|at| {
                // By the wall clock, because it becomes part of an object's status.
                let at = SystemTime::now().checked_sub(at.elapsed())?;
                Timestamp::try_from(at).ok()
            });
            Report {
                node: agent.node().to_string(),
                seen: at.zip(seen.description),
                problem: seen.problem,
                is_refused: seen.is_refused,
            }
        })
        .collect()
    }

    async fn stored(&self) -> Vec<Stored> {
        let each = self.all().into_iter().map(stored_by);
        let each = stream::iter(each).buffer_unordered(MAX_ASKED_AT_ONCE);
        each.concat().await
    }

    async fn describe(&self, node: &str, volume_ids: Vec<String>) -> Result<Vec<DescribedVolume>> {
        let agent = self.of_node(node).ok_or_else(|| unknown(node))?;
        let mut client = agent.client().await?;
        let request = within(DescribeVolumesRequest { volume_ids }, LIST_TIMEOUT);
        let answer = client.describe_volumes(request).await;
        let answer = answer.map_err(|status| agent.error(&status))?;
        Ok(answer.into_inner().volumes)
    }

    async fn delete(&self, orphan: &Orphan) -> Result<()> {
        let agent = self.of_node(&orphan.node);
        let agent = agent.ok_or_else(|| unknown(&orphan.node))?;
        let mut client = agent.controller().await?;
        let deleted = match orphan.what {
            OrphanKind::Volume => {
                let request = DeleteVolumeRequest {
                    volume_id: orphan.id.clone(),
                    ..DeleteVolumeRequest::default()
                };
                let request = within(request, CHANGE_TIMEOUT);
                client.delete_volume(request).await.map(drop)
            }
            OrphanKind::Snapshot => {
                let request = DeleteSnapshotRequest {
                    snapshot_id: orphan.id.clone(),
                    ..DeleteSnapshotRequest::default()
                };
                let request = within(request, CHANGE_TIMEOUT);
                client.delete_snapshot(request).await.map(drop)
            }
        };
        deleted.map_err(|status| agent.error(&status))
    }

    async fn change_pool(&self, node: &str, pool: PoolId, request: PoolRequest) -> Result<()> {
        let agent = self.of_node(node).ok_or_else(|| unknown(node))?;
        let mut client = agent.client().await?;
        let pool_id = pool.to_string();
        let answer = match request {
            PoolRequest::Adopt => {
                let asked = within(AdoptPoolRequest { pool_id }, CHANGE_TIMEOUT);
                client.adopt_pool(asked).await.map(drop)
            }
            PoolRequest::Forget => {
                let asked = within(ForgetPoolRequest { pool_id }, CHANGE_TIMEOUT);
                client.forget_pool(asked).await.map(drop)
            }
        };
        match answer {
            // What the agent reports from now on decides.
            Ok(()) => {
                agent.ask_since(Instant::now()).await;
                Ok(())
            }
            Err(status) if status.code() == Code::Unimplemented => Err(Error::refused(
                format!("the agent of node {node}"),
                "it is of an earlier release, which cannot do this; update it",
            )),
            Err(status) => Err(agent.error(&status)),
        }
    }
}

/// Asks one pool of an agent after the other. What it has not answered within [`AGENT_TIMEOUT`] is
/// left out.
async fn stored_by(agent: Arc<Agent>) -> Vec<Stored> {
    let seen = agent.seen();
    let pools = seen.pools.iter().filter(|pool| pool.served);
    let until = tokio::time::Instant::now() + AGENT_TIMEOUT;
    let (mut stored, mut entries) = (Vec::new(), 0);
    for pool in pools.filter(|_| seen.is_reachable()) {
        let list = async {
            let client = agent.controller().await.map_err(|error| chain(&error))?;
            orphans::ask(client, Some(pool.id), LIST_TIMEOUT).await
        };
        let answer = match tokio::time::timeout_at(until, list).await {
            Ok(answer) => answer,
            Err(_) => Err(format!(
                "its agent has not listed all pools within {} s",
                AGENT_TIMEOUT.as_secs()
            )),
        };
        let answer = answer.and_then(|(volumes, snapshots)| {
            entries += volumes.len() + snapshots.len();
            match entries > MAX_STORED {
                true => Err(format!("its node has more than {MAX_STORED} objects")),
                false => Ok((volumes, snapshots)),
            }
        });
        match answer {
            Ok((volumes, snapshots)) => stored.push(Stored {
                pool: pool.id,
                node: agent.node().to_string(),
                volumes,
                snapshots,
            }),
            Err(problem) => tracing::debug!(
                node = agent.node(),
                pool = %pool.id,
                problem,
                "failed to list the contents of a pool"
            ),
        }
    }
    stored
}

fn unknown(node: &str) -> Error {
    let what = format!("the agent of node {node}");
    Error::unreachable(what, "it is not known any more")
}
