//! The root that is frozen is the volume's, or nothing is: the mount may have gone or been
//! replaced since it was looked up.

use std::path::Path;

use slackwater::host::{Device, Freezer, Host, MountRoot};
use slackwater::model::FsType::{self, Btrfs, Ext4, Xfs};

use crate::bench::{Bench, Write_, long};
use crate::scratch::{run, said, text};

const ALL: [FsType; 3] = [Ext4, Xfs, Btrfs];

fn open(
    bench: &Bench,
    mount_point: &Path,
    device: &Device,
    fs: FsType,
) -> Result<MountRoot, String> {
    let opened = bench.pool.host.open_mount_root(mount_point, device, fs);
    opened.map_err(|error| said(&error))
}

#[test]
fn a_mount_that_went_or_was_replaced_is_refused() {
    let bench = Bench::new(&ALL);
    for (at, fs) in ALL.into_iter().enumerate() {
        let volume = &bench.volumes[at];
        let other = &bench.volumes[(at + 1) % ALL.len()];
        open(&bench, &volume.target, &volume.device, fs).unwrap();
        // Another device than what is mounted there.
        open(&bench, &volume.target, &other.device, fs).unwrap_err();
        open(&bench, &other.target, &volume.device, fs).unwrap_err();
        // Something is mounted over it.
        run("mount", &["-t", "tmpfs", "none", text(&volume.target)]);
        let told = open(&bench, &volume.target, &volume.device, fs).unwrap_err();
        assert!(told.contains("freeze"), "{told}");
        crate::bench::unmount(&volume.target);
        // It went: the folder is one of the host's own file system.
        crate::bench::unmount(&volume.target);
        open(&bench, &volume.target, &volume.device, fs).unwrap_err();
        // A link to what would be right.
        bench.pool.mount(&volume.device, &volume.target, fs, &[]);
        let link = bench.pool.root.join(format!("link-{fs}"));
        std::os::unix::fs::symlink(&volume.target, &link).unwrap();
        open(&bench, &link, &volume.device, fs).unwrap_err();
        // Neither a file nor nothing.
        let file = volume.target.join("file");
        std::fs::write(&file, "").unwrap();
        open(&bench, &file, &volume.device, fs).unwrap_err();
        open(&bench, &volume.target.join("nothing"), &volume.device, fs).unwrap_err();
    }
    // The host's own file system.
    Write_::start(&bench.pool.root).goes_on();
}

#[test]
fn what_happens_to_the_mount_after_that_changes_nothing() {
    let bench = Bench::new(&ALL);
    let members = bench.members(&ALL);
    for volume in &bench.volumes {
        run("umount", &["--lazy", text(&volume.target)]);
    }
    let session = bench.guard.begin(members, long()).unwrap();
    session.sync().unwrap();
    session.freeze().unwrap();
    for volume in &bench.volumes {
        // The folder is the host's now, and writable.
        Write_::start(&volume.target).goes_on();
    }
    assert!(
        (0..3).all(|at| session.thaw(at).unwrap()),
        "the volumes were, and stayed, frozen"
    );
}
