//! The Controller service of a cluster: each call about one object is forwarded to the agent that
//! has it.
//!
//! The router parses a request as an agent does, so that an invalid request is refused without
//! asking any agent. It then forwards the original request.

use tonic::transport::Channel;
use tonic::{Request, Response, Status};

use super::Router;
use super::call::Call;
use super::checked::same;
use super::route::{Owner, absent};
use crate::csi;
use crate::csi::controller_client::ControllerClient;
use crate::csi::controller_server::Controller;
use crate::error::{Kind, Result};
use crate::service::{Rpc, RpcResult, ids, log_and_unwrap, only_if, reply, request};

type Client = ControllerClient<Channel>;

impl Router {
    /// Forwards a call about one object to the agent that has it.
    async fn one<M: Clone, A, W>(
        &self,
        call: &Call<'_>,
        kind: Kind,
        id: &str,
        message: M,
        ask: impl Fn(Client, Request<M>) -> W,
    ) -> Result<A>
    where
        W: Future<Output = std::result::Result<Response<A>, Status>>,
    {
        self.about_one(call, (kind, id), message, ask, |_| Ok(()))
            .await
    }

    /// Like `one`, and checks the answer.
    async fn about_one<M: Clone, A, W>(
        &self,
        call: &Call<'_>,
        (kind, id): (Kind, &str),
        message: M,
        ask: impl Fn(Client, Request<M>) -> W,
        look: impl Fn(&A) -> std::result::Result<(), String>,
    ) -> Result<A>
    where
        W: Future<Output = std::result::Result<Response<A>, Status>>,
    {
        match self.owner(id).await? {
            Owner::Agent(agent) => {
                let answer = call.forward(&agent, message, ask).await?;
                self.checked(&agent, look(&answer))?;
                Ok(answer)
            }
            Owner::Nowhere(why) => Err(absent(call.rpc(), kind, id, why)),
        }
    }
}

#[tonic::async_trait]
impl Controller for Router {
    async fn create_volume(
        &self,
        request: Request<csi::CreateVolumeRequest>,
    ) -> RpcResult<csi::CreateVolumeResponse> {
        let call = self.call(Rpc::CreateVolume, &request);
        let created = self.create_volume(&call, log_and_unwrap(request)).await;
        if let Ok(csi::CreateVolumeResponse {
            volume: Some(created),
        }) = &created
        {
            ids::record("volume_id", &created.volume_id);
        }
        call.answer(created)
    }

    /// A volume whose pool is lost, or whose ID is not valid, counts as deleted.
    async fn delete_volume(
        &self,
        request: Request<csi::DeleteVolumeRequest>,
    ) -> RpcResult<csi::DeleteVolumeResponse> {
        let call = self.call(Rpc::DeleteVolume, &request);
        let message = log_and_unwrap(request);
        let deleted = async {
            let id = request::volume_id(&message.volume_id)?;
            match self.owner(&id).await? {
                Owner::Agent(agent) => {
                    let ask =
                        async |mut client: Client, request| client.delete_volume(request).await;
                    call.forward(&agent, message, ask).await
                }
                Owner::Nowhere(_) => Ok(csi::DeleteVolumeResponse {}),
            }
        };
        call.answer(deleted.await)
    }

    async fn controller_publish_volume(
        &self,
        request: Request<csi::ControllerPublishVolumeRequest>,
    ) -> RpcResult<csi::ControllerPublishVolumeResponse> {
        let call = self.call(Rpc::ControllerPublishVolume, &request);
        let attached = self.attach(&call, log_and_unwrap(request)).await;
        call.answer(attached)
    }

    /// An attachment has no state, so a detach never waits for any agent.
    async fn controller_unpublish_volume(
        &self,
        request: Request<csi::ControllerUnpublishVolumeRequest>,
    ) -> RpcResult<csi::ControllerUnpublishVolumeResponse> {
        let call = self.call(Rpc::ControllerUnpublishVolume, &request);
        let detached = request::detach(&log_and_unwrap(request));
        call.answer(detached.map(|()| csi::ControllerUnpublishVolumeResponse {}))
    }

    async fn list_volumes(
        &self,
        request: Request<csi::ListVolumesRequest>,
    ) -> RpcResult<csi::ListVolumesResponse> {
        let call = self.call(Rpc::ListVolumes, &request);
        let listed = self
            .list_volumes_of_all(&call, &log_and_unwrap(request))
            .await;
        call.answer(listed)
    }

    async fn controller_list_volume_health(
        &self,
        request: Request<csi::ControllerListVolumeHealthRequest>,
    ) -> RpcResult<csi::ControllerListVolumeHealthResponse> {
        let call = self.call(Rpc::ControllerListVolumeHealth, &request);
        only_if(self.options.alpha.health, call.rpc(), "health")?;
        let listed = self
            .list_health_of_all(&call, &log_and_unwrap(request))
            .await;
        call.answer(listed)
    }

    async fn get_capacity(
        &self,
        request: Request<csi::GetCapacityRequest>,
    ) -> RpcResult<csi::GetCapacityResponse> {
        let call = self.call(Rpc::GetCapacity, &request);
        let capacity = self.capacity(&call, log_and_unwrap(request)).await;
        call.answer(capacity)
    }

    async fn controller_get_capabilities(
        &self,
        request: Request<csi::ControllerGetCapabilitiesRequest>,
    ) -> RpcResult<csi::ControllerGetCapabilitiesResponse> {
        log_and_unwrap(request);
        let alpha = self.options.alpha;
        Ok(Response::new(reply::controller_capabilities(alpha)))
    }

