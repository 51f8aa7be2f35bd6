//! CreateSnapshot, DeleteSnapshot, ListSnapshots, GetSnapshot.

use super::{CreateSnapshot, Driver, ListSnapshots, Snapshot, SnapshotPage};
use crate::error::{Error, Result};

impl Driver {
    /// CreateSnapshot.
    pub fn create_snapshot(&self, _request: &CreateSnapshot) -> Result<Snapshot> {
        Err(Error::Unsupported {
            what: "a snapshot".into(),
        })
    }

    /// DeleteSnapshot.
    pub fn delete_snapshot(&self, _snapshot_id: &str) -> Result<()> {
        Err(Error::Unsupported {
            what: "a snapshot".into(),
        })
    }

    /// ListSnapshots.
    pub fn list_snapshots(&self, _request: &ListSnapshots) -> Result<SnapshotPage> {
        Err(Error::Unsupported {
            what: "a snapshot".into(),
        })
    }

    /// GetSnapshot.
    pub fn get_snapshot(&self, _snapshot_id: &str) -> Result<Snapshot> {
        Err(Error::Unsupported {
            what: "a snapshot".into(),
        })
    }
}
