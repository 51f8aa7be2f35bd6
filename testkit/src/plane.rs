//! A separate control plane: etcd and kube-apiserver from `make cluster`, on ports of their own,
//! without any node. `None`, with a printed reason, if the programs do not exist.

use std::fs::File;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use tokio::runtime::Runtime;

/// A kube-apiserver needs about 10 s on an otherwise idle machine.
const START: Duration = Duration::from_secs(300);
/// A user with all rights.
const ADMIN: &str = "admin-of-this-test";

pub struct Plane {
    folder: tempfile::TempDir,
    hyper: PathBuf,
    etcd: Option<Child>,
    api: Option<Child>,
    others: Vec<Child>,
    etcd_ports: [u16; 2],
    port: u16,
    gates: &'static [&'static str],
    pub runtime: Runtime,
}

impl Plane {
    pub fn start(what: &str) -> Option<Plane> {
        Plane::start_with(what, &[])
    }

    /// With feature gates of the API server that are off by default.
    pub fn start_with(what: &str, gates: &'static [&'static str]) -> Option<Plane> {
        let hyper = program()?;
        let Some(hyper) = hyper.exists().then_some(hyper) else {
            crate::left_out(&format!(
                "{what} with a real API server: its programs are not here (make cluster builds them)"
            ));
            return None;
        };
        let folder = tempfile::Builder::new()
            .prefix("slackwater-plane-")
            .tempdir()
            .unwrap();
        let mut plane = Plane {
            folder,
            hyper,
            etcd: None,
            api: None,
            others: Vec::new(),
            etcd_ports: [free_port(), free_port()],
            port: free_port(),
            gates,
            runtime: Runtime::new().unwrap(),
        };
        // The key that signs the tokens of service accounts.
        let key = rcgen::KeyPair::generate().unwrap();
        std::fs::write(plane.path("sa.key"), key.serialize_pem()).unwrap();
        std::fs::write(plane.path("sa.pub"), key.public_key_pem()).unwrap();
        let tokens = format!("{ADMIN},admin,1,\"system:masters\"\n");
        std::fs::write(plane.path("tokens"), tokens).unwrap();
        let config = format!(
            "apiVersion: v1\nkind: Config\ncurrent-context: x\n\
             clusters: [{{name: x, cluster: {{server: 'https://127.0.0.1:{}', \
             insecure-skip-tls-verify: true}}}}]\n\
             users: [{{name: x, user: {{token: {ADMIN}}}}}]\n\
             contexts: [{{name: x, context: {{cluster: x, user: x}}}}]\n",
            plane.port
        );
        std::fs::write(plane.path("kubeconfig"), config).unwrap();
        plane.start_etcd();
        plane.start_api();
        Some(plane)
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// The program of `make cluster`, which is also kubectl.
    pub fn program(&self) -> &Path {
        &self.hyper
    }

    fn spawn(&self, name: &str, arguments: &[String]) -> Child {
        self.spawn_of(&self.hyper, name, arguments)
    }

    fn spawn_of(&self, program: &Path, name: &str, arguments: &[String]) -> Child {
        let log = File::options()
            .create(true)
            .append(true)
            .open(self.path(name))
            .unwrap();
        Command::new(program)
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .spawn()
            .unwrap()
    }

    fn start_etcd(&mut self) {
        let [client, peer] = self.etcd_ports;
        let words = [
            "etcd".to_string(),
            format!("--data-dir={}", self.path("etcd").display()),
            format!("--listen-client-urls=http://127.0.0.1:{client}"),
            format!("--advertise-client-urls=http://127.0.0.1:{client}"),
            format!("--listen-peer-urls=http://127.0.0.1:{peer}"),
            format!("--initial-advertise-peer-urls=http://127.0.0.1:{peer}"),
            format!("--initial-cluster=default=http://127.0.0.1:{peer}"),
            "--unsafe-no-fsync".into(),
        ];
        self.etcd = Some(self.spawn("etcd.log", &words));
    }

    /// Starts or restarts the API server, and waits until it serves.
    pub fn start_api(&mut self) {
        let key = self.path("sa.key");
        let mut words = vec![
            "kube-apiserver".to_string(),
            format!("--etcd-servers=http://127.0.0.1:{}", self.etcd_ports[0]),
            "--bind-address=127.0.0.1".into(),
            format!("--secure-port={}", self.port),
            format!("--cert-dir={}", self.path("certs").display()),
            format!(
                "--service-account-key-file={}",
                self.path("sa.pub").display()
            ),
            format!("--service-account-signing-key-file={}", key.display()),
            "--service-account-issuer=https://kubernetes.default.svc".into(),
            format!("--token-auth-file={}", self.path("tokens").display()),
            "--service-cluster-ip-range=10.97.0.0/24".into(),
            "--authorization-mode=RBAC".into(),
            "--disable-admission-plugins=ServiceAccount".into(),
            "--allow-privileged=true".into(),
        ];
        let gates = self.gates.iter();
        words.extend(gates.map(|gate| format!("--feature-gates={gate}=true")));
        self.api = Some(self.spawn("api.log", &words));
        let start = Instant::now();
        while self.try_kubectl(&["get", "--raw", "/readyz"]).is_err() {
            let api = self.api.as_mut().unwrap();
            let ended = api.try_wait().unwrap();
            assert!(
                ended.is_none(),
                "kube-apiserver ended: {ended:?}\n{}",
                self.log("api.log")
            );
            assert!(
                start.elapsed() < START,
                "not ready\n{}",
                self.log("api.log")
            );
            std::thread::sleep(Duration::from_millis(500));
        }
    }

    /// The controllers that bind claims to volumes, protect both, and create the pods and the claims of
    /// StatefulSets.
    pub fn start_controllers(&mut self) {
        let kubeconfig = self.path("kubeconfig");
        let words = [
            "kube-controller-manager".to_string(),
            format!("--kubeconfig={}", kubeconfig.display()),
            "--controllers=persistentvolume-binder-controller,\
             persistentvolume-protection-controller,persistentvolumeclaim-protection-controller,\
             statefulset-controller"
                .into(),
            "--leader-elect=false".into(),
            "--secure-port=0".into(),
        ];
        let child = self.spawn("controllers.log", &words);
        self.others.push(child);
    }

    /// The CRDs of snapshots.
    pub fn apply_snapshot_crds(&self) {
        let cache = self.hyper.ancestors().nth(2).unwrap();
        for kind in [
            "volumesnapshotclasses",
            "volumesnapshotcontents",
            "volumesnapshots",
        ] {
            let name = format!("manifests/crd/snapshot.storage.k8s.io_{kind}.yaml");
            self.apply(&std::fs::read_to_string(cache.join(name)).unwrap());
            let name = format!("crd/{kind}.snapshot.storage.k8s.io");
            self.kubectl(&["wait", "--for=condition=Established", &name]);
        }
    }

    /// The CRDs of snapshots, and the snapshot controller.
    pub fn start_snapshot_controller(&mut self) {
        self.apply_snapshot_crds();
        let program = self.hyper.with_file_name("snapshot-controller");
        let words = [
            format!("--kubeconfig={}", self.path("kubeconfig").display()),
            "--v=5".into(),
        ];
        let child = self.spawn_of(&program, "snapshots.log", &words);
        self.others.push(child);
    }

    /// The CRDs of group snapshots.
    pub fn apply_group_crds(&self) {
        let cache = self.hyper.ancestors().nth(2).unwrap();
        for kind in [
            "volumegroupsnapshotclasses",
            "volumegroupsnapshotcontents",
            "volumegroupsnapshots",
        ] {
            let name = format!("manifests/crd/groupsnapshot.storage.k8s.io_{kind}.yaml");
            self.apply(&std::fs::read_to_string(cache.join(name)).unwrap());
            let name = format!("crd/{kind}.groupsnapshot.storage.k8s.io");
            self.kubectl(&["wait", "--for=condition=Established", &name]);
        }
    }

    /// external-provisioner, for the driver behind a socket.
    pub fn start_provisioner(&mut self, socket: &Path) {
        let program = self.hyper.with_file_name("csi-provisioner");
        let kubeconfig = self.path("kubeconfig");
        let words = [
            format!("--kubeconfig={}", kubeconfig.display()),
            format!("--csi-address={}", socket.display()),
            "--strict-topology=false".into(),
            "--extra-create-metadata".into(),
            "--v=5".into(),
        ];
        let child = self.spawn_of(&program, "provisioner.log", &words);
        self.others.push(child);
    }

    /// Kills the API server.
    pub fn stop_api(&mut self) {
        end(self.api.take());
    }

    pub fn log(&self, name: &str) -> String {
        let text = std::fs::read_to_string(self.path(name)).unwrap_or_default();
        let lines: Vec<_> = text.lines().collect();
        lines[lines.len().saturating_sub(30)..].join("\n")
    }

    pub fn try_kubectl(&self, words: &[&str]) -> Result<String, String> {
        let output = Command::new(&self.hyper)
            .arg("kubectl")
            .arg(format!(
                "--kubeconfig={}",
                self.path("kubeconfig").display()
            ))
            .arg("--request-timeout=60s")
            .args(words)
            .env("HOME", self.folder.path())
            .output()
            .unwrap();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        match output.status.success() {
            true => Ok(text(&output.stdout)),
            false => Err(text(&output.stderr)),
        }
    }

    #[track_caller]
    pub fn kubectl(&self, words: &[&str]) -> String {
        let done = self.try_kubectl(words);
        done.unwrap_or_else(|error| panic!("kubectl {words:?}: {error}"))
    }

    /// Applies objects in YAML or JSON.
    #[track_caller]
    pub fn apply(&self, objects: &str) {
        let file = self.path("objects");
        std::fs::write(&file, objects).unwrap();
        self.kubectl(&["apply", "--server-side", "-f", file.to_str().unwrap()]);
    }

    /// A client with all rights.
    pub fn client(&self) -> kube::Client {
        self.client_of(ADMIN)
    }

    pub fn client_of(&self, token: &str) -> kube::Client {
        let url = format!("https://127.0.0.1:{}", self.port).parse().unwrap();
        let mut config = kube::Config::new(url);
        config.accept_invalid_certs = true;
        config.default_retry = false;
        let token = serde_json::json!({ "token": token });
        config.auth_info = serde_json::from_value(token).unwrap();
        let _inside = self.runtime.enter();
        kube::Client::try_from(config).unwrap()
    }
}

impl Drop for Plane {
    fn drop(&mut self) {
        for other in self.others.drain(..) {
            end(Some(other));
        }
        end(self.api.take());
        end(self.etcd.take());
        if std::thread::panicking() {
            eprintln!("--- the API server's log ---\n{}", self.log("api.log"));
            for log in ["controllers.log", "provisioner.log", "snapshots.log"] {
                eprintln!("--- {log} ---\n{}", self.log(log));
            }
        }
    }
}

fn end(child: Option<Child>) {
    if let Some(mut child) = child {
        let _ = child.kill();
        let _ = child.wait();
    }
}

fn program() -> Option<PathBuf> {
    let cache = match std::env::var_os("CLUSTER_CACHE") {
        Some(cache) => PathBuf::from(cache),
        None => Path::new(&std::env::var_os("HOME")?).join(".cache/slackwater-cluster"),
    };
    Some(cache.join("bin/hyper"))
}

fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.local_addr().unwrap().port()
}
