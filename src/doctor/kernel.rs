//! Checks the machine: kernel, permissions, programs, loop devices, mount propagation.

use std::path::{Path, PathBuf};

use super::{Check, Subject};
use crate::error::{HostError, chain};
use crate::host::linux::{self, SYS_ADMIN, SYS_RESOURCE, effective_capabilities};
use crate::host::{Effect, FileKind, Host, LoopSpec, LoopStatus, attach_loop};

/// LOOP_CONFIGURE was added in 5.8, mount_setattr (read-only bind mounts) in 5.12.
const OLDEST_KERNEL: (u32, u32) = (5, 12);
const RELEASE: &str = "/proc/sys/kernel/osrelease";
const SCRATCH_BYTES: u64 = 16 << 20;

/// Program, Debian package, purpose.
const PROGRAMS: [(&str, &str, &str); 4] = [
    (
        "blkid",
        "util-linux",
        "the contents of volumes cannot be detected",
    ),
    ("mkfs.ext4", "e2fsprogs", "ext4 volumes cannot be used"),
    ("mkfs.xfs", "xfsprogs", "xfs volumes cannot be used"),
    ("mkfs.btrfs", "btrfs-progs", "btrfs volumes cannot be used"),
];

pub(super) fn examine(host: &dyn Host, examined: &Subject) -> Vec<Check> {
    let mut checks = vec![kernel(&text(host, RELEASE))];
    checks.extend(capabilities(&text(host, "/proc/self/status")));
    checks.extend(programs(host, &examined.programs));
    checks.push(loop_control(host));
    checks.push(loops(host));
    checks.extend(super::udev::examine(host));
    let table = text(host, "/proc/self/mountinfo");
    let switch = |name: &str| text(host, &format!("/sys/kernel/{name}"));
    let (expedited, normal) = (switch("rcu_expedited"), switch("rcu_normal"));
    checks.push(grace_periods(&expedited, &normal, &table));
    let allowed = examined.allowed_paths.iter();
    checks.extend(allowed.map(|path| allowed_path(host, path, &table)));
    checks
}

/// Reads a file in /proc. If it cannot be read the result is empty, which each check reports as
/// unknown.
fn text(host: &dyn Host, path: &str) -> String {
    let bytes = host.read_file(Path::new(path)).ok().flatten();
    String::from_utf8_lossy(&bytes.unwrap_or_default()).into_owned()
}

/// Major and minor version of the running kernel; `None` if not known.
pub(super) fn version(host: &dyn Host) -> Option<(u32, u32)> {
    linux::version(&text(host, RELEASE))
}

fn kernel(release: &str) -> Check {
    let release = release.trim();
    let Some(found) = linux::version(release) else {
        return Check::warn(
            "kernel",
            "its release is unknown",
            "Linux 5.12 or newer is needed",
        );
    };
    if found < OLDEST_KERNEL {
        return Check::fail(
            "kernel",
            format!("{release} has no mount_setattr"),
            "boot Linux 5.12 or newer",
        );
    }
    Check::ok("kernel", release)
}

fn capabilities(status: &str) -> Vec<Check> {
    let Some(effective) = effective_capabilities(status) else {
        return vec![Check::warn(
            "privileges",
            "the capabilities of this process are unknown",
            "run it as root",
        )];
    };
    let has = |bit: u32| effective & (1 << bit) != 0;
    vec![
        if has(SYS_ADMIN) {
            Check::ok(
                "privileges",
                "CAP_SYS_ADMIN: mounts and loop devices are possible",
            )
        } else {
            Check::fail(
                "privileges",
                "without CAP_SYS_ADMIN, mounts and loop devices are not possible",
                "run it as root; in a container, as privileged",
            )
        },
        if has(SYS_RESOURCE) {
            Check::ok(
                "privileges",
                "CAP_SYS_RESOURCE: mounted ext4 file systems can grow",
            )
        } else {
            Check::warn(
                "privileges",
                "without CAP_SYS_RESOURCE, mounted ext4 volumes cannot grow",
                "add the capability; xfs and btrfs grow without it",
            )
        },
    ]
}

