//! The commands about snapshots and group snapshots: their list, archives of them, and reverts of claims to
//! them. Restores into new claims are in [`crate::restore`].

pub mod archive;
pub mod list;
pub mod revert;
