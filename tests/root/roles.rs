//! The roles of the cluster as the program serves them: permitted clients of an agent, its
//! certificate files, its shutdown, and a guard in a separate process.

#![allow(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "a test panics where an expectation fails, and works on its own files"
)]

mod certificates;
mod controller;
mod endpoint;
mod fixture;
mod guard;
