//! How long a cut keeps writers waiting, against the number of members and of blocks.

use std::fs::OpenOptions;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use nix::libc;
use slackwater::host::ThinMessage;
use slackwater::model::FsType;
use slackwater_testkit::snapshots::members as members_of;
use slackwater_testkit::{block, mount, run, succeeds};

use super::fixture::{Fixture, GROUP, MAPPED, without_udev};
use super::measure::{Pairs, Spread, given, timed};

const MEMBERS: usize = 16;
/// Bytes of a volume of a group.
const SMALL: u64 = 64 << 20;
const CHUNK: u64 = 64 << 10;
/// The numbers of blocks of a volume.
const BLOCKS: [u64; 3] = [1, 1_000, 100_000];

/// 4 KiB that O_DIRECT accepts.
#[repr(align(4096))]
pub struct Page(pub [u8; 4096]);

/// Flushes that the disk below everything has completed (Documentation/block/stat.rst).
pub fn flushes() -> u64 {
    let disk = slackwater_testkit::guest::disk("pool").replace("/dev/", "/sys/block/");
    let line = std::fs::read_to_string(disk + "/stat").expect("its statistics");
    let field = line.split_whitespace().nth(15).expect("the field");
    field.parse().expect("a number")
}

/// What a cut has cost.
#[derive(Clone, Copy)]
struct Cut {
    /// From the first freeze to the last thaw, in ms.
    frozen: f64,
    /// The whole call, in ms.
    whole: f64,
    flushes: f64,
}

/// The duration in milliseconds, and the flushes.
fn counted(work: impl FnOnce()) -> (f64, f64) {
    without_udev(|| {
        let before = flushes();
        let ((), took) = timed(work);
        (took, (flushes() - before) as f64)
    })
}

/// Takes a snapshot of one volume or of a group, and deletes it.
fn cut(fixture: &Fixture, ids: &[String], name: &str, class: &[(&str, &str)]) -> Cut {
    let (client, before) = (&fixture.client, fixture.frozen());
    let mut created = (String::new(), Vec::new());
    let (whole, flushes) = counted(|| {
        created = fixture.runtime.block_on(async {
            if let [id] = ids {
                let made = client.snapshot(name, id, class).await.expect("a snapshot");
                return (made.snapshot_id, Vec::new());
            }
            let made = client.group(name, ids, class).await.expect("a group");
            (made.group_snapshot_id.clone(), members_of(&made))
        });
    });
    let frozen = fixture.frozen() - before;
    let gone = fixture.runtime.block_on(async {
        match ids {
            [_] => client.delete_snapshot(&created.0).await,
            _ => client.delete_group(&created.0, &created.1).await,
        }
    });
    gone.expect("delete");
    Cut {
        frozen,
        whole,
        flushes,
    }
}

pub fn members() {
    compare_members(false);
}

pub fn members_with_slow_flushes() {
    compare_members(true);
}

