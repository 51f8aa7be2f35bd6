//! What the commands show: pools, volumes, snapshots, moves, freezes and growth, each joined from the
//! Kubernetes objects that have its parts. Nothing here prints, and nothing is changed.

pub mod frozen;
pub mod growth;
pub mod pool;
pub mod running_copy;
pub mod snapshot;
pub mod volume;
pub mod volume_move;

pub use pool::{Pool, pools, pools_of};
pub use snapshot::{Group, Snapshot, groups, snapshots};
pub use volume::{Volume, claims_of, driver_of, has_ended, volumes};
pub use volume_move::{Move, move_objects, moves};