    async fn create_snapshot(
        &self,
        request: Request<csi::CreateSnapshotRequest>,
    ) -> RpcResult<csi::CreateSnapshotResponse> {
        let call = self.call(Rpc::CreateSnapshot, &request);
        let created = self.snapshot(&call, log_and_unwrap(request)).await;
        if let Ok(csi::CreateSnapshotResponse {
            snapshot: Some(created),
        }) = &created
        {
            ids::record("snapshot_id", &created.snapshot_id);
        }
        call.answer(created)
    }

    async fn delete_snapshot(
        &self,
        request: Request<csi::DeleteSnapshotRequest>,
    ) -> RpcResult<csi::DeleteSnapshotResponse> {
        let call = self.call(Rpc::DeleteSnapshot, &request);
        let deleted = self
            .delete_snapshot_of_csi(&call, log_and_unwrap(request))
            .await;
        call.answer(deleted)
    }

    async fn list_snapshots(
        &self,
        request: Request<csi::ListSnapshotsRequest>,
    ) -> RpcResult<csi::ListSnapshotsResponse> {
        let call = self.call(Rpc::ListSnapshots, &request);
        let listed = self
            .list_snapshots_of_all(&call, log_and_unwrap(request))
            .await;
        call.answer(listed)
    }

    async fn validate_volume_capabilities(
        &self,
        request: Request<csi::ValidateVolumeCapabilitiesRequest>,
    ) -> RpcResult<csi::ValidateVolumeCapabilitiesResponse> {
        let call = self.call(Rpc::ValidateVolumeCapabilities, &request);
        let message = log_and_unwrap(request);
        let answered = async {
            let id = request::validate(&message)?.volume_id;
            let ask = async |mut client: Client, request| {
                client.validate_volume_capabilities(request).await
            };
            self.one(&call, Kind::Volume, &id, message, ask).await
        };
        call.answer(answered.await)
    }

    async fn controller_expand_volume(
        &self,
        request: Request<csi::ControllerExpandVolumeRequest>,
    ) -> RpcResult<csi::ControllerExpandVolumeResponse> {
        let call = self.call(Rpc::ControllerExpandVolume, &request);
        let message = log_and_unwrap(request);
        let answered = async {
            let id = request::expand_volume(&message)?.volume_id;
            let ask =
                async |mut client: Client, request| client.controller_expand_volume(request).await;
            self.one(&call, Kind::Volume, &id, message, ask).await
        };
        call.answer(answered.await)
    }

    async fn controller_modify_volume(
        &self,
        request: Request<csi::ControllerModifyVolumeRequest>,
    ) -> RpcResult<csi::ControllerModifyVolumeResponse> {
        let call = self.call(Rpc::ControllerModifyVolume, &request);
        let message = log_and_unwrap(request);
        let answered = async {
            let id = request::modify_volume(&message)?.volume_id;
            let ask =
                async |mut client: Client, request| client.controller_modify_volume(request).await;
            self.one(&call, Kind::Volume, &id, message, ask).await
        };
        call.answer(answered.await)
    }

    async fn controller_get_volume(
        &self,
        request: Request<csi::ControllerGetVolumeRequest>,
    ) -> RpcResult<csi::ControllerGetVolumeResponse> {
        let call = self.call(Rpc::ControllerGetVolume, &request);
        only_if(self.options.alpha.get_volume, call.rpc(), "get-volume")?;
        let message = log_and_unwrap(request);
        let answered = async {
            let id = request::volume_id(&message.volume_id)?;
            let ask =
                async |mut client: Client, request| client.controller_get_volume(request).await;
            let look = |answer: &csi::ControllerGetVolumeResponse| {
                same(&id, answer.volume.as_ref().map(|one| &*one.volume_id))
            };
            self.about_one(&call, (Kind::Volume, &id), message, ask, look)
                .await
        };
        call.answer(answered.await)
    }

    async fn controller_get_volume_health(
        &self,
        request: Request<csi::ControllerGetVolumeHealthRequest>,
    ) -> RpcResult<csi::ControllerGetVolumeHealthResponse> {
        let call = self.call(Rpc::ControllerGetVolumeHealth, &request);
        only_if(self.options.alpha.health, call.rpc(), "health")?;
        let message = log_and_unwrap(request);
        let answered = async {
            let id = request::volume_id(&message.volume_id)?;
            let ask = async |mut client: Client, request| {
                client.controller_get_volume_health(request).await
            };
            let look = |answer: &csi::ControllerGetVolumeHealthResponse| {
                same(
                    &id,
                    answer.volume_health.as_ref().map(|one| &*one.volume_id),
                )
            };
            self.about_one(&call, (Kind::Volume, &id), message, ask, look)
                .await
        };
        call.answer(answered.await)
    }

    async fn get_snapshot(
        &self,
        request: Request<csi::GetSnapshotRequest>,
    ) -> RpcResult<csi::GetSnapshotResponse> {
        let call = self.call(Rpc::GetSnapshot, &request);
        only_if(self.options.alpha.get_snapshot, call.rpc(), "get-snapshot")?;
        let message = log_and_unwrap(request);
        let answered = async {
            let id = request::snapshot_id(&message.snapshot_id)?;
            let ask = async |mut client: Client, request| client.get_snapshot(request).await;
            let look = |answer: &csi::GetSnapshotResponse| {
                same(&id, answer.snapshot.as_ref().map(|one| &*one.snapshot_id))
            };
            self.about_one(&call, (Kind::Snapshot, &id), message, ask, look)
                .await
        };
        call.answer(answered.await)
    }
}
