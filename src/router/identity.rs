//! The Identity service: the name of this driver, and its readiness.

use tonic::{Request, Response};

use super::Router;
use crate::csi;
use crate::csi::identity_server::Identity;
use crate::service::{RpcResult, log_and_unwrap, reply};

#[tonic::async_trait]
impl Identity for Router {
    async fn get_plugin_info(
        &self,
        request: Request<csi::GetPluginInfoRequest>,
    ) -> RpcResult<csi::GetPluginInfoResponse> {
        log_and_unwrap(request);
        Ok(Response::new(reply::plugin_info(
            self.options.driver_name.clone(),
        )))
    }

    async fn get_plugin_capabilities(
        &self,
        request: Request<csi::GetPluginCapabilitiesRequest>,
    ) -> RpcResult<csi::GetPluginCapabilitiesResponse> {
        log_and_unwrap(request);
        Ok(Response::new(reply::plugin_capabilities(
            self.options.alpha,
        )))
    }

    /// The router is not ready until each agent has answered or failed once, because before that it
    /// does not know which pools exist. An agent that is unreachable later does not make the router
    /// unready.
    ///
    /// An API server that does not answer makes it unready: sidecars probe at their start, and
    /// wait. If external-snapshotter starts without an API server, it takes the CRDs of groups for
    /// missing, and works without groups until it is restarted.
    async fn probe(&self, request: Request<csi::ProbeRequest>) -> RpcResult<csi::ProbeResponse> {
        log_and_unwrap(request);
        let ready = self.agents.all_asked().is_ok() && self.cluster.answers().await;
        Ok(Response::new(csi::ProbeResponse { ready: Some(ready) }))
    }
}
