//! A clone that is made ahead and completed while writers are paused is compared byte by byte,
//! under writers of every kind.
//!
//! Each writer holds a read lock during a write, and the cut takes the write lock: then no write is
//! in flight at the block device, as during a freeze. With SLACKWATER_SOAK=1, the test runs
//! thousands of rounds.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::RwLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use nix::fcntl::{FallocateFlags, fallocate};
use nix::libc;
use nix::unistd::syncfs;
use slackwater::host::{Done, Effect, Host, Known};
use slackwater::model::FsType;
use slackwater::model::size::MIB;

use super::scratch::{Image, Scratch, eventually, run};

const BLOCK: u64 = 4096;
const WRITERS: u64 = 3;

/// The duration and the size: a small image, since most of a round is the comparison.
#[derive(Clone, Copy)]
struct Length {
    rounds: u32,
    size: u64,
}

const SHORT: Length = Length {
    rounds: 150,
    size: 2 * MIB,
};
/// Also with more than one piece of the clone ahead.
const SOAK: Length = Length {
    rounds: 2500,
    size: 10 * MIB,
};

/// The number of rounds between two commits of the pool.
const COMMIT: u32 = 8;

/// The backing file system of a pool.
#[derive(Clone, Copy, Debug)]
struct BackingFs {
    fs: FsType,
    /// As on new btrfs pools; pools of an earlier release differ.
    in_place: bool,
}

const XFS: BackingFs = BackingFs {
    fs: FsType::Xfs,
    in_place: false,
};
const BTRFS: BackingFs = BackingFs {
    fs: FsType::Btrfs,
    in_place: true,
};
const EARLIER_BTRFS: BackingFs = BackingFs {
    in_place: false,
    ..BTRFS
};

/// Where pages are cached between the writer and the disk.
#[derive(Clone, Copy, Debug)]
struct Way {
    /// The loop device bypasses the pool's page cache.
    direct_loop: bool,
    /// The writers bypass the device's page cache.
    direct_device: bool,
}

/// A page at which direct writes may begin.
#[derive(Clone, Copy)]
#[repr(C, align(4096))]
struct Page([u8; BLOCK as usize]);

/// Enough for sixteen blocks.
struct Pages(Box<[Page; 16]>);

impl Pages {
    fn new() -> Pages {
        Pages(Box::new([Page([0; BLOCK as usize]); 16]))
    }

    /// Random words at the beginning, within and at the end of each block, which is all that a
    /// comparison needs. The buffer stays aligned, and is written block by block.
    fn fill(&mut self, random: &mut Random) {
        for Page(page) in self.0.iter_mut() {
            for at in [0, 2000, 4088] {
                page[at..at + 8].copy_from_slice(&random.next().to_ne_bytes());
            }
        }
    }
}

/// xorshift: the same writes in the same order for a seed, whatever their interleaving.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }
}

/// The device that the writers write to.
struct Stage<'a> {
    scratch: &'a Scratch,
    image: &'a Image,
    number: u32,
    source: File,
    device: File,
    gate: RwLock<()>,
    /// The current and the future size of the device in bytes.
    size: AtomicU64,
    most: u64,
    stop: AtomicBool,
    acts: AtomicU64,
    /// Rounds whose copy failed verification, and was reported as such.
    disagreed: AtomicU64,
}

