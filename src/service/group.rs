//! The GroupController service: snapshots of several volumes at one point in time.

use tonic::Request;

use super::{Rpc, RpcResult, Service, answer, ids, log_and_unwrap, reply, request};
use crate::csi;
use crate::csi::group_controller_server::GroupController;

#[tonic::async_trait]
impl GroupController for Service {
    async fn group_controller_get_capabilities(
        &self,
        request: Request<csi::GroupControllerGetCapabilitiesRequest>,
    ) -> RpcResult<csi::GroupControllerGetCapabilitiesResponse> {
        log_and_unwrap(request);
        answer(reply::group_capabilities())
    }

    async fn create_volume_group_snapshot(
        &self,
        request: Request<csi::CreateVolumeGroupSnapshotRequest>,
    ) -> RpcResult<csi::CreateVolumeGroupSnapshotResponse> {
        let max_wait = super::max_wait(&request);
        let args =
            request::create_group(&log_and_unwrap(request)).map(super::warn_misplaced_policy);
        if let Ok(asked) = &args {
            let locks = self.driver.snapshots.locks_of_group(asked);
            self.driver.wait_until_free(&locks, max_wait).await;
        }
        let group = self
            .run(Rpc::CreateVolumeGroupSnapshot, args, |driver, args| {
                driver.snapshots.create_group(args)
            })
            .await?;
        ids::grouped(group.id);
        let key = self.snapshot_topology_key();
        answer(csi::CreateVolumeGroupSnapshotResponse {
            group_snapshot: Some(reply::group(&group, key.as_deref())),
        })
    }

    async fn delete_volume_group_snapshot(
        &self,
        request: Request<csi::DeleteVolumeGroupSnapshotRequest>,
    ) -> RpcResult<csi::DeleteVolumeGroupSnapshotResponse> {
        let args = request::delete_group(&log_and_unwrap(request));
        self.run(Rpc::DeleteVolumeGroupSnapshot, args, |driver, args| {
            driver.snapshots.delete_group(args)
        })
        .await?;
        answer(csi::DeleteVolumeGroupSnapshotResponse {})
    }

    async fn get_volume_group_snapshot(
        &self,
        request: Request<csi::GetVolumeGroupSnapshotRequest>,
    ) -> RpcResult<csi::GetVolumeGroupSnapshotResponse> {
        let args = request::get_group(&log_and_unwrap(request));
        let group = self
            .run(Rpc::GetVolumeGroupSnapshot, args, |driver, args| {
                driver.snapshots.get_group(args)
            })
            .await?;
        let key = self.snapshot_topology_key();
        answer(csi::GetVolumeGroupSnapshotResponse {
            group_snapshot: Some(reply::group(&group, key.as_deref())),
        })
    }
}
