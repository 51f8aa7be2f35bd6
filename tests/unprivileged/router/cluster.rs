//! A cluster for tests: agents that can be killed and come back, a router, and the state of
//! Kubernetes.

use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::net::{SocketAddr, TcpListener};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use slackwater::agent::DescribeResponse;
use slackwater::agent::admin_client::AdminClient;
use slackwater::agent::admin_server::AdminServer;
use slackwater::agent::agent_server::AgentServer;
use slackwater::agent::peer_server::PeerServer;
use slackwater::csi::controller_client::ControllerClient;
use slackwater::csi::controller_server::ControllerServer;
use slackwater::csi::group_controller_client::GroupControllerClient;
use slackwater::csi::group_controller_server::GroupControllerServer;
use slackwater::csi::identity_client::IdentityClient;
use slackwater::csi::identity_server::IdentityServer;
use slackwater::csi::snapshot_metadata_client::SnapshotMetadataClient;
use slackwater::csi::snapshot_metadata_server::SnapshotMetadataServer;
use slackwater::csi::{
    CreateVolumeRequest, ListVolumesRequest, Topology, TopologyRequirement, Volume,
};
use slackwater::cut::CutInterfaces;
use slackwater::error::{Error, Result};
use slackwater::hook::{HookTarget, Hooks, NoHooks, Quiesced};
use slackwater::host::memory::{MemoryHost, MemoryOptions};
use slackwater::model::{Alpha, PoolId, SharedVolume};
use slackwater::operation::{ContentSource, Driver, Settings};
use slackwater::router::agents::endpoint;
use slackwater::router::cluster::{KnownPool, ObjectRef, Unwanted};
use slackwater::router::create_volume::pod_placement::{Fit, PodClaims};
use slackwater::router::{Agents, Cluster, Dial, Options, Router};
use slackwater::service::{Callers, PeerDial, PeerService, Peers, Service};
use slackwater::telemetry::Metrics;
use tempfile::TempDir;
use tokio::net::UnixListener;
use tokio::runtime::{Builder, Runtime};
use tokio_stream::wrappers::{TcpListenerStream, UnixListenerStream};
use tonic::transport::{Channel, Server};
use tonic::{Code, Status};

use crate::service::gate::GatedHost;
use crate::service::harness::{all_alpha, channel, create, pool};

pub const DRIVER: &str = "csi.slackwater.dev";
pub const KEY: &str = "topology.csi.slackwater.dev/home";
/// A limit that is reached only by a hang.
pub const WAIT_TIMEOUT: Duration = Duration::from_secs(60);

/// Serves at an address, in threads of its own, until it is dropped. Then its connections break, as
/// those of a killed process do.
pub struct Served {
    pub address: SocketAddr,
    runtime: Option<Runtime>,
}

impl Served {
    pub fn at<F>(
        address: Option<SocketAddr>,
        serve: impl FnOnce(tokio::net::TcpListener) -> F + Send + 'static,
    ) -> Served
    where
        F: Future<Output = ()> + Send,
    {
        let any = SocketAddr::from(([127, 0, 0, 1], 0));
        let listener = bound(address.unwrap_or(any));
        listener.set_nonblocking(true).unwrap();
        let address = listener.local_addr().unwrap();
        let mut builder = Builder::new_multi_thread();
        let runtime = builder.worker_threads(1).enable_all().build().unwrap();
        runtime.spawn(async move {
            serve(tokio::net::TcpListener::from_std(listener).unwrap()).await;
        });
        Served {
            address,
            runtime: Some(runtime),
        }
    }
}

