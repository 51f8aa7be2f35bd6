//! Code that the driver and its freeze guard share.
//!
//! | module | content |
//! |---|---|
//! | [`model`] | values without behavior: IDs, sizes, capabilities, parameters |
//! | [`error`] | one error type, named by condition |
//! | [`fault`] | faults that tests plan, in a build for tests |
//! | [`record`] | what is stored on disk: versioned JSON, written durably |
//! | [`thin_metadata`] | reads the metadata of a thin pool: its thin devices and their blocks |
//! | [`host`] | access to kernel, disk and programs: `host::linux` is real, `host::memory` simulated |
//! | [`crc32c`] | CRC-32C, the checksum of several formats on disk |
//! | `fuzz` | fuzzing of parsers, for tests alone |

pub mod crc32c;
pub mod error;
pub mod fault;
#[cfg(any(test, feature = "testing"))]
pub mod fuzz;
pub mod host;
pub mod model;
pub mod record;
pub mod thin_metadata;
