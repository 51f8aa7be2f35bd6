//! ListVolumes, ListSnapshots and ControllerListVolumeHealth of a whole cluster.

mod pagination;

use std::collections::BTreeSet;

use tonic::transport::Channel;

use super::Router;
use super::call::Call;
use super::checked::{same, same_pool};
use super::resolve::InPart;
use super::route::Owner;
use crate::csi::controller_client::ControllerClient;
use crate::csi::{
    ControllerListVolumeHealthRequest, ControllerListVolumeHealthResponse, ListSnapshotsRequest,
    ListSnapshotsResponse, ListVolumesRequest, ListVolumesResponse, VolumeHealth,
    list_snapshots_response, list_volumes_response,
};
use crate::error::Result;
use pagination::{Wanted, of_pool};

type Client = ControllerClient<Channel>;

impl Router {
    pub(super) async fn list_volumes_of_all(
        &self,
        call: &Call<'_>,
        message: &ListVolumesRequest,
    ) -> Result<ListVolumesResponse> {
        let wanted = Wanted::new(message.max_entries, &message.starting_token)?;
        let id = |entry: &list_volumes_response::Entry| {
            let volume = entry.volume.as_ref();
            volume
                .map(|volume| volume.volume_id.clone())
                .unwrap_or_default()
        };
        let (entries, next_token) = self
            .list(&wanted, id, |agent, ask| async move {
                let mut client: Client = agent.controller().await?;
                let question = ListVolumesRequest {
                    max_entries: ask.max_entries,
                    starting_token: ask.starting_token.clone(),
                };
                let question = of_pool(call, question, &ask)?;
                let answer = client.list_volumes(question);
                let answer = call.ask(&agent, answer).await?.into_inner();
                Ok((answer.entries, answer.next_token))
            })
            .await?;
        Ok(ListVolumesResponse {
            entries,
            next_token,
        })
    }

    pub(super) async fn list_health_of_all(
        &self,
        call: &Call<'_>,
        message: &ControllerListVolumeHealthRequest,
    ) -> Result<ControllerListVolumeHealthResponse> {
        let wanted = Wanted::new(message.max_entries, &message.starting_token)?;
        let id = |entry: &VolumeHealth| entry.volume_id.clone();
        let secrets = &message.secrets;
        let (entries, next_token) = self
            .list(&wanted, id, |agent, ask| async move {
                let mut client: Client = agent.controller().await?;
                let question = ControllerListVolumeHealthRequest {
                    max_entries: ask.max_entries,
                    starting_token: ask.starting_token.clone(),
                    secrets: secrets.clone(),
                };
                let question = of_pool(call, question, &ask)?;
                let answer = client.controller_list_volume_health(question);
                let answer = call.ask(&agent, answer).await?.into_inner();
                Ok((answer.entries, answer.next_token))
            })
            .await?;
        Ok(ControllerListVolumeHealthResponse {
            entries,
            next_token,
        })
    }

    /// A list by ID or by source asks only the agent that has the object; it is empty if the ID is
    /// invalid or its pool is lost. Members of a group that is not complete on all nodes are
    /// returned only in a list by ID.
    pub(super) async fn list_snapshots_of_all(
        &self,
        call: &Call<'_>,
        message: ListSnapshotsRequest,
    ) -> Result<ListSnapshotsResponse> {
        let wanted = Wanted::new(message.max_entries, &message.starting_token)?;
        for filter in [&message.snapshot_id, &message.source_volume_id] {
            if filter.is_empty() {
                continue;
            }
            let Owner::Agent(agent) = self.owner(filter).await? else {
                return Ok(ListSnapshotsResponse::default());
            };
            let ask = async |mut client: Client, request| client.list_snapshots(request).await;
            let mut answer = call.forward(&agent, message.clone(), ask).await?;
            let about = |entry: &list_snapshots_response::Entry| {
                let snapshot = entry.snapshot.as_ref();
                let value = snapshot.map(|snapshot| match message.snapshot_id.is_empty() {
                    true => &*snapshot.source_volume_id,
                    false => &*snapshot.snapshot_id,
                });
                same(filter, value)?;
                let id = snapshot.map(|snapshot| &*snapshot.snapshot_id);
                same_pool(filter, id)
            };
            let verdict = answer.entries.iter().try_for_each(about);
            self.checked(&agent, verdict)?;
            if message.snapshot_id.is_empty() {
                self.hide(&mut answer.entries, &self.uncommitted_groups())
                    .await;
            }
            return Ok(answer);
        }
        // This comes before the list: a group that is not incomplete now is complete when it is
        // listed.
        self.agents.ask_all_now().await;
        let in_part = self.uncommitted_groups();
        let id = |entry: &list_snapshots_response::Entry| {
            let snapshot = entry.snapshot.as_ref();
            let id = snapshot.map(|snapshot| snapshot.snapshot_id.clone());
            id.unwrap_or_default()
        };
        let secrets = &message.secrets;
        let (mut entries, next_token) = self
            .list(&wanted, id, |agent, ask| async move {
                let mut client: Client = agent.controller().await?;
                let question = ListSnapshotsRequest {
                    max_entries: ask.max_entries,
                    starting_token: ask.starting_token.clone(),
                    secrets: secrets.clone(),
                    ..ListSnapshotsRequest::default()
                };
                let question = of_pool(call, question, &ask)?;
                let answer = client.list_snapshots(question);
                let answer = call.ask(&agent, answer).await?.into_inner();
                Ok((answer.entries, answer.next_token))
            })
            .await?;
        self.hide(&mut entries, &in_part).await;
        Ok(ListSnapshotsResponse {
            entries,
            next_token,
        })
    }
}

impl Router {
    /// Removes the snapshots of moves, and the members of these groups, if an agent that reports the
    /// group as incomplete has members of it.
    async fn hide(&self, entries: &mut Vec<list_snapshots_response::Entry>, groups: &InPart) {
        let mut hidden = BTreeSet::new();
        let mut seen = BTreeSet::new();
        for snapshot in entries.iter().filter_map(|entry| entry.snapshot.as_ref()) {
            let group = &snapshot.group_snapshot_id;
            let Some(nodes) = groups.get(group).filter(|_| seen.insert(group.clone())) else {
                continue;
            };
            if self.has_part((group, &snapshot.snapshot_id), nodes).await {
                hidden.insert(group.clone());
            }
        }
        let moved = self.cluster.moved_ids();
        entries.retain(|entry| {
            entry.snapshot.as_ref().is_none_or(|snapshot| {
                let group = &snapshot.group_snapshot_id;
                !hidden.contains(group) && !moved.contains(&snapshot.snapshot_id)
            })
        });
    }
}
