//! A disk with a volatile cache beneath the volume group: what was answered is there after a power
//! cut, also if the disk loses each write that was not flushed. dm-log-writes records the order of
//! writes and flushes, from which this test rebuilds the disk as of several moments.

#![allow(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "a test panics where an expectation fails, and writes files"
)]

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::FileExt;

use slackwater_testkit::guest::{self, in_guest, rounds};
use slackwater_testkit::{Scratch, Server, Sweep, mount, run};

use crate::guest_block_groups::file_pool;
use crate::guest_lvm::{
    POOL, create_pool, create_pool_on, created, end, end_pool, release, runtime,
};
use crate::guest_power::{self, LOGGED, Ledger};

const DISKS: [&str; 3] = ["pool:1G", "log:2G", "state:64M"];
const CONFIGURATION: &str = "/etc/lvm/lvmlocal.conf";
const ONLY_LOGGED: &str =
    "devices {\n global_filter = [ \"a|^/dev/mapper/pv-logged$|\", \"r|.*|\" ]\n}\n";
/// drivers/md/dm-log-writes.c: the flags of an entry.
const FLUSH: u64 = 1 << 0;
const FUA: u64 = 1 << 1;
const DISCARD: u64 = 1 << 2;
const MARK: u64 = 1 << 3;
const SECTOR: u64 = 512;

/// An entry of the log.
struct Entry {
    /// Bytes from the start of the disk.
    to: u64,
    length: u64,
    flags: u64,
    /// Where the log has what was written, or the text of a mark.
    data: u64,
}

/// The entries of a log: a superblock, and then each entry and its data in whole sectors.
fn entries(log: &File) -> Vec<Entry> {
    let numbers = |at: u64| {
        let mut bytes = [0; 32];
        log.read_exact_at(&mut bytes, at).unwrap();
        [0, 8, 16, 24].map(|n| u64::from_le_bytes(bytes[n..n + 8].try_into().unwrap()))
    };
    let [magic, version, count, sector] = numbers(0);
    assert_eq!((magic, version), (0x6a_7366_7773_6872, 1));
    assert_eq!(sector & u64::from(u32::MAX), SECTOR);
    let mut at = SECTOR;
    let next = |_| {
        let [to, sectors, flags, _] = numbers(at);
        let has_data = flags & (DISCARD | MARK) == 0;
        let data = if flags & MARK == 0 {
            at + SECTOR
        } else {
            at + 32
        };
        let length = sectors * SECTOR;
        at += SECTOR + if has_data { length } else { 0 };
        let to = to * SECTOR;
        Entry {
            to,
            length,
            flags,
            data,
        }
    };
    (0..count).map(next).collect()
}

/// What a disk has lost of the writes after its last flush.
#[derive(Clone, Copy, Debug)]
enum Lost {
    Nothing,
    Half,
    Everything,
}

/// Makes the disk what it was after these entries. Returns the number of marks among them.
fn rebuild(disk: &str, log: &File, entries: &[Entry], lost: Lost) -> usize {
    run("blkdiscard", &["--force", disk]);
    let disk = OpenOptions::new().write(true).open(disk).unwrap();
    let flushed = entries.iter().rposition(|entry| entry.flags & FLUSH != 0);
    let mut bytes = Vec::new();
    for (n, entry) in entries.iter().enumerate() {
        let is_safe = flushed.is_some_and(|flushed| n < flushed) || entry.flags & FUA != 0;
        let is_lost = match lost {
            Lost::Nothing => false,
            Lost::Half => n * 389 % 2 == 0,
            Lost::Everything => true,
        };
        if entry.flags & MARK != 0 || is_lost && !is_safe {
            continue;
        }
        bytes.resize(entry.length as usize, 0);
        match entry.flags & DISCARD {
            0 => log.read_exact_at(&mut bytes, entry.data).unwrap(),
            _ => bytes.fill(0),
        }
        disk.write_all_at(&bytes, entry.to).unwrap();
    }
    disk.sync_all().unwrap();
    entries
        .iter()
        .filter(|entry| entry.flags & MARK != 0)
        .count()
}

