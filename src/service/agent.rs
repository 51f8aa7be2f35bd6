//! The Agent service: what the router asks beside CSI.

mod describe;

use tonic::Request;

use super::{Answer, Service, answer};
use crate::agent::agent_server::Agent;
use crate::agent::{DescribeRequest, DescribeResponse, FindRequest, FindResponse};

pub(super) use describe::Looks;

#[tonic::async_trait]
impl Agent for Service {
    async fn describe(&self, _request: Request<DescribeRequest>) -> Answer<DescribeResponse> {
        answer(self.described().await?)
    }

    async fn find(&self, request: Request<FindRequest>) -> Answer<FindResponse> {
        answer(self.found(request.into_inner()).await?)
    }
}
