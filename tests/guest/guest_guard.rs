//! The freeze guard suspends mapped devices, in a guest kernel that has device mapper.

#![allow(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "a test panics where an expectation fails, and starts programs"
)]

mod deaths;
mod driver;
pub(crate) mod fixture;
mod refused;
mod two_processors;
mod waiting;

use std::fs;

use slackwater::host::Freezer;
use slackwater::model::FsType::{Btrfs, Ext4, Xfs};
use slackwater_testkit::guest::{self, in_guest};
use slackwater_testkit::run;

use fixture::{DISKS, Fixture, ProbeWrite, has_inactive_table, linear, thaw};

#[test]
fn mounted_and_raw_volumes_are_suspended_until_their_own_thaw() {
    let test = "guest_guard::mounted_and_raw_volumes_are_suspended_until_their_own_thaw";
    in_guest(test, &DISKS, || {
        let fixture = Fixture::new(&[Some(Ext4), Some(Xfs), Some(Btrfs), None]);
        for _ in 0..2 {
            let session = fixture.begin(fixture::long());
            session.sync().unwrap();
            assert!(fixture.volumes.iter().all(|one| !one.is_suspended()));
            session.freeze().unwrap();
            let writers = fixture.writers();
            for (at, writer) in writers.into_iter().enumerate() {
                assert!(fixture.volumes[at].is_suspended());
                assert!(writer.is_stopped(), "{at} waits for its own thaw");
                assert!(session.thaw(at).unwrap(), "{at} was held all the time");
                writer.goes_on();
            }
            let listed = fixture.guard.list_journaled().unwrap();
            assert_eq!(listed[3].mapped.as_deref(), Some("SLACKWATER-test-3"));
            session.written().unwrap();
            drop(session);
            fixture.assert_all_free("a session");
        }
        let session = fixture.frozen();
        session.give_up();
        drop(session);
        fixture.assert_all_free("a session that was given up");
        assert_eq!(fixture::guards().len(), 1, "one guard serves all");
    });
}

/// A write that reaches the device, or that is refused.
fn write_directly(volume: &fixture::Volume) {
    let node = format!("of=/dev/mapper/{}", volume.name());
    run(
        "dd",
        &["if=/dev/zero", &node, "oflag=direct", "bs=4k", "count=1"],
    );
}

/// The verdict on the first volume after something else was done to it.
fn verdict(fixture: &Fixture, act: impl FnOnce(&str)) -> bool {
    let session = fixture.frozen();
    act(&fixture.volumes[0].name());
    let verdicts = [0, 1].map(|at| session.thaw(at).unwrap());
    assert!(verdicts[1], "nothing was done to the second volume");
    drop(session);
    fixture.assert_all_free("a foreign process");
    verdicts[0]
}

#[test]
fn a_foreign_resume_is_detected() {
    let test = "guest_guard::a_foreign_resume_is_detected";
    in_guest(test, &DISKS, || {
        let mut fixture = Fixture::new(&[None, Some(Ext4)]);
        let resume = |name: &str| drop(run("dmsetup", &["resume", name]));
        let suspend = |name: &str| drop(run("dmsetup", &["suspend", "--nolockfs", name]));
        assert!(verdict(&fixture, |_| {}));
        assert!(!verdict(&fixture, resume));
        // The device is suspended again when the guard looks, so only the counter of its writes
        // shows it. Kernels that do not count by default count when the queue is configured so.
        let device = fs::canonicalize("/dev/mapper/slackwater-test-0").unwrap();
        let queue = device.strip_prefix("/dev").unwrap().join("queue/iostats");
        fs::write(std::path::Path::new("/sys/block").join(queue), "1").unwrap();
        let between = |name: &str| {
            resume(name);
            write_directly(&fixture.volumes[0]);
            suspend(name);
        };
        assert!(!verdict(&fixture, between));
        assert!(verdict(&fixture, |_| {}));
        // A file system that a foreign process has thawed below a device that stays suspended.
        fixture.volumes.swap(0, 1);
        let folder = fixture.volumes[0].mounted.clone().unwrap().0;
        assert!(!verdict(&fixture, |name| {
            resume(name);
            assert!(thaw(&folder));
        }));
    });
}

#[test]
fn a_table_that_a_foreign_process_loads_during_a_suspend_is_never_switched_to() {
    let test =
        "guest_guard::a_table_that_a_foreign_process_loads_during_a_suspend_is_never_switched_to";
    in_guest(test, &DISKS, || {
        let fixture = Fixture::new(&[None, None]);
        let table = |name: &str| run("dmsetup", &["table", name]);
        let before = table("slackwater-test-0");
        let other = linear(&guest::disk("pool"), 512 << 20, 64 << 20);
        let held = verdict(&fixture, |name| {
            run("dmsetup", &["load", name, "--table", &other]);
            assert!(has_inactive_table(name));
        });
        assert!(held, "nothing was written between");
        assert_eq!(table("slackwater-test-0"), before);
        assert!(!has_inactive_table("slackwater-test-0"));
    });
}

#[test]
fn a_guard_that_receives_a_signal_resumes_and_thaws_first() {
    let test = "guest_guard::a_guard_that_receives_a_signal_resumes_and_thaws_first";
    in_guest(test, &DISKS, || {
        let fixture = Fixture::new(&[Some(Ext4), None]);
        let session = fixture.frozen();
        let writers = fixture.writers();
        fixture::signal(fixture.guard_pid(), nix::sys::signal::Signal::SIGTERM);
        writers.into_iter().for_each(ProbeWrite::goes_on);
        assert!(!session.thaw(0).unwrap() && !session.thaw(1).unwrap());
        drop(session);
        fixture.assert_all_free("SIGTERM");
    });
}

/// A line of /proc/PID/status.
fn status_of(pid: u32, key: &str) -> String {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(key));
    line.unwrap_or_default().trim().to_string()
}

/// A guard whose threads could wait for writes to the devices that they have suspended would hang
/// under memory pressure.
#[test]
fn the_guard_allocates_independently_of_block_devices() {
    let test = "guest_guard::the_guard_allocates_independently_of_block_devices";
    in_guest(test, &DISKS, || {
        let fixture = Fixture::new(&[None]);
        let session = fixture.frozen();
        let pid = fixture.guard_pid();
        assert_ne!(status_of(pid, "VmLck:"), "0 kB", "its memory is locked");
        // PF_MEMALLOC_NOIO and PF_LOCAL_THROTTLE of linux/sched.h, in the flags of each thread.
        let tasks = fs::read_dir(format!("/proc/{pid}/task")).unwrap();
        for task in tasks {
            let stat = fs::read_to_string(task.unwrap().path().join("stat")).unwrap();
            let fields = stat.rsplit_once(')').unwrap().1;
            let flags: u64 = fields.split_whitespace().nth(6).unwrap().parse().unwrap();
            assert_ne!(flags & 0x0008_0000, 0, "{stat}");
        }
        assert!(session.thaw(0).unwrap());
    });
}
