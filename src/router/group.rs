//! The GroupController service of a cluster: the router cuts every group, including groups on a
//! single node.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tonic::Request;
use uuid::Uuid;

use super::Router;
use super::agents::Agent;
use super::cluster::{Note, ObjectRef, Reached};
use super::cuts::Wanted;
use super::cuts::events::about;
use super::cuts::events::content;
use super::resolve::Asked;
use crate::csi;
use crate::csi::group_controller_server::GroupController;
use crate::error::{Error, Kind, Result};
use crate::model::{GroupId, HomeId, VolumeId};
use crate::operation::{CreateGroup, Group, Key, NamedGroup, same_members, same_request};
use crate::service::{
    Rpc, RpcResult, ids, log_and_unwrap, max_wait, reply, request, status, warn_misplaced_policy,
};

#[tonic::async_trait]
impl GroupController for Router {
    async fn group_controller_get_capabilities(
        &self,
        request: Request<csi::GroupControllerGetCapabilitiesRequest>,
    ) -> RpcResult<csi::GroupControllerGetCapabilitiesResponse> {
        log_and_unwrap(request);
        Ok(tonic::Response::new(reply::group_capabilities()))
    }

    async fn create_volume_group_snapshot(
        &self,
        request: Request<csi::CreateVolumeGroupSnapshotRequest>,
    ) -> RpcResult<csi::CreateVolumeGroupSnapshotResponse> {
        let max_wait = max_wait(&request);
        let message = log_and_unwrap(request);
        let content = content(&message.parameters);
        let created = self.create_group(message, max_wait).await;
        let group = created.map_err(|error| status(Rpc::CreateVolumeGroupSnapshot, &error))?;
        ids::grouped(group.id);
        if let (Some(content), Some(member)) = (content, group.snapshots.first()) {
            let reached = Reached {
                level: member.level,
                reason: member.reason.clone(),
                cut_at: group.cut_at,
                frozen: None,
            };
            self.cluster.note(content, Note::Reached(reached));
        }
        Ok(tonic::Response::new(
            csi::CreateVolumeGroupSnapshotResponse {
                group_snapshot: Some(reply::group(
                    &group,
                    self.snapshot_topology_key().as_deref(),
                )),
            },
        ))
    }

    async fn delete_volume_group_snapshot(
        &self,
        request: Request<csi::DeleteVolumeGroupSnapshotRequest>,
    ) -> RpcResult<csi::DeleteVolumeGroupSnapshotResponse> {
        let deleted = match request::delete_group(&log_and_unwrap(request)) {
            Ok(named) => self.delete_group(named).await,
            Err(error) => Err(error),
        };
        deleted.map_err(|error| status(Rpc::DeleteVolumeGroupSnapshot, &error))?;
        Ok(tonic::Response::new(
            csi::DeleteVolumeGroupSnapshotResponse {},
        ))
    }

    async fn get_volume_group_snapshot(
        &self,
        request: Request<csi::GetVolumeGroupSnapshotRequest>,
    ) -> RpcResult<csi::GetVolumeGroupSnapshotResponse> {
        let got = match request::get_group(&log_and_unwrap(request)) {
            Ok(named) => self.get_group(named).await,
            Err(error) => Err(error),
        };
        let group = got.map_err(|error| status(Rpc::GetVolumeGroupSnapshot, &error))?;
        Ok(tonic::Response::new(csi::GetVolumeGroupSnapshotResponse {
            group_snapshot: Some(reply::group(
                &group,
                self.snapshot_topology_key().as_deref(),
            )),
        }))
    }
}

impl Router {
    fn snapshot_topology_key(&self) -> Option<String> {
        let is_shown = self.options.alpha.snapshot_topology;
        is_shown.then(|| self.topology_key())
    }

    /// The ID of a group's name: the same in every router of this driver.
    fn group_id(&self, name: &str) -> GroupId {
        let driver = self.options.driver_name.as_bytes();
        GroupId::of_name(HomeId(Uuid::new_v5(&Uuid::NAMESPACE_DNS, driver)), name)
    }

