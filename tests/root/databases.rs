//! Databases under load on volumes of the real driver, cut, restored and started on the copies:
//! proof of the guarantees of each level with the programs that need them. Needs root; the
//! databases run as an unprivileged user, on sockets below the scratch folder. `SLACKWATER_SOAK=1`
//! makes many cuts.

#![allow(
    clippy::expect_used,
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "a test panics where an expectation fails, and works on its own files"
)]

mod cluster;
mod engine;
mod hooks;

mod postgresql;
mod process;
mod replicas;
mod sessions;
mod sqlite;
mod unsynced;
mod volumes;

pub use slackwater_testkit::node::*;
pub use slackwater_testkit::rounds;