fn compare_members(is_delayed: bool) {
    let rounds = given("ROUNDS", 12);
    let fixture = Fixture::new(is_delayed);
    let (client, how) = (&fixture.client, mount("ext4"));
    let mut volumes: Vec<(String, PathBuf)> = Vec::new();
    for n in 0..MEMBERS {
        let (name, how) = (format!("member-{n}"), how.clone());
        let staging = fixture.staging(&name);
        volumes.push(fixture.runtime.block_on(async {
            let id = client.create(&name, SMALL, how.clone(), &[]).await;
            let id = id.expect("create");
            client.stage(&id, &staging, how).await.expect("stage");
            (id, staging)
        }));
    }
    let ids: Vec<String> = volumes.iter().map(|(id, _)| id.clone()).collect();
    let thin = &fixture.by_hand;
    let by_hand: Vec<(u32, PathBuf)> = (0..MEMBERS)
        .map(|n| {
            let name = format!("by-hand-{n}");
            let (id, staging) = (thin.create(&name), fixture.staging(&name));
            thin.stage(&name, id, FsType::Ext4, &staging, true);
            (id, staging)
        })
        .collect();
    // Origins of the bare messages, which have no device.
    let origins: Vec<u32> = (1..MEMBERS).map(|_| thin.new_id()).collect();
    for id in origins.iter().copied() {
        thin.message(ThinMessage::CreateThin { id });
    }
    let (mut one, mut all) = (Vec::new(), Vec::new());
    let (mut bare, mut hand) = (Vec::new(), Vec::new());
    for round in 0..=rounds {
        // So that each freeze has something to write back.
        let roots = volumes.iter().map(|it| &it.1);
        for staging in roots.chain(by_hand.iter().map(|it| &it.1)) {
            std::fs::write(staging.join("data"), format!("{round}")).expect("a file");
        }
        // With slow flushes, the freezes alone take longer than by default.
        let class = [("freezeTimeout", if is_delayed { "30s" } else { "10s" })];
        let first = cut(&fixture, &ids[..1], &format!("one-{round}"), &class);
        let group = cut(&fixture, &ids, &format!("all-{round}"), &class);
        let copies: Vec<u32> = origins.iter().map(|_| thin.new_id()).collect();
        let messages = counted(|| {
            for (id, origin) in copies.iter().zip(&origins) {
                thin.create_snap(*id, *origin);
            }
        });
        for id in copies {
            thin.message(ThinMessage::Delete { id });
        }
        let windows = without_udev(|| [thin.cut(&by_hand[..1]), thin.cut(&by_hand)]);
        // The first round is a warm-up.
        if round > 0 {
            one.push(first);
            all.push(group);
            bare.push(messages);
            hand.push(windows);
        }
    }
    tell_members(is_delayed, &one, &all, &bare);
    tell_hand(&[&one, &all], &hand);
    if !is_delayed {
        by_lvm(&fixture, &ids, rounds);
    }
    for (n, (id, staging)) in by_hand.iter().enumerate() {
        thin.hand.unstage(staging);
        thin.delete(&thin.hand.volumes.join(format!("by-hand-{n}")), *id);
    }
    fixture.runtime.block_on(async {
        for (id, staging) in &volumes {
            client.unstage(id, staging).await.expect("unstage");
            client.delete(id).await.expect("delete");
        }
    });
    fixture.end();
}

/// The window of the driver, compared with the same freezes, suspends, messages, resumes and thaws
/// without it.
fn tell_hand(cuts: &[&[Cut]; 2], hand: &[[f64; 2]]) {
    println!("\n| | by hand | driver / by hand |");
    println!("|---|---|---|");
    for (at, what) in ["one member", "sixteen members"].iter().enumerate() {
        let pairs = Pairs {
            ours: cuts[at].iter().map(|cut| cut.frozen).collect(),
            hand: hand.iter().map(|windows| windows[at]).collect(),
        };
        let spread = Spread::of(pairs.hand.iter().copied());
        println!("| {what} | {spread} | {} |", pairs.ratio());
    }
}

fn tell_members(is_delayed: bool, one: &[Cut], all: &[Cut], bare: &[(f64, f64)]) {
    let how = if is_delayed {
        "2 ms more per flush"
    } else {
        "flushes cost nothing"
    };
    println!(
        "\n{how}: {} rounds; ms and flushes, medians and quartiles\n",
        one.len()
    );
    println!("| | frozen | the whole call | flushes |");
    println!("|---|---|---|---|");
    for (what, cuts) in [("one member", one), ("sixteen members", all)] {
        let of = |value: fn(&Cut) -> f64| Spread::of(cuts.iter().map(value));
        let (frozen, whole) = (of(|cut| cut.frozen), of(|cut| cut.whole));
        println!(
            "| {what} | {frozen} | {whole} | {} |",
            of(|cut| cut.flushes)
        );
    }
    let took = Spread::of(bare.iter().map(|bare| bare.0));
    let flushes = Spread::of(bare.iter().map(|bare| bare.1));
    println!("| fifteen bare messages | | {took} | {flushes} |");
    let bounds = one
        .iter()
        .zip(bare)
        .map(|(one, bare)| one.frozen + 1.3 * bare.0);
    let pairs = Pairs {
        ours: all.iter().map(|cut| cut.frozen).collect(),
        hand: bounds.collect(),
    };
    println!(
        "\nsixteen / (one + 1.3 x fifteen messages): {}",
        pairs.ratio()
    );
}

