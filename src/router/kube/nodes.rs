//! Controllers about nodes.
//!
//! | file | content |
//! |---|---|
//! | `labels` | the topology label of Node objects |
//! | `lost` | claims of nodes that are lost for good |

pub(super) mod labels;
mod lost;
