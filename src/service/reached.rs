//! The consistency level of a snapshot, which CSI's response has no field for: an agent passes it
//! to its router in the metadata of the response. Other callers ignore it.

use tonic::metadata::MetadataMap;

use crate::model::Level;
use crate::operation::Snapshot;

const LEVEL: &str = "slackwater-level";
const REASON: &str = "slackwater-reason";
/// Longer reasons are not accepted.
const REASON_BYTES: usize = 1024;

/// Adds the level and the reason.
pub(super) fn put(metadata: &mut MetadataMap, snapshot: &Snapshot) {
    if let Ok(level) = snapshot.level.word().parse() {
        metadata.insert(LEVEL, level);
    }
    // Metadata values must be ASCII; other text is left out.
    if let Ok(reason) = snapshot.reason.parse() {
        metadata.insert(REASON, reason);
    }
}

/// Reads the level, and the reason why it is not higher; `None` if the agent does not send it.
pub fn read(metadata: &MetadataMap) -> Option<(Level, String)> {
    let text = |key: &str| metadata.get(key)?.to_str().ok();
    let level = Level::of_word(text(LEVEL)?)?;
    let mut reason = text(REASON).unwrap_or_default().to_string();
    reason.truncate(REASON_BYTES);
    Some((level, reason))
}
