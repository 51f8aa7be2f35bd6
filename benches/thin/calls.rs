//! Each call of a volume's life, compared with its effects by hand: ratios of pairs.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::mpsc::channel;
use std::thread;

use slackwater::model::FsType;
use slackwater_testkit::mount;
use slackwater_testkit::snapshots::from_snapshot;

use super::cuts::flushes;
use super::fixture::{Fixture, SIZE, without_udev};
use super::hand::write_back;
use super::measure::{Pairs, Spread, given, timed};

const CALLS: [&str; 11] = [
    // A call that does nothing: the cost of gRPC in the guest.
    "Probe",
    "create",
    "stage (mkfs)",
    "publish",
    "stats",
    "snapshot",
    "restore, stage",
    "unpublish",
    "unstage",
    "delete",
    "delete a snapshot",
];

/// What the kernel counts, of everything that runs in the guest. On one machine these numbers depend little on other
/// work, and tell where the time of a call goes.
const COUNTED: [&str; 4] = [
    "flushes",
    "threads and processes started",
    "context switches",
    "page faults",
];

/// The duration in milliseconds, and what the kernel has counted during the work.
struct Cost(f64, [f64; COUNTED.len()]);

impl Cost {
    fn of(work: impl FnOnce()) -> Cost {
        without_udev(|| {
            let before = counters();
            let ((), took) = timed(work);
            let after = counters();
            Cost(took, std::array::from_fn(|at| after[at] - before[at]))
        })
    }
}

fn counters() -> [f64; COUNTED.len()] {
    let of = |file: &str, key: &str| -> f64 {
        let text = std::fs::read_to_string(file).expect("the kernel's counters");
        let mut lines = text.lines().filter_map(|line| line.split_once(' '));
        let line = lines.find(|(name, _)| *name == key);
        let number = line.and_then(|(_, number)| number.trim().parse().ok());
        number.unwrap_or_else(|| panic!("{file} has {key}"))
    };
    [
        flushes() as f64,
        of("/proc/stat", "processes"),
        of("/proc/stat", "ctxt"),
        of("/proc/vmstat", "pgfault"),
    ]
}

/// What the same takes on each kernel: how much of a call's time is the price of this one.
fn print_prices() {
    let (to, asked) = channel::<()>();
    let (answer, answered) = channel();
    let echo = thread::spawn(
        move || {
            while asked.recv().is_ok() && answer.send(()).is_ok() {}
        },
    );
    let price = |what: &str, work: &mut dyn FnMut()| {
        const TIMES: usize = 200;
        let took = (0..TIMES).map(|_| timed(&mut *work).1 * 1e3);
        println!("| {what} | {} |", Spread::of(took));
    };
    println!("\n| | us |\n|---|---|");
    price("a system call", &mut || {
        nix::unistd::getppid();
    });
    price("a message to another thread, and its answer", &mut || {
        to.send(()).expect("the thread runs");
        answered.recv().expect("the thread runs");
    });
    price("a thread that is started and joined", &mut || {
        thread::spawn(|| {}).join().expect("no panic");
    });
    drop(to);
    echo.join().expect("no panic");
}

/// One life of a volume.
struct Life<'a> {
    fixture: &'a Fixture,
    fs: FsType,
    name: String,
    staging: PathBuf,
    restored: PathBuf,
    target: PathBuf,
}

/// The volume, its snapshot, and the volume that was restored from it.
#[derive(Default)]
struct Ids<T> {
    volume: T,
    snapshot: T,
    restored: T,
}

