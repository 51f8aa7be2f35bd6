//! Whether a pool of LVM may have raw block volumes although nothing has shown that LVM ignores them.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// The option `rawBlock` of a pool of LVM (docs/adr/0035).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RawBlock {
    /// Raw block volumes are allowed without a test of LVM's filter: the administrator vouches for it.
    Unfiltered,
}

impl FromStr for RawBlock {
    type Err = String;

    fn from_str(text: &str) -> Result<RawBlock, String> {
        match text {
            "unfiltered" => Ok(RawBlock::Unfiltered),
            _ => Err(format!("rawBlock={text} is not valid; give unfiltered")),
        }
    }
}

impl fmt::Display for RawBlock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            RawBlock::Unfiltered => "unfiltered",
        })
    }
}
