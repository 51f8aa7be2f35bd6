//! `slackwater guard`: no runtime, no logs; one line on stderr if it can't begin.

use std::path::PathBuf;
use std::process::ExitCode;

use super::{Failure, host_with_guard};
use crate::cut::guard::program::{self, Options};

/// Guards until SIGTERM, or until its parent is gone; at once done if another guard is there.
pub(super) fn run(
    socket: PathBuf,
    state_dir: PathBuf,
    with_parent: bool,
) -> Result<ExitCode, Failure> {
    let host = host_with_guard(&[], &[], &state_dir);
    let options = Options {
        socket,
        state_dir,
        with_parent,
    };
    program::run(host, &options).map_err(Failure::run)?;
    Ok(ExitCode::SUCCESS)
}
