//! The pools of this node: what serves them, what they lie on, and how much they can still hold.

pub mod admin;
pub(in crate::operation) mod capacity;
pub mod ground;
pub mod image;
pub mod inventory;
pub(in crate::operation) mod lookup;
pub mod make;
pub mod node_record;
pub(in crate::operation) mod pool;
