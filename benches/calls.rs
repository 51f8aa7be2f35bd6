//! Each CSI call, compared with the same work by hand, in turns: ratios of pairs, with their
//! spread.
//!
//! "By hand" is done in two ways. The *effects* are exactly the changes that the driver makes on
//! disk and kernel ([`slackwater::host::Effect`]: the same records, the same fsyncs, the same
//! mkfs), one after the other from this process, with only the indispensable query (the content of
//! the device, before mkfs or mount). The difference is the driver's own cost: gRPC, locks,
//! queries. The *programs* are what an administrator types: truncate, losetup, mkfs, mount, umount,
//! rm; without records, and without a proof that a volume was never formatted before.
//!
//! `ROUNDS=5 cargo bench --bench calls` is a shorter run.

#![allow(
    clippy::disallowed_methods,
    reason = "a benchmark is not the driver: it may start programs and write files"
)]

#[path = "hand/mod.rs"]
mod hand;
#[path = "measure/mod.rs"]
mod measure;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use hand::{Hand, Programs};
use measure::{Pairs, Spread, given, timed};
use slackwater::model::FsType;
use slackwater_testkit::{Client, Disk, Scratch, Server, mount};
use tokio::runtime::Runtime;
use tokio::sync::Semaphore;

const GIB: u64 = 1 << 30;
const KINDS: [FsType; 3] = [FsType::Ext4, FsType::Xfs, FsType::Btrfs];
/// The calls of a volume's life, in order.
const CALLS: [&str; 10] = [
    "Probe (nothing)",
    "create",
    "stage (mkfs)",
    "publish",
    "stats",
    "unpublish",
    "unstage",
    "stage (again)",
    "unstage (again)",
    "delete",
];
/// The number of volumes of the crowd, and how many are in progress at once.
const CROWD: usize = 40;
const AT_ONCE: usize = 20;

/// The driver as its client sees it.
struct Driver {
    runtime: Runtime,
    client: Client,
}

/// The paths of one volume's life.
struct Places {
    name: String,
    staging: PathBuf,
    target: PathBuf,
}

impl Places {
    fn new(scratch: &Scratch, name: String) -> Places {
        let staging = scratch.dir(&format!("kubelet/{name}.staging"));
        let target = scratch.join(&format!("kubelet/{name}"));
        Places {
            name,
            staging,
            target,
        }
    }
}

/// Milliseconds of each of [`CALLS`], for driver, effects and programs; each round in another
/// order.
type Times = BTreeMap<(&'static str, &'static str), [Vec<f64>; 3]>;

/// One life of a volume, step by step.
trait Life {
    fn step(&mut self, call: &str);
}

struct ByDriver<'a>(&'a Driver, FsType, Places, String);

impl Life for ByDriver<'_> {
    fn step(&mut self, call: &str) {
        let ByDriver(driver, fs, places, id) = self;
        let (client, capability) = (&driver.client, mount(fs.name()));
        let answer = driver.runtime.block_on(async {
            match call {
                "Probe (nothing)" => {
                    assert!(client.is_ready().await, "the driver serves");
                    Ok(())
                }
                "create" => {
                    *id = client.create(&places.name, GIB, capability, &[]).await?;
                    Ok(())
                }
                "stage (mkfs)" | "stage (again)" => {
                    client.stage(id, &places.staging, capability).await
                }
                "publish" => {
                    let (staging, target) = (&places.staging, &places.target);
                    client.publish(id, staging, target, capability, false).await
                }
                "stats" => client.stats(id, &places.target).await.map(drop),
                "unpublish" => client.unpublish(id, &places.target).await,
                "unstage" | "unstage (again)" => client.unstage(id, &places.staging).await,
                "delete" => client.delete(id).await,
                other => unreachable!("{other}"),
            }
        });
        answer.expect("the call succeeds");
    }
}

struct ByEffects<'a>(&'a Hand, FsType, Places);

impl Life for ByEffects<'_> {
    fn step(&mut self, call: &str) {
        let ByEffects(hand, fs, places) = self;
        match call {
            "Probe (nothing)" => {}
            "create" => hand.create(&places.name),
            "stage (mkfs)" => hand.stage(&places.name, *fs, &places.staging, true),
            "stage (again)" => hand.stage(&places.name, *fs, &places.staging, false),
            "publish" => hand.publish(&places.staging, &places.target),
            "stats" => hand.stats(&places.target),
            "unpublish" => hand.unpublish(&places.target),
            "unstage" | "unstage (again)" => hand.unstage(&places.staging),
            "delete" => hand.delete(&places.name),
            other => unreachable!("{other}"),
        }
    }
}

