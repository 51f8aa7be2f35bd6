//! Clones, copies and extent maps of images on pools with shared blocks, and the detection of such
//! pools.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use nix::fcntl::{FallocateFlags, fallocate};
use slackwater::host::{Done, Effect, Extent, Host, Known};
use slackwater::model::FsType;
use slackwater::model::size::MIB;

use super::scratch::{Image, Scratch, run, text, try_run};

const SHARING: [FsType; 2] = [FsType::Xfs, FsType::Btrfs];
const BLOCK: u64 = 4096;

/// Creates an empty file on the pool.
fn empty(scratch: &Scratch, name: &str) -> PathBuf {
    let path = scratch.pool.join(name);
    fs::write(&path, b"").unwrap();
    path
}

fn open(path: &Path) -> File {
    OpenOptions::new()
        .read(true)
        .write(true)
        .open(path)
        .unwrap()
}

fn write(path: &Path, offset: u64, bytes: u64, with: u8) {
    open(path)
        .write_all_at(&vec![with; bytes as usize], offset)
        .unwrap();
}

fn change(path: &Path, mode: FallocateFlags, offset: u64, bytes: u64) {
    fallocate(open(path), mode, offset as i64, bytes as i64).unwrap();
}

fn punch(path: &Path, offset: u64, bytes: u64) {
    let mode = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
    change(path, mode, offset, bytes);
}

fn reserve(path: &Path, offset: u64, bytes: u64) {
    change(path, FallocateFlags::FALLOC_FL_KEEP_SIZE, offset, bytes);
}

/// Creates an image with data, holes, reserved blocks, and an end within a block.
fn mixed_image(scratch: &Scratch, name: &str) -> Image {
    let image = scratch.image(name, 40 * MIB);
    let path = &image.path;
    reserve(path, 30 * MIB, 20 * MIB);
    for n in 0..200 {
        write(path, n * 3 * BLOCK, BLOCK, n as u8 + 1);
    }
    write(path, 8 * MIB, 9 * MIB, 7);
    punch(path, 12 * MIB, MIB);
    write(path, 31 * MIB, MIB, 8);
    write(path, 40 * MIB, 123, 9);
    image
}

fn assert_same(left: &Path, right: &Path) {
    let (left, right) = (fs::read(left).unwrap(), fs::read(right).unwrap());
    assert_eq!(left.len(), right.len());
    // Compares the whole first, because byte by byte takes long without optimization.
    if left != right {
        let differs = left
            .iter()
            .zip(&right)
            .position(|(left, right)| left != right);
        panic!("byte {differs:?} differs");
    }
}

fn cloned(done: Done) -> u64 {
    match done {
        Done::Cloned(count) => count,
        Done::Plain | Done::Loop(_) | Done::Checked(_) | Done::Session(_) => {
            panic!("a clone returns the number of cloned bytes")
        }
    }
}

fn rest(scratch: &Scratch, source: &Path, target: &Path) -> u64 {
    rest_with(scratch, source, target, &Known::default())
}

fn rest_with(scratch: &Scratch, source: &Path, target: &Path, known: &Known) -> u64 {
    cloned(scratch.done(&Effect::CloneDelta {
        source,
        target,
        known,
    }))
}

fn map(scratch: &Scratch, path: &Path) -> Vec<Extent> {
    scratch.host.extents(path, 0, 100_000).unwrap()
}

/// Addresses of data, block by block.
fn blocks(scratch: &Scratch, path: &Path) -> Vec<(u64, u64)> {
    map(scratch, path)
        .iter()
        .filter(|run| !run.unwritten)
        .flat_map(|run| {
            let (logical, physical) = (run.logical, run.physical);
            (0..run.length.div_ceil(BLOCK))
                .map(move |n| (logical + n * BLOCK, physical + n * BLOCK))
        })
        .collect()
}

#[test]
fn a_whole_clone_equals_the_source_and_keeps_nothing_of_the_target() {
    for fs in SHARING {
        let scratch = Scratch::on(fs);
        let source = mixed_image(&scratch, "source").path;
        let target = empty(&scratch, "target");
        for before in [0, MIB, 60 * MIB] {
            write(&target, 0, before, 0xff);
            let effect = Effect::CloneWhole {
                source: &source,
                target: &target,
            };
            let extents = cloned(scratch.done(&effect));
            assert!(extents >= 203, "{extents} on {fs}");
            assert_eq!(extents, scratch.host.extent_count(&target).unwrap());
            assert_same(&source, &target);
        }
        assert_eq!(blocks(&scratch, &source), blocks(&scratch, &target), "{fs}");
        // They are two independent files nevertheless.
        write(&target, 0, BLOCK, 0xee);
        assert_eq!(fs::read(&source).unwrap()[0], 1);
    }
}

