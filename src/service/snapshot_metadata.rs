//! The SnapshotMetadata service: ranges of a snapshot, as a stream.
//!
//! The first page is read before the stream begins, so that an invalid request fails as a whole.
//! The rest follows as fast as the caller reads it, a page at a time; if the caller disconnects, no
//! more pages are read. A stream ends with OK only after everything was sent, even if the task that
//! sends it fails.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use tokio::sync::mpsc;
use tokio_stream::Stream;
use tonic::codegen::BoxStream;
use tonic::{Request, Status};
use tracing::Instrument;

use super::request::metadata::{self, MetadataStream};
use super::{Rpc, RpcResult, Service, answer, log_and_unwrap, status};
use crate::csi;
use crate::csi::snapshot_metadata_server::SnapshotMetadata;
use crate::error::{Error, Result};
use crate::operation::{Driver, GetMetadata, MetadataPage};

/// Number of messages that may wait for the caller; each may have some 100 KiB.
const MAX_QUEUED_MESSAGES: usize = 2;

/// The messages of one stream.
struct Messages<T> {
    incoming: mpsc::Receiver<Sent<T>>,
    rpc: Rpc,
    ended: bool,
}

/// An item that the task sends to the stream.
enum Sent<T> {
    Message(T),
    Failed(Status),
    /// Everything was sent.
    End,
}

impl<T> Stream for Messages<T> {
    type Item = std::result::Result<T, Status>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if self.ended {
            return Poll::Ready(None);
        }
        let sent = std::task::ready!(self.incoming.poll_recv(context));
        self.ended = !matches!(sent, Some(Sent::Message(_)));
        let cut_off = || {
            let invariant = "a stream is filled to its end".into();
            status(self.rpc, &Error::Bug { invariant })
        };
        Poll::Ready(match sent {
            Some(Sent::Message(message)) => Some(Ok(message)),
            Some(Sent::Failed(status)) => Some(Err(status)),
            Some(Sent::End) => None,
            None => Some(Err(cut_off())),
        })
    }
}

/// Sends the messages of a stream.
struct Filler<T> {
    driver: Arc<Driver>,
    rpc: Rpc,
    ask: GetMetadata,
    ranges_per_message: usize,
    message: fn(i64, Vec<csi::BlockMetadata>) -> T,
    to: mpsc::Sender<Sent<T>>,
}

impl<T> Filler<T> {
    /// Sends until everything is sent, a failure occurs, or the caller disconnects.
    async fn fill(mut self, first: MetadataPage) {
        let mut page = first;
        let mut sent = false;
        loop {
            for ranges in page.ranges.chunks(self.ranges_per_message) {
                sent = true;
                if !self.send(&page, ranges).await {
                    return;
                }
            }
            let Some(next) = page.next else { break };
            self.ask.starting_offset = next;
            self.ask.of = Some(page.of);
            let ask = self.ask.clone();
            let look = self
                .driver
                .run_blocking(move |driver| driver.snapshots.snapshot_metadata(&ask));
            page = match look.await {
                Ok(page) => page,
                Err(error) => {
                    let status = status(self.rpc, &error);
                    tracing::warn!(error = status.message(), "failed to continue a stream");
                    let _ = self.to.send(Sent::Failed(status)).await;
                    return;
                }
            };
        }
        // The size is sent even if there are no ranges.
        if sent || self.send(&page, &[]).await {
            let _ = self.to.send(Sent::End).await;
        }
    }

    /// Returns false once the caller has disconnected.
    async fn send(&self, page: &MetadataPage, ranges: &[(u64, u64)]) -> bool {
        let blocks = ranges.iter().map(|(offset, bytes)| csi::BlockMetadata {
            byte_offset: *offset as i64,
            size_bytes: *bytes as i64,
        });
        let message = (self.message)(page.capacity as i64, blocks.collect());
        self.to.send(Sent::Message(message)).await.is_ok()
    }
}

impl Service {
    async fn stream<T: Send + 'static>(
        &self,
        rpc: Rpc,
        asked: Result<MetadataStream>,
        message: fn(i64, Vec<csi::BlockMetadata>) -> T,
    ) -> RpcResult<BoxStream<T>> {
        let MetadataStream {
            ask,
            ranges_per_message,
        } = asked.map_err(|error| status(rpc, &error))?;
        let first = self
            .run(rpc, Ok(ask.clone()), |driver, args| {
                driver.snapshots.snapshot_metadata(args)
            })
            .await?;
        let (to, incoming) = mpsc::channel(MAX_QUEUED_MESSAGES);
        let filler = Filler {
            driver: self.driver.clone(),
            rpc,
            ask,
            ranges_per_message,
            message,
            to,
        };
        tokio::spawn(filler.fill(first).in_current_span());
        answer(Box::pin(Messages {
            incoming,
            rpc,
            ended: false,
        }))
    }
}

#[tonic::async_trait]
impl SnapshotMetadata for Service {
    async fn get_metadata_allocated(
        &self,
        request: Request<csi::GetMetadataAllocatedRequest>,
    ) -> RpcResult<BoxStream<csi::GetMetadataAllocatedResponse>> {
        let asked = metadata::allocated(&log_and_unwrap(request));
        let message = |volume_capacity_bytes, block_metadata| csi::GetMetadataAllocatedResponse {
            block_metadata_type: csi::BlockMetadataType::VariableLength.into(),
            volume_capacity_bytes,
            block_metadata,
        };
        self.stream(Rpc::GetMetadataAllocated, asked, message).await
    }

    async fn get_metadata_delta(
        &self,
        request: Request<csi::GetMetadataDeltaRequest>,
    ) -> RpcResult<BoxStream<csi::GetMetadataDeltaResponse>> {
        let asked = metadata::delta(&log_and_unwrap(request));
        let message = |volume_capacity_bytes, block_metadata| csi::GetMetadataDeltaResponse {
            block_metadata_type: csi::BlockMetadataType::VariableLength.into(),
            volume_capacity_bytes,
            block_metadata,
        };
        self.stream(Rpc::GetMetadataDelta, asked, message).await
    }
}

#[cfg(test)]
mod tests {
    use tokio_stream::StreamExt;

    use super::*;

    /// What a stream returns whose sender sent these items and was then dropped.
    async fn received(sent: Vec<Sent<u8>>) -> Vec<std::result::Result<u8, tonic::Code>> {
        let (to, incoming) = mpsc::channel(8);
        for each in sent {
            assert!(to.send(each).await.is_ok());
        }
        drop(to);
        let messages = Messages {
            incoming,
            rpc: Rpc::GetMetadataDelta,
            ended: false,
        };
        let codes = messages.map(|item| item.map_err(|status| status.code()));
        codes.collect().await
    }

    #[tokio::test]
    async fn only_a_stream_that_was_filled_ends_well() {
        assert_eq!(received(vec![Sent::Message(1), Sent::End]).await, [Ok(1)]);
        let lost = Err(tonic::Code::Internal);
        assert_eq!(received(vec![Sent::Message(1)]).await, [Ok(1), lost]);
        assert_eq!(received(vec![]).await, [lost]);
        let failed = Sent::Failed(Status::aborted("moved"));
        assert_eq!(received(vec![failed]).await, [Err(tonic::Code::Aborted)]);
    }
}
