//! A small API server that forwards ports of pods to servers of this machine, as the kubelet does over
//! `v4.channel.k8s.io`.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use futures_util::{SinkExt, StreamExt};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::runtime::Runtime;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::handshake::server::{Request, Response};

/// The port at which pods serve the page.
const PAGE_PORT: u16 = 9831;
const PROTOCOL: &str = "v4.channel.k8s.io";

#[derive(Default)]
pub struct State {
    pub pods: Vec<Value>,
    /// Where the page of a pod is really served, by its name. The ports of others are not forwarded.
    pub pages: BTreeMap<String, SocketAddr>,
    /// Verbs for which the user has no permission.
    pub denied: Vec<&'static str>,
    /// Namespaces in which pods can be listed; none is all.
    pub only: Option<&'static str>,
}

/// The API server.
pub struct Forwarding {
    pub state: Arc<Mutex<State>>,
    folder: tempfile::TempDir,
    _runtime: Runtime,
}

/// A directory with a kubeconfig of this API server.
pub fn kubeconfig(address: SocketAddr) -> tempfile::TempDir {
    let folder = tempfile::Builder::new()
        .prefix("slackwater-plugin-")
        .tempdir()
        .unwrap();
    let config = format!(
        "apiVersion: v1\nkind: Config\ncurrent-context: x\n\
         clusters: [{{name: x, cluster: {{server: 'http://{address}'}}}}]\n\
         users: [{{name: x, user: {{}}}}]\n\
         contexts: [{{name: x, context: {{cluster: x, user: x}}}}]\n"
    );
    std::fs::write(folder.path().join("kubeconfig"), config).unwrap();
    folder
}

/// A pod of the controller; `arguments` are further ones of its container.
pub fn pod(name: &str, arguments: &[&str]) -> Value {
    let common = [
        "serve",
        "--role=controller",
        "--driver-name=csi.slackwater.dev",
    ];
    let all: Vec<_> = common.iter().chain(arguments).collect();
    json!({"metadata": {"name": name, "namespace": "storage"},
        "spec": {"containers": [{"name": "router", "args": all}]},
        "status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}})
}

impl Forwarding {
    pub fn start() -> Forwarding {
        let runtime = Runtime::new().unwrap();
        let listener = runtime.block_on(tokio::net::TcpListener::bind("127.0.0.1:0"));
        let listener = listener.unwrap();
        let address = listener.local_addr().unwrap();
        let state = Arc::<Mutex<State>>::default();
        let shared = Arc::clone(&state);
        runtime.spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(serve(stream, Arc::clone(&shared)));
            }
        });
        let folder = kubeconfig(address);
        Forwarding {
            state,
            folder,
            _runtime: runtime,
        }
    }

    /// Replaces the pods by one with the page, which a server of this machine serves.
    pub fn serve_page(&self, name: &str, server: SocketAddr) {
        let mut state = self.state.lock().unwrap();
        state.pods = vec![pod(name, &[&format!("--page-port={PAGE_PORT}")])];
        state.pages = [(name.to_string(), server)].into();
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
}

