//! The edge of a cluster: a router on its unix socket, and agents in this process, each a whole
//! driver on a simulated machine, served over TCP.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test ends where something isn't as it says"
)]

mod away;
mod fake;
#[allow(dead_code, reason = "as other programs use it")]
#[path = "../service/gate.rs"]
mod gate;
mod ground;
mod groups;
#[allow(dead_code, reason = "as other programs use it")]
#[path = "../service/harness.rs"]
mod harness;
mod ids;
mod liar;
mod lies;
mod lists;
mod lost;
mod model;
mod place;
mod quiet;
mod steps;
mod streams;
