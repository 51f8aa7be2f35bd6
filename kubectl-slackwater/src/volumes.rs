//! The commands about volumes and their claims: their list, the use of one claim, moves, checks, imports and
//! long freezes.

pub mod check;
pub mod claim_usage;
pub mod frozen;
pub mod import;
pub mod list;
pub mod move_volume;
