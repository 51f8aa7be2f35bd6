//! Devices that the guard may not suspend are refused, and left as they were.

use std::fs::{self, File};
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::process::{Child, Command, Stdio};

use nix::errno::Errno;
use slackwater::error::HostError;
use slackwater::host::linux::seqpacket::Channel;
use slackwater::host::{Device, DeviceHold, FreezeMember, Freezer};
use slackwater::model::FsType::Ext4;
use slackwater_testkit::guest::{self, in_guest};
use slackwater_testkit::{eventually, run};

use super::fixture::{
    DISKS, Fixture, create_linear, guard_of, guards, has_inactive_table, is_suspended, linear, long,
};

fn refusal(fixture: &Fixture, members: Vec<FreezeMember>) -> HostError {
    match fixture.guard.begin(members, long()) {
        Ok(_) => panic!("it was not refused"),
        Err(error) => error,
    }
}

/// A raw member on any open device.
fn on_device(path: &str) -> FreezeMember {
    let file = File::open(path).unwrap();
    let rdev = file.metadata().unwrap().rdev();
    FreezeMember {
        volume_id: "other".into(),
        namespace: None,
        image: slackwater::host::FileId {
            device: rdev,
            inode: 1,
        },
        root: None,
        mapped: Some(DeviceHold {
            device: Device {
                path: path.into(),
                rdev,
            },
            keep: Box::new(OwnedFd::from(file)),
        }),
    }
}

#[test]
fn devices_of_others_are_refused_and_left_as_they_were() {
    let test = "guest_guard::refused::devices_of_others_are_refused_and_left_as_they_were";
    in_guest(test, &DISKS, || {
        let fixture = Fixture::new(&[Some(Ext4), None]);
        let name = fixture.volumes[1].name();

        run("dmsetup", &["suspend", &name]);
        let error = refusal(&fixture, fixture.members());
        assert_eq!(error.code(), Some(Errno::EBUSY), "{error}");
        assert!(is_suspended(&name));
        assert!(fixture.guard.sweep().unwrap().is_empty());
        assert!(is_suspended(&name), "the sweep leaves it alone, too");
        run("dmsetup", &["resume", &name]);

        let disk = guest::disk("pool");
        let other = linear(&disk, 512 << 20, 64 << 20);
        run("dmsetup", &["load", &name, "--table", &other]);
        let error = refusal(&fixture, fixture.members());
        assert_eq!(error.code(), Some(Errno::EBUSY), "{error}");
        assert!(has_inactive_table(&name));
        run("dmsetup", &["clear", &name]);

        create_linear("theirs", "LVM-theirs", &disk, 512 << 20, 64 << 20);
        for path in ["/dev/mapper/theirs", &disk] {
            let error = refusal(&fixture, vec![on_device(path)]);
            assert_eq!(error.code(), Some(Errno::EPERM), "{path}: {error}");
        }
        assert!(!is_suspended("theirs"));
        let error = refusal(&fixture, vec![on_device("/dev/null")]);
        assert_eq!(error.code(), Some(Errno::ENOTBLK), "{error}");

        let mut members = fixture.members();
        members[1].mapped = members[0].mapped.take();
        members.truncate(2);
        let first = members.remove(0);
        let mut mixed = fixture.volumes[1].member(&fixture.host);
        mixed.root = first.root;
        let error = refusal(&fixture, vec![mixed]);
        assert!(error.to_string().contains("suspend"), "{error}");

        assert!(fixture.journal_is_empty());
        assert!(guards().is_empty(), "no guard was started for that");
        fixture.assert_all_free("refusals");
    });
}

/// A guard that does not see /dev/mapper. It is killed when this is dropped.
struct BlindGuard(Child);

impl BlindGuard {
    fn start(fixture: &Fixture) -> BlindGuard {
        fs::create_dir_all(&fixture.state).unwrap();
        let socket = fixture.state.join("guard.sock");
        let hide =
            "mount -t tmpfs none /dev/mapper && exec \"$0\" --socket \"$1\" --state-dir \"$2\"";
        let child = Command::new("unshare")
            .args(["--mount", "sh", "-c", hide])
            .arg(env!("CARGO_BIN_EXE_slackwater-guard"))
            .arg(&socket)
            .arg(&fixture.state)
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        eventually("a guard that listens", || {
            Channel::connect(&socket).is_ok_and(|channel| channel.is_some())
        });
        BlindGuard(child)
    }
}

impl Drop for BlindGuard {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_guard_without_device_mapper_freezes_and_refuses_devices() {
    let test = "guest_guard::refused::a_guard_without_device_mapper_freezes_and_refuses_devices";
    in_guest(test, &DISKS, || {
        let fixture = Fixture::new(&[Some(Ext4)]);
        let _blind = BlindGuard::start(&fixture);
        let guard = guard_of(&fixture.state).started_by_others();
        guard.ready(true).unwrap();
        let Err(error) = guard.begin(fixture.members(), long()) else {
            panic!("it was not refused");
        };
        assert_eq!(error.code(), Some(Errno::EOPNOTSUPP), "{error}");
        assert!(error.to_string().contains("dm_mod"), "{error}");
        assert!(fixture.journal_is_empty());
        let mut members = fixture.members();
        members[0].mapped = None;
        let session = guard.begin(members, long()).unwrap();
        session.freeze().unwrap();
        assert!(!fixture.volumes[0].is_suspended());
        assert!(session.thaw(0).unwrap());
        drop(session);
        fixture.assert_all_free("a session without devices");
    });
}
