//! A real server of objects: versitygw, behind a front with TLS that sees each request. `tests/s3` is its
//! program in Go, so these tests need Go, and download its modules the first time. Servers that misbehave are
//! in `objects.rs`.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use slackwater_populate::failure::Next;

use crate::server::{Request, Server, Step, Steps, Tls, broken, reply};
use crate::support::{Outcome, Volume, digest, fill, noise};

const REGION: &str = "eu-test-1";
const ACCESS_KEY: &str = "AKIATEST";
const SECRET_KEY: &str = "of-the-real-server";
/// It starts within a second. The machine may be busy.
const START: Duration = Duration::from_secs(120);

/// The program, which is built once in a run.
fn program() -> &'static Path {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    PROGRAM.get_or_init(|| {
        let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join("s3");
        let built = Command::new("go")
            .args(["build", "-ldflags=-s -w", "-o"])
            .arg(&program)
            .arg(".")
            .current_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/s3"))
            .output()
            .expect("go is missing: this test uses an S3-compatible server in Go");
        assert!(built.status.success(), "{built:?}");
        program
    })
}

fn command(words: &[&str]) -> Command {
    let mut command = Command::new(program());
    command
        .args(words)
        .env("AWS_ACCESS_KEY_ID", ACCESS_KEY)
        .env("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
        .stdin(Stdio::piped());
    command
}

/// The server behind its socket. It ends with the pipe to its stdin, also if the test is killed.
struct Gateway {
    child: Child,
    socket: PathBuf,
    _folder: tempfile::TempDir,
}

impl Gateway {
    fn new() -> Gateway {
        let folder = tempfile::TempDir::with_prefix("slackwater-").expect("a folder");
        let socket = folder.path().join("socket");
        let (folder_, socket_) = (folder.path().to_str(), socket.to_str());
        let words = [
            "serve",
            folder_.expect("text"),
            socket_.expect("text"),
            REGION,
        ];
        let log = fs::File::create(folder.path().join("log")).expect("a file");
        let mut child = command(&words);
        child.stdout(log.try_clone().expect("a file")).stderr(log);
        let mut gateway = Gateway {
            child: child.spawn().expect("it starts"),
            socket,
            _folder: folder,
        };
        let started_at = Instant::now();
        while UnixStream::connect(&gateway.socket).is_err() {
            let ended = gateway.child.try_wait().expect("a child");
            let log = fs::read_to_string(gateway._folder.path().join("log"));
            assert!(
                ended.is_none() && started_at.elapsed() < START,
                "{ended:?} {log:?}"
            );
            thread::sleep(Duration::from_millis(20));
        }
        gateway
    }

    /// Runs the client of the same program, which is that of Amazon.
    fn client(&self, verb: &str, keys: &[&str], content: &[u8]) {
        let socket = self.socket.to_str().expect("text");
        let mut child = command(&[&[verb, socket, REGION], keys].concat());
        let mut child = child.stderr(Stdio::piped()).spawn().expect("it starts");
        let mut stdin = child.stdin.take().expect("a pipe");
        stdin.write_all(content).expect("it reads");
        drop(stdin);
        let output = child.wait_with_output().expect("it ends");
        assert!(output.status.success(), "{keys:?} {output:?}");
    }

    fn put(&self, key: &str, content: &[u8]) {
        self.client("put", &[key], content);
    }

    fn delete(&self, key: &str) {
        self.client("delete", &[key], b"");
    }

    /// The reply to a request, as it is.
    fn forward(&self, request: &Request) -> Steps {
        let mut stream = UnixStream::connect(&self.socket).expect("it serves");
        let mut head = format!("{}\r\n", request.line);
        let mut headers = request.headers.clone();
        headers.insert("connection".into(), "close".into());
        for (name, value) in headers {
            head += &format!("{name}: {value}\r\n");
        }
        stream
            .write_all(format!("{head}\r\n").as_bytes())
            .expect("it reads");
        let mut reply = Vec::new();
        stream.read_to_end(&mut reply).expect("it answers");
        vec![Step::Send(reply)]
    }
}

impl Drop for Gateway {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        let _ = self.child.wait();
    }
}

/// What a front does about a request before it is forwarded, or to its reply; the second one is the number
/// of requests before it.
type Meddle = Box<dyn Fn(&Gateway, &Request, usize) -> Option<Steps> + Send + Sync>;

struct Store {
    gateway: Arc<Gateway>,
    front: Server,
    tls: Tls,
}

impl Store {
    fn new() -> Store {
        Store::with(Box::new(|_, _, _| None))
    }

