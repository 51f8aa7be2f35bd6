//! `slackwater demo`: the real driver on a temporary pool, used as a CSI client uses it.
//!
//! *Expected flow*: a sparse image becomes a pool on a loop device, or a thin pool of LVM that was
//! never used is taken; the driver is started on it as a separate process; over its socket, volumes of
//! each kind are created, mounted, written, expanded, unmounted, mounted again, compared and deleted.
//! Finally three of them are cut together under writers, and restored.
//!
//! *Guarantees*: everything is in one directory and is removed at the end, also after an error or a
//! signal. Then the demo *checks* loop devices, mounts, files and processes, and reports whether
//! something is left.

mod calls;
pub mod client;
mod data;
mod group;
mod leak_check;
mod process;
mod progress;
mod scratch_pool;
mod script;
mod thin_pool;
pub mod writers;

use std::path::{Path, PathBuf};
use std::time::Instant;

use crate::error::chain;
use crate::model::ThinPoolName;
use crate::server;

use calls::Calls;
use group::Group;
use process::Process;
use progress::Progress;
use scratch_pool::ScratchPool;
use script::Trial;

/// Options of the demo.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Keep the driver and its volumes until a signal arrives.
    pub keep: bool,
    /// Where its directory is created; by default in the directory for temporary files.
    pub dir: Option<PathBuf>,
    /// The thin pool to use instead of a file system on an image. It must never have been used.
    pub pool: Option<ThinPoolName>,
}

/// A failed step and its cause.
#[derive(Debug, thiserror::Error)]
#[error("{step}: {cause}")]
pub struct Failed {
    step: String,
    cause: String,
}

impl Failed {
    fn new(step: impl Into<String>, cause: impl std::fmt::Display) -> Failed {
        Failed {
            step: step.into(),
            cause: cause.to_string(),
        }
    }

    fn of(step: impl Into<String>, error: &dyn std::error::Error) -> Failed {
        Failed::new(step, chain(error))
    }
}

type Result<T, E = Failed> = std::result::Result<T, E>;

/// How the first part ended.
enum Ending {
    Done,
    Stopped,
    Failed(Failed),
}

/// The hook program of the demo: blocks the first writer until its stdin ends.
pub fn hook(folder: &Path, deadline: std::time::Duration) -> std::io::Result<()> {
    writers::hook(folder, deadline)
}

/// Runs the demo; returns true if everything succeeded and nothing is left.
pub fn run(options: &Options) -> Result<bool> {
    let base = base(options)?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| Failed::of("start", &error))?;
    runtime.block_on(run_at(options, &base))
}

/// The directory in which the demo's own is created, with links resolved, because the driver
/// refuses paths with links.
fn base(options: &Options) -> Result<PathBuf> {
    if !nix::unistd::geteuid().is_root() {
        return Err(Failed::new(
            "demo",
            "loop devices and mounts need root; run it with sudo",
        ));
    }
    let base = options.dir.clone().unwrap_or_else(std::env::temp_dir);
    std::fs::canonicalize(&base)
        .map_err(|error| Failed::new("demo", format!("--dir {}: {error}", base.display())))
}

async fn run_at(options: &Options, base: &Path) -> Result<bool> {
    // From here on a signal causes a cleanup.
    let signal = server::signal().map_err(|error| Failed::of("wait for signals", &error))?;
    let mut signal = std::pin::pin!(signal);
    let begun = Instant::now();
    let mut progress = Progress::new(script::steps());
    let mut stage = Stage::new(base, options.pool.as_ref())?;
    progress.note(&format!(
        "Slackwater {} on {} in {}",
        env!("CARGO_PKG_VERSION"),
        match &options.pool {
            Some(pool) => format!("the thin pool {pool}, with files"),
            None => "a temporary pool".into(),
        },
        stage.pool.folder.display()
    ));

    let ending = until(signal.as_mut(), stage.act(&mut progress, options.keep)).await;
    if matches!(ending, Ending::Done) && options.keep {
        progress.note(&stage.how_to_talk());
        signal.await;
    }
    if let Ending::Failed(_) = &ending {
        progress.note(&stage.log_tail());
    }
    if !matches!(ending, Ending::Done) {
        progress.note("cleaning up");
    }
    let calls = stage.count();
    let left = stage.tear_down(&mut progress).await;
    for thing in &left {
        progress.note(&format!("LEFT BEHIND: {thing}"));
    }
    if left.is_empty() {
        progress.note("checked loop devices, mounts, files and processes: nothing is left behind");
    }
    progress.note(&format!(
        "{calls} CSI calls in {:.1} s",
        begun.elapsed().as_secs_f64()
    ));
    match ending {
        Ending::Failed(failed) => Err(failed),
        Ending::Stopped => Ok(false),
        Ending::Done => Ok(left.is_empty()),
    }
}

