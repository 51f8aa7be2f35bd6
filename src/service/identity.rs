//! The Identity service: the driver's name, and whether it can work.

use tonic::Request;

use super::{Rpc, RpcResult, Service, answer, log_and_unwrap, reply, status};
use crate::csi::identity_server::Identity;
use crate::csi::{
    GetPluginCapabilitiesRequest, GetPluginCapabilitiesResponse, GetPluginInfoRequest,
    GetPluginInfoResponse, ProbeRequest, ProbeResponse,
};
use crate::error::Error;

#[tonic::async_trait]
impl Identity for Service {
    async fn get_plugin_info(
        &self,
        request: Request<GetPluginInfoRequest>,
    ) -> RpcResult<GetPluginInfoResponse> {
        log_and_unwrap(request);
        let name = self.driver.settings().driver_name.clone();
        answer(reply::plugin_info(name))
    }

    async fn get_plugin_capabilities(
        &self,
        request: Request<GetPluginCapabilitiesRequest>,
    ) -> RpcResult<GetPluginCapabilitiesResponse> {
        log_and_unwrap(request);
        answer(reply::plugin_capabilities(self.alpha))
    }

    async fn probe(&self, request: Request<ProbeRequest>) -> RpcResult<ProbeResponse> {
        log_and_unwrap(request);
        let missing = self.pulse.missing(&self.driver).await;
        let missing = missing.map_err(|error| status(Rpc::Probe, &error))?;
        if !missing.is_empty() {
            let error = Error::refused("this host", missing.join("; "));
            return Err(status(Rpc::Probe, &error));
        }
        answer(ProbeResponse { ready: Some(true) })
    }
}