/// Compares with `lvcreate -s` of thin volumes in another pool of the same group.
fn by_lvm(fixture: &Fixture, ids: &[String], rounds: usize) {
    fixture.group.pool("lvm", "2G", "64k");
    let source = format!("{GROUP}/source");
    let pool = format!("{GROUP}/lvm");
    run(
        "lvcreate",
        &[
            "--type",
            "thin",
            "--virtualsize",
            "64M",
            "--thinpool",
            &pool,
            "--name",
            "source",
        ],
    );
    let snapshots = |count: usize| {
        for n in 0..count {
            run(
                "lvcreate",
                &["--snapshot", "--name", &format!("copy-{n}"), &source],
            );
        }
    };
    println!(
        "\n| | CreateSnapshot, or a group | lvcreate --snapshot, one after the other | lvcreate / driver |"
    );
    println!("|---|---|---|---|");
    for count in [1, MEMBERS] {
        let mut pairs = Pairs::default();
        for round in 0..=rounds.min(5) {
            let name = format!("lvm-{count}-{round}");
            let ours = cut(fixture, &ids[..count], &name, &[]).whole;
            let lvm = timed(|| snapshots(count)).1;
            for n in 0..count {
                run("lvremove", &["--yes", &format!("{GROUP}/copy-{n}")]);
            }
            if round > 0 {
                pairs.add(lvm, ours);
            }
        }
        let lvm = Spread::of(pairs.ours.iter().copied());
        let ours = Spread::of(pairs.hand.iter().copied());
        println!("| {count} | {ours} | {lvm} | {} |", pairs.ratio());
    }
    run("lvremove", &["--yes", &source]);
    fixture.group.remove_pool("lvm");
}

/// Writes one page to each of these blocks.
fn map_blocks(device: &Path, blocks: std::ops::Range<u64>) {
    let file = OpenOptions::new()
        .write(true)
        .custom_flags(libc::O_DIRECT)
        .open(device);
    let (file, page) = (file.expect("a device"), Page([7; 4096]));
    for block in blocks {
        file.write_all_at(&page.0, block * CHUNK).expect("room");
    }
    file.sync_all().expect("a flush");
}

/// Raw block volumes, because a file system takes blocks of its own.
pub fn blocks() {
    let rounds = given("ROUNDS", 12);
    let fixture = Fixture::new(false);
    let client = &fixture.client;
    let zero = |word: &str| run("lvchange", &["--zero", word, &format!("{GROUP}/thin")]);
    let mut volumes = Vec::new();
    for count in BLOCKS {
        let name = format!("blocks-{count}");
        let (staging, target) = (
            fixture.staging(&name),
            fixture.scratch.join(&format!("kubelet/{name}")),
        );
        let id = fixture.runtime.block_on(async {
            let id = client
                .create(&name, (count * CHUNK).max(1 << 20), block(), &[])
                .await;
            let id = id.expect("create");
            client.stage(&id, &staging, block()).await.expect("stage");
            let published = client.publish(&id, &staging, &target, block(), false);
            published.await.expect("publish");
            id
        });
        volumes.push((id, staging, target));
    }
    // The rest of each block would be written as well.
    zero("n");
    for ((_, _, target), count) in volumes.iter().zip(BLOCKS) {
        map_blocks(target, 0..count);
    }
    zero("y");
    assert!(
        succeeds("dmsetup", &["status", MAPPED]),
        "the pool is there"
    );
    println!(
        "\n{rounds} rounds; ms, medians and quartiles; then the ratio to one block in pairs\n"
    );
    println!("| blocks | frozen | the whole call | frozen / frozen with one block |");
    println!("|---|---|---|---|");
    let mut cuts: [Vec<Cut>; 3] = Default::default();
    for round in 0..=rounds {
        for turn in 0..BLOCKS.len() {
            let at = (round + turn) % BLOCKS.len();
            // A snapshot of a volume without new writes would be of an unchanged tree.
            map_blocks(&volumes[at].2, 0..1);
            let (id, name) = (&volumes[at].0, format!("blocks-{at}-{round}"));
            let class = [("consistency", "crash")];
            let one = cut(&fixture, std::slice::from_ref(id), &name, &class);
            if round > 0 {
                cuts[at].push(one);
            }
        }
    }
    for (at, count) in BLOCKS.iter().enumerate() {
        let frozen = |at: usize| cuts[at].iter().map(|cut| cut.frozen);
        let ratio = Spread::of(frozen(at).zip(frozen(0)).map(|(this, one)| this / one));
        let whole = Spread::of(cuts[at].iter().map(|cut| cut.whole));
        println!(
            "| {count} | {} | {whole} | {ratio} |",
            Spread::of(frozen(at))
        );
    }
    fixture.runtime.block_on(async {
        for (id, staging, target) in &volumes {
            client.unpublish(id, target).await.expect("unpublish");
            client.unstage(id, staging).await.expect("unstage");
            client.delete(id).await.expect("delete");
        }
    });
    fixture.end();
}