#[test]
fn a_clone_ahead_of_an_idle_image_leaves_no_remainder() {
    for fs in SHARING {
        let scratch = Scratch::on(fs);
        let source = mixed_image(&scratch, "source").path;
        let target = empty(&scratch, "target");
        write(&target, 0, 60 * MIB, 0xff);
        let effect = Effect::ClonePreFreeze {
            source: &source,
            target: &target,
        };
        assert!(cloned(scratch.done(&effect)) >= 200);
        // Also if the source has reserved blocks, for which the copy has holes.
        assert_eq!(rest(&scratch, &source, &target), 0, "{fs}");
        assert_same(&source, &target);
        let reserved = map(&scratch, &source).iter().any(|run| run.unwritten);
        assert!(
            reserved,
            "the image has no reserved blocks, so the test proves nothing"
        );
    }
}

#[test]
fn the_remainder_consists_of_changes_on_either_side() {
    for fs in SHARING {
        let scratch = Scratch::on(fs);
        let source = mixed_image(&scratch, "source").path;
        let target = empty(&scratch, "target");
        let ahead = Effect::ClonePreFreeze {
            source: &source,
            target: &target,
        };
        let changes: [(&str, &dyn Fn()); 9] = [
            ("overwritten", &|| write(&source, 9 * MIB, 3 * BLOCK, 70)),
            ("again, in place", &|| {
                write(&source, 9 * MIB, 2 * BLOCK, 71);
            }),
            ("into a hole", &|| write(&source, 20 * MIB, BLOCK, 72)),
            ("into reserved blocks", &|| {
                write(&source, 35 * MIB, 9 * BLOCK, 73);
            }),
            ("punched", &|| punch(&source, 8 * MIB, 16 * BLOCK)),
            ("reserved again", &|| reserve(&source, 8 * MIB, 8 * BLOCK)),
            ("the last bytes", &|| write(&source, 40 * MIB, 100, 74)),
            ("longer", &|| write(&source, 44 * MIB, 77, 75)),
            ("the copy", &|| write(&target, 5 * MIB, BLOCK, 76)),
        ];
        scratch.done(&ahead);
        for (what, change) in changes {
            change();
            let ranges = rest(&scratch, &source, &target);
            match what {
                "reserved again" => assert_eq!(ranges, 0, "{what} on {fs}"),
                // The block that was the last is zeroed to its end in the copy, so it is no longer
                // shared.
                "longer" => assert!((1..=2).contains(&ranges), "{ranges} on {fs}"),
                _ => assert_eq!(ranges, 1, "{what} on {fs}"),
            }
            assert_same(&source, &target);
            assert_eq!(rest(&scratch, &source, &target), 0, "{what} on {fs}");
        }
        scratch.done(&Effect::Truncate {
            path: &source,
            size: 10 * MIB,
        });
        rest(&scratch, &source, &target);
        assert_same(&source, &target);
    }
}

/// A map of several pages. The copy's map is read ahead of the changes in it.
#[test]
fn a_long_map_is_compared_to_its_end() {
    for fs in SHARING {
        let scratch = Scratch::on(fs);
        let runs = 9000;
        let source = scratch.image("source", (2 * runs + 1) * BLOCK).path;
        for n in 0..runs {
            write(&source, 2 * n * BLOCK, BLOCK, n as u8);
        }
        let target = empty(&scratch, "target");
        scratch.done(&Effect::ClonePreFreeze {
            source: &source,
            target: &target,
        });
        assert!(
            scratch.host.extent_count(&source).unwrap() > 8192,
            "otherwise the map is short"
        );
        assert_eq!(rest(&scratch, &source, &target), 0, "{fs}");
        for turn in 1..4 {
            let step = 7 * turn as usize;
            for n in (0..runs).step_by(step) {
                match n % 3 {
                    0 => write(&source, 2 * n * BLOCK, BLOCK, turn as u8),
                    1 => punch(&source, 2 * n * BLOCK, BLOCK),
                    _ => write(&source, (2 * n + 1) * BLOCK, BLOCK, turn as u8),
                }
            }
            write(&source, 2 * runs * BLOCK, BLOCK, turn as u8);
            assert!(rest(&scratch, &source, &target) > 300, "{fs}");
            assert_same(&source, &target);
            assert_eq!(rest(&scratch, &source, &target), 0, "{fs}");
        }
    }
}

