//! CreateSnapshot: forwarded to the agent of the volume, after a check that no other agent has the name
//! for another volume.

use std::sync::Arc;
use std::time::{Instant, SystemTime};

use futures_util::StreamExt;
use tonic::Code;

use super::Router;
use super::agents::Agent;
use super::call::Call;
use super::cluster::{Note, Reached};
use super::cuts::events::{SNAPSHOT_CONTENT, content};
use super::find::AT_ONCE;
use super::route::{Owner, absent};
use crate::agent::FindRequest;
use crate::agent::find_request::Kind as Found;
use crate::csi::{CreateSnapshotRequest, CreateSnapshotResponse};
use crate::error::{Error, Kind, Result};
use crate::model::Level;
use crate::operation::Key;
use crate::service::{reached, request};

impl Router {
    /// CreateSnapshot. A name exists at most once on the agent of its source. Whether another agent
    /// has it, for another volume, is checked unless Kubernetes generated the name.
    pub(super) async fn snapshot(
        &self,
        call: &Call<'_>,
        message: CreateSnapshotRequest,
    ) -> Result<CreateSnapshotResponse> {
        let key = self
            .options
            .alpha
            .snapshot_topology
            .then(|| self.topology_key());
        let asked = request::create_snapshot(&message, key.as_deref())?.args;
        let source = &asked.source_volume_id;
        let agent = match self.owner(source).await? {
            Owner::Agent(agent) => agent,
            Owner::Nowhere(why) => return Err(absent(call.rpc(), Kind::Volume, source, why)),
        };
        if !message.parameters.contains_key(SNAPSHOT_CONTENT) {
            self.name_is_free(call, &asked.name, source, &agent).await?;
        }
        if asked.parameters.consistency == Level::Application {
            // The application runs in a pod, which no agent can reach.
            let lock = [Key::SnapshotName(asked.name.clone())];
            let locks = &self.cuts.locks;
            let wait_until = Instant::now() + call.max_wait();
            locks.wait_until_free(&lock, call.max_wait()).await;
            match self.cut_single(agent.clone(), &message, wait_until).await {
                // The volume is in backoff after another call has failed; the snapshot may exist.
                Err(paused @ Error::Paused { .. }) => {
                    let question = named(&asked.name);
                    if self.find(call, agent.clone(), question).await?.is_none() {
                        return Err(paused);
                    }
                }
                cut => cut?,
            }
        }
        let content = content(&message.parameters);
        let answer = call
            .forward_whole(&agent, message, async |mut client, request| {
                client.create_snapshot(request).await
            })
            .await?;
        let reached = reached::read(answer.metadata());
        let frozen = reached::read_frozen(answer.metadata());
        let created =
            self.check_created_snapshot(&agent, (&asked.name, source), answer.into_inner())?;
        if let (Some(content), Some((level, reason))) = (content, reached) {
            let at = created.snapshot.as_ref();
            let at = at.and_then(|created| SystemTime::try_from(created.creation_time?).ok());
            let at = at.and_then(|at| at.duration_since(SystemTime::UNIX_EPOCH).ok());
            let reached = Reached {
                level,
                reason,
                frozen,
                cut_at: at.map_or(0, |at| u64::try_from(at.as_nanos()).unwrap_or(0)),
            };
            self.cluster.note(content, Note::Reached(reached));
        }
        Ok(created)
    }

    /// Fails if another agent than the source's has a snapshot with this name, or may have one.
    async fn name_is_free(
        &self,
        call: &Call<'_>,
        name: &str,
        source: &str,
        owner: &Arc<Agent>,
    ) -> Result<()> {
        let mut others = self.agents.all();
        others.retain(|agent| !Arc::ptr_eq(agent, owner) && !self.is_written_off(agent));
        let looks = others
            .into_iter()
            .map(|agent| self.find(call, agent, named(name)));
        let mut looks = futures_util::stream::iter(looks).buffer_unordered(AT_ONCE);
        let mut unknown = None;
        while let Some(found) = looks.next().await {
            match found {
                Ok(None) => {}
                Ok(Some(id)) => {
                    return Err(Error::Forwarded {
                        code: Code::AlreadyExists as i32,
                        message: format!(
                            "snapshot {name:?} exists as {id}, but of another volume than {source}"
                        ),
                    });
                }
                Err(error) => unknown = Some(error),
            }
        }
        unknown.map_or(Ok(()), Err)
    }
}

/// A request to look up a snapshot by its name.
fn named(name: &str) -> FindRequest {
    FindRequest {
        kind: Found::Snapshot.into(),
        name: name.to_string(),
        pool: String::new(),
    }
}
