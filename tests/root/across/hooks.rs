//! Hooks of the cluster hold applications while agents cut. The router runs inside the test.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use slackwater::csi::controller_server::Controller;
use slackwater::csi::group_controller_server::GroupController;
use slackwater::csi::{self, CreateSnapshotRequest, CreateVolumeGroupSnapshotRequest};
use slackwater::error::{Error, Result};
use slackwater::hook::{HookTarget, Hooks, Quiesced};
use slackwater::model::{PoolId, SharedVolume};
use slackwater::router::cluster::{Content, KnownPool, Note, ObjectRef};
use slackwater::router::{Agents, Cluster as Around, Options, Router, TlsDial};
use slackwater::tls::{Credentials, Name};
use tonic::{Code, Request, Status};

use slackwater_testkit::cluster::{Cluster, Volume, ids};
use slackwater_testkit::node::refused;
use slackwater_testkit::writers::Writers;

/// The error of a hook.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
enum Fault {
    #[default]
    None,
    /// It cannot be started.
    Start,
    /// It dies while it should hold.
    Dies,
    /// It exits with a failure.
    Release,
}

/// A cluster with one hook for all volumes.
#[derive(Clone, Default)]
struct Pods {
    fault: Arc<Mutex<Fault>>,
    done: Arc<Mutex<Vec<String>>>,
    recorded_events: Arc<Mutex<Vec<(ObjectRef, bool, String)>>>,
    notes: Arc<Mutex<Vec<(Content, Note)>>>,
}

impl Pods {
    fn note(&self, what: &str) {
        self.done.lock().unwrap().push(what.into());
    }

    fn took(&self) -> Vec<String> {
        std::mem::take(&mut self.done.lock().unwrap())
    }

    fn recorded_events(&self) -> Vec<(ObjectRef, bool, String)> {
        std::mem::take(&mut self.recorded_events.lock().unwrap())
    }

    /// The objects at which was recorded since the last call how long a cut stopped writers.
    fn durations(&self) -> Vec<Content> {
        let notes = std::mem::take(&mut *self.notes.lock().unwrap());
        let of = |(content, note)| match note {
            Note::Durations { frozen, held } => {
                let (frozen, held) = (frozen.unwrap(), held.unwrap());
                assert!(!frozen.is_zero() && frozen < held, "{frozen:?}, {held:?}");
                Some(content)
            }
            Note::Reached(_) => None,
        };
        notes.into_iter().filter_map(of).collect()
    }

    fn fails(&self, at: Fault) -> Result<()> {
        match *self.fault.lock().unwrap() == at {
            false => Ok(()),
            true => Err(Error::QuiesceFailed {
                hook: "db".into(),
                reason: format!("planned: {at:?}"),
            }),
        }
    }
}

#[tonic::async_trait]
impl Around for Pods {
    async fn selected_node(&self, _claim: &str) -> Result<Option<String>> {
        Ok(None)
    }

    async fn has_node(&self, _node: &str) -> Result<bool> {
        Ok(true)
    }

    fn claim_of(&self, _volume_id: &str) -> Option<String> {
        Some("shop/data".into())
    }

    fn is_lost(&self, _pool: PoolId) -> bool {
        false
    }

    fn known_pools(&self) -> Vec<KnownPool> {
        Vec::new()
    }

    fn is_leader(&self) -> bool {
        true
    }

    fn record_event(
        &self,
        about: &ObjectRef,
        is_warning: bool,
        _reason: &'static str,
        message: String,
    ) {
        let recorded_events = (about.clone(), is_warning, message);
        self.recorded_events.lock().unwrap().push(recorded_events);
    }

    fn note(&self, content: Content, note: Note) {
        self.notes.lock().unwrap().push((content, note));
    }

    fn hooks(&self) -> Arc<dyn Hooks> {
        Arc::new(self.clone())
    }
}

impl Hooks for Pods {
    fn wanted(&self, targets: &[HookTarget], _shared: SharedVolume) -> Result<Vec<String>> {
        let known = |target: &HookTarget| target.claim.as_deref() == Some("shop/data");
        assert!(targets.iter().all(known), "{targets:?}");
        Ok(vec!["db".into()])
    }

