//! Many calls on the simulated machine, with every fault that it has. They take minutes, and need
//! nothing.

mod fault_sweep;
#[path = "../simulation/mod.rs"]
mod simulation;
mod state_machine;
mod thin_rules;
