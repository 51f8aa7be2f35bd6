//! The program against servers on this machine that misbehave.

#![allow(
    clippy::disallowed_methods,
    reason = "a test starts programs and writes files"
)]

mod archives;
mod blocks;
mod confined;
mod hostile;
mod images;
mod kill;
mod network;
mod objects;
mod program;
mod qemu;
mod registry;
mod s3;
mod server;
mod support;
