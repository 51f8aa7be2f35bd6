//! The CSI services of a node over a real Unix socket: the whole driver on a simulated machine.

#![expect(
    clippy::unwrap_used,
    reason = "a test panics where an expectation fails"
)]

mod arbitrary;
mod calls;
mod capabilities;
mod codes;
mod dead_disk;
mod full_disk;
pub mod gate;
mod growth;
mod harmful;
pub mod harness;
mod http;
mod imports;
mod interrupted;
mod lifecycle;
mod metadata;
mod refusals;
mod secrets;
mod snapshots;
mod sockets;
