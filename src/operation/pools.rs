//! The pools of this node: what serves them, what they lie on, and how much they can still hold.

pub mod admin;
pub(in crate::operation) mod capacity;
pub mod ground;
pub mod image;
pub mod inventory;
pub mod make;
pub(in crate::operation) mod pool;
pub(in crate::operation) mod start;
pub(in crate::operation) mod watch;
