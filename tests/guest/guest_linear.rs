//! Mapped devices above loop devices: the real host's table, and what a tenant can do to the loop
//! device below it.

#![allow(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "a test panics where an expectation fails, and writes files"
)]

use std::fs::{self, File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::thread;

use nix::errno::Errno;
use slackwater::host::linux::LinuxHost;
use slackwater::host::{Device, Done, Effect, Host, LinearTable, LoopHold, LoopSpec, Result};
use slackwater_testkit::guest::in_guest;
use slackwater_testkit::run;

const MIB: u64 = 1 << 20;
const UUID: &str = "SLACKWATER-default-raw";
/// linux/loop.h
const LOOP_CLR_FD: u64 = 0x4C01;
const LOOP_SET_STATUS64: u64 = 0x4C04;
const LOOP_CHANGE_FD: u64 = 0x4C06;

fn attach(host: &LinuxHost, image: &Path) -> LoopHold {
    let done = host.perform(&Effect::AttachLoop(LoopSpec {
        image,
        backing: host.stat(image).unwrap().unwrap().id,
        block_size: 512,
        autoclear: true,
        read_only: false,
    }));
    match done.unwrap() {
        Done::Loop(hold) => hold,
        other => panic!("{other:?} is no loop device"),
    }
}

fn load(host: &LinuxHost, lower: &Device, bytes: u64) -> Result<()> {
    let lower = lower.clone();
    host.perform(&Effect::LoadLinear {
        uuid: UUID,
        table: &LinearTable { lower, bytes },
        read_only: false,
    })
    .map(drop)
}

fn resume(host: &LinuxHost) {
    host.perform(&Effect::ResumeMapped { uuid: UUID }).unwrap();
}

/// A host, an image of 4 MiB, its loop device, and the mapped device above it.
fn shown(folder: &str) -> (LinuxHost, PathBuf, LoopHold, Device) {
    let folder = Path::new(folder);
    fs::create_dir_all(folder).unwrap();
    let image = folder.join("data.img");
    File::create(&image).unwrap().set_len(4 * MIB).unwrap();
    let host = LinuxHost::new(vec![PathBuf::from("/tmp")]);
    let hold = attach(&host, &image);
    host.perform(&Effect::CreateMapped { uuid: UUID }).unwrap();
    load(&host, &hold.device(), 4 * MIB).unwrap();
    resume(&host);
    let device = host.hold_mapped(UUID).unwrap().unwrap().device;
    (host, image, hold, device)
}

fn open(device: &Device) -> File {
    let mut options = OpenOptions::new();
    options.read(true).write(true).open(&device.path).unwrap()
}

/// Gives up CAP_SYS_RAWIO in this thread.
#[expect(unsafe_code, reason = "the system call has no safe form")]
fn drop_raw_io() {
    /// linux/capability.h
    const CAP_SYS_RAWIO: u32 = 17;
    const VERSION_3: u32 = 0x2008_0522;
    let header = [VERSION_3, 0];
    // Effective, permitted and inheritable capabilities below 32, and then those from 32 on.
    let mut sets = [0u32; 6];
    // SAFETY: both arguments point to the structures of version 3, of 8 and of 24 bytes.
    let call = |number, sets: &mut [u32; 6]| unsafe {
        nix::libc::syscall(number, header.as_ptr(), sets.as_mut_ptr())
    };
    assert_eq!(call(nix::libc::SYS_capget, &mut sets), 0);
    assert_ne!(sets[0] & (1 << CAP_SYS_RAWIO), 0);
    sets[0] &= !(1 << CAP_SYS_RAWIO);
    assert_eq!(call(nix::libc::SYS_capset, &mut sets), 0);
}

/// Sends an ioctl of loop devices to a device, with the bytes to which its argument points.
#[expect(unsafe_code, reason = "the ioctls have no safe form")]
fn ioctl(device: &File, request: u64, argument: usize) -> std::result::Result<i32, Errno> {
    let fd = device.as_raw_fd();
    // SAFETY: `argument` is a number, or the address of a buffer that outlives the call and is
    // longer than `struct loop_info64`.
    Errno::result(unsafe { nix::libc::ioctl(fd, request as _, argument) })
}

/// Checks that a device takes no ioctl that detaches or changes a loop device below it. `other` is a
/// file that could replace the image.
pub(crate) fn refuses_loop_ioctls(tenant: &File, other: &File) {
    let status = [0u8; 512];
    let requests = [
        (LOOP_CLR_FD, 0),
        (LOOP_CHANGE_FD, other.as_raw_fd() as usize),
        (LOOP_SET_STATUS64, status.as_ptr() as usize),
    ];
    for (request, argument) in requests {
        let refused = ioctl(tenant, request, argument);
        assert_eq!(refused, Err(Errno::ENOTTY), "ioctl {request:#x}");
    }
}

#[test]
fn a_tenant_cannot_detach_or_change_the_loop_device_below_its_device() {
    in_guest(
        "guest_linear::a_tenant_cannot_detach_or_change_the_loop_device_below_its_device",
        &["pool:64M"],
        || {
            let (host, image, hold, device) = shown("/run/guest/ioctls");
            let other = File::open(&image).unwrap();
            let tenant = open(&device);
            // The process is root, and so has CAP_SYS_RAWIO.
            refuses_loop_ioctls(&tenant, &other);
            thread::scope(|scope| {
                scope.spawn(|| {
                    drop_raw_io();
                    refuses_loop_ioctls(&tenant, &other);
                });
            });
            // A table with one target forwards them, and the loop device accepts the first one.
            let lower = hold.device().path;
            let table = format!("0 8192 linear {} 0", lower.display());
            host.perform(&Effect::RemoveMapped { uuid: UUID }).unwrap();
            drop(tenant);
            run("udevadm", &["settle"]);
            run("dmsetup", &["create", "single", "--table", &table]);
            let single = File::open("/dev/mapper/single").unwrap();
            assert_eq!(ioctl(&single, LOOP_CLR_FD, 0), Ok(0));
            drop(single);
            run("dmsetup", &["remove", "--retry", "single"]);
        },
    );
}

#[test]
fn a_linear_table_shows_the_image_grows_and_keeps_the_loop_device() {
    in_guest(
        "guest_linear::a_linear_table_shows_the_image_grows_and_keeps_the_loop_device",
        &["pool:64M"],
        || {
            let (host, image, hold, device) = shown("/run/guest/growth");
            let lower = hold.device();
            let tenant = open(&device);
            // One write to both targets.
            tenant.write_all_at(&[7; 8192], MIB - 4096).unwrap();
            tenant.sync_all().unwrap();
            let content = fs::read(&image).unwrap();
            let (before, rest) = content.split_at((MIB - 4096) as usize);
            assert!(before.iter().all(|byte| *byte == 0));
            assert!(rest[..8192].iter().all(|byte| *byte == 7));
            assert!(rest[8192..].iter().all(|byte| *byte == 0));

            let image = OpenOptions::new().write(true).open(&image).unwrap();
            image.set_len(8 * MIB).unwrap();
            let short = load(&host, &lower, 8 * MIB).unwrap_err();
            assert_eq!(short.code(), Some(Errno::EINVAL));
            let number = hold.number;
            host.perform(&Effect::ResizeLoop { number }).unwrap();
            load(&host, &lower, 8 * MIB).unwrap();
            resume(&host);
            let sectors = run("blockdev", &["--getsize64", device.path.to_str().unwrap()]);
            assert_eq!(sectors.trim(), (8 * MIB).to_string());

            drop((tenant, hold));
            let backing = format!("/sys/block/loop{number}/loop/backing_file");
            assert!(fs::exists(&backing).unwrap(), "the table names it");
            host.perform(&Effect::RemoveMapped { uuid: UUID }).unwrap();
            assert!(host.hold_mapped(UUID).unwrap().is_none());
            run("udevadm", &["settle"]);
            assert!(!fs::exists(&backing).unwrap(), "nothing holds it");
        },
    );
}
