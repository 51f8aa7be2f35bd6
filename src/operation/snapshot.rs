//! Snapshots, groups of snapshots, and volumes that are made from snapshots or other volumes.

pub(in crate::operation) mod attempt;
pub(in crate::operation) mod copy;
mod create;
pub(in crate::operation) mod group;
mod list;
mod metadata;
pub(in crate::operation) mod resolve;
pub(in crate::operation) mod restore;
pub(in crate::operation) mod session;
mod source;
mod thick_space_watchdog;