#[test]
fn an_image_is_never_cloned_onto_itself() {
    let scratch = Scratch::new();
    let source = &mixed_image(&scratch, "source").path;
    let before = fs::read(source).unwrap();
    let target = source;
    for effect in [
        Effect::CloneWhole { source, target },
        Effect::ClonePreFreeze { source, target },
        Effect::CloneDelta {
            source,
            target,
            known: &Known::default(),
        },
    ] {
        let error_text = scratch.refused(&effect);
        assert!(error_text.contains("are the same file"), "{error_text}");
    }
    assert!(fs::read(source).unwrap() == before);
}

#[test]
fn a_map_read_in_pages_equals_the_whole_map() {
    for fs in SHARING {
        let scratch = Scratch::on(fs);
        let source = mixed_image(&scratch, "source").path;
        let whole = map(&scratch, &source);
        let mut pages = Vec::new();
        let mut from = 0;
        loop {
            let page = scratch.host.extents(&source, from, 7).unwrap();
            let Some(last) = page.last() else { break };
            from = last.logical + last.length;
            pages.extend(page);
        }
        assert_eq!(pages, whole, "{fs}");
        assert!(
            whole
                .windows(2)
                .all(|pair| pair[0].logical + pair[0].length <= pair[1].logical)
        );
        // A map that begins within a run contains that run.
        let run = whole.iter().find(|run| run.length >= MIB).unwrap();
        let page = scratch
            .host
            .extents(&source, run.logical + BLOCK, 1)
            .unwrap();
        assert_eq!(page[0].logical + page[0].length, run.logical + run.length);
    }
}

#[test]
fn unshared_blocks_are_the_images_own_and_holes_stay_holes() {
    let scratch = Scratch::new();
    let source = mixed_image(&scratch, "source").path;
    let target = empty(&scratch, "target");
    scratch.done(&Effect::CloneWhole {
        source: &source,
        target: &target,
    });
    let size = fs::metadata(&source).unwrap().len();
    let before: u64 = map(&scratch, &source).iter().map(|run| run.length).sum();
    scratch.done(&Effect::Unshare {
        path: &source,
        offset: 0,
        length: size,
    });
    assert_same(&source, &target);
    let theirs: std::collections::BTreeSet<_> = blocks(&scratch, &target)
        .into_iter()
        .map(|(_, physical)| physical)
        .collect();
    let shared = blocks(&scratch, &source)
        .into_iter()
        .filter(|(_, physical)| theirs.contains(physical))
        .count();
    assert_eq!(shared, 0);
    let allocated = |path| -> u64 { map(&scratch, path).iter().map(|run| run.length).sum() };
    assert_eq!(allocated(&source), before);
    assert!(before < size, "{before} of {size}: it has holes");
    // A file that was emptied in between takes no blocks.
    let (path, size) = (&*target, 0);
    scratch.done(&Effect::Truncate { path, size });
    let effect = Effect::Unshare {
        path,
        offset: 0,
        length: MIB,
    };
    scratch.done(&effect);
    assert_eq!(allocated(&target), 0);
}

