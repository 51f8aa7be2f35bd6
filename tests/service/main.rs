//! The edge of a node, over a real unix socket: the whole driver on a simulated machine.

mod arbitrary;
mod calls;
mod capabilities;
mod codes;
mod gate;
mod harness;
mod http;
mod interrupted;
mod lifecycle;
mod refusals;
mod secrets;
mod sockets;
