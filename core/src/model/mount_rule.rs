//! Where a pool may be created.

use std::fmt;
use std::str::FromStr;

/// The option `mount` of a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MountRule {
    /// Only where the root of a file system, or of a btrfs subvolume, is mounted on its directory,
    /// so that a directory whose disk is not mounted is never used as the pool.
    Required,
    /// In any directory.
    Any,
}

impl FromStr for MountRule {
    type Err = String;

    fn from_str(text: &str) -> Result<MountRule, String> {
        match text {
            "required" => Ok(MountRule::Required),
            "any" => Ok(MountRule::Any),
            _ => Err(format!("mount={text} is not valid; give required or any")),
        }
    }
}

impl fmt::Display for MountRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            MountRule::Required => "required",
            MountRule::Any => "any",
        })
    }
}
