//! Data sources: the controller of `slackwater populators`, which fills the volumes of claims that name
//! an HttpSource, an OciSource or an S3Source ([ADR 0047]).
//!
//! `decide.rs` has all decisions. What must survive is recorded in annotations of the claim and of its
//! prime claim. The router uses nothing of it but the objects of sources, for its status page, and nothing
//! here calls an agent: it runs in a Deployment of its own, with rights of its own.
//!
//! | file | content |
//! |---|---|
//! | `source` | the data sources |
//! | `observe`, `decide`, `execute`, `controller` | the reconciler |
//! | `pod`, `state` | the pod that fills a volume, and the annotations |
//! | `cache`, `snapshots`, `clean` | the cache of snapshots |
//! | `turns` | the order of claims |
//! | `grant` | ReferenceGrants |
//! | `status`, `metrics` | what is reported |
//!
//! [ADR 0047]: ../../../docs/adr/0047-a-controller-of-its-own-fills-claims.md

mod cache;
mod clean;
mod controller;
mod decide;
mod execute;
mod grant;
mod metrics;
mod observe;
mod pod;
mod snapshots;
pub(super) mod source;
mod state;
mod status;
mod turns;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::Duration;

use ::kube::Client;
use ::kube::api::Api;
use ::kube::runtime::watcher;
use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use k8s_openapi::api::storage::v1::StorageClass;
use tokio::sync::watch::{Sender, channel};
use tokio::task::JoinSet;

use super::Options;
use super::events::{self, EventRecorder};
use super::reconcile::lease::{Leadership, Pace};
use super::reconcile::watches::{Store, WatchStates, until_served, watch};
use super::reconcile::{self, Controller};
use crate::telemetry::Metrics;
use clean::CacheController;
use controller::{Memory, PopulateController};
use source::{Kind, Source, source_of};
use state::{CLAIM_LABEL, SELECTED_NODE, annotation, is_leaving, phase, uid, volume_name};
use status::StatusController;
pub use turns::Limits;

/// The Lease of the controllers of data sources.
const LEASE: &str = "slackwater-populators";
/// Names of the watches in messages.
const CLAIMS: &str = "PersistentVolumeClaims";
const CLASSES: &str = "StorageClasses";
/// One in this number of passes over claims looks through the cache.
const CLEAN_INTERVAL: u32 = 12;

/// What an administrator has decided about the pods.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The driver whose claims are filled.
    pub driver: String,
    /// The image of `slackwater-populate`, with its digest.
    pub image: String,
    /// Whether servers in private networks may be connected to.
    pub private_networks: bool,
    /// `http://HOST:PORT` of a proxy.
    pub proxy: Option<String>,
    /// Certificates that the pods trust besides those of their image, in PEM.
    pub certificates: Option<String>,
    /// Addresses and networks that are refused, besides those of the API server.
    pub refused: Vec<String>,
    /// The largest qcow2 image for a block volume, as a quantity.
    pub scratch_size: String,
    /// Pods that fill block volumes run as root without capabilities.
    pub root_for_block: bool,
    /// The ClusterRole that the owner of a namespace binds, and the account to which.
    pub role: String,
    pub account: String,
    /// The VolumeSnapshotClass of cached snapshots; without it, nothing is cached.
    pub cache_class: Option<String>,
    /// The most cached snapshots in a namespace.
    pub cache_snapshots: usize,
    /// The most pods at the same time.
    pub limits: Limits,
}

impl Settings {
    /// The defaults.
    pub fn new(driver: &str, image: &str) -> Settings {
        Settings {
            driver: driver.into(),
            image: image.into(),
            private_networks: true,
            proxy: None,
            certificates: None,
            refused: Vec::new(),
            scratch_size: "20Gi".into(),
            root_for_block: false,
            role: "slackwater-populators-namespace".into(),
            account: "slackwater:slackwater-populators".into(),
            cache_class: None,
            cache_snapshots: 16,
            limits: Limits::default(),
        }
    }
}

