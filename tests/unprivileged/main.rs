//! Tests that need nothing: the services, the router, the command line, and checks of the sources and
//! pages. A few of them need root, and are left out without it.

mod cli;
mod descriptor;
mod docs;
mod page;
mod readme;
mod router;
mod runs;
mod service;
mod shape;
mod thin_metadata;
