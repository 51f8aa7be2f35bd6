//! The Kubernetes API as the router's cluster: watches that keep objects in memory, a Lease for work
//! that only one router may do, Pool objects, node labels, events, and hooks by exec.
//!
//! No object is polled. A router renews or reads the Lease every 10 s, and otherwise sends requests
//! only when something happens. While the API server is away, calls are answered from memory, and
//! [`InCluster::problem`] reports it. What the leading router maintains follows one pattern, which
//! `reconcile.rs` describes.
//!
//! | module | content |
//! |---|---|
//! | `start`, `options` | the start of a router in its cluster, and its settings |
//! | `reconcile` | what all controllers share: the reconciler, watches, the Lease of the leader, repeated requests |
//! | `custom_resource` | what all kinds of objects of this driver share |
//! | `lists` | lists of the API server, read page by page |
//! | `persistent_volumes` | the PersistentVolumes of this driver, in memory |
//! | `agents` | addresses of the agents, and what the cluster needs of them |
//! | `events`, `snapshot_contents` | Events; annotations of the objects of snapshots |
//! | `metrics`, `page` | what is shown in metrics and on the status page |
//! | `placement` | what decides on the node of a new volume |
//! | `pools` | Pool objects: their status, requests about pools, evacuation |
//! | `nodes` | the label of Node objects; claims of nodes that are lost |
//! | `moves`, `reverts`, `schedules` | VolumeMoves, VolumeReverts and SnapshotSchedules |
//! | `orphans` | volumes and snapshots that no object names |
//! | `adopt` | the command that moves PersistentVolumes along with a pool |
//! | `certificates` | certificates of router and agents |
//! | `populators` | data sources, a program of its own |

pub mod adopt;
mod agents;
pub mod certificates;
mod custom_resource;
mod events;
mod lists;
mod metrics;
mod moves;
mod nodes;
mod options;
pub mod orphans;
mod page;
mod persistent_volumes;
mod placement;
pub mod pools;
pub mod populators;
pub mod reconcile;
mod reverts;
mod schedules;
mod snapshot_contents;
mod start;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::Duration;

use ::kube::api::Api;
use ::kube::core::PartialObjectMeta;
use ::kube::runtime::watcher;
use ::kube::{Client, Config, Error as KubeError, Resource};
use k8s_openapi::api::core::v1::{Node, PersistentVolume};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use super::cluster::{Cluster, Content, KnownPool, Note, ObjectRef, Unwanted};
use super::create_volume::pod_placement::{Fit, PodClaims};
use crate::error::{Error, Result, chain};
use crate::hook::{Hooks, PodHooks};
use crate::model::PoolId;
use crate::operation::ContentSource;
use crate::telemetry::router::ClusterStatus;
use crate::telemetry::volumes::VolumeClaim;
pub use agents::AgentReports;
use events::{EventBody, EventRecorder};
use moves::object::VolumeMove;
use nodes::labels::LabelController;
pub use options::Options;
use orphans::{KnownOrphans, OrphanController};
pub use page::StatusSource;
use persistent_volumes::Volumes;
use pools::evacuation::EvacuationController;
use pools::evacuation::remaining::Checked;
use pools::object::Pool;
use pools::requests::PoolRequestController;
use pools::requests::progress::PoolRequests;
use pools::status::PoolController;
use reconcile::Controller;
use reconcile::lease::Leadership;
use reconcile::retry::{Unsent, retried};
use reconcile::watches::{Store, WatchStates, watch};
use schedules::object::SnapshotSchedule;
pub use start::{Begun, begin};

/// The Lease of the routers of a driver.
const LEASE: &str = "slackwater-router";
/// The timeout of a request to the API server.
const API_TIMEOUT: Duration = Duration::from_secs(10);
/// Names of the watches in messages.
const NODES: &str = "Nodes";
const POOLS: &str = "Pools";
const VOLUMES: &str = "PersistentVolumes";
const AGENTS: &str = "EndpointSlices";

