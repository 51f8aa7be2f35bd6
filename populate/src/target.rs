//! The volume that is filled: the blocks of a device or of one file, or a folder of files.

pub mod disk;
pub mod tree;
