//! Tests of copies: their content, the space that they need, and which are invalid.

use super::*;
use crate::host::Known;
use crate::model::size::MIB;

const IMAGE: &str = "/memory/img";
const COPY: &str = "/memory/copy";

fn make_copy_of(host: &MemoryHost, size: u64) {
    host.perform(&Effect::Allocate {
        path: path(COPY),
        size,
        reserve: false,
    })
    .unwrap();
}

fn whole(host: &MemoryHost) -> Result<Done> {
    let (source, target) = (path(IMAGE), path(COPY));
    host.perform(&Effect::CloneWhole { source, target })
}

fn ahead(host: &MemoryHost) -> Result<Done> {
    let (source, target) = (path(IMAGE), path(COPY));
    host.perform(&Effect::ClonePreFreeze { source, target })
}

fn rest(host: &MemoryHost) -> Result<Done> {
    let (source, target) = (path(IMAGE), path(COPY));
    host.perform(&Effect::CloneDelta {
        source,
        target,
        known: &Known::default(),
    })
}

fn copy(host: &MemoryHost, offset: u64, length: u64) -> Result<Done> {
    host.perform(&Effect::CopyRange {
        source: path(IMAGE),
        target: path(COPY),
        offset,
        length,
    })
}

fn in_copy(host: &MemoryHost) -> Vec<u64> {
    host.image_tokens(path(COPY)).unwrap()
}

fn attach_copy(host: &MemoryHost) -> LoopHold {
    let image = path(COPY);
    let spec = LoopSpec {
        image,
        backing: host.stat(image).unwrap().unwrap().id,
        block_size: 512,
        autoclear: true,
        read_only: false,
    };
    match host.perform(&Effect::AttachLoop(spec)).unwrap() {
        Done::Loop(hold) => hold,
        Done::Plain | Done::Cloned(_) | Done::Checked(_) | Done::Session(_) => panic!("no loop"),
    }
}

fn mount_copy(host: &MemoryHost, fs: FsType, options: &[String]) -> Result<Done> {
    let hold = attach_copy(host);
    let (device, target) = (&hold.device(), path(TARGET));
    host.perform(&Effect::MakeTarget {
        path: target,
        kind: NodeKind::Dir,
    })?;
    host.perform(&Effect::Mount(MountSpec {
        device,
        target,
        fs,
        options,
        read_only: false,
    }))
}

#[test]
fn a_clone_contains_exactly_the_data_that_was_written_back() {
    let host = staged(FsType::Xfs);
    make_copy_of(&host, GIB);
    host.write_token(path(STAGE), 1).unwrap();
    host.write_unsynced(path(STAGE), 2).unwrap();
    whole(&host).unwrap();
    assert_eq!(in_copy(&host), [1]);
    host.sync(path(STAGE)).unwrap();
    assert_eq!(in_copy(&host), [1], "a copy is independent");
    whole(&host).unwrap();
    assert_eq!(in_copy(&host), [1, 2]);
    assert_eq!(host.stat(path(COPY)).unwrap().unwrap().size, GIB);
    assert_eq!(host.flaw(path(COPY)), None, "one clone is one moment");
}

#[test]
fn a_clone_survives_a_power_loss_only_once_it_was_synced() {
    for synced in [false, true] {
        let host = staged(FsType::Xfs);
        make_copy_of(&host, GIB);
        sync_file(&host, COPY).unwrap();
        sync_dir(&host, "/memory").unwrap();
        host.write_token(path(STAGE), 1).unwrap();
        whole(&host).unwrap();
        if synced {
            sync_file(&host, COPY).unwrap();
        }
        let host = host.reboot(true);
        let expected: &[u64] = if synced { &[1] } else { &[] };
        assert_eq!(in_copy(&host), expected);
    }
}

