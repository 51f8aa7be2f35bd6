//! What the real host reads of the metadata of a thin pool, compared with what the devices contain,
//! and with what thin-provisioning-tools read of the same metadata.

#![allow(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "a test panics where an expectation fails"
)]

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::PathBuf;

use nix::libc;
use slackwater::host::difference::Differences;
use slackwater::host::linux::LinuxHost;
use slackwater::host::{Effect, Extent, Host, Result, ThinMessage, ThinSnapshot, ThinTable};
use slackwater_testkit::guest::{self, in_guest};
use slackwater_testkit::run;

use crate::guest_thin_host::suspend;

const DISKS: [&str; 1] = ["pool:3G"];
const POOL: &str = "slackwater--vg-thin";
/// Where LVM shows the metadata and the pool.
const METADATA: &str = "/dev/mapper/slackwater--vg-thin_tmeta";
/// The size of a block, and of a thin device, most of which has no blocks.
const BLOCK: u64 = 64 << 10;
const BLOCKS: u64 = 1 << 22;

fn create_pool() -> LinuxHost {
    run("vgcreate", &["slackwater-vg", &guest::disk("pool")]);
    let size = ["--size=2G", "--poolmetadatasize=16M", "--chunksize=64k"];
    // Blocks are not zeroed, so a block of the disk takes no more of the guest's memory than is written.
    let named = ["--type=thin-pool", "--zero=n", "--name=thin"];
    run(
        "lvcreate",
        &[&size[..], &named[..], &["slackwater-vg"]].concat(),
    );
    LinuxHost::new(vec![PathBuf::from("/tmp")])
}

/// Creates a snapshot of a thin device.
fn snapshot(host: &LinuxHost, id: u32, origin: u32) -> Result<()> {
    let snapshot = ThinSnapshot {
        pool: POOL.into(),
        rdev: host.thin_pool(POOL)?.unwrap().rdev,
        id,
        origin,
    };
    let prepared = &host.prepare_thin_snapshot(snapshot)?;
    host.perform(&Effect::CreateThinSnapshot { prepared })
        .map(drop)
}

/// Numbers that look random, and are the same in each run.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        (self.0 >> 33) % end
    }
}

/// 4096 bytes, aligned for direct I/O.
#[repr(align(4096))]
struct Page([u8; 4096]);

/// An active thin device.
struct Thin<'a> {
    host: &'a LinuxHost,
    uuid: String,
    path: PathBuf,
    file: File,
}

impl Thin<'_> {
    fn activate(host: &LinuxHost, id: u32) -> Thin<'_> {
        let uuid = format!("SLACKWATER-default-{id}");
        let table = &ThinTable {
            pool: POOL.into(),
            id,
            bytes: BLOCKS * BLOCK,
        };
        let perform = |effect: &Effect<'_>| host.perform(effect).map(drop).unwrap();
        perform(&Effect::CreateMapped { uuid: &uuid });
        perform(&Effect::LoadTable {
            uuid: &uuid,
            table,
            read_only: false,
        });
        perform(&Effect::ResumeMapped { uuid: &uuid });
        let found = host.mapped_devices(POOL, "SLACKWATER-").unwrap();
        let path = found.into_iter().find(|it| it.uuid == uuid).unwrap();
        let path = path.device.path;
        let open = OpenOptions::new()
            .read(true)
            .write(true)
            .custom_flags(libc::O_DIRECT)
            .open(&path);
        Thin {
            host,
            uuid,
            path,
            file: open.unwrap(),
        }
    }

    /// Writes the first page of a block, with a content that no other write has.
    fn write(&self, block: u64, write: u64) {
        let mut page = Page([0; 4096]);
        page.0[..8].copy_from_slice(&(write + 1).to_le_bytes());
        self.file.write_all_at(&page.0, block * BLOCK).unwrap();
    }

    fn content(&self, block: u64) -> u64 {
        let mut page = Page([0; 4096]);
        self.file.read_exact_at(&mut page.0, block * BLOCK).unwrap();
        u64::from_le_bytes(*page.0.first_chunk().unwrap())
    }

    fn discard(&self, block: u64, blocks: u64) {
        let [offset, length] = [block, blocks].map(|it| (it * BLOCK).to_string());
        let path = self.path.to_str().unwrap();
        run("blkdiscard", &["-o", &offset, "-l", &length, path]);
    }

    fn snapshot(&self, id: u32) {
        self.file.sync_all().unwrap();
        let uuid = &self.uuid;
        suspend(uuid);
        snapshot(self.host, id, 1).unwrap();
        self.host.perform(&Effect::ResumeMapped { uuid }).unwrap();
    }

    /// All extents, read in parts.
    fn extents(&self) -> Vec<Extent> {
        let mut all = Vec::new();
        let mut from = 0;
        loop {
            let part = self.host.extents(&self.path, from, 3000).unwrap();
            let Some(last) = part.last() else { return all };
            from = last.logical + last.length;
            all.extend(part);
        }
    }
}

