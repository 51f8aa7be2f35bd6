//! The Kubernetes API as the router's cluster: watches into memory, a Lease for what must be done
//! by one, Pool objects, Node labels, events, hooks by exec.
//!
//! Nothing here is polled: a router asks the API server for a Lease every 10 s, and otherwise
//! only when something happens. While the API server is gone, everything goes on being answered
//! from memory, and [`InCluster::problem`] says so.

pub mod adopt;
mod begin;
pub mod behind;
pub mod certificates;
mod endpoints;
mod events;
mod fleet;
pub mod hand_over;
pub mod label;
pub mod lease;
mod note;
pub mod orphans;
mod pods;
pub mod pool;
pub mod pool_status;
mod reconcile;
pub mod unowned;
mod volumes;
pub mod watch;

use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::Duration;

use ::kube::api::Api;
use ::kube::core::PartialObjectMeta;
use ::kube::runtime::watcher;
use ::kube::{Client, Error as KubeError, Resource};
use k8s_openapi::api::core::v1::{Node, PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use super::cluster::{Cluster, Content, KnownPool, ObjectRef, Reached};
use crate::error::{Error, Result, chain};
use crate::hook::{HookRights, Hooks, PodHooks};
use crate::model::PoolId;
use crate::telemetry::router::{ClusterStatus, Orphans};
pub use begin::{Begun, begin};
use events::{EventBody, EventRecorder};
use lease::{Leadership, Pace};
use orphans::Stored;
use pool::Pool;
use pool_status::Report;
use volumes::Volumes;
use watch::{Store, WatchStates, watch};

/// The scheduler writes on a claim which node it has chosen.
const SELECTED_NODE: &str = "volume.kubernetes.io/selected-node";
/// The Lease of the routers of a driver.
const LEASE: &str = "slackwater-router";
/// A question to the API server within a call is given up after this.
const API_TIMEOUT: Duration = Duration::from_secs(10);
/// How each watch is called in what people read.
const NODES: &str = "Nodes";
const POOLS: &str = "Pools";
const VOLUMES: &str = "PersistentVolumes";
const AGENTS: &str = "EndpointSlices";

/// How the router is in its cluster.
#[derive(Clone, Debug)]
pub struct Options {
    /// The driver's name.
    pub driver: String,
    /// Namespace and name of the agents' headless Service; agents are given by address if `None`.
    pub agent_service: Option<(String, String)>,
    /// Where the router runs: its Lease is there.
    pub namespace: String,
    /// The router's own name, its pod's: the holder of the Lease.
    pub me: String,
    /// Mark a pool as lost after its Node object and its agent have been gone for so long; never
    /// if `None`.
    pub lost_after: Option<Duration>,
    /// What allows hooks in pods.
    pub hook_rights: HookRights,
    /// Whether a csi-snapshotter runs beside the router.
    pub has_snapshotter: bool,
    /// Times of the Lease.
    pub pace: Pace,
    /// How often the one that leads looks whether something is to be written.
    pub look_every: Duration,
    /// How often it looks for orphans, and how long something must have been one to be told.
    pub orphans: orphans::Pace,
}

impl Options {
    /// As usual, for a driver of this name.
    pub fn new(driver: &str, namespace: &str, me: &str) -> Options {
        Options {
            driver: driver.into(),
            agent_service: None,
            namespace: namespace.into(),
            me: me.into(),
            lost_after: None,
            hook_rights: HookRights::default(),
            has_snapshotter: true,
            pace: Pace::default(),
            look_every: Duration::from_secs(5),
            orphans: orphans::Pace::default(),
        }
    }
}

/// The agents, as the router knows them.
#[tonic::async_trait]
pub trait AgentReports: Send + Sync + 'static {
    /// Where the agents of all nodes are now. One that isn't among them any more stays known,
    /// and can't be reached.
    fn place(&self, agents: BTreeMap<String, SocketAddr>);

    /// What each agent has said last.
    fn reports(&self) -> Vec<Report>;

    /// What each pool has that is served now; nothing of pools that can't be asked.
    async fn stored(&self) -> Vec<Stored>;
}

