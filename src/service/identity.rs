//! The Identity service: the driver's name, and whether it can work.

use tonic::Request;

use super::{Rpc, RpcResult, Service, answer, log_and_unwrap, reply, status};
use crate::csi;
use crate::csi::identity_server::Identity;
use crate::error::Error;

#[tonic::async_trait]
impl Identity for Service {
    async fn get_plugin_info(
        &self,
        request: Request<csi::GetPluginInfoRequest>,
    ) -> RpcResult<csi::GetPluginInfoResponse> {
        log_and_unwrap(request);
        let name = self.driver.pools.settings().driver_name.clone();
        answer(reply::plugin_info(name))
    }

    async fn get_plugin_capabilities(
        &self,
        request: Request<csi::GetPluginCapabilitiesRequest>,
    ) -> RpcResult<csi::GetPluginCapabilitiesResponse> {
        log_and_unwrap(request);
        answer(reply::plugin_capabilities(self.alpha))
    }

    async fn probe(&self, request: Request<csi::ProbeRequest>) -> RpcResult<csi::ProbeResponse> {
        log_and_unwrap(request);
        let missing = self.prerequisites.missing(&self.driver).await;
        let missing = missing.map_err(|error| status(Rpc::Probe, &error))?;
        if !missing.is_empty() {
            let error = Error::refused("this host", missing.join("; "));
            return Err(status(Rpc::Probe, &error));
        }
        answer(csi::ProbeResponse { ready: Some(true) })
    }
}
