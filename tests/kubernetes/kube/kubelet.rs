//! A small API server: objects that can be read, created and patched, and exec as the kubelet
//! serves it over `v5.channel.k8s.io`, with real processes of this machine instead of a
//! container's. A watch returns no events.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};

use futures_util::{SinkExt, StreamExt};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Runtime;
use tokio::sync::{mpsc, watch};
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::handshake::server::{Request, Response};

/// Its objects, by path.
#[derive(Default)]
pub struct Objects {
    pub at: BTreeMap<String, Value>,
    /// Paths that are answered with 403.
    pub forbidden: Vec<String>,
    /// Path and query of each request.
    pub asked: Vec<String>,
    /// Method, path and body of each change.
    pub changes: Vec<(String, String, Value)>,
}

impl Objects {
    /// Applies a change. Returns the status code and the answer.
    fn change(&mut self, method: &str, path: &str, sent: Value) -> (u16, Value) {
        let change = (method.to_string(), path.to_string(), sent.clone());
        self.changes.push(change);
        let of = |end: &str| path.strip_suffix(end).unwrap_or(path).to_string();
        match method {
            "POST" => {
                let mut object = sent;
                let created = self.changes.len();
                let stem = object.pointer("/metadata/generateName").cloned();
                if let Some(stem) = stem.as_ref().and_then(Value::as_str) {
                    object["metadata"]["name"] = json!(format!("{stem}{created}"));
                }
                let name = object["metadata"]["name"].as_str().unwrap_or_default();
                let at = format!("{path}/{name}");
                if self.at.contains_key(&at) {
                    return (409, status(409, "AlreadyExists"));
                }
                let uid = &mut object["metadata"]["uid"];
                if uid.is_null() {
                    *uid = json!(format!("uid-{created}"));
                }
                self.at.insert(at, object.clone());
                (201, object)
            }
            "DELETE" => self.delete(path),
            "PUT" => {
                self.at.insert(path.to_string(), sent.clone());
                (200, sent)
            }
            _ => {
                let path = [of("/status"), of("/approval")];
                let path = path.iter().min_by_key(|path| path.len()).unwrap();
                let version = |object: &Value| object["metadata"]["resourceVersion"].clone();
                let named = version(&sent);
                match self.at.get_mut(path) {
                    Some(object) if !named.is_null() && named != version(object) => {
                        (409, status(409, "Conflict"))
                    }
                    Some(object) => {
                        merge(object, sent);
                        let object = object.clone();
                        if is_leaving(&object) && !has_finalizers(&object) {
                            self.at.remove(path);
                        }
                        (200, object)
                    }
                    None => (404, status(404, "NotFound")),
                }
            }
        }
    }

    /// An object with finalizers stays until they are removed.
    fn delete(&mut self, path: &str) -> (u16, Value) {
        let Some(object) = self.at.get_mut(path) else {
            return (404, status(404, "NotFound"));
        };
        object["metadata"]["deletionTimestamp"] = json!("2026-01-02T00:00:00Z");
        let object = object.clone();
        if !has_finalizers(&object) {
            self.at.remove(path);
        }
        (200, object)
    }
}

fn is_leaving(object: &Value) -> bool {
    !object["metadata"]["deletionTimestamp"].is_null()
}

fn has_finalizers(object: &Value) -> bool {
    let finalizers = object["metadata"]["finalizers"].as_array();
    finalizers.is_some_and(|all| !all.is_empty())
}

/// JSON merge patch (RFC 7386).
fn merge(object: &mut Value, patch: Value) {
    let Value::Object(patch) = patch else {
        *object = patch;
        return;
    };
    if !object.is_object() {
        *object = json!({});
    }
    for (key, value) in patch {
        match value {
            Value::Null => drop(object.as_object_mut().unwrap().remove(&key)),
            value => merge(&mut object[key], value),
        }
    }
}

pub struct ApiServer {
    pub address: SocketAddr,
    pub objects: Arc<Mutex<Objects>>,
    /// Each new value closes all connections.
    cut: watch::Sender<u64>,
    /// The runtime of the server and of the hooks under test.
    pub runtime: Runtime,
}

