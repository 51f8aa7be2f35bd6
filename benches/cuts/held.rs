//! How long an application is held for a cut, by its own clock, as a function of the number of
//! extents of its image.

use std::path::Path;

use super::fixture::Fixture;
use super::measure::{Spread, given, now};
use super::pictures;
use super::plot::{Line, Plot};
use super::stall::{Load, Writers};

const FS: &str = "ext4";
/// The number of extents of an image.
const EXTENTS: [u64; 4] = [100, 1_000, 10_000, 100_000];
/// The size of a volume in bytes, without the space for its extents.
const SIZE: u64 = 1 << 29;

/// From a hook's READY to the end of its stdin, in ms, for each of its runs.
fn held(log: &Path) -> Vec<f64> {
    let text = std::fs::read_to_string(log).expect("the log of a hook");
    let nanos: Vec<u64> = text
        .lines()
        .map(|line| line.parse().expect("nanoseconds"))
        .collect();
    let pairs = nanos.chunks_exact(2);
    pairs.map(|pair| (pair[1] - pair[0]) as f64 / 1e6).collect()
}

pub fn measure() {
    let turns = given("ROUNDS", 5);
    let (fixture, log) = Fixture::with_hook("xfs", 64 << 30);
    let client = &fixture.node.client;
    let class = [("consistency", "application")];
    let mut line = Line {
        name: "application held".into(),
        points: Vec::new(),
    };
    println!("\nan application is held for, ms: medians and quartiles of {turns}\n");
    println!("| extents | held | the whole call |\n|---|---|---|");
    for extents in EXTENTS {
        let name = format!("held-{extents}");
        let volume = fixture.volume(&name, FS, SIZE + 2 * 4096 * extents);
        fixture.break_up(&volume, FS, extents);
        std::fs::write(&log, "").expect("an empty log");
        let mut calls = Vec::new();
        // The first round is a warm-up.
        for round in 0..=turns {
            let writers = Writers::start(&[&volume.staging], Load::Busy);
            let start = std::time::Instant::now();
            fixture.runtime.block_on(async {
                let name = format!("{name}-{round}-{}", now());
                let created = client.snapshot(&name, &volume.id, &class).await;
                calls.push(start.elapsed().as_secs_f64() * 1e3);
                let id = created.expect("a snapshot").snapshot_id;
                client.delete_snapshot(&id).await.expect("delete");
            });
            writers.stall(0);
        }
        let held = Spread::of(held(&log).into_iter().skip(1));
        let calls = Spread::of(calls.into_iter().skip(1));
        println!("| {extents} | {held} | {calls} |");
        line.points
            .push((extents as f64, [held.low, held.middle, held.high]));
        fixture.end(&volume);
    }
    Plot {
        title: "How long an application is held for a snapshot",
        across: "extents of the volume's image",
        up: "from its hook's READY to its release, ms",
        lines: vec![line],
        bounds: vec![("600 ms", 600.0)],
    }
    .save(&pictures().join("held-extents.svg"));
}