    fn quiesce(&self, _names: &[String], _timeout: Duration) -> Result<Box<dyn Quiesced>> {
        self.fails(Fault::Start)?;
        self.note("quiesced");
        Ok(Box::new(Held(self.clone())))
    }
}

struct Held(Pods);

impl Quiesced for Held {
    fn verify(&mut self) -> Result<()> {
        self.0.fails(Fault::Dies)
    }

    fn release(self: Box<Self>) -> Result<Option<String>> {
        self.0.fails(Fault::Release).map(|()| None)
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.0.note("released");
    }
}

async fn router(cluster: &Cluster, pods: &Pods) -> Router {
    let (files, list) = cluster.router_parts();
    let credentials = Credentials::of_files(Name::controller().unwrap(), files).unwrap();
    let driver_name = "csi.slackwater.dev".to_string();
    let dial = TlsDial::new(Arc::new(credentials));
    let agents = Arc::new(Agents::new(Arc::new(dial), &driver_name));
    agents.set(list);
    agents.ask_all().await;
    let options = Options {
        driver_name,
        alpha: Default::default(),
        metrics: Arc::default(),
    };
    Router::new(agents, Arc::new(pods.clone()), options)
}

fn parameters(kind: &str, more: &[(&str, &str)]) -> std::collections::HashMap<String, String> {
    let object = [
        (format!("csi.storage.k8s.io/{kind}/name"), "s".to_string()),
        (
            format!("csi.storage.k8s.io/{kind}/namespace"),
            "shop".into(),
        ),
        (
            format!("csi.storage.k8s.io/{kind}content/name"),
            "content".into(),
        ),
    ];
    let class = [
        ("consistency", "application"),
        ("quiesceTimeout", "120s"),
        ("freezeTimeout", "30s"),
        ("retries", "0"),
    ];
    let class = class.iter().chain(more);
    let class = class.map(|(key, value)| (key.to_string(), value.to_string()));
    object.into_iter().chain(class).collect()
}

async fn group(
    router: &Router,
    name: &str,
    volumes: &[Volume],
    more: &[(&str, &str)],
) -> std::result::Result<csi::VolumeGroupSnapshot, Status> {
    let request = CreateVolumeGroupSnapshotRequest {
        name: name.into(),
        source_volume_ids: ids(volumes),
        parameters: parameters("volumegroupsnapshot", more),
        ..Default::default()
    };
    let created = router.create_volume_group_snapshot(Request::new(request));
    Ok(created.await?.into_inner().group_snapshot.unwrap())
}

