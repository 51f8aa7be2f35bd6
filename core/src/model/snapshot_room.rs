//! Whether snapshots may use the space that is guaranteed to volumes.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// The option `snapshots` of a pool (docs/adr/0031).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SnapshotSpacePolicy {
    /// No: the space that is guaranteed to volumes is kept available, and a snapshot that does not
    /// fit next to it is refused.
    Reserved,
    /// Yes: a snapshot is taken if the pool has enough free space. The guarantees of volumes are
    /// then best effort.
    BestEffort,
}

impl FromStr for SnapshotSpacePolicy {
    type Err = String;

    fn from_str(text: &str) -> Result<SnapshotSpacePolicy, String> {
        match text {
            "reserved" => Ok(SnapshotSpacePolicy::Reserved),
            "best-effort" => Ok(SnapshotSpacePolicy::BestEffort),
            _ => Err(format!(
                "snapshots={text} is not valid; give reserved or best-effort"
            )),
        }
    }
}

impl fmt::Display for SnapshotSpacePolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            SnapshotSpacePolicy::Reserved => "reserved",
            SnapshotSpacePolicy::BestEffort => "best-effort",
        })
    }
}