/// A cluster whose objects are watched.
pub struct InCluster {
    client: Client,
    options: Options,
    following: Arc<WatchStates>,
    agents: Arc<dyn AgentReports>,
    volumes: Volumes,
    /// The home in the label of each Node object.
    nodes: RwLock<Store<Option<String>>>,
    pools: RwLock<Store<Pool>>,
    moves: RwLock<Store<VolumeMove>>,
    reverts: RwLock<Store<reverts::object::VolumeRevert>>,
    schedules: RwLock<Store<SnapshotSchedule>>,
    /// A Pool object was created, deleted or edited by a person, or a Node object was created, deleted
    /// or labeled.
    changes: tokio::sync::watch::Sender<()>,
    leadership: Leadership,
    recorder: EventRecorder,
    notes: mpsc::Sender<snapshot_contents::Noted>,
    /// The cluster has the snapshot CRDs, and this installation has no csi-snapshotter.
    snapshotter_missing: AtomicBool,
    /// The number of nodes whose label is wrong and is not changed.
    conflicts: AtomicU64,
    orphans: KnownOrphans,
    hooks: Arc<PodHooks>,
    /// What is left in pools that are being emptied, at the last check.
    evacuations: Mutex<BTreeMap<PoolId, Checked>>,
    /// How far requests about pools are.
    requests: Mutex<PoolRequests>,
    /// Names of pods that use the disks of pools that are not served, by UID.
    pods: Mutex<BTreeMap<String, String>>,
    tasks: Mutex<JoinSet<()>>,
}

/// A connection that is silent for this time is closed, so that a watch begins again if the API server
/// has disappeared without closing it. Longer than a watch, which the API server ends within five
/// minutes, and than a hook may be silent.
const READ_TIMEOUT: Duration = Duration::from_secs(660);

/// A client for the API server that KUBECONFIG names, or that of the cluster in which this pod runs.
pub async fn connect() -> Result<Client> {
    let failed =
        |error: &dyn std::error::Error| Error::unreachable("the Kubernetes API", chain(error));
    let config = Config::infer().await;
    let mut config = config.map_err(|error| failed(&error))?;
    config.read_timeout = Some(READ_TIMEOUT);
    // Callers repeat their requests. The client would wait for minutes, for example while the
    // PodDisruptionBudget of one pod does not allow its eviction.
    config.default_retry = false;
    Client::try_from(config).map_err(|error| failed(&error))
}

impl InCluster {
    /// Starts the watches and the controllers. Until all objects have been read once,
    /// [`InCluster::problem`] reports it. Must be called within a tokio runtime.
    pub fn start(
        client: Client,
        options: Options,
        agents: Arc<dyn AgentReports>,
    ) -> Arc<InCluster> {
        let following = Arc::<WatchStates>::default();
        let key = topology_key(&options.driver);
        let (recorder, queue) = events::queue();
        let (notes, written) = snapshot_contents::queue();
        let leadership = Leadership::new(
            client.clone(),
            (&options.namespace, LEASE),
            &options.me,
            options.pace,
            Arc::clone(&following),
        );
        let cluster = Arc::new(InCluster {
            agents,
            volumes: Volumes::new(&options.driver, &key),
            hooks: Arc::new(PodHooks::new(client.clone()).with_rights(options.hook_rights.clone())),
            client: client.clone(),
            following,
            nodes: RwLock::default(),
            pools: RwLock::default(),
            moves: RwLock::default(),
            reverts: RwLock::default(),
            schedules: RwLock::default(),
            changes: tokio::sync::watch::channel(()).0,
            leadership,
            recorder,
            notes,
            snapshotter_missing: AtomicBool::default(),
            conflicts: AtomicU64::default(),
            orphans: KnownOrphans::default(),
            evacuations: Mutex::default(),
            requests: Mutex::default(),
            pods: Mutex::default(),
            tasks: Mutex::default(),
            options: options.clone(),
        });
        cluster.spawn(snapshot_contents::write(client.clone(), written));
        cluster.spawn(events::send(client, options, queue));
        cluster.follow_all(&key);
        let leading = Arc::clone(&cluster);
        cluster.spawn(async move { leading.leadership.run().await });
        cluster.control_all();
        cluster
    }

