//! Records parts of tests that are skipped because this machine lacks something, so that a
//! successful run shows them.

use std::fs::OpenOptions;
use std::io::Write;

/// What a printed line begins with.
pub(crate) const LEFT_OUT: &str = "left out: ";

/// Prints what is skipped and why, and adds it to the file that `make tests` names, which
/// `tests/summary` counts.
pub fn left_out(what: &str) {
    // Not `eprintln`, which is captured while a test passes.
    let _ = writeln!(std::io::stderr(), "{LEFT_OUT}{what}");
    if let Some(file) = std::env::var_os("SLACKWATER_LEFT_OUT") {
        let opened = OpenOptions::new().append(true).create(true).open(file);
        let written = opened.and_then(|mut file| writeln!(file, "{what}"));
        written.expect("the file of $SLACKWATER_LEFT_OUT can be written");
    }
}
