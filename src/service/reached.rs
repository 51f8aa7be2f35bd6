//! The level that a cut has reached. CSI's response has no fields for it, so an agent passes it to its
//! router in the metadata of the response. Other callers ignore it.

use std::time::Duration;

use tonic::metadata::MetadataMap;

use crate::model::Level;
use crate::operation::Snapshot;

const LEVEL: &str = "slackwater-level";
const REASON: &str = "slackwater-reason";
/// Microseconds. Only the response of the call that took the snapshot has it, if anything was frozen.
const FROZEN: &str = "slackwater-frozen-us";
/// Longer reasons are not accepted.
const REASON_BYTES: usize = 1024;

/// Adds the level, the reason, and how long file systems were frozen.
pub(super) fn put(metadata: &mut MetadataMap, snapshot: &Snapshot) {
    if let Ok(level) = snapshot.level.as_str().parse() {
        metadata.insert(LEVEL, level);
    }
    // Metadata values must be ASCII; other text is left out.
    if let Ok(reason) = snapshot.reason.parse() {
        metadata.insert(REASON, reason);
    }
    if let Some(frozen) = snapshot.frozen {
        let microseconds = u64::try_from(frozen.as_micros()).unwrap_or(u64::MAX);
        metadata.insert(FROZEN, microseconds.into());
    }
}

/// Reads the level, and the reason why it is not higher; `None` if the agent does not send it.
pub fn read(metadata: &MetadataMap) -> Option<(Level, String)> {
    let level = Level::parse(text(metadata, LEVEL)?)?;
    let mut reason = text(metadata, REASON).unwrap_or_default().to_string();
    reason.truncate(REASON_BYTES);
    Some((level, reason))
}

/// Reads for how long the cut froze file systems; `None` if it froze none, if an earlier call took the
/// snapshot, or if the agent does not send it.
pub fn read_frozen(metadata: &MetadataMap) -> Option<Duration> {
    let microseconds = text(metadata, FROZEN)?.parse().ok()?;
    Some(Duration::from_micros(microseconds))
}

fn text<'a>(metadata: &'a MetadataMap, key: &str) -> Option<&'a str> {
    metadata.get(key)?.to_str().ok()
}
