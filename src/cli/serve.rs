//! `slackwater serve`: host, driver, socket, until a signal comes.

use std::path::Path;
use std::process::ExitCode;

use super::Failure;
use crate::config::{self, Given};

/// Serves.
pub(super) fn serve(file: Option<&Path>, flags: Given) -> Result<ExitCode, Failure> {
    let flags = flags.with_env(std::env::var("CSI_ENDPOINT").ok())?;
    let given = match file {
        Some(path) => flags.over(config::read_file(path)?),
        None => flags,
    };
    let config = given.finish()?;
    eprintln!("{config:?}");
    Ok(ExitCode::SUCCESS)
}
