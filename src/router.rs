//! The edge of a cluster: CSI in, CSI out to the agent of the node that owns the storage.
//!
//! The router owns nothing. It parses an id, finds the agent that serves its pool, passes the
//! request on, and merges what several have to say. An agent that can't be reached is
//! UNAVAILABLE by its name, never "not found". Cuts over several volumes are coordinated here
//! ([`crate::cut::coordinator`]), with a stream to each agent as its participant.

pub mod cluster;
pub mod kube;
