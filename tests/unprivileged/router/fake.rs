//! An agent that gives any answer that a test needs.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use slackwater::agent::agent_server::{Agent, AgentServer};
use slackwater::agent::cut_request::Step;
use slackwater::agent::cut_response::{
    AllWritten, Answer, Begun, Committed, Frozen, Kept, Prepared, Readiness, Thawed,
};
use slackwater::agent::{
    CutRequest, CutResponse, DescribeRequest, DescribeResponse, FindRequest, FindResponse, Pool,
};
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
use tonic::{Request, Response, Status, Streaming};

use crate::router::cluster::{DRIVER, Served};

/// Its answers, and the calls that it received.
#[derive(Clone)]
pub struct Fake {
    pub description: Arc<Mutex<DescribeResponse>>,
    /// The `grpc-timeout` of each received call.
    pub timeouts: Arc<Mutex<Vec<Option<String>>>>,
    /// A call was given up by its caller.
    pub dropped: Arc<AtomicBool>,
    /// Calls hang for ever.
    pub hangs: Arc<AtomicBool>,
    /// The number of messages of a stream that were sent so far.
    pub sent: Arc<Mutex<usize>>,
    /// The steps of cuts that it received. It reports success for all of them.
    pub steps: Arc<Mutex<Vec<&'static str>>>,
    /// The addresses of the connections for cuts, and of those for other calls.
    pub peers: Arc<Mutex<[BTreeSet<SocketAddr>; 2]>>,
    /// It announces that it supports the step `ahead`.
    pub ahead: Arc<AtomicBool>,
}

impl Fake {
    pub fn new(node: &str, home: &str, pools: &[PoolId]) -> Fake {
        let pools = pools.iter().map(|id| Pool {
            name: "default".into(),
            place: "fake:".into(),
            id: id.to_string(),
            ..Pool::default()
        });
        let description = DescribeResponse {
            node_name: node.into(),
            driver_name: DRIVER.into(),
            home: home.into(),
            pools: pools.collect(),
            ..DescribeResponse::default()
        };
        Fake {
            description: Arc::new(Mutex::new(description)),
            timeouts: Arc::default(),
            dropped: Arc::default(),
            hangs: Arc::default(),
            sent: Arc::default(),
            steps: Arc::default(),
            peers: Arc::default(),
            ahead: Arc::default(),
        }
    }

    fn came<T>(&self, request: &Request<T>, is_cut: bool) {
        let peer = request.remote_addr().unwrap();
        self.peers.lock().unwrap()[usize::from(!is_cut)].insert(peer);
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
        self.came(request, false);
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
        request: Request<DescribeRequest>,
    ) -> Result<Response<DescribeResponse>, Status> {
        self.came(&request, false);
        Ok(Response::new(self.description.lock().unwrap().clone()))
    }

    async fn find(&self, request: Request<FindRequest>) -> Result<Response<FindResponse>, Status> {
        self.note(&request).await;
        Ok(Response::new(FindResponse::default()))
    }

    async fn cut(
        &self,
        request: Request<Streaming<CutRequest>>,
    ) -> Result<Response<BoxStream<CutResponse>>, Status> {
        self.came(&request, true);
        let mut steps = request.into_inner();
        let (to, from) = mpsc::channel(1);
        let (seen, ahead) = (self.steps.clone(), self.ahead.load(Ordering::SeqCst));
        tokio::spawn(async move {
            while let Ok(Some(CutRequest { step: Some(step) })) = steps.message().await {
                let (word, answer) = done(&step, ahead);
                seen.lock().unwrap().push(word);
                // An unknown step ends the stream.
                let Some(answer) = answer else { return };
                let answer = Some(answer);
                if to.send(Ok(CutResponse { answer })).await.is_err() {
                    return;
                }
            }
        });
        let stream = tokio_stream::wrappers::ReceiverStream::new(from);
        Ok(Response::new(Box::pin(stream)))
    }
}

fn done(step: &Step, ahead: bool) -> (&'static str, Option<Answer>) {
    let (word, answer) = match step {
        Step::Begin(_) => {
            let begun = Begun {
                ahead,
                ..Begun::default()
            };
            ("begin", Answer::Begun(begun))
        }
        Step::Ready(_) => ("ready", Answer::Ready(Readiness::default())),
        Step::Ahead(_) if !ahead => return ("ahead", None),
        Step::Ahead(_) => ("ahead", Answer::Ahead(Prepared::default())),
        Step::Prepare(_) => ("prepare", Answer::Prepared(Prepared::default())),
        Step::Freeze(_) => ("freeze", Answer::Frozen(Frozen {})),
        Step::Cut(_) => ("cut", Answer::Thawed(Thawed::default())),
        Step::Written(_) => ("written", Answer::Written(AllWritten {})),
        Step::Keep(_) => ("keep", Answer::Kept(Kept {})),
        Step::Commit(_) => ("commit", Answer::Committed(Committed {})),
    };
    (word, Some(answer))
}

#[tonic::async_trait]
impl Controller for Fake {
    async fn create_volume(
        &self,
        request: Request<CreateVolumeRequest>,
    ) -> Result<Response<CreateVolumeResponse>, Status> {
        self.note(&request).await;
        Err(Status::internal("the fake creates nothing"))
    }

    async fn delete_volume(
        &self,
        request: Request<DeleteVolumeRequest>,
    ) -> Result<Response<DeleteVolumeResponse>, Status> {
        self.note(&request).await;
        Ok(Response::new(DeleteVolumeResponse {}))
    }
}

/// The number of messages in the fake's stream, each with a certain size.
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

/// An address that accepts connections, but never answers.
pub fn silent() -> Served {
    Served::at(None, |listener| async move {
        let mut held = Vec::new();
        while let Ok((connection, _)) = listener.accept().await {
            held.push(connection);
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    })
}
