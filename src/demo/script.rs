//! The steps of each volume.

use std::path::{Path, PathBuf};

use super::calls::{Calls, Use};
use super::progress::Progress;
use super::{Failed, Result, data};
use crate::host::linux;
use crate::model::FsType;
use crate::model::size::{HumanBytes, MIB};

/// Number of steps of one volume, for the progress bar.
const STEPS: usize = 7;
/// Number of the other steps: pool, driver, stop.
const OTHER_STEPS: usize = 3;
/// Bytes written to each volume.
const WRITTEN: u64 = 32 * MIB;

/// Kind, size, and size after expansion. XFS requires at least 300 MiB.
const KINDS: [(Option<FsType>, u64, u64); 4] = [
    (Some(FsType::Ext4), 256 * MIB, 384 * MIB),
    (Some(FsType::Xfs), 512 * MIB, 768 * MIB),
    (Some(FsType::Btrfs), 256 * MIB, 512 * MIB),
    (None, 64 * MIB, 128 * MIB),
];

/// The steps of one volume.
pub(super) struct Trial {
    pub(super) label: &'static str,
    kind: Option<FsType>,
    size: u64,
    grown: u64,
    staging: PathBuf,
    target: PathBuf,
    id: String,
    seed: u64,
}

/// All volumes; `callers` stands for the kubelet's directory.
pub(super) fn trials(callers: &Path) -> Vec<Trial> {
    let numbered = (1u64..).zip(KINDS);
    numbered
        .map(|(seed, (kind, size, grown))| {
            let label = kind.map_or("block", FsType::name);
            Trial {
                label,
                kind,
                size,
                grown,
                staging: callers.join("staging").join(label),
                target: callers.join("pods").join(label).join("volume"),
                id: String::new(),
                seed,
            }
        })
        .collect()
}

/// Total number of steps.
pub(super) fn steps() -> usize {
    KINDS.len() * STEPS + OTHER_STEPS + super::group::STEPS
}

impl Trial {
    fn used(&self) -> Use<'_> {
        Use {
            id: &self.id,
            kind: self.kind,
            staging: &self.staging,
            target: &self.target,
        }
    }

    pub(super) fn target(&self) -> &Path {
        &self.target
    }

    /// The path that is written: a file, or the device.
    fn place(&self) -> PathBuf {
        match self.kind {
            Some(_) => self.target.join("data"),
            None => self.target.clone(),
        }
    }

    /// The steps from creation to comparison.
    pub(super) async fn run(&mut self, progress: &mut Progress, calls: &mut Calls) -> Result<()> {
        let label = self.label;
        let name = format!("demo-{label}");
        let (kind, size) = (self.kind, self.size);
        let id = &mut self.id;
        progress
            .step(label, "create", async {
                *id = calls.create(&name, kind, size, None).await?;
                Ok(HumanBytes(size).to_string())
            })
            .await?;
        progress
            .step(label, "attach, stage, publish", async {
                self.make_folders()?;
                calls.bring_up(self.used()).await?;
                Ok(self.target.display().to_string())
            })
            .await?;
        let mut written = 0;
        progress
            .step(label, "write and sync", async {
                let sum = data::write(&self.place(), WRITTEN, self.seed);
                written = sum.map_err(|error| Failed::of("write", &error))?;
                let (total, used) = calls.stats(self.used()).await?;
                Ok(format!("{}, {}", HumanBytes(WRITTEN), usage(used, total)))
            })
            .await?;
        self.grow(progress, calls).await?;
        progress
            .step(label, "unpublish, unstage, publish again", async {
                calls.take_down(self.used()).await?;
                calls.bring_up(self.used()).await?;
                Ok(String::new())
            })
            .await?;
        progress
            .step(label, "compare with the written data", async {
                let found = data::checksum(&self.place(), WRITTEN);
                let found = found.map_err(|error| Failed::of("read", &error))?;
                if found != written {
                    return Err(Failed::new(
                        "compare",
                        format!("checksum {found:016x} instead of {written:016x}"),
                    ));
                }
                Ok(format!("checksum {found:016x}"))
            })
            .await
    }

    async fn grow(&self, progress: &mut Progress, calls: &mut Calls) -> Result<()> {
        const DOING: &str = "grow while in use";
        if self.kind == Some(FsType::Ext4) && !linux::has_capability(linux::SYS_RESOURCE) {
            let why = "growing a mounted ext4 needs CAP_SYS_RESOURCE, which this process lacks";
            progress.skip(self.label, DOING, why);
            return Ok(());
        }
        progress
            .step(self.label, DOING, async {
                let before = self.bytes(calls).await?;
                calls.grow(self.used(), self.grown).await?;
                let after = self.bytes(calls).await?;
                if after <= before {
                    let cause =
                        format!("{} before, {} after", HumanBytes(before), HumanBytes(after));
                    return Err(Failed::new("grow", cause));
                }
                Ok(format!(
                    "from {} to {}",
                    HumanBytes(self.size),
                    HumanBytes(self.grown)
                ))
            })
            .await
    }

    /// The size that a pod sees: that of the file system, or of the device.
    async fn bytes(&self, calls: &mut Calls) -> Result<u64> {
        if self.kind.is_none() {
            return data::device_bytes(&self.target).map_err(|error| Failed::of("read", &error));
        }
        Ok(calls.stats(self.used()).await?.0)
    }

    /// Unpublishes and deletes the volume.
    pub(super) async fn tear_down(&self, progress: &mut Progress, calls: &mut Calls) -> Result<()> {
        progress
            .step(self.label, "unpublish, unstage, detach, delete", async {
                calls.take_down(self.used()).await?;
                calls.delete(&self.id).await?;
                Ok(String::new())
            })
            .await
    }

    /// After an error, a signal or `--keep`: unpublishes as far as possible.
    pub(super) async fn take_down(&self, calls: &mut Calls) {
        if !self.id.is_empty() {
            let _ = calls.take_down(self.used()).await;
        }
    }

    /// Creates what the kubelet creates before it calls: the staging directory, and the target's
    /// parent.
    fn make_folders(&self) -> Result<()> {
        let parent = self.target.parent().unwrap_or(&self.target);
        for folder in [&self.staging, parent] {
            std::fs::create_dir_all(folder)
                .map_err(|error| Failed::of("create directories", &error))?;
        }
        Ok(())
    }
}

fn usage(used: u64, total: u64) -> String {
    match used {
        0 => format!("a device of {}", HumanBytes(total)),
        used => format!("{} of {} used", HumanBytes(used), HumanBytes(total)),
    }
}
