//! The longest time between two acknowledged writes around a cut, by the driver and by hand, as a
//! function of the number of volumes and of an image's extents.

use std::path::Path;
use std::time::Duration;

use super::fixture::{Fixture, Volume};
use super::hand::Way;
use super::measure::{Spread, given, now, timed};
use super::pictures;
use super::plot::{Line, Plot};
use super::stall::{Load, Stall, Writers};
use slackwater_testkit::snapshots::members as members_of;

const GIB: u64 = 1 << 30;
const FS: &str = "ext4";
/// The numbers of volumes in a group.
const MEMBERS: [usize; 5] = [1, 2, 4, 8, 16];
/// A smaller xfs would be faster, but xfs needs at least this much.
const SMALL: u64 = GIB / 2;
/// The number of extents of each busy member's image.
const PIECES: u64 = 2_000;
/// The number of extents of an image.
const EXTENTS: [u64; 4] = [100, 1_000, 10_000, 100_000];
/// The pause between two cuts: see `calls::REST`.
const REST: Duration = Duration::from_millis(700);
/// About the duration of a cut by the driver.
const NOTHING: Duration = Duration::from_millis(300);

/// The program that cuts.
#[derive(Clone, Copy, PartialEq)]
enum Who {
    NoCut,
    Driver,
    Hand(Way),
}

/// The result of one cut.
#[derive(Clone, Copy, Default)]
struct Cut {
    stall: Stall,
    /// The duration of the whole cut, in ms.
    took: f64,
    /// The longest of the copies by hand, in ms.
    longest: f64,
}

fn cut(fixture: &Fixture, volumes: &[Volume], who: Who, load: Load, name: &str) -> Cut {
    std::thread::sleep(REST);
    let mount_points: Vec<&Path> = volumes.iter().map(|one| one.staging.as_path()).collect();
    let writers = Writers::start(&mount_points, load);
    let client = &fixture.node.client;
    let mut created = (String::new(), Vec::new());
    let ((cut_at, longest), took) = timed(|| match who {
        Who::NoCut => {
            std::thread::sleep(NOTHING);
            (0, 0.0)
        }
        Who::Hand(way) => {
            let images: Vec<(&Path, &Path)> = volumes
                .iter()
                .map(|one| (one.image.as_path(), one.staging.as_path()))
                .collect();
            fixture.hand.cut(&images, way)
        }
        Who::Driver => fixture.runtime.block_on(async {
            let time = match volumes {
                [one] => {
                    let snapshot = client.snapshot(name, &one.id, &[]).await;
                    let snapshot = snapshot.expect("a snapshot");
                    created.0 = snapshot.snapshot_id;
                    snapshot.creation_time
                }
                _ => {
                    let ids: Vec<String> = volumes.iter().map(|one| one.id.clone()).collect();
                    let group = client.group(name, &ids, &[]).await.expect("a group");
                    created = (group.group_snapshot_id.clone(), members_of(&group));
                    group.creation_time
                }
            };
            let time = time.expect("a time");
            let nanos = time.seconds * 1_000_000_000 + i64::from(time.nanos);
            (nanos.cast_unsigned(), 0.0)
        }),
    });
    let stall = writers.stall(cut_at);
    match who {
        Who::NoCut => {}
        Who::Hand(_) => fixture.hand.forget_snapshots(),
        Who::Driver => fixture.runtime.block_on(async {
            let gone = match volumes {
                [_] => client.delete_snapshot(&created.0).await,
                _ => client.delete_group(&created.0, &created.1).await,
            };
            gone.expect("delete");
        }),
    }
    Cut {
        stall,
        took,
        longest,
    }
}

/// In turns: for each group and each way to cut, all its cuts.
fn rounds(
    fixture: &Fixture,
    groups: &[&[Volume]],
    all: &[Who],
    load: Load,
    rounds: usize,
) -> Vec<Vec<Vec<Cut>>> {
    let mut cuts = vec![vec![Vec::new(); all.len()]; groups.len()];
    for round in 0..=rounds {
        for (volumes, cuts) in groups.iter().zip(&mut cuts) {
            for turn in 0..all.len() {
                let at = (round + turn) % all.len();
                let name = format!("{}-{round}-{}", volumes.len(), now());
                let one = cut(fixture, volumes, all[at], load, &name);
                // The first round is a warm-up.
                if round > 0 {
                    cuts[at].push(one);
                }
            }
        }
    }
    cuts
}

fn spread(cuts: &[Cut], of: impl Fn(&Cut) -> f64) -> Spread {
    Spread::of(cuts.iter().map(of))
}

fn point(x: f64, spread: Spread) -> (f64, [f64; 3]) {
    (x, [spread.low, spread.middle, spread.high])
}

fn line(name: &str) -> Line {
    let (name, points) = (name.to_string(), Vec::new());
    Line { name, points }
}

/// The quotient of each pair.
fn ratio(ours: &[Cut], theirs: &[Cut], of: impl Fn(&Cut, &Cut) -> f64) -> Spread {
    Spread::of(
        ours.iter()
            .zip(theirs)
            .map(|(ours, theirs)| of(ours, theirs)),
    )
}

