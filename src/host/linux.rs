//! The kernel of this machine.