impl Stage<'_> {
    fn write(&self, mut random: Random) {
        let mut pages = Pages::new();
        while !self.stop.load(Ordering::Relaxed) {
            let open = self.gate.read().unwrap();
            self.act(&mut random, &mut pages);
            drop(open);
            self.acts.fetch_add(1, Ordering::Relaxed);
            if random.below(8) == 0 {
                std::thread::sleep(Duration::from_micros(random.below(200)));
            }
        }
    }

    fn act(&self, random: &mut Random, pages: &mut Pages) {
        let blocks = self.size.load(Ordering::Relaxed) / BLOCK;
        let count = match random.below(4) {
            0 => 1 + random.below(16),
            _ => 1,
        };
        // A third of the writes goes to the same few blocks: the first write unshares them, later
        // ones rewrite them in place.
        let first = match random.below(3) {
            0 => random.below(64),
            _ => random.below(blocks - count),
        };
        let (offset, bytes) = (first * BLOCK, count * BLOCK);
        let range = |file: &File, mode| fallocate(file, mode, offset as i64, bytes as i64).unwrap();
        let keep = FallocateFlags::FALLOC_FL_KEEP_SIZE;
        match random.below(100) {
            0..=85 => {
                pages.fill(random);
                for n in 0..count {
                    let Page(page) = &pages.0[n as usize];
                    self.device.write_all_at(page, offset + n * BLOCK).unwrap();
                }
            }
            // The loop device turns both into a hole and reserved blocks, as it does for a discard
            // and for zeroes.
            86..=91 => range(&self.device, FallocateFlags::FALLOC_FL_PUNCH_HOLE | keep),
            92..=95 => range(&self.device, FallocateFlags::FALLOC_FL_ZERO_RANGE | keep),
            96 => self.device.sync_all().unwrap(),
            97 => self.source.sync_data().unwrap(),
            98 => range(&self.source, keep),
            _ => self.lengthen(),
        }
    }

    /// Lengthens the image and the device.
    fn lengthen(&self) {
        let size = self.size.load(Ordering::Relaxed);
        if size >= self.most {
            return;
        }
        self.scratch.done(&Effect::Allocate {
            path: &self.image.path,
            size: size + 64 * 1024,
            reserve: size.is_multiple_of(128 * 1024),
        });
        self.scratch.done(&Effect::ResizeLoop {
            number: self.number,
        });
        self.size.fetch_max(size + 64 * 1024, Ordering::Relaxed);
    }

    /// Makes one clone ahead. Returns the number of blocks that differ from the source in the cut,
    /// with or without completing the clone there.
    fn round(&self, random: &mut Random, copy: &Path, way: Way, corrects: bool) -> usize {
        let (source, target) = (self.image.path.as_path(), copy);
        let pause = |most: u64, random: &mut Random| {
            std::thread::sleep(Duration::from_micros(random.below(most)));
        };
        fs::write(target, b"").unwrap();
        let known = Known::default();
        let rest = || {
            self.scratch.done(&Effect::CloneDelta {
                source,
                target,
                known: &known,
            })
        };
        self.scratch
            .done(&Effect::ClonePreFreeze { source, target });
        let mut acts = self.acts.load(Ordering::Relaxed);
        pause(3000, random);
        for _ in 0..random.below(4) {
            rest();
            acts = self.acts.load(Ordering::Relaxed);
            pause(1000, random);
        }
        // On a slow machine, the writers may not have run yet.
        eventually("writers that write", || {
            self.acts.load(Ordering::Relaxed) > acts + WRITERS
        });
        known.seal();
        let closed = self.gate.write().unwrap();
        if !way.direct_device {
            // As a freeze does.
            self.device.sync_all().unwrap();
        }
        if corrects {
            let done = rest();
            assert!(matches!(done, Done::Cloned(_)), "{done:?}");
        }
        // The same result as the comparison of bytes, except for blocks that were moved back.
        let agrees = self.scratch.host.verify_copy(target, &known).unwrap();
        let (ours, theirs) = (fs::read(source).unwrap(), fs::read(target).unwrap());
        drop(closed);
        if corrects && !agrees {
            self.disagreed.fetch_add(1, Ordering::Relaxed);
            return 0;
        }
        // Compares the whole first, because block by block takes long without optimization.
        if ours == theirs {
            return 0;
        }
        let differ = ours
            .chunks(BLOCK as usize)
            .zip(theirs.chunks(BLOCK as usize))
            .filter(|(ours, theirs)| ours != theirs)
            .count();
        differ + ours.len().abs_diff(theirs.len())
    }
}

/// Attaches with the host's own code, also if buffered, because it makes sure that the device has
/// no discard limit of another user.
/// left on the device.
fn attach(scratch: &Scratch, image: &Image, direct: bool) -> u32 {
    let number = scratch.attach_as(image, false, false).number;
    if !direct {
        run(
            "losetup",
            &["--direct-io=off", &format!("/dev/loop{number}")],
        );
    }
    let loops = scratch.host.loops().unwrap();
    let status = loops.iter().find(|status| status.number == number).unwrap();
    assert_eq!(status.direct_io, direct);
    number
}

