//! Only the root of the volume's file system is frozen: the mount may be gone or replaced since it
//! was looked up.

use std::path::Path;

use slackwater::host::{Device, Freezer, Host, MountRoot};
use slackwater::model::FsType::{self, Btrfs, Ext4, Xfs};

use crate::guard::fixture::{Fixture, ProbeWrite, long};
use crate::host_linux::scratch::{error_text, run, text};

const ALL: [FsType; 3] = [Ext4, Xfs, Btrfs];

fn open(
    fixture: &Fixture,
    mount_point: &Path,
    device: &Device,
    fs: FsType,
) -> Result<MountRoot, String> {
    let opened = fixture.pool.host.open_mount_root(mount_point, device, fs);
    opened.map_err(|error| error_text(&error))
}

#[test]
fn a_mount_that_is_gone_or_was_replaced_is_refused() {
    let fixture = Fixture::new(&ALL);
    for (at, fs) in ALL.into_iter().enumerate() {
        let volume = &fixture.volumes[at];
        let other = &fixture.volumes[(at + 1) % ALL.len()];
        open(&fixture, &volume.target, &volume.device, fs).unwrap();
        // The device differs from the mounted one.
        open(&fixture, &volume.target, &other.device, fs).unwrap_err();
        open(&fixture, &other.target, &volume.device, fs).unwrap_err();
        // Another file system is mounted over it.
        run("mount", &["-t", "tmpfs", "none", text(&volume.target)]);
        let refusal = open(&fixture, &volume.target, &volume.device, fs).unwrap_err();
        assert!(refusal.contains("freeze"), "{refusal}");
        crate::guard::fixture::unmount(&volume.target);
        // It is unmounted: the folder belongs to the host's own file system.
        crate::guard::fixture::unmount(&volume.target);
        open(&fixture, &volume.target, &volume.device, fs).unwrap_err();
        // A link to the right folder.
        fixture.pool.mount(&volume.device, &volume.target, fs, &[]);
        let link = fixture.pool.root.join(format!("link-{fs}"));
        std::os::unix::fs::symlink(&volume.target, &link).unwrap();
        open(&fixture, &link, &volume.device, fs).unwrap_err();
        // Neither a file nor a missing path.
        let file = volume.target.join("file");
        std::fs::write(&file, "").unwrap();
        open(&fixture, &file, &volume.device, fs).unwrap_err();
        open(&fixture, &volume.target.join("nothing"), &volume.device, fs).unwrap_err();
    }
    // The host's own file system.
    ProbeWrite::start(&fixture.pool.root).goes_on();
}

#[test]
fn changes_of_the_mount_after_the_lookup_have_no_effect() {
    let fixture = Fixture::new(&ALL);
    let members = fixture.members(&ALL);
    for volume in &fixture.volumes {
        run("umount", &["--lazy", text(&volume.target)]);
    }
    let session = fixture.guard.begin(members, long()).unwrap();
    session.sync().unwrap();
    session.freeze().unwrap();
    for volume in &fixture.volumes {
        // The folder belongs to the host now, and is writable.
        ProbeWrite::start(&volume.target).goes_on();
    }
    assert!(
        (0..3).all(|at| session.thaw(at).unwrap()),
        "the volumes were, and stayed, frozen"
    );
}