    fn control_all(self: &Arc<InCluster>) {
        let every = self.options.poll_interval;
        let changes = || Some(self.changes.subscribe());
        self.control(Arc::new(PoolController(Arc::clone(self))), every, changes());
        let requests = Arc::new(PoolRequestController::new(Arc::clone(self)));
        self.control(requests, every, changes());
        let labels = Arc::new(LabelController(Arc::clone(self)));
        self.control(labels, every, changes());
        self.spawn(events::warnings::advise(Arc::clone(self)));
        let (cluster, memory) = (Arc::clone(self), Mutex::default());
        let every = self.options.orphans.every;
        self.control(Arc::new(OrphanController { cluster, memory }), every, None);
        let evacuations = Arc::new(EvacuationController(Arc::clone(self)));
        self.control(evacuations, self.options.poll_interval * 3, changes());
    }

    /// Runs a controller while this router leads, with its poll interval and the changes that cause a
    /// pass before the next poll.
    fn control(
        self: &Arc<InCluster>,
        controller: Arc<impl Controller>,
        every: Duration,
        changes: Option<tokio::sync::watch::Receiver<()>>,
    ) {
        let cluster = Arc::clone(self);
        let is_leader = move || cluster.is_leader();
        let pace = reconcile::Pace { every, changes };
        self.spawn(reconcile::run(controller, is_leader, pace));
    }

    fn follow_all(self: &Arc<InCluster>, key: &str) {
        let all = watcher::Config::default();
        let this = Arc::clone(self);
        self.watch::<PersistentVolume>(Api::all(self.client.clone()), all.clone(), VOLUMES, {
            move |event| this.volumes.take(event)
        });
        let (this, key) = (Arc::clone(self), key.to_string());
        self.watch::<PartialObjectMeta<Node>>(Api::all(self.client.clone()), all.clone(), NODES, {
            move |event| {
                let mut nodes = this.nodes.write().unwrap_or_else(PoisonError::into_inner);
                let label = |labels: BTreeMap<String, String>| labels.get(&key).cloned();
                let read = |node: PartialObjectMeta<Node>| node.metadata.labels.and_then(label);
                if nodes.take(event, |node| Some(read(node)), PartialEq::eq) {
                    this.changes.send_replace(());
                }
            }
        });
        let ours = all.clone().labels(&format!(
            "{}={}",
            pools::object::DRIVER_LABEL,
            self.options.driver
        ));
        let this = Arc::clone(self);
        self.watch::<Pool>(Api::all(self.client.clone()), ours, POOLS, move |event| {
            let mut pools = this.pools.write().unwrap_or_else(PoisonError::into_inner);
            // The router's own writes of the status do not change the generation.
            let is_same =
                |old: &Pool, new: &Pool| old.metadata.generation == new.metadata.generation;
            if pools.take(event, Some, is_same) {
                this.changes.send_replace(());
            }
        });
        if let Some((namespace, service)) = &self.options.agent_service {
            let api = Api::<EndpointSlice>::namespaced(self.client.clone(), namespace);
            let its = all.labels(&format!("kubernetes.io/service-name={service}"));
            let (agents, mut slices) = (Arc::clone(&self.agents), Store::default());
            self.watch(api, its, AGENTS, move |event| {
                let is_part = matches!(event, watcher::Event::Init | watcher::Event::InitApply(_));
                slices.take(event, |slice| Some(agents::read(&slice)), PartialEq::eq);
                if !is_part {
                    agents.place(agents::by_node(slices.now().values()));
                }
            });
        }
    }

    fn watch<K>(
        &self,
        api: Api<K>,
        config: watcher::Config,
        what: &'static str,
        take: impl FnMut(watcher::Event<K>) + Send + 'static,
    ) where
        K: Resource + Clone + serde::de::DeserializeOwned + std::fmt::Debug + Send + 'static,
    {
        self.spawn(watch(api, config, what, Arc::clone(&self.following), take));
    }

    fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        let mut tasks = self.tasks.lock().unwrap_or_else(PoisonError::into_inner);
        tasks.spawn(task);
    }

    /// Releases the Lease, and ends watches and controllers.
    pub async fn shut_down(&self) {
        self.leadership.resign().await;
        self.tasks
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .abort_all();
    }

    /// Why answers may be outdated or missing; `None` if all is well.
    pub fn problem(&self) -> Option<String> {
        self.following.problem()
    }

    /// Whether all objects have been read once, so that calls can be answered from memory.
    pub fn is_complete(&self) -> bool {
        let has_agents = self.options.agent_service.is_none() || self.following.is_complete(AGENTS);
        self.has_read_objects() && has_agents
    }

    /// Whether everything that is decided about pools and labels is in memory.
    fn has_read_objects(&self) -> bool {
        let mut all = [NODES, POOLS, VOLUMES].into_iter();
        all.all(|what| self.following.is_complete(what))
    }

    fn node_labels(&self) -> BTreeMap<String, Option<String>> {
        let nodes = self.nodes.read().unwrap_or_else(PoisonError::into_inner);
        nodes.now().clone()
    }
}

