//! Checks of unmounted file systems, by their own tools.
//!
//! A tool is never killed: interrupting a repair can leave the file system worse than before.
//! e2fsck and xfs_repair open the device exclusively when they write, so the kernel refuses to
//! mount it in this time, even if the driver that started them has died.

use super::growth::ext4_superblock;
use super::program::{BTRFS, E2FSCK, Ended, Program, XFS_REPAIR};
use crate::error::HostError;
use crate::host::session::one_line_excerpt;
use crate::host::{Check, Checked, Device, Result};
use crate::model::FsType;

/// Bits of e2fsck's exit status: errors were repaired; errors are left; it could not run.
const REPAIRED: i32 = 1 | 2;
const LEFT: i32 = 4;
/// Maximum length of the reported output of a program.
const REPORT_BYTES: usize = 16 << 10;

pub(super) fn is_unclean(device: &Device, fs: FsType) -> Result<bool> {
    match fs {
        FsType::Ext4 => Ok(ext4_superblock(device)?.is_unclean()),
        FsType::Xfs | FsType::Btrfs => Ok(false),
    }
}

pub(super) fn check(device: &Device, fs: FsType, how: Check) -> Result<Checked> {
    let path = &device.path;
    let (program, words) = command(fs, how).ok_or_else(|| {
        HostError::unexpected(
            "check",
            path,
            format!("{fs} is not checked when it is mounted"),
        )
    })?;
    // The node must be the device, whatever its path refers to.
    let open = super::loop_device::open_verified(device)?;
    let mut arguments: Vec<&str> = words.to_vec();
    let device_name = path.to_string_lossy();
    arguments.push(&device_name);
    let mut ended = program.run_on(open, path, &arguments)?;
    let report = report(&ended);
    match sound(fs, how, ended.status.code()) {
        Some(sound) if sound || matches!(how, Check::Look | Check::Repair) => {
            Ok(Checked { sound, report })
        }
        Some(_) | None => {
            // e2fsck writes most messages to standard output.
            ended.stderr = one_line_excerpt(&report);
            Err(ended.error("check", path))
        }
    }
}

/// The program and its arguments, without the device.
fn command(fs: FsType, how: Check) -> Option<(Program, &'static [&'static str])> {
    Some(match (fs, how) {
        (FsType::Ext4, Check::Preen) => (E2FSCK, &["-p"]),
        (FsType::Ext4, Check::Whole) => (E2FSCK, &["-f", "-p"]),
        (FsType::Ext4, Check::Look) => (E2FSCK, &["-f", "-n"]),
        (FsType::Ext4, Check::Repair) => (E2FSCK, &["-f", "-y"]),
        (FsType::Xfs, Check::Look) => (XFS_REPAIR, &["-n"]),
        (FsType::Xfs, Check::Repair) => (XFS_REPAIR, &[]),
        (FsType::Btrfs, Check::Look) => (BTRFS, &["check", "--readonly"]),
        (FsType::Btrfs, Check::Repair) => (BTRFS, &["check", "--repair"]),
        (FsType::Xfs | FsType::Btrfs, Check::Preen | Check::Whole) => return None,
    })
}

/// Interprets the exit status; `None` if the program could not run.
fn sound(fs: FsType, how: Check, code: Option<i32>) -> Option<bool> {
    match (fs, code?) {
        (_, 0) => Some(true),
        (FsType::Ext4, code) if code & !REPAIRED == 0 => Some(true),
        (FsType::Ext4, code) if code & !(REPAIRED | LEFT) == 0 => Some(false),
        // A log that only a mount can replay gives 2, and nothing was checked.
        (FsType::Xfs, 1) if how == Check::Look => Some(false),
        (FsType::Btrfs, 1) => Some(false),
        _ => None,
    }
}

fn report(ended: &Ended) -> String {
    let mut text = format!("{}\n{}", ended.stdout.trim(), ended.stderr);
    if text.len() > REPORT_BYTES {
        text.truncate(text.floor_char_boundary(REPORT_BYTES));
        text.push('\u{2026}');
    }
    text.trim().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::ExitStatus;

    #[test]
    fn fuzz_reports() {
        let long = "Pass 1: Checking inodes, blocks, and sizes \u{2026}\n".repeat(180);
        let seeds = ["/dev/loop0: clean, 11/65536 files\n", &long];
        crate::fuzz::fuzz_text("reports of checks", &seeds, |text| {
            let report = report(&Ended {
                program: E2FSCK,
                status: ExitStatus::default(),
                stdout: text.to_string(),
                stderr: text.to_string(),
            });
            assert!(report.len() <= REPORT_BYTES + '\u{2026}'.len_utf8());
            Some(report)
        });
    }

    #[test]
    fn exit_codes_tell_sound_from_broken_and_from_not_checked() {
        let ext4 = |code| sound(FsType::Ext4, Check::Preen, Some(code));
        assert_eq!([0, 1, 2, 3].map(ext4), [Some(true); 4]);
        assert_eq!([4, 5, 6].map(ext4), [Some(false); 3]);
        assert_eq!([8, 12, 16, 32, 128].map(ext4), [None; 5]);
        let xfs = |how, code| sound(FsType::Xfs, how, Some(code));
        assert_eq!(xfs(Check::Look, 1), Some(false));
        assert_eq!([1, 2].map(|code| xfs(Check::Repair, code)), [None; 2]);
        assert_eq!(sound(FsType::Btrfs, Check::Look, Some(1)), Some(false));
        // The program was killed by a signal.
        assert_eq!(sound(FsType::Ext4, Check::Preen, None), None);
    }
}
