//! A cluster without Kubernetes: agents with their guards and disks, and routers.

use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use slackwater::agent::agent_client::AgentClient;
use slackwater::csi;
use slackwater::tls::{Connector, Credentials, Name};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tonic::transport::{Channel, Endpoint};

use crate::node::{GIB, definition, volume_uuid};
use crate::snapshots::{from_snapshot, members};
use crate::writers::{WRITERS, Writers, counts_in, is_consistent};
use crate::{
    Client, Disk, Scratch, Server, WAIT_TIMEOUT, binary, eventually, free_port, mount, run,
    slackwater,
};

/// The minimum size of xfs.
pub const SIZE: u64 = GIB / 2;

/// One of our programs; it is killed when this is dropped.
pub struct Process {
    child: Child,
    log: PathBuf,
}

impl Process {
    pub fn start(arguments: &[String], environment: &[(&str, &str)], log: &Path) -> Process {
        let file = std::fs::OpenOptions::new();
        let file = file.clone().create(true).append(true).open(log).unwrap();
        let child = slackwater()
            .args(arguments)
            .envs(environment.iter().copied())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(file)
            .spawn()
            .unwrap();
        Process {
            child,
            log: log.to_path_buf(),
        }
    }

    pub fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    pub fn signal(&self, signal: Signal) {
        let _ = kill(Pid::from_raw(self.child.id() as i32), signal);
    }

    pub fn is_alive(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }

    pub fn kill(&mut self) {
        self.signal(Signal::SIGCONT);
        let _ = self.child.kill();
        self.child.wait().unwrap();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
        if std::thread::panicking() {
            let name = self.log.file_name().unwrap().to_string_lossy().into_owned();
            eprintln!("--- {name} of {} ---\n{}", self.log.display(), self.log());
        }
    }
}

/// A proxy between router and agent. While it is cut, it forwards no data and closes no connection.
pub struct Link {
    pub address: SocketAddr,
    cut: Arc<AtomicBool>,
}

impl Link {
    fn to(agent: SocketAddr) -> Link {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let cut = Arc::new(AtomicBool::new(false));
        listener.set_nonblocking(true).unwrap();
        let is_cut = cut.clone();
        tokio::spawn(async move {
            let listener = tokio::net::TcpListener::from_std(listener).unwrap();
            while let Ok((near, _)) = listener.accept().await {
                let Ok(far) = TcpStream::connect(agent).await else {
                    continue;
                };
                let (near_in, near_out) = near.into_split();
                let (far_in, far_out) = far.into_split();
                tokio::spawn(pass(near_in, far_out, is_cut.clone()));
                tokio::spawn(pass(far_in, near_out, is_cut.clone()));
            }
        });
        Link { address, cut }
    }

    pub fn cut(&self) {
        self.cut.store(true, Ordering::SeqCst);
    }

    pub fn mend(&self) {
        self.cut.store(false, Ordering::SeqCst);
    }
}

