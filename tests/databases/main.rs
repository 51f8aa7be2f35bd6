//! Databases under load on volumes of the real driver, cut, restored and started on the copies:
//! what each level promises, shown by the programs that it's for. Needs root; the databases run
//! as an unprivileged user, on sockets below the scratch folder. `SLACKWATER_SOAK=1` makes the
//! cuts many.

#![allow(
    clippy::expect_used,
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "a test says what it expects, and works on its own files"
)]

#[path = "../support/mod.rs"]
mod support;

mod engine;
mod hooks;

mod postgresql;
mod process;
mod replicas;
mod sessions;
mod sqlite;
mod unsynced;
mod volumes;

pub use support::node::*;

/// So many rounds, or many more in a soak.
pub fn rounds(few: usize, many: usize) -> usize {
    match std::env::var_os("SLACKWATER_SOAK") {
        Some(_) => many,
        None => few,
    }
}