#[test]
fn clones_need_a_file_system_that_shares_blocks_free_space_and_both_files() {
    for fs_name in ["ext4", "xfs", "btrfs"] {
        let host = MemoryHost::with_options(MemoryOptions {
            fs_name: fs_name.into(),
            ..MemoryOptions::default()
        });
        allocate(&host, GIB, false).unwrap();
        make_copy_of(&host, GIB);
        let expected = (fs_name == "ext4").then_some(Errno::EOPNOTSUPP);
        for clone in [whole, ahead, rest] {
            assert_eq!(clone(&host).err().and_then(|error| error.code()), expected);
        }
        if fs_name != "ext4" {
            host.leave_available(0);
            assert_eq!(code(whole(&host)), Some(Errno::ENOSPC));
        }
    }
    let host = MemoryHost::new();
    assert_eq!(code(whole(&host)), Some(Errno::ENOENT));
    allocate(&host, GIB, false).unwrap();
    assert_eq!(code(whole(&host)), Some(Errno::ENOENT));
    make_copy_of(&host, 2 * GIB);
    ahead(&host).unwrap();
    let size = host.stat(path(COPY)).unwrap().unwrap().size;
    assert_eq!(size, GIB, "the source's length");
}

#[test]
fn a_copy_cloned_ahead_is_torn_until_the_remainder_comes_from_a_frozen_source() {
    let host = staged(FsType::Xfs);
    make_copy_of(&host, GIB);
    host.write_token(path(STAGE), 1).unwrap();
    ahead(&host).unwrap();
    assert!(host.flaw(path(COPY)).is_some());
    rest(&host).unwrap();
    assert!(host.flaw(path(COPY)).is_some(), "its users write on");
    host.write_unsynced(path(STAGE), 2).unwrap();
    host.freeze(path(STAGE)).unwrap();
    let cloned = rest(&host).unwrap();
    assert!(
        matches!(cloned, Done::Cloned(2)),
        "the token, and what names it"
    );
    assert_eq!((host.flaw(path(COPY)), in_copy(&host)), (None, vec![1, 2]));
    assert!(host.violations().is_empty());
}

#[test]
fn every_clone_of_an_idle_image_is_consistent() {
    let host = staged(FsType::Xfs);
    host.write_token(path(STAGE), 1).unwrap();
    unmount(&host, STAGE).unwrap();
    make_copy_of(&host, GIB);
    ahead(&host).unwrap();
    assert_eq!((host.flaw(path(COPY)), in_copy(&host)), (None, vec![1]));
}

#[test]
fn a_published_raw_device_is_not_idle() {
    let host = MemoryHost::new();
    allocate(&host, GIB, false).unwrap();
    let hold = attach(&host, false).unwrap();
    host.perform(&Effect::MakeTarget {
        path: path(TARGET),
        kind: NodeKind::File,
    })
    .unwrap();
    host.perform(&Effect::BindDevice {
        device: &hold.device(),
        target: path(TARGET),
    })
    .unwrap();
    host.write_block_token(path(TARGET), 5).unwrap();
    make_copy_of(&host, GIB);
    ahead(&host).unwrap();
    assert!(host.flaw(path(COPY)).is_some());
    whole(&host).unwrap();
    assert_eq!((host.flaw(path(COPY)), in_copy(&host)), (None, vec![5]));
}

#[test]
fn serving_a_torn_copy_is_a_violation() {
    let host = staged(FsType::Xfs);
    make_copy_of(&host, GIB);
    ahead(&host).unwrap();
    drop(attach_copy(&host));
    assert_eq!(host.violations().len(), 1);
    host.perform(&Effect::Allocate {
        path: path("/memory/next"),
        size: GIB,
        reserve: false,
    })
    .unwrap();
    host.perform(&Effect::CloneWhole {
        source: path(COPY),
        target: path("/memory/next"),
    })
    .unwrap();
    assert_eq!(host.violations().len(), 2);
    assert!(host.flaw(path("/memory/next")).is_some(), "inherited");
}

#[test]
fn overwriting_an_attached_image_is_a_violation() {
    let host = staged(FsType::Xfs);
    make_copy_of(&host, GIB);
    host.perform(&Effect::CloneWhole {
        source: path(COPY),
        target: path(IMAGE),
    })
    .unwrap();
    assert_eq!(host.violations().len(), 1);
}

#[test]
fn an_interrupted_copy_is_flawed() {
    for mode in [FaultMode::Before(Errno::EIO), FaultMode::CrashBefore] {
        let host = staged(FsType::Xfs);
        make_copy_of(&host, GIB);
        host.fail_effect(1, mode);
        assert!(whole(&host).is_err());
        let host = match host.is_alive() {
            true => host,
            false => host.restart_process(),
        };
        assert!(host.flaw(path(COPY)).is_some());
        whole(&host).unwrap();
        assert_eq!(host.flaw(path(COPY)), None);
    }
}

