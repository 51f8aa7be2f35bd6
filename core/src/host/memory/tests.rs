//! Tests of the rules of the simulation.

mod clones;
mod freezer;
mod kernel;
mod linear;
mod thin;

use std::collections::BTreeSet;
use std::path::Path;

use nix::errno::Errno;
use uuid::Uuid;

use super::*;
use crate::host::Signature;
use crate::host::{Device, Done, Effect, FileId, FileKind, Host, LoopSpec, MountSpec, NodeKind};
use crate::model::FsType;

const STAGE: &str = "/var/lib/kubelet/stage";
const TARGET: &str = "/var/lib/kubelet/target";

fn path(text: &str) -> &Path {
    Path::new(text)
}

fn make_dir(host: &MemoryHost, at: &str) -> Result<Done> {
    host.perform(&Effect::MakeDir { path: path(at) })
}

fn write(host: &MemoryHost, at: &str, text: &str) -> Result<Done> {
    host.perform(&Effect::WriteFile {
        path: path(at),
        bytes: text.as_bytes(),
    })
}

fn sync_file(host: &MemoryHost, at: &str) -> Result<Done> {
    host.perform(&Effect::SyncFile { path: path(at) })
}

fn sync_dir(host: &MemoryHost, at: &str) -> Result<Done> {
    host.perform(&Effect::SyncDir { path: path(at) })
}

fn rename(host: &MemoryHost, from: &str, to: &str) -> Result<Done> {
    host.perform(&Effect::Rename {
        from: path(from),
        to: path(to),
    })
}

fn allocate(host: &MemoryHost, size: u64, reserve: bool) -> Result<Done> {
    host.perform(&Effect::Allocate {
        path: path("/memory/img"),
        size,
        reserve,
    })
}

fn text(host: &MemoryHost, at: &str) -> Option<String> {
    host.read_file(path(at))
        .unwrap()
        .map(|bytes| String::from_utf8(bytes).unwrap())
}

fn image_id(host: &MemoryHost) -> FileId {
    host.stat(path("/memory/img")).unwrap().unwrap().id
}

fn attach(host: &MemoryHost, autoclear: bool) -> Result<LoopHold> {
    let image = path("/memory/img");
    let spec = LoopSpec {
        image,
        backing: image_id(host),
        block_size: 512,
        autoclear,
        read_only: false,
    };
    match host.perform(&Effect::AttachLoop(spec))? {
        Done::Loop(hold) => Ok(hold),
        Done::Plain | Done::Cloned(_) | Done::Checked(_) | Done::Session(_) => panic!("no loop"),
    }
}

fn format(host: &MemoryHost, device: &Device, fs: FsType) -> Result<Done> {
    let uuid = Uuid::from_u128(7);
    host.perform(&Effect::Format {
        device,
        fs,
        uuid,
        options: &[],
        keep_blocks: true,
    })
}

fn mount(host: &MemoryHost, device: &Device, fs: FsType, read_only: bool) -> Result<Done> {
    let target = path(STAGE);
    host.perform(&Effect::MakeTarget {
        path: target,
        kind: NodeKind::Dir,
    })?;
    host.perform(&Effect::Mount(MountSpec {
        device,
        target,
        fs,
        options: &[],
        read_only,
    }))
}

fn bind(host: &MemoryHost, read_only: bool) -> Result<Done> {
    host.perform(&Effect::MakeTarget {
        path: path(TARGET),
        kind: NodeKind::Dir,
    })?;
    host.perform(&Effect::Bind {
        source: path(STAGE),
        target: path(TARGET),
        read_only,
    })
}

fn unmount(host: &MemoryHost, at: &str) -> Result<Done> {
    host.perform(&Effect::Unmount { target: path(at) })
}

/// An image with a file system, mounted at STAGE.
fn staged(fs: FsType) -> MemoryHost {
    let host = MemoryHost::new();
    allocate(&host, GIB, false).unwrap();
    sync_file(&host, "/memory/img").unwrap();
    sync_dir(&host, "/memory").unwrap();
    let hold = attach(&host, true).unwrap();
    format(&host, &hold.device(), fs).unwrap();
    mount(&host, &hold.device(), fs, false).unwrap();
    host
}

