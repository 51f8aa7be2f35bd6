//! The calls for volumes: create, grow and delete them; stage and publish them on this node.

pub(in crate::operation) mod block;
pub(in crate::operation) mod capability;
pub(in crate::operation) mod check;
pub(in crate::operation) mod create;
pub(in crate::operation) mod delete;
pub(in crate::operation) mod expand;
pub(in crate::operation) mod fit;
pub(in crate::operation) mod format;
pub(in crate::operation) mod health;
pub(in crate::operation) mod inline;
pub(in crate::operation) mod list;
pub(in crate::operation) mod modify;
pub(in crate::operation) mod publish;
pub(in crate::operation) mod stage;
pub(in crate::operation) mod stats;
pub(in crate::operation) mod take_raw;
pub(in crate::operation) mod trim;
pub(in crate::operation) mod unstage;
