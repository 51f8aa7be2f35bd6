//! Cuts across nodes: agents, guards and routers as real processes on one machine, each agent with
//! a pool on a disk of its own, and mutual TLS between them. Needs root.
//!
//! What is looked at after whatever happens: writers get on, groups are whole or absent, what is
//! there is in order, and nothing is left on the pools.

#![allow(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "a test says what it expects, and works on its own files"
)]

#[path = "../support/mod.rs"]
mod support;

mod agents;
mod answers;
mod ground;
mod hooks;
mod network;
mod order;
mod routers;
