//! CreateSnapshot of a mounted volume that is clean, and a restore until it is staged.

use std::path::PathBuf;
use std::time::Duration;

use slackwater::model::FsType;

use super::fixture::{Fixture, Volume};
use super::hand::write_back;
use super::measure::{Pairs, Spread, given, timed};
use slackwater_testkit::snapshots::from_snapshot;
use slackwater_testkit::{mount, run};

const GIB: u64 = 1 << 30;
const KINDS: [FsType; 3] = [FsType::Ext4, FsType::Xfs, FsType::Btrfs];
/// A file system that was frozen just before freezes in a hundredth of the time. After this rest, a
/// freeze takes as long as for users who take a snapshot every hour.
const REST: Duration = Duration::from_millis(500);
/// Driver, effects, the bare minimum, programs.
const WAYS: usize = 4;

type Times = [Vec<f64>; WAYS];

pub fn measure() {
    let rounds = given("ROUNDS", 20);
    println!("\n{rounds} rounds; medians in ms, then of pairs the median and the quartiles\n");
    println!(
        "| | volume | driver | effects | bare | programs | driver / effects | undisturbed | driver - effects, ms | driver / programs |"
    );
    println!("|---|---|---|---|---|---|---|---|---|---|");
    // xfs, because its clones are the cheapest.
    let fixture = Fixture::new("xfs", 64 * GIB);
    for fs in KINDS {
        let volume = fixture.volume(&format!("source-{fs}"), fs.name(), GIB);
        let (mut snapshots, mut restores) = (Times::default(), Times::default());
        for round in 0..=rounds {
            let (cut, restored) = one(&fixture, &volume, fs, round);
            // The first round is a warm-up.
            if round > 0 {
                for way in 0..WAYS {
                    snapshots[way].push(cut[way]);
                    restores[way].push(restored[way]);
                }
            }
        }
        tell("snapshot", fs, &snapshots);
        tell("restore, stage", fs, &restores);
        fixture.end(&volume);
    }
}

/// Runs all ways once, each round in another order. Returns milliseconds of snapshots, and of
/// restores from them.
fn one(fixture: &Fixture, volume: &Volume, fs: FsType, round: usize) -> ([f64; WAYS], [f64; WAYS]) {
    let name = |who: &str| format!("{who}-{fs}-{round}");
    let (mut cut, mut restored) = ([0.0; WAYS], [f64::NAN; WAYS]);
    let mut id = String::new();
    let client = &fixture.node.client;
    let (image, mount_point) = (&volume.image, &volume.staging);
    for turn in 0..WAYS {
        let way = (round + turn) % WAYS;
        write_back(mount_point);
        std::thread::sleep(REST);
        cut[way] = timed(|| match way {
            0 => {
                let name = name("driver");
                let created = client.snapshot(&name, &volume.id, &[]);
                let created = fixture.runtime.block_on(created).expect("a snapshot");
                id = created.snapshot_id;
            }
            1 => fixture.hand.snapshot(&name("effects"), image, mount_point),
            2 => fixture
                .hand
                .bare_snapshot(&name("bare"), image, mount_point),
            _ => fixture
                .programs
                .snapshot(&name("programs"), image, mount_point),
        })
        .1;
    }
    let staging = |who: &str| -> PathBuf { fixture.node.staging(&format!("{who}-{fs}-restored")) };
    let mut volume_id = String::new();
    for turn in 0..WAYS {
        let way = (round + turn) % WAYS;
        restored[way] = match way {
            0 => {
                let (staging, capability) = (staging("driver"), mount(fs.name()));
                let source = from_snapshot(&id);
                timed(|| {
                    fixture.runtime.block_on(async {
                        let name = name("restored");
                        let created =
                            client.create_from(&name, GIB, capability.clone(), source, &[]);
                        volume_id = created.await.expect("create").volume_id;
                        let staged = client.stage(&volume_id, &staging, capability);
                        staged.await.expect("stage");
                    });
                })
                .1
            }
            1 => {
                let staging = staging("effects");
                let (to, from) = (name("restored"), name("effects"));
                timed(|| fixture.hand.restore(&to, &from, fs, &staging)).1
            }
            2 => f64::NAN,
            _ => {
                let staging = staging("programs");
                let (to, from) = (name("restored"), name("programs"));
                timed(|| fixture.programs.restore(&to, &from, fs, &staging)).1
            }
        };
    }
    fixture.runtime.block_on(async {
        fixture
            .node
            .unstage_and_delete(&volume_id, &staging("driver"))
            .await;
        client.delete_snapshot(&id).await.expect("delete");
    });
    fixture.hand.unstage(&staging("effects"));
    fixture.hand.delete(&name("restored"));
    fixture.hand.forget_snapshots();
    fixture
        .programs
        .unstage(&name("restored"), &staging("programs"));
    for who in ["restored", "programs"] {
        fixture.programs.delete(&name(who));
    }
    run(
        "sync",
        &[
            "--file-system",
            &fixture.node.disk.mount_point.to_string_lossy(),
        ],
    );
    (cut, restored)
}

fn tell(call: &str, fs: FsType, times: &Times) {
    let [driver, effects, bare, programs] = times;
    let middle = |values: &Vec<f64>| match values.iter().any(|value| value.is_nan()) {
        true => String::new(),
        false => format!("{:.2}", Spread::of(values.iter().copied()).middle),
    };
    let pairs = |hand: &Vec<f64>| Pairs {
        ours: driver.clone(),
        hand: hand.clone(),
    };
    println!(
        "| {call} | {fs} | {} | {} | {} | {} | {} | {:.2} | {} | {} |",
        middle(driver),
        middle(effects),
        middle(bare),
        middle(programs),
        pairs(effects).ratio(),
        pairs(effects).undisturbed(),
        pairs(effects).more(),
        pairs(programs).ratio(),
    );
}