/// Waits for the work, or for the signal if it comes first.
async fn until(
    signal: std::pin::Pin<&mut impl Future<Output = ()>>,
    work: impl Future<Output = Result<()>>,
) -> Ending {
    tokio::select! {
        () = signal => Ending::Stopped,
        done = work => match done {
            Ok(()) => Ending::Done,
            Err(failed) => Ending::Failed(failed),
        },
    }
}

/// Everything that was set up and must be removed.
struct Stage {
    pool: ScratchPool,
    process: Option<Process>,
    calls: Option<Calls>,
    trials: Vec<Trial>,
    group: Group,
}

impl Stage {
    fn new(base: &Path, thin: Option<&ThinPoolName>) -> Result<Stage> {
        let pool = ScratchPool::new(base, thin)?;
        let trials = script::trials(&pool.callers());
        let group = Group::new(&pool.callers(), &pool.marker_dir());
        Ok(Stage {
            pool,
            process: None,
            calls: None,
            trials,
            group,
        })
    }

    /// The part that may fail, or be interrupted at any point.
    async fn act(&mut self, progress: &mut Progress, keep: bool) -> Result<()> {
        let pool = &mut self.pool;
        progress
            .step("pool", pool.how(), async { pool.set_up() })
            .await?;
        let (pool, process, calls) = (&self.pool, &mut self.process, &mut self.calls);
        progress
            .step("driver", "start, and wait until it is ready", async {
                let started = process.insert(Process::start(pool)?);
                let calls = calls.insert(Calls::connect(&pool.socket(), started).await?);
                calls.plugin().await
            })
            .await?;
        let Some(calls) = &mut self.calls else {
            return Err(Failed::new("driver", "it has no client"));
        };
        for trial in &mut self.trials {
            trial.run(progress, calls).await?;
            if !keep {
                trial.tear_down(progress, calls).await?;
            }
        }
        self.group.run(progress, calls).await
    }

    fn count(&self) -> u64 {
        self.calls.as_ref().map_or(0, |calls| calls.count)
    }

    /// Removes everything, through the driver if it still answers, and returns what is left.
    async fn tear_down(mut self, progress: &mut Progress) -> Vec<String> {
        if let Some(calls) = &mut self.calls {
            self.group.take_down(calls).await;
            for trial in &self.trials {
                trial.take_down(calls).await;
            }
            calls.delete_all().await;
        }
        drop(self.calls.take());
        if let Some(process) = self.process.take() {
            let stopped = progress.step("driver", "stop", process.stop()).await;
            // The screen reports a driver that had to be killed.
            drop(stopped);
        }
        self.pool.tear_down();
        leak_check::leaks(&self.pool).await
    }

    /// The last lines of the driver's log, which are more informative than an exit status.
    fn log_tail(&self) -> String {
        const LINES: usize = 8;
        let text = std::fs::read_to_string(self.pool.log()).unwrap_or_default();
        let lines: Vec<&str> = text.lines().collect();
        let tail = &lines[lines.len().saturating_sub(LINES)..];
        format!("last lines of the driver's log:\n  {}", tail.join("\n  "))
    }

    fn how_to_talk(&self) -> String {
        let socket = self.pool.socket();
        let socket = socket.display();
        let mut text = format!(
            "\nThe driver runs on unix://{socket}\n  log: {}\n",
            self.pool.log().display()
        );
        for trial in &self.trials {
            text.push_str(&format!(
                "  {}: {}\n",
                trial.label,
                trial.target().display()
            ));
        }
        text.push_str(&format!(
            "To call it, from the source directory:\n  grpcurl -plaintext -unix -import-path proto -proto csi.proto {socket} csi.v1.Identity/GetPluginInfo\n  grpcurl -plaintext -unix -import-path proto -proto csi.proto {socket} csi.v1.Controller/ListVolumes\nStop it with Ctrl-C, or: kill {}\n",
            std::process::id()
        ));
        text
    }
}
