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
mod deleted_namespace;
mod exec_server;
mod fixture;
mod gone_plane;
mod krew;
mod on_node;
mod page;
mod polling;
mod pool_requests;
mod port_forward_server;
mod reads;
mod restore_checks;
mod restore_races;
mod restores;
mod reverts;
mod schedules;
mod simulated_server;
mod transfer_undo;
mod transfers;
