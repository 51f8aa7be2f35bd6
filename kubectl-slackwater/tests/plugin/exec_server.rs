//! A small API server with pods of the driver, in which programs are run as the kubelet does it over
//! `v5.channel.k8s.io`.

use std::collections::BTreeMap;
use std::process::{Command, Output};
use std::sync::{Arc, Mutex};

use futures_util::{SinkExt, StreamExt};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::runtime::Runtime;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::handshake::server::{Request, Response};

use crate::fixture::{DRIVER, POOLS, id, said};
use crate::port_forward_server::{head, kubeconfig};

/// How a program in a pod ends.
#[derive(Clone, Debug)]
pub enum End {
    /// With this exit code.
    Code(u8),
    /// The container runtime could not run it.
    Refused(&'static str),
    /// The websocket is closed without a status.
    Closed,
    /// The connection breaks.
    Broken,
    /// Not before the connection has ended.
    Never,
}

/// What a program in a pod does.
#[derive(Clone, Debug)]
pub struct Script {
    pub out: Vec<u8>,
    pub err: &'static str,
    pub end: End,
}

impl Script {
    pub fn of(out: &str, err: &'static str, end: End) -> Script {
        Script {
            out: out.into(),
            err,
            end,
        }
    }
}

/// A program that was run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Run {
    pub pod: String,
    pub container: String,
    pub words: Vec<String>,
    /// Its stdin, if it has one that has ended.
    pub input: Option<Vec<u8>>,
}

#[derive(Default)]
pub struct State {
    pub pods: Vec<Value>,
    /// By their paths below the API.
    pub objects: BTreeMap<String, Value>,
    /// What programs do, by their pod.
    pub scripts: BTreeMap<String, Script>,
    pub runs: Vec<Run>,
    /// Verbs of pods/exec for which the user has no permission.
    pub denied: Vec<&'static str>,
    /// The API server is too old for the end of stdin.
    pub is_old: bool,
}

/// The API server.
pub struct Execs {
    pub state: Arc<Mutex<State>>,
    folder: tempfile::TempDir,
    _runtime: Runtime,
}

/// A pod of the driver on a node.
pub fn pod(name: &str, node: &str) -> Value {
    json!({"metadata": {"name": name, "namespace": "storage"},
        "spec": {"nodeName": node, "containers": [{"name": "driver", "args": ["serve",
            format!("--driver-name={DRIVER}"), "--endpoint=unix:///plugin/csi.sock",
            "--node-name=$(NODE_NAME)", "--pool=default=file:/srv/pool,init",
            "--node-record=/var/lib/slackwater/node.json", "--state-dir=/run/slackwater/state"]}]},
        "status": {"phase": "Running", "containerStatuses": [{"name": "driver", "ready": true}]}})
}

