//! The SnapshotMetadata service of a cluster: streams of agents, forwarded as fast as the caller
//! reads them.

use tokio_stream::{Stream, StreamExt};
use tonic::codegen::BoxStream;
use tonic::{Request, Streaming};

use std::sync::Arc;

use super::Router;
use super::agents::Agent;
use super::call::Call;
use super::route::{Owner, absent};
use crate::csi::snapshot_metadata_server::SnapshotMetadata;
use crate::csi::{
    GetMetadataAllocatedRequest, GetMetadataAllocatedResponse, GetMetadataDeltaRequest,
    GetMetadataDeltaResponse,
};
use crate::error::{Kind, Result};
use crate::service::{Rpc, RpcResult, log_and_unwrap, only_if, request, status};

#[tonic::async_trait]
impl SnapshotMetadata for Router {
    async fn get_metadata_allocated(
        &self,
        request: Request<GetMetadataAllocatedRequest>,
    ) -> RpcResult<BoxStream<GetMetadataAllocatedResponse>> {
        let call = self.call(Rpc::GetMetadataAllocated, &request);
        self.serves_metadata(&call)?;
        let message = log_and_unwrap(request);
        let stream = async {
            request::metadata::allocated(&message)?;
            let agent = self.of_snapshot(&call, &message.snapshot_id).await?;
            let mut client = agent.metadata().await?;
            let question = call.request(message)?;
            let stream = call
                .ask(&agent, client.get_metadata_allocated(question))
                .await?;
            Ok(passed_on(call.rpc(), agent, stream.into_inner()))
        };
        call.answer(stream.await)
    }

    /// Two snapshots of one volume are on one pool; the agent checks whether they belong to one
    /// volume.
    async fn get_metadata_delta(
        &self,
        request: Request<GetMetadataDeltaRequest>,
    ) -> RpcResult<BoxStream<GetMetadataDeltaResponse>> {
        let call = self.call(Rpc::GetMetadataDelta, &request);
        self.serves_metadata(&call)?;
        let message = log_and_unwrap(request);
        let stream = async {
            request::metadata::delta(&message)?;
            self.of_snapshot(&call, &message.base_snapshot_id).await?;
            let agent = self.of_snapshot(&call, &message.target_snapshot_id).await?;
            let mut client = agent.metadata().await?;
            let question = call.request(message)?;
            let stream = call
                .ask(&agent, client.get_metadata_delta(question))
                .await?;
            Ok(passed_on(call.rpc(), agent, stream.into_inner()))
        };
        call.answer(stream.await)
    }
}

impl Router {
    fn serves_metadata(&self, call: &Call<'_>) -> std::result::Result<(), tonic::Status> {
        let served = self.options.alpha.snapshot_metadata;
        only_if(served, call.rpc(), "snapshot-metadata")
    }

    async fn of_snapshot(&self, call: &Call<'_>, id: &str) -> Result<Arc<Agent>> {
        match self.owner(id).await? {
            Owner::Agent(agent) => Ok(agent),
            Owner::Nowhere(why) => Err(absent(call.rpc(), Kind::Snapshot, id, why)),
        }
    }
}

/// Forwards the messages. Nothing is read ahead: if the caller does not read, the agent stops
/// sending. If the connection to the agent breaks, the stream ends with an error.
fn passed_on<T: Send + 'static>(rpc: Rpc, agent: Arc<Agent>, stream: Streaming<T>) -> BoxStream<T> {
    let stream = stream.map(move |message| {
        message.map_err(|broken| {
            let status = status(rpc, &agent.error(&broken));
            tracing::warn!(
                node = agent.node(),
                error = status.message(),
                "failed to continue a stream"
            );
            status
        })
    });
    boxed(stream)
}

fn boxed<T>(
    stream: impl Stream<Item = std::result::Result<T, tonic::Status>> + Send + 'static,
) -> BoxStream<T> {
    Box::pin(stream)
}
