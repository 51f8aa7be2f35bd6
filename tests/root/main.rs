//! Tests that need root: the real host, and the driver as a process, with loop devices and mounts.
//! They run next to each other, each with files of its own.

#[cfg(feature = "fault")]
mod across;
#[cfg(feature = "fault")]
mod cut;
#[cfg(feature = "fault")]
mod databases;
mod demo;
#[cfg(feature = "fault")]
mod guard;
#[cfg(feature = "fault")]
mod hooks;
mod host_linux;
mod kernel;
#[cfg(feature = "fault")]
mod kill;
#[cfg(feature = "fault")]
mod roles;
#[cfg(feature = "fault")]
#[path = "../simulation/mod.rs"]
mod simulation;