/// Whether a freeze takes about a millisecond (ADR 0028).
fn grace_periods(expedited: &str, normal: &str, mountinfo: &str) -> Check {
    let subject = "grace periods";
    let long = "each freeze blocks writers for about 25 ms longer";
    let on = |text: &str| !matches!(text.trim(), "" | "0");
    let is_sys = |line: &&str| line.split(' ').nth(4) == Some("/sys");
    let is_read_only = |line: &str| {
        let options = line.split(' ').nth(5).unwrap_or_default();
        options.split(',').any(|option| option == "ro")
    };
    if on(normal) {
        let found = format!("normal, as set by /sys/kernel/rcu_normal: {long}");
        return Check::ok(subject, found);
    }
    let found = if expedited.trim().is_empty() {
        "/sys/kernel/rcu_expedited does not exist"
    } else if mountinfo.lines().rfind(is_sys).is_some_and(is_read_only) {
        "/sys is read-only"
    } else {
        return Check::ok(subject, "expedited while a file system is frozen");
    };
    let fix =
        "give the freeze guard a writable /sys: run it as root; in a container, as privileged";
    Check::warn(subject, format!("{found}: {long}"), fix)
}

/// Whether this process may mount; `None` if not known.
pub(super) fn may_mount(host: &dyn Host) -> Option<bool> {
    effective_capabilities(&text(host, "/proc/self/status"))
        .map(|effective| effective & (1 << SYS_ADMIN) != 0)
}

/// Whether a program exists in one of the directories.
pub(super) fn is_there(host: &dyn Host, folders: &[PathBuf], program: &str) -> bool {
    folders.iter().any(|folder| {
        let found = host.stat(&folder.join(program));
        matches!(found, Ok(Some(stat)) if stat.kind != FileKind::Dir)
    })
}

fn programs(host: &dyn Host, folders: &[PathBuf]) -> Vec<Check> {
    let is_there = |program: &str| is_there(host, folders, program);
    let (there, missing): (Vec<_>, Vec<_>) =
        PROGRAMS.into_iter().partition(|(name, ..)| is_there(name));
    let mut checks = Vec::new();
    if !there.is_empty() {
        let names: Vec<&str> = there.iter().map(|(name, ..)| *name).collect();
        checks.push(Check::ok("programs", names.join(", ")));
    }
    for (name, package, purpose) in missing {
        let found = format!("{name} is missing: {purpose}");
        let fix = format!("install {package}");
        // Without blkid no volume can be staged; each other program affects one file system only.
        checks.push(if name == "blkid" {
            Check::fail("programs", found, fix)
        } else {
            Check::warn("programs", found, fix)
        });
    }
    let lvm = if is_there("lvm") {
        "found"
    } else {
        "not found"
    };
    checks.push(Check::ok(
        "LVM",
        format!("{lvm}; the driver itself runs no program of LVM"),
    ));
    checks
}

fn loop_control(host: &dyn Host) -> Check {
    match host.stat(Path::new("/dev/loop-control")) {
        Ok(Some(_)) => Check::ok("loop control", "/dev/loop-control"),
        Ok(None) => Check::fail(
            "loop control",
            "/dev/loop-control does not exist",
            "modprobe loop; in a container, mount the host's /dev",
        ),
        Err(error) => Check::fail("loop control", chain(&error), "modprobe loop"),
    }
}

fn loops(host: &dyn Host) -> Check {
    match host.loops() {
        Ok(loops) => Check::ok("loop devices", format!("{} attached", loops.len())),
        Err(error) => Check::fail(
            "loop devices",
            chain(&error),
            "in a container, mount the host's /dev and /sys",
        ),
    }
}

/// Checks a directory for mounts: it must exist, and mounts in it must propagate to other mount
/// namespaces.
fn allowed_path(host: &dyn Host, path: &Path, mountinfo: &str) -> Check {
    let subject = format!("allowed path {}", path.display());
    match host.stat(path) {
        Ok(Some(stat)) if stat.kind == FileKind::Dir => {}
        Ok(Some(_)) => return Check::fail(subject, "is not a directory", "give a directory"),
        Ok(None) => {
            return Check::warn(
                subject,
                "does not exist",
                "create it, or give another directory with --allowed-path",
            );
        }
        Err(error) => return Check::fail(subject, chain(&error), "make it readable for root"),
    }
    match is_shared(mountinfo, path) {
        Some(true) => Check::ok(subject, "mounts below it are visible on the host (shared)"),
        Some(false) => Check::warn(
            subject,
            "mounts below it stay in this mount namespace",
            "in a pod, set mountPropagation: Bidirectional; otherwise run mount --make-rshared",
        ),
        None => Check::warn(subject, "its mount is unknown", "mount /proc"),
    }
}

