//! What tests of several crates share. No released program contains it.

pub mod fuzz;