/// A cluster that is followed.
pub struct InCluster {
    client: Client,
    options: Options,
    following: Arc<WatchStates>,
    volumes: Volumes,
    /// The home that each Node object has as a label.
    nodes: RwLock<Store<Option<String>>>,
    pools: RwLock<Store<Pool>>,
    leadership: Leadership,
    recorder: EventRecorder,
    notes: mpsc::Sender<note::Note>,
    /// Whether the cluster has snapshots and this installation makes none.
    snapshotter_missing: AtomicBool,
    /// Nodes whose label is wrong and can't be mended.
    conflicts: AtomicU64,
    /// What nothing in the cluster names, by the last look of the one that leads.
    orphans: Mutex<Option<Orphans>>,
    hooks: Arc<PodHooks>,
    /// Names of pods that keep the disks of pools that aren't served, by UID.
    pods: Mutex<BTreeMap<String, String>>,
    tasks: Mutex<JoinSet<()>>,
}

/// A client for the API server that KUBECONFIG names, or that this pod is of.
pub async fn connect() -> Result<Client> {
    let client = Client::try_default().await;
    client.map_err(|error| Error::Unreachable {
        what: "the Kubernetes API".into(),
        reason: chain(&error),
    })
}

impl InCluster {
    /// Begins to follow. Answers come once everything has been seen; until then
    /// [`InCluster::problem`] says so. Must be called within a runtime.
    pub fn start(client: Client, options: Options, fleet: Arc<dyn AgentReports>) -> Arc<InCluster> {
        let following = Arc::<WatchStates>::default();
        let key = topology_key(&options.driver);
        let (recorder, queue) = events::queue();
        let (notes, written) = note::queue();
        let leadership = Leadership::new(
            client.clone(),
            (&options.namespace, LEASE),
            &options.me,
            options.pace,
            Arc::clone(&following),
        );
        let cluster = Arc::new(InCluster {
            volumes: Volumes::new(&options.driver, &key),
            hooks: Arc::new(PodHooks::new(client.clone()).with_rights(options.hook_rights.clone())),
            client: client.clone(),
            following,
            nodes: RwLock::default(),
            pools: RwLock::default(),
            leadership,
            recorder,
            notes,
            snapshotter_missing: AtomicBool::default(),
            conflicts: AtomicU64::default(),
            orphans: Mutex::default(),
            pods: Mutex::default(),
            tasks: Mutex::default(),
            options: options.clone(),
        });
        cluster.spawn(note::write(client.clone(), written));
        cluster.spawn(events::send(client, options, queue));
        cluster.follow_all(&key, &fleet);
        let leading = Arc::clone(&cluster);
        cluster.spawn(async move { leading.leadership.run().await });
        let working = Arc::clone(&cluster);
        let asked = Arc::clone(&fleet);
        cluster.spawn(async move { reconcile::run(&working, asked.as_ref()).await });
        let looking = Arc::clone(&cluster);
        cluster.spawn(async move { orphans::run(&looking, fleet.as_ref()).await });
        cluster
    }