impl<'a> Life<'a> {
    fn new(fixture: &'a Fixture, fs: FsType, name: String) -> Life<'a> {
        Life {
            fixture,
            fs,
            staging: fixture.staging(&name),
            restored: fixture.staging(&format!("{name}-restored")),
            target: fixture.scratch.join(&format!("kubelet/{name}")),
            name,
        }
    }

    fn driver(&self, call: &str, ids: &mut Ids<String>) {
        let client = &self.fixture.client;
        let (staging, target) = (&self.staging, &self.target);
        let how = mount(self.fs.name());
        let name = &self.name;
        let answer = self.fixture.runtime.block_on(async {
            match call {
                "Probe" => assert!(client.is_ready().await, "the driver serves"),
                "create" => ids.volume = client.create(name, SIZE, how, &[]).await?,
                "stage (mkfs)" => client.stage(&ids.volume, staging, how).await?,
                "publish" => {
                    let published = client.publish(&ids.volume, staging, target, how, false);
                    published.await?;
                }
                "stats" => drop(client.stats(&ids.volume, target).await?),
                "snapshot" => {
                    let created = client.snapshot(name, &ids.volume, &[]).await?;
                    ids.snapshot = created.snapshot_id;
                }
                "restore, stage" => {
                    let (source, name) = (from_snapshot(&ids.snapshot), format!("{name}-r"));
                    let created = client.create_from(&name, SIZE, how.clone(), source, &[]);
                    ids.restored = created.await?.volume_id;
                    client.stage(&ids.restored, &self.restored, how).await?;
                }
                "unpublish" => client.unpublish(&ids.volume, target).await?,
                "unstage" => client.unstage(&ids.restored, &self.restored).await?,
                "delete" => client.delete(&ids.restored).await?,
                "delete a snapshot" => client.delete_snapshot(&ids.snapshot).await?,
                "end" => {
                    client.unstage(&ids.volume, staging).await?;
                    client.delete(&ids.volume).await?;
                }
                other => unreachable!("{other}"),
            }
            Ok::<_, tonic::Status>(())
        });
        answer.expect("the call succeeds");
    }

    fn effects(&self, call: &str, ids: &mut Ids<u32>) {
        let thin = &self.fixture.by_hand;
        let (hand, name, fs) = (&thin.hand, &self.name, self.fs);
        let restored = &format!("{name}-r");
        match call {
            "Probe" => {}
            "create" => ids.volume = thin.create(name),
            "stage (mkfs)" => thin.stage(name, ids.volume, fs, &self.staging, true),
            "publish" => hand.publish(&self.staging, &self.target),
            "stats" => hand.stats(&self.target),
            "snapshot" => ids.snapshot = thin.snapshot(name, ids.volume, &self.staging),
            "restore, stage" => {
                ids.restored = thin.restore(restored, ids.snapshot, fs, &self.restored);
            }
            "unpublish" => hand.unpublish(&self.target),
            "unstage" => hand.unstage(&self.restored),
            "delete" => thin.delete(&hand.volumes.join(restored), ids.restored),
            "delete a snapshot" => thin.delete(&hand.snapshots.join(name), ids.snapshot),
            "end" => {
                hand.unstage(&self.staging);
                thin.delete(&hand.volumes.join(name), ids.volume);
            }
            other => unreachable!("{other}"),
        }
    }
}

/// On a disk whose flush costs nothing, so that the difference is processor time.
pub fn measure() {
    compare(false);
}

/// Each flush of the disk takes 2 ms longer, as on many disks without a protected cache.
pub fn measure_with_slow_flushes() {
    compare(true);
}

fn compare(is_delayed: bool) {
    let rounds = given("ROUNDS", 12);
    let fixture = Fixture::new(is_delayed);
    print_prices();
    let mut costs: BTreeMap<(&str, &str), (Pairs, [Pairs; COUNTED.len()])> = BTreeMap::new();
    for round in 0..=rounds {
        for fs in [FsType::Ext4, FsType::Xfs] {
            let life = |who: &str| Life::new(&fixture, fs, format!("{who}-{fs}-{round}"));
            let (ours, theirs) = (life("driver"), life("effects"));
            let (mut our_ids, mut their_ids) = (Ids::default(), Ids::default());
            for call in CALLS {
                if call == "snapshot" {
                    for path in [&ours.staging, &theirs.staging] {
                        write_back(path);
                    }
                }
                let mut of = [const { Cost(0.0, [0.0; COUNTED.len()]) }; 2];
                for turn in 0..2 {
                    let who = (round + turn) % 2;
                    of[who] = match who {
                        0 => Cost::of(|| ours.driver(call, &mut our_ids)),
                        _ => Cost::of(|| theirs.effects(call, &mut their_ids)),
                    };
                }
                // The first round is a warm-up.
                if round > 0 {
                    let [Cost(our_time, our_counts), Cost(their_time, their_counts)] = of;
                    let (times, counts) = costs.entry((call, fs.name())).or_default();
                    times.add(our_time, their_time);
                    for (at, pairs) in counts.iter_mut().enumerate() {
                        pairs.add(our_counts[at], their_counts[at]);
                    }
                }
            }
            ours.driver("end", &mut our_ids);
            theirs.effects("end", &mut their_ids);
        }
    }
    fixture.end();
    let middle = |values: &[f64]| Spread::of(values.iter().copied()).middle;
    println!("\n{rounds} rounds; medians in ms, then of pairs the median and the quartiles\n");
    println!(
        "| call | | driver | effects | driver / effects | undisturbed | driver - effects, ms |"
    );
    println!("|---|---|---|---|---|---|---|");
    for call in CALLS {
        for fs in ["ext4", "xfs"] {
            let (times, _) = &costs[&(call, fs)];
            println!(
                "| {call} | {fs} | {:.2} | {:.2} | {} | {:.2} | {} |",
                middle(&times.ours),
                middle(&times.hand),
                times.ratio(),
                times.undisturbed(),
                times.more(),
            );
        }
    }
    println!("\nmedians, of the driver and of the effects\n");
    println!("| call | | {} |", COUNTED.join(" | "));
    println!("|---|---|{}", "---|".repeat(COUNTED.len()));
    for call in CALLS {
        for fs in ["ext4", "xfs"] {
            let (_, counts) = &costs[&(call, fs)];
            let both = |pairs: &Pairs| {
                format!("{:.0} and {:.0}", middle(&pairs.ours), middle(&pairs.hand))
            };
            let columns: Vec<_> = counts.iter().map(both).collect();
            println!("| {call} | {fs} | {} |", columns.join(" | "));
        }
    }
}
