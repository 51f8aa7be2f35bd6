//! CreateVolume of the twentieth volume from one snapshot, beside the first one from a new snapshot of the same
//! volume, in turns: what a cached snapshot of a data source costs the claims that come later.
//!
//! `ROUNDS=5 MIB=1024 cargo bench --bench clones`: five rounds, with 1024 MiB of content in the volume.

#![allow(
    clippy::disallowed_methods,
    reason = "a benchmark is not the driver: it may start programs and write files"
)]

#[path = "measure/mod.rs"]
mod measure;

use std::fs::File;
use std::io::Write;
use std::path::Path;

use measure::{Pairs, Spread, given, timed};
use slackwater_testkit::snapshots::from_snapshot;
use slackwater_testkit::{Client, Disk, Scratch, Server, mount};
use tokio::runtime::Runtime;

const GIB: u64 = 1 << 30;
const SIZE: u64 = 10 * GIB;
const CLONES: usize = 20;

struct Driver {
    runtime: Runtime,
    client: Client,
}

impl Driver {
    fn restore(&self, name: &str, snapshot: &str) -> String {
        let (client, runtime) = (&self.client, &self.runtime);
        let source = from_snapshot(snapshot);
        let created = client.create_from(name, SIZE, mount("xfs"), source, &[]);
        runtime.block_on(created).expect("it is created").volume_id
    }

    fn snapshot(&self, name: &str, volume: &str) -> String {
        let snapshot = self.client.snapshot(name, volume, &[]);
        let snapshot = self.runtime.block_on(snapshot);
        snapshot.expect("it is created").snapshot_id
    }

    fn delete(&self, volumes: &[String], snapshots: &[String]) {
        self.runtime.block_on(async {
            for volume in volumes {
                self.client.delete(volume).await.expect("it is deleted");
            }
            for snapshot in snapshots {
                let deleted = self.client.delete_snapshot(snapshot).await;
                deleted.expect("it is deleted");
            }
        });
    }
}

/// A volume with content in 64 files, which is not in use any more.
fn filled(driver: &Driver, scratch: &Scratch, mib: usize) -> String {
    let (client, runtime) = (&driver.client, &driver.runtime);
    let created = client.create("source", SIZE, mount("xfs"), &[]);
    let id = runtime.block_on(created).expect("it is created");
    let staging = scratch.dir("kubelet/staging");
    let target = scratch.join("kubelet/target");
    runtime.block_on(async {
        let staged = client.stage(&id, &staging, mount("xfs")).await;
        staged.expect("it is staged");
        let published = client.publish(&id, &staging, &target, mount("xfs"), false);
        published.await.expect("it is published");
    });
    fill(&target, mib);
    runtime.block_on(async {
        let unpublished = client.unpublish(&id, &target).await;
        unpublished.expect("it is unpublished");
        client.unstage(&id, &staging).await.expect("it is unstaged");
    });
    id
}

fn fill(folder: &Path, mib: usize) {
    let content = vec![0x5a; (mib << 20) / 64];
    for number in 0..64 {
        let mut file = File::create(folder.join(number.to_string())).expect("a file");
        file.write_all(&content).expect("it is written");
        file.sync_all().expect("it is durable");
    }
}

fn main() {
    let (rounds, mib) = (given("ROUNDS", 10), given("MIB", 1024));
    let scratch = Scratch::new();
    let disk = Disk::new(&scratch, "disk", "xfs", 256 * GIB);
    let pool = disk.mount_point.join("pool");
    std::fs::create_dir(&pool).expect("a folder");
    let server = Server::start(
        &scratch,
        &[&format!("default=file:{},init,mount=any", pool.display())],
    );
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .expect("a runtime");
    // A client must be created within a runtime.
    let client = runtime.block_on(async { server.client() });
    let driver = Driver { runtime, client };
    let source = filled(&driver, &scratch, mib);
    let mut pairs = Pairs::default();
    for round in 0..=rounds {
        let cached = driver.snapshot(&format!("cached-{round}"), &source);
        let mut clones: Vec<_> = (1..CLONES)
            .map(|number| driver.restore(&format!("clone-{round}-{number}"), &cached))
            .collect();
        let fresh = driver.snapshot(&format!("fresh-{round}"), &source);
        let mut times = [0.0; 2];
        for turn in 0..2 {
            // The order is another one in each round.
            let is_twentieth = (round + turn) % 2 == 0;
            let (name, snapshot) = match is_twentieth {
                true => (format!("twentieth-{round}"), &cached),
                false => (format!("first-{round}"), &fresh),
            };
            let (clone, took) = timed(|| driver.restore(&name, snapshot));
            clones.push(clone);
            times[usize::from(!is_twentieth)] = took;
        }
        // The first round is a warm-up.
        if round > 0 {
            pairs.add(times[0], times[1]);
        }
        driver.delete(&clones, &[cached, fresh]);
    }
    driver.delete(&[source], &[]);
    let spread = |values: &[f64]| Spread::of(values.iter().copied());
    println!("\n{rounds} rounds with {mib} MiB of content; medians in ms (quartiles)\n");
    println!("| twentieth from one snapshot | first of another | ratio |");
    println!("|---|---|---|");
    let (twentieth, first) = (spread(&pairs.ours), spread(&pairs.hand));
    println!("| {twentieth} | {first} | {} |", pairs.ratio());
}
