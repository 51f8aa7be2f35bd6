//! Tests of the guard of a simulated machine.

use std::time::Duration;

use super::*;
use crate::host::freezer::FreezeLimits;
use crate::host::{Freeze, FreezeMember, Freezer};

const LIMITS: FreezeLimits = FreezeLimits {
    sync: Duration::from_secs(10),
    freeze: Duration::from_secs(10),
};

fn member(host: &MemoryHost) -> FreezeMember {
    let root = host.open_mount_root(path(STAGE), &Device::of_loop(0), FsType::Xfs);
    FreezeMember {
        volume_id: "v".into(),
        namespace: None,
        image: image_id(host),
        root: Some(root.unwrap()),
        mapped: None,
    }
}

fn begin(host: &MemoryHost) -> Box<dyn Freeze> {
    host.begin(vec![member(host)], LIMITS).unwrap()
}

fn copy_at(host: &MemoryHost) -> &'static Path {
    let copy = path("/memory/copy");
    host.perform(&Effect::Allocate {
        path: copy,
        size: GIB,
        reserve: false,
    })
    .unwrap();
    copy
}

#[test]
fn a_root_is_that_of_its_device_and_keeps_it_mounted() {
    let host = staged(FsType::Xfs);
    let open = |device, fs| host.open_mount_root(path(STAGE), &Device::of_loop(device), fs);
    assert!(open(1, FsType::Xfs).is_err(), "another device");
    assert!(open(0, FsType::Ext4).is_err(), "another file system");
    let root = open(0, FsType::Xfs).unwrap();
    assert_eq!(code(unmount(&host, STAGE)), Some(Errno::EBUSY));
    drop(root);
    unmount(&host, STAGE).unwrap();
    assert!(open(0, FsType::Xfs).is_err());
}

#[test]
fn a_cut_under_a_freeze_has_all_written_data() {
    let host = staged(FsType::Xfs);
    let copy = copy_at(&host);
    host.write_unsynced(path(STAGE), 1).unwrap();
    let freeze = begin(&host);
    freeze.sync().unwrap();
    host.write_unsynced(path(STAGE), 2).unwrap();
    assert!(!host.list_journaled().unwrap()[0].freezing);
    freeze.freeze().unwrap();
    assert!(host.list_journaled().unwrap()[0].freezing);
    assert_eq!(host.write_unsynced(path(STAGE), 3), Err(Errno::EAGAIN));
    host.perform(&Effect::CloneWhole {
        source: path("/memory/img"),
        target: copy,
    })
    .unwrap();
    assert_eq!(host.list_journaled().unwrap().len(), 1);
    assert!(freeze.thaw(0).unwrap());
    host.write_unsynced(path(STAGE), 3).unwrap();
    drop(freeze);
    assert_eq!(host.image_tokens(copy).unwrap(), [1, 2]);
    assert!(host.frozen().is_empty() && host.list_journaled().unwrap().is_empty());
    unmount(&host, STAGE).unwrap();
    let steps = [
        "freeze_journal",
        "freeze_sync",
        "freeze",
        "clone_whole",
        "thaw",
    ];
    let log = host.effect_log();
    let log: Vec<&str> = log
        .iter()
        .filter_map(|line| line.split(' ').next())
        .collect();
    assert!(
        log.windows(steps.len()).any(|window| window == steps),
        "{log:?}"
    );
    assert!(host.violations().is_empty());
}

#[test]
fn a_file_system_held_by_the_guard_cannot_be_unmounted() {
    let host = staged(FsType::Xfs);
    let freeze = begin(&host);
    assert_eq!(code(unmount(&host, STAGE)), Some(Errno::EBUSY));
    freeze.freeze().unwrap();
    assert_eq!(code(unmount(&host, STAGE)), Some(Errno::EBUSY));
    drop(freeze);
    assert!(host.frozen().is_empty(), "dropping it thaws");
    unmount(&host, STAGE).unwrap();
}

#[test]
fn a_foreign_thaw_is_reported() {
    let thaws: [fn(&MemoryHost); 3] = [
        |host| host.thaw(path(STAGE)).unwrap(),
        MemoryHost::pass_deadline,
        |host| {
            host.fail_effect(1, FaultMode::Thaw);
            make_dir(&host.another_process(), "/memory/d").unwrap();
        },
    ];
    for thaw in thaws {
        let host = staged(FsType::Xfs);
        let freeze = begin(&host);
        freeze.freeze().unwrap();
        thaw(&host);
        host.write_token(path(STAGE), 1).unwrap();
        assert!(!freeze.thaw(0).unwrap());
        assert!(freeze.thaw(1).is_err(), "there is no such member");
        assert!(host.violations().is_empty());
    }
}

