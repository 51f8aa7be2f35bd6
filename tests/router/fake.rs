//! An agent that says whatever a test wants.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use slackwater::agent::agent_server::{Agent, AgentServer};
use slackwater::agent::{DescribeRequest, DescribeResponse, FindRequest, FindResponse, Pool};
use slackwater::csi::controller_server::{Controller, ControllerServer};
use slackwater::csi::snapshot_metadata_server::{SnapshotMetadata, SnapshotMetadataServer};
use slackwater::csi::{
    CreateVolumeRequest, CreateVolumeResponse, DeleteVolumeRequest, DeleteVolumeResponse,
    GetMetadataAllocatedRequest, GetMetadataAllocatedResponse,
};
use slackwater::model::PoolId;
use tokio::sync::mpsc;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::codegen::BoxStream;
use tonic::transport::Server;
use tonic::{Request, Response, Status};

use crate::ground::{DRIVER, Served};

/// What it says, and what it saw.
#[derive(Clone)]
pub struct Fake {
    pub told: Arc<Mutex<DescribeResponse>>,
    /// `grpc-timeout` of each call that it got.
    pub timeouts: Arc<Mutex<Vec<Option<String>>>>,
    /// A call that was given up by who made it.
    pub dropped: Arc<AtomicBool>,
    /// Calls wait for ever.
    pub hangs: Arc<AtomicBool>,
    /// Messages of a stream, so far.
    pub sent: Arc<Mutex<usize>>,
}

impl Fake {
    pub fn new(node: &str, home: &str, pools: &[PoolId]) -> Fake {
        let pools = pools.iter().map(|id| Pool {
            name: "default".into(),
            place: "fake:".into(),
            id: id.to_string(),
            ..Pool::default()
        });
        let told = DescribeResponse {
            node_name: node.into(),
            driver_name: DRIVER.into(),
            home: home.into(),
            pools: pools.collect(),
            ..DescribeResponse::default()
        };
        Fake {
            told: Arc::new(Mutex::new(told)),
            timeouts: Arc::default(),
            dropped: Arc::default(),
            hangs: Arc::default(),
            sent: Arc::default(),
        }
    }

    pub fn serve(&self) -> Served {
        let fake = self.clone();
        Served::at(None, move |listener| async move {
            let server = Server::builder()
                .add_service(ControllerServer::new(fake.clone()))
                .add_service(SnapshotMetadataServer::new(fake.clone()))
                .add_service(AgentServer::new(fake));
            let incoming = TcpListenerStream::new(listener);
            server.serve_with_incoming(incoming).await.unwrap();
        })
    }

    async fn note<T>(&self, request: &Request<T>) {
        let timeout = request.metadata().get("grpc-timeout");
        let timeout = timeout.map(|text| text.to_str().unwrap().to_string());
        self.timeouts.lock().unwrap().push(timeout);
        let _dropped = Dropped(self.dropped.clone());
        if self.hangs.load(Ordering::SeqCst) {
            std::future::pending::<()>().await;
        }
        std::mem::forget(_dropped);
    }
}

struct Dropped(Arc<AtomicBool>);

impl Drop for Dropped {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

#[tonic::async_trait]
impl Agent for Fake {
    async fn describe(
        &self,
        _request: Request<DescribeRequest>,
    ) -> Result<Response<DescribeResponse>, Status> {
        Ok(Response::new(self.told.lock().unwrap().clone()))
    }

    async fn find(&self, request: Request<FindRequest>) -> Result<Response<FindResponse>, Status> {
        self.note(&request).await;
        Ok(Response::new(FindResponse::default()))
    }
}

#[tonic::async_trait]
impl Controller for Fake {
    async fn create_volume(
        &self,
        request: Request<CreateVolumeRequest>,
    ) -> Result<Response<CreateVolumeResponse>, Status> {
        self.note(&request).await;
        Err(Status::internal("the fake makes nothing"))
    }

    async fn delete_volume(
        &self,
        request: Request<DeleteVolumeRequest>,
    ) -> Result<Response<DeleteVolumeResponse>, Status> {
        self.note(&request).await;
        Ok(Response::new(DeleteVolumeResponse {}))
    }
}

/// So many messages has the fake's stream, each of some size.
pub const MESSAGES: usize = 20_000;

#[tonic::async_trait]
impl SnapshotMetadata for Fake {
    async fn get_metadata_allocated(
        &self,
        _request: Request<GetMetadataAllocatedRequest>,
    ) -> Result<Response<BoxStream<GetMetadataAllocatedResponse>>, Status> {
        let (to, from) = mpsc::channel(1);
        let sent = self.sent.clone();
        tokio::spawn(async move {
            let message = GetMetadataAllocatedResponse {
                volume_capacity_bytes: 1,
                block_metadata: vec![Default::default(); 1000],
                ..Default::default()
            };
            for _ in 0..MESSAGES {
                if to.send(Ok(message.clone())).await.is_err() {
                    return;
                }
                *sent.lock().unwrap() += 1;
            }
        });
        let stream = tokio_stream::wrappers::ReceiverStream::new(from);
        Ok(Response::new(Box::pin(stream)))
    }
}

/// An address where connections are taken, and nothing is ever said.
pub fn silent() -> Served {
    Served::at(None, |listener| async move {
        let mut held = Vec::new();
        while let Ok((connection, _)) = listener.accept().await {
            held.push(connection);
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    })
}