/// A cut without hooks is the agent's own, which answers for how long it froze the file system. A repeat
/// of the call has taken nothing.
async fn an_agent_answers_how_long_it_froze(
    cluster: &Cluster,
    router: &Router,
    pods: &Pods,
    of: &str,
) {
    for is_first in [true, false] {
        pods.notes.lock().unwrap().clear();
        let request = CreateSnapshotRequest {
            name: "without hooks".into(),
            source_volume_id: of.into(),
            parameters: parameters("volumesnapshot", &[("consistency", "filesystem")]),
            ..Default::default()
        };
        let created = router.create_snapshot(Request::new(request)).await.unwrap();
        let notes = pods.notes.lock().unwrap().clone();
        let [(_, Note::Reached(reached))] = &notes[..] else {
            panic!("{notes:?}");
        };
        let frozen = reached.frozen.is_some_and(|frozen| !frozen.is_zero());
        assert_eq!(frozen, is_first, "{notes:?}");
        if !is_first {
            let id = created.into_inner().snapshot.unwrap().snapshot_id;
            let client = &cluster.router.client;
            client.delete_snapshot(&id).await.unwrap();
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn hooks_of_the_cluster_hold_applications_across_nodes_and_always_release_them() {
    let cluster = Cluster::new(&["xfs", "xfs"]).await;
    let volumes = cluster.volumes(&[(0, "ext4"), (1, "xfs")]).await;
    let writers = Writers::start(&volumes);
    let pods = Pods::default();
    let router = router(&cluster, &pods).await;
    let about = ObjectRef::Group("shop/s".into());

    for (fault, interval) in [
        (Fault::Start, "1s"),
        (Fault::Dies, "2s"),
        (Fault::Release, "3s"),
    ] {
        let name = format!("{fault:?}");
        *pods.fault.lock().unwrap() = fault;
        // A class of its own, because hooks of the other classes are paused for these volumes.
        let class = [("retryInterval", interval)];
        let answer = group(&router, &name, &volumes, &class).await;
        let answer = refused(answer, Code::FailedPrecondition);
        assert!(answer.contains("planned"), "{answer}");
        let held = ["quiesced", "released"];
        let held = if fault == Fault::Start {
            &held[..0]
        } else {
            &held
        };
        assert_eq!(pods.took(), held, "{name}");
        let recorded_events = pods.recorded_events();
        assert!(
            matches!(&recorded_events[..], [(of, true, _)] if *of == about),
            "{recorded_events:?}"
        );
        cluster.assert_thawed(&writers, &name);
        cluster.assert_no_snapshots(&name);
        // The application is left alone for a while.
        for name in [name.as_str(), "another"] {
            let answer = group(&router, name, &volumes, &class).await;
            refused(answer, Code::FailedPrecondition);
        }
        assert_eq!(pods.took(), [""; 0], "{name}: no application is disturbed");
        pods.recorded_events();

        let falls = [("onQuiesceFailure", "filesystem")];
        let name = format!("{name}, falls back");
        let created = group(&router, &name, &volumes, &falls).await.unwrap();
        let recorded_events = pods.recorded_events();
        let (of, is_warning, message) = &recorded_events[0];
        assert!(*of == about && !is_warning, "{recorded_events:?}");
        assert!(
            message.contains("level filesystem: application was requested"),
            "{message}"
        );
        cluster.delete_group(&created).await;
        pods.took();
    }
    pods.notes.lock().unwrap().clear();
    *pods.fault.lock().unwrap() = Fault::None;
    let created = group(&router, "good", &volumes, &[]).await.unwrap();
    assert_eq!(pods.took(), ["quiesced", "released"]);
    let recorded_events = pods.recorded_events();
    assert_eq!(
        recorded_events,
        [(about, false, "cut at level application".into())]
    );
    assert_eq!(pods.durations(), [Content::Group("content".into())]);
    cluster.delete_group(&created).await;

    // A single snapshot whose application runs in a pod is cut by the router as well.
    let request = CreateSnapshotRequest {
        name: "single".into(),
        source_volume_id: volumes[1].id.clone(),
        parameters: parameters("volumesnapshot", &[]),
        ..Default::default()
    };
    let created = router.create_snapshot(Request::new(request.clone())).await;
    let created = created.unwrap().into_inner().snapshot.unwrap();
    assert_eq!(pods.took(), ["quiesced", "released"]);
    let about = ObjectRef::Snapshot("shop/s".into());
    let recorded_events = pods.recorded_events();
    assert_eq!(
        recorded_events,
        [(about, false, "cut at level application".into())]
    );
    let content = Content::Snapshot("content".into());
    assert_eq!(pods.durations(), [content]);
    let again = router.create_snapshot(Request::new(request.clone())).await;
    assert_eq!(again.unwrap().into_inner().snapshot.unwrap(), created);
    assert_eq!(pods.took(), [""; 0], "a repeat disturbs no application");
    assert_eq!(pods.durations(), []);
    an_agent_answers_how_long_it_froze(&cluster, &router, &pods, &volumes[1].id).await;
    // Names that Kubernetes has generated are not looked up on other nodes.
    let mut other = CreateSnapshotRequest {
        source_volume_id: volumes[0].id.clone(),
        ..request
    };
    let key = "csi.storage.k8s.io/volumesnapshotcontent/name";
    other.parameters.remove(key);
    let answer = router.create_snapshot(Request::new(other)).await;
    refused(answer, Code::AlreadyExists);
    let client = &cluster.router.client;
    client.delete_snapshot(&created.snapshot_id).await.unwrap();
    drop(writers);
    cluster.tear_down(volumes).await;
}
