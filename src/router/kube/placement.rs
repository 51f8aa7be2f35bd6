//! What decides on the node of a new volume, and whether the volume is still wanted there.

pub(super) mod pod_claims;
pub(super) mod unwanted_copies;
