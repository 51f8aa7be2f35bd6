//! The Agent service: the router's requests that are not part of CSI.

mod adopt_pool;
mod copies;
mod cut;
mod describe;
mod describe_volumes;
#[cfg(test)]
mod fuzz;
mod moving;
mod reverting;

use tonic::{Request, Streaming};

use super::{RpcResult, Service, answer};
use crate::agent::agent_server::Agent;
use crate::agent::{
    AdoptPoolRequest, AdoptPoolResponse, CutRequest, DeleteGroupRequest, DeleteGroupResponse,
    DeleteMovedRequest, DeleteMovedResponse, DeleteOneRequest, DeleteOneResponse, DescribeRequest,
    DescribeResponse, DescribeVolumesRequest, DescribeVolumesResponse, FenceRequest, FenceResponse,
    FindRequest, FindResponse, ForgetPoolRequest, ForgetPoolResponse, GetGroupRequest,
    GetGroupResponse, LookForMoveRequest, LookForMoveResponse, LookForRevertRequest,
    LookForRevertResponse, OfferRequest, OfferResponse, ReceiveRequest, ReceiveResponse,
    RevertRequest, RevertResponse, SettleGroupRequest, SettleGroupResponse,
    SnapshotForCloneRequest, SnapshotForCloneResponse, SnapshotForMoveRequest,
    SnapshotForMoveResponse,
};

pub(super) use describe::DescriptionCache;

#[tonic::async_trait]
impl Agent for Service {
    async fn describe(&self, _request: Request<DescribeRequest>) -> RpcResult<DescribeResponse> {
        answer(self.handle_describe().await?)
    }

    async fn find(&self, request: Request<FindRequest>) -> RpcResult<FindResponse> {
        answer(self.handle_find(request.into_inner()).await?)
    }

    async fn cut(&self, request: Request<Streaming<CutRequest>>) -> RpcResult<cut::CutStream> {
        answer(self.handle_cut(request.into_inner()))
    }

    async fn get_group(&self, request: Request<GetGroupRequest>) -> RpcResult<GetGroupResponse> {
        answer(self.handle_get_group(request.into_inner()).await?)
    }

    async fn settle_group(
        &self,
        request: Request<SettleGroupRequest>,
    ) -> RpcResult<SettleGroupResponse> {
        answer(self.handle_settle_group(request.into_inner()).await?)
    }

    async fn delete_group(
        &self,
        request: Request<DeleteGroupRequest>,
    ) -> RpcResult<DeleteGroupResponse> {
        answer(self.handle_delete_group(request.into_inner()).await?)
    }

    async fn delete_one(&self, request: Request<DeleteOneRequest>) -> RpcResult<DeleteOneResponse> {
        answer(self.handle_delete_one(request.into_inner()).await?)
    }

    async fn offer(&self, request: Request<OfferRequest>) -> RpcResult<OfferResponse> {
        answer(self.handle_offer(request.into_inner()).await?)
    }

    async fn receive(&self, request: Request<ReceiveRequest>) -> RpcResult<ReceiveResponse> {
        answer(self.handle_receive(request).await?)
    }

    async fn fence(&self, request: Request<FenceRequest>) -> RpcResult<FenceResponse> {
        answer(self.handle_fence(request.into_inner()).await?)
    }

    async fn snapshot_for_clone(
        &self,
        request: Request<SnapshotForCloneRequest>,
    ) -> RpcResult<SnapshotForCloneResponse> {
        answer(self.handle_snapshot_for_clone(request).await?)
    }

    async fn snapshot_for_move(
        &self,
        request: Request<SnapshotForMoveRequest>,
    ) -> RpcResult<SnapshotForMoveResponse> {
        answer(self.handle_snapshot_for_move(request.into_inner()).await?)
    }

    async fn delete_moved(
        &self,
        request: Request<DeleteMovedRequest>,
    ) -> RpcResult<DeleteMovedResponse> {
        answer(self.handle_delete_moved(request.into_inner()).await?)
    }

    async fn look_for_move(
        &self,
        request: Request<LookForMoveRequest>,
    ) -> RpcResult<LookForMoveResponse> {
        answer(self.handle_look_for_move(request.into_inner()).await?)
    }

    async fn revert(&self, request: Request<RevertRequest>) -> RpcResult<RevertResponse> {
        answer(self.handle_revert(request.into_inner()).await?)
    }

    async fn look_for_revert(
        &self,
        request: Request<LookForRevertRequest>,
    ) -> RpcResult<LookForRevertResponse> {
        answer(self.handle_look_for_revert(request.into_inner()).await?)
    }

    async fn describe_volumes(
        &self,
        request: Request<DescribeVolumesRequest>,
    ) -> RpcResult<DescribeVolumesResponse> {
        answer(self.handle_describe_volumes(request.into_inner()).await?)
    }

    async fn adopt_pool(&self, request: Request<AdoptPoolRequest>) -> RpcResult<AdoptPoolResponse> {
        answer(self.handle_adopt_pool(request.into_inner()).await?)
    }

    async fn forget_pool(
        &self,
        request: Request<ForgetPoolRequest>,
    ) -> RpcResult<ForgetPoolResponse> {
        answer(self.handle_forget_pool(request.into_inner()).await?)
    }
}