fn code(result: Result<Done>) -> Option<Errno> {
    result.unwrap_err().code()
}

#[test]
fn a_record_survives_a_power_loss_only_when_file_and_directory_are_synced() {
    for (file, dir, expected) in [
        (true, true, Some("new")),
        (true, false, Some("old")),
        (false, true, Some("")),
    ] {
        let host = MemoryHost::new();
        write(&host, "/memory/r", "old").unwrap();
        sync_file(&host, "/memory/r").unwrap();
        sync_dir(&host, "/memory").unwrap();
        write(&host, "/memory/r.new", "new").unwrap();
        if file {
            sync_file(&host, "/memory/r.new").unwrap();
        }
        rename(&host, "/memory/r.new", "/memory/r").unwrap();
        if dir {
            sync_dir(&host, "/memory").unwrap();
        }
        assert_eq!(
            host.violations().is_empty(),
            file,
            "renaming what is not synced is written down"
        );
        let host = host.reboot(true);
        assert_eq!(text(&host, "/memory/r").as_deref(), expected);
    }
}

#[test]
fn a_sync_of_several_files_that_is_cut_off_makes_any_of_them_durable() {
    let names = ["/memory/a", "/memory/b", "/memory/c"];
    let paths = names.map(PathBuf::from);
    let sync = Effect::SyncAll { paths: &paths };
    let mut seen = BTreeSet::new();
    for (before, mode) in [
        (0, FaultMode::CrashBefore),
        (1, FaultMode::CrashBefore),
        (0, FaultMode::Before(Errno::EIO)),
        (0, FaultMode::CrashAfter),
    ] {
        let host = MemoryHost::new();
        for name in names {
            write(&host, name, "text").unwrap();
        }
        sync_dir(&host, "/memory").unwrap();
        for _ in 0..before {
            make_dir(&host, "/memory/other").unwrap();
        }
        host.fail_effect(1, mode);
        assert!(host.perform(&sync).is_err());
        let host = host.reboot(true);
        let is_durable = |name| text(&host, name).as_deref() == Some("text");
        seen.insert(names.map(is_durable));
    }
    let wanted = [[false, true, false], [true, false, true], [true; 3]];
    assert_eq!(seen, BTreeSet::from(wanted));
}

#[test]
fn a_sync_of_several_files_and_directories_makes_all_of_them_durable() {
    let host = MemoryHost::new();
    make_dir(&host, "/memory/d").unwrap();
    write(&host, "/memory/d/r", "text").unwrap();
    let paths = ["/memory/d/r", "/memory/d", "/memory"].map(PathBuf::from);
    host.perform(&Effect::SyncAll { paths: &paths }).unwrap();
    let host = host.reboot(true);
    assert_eq!(text(&host, "/memory/d/r").as_deref(), Some("text"));
}

#[test]
fn a_clean_reboot_loses_nothing_but_mounts_and_loops() {
    let host = staged(FsType::Ext4);
    write(&host, "/memory/r", "text").unwrap();
    host.write_unsynced(path(STAGE), 5).unwrap();
    let boot = host.boot_id().unwrap();
    let host = host.reboot(false);
    assert_ne!(host.boot_id().unwrap(), boot);
    assert!(host.loops().unwrap().is_empty() && host.mounted().is_empty());
    assert_eq!(text(&host, "/memory/r").as_deref(), Some("text"));
    let hold = attach(&host, true).unwrap();
    mount(&host, &hold.device(), FsType::Ext4, false).unwrap();
    assert_eq!(host.tokens(path(STAGE)).unwrap(), [5]);
}

#[test]
fn a_power_loss_keeps_what_a_user_synced_and_no_more() {
    let host = staged(FsType::Xfs);
    host.write_token(path(STAGE), 1).unwrap();
    host.write_unsynced(path(STAGE), 2).unwrap();
    let host = host.reboot(true);
    let hold = attach(&host, true).unwrap();
    mount(&host, &hold.device(), FsType::Xfs, false).unwrap();
    assert_eq!(host.tokens(path(STAGE)).unwrap(), [1]);
}

