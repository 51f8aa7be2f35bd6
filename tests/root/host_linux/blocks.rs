//! Blocks of images: reserved blocks that stay reserved, zeroing, discarding, and a full pool.

use std::fs;
use std::os::unix::fs::FileExt;

use slackwater::host::{Device, Effect, Host};
use slackwater::model::FsType;
use slackwater::model::size::MIB;

use super::scratch::{Image, Scratch, eventually, run, text, try_run};

fn reserved(scratch: &Scratch, name: &str, size: u64) -> Image {
    let image = scratch.image(name, MIB);
    scratch.done(&Effect::Allocate {
        path: &image.path,
        size,
        reserve: true,
    });
    assert!(scratch.allocated(&image) >= size);
    image
}

/// Runs mkfs, use, deletion, and every way to free blocks from inside the volume.
fn use_and_free(scratch: &Scratch, device: &Device, fs: FsType, keep_blocks: bool) {
    let uuid = scratch.host.random_uuid();
    scratch.done(&Effect::Format {
        device,
        fs,
        uuid,
        options: &[],
        keep_blocks,
    });
    let target = scratch.target("thick/mount");
    scratch.mount(device, &target, fs, &["discard"]);
    for n in 0..4 {
        fs::write(target.join(n.to_string()), vec![n; 24 << 20]).unwrap();
    }
    run("sync", &["--file-system", text(&target)]);
    for n in 0..4 {
        fs::remove_file(target.join(n.to_string())).unwrap();
    }
    // Each of these may fail; none may free blocks.
    let _ = try_run("fstrim", &[text(&target)]);
    fs::write(target.join("zeroed"), vec![0; 8 << 20]).unwrap();
    let _ = try_run(
        "fallocate",
        &["-z", "-l", "8M", text(&target.join("zeroed"))],
    );
    run("sync", &["--file-system", text(&target)]);
    scratch.unmount(&target);
    let node = text(&device.path);
    eventually("the claim ends", || {
        !scratch.host.is_claimed(device).unwrap()
    });
    let _ = try_run("fallocate", &["-p", "-l", "64M", node]);
    let _ = try_run("blkdiscard", &["--zeroout", node]);
    let _ = try_run("blkdiscard", &["--force", node]);
}

#[test]
fn a_reserved_image_keeps_its_blocks_whatever_its_user_does() {
    for pool in [FsType::Xfs, FsType::Ext4] {
        for fs in FsType::ALL {
            let scratch = Scratch::on(pool);
            let size = 320 * MIB;
            let image = reserved(&scratch, "thick", size);
            let hold = scratch.attach(&image);
            scratch.done(&Effect::DisableDiscard {
                device: &hold.device(),
            });
            use_and_free(&scratch, &hold.device(), fs, true);
            let left = scratch.allocated(&image);
            assert!(left >= size, "{left} of {size} on {pool} with {fs}");
        }
    }
}

#[test]
fn without_the_limit_the_same_operations_free_nearly_all_blocks() {
    let scratch = Scratch::new();
    let image = reserved(&scratch, "thin", 320 * MIB);
    let hold = scratch.attach(&image);
    use_and_free(&scratch, &hold.device(), FsType::Ext4, true);
    let left = scratch.allocated(&image);
    assert!(left < 32 * MIB, "{left}: the test above proves nothing");
}

#[test]
fn ext4_that_initializes_its_tables_late_frees_nothing() {
    let scratch = Scratch::new();
    let size = 320 * MIB;
    let image = reserved(&scratch, "thick", size);
    let hold = scratch.attach(&image);
    scratch.done(&Effect::DisableDiscard {
        device: &hold.device(),
    });
    let device = hold.device();
    scratch.done(&Effect::Format {
        device: &device,
        fs: FsType::Ext4,
        uuid: scratch.host.random_uuid(),
        options: &["-E".into(), "lazy_itable_init=1".into()],
        keep_blocks: true,
    });
    let target = scratch.target("thick/mount");
    // 0: no pause between groups.
    scratch.mount(&device, &target, FsType::Ext4, &["init_itable=0"]);
    let number = hold.number;
    let zeroed = |dump: &str| {
        let groups = dump.matches("(Blocks ").count();
        groups > 0 && dump.matches("ITABLE_ZEROED").count() == groups
    };
    eventually("all inode tables are initialized", || {
        run("sync", &["--file-system", text(&target)]);
        zeroed(&run("dumpe2fs", &[&format!("/dev/loop{number}")]))
    });
    assert!(scratch.allocated(&image) >= size);
}

