//! Cuts across nodes: agents, guards and routers as real processes on one machine, each agent with
//! a pool on a disk of its own, and mutual TLS between them. Needs root.
//!
//! After every scenario, writers make progress, groups are complete or absent, their content is in
//! write order, and nothing is left on the pools.

#![allow(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "a test panics where an expectation fails, and works on its own files"
)]

mod agents;
mod answers;
mod clones;
mod copies;
mod differences;
mod hooks;
mod moves;
mod network;
mod order;
mod restore;
mod reverts;
mod routers;
mod usage;
mod wire;
