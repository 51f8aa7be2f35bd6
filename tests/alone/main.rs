//! Tests that need root and disturb others: while they run, all programs on the machine have a disk
//! that is dead or hangs, mounts that stay in use, or a free loop device that is claimed. They run one
//! after the other.

mod dead_disk;
mod image_pool;
mod loop_devices;
