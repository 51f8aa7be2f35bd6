//! Writes and the guard on two processors at once, which User Mode Linux does not have: in a guest of
//! QEMU, whose processors are emulated.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use slackwater::error::{HostError, chain};
use slackwater::host::{Freeze, Freezer};
use slackwater::model::snapshot::MAX_FREEZE_TIMEOUT;
use slackwater_testkit::guest::{self, in_guest_with};
use slackwater_testkit::{eventually, run};

use super::fixture::{DISKS, Fixture, long};

/// The time for which the rounds go on.
const ROUNDS: Duration = Duration::from_secs(60);
const BLOCK: usize = 4096;

/// A block that is aligned for direct I/O.
#[repr(align(4096))]
struct Block([u8; BLOCK]);

/// The number in the first block of the disk, which is that of the first volume.
fn on_disk() -> u64 {
    let mut options = OpenOptions::new();
    let disk = options
        .read(true)
        .custom_flags(nix::libc::O_DIRECT)
        .open(guest::disk("pool"))
        .unwrap();
    let mut block = Block([0; BLOCK]);
    disk.read_exact_at(&mut block.0, 0).unwrap();
    u64::from_le_bytes(block.0[..8].try_into().unwrap())
}

/// Writes one number after the other, until it has to stop.
fn write_numbers(device: &File, stop: &AtomicBool) {
    let mut block = Block([0; BLOCK]);
    for number in 1_u64.. {
        if stop.load(Ordering::SeqCst) {
            return;
        }
        block.0[..8].copy_from_slice(&number.to_le_bytes());
        device.write_all_at(&block.0, 0).unwrap();
    }
}

/// Stops the writer, also after a failure, when its thread is waited for.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

/// How long the driver waits for the guard's answer to a thaw before it thaws by itself. The cut is lost then.
const THAW_WAIT: Duration = Duration::from_secs(1);

/// A session that holds everything. An error is possible on a slow machine, where the guard answers late.
fn frozen(fixture: &Fixture) -> Result<Box<dyn Freeze>, HostError> {
    let session = fixture.guard.begin(fixture.members(), long())?;
    session.sync()?;
    session.freeze()?;
    Ok(session)
}

/// Releases the device. Returns whether it was held all the time, and whether the guard answered late.
fn thawed(session: &dyn Freeze) -> (bool, bool) {
    let begun = Instant::now();
    let verdict = session.thaw(0);
    let is_late = begun.elapsed() >= THAW_WAIT;
    match verdict {
        Ok(verdict) => (verdict, is_late),
        Err(error) if is_late => {
            println!("{}", chain(&error));
            (false, true)
        }
        Err(error) => panic!("{}", chain(&error)),
    }
}

/// A device is written all the time. In every other round, another process resumes it and suspends it again
/// while the guard holds it.
#[test]
fn no_verdict_hides_a_write_of_another_processor() {
    let test = "guest_guard::two_processors::no_verdict_hides_a_write_of_another_processor";
    in_guest_with(&["--qemu"], test, &DISKS, || {
        assert_eq!(thread::available_parallelism().unwrap().get(), 2);
        let fixture = Fixture::new(&[None]);
        let name = fixture.volumes[0].name();
        let columns = ["info", "--columns", "--noheadings", "-o", "minor", &name];
        // Only udev makes the link in /dev/mapper.
        let node = format!("/dev/dm-{}", run("dmsetup", &columns).trim());
        let mut options = OpenOptions::new();
        let options = options.write(true).custom_flags(nix::libc::O_DIRECT);
        let device = options.open(node).unwrap();
        let (stop, begun) = (AtomicBool::new(false), Instant::now());
        let (mut held, mut lost) = (0, 0);
        thread::scope(|scope| {
            let writer = scope.spawn(|| write_numbers(&device, &stop));
            let _stop = Stop(&stop);
            for round in 0.. {
                if begun.elapsed() > ROUNDS && held > 1 && lost > 1 {
                    break;
                }
                assert!(!writer.is_finished(), "the writer has failed");
                let start = Instant::now();
                let session = match frozen(&fixture) {
                    Ok(session) => session,
                    Err(error) => {
                        println!("round {round}: {}", chain(&error));
                        continue;
                    }
                };
                let before = on_disk();
                let is_disturbed = round % 2 == 1;
                if is_disturbed {
                    run("dmsetup", &["resume", &name]);
                    run("dmsetup", &["suspend", "--nolockfs", &name]);
                }
                let after = on_disk();
                let (verdict, is_late) = thawed(&*session);
                let is_over = start.elapsed() > MAX_FREEZE_TIMEOUT;
                assert!(verdict || is_disturbed || is_over || is_late, "it was held");
                if verdict {
                    assert_eq!(after, before, "nothing was written while it was held");
                    held += 1;
                } else if is_disturbed {
                    lost += 1;
                }
                session.written().unwrap();
                drop(session);
                if is_disturbed && is_over {
                    // On a slow machine, the guard's deadline can end before the other process suspends
                    // the device, which is then not the guard's to resume.
                    run("dmsetup", &["resume", &name]);
                }
                let is_free = || !fixture.volumes[0].is_suspended();
                match is_late {
                    true => eventually("the device is resumed", is_free),
                    false => assert!(is_free(), "round {round}"),
                }
                println!("round {round}: {held} cuts were held, {lost} were lost");
            }
        });
        fixture.assert_all_free("the last round");
    });
}
