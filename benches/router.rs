//! A large cluster without kubelets: 200 simulated agents with 20,000 volumes, and one router.
//!
//! The router is the real program in a process of its own. The agents are whole drivers with memory
//! pools in this process, each with its certificate and its address. The router's overhead is the
//! difference to the same call made directly to the agent, in turns.
//!
//! `AGENTS=20 VOLUMES=2000 cargo bench --bench router` is a shorter run.

#![allow(
    clippy::disallowed_methods,
    reason = "a benchmark is not the driver: it may start programs and write files"
)]
#![allow(
    clippy::unwrap_used,
    reason = "a benchmark panics where something fails"
)]

#[path = "measure/mod.rs"]
mod measure;

use std::net::SocketAddr;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use measure::{Spread, cpu, given};
use slackwater::csi::controller_client::ControllerClient;
use slackwater::csi::group_controller_client::GroupControllerClient;
use slackwater::csi::identity_client::IdentityClient;
use slackwater::csi::volume_capability::access_mode::Mode;
use slackwater::csi::volume_capability::{AccessMode, AccessType, MountVolume};
use slackwater::csi::*;
use slackwater::cut::CutInterfaces;
use slackwater::host::memory::MemoryHost;
use slackwater::operation::{Driver, Settings};
use slackwater::router::agents::endpoint;
use slackwater::server::{self, Endpoint, Options, Socket};
use slackwater::tls::authority::{Authority, Validity};
use slackwater::tls::{Bundle, Connector, Credentials, Name};
use tempfile::TempDir;
use tonic::transport::Channel;

const DRIVER: &str = "csi.slackwater.dev";
const KEY: &str = "topology.csi.slackwater.dev/home";
/// The number of rounds of calls that take about a millisecond.
const ROUNDS: usize = 400;

fn main() {
    let agents = given("AGENTS", 200);
    let volumes = given("VOLUMES", 20_000);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(run(agents, volumes));
    runtime.shutdown_background();
}

/// One agent.
struct Agent {
    node: String,
    driver: Arc<Driver>,
    address: SocketAddr,
}

struct Pki {
    authority: Authority,
    validity: Validity,
}

impl Pki {
    fn issue(&self, name: &Name) -> Bundle {
        self.authority.issue(name, self.validity).unwrap()
    }
}

async fn start(node: String, folder: &Path, pki: &Pki) -> Agent {
    let settings = Settings {
        node_name: node.clone(),
        driver_name: DRIVER.into(),
        pools: vec!["default=memory:".parse().unwrap()],
        node_record: "/var/lib/slackwater/node.json".into(),
        state_dir: "/run/slackwater/state".into(),
        ..Settings::default()
    };
    let driver = Driver::start(settings, CutInterfaces::simulated(MemoryHost::new())).unwrap();
    let driver = Arc::new(driver);
    let name = Name::node(&node).unwrap();
    let credentials = Credentials::of_bundle(name.clone(), pki.issue(&name)).unwrap();
    let listener = server::listen(SocketAddr::from(([127, 0, 0, 1], 0)))
        .await
        .unwrap();
    let address = listener.local_addr().unwrap();
    let socket = Socket::bind(&folder.join(format!("{node}.sock"))).unwrap();
    let served = server::serve_node(
        socket,
        (
            Endpoint {
                listener,
                credentials: Arc::new(credentials),
            },
            None,
        ),
        driver.clone(),
        Options::default(),
        std::future::pending(),
    );
    tokio::spawn(served);
    Agent {
        node,
        driver,
        address,
    }
}

/// The router's process.
struct Router(Child);