#[test]
fn a_rename_between_directories_is_durable_at_both_ends_or_at_none() {
    for synced in [None, Some("/memory/a"), Some("/memory/b")] {
        let host = MemoryHost::new();
        for dir in ["/memory/a", "/memory/b", "/memory/a/x"] {
            make_dir(&host, dir).unwrap();
        }
        for dir in ["/memory", "/memory/a", "/memory/b"] {
            sync_dir(&host, dir).unwrap();
        }
        rename(&host, "/memory/a/x", "/memory/b/y").unwrap();
        if let Some(dir) = synced {
            sync_dir(&host, dir).unwrap();
        }
        let host = host.reboot(true);
        let expected = if synced.is_some() {
            vec!["a", "b", "b/y"]
        } else {
            vec!["a", "a/x", "b"]
        };
        assert_eq!(host.files_below(path("/memory")), expected);
    }
}

#[test]
fn a_removal_comes_back_unless_its_directory_was_synced() {
    let host = MemoryHost::new();
    write(&host, "/memory/r", "text").unwrap();
    sync_file(&host, "/memory/r").unwrap();
    sync_dir(&host, "/memory").unwrap();
    host.perform(&Effect::RemoveFile {
        path: path("/memory/r"),
    })
    .unwrap();
    assert_eq!(text(&host, "/memory/r"), None);
    let host = host.reboot(true);
    assert_eq!(text(&host, "/memory/r").as_deref(), Some("text"));
}

#[test]
fn removing_a_missing_file_succeeds_and_a_full_directory_stays() {
    let host = MemoryHost::new();
    make_dir(&host, "/memory/d").unwrap();
    make_dir(&host, "/memory/d").unwrap();
    write(&host, "/memory/d/f", "x").unwrap();
    let remove = |at| host.perform(&Effect::RemoveDir { path: path(at) });
    assert_eq!(code(remove("/memory/d")), Some(Errno::ENOTEMPTY));
    remove("/memory/none").unwrap();
    remove("/memory/none/none").unwrap();
    assert_eq!(
        code(rename(&host, "/memory/none", "/memory/d/g")),
        Some(Errno::ENOENT)
    );
    assert_eq!(
        code(rename(&host, "/memory/d/f", "/memory/none/g")),
        Some(Errno::ENOENT)
    );
    assert_eq!(code(make_dir(&host, "/memory/none/d")), Some(Errno::ENOENT));
}

#[test]
fn a_pinned_folder_is_reached_only_by_its_own_process() {
    let host = MemoryHost::new();
    let (pinned, _kept) = host.pin_dir(path("/memory")).unwrap();
    write(&host, pinned.join("f").to_str().unwrap(), "x").unwrap();
    assert_eq!(text(&host, "/memory/f").as_deref(), Some("x"));
    let next = host.restart_process();
    assert!(next.read_file(&pinned.join("f")).is_err());
    assert!(
        host.read_file(path("/memory/f")).is_err(),
        "the old process is dead"
    );
    assert!(!host.is_alive() && next.is_alive());
}

#[test]
fn a_lock_is_held_until_it_is_dropped_or_its_process_ends() {
    let host = MemoryHost::new();
    let other = host.another_process();
    let lock = |host: &MemoryHost| host.try_lock_file(path("/memory/lock")).unwrap();
    let first = lock(&host);
    assert!(first.is_some() && lock(&host).is_none() && lock(&other).is_none());
    let _ = host.restart_process();
    let second = lock(&other);
    assert!(second.is_some());
    drop(first);
    assert!(lock(&host.another_process()).is_none());
    drop(second);
    assert!(lock(&other).is_some());
}

