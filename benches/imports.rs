//! The import of an image file as OpenEBS rawfile has it: cloned and copied by the driver, and cloned
//! by `cp --reflink=always`, in turns.
//!
//! `ROUNDS=3 MEGABYTES=64 cargo bench --bench imports` is a shorter run.

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

use std::fs;
use std::path::Path;

use measure::{Pairs, fill, given, timed};
use slackwater_testkit::disk::folder;
use slackwater_testkit::node::{Node, definition};
use slackwater_testkit::{Disk, Scratch, Server, run};
use tokio::runtime::Runtime;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

fn main() {
    let runtime = Runtime::new().unwrap();
    let rounds = given("ROUNDS", 9);
    for fs in ["xfs", "btrfs"] {
        // A client must be created within a runtime.
        let node = runtime.block_on(async { node(fs) });
        let top = node.disk.mount_point.join("rawfile");
        let (cloned, copied) = (
            top.join("disk.img"),
            node.disk.mount_point.join("copied.img"),
        );
        let target = top.join("by-hand.img");
        image(&cloned);
        // The same file, outside of --import-path.
        fs::hard_link(&cloned, &copied).unwrap();
        let (mut to_copy, mut to_hand) = (Pairs::default(), Pairs::default());
        for round in 0..=rounds {
            let clone = import(&runtime, &node, &cloned, "cloned");
            let copy = import(&runtime, &node, &copied, "copied");
            let words = [cloned.to_str().unwrap(), target.to_str().unwrap()];
            let ((), hand) = timed(|| {
                run("cp", &["--reflink=always", words[0], words[1]]);
                run("sync", &[words[1]]);
            });
            fs::remove_file(&target).unwrap();
            // The first round is a warm-up.
            if round > 0 {
                to_copy.add(clone, copy);
                to_hand.add(clone, hand);
            }
        }
        println!(
            "| {fs}: cloned / copied by the driver | {} |",
            to_copy.ratio()
        );
        println!(
            "| {fs}: cloned / `cp --reflink=always` and `sync` of the copy | {} |",
            to_hand.ratio()
        );
        println!("| {fs}: more than `cp`, ms | {} |", to_hand.more());
    }
}

/// A node without a limit of the rate of copies.
fn node(fs: &str) -> Node {
    let scratch = Scratch::new();
    let disk = Disk::new(&scratch, "pool", fs, 8 * GIB);
    let top = disk.mount_point.join("rawfile");
    let more = ["--import-path", top.to_str().unwrap(), "--copy-rate", "1Ti"];
    let server = Server::spawn(&scratch, &[&definition(&disk.mount_point)], &more, &[]);
    server.wait_ready();
    folder(&top);
    if fs == "btrfs" {
        run("chattr", &["+C", top.to_str().unwrap()]);
    }
    Node::of(server, disk, scratch)
}

/// An image of 1 GiB with data that does not compress.
fn image(path: &Path) {
    fill(path, given("MEGABYTES", 512) as u64 * MIB);
    let file = fs::OpenOptions::new().write(true).open(path).unwrap();
    file.set_len(GIB).unwrap();
    file.sync_all().unwrap();
}

/// Imports a file, and deletes the volume. Returns the time of the command in milliseconds.
fn import(runtime: &Runtime, node: &Node, from: &Path, how: &str) -> f64 {
    let fixed = ["volumes", "import", "--yes", "--raw", "--json"];
    let words = ["--to-pool", "default", "--name", "data", "--from"];
    let words = [&fixed[..], &words, &[from.to_str().unwrap()]].concat();
    let ((done, printed, said), time) = timed(|| node.server.archive(&words, &[]));
    assert!(done, "{said}");
    let printed: serde_json::Value = serde_json::from_slice(&printed).unwrap();
    assert_eq!(printed["method"], how, "{said}");
    let id = printed["id"].as_str().unwrap();
    runtime.block_on(node.client.delete_unused(id));
    time
}