#[test]
fn shared_blocks_count_once_and_again_when_they_are_overwritten() {
    let host = staged(FsType::Xfs);
    make_copy_of(&host, GIB);
    let available = || host.space(path("/memory")).unwrap().available;
    let before = available();
    whole(&host).unwrap();
    assert_eq!(available(), before);
    let allocated = |at| host.stat(path(at)).unwrap().unwrap().allocated;
    assert_eq!(allocated(COPY), allocated(IMAGE));
    host.write_token(path(STAGE), 1).unwrap();
    assert_eq!(
        available(),
        before - 2 * 4096,
        "the token, and what names it"
    );
    host.write_token(path(STAGE), 2).unwrap();
    assert_eq!(available(), before - 3 * 4096, "that is its own by now");
    host.perform(&Effect::RemoveFile { path: path(COPY) })
        .unwrap();
    assert_eq!(available(), before - 2 * 4096);
}

#[test]
fn a_reserved_image_keeps_its_promise_over_a_clone_only_once_it_is_unshared() {
    for unshare in [None, Some(IMAGE), Some(COPY)] {
        let host = MemoryHost::new();
        allocate(&host, GIB, true).unwrap();
        let hold = attach(&host, true).unwrap();
        format(&host, &hold.device(), FsType::Xfs).unwrap();
        mount(&host, &hold.device(), FsType::Xfs, false).unwrap();
        make_copy_of(&host, GIB);
        whole(&host).unwrap();
        if let Some(image) = unshare {
            host.perform(&Effect::Unshare {
                path: path(image),
                offset: 0,
                length: GIB,
            })
            .unwrap();
        }
        host.leave_available(0);
        let expected = unshare.map(drop).ok_or(Errno::ENOSPC);
        assert_eq!(host.write_token(path(STAGE), 1), expected);
    }
}

#[test]
fn unsharing_needs_space_for_shared_blocks_and_holes_stay() {
    let host = staged(FsType::Xfs);
    unmount(&host, STAGE).unwrap();
    make_copy_of(&host, GIB);
    whole(&host).unwrap();
    let allocated = || host.stat(path(COPY)).unwrap().unwrap().allocated;
    let shared = allocated();
    assert!(0 < shared && shared < GIB / 2, "{shared}");
    let unshare = || {
        host.perform(&Effect::Unshare {
            path: path(COPY),
            offset: 0,
            length: GIB,
        })
    };
    host.leave_available(shared - 1);
    assert_eq!(code(unshare()), Some(Errno::ENOSPC));
    host.leave_available(shared);
    unshare().unwrap();
    let available = host.space(path("/memory")).unwrap().available;
    assert_eq!((allocated(), available), (shared, 0));
    unshare().unwrap();
}

#[test]
fn a_copy_by_ranges_is_complete_with_its_last_byte() {
    let host = staged(FsType::Ext4);
    host.write_token(path(STAGE), 1).unwrap();
    unmount(&host, STAGE).unwrap();
    make_copy_of(&host, 2 * GIB);
    copy(&host, 0, GIB / 2).unwrap();
    assert!(host.flaw(path(COPY)).is_some() && in_copy(&host).is_empty());
    copy(&host, GIB / 2, GIB / 2).unwrap();
    assert_eq!((host.flaw(path(COPY)), in_copy(&host)), (None, vec![1]));
    assert_eq!(code(copy(&host, 2 * GIB, 1)), Some(Errno::EINVAL));
}

#[test]
fn a_copy_with_a_gap_or_of_a_changed_source_is_never_consistent() {
    let host = staged(FsType::Ext4);
    unmount(&host, STAGE).unwrap();
    make_copy_of(&host, GIB);
    copy(&host, 0, MIB).unwrap();
    copy(&host, 2 * MIB, GIB - 2 * MIB).unwrap();
    assert!(host.flaw(path(COPY)).is_some(), "a gap");
    copy(&host, 0, GIB).unwrap();
    assert_eq!(host.flaw(path(COPY)), None, "begun anew");
    copy(&host, 0, MIB).unwrap();
    let hold = attach(&host, true).unwrap();
    mount(&host, &hold.device(), FsType::Ext4, false).unwrap();
    unmount(&host, STAGE).unwrap();
    drop(hold);
    copy(&host, MIB, GIB - MIB).unwrap();
    assert!(host.flaw(path(COPY)).is_some(), "it was mounted meanwhile");
    let hold = attach(&host, true).unwrap();
    mount(&host, &hold.device(), FsType::Ext4, false).unwrap();
    copy(&host, 0, GIB).unwrap();
    assert!(host.flaw(path(COPY)).is_some(), "it's in use");
}