#[test]
fn a_full_pool_refuses_reserved_blocks_and_writes() {
    let host = MemoryHost::with_capacity(GIB);
    allocate(&host, 2 * GIB, false).unwrap();
    assert_eq!(code(allocate(&host, 2 * GIB, true)), Some(Errno::ENOSPC));
    assert_eq!(host.space(path("/memory")).unwrap().available, GIB);
    host.leave_available(0);
    assert_eq!(code(write(&host, "/memory/r", "text")), Some(Errno::ENOSPC));
    assert_eq!(text(&host, "/memory/r").as_deref(), Some(""));
}

#[test]
fn a_reserved_image_takes_writes_on_a_full_pool_and_a_thin_one_does_not() {
    for reserve in [true, false] {
        let host = MemoryHost::new();
        allocate(&host, GIB, reserve).unwrap();
        let hold = attach(&host, true).unwrap();
        format(&host, &hold.device(), FsType::Ext4).unwrap();
        mount(&host, &hold.device(), FsType::Ext4, false).unwrap();
        host.leave_available(0);
        let expected = if reserve { Ok(()) } else { Err(Errno::ENOSPC) };
        assert_eq!(host.write_token(path(STAGE), 1), expected);
    }
}

#[test]
fn a_fault_before_does_nothing_and_one_after_does_all() {
    let host = MemoryHost::new();
    host.fail_effect(1, FaultMode::Before(Errno::EIO));
    host.fail_effect(2, FaultMode::After(Errno::EIO));
    assert_eq!(code(make_dir(&host, "/memory/a")), Some(Errno::EIO));
    assert_eq!(code(make_dir(&host, "/memory/b")), Some(Errno::EIO));
    make_dir(&host, "/memory/c").unwrap();
    assert_eq!(host.files_below(path("/memory")), ["b", "c"]);
    assert_eq!(host.effects(), 3);
}

#[test]
fn a_crash_ends_the_process_before_or_after_its_effect() {
    for (mode, left) in [(FaultMode::CrashBefore, 0), (FaultMode::CrashAfter, 1)] {
        let host = MemoryHost::new();
        host.fail_effect(1, mode);
        assert!(make_dir(&host, "/memory/a").is_err());
        assert!(host.list_dir(path("/memory")).is_err());
        let host = host.restart_process();
        assert_eq!(host.files_below(path("/memory")).len(), left);
    }
}

#[test]
fn a_late_failure_of_an_attach_leaves_nothing_open() {
    let host = MemoryHost::new();
    allocate(&host, GIB, false).unwrap();
    host.fail_effect(1, FaultMode::After(Errno::EIO));
    assert!(attach(&host, true).is_err());
    assert!(
        host.loop_numbers().is_empty(),
        "an autoclear loop goes with the descriptor"
    );
    host.fail_effect(1, FaultMode::After(Errno::EIO));
    assert!(attach(&host, false).is_err());
    assert_eq!(host.loop_numbers(), [(0, false)], "a lasting one stays");
}

#[test]
fn a_seeded_machine_repeats_itself() {
    let boot = || {
        let options = MemoryOptions {
            seed: Some(3),
            ..MemoryOptions::default()
        };
        let host = MemoryHost::with_options(options);
        (
            host.boot_id().unwrap(),
            host.random_uuid(),
            host.random_uuid(),
            host.now(),
        )
    };
    assert_eq!(boot(), boot());
    assert_ne!(boot().1, boot().2);
}

#[test]
fn a_look_that_fails_is_an_error_and_not_an_absence() {
    let host = MemoryHost::new();
    host.fail_query(2, Errno::EIO);
    assert!(host.list_dir(path("/memory")).is_ok());
    assert!(host.list_dir(path("/memory")).is_err());
    assert_eq!((host.looks(), host.effects()), (2, 0));
}

#[test]
fn a_removed_disk_comes_back_with_all_of_its_content() {
    let host = MemoryHost::new();
    make_dir(&host, "/memory/pool").unwrap();
    write(&host, "/memory/pool/f", "x").unwrap();
    host.pull_disk(path("/memory/pool")).unwrap();
    let host = host.reboot(false);
    assert_eq!(host.files_below(path("/memory")), ["pool"]);
    host.put_disk_back(path("/memory/pool")).unwrap();
    assert_eq!(host.files_below(path("/memory")), ["pool", "pool/f"]);
}
