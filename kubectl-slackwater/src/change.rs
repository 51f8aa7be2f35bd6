//! What all commands that change objects have in common: they check the permissions of the user before the first
//! change, print the plan, do nothing without `--yes`, and can wait for the end of what they have begun.

pub mod permission;
pub mod progress;
pub mod request;

use std::io::Write;

use crate::cli::Change;
use crate::failure::{Failure, Result};
use crate::text::escaped_lines;

pub use permission::{Need, missing, require};
pub use progress::{CHANGED, Progress, follow, until_end};
pub use request::{check_stored, create, delete, name_prefix, patch};

/// Prints what will be done. Fails if the user has not confirmed it; a dry run needs no `--yes`.
pub fn confirm(change: &Change, plan: &str) -> Result<()> {
    print_lines(plan);
    match change.yes || change.dry_run {
        true => Ok(()),
        false => Err(Failure::unconfirmed()),
    }
}

/// Prints lines on stdout. A reader that is gone does not end a change in the middle.
pub fn print_lines(lines: &str) {
    let mut out = std::io::stdout().lock();
    let _ = writeln!(out, "{}", escaped_lines(lines));
}

/// The end of the line that reports a change.
pub fn mark(change: &Change) -> &'static str {
    match change.dry_run {
        true => " (server dry run)",
        false => "",
    }
}
