//! The driver as a separate process: starting it, waiting for it, stopping it.

use std::fs::File;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::scratch_pool::ScratchPool;
use super::{Failed, Result};

/// A driver finishes running operations within 25 s.
const EXIT_TIMEOUT: Duration = Duration::from_secs(30);
const POLL_INTERVAL: Duration = Duration::from_millis(10);

pub(super) struct Process {
    child: Child,
}

impl Process {
    /// Starts this program with `serve`. The demo is a client and not a part of the driver: this is
    /// the only place outside `host` that starts a program.
    #[expect(
        clippy::disallowed_methods,
        reason = "a client of the driver, not a part of it"
    )]
    pub(super) fn start(pool: &ScratchPool) -> Result<Process> {
        let failed = |error: std::io::Error| Failed::of("start the driver", &error);
        let program = std::env::current_exe().map_err(failed)?;
        let log = File::create(pool.log()).map_err(failed)?;
        let child = Command::new(program)
            .args(pool.serve_arguments())
            .env_remove("CSI_ENDPOINT")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            // Ctrl-C is for the demo, which needs the driver to clean up.
            .process_group(0)
            .spawn()
            .map_err(failed)?;
        Ok(Process { child })
    }

    pub(super) fn id(&self) -> u32 {
        self.child.id()
    }

    /// Its exit status, if it has exited.
    pub(super) fn try_wait(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().ok().flatten()
    }

    /// Sends SIGTERM, as Kubernetes does, and waits for the exit.
    pub(super) async fn stop(mut self) -> Result<String> {
        const STEP: &str = "stop the driver";
        let id = i32::try_from(self.id()).map_err(|error| Failed::of(STEP, &error))?;
        if self.try_wait().is_none() {
            kill(Pid::from_raw(id), Signal::SIGTERM).map_err(|errno| Failed::of(STEP, &errno))?;
        }
        let begun = Instant::now();
        while begun.elapsed() < EXIT_TIMEOUT {
            match self.try_wait() {
                Some(status) if status.success() => return Ok(format!("{status}")),
                Some(status) => return Err(Failed::new(STEP, format!("it exited with {status}"))),
                None => tokio::time::sleep(POLL_INTERVAL).await,
            }
        }
        Err(Failed::new(
            STEP,
            format!(
                "it did not exit within {} s and was killed",
                EXIT_TIMEOUT.as_secs()
            ),
        ))
    }
}

/// The driver never outlives its demo.
impl Drop for Process {
    fn drop(&mut self) {
        if self.try_wait().is_none() {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}
