//! The freeze guard against this machine's kernel: what is frozen stands still, and nothing stays
//! frozen, whoever is killed or stopped, and when.
//!
//! Needs root and loop devices. Every test has a pool and a state dir of its own; whatever a
//! failed test leaves frozen is thawed when its volume is dropped.

#![expect(
    clippy::disallowed_methods,
    reason = "a test prepares what it needs with programs and plain files"
)]
#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests, which clippy takes for ordinary code"
)]

mod bench;
mod command;
#[cfg(feature = "fault")]
mod deaths;
mod driver;
mod hidden;
mod hung;
#[path = "../support/left_out.rs"]
mod left_out;
#[cfg(feature = "fault")]
mod others;
mod roots;
#[path = "../host_linux/scratch.rs"]
#[allow(dead_code)]
mod scratch;
mod window;
