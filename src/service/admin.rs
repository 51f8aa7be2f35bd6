//! The Admin service: commands of an administrator for a running driver.

use tonic::Request;

use super::{Rpc, RpcResult, Service, answer, request};
use crate::agent::admin_server::Admin;
use crate::agent::{
    CheckVolumeRequest, CheckVolumeResponse, DeleteSnapshotRequest, DeleteSnapshotResponse,
};
use crate::operation::{DeleteOne, Driver};

#[tonic::async_trait]
impl Admin for Service {
    async fn check_volume(
        &self,
        request: Request<CheckVolumeRequest>,
    ) -> RpcResult<CheckVolumeResponse> {
        let CheckVolumeRequest { volume_id, repair } = request.into_inner();
        let id = request::volume_id(&volume_id);
        // This RPC determines the codes: those of a call that creates nothing.
        let checked = self.run(Rpc::NodeGetVolumeStats, id, move |driver, id| {
            driver.volumes.check_volume(id, repair)
        });
        let checked = checked.await?;
        answer(CheckVolumeResponse {
            sound: checked.sound,
            report: checked.report,
        })
    }

    async fn delete_snapshot(
        &self,
        request: Request<DeleteSnapshotRequest>,
    ) -> RpcResult<DeleteSnapshotResponse> {
        let id = request::snapshot_id(&request.into_inner().snapshot_id);
        let how = DeleteOne {
            of_any_group: true,
            ..DeleteOne::default()
        };
        self.run(Rpc::DeleteSnapshot, id, move |driver: &Driver, id| {
            driver.snapshots.delete_alone(id, &how)
        })
        .await?;
        answer(DeleteSnapshotResponse {})
    }
}
