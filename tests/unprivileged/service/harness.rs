//! A node under test: a machine, a driver, a socket, and clients of every service.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use hyper_util::rt::TokioIo;
use slackwater::csi::controller_client::ControllerClient;
use slackwater::csi::group_controller_client::GroupControllerClient;
use slackwater::csi::identity_client::IdentityClient;
use slackwater::csi::node_client::NodeClient;
use slackwater::csi::snapshot_metadata_client::SnapshotMetadataClient;
use slackwater::csi::volume_capability::access_mode::Mode;
use slackwater::csi::volume_capability::{AccessMode, AccessType, BlockVolume, MountVolume};
use slackwater::csi::volume_content_source::{SnapshotSource, Type as Source, VolumeSource};
use slackwater::csi::{
    CapacityRange, CreateSnapshotRequest, CreateVolumeGroupSnapshotRequest, CreateVolumeRequest,
    DeleteSnapshotRequest, DeleteVolumeRequest, NodePublishVolumeRequest, NodeStageVolumeRequest,
    NodeUnstageVolumeRequest, Volume, VolumeCapability,
};
use slackwater::cut::CutInterfaces;
use slackwater::host::Host;
use slackwater::host::memory::MemoryHost;
use slackwater::model::{Alpha, PoolDefinition};
use slackwater::operation::{Driver, Settings};
use slackwater::server::{Options, Socket, serve};
use slackwater::telemetry::Metrics;
use tempfile::TempDir;
use tokio::net::UnixStream;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tonic::transport::{Channel, Endpoint};

pub const MIB: i64 = 1 << 20;
pub const GIB: i64 = 1 << 30;
/// How long a node under test waits at its stop for running work: for ever, compared with a test.
const LONG: Duration = Duration::from_secs(300);
pub const NODE: &str = "node-1";
pub const STAGING: &str = "/var/lib/kubelet/staging";
pub const TARGET: &str = "/var/lib/kubelet/target";

/// All alpha features.
pub fn all_alpha() -> Alpha {
    Alpha::NAMES
        .iter()
        .map(|n| n.parse::<Alpha>().unwrap())
        .collect()
}

pub struct Node {
    pub host: MemoryHost,
    pub driver: Arc<Driver>,
    pub metrics: Arc<Metrics>,
    pub path: PathBuf,
    pub identity: IdentityClient<Channel>,
    pub controller: ControllerClient<Channel>,
    pub groups: GroupControllerClient<Channel>,
    pub metadata: SnapshotMetadataClient<Channel>,
    pub node: NodeClient<Channel>,
    stop: oneshot::Sender<()>,
    served: JoinHandle<std::io::Result<()>>,
    pub folder: TempDir,
}

impl Node {
    pub async fn start() -> Node {
        Node::with(Alpha::default(), |_| {}).await
    }

    pub async fn with_alpha(alpha: Alpha) -> Node {
        Node::with(alpha, |_| {}).await
    }

    /// With other settings than one pool named `default`.
    pub async fn with(alpha: Alpha, change: impl FnOnce(&mut Settings)) -> Node {
        let host = MemoryHost::new();
        Node::on(host.clone(), Arc::new(host), alpha, change).await
    }

    /// On a host that wraps the machine.
    pub async fn on(
        machine: MemoryHost,
        host: Arc<dyn Host>,
        alpha: Alpha,
        change: impl FnOnce(&mut Settings),
    ) -> Node {
        Node::with_drain_timeout(LONG, machine, host, alpha, change).await
    }