impl Execs {
    /// With a pod on each of two nodes, two pools, and a claim `data` with a volume and a snapshot `monday`
    /// on the first.
    pub fn start() -> Execs {
        let runtime = Runtime::new().unwrap();
        let listener = runtime.block_on(tokio::net::TcpListener::bind("127.0.0.1:0"));
        let listener = listener.unwrap();
        let folder = kubeconfig(listener.local_addr().unwrap());
        let state = Arc::<Mutex<State>>::default();
        let shared = Arc::clone(&state);
        runtime.spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(serve(stream, Arc::clone(&shared)));
            }
        });
        let server = Execs {
            state,
            folder,
            _runtime: runtime,
        };
        server.fill();
        server.fill_snapshots();
        server
    }

    fn fill(&self) {
        let mut state = self.state.lock().unwrap();
        state.pods = vec![pod("driver-1", "node-1"), pod("driver-2", "node-2")];
        for (n, node) in ["node-1", "node-2"].iter().enumerate() {
            let fine = Script::of(&format!("all is well on {node}\n"), "", End::Code(0));
            state.scripts.insert(format!("driver-{}", n + 1), fine);
            let pool = json!({"metadata": {"name": POOLS[n]}, "spec": {},
                "status": {"node": node, "name": "default"}});
            let path = format!("/apis/slackwater.dev/v1alpha1/pools/{}", POOLS[n]);
            state.objects.insert(path, pool);
            let path = format!("/api/v1/nodes/{node}");
            state
                .objects
                .insert(path, json!({"metadata": {"name": node}}));
        }
        let of_namespace = "/api/v1/namespaces/default/persistentvolumeclaims";
        for (claim, volume) in [("data", "pv-1"), ("foreign", "pv-2"), ("pending", "")] {
            state.objects.insert(
                format!("{of_namespace}/{claim}"),
                json!({"metadata": {"name": claim, "namespace": "default"}, "spec": {"volumeName": volume}}),
            );
        }
        for (volume, driver) in [("pv-1", DRIVER), ("pv-2", "csi.example.org")] {
            let csi = json!({"driver": driver, "volumeHandle": id(0, 1)});
            state.objects.insert(
                format!("/api/v1/persistentvolumes/{volume}"),
                json!({"metadata": {"name": volume}, "spec": {"csi": csi}}),
            );
        }
    }

    fn fill_snapshots(&self) {
        let mut state = self.state.lock().unwrap();
        let group = "/apis/snapshot.storage.k8s.io/v1";
        for (name, content, driver) in [
            ("monday", "content-1", DRIVER),
            ("foreign", "content-2", "csi.example.org"),
            ("pending", "", DRIVER),
        ] {
            state.objects.insert(
                format!("{group}/namespaces/default/volumesnapshots/{name}"),
                json!({"metadata": {"name": name, "namespace": "default"},
                    "status": {"boundVolumeSnapshotContentName": content}}),
            );
            state.objects.insert(
                format!("{group}/volumesnapshotcontents/{content}"),
                json!({"metadata": {"name": content}, "spec": {"driver": driver},
                    "status": {"snapshotHandle": id(0, 101)}}),
            );
        }
    }

    /// What programs in this pod do from now on.
    pub fn script(&self, pod: &str, script: Script) {
        let mut state = self.state.lock().unwrap();
        state.scripts.insert(pod.into(), script);
    }

    /// The plugin with these arguments.
    pub fn command(&self, words: &[&str]) -> Command {
        let config = self.folder.path().join("kubeconfig");
        let mut command = Command::new(env!("CARGO_BIN_EXE_kubectl-slackwater"));
        command
            .arg(format!("--kubeconfig={}", config.display()))
            .args(words);
        command
    }

    pub fn output(&self, words: &[&str]) -> Output {
        self.command(words).output().unwrap()
    }

    pub fn says(&self, words: &[&str]) -> String {
        said(words, &self.output(words))
    }

    /// What was run since the last call.
    pub fn runs(&self) -> Vec<Run> {
        std::mem::take(&mut self.state.lock().unwrap().runs)
    }
}

async fn serve(mut stream: TcpStream, state: Arc<Mutex<State>>) {
    while let Some(head) = head(&mut stream).await {
        let mut words = head.split(' ');
        let method = words.next().unwrap_or_default().to_string();
        let target = words.next().unwrap_or_default().to_string();
        let path = target.split('?').next().unwrap_or_default().to_string();
        if let Some(pod) = path.strip_suffix("/exec") {
            let pod = pod.rsplit('/').next().unwrap().to_string();
            return exec(stream, state, pod, &target).await;
        }
        let length = head.to_ascii_lowercase();
        let length = length.split("content-length: ").nth(1);
        let length = length.and_then(|rest| rest.split("\r\n").next()?.parse().ok());
        let mut used = vec![0; head.len()];
        stream.read_exact(&mut used).await.unwrap();
        let mut sent = vec![0; length.unwrap_or(0)];
        stream.read_exact(&mut sent).await.unwrap();
        let sent = serde_json::from_slice(&sent).unwrap_or_default();
        let (code, body) = answer(&state.lock().unwrap(), &method, &path, sent);
        let body = body.to_string();
        let answer = format!(
            "HTTP/1.1 {code} x\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        );
        if stream.write_all(answer.as_bytes()).await.is_err() {
            return;
        }
    }
}

fn answer(state: &State, method: &str, path: &str, mut sent: Value) -> (u16, Value) {
    if method == "POST" {
        let attributes = &sent["spec"]["resourceAttributes"];
        assert_eq!(attributes["resource"], "pods");
        assert_eq!(attributes["subresource"], "exec");
        let is_denied = state.denied.iter().any(|verb| attributes["verb"] == *verb);
        sent["status"] = json!({"allowed": !is_denied});
        return (201, sent);
    }
    let list = |kind: &str, items: Vec<Value>| {
        let items = json!({"kind": kind, "apiVersion": "v1", "metadata": {}, "items": items});
        (200, items)
    };
    if path.ends_with("/pods") {
        let mut pods = state.pods.clone();
        if let Some(namespace) = path.strip_prefix("/api/v1/namespaces/") {
            let namespace = namespace.strip_suffix("/pods").unwrap_or(namespace);
            pods.retain(|pod| pod["metadata"]["namespace"] == namespace);
        }
        return list("PodList", pods);
    }
    if path.ends_with("/pools") {
        let of_pools = |(path, _): &(&String, &Value)| path.contains("/pools/");
        let pools = state.objects.iter().filter(of_pools);
        return list("PoolList", pools.map(|(_, pool)| pool.clone()).collect());
    }
    match state.objects.get(path) {
        Some(object) => (200, object.clone()),
        None => (
            404,
            json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "code": 404,
                "status": "Failure", "reason": "NotFound", "message": "it is NotFound"}),
        ),
    }
}

