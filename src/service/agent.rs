//! The Agent service: what the router asks beside CSI.

mod cut;
mod describe;

use tonic::{Request, Streaming};

use super::{Answer, Service, answer};
use crate::agent::agent_server::Agent;
use crate::agent::{
    CutRequest, DeleteGroupRequest, DeleteGroupResponse, DeleteOneRequest, DeleteOneResponse,
    DescribeRequest, DescribeResponse, FindRequest, FindResponse, GetGroupRequest,
    GetGroupResponse, SettleGroupRequest, SettleGroupResponse,
};

pub(super) use describe::Looks;

#[tonic::async_trait]
impl Agent for Service {
    async fn describe(&self, _request: Request<DescribeRequest>) -> Answer<DescribeResponse> {
        answer(self.described().await?)
    }

    async fn find(&self, request: Request<FindRequest>) -> Answer<FindResponse> {
        answer(self.found(request.into_inner()).await?)
    }

    async fn cut(&self, request: Request<Streaming<CutRequest>>) -> Answer<cut::CutStream> {
        answer(self.share(request.into_inner()))
    }

    async fn get_group(&self, request: Request<GetGroupRequest>) -> Answer<GetGroupResponse> {
        answer(self.group_told(request.into_inner()).await?)
    }

    async fn settle_group(
        &self,
        request: Request<SettleGroupRequest>,
    ) -> Answer<SettleGroupResponse> {
        answer(self.group_settled(request.into_inner()).await?)
    }

    async fn delete_group(
        &self,
        request: Request<DeleteGroupRequest>,
    ) -> Answer<DeleteGroupResponse> {
        answer(self.group_ended(request.into_inner()).await?)
    }

    async fn delete_one(&self, request: Request<DeleteOneRequest>) -> Answer<DeleteOneResponse> {
        answer(self.one_deleted(request.into_inner()).await?)
    }
}
