//! Mutual TLS between the router and the agents: certificates from files that may change at any
//! time, and names that decide who may ask whom.
