//! The Admin service of a cluster: it deletes single snapshots. All other calls of an administrator are for
//! the driver of a node.

use tonic::codegen::BoxStream;
use tonic::{Request, Streaming};

use super::Router;
use super::route::Owner;
use crate::agent::admin_server::Admin;
use crate::agent::{
    CheckVolumeRequest, CheckVolumeResponse, DeleteSnapshotRequest, DeleteSnapshotResponse,
    ExportRequest, ExportResponse, ImportFileRequest, ImportFileResponse, ImportRequest,
    ImportResponse,
};
use crate::service::{Rpc, RpcResult, request};

#[tonic::async_trait]
impl Admin for Router {
    async fn check_volume(
        &self,
        _request: Request<CheckVolumeRequest>,
    ) -> RpcResult<CheckVolumeResponse> {
        Err(tonic::Status::unimplemented(
            "a volume is checked by the driver of its node; run this command in the container of that driver",
        ))
    }

    async fn export(
        &self,
        _request: Request<ExportRequest>,
    ) -> RpcResult<BoxStream<ExportResponse>> {
        Err(tonic::Status::unimplemented(
            "a snapshot is exported by the driver of its node; run this command in the container of that driver",
        ))
    }

    async fn import(
        &self,
        _request: Request<Streaming<ImportRequest>>,
    ) -> RpcResult<ImportResponse> {
        Err(tonic::Status::unimplemented(
            "a volume is imported by the driver of its node; run this command in the container of that driver",
        ))
    }

    async fn import_file(
        &self,
        _request: Request<ImportFileRequest>,
    ) -> RpcResult<ImportFileResponse> {
        Err(tonic::Status::unimplemented(
            "a volume is imported by the driver of its node; run this command in the container of that driver",
        ))
    }

    async fn delete_snapshot(
        &self,
        request: Request<DeleteSnapshotRequest>,
    ) -> RpcResult<DeleteSnapshotResponse> {
        let call = self.call(Rpc::DeleteSnapshot, &request);
        let deleted = async {
            let id = request::snapshot_id(&request.get_ref().snapshot_id)?;
            match self.owner(&id).await? {
                Owner::Agent(agent) => self.delete_one(agent, &id, true).await?,
                Owner::Nowhere(_) => {}
            }
            Ok(DeleteSnapshotResponse {})
        };
        call.answer(deleted.await)
    }
}
