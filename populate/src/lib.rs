//! Fills one volume from an HTTP server, a registry of images or an object store. The program
//! `slackwater-populate` runs in a pod without privileges, in the namespace of a claim, before the
//! claim has a volume (`docs/populate.md`, `docs/adr/0046-a-program-of-its-own-fills-volumes.md`).
//!
//! Everything that it reads was written by others. In reading order:
//!
//! | module | contents |
//! |---|---|
//! | [`config`] | the configuration, one JSON document |
//! | [`failure`] | why an attempt failed, and the exit codes |
//! | [`report`] | progress as lines of numbers |
//! | [`net`] | requests: which addresses are dialled, redirects, Secrets, connections that break |
//! | [`received`] | received bytes are counted, limited and hashed |
//! | [`mod@format`], [`decode`] | what the content is, by its first bytes; decompression with limits |
//! | [`name`], [`archive`], [`tree`] | names, headers and entries of archives; the folder that is filled |
//! | [`disk`], [`qcow2`] | the blocks of a device, or of a file; images whose blocks are in another order |
//! | [`oci`], [`s3`] | what registries and object stores expect and reply |
//! | [`confine`] | what this process may open from here on |
//! | [`run`] | one attempt |

pub mod archive;
pub mod config;
pub mod confine;
pub mod decode;
pub mod disk;
pub mod failure;
pub mod format;
pub mod name;
pub mod net;
pub mod oci;
pub mod qcow2;
pub mod received;
pub mod report;
pub mod run;
pub mod s3;
pub mod tree;