#[test]
fn a_copy_is_resumed_after_a_power_loss_from_its_last_sync() {
    let host = staged(FsType::Ext4);
    unmount(&host, STAGE).unwrap();
    make_copy_of(&host, GIB);
    copy(&host, 0, MIB).unwrap();
    sync_file(&host, COPY).unwrap();
    sync_dir(&host, "/memory").unwrap();
    copy(&host, MIB, MIB).unwrap();
    let host = host.reboot(true);
    copy(&host, 2 * MIB, GIB - 2 * MIB).unwrap();
    assert!(host.flaw(path(COPY)).is_some(), "the second range is lost");
    copy(&host, MIB, GIB - MIB).unwrap();
    assert_eq!(host.flaw(path(COPY)), None);
}

#[test]
fn a_file_has_the_time_of_its_last_change() {
    let host = staged(FsType::Xfs);
    let modified = |at| host.stat(path(at)).unwrap().unwrap().modified;
    let before = modified(IMAGE);
    host.write_unsynced(path(STAGE), 1).unwrap();
    assert_eq!(modified(IMAGE), before);
    host.sync(path(STAGE)).unwrap();
    let written = modified(IMAGE);
    assert!(written > before);
    host.sync(path(STAGE)).unwrap();
    make_copy_of(&host, GIB);
    whole(&host).unwrap();
    assert_eq!(modified(IMAGE), written);
    unmount(&host, STAGE).unwrap();
    let hold = attach(&host, true).unwrap();
    mount(&host, &hold.device(), FsType::Xfs, false).unwrap();
    assert!(modified(IMAGE) > written, "a mount writes");
}

#[test]
fn file_systems_with_the_same_uuid_are_mounted_together_only_as_the_kernel_allows() {
    for (fs, refused) in [
        (FsType::Ext4, None),
        (FsType::Xfs, Some(Errno::EINVAL)),
        (FsType::Btrfs, Some(Errno::EEXIST)),
    ] {
        let host = staged(fs);
        make_copy_of(&host, GIB);
        whole(&host).unwrap();
        let mounted = mount_copy(&host, fs, &[]);
        assert_eq!(mounted.err().and_then(|error| error.code()), refused);
        if fs == FsType::Xfs {
            mount_copy(&host, fs, &["nouuid".into()]).unwrap();
        }
        if fs == FsType::Btrfs {
            let (image, uuid) = (path(COPY), Uuid::from_u128(8));
            host.perform(&Effect::RenewFsId { image, uuid }).unwrap();
            mount_copy(&host, fs, &[]).unwrap();
            assert_eq!(
                code(host.perform(&Effect::RenewFsId { image, uuid })),
                Some(Errno::EBUSY)
            );
        }
    }
}

#[test]
fn the_map_shows_shared_and_reserved_extents() {
    let host = MemoryHost::new();
    allocate(&host, GIB, true).unwrap();
    let hold = attach(&host, true).unwrap();
    format(&host, &hold.device(), FsType::Xfs).unwrap();
    mount(&host, &hold.device(), FsType::Xfs, false).unwrap();
    make_copy_of(&host, GIB);
    whole(&host).unwrap();
    let map = |at| host.extents(path(at), 0, 100).unwrap();
    let (source, copied) = (map(IMAGE), map(COPY));
    assert_eq!(source[..1], copied, "what is only reserved isn't cloned");
    assert!(source[1].unwritten && source[1].logical == source[0].length);
    host.write_token(path(STAGE), 1).unwrap();
    let now = map(IMAGE);
    assert_ne!(now[0].physical, copied[0].physical, "written anew");
    assert_eq!(now[1].physical, copied[0].physical + 4096, "still shared");
    assert_eq!(host.extent_count(path(IMAGE)).unwrap(), now.len() as u64);
    assert_eq!(
        host.extents(path(IMAGE), now[1].logical, 1).unwrap(),
        now[1..2]
    );
}