    /// With another limit for running work at the stop.
    pub async fn with_drain_timeout(
        drain: Duration,
        machine: MemoryHost,
        host: Arc<dyn Host>,
        alpha: Alpha,
        change: impl FnOnce(&mut Settings),
    ) -> Node {
        let mut settings = Settings {
            node_name: NODE.to_string(),
            driver_name: "csi.slackwater.dev".to_string(),
            pools: vec![pool("default")],
            node_record: "/var/lib/slackwater/node.json".into(),
            state_dir: "/run/slackwater/state".into(),
            alone: true,
            inline_max_size: Some(1 << 40),
            ..Settings::default()
        };
        change(&mut settings);
        let interfaces = CutInterfaces {
            host,
            ..CutInterfaces::simulated(machine.clone())
        };
        let driver = Arc::new(Driver::start(settings, interfaces).unwrap());
        let metrics = Arc::new(Metrics::new());
        let folder = tempfile::TempDir::with_prefix("slackwater-").unwrap();
        let path = folder.path().join("csi.sock");
        let socket = Socket::bind(&path).unwrap();
        let options = Options {
            alpha,
            metrics: metrics.clone(),
            drain,
        };
        let (stop, stopped) = oneshot::channel();
        let served = tokio::spawn(serve(socket, driver.clone(), options, async {
            let _ = stopped.await;
        }));
        let channel = channel(path.clone());
        Node {
            host: machine,
            driver,
            metrics,
            path,
            identity: IdentityClient::new(channel.clone()),
            controller: ControllerClient::new(channel.clone()),
            groups: GroupControllerClient::new(channel.clone()),
            metadata: SnapshotMetadataClient::new(channel.clone()),
            node: NodeClient::new(channel),
            stop,
            served,
            folder,
        }
    }

    /// Stops as after SIGTERM.
    pub async fn stop(self) {
        let path = self.path.clone();
        let _ = self.stop.send(());
        self.served.await.unwrap().unwrap();
        assert!(!path.exists(), "the socket is removed");
        assert_eq!(self.driver.pools.locks_held(), 0);
        assert_eq!(self.host.violations(), Vec::<String>::new());
    }

    /// Begins the shutdown.
    pub fn begin_stop(self) -> Stopping {
        let _ = self.stop.send(());
        Stopping {
            served: self.served,
            _folder: self.folder,
        }
    }

    /// A file on the machine, as text.
    pub fn driver_file(&self, path: &str) -> String {
        let bytes = self.host.read_file(Path::new(path)).unwrap().unwrap();
        String::from_utf8(bytes).unwrap()
    }

    pub async fn create(&self, name: &str) -> Volume {
        let created = self.controller.clone().create_volume(create(name)).await;
        created.unwrap().into_inner().volume.unwrap()
    }

    /// A volume of its own, staged at [`STAGING`].
    pub async fn staged(&self, name: &str) -> String {
        let id = self.create(name).await.volume_id;
        let staged = self.node.clone().node_stage_volume(stage(&id)).await;
        staged.unwrap();
        id
    }

    pub async fn unstage(&self, id: &str) {
        let unstaged = self.node.clone().node_unstage_volume(unstage(id)).await;
        unstaged.unwrap();
    }

    pub async fn delete(&self, id: &str) {
        let deleted = self.controller.clone().delete_volume(delete(id)).await;
        deleted.unwrap();
    }

    pub async fn delete_snapshot(&self, id: &str) {
        let request = delete_snapshot(id);
        let deleted = self.controller.clone().delete_snapshot(request).await;
        deleted.unwrap();
    }
}

/// A node that stops. Its folder exists until this is dropped.
pub struct Stopping {
    pub served: JoinHandle<std::io::Result<()>>,
    _folder: TempDir,
}

/// A simulated pool.
/// A memory pool of this name, or any definition.
pub fn pool(name: &str) -> PoolDefinition {
    match name.contains('=') {
        true => name.parse().unwrap(),
        false => format!("{name}=memory:").parse().unwrap(),
    }
}

/// A lazy connection, as sidecars have one; like them, it uses `localhost` as the authority.
pub fn channel(path: PathBuf) -> Channel {
    channel_with_authority(path, "localhost")
}