pub fn members() {
    let turns = given("ROUNDS", 7);
    let fixture = Fixture::new("xfs", 64 * GIB);
    let most = MEMBERS[MEMBERS.len() - 1];
    let volumes: Vec<Volume> = (0..most)
        .map(|n| fixture.volume(&format!("member-{n}"), FS, SMALL))
        .collect();
    let whole = [Way::SideBySide, Way::InSequence].map(Who::Hand);
    let all = [Who::Driver, whole[0], whole[1], Who::NoCut];
    println!("\nstall of the writer that waits longest, ms: medians and quartiles of {turns}\n");
    println!(
        "| volumes | | driver, at the cut | any other moment | FICLONE in parallel | one after the other | without a cut | longest FICLONE by hand | driver / longest FICLONE | the whole call |"
    );
    println!("|---|---|---|---|---|---|---|---|---|---|");
    for load in [Load::Idle, Load::Busy] {
        let word = match load {
            Load::Idle => "idle",
            Load::Busy => {
                for volume in &volumes {
                    fixture.break_up(volume, FS, PIECES);
                }
                "busy"
            }
        };
        let mut lines = [
            line("driver,|at the cut"),
            line("driver,|any other moment"),
            line("FICLONE in parallel,|in one freeze"),
            line("FICLONE in sequence,|in one freeze"),
            line("without a cut"),
        ];
        let groups = MEMBERS.map(|count| &volumes[..count]);
        let groups = rounds(&fixture, &groups, &all, load, turns);
        for (count, cuts) in MEMBERS.into_iter().zip(&groups) {
            let [driver, aside, series, no_cut] = &cuts[..] else {
                unreachable!("one line for each way to cut");
            };
            let stall = |cut: &Cut| cut.stall.cut;
            let other = |cut: &Cut| cut.stall.other;
            let columns = [
                spread(driver, stall),
                spread(driver, other),
                spread(aside, stall),
                spread(series, stall),
                spread(no_cut, other),
            ];
            for (line, column) in lines.iter_mut().zip(columns) {
                line.points.push(point(count as f64, column));
            }
            println!(
                "| {count} | {word} | {} | {} | {} | {} | {} | {} | {} | {} |",
                columns[0],
                columns[1],
                columns[2],
                columns[3],
                columns[4],
                spread(aside, |cut| cut.longest),
                ratio(driver, aside, |ours, theirs| ours.stall.cut
                    / theirs.longest),
                spread(driver, |cut| cut.took),
            );
        }
        // For each round, the largest group next to the single volume.
        let times = |who: usize| {
            let (all, one) = (&groups[MEMBERS.len() - 1][who], &groups[0][who]);
            ratio(all, one, |all, one| all.stall.cut / one.stall.cut)
        };
        println!(
            "| {most} / 1 | {word} | {} | | {} | {} | | | | |",
            times(0),
            times(1),
            times(2)
        );
        Plot {
            title: &format!("Stalls of writers at a group snapshot ({word} volumes)"),
            across: "volumes in the group",
            up: "longest time between two writes, ms",
            lines: lines.into(),
            bounds: Vec::new(),
        }
        .save(&pictures().join(format!("stall-members-{word}.svg")));
    }
    volumes.iter().for_each(|volume| fixture.end(volume));
}

pub fn extents() {
    let turns = given("ROUNDS", 5);
    let fixture = Fixture::new("xfs", 64 * GIB);
    let all = [
        Who::Driver,
        Who::Hand(Way::InSequence),
        Who::Hand(Way::Copy),
        Who::NoCut,
    ];
    let mut lines = [
        line("driver,|at the cut"),
        line("driver,|any other moment"),
        line("one FICLONE|in the freeze"),
        line("frozen for a copy|of all blocks"),
        line("without a cut"),
    ];
    println!("\nstall of a busy writer, ms: medians and quartiles of {turns}\n");
    println!(
        "| extents | driver, at the cut | any other moment | FICLONE in the freeze | frozen for the copy | without a cut | the whole call |"
    );
    println!("|---|---|---|---|---|---|---|");
    for extents in EXTENTS {
        let size = SMALL + 2 * 4096 * extents;
        let volume = fixture.volume(&format!("extents-{extents}"), FS, size);
        fixture.break_up(&volume, FS, extents);
        let volumes = [volume];
        let cuts = rounds(&fixture, &[&volumes], &all, Load::Busy, turns);
        let [driver, whole, copy, no_cut] = &cuts[0][..] else {
            unreachable!("one line for each way to cut");
        };
        let stall = |cut: &Cut| cut.stall.cut;
        let other = |cut: &Cut| cut.stall.other;
        let columns = [
            spread(driver, stall),
            spread(driver, other),
            spread(whole, stall),
            spread(copy, stall),
            spread(no_cut, other),
        ];
        for (line, column) in lines.iter_mut().zip(columns) {
            line.points.push(point(extents as f64, column));
        }
        println!(
            "| {extents} | {} | {} | {} | {} | {} | {} |",
            columns[0],
            columns[1],
            columns[2],
            columns[3],
            columns[4],
            spread(driver, |cut| cut.took),
        );
        volumes.iter().for_each(|volume| fixture.end(volume));
    }
    Plot {
        title: "Stalls of a writer at a snapshot",
        across: "extents of the volume's image",
        up: "longest time between two writes, ms",
        lines: lines.into(),
        bounds: vec![("300 ms", 300.0)],
    }
    .save(&pictures().join("stall-extents.svg"));
}
