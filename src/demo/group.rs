//! A group snapshot: three volumes with writers that write across them, one group snapshot with a
//! hook, restoring all three, and a check that no write is out of order.

use std::path::{Path, PathBuf};
use std::time::Duration;

use super::calls::{Calls, Use};
use super::progress::Progress;
use super::writers::{self, Writers};
use super::{Failed, Result};
use crate::model::FsType;
use crate::model::size::MIB;

/// Number of steps, for the progress bar.
pub(super) const STEPS: usize = 5;
/// xfs requires at least 300 MiB.
const KINDS: [(FsType, u64); 3] = [
    (FsType::Ext4, 256 * MIB),
    (FsType::Xfs, 512 * MIB),
    (FsType::Btrfs, 256 * MIB),
];
/// The name of this part in the output.
const NAME: &str = "group";
/// Minimum count of the writers before the cut.
const MIN_COUNT: u64 = 1000;

struct Volume {
    id: String,
    kind: FsType,
    staging: PathBuf,
    target: PathBuf,
}

impl Volume {
    fn used(&self) -> Use<'_> {
        Use {
            id: &self.id,
            kind: Some(self.kind),
            staging: &self.staging,
            target: &self.target,
        }
    }
}

/// Everything that must be removed.
pub(super) struct Group {
    /// Stands for the kubelet's directory.
    callers: PathBuf,
    /// The directory in which writers and hook communicate.
    marker_dir: PathBuf,
    writers: Option<Writers>,
    volumes: Vec<Volume>,
    restored: Vec<Volume>,
    group: Option<(String, Vec<String>)>,
}

impl Group {
    pub(super) fn new(callers: &Path, marker_dir: &Path) -> Group {
        Group {
            callers: callers.to_path_buf(),
            marker_dir: marker_dir.to_path_buf(),
            writers: None,
            volumes: Vec::new(),
            restored: Vec::new(),
            group: None,
        }
    }

    pub(super) async fn run(&mut self, progress: &mut Progress, calls: &mut Calls) -> Result<()> {
        progress
            .step(NAME, "create three volumes and start writers", async {
                for (kind, bytes) in KINDS {
                    let name = format!("demo-group-{}", kind.name());
                    let id = calls.create(&name, Some(kind), bytes, None).await?;
                    let volume = self.place(&name, id, kind)?;
                    self.volumes.push(volume);
                    up(&self.volumes, calls).await?;
                }
                let roots = roots(&self.volumes);
                let failed = |error| Failed::of("write", &error);
                self.writers =
                    Some(Writers::start(&roots, Some(&self.marker_dir)).map_err(failed)?);
                Ok("ext4, xfs and btrfs".into())
            })
            .await?;
        self.cut(progress, calls).await?;
        progress
            .step(NAME, "restore all three snapshots", async {
                let (_, snapshots) = self.group.clone().unwrap_or_default();
                for ((kind, bytes), snapshot) in KINDS.into_iter().zip(snapshots) {
                    let name = format!("demo-restored-{}", kind.name());
                    let id = calls
                        .create(&name, Some(kind), bytes, Some(&snapshot))
                        .await?;
                    let volume = self.place(&name, id, kind)?;
                    self.restored.push(volume);
                    up(&self.restored, calls).await?;
                }
                Ok(String::new())
            })
            .await?;
        progress
            .step(NAME, "verify the order of writes", async {
                writers::check(&roots(&self.restored))
                    .map_err(|sentence| Failed::new("compare", sentence))
            })
            .await?;
        progress
            .step(NAME, "unpublish and delete all", async {
                self.tear_down(calls).await?;
                Ok(String::new())
            })
            .await
    }

    async fn cut(&mut self, progress: &mut Progress, calls: &mut Calls) -> Result<()> {
        progress
            .step(NAME, "quiesce, freeze, cut, thaw, release", async {
                let Some(writers) = &self.writers else {
                    return Err(Failed::new("cut", "no writer is running"));
                };
                wait_until(writers, |counts| counts >= MIN_COUNT).await?;
                writers.reset_stall();
                let ids: Vec<_> = self
                    .volumes
                    .iter()
                    .map(|volume| volume.id.clone())
                    .collect();
                self.group = Some(calls.group("demo-group", &ids).await?);
                let stall = writers.stall();
                let counts = writers.counts();
                wait_until(writers, |now| now > counts).await?;
                Ok(format!(
                    "the writer was paused for {:.1} ms",
                    stall.as_secs_f64() * 1000.0
                ))
            })
            .await
    }

    fn place(&self, name: &str, id: String, kind: FsType) -> Result<Volume> {
        let volume = Volume {
            id,
            kind,
            staging: self.callers.join("staging").join(name),
            target: self.callers.join("pods").join(name).join("volume"),
        };
        let parent = volume.target.parent().unwrap_or(&volume.target);
        for folder in [&volume.staging, parent] {
            std::fs::create_dir_all(folder)
                .map_err(|error| Failed::of("create directories", &error))?;
        }
        Ok(volume)
    }

    async fn tear_down(&mut self, calls: &mut Calls) -> Result<()> {
        self.writers = None;
        for volumes in [&mut self.restored, &mut self.volumes] {
            while let Some(volume) = volumes.last() {
                calls.take_down(volume.used()).await?;
                calls.delete(&volume.id).await?;
                volumes.pop();
            }
        }
        if let Some((id, members)) = self.group.take() {
            calls.delete_group(&id, &members).await?;
        }
        Ok(())
    }

    /// After an error or a signal: removes as much as possible.
    pub(super) async fn take_down(&mut self, calls: &mut Calls) {
        self.writers = None;
        for volume in self.restored.iter().chain(&self.volumes) {
            let _ = calls.take_down(volume.used()).await;
        }
    }
}

/// Waits for a count of the writers; an error if one of them has ended.
async fn wait_until(writers: &Writers, is_reached: impl Fn(u64) -> bool) -> Result<()> {
    while !is_reached(writers.counts()) {
        if let Some(error) = writers.failure() {
            return Err(Failed::of("write", error));
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    Ok(())
}

/// Publishes the last volume.
async fn up(volumes: &[Volume], calls: &mut Calls) -> Result<()> {
    match volumes.last() {
        Some(volume) => calls.bring_up(volume.used()).await,
        None => Ok(()),
    }
}

fn roots(volumes: &[Volume]) -> Vec<PathBuf> {
    volumes.iter().map(|volume| volume.target.clone()).collect()
}
