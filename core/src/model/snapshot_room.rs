//! Whether snapshots may take the room that volumes were promised.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Word `snapshots` of a pool (docs/adr/0031).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SnapshotRoom {
    /// No: what volumes were promised is kept for them, and a snapshot that doesn't fit beside it
    /// is refused.
    Reserved,
    /// Yes: a snapshot is made where there is head-room. Promises are best effort then.
    BestEffort,
}

impl FromStr for SnapshotRoom {
    type Err = String;

    fn from_str(text: &str) -> Result<SnapshotRoom, String> {
        match text {
            "reserved" => Ok(SnapshotRoom::Reserved),
            "best-effort" => Ok(SnapshotRoom::BestEffort),
            _ => Err(format!(
                "snapshots={text} is not valid; give reserved or best-effort"
            )),
        }
    }
}

impl fmt::Display for SnapshotRoom {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            SnapshotRoom::Reserved => "reserved",
            SnapshotRoom::BestEffort => "best-effort",
        })
    }
}