/// The settings of the controller in its cluster.
#[derive(Clone, Debug)]
pub struct PopulatorOptions {
    pub settings: Settings,
    pub namespace: String,
    /// The name of its pod.
    pub me: String,
    pub pace: Pace,
    /// How often it looks at claims whose population is in progress.
    pub poll_interval: Duration,
}

impl PopulatorOptions {
    /// The defaults.
    pub fn new(settings: Settings, namespace: &str, me: &str) -> PopulatorOptions {
        PopulatorOptions {
            settings,
            namespace: namespace.into(),
            me: me.into(),
            pace: Pace::default(),
            poll_interval: Duration::from_secs(5),
        }
    }
}

/// What is used of a StorageClass.
#[derive(Clone, Debug, PartialEq, Eq)]
struct KnownClass {
    driver: String,
    waits: bool,
    /// Its parameters cannot be changed while it has this UID.
    uid: String,
}

/// The controller of data sources.
pub struct Populators {
    client: Client,
    options: PopulatorOptions,
    following: Arc<WatchStates>,
    /// Claims that name a source, and prime claims.
    claims: RwLock<Store<PersistentVolumeClaim>>,
    classes: RwLock<Store<KnownClass>>,
    sources: BTreeMap<Kind, RwLock<Store<Source>>>,
    changes: Sender<()>,
    leadership: Leadership,
    recorder: EventRecorder,
    memory: Mutex<Memory>,
    metrics: Arc<Metrics>,
    tasks: Mutex<JoinSet<()>>,
}

impl Populators {
    /// Starts watches and controllers. Must be called within a tokio runtime.
    pub fn start(
        client: Client,
        options: PopulatorOptions,
        metrics: Arc<Metrics>,
    ) -> Arc<Populators> {
        let following = Arc::<WatchStates>::default();
        let (recorder, queue) = events::queue();
        let leadership = Leadership::new(
            client.clone(),
            (&options.namespace, LEASE),
            &options.me,
            options.pace,
            Arc::clone(&following),
        );
        let of_events = Options::new(&options.settings.driver, &options.namespace, &options.me);
        let populators = Arc::new(Populators {
            client: client.clone(),
            options,
            following,
            claims: RwLock::default(),
            classes: RwLock::default(),
            sources: Kind::ALL.map(|kind| (kind, RwLock::default())).into(),
            changes: channel(()).0,
            leadership,
            recorder,
            memory: Mutex::default(),
            metrics,
            tasks: Mutex::default(),
        });
        populators.spawn(events::send(client, of_events, queue));
        populators.follow_all();
        let leading = Arc::clone(&populators);
        populators.spawn(async move { leading.leadership.run().await });
        let every = populators.options.poll_interval;
        populators.control(PopulateController(Arc::clone(&populators)), every);
        populators.control(StatusController(Arc::clone(&populators)), every);
        let clean = CacheController(Arc::clone(&populators));
        populators.control(clean, every * CLEAN_INTERVAL);
        populators
    }

    fn control(self: &Arc<Populators>, controller: impl Controller, every: Duration) {
        let of = Arc::clone(self);
        let is_leader = move || of.leadership.is_leader();
        let pace = reconcile::Pace {
            every,
            changes: (every == self.options.poll_interval).then(|| self.changes.subscribe()),
        };
        self.spawn(reconcile::run(Arc::new(controller), is_leader, pace));
    }

    fn follow_all(self: &Arc<Populators>) {
        let all = watcher::Config::default();
        let states = || Arc::clone(&self.following);
        let this = Arc::clone(self);
        let api = Api::<PersistentVolumeClaim>::all(self.client.clone());
        self.spawn(watch(api, all.clone(), CLAIMS, states(), move |event| {
            let mut claims = this.claims.write().unwrap_or_else(PoisonError::into_inner);
            if claims.take(event, kept, is_same) {
                this.changes.send_replace(());
            }
        }));
        let this = Arc::clone(self);
        let api = Api::<StorageClass>::all(self.client.clone());
        self.spawn(watch(api, all, CLASSES, states(), move |event| {
            let mut classes = this.classes.write().unwrap_or_else(PoisonError::into_inner);
            let read = |class: StorageClass| {
                Some(KnownClass {
                    uid: uid(&class).into(),
                    waits: class.volume_binding_mode.as_deref() == Some("WaitForFirstConsumer"),
                    driver: class.provisioner,
                })
            };
            if classes.take(event, read, PartialEq::eq) {
                this.changes.send_replace(());
            }
        }));
        for kind in Kind::ALL {
            self.spawn(follow(Arc::clone(self), kind));
        }
    }

    fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        let mut tasks = self.tasks.lock().unwrap_or_else(PoisonError::into_inner);
        tasks.spawn(task);
    }

    /// Why nothing can be decided, or decisions may be outdated; `None` if all is well.
    pub fn problem(&self) -> Option<String> {
        self.following.problem()
    }

    /// Whether everything that is decided from has been read once.
    fn has_read_objects(&self) -> bool {
        let mut all = [CLAIMS, CLASSES]
            .into_iter()
            .chain(Kind::ALL.map(Kind::as_str));
        all.all(|what| self.following.is_complete(what))
    }

    /// Claims that name a source, and prime claims.
    fn claims(&self) -> BTreeMap<String, PersistentVolumeClaim> {
        let claims = self.claims.read().unwrap_or_else(PoisonError::into_inner);
        claims.now().clone()
    }

    fn class(&self, name: &str) -> Option<KnownClass> {
        let classes = self.classes.read().unwrap_or_else(PoisonError::into_inner);
        classes.now().get(name).cloned()
    }

    fn sources(&self, kind: Kind) -> BTreeMap<String, Source> {
        let sources = self.sources.get(&kind);
        let sources = sources.map(|all| all.read().unwrap_or_else(PoisonError::into_inner));
        sources.map(|all| all.now().clone()).unwrap_or_default()
    }

    fn source(&self, kind: Kind, path: &str) -> Option<Source> {
        let sources = self.sources.get(&kind)?;
        let sources = sources.read().unwrap_or_else(PoisonError::into_inner);
        sources.now().get(path).cloned()
    }

    fn memory(&self) -> std::sync::MutexGuard<'_, Memory> {
        self.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Releases the Lease, and ends watches and controllers.
    pub async fn shut_down(&self) {
        self.leadership.resign().await;
        let mut tasks = self.tasks.lock().unwrap_or_else(PoisonError::into_inner);
        tasks.abort_all();
    }
}

/// Claims that name a source, and prime claims. Other claims are not kept.
fn kept(mut claim: PersistentVolumeClaim) -> Option<PersistentVolumeClaim> {
    let labels = claim.metadata.labels.as_ref();
    let is_prime = labels.is_some_and(|labels| labels.contains_key(CLAIM_LABEL));
    claim.metadata.managed_fields = None;
    (is_prime || source_of(&claim).is_some()).then_some(claim)
}

/// Whether nothing has changed that others decide.
fn is_same(old: &PersistentVolumeClaim, new: &PersistentVolumeClaim) -> bool {
    old.metadata.uid == new.metadata.uid
        && phase(old) == phase(new)
        && volume_name(old) == volume_name(new)
        && is_leaving(old) == is_leaving(new)
        && annotation(old, SELECTED_NODE) == annotation(new, SELECTED_NODE)
}

/// Watches the sources of a kind, once the cluster has their CRD.
async fn follow(populators: Arc<Populators>, kind: Kind) {
    let api = Api::<Source>::all_with(populators.client.clone(), &kind);
    until_served(&api, kind.as_str()).await;
    let (states, all) = (
        Arc::clone(&populators.following),
        watcher::Config::default(),
    );
    watch(api, all, kind.as_str(), states, move |event| {
        let Some(sources) = populators.sources.get(&kind) else {
            return;
        };
        let mut sources = sources.write().unwrap_or_else(PoisonError::into_inner);
        // Its own writes of the status do not change the generation.
        let is_same =
            |old: &Source, new: &Source| old.metadata.generation == new.metadata.generation;
        if sources.take(event, Some, is_same) {
            populators.changes.send_replace(());
        }
    })
    .await;
}
