//! A guard in a process of its own, beside a node of a cluster.