#[test]
fn a_foreign_freeze_is_neither_repeated_nor_thawed_nor_swept() {
    let host = staged(FsType::Xfs);
    host.freeze(path(STAGE)).unwrap();
    let freeze = begin(&host);
    assert_eq!(freeze.freeze().unwrap_err().code(), Some(Errno::EBUSY));
    assert!(!freeze.thaw(0).unwrap());
    drop(freeze);
    let host = host.restart_process();
    assert!(host.sweep().unwrap().is_empty());
    assert_eq!(host.frozen(), [(0, true)]);
}

#[test]
fn freezes_of_a_killed_owner_are_thawed_by_the_guard_or_by_the_next_start() {
    for guard_dies in [false, true] {
        let host = staged(FsType::Xfs);
        host.let_guard_die(guard_dies);
        let freeze = begin(&host);
        freeze.freeze().unwrap();
        let next = host.restart_process();
        assert!(freeze.thaw(0).is_err(), "of a dead process");
        drop(freeze);
        assert_eq!(next.frozen().len(), usize::from(guard_dies));
        assert_eq!(
            next.list_journaled().unwrap().len(),
            usize::from(guard_dies)
        );
        let swept: Vec<String> = guard_dies.then(|| "v".into()).into_iter().collect();
        assert_eq!(next.sweep().unwrap(), swept);
        assert!(next.sweep().unwrap().is_empty());
        next.write_token(path(STAGE), 1).unwrap();
        unmount(&next, STAGE).unwrap();
    }
}

#[test]
fn without_a_guard_a_frozen_file_system_outlives_its_mount_until_the_sweep() {
    let host = staged(FsType::Xfs);
    host.let_guard_die(true);
    let freeze = begin(&host);
    freeze.freeze().unwrap();
    let next = host.restart_process();
    drop(freeze);
    unmount(&next, STAGE).unwrap();
    assert_eq!(next.loop_numbers(), [(0, true)]);
    next.sweep().unwrap();
    assert!(next.loop_numbers().is_empty());
}

#[test]
fn freezes_of_a_running_owner_are_not_swept() {
    let host = staged(FsType::Xfs);
    let freeze = begin(&host);
    freeze.freeze().unwrap();
    assert!(host.another_process().sweep().unwrap().is_empty());
    assert!(freeze.thaw(0).unwrap());
}

#[test]
fn steps_that_fail_leave_nothing_frozen() {
    for (n, mode) in [
        (1, FaultMode::Before(Errno::EIO)),
        (1, FaultMode::After(Errno::EIO)),
        (1, FaultMode::CrashBefore),
        (1, FaultMode::CrashAfter),
        (2, FaultMode::Before(Errno::EIO)),
        (2, FaultMode::After(Errno::EIO)),
        (2, FaultMode::CrashAfter),
    ] {
        let host = staged(FsType::Xfs);
        let freeze = begin(&host);
        host.fail_effect(n, mode);
        let frozen = freeze.freeze();
        assert_eq!(frozen.is_err(), n == 1, "{mode:?}");
        if n == 2 {
            assert!(freeze.thaw(0).is_err());
        }
        drop(freeze);
        assert!(host.frozen().is_empty(), "{n} {mode:?}");
    }
}

#[test]
fn a_sync_on_a_full_pool_fails_and_a_freeze_does_not_report_lost_data() {
    let host = staged(FsType::Xfs);
    host.leave_available(0);
    let freeze = begin(&host);
    host.write_unsynced(path(STAGE), 1).unwrap();
    assert_eq!(freeze.sync().unwrap_err().code(), Some(Errno::ENOSPC));
    host.write_unsynced(path(STAGE), 2).unwrap();
    freeze.freeze().unwrap();
    assert!(host.tokens(path(STAGE)).unwrap().is_empty());
}

#[test]
fn anything_but_a_cut_in_the_window_is_a_violation() {
    let host = staged(FsType::Xfs);
    let freeze = begin(&host);
    make_dir(&host, "/memory/a").unwrap();
    freeze.freeze().unwrap();
    assert!(host.violations().is_empty());
    make_dir(&host, "/memory/b").unwrap();
    assert_eq!(host.violations().len(), 1);
    std::thread::scope(|scope| {
        scope.spawn(|| make_dir(&host, "/memory/c").unwrap());
    });
    assert_eq!(host.violations().len(), 1, "other calls go on");
    assert!(freeze.thaw(0).unwrap());
    make_dir(&host, "/memory/d").unwrap();
    assert_eq!(host.violations().len(), 1);
}

#[test]
fn a_freeze_and_its_journal_end_with_the_boot() {
    let host = staged(FsType::Xfs);
    host.let_guard_die(true);
    let freeze = begin(&host);
    freeze.freeze().unwrap();
    let next = host.reboot(false);
    drop(freeze);
    assert!(next.frozen().is_empty() && next.list_journaled().unwrap().is_empty());
}
