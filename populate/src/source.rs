//! Where the content is from: what registries and object stores expect and reply, and the count, the limit
//! and the hash of the bytes that arrive. Requests are in [`crate::net`].

pub mod oci;
pub mod received;
pub mod s3;