fn send(host: &LinuxHost, message: ThinMessage) {
    let pool = POOL;
    host.perform(&Effect::ThinMessage { pool, message })
        .unwrap();
}

/// Blocks, each with its block of data.
fn blocks(extents: &[Extent]) -> BTreeMap<u64, u64> {
    let each = |extent: &Extent| {
        let (first, data) = (extent.logical / BLOCK, extent.physical / BLOCK);
        (0..extent.length / BLOCK).map(move |i| (first + i, data + i))
    };
    extents.iter().flat_map(each).collect()
}

fn changed(one: &Thin<'_>, other: &Thin<'_>) -> BTreeSet<u64> {
    let [left, right] = [one, other].map(|thin| thin.extents().into_iter().map(Result::Ok));
    let found = Differences::new(left, right, 0, BLOCKS * BLOCK);
    let found = found.map(|range| range.unwrap());
    found
        .flat_map(|(start, end)| start / BLOCK..end / BLOCK)
        .collect()
}

/// The number of an attribute in an element of XML.
fn number(element: &str, name: &str) -> u64 {
    let (_, value) = element.split_once(&format!(" {name}=\"")).unwrap();
    value.split_once('"').unwrap().0.parse().unwrap()
}

/// Runs a tool on the snapshot of the metadata. Returns the elements of its XML.
fn elements(tool: &str, arguments: &[&str]) -> Vec<String> {
    let text = run(tool, &[arguments, &["-m", METADATA]].concat());
    let lines = text.lines().map(|line| line.trim().to_string());
    lines.filter(|line| line.starts_with('<')).collect()
}

/// The blocks of each device, as thin_dump reads them.
fn dumped() -> BTreeMap<u32, BTreeMap<u64, u64>> {
    let mut devices = BTreeMap::new();
    let mut id = 0;
    for line in elements("thin_dump", &[]) {
        let (first, data, length) = match line.split(' ').next() {
            Some("<device") => {
                id = number(&line, "dev_id") as u32;
                devices.insert(id, BTreeMap::new());
                continue;
            }
            Some("<single_mapping") => (
                number(&line, "origin_block"),
                number(&line, "data_block"),
                1,
            ),
            Some("<range_mapping") => (
                number(&line, "origin_begin"),
                number(&line, "data_begin"),
                number(&line, "length"),
            ),
            _ => continue,
        };
        let mapped = (0..length).map(|i| (first + i, data + i));
        devices.entry(id).or_default().extend(mapped);
    }
    devices
}

/// The blocks that differ, as thin_delta reads them.
fn delta(one: u32, other: u32) -> BTreeSet<u64> {
    let [one, other] = [one, other].map(|id| id.to_string());
    let found = elements("thin_delta", &["--snap1", &one, "--snap2", &other]);
    let differ = ["<different ", "<left_only ", "<right_only "];
    let found = found
        .iter()
        .filter(|line| differ.iter().any(|it| line.starts_with(it)));
    found
        .flat_map(|line| {
            let begin = number(line, "begin");
            begin..begin + number(line, "length")
        })
        .collect()
}