    fn follow_all(self: &Arc<InCluster>, key: &str, fleet: &Arc<dyn AgentReports>) {
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
                nodes.take(event, |node| Some(node.metadata.labels.and_then(label)));
            }
        });
        let ours = all
            .clone()
            .labels(&format!("{}={}", pool::DRIVER_LABEL, self.options.driver));
        let this = Arc::clone(self);
        self.watch::<Pool>(Api::all(self.client.clone()), ours, POOLS, move |event| {
            let mut pools = this.pools.write().unwrap_or_else(PoisonError::into_inner);
            pools.take(event, Some);
        });
        if let Some((namespace, service)) = &self.options.agent_service {
            let api = Api::<EndpointSlice>::namespaced(self.client.clone(), namespace);
            let its = all.labels(&format!("kubernetes.io/service-name={service}"));
            let (fleet, mut slices) = (Arc::clone(fleet), Store::default());
            self.watch(api, its, AGENTS, move |event| {
                let is_part = matches!(event, watcher::Event::Init | watcher::Event::InitApply(_));
                slices.take(event, |slice| Some(endpoints::read(&slice)));
                if !is_part {
                    fleet.place(endpoints::by_node(slices.now().values()));
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

    /// Gives the Lease up, and follows no longer.
    pub async fn shut_down(&self) {
        self.leadership.resign().await;
        self.tasks
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .abort_all();
    }

    /// Why answers may be old, or not be there yet; `None` if all is well.
    pub fn problem(&self) -> Option<String> {
        self.following.problem()
    }

    /// Whether everything has been seen once, so that calls can be served from memory.
    pub fn is_complete(&self) -> bool {
        let watches = [NODES, POOLS, VOLUMES];
        let agents = self.options.agent_service.is_some().then_some(AGENTS);
        let mut all = watches.into_iter().chain(agents);
        all.all(|what| self.following.is_complete(what))
    }

    /// Whether a PersistentVolume names a volume; `None` if that isn't known yet.
    pub fn names_volume(&self, handle: &str) -> Option<bool> {
        let is_known = self.following.is_complete(VOLUMES);
        is_known.then(|| self.volumes.names(handle))
    }

    fn node_labels(&self) -> BTreeMap<String, Option<String>> {
        let nodes = self.nodes.read().unwrap_or_else(PoisonError::into_inner);
        nodes.now().clone()
    }

    fn pool_objects(&self) -> BTreeMap<PoolId, Pool> {
        let pools = self.pools.read().unwrap_or_else(PoisonError::into_inner);
        let all = pools.now().values();
        all.filter_map(|pool| Some((pool.id()?, pool.clone())))
            .collect()
    }
}

/// The topology key of a driver: the label of its Nodes.
pub fn topology_key(driver: &str) -> String {
    format!("topology.{driver}/home")
}

/// An answer of the API server within a call.
async fn ask<T>(what: &str, answer: impl Future<Output = Result<T, KubeError>>) -> Result<T> {
    let reason = match tokio::time::timeout(API_TIMEOUT, answer).await {
        Ok(Ok(answer)) => return Ok(answer),
        Ok(Err(error)) => chain(&error),
        Err(_) => format!(
            "the API server did not answer within {} s",
            API_TIMEOUT.as_secs()
        ),
    };
    Err(Error::Unreachable {
        what: what.into(),
        reason,
    })
}

#[tonic::async_trait]
impl Cluster for InCluster {
    async fn selected_node(&self, claim: &str) -> Result<Option<String>> {
        let Some((namespace, name)) = claim.split_once('/') else {
            return Ok(None);
        };
        type Claim = PartialObjectMeta<PersistentVolumeClaim>;
        let api = Api::<Claim>::namespaced(self.client.clone(), namespace);
        let found = ask(&format!("claim {claim}"), api.get_opt(name)).await?;
        let annotations = found.and_then(|claim| claim.metadata.annotations);
        Ok(annotations.and_then(|mut all| all.remove(SELECTED_NODE)))
    }

    async fn has_node(&self, node: &str) -> Result<bool> {
        let is_there = {
            let nodes = self.nodes.read().unwrap_or_else(PoisonError::into_inner);
            nodes.now().contains_key(node)
        };
        if is_there {
            return Ok(true);
        }
        // That it's gone is a reason for a final answer: so it's looked at anew.
        let api = Api::<PartialObjectMeta<Node>>::all(self.client.clone());
        let found = ask(&format!("node {node}"), api.get_opt(node)).await?;
        Ok(found.is_some())
    }

    async fn answers(&self) -> bool {
        let Ok(request) = http::Request::get("/readyz").body(Vec::new()) else {
            return false;
        };
        let answer = ask("the API server", self.client.request_text(request));
        answer.await.is_ok()
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

    fn known_pools(&self) -> Vec<KnownPool> {
        let pools = self.pools.read().unwrap_or_else(PoisonError::into_inner);
        pools.now().values().filter_map(Pool::known).collect()
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

    fn note(&self, content: &Content, reached: Reached) {
        // As with events: what does not fit is not worth a wait.
        let _ = self.notes.try_send((content.clone(), reached));
    }

    fn status(&self) -> Option<ClusterStatus> {
        let missing = (!self.is_complete()).then(|| self.problem()).flatten();
        Some(ClusterStatus {
            missing,
            leads: self.is_leader(),
            failing_watches: self.following.failing() as u64,
            dropped_events: self.recorder.dropped(),
            label_conflicts: self.conflicts.load(Ordering::Relaxed),
            snapshotter_missing: self.snapshotter_missing.load(Ordering::Relaxed),
            orphans: *self.orphans.lock().unwrap_or_else(PoisonError::into_inner),
        })
    }

    fn hooks(&self) -> Arc<dyn Hooks> {
        Arc::clone(&self.hooks) as Arc<dyn Hooks>
    }
}

fn names(nodes: &BTreeMap<String, Option<String>>) -> BTreeSet<String> {
    nodes.keys().cloned().collect()
}