/// A value of a query, decoded.
fn decoded(text: &str) -> String {
    let mut bytes = Vec::new();
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        bytes.push(match byte {
            b'+' => b' ',
            b'%' => {
                let digits = [rest.next().unwrap(), rest.next().unwrap()];
                u8::from_str_radix(std::str::from_utf8(&digits).unwrap(), 16).unwrap()
            }
            other => other,
        });
    }
    String::from_utf8(bytes).unwrap()
}

#[allow(clippy::result_large_err, reason = "the signature is tungstenite's")]
async fn exec(stream: TcpStream, state: Arc<Mutex<State>>, pod: String, target: &str) {
    let query = target.split('?').nth(1).unwrap_or_default().to_string();
    let query = query.split('&').filter_map(|pair| pair.split_once('='));
    let query: Vec<_> = query.map(|(key, value)| (key, decoded(value))).collect();
    let all = |name: &str| {
        let found = query.iter().filter(|(key, _)| *key == name);
        found.map(|(_, value)| value.clone()).collect::<Vec<_>>()
    };
    let (script, is_old) = {
        let state = state.lock().unwrap();
        (state.scripts[&pod].clone(), state.is_old)
    };
    let protocol = match is_old {
        true => "v4.channel.k8s.io",
        false => "v5.channel.k8s.io",
    };
    let choose = |request: &Request, mut response: Response| {
        let offered = &request.headers()["sec-websocket-protocol"];
        assert!(offered.to_str().unwrap().contains(protocol));
        let chosen = protocol.parse().unwrap();
        let headers = response.headers_mut();
        headers.insert("sec-websocket-protocol", chosen);
        Ok(response)
    };
    let socket = tokio_tungstenite::accept_hdr_async(stream, choose).await;
    let mut socket = socket.unwrap();
    let mut input = None;
    if all("stdin") == ["true"] {
        let mut bytes = Vec::new();
        while let Some(Ok(message)) = socket.next().await {
            match message {
                Message::Binary(data) if data[..] == [255, 0] => {
                    input = Some(bytes);
                    break;
                }
                Message::Binary(data) => {
                    assert_eq!(data[0], 0);
                    bytes.extend_from_slice(&data[1..]);
                }
                _ => {}
            }
        }
    }
    state.lock().unwrap().runs.push(Run {
        pod,
        container: all("container").concat(),
        words: all("command"),
        input,
    });
    let message = |channel: u8, data: &[u8]| Message::binary([&[channel], data].concat());
    for channel in 1..=3 {
        let _ = socket.send(message(channel, &[])).await;
    }
    let _ = socket.send(message(2, script.err.as_bytes())).await;
    for piece in script.out.chunks(4096) {
        // The plugin may be gone.
        if socket.send(message(1, piece)).await.is_err() {
            return;
        }
    }
    let status = match script.end {
        End::Code(0) => json!({"status": "Success"}),
        End::Code(code) => json!({"status": "Failure", "reason": "NonZeroExitCode",
            "message": "command terminated with non-zero exit code",
            "details": {"causes": [{"reason": "ExitCode", "message": code.to_string()}]}}),
        End::Refused(why) => {
            json!({"status": "Failure", "reason": "InternalError", "message": why})
        }
        End::Closed => return drop(socket.close(None).await),
        End::Broken => return,
        End::Never => {
            while let Some(Ok(_)) = socket.next().await {}
            return;
        }
    };
    let _ = socket.send(message(3, status.to_string().as_bytes())).await;
    let _ = socket.close(None).await;
}
