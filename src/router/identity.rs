//! Who this driver is, and whether it can work.

use tonic::{Request, Response};

use super::Router;
use crate::csi::identity_server::Identity;
use crate::csi::{
    GetPluginCapabilitiesRequest, GetPluginCapabilitiesResponse, GetPluginInfoRequest,
    GetPluginInfoResponse, ProbeRequest, ProbeResponse,
};
use crate::service::{RpcResult, log_and_unwrap, reply};

#[tonic::async_trait]
impl Identity for Router {
    async fn get_plugin_info(
        &self,
        request: Request<GetPluginInfoRequest>,
    ) -> RpcResult<GetPluginInfoResponse> {
        log_and_unwrap(request);
        Ok(Response::new(reply::plugin_info(
            self.options.driver_name.clone(),
        )))
    }

    async fn get_plugin_capabilities(
        &self,
        request: Request<GetPluginCapabilitiesRequest>,
    ) -> RpcResult<GetPluginCapabilitiesResponse> {
        log_and_unwrap(request);
        Ok(Response::new(reply::plugin_capabilities(
            self.options.alpha,
        )))
    }

    /// Not ready until each agent has answered or failed once: before that, nobody knows which
    /// pools there are. An agent that is away doesn't make a cluster unready.
    ///
    /// An API server that doesn't answer does: sidecars ask this at their start, and wait.
    /// external-snapshotter, when it starts without an API server, takes the CRDs of groups for
    /// missing, and goes on without groups until it's started again.
    async fn probe(&self, request: Request<ProbeRequest>) -> RpcResult<ProbeResponse> {
        log_and_unwrap(request);
        let ready = self.agents.all_asked().is_ok() && self.cluster.answers().await;
        Ok(Response::new(ProbeResponse { ready: Some(ready) }))
    }
}