#[test]
fn devices_and_changed_blocks_are_those_of_the_contents_and_of_the_tools() {
    let test =
        "guest_metadata::devices_and_changed_blocks_are_those_of_the_contents_and_of_the_tools";
    in_guest(test, &DISKS, || {
        let host = create_pool();
        let random = &mut Numbers(7);
        let mut writes = 0..;
        send(&host, ThinMessage::CreateThin { id: 1 });
        let one = Thin::activate(&host, 1);
        // A tree of three levels, in which the kernel splits and merges nodes.
        let mut write = |thin: &Thin<'_>, block: u64| thin.write(block, writes.next().unwrap());
        for _ in 0..18_000 {
            write(&one, random.below(BLOCKS));
        }
        (1000..3000).for_each(|block| write(&one, block));
        for _ in 0..20 {
            one.discard(random.below(BLOCKS), BLOCKS / 100);
        }
        one.snapshot(2);
        let mapped = Vec::from_iter(blocks(&one.extents()).into_keys());
        for _ in 0..40 {
            write(&one, random.below(BLOCKS));
            write(&one, mapped[random.below(mapped.len() as u64) as usize]);
        }
        (2990..3010).for_each(|block| write(&one, block));
        one.discard(1500, 100);
        one.snapshot(3);
        let [two, three] = [2, 3].map(|id| Thin::activate(&host, id));
        write(&three, 5);
        write(&one, 1001);
        send(&host, ThinMessage::CreateThin { id: 900 });
        snapshot(&host, 4, 900).unwrap();
        send(&host, ThinMessage::Delete { id: 900 });
        for thin in [&one, &two, &three] {
            thin.file.sync_all().unwrap();
        }

        let found =
            [(1, &one), (2, &two), (3, &three)].map(|(id, thin)| (id, blocks(&thin.extents())));
        let pairs = [
            (1, &one, 2, &two),
            (2, &two, 3, &three),
            (3, &three, 1, &one),
        ];
        let changes = pairs.map(|(a, one, b, other)| (a, b, changed(one, other)));
        let devices = host.thin_devices(POOL).unwrap();
        assert!(
            found.iter().all(|(_, blocks)| blocks.len() > 126 * 126),
            "three levels"
        );

        run("dmsetup", &["message", POOL, "0", "reserve_metadata_snap"]);
        let dumped = dumped();
        let deltas = pairs.map(|(a, _, b, _)| delta(a, b));
        run("dmsetup", &["message", POOL, "0", "release_metadata_snap"]);
        let bytes = dumped
            .iter()
            .map(|(id, blocks)| (*id, blocks.len() as u64 * BLOCK));
        assert_eq!(devices, bytes.collect());
        assert_eq!(Vec::from_iter(devices.into_keys()), [1, 2, 3, 4]);
        for (id, blocks) in &found {
            assert!(*blocks == dumped[id], "device {id}");
        }
        for ((a, b, changed), delta) in changes.iter().zip(deltas) {
            assert_eq!(*changed, delta, "devices {a} and {b}");
            assert!(!changed.is_empty());
        }
        // Content that is not in a block is 0.
        let all: BTreeSet<u64> = found
            .iter()
            .flat_map(|(_, blocks)| blocks.keys())
            .copied()
            .collect();
        for ((_, one, _, other), (a, b, changed)) in pairs.into_iter().zip(&changes) {
            let differ = |block: &u64| one.content(*block) != other.content(*block);
            let differ: BTreeSet<u64> = all.iter().copied().filter(|block| differ(block)).collect();
            assert_eq!(*changed, differ, "devices {a} and {b}");
        }
    });
}
