//! One attempt in this process, and what it left behind.

use std::cell::RefCell;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use serde_json::{Value, json};
use slackwater_populate::config::Config;
use slackwater_populate::failure::{Failure, Result};
use slackwater_populate::net::address::{Policy, Reach};
use slackwater_populate::report::Report;
use slackwater_populate::run::Attempt;
use slackwater_populate::source::received::{hex, sha256};

#[derive(Clone, Default)]
struct Output(Rc<RefCell<Vec<u8>>>);

impl Write for Output {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.borrow_mut().write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// The servers of tests are on this machine: 127.0.0.1 is like a private network for them, and
/// 127.0.0.2 like the internet. No configuration can say this.
pub fn policy() -> Policy {
    let reach = |text: &str, reach| (text.parse().expect("an address"), reach);
    Policy {
        private_networks: true,
        known: vec![
            reach("127.0.0.1", Reach::Private),
            reach("127.0.0.2", Reach::Public),
        ],
    }
}

/// A volume with a file system: a folder.
pub struct Volume {
    pub folder: tempfile::TempDir,
}

impl Volume {
    pub fn new() -> Volume {
        let folder = tempfile::TempDir::with_prefix("slackwater-").expect("a folder");
        fs::create_dir(folder.path().join("root")).expect("a folder");
        Volume { folder }
    }

    pub fn root(&self) -> PathBuf {
        self.folder.path().join("root")
    }

    pub fn read(&self, name: &str) -> Vec<u8> {
        fs::read(self.root().join(name)).unwrap_or_default()
    }

    pub fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(self.root()).expect("a folder");
        let name = |entry: std::io::Result<fs::DirEntry>| entry.expect("an entry").file_name();
        let mut names: Vec<_> = entries
            .map(|entry| name(entry).into_string().expect("text"))
            .collect();
        names.sort();
        names
    }

    /// A configuration that fills this volume, with other fields.
    pub fn config(&self, url: &str, more: Value) -> Value {
        let mut config = json!({
            "source": {"http": {"url": url, "unverified": true}},
            "target": {"filesystem": self.root()},
            "limits": {"seconds": 60, "silenceSeconds": 20},
        });
        merge(&mut config, more);
        config
    }

    /// A Secret with one header, for these origins.
    pub fn secret(&self, origins: &[String], authority: &str) -> Value {
        let folder = self.folder.path().join("secret");
        fs::create_dir_all(&folder).expect("a folder");
        fs::write(folder.join("header.Authorization"), "Bearer hunter2").expect("a file");
        fs::write(folder.join("ca.crt"), authority).expect("a file");
        json!({"directory": folder, "origins": origins})
    }
}

fn merge(into: &mut Value, from: Value) {
    match (into, from) {
        (Value::Object(into), Value::Object(from)) => {
            for (key, value) in from {
                merge(into.entry(key).or_insert(Value::Null), value);
            }
        }
        (into, from) => *into = from,
    }
}

/// What an attempt returned, and its last line.
pub struct Outcome {
    pub result: Result<()>,
    pub last: Value,
}

impl Outcome {
    pub fn failure(&self, reason: &str) -> &Failure {
        let failure = self.result.as_ref().expect_err("it fails");
        assert_eq!(failure.reason, reason, "{failure}");
        failure
    }

    pub fn good(&self) {
        if let Err(failure) = &self.result {
            panic!("{}: {failure}", failure.reason);
        }
    }
}

pub fn fill(config: &Value) -> Outcome {
    fill_with(config, policy())
}

pub fn fill_with(config: &Value, policy: Policy) -> Outcome {
    let output = Output::default();
    let report = Report::new(output.clone());
    let result = Config::parse(&config.to_string())
        .and_then(|config| Attempt::prepare(&config, policy, &report)?.run());
    report.print();
    let text = String::from_utf8(output.0.borrow().clone()).expect("text");
    let last = text.lines().last().expect("a line");
    Outcome {
        result,
        last: serde_json::from_str(last).expect("JSON"),
    }
}

pub fn digest(bytes: &[u8]) -> String {
    let mut hash = sha256();
    hash.update(bytes);
    hex(hash.finish().as_ref())
}

/// Bytes without a pattern that are the same in each run.
pub fn noise(length: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut bytes = Vec::with_capacity(length + 8);
    while bytes.len() < length {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes.truncate(length);
    bytes
}

/// What a program compresses these bytes to.
pub fn compressed(program: &str, bytes: &[u8]) -> Vec<u8> {
    use std::process::{Command, Stdio};
    let mut child = Command::new(program)
        .arg("-c")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap_or_else(|error| panic!("{program}: {error}"));
    let mut stdin = child.stdin.take().expect("a pipe");
    let bytes = bytes.to_vec();
    let writer = std::thread::spawn(move || stdin.write_all(&bytes));
    let output = child.wait_with_output().expect("it ends");
    writer.join().expect("no panic").expect("it reads all");
    assert!(output.status.success());
    output.stdout
}

/// An archive that the program tar has made of a folder.
pub fn tar(folder: &Path, flags: &[&str]) -> Vec<u8> {
    let output = std::process::Command::new("tar")
        .args(["--create", "--directory"])
        .arg(folder)
        .args(flags)
        .arg(".")
        .output()
        .expect("tar starts");
    assert!(output.status.success(), "{output:?}");
    output.stdout
}

/// An image in the format qcow2 with 64 KiB clusters that has this content, at most 8192 of them.
pub fn qcow2(content: &[u8]) -> Vec<u8> {
    const CLUSTER: usize = 1 << 16;
    let count = content.len().div_ceil(CLUSTER);
    let mut bytes = vec![0; 3 * CLUSTER];
    let mut put = |at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
    put(0, b"QFI\xfb\0\0\0\x03");
    put(20, &16_u32.to_be_bytes());
    put(24, &((count * CLUSTER) as u64).to_be_bytes());
    put(36, &1_u32.to_be_bytes());
    put(40, &(CLUSTER as u64).to_be_bytes());
    put(100, &104_u32.to_be_bytes());
    put(CLUSTER, &(2 * CLUSTER as u64).to_be_bytes());
    for index in 0..count {
        // The last block of the disk is the first in the file.
        let at = (3 + count - 1 - index) * CLUSTER;
        put(2 * CLUSTER + 8 * index, &(at as u64).to_be_bytes());
    }
    for chunk in content.chunks(CLUSTER).rev() {
        let at = bytes.len();
        bytes.extend_from_slice(chunk);
        bytes.resize(at + CLUSTER, 0);
    }
    bytes
}
