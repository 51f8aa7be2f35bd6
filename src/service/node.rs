//! The Node service.

use tonic::Request;

use super::request::Publish;
use super::{Rpc, RpcResult, Service, answer, log_and_unwrap, only_if, reply, request, status};
use crate::csi;
use crate::csi::node_server::Node;
use crate::operation::Driver;

#[tonic::async_trait]
impl Node for Service {
    async fn node_stage_volume(
        &self,
        request: Request<csi::NodeStageVolumeRequest>,
    ) -> RpcResult<csi::NodeStageVolumeResponse> {
        let args = request::stage(&log_and_unwrap(request));
        self.run(Rpc::NodeStageVolume, args, |driver, args| {
            driver.volumes.stage_volume(args)
        })
        .await?;
        answer(csi::NodeStageVolumeResponse {})
    }

    async fn node_unstage_volume(
        &self,
        request: Request<csi::NodeUnstageVolumeRequest>,
    ) -> RpcResult<csi::NodeUnstageVolumeResponse> {
        let args = request::unstage(&log_and_unwrap(request));
        let unstage = |driver: &Driver, (id, path): &(String, String)| {
            driver.volumes.unstage_volume(id, path)
        };
        self.run(Rpc::NodeUnstageVolume, args, unstage).await?;
        answer(csi::NodeUnstageVolumeResponse {})
    }

    async fn node_publish_volume(
        &self,
        request: Request<csi::NodePublishVolumeRequest>,
    ) -> RpcResult<csi::NodePublishVolumeResponse> {
        let args = request::publish(&log_and_unwrap(request));
        let publish = |driver: &Driver, args: &Publish| match args {
            Publish::Persistent(args) => driver.volumes.publish_volume(args),
            Publish::Ephemeral(args) => driver.volumes.publish_ephemeral(args),
        };
        self.run(Rpc::NodePublishVolume, args, publish).await?;
        answer(csi::NodePublishVolumeResponse {})
    }

    async fn node_unpublish_volume(
        &self,
        request: Request<csi::NodeUnpublishVolumeRequest>,
    ) -> RpcResult<csi::NodeUnpublishVolumeResponse> {
        let args = request::unpublish(&log_and_unwrap(request));
        let unpublish = |driver: &Driver, (id, path): &(String, String)| {
            driver.volumes.unpublish_volume(id, path)
        };
        self.run(Rpc::NodeUnpublishVolume, args, unpublish).await?;
        answer(csi::NodeUnpublishVolumeResponse {})
    }

    async fn node_get_volume_stats(
        &self,
        request: Request<csi::NodeGetVolumeStatsRequest>,
    ) -> RpcResult<csi::NodeGetVolumeStatsResponse> {
        let args = request::stats(&log_and_unwrap(request));
        let stats = self
            .run(Rpc::NodeGetVolumeStats, args, |driver, args| {
                driver.volumes.volume_stats(args)
            })
            .await?;
        answer(reply::stats(stats))
    }

    async fn node_get_volume_health(
        &self,
        request: Request<csi::NodeGetVolumeHealthRequest>,
    ) -> RpcResult<csi::NodeGetVolumeHealthResponse> {
        const RPC: Rpc = Rpc::NodeGetVolumeHealth;
        only_if(self.alpha.health, RPC, "health")?;
        let id = request::volume_id(&log_and_unwrap(request).volume_id);
        let health = self
            .run(RPC, id, |driver, id| driver.volumes.volume_health(id))
            .await?;
        answer(csi::NodeGetVolumeHealthResponse {
            volume_health: Some(reply::volume_health(health)),
        })
    }

    async fn node_get_storage_health(
        &self,
        request: Request<csi::NodeGetStorageHealthRequest>,
    ) -> RpcResult<csi::NodeGetStorageHealthResponse> {
        const RPC: Rpc = Rpc::NodeGetStorageHealth;
        only_if(self.alpha.health, RPC, "health")?;
        log_and_unwrap(request);
        let findings = self
            .run(RPC, Ok(()), |driver, (): &()| {
                driver.volumes.storage_health()
            })
            .await?;
        answer(reply::storage_health(findings))
    }

    async fn node_expand_volume(
        &self,
        request: Request<csi::NodeExpandVolumeRequest>,
    ) -> RpcResult<csi::NodeExpandVolumeResponse> {
        let args = request::expand_node(&log_and_unwrap(request));
        let size = self
            .run(Rpc::NodeExpandVolume, args, |driver, args| {
                driver.volumes.expand_node(args)
            })
            .await?;
        answer(csi::NodeExpandVolumeResponse {
            capacity_bytes: reply::bytes(size),
        })
    }

    async fn node_get_capabilities(
        &self,
        request: Request<csi::NodeGetCapabilitiesRequest>,
    ) -> RpcResult<csi::NodeGetCapabilitiesResponse> {
        log_and_unwrap(request);
        answer(reply::node_capabilities(self.alpha))
    }

    async fn node_get_info(
        &self,
        request: Request<csi::NodeGetInfoRequest>,
    ) -> RpcResult<csi::NodeGetInfoResponse> {
        log_and_unwrap(request);
        let settings = self.driver.pools.settings();
        let settled = self.driver.pools.get_home();
        let home = settled.map_err(|error| status(Rpc::NodeGetInfo, &error))?;
        answer(reply::node(
            settings.node_name.clone(),
            settings.max_volumes,
            (&self.driver.pools.topology_key(), home),
        ))
    }
}
