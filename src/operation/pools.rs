//! The pools of this node: how they are created and found, where they are stored, and how much
//! space they have left.

pub mod admin;
pub(in crate::operation) mod capacity;
pub mod ground;
pub mod image;
pub mod inventory;
pub(in crate::operation) mod lookup;
pub mod make;
pub mod node_record;
pub(in crate::operation) mod pool;
