//! What tests do with a simulated machine, besides using it as a host: they observe it, act as
//! users of volumes and as other processes, and end processes, disks and power. No release
//! contains this.

mod foreign;
mod lasting;
mod power;
mod user;
mod watch;

pub use foreign::Held;
pub use lasting::{Delay, Hung};