impl ApiServer {
    pub fn new() -> ApiServer {
        let runtime = Runtime::new().unwrap();
        let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).unwrap();
        let address = listener.local_addr().unwrap();
        let objects = Arc::<Mutex<Objects>>::default();
        let (cut, cuts) = watch::channel(0);
        let shared = Arc::clone(&objects);
        runtime.spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let (objects, mut cuts) = (Arc::clone(&shared), cuts.clone());
                tokio::spawn(async move {
                    tokio::select! {
                        () = serve(stream, objects) => {}
                        _ = cuts.changed() => {}
                    }
                });
            }
        });
        ApiServer {
            address,
            objects,
            cut,
            runtime,
        }
    }

    pub fn client(&self) -> kube::Client {
        let url = format!("http://{}", self.address).parse().unwrap();
        let mut config = kube::Config::new(url);
        config.default_retry = false;
        let _inside = self.runtime.enter();
        kube::Client::try_from(config).unwrap()
    }

    pub fn put(&self, path: &str, object: Value) {
        self.objects.lock().unwrap().at.insert(path.into(), object);
    }

    pub fn forbid(&self, path: &str) {
        self.objects.lock().unwrap().forbidden.push(path.into());
    }

    /// The number of requests with this text in their path.
    pub fn asked(&self, part: &str) -> usize {
        let objects = self.objects.lock().unwrap();
        objects
            .asked
            .iter()
            .filter(|asked| asked.contains(part))
            .count()
    }

    /// Closes all connections at once, as if the server had been killed.
    pub fn cut_off(&self) {
        self.cut.send_modify(|n| *n += 1);
    }
}

async fn serve(mut stream: TcpStream, objects: Arc<Mutex<Objects>>) {
    loop {
        let Some(head) = head(&mut stream).await else {
            return;
        };
        let target = head.split(' ').nth(1).unwrap_or_default().to_string();
        let path = target.split('?').next().unwrap_or_default().to_string();
        let is_forbidden = {
            let mut objects = objects.lock().unwrap();
            objects.asked.push(target.clone());
            objects.forbidden.contains(&path)
        };
        let is_upgrade = head.to_ascii_lowercase().contains("upgrade: websocket");
        if is_upgrade && !is_forbidden {
            exec(stream, &target).await;
            return;
        }
        let length = head.to_ascii_lowercase();
        let length = length.split("content-length: ").nth(1);
        let length = length.and_then(|rest| rest.split("\r\n").next()?.parse().ok());
        let mut used = vec![0; head.len()];
        stream.read_exact(&mut used).await.unwrap();
        let mut sent = vec![0; length.unwrap_or(0)];
        stream.read_exact(&mut sent).await.unwrap();
        if target.contains("watch=true") {
            let head = "HTTP/1.1 200 x\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n";
            let _ = stream.write_all(head.as_bytes()).await;
            std::future::pending::<()>().await;
        }
        let method = head.split(' ').next().unwrap_or_default();
        let (code, body) = if is_forbidden {
            (403, status(403, "Forbidden"))
        } else if method != "GET" {
            let sent = serde_json::from_slice(&sent).unwrap_or_default();
            objects.lock().unwrap().change(method, &path, sent)
        } else {
            match objects.lock().unwrap().at.get(&path) {
                Some(object) => (200, object.clone()),
                None => (404, status(404, "NotFound")),
            }
        };
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

fn status(code: u16, reason: &str) -> Value {
    json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code,
        "reason": reason, "message": format!("it is {reason}"), "metadata": {}})
}

/// The head of the next request, whose body stays to be read; `None` at the end.
async fn head(stream: &mut TcpStream) -> Option<String> {
    let mut bytes = vec![0; 64 << 10];
    loop {
        let count = stream
            .peek(&mut bytes)
            .await
            .ok()
            .filter(|count| *count > 0)?;
        let text = String::from_utf8_lossy(&bytes[..count]).into_owned();
        if let Some(end) = text.find("\r\n\r\n") {
            return Some(text[..end + 4].to_string());
        }
        tokio::time::sleep(std::time::Duration::from_millis(1)).await;
    }
}

/// The decoded words of a query.
fn commands(target: &str) -> Vec<String> {
    let query = target.split_once('?').map_or("", |(_, query)| query);
    let words = query
        .split('&')
        .filter_map(|pair| pair.strip_prefix("command="));
    words.map(decoded).collect()
}

