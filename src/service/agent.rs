//! The Agent service: the router's requests that are not part of CSI.

mod cut;
mod describe;
#[cfg(test)]
mod fuzz;

use tonic::{Request, Streaming};

use super::{RpcResult, Service, answer};
use crate::agent::agent_server::Agent;
use crate::agent::{
    CutRequest, DeleteGroupRequest, DeleteGroupResponse, DeleteOneRequest, DeleteOneResponse,
    DescribeRequest, DescribeResponse, FindRequest, FindResponse, GetGroupRequest,
    GetGroupResponse, OfferRequest, OfferResponse, ReceiveRequest, ReceiveResponse,
    SettleGroupRequest, SettleGroupResponse,
};

pub(super) use describe::Looks;

#[tonic::async_trait]
impl Agent for Service {
    async fn describe(&self, _request: Request<DescribeRequest>) -> RpcResult<DescribeResponse> {
        answer(self.described().await?)
    }

    async fn find(&self, request: Request<FindRequest>) -> RpcResult<FindResponse> {
        answer(self.found(request.into_inner()).await?)
    }

    async fn cut(&self, request: Request<Streaming<CutRequest>>) -> RpcResult<cut::CutStream> {
        answer(self.share(request.into_inner()))
    }

    async fn get_group(&self, request: Request<GetGroupRequest>) -> RpcResult<GetGroupResponse> {
        answer(self.describe_group(request.into_inner()).await?)
    }

    async fn settle_group(
        &self,
        request: Request<SettleGroupRequest>,
    ) -> RpcResult<SettleGroupResponse> {
        answer(self.resolve_group(request.into_inner()).await?)
    }

    async fn delete_group(
        &self,
        request: Request<DeleteGroupRequest>,
    ) -> RpcResult<DeleteGroupResponse> {
        answer(self.remove_group(request.into_inner()).await?)
    }

    async fn delete_one(&self, request: Request<DeleteOneRequest>) -> RpcResult<DeleteOneResponse> {
        answer(self.one_deleted(request.into_inner()).await?)
    }

    async fn offer(&self, request: Request<OfferRequest>) -> RpcResult<OfferResponse> {
        answer(self.offered(request.into_inner()).await?)
    }

    async fn receive(&self, request: Request<ReceiveRequest>) -> RpcResult<ReceiveResponse> {
        answer(self.received(request).await?)
    }
}
