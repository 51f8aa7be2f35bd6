//! Write order in group snapshots of volumes on a thin pool: raw block volumes, mounted ones, and both
//! together.

#![allow(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "a test panics where an expectation fails"
)]

use std::path::{Path, PathBuf};

use slackwater_testkit::guest::{in_guest, rounds};
use slackwater_testkit::snapshots::members;
use slackwater_testkit::writers::{WRITERS, Writers, counts_in, is_consistent};
use slackwater_testkit::{Client, Scratch, Server, block, mount};

use crate::guest_lvm::{DISKS, POOL, Volume, create_pool, created, end_pool, restore, runtime};

/// The volumes of the tests: every other one is a raw block volume.
async fn volumes(scratch: &Scratch, client: &Client, count: usize) -> Vec<Volume> {
    let mut volumes = Vec::new();
    for n in 0..count {
        let how = if n % 2 == 0 { block() } else { mount("ext4") };
        let volume = created(scratch, client, &format!("v{n}"), how).await;
        volume.up(client).await;
        volumes.push(volume);
    }
    volumes
}

/// The counters in the snapshots of these volumes, by writer and volume.
async fn counters(
    scratch: &Scratch,
    client: &Client,
    volumes: &[&Volume],
    snapshots: &[String],
) -> Vec<Vec<u64>> {
    let mut found = Vec::new();
    for (volume, snapshot) in volumes.iter().zip(snapshots) {
        let restored = restore(scratch, client, snapshot, volume.how.clone()).await;
        restored.up(client).await;
        found.push(counts_in(&restored.target));
        restored.down(client).await;
        client.delete(&restored.id).await.unwrap();
    }
    let row = |writer: usize| found.iter().map(|counters| counters[writer]).collect();
    (0..WRITERS).map(row).collect()
}

/// Cuts these volumes under load, as a group or one after the other. Returns the number of cuts that
/// were out of order. In sequence, it ends with the first of them.
pub(crate) async fn violations(
    scratch: &Scratch,
    client: &Client,
    volumes: &[&Volume],
    (cuts, in_sequence): (usize, bool),
) -> usize {
    let ids: Vec<String> = volumes.iter().map(|volume| volume.id.clone()).collect();
    let paths: Vec<PathBuf> = volumes.iter().map(|volume| volume.target.clone()).collect();
    let writers = Writers::start(&paths.iter().map(PathBuf::as_path).collect::<Vec<&Path>>());
    let mut wrong = 0;
    for cut in 0..cuts {
        let name = format!("{}-{cut}-{in_sequence}", ids.len());
        let before = writers.counts();
        let group = match in_sequence {
            true => client.in_sequence(&name, &ids).await,
            false => client.group(&name, &ids, &[]).await.unwrap(),
        };
        let found = counters(scratch, client, volumes, &members(&group)).await;
        wrong += usize::from(!found.iter().all(|row| is_consistent(row)));
        let after = writers.counts();
        assert!(after > before, "the writers continue after each cut");
        client.delete_all_of(&group).await;
        if in_sequence && wrong > 0 {
            break;
        }
    }
    wrong
}

#[test]
fn no_group_of_thin_volumes_is_out_of_order_but_snapshots_in_sequence_are() {
    let test =
        "guest_order::no_group_of_thin_volumes_is_out_of_order_but_snapshots_in_sequence_are";
    in_guest(test, &DISKS, || {
        create_pool("640M");
        let scratch = Scratch::new();
        let server = Server::start(&scratch, &[POOL]);
        runtime().block_on(async {
            let client = server.client();
            let all = volumes(&scratch, &client, 16).await;
            let all: Vec<&Volume> = all.iter().collect();
            let raw = [all[0], all[2]];
            let mounted = [all[1], all[3]];
            for (members, cuts) in [
                (&raw[..], rounds(2, 100)),
                (&mounted[..], rounds(1, 100)),
                (&all[..8], rounds(1, 30)),
                (&all[..], rounds(1, 30)),
            ] {
                let wrong = violations(&scratch, &client, members, (cuts, false)).await;
                assert_eq!(wrong, 0, "{} members\n{}", members.len(), server.log());
            }
            // The oracle finds what is wrong with cuts of one volume after the other.
            let wrong = violations(&scratch, &client, &all[..4], (2, true)).await;
            assert_ne!(wrong, 0);
            for volume in all {
                volume.down(&client).await;
                client.delete(&volume.id).await.unwrap();
            }
        });
        end_pool(server);
    });
}
