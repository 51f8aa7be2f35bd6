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
//! | [`source`] | what registries and object stores expect and reply; received bytes are counted, limited and hashed |
//! | [`mod@format`] | what the content is, by its first bytes; decompression, archives and images with limits |
//! | [`target`] | the blocks of a device or of a file, or the folder that is filled |
//! | [`confine`] | what this process may open from here on |
//! | [`run`] | one attempt |

pub mod config;
pub mod confine;
pub mod failure;
pub mod format;
pub mod net;
pub mod report;
pub mod run;
pub mod source;
pub mod target;
