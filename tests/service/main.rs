//! The edge of a node, over a real unix socket: the whole driver on a simulated machine.

#![expect(
    clippy::unwrap_used,
    reason = "a test ends where something isn't as it says"
)]

mod arbitrary;
mod calls;
mod capabilities;
mod codes;
mod dead_disk;
mod full_disk;
mod gate;
mod growth;
mod harmful;
mod harness;
mod http;
mod interrupted;
mod lifecycle;
mod metadata;
mod refusals;
mod secrets;
mod snapshots;
mod sockets;
