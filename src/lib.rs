//! Slackwater: a CSI driver for the disks a node already has.
//!
//! A volume is one image file on a file system of the node, attached to a loop device, or one thin
//! device of a thin pool of LVM. It is formatted once, and mounted. Records of volumes, snapshots and
//! pools are files next to the data; the current state is read from the kernel. `docs/architecture.md`
//! describes the path of a call, the dependencies between modules and all invariants; `docs/adr` has
//! the reasons for decisions.
//!
//! # Reading order
//!
//! A module uses only modules above it in this list. `cargo test --test unprivileged shape::`
//! enforces the exact rules.
//!
//! 1. [`error`] and [`model`]: the error type; ids, sizes and parameters, without I/O. [`fault`]:
//!    faults that tests plan for a process.
//!    [`crc32c`] and [`thin_metadata`] read what dm-thin writes.
//! 2. [`host`]: kernel, disk and programs behind one trait, with a real implementation
//!    ([`host::linux`]) and a simulated one ([`host::memory`]). Begin with [`host::Effect`].
//! 3. [`record`]: what survives a restart.
//! 4. [`backend`]: the storage of one pool: images, records, devices. A new kind of pool implements
//!    the trait `Store` in `backend/store.rs`, next to `backend/file.rs`, and has a variant of
//!    [`backend::PoolKind`] and of [`model::PoolPlace`]. ADR 0033 lists what else it needs.
//! 5. [`hook`]: programs that hold an application during a snapshot.
//! 6. [`cut`]: consistent snapshots. [`cut::guard`] is the client of the separate process that freezes
//!    and thaws, whose sources are in `guard/src`. The path of a cut to FIFREEZE is `cut/local.rs`,
//!    `guard/src/lib.rs`, `guard/src/client.rs`, then in the other process `guard/src/session.rs`,
//!    `guard/src/session/member.rs`, `core/src/host/linux/freeze.rs`, and for the ioctl
//!    `core/src/host/linux/sys/fs.rs`.
//! 7. [`operation`]: one file for each operation of CSI; most decisions are made here, such as
//!    whether a repeated call is ALREADY_EXISTS. Each place on a node that decides this calls
//!    [`error::Error::exists`], for example `mismatch` in `operation/volume/create.rs` and
//!    `same_request` in `operation/snapshot/create.rs`; `docs/architecture.md` lists all.
//! 8. [`csi`] and [`agent`]: messages that are generated from `proto/`.
//! 9. [`telemetry`] and [`tls`]: logs and metrics; the connections between router and agents.
//! 10. [`service`]: the gRPC services of one node. [`service::status`](mod@service::status) is the
//!     table from errors to gRPC codes.
//! 11. [`router`]: the gRPC services of a cluster. It forwards calls to agents, which are the
//!     drivers of the nodes, and coordinates snapshots over several nodes. The headers of
//!     `router.rs` and `router/kube.rs` list its features.
//! 12. [`server`]: sockets, start and shutdown of each role.
//! 13. [`config`], [`doctor`], [`demo`] and [`cli`]: the entry points. No other module uses them.
//!
//! A good first call to follow is NodeStageVolume: `service/request/node.rs`,
//! `operation/volume/stage.rs`, `backend/file/device.rs`, `core/src/host/linux/loop_device.rs`,
//! `operation/volume/format.rs`, `core/src/host/linux/mounts.rs`.
//!
//! Tests are next to the code that they test, and in `tests/`, in one program for each need.
//! `CONTRIBUTING.md` describes each folder. A call that fails gets a scenario in
//! `tests/simulated/fault_sweep/` (snapshots: `cuts.rs`), which lets each of its effects fail, and a
//! row in `tests/unprivileged/service/codes/` if its code matters (snapshots: `snapshots.rs`).
//!
//! # Invariants
//!
//! - Pools, images, records, loop devices and mounts are changed only by [`host::Host::perform`]
//!   with a [`host::Effect`], so that tests can fail or interrupt each change. Freezing, sockets,
//!   the end of a hook's program and files of certificates do not pass through it.
//! - A volume is never formatted twice: its record says that formatting has begun before mkfs
//!   starts.
//! - An image never has two loop devices.
//! - A gRPC code that callers take for final means that nothing is left. Where that is not certain,
//!   the code is ABORTED or UNAVAILABLE.
//! - An object that cannot be reached is not gone, and a broken connection is not a reply: both are
//!   UNAVAILABLE.
//! - An operation runs to its end, even if its caller goes away. If a lock is taken, the call is
//!   ABORTED; only calls that create snapshots wait for it, for a limited time.
//! - Only the freeze guard freezes a file system. It thaws at a deadline and at the end of its
//!   connection; the driver thaws if the guard dies, and the next start if both died.
//! - Paths of callers are opened without following links, and used through the open descriptor.
//! - `Debug` output of a message shows no secret.

pub mod agent;
pub mod backend;
pub mod cli;
pub mod config;
pub mod csi;
pub mod cut;
pub mod demo;
pub mod doctor;
pub mod hook;
pub mod operation;
pub mod router;
pub mod server;
pub mod service;
pub mod telemetry;
pub mod tls;

pub use slackwater_core::{crc32c, error, fault, host, model, record, thin_metadata};
