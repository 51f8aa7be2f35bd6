//! The simulation's own rules.

use super::*;
use crate::host::{LoopSpec, MountSpec, NodeKind};

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
        Done::Plain => panic!("no loop"),
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
fn removing_nothing_is_success_and_a_full_directory_stays() {
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
fn a_pinned_folder_is_reached_by_its_own_process_alone() {
    let host = MemoryHost::new();
    let pinned = host.pin_dir(path("/memory")).unwrap();
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
fn a_lock_is_held_until_its_process_ends() {
    let host = MemoryHost::new();
    let other = host.another_process();
    assert!(host.try_lock_file(path("/memory/lock")).unwrap());
    assert!(!other.try_lock_file(path("/memory/lock")).unwrap());
    let _ = host.restart_process();
    assert!(other.try_lock_file(path("/memory/lock")).unwrap());
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
fn an_autoclear_loop_goes_with_its_last_opener() {
    let host = staged(FsType::Ext4);
    assert_eq!(host.loop_numbers(), [(0, true)], "the mount keeps it");
    let reader = host.open_reader(path("/memory/img")).unwrap();
    unmount(&host, STAGE).unwrap();
    assert_eq!(host.loop_numbers(), [(0, true)], "the reader keeps it");
    drop(reader);
    assert!(host.loop_numbers().is_empty());
}

#[test]
fn a_dead_process_keeps_no_loop_but_a_lasting_one() {
    for (autoclear, left) in [(true, 0), (false, 1)] {
        let host = MemoryHost::new();
        allocate(&host, GIB, false).unwrap();
        let hold = attach(&host, autoclear).unwrap();
        let next = host.restart_process();
        assert_eq!(next.loops().unwrap().len(), left);
        drop(hold);
        assert_eq!(next.loops().unwrap().len(), left);
    }
}

#[test]
fn detaching_an_open_loop_leaves_it_to_its_last_opener() {
    let host = staged(FsType::Ext4);
    let detach = |number, backing| {
        host.perform(&Effect::DetachLoop { number, backing })
            .unwrap()
    };
    let hold = host.hold_loop(0, image_id(&host)).unwrap().unwrap();
    unmount(&host, STAGE).unwrap();
    detach(
        0,
        FileId {
            device: 1,
            inode: 1,
        },
    );
    detach(0, image_id(&host));
    assert_eq!(host.loop_numbers(), [(0, true)]);
    drop(hold);
    assert!(host.loop_numbers().is_empty());
}

#[test]
fn a_second_loop_on_an_image_is_refused_and_written_down() {
    let host = staged(FsType::Ext4);
    assert_eq!(attach(&host, true).unwrap_err().code(), Some(Errno::EBUSY));
    assert_eq!(host.violations().len(), 1);
}

#[test]
fn beside_a_strangers_loop_ours_is_refused_without_blame() {
    let host = MemoryHost::new();
    allocate(&host, GIB, false).unwrap();
    let number = host.foreign_loop(path("/memory/img")).unwrap();
    assert_eq!(attach(&host, true).unwrap_err().code(), Some(Errno::EBUSY));
    assert!(host.violations().is_empty());
    host.release_loop(number);
    assert!(attach(&host, true).is_ok());
}

#[test]
fn a_stolen_number_is_not_held_for_the_old_image() {
    let host = MemoryHost::new();
    allocate(&host, GIB, false).unwrap();
    drop(attach(&host, false).unwrap());
    let backing = image_id(&host);
    assert!(host.hold_loop(0, backing).unwrap().is_some());
    host.steal_loop(0).unwrap();
    assert!(host.hold_loop(0, backing).unwrap().is_none());
}

#[test]
fn formatting_what_was_in_use_is_written_down_however_blank_it_reads() {
    let host = staged(FsType::Ext4);
    unmount(&host, STAGE).unwrap();
    host.blank_device(path("/memory/img")).unwrap();
    let hold = attach(&host, true).unwrap();
    assert_eq!(host.signature(&hold.device()).unwrap(), Signature::None);
    assert_eq!(
        code(mount(&host, &hold.device(), FsType::Ext4, false)),
        Some(Errno::EINVAL)
    );
    format(&host, &hold.device(), FsType::Ext4).unwrap();
    assert_eq!(host.violations().len(), 1);
}

#[test]
fn a_mount_shows_like_the_kernels() {
    let host = staged(FsType::Ext4);
    bind(&host, true).unwrap();
    let mounts = host.mounts().unwrap();
    let at = |point: &str| {
        mounts
            .iter()
            .find(|mount| mount.mount_point == path(point))
            .unwrap()
    };
    let (stage, target) = (at(STAGE), at(TARGET));
    assert_eq!(
        (stage.device, stage.source.as_path()),
        (Device::of_loop(0).rdev, path("/dev/loop0"))
    );
    assert_eq!(
        (stage.root.as_path(), stage.fs_name.as_str()),
        (path("/"), "ext4")
    );
    assert_eq!(
        (target.device, target.root.as_path()),
        (stage.device, path("/"))
    );
    assert!(target.is_read_only() && !stage.is_read_only());
    assert_eq!(host.write_token(path(TARGET), 1), Err(Errno::EROFS));
    host.write_token(path(STAGE), 1).unwrap();
    assert_eq!(host.tokens(path(TARGET)).unwrap(), [1]);
}

#[test]
fn btrfs_has_a_number_that_is_no_device() {
    let host = staged(FsType::Btrfs);
    let mounts = host.mounts().unwrap();
    let stage = mounts
        .iter()
        .find(|mount| mount.mount_point == path(STAGE))
        .unwrap();
    assert_ne!(stage.device, Device::of_loop(0).rdev);
    assert_eq!(
        host.stat_caller(path(STAGE)).unwrap().unwrap().id.device,
        stage.device
    );
    assert_eq!(host.space_caller(path(STAGE)).unwrap().inodes, 0);
}

#[test]
fn a_bound_device_is_written_through_its_node() {
    let host = MemoryHost::new();
    allocate(&host, GIB, false).unwrap();
    let hold = attach(&host, false).unwrap();
    let target = path(TARGET);
    host.perform(&Effect::MakeTarget {
        path: target,
        kind: NodeKind::File,
    })
    .unwrap();
    let device = hold.device();
    host.perform(&Effect::BindDevice {
        device: &device,
        target,
    })
    .unwrap();
    let mounts = host.mounts().unwrap();
    let mount = mounts
        .iter()
        .find(|mount| mount.mount_point == target)
        .unwrap();
    assert_eq!(
        (mount.fs_name.as_str(), mount.root.as_path()),
        ("devtmpfs", path("/loop0"))
    );
    let stat = host.stat_caller(target).unwrap().unwrap();
    assert_eq!((stat.kind, stat.rdev), (FileKind::Block, device.rdev));
    host.write_block_token(target, 9).unwrap();
    assert_eq!(host.block_tokens(target).unwrap(), [9]);
}

#[test]
fn what_is_mounted_or_open_stays() {
    let host = staged(FsType::Ext4);
    let remove = |at| host.perform(&Effect::RemoveTarget { path: path(at) });
    assert_eq!(code(remove(STAGE)), Some(Errno::EBUSY));
    let open = host.open_file(path(STAGE)).unwrap();
    assert_eq!(code(unmount(&host, STAGE)), Some(Errno::EBUSY));
    drop(open);
    unmount(&host, STAGE).unwrap();
    assert_eq!(code(unmount(&host, STAGE)), Some(Errno::EINVAL));
    remove(STAGE).unwrap();
    remove(STAGE).unwrap();
    assert_eq!(code(unmount(&host, STAGE)), Some(Errno::ENOENT));
}

#[test]
fn a_frozen_file_system_outlives_its_mounts_until_it_is_thawed() {
    let host = staged(FsType::Xfs);
    host.freeze(path(STAGE)).unwrap();
    assert_eq!(host.write_token(path(STAGE), 1), Err(Errno::EAGAIN));
    unmount(&host, STAGE).unwrap();
    assert!(host.is_claimed(&Device::of_loop(0)).unwrap());
    mount(&host, &Device::of_loop(0), FsType::Xfs, false).unwrap();
    host.thaw(path(STAGE)).unwrap();
    host.write_token(path(STAGE), 1).unwrap();
    assert_eq!(host.thaw(path(STAGE)), Err(Errno::EINVAL));
}

#[test]
fn a_file_system_grows_to_its_device_once_both_have_been_told() {
    let host = staged(FsType::Ext4);
    let (device, at) = (Device::of_loop(0), path(STAGE));
    allocate(&host, 2 * GIB, false).unwrap();
    assert!(!host.wants_growth(&device, at, FsType::Ext4).unwrap());
    host.perform(&Effect::ResizeLoop { number: 0 }).unwrap();
    assert!(host.wants_growth(&device, at, FsType::Ext4).unwrap());
    host.perform(&Effect::GrowFs {
        device: &device,
        mount_point: at,
        fs: FsType::Ext4,
    })
    .unwrap();
    assert_eq!(host.fs_bytes(at), Ok(2 * GIB));
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
fn callers_paths_are_those_below_an_allowed_folder() {
    let host = MemoryHost::new();
    assert!(host.check_path(path("/var/lib/kubelet/pods/x")).is_ok());
    for bad in [
        "/var/lib/kubelet",
        "/etc/x",
        "x",
        "/var/lib/kubelet/../x",
        "/var/lib/kubeletx/y",
    ] {
        assert!(host.check_path(path(bad)).is_err(), "{bad}");
    }
    assert!(
        host.perform(&Effect::MakeTarget {
            path: path("/etc/x"),
            kind: NodeKind::Dir
        })
        .is_err()
    );
    assert_eq!(host.violations().len(), 1);
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
