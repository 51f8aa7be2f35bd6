//! The door: arguments, configuration, run.

fn main() {}
