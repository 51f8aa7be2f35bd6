//! The services of a cluster: a router on its Unix socket, and agents in this process, each of them
//! a whole driver on a simulated machine, served over TCP.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test panics where an expectation fails"
)]

mod away;
mod clones;
mod cluster;
mod fake;
mod groups;
mod ids;
mod liar;
mod lies;
mod lists;
mod lost;
mod model;
mod place;
mod pools;
mod quiet;
mod receive;
mod restore_node;
mod steps;
mod streams;
