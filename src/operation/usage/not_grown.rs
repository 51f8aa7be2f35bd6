//! Volumes in use whose file system is smaller than it should be.

use std::sync::PoisonError;

use uuid::Uuid;

use crate::model::VolumeId;
use crate::operation::Driver;

/// A volume in use whose file system could not be grown to its size.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NotGrown {
    /// The volume ID.
    pub id: VolumeId,
    /// Why it could not be grown.
    pub reason: String,
}

impl Driver {
    /// Removes a volume from the list: its file system has grown, or the volume is no longer in
    /// use.
    pub(in crate::operation) fn no_longer_small(&self, uuid: Uuid) {
        let mut all = self.small.lock().unwrap_or_else(PoisonError::into_inner);
        all.remove(&uuid);
    }

    /// Volumes in use whose file system could not be grown, for reports to administrators.
    pub fn not_grown(&self) -> Vec<NotGrown> {
        let all = self.small.lock().unwrap_or_else(PoisonError::into_inner);
        all.values().cloned().collect()
    }
}
