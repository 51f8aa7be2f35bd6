//! Calls about volumes: created, grown and deleted; staged and published on this node.

mod block;
mod check;
mod create;
mod delete;
mod expand;
pub(in crate::operation) mod fit;
mod format;
mod health;
mod inline;
pub(in crate::operation) mod list;
mod modify;
pub(in crate::operation) mod publish;
mod stage;
mod stats;
mod take_raw;
mod trim;
mod unstage;
