//! How long slackwater-populate takes, beside curl with dd and tar, from the same server on this machine.
//!
//! `cargo bench --package slackwater-populate`, or `make bench`. SLACKWATER_BENCH_MIB sets the size.

#![allow(clippy::disallowed_methods, reason = "a benchmark starts programs")]

#[path = "../tests/local/server.rs"]
#[allow(dead_code, reason = "the tests use all of it")]
mod server;
#[path = "../tests/local/support.rs"]
#[allow(dead_code, reason = "the tests use all of it")]
mod support;

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::json;
use server::{Server, object};
use support::{Volume, digest, fill, noise, tar};

/// Each way is measured this often, by turns; the fastest counts.
const ROUNDS: usize = 3;

fn main() {
    let mib = std::env::var("SLACKWATER_BENCH_MIB").ok();
    let mib: usize = mib.map_or(1024, |text| text.parse().expect("a number"));
    println!(
        "{mib} MiB from a server on this machine, the fastest of {ROUNDS}, in s; slackwater-populate verifies SHA-256\n"
    );
    println!(
        "| | slackwater-populate | by hand, with sha256sum | ratio | by hand, without | ratio |"
    );
    println!("|---|---|---|---|---|---|");
    let content = noise(mib << 20);
    let folder = tempfile::TempDir::with_prefix("slackwater-").expect("a folder");
    for part in 0..64 {
        let length = content.len() / 64;
        let path = folder.path().join(format!("d{}/f{part}", part % 8));
        fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
        // Half of it can be compressed.
        let mut bytes = content[part * length..(part + 1) * length].to_vec();
        bytes[length / 2..].fill(b'x');
        fs::write(path, bytes).expect("a file");
    }
    compare(
        "raw",
        content,
        "dd of=disk.img bs=1M iflag=fullblock conv=fsync status=none",
    );
    compare(
        "tar",
        tar(folder.path(), &[]),
        "tar --extract && sync --file-system .",
    );
    compare(
        "tar.gz",
        tar(folder.path(), &["--gzip"]),
        "tar --extract --gzip && sync --file-system .",
    );
    compare(
        "tar.zst",
        tar(folder.path(), &["--zstd"]),
        "tar --extract --zstd && sync --file-system .",
    );
}

fn compare(what: &str, bytes: Vec<u8>, command: &str) {
    let sum = digest(&bytes);
    let server = Server::new(move |request| object(request, "\"1\"", &bytes));
    let [mut ours, mut verified, mut bare] = [Duration::MAX; 3];
    for _ in 0..ROUNDS {
        let get = format!("set -o pipefail; curl --silent --fail {}", server.url("/x"));
        let pipe = format!("{get} | tee >(sha256sum >sum) | ({command}); wait");
        verified = verified.min(by_hand(&pipe));
        bare = bare.min(by_hand(&format!("{get} | ({command})")));
        let volume = Volume::new();
        let source = json!({"source": {"http": {"unverified": false, "sha256": sum}}, "limits": {"seconds": 3600}});
        let begun = Instant::now();
        fill(&volume.config(&server.url("/x"), source)).good();
        ours = ours.min(begun.elapsed());
    }
    let [ours, verified, bare] = [ours, verified, bare].map(|time| time.as_secs_f64());
    println!(
        "| {what} | {ours:.2} | {verified:.2} | {:.2} | {bare:.2} | {:.2} |",
        ours / verified,
        ours / bare
    );
}

/// Runs a pipe in an empty volume.
fn by_hand(pipe: &str) -> Duration {
    let volume = Volume::new();
    let begun = Instant::now();
    shell(&volume.root(), pipe);
    begun.elapsed()
}

fn shell(folder: &Path, text: &str) {
    let status = Command::new("bash")
        .args(["-c", text])
        .current_dir(folder)
        .status();
    assert!(status.expect("bash starts").success(), "{text}");
}