    fn with(meddle: Meddle) -> Store {
        let tls = Tls::new();
        let gateway = Arc::new(Gateway::new());
        // The thread of the front never ends, and must not keep the folder of the server.
        let behind = Arc::downgrade(&gateway);
        let count = Mutex::new(0);
        let front = Server::at("127.0.0.1", Some(&tls), move |request| {
            let before = {
                let mut count = count.lock().expect("no panic");
                *count += 1;
                *count - 1
            };
            match behind.upgrade() {
                Some(behind) => {
                    meddle(&behind, request, before).unwrap_or_else(|| behind.forward(request))
                }
                None => reply("503 Service Unavailable", &[], b""),
            }
        });
        Store {
            gateway,
            front,
            tls,
        }
    }

    fn secret(&self, volume: &Volume, key: &str) -> Value {
        let secret = volume.secret(&[self.front.origin()], &self.tls.authority);
        let folder = PathBuf::from(secret["directory"].as_str().expect("a path"));
        fs::write(folder.join("accessKeyId"), ACCESS_KEY).expect("a file");
        fs::write(folder.join("secretAccessKey"), key).expect("a file");
        secret
    }

    fn config(&self, volume: &Volume, source: Value) -> Value {
        let secret = self.secret(volume, &format!("{SECRET_KEY}\n"));
        let mut config = volume.config("", json!({"secret": secret}));
        config["source"] = json!({"s3": {"endpoint": self.front.origin(), "region": REGION,
            "bucket": "bucket"}});
        for (key, value) in source.as_object().expect("an object") {
            config["source"]["s3"][key] = value.clone();
        }
        config
    }

    fn fill(&self, volume: &Volume, source: Value) -> Outcome {
        fill(&self.config(volume, source))
    }

    /// Requests for objects, in order.
    fn gets(&self) -> Vec<Request> {
        let is_object = |request: &Request| request.path().starts_with("/bucket/");
        self.front
            .requests()
            .into_iter()
            .filter(is_object)
            .collect()
    }
}

fn all() -> Value {
    json!({"prefix": "p/", "unverified": true})
}

/// Names that a URL, a signature and a list in XML have to encode.
const ODD: [&str; 10] = [
    "plain",
    "with space and+plus",
    "ünïcödé 日本",
    "percent %41 %2e%2e %",
    "query?a=b&c=d#e;f",
    "quotes ' \" < > & ]]>",
    "(a)!*$,@:~[b]{c}|^`\\d",
    "folder/below it/ü",
    ".hidden..",
    "tab\tand newline\n",
];

#[test]
fn objects_with_odd_names_become_files() {
    let store = Store::new();
    for name in ODD {
        store.gateway.put(&format!("p/{name}"), name.as_bytes());
    }
    store.gateway.put("p/empty", b"");
    store.gateway.put("p/folder without files/", b"");
    store.gateway.put("q", b"has another prefix");
    let volume = Volume::new();
    let outcome = store.fill(&volume, all());
    outcome.good();
    for name in ODD {
        assert_eq!(volume.read(name), name.as_bytes(), "{name}");
    }
    assert!(volume.root().join("empty").is_file());
    assert!(volume.root().join("folder without files").is_dir());
    assert!(!volume.root().join("q").exists());
    for request in store.gets() {
        assert!(request.header("if-match").is_some(), "{request:?}");
    }
}

/// The server has 1000 keys in a page.
#[test]
fn a_list_of_more_than_one_page_is_received_whole() {
    let store = Store::new();
    for part in ["a", "z"] {
        store.gateway.put(&format!("p/{part}"), part.as_bytes());
    }
    let folders: Vec<_> = (0..1200).map(|number| format!("p/f{number:04}/")).collect();
    let folders: Vec<_> = folders.iter().map(String::as_str).collect();
    store.gateway.client("put", &folders, b"");
    let volume = Volume::new();
    store.fill(&volume, all()).good();
    assert_eq!(volume.read("z"), b"z");
    assert_eq!(volume.names().len(), 1202);
    let lists = store.front.requests();
    let lists = lists
        .iter()
        .filter(|request| request.path().starts_with("/bucket?"));
    assert!(lists.count() > 1);
}

#[test]
fn one_object_is_verified_also_if_it_was_uploaded_in_parts() {
    let store = Store::new();
    let content = noise(11 << 20);
    store.gateway.put("disks/a b.img", &content);
    let volume = Volume::new();
    let source = json!({"key": "disks/a b.img", "sha256": digest(&content)});
    store.fill(&volume, source).good();
    assert!(volume.read("disk.img") == content);
    let wrong = json!({"key": "disks/a b.img", "sha256": digest(b"")});
    let outcome = store.fill(&Volume::new(), wrong);
    assert_eq!(outcome.failure("ChecksumMismatch").next, Next::Nothing);
    let missing = json!({"key": "disks/a", "unverified": true});
    store.fill(&Volume::new(), missing).failure("ServerRefused");
}

