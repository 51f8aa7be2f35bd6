//! The chart, and the router's work on objects of Kubernetes. Parts of the tests need Helm or a
//! kube-apiserver, which `make cluster` builds, and are left out without them.

mod chart;
mod kube;
