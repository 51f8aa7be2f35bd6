//! What talks to the Kubernetes API: hooks by exec against a server that speaks the kubelet's
//! protocol, and the rest against a real kube-apiserver where the laboratory's programs are.

#![allow(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "a test says what it expects, and works on its own files"
)]

mod adopt;
mod agents;
mod api;
mod chart;
mod enrol;
mod hooks;
mod kubelet;
mod orphans;
mod plane;
mod real;
#[path = "../support/mod.rs"]
mod support;
