//! What the driver and its freeze guard share.
//!
//! | module | what it is |
//! |---|---|
//! | [`model`] | values without behaviour of their own: IDs, sizes, capabilities, parameters |
//! | [`error`] | one error type, named by condition |
//! | [`record`] | what is stored on disk: versioned JSON, written durably |
//! | [`host`] | the seam to kernel, disk and programs; `host::linux` is the real one, `host::memory` simulates a machine |

pub mod error;
pub mod host;
pub mod model;
pub mod record;
