//! Users of the Kubernetes API: hooks by exec with a server that implements the kubelet's protocol,
//! and the rest with a real kube-apiserver if the programs of `make cluster` exist.

#![allow(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "a test panics where an expectation fails, and works on its own files"
)]

mod adopt;
mod agents;
mod api;
mod chart;
mod enrol;
mod hooks;
mod kubelet;
mod leading;
mod moves;
mod node_lost;
mod orphans;
mod page;
mod pod_claims;
mod pool_requests;
mod populators;
mod real;
mod reverts;
mod schedules;

use slackwater_testkit::plane;
