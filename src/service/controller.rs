//! The Controller service.

use tonic::{Request, Response};

use super::{Rpc, RpcResult, Service, answer, ids, log_and_unwrap, only_if, reply, request};
use crate::csi;
use crate::csi::controller_server::Controller;
use crate::operation::{Capacity, Driver};

#[tonic::async_trait]
impl Controller for Service {
    async fn create_volume(
        &self,
        request: Request<csi::CreateVolumeRequest>,
    ) -> RpcResult<csi::CreateVolumeResponse> {
        let key = self.driver.pools.topology_key();
        let args = request::create_volume(&log_and_unwrap(request), &key);
        let volume = self
            .run(Rpc::CreateVolume, args, |driver, args| {
                driver.volumes.create_volume(args)
            })
            .await?;
        ids::record_volume_id(&volume.id);
        answer(reply::created(&volume, &key))
    }

    async fn delete_volume(
        &self,
        request: Request<csi::DeleteVolumeRequest>,
    ) -> RpcResult<csi::DeleteVolumeResponse> {
        let id = request::volume_id(&log_and_unwrap(request).volume_id);
        let delete = |driver: &Driver, id: &String| driver.volumes.delete_volume(id);
        self.run(Rpc::DeleteVolume, id, delete).await?;
        answer(csi::DeleteVolumeResponse {})
    }

    async fn controller_publish_volume(
        &self,
        request: Request<csi::ControllerPublishVolumeRequest>,
    ) -> RpcResult<csi::ControllerPublishVolumeResponse> {
        let args = request::attach(&log_and_unwrap(request));
        self.run(Rpc::ControllerPublishVolume, args, |driver, args| {
            driver.volumes.attach_volume(args)
        })
        .await?;
        answer(csi::ControllerPublishVolumeResponse::default())
    }

    async fn controller_unpublish_volume(
        &self,
        request: Request<csi::ControllerUnpublishVolumeRequest>,
    ) -> RpcResult<csi::ControllerUnpublishVolumeResponse> {
        let args = request::detach(&log_and_unwrap(request));
        args.map_err(|error| super::status(Rpc::ControllerUnpublishVolume, &error))?;
        answer(csi::ControllerUnpublishVolumeResponse {})
    }

    async fn validate_volume_capabilities(
        &self,
        request: Request<csi::ValidateVolumeCapabilitiesRequest>,
    ) -> RpcResult<csi::ValidateVolumeCapabilitiesResponse> {
        let message = log_and_unwrap(request);
        let args = request::validate(&message);
        let verdict = self
            .run(Rpc::ValidateVolumeCapabilities, args, |driver, args| {
                driver.volumes.validate_volume(args)
            })
            .await?;
        answer(reply::validated(message, verdict))
    }

    async fn list_volumes(
        &self,
        request: Request<csi::ListVolumesRequest>,
    ) -> RpcResult<csi::ListVolumesResponse> {
        let pool = request::only_pool(request.metadata());
        let message = log_and_unwrap(request);
        let args = request::page(message.max_entries, &message.starting_token, pool);
        let page = self
            .run(Rpc::ListVolumes, args, |driver, args| {
                driver.volumes.list_volumes(args)
            })
            .await?;
        answer(reply::volumes(page, &self.driver.pools.topology_key()))
    }

    async fn controller_list_volume_health(
        &self,
        request: Request<csi::ControllerListVolumeHealthRequest>,
    ) -> RpcResult<csi::ControllerListVolumeHealthResponse> {
        const RPC: Rpc = Rpc::ControllerListVolumeHealth;
        only_if(self.alpha.health, RPC, "health")?;
        let pool = request::only_pool(request.metadata());
        let message = log_and_unwrap(request);
        let args = request::page(message.max_entries, &message.starting_token, pool);
        let (entries, next_token) = self
            .run(RPC, args, |driver, args| {
                driver.volumes.list_volume_health(args)
            })
            .await?;
        answer(csi::ControllerListVolumeHealthResponse {
            entries: entries.into_iter().map(reply::volume_health).collect(),
            next_token,
        })
    }

    async fn controller_get_volume_health(
        &self,
        request: Request<csi::ControllerGetVolumeHealthRequest>,
    ) -> RpcResult<csi::ControllerGetVolumeHealthResponse> {
        const RPC: Rpc = Rpc::ControllerGetVolumeHealth;
        only_if(self.alpha.health, RPC, "health")?;
        let id = request::volume_id(&log_and_unwrap(request).volume_id);
        let health = self
            .run(RPC, id, |driver, id| driver.volumes.volume_health(id))
            .await?;
        answer(csi::ControllerGetVolumeHealthResponse {
            volume_health: Some(reply::volume_health(health)),
        })
    }

    async fn get_capacity(
        &self,
        request: Request<csi::GetCapacityRequest>,
    ) -> RpcResult<csi::GetCapacityResponse> {
        let args = request::capacity(&log_and_unwrap(request), &self.driver.pools.topology_key());
        let ask = |driver: &Driver, args: &Option<_>| match args {
            Some(args) => driver.pools.capacity(args),
            None => Ok(Capacity::default()),
        };
        let capacity = self.run(Rpc::GetCapacity, args, ask).await?;
        answer(reply::capacity(capacity))
    }

