//! Tests of loop devices, mounts and CSI paths.

use super::*;

#[test]
fn an_autoclear_loop_is_detached_with_its_last_opener() {
    let host = staged(FsType::Ext4);
    assert_eq!(host.loop_numbers(), [(0, true)], "the mount keeps it");
    let reader = host.open_reader(path("/memory/img")).unwrap();
    unmount(&host, STAGE).unwrap();
    assert_eq!(host.loop_numbers(), [(0, true)], "the reader keeps it");
    drop(reader);
    assert!(host.loop_numbers().is_empty());
}

#[test]
fn a_dead_process_keeps_only_loops_without_autoclear() {
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
fn a_second_loop_on_an_image_is_refused_and_a_violation() {
    let host = staged(FsType::Ext4);
    assert_eq!(attach(&host, true).unwrap_err().code(), Some(Errno::EBUSY));
    assert_eq!(host.violations().len(), 1);
}

#[test]
fn a_loop_next_to_a_foreign_one_is_refused_and_not_a_violation() {
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
fn formatting_a_used_device_is_a_violation_even_if_it_reads_as_blank() {
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
        host.stat_csi_path(path(STAGE)).unwrap().unwrap().id.device,
        stage.device
    );
    assert_eq!(host.space_csi_path(path(STAGE)).unwrap().inodes, 0);
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
    let stat = host.stat_csi_path(target).unwrap().unwrap();
    assert_eq!((stat.kind, stat.rdev), (FileKind::Block, device.rdev));
    host.write_block_token(target, 9).unwrap();
    assert_eq!(host.block_tokens(target).unwrap(), [9]);
}

#[test]
fn mounted_or_open_devices_stay() {
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
fn a_file_system_grows_to_its_device_once_both_were_resized() {
    let host = staged(FsType::Ext4);
    let (device, at) = (Device::of_loop(0), path(STAGE));
    allocate(&host, 2 * GIB, false).unwrap();
    assert!(!host.should_grow(&device, at, FsType::Ext4).unwrap());
    host.perform(&Effect::ResizeLoop { number: 0 }).unwrap();
    assert!(host.should_grow(&device, at, FsType::Ext4).unwrap());
    host.perform(&Effect::GrowFs {
        device: &device,
        mount_point: at,
        fs: FsType::Ext4,
    })
    .unwrap();
    assert_eq!(host.fs_bytes(at), Ok(2 * GIB));
}

#[test]
fn target_paths_are_those_below_an_allowed_folder() {
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
fn a_target_folder_is_assumed_to_exist_until_the_test_removes_it() {
    let host = MemoryHost::new();
    let parent = path("/var/lib/kubelet/pods/a");
    assert_eq!(
        host.stat_csi_path(parent).unwrap().unwrap().kind,
        FileKind::Dir
    );
    host.forget_folder(parent);
    assert!(host.stat_csi_path(parent).unwrap().is_none());
    assert!(host.stat_csi_path(&parent.join("b")).unwrap().is_none());
}

#[test]
fn trimming_frees_reserved_blocks_unless_the_device_forbids_it() {
    for forbid in [false, true] {
        let host = MemoryHost::new();
        allocate(&host, GIB, true).unwrap();
        let hold = attach(&host, true).unwrap();
        if forbid {
            host.perform(&Effect::DisableDiscard {
                device: &Device::of_loop(0),
            })
            .unwrap();
        }
        format(&host, &hold.device(), FsType::Ext4).unwrap();
        mount(&host, &hold.device(), FsType::Ext4, false).unwrap();
        assert_eq!(host.trim(path(STAGE)).is_ok(), !forbid);
        host.leave_available(0);
        assert_eq!(host.write_token(path(STAGE), 1).is_ok(), forbid);
    }
}
