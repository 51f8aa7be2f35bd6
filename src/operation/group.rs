//! CreateVolumeGroupSnapshot, DeleteVolumeGroupSnapshot, GetVolumeGroupSnapshot.

use super::{CreateGroup, Driver, Group, NamedGroup};
use crate::error::{Error, Result};

impl Driver {
    /// CreateVolumeGroupSnapshot.
    pub fn create_group(&self, _request: &CreateGroup) -> Result<Group> {
        Err(Error::Unsupported {
            what: "a group".into(),
        })
    }

    /// DeleteVolumeGroupSnapshot.
    pub fn delete_group(&self, _request: &NamedGroup) -> Result<()> {
        Err(Error::Unsupported {
            what: "a group".into(),
        })
    }

    /// GetVolumeGroupSnapshot.
    pub fn get_group(&self, _request: &NamedGroup) -> Result<Group> {
        Err(Error::Unsupported {
            what: "a group".into(),
        })
    }
}
