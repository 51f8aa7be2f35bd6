//! The freeze guard with this machine's kernel: a frozen file system blocks all writers, and
//! nothing stays frozen, whichever process is killed or stopped, and when.
//!
//! Needs root and loop devices. Every test has a pool and a state directory of its own. File
//! systems that a failed test leaves frozen are thawed when their volume is dropped.

#![expect(
    clippy::disallowed_methods,
    reason = "a test prepares its files and devices with programs and std::fs"
)]
#![expect(
    clippy::unwrap_used,
    reason = "test helpers, which clippy treats as ordinary code"
)]

mod command;
mod deaths;
mod driver;
mod fixture;
mod hidden;
mod hung;
mod others;
mod roots;
mod window;
