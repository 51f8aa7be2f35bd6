//! The plugin as a process, against a real API server with the objects that the driver's controller
//! and the snapshot controller write. It is left out if the programs of `make cluster` do not exist.

#![allow(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "a test panics where an expectation fails, and starts programs"
)]

mod across;
mod adopts;
mod archives;
mod changes;
mod checked;
mod execs;
mod forward;
mod gone;
mod gone_plane;
mod krew;
mod memory;
mod on_node;
mod page;
mod pool_requests;
mod raced;
mod reads;
mod restores;
mod reverts;
mod schedules;
mod transfers;
mod undone;
mod waits;
mod world;
