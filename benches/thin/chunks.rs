//! Random writes after a snapshot, against the size of a pool's chunks.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};

use nix::libc;
use slackwater::host::{Host, ThinMessage};
use slackwater_testkit::Scratch;

use super::cuts::Page;
use super::fixture::{Group, MAPPED, ThinHand};
use super::measure::{Spread, given, timed};

/// In KiB.
const CHUNKS: [u64; 5] = [64, 128, 256, 512, 1024];
const BYTES: u64 = 256 << 20;
const WRITES: u64 = 1000;

/// Writes pages in a fixed random order; returns the writes per second.
fn write(file: &File, seed: u64) -> f64 {
    let page = Page([9; 4096]);
    let mut state = seed;
    let ((), took) = timed(|| {
        for _ in 0..WRITES {
            // The constants of MMIX's generator (Knuth).
            state = state
                .wrapping_mul(6364136223846793005)
                .wrapping_add(1442695040888963407);
            let at = (state >> 33) % (BYTES / 4096);
            file.write_all_at(&page.0, at * 4096).expect("a write");
        }
        file.sync_all().expect("a flush");
    });
    WRITES as f64 / took * 1e3
}

/// One chunk size: writes per second without a snapshot, after one, and MiB copied.
fn measure_one(chunk: u64, rounds: usize) -> [Vec<f64>; 4] {
    let group = Group::new(false);
    group.pool("thin", "2G", &format!("{chunk}k"));
    let scratch = Scratch::new();
    let thin = ThinHand::new(scratch.dir("records"), scratch.join("kubelet"), MAPPED);
    let id = thin.new_id();
    thin.message(ThinMessage::CreateThin { id });
    let held = thin.activate(id, BYTES);
    let options = libc::O_DIRECT;
    let file = OpenOptions::new()
        .write(true)
        .custom_flags(options)
        .open(&held.device.path);
    let file = file.expect("a device");
    #[repr(align(4096))]
    struct Piece([u8; 1 << 20]);
    let piece = Box::new(Piece([1; 1 << 20]));
    for at in (0..BYTES).step_by(1 << 20) {
        file.write_all_at(&piece.0, at).expect("a write");
    }
    let used = || {
        let status = thin.hand.host.thin_pool(MAPPED).expect("its status");
        status.expect("a thin pool").data.used
    };
    let mut found: [Vec<f64>; 4] = Default::default();
    for round in 0..=rounds {
        let seed = round as u64 + 1;
        let before = write(&file, seed);
        let (snapshot, had) = (thin.new_id(), used());
        thin.snapshot_suspended(snapshot, id);
        let first = write(&file, seed);
        let again = write(&file, seed);
        let copied = (used() - had) as f64 / f64::from(1 << 20);
        thin.message(ThinMessage::Delete { id: snapshot });
        if round > 0 {
            let values = [before, first / before, again / before, copied];
            for (all, value) in found.iter_mut().zip(values) {
                all.push(value);
            }
        }
    }
    drop((file, held));
    thin.message(ThinMessage::Delete { id });
    found
}

pub fn measure() {
    let rounds = given("ROUNDS", 12);
    println!(
        "\n{rounds} rounds of {WRITES} random writes of 4 KiB to 256 MiB, one after the other, and a flush; writes per second, and the ratio in pairs\n"
    );
    println!(
        "| chunk | without a snapshot | after one / without | the same writes again / without | MiB copied |"
    );
    println!("|---|---|---|---|---|");
    for chunk in CHUNKS {
        let [before, first, again, copied] = measure_one(chunk, rounds);
        let before = Spread::of(before).middle;
        let [first, again, copied] = [first, again, copied].map(Spread::of);
        println!(
            "| {chunk} KiB | {before:.0} | {first} | {again} | {:.0} |",
            copied.middle
        );
    }
}