/// The number of rounds in which the copy differed in the cut.
fn bad_rounds(below: BackingFs, way: Way, corrects: bool, length: Length) -> u32 {
    let Length { rounds, size } = length;
    let BackingFs { fs, in_place } = below;
    let scratch = Scratch::on(fs);
    if in_place {
        scratch.done(&Effect::WriteInPlace {
            path: &scratch.pool,
        });
    }
    let image = scratch.image("source", size);
    // Half of it is reserved, the other half is a hole.
    let source = OpenOptions::new()
        .read(true)
        .write(true)
        .open(&image.path)
        .unwrap();
    let keep = FallocateFlags::FALLOC_FL_KEEP_SIZE;
    fallocate(&source, keep, 0, (size / 2) as i64).unwrap();
    let number = attach(&scratch, &image, way.direct_loop);
    let node = format!("/dev/loop{number}");
    let device = OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(if way.direct_device { libc::O_DIRECT } else { 0 })
        .open(&node)
        .unwrap();
    let stage = Stage {
        scratch: &scratch,
        image: &image,
        number,
        source,
        device,
        gate: RwLock::new(()),
        size: AtomicU64::new(size),
        most: 2 * size,
        stop: AtomicBool::new(false),
        acts: AtomicU64::new(0),
        disagreed: AtomicU64::new(0),
    };
    let copy = scratch.pool.join("copy");
    let bad = std::thread::scope(|scope| {
        for n in 1..=WRITERS {
            let stage = &stage;
            scope.spawn(move || stage.write(Random(n.wrapping_mul(0x9e37_79b9_7f4a_7c15))));
        }
        let _stop = Stop(&stage.stop);
        let mut random = Random(7);
        let pool = File::open(&scratch.pool).unwrap();
        (0..rounds)
            .filter(|round| {
                // btrfs frees blocks when it commits. By itself it commits so late that the pool
                // can be full of deleted data.
                if round % COMMIT == 0 {
                    syncfs(&pool).unwrap();
                }
                stage.round(&mut random, &copy, way, corrects) > 0
            })
            .count()
    });
    let acts = stage.acts.load(Ordering::Relaxed);
    let disagreed = stage.disagreed.load(Ordering::Relaxed);
    println!(
        "{below:?} {way:?}: {bad} of {rounds} rounds differ, {disagreed} were refused, {acts} writes"
    );
    assert!(
        disagreed * 10 <= u64::from(rounds),
        "a cut is hardly ever thrown away"
    );
    assert!(acts > u64::from(rounds), "{acts} acts are no load");
    bad as u32
}

/// Stops the writers, also when a round panics.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn every_copy_is_exact(below: BackingFs, direct_loop: bool) {
    let soak = std::env::var_os("SLACKWATER_SOAK").is_some_and(|value| value == "1");
    let length = if soak { SOAK } else { SHORT };
    for direct_device in [true, false] {
        let way = Way {
            direct_loop,
            direct_device,
        };
        let bad = bad_rounds(below, way, true, length);
        assert_eq!(bad, 0, "{below:?} {way:?}");
    }
}

#[test]
fn on_xfs_through_a_direct_loop_every_copy_is_exact() {
    every_copy_is_exact(XFS, true);
}

#[test]
fn on_xfs_through_a_buffered_loop_every_copy_is_exact() {
    every_copy_is_exact(XFS, false);
}

#[test]
fn on_btrfs_through_a_direct_loop_every_copy_is_exact() {
    every_copy_is_exact(BTRFS, true);
}

#[test]
fn on_btrfs_through_a_buffered_loop_every_copy_is_exact() {
    every_copy_is_exact(BTRFS, false);
}

#[test]
fn on_btrfs_of_an_earlier_release_through_a_direct_loop_every_copy_is_exact() {
    every_copy_is_exact(EARLIER_BTRFS, true);
}

#[test]
fn on_btrfs_of_an_earlier_release_through_a_buffered_loop_every_copy_is_exact() {
    every_copy_is_exact(EARLIER_BTRFS, false);
}

/// Proof that the tests above detect a violation.
#[test]
fn without_completion_in_the_cut_copies_differ() {
    for below in [XFS, BTRFS] {
        let way = Way {
            direct_loop: true,
            direct_device: true,
        };
        let length = Length {
            rounds: 20,
            ..SHORT
        };
        let bad = bad_rounds(below, way, false, length);
        assert!(bad > 5, "{bad} of 20 rounds on {below:?}");
    }
}
