//! Volumes in use whose file system is smaller than it should be.

use std::sync::PoisonError;

use uuid::Uuid;

use crate::error::{Error, Result, chain};
use crate::model::VolumeId;
use crate::operation::{Pool, Usage};
use crate::record::VolumeRecord;

/// A volume in use whose file system could not be grown to its size.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NotGrown {
    pub id: VolumeId,
    /// Why it could not be grown.
    pub reason: String,
}

impl Usage {
    /// Reports that the file system stays smaller than the volume. It is not an error, because the
    /// volume can be used.
    pub(in crate::operation) fn record_not_grown(
        &self,
        pool: &Pool,
        record: &VolumeRecord,
        error: &Error,
    ) -> Result<()> {
        tracing::warn!(
            volume = %record.uuid, error = %chain(error),
            "failed to grow the file system to the volume's size; it is mounted at its current size and the next staging tries again"
        );
        let (pool, uuid) = (pool.id(), record.uuid);
        let small = NotGrown {
            id: VolumeId { pool, uuid },
            reason: chain(error).to_string(),
        };
        let mut all = self.small.lock().unwrap_or_else(PoisonError::into_inner);
        all.insert(uuid, small);
        Ok(())
    }

    /// Removes a volume from the list: its file system has grown, or the volume is no longer in
    /// use.
    pub(in crate::operation) fn clear_not_grown(&self, uuid: Uuid) {
        let mut all = self.small.lock().unwrap_or_else(PoisonError::into_inner);
        all.remove(&uuid);
    }

    /// Volumes in use whose file system could not be grown, for reports to administrators.
    pub fn not_grown(&self) -> Vec<NotGrown> {
        let all = self.small.lock().unwrap_or_else(PoisonError::into_inner);
        all.values().cloned().collect()
    }
}