/// The topology key of a driver, which is the label of its nodes.
pub fn topology_key(driver: &str) -> String {
    format!("topology.{driver}/home")
}

/// Waits for an answer of the API server, at most [`API_TIMEOUT`].
async fn ask<T>(what: &str, answer: impl Future<Output = Result<T, KubeError>>) -> Result<T> {
    let reason = match tokio::time::timeout(API_TIMEOUT, answer).await {
        Ok(Ok(answer)) => return Ok(answer),
        Ok(Err(error)) => chain(&error),
        Err(_) => format!(
            "the API server did not answer within {} s",
            API_TIMEOUT.as_secs()
        ),
    };
    Err(Error::unreachable(what, reason))
}

#[tonic::async_trait]
impl Cluster for InCluster {
    async fn selected_node(&self, claim: &str) -> Result<Option<String>> {
        placement::pod_claims::selected_node(self, claim).await
    }

    async fn pod_claims(
        &self,
        claim: &str,
        source: Option<&ContentSource>,
        is_elsewhere: bool,
    ) -> Result<Option<PodClaims>> {
        placement::pod_claims::read(self, claim, source, is_elsewhere).await
    }

    async fn check_node(&self, claims: &PodClaims, node: &str) -> Fit {
        placement::pod_claims::check_node(self, claims, node).await
    }

    async fn has_node(&self, node: &str) -> Result<bool> {
        let is_there = {
            let nodes = self.nodes.read().unwrap_or_else(PoisonError::into_inner);
            nodes.now().contains_key(node)
        };
        Ok(is_there || placement::unwanted_copies::exists(self, node).await?)
    }

    async fn answers(&self) -> bool {
        let Ok(request) = http::Request::get("/readyz").body(Vec::new()) else {
            return false;
        };
        let answer = ask("the API server", self.client.request_text(request));
        answer.await.is_ok()
    }

    async fn find_unwanted(&self, node: &str, claim: Option<&str>) -> Option<Unwanted> {
        placement::unwanted_copies::find(self, node, claim).await
    }

    fn claim_of(&self, volume_id: &str) -> Option<String> {
        self.volumes.claim_of(volume_id)
    }

    fn is_lost(&self, pool: PoolId) -> bool {
        let pools = self.pools.read().unwrap_or_else(PoisonError::into_inner);
        pools
            .now()
            .get(&pool.to_string())
            .is_some_and(|pool| pool.spec.lost)
    }

    fn is_evacuated(&self, pool: PoolId) -> bool {
        let pools = self.pools.read().unwrap_or_else(PoisonError::into_inner);
        let pool = pools.now().get(&pool.to_string());
        pool.is_some_and(|pool| pool.spec.evacuate)
    }

    fn known_pools(&self) -> Vec<KnownPool> {
        let pools = self.pools.read().unwrap_or_else(PoisonError::into_inner);
        pools.now().values().filter_map(Pool::known).collect()
    }

    fn moved_ids(&self) -> BTreeSet<String> {
        self.ids_of_moves()
    }

    fn is_leader(&self) -> bool {
        self.leadership.is_leader()
    }

    fn record_event(
        &self,
        about: &ObjectRef,
        is_warning: bool,
        reason: &'static str,
        message: String,
    ) {
        self.recorder.record_event(EventBody {
            about: about.clone(),
            is_warning,
            reason,
            message,
        });
    }

    fn note(&self, content: Content, note: Note) {
        // A full queue drops the note, as with events: no call waits for it.
        let _ = self.notes.try_send((content, note));
    }

    fn status(&self) -> Option<ClusterStatus> {
        Some(self.numbers())
    }

    fn volume_claims(&self) -> Option<Vec<VolumeClaim>> {
        self.reported_claims()
    }

    fn hooks(&self) -> Arc<dyn Hooks> {
        Arc::clone(&self.hooks) as Arc<dyn Hooks>
    }
}
