//! The verbs: every CSI call as an operation on values, idempotent, locked, recorded.
//!
//! One operation = validate -> lock -> look -> compare -> act -> record. The functions here
//! block; [`Driver::detach`] is the one place where async code crosses over, and what it starts
//! ends by itself, whether or not its caller still waits.

pub mod pool_make;
pub mod request;

use std::sync::Arc;

use crate::error::{Error, Result};
use crate::host::Host;
use crate::model::{HomeId, PoolDefinition};

pub use request::*;

/// What the operations need to know of the configuration.
#[derive(Clone, Debug)]
pub struct Settings {
    /// `--node-name`, also the CSI node id.
    pub node_name: String,
    /// `--driver-name`.
    pub driver_name: String,
    /// `--pool`, in order.
    pub pools: Vec<PoolDefinition>,
    /// `--node-record`.
    pub node_record: std::path::PathBuf,
}

/// A configured pool as it is now, for metrics, reports and people.
#[derive(Clone, Debug)]
pub struct PoolStatus {
    /// Name in the configuration.
    pub name: String,
    /// "file:/path".
    pub place: String,
    /// Its id, if it could be read.
    pub id: Option<crate::model::PoolId>,
    /// Why it isn't served; `None` if it is.
    pub refusal: Option<String>,
    /// Room, if it's served.
    pub space: Option<crate::backend::PoolSpace>,
    /// Number of volumes.
    pub volumes: u64,
    /// Number of records that can't be read.
    pub damaged: u64,
    /// What start-up found and ended.
    pub leftovers: crate::backend::Leftovers,
}

/// The driver of one node: its pools, its locks, what runs.
pub struct Driver {
    settings: Settings,
}

impl Driver {
    /// Opens pools, takes their locks, recovers what a crash left. Errors = bad configuration or host failure. Pools that can't be served (blank path known to the node record, other home) don't fail it.
    pub fn start(settings: Settings, host: Arc<dyn Host>) -> Result<Driver> {
        unimplemented!()
    }
    /// Looks again at pools that aren't served (caller does it every 10 s).
    pub fn look_again(&self) {
        unimplemented!()
    }
    /// Runs blocking work to its end, even if the caller goes away. Refuses with Error::Stopping after stop().
    pub async fn detach<T: Send + 'static>(
        self: &Arc<Self>,
        work: impl FnOnce(&Driver) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        unimplemented!()
    }
    /// No new operations from now on.
    pub fn stop(&self) {
        unimplemented!()
    }
    /// Operations running now (name-less count).
    pub fn running(&self) -> usize {
        unimplemented!()
    }
    /// See the operation.
    pub fn settings(&self) -> &Settings {
        unimplemented!()
    }
    /// See the operation.
    pub fn home(&self) -> HomeId {
        unimplemented!()
    }
    /// See the operation.
    pub fn topology_key(&self) -> String {
        unimplemented!()
    }
    /// One status a configured pool: name, place, id, served or why not, space (Option<PoolSpace>), volumes, damaged, leftovers at start. For metrics, doctor, volumes.
    pub fn pool_status(&self) -> Vec<PoolStatus> {
        unimplemented!()
    }
    /// What is missing on this host for volumes; empty when fine. (Probe)
    pub fn missing(&self) -> Vec<String> {
        unimplemented!()
    }
    /// See the operation.
    pub fn create_volume(&self, request: &CreateVolume) -> Result<Volume> {
        unimplemented!()
    }
    /// See the operation.
    pub fn delete_volume(&self, volume_id: &str) -> Result<()> {
        unimplemented!()
    }
    /// See the operation.
    pub fn attach_volume(&self, request: &Attach) -> Result<()> {
        unimplemented!()
    }
    /// See the operation.
    pub fn validate_volume(&self, request: &Validate) -> Result<Result<(), String>> {
        unimplemented!()
    }
    /// See the operation.
    pub fn list_volumes(&self, request: &ListVolumes) -> Result<VolumePage> {
        unimplemented!()
    }
    /// See the operation.
    pub fn get_volume(&self, volume_id: &str) -> Result<Volume> {
        unimplemented!()
    }
    /// See the operation.
    pub fn capacity(&self, request: &AskCapacity) -> Result<Capacity> {
        unimplemented!()
    }
    /// See the operation.
    pub fn expand_volume(&self, request: &ExpandVolume) -> Result<Expanded> {
        unimplemented!()
    }
    /// See the operation.
    pub fn modify_volume(&self, request: &ModifyVolume) -> Result<()> {
        unimplemented!()
    }
    /// See the operation.
    pub fn stage_volume(&self, request: &StageVolume) -> Result<()> {
        unimplemented!()
    }
    /// See the operation.
    pub fn unstage_volume(&self, volume_id: &str, staging_path: &str) -> Result<()> {
        unimplemented!()
    }
    /// See the operation.
    pub fn publish_volume(&self, request: &PublishVolume) -> Result<()> {
        unimplemented!()
    }
    /// See the operation.
    pub fn publish_ephemeral(&self, request: &PublishEphemeral) -> Result<()> {
        unimplemented!()
    }
    /// See the operation.
    pub fn unpublish_volume(&self, volume_id: &str, target_path: &str) -> Result<()> {
        unimplemented!()
    }
    /// See the operation.
    pub fn volume_stats(&self, request: &AskStats) -> Result<Stats> {
        unimplemented!()
    }
    /// See the operation.
    pub fn expand_node(&self, request: &ExpandNode) -> Result<u64> {
        unimplemented!()
    }
    /// See the operation.
    pub fn volume_health(&self, volume_id: &str) -> Result<VolumeHealth> {
        unimplemented!()
    }
    /// See the operation.
    pub fn list_volume_health(&self, request: &ListVolumes) -> Result<(Vec<VolumeHealth>, String)> {
        unimplemented!()
    }
    /// See the operation.
    pub fn storage_health(&self) -> Result<Vec<Finding>> {
        unimplemented!()
    }
    /// Metrics: number of formats done and loop devices on our images.
    pub fn formats(&self) -> u64 {
        unimplemented!()
    }
    /// See the operation.
    pub fn loop_devices(&self) -> Result<usize> {
        unimplemented!()
    }
}
