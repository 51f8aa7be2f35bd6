//! Pools: the Pool objects, and the controllers that maintain them.
//!
//! | file | content |
//! |---|---|
//! | `object` | the Pool object |
//! | `status` | the controller that writes its status |
//! | `usage`, `running_copies`, `disk_users` | parts of the status |
//! | `requests` | the controller of `spec.adopt` and `spec.forget` |
//! | `evacuation` | the controller of `spec.evacuate` |
//! | `hand_over` | the command that writes `spec.node` |

mod disk_users;
pub(super) mod evacuation;
pub mod hand_over;
pub mod object;
pub mod requests;
pub mod running_copies;
pub mod status;
pub mod usage;
