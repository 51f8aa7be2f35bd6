//! Snapshots, groups of snapshots, and volumes that are created from snapshots or other volumes.

pub(in crate::operation) mod attempt;
pub(in crate::operation) mod copy;
pub(in crate::operation) mod create;
pub(in crate::operation) mod cut;
pub(in crate::operation) mod cut_counts;
pub(in crate::operation) mod group;
pub(in crate::operation) mod list;
pub(in crate::operation) mod members;
pub(in crate::operation) mod metadata;
pub(in crate::operation) mod plan;
pub(in crate::operation) mod resolve;
pub(in crate::operation) mod restore;
pub(in crate::operation) mod session;
pub(in crate::operation) mod source;
pub(in crate::operation) mod thick_space_watchdog;
