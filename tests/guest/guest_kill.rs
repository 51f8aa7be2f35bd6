//! The driver on a thin pool of LVM, killed with SIGKILL at its effects on devices and records.

#![allow(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "a test panics where an expectation fails, and reads devices"
)]

// Only this feature has a list of all effects.
#[cfg(feature = "fault")]
mod effects;
#[cfg(feature = "fault")]
mod killed;

use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

use slackwater_testkit::guest::in_guest;
use slackwater_testkit::{Scratch, Server, block, run};

use crate::guest_lvm::{
    DISKS, POOL, Volume, create_pool, created, end_pool, read_at, runtime, write_at,
};

/// The number of the device that is mounted at a target.
fn shown(target: &Path) -> Option<u64> {
    let found = fs::metadata(target).ok()?;
    found.file_type().is_block_device().then(|| found.rdev())
}

/// Another mount covers the target of `first` while no driver runs. The kernel's table of mounts is
/// then all that shows that its device is in use, because a mounted node does not hold its device.
async fn cover(server: &mut Server, [first, second]: [&Volume; 2]) {
    let target = first.target.to_str().unwrap();
    for other in ["/dev/null", "/etc/fstab", "/dev/guest/pool"] {
        first.up(&server.client()).await;
        write_at(&first.target, 0, 3);
        let number = shown(&first.target);
        server.kill();
        run("mount", &["--bind", other, target]);
        server.restart();
        // The driver unmounts only what it has mounted, and keeps the device until that is gone.
        let kept = first.try_down(&server.client()).await.expect_err(other);
        second.up(&server.client()).await;
        write_at(&second.target, 0, 2);
        assert_ne!(number, shown(&second.target), "{other}: {kept}");
        run("umount", &[target]);
        assert_eq!(shown(&first.target), number, "{other}: {kept}");
        assert_eq!(read_at(&first.target, 0), 3, "{other}: {kept}");
        second.down(&server.client()).await;
        first.down(&server.client()).await;
    }
}

#[test]
fn a_target_whose_driver_was_killed_never_shows_the_volume_of_another_tenant() {
    let test =
        "guest_kill::a_target_whose_driver_was_killed_never_shows_the_volume_of_another_tenant";
    in_guest(test, &DISKS, || {
        create_pool("640M");
        let scratch = Scratch::new();
        let mut server = Server::start(&scratch, &[POOL]);
        runtime().block_on(async {
            let first = created(&scratch, &server.client(), "first", block()).await;
            let second = created(&scratch, &server.client(), "second", block()).await;
            let gate = scratch.join("gate");
            for fault in [
                "unmount:kill",
                "unmount:kill-after",
                "remove_mapped:kill-after",
            ] {
                first.up(&server.client()).await;
                write_at(&first.target, 0, 1);
                // No process has the device open until the driver runs again.
                let faults = format!("effect.{fault},effect.all:after={}", gate.display());
                server.restart_with(&[("SLACKWATER_FAULT", &faults)]);
                fs::write(&gate, "").unwrap();
                let client = server.client();
                first.try_down(&client).await.expect_err(fault);
                assert_eq!(server.wait(), None, "{fault}");
                fs::remove_file(&gate).unwrap();
                server.restart();
                second.up(&server.client()).await;
                write_at(&second.target, 0, 2);
                if let Some(number) = shown(&first.target) {
                    assert_ne!(Some(number), shown(&second.target), "{fault}");
                    assert_eq!(read_at(&first.target, 0), 1, "{fault}");
                }
                second.down(&server.client()).await;
                first.down(&server.client()).await;
            }
            // Another program removes the device while no driver runs.
            first.up(&server.client()).await;
            server.kill();
            let devices = run("dmsetup", &["ls", "--target", "thin"]);
            let of_first = |line: &&str| line.contains(first.id.split_once('.').unwrap().1);
            let device = devices.lines().find(of_first).unwrap();
            run("dmsetup", &["remove", device.split('\t').next().unwrap()]);
            server.restart();
            second.up(&server.client()).await;
            assert_ne!(shown(&first.target), shown(&second.target), "reused");
            first.down(&server.client()).await;
            second.down(&server.client()).await;
            cover(&mut server, [&first, &second]).await;
            for volume in [first, second] {
                server.client().delete(&volume.id).await.unwrap();
            }
        });
        end_pool(server);
    });
}