/// A server that answers each request with this text, until it is dropped. Without a text, it closes the
/// connection.
pub struct PageServer {
    pub address: SocketAddr,
    has_ended: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl PageServer {
    pub fn start(text: &'static str) -> PageServer {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let has_ended = Arc::<AtomicBool>::default();
        let ended = Arc::clone(&has_ended);
        let thread = std::thread::spawn(move || {
            while let Ok((stream, _)) = listener.accept() {
                if ended.load(Ordering::SeqCst) {
                    return;
                }
                std::thread::spawn(move || answer_with(stream, text));
            }
        });
        PageServer {
            address,
            has_ended,
            thread: Some(thread),
        }
    }
}

fn answer_with(mut stream: TcpStream, text: &str) {
    let mut asked = Vec::new();
    let mut byte = [0];
    while !asked.ends_with(b"\r\n\r\n") && matches!(stream.read(&mut byte), Ok(1)) {
        asked.push(byte[0]);
    }
    if text.is_empty() {
        return;
    }
    let _ = stream.write_all(format!("HTTP/1.1 200 OK\r\n\r\n{text}").as_bytes());
}

impl Drop for PageServer {
    fn drop(&mut self) {
        self.has_ended.store(true, Ordering::SeqCst);
        drop(TcpStream::connect(self.address));
        let _ = self.thread.take().map(std::thread::JoinHandle::join);
    }
}

async fn serve(mut stream: tokio::net::TcpStream, state: Arc<Mutex<State>>) {
    while let Some(head) = head(&mut stream).await {
        let mut words = head.split(' ');
        let method = words.next().unwrap_or_default().to_string();
        let target = words.next().unwrap_or_default();
        let path = target.split('?').next().unwrap_or_default().to_string();
        let forwarded = path.strip_suffix("/portforward");
        let pod = forwarded.and_then(|path| path.rsplit('/').next());
        let page = pod.and_then(|pod| state.lock().unwrap().pages.get(pod).copied());
        if let Some(page) = page {
            assert!(target.ends_with(&format!("ports={PAGE_PORT}")), "{target}");
            return forward(stream, page).await;
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
    let refused = |code: u16, reason: &str| {
        let status = json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "code": code,
            "status": "Failure", "reason": reason, "message": format!("it is {reason}")});
        (code, status)
    };
    let pods = match state.only {
        Some(namespace) => format!("/api/v1/namespaces/{namespace}/pods"),
        None => path.to_string(),
    };
    if method == "POST" {
        let attributes = &sent["spec"]["resourceAttributes"];
        assert_eq!(attributes["resource"], "pods");
        assert_eq!(attributes["subresource"], "portforward");
        let is_denied = state.denied.iter().any(|verb| attributes["verb"] == *verb);
        sent["status"] = json!({"allowed": !is_denied});
        return (201, sent);
    }
    match path.ends_with("/pods") {
        true if path == pods => (
            200,
            json!({"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": state.pods}),
        ),
        true => refused(403, "Forbidden"),
        false => refused(404, "NotFound"),
    }
}

/// The head of the next request, whose body stays to be read; `None` at the end.
pub async fn head(stream: &mut tokio::net::TcpStream) -> Option<String> {
    let mut bytes = vec![0; 64 << 10];
    loop {
        let count = stream.peek(&mut bytes).await.ok();
        let count = count.filter(|count| *count > 0)?;
        let text = String::from_utf8_lossy(&bytes[..count]).into_owned();
        if let Some(end) = text.find("\r\n\r\n") {
            return Some(text[..end + 4].to_string());
        }
        tokio::time::sleep(std::time::Duration::from_millis(1)).await;
    }
}

/// Channel 0 has the bytes of the port, and channel 1 the reason why it cannot be used. Each begins with
/// the number of the port.
#[allow(clippy::result_large_err, reason = "the signature is tungstenite's")]
async fn forward(stream: tokio::net::TcpStream, page: SocketAddr) {
    let choose = |request: &Request, mut response: Response| {
        let offered = &request.headers()["sec-websocket-protocol"];
        assert!(offered.to_str().unwrap().contains(PROTOCOL));
        let chosen = PROTOCOL.parse().unwrap();
        response
            .headers_mut()
            .insert("sec-websocket-protocol", chosen);
        Ok(response)
    };
    let socket = tokio_tungstenite::accept_hdr_async(stream, choose).await;
    let (mut send, mut receive) = socket.unwrap().split();
    let [low, high] = PAGE_PORT.to_le_bytes();
    for channel in [0, 1] {
        let first = Message::binary(vec![channel, low, high]);
        send.send(first).await.unwrap();
    }
    let (mut from_page, mut to_page) = match tokio::net::TcpStream::connect(page).await {
        Ok(page) => page.into_split(),
        Err(_) => {
            // The request is underway already.
            let _ = receive.next().await;
            let mut message = vec![1];
            message.extend(b"the port refuses connections\x1b");
            send.send(Message::binary(message)).await.unwrap();
            let _ = send.close().await;
            return;
        }
    };
    let answers = async move {
        let mut bytes = vec![0; 4096];
        while let Ok(count @ 1..) = from_page.read(&mut bytes).await {
            let mut message = vec![0];
            message.extend(&bytes[..count]);
            if send.send(Message::binary(message)).await.is_err() {
                return;
            }
        }
        let _ = send.close().await;
    };
    let requests = async move {
        while let Some(Ok(message)) = receive.next().await {
            let Message::Binary(bytes) = message else {
                continue;
            };
            assert_eq!(bytes[0], 0);
            if to_page.write_all(&bytes[1..]).await.is_err() {
                return;
            }
        }
    };
    // The end of either is that of the connection.
    futures_util::future::select(Box::pin(answers), Box::pin(requests)).await;
}