impl Drop for Router {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Router {
    fn start(folder: &Path, agents: &[Agent], pki: &Pki) -> Router {
        let bundle = pki.issue(&Name::controller().unwrap());
        for (name, text) in [
            ("crt", &bundle.certificate),
            ("key", &bundle.key),
            ("ca", &bundle.authorities),
        ] {
            std::fs::write(folder.join(name), text).unwrap();
        }
        let mut command = Command::new(env!("CARGO_BIN_EXE_slackwater"));
        command.args(["serve", "--role", "controller", "--endpoint"]);
        command.arg(format!("unix://{}", folder.join("router.sock").display()));
        for (flag, name) in [
            ("--tls-cert", "crt"),
            ("--tls-key", "key"),
            ("--tls-ca", "ca"),
        ] {
            command.arg(flag).arg(folder.join(name));
        }
        for agent in agents {
            command
                .arg("--agent")
                .arg(format!("{}={}", agent.node, agent.address));
        }
        let log = std::fs::File::create(folder.join("router.log")).unwrap();
        command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log);
        Router(command.spawn().unwrap())
    }

    /// Resident memory, in MiB.
    fn memory(&self) -> f64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.0.id())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let kib: f64 = line
            .unwrap()
            .split_whitespace()
            .next()
            .unwrap()
            .parse()
            .unwrap();
        kib / 1024.0
    }

    /// Seconds of processor time so far.
    fn processor(&self) -> f64 {
        cpu(&self.0.id().to_string())
    }
}

fn unix(path: std::path::PathBuf) -> Channel {
    let connector = tower::service_fn(move |_| {
        let path = path.clone();
        async move {
            let stream = tokio::net::UnixStream::connect(path).await?;
            Ok::<_, std::io::Error>(hyper_util::rt::TokioIo::new(stream))
        }
    });
    tonic::transport::Endpoint::from_static("http://localhost")
        .connect_with_connector_lazy(connector)
}

fn direct(agent: &Agent, pki: &Pki) -> Channel {
    let own = Name::controller().unwrap();
    let credentials = Credentials::of_bundle(own.clone(), pki.issue(&own)).unwrap();
    let to = Name::node(&agent.node).unwrap();
    let connector = Connector::new(Arc::new(credentials), to, agent.address);
    let endpoint = endpoint(&agent.address.to_string()).unwrap();
    endpoint.connect_with_connector_lazy(connector)
}

fn create(name: String, home: Option<&str>) -> CreateVolumeRequest {
    let topology = home.map(|home| Topology {
        segments: [(KEY.to_string(), home.to_string())].into(),
    });
    CreateVolumeRequest {
        name,
        capacity_range: Some(CapacityRange {
            required_bytes: 8 << 20,
            limit_bytes: 0,
        }),
        volume_capabilities: vec![VolumeCapability {
            access_type: Some(AccessType::Mount(MountVolume::default())),
            access_mode: Some(AccessMode {
                mode: Mode::SingleNodeWriter.into(),
            }),
        }],
        accessibility_requirements: topology.map(|topology| TopologyRequirement {
            requisite: vec![topology.clone()],
            preferred: vec![topology],
        }),
        ..Default::default()
    }
}

fn validate(id: &str) -> ValidateVolumeCapabilitiesRequest {
    ValidateVolumeCapabilitiesRequest {
        volume_id: id.to_string(),
        volume_capabilities: create(String::new(), None).volume_capabilities,
        ..Default::default()
    }
}

/// Milliseconds of some work, and its result.
async fn timed<T>(work: impl Future<Output = T>) -> (f64, T) {
    let started_at = Instant::now();
    let done = work.await;
    (started_at.elapsed().as_secs_f64() * 1e3, done)
}

fn row(what: &str, spread: &Spread) {
    println!("| {what} | {spread} |");
}