/// The port of a killed server becomes free a moment later.
fn bound(address: SocketAddr) -> TcpListener {
    let start = std::time::Instant::now();
    loop {
        match TcpListener::bind(address) {
            Ok(listener) => return listener,
            Err(error) => assert!(start.elapsed() < WAIT_TIMEOUT, "{address}: {error}"),
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

/// One node of the cluster: a machine, its driver, and its agent.
pub struct AgentNode {
    pub name: String,
    pub machine: MemoryHost,
    pub gate: GatedHost,
    pub driver: Arc<Driver>,
    pub address: SocketAddr,
    served: Option<Served>,
    /// Where it sends snapshots to other agents, and the port that it reports for that.
    pub peer_address: Option<SocketAddr>,
    pub reported_port: Option<u16>,
    peers: Option<Served>,
}

impl AgentNode {
    /// With an address at which it sends snapshots to any caller that has a ticket.
    pub fn with_peers(name: &str, pools: &[&str], capacity: Option<u64>) -> AgentNode {
        let mut node = AgentNode::start(name, pools, capacity);
        let served = node.serve_peers(None);
        node.peer_address = Some(served.address);
        node.reported_port = Some(served.address.port());
        node.peers = Some(served);
        node.revive();
        node
    }

    fn serve_peers(&self, address: Option<SocketAddr>) -> Served {
        let service = PeerService::new(self.driver.clone(), Arc::new(AnyCaller));
        Served::at(address, move |listener| async move {
            let server = Server::builder().add_service(PeerServer::new(service));
            let incoming = TcpListenerStream::new(listener);
            server.serve_with_incoming(incoming).await.unwrap();
        })
    }

    pub fn start(name: &str, pools: &[&str], capacity: Option<u64>) -> AgentNode {
        let options = MemoryOptions::default();
        let machine = MemoryHost::with_options(MemoryOptions {
            capacity: capacity.unwrap_or(options.capacity),
            ..options
        });
        let gate = GatedHost::new(machine.clone());
        let driver = driver(name, pools, &machine, &gate);
        let mut node = AgentNode {
            name: name.to_string(),
            machine,
            gate,
            driver,
            address: SocketAddr::from(([127, 0, 0, 1], 0)),
            served: None,
            peer_address: None,
            reported_port: None,
            peers: None,
        };
        let served = node.serve(None);
        node.address = served.address;
        node.served = Some(served);
        node
    }

    fn serve(&self, address: Option<SocketAddr>) -> Served {
        let mut service = Service::new(self.driver.clone(), all_alpha());
        if self.reported_port.is_some() {
            service = service.with_peers(Peers {
                dial: Arc::new(Plain),
                port: self.reported_port,
            });
        }
        Served::at(address, move |listener| async move {
            let server = Server::builder()
                .add_service(ControllerServer::new(service.clone()))
                .add_service(SnapshotMetadataServer::new(service.clone()))
                .add_service(AgentServer::new(service));
            let incoming = TcpListenerStream::new(listener);
            server.serve_with_incoming(incoming).await.unwrap();
        })
    }

    /// Breaks the agent's connections and stops listening. Running calls go on.
    pub fn kill(&mut self) {
        self.served = None;
        self.peers = None;
    }

    /// The agent listens again on the same port.
    pub fn revive(&mut self) {
        self.kill();
        self.served = Some(self.serve(Some(self.address)));
        self.peers = (self.peer_address).map(|address| self.serve_peers(Some(address)));
    }

    /// Ends the machine's process, and starts another one with other pools.
    pub fn restart(&mut self, pools: &[&str]) {
        self.kill();
        self.machine = self.machine.restart_process();
        self.gate = GatedHost::new(self.machine.clone());
        self.driver = driver(&self.name, pools, &self.machine, &self.gate);
        self.revive();
    }

    pub fn home(&self) -> String {
        self.driver.pools.home().to_string()
    }

    pub fn pool_id(&self) -> PoolId {
        self.driver.pool_status()[0].id.unwrap()
    }
}

fn driver(name: &str, pools: &[&str], machine: &MemoryHost, gate: &GatedHost) -> Arc<Driver> {
    let settings = Settings {
        node_name: name.to_string(),
        driver_name: DRIVER.to_string(),
        pools: pools.iter().map(|name| pool(name)).collect(),
        node_record: "/var/lib/slackwater/node.json".into(),
        state_dir: "/run/slackwater/state".into(),
        ..Settings::default()
    };
    let interfaces = CutInterfaces {
        host: Arc::new(gate.clone()),
        ..CutInterfaces::simulated(machine.clone())
    };
    Arc::new(Driver::start(settings, interfaces).unwrap())
}

/// Addresses without name resolution.
pub struct Plain;

#[tonic::async_trait]
impl Dial for Plain {
    async fn dial(&self, _node: &str, address: &str) -> Result<Channel> {
        Ok(endpoint(address)?.connect_lazy())
    }
}

#[tonic::async_trait]
impl PeerDial for Plain {
    async fn dial(&self, _node: &str, address: &str) -> Result<Channel> {
        Ok(endpoint(address)?.connect_lazy())
    }
}

/// Without certificates, every caller counts as the agent of any node.
struct AnyCaller;

impl Callers for AnyCaller {
    fn is_agent_of(&self, _caller: &tonic::Extensions, _node: &str) -> bool {
        true
    }
}

/// The state of Kubernetes.
#[derive(Default)]
pub struct KubernetesState {
    pub selected: BTreeMap<String, String>,
    pub gone: BTreeSet<String>,
    /// Nodes on which no copy is to go on, and claims that were deleted.
    pub cordoned: BTreeSet<String>,
    pub deleted: BTreeSet<String>,
    pub lost: BTreeSet<PoolId>,
    pub evacuated: BTreeSet<PoolId>,
    /// IDs of the volumes and snapshots of moves.
    pub moved: BTreeSet<String>,
    pub known: Vec<KnownPool>,
    pub unknown: bool,
    /// By volume.
    pub claims: BTreeMap<String, String>,
    /// Events: the object and the reason.
    pub reported: Vec<(ObjectRef, &'static str)>,
    /// The messages of the events.
    pub messages: Vec<String>,
    /// Claims whose hooks were requested.
    pub held: Vec<String>,
    /// The claims of the only pod.
    pub pod_claims: PodClaims,
    /// What is found when a node is examined: the next one of these, and then that the pod could run
    /// there.
    pub against: Vec<String>,
}

#[derive(Clone, Default)]
pub struct Kubernetes(pub Arc<Mutex<KubernetesState>>);

impl Kubernetes {
    pub fn update(&self, change: impl FnOnce(&mut KubernetesState)) {
        change(&mut self.0.lock().unwrap());
    }

    fn check(&self) -> Result<()> {
        match self.0.lock().unwrap().unknown {
            false => Ok(()),
            true => Err(Error::Unreachable {
                what: "the API server".into(),
                reason: "the agent is away".into(),
            }),
        }
    }
}

#[tonic::async_trait]
impl Cluster for Kubernetes {
    async fn selected_node(&self, claim: &str) -> Result<Option<String>> {
        self.check()?;
        Ok(self.0.lock().unwrap().selected.get(claim).cloned())
    }

    async fn pod_claims(
        &self,
        _claim: &str,
        _source: Option<&ContentSource>,
        _is_elsewhere: bool,
    ) -> Result<Option<PodClaims>> {
        self.check()?;
        Ok(Some(self.0.lock().unwrap().pod_claims.clone()))
    }

    async fn check_node(&self, _claims: &PodClaims, _node: &str) -> Fit {
        self.0.lock().unwrap().against.pop().map_or(Ok(()), Err)
    }

    async fn has_node(&self, node: &str) -> Result<bool> {
        self.check()?;
        Ok(node.starts_with("node-") && !self.0.lock().unwrap().gone.contains(node))
    }

    async fn find_unwanted(&self, node: &str, claim: Option<&str>) -> Option<Unwanted> {
        let state = self.0.lock().unwrap();
        if state.gone.contains(node) {
            let gone = "it is no longer in the cluster";
            return Some(Unwanted::Node(gone.into()));
        }
        if state.cordoned.contains(node) {
            return Some(Unwanted::Node("it is cordoned".into()));
        }
        let is_deleted = |claim: &str| state.deleted.contains(claim);
        let deleted = claim.filter(|claim| is_deleted(claim));
        deleted.map(|claim| Unwanted::Claim(format!("claim {claim} was deleted")))
    }

    fn claim_of(&self, volume_id: &str) -> Option<String> {
        self.0.lock().unwrap().claims.get(volume_id).cloned()
    }

    fn is_lost(&self, pool: PoolId) -> bool {
        self.0.lock().unwrap().lost.contains(&pool)
    }

    fn is_evacuated(&self, pool: PoolId) -> bool {
        self.0.lock().unwrap().evacuated.contains(&pool)
    }

    fn moved_ids(&self) -> BTreeSet<String> {
        self.0.lock().unwrap().moved.clone()
    }

    fn known_pools(&self) -> Vec<KnownPool> {
        self.0.lock().unwrap().known.clone()
    }

    fn is_leader(&self) -> bool {
        true
    }

    fn record_event(
        &self,
        about: &ObjectRef,
        _warning: bool,
        reason: &'static str,
        message: String,
    ) {
        let mut state = self.0.lock().unwrap();
        state.reported.push((about.clone(), reason));
        state.messages.push(message);
    }

    fn hooks(&self) -> Arc<dyn Hooks> {
        Arc::new(self.clone())
    }
}

/// No application has a hook. Requests for hooks are recorded.
impl Hooks for Kubernetes {
    fn wanted(&self, targets: &[HookTarget], shared: SharedVolume) -> Result<Vec<String>> {
        let claims = targets.iter().filter_map(|target| target.claim.clone());
        self.0.lock().unwrap().held.extend(claims);
        NoHooks.wanted(targets, shared)
    }

    fn quiesce(&self, names: &[String], timeout: Duration) -> Result<Box<dyn Quiesced>> {
        NoHooks.quiesce(names, timeout)
    }
}

/// A router on a Unix socket.
pub struct TestRouter {
    pub agents: Arc<Agents>,
    pub kubernetes: Kubernetes,
    pub metrics: Arc<Metrics>,
    pub identity: IdentityClient<Channel>,
    pub metadata: SnapshotMetadataClient<Channel>,
    pub path: PathBuf,
    served: tokio::task::JoinHandle<()>,
    _folder: TempDir,
}

impl Drop for TestRouter {
    fn drop(&mut self) {
        self.served.abort();
    }
}

impl TestRouter {
    /// Starts a router of agents at these addresses, and waits until it is ready.
    pub async fn new(agents: &[(&str, SocketAddr)]) -> TestRouter {
        let routed = TestRouter::with(Alpha::default()).await;
        routed.set(agents).await;
        routed
    }

    pub async fn with(alpha: Alpha) -> TestRouter {
        let agents = Arc::new(Agents::new(Arc::new(Plain), DRIVER));
        let kubernetes = Kubernetes::default();
        let metrics = Arc::new(Metrics::new());
        let options = Options {
            driver_name: DRIVER.to_string(),
            alpha,
            metrics: metrics.clone(),
        };
        let router = Router::new(agents.clone(), Arc::new(kubernetes.clone()), options);
        let folder = TempDir::with_prefix("slackwater-").unwrap();
        let path = folder.path().join("csi.sock");
        let listener = UnixListener::bind(&path).unwrap();
        let served = tokio::spawn(async move {
            let server = Server::builder()
                .add_service(IdentityServer::new(router.clone()))
                .add_service(ControllerServer::new(router.clone()))
                .add_service(GroupControllerServer::new(router.clone()))
                .add_service(AdminServer::new(router.clone()))
                .add_service(SnapshotMetadataServer::new(router));
            let incoming = UnixListenerStream::new(listener);
            server.serve_with_incoming(incoming).await.unwrap();
        });
        let channel = channel(path.clone());
        TestRouter {
            agents,
            kubernetes,
            metrics,
            identity: IdentityClient::new(channel.clone()),
            metadata: SnapshotMetadataClient::new(channel),
            path,
            served,
            _folder: folder,
        }
    }

    pub async fn of(nodes: &[&AgentNode]) -> TestRouter {
        let agents: Vec<_> = nodes
            .iter()
            .map(|node| (&*node.name, node.address))
            .collect();
        TestRouter::new(&agents).await
    }

    /// Replaces the list of agents, and waits for their answers.
    pub async fn set(&self, agents: &[(&str, SocketAddr)]) {
        let list = agents.iter();
        self.agents
            .set(list.map(|(node, address)| (node.to_string(), address.to_string())));
        self.agents.ask_all().await;
        assert!(self.agents.all_asked().is_ok());
    }

    /// Waits until an agent becomes reachable or unreachable.
    pub async fn until(&self, node: &str, reachable: bool) {
        let agent = self.agents.of_node(node).unwrap();
        eventually(node, async || {
            agent.ask().await;
            agent.check().is_ok() == reachable
        })
        .await;
    }

    /// Waits until an agent has answered after this moment: an older connection may still have to
    /// be detected as dead.
    pub async fn until_answered_since(&self, node: &str, moment: Instant) {
        let agent = self.agents.of_node(node).unwrap();
        eventually(node, async || {
            agent.ask().await;
            let seen = agent.seen();
            agent.check().is_ok() && seen.answered.is_some_and(|at| at > moment)
        })
        .await;
    }

    /// Waits until an agent's description satisfies a condition.
    pub async fn until_described(&self, node: &str, is_so: impl Fn(&DescribeResponse) -> bool) {
        let agent = self.agents.of_node(node).unwrap();
        eventually(node, async || {
            agent.ask().await;
            agent
                .seen()
                .description
                .is_some_and(|reported| is_so(&reported))
        })
        .await;
    }

    pub fn controller(&self) -> ControllerClient<Channel> {
        ControllerClient::new(channel(self.path.clone()))
    }

    /// The client of an administrator.
    pub fn admin(&self) -> AdminClient<Channel> {
        AdminClient::new(channel(self.path.clone()))
    }

    pub fn groups(&self) -> GroupControllerClient<Channel> {
        GroupControllerClient::new(channel(self.path.clone()))
    }

    pub async fn create(
        &self,
        request: CreateVolumeRequest,
    ) -> std::result::Result<Volume, Status> {
        let created = self.controller().create_volume(request).await?;
        Ok(created.into_inner().volume.unwrap())
    }

    /// Creates a volume on this node.
    pub async fn create_on(&self, name: &str, node: &AgentNode) -> String {
        let created = self.create(at(create(name), &[&node.home()])).await;
        created.unwrap().volume_id
    }

    /// All IDs, listed in pages of this size.
    pub async fn list(&self, most: i32) -> std::result::Result<Vec<String>, Status> {
        let (mut ids, mut token) = (Vec::new(), String::new());
        loop {
            let request = ListVolumesRequest {
                max_entries: most,
                starting_token: token,
            };
            let page = self.controller().list_volumes(request).await?.into_inner();
            assert!(most == 0 || page.entries.len() <= most as usize);
            let entries = page.entries.into_iter();
            ids.extend(entries.map(|entry| entry.volume.unwrap().volume_id));
            token = page.next_token;
            if token.is_empty() {
                return Ok(ids);
            }
        }
    }
}

/// Waits for a condition, for at most [`WAIT_TIMEOUT`].
pub async fn eventually(what: &str, mut is_so: impl AsyncFnMut() -> bool) {
    let waiting = async {
        while !is_so().await {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let waited = tokio::time::timeout(WAIT_TIMEOUT, waiting).await;
    assert!(waited.is_ok(), "not in time: {what}");
}

fn topology(home: &str) -> Topology {
    Topology {
        segments: [(KEY.to_string(), home.to_string())].into(),
    }
}

/// Only at these homes, in this order.
pub fn at(request: CreateVolumeRequest, homes: &[&str]) -> CreateVolumeRequest {
    let homes: Vec<_> = homes.iter().map(|home| topology(home)).collect();
    CreateVolumeRequest {
        accessibility_requirements: Some(TopologyRequirement {
            requisite: homes.clone(),
            preferred: homes,
        }),
        ..request
    }
}

/// With the name of its claim.
pub fn claimed(mut request: CreateVolumeRequest, claim: &str) -> CreateVolumeRequest {
    let (namespace, name) = claim.split_once('/').unwrap();
    for (key, value) in [("namespace", namespace), ("name", name)] {
        let key = format!("csi.storage.k8s.io/pvc/{key}");
        request.parameters.insert(key, value.to_string());
    }
    request
}

/// The home in an answer.
pub fn home_of(volume: &Volume) -> &str {
    &volume.accessible_topology[0].segments[KEY]
}

/// An error with this code, whose message contains all these words.
#[track_caller]
pub fn refused<T: std::fmt::Debug>(
    answer: std::result::Result<T, Status>,
    code: Code,
    words: &[&str],
) {
    let status = answer.unwrap_err();
    assert_eq!(status.code(), code, "{status:?}");
    for word in words {
        assert!(status.message().contains(word), "{word}: {status:?}");
    }
}
