//! Tests of functions that the running kernel may lack or refuse. Each test runs in a guest kernel
//! (README.md), for which it needs root.

mod guest_archives;
mod guest_block_groups;
mod guest_databases;
mod guest_dead_group;
mod guest_dm;
mod guest_ext4;
mod guest_filter;
mod guest_flush;
mod guest_guard;
mod guest_kill;
mod guest_linear;
mod guest_lvm;
mod guest_memory;
mod guest_metadata;
mod guest_order;
mod guest_outage;
mod guest_pool;
mod guest_power;
mod guest_repair;
mod guest_suspended;
mod guest_thick;
mod guest_thin_host;
mod guest_udev;