/// Whether the mount that contains a path is in a peer group: proc(5), optional fields.
fn is_shared(mountinfo: &str, path: &Path) -> Option<bool> {
    let lines = mountinfo.lines().filter_map(|line| {
        let words: Vec<&str> = line.split(' ').collect();
        let point = PathBuf::from(words.get(4)?.replace("\\040", " "));
        let optional = words.iter().skip(6).take_while(|word| **word != "-");
        let shared = optional.into_iter().any(|word| word.starts_with("shared:"));
        path.starts_with(&point).then_some((point, shared))
    });
    // Of several mounts at one mount point, the last is on top.
    lines
        .max_by_key(|(point, _)| point.components().count())
        .map(|(_, shared)| shared)
}

/// Attaches a temporary image in a pool's directory, returns whether it uses direct I/O, and
/// removes everything again.
pub(super) fn try_loop(
    host: &dyn Host,
    folder: &Path,
    sector: u32,
) -> Result<LoopStatus, HostError> {
    let image = folder.join(format!("doctor-{}.img", host.random_uuid()));
    let tried = attach(host, &image, sector);
    let removed = host.perform(&Effect::RemoveFile { path: &image });
    let status = tried?;
    removed.map(|_| status)
}

fn attach(host: &dyn Host, image: &Path, sector: u32) -> Result<LoopStatus, HostError> {
    host.perform(&Effect::Allocate {
        path: image,
        size: SCRATCH_BYTES,
        reserve: false,
    })?;
    let gone = || HostError::unexpected("stat", image, "the temporary image has disappeared");
    let backing = host.stat(image)?.ok_or_else(gone)?.id;
    let spec = LoopSpec {
        image,
        backing,
        block_size: sector,
        autoclear: true,
        read_only: false,
    };
    let hold = attach_loop(host, spec)?;
    let status = host
        .loops()?
        .into_iter()
        .find(|status| status.number == hold.number && status.backing == backing);
    // With autoclear the device is detached when its last opener, this process, closes it.
    drop(hold);
    status.ok_or_else(gone)
}

#[cfg(test)]
mod tests {
    use super::*;
    use slackwater_core::fuzz::fuzz_text;

    #[test]
    fn kernels_before_mount_setattr_are_refused() {
        let levels: Vec<String> = ["5.11.19-generic", "5.12.0", "6.12.1+deb13", "", "next-2026"]
            .iter()
            .map(|release| kernel(release).to_string())
            .collect();
        insta::assert_snapshot!(levels.join("\n"));
    }

    #[test]
    fn rights_are_read_from_the_status_of_the_process() {
        let checks: Vec<String> = [
            "CapEff:\t000001fffeffffff\n",
            "CapEff:\t0000000000000000\n",
            "Name:\tx\n",
        ]
        .iter()
        .flat_map(|status| capabilities(status))
        .map(|check| check.to_string())
        .collect();
        insta::assert_snapshot!(checks.join("\n"));
    }

    #[test]
    fn a_freeze_is_short_where_grace_periods_may_be_expedited() {
        let table =
            "20 1 0:5 / / rw - ext4 /dev/sda1 rw\n21 20 0:6 / /sys ro,nosuid - sysfs sysfs rw\n";
        let checks: Vec<String> = [
            ("0\n", "0\n", ""),
            ("0\n", "1\n", ""),
            ("", "", ""),
            ("0\n", "0\n", table),
        ]
        .iter()
        .map(|(expedited, normal, table)| grace_periods(expedited, normal, table).to_string())
        .collect();
        insta::assert_snapshot!(checks.join("\n"));
    }

    #[test]
    fn the_innermost_mount_decides_whether_mounts_are_seen_outside() {
        let table = "\
22 1 8:1 / / rw shared:1 - ext4 /dev/sda1 rw
30 22 8:2 / /var/lib rw - xfs /dev/sdb rw
31 30 8:3 / /var/lib/kubelet rw master:2 shared:9 - xfs /dev/sdc rw
32 22 8:4 / /with\\040space rw - xfs /dev/sdd rw
";
        let path = Path::new("/with space/x");
        fuzz_text("mount propagation", &[table], |table| {
            is_shared(table, path)
        });
        let shared = |path: &str| is_shared(table, Path::new(path));
        assert_eq!(shared("/etc"), Some(true));
        assert_eq!(shared("/var/lib/other"), Some(false));
        assert_eq!(shared("/var/lib/kubelet/pods"), Some(true));
        assert_eq!(shared("/with space/x"), Some(false));
        assert_eq!(is_shared("", Path::new("/")), None);
    }
}