    async fn controller_get_capabilities(
        &self,
        request: Request<csi::ControllerGetCapabilitiesRequest>,
    ) -> RpcResult<csi::ControllerGetCapabilitiesResponse> {
        log_and_unwrap(request);
        answer(reply::controller_capabilities(self.alpha))
    }

    async fn create_snapshot(
        &self,
        request: Request<csi::CreateSnapshotRequest>,
    ) -> RpcResult<csi::CreateSnapshotResponse> {
        let (key, max_wait) = (self.snapshot_topology_key(), super::max_wait(&request));
        let args = request::create_snapshot(&log_and_unwrap(request), key.as_deref())
            .map(super::warn_misplaced_policy);
        if let Ok(asked) = &args {
            let locks = self.driver.snapshots.locks_of_snapshot(asked);
            self.driver.wait_until_free(&locks, max_wait).await;
        }
        let snapshot = self
            .run(Rpc::CreateSnapshot, args, |driver, args| {
                driver.snapshots.create_snapshot(args)
            })
            .await?;
        ids::record_snapshot_id(&snapshot.id);
        let mut answer = Response::new(csi::CreateSnapshotResponse {
            snapshot: Some(reply::snapshot(&snapshot, key.as_deref())),
        });
        super::reached::put(answer.metadata_mut(), &snapshot);
        Ok(answer)
    }

    async fn delete_snapshot(
        &self,
        request: Request<csi::DeleteSnapshotRequest>,
    ) -> RpcResult<csi::DeleteSnapshotResponse> {
        let id = request::snapshot_id(&log_and_unwrap(request).snapshot_id);
        let delete = |driver: &Driver, id: &String| driver.snapshots.delete_snapshot(id);
        self.run(Rpc::DeleteSnapshot, id, delete).await?;
        answer(csi::DeleteSnapshotResponse {})
    }

    async fn list_snapshots(
        &self,
        request: Request<csi::ListSnapshotsRequest>,
    ) -> RpcResult<csi::ListSnapshotsResponse> {
        let pool = request::only_pool(request.metadata());
        let args = request::list_snapshots(&log_and_unwrap(request), pool);
        let page = self
            .run(Rpc::ListSnapshots, args, |driver, args| {
                driver.snapshots.list_snapshots(args)
            })
            .await?;
        answer(reply::snapshots(
            page,
            self.snapshot_topology_key().as_deref(),
        ))
    }

    async fn get_snapshot(
        &self,
        request: Request<csi::GetSnapshotRequest>,
    ) -> RpcResult<csi::GetSnapshotResponse> {
        const RPC: Rpc = Rpc::GetSnapshot;
        only_if(self.alpha.get_snapshot, RPC, "get-snapshot")?;
        let id = request::snapshot_id(&log_and_unwrap(request).snapshot_id);
        let snapshot = self
            .run(RPC, id, |driver, id| driver.snapshots.get_snapshot(id))
            .await?;
        answer(csi::GetSnapshotResponse {
            snapshot: Some(reply::snapshot(
                &snapshot,
                self.snapshot_topology_key().as_deref(),
            )),
        })
    }

    async fn controller_expand_volume(
        &self,
        request: Request<csi::ControllerExpandVolumeRequest>,
    ) -> RpcResult<csi::ControllerExpandVolumeResponse> {
        let args = request::expand_volume(&log_and_unwrap(request));
        let expanded = self
            .run(Rpc::ControllerExpandVolume, args, |driver, args| {
                driver.volumes.expand_volume(args)
            })
            .await?;
        answer(csi::ControllerExpandVolumeResponse {
            capacity_bytes: reply::bytes(expanded.size),
            node_expansion_required: expanded.node_expansion_required,
        })
    }

    async fn controller_get_volume(
        &self,
        request: Request<csi::ControllerGetVolumeRequest>,
    ) -> RpcResult<csi::ControllerGetVolumeResponse> {
        const RPC: Rpc = Rpc::ControllerGetVolume;
        only_if(self.alpha.get_volume, RPC, "get-volume")?;
        let id = request::volume_id(&log_and_unwrap(request).volume_id);
        let volume = self
            .run(RPC, id, |driver, id| driver.volumes.get_volume(id))
            .await?;
        answer(reply::get_volume(
            &volume,
            &self.driver.pools.topology_key(),
        ))
    }

    async fn controller_modify_volume(
        &self,
        request: Request<csi::ControllerModifyVolumeRequest>,
    ) -> RpcResult<csi::ControllerModifyVolumeResponse> {
        let args = request::modify_volume(&log_and_unwrap(request));
        self.run(Rpc::ControllerModifyVolume, args, |driver, args| {
            driver.volumes.modify_volume(args)
        })
        .await?;
        answer(csi::ControllerModifyVolumeResponse {})
    }
}
