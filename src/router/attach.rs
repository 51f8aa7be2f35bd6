//! ControllerPublishVolume: checks whether a volume is on the node to which it is published.

use tonic::Code;

use super::Router;
use super::call::Call;
use super::route::{Owner, absent};
use crate::csi::{ControllerPublishVolumeRequest, ControllerPublishVolumeResponse};
use crate::error::{Error, Kind, Result};
use crate::service::request;

impl Router {
    /// The agent that has the volume checks the request. A volume that exists on another node is
    /// FAILED_PRECONDITION, a node that does not exist NOT_FOUND.
    pub(super) async fn attach(
        &self,
        call: &Call<'_>,
        mut message: ControllerPublishVolumeRequest,
    ) -> Result<ControllerPublishVolumeResponse> {
        let asked = request::attach(&message)?;
        let agent = match self.owner(&asked.volume_id).await? {
            Owner::Agent(agent) => agent,
            Owner::Nowhere(why) => {
                return Err(absent(call.rpc(), Kind::Volume, &asked.volume_id, why));
            }
        };
        // An agent knows only itself: it checks whether it has the volume, for its own node.
        message.node_id = agent.node().to_string();
        let attached = call
            .forward(&agent, message, async |mut client, request| {
                client.controller_publish_volume(request).await
            })
            .await?;
        if asked.node_id == agent.node() {
            return Ok(attached);
        }
        if !self.knows_node(&asked.node_id).await? {
            return Err(Error::not_found(Kind::Node, asked.node_id));
        }
        Err(Error::Forwarded {
            code: Code::FailedPrecondition as i32,
            message: format!(
                "volume {} is on node {} and cannot be attached to node {}",
                asked.volume_id,
                agent.node(),
                asked.node_id
            ),
        })
    }

    async fn knows_node(&self, node: &str) -> Result<bool> {
        if self.agents.of_node(node).is_some() {
            return Ok(true);
        }
        Ok(self.cluster.knows_nodes() && self.cluster.has_node(node).await?)
    }
}
