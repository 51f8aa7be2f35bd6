//! A cut share that is given up is thawed before anything is logged about it: the log may be on a
//! frozen file system.

use std::mem::forget;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use slackwater::agent::agent_client::AgentClient;
use slackwater::agent::agent_server::AgentServer;
use slackwater::agent::cut_request::{Ahead, Begin, Freeze, Prepare, Ready, Step};
use slackwater::agent::cut_response::Answer;
use slackwater::agent::{CutRequest, CutResponse};
use slackwater::host::memory::MemoryHost;
use slackwater::model::size::GIB;
use slackwater::model::{AccessMode, AccessType, Capability, CapacityRange, FsType};
use slackwater::operation::{CreateVolume, StageVolume};
use slackwater::service::Service;
use tokio::runtime::Builder;
use tokio::sync::mpsc;
use tokio_stream::wrappers::{ReceiverStream, TcpListenerStream};
use tonic::Streaming;
use tonic::transport::Server;
use tracing::{Event, Subscriber};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};
use uuid::Uuid;

use crate::router::cluster::*;
use crate::service::harness::all_alpha;

/// A subscriber that observes everything an agent logs.
#[derive(Clone)]
struct Listener {
    machine: MemoryHost,
    /// Whether any file system was frozen at each event.
    frozen_at_event: Arc<Mutex<Vec<bool>>>,
}

impl<S: Subscriber> Layer<S> for Listener {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        if !event.metadata().target().starts_with("slackwater") {
            return;
        }
        let is_frozen = !self.machine.frozen().is_empty();
        self.frozen_at_event.lock().unwrap().push(is_frozen);
    }
}

/// Creates and stages a volume.
fn staged(peer: &AgentNode) -> String {
    let capability = Capability {
        access_type: AccessType::Mount {
            fs_type: Some(FsType::Ext4),
            mount_flags: Vec::new(),
        },
        access_mode: AccessMode::SingleNodeWriter,
    };
    let volume = peer.driver.volumes.create_volume(&CreateVolume {
        name: "v".into(),
        capacity: CapacityRange {
            required: GIB,
            limit: 0,
        },
        capabilities: vec![capability.clone()],
        parameters: Default::default(),
        requisite: Vec::new(),
        content_source: None,
    });
    let id = volume.unwrap().id.to_string();
    let staged = peer.driver.volumes.stage_volume(&StageVolume {
        volume_id: id.clone(),
        staging_path: "/var/lib/kubelet/plugins/v/globalmount".into(),
        capability,
    });
    staged.unwrap();
    id
}

/// The way in which a router leaves a share.
#[derive(Clone, Copy, Debug)]
enum Leaves {
    /// It disconnects.
    Goes,
    /// It sends a step that is not allowed next.
    Babbles,
}

/// A share that is frozen: the request stream to its agent, and the answers.
async fn frozen(
    client: &mut AgentClient<tonic::transport::Channel>,
    id: &str,
) -> (mpsc::Sender<CutRequest>, Streaming<CutResponse>) {
    let level = "filesystem".to_string();
    let begin = Begin {
        name: "s".into(),
        attempt: Uuid::from_u128(1).to_string(),
        source_volume_ids: vec![id.into()],
        all_source_volume_ids: vec![id.into()],
        level: level.clone(),
        ..Begin::default()
    };
    let steps = [
        Step::Begin(begin),
        Step::Ready(Ready { level }),
        Step::Ahead(Ahead { hooks: false }),
        Step::Prepare(Prepare {}),
        Step::Freeze(Freeze {}),
    ];
    let (orders, outgoing) = mpsc::channel(1);
    let mut steps = steps
        .map(|step| CutRequest { step: Some(step) })
        .into_iter();
    orders.send(steps.next().unwrap()).await.unwrap();
    let answers = client.cut(ReceiverStream::new(outgoing)).await;
    let mut answers = answers.unwrap().into_inner();
    let mut last = answers.message().await.unwrap();
    for step in steps {
        orders.send(step).await.unwrap();
        last = answers.message().await.unwrap();
    }
    let last = last.and_then(|last| last.answer);
    assert!(matches!(last, Some(Answer::Frozen(_))), "{last:?}");
    (orders, answers)
}

#[test]
fn a_share_that_is_given_up_is_thawed_before_anything_is_logged() {
    // While only one subscriber exists, tracing asks it, in the thread that first reaches a
    // callsite, whether it is interested. A thread of another test would disable the callsite for
    // all threads.
    let _ = tracing::subscriber::set_global_default(tracing_subscriber::registry());
    for leaves in [Leaves::Goes, Leaves::Babbles] {
        let peer = AgentNode::start("node-a", &["default"], None);
        let id = staged(&peer);
        let listener = Listener {
            machine: peer.machine.clone(),
            frozen_at_event: Arc::default(),
        };
        let frozen_at_event = listener.frozen_at_event.clone();
        let mut builder = Builder::new_multi_thread();
        builder.worker_threads(1).enable_all();
        // Active for the lifetime of the thread.
        builder.on_thread_start(move || {
            let subscriber = tracing_subscriber::registry().with(listener.clone());
            forget(tracing::subscriber::set_default(subscriber));
        });
        let runtime = builder.build().unwrap();
        let service = Service::new(peer.driver.clone(), all_alpha());
        let tcp = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        tcp.set_nonblocking(true).unwrap();
        let address = tcp.local_addr().unwrap();
        runtime.spawn(async move {
            let server = Server::builder().add_service(AgentServer::new(service));
            let incoming = TcpListenerStream::new(tokio::net::TcpListener::from_std(tcp).unwrap());
            server.serve_with_incoming(incoming).await.unwrap();
        });
        let router = Builder::new_current_thread().enable_all().build().unwrap();
        let (orders, mut answers) = router.block_on(async {
            let client = AgentClient::connect(format!("http://{address}"));
            frozen(&mut client.await.unwrap(), &id).await
        });
        assert_eq!(peer.machine.frozen().len(), 1);
        frozen_at_event.lock().unwrap().clear();
        match leaves {
            // Its connections break.
            Leaves::Goes => drop(router),
            Leaves::Babbles => router.block_on(async {
                orders.send(CutRequest { step: None }).await.unwrap();
                // Until the agent has ended the stream.
                while let Ok(Some(_)) = answers.message().await {}
            }),
        }
        let left = Instant::now();
        while frozen_at_event.lock().unwrap().is_empty() {
            assert!(
                left.elapsed() < WAIT_TIMEOUT,
                "{leaves:?}: the end is logged"
            );
            std::thread::sleep(Duration::from_millis(5));
        }
        let frozen_at_event = frozen_at_event.lock().unwrap().clone();
        assert!(
            !frozen_at_event.contains(&true),
            "{leaves:?}: {frozen_at_event:?}"
        );
        assert_eq!(peer.machine.frozen(), []);
    }
}