#[test]
fn an_image_is_never_made_shorter_by_allocating() {
    for fs in FsType::ALL {
        let scratch = Scratch::on(fs);
        let image = scratch.image("a", 16 * MIB);
        scratch.image("a", 8 * MIB);
        let stat = || scratch.host.stat(&image.path).unwrap().unwrap();
        assert_eq!(stat().size, 16 * MIB, "{fs}");
        assert_eq!(stat().allocated, 0, "{fs}");
        scratch.done(&Effect::Allocate {
            path: &image.path,
            size: 8 * MIB,
            reserve: true,
        });
        assert_eq!(stat().size, 16 * MIB, "{fs}");
        assert!(stat().allocated >= 8 * MIB, "{fs}");
        scratch.done(&Effect::Truncate {
            path: &image.path,
            size: 4 * MIB,
        });
        assert_eq!(stat().size, 4 * MIB, "{fs}");
        scratch.done(&Effect::Truncate {
            path: &image.path,
            size: 12 * MIB,
        });
        assert_eq!(
            stat().size,
            4 * MIB,
            "{fs}: allocating does not change the length"
        );
    }
}

#[test]
fn a_full_pool_is_distinguished_from_other_errors() {
    for fs in FsType::ALL {
        let scratch = Scratch::sized(fs, 400 * MIB);
        let path = scratch.pool.join("thick");
        let error = scratch
            .perform(&Effect::Allocate {
                path: &path,
                size: 1024 * MIB,
                reserve: true,
            })
            .unwrap_err();
        assert!(error.is_no_space(), "{fs}: {error:?}");
    }
}

#[test]
fn a_file_that_is_too_long_for_ext4_is_distinguished_from_a_full_pool() {
    let scratch = Scratch::on(FsType::Ext4);
    for reserve in [false, true] {
        let error = scratch
            .perform(&Effect::Allocate {
                path: &scratch.pool.join("long"),
                size: 17 << 40,
                reserve,
            })
            .unwrap_err();
        assert!(error.is_too_large(), "{error:?}");
        assert!(!error.is_no_space(), "{error:?}");
    }
}

#[test]
fn a_hint_gives_blocks_by_larger_extents_and_clones_keep_working() {
    let scratch = Scratch::on(FsType::Xfs);
    let extents_with = |name: &str, bytes: Option<u64>| {
        let path = scratch.pool.join(name);
        if let Some(bytes) = bytes {
            scratch.done(&Effect::HintExtents { path: &path, bytes });
        }
        let image = scratch.image(name, 8 * MIB);
        let file = fs::OpenOptions::new().write(true).open(&path).unwrap();
        // Every second block.
        for at in (0..4 * MIB).step_by(8192) {
            file.write_all_at(&[0xA5; 4096], at).unwrap();
            file.sync_data().unwrap();
        }
        // A file that already has blocks keeps its hint.
        scratch.done(&Effect::HintExtents {
            path: &path,
            bytes: MIB,
        });
        scratch.allocated(&image)
    };
    let without = extents_with("plain", None);
    let with = extents_with("hinted", Some(64 << 10));
    assert!(without < 3 * MIB, "{without}: only every second block");
    assert!((4 * MIB..5 * MIB).contains(&with), "{with}: whole extents");
    let target = scratch.image("clone", 0);
    scratch.done(&Effect::CloneWhole {
        source: &scratch.pool.join("hinted"),
        target: &target.path,
    });
    let hinted = fs::read(scratch.pool.join("hinted")).unwrap();
    assert!(fs::read(&target.path).unwrap() == hinted);
}