async fn pass(
    mut from: tokio::net::tcp::OwnedReadHalf,
    mut to: tokio::net::tcp::OwnedWriteHalf,
    cut: Arc<AtomicBool>,
) {
    let mut bytes = vec![0; 64 << 10];
    while let Ok(read @ 1..) = from.read(&mut bytes).await {
        while cut.load(Ordering::SeqCst) {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        if to.write_all(&bytes[..read]).await.is_err() {
            break;
        }
    }
    // The end of a connection is not forwarded either.
    while cut.load(Ordering::SeqCst) {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// A node: its agent, its guard, its disk, and the link to it.
pub struct Agent {
    pub name: String,
    pub server: Server,
    /// The kubelet's client.
    pub client: Client,
    pub guard: Process,
    pub wire: Link,
    pub disk: Disk,
    pub scratch: Scratch,
}

impl Agent {
    fn start(name: &str, fs: &str, certificates: &Path, options: &[&str]) -> Agent {
        let scratch = Scratch::new();
        let disk = Disk::new(&scratch, "pool", fs, 8 * GIB);
        let guard = guard(&scratch, &[]);
        let address: SocketAddr = ([127, 0, 0, 1], free_port()).into();
        let file = |end: &str| {
            let path = certificates.join(end);
            path.to_str().unwrap().to_string()
        };
        let more = [
            "--node-name".to_string(),
            name.to_string(),
            "--role".into(),
            "node".into(),
            "--agent-listen".into(),
            address.to_string(),
            "--peer-listen".into(),
            format!("127.0.0.1:{}", free_port()),
            "--tls-cert".into(),
            file(&format!("node-{name}.crt")),
            "--tls-key".into(),
            file(&format!("node-{name}.key")),
            "--tls-ca".into(),
            file("ca.crt"),
        ];
        let more = more.iter().map(String::as_str);
        let more: Vec<&str> = more.chain(options.iter().copied()).collect();
        let pool = definition(&disk.mount_point);
        let server = Server::spawn(&scratch, &[&pool], &more, &[]);
        server.wait_ready();
        let client = server.client();
        Agent {
            name: name.to_string(),
            wire: Link::to(address),
            server,
            client,
            guard,
            disk,
            scratch,
        }
    }

    pub fn restart_with(&mut self, environment: &[(&str, &str)]) {
        self.server.restart_with(environment);
        self.client = self.server.client();
    }

    /// Restarts it with a fault at its n-th effect.
    pub fn arm(&mut self, fault: &str) {
        let gate = self.scratch.join("gate");
        let _ = std::fs::remove_file(&gate);
        let faults = format!("{fault},effect.all:after={}", gate.display());
        self.restart_with(&[("SLACKWATER_FAULT", &faults)]);
        std::fs::write(gate, "").unwrap();
    }

    /// Whether its process was stopped by a signal.
    pub fn is_stopped(&self) -> bool {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.server.pid()));
        let stat = stat.unwrap_or_default();
        let after = stat.rsplit(')').next().unwrap_or_default();
        after.trim_start().starts_with('T')
    }

    /// The number of file systems that the journal lists as frozen.
    pub fn frozen(&self) -> usize {
        let state = self.scratch.join("state");
        let output = run(
            binary(),
            &["frozen", "--json", "--state-dir", state.to_str().unwrap()],
        );
        let output: serde_json::Value = serde_json::from_str(&output).unwrap();
        output["frozen"].as_array().unwrap().len()
    }

    /// Requires this node.
    pub async fn topology(&self) -> csi::TopologyRequirement {
        let mut node = self.client.node();
        let info = node.node_get_info(csi::NodeGetInfoRequest {});
        let home = info.await.unwrap().into_inner().accessible_topology;
        csi::TopologyRequirement {
            requisite: home.clone().into_iter().collect(),
            preferred: home.into_iter().collect(),
        }
    }

    /// The image of a volume or snapshot, in "volumes" or "snapshots".
    pub fn image(&self, part: &str, id: &str) -> PathBuf {
        let root = self.disk.mount_point.join(part);
        root.join(volume_uuid(id)).join("data.img")
    }

    pub fn staging(&self, name: &str) -> PathBuf {
        self.scratch.dir("kubelet").join(format!("{name}.staging"))
    }
}

fn guard(scratch: &Scratch, environment: &[(&str, &str)]) -> Process {
    let state = scratch.dir("state");
    let state = state.to_str().unwrap();
    let socket = format!("{state}/guard.sock");
    let words = ["guard", "--socket", &socket, "--state-dir", state];
    let words: Vec<String> = words.iter().map(|word| word.to_string()).collect();
    let guard = Process::start(&words, environment, &scratch.join("guard.log"));
    eventually("the guard listens", || Path::new(&socket).exists());
    guard
}

impl Drop for Agent {
    fn drop(&mut self) {
        if std::thread::panicking() {
            // A frozen file system could be neither unmounted nor removed.
            self.server.kill();
            self.guard.kill();
            let state = self.scratch.join("state");
            let words = ["frozen", "--thaw", "--state-dir", state.to_str().unwrap()];
            let _ = crate::succeeds(binary(), &words);
        }
    }
}

/// A router.
pub struct Router {
    pub process: Process,
    pub client: Client,
    socket: PathBuf,
}

/// A volume that is staged on its node.
pub struct Volume {
    pub id: String,
    /// The index of its agent.
    pub node: usize,
    pub fs: &'static str,
    pub staging: PathBuf,
}

impl AsRef<Path> for Volume {
    fn as_ref(&self) -> &Path {
        &self.staging
    }
}

/// The whole cluster. The router is dropped first, and the files last.
pub struct Cluster {
    pub router: Router,
    pub agents: Vec<Agent>,
    certificates: PathBuf,
    scratch: Scratch,
}

impl Cluster {
    /// Starts agents with pools on these file systems, and one router.
    pub async fn new(pools: &[&str]) -> Cluster {
        Cluster::with(pools, &[]).await
    }

    /// The same, with further options of the agents.
    pub async fn with(pools: &[&str], options: &[&str]) -> Cluster {
        let scratch = Scratch::new();
        let certificates = scratch.join("tls");
        let names: Vec<String> = (0..pools.len()).map(|n| format!("node-{n}")).collect();
        let mut words = vec!["certificates", "--out", certificates.to_str().unwrap()];
        words.extend(names.iter().flat_map(|name| ["--node", name]));
        run(binary(), &words);
        let agents = names.iter().zip(pools);
        let agents: Vec<Agent> = agents
            .map(|(name, fs)| Agent::start(name, fs, &certificates, options))
            .collect();
        let router = start_router(&scratch, "router", &agents, &certificates, &[]).await;
        Cluster {
            router,
            agents,
            certificates,
            scratch,
        }
    }

    /// The parameters of a router of these agents that runs within a test.
    pub fn router_parts(&self) -> (slackwater::tls::Files, Vec<(String, String)>) {
        let file = |end: &str| self.certificates.join(end);
        let files = slackwater::tls::Files {
            certificate: file("controller.crt"),
            key: file("controller.key"),
            authorities: file("ca.crt"),
        };
        let agents = self.agents.iter();
        let agents = agents.map(|agent| (agent.name.clone(), agent.wire.address.to_string()));
        (files, agents.collect())
    }

    /// A client of an agent, with the rights of a router.
    pub fn to_agent(&self, n: usize) -> AgentClient<Channel> {
        let (files, list) = self.router_parts();
        let credentials = Credentials::of_files(Name::controller().unwrap(), files).unwrap();
        let (name, address) = &list[n];
        let name = Name::node(name).unwrap();
        let connector = Connector::new(Arc::new(credentials), name, address.parse().unwrap());
        let endpoint = Endpoint::from_static("http://agent");
        AgentClient::new(endpoint.connect_with_connector_lazy(connector))
    }

    /// Starts another router of the same agents.
    pub async fn another_router(&self, name: &str) -> Router {
        start_router(&self.scratch, name, &self.agents, &self.certificates, &[]).await
    }

    /// Kills the router, and starts it again with another environment.
    pub async fn restart_router(&mut self, environment: &[(&str, &str)]) {
        self.router.process.kill();
        self.router = start_router(
            &self.scratch,
            "router",
            &self.agents,
            &self.certificates,
            environment,
        )
        .await;
    }

    /// Restarts the router so that it exits or stops at a step of the next cut.
    pub async fn arm_router(&mut self, fault: &str) {
        self.restart_router(&[("SLACKWATER_FAULT", fault)]).await;
    }

    /// Creates and stages volumes on these nodes.
    pub async fn volumes(&self, on: &[(usize, &'static str)]) -> Vec<Volume> {
        let mut volumes = Vec::new();
        for (n, (node, fs)) in on.iter().enumerate() {
            let agent = &self.agents[*node];
            let name = format!("v{n}");
            let staging = agent.staging(&name);
            std::fs::create_dir_all(&staging).unwrap();
            let id = self.create_on(agent, &name, fs).await;
            agent.client.stage(&id, &staging, mount(fs)).await.unwrap();
            volumes.push(Volume {
                id,
                node: *node,
                fs,
                staging,
            });
        }
        volumes
    }

    /// Creates a volume on a node, as the scheduler would select it.
    async fn create_on(&self, agent: &Agent, name: &str, fs: &str) -> String {
        let request = csi::CreateVolumeRequest {
            name: name.into(),
            capacity_range: Some(csi::CapacityRange {
                required_bytes: SIZE as i64,
                limit_bytes: 0,
            }),
            volume_capabilities: vec![mount(fs)],
            accessibility_requirements: Some(agent.topology().await),
            ..Default::default()
        };
        let created = self.router.client.controller().create_volume(request).await;
        created.unwrap().into_inner().volume.unwrap().volume_id
    }

    /// The counters in restored volumes, by writer and volume.
    pub async fn counters(
        &self,
        volumes: &[Volume],
        group: &csi::VolumeGroupSnapshot,
    ) -> Vec<Vec<u64>> {
        let client = &self.router.client;
        let mut found = vec![Vec::new(); WRITERS];
        for (n, (volume, snapshot)) in volumes.iter().zip(members(group)).enumerate() {
            let agent = &self.agents[volume.node];
            let name = format!("restored-{n}");
            let staging = agent.staging(&name);
            std::fs::create_dir_all(&staging).unwrap();
            let cap = mount(volume.fs);
            let source = from_snapshot(&snapshot);
            let restored = client
                .create_from(&name, SIZE, cap.clone(), source, &[])
                .await
                .unwrap();
            let id = &restored.volume_id;
            agent.client.stage(id, &staging, cap).await.unwrap();
            for (row, counter) in found.iter_mut().zip(counts_in(&staging)) {
                row.push(counter);
            }
            agent.client.unstage(id, &staging).await.unwrap();
            client.delete_unused(id).await;
        }
        found
    }

    /// Requests a group until it exists: cleanup may still hold locks, and an agent that has come
    /// back must be found first. Verifies that the answer is one consistent group, and deletes it.
    pub async fn assert_comes_to_one(
        &self,
        name: &str,
        volumes: &[Volume],
        parameters: &[(&str, &str)],
        context: &str,
    ) -> csi::VolumeGroupSnapshot {
        let group = self.until_made(name, volumes, parameters, context).await;
        for row in self.counters(volumes, &group).await {
            assert!(is_consistent(&row), "{context}: {row:?}");
        }
        self.delete_group(&group).await;
        self.assert_no_snapshots(context);
        group
    }

    /// Repeats as a sidecar does, while the code of the answer calls for a retry.
    pub async fn until_made(
        &self,
        name: &str,
        volumes: &[Volume],
        parameters: &[(&str, &str)],
        context: &str,
    ) -> csi::VolumeGroupSnapshot {
        until_made(&self.router.client, name, volumes, parameters, context).await
    }

    /// Repeats as a sidecar does while an earlier call for the group is still running, whose caller has
    /// given up.
    pub async fn delete_group(&self, group: &csi::VolumeGroupSnapshot) {
        let client = &self.router.client;
        let members = members(group);
        let start = Instant::now();
        while let Err(status) = client
            .delete_group(&group.group_snapshot_id, &members)
            .await
        {
            let is_running = status.code() == tonic::Code::Aborted;
            assert!(is_running && start.elapsed() < WAIT_TIMEOUT, "{status}");
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    }

    /// No part of any snapshot is on the pools.
    #[track_caller]
    pub fn assert_no_snapshots(&self, context: &str) {
        for agent in &self.agents {
            assert_eq!(
                agent.disk.snapshots(),
                Vec::<PathBuf>::new(),
                "{context}: {}",
                agent.name
            );
        }
    }

    /// No file system is frozen on any node.
    #[track_caller]
    pub fn assert_thawed(&self, writers: &Writers, context: &str) {
        writers.assert_flowing(context);
        eventually(&format!("{context}: the journal is empty"), || {
            self.agents.iter().all(|agent| agent.frozen() == 0)
        });
    }

    /// The listed snapshots, once all agents can be reached again.
    pub async fn listed(&self, context: &str) -> Vec<String> {
        let start = std::time::Instant::now();
        loop {
            match self.router.client.snapshots("").await {
                Ok(listed) => return listed,
                Err(status) => {
                    let again = status.code() == tonic::Code::Unavailable;
                    assert!(
                        again && start.elapsed() < WAIT_TIMEOUT,
                        "{context}: {status}"
                    );
                    tokio::time::sleep(Duration::from_millis(200)).await;
                }
            }
        }
    }

    /// Either no member of a group is listed, or all of them.
    pub async fn assert_none_or_all(&self, volumes: &[Volume], context: &str) {
        let listed = self.listed(context).await;
        let is_so = listed.len().is_multiple_of(volumes.len());
        assert!(is_so, "{context}: {listed:?}");
    }

    /// Waits until this many snapshots are listed. Before that, none is.
    pub async fn until_listed_at_once(&self, many: usize, context: &str) {
        let start = std::time::Instant::now();
        loop {
            let listed = self.listed(context).await;
            if listed.len() == many {
                return;
            }
            assert_eq!(listed, [""; 0], "{context}");
            assert!(start.elapsed() < WAIT_TIMEOUT, "{context}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Waits until no part of any snapshot is on the pools.
    pub async fn until_no_snapshots(&self, context: &str) {
        let start = std::time::Instant::now();
        while self
            .agents
            .iter()
            .any(|agent| !agent.disk.snapshots().is_empty())
        {
            assert!(start.elapsed() < WAIT_TIMEOUT, "{context}");
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    /// Deletes the volumes, and verifies that nothing is left.
    pub async fn tear_down(self, volumes: Vec<Volume>) {
        for volume in &volumes {
            let agent = &self.agents[volume.node];
            let unstaged = agent.client.unstage(&volume.id, &volume.staging);
            unstaged.await.unwrap();
            self.router.client.delete_unused(&volume.id).await;
        }
        self.assert_no_snapshots("at the end");
        for agent in &self.agents {
            assert_eq!(agent.disk.volumes(), Vec::<PathBuf>::new());
            assert_eq!(agent.disk.trash(), Vec::<PathBuf>::new());
        }
    }
}

pub fn ids(volumes: &[Volume]) -> Vec<String> {
    volumes.iter().map(|volume| volume.id.clone()).collect()
}

/// Repeats as a sidecar does, while the code of the answer calls for a retry.
pub async fn until_made(
    client: &Client,
    name: &str,
    volumes: &[Volume],
    parameters: &[(&str, &str)],
    context: &str,
) -> csi::VolumeGroupSnapshot {
    let start = std::time::Instant::now();
    loop {
        let ids = ids(volumes);
        let asked = client.group(name, &ids, parameters);
        let answer = tokio::time::timeout(WAIT_TIMEOUT, asked).await;
        let answer = answer.unwrap_or_else(|_| panic!("{context}: the call hangs"));
        match answer {
            Ok(group) => return group,
            Err(status) => {
                use tonic::Code::{Aborted, Unavailable};
                let again = matches!(status.code(), Aborted | Unavailable);
                assert!(
                    again && start.elapsed() < WAIT_TIMEOUT,
                    "{context}: {status}"
                );
                tokio::time::sleep(Duration::from_millis(200)).await;
            }
        }
    }
}

async fn start_router(
    scratch: &Scratch,
    name: &str,
    agents: &[Agent],
    certificates: &Path,
    environment: &[(&str, &str)],
) -> Router {
    let socket = scratch.dir(name).join("csi.sock");
    let file = |end: &str| certificates.join(end).to_str().unwrap().to_string();
    let mut words = vec![
        "serve".to_string(),
        "--role".into(),
        "controller".into(),
        "--endpoint".into(),
        format!("unix://{}", socket.display()),
        "--tls-cert".into(),
        file("controller.crt"),
        "--tls-key".into(),
        file("controller.key"),
        "--tls-ca".into(),
        file("ca.crt"),
    ];
    for agent in agents {
        words.push("--agent".into());
        words.push(format!("{}={}", agent.name, agent.wire.address));
    }
    let log = scratch.join(&format!("{name}.log"));
    let process = Process::start(&words, environment, &log);
    let client = Client::new(&socket);
    let start = std::time::Instant::now();
    while !client.is_ready().await {
        assert!(start.elapsed() < WAIT_TIMEOUT, "{}", process.log());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    Router {
        process,
        client,
        socket,
    }
}

impl Drop for Router {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.socket);
    }
}
