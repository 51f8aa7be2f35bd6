//! GetCapacity, of one topology segment or of all.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use tokio::time::timeout;

use super::Router;
use super::agents::Agent;
use super::call::Call;
use crate::csi::{GetCapacityRequest, GetCapacityResponse};
use crate::error::{Error, Result};
use crate::operation::Capacity;
use crate::service::{reply, request};

/// An agent that takes longer counts as having no capacity, because the caller queries all nodes
/// one after the other.
const AGENT_TIMEOUT: Duration = Duration::from_secs(3);

impl Router {
    /// The available capacity; 0 without delay for a pool that cannot be reached, is marked as
    /// lost, is being emptied, or is not known.
    pub(super) async fn capacity(
        &self,
        call: &Call<'_>,
        message: GetCapacityRequest,
    ) -> Result<GetCapacityResponse> {
        let mut sum = reply::capacity(Capacity::default());
        let Some(asked) = request::capacity(&message, &self.topology_key())? else {
            return Ok(sum);
        };
        // While not all agents are known, the answer must not be 0: sidecars record it for a
        // minute.
        self.agents.all_asked()?;
        let class = asked.parameters.pool.as_deref();
        let mut agents = match &asked.topology {
            Some(home) => self.at_home(home).await.unwrap_or_default(),
            None => self.agents.all(),
        };
        agents.retain(|agent| agent.check().is_ok());
        if self.is_known_class(class) {
            agents.retain(|agent| self.takes_volumes(agent, class));
        } else {
            // Any agent can report the error in the request.
            agents.truncate(1);
        }
        let each = agents.iter().map(|agent| {
            timeout(
                AGENT_TIMEOUT,
                self.ask_capacity(call, agent, message.clone()),
            )
        });
        for answer in join_all(each).await {
            match answer {
                Ok(Ok(answer)) => add(&mut sum, &answer),
                Ok(Err(Error::Unreachable { .. })) | Err(_) => {}
                Ok(Err(error)) => return Err(error),
            }
        }
        Ok(sum)
    }

    async fn ask_capacity(
        &self,
        call: &Call<'_>,
        agent: &Arc<Agent>,
        message: GetCapacityRequest,
    ) -> Result<GetCapacityResponse> {
        call.forward(agent, message, async |mut client, request| {
            client.get_capacity(request).await
        })
        .await
    }
}

/// Adds up the available capacity; the maximum volume size is the largest of all, the minimum the
/// smallest.
fn add(sum: &mut GetCapacityResponse, more: &GetCapacityResponse) {
    let available = more.available_capacity.max(0);
    sum.available_capacity = sum.available_capacity.saturating_add(available);
    sum.maximum_volume_size = sum.maximum_volume_size.max(more.maximum_volume_size);
    sum.minimum_volume_size = match (sum.minimum_volume_size, more.minimum_volume_size) {
        (Some(one), Some(other)) => Some(one.min(other)),
        (one, other) => one.or(other),
    };
}