#[test]
fn wrong_keys_and_another_region_are_refused_by_the_server() {
    let store = Store::new();
    store.gateway.put("p/a", b"a");
    let refused = |config: &Value| {
        let outcome = fill(config);
        let failure = outcome.failure("ServerRefused");
        assert_eq!(failure.next, Next::Nothing);
        let text = format!("{failure:?} {failure}");
        assert!(text.contains("replied 40"), "{text}");
        for key in [ACCESS_KEY, SECRET_KEY, "of-nothing"] {
            assert!(!text.contains(key), "{text}");
        }
    };
    let volume = Volume::new();
    for source in [all(), json!({"key": "p/a", "unverified": true})] {
        let mut config = store.config(&volume, source);
        config["source"]["s3"]["region"] = json!("us-east-1");
        refused(&config);
        config["source"]["s3"]["region"] = json!(REGION);
        store.secret(&volume, "of-nothing");
        refused(&config);
        store.secret(&volume, SECRET_KEY);
        let folder = volume.folder.path().join("secret");
        fs::write(folder.join("accessKeyId"), "AKIAOTHER").expect("a file");
        refused(&config);
        assert!(volume.names().is_empty());
        let volume = Volume::new();
        store.fill(&volume, all()).good();
    }
}

/// The server compares what If-Match names.
#[test]
fn an_object_that_is_replaced_or_deleted_after_the_list_ends_the_attempt() {
    let replace = |gateway: &Gateway| gateway.put("p/b", b"other");
    let delete = |gateway: &Gateway| gateway.delete("p/b");
    for change in [replace as fn(&Gateway), delete] {
        let store = Store::with(Box::new(move |gateway, request, _| {
            if request.path() == "/bucket/p/b" {
                change(gateway);
            }
            None
        }));
        store.gateway.put("p/a", b"first");
        store.gateway.put("p/b", b"value");
        let volume = Volume::new();
        let outcome = store.fill(&volume, all());
        assert_eq!(outcome.failure("SourceChanged").next, Next::NewVolume);
        assert_eq!(volume.read("b"), b"");
    }
}

/// A front that breaks the first reply for the object after some bytes.
fn breaks(then: fn(&Gateway)) -> Store {
    Store::with(Box::new(move |gateway, request, before| {
        if before > 0 {
            return None;
        }
        let reply = broken(gateway.forward(request), 1_000_000);
        then(gateway);
        Some(reply)
    }))
}

#[test]
fn the_rest_of_an_object_is_requested_after_a_break_and_never_that_of_another() {
    let content = noise(3 << 20);
    let store = breaks(|_| {});
    store.gateway.put("disk", &content);
    let volume = Volume::new();
    let source = json!({"key": "disk", "sha256": digest(&content)});
    store.fill(&volume, source).good();
    assert!(volume.read("disk.img") == content);
    let ranges: Vec<_> = store
        .gets()
        .iter()
        .map(|request| request.header("range").map(str::to_string))
        .collect();
    assert_eq!(ranges, [None, Some("bytes=1000000-".into())]);

    let store = breaks(|gateway| gateway.put("disk", &noise(4 << 20)));
    store.gateway.put("disk", &content);
    let source = json!({"key": "disk", "unverified": true});
    let outcome = store.fill(&Volume::new(), source);
    assert_eq!(outcome.failure("SourceChanged").next, Next::NewVolume);
    assert_eq!(store.gets().len(), 2);
}

#[test]
fn another_attempt_continues_at_the_etag_of_the_server() {
    let content = noise(3 << 20);
    let is_down = Arc::new(AtomicBool::new(true));
    let down = is_down.clone();
    let store = Store::with(Box::new(move |gateway, request, before| match before {
        0 => Some(broken(gateway.forward(request), 2_500_000)),
        _ => down
            .load(Ordering::SeqCst)
            .then(|| reply("503 Service Unavailable", &[], b"")),
    }));
    store.gateway.put("disk", &content);
    let volume = Volume::new();
    let source = json!({"key": "disk", "sha256": digest(&content)});
    let mut config = store.config(&volume, source);
    config["limits"]["seconds"] = json!(2);
    let first = fill(&config);
    first.result.as_ref().expect_err("it has no more time");
    assert_eq!(first.last["durable"], 2_500_000);
    let validator = first.last["validator"].as_array().expect("bytes");
    let bytes = validator
        .iter()
        .map(|byte| byte.as_u64().expect("a byte") as u8);
    let validator = String::from_utf8(bytes.collect()).expect("text");
    is_down.store(false, Ordering::SeqCst);
    config["limits"]["seconds"] = json!(60);
    config["resume"] = json!({"bytes": 2_500_000, "validator": validator});
    fill(&config).good();
    assert!(volume.read("disk.img") == content);
    let last = store.gets().pop().expect("a request");
    assert_eq!(last.header("range"), Some("bytes=2500000-"));
    assert_eq!(last.header("if-range"), Some(validator.as_str()));
}
