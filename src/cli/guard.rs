//! `slackwater guard`: replaces this process by the program `slackwater-guard`, which is installed
//! next to it.

use std::path::Path;
use std::process::ExitCode;

use super::Failure;
use crate::cut::guard;
use crate::host::linux::freeze;

/// Returns only if the program cannot be run.
pub(super) fn run(socket: &Path, state_dir: &Path, with_parent: bool) -> Result<ExitCode, Failure> {
    let program = guard::program().map_err(Failure::run)?;
    let failed = freeze::become_guard(&program, socket, state_dir, with_parent);
    Err(Failure::run(failed))
}