struct ByPrograms<'a>(&'a Programs, FsType, Places);

impl Life for ByPrograms<'_> {
    fn step(&mut self, call: &str) {
        let ByPrograms(programs, fs, places) = self;
        match call {
            "Probe (nothing)" => {}
            "create" => programs.create(&places.name),
            "stage (mkfs)" => programs.stage(&places.name, *fs, &places.staging, true),
            "stage (again)" => programs.stage(&places.name, *fs, &places.staging, false),
            "publish" => programs.publish(&places.staging, &places.target),
            "stats" => programs.stats(&places.target),
            "unpublish" => programs.unpublish(&places.target),
            "unstage" | "unstage (again)" => programs.unstage(&places.name, &places.staging),
            "delete" => programs.delete(&places.name),
            other => unreachable!("{other}"),
        }
    }
}

fn main() {
    let rounds = given("ROUNDS", 30);
    let scratch = Scratch::new();
    let disk = Disk::new(&scratch, "disk", "xfs", 128 * GIB);
    let root = &disk.mount_point;
    std::fs::create_dir(root.join("pool")).expect("a folder");
    let pool = format!(
        "default=file:{},init,mount=any",
        root.join("pool").display()
    );
    let server = Server::start(&scratch, &[&pool]);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .expect("a runtime");
    // A client must be created within a runtime.
    let client = runtime.block_on(async { server.client() });
    let driver = Driver { runtime, client };
    let hand = Hand::new(root.join("effects"), scratch.join("kubelet"));
    let programs = Programs::new(root.join("programs"));
    let mut times = Times::new();
    for round in 0..=rounds {
        for fs in KINDS {
            let place = |who: &str| Places::new(&scratch, format!("{who}-{fs}-{round}"));
            let mut lives: [Box<dyn Life + '_>; 3] = [
                Box::new(ByDriver(&driver, fs, place("driver"), String::new())),
                Box::new(ByEffects(&hand, fs, place("effects"))),
                Box::new(ByPrograms(&programs, fs, place("programs"))),
            ];
            for call in CALLS {
                for turn in 0..lives.len() {
                    let who = (round + turn) % lives.len();
                    let ((), took) = timed(|| lives[who].step(call));
                    // The first round is a warm-up.
                    if round > 0 {
                        times.entry((call, fs.name())).or_default()[who].push(took);
                    }
                }
            }
        }
    }
    print_table(&times, rounds);
    crowd(&scratch, &driver, &hand);
}

/// Prints a table for docs/performance.md.
fn print_table(times: &Times, rounds: usize) {
    println!("\n{rounds} rounds; medians in ms, then of pairs the median and the quartiles\n");
    println!(
        "| call | | driver | effects | programs | driver / effects | undisturbed | driver - effects, ms | driver / programs |"
    );
    println!("|---|---|---|---|---|---|---|---|---|");
    let probes = times.iter().filter(|((call, _), _)| *call == CALLS[0]);
    let probes = Spread::of(probes.flat_map(|(_, [driver, ..])| driver.iter().copied()));
    println!("| Probe | | {probes} | | | | | | |");
    for call in &CALLS[1..] {
        for fs in KINDS {
            let [driver, effects, programs] = &times[&(*call, fs.name())];
            let middle = |values: &Vec<f64>| Spread::of(values.iter().copied()).middle;
            let pairs = |hand: &Vec<f64>| Pairs {
                ours: driver.clone(),
                hand: hand.clone(),
            };
            println!(
                "| {call} | {fs} | {:.2} | {:.2} | {:.2} | {} | {:.2} | {} | {} |",
                middle(driver),
                middle(effects),
                middle(programs),
                pairs(effects).ratio(),
                pairs(effects).undisturbed(),
                pairs(effects).more(),
                pairs(programs).ratio(),
            );
        }
    }
}