#[test]
fn what_was_answered_is_there_after_a_power_cut_of_a_disk_that_loses_unflushed_writes() {
    let test = "guest_flush::what_was_answered_is_there_after_a_power_cut_of_a_disk_that_loses_unflushed_writes";
    in_guest(test, &DISKS, || {
        let disks = ["pool", "log"].map(guest::disk);
        let sectors = run("blockdev", &["--getsz", &disks[0]]);
        let table = format!("0 {} log-writes {}", sectors.trim(), disks.join(" "));
        let name = LOGGED.strip_prefix("/dev/mapper/").unwrap();
        run("dmsetup", &["create", name, "--table", &table]);
        // The disk has the same label.
        fs::write(CONFIGURATION, ONLY_LOGGED).unwrap();
        guest_power::prepare();
        create_pool_on(LOGGED, "640M", "8M");
        let (scratch, server) = guest_power::serve();
        let ledger = Ledger::new("ledger");
        runtime().block_on(async {
            let client = server.client();
            let rounds = slackwater_testkit::rounds(2, 20);
            guest_power::load(&scratch, &client, &ledger, rounds).await;
        });
        end(server);
        release();
        run("vgchange", &["--activate", "n", "slackwater-vg"]);
        run("dmsetup", &["remove", name]);
        fs::remove_file(CONFIGURATION).unwrap();

        let log = File::open(&disks[1]).unwrap();
        let entries = entries(&log);
        let marks = (0..entries.len()).filter(|n| entries[*n].flags & MARK != 0);
        let marks: Vec<usize> = marks.collect();
        let points = rounds(3, 400);
        let span = marks[marks.len() - 1] - marks[0];
        let part = Sweep::requested();
        for point in (1..=points).skip(part.n).step_by(part.of) {
            let end = marks[0] + span * point / points;
            let lost = [Lost::Everything, Lost::Half, Lost::Nothing][point % 3];
            let known = rebuild(&disks[0], &log, &entries[..=end], lost);
            println!(
                "entry {end} of {}, {lost:?} lost, {known} marks",
                entries.len()
            );
            run("vgchange", &["--activate", "y", "slackwater-vg"]);
            let (scratch, server) = guest_power::serve();
            let ledger = ledger.first(known, &format!("ledger-{point}"));
            runtime().block_on(async {
                guest_power::check(&scratch, &server.client(), &ledger).await;
            });
            end_pool(server);
        }
    });
}

/// Flushes that a disk of the guest has completed (Documentation/block/stat.rst).
fn flushes(disk: &str) -> usize {
    let disk = guest::disk(disk).replace("/dev/", "/sys/block/");
    let line = fs::read_to_string(disk + "/stat").unwrap();
    line.split_whitespace().nth(15).unwrap().parse().unwrap()
}

/// The flushes of a disk for a group of mounted volumes.
#[derive(Clone, Copy, Debug)]
struct Flushes {
    creation: usize,
    deletion: usize,
}

/// The flushes of a group of 4 members and of one of 12.
async fn flushes_of_groups(scratch: &Scratch, server: &Server, disk: &str) -> [Flushes; 2] {
    let client = server.client();
    let mut volumes = Vec::new();
    for n in 0..12 {
        let name = format!("v{n}");
        let volume = created(scratch, &client, &name, mount("ext4")).await;
        volume.up(&client).await;
        volumes.push(volume);
    }
    let ids: Vec<String> = volumes.iter().map(|volume| volume.id.clone()).collect();
    let mut costs = Vec::new();
    for count in [4, 12] {
        // Journals that are committed while a call runs, and a cut that is repeated, only add flushes.
        let mut least: Option<Flushes> = None;
        for round in 0..4 {
            nix::unistd::sync();
            let before = flushes(disk);
            let name = format!("g{count}-{round}");
            let group = client.group(&name, &ids[..count], &[]).await.unwrap();
            nix::unistd::sync();
            let created = flushes(disk);
            client.delete_all_of(&group).await;
            let (creation, deletion) = (created - before, flushes(disk) - created);
            least = Some(Flushes {
                creation: least.map_or(creation, |least| least.creation.min(creation)),
                deletion: least.map_or(deletion, |least| least.deletion.min(deletion)),
            });
        }
        costs.extend(least);
    }
    println!("flushes of a group of 4 and of 12 on {disk}: {costs:?}");
    for volume in volumes {
        volume.down(&client).await;
        client.delete(&volume.id).await.unwrap();
    }
    costs.try_into().unwrap()
}

/// Each member of a group has a freeze, write-backs, a message to the pool and a thaw of its own, which
/// are about 12 flushes, and its deletion a message, which is 3. The records of a member are at least
/// another 12, and its deletion 6, unless those of all members are written together.
#[test]
fn a_further_member_of_a_group_costs_the_flushes_of_its_freeze_and_its_messages() {
    let test =
        "guest_flush::a_further_member_of_a_group_costs_the_flushes_of_its_freeze_and_its_messages";
    in_guest(test, &["pool:1G"], || {
        create_pool("640M");
        let scratch = Scratch::new();
        let server = Server::start(&scratch, &[POOL]);
        let [few, many] = runtime().block_on(flushes_of_groups(&scratch, &server, "pool"));
        assert!(many.creation <= few.creation + 8 * 20, "{few:?}, {many:?}");
        assert!(many.deletion <= few.deletion + 8 * 6, "{few:?}, {many:?}");
        end_pool(server);
    });
}

/// The images of all members are written back and shared by the same file system, which needs no flush
/// of the disk for each of them beyond what its freeze needs.
#[test]
fn a_further_member_of_a_group_on_a_file_pool_costs_the_flushes_of_its_freeze() {
    let test =
        "guest_flush::a_further_member_of_a_group_on_a_file_pool_costs_the_flushes_of_its_freeze";
    in_guest(test, &["files:2G"], || {
        let scratch = Scratch::new();
        let server = Server::start(&scratch, &[&file_pool(&scratch)]);
        let [few, many] = runtime().block_on(flushes_of_groups(&scratch, &server, "files"));
        assert!(many.creation <= few.creation + 8 * 20, "{few:?}, {many:?}");
        assert!(many.deletion <= few.deletion + 8 * 3, "{few:?}, {many:?}");
        end(server);
    });
}