#[test]
fn zeroing_overwrites_what_was_written_and_leaves_holes() {
    for fs in FsType::ALL {
        let scratch = Scratch::on(fs);
        let image = scratch.image("a", 64 * MIB);
        let file = fs::OpenOptions::new()
            .read(true)
            .write(true)
            .open(&image.path)
            .unwrap();
        for at in [0, 5 * MIB + 4096, 64 * MIB - 4096] {
            file.write_all_at(&[0xA5; 4096], at).unwrap();
        }
        file.write_all_at(&vec![0x5A; 3 << 20], 20 * MIB).unwrap();
        let before = scratch.allocated(&image);
        scratch.done(&Effect::Zero { path: &image.path });
        assert!(scratch.allocated(&image) <= before + MIB, "{fs}");
        assert!(
            fs::read(&image.path).unwrap().iter().all(|byte| *byte == 0),
            "{fs}"
        );
    }
}

#[test]
fn discarding_gives_all_blocks_back() {
    for fs in FsType::ALL {
        let scratch = Scratch::on(fs);
        let image = scratch.image("a", 64 * MIB);
        fs::write(&image.path, vec![1; 64 << 20]).unwrap();
        assert!(scratch.allocated(&image) >= 64 * MIB);
        scratch.done(&Effect::Discard {
            path: &image.path,
            from: 0,
        });
        let left = scratch.host.stat(&image.path).unwrap().unwrap();
        assert_eq!((left.size, left.allocated), (64 * MIB, 0), "{fs}");
        scratch.image("empty", 0);
        scratch.done(&Effect::Discard {
            path: &scratch.pool.join("empty"),
            from: 0,
        });
    }
}

/// The number of blocks of a disk's image that begin with a word.
fn blocks_with(scratch: &Scratch, word: &[u8]) -> usize {
    run("sync", &["--file-system", text(&scratch.pool)]);
    let disk = fs::File::open(scratch.root.join("disk.img")).unwrap();
    let bytes = disk.metadata().unwrap().len();
    let mut piece = vec![0; MIB as usize];
    (0..bytes)
        .step_by(MIB as usize)
        .map(|at| {
            disk.read_exact_at(&mut piece, at).unwrap();
            let mut blocks = piece.chunks(4096);
            let found = blocks.by_ref().filter(|block| block.starts_with(word));
            found.count()
        })
        .sum()
}

#[test]
fn blocks_shared_by_two_images_are_zeroed_with_the_last_of_them() {
    const BLOCKS: u64 = 2048;
    let block = |word: &[u8]| [word, &[b'.'; 4096][word.len()..]].concat();
    let (old, new) = (b"slackwater old", b"slackwater new");
    for clone_first in [false, true] {
        let scratch = Scratch::sized(FsType::Xfs, 400 * MIB);
        let image = scratch.image("a", BLOCKS * 4096);
        let clone = scratch.image("b", BLOCKS * 4096);
        fs::write(&image.path, block(old).repeat(BLOCKS as usize)).unwrap();
        scratch.done(&Effect::CloneWhole {
            source: &image.path,
            target: &clone.path,
        });
        let file = fs::OpenOptions::new()
            .write(true)
            .open(&image.path)
            .unwrap();
        for at in (0..BLOCKS).step_by(16) {
            file.write_all_at(&block(new), at * 4096).unwrap();
        }
        drop(file);
        assert_eq!(blocks_with(&scratch, old) as u64, BLOCKS);
        assert_eq!(blocks_with(&scratch, new) as u64, BLOCKS / 16);

        let [first, last] = match clone_first {
            true => [&clone, &image],
            false => [&image, &clone],
        };
        let other = fs::read(&last.path).unwrap();
        let allocated = scratch.allocated(last);
        scratch.done(&Effect::Zero { path: &first.path });
        assert!(
            fs::read(&last.path).unwrap() == other,
            "the other image is intact"
        );
        assert!(scratch.allocated(last) <= allocated);
        scratch.done(&Effect::Truncate {
            path: &first.path,
            size: 0,
        });
        let left = blocks_with(&scratch, if clone_first { old } else { new }) as u64;
        // The blocks that the other image had overwritten belonged to the clone alone.
        let kept = if clone_first { BLOCKS - BLOCKS / 16 } else { 0 };
        assert_eq!(left, kept, "the clone first: {clone_first}");

        scratch.done(&Effect::Zero { path: &last.path });
        for word in [old, new] {
            assert_eq!(
                blocks_with(&scratch, word),
                0,
                "the clone first: {clone_first}"
            );
        }
    }
}