async fn run(count: usize, volumes: usize) {
    let pki = {
        let validity = Validity::from_now(Duration::from_secs(24 * 3600));
        Pki {
            authority: Authority::new(validity).unwrap(),
            validity,
        }
    };
    let folder = TempDir::with_prefix("slackwater-").unwrap();
    let mut agents = Vec::new();
    for n in 0..count {
        agents.push(start(format!("node-{n}"), folder.path(), &pki).await);
    }
    let router = Router::start(folder.path(), &agents, &pki);
    let channel = unix(folder.path().join("router.sock"));
    let mut identity = IdentityClient::new(channel.clone());
    let (ready, ()) = timed(async {
        loop {
            let probe = identity.probe(ProbeRequest {}).await;
            if probe.is_ok_and(|answer| answer.into_inner().ready == Some(true)) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
    let empty = router.memory();
    let mut controller = ControllerClient::new(channel.clone()).max_decoding_message_size(16 << 20);
    let (filled, ids) = timed(fill(&controller, &agents, volumes)).await;
    println!("{count} agents, {} volumes\n", ids.len());
    println!("| what | ms: median (quartiles) |\n|---|---|");
    row("ready, from its start", &Spread::of([ready]));
    row(
        "CreateVolume at one node, 16 at a time, per volume",
        &Spread::of([filled / ids.len() as f64]),
    );
    lists(&mut controller, ids.len()).await;
    capacity(&mut controller, &agents).await;
    creates(&mut controller, &agents).await;
    groups(&channel, &ids).await;
    added(&mut controller, &agents, &pki, &ids).await;
    let (started_at, before) = (Instant::now(), router.processor());
    tokio::time::sleep(Duration::from_secs(20)).await;
    let idle = (router.processor() - before) / started_at.elapsed().as_secs_f64();
    println!("\n| the router's process | |\n|---|---|");
    println!("| memory at start | {empty:.0} MiB |");
    println!("| memory at the end | {:.0} MiB |", router.memory());
    println!(
        "| processor time while idle | {:.1} % of one |",
        idle * 100.0
    );
}

async fn fill(
    controller: &ControllerClient<Channel>,
    agents: &[Agent],
    volumes: usize,
) -> Vec<String> {
    use tokio_stream::StreamExt;
    let homes: Vec<_> = agents
        .iter()
        .map(|agent| agent.driver.pools.home().to_string())
        .collect();
    let (to, from) = tokio::sync::mpsc::channel(16);
    for worker in 0..16 {
        let (mut controller, homes, to) = (controller.clone(), homes.clone(), to.clone());
        tokio::spawn(async move {
            for n in (worker..volumes).step_by(16) {
                let request = create(format!("v{n}"), Some(&homes[n % homes.len()]));
                let created = controller.create_volume(request).await.unwrap();
                to.send(created.into_inner().volume.unwrap().volume_id)
                    .await
                    .unwrap();
            }
        });
    }
    drop(to);
    tokio_stream::wrappers::ReceiverStream::new(from)
        .collect()
        .await
}

async fn lists(controller: &mut ControllerClient<Channel>, all: usize) {
    for (most, rounds) in [(0, 5), (100, 2)] {
        let (mut pages, mut whole) = (Vec::new(), Vec::new());
        for _ in 0..rounds {
            let (mut token, mut seen) = (String::new(), 0);
            let started_at = Instant::now();
            loop {
                let request = ListVolumesRequest {
                    max_entries: most,
                    starting_token: token,
                };
                let (took, page) = timed(controller.list_volumes(request)).await;
                pages.push(took);
                let page = page.unwrap().into_inner();
                seen += page.entries.len();
                token = page.next_token;
                if token.is_empty() {
                    break;
                }
            }
            whole.push(started_at.elapsed().as_secs_f64() * 1e3);
            assert_eq!(seen, all);
        }
        let size = if most == 0 { 5000 } else { most };
        row(
            &format!("ListVolumes, a page of {size}"),
            &Spread::of(pages),
        );
        row(
            &format!("ListVolumes, all by pages of {size}"),
            &Spread::of(whole),
        );
    }
}

async fn capacity(controller: &mut ControllerClient<Channel>, agents: &[Agent]) {
    let mut each = Vec::new();
    for agent in agents {
        let request = GetCapacityRequest {
            accessible_topology: Some(Topology {
                segments: [(KEY.to_string(), agent.driver.pools.home().to_string())].into(),
            }),
            ..Default::default()
        };
        let (took, answer) = timed(controller.get_capacity(request)).await;
        assert!(answer.unwrap().into_inner().available_capacity > 0);
        each.push(took);
    }
    row("GetCapacity of one node", &Spread::of(each));
    let mut all = Vec::new();
    for _ in 0..20 {
        let (took, answer) = timed(controller.get_capacity(GetCapacityRequest::default())).await;
        answer.unwrap();
        all.push(took);
    }
    row("GetCapacity, the sum", &Spread::of(all));
}

async fn creates(controller: &mut ControllerClient<Channel>, agents: &[Agent]) {
    let (mut here, mut anywhere, mut deletes) = (Vec::new(), Vec::new(), Vec::new());
    for n in 0..50 {
        let home = agents[n % agents.len()].driver.pools.home().to_string();
        for (times, request) in [
            (&mut here, create(format!("here{n}"), Some(&home))),
            (&mut anywhere, create(format!("anywhere{n}"), None)),
        ] {
            let (took, created) = timed(controller.create_volume(request)).await;
            times.push(took);
            let request = DeleteVolumeRequest {
                volume_id: created.unwrap().into_inner().volume.unwrap().volume_id,
                ..Default::default()
            };
            let (took, deleted) = timed(controller.delete_volume(request)).await;
            deleted.unwrap();
            deletes.push(took);
        }
    }
    row("CreateVolume at one node", &Spread::of(here));
    row(
        "CreateVolume anywhere (the name is looked up on every node)",
        &Spread::of(anywhere),
    );
    row("DeleteVolume", &Spread::of(deletes));
}

async fn groups(channel: &Channel, ids: &[String]) {
    let mut groups = GroupControllerClient::new(channel.clone());
    for members in [2, 10, 50] {
        let mut times = Vec::new();
        for round in 0..5 {
            let request = CreateVolumeGroupSnapshotRequest {
                name: format!("group-{members}-{round}"),
                source_volume_ids: ids[..members.min(ids.len())].to_vec(),
                ..Default::default()
            };
            let (took, created) = timed(groups.create_volume_group_snapshot(request)).await;
            times.push(took);
            let created = created.unwrap().into_inner().group_snapshot.unwrap();
            let delete = DeleteVolumeGroupSnapshotRequest {
                group_snapshot_id: created.group_snapshot_id,
                snapshot_ids: created
                    .snapshots
                    .into_iter()
                    .map(|one| one.snapshot_id)
                    .collect(),
                ..Default::default()
            };
            groups.delete_volume_group_snapshot(delete).await.unwrap();
        }
        row(
            &format!("CreateVolumeGroupSnapshot of {members} volumes"),
            &Spread::of(times),
        );
    }
}

/// The same calls directly to an agent and through the router, in turns.
async fn added(
    controller: &mut ControllerClient<Channel>,
    agents: &[Agent],
    pki: &Pki,
    ids: &[String],
) {
    let agent = &agents[0];
    let pool = agent.driver.pool_status()[0].id.unwrap().to_string();
    let id = ids.iter().find(|id| id.starts_with(&pool)).unwrap();
    let mut itself = ControllerClient::new(direct(agent, pki));
    itself
        .validate_volume_capabilities(validate(id))
        .await
        .unwrap();
    let (mut through, mut straight, mut more) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        let (a, answer) = timed(controller.validate_volume_capabilities(validate(id))).await;
        answer.unwrap();
        let (b, answer) = timed(itself.validate_volume_capabilities(validate(id))).await;
        answer.unwrap();
        through.push(a);
        straight.push(b);
        more.push(a - b);
    }
    row(
        "ValidateVolumeCapabilities, the agent itself",
        &Spread::of(straight),
    );
    row(
        "ValidateVolumeCapabilities, through the router",
        &Spread::of(through),
    );
    row(
        "overhead of the router, with one more connection",
        &Spread::of(more),
    );
}
