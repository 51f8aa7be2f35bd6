//! Deletes a single snapshot that may be a member of a group: one that may be deleted individually,
//! or one whose group is gone.
//!
//! The record of a group's first member decides about the others. So before any member is deleted,
//! its group is resolved on all nodes while the router holds the group's lock; and the agent checks
//! its own records again, under its own lock.

use std::sync::Arc;

use tonic::Code;

use super::Router;
use super::agents::Agent;
use super::call::Call;
use super::resolve::{Asked, answered};
use super::route::Owner;
use crate::agent::DeleteOneRequest;
use crate::csi::controller_client::ControllerClient;
use crate::csi::{self, DeleteSnapshotResponse as Deleted};
use crate::error::{Error, Result, chain};
use crate::model::GroupId;
use crate::operation::Key;
use crate::service::request;

impl Router {
    /// DeleteSnapshot. A snapshot whose pool is lost, or whose ID is not valid, counts as deleted.
    pub(super) async fn delete_snapshot_of_csi(
        &self,
        call: &Call<'_>,
        message: csi::DeleteSnapshotRequest,
    ) -> Result<Deleted> {
        let id = request::snapshot_id(&message.snapshot_id)?;
        let Owner::Agent(agent) = self.owner(&id).await? else {
            return Ok(Deleted {});
        };
        let ask =
            async |mut client: ControllerClient<_>, request| client.delete_snapshot(request).await;
        match call.forward(&agent, message, ask).await {
            // The snapshot may belong to a group that has members on other nodes.
            Err(first) if has_code(&first, Code::Aborted) => {
                match self.delete_one(agent, &id, false).await {
                    // An agent of the previous release, on which an operation is running.
                    Err(error) if has_code(&error, Code::Unimplemented) => Err(first),
                    done => done.map(|()| Deleted {}),
                }
            }
            answer => answer,
        }
    }

    /// Deletes a snapshot on an agent; if it is a member of a group, the group is resolved first.
    pub(super) async fn delete_one(
        &self,
        agent: Arc<Agent>,
        id: &str,
        of_any_group: bool,
    ) -> Result<()> {
        let request = DeleteOneRequest {
            snapshot_id: id.to_string(),
            of_any_group,
            settled_group_id: String::new(),
        };
        let Some(group) = self.asked_to_delete(&agent, request.clone()).await? else {
            return Ok(());
        };
        let lock = self.cuts.locks.acquire(Key::Group(group.0))?;
        let router = self.clone();
        let work = async move {
            let _lock = lock;
            let unsettled = |reason: String| Error::GroupInDoubt {
                group: group.to_string(),
                reason,
            };
            let ids = [request.snapshot_id.clone()];
            let settled = router.resolve_and_read(group, &ids, Asked::Theirs).await;
            settled.map_err(|error| unsettled(chain(&error)))?;
            let request = DeleteOneRequest {
                settled_group_id: group.to_string(),
                ..request
            };
            match router.asked_to_delete(&agent, request).await? {
                None => Ok(()),
                Some(_) => Err(unsettled(format!(
                    "the agent of node {} reports a member in doubt again",
                    agent.node()
                ))),
            }
        };
        self.detached(work).await
    }

    /// Asks an agent to delete a snapshot. Returns the group that must be resolved first, if it is
    /// a member of one.
    async fn asked_to_delete(
        &self,
        agent: &Arc<Agent>,
        request: DeleteOneRequest,
    ) -> Result<Option<GroupId>> {
        let mut client = agent.client().await?;
        let group = answered(agent, client.delete_one(request)).await?;
        let group = match group.unsettled_group_id.as_str() {
            "" => Ok(None),
            group => group.parse().map(Some),
        };
        self.checked(
            agent,
            group.map_err(|_| "it contains no valid group ID".to_string()),
        )
    }
}

fn has_code(error: &Error, wanted: Code) -> bool {
    matches!(error, Error::Forwarded { code, .. } if *code == wanted as i32)
}
