//! Checks and growth of unmounted file systems.

use nix::errno::Errno;

use super::content::Health;
use super::machine::Machine;
use super::mapped::number_of;
use crate::error::HostCause;
use crate::host::{Check, Checked, Device};
use crate::model::FsType;

impl Machine {
    /// Simulates e2fsck and similar tools: they refuse a mounted device, and repair as requested.
    pub(super) fn check_fs(
        &mut self,
        device: &Device,
        fs: FsType,
        how: Check,
    ) -> Result<Checked, HostCause> {
        let number = number_of(device).ok_or(Errno::ENOTBLK)?;
        let refuse = |code: i32, stderr: String| HostCause::Tool {
            program: format!("fsck.{fs}"),
            status: format!("exit status: {code}"),
            stderr,
        };
        if self.supers.contains_key(&number) {
            self.violation(format!("check of loop{number}, which is mounted"));
            return Err(refuse(8, format!("/dev/loop{number} is mounted")));
        }
        let content = self.content_mut(number)?.fs_mut();
        let content = content.filter(|content| content.fs == fs);
        let content = content.ok_or_else(|| refuse(8, "bad magic number".into()))?;
        let repairs = match how {
            Check::Look => false,
            Check::Preen | Check::Whole => content.health != Health::Broken,
            Check::Repair => true,
        };
        if repairs {
            content.health = Health::Sound;
            self.sync_loop(number);
        } else if content.health == Health::Broken && how != Check::Look {
            let what = "UNEXPECTED INCONSISTENCY; RUN fsck MANUALLY";
            return Err(refuse(4, what.into()));
        }
        let sound = self
            .content(number)?
            .fs()
            .is_some_and(|fs| fs.health == Health::Sound);
        let report = if sound { "clean" } else { "errors were found" };
        Ok(Checked {
            sound,
            report: report.into(),
        })
    }

    /// Simulates resize2fs: it refuses a mounted device, and a file system that no check has just
    /// found sound.
    pub(super) fn grow_unmounted(&mut self, device: &Device) -> Result<(), HostCause> {
        let number = number_of(device).ok_or(Errno::ENOTBLK)?;
        let refuse = |stderr: &str| HostCause::Tool {
            program: "resize2fs".into(),
            status: "exit status: 1".into(),
            stderr: stderr.into(),
        };
        if self.supers.contains_key(&number) {
            self.violation(format!("resize2fs of loop{number}, which is mounted"));
            return Err(refuse("on-line resizing required"));
        }
        let bytes = self.dev(number)?.bytes;
        let content = self.content_mut(number)?.fs_mut();
        let content = content.filter(|content| content.fs == FsType::Ext4);
        let content = content.ok_or_else(|| refuse("bad magic number"))?;
        if content.health != Health::Sound {
            return Err(refuse("please run 'e2fsck -f' first"));
        }
        content.bytes = content.bytes.max(bytes);
        self.sync_loop(number);
        Ok(())
    }

    /// Simulates a resize2fs that was interrupted: only [`Check::Repair`] makes the file system
    /// sound again.
    pub(super) fn cut_off_growth(&mut self, device: &Device) {
        if let Some(number) = number_of(device)
            && let Ok(content) = self.content_mut(number)
            && let Some(fs) = content.fs_mut()
        {
            fs.health = Health::Broken;
            self.sync_loop(number);
        }
    }
}