/// Creates, stages and publishes many volumes at once.
fn crowd(scratch: &Scratch, driver: &Driver, hand: &Hand) {
    let rounds = given("CROWD_ROUNDS", 7);
    println!(
        "\n{CROWD} volumes, {AT_ONCE} at once, {rounds} rounds; seconds, then the ratio of pairs\n"
    );
    println!("| | | driver | effects | driver / effects |");
    println!("|---|---|---|---|---|");
    for fs in KINDS {
        let (mut up, mut down) = (Pairs::default(), Pairs::default());
        for round in 0..=rounds {
            let places = |who: &str| -> Arc<Vec<Places>> {
                let name = |n| format!("crowd-{who}-{fs}-{round}-{n}");
                let all = (0..CROWD).map(|n| Places::new(scratch, name(n)));
                Arc::new(all.collect())
            };
            let (ours, theirs) = (places("driver"), places("effects"));
            let mut took = [[0.0; 2]; 2];
            for turn in 0..2 {
                if (round + turn) % 2 == 0 {
                    let (ids, went) = timed(|| driver_up(driver, fs, &ours));
                    took[0] = [went, timed(|| driver_down(driver, &ours, ids)).1];
                } else {
                    let went = timed(|| hand_up(hand, fs, &theirs)).1;
                    took[1] = [went, timed(|| hand_down(hand, &theirs)).1];
                }
            }
            if round > 0 {
                up.ours.push(took[0][0] / 1e3);
                down.ours.push(took[0][1] / 1e3);
                up.hand.push(took[1][0] / 1e3);
                down.hand.push(took[1][1] / 1e3);
            }
        }
        for (what, pairs) in [
            ("create, stage, publish", up),
            ("unpublish, unstage, delete", down),
        ] {
            let ours = Spread::of(pairs.ours.iter().copied());
            let theirs = Spread::of(pairs.hand.iter().copied());
            println!("| {what} | {fs} | {ours} | {theirs} | {} |", pairs.ratio());
        }
    }
}

fn driver_up(driver: &Driver, fs: FsType, all: &Arc<Vec<Places>>) -> Vec<String> {
    let permits = Arc::new(Semaphore::new(AT_ONCE));
    driver.runtime.block_on(async {
        let mut running = Vec::new();
        for n in 0..all.len() {
            let (client, permits, all) = (driver.client.clone(), permits.clone(), all.clone());
            running.push(tokio::spawn(async move {
                let _permit = permits.acquire().await.expect("never closed");
                let Places {
                    name,
                    staging,
                    target,
                } = &all[n];
                let id = client.create(name, GIB, mount(fs.name()), &[]).await?;
                client.stage(&id, staging, mount(fs.name())).await?;
                let capability = mount(fs.name());
                client
                    .publish(&id, staging, target, capability, false)
                    .await?;
                Ok::<_, tonic::Status>(id)
            }));
        }
        let mut ids = Vec::new();
        for task in running {
            ids.push(task.await.expect("no panic").expect("the call succeeds"));
        }
        ids
    })
}

fn driver_down(driver: &Driver, all: &Arc<Vec<Places>>, ids: Vec<String>) {
    let permits = Arc::new(Semaphore::new(AT_ONCE));
    driver.runtime.block_on(async {
        let mut running = Vec::new();
        for (n, id) in ids.into_iter().enumerate() {
            let (client, permits, all) = (driver.client.clone(), permits.clone(), all.clone());
            running.push(tokio::spawn(async move {
                let _permit = permits.acquire().await.expect("never closed");
                client.unpublish(&id, &all[n].target).await?;
                client.unstage(&id, &all[n].staging).await?;
                client.delete(&id).await
            }));
        }
        for task in running {
            task.await.expect("no panic").expect("the call succeeds");
        }
    });
}

fn at_once(all: &[Places], work: impl Fn(&Places) + Sync) {
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..AT_ONCE {
            scope.spawn(|| {
                while let Some(places) = all.get(next.fetch_add(1, Ordering::Relaxed)) {
                    work(places);
                }
            });
        }
    });
}

fn hand_up(hand: &Hand, fs: FsType, all: &[Places]) {
    at_once(all, |places| {
        hand.create(&places.name);
        hand.stage(&places.name, fs, &places.staging, true);
        hand.publish(&places.staging, &places.target);
    });
}

fn hand_down(hand: &Hand, all: &[Places]) {
    at_once(all, |places| {
        hand.unpublish(&places.target);
        hand.unstage(&places.staging);
        hand.delete(&places.name);
    });
}