pub fn channel_with_authority(path: PathBuf, authority: &str) -> Channel {
    let connector = tower::service_fn(move |_| {
        let path = path.clone();
        async move { Ok::<_, std::io::Error>(TokioIo::new(UnixStream::connect(path).await?)) }
    });
    Endpoint::try_from(format!("http://{authority}"))
        .unwrap()
        .timeout(Duration::from_secs(30))
        .connect_with_connector_lazy(connector)
}

pub fn mode(mode: Mode) -> Option<AccessMode> {
    Some(AccessMode { mode: mode.into() })
}

pub fn mount() -> VolumeCapability {
    mount_as("", &[])
}

pub fn mount_as(fs_type: &str, flags: &[&str]) -> VolumeCapability {
    VolumeCapability {
        access_type: Some(AccessType::Mount(MountVolume {
            fs_type: fs_type.to_string(),
            mount_flags: flags.iter().map(|flag| flag.to_string()).collect(),
            volume_mount_group: String::new(),
        })),
        access_mode: mode(Mode::SingleNodeWriter),
    }
}

pub fn block() -> VolumeCapability {
    VolumeCapability {
        access_type: Some(AccessType::Block(BlockVolume {})),
        access_mode: mode(Mode::SingleNodeWriter),
    }
}

pub fn at_least(bytes: i64) -> Option<CapacityRange> {
    range(bytes, 0)
}

pub fn range(required_bytes: i64, limit_bytes: i64) -> Option<CapacityRange> {
    Some(CapacityRange {
        required_bytes,
        limit_bytes,
    })
}

pub fn map<const N: usize>(pairs: [(&str, &str); N]) -> std::collections::HashMap<String, String> {
    pairs.map(|(k, v)| (k.to_string(), v.to_string())).into()
}

pub fn create(name: &str) -> CreateVolumeRequest {
    CreateVolumeRequest {
        name: name.to_string(),
        capacity_range: at_least(GIB),
        volume_capabilities: vec![mount()],
        ..Default::default()
    }
}

pub fn snapshot(name: &str, source: &str) -> CreateSnapshotRequest {
    CreateSnapshotRequest {
        name: name.to_string(),
        source_volume_id: source.to_string(),
        ..Default::default()
    }
}

pub fn delete(id: &str) -> DeleteVolumeRequest {
    DeleteVolumeRequest {
        volume_id: id.to_string(),
        ..Default::default()
    }
}

pub fn delete_snapshot(id: &str) -> DeleteSnapshotRequest {
    DeleteSnapshotRequest {
        snapshot_id: id.to_string(),
        ..Default::default()
    }
}

pub fn from_snapshot(id: &str) -> Source {
    Source::Snapshot(SnapshotSource {
        snapshot_id: id.to_string(),
    })
}

pub fn from_volume(id: &str) -> Source {
    Source::Volume(VolumeSource {
        volume_id: id.to_string(),
    })
}

pub fn group(name: &str, sources: &[&str]) -> CreateVolumeGroupSnapshotRequest {
    CreateVolumeGroupSnapshotRequest {
        name: name.to_string(),
        source_volume_ids: sources.iter().map(|id| id.to_string()).collect(),
        ..Default::default()
    }
}

pub fn stage(id: &str) -> NodeStageVolumeRequest {
    NodeStageVolumeRequest {
        volume_id: id.to_string(),
        staging_target_path: STAGING.to_string(),
        volume_capability: Some(mount()),
        ..Default::default()
    }
}

pub fn unstage(id: &str) -> NodeUnstageVolumeRequest {
    NodeUnstageVolumeRequest {
        volume_id: id.to_string(),
        staging_target_path: STAGING.into(),
    }
}

pub fn publish(id: &str, target: &str) -> NodePublishVolumeRequest {
    NodePublishVolumeRequest {
        volume_id: id.to_string(),
        staging_target_path: STAGING.to_string(),
        target_path: target.to_string(),
        volume_capability: Some(mount()),
        ..Default::default()
    }
}
