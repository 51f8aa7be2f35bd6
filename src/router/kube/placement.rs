//! What Kubernetes objects say about the node of a new volume, for `create_volume`, and whether a copy to
//! that node is still wanted.

pub(super) mod pod_claims;
pub(super) mod unwanted_copies;
