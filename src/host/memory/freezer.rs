//! The simulated machine's own guard: it lives on when the driver's process dies, and thaws.

use std::path::Path;

use super::MemoryHost;
use crate::error::HostError;
use crate::host::freezer::{FreezeLimits, Journalled};
use crate::host::{Freeze, FreezeMember, Freezer, Result};

impl Freezer for MemoryHost {
    fn begin(&self, _members: Vec<FreezeMember>, _limits: FreezeLimits) -> Result<Box<dyn Freeze>> {
        Err(HostError::unexpected(
            "freeze",
            Path::new("/"),
            "not simulated",
        ))
    }

    fn sweep(&self) -> Result<Vec<String>> {
        Ok(Vec::new())
    }

    fn journalled(&self) -> Result<Vec<Journalled>> {
        Ok(Vec::new())
    }
}
