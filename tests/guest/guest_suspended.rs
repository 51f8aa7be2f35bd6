//! A thin pool that another program holds suspended, as LVM does while it extends a pool, at each
//! moment of a group cut and of the calls around it.

#![allow(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "a test panics where an expectation fails, and writes files"
)]

use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt;
use std::thread;
use std::time::Duration;

use slackwater_testkit::guest::{in_guest, rounds};
use slackwater_testkit::snapshots::members;
use slackwater_testkit::writers::Writers;
use slackwater_testkit::{Client, Scratch, Server, block, mount, run};
use tonic::Code;

use crate::guest_lvm::{DISKS, POOL, Volume, create_pool, created, end_pool, runtime, until};

const MAPPED: &str = "slackwater--vg-thin";

/// Suspends the pool after a time, for another time.
fn suspend(after: Duration, length: Duration) -> thread::JoinHandle<()> {
    thread::spawn(move || {
        thread::sleep(after);
        run("dmsetup", &["suspend", "--noflush", "--nolockfs", MAPPED]);
        thread::sleep(length);
        run("dmsetup", &["resume", MAPPED]);
    })
}

#[test]
fn lvextend_delays_writers_and_cuts_and_lets_none_fail() {
    let test = "guest_suspended::lvextend_delays_writers_and_cuts_and_lets_none_fail";
    in_guest(test, &DISKS, || {
        create_pool("640M");
        let scratch = Scratch::new();
        let server = Server::start(&scratch, &[POOL]);
        runtime().block_on(async {
            let client = server.client();
            let raw = created(&scratch, &client, "raw", block()).await;
            let files = created(&scratch, &client, "files", mount("ext4")).await;
            raw.up(&client).await;
            files.up(&client).await;
            let ids = [raw.id.clone(), files.id.clone()];
            let writers = Writers::start(&[&raw.target, &files.target]);
            for round in 0..rounds(2, 30) {
                let extending = thread::spawn(|| {
                    run("lvextend", &["--size", "+8M", "slackwater-vg/thin"]);
                });
                while !extending.is_finished() {
                    calls(&client, &format!("while-{round}"), &ids, 16 << 20).await;
                }
                extending.join().unwrap();
                assert_eq!(suspended(), "", "{}", server.log());
                writers.assert_flowing("lvextend");
            }
            drop(writers);
            for volume in [raw, files] {
                volume.down(&client).await;
                client.delete(&volume.id).await.unwrap();
            }
        });
        end_pool(server);
    });
}

/// The mapped devices that are suspended.
pub(crate) fn suspended() -> String {
    let columns = [
        "info",
        "--columns",
        "--noheadings",
        "--options",
        "name,suspended",
    ];
    let listed = run("dmsetup", &columns);
    let lines = listed.lines().filter(|line| line.contains("Suspended"));
    lines.collect()
}

fn write(volumes: [&Volume; 2], byte: u8) {
    let [files, raw] = volumes;
    fs::write(files.target.join("data"), [byte; 4096]).unwrap();
    let device = OpenOptions::new().write(true).open(&raw.target).unwrap();
    device.write_all_at(&[byte; 4096], 0).unwrap();
    device.sync_all().unwrap();
}

/// Makes a cut of both volumes, a volume, and a larger volume, and deletes all of them. Repeats what
/// is ABORTED or UNAVAILABLE until it succeeds, as sidecars do.
async fn calls(client: &Client, name: &str, ids: &[String], size: u64) {
    let mut again = 0;
    let mut retry = |status: tonic::Status| {
        let is_temporary = matches!(status.code(), Code::Aborted | Code::Unavailable);
        assert!(is_temporary, "{status}");
        again += 1;
        assert!(again < 1000, "it never ends: {status}");
        thread::sleep(Duration::from_millis(100));
        again
    };
    // After a failed cut, the driver leaves the application alone for a minute, unless the class is
    // another one.
    let mut attempt = 0;
    let group = loop {
        let extents = (1_000_000 + attempt).to_string();
        let class = [("retries", "0"), ("maxExtents", &extents)];
        match client
            .group(&format!("{name}-{attempt}"), ids, &class)
            .await
        {
            Ok(group) => break group,
            Err(status) => attempt = retry(status),
        }
    };
    let id = loop {
        match client.create(name, size, block(), &[]).await {
            Ok(id) => break id,
            Err(status) => {
                retry(status);
            }
        }
    };
    while let Err(status) = client.expand(&id, 2 * size).await {
        retry(status);
    }
    while let Err(status) = client.delete(&id).await {
        retry(status);
    }
    while let Err(status) = client
        .delete_group(&group.group_snapshot_id, &members(&group))
        .await
    {
        retry(status);
    }
}

#[test]
fn a_pool_that_is_held_suspended_at_any_moment_delays_calls_and_leaves_nothing_suspended() {
    let test = "guest_suspended::a_pool_that_is_held_suspended_at_any_moment_delays_calls_and_leaves_nothing_suspended";
    in_guest(test, &DISKS, || {
        create_pool("640M");
        let scratch = Scratch::new();
        let server = Server::start(&scratch, &[POOL]);
        runtime().block_on(async {
            let client = server.client();
            let files = created(&scratch, &client, "files", mount("ext4")).await;
            let raw = created(&scratch, &client, "raw", block()).await;
            files.up(&client).await;
            raw.up(&client).await;
            let ids = [files.id.clone(), raw.id.clone()];
            let length = Duration::from_secs(slackwater_testkit::rounds(1, 20) as u64);
            for step in 0..rounds(6, 120) {
                write([&files, &raw], step as u8);
                let after = Duration::from_millis(step as u64 * 25);
                let suspending = suspend(after, length);
                calls(&client, &format!("cut-{step}"), &ids, 16 << 20).await;
                suspending.join().unwrap();
                assert_eq!(suspended(), "", "after {after:?}\n{}", server.log());
                // Nothing is frozen, and as soon as the pool is served again, a cut succeeds at once.
                write([&files, &raw], step as u8);
                until("the pool is served", async || client.list().await.is_ok()).await;
                let extents = (2_000_000 + step).to_string();
                let class = [("maxExtents", extents.as_str())];
                let name = format!("after-{step}");
                let group = client.group(&name, &ids, &class).await.unwrap();
                client.delete_all_of(&group).await;
            }
            for volume in [files, raw] {
                volume.down(&client).await;
                client.delete(&volume.id).await.unwrap();
            }
        });
        end_pool(server);
    });
}
