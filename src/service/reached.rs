//! What a snapshot has reached, beside CSI's answer, which has no field for it: metadata of the
//! answer, from an agent to its router. Who doesn't know it passes it over.

use tonic::metadata::MetadataMap;

use crate::model::Level;
use crate::operation::Snapshot;

const LEVEL: &str = "slackwater-level";
const REASON: &str = "slackwater-reason";
/// More of a reason is not taken.
const REASON_BYTES: usize = 1024;

/// Says it.
pub(super) fn put(metadata: &mut MetadataMap, snapshot: &Snapshot) {
    if let Ok(level) = snapshot.level.word().parse() {
        metadata.insert(LEVEL, level);
    }
    // What isn't ASCII can't be said here.
    if let Ok(reason) = snapshot.reason.parse() {
        metadata.insert(REASON, reason);
    }
}

/// The level and the reason for no higher one; none of an agent that does not say it.
pub fn read(metadata: &MetadataMap) -> Option<(Level, String)> {
    let text = |key: &str| metadata.get(key)?.to_str().ok();
    let level = Level::of_word(text(LEVEL)?)?;
    let mut reason = text(REASON).unwrap_or_default().to_string();
    reason.truncate(REASON_BYTES);
    Some((level, reason))
}