    async fn create_group(
        &self,
        asked: csi::CreateVolumeGroupSnapshotRequest,
        max_wait: Duration,
    ) -> Result<Group> {
        let request = warn_misplaced_policy(request::create_group(&asked)?);
        let id = self.group_id(&request.name);
        let wait_until = Instant::now() + max_wait;
        let locks = &self.cuts.locks;
        locks.wait_until_free(&[Key::Group(id.0)], max_wait).await;
        let lock = self.cuts.locks.acquire(Key::Group(id.0))?;
        let router = self.clone();
        let work = async move {
            let _lock = lock;
            router
                .get_or_create_group(id, request, asked.parameters, wait_until)
                .await
        };
        self.detached(work).await
    }

    async fn get_or_create_group(
        &self,
        id: GroupId,
        request: CreateGroup,
        given: HashMap<String, String>,
        wait_until: Instant,
    ) -> Result<Group> {
        let sources = request.source_volume_ids.clone();
        // A name that was generated for a Kubernetes object is used only with these volumes.
        let asked = match about(&given) {
            Some(ObjectRef::Group(_)) => Asked::Theirs,
            _ => Asked::All,
        };
        let state = self.resolve_and_read(id, &sources, asked).await?;
        state.check_agreement(id)?;
        if let Some(membership) = state.membership() {
            same_request(&request, membership)?;
            // All members are required, even those that may be deleted individually.
            return state.group(id, false);
        }
        let wanted = Wanted {
            shares: self.shares(&sources).await?,
            name: request.name,
            group: Some(id),
            parameters: request.parameters,
            given: given.clone(),
            sources: sources.clone(),
            requisite: Vec::new(),
            wait_until,
        };
        let cut = self.cut(wanted).await;
        self.record_cut_event(&given, cut.as_ref().map(Option::as_ref));
        cut?;
        let state = self.resolve_and_read(id, &sources, asked).await?;
        state.check_agreement(id)?;
        state.group(id, false)
    }

    /// The agents of the volumes, with the volumes of each in their order.
    async fn shares(&self, sources: &[String]) -> Result<Vec<(Arc<Agent>, Vec<String>)>> {
        let mut shares: Vec<(Arc<Agent>, Vec<String>)> = Vec::new();
        for source in sources {
            let Ok(volume) = source.parse::<VolumeId>() else {
                return Err(Error::no_volume(source));
            };
            let agent = self.agent_of(volume.pool).await?;
            let share = shares
                .iter_mut()
                .find(|(one, _)| one.node() == agent.node());
            match share {
                Some((_, of_agent)) => of_agent.push(source.clone()),
                None => shares.push((agent, vec![source.clone()])),
            }
        }
        Ok(shares)
    }

    async fn get_group(&self, named: NamedGroup) -> Result<Group> {
        let absent = || Error::not_found(Kind::Group, &named.group_id);
        let id: GroupId = named.group_id.parse().map_err(|_| absent())?;
        let state = self
            .resolve_and_read(id, &named.snapshot_ids, Asked::Theirs)
            .await?;
        let Some(membership) = state.membership() else {
            // The group is known not to exist only if all agents have answered.
            state.fail_if_unknown()?;
            return Err(absent());
        };
        state.check_agreement(id)?;
        same_members(&named, membership, state.found().cloned())?;
        state.group(id, membership.independent)
    }

    async fn delete_group(&self, named: NamedGroup) -> Result<()> {
        let Ok(id) = named.group_id.parse::<GroupId>() else {
            return Ok(());
        };
        let lock = self.cuts.locks.acquire(Key::Group(id.0))?;
        let router = self.clone();
        let work = async move {
            let _lock = lock;
            router.delete_resolved_group(id, named).await
        };
        self.detached(work).await
    }

    async fn delete_resolved_group(&self, id: GroupId, named: NamedGroup) -> Result<()> {
        let state = self
            .resolve_if_agreed(id, &named.snapshot_ids, Asked::Theirs)
            .await?;
        // If two nodes define the group differently, it is not known whose definition is true, and
        // deleting the group is the way out. Agents delete only members of this group.
        if let Some(membership) = state.membership()
            && state.check_agreement(id).is_ok()
        {
            same_members(&named, membership, state.found().cloned())?;
        }
        let mut members: Vec<String> = state.found().cloned().collect();
        members.extend(
            state
                .membership()
                .into_iter()
                .flat_map(|of| of.members.clone()),
        );
        if members.is_empty() && named.snapshot_ids.is_empty() {
            // The members may be on any agent, so an agent that cannot be reached may have them.
            return state.fail_if_unknown();
        }
        members.extend(named.snapshot_ids);
        self.delete_group_members(id, self.ids_by_node(&members).await?)
            .await
    }
}