#[test]
fn unsharing_on_a_full_pool_fails_cleanly() {
    let scratch = Scratch::sized(FsType::Xfs, 320 * MIB);
    let source = scratch.image("source", 100 * MIB).path;
    write(&source, 0, 100 * MIB, 5);
    let target = empty(&scratch, "target");
    scratch.done(&Effect::CloneWhole {
        source: &source,
        target: &target,
    });
    let room = scratch.host.space(&scratch.pool).unwrap().available;
    let filler = scratch.image("filler", MIB).path;
    reserve(&filler, 0, room - 20 * MIB);
    let effect = Effect::Unshare {
        path: &source,
        offset: 0,
        length: 100 * MIB,
    };
    let error = scratch.perform(&effect).unwrap_err();
    assert!(error.is_no_space(), "{error:?}");
    assert_same(&source, &target);
    scratch.done(&Effect::RemoveFile { path: &filler });
    // xfs frees the blocks of a removed file a little later.
    while scratch.host.space(&scratch.pool).unwrap().available < room - 20 * MIB {
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    scratch.done(&effect);
    assert_same(&source, &target);
}

#[test]
fn btrfs_cannot_unshare_and_reports_it() {
    let scratch = Scratch::on(FsType::Btrfs);
    let image = mixed_image(&scratch, "source");
    let target = empty(&scratch, "target");
    scratch.done(&Effect::CloneWhole {
        source: &image.path,
        target: &target,
    });
    let error_text = scratch.refused(&Effect::Unshare {
        path: &image.path,
        offset: 0,
        length: MIB,
    });
    assert!(error_text.contains("unshare the blocks of"), "{error_text}");
}

#[test]
fn a_copied_range_has_the_data_and_the_holes_of_its_source() {
    for fs in FsType::ALL {
        let scratch = Scratch::on(fs);
        let source = mixed_image(&scratch, "source").path;
        let size = fs::metadata(&source).unwrap().len();
        let target = |name| {
            let path = empty(&scratch, name);
            open(&path).set_len(size).unwrap();
            path
        };
        let copy = |target: &Path, offset, length| {
            scratch.done(&Effect::CopyRange {
                source: &source,
                target,
                offset,
                length,
            });
        };
        let (all, part) = (target("all"), target("part"));
        // Before any process has read it: reserved blocks whose zeros are cached count as data.
        for piece in (0..size).step_by(3 << 20) {
            copy(&all, piece, 3 << 20);
        }
        run("sync", &["--file-system", text(&scratch.pool)]);
        let blocks = scratch.host.stat(&all).unwrap().unwrap().allocated;
        assert!(blocks < 16 * MIB, "{blocks} on {fs}");
        assert_same(&source, &all);
        copy(&part, 8 * MIB + 100, 5 * MIB);
        let (from, to) = (fs::read(&source).unwrap(), fs::read(&part).unwrap());
        let (start, end) = ((8 * MIB + 100) as usize, (13 * MIB + 100) as usize);
        assert!(from[start..end] == to[start..end], "{fs}");
        assert!(to[..start].iter().all(|byte| *byte == 0), "{fs}");
        assert!(to[end..].iter().all(|byte| *byte == 0), "{fs}");
        let short = empty(&scratch, "short");
        let error_text = scratch.refused(&Effect::CopyRange {
            source: &source,
            target: &short,
            offset: 0,
            length: MIB,
        });
        assert!(error_text.contains("0 bytes"), "{error_text}");
    }
}

#[test]
fn sharing_of_blocks_is_tried_and_leaves_no_trace() {
    for fs in FsType::ALL {
        let scratch = Scratch::on(fs);
        let before = scratch.host.list_dir(&scratch.pool).unwrap();
        let backing = scratch.host.backing_fs(&scratch.pool).unwrap();
        assert_eq!(backing.shares_blocks, fs != FsType::Ext4, "{fs}");
        assert_eq!(scratch.host.list_dir(&scratch.pool).unwrap(), before);
    }
    let scratch = Scratch::new();
    // An old xfs without reflink.
    let disk = scratch.image("old", 512 * MIB);
    run(
        "mkfs.xfs",
        &[
            "-q",
            "-m",
            "reflink=0,rmapbt=0",
            "-s",
            "size=4096",
            text(&disk.path),
        ],
    );
    let hold = scratch.attach(&disk);
    let target = scratch.target("old");
    scratch.mount(&hold.device(), &target, FsType::Xfs, &[]);
    assert!(!scratch.host.backing_fs(&target).unwrap().shares_blocks);
    scratch.unmount(&target);
    assert!(
        !scratch
            .host
            .backing_fs(Path::new("/dev/shm"))
            .unwrap()
            .shares_blocks
    );
}

/// A btrfs with files that were synced one by one: they are in its log, and not yet in its trees.
#[test]
fn a_btrfs_with_a_new_fsid_is_mounted_together_with_its_source_and_keeps_its_log() {
    let scratch = Scratch::new();
    let volume = scratch.volume("volume", FsType::Btrfs, 300 * MIB);
    run("mount", &["-o", "remount,commit=600", text(&volume.target)]);
    for n in 0..8 {
        let path = volume.target.join(n.to_string());
        fs::write(&path, vec![n; 8192]).unwrap();
        File::open(&path).unwrap().sync_all().unwrap();
    }
    let copy = Image {
        path: empty(&scratch, "copy"),
        id: super::scratch::id_of(&scratch.pool.join("copy")),
    };
    scratch.done(&Effect::CloneWhole {
        source: &volume.image.path,
        target: &copy.path,
    });
    let log = |image: &Path| {
        let super_block = run("btrfs", &["inspect-internal", "dump-super", text(image)]);
        let line = super_block
            .lines()
            .find(|line| line.starts_with("log_root\t"));
        line.unwrap().split_whitespace().last().unwrap() != "0"
    };
    assert!(
        log(&copy.path),
        "the log is empty, so the test proves nothing"
    );
    for turn in 0..2 {
        let uuid = scratch.host.random_uuid();
        for _ in 0..2 {
            scratch.done(&Effect::RenewFsId {
                image: &copy.path,
                uuid,
            });
        }
        run(
            "btrfs",
            &["inspect-internal", "dump-super", "-a", text(&copy.path)],
        );
        assert_eq!(log(&copy.path), turn == 0);
        let hold = scratch.attach(&copy);
        let device = hold.device();
        let target = scratch.target("copy/mount");
        scratch.mount(&device, &target, FsType::Btrfs, &[]);
        for n in 0..8 {
            assert!(fs::read(target.join(n.to_string())).unwrap() == vec![n; 8192]);
        }
        let error_text = run(
            "blkid",
            &["-p", "-o", "value", "-s", "UUID", text(&device.path)],
        );
        assert_eq!(error_text, uuid.to_string());
        fs::write(target.join("more"), b"more").unwrap();
        scratch.unmount(&target);
        drop(hold);
        super::scratch::eventually("the loop ends", || {
            let loops = scratch.host.loops().unwrap();
            !loops.iter().any(|status| status.backing == copy.id)
        });
        run("btrfs", &["check", "--force", text(&copy.path)]);
    }
}

#[test]
fn a_btrfs_with_other_checksums_gets_its_fsid_from_btrfstune() {
    let scratch = Scratch::new();
    let image = scratch.image("image", 300 * MIB);
    run("mkfs.btrfs", &["-q", "--csum", "xxhash", text(&image.path)]);
    let uuid = scratch.host.random_uuid();
    scratch.done(&Effect::RenewFsId {
        image: &image.path,
        uuid,
    });
    let error_text = run(
        "blkid",
        &["-p", "-o", "value", "-s", "UUID", text(&image.path)],
    );
    assert_eq!(error_text, uuid.to_string());
    let xfs = scratch.image("xfs", 320 * MIB);
    assert!(try_run("mkfs.xfs", &["-q", text(&xfs.path)]).is_ok());
    let error_text = scratch.refused(&Effect::RenewFsId {
        image: &xfs.path,
        uuid,
    });
    assert!(error_text.contains("no btrfs"), "{error_text}");
}

/// On xfs, the window reads only the image's map; the check afterwards detects that the copy was
/// moved.
#[test]
fn a_copy_that_was_moved_fails_verification() {
    for moved_at in ["before", "after", "never"] {
        let scratch = Scratch::on(FsType::Xfs);
        let source = mixed_image(&scratch, "source").path;
        let copy = empty(&scratch, "copy");
        let known = Known::default();
        scratch.done(&Effect::ClonePreFreeze {
            source: &source,
            target: &copy,
        });
        write(&source, 2 * MIB, BLOCK, 0xaa);
        assert_eq!(rest_with(&scratch, &source, &copy, &known), 1);
        assert_eq!(rest_with(&scratch, &source, &copy, &known), 0);
        // Moves the copy's block elsewhere, so that the image's block is unshared and overwritten
        // in place.
        let shift = || {
            punch(&copy, 0, BLOCK);
            write(&copy, 0, BLOCK, 0xbb);
        };
        if moved_at == "before" {
            shift();
        }
        let before = blocks(&scratch, &source);
        write(&source, 3 * MIB, BLOCK, 0xcc);
        if moved_at == "before" {
            write(&source, 0, BLOCK, 0xdd);
            let at = |map: &[(u64, u64)]| map.iter().find(|(at, _)| *at == 0).copied();
            assert_eq!(at(&before), at(&blocks(&scratch, &source)), "in place");
        }
        known.seal();
        assert_eq!(rest_with(&scratch, &source, &copy, &known), 1);
        if moved_at == "after" {
            shift();
        }
        let agrees = scratch.host.verify_copy(&copy, &known).unwrap();
        assert_eq!(agrees, moved_at == "never", "moved {moved_at}");
        if agrees {
            assert_same(&source, &copy);
        }
    }
}