fn decoded(text: &str) -> String {
    let mut bytes = Vec::new();
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        match byte {
            b'+' => bytes.push(b' '),
            b'%' => {
                let digits = [rest.next().unwrap(), rest.next().unwrap()];
                let digits = std::str::from_utf8(&digits).unwrap();
                bytes.push(u8::from_str_radix(digits, 16).unwrap());
            }
            byte => bytes.push(byte),
        }
    }
    String::from_utf8(bytes).unwrap()
}

/// The end of a connection closes the program's stdin, and has no other effect.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
    }
}

#[allow(clippy::result_large_err, reason = "the signature is tungstenite's")]
async fn exec(stream: TcpStream, target: &str) {
    let choose = |request: &Request, mut response: Response| {
        let offered = request.headers()["sec-websocket-protocol"]
            .to_str()
            .unwrap();
        assert!(offered.contains("v5.channel.k8s.io"), "{offered}");
        let chosen = "v5.channel.k8s.io".parse().unwrap();
        response
            .headers_mut()
            .insert("sec-websocket-protocol", chosen);
        Ok(response)
    };
    let Ok(socket) = tokio_tungstenite::accept_hdr_async(stream, choose).await else {
        return;
    };
    assert!(
        target.contains("stdin=true") && target.contains("stdout=true"),
        "{target}"
    );
    assert!(!target.contains("tty=true"), "{target}");
    let words = commands(target);
    let child = Command::new(&words[0])
        .args(&words[1..])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn();
    let (mut send, mut receive) = socket.split();
    for channel in 0..4 {
        let _ = send.send(Message::binary(vec![channel])).await;
    }
    let mut process = match child {
        Ok(child) => Process(child),
        Err(error) => {
            let mut message = vec![3];
            message.extend(status(500, &error.to_string()).to_string().bytes());
            let _ = send.send(Message::binary(message)).await;
            return;
        }
    };
    let mut messages = follow(&mut process);
    loop {
        tokio::select! {
            message = messages.recv() => {
                let Some(message) = message else { break };
                if send.send(Message::binary(message)).await.is_err() {
                    return;
                }
            }
            message = receive.next() => match message {
                Some(Ok(Message::Binary(bytes))) => match bytes.as_ref() {
                    // Closing one's own half leaves the others open.
                    [255, 0] => drop(process.0.stdin.take()),
                    [0, input @ ..] => {
                        process.0.stdin.as_mut().unwrap().write_all(input).unwrap();
                    }
                    other => panic!("{other:?}"),
                },
                Some(Ok(_)) => {}
                Some(Err(_)) | None => return,
            }
        }
    }
    let _ = send.close().await;
}

/// The output of a process, and finally its status, as messages.
fn follow(process: &mut Process) -> mpsc::UnboundedReceiver<Vec<u8>> {
    let (tell, messages) = mpsc::unbounded_channel();
    let out = reader(1, process.0.stdout.take().unwrap(), tell.clone());
    let err = reader(2, process.0.stderr.take().unwrap(), tell.clone());
    let id = nix::unistd::Pid::from_raw(process.0.id() as i32);
    std::thread::spawn(move || {
        let end = nix::sys::wait::waitpid(id, None).unwrap();
        out.join().unwrap();
        err.join().unwrap();
        let status = match end {
            nix::sys::wait::WaitStatus::Exited(_, 0) => json!({"status": "Success"}),
            nix::sys::wait::WaitStatus::Exited(_, code) => json!({
                "status": "Failure", "reason": "NonZeroExitCode",
                "message": format!("command terminated with exit code {code}"),
                "details": {"causes": [{"reason": "ExitCode", "message": code.to_string()}]},
            }),
            other => json!({"status": "Failure", "message": format!("{other:?}")}),
        };
        let mut message = vec![3];
        message.extend(status.to_string().bytes());
        let _ = tell.send(message);
    });
    messages
}

fn reader(
    channel: u8,
    mut pipe: impl Read + Send + 'static,
    tell: mpsc::UnboundedSender<Vec<u8>>,
) -> std::thread::JoinHandle<()> {
    std::thread::spawn(move || {
        let mut bytes = [0; 4096];
        while let Ok(count @ 1..) = pipe.read(&mut bytes) {
            let mut message = vec![channel];
            message.extend(&bytes[..count]);
            let _ = tell.send(message);
        }
    })
}
