//! How a pool is defined on the command line: `NAME=file:/path[,init][,overcommit=1]`.

use std::path::PathBuf;

/// One `--pool`.
#[derive(Clone, Debug, PartialEq)]
pub struct PoolDefinition {
    /// The name that classes use.
    pub name: String,
    /// Kind and place.
    pub place: PoolPlace,
    /// Make it if nothing is there.
    pub init: bool,
    /// How many times the pool may be promised to thin volumes.
    pub overcommit: f64,
}

/// Where a pool is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PoolPlace {
    /// Image files in a folder.
    File {
        /// The folder, absolute.
        path: PathBuf,
    },
    /// Simulated, gone with the process.
    Memory,
}

impl std::fmt::Display for PoolPlace {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            PoolPlace::File { path } => write!(f, "file:{}", path.display()),
            PoolPlace::Memory => f.write_str("memory:"),
        }
    }
}
