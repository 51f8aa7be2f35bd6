//! Requests over connections of our own, with the rules of addresses, redirects and Secrets.

pub mod address;
pub mod client;
pub mod dial;
pub mod download;
pub mod secret;
