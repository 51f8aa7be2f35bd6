//! Which members can be cut at one moment: judged over all of them, on whatever nodes they are.

use crate::error::{Error, Result};
use crate::model::{Level, OnQuiesceFailure, SnapshotParameters};

/// A member that somebody uses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Used {
    /// Id of its volume.
    pub volume_id: String,
    /// "namespace/name" of its claim, if it's known.
    pub claim: Option<String>,
    /// As a raw device.
    pub raw: bool,
}

/// Several volumes in use need a moment at which all stand still: refuses what has none.
pub fn refuse_without(used: &[Used], level: Level, parameters: &SnapshotParameters) -> Result<()> {
    if used.len() < 2 {
        return Ok(());
    }
    let crash = |key: &str| {
        Err(Error::invalid(
            format!("parameters.{key}"),
            "\"crash\" does not freeze, so several volumes in use would not be cut at the same point in time; give filesystem",
        ))
    };
    if level == Level::Crash {
        return crash("consistency");
    }
    if parameters.on_quiesce_failure == OnQuiesceFailure::Degrade(Level::Crash) {
        return crash("onQuiesceFailure");
    }
    match used.iter().find(|used| used.raw) {
        None => Ok(()),
        Some(used) => Err(Error::refused(
            format!("volume {}", used.volume_id),
            "it is published as a raw block device, which cannot be frozen together with other volumes in use; snapshot it alone, or unpublish it first",
        )),
    }
}
