//! Tests that need root and disturb others: while they run, all programs on the machine have a disk
//! that is dead or hangs, or mounts that stay in use. They run one after the other.

mod dead_disk;
mod image_pool;
