//! The cluster's roles as the program serves them: who may ask an agent, what its certificates'
//! files do, how it ends, and a guard in a process of its own.

#![allow(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "a test says what it expects, and works on its own files"
)]

mod certificates;
mod controller;
mod endpoint;
mod ground;
mod guard;
#[path = "../support/mod.rs"]
mod support;
