//! What needs root: block devices, which are loop devices on files of their own, and owners.

#![allow(
    clippy::disallowed_methods,
    reason = "a test starts programs and writes files"
)]

mod owners;
#[path = "../local/server.rs"]
#[allow(dead_code, reason = "the other program uses all of it")]
mod server;
mod sizes;
#[path = "../local/support.rs"]
#[allow(dead_code, reason = "the other program uses all of it")]
mod support;
mod users;

use std::fs;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::PathBuf;
use std::process::Command;

use serde_json::{Value, json};
use server::{Server, broken, object, reply, serves};
use slackwater_populate::failure::Next;
use support::{Volume, digest, fill, noise, qcow2, tar};

/// A loop device, which is detached at the end.
struct Device {
    path: PathBuf,
    file: PathBuf,
    _folder: tempfile::TempDir,
}

impl Device {
    fn new(content: &[u8]) -> Device {
        let folder = tempfile::TempDir::with_prefix("slackwater-").expect("a folder");
        let file = folder.path().join("image");
        fs::write(&file, content).expect("a file");
        Device::on(folder, file)
    }

    fn on(folder: tempfile::TempDir, file: PathBuf) -> Device {
        let output = Command::new("losetup")
            .args(["--find", "--show"])
            .arg(&file)
            .output()
            .expect("losetup starts");
        assert!(output.status.success(), "{output:?}");
        let path = String::from_utf8(output.stdout).expect("text");
        Device {
            path: path.trim_end().into(),
            file,
            _folder: folder,
        }
    }

    fn fill(&self, url: &str, more: Value) -> support::Outcome {
        let mut config = Volume::new().config(url, more);
        config["target"] = json!({"block": self.path});
        fill(&config)
    }

    fn content(&self) -> Vec<u8> {
        fs::read(&self.path).expect("it is read")
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        let detached = Command::new("losetup")
            .arg("--detach")
            .arg(&self.path)
            .status();
        assert!(detached.expect("losetup starts").success());
    }
}

#[test]
fn the_rest_of_a_larger_device_reads_as_zeros() {
    for length in [0, 1, 4096, 1_000_000, 2 << 20] {
        let device = Device::new(&noise(2 << 20));
        let content = noise(length);
        let server = serves(content.clone());
        let source = json!({"source": {"http": {"unverified": false, "sha256": digest(&content)}}});
        device.fill(&server.url("/x"), source).good();
        let mut expected = content;
        expected.resize(2 << 20, 0);
        assert!(device.content() == expected, "{length}");
    }
}

#[test]
fn a_device_that_reads_as_zeros_stays_thin() {
    let folder = tempfile::TempDir::with_prefix("slackwater-").expect("a folder");
    let image = folder.path().join("sparse");
    let file = fs::File::create(&image).expect("a file");
    file.set_len(64 << 20).expect("a length");
    let device = Device::on(folder, image);
    let mut content = vec![0; 32 << 20];
    content[20 << 20] = 1;
    device
        .fill(&serves(content.clone()).url("/x"), json!({}))
        .good();
    let blocks = fs::metadata(&device.file).expect("metadata").blocks();
    assert!(blocks * 512 <= 1 << 20, "{blocks}");
    assert!(device.content().starts_with(&content));
}

#[test]
fn what_is_larger_than_the_device_and_what_is_no_disk_is_refused() {
    let device = Device::new(&vec![0; 1 << 20]);
    let server = serves(noise((1 << 20) + 1));
    let outcome = device.fill(&server.url("/x"), json!({}));
    assert_eq!(outcome.failure("TooLarge").next, Next::Nothing);
    let folder = tempfile::TempDir::with_prefix("slackwater-").expect("a folder");
    let outcome = device.fill(&serves(tar(folder.path(), &[])).url("/x"), json!({}));
    assert_eq!(outcome.failure("FormatRefused").next, Next::Nothing);
}

#[test]
fn a_device_that_something_uses_is_not_written() {
    let device = Device::new(&vec![7; 1 << 20]);
    let exclusive = fs::File::options()
        .read(true)
        .custom_flags(nix::fcntl::OFlag::O_EXCL.bits())
        .open(&device.path)
        .expect("it opens");
    let outcome = device.fill(&serves(noise(1000)).url("/x"), json!({}));
    assert_eq!(outcome.failure("TargetFailed").next, Next::Again);
    drop(exclusive);
    assert_eq!(device.content(), vec![7; 1 << 20]);
}

#[test]
fn an_attempt_on_a_device_continues_an_earlier_one() {
    let content = noise(3 << 20);
    let half = content.clone();
    let server = Server::new(move |request| match request.from() {
        None => broken(object(request, "\"1\"", &half), 2_500_000),
        Some(_) => reply("503 Busy", &[], b""),
    });
    let device = Device::new(&noise(4 << 20));
    let first = device.fill(&server.url("/x"), json!({"limits": {"seconds": 2}}));
    assert_eq!(
        first.result.as_ref().expect_err("it fails").next,
        Next::Again
    );
    assert_eq!(first.last["durable"], 2_500_000);
    let server = serves(content.clone());
    let more = json!({
        "resume": {"bytes": 2_500_000, "validator": "\"1\""},
        "source": {"http": {"unverified": false, "sha256": digest(&content)}},
    });
    device.fill(&server.url("/x"), more).good();
    assert_eq!(server.requests()[0].header("range"), Some("bytes=2500000-"));
    let mut expected = content;
    expected.resize(4 << 20, 0);
    assert!(device.content() == expected);
}

#[test]
fn a_qcow2_image_for_a_device_needs_scratch() {
    let content = noise(300_000);
    let server = serves(qcow2(&content));
    let device = Device::new(&noise(1 << 20));
    let outcome = device.fill(&server.url("/x"), json!({}));
    assert_eq!(outcome.failure("ScratchNeeded").next, Next::Nothing);
    let scratch = tempfile::TempDir::with_prefix("slackwater-").expect("a folder");
    device
        .fill(&server.url("/x"), json!({"scratch": scratch.path()}))
        .good();
    let mut expected = content;
    expected.resize(1 << 20, 0);
    assert!(device.content() == expected);
    let left = fs::read_dir(scratch.path()).expect("a folder").count();
    assert_eq!(left, 0);
}
