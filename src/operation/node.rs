//! The node as a whole: its start, the disks of its pools, its background tasks, and its state.

pub(in crate::operation) mod adopt;
pub(in crate::operation) mod clean;
pub(in crate::operation) mod describe;
pub(in crate::operation) mod disk;
pub(in crate::operation) mod open;
pub(in crate::operation) mod pool_status;
pub(in crate::operation) mod start;
pub(in crate::operation) mod volume_usage;
pub(in crate::operation) mod watch;
