//! The file backend on a simulated host.
