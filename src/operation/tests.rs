//! Fixtures for the tests of operations: a driver on a simulated machine, and a new volume.

use crate::cut::CutInterfaces;
use crate::host::memory::MemoryHost;
use crate::model::{
    AccessMode, AccessType, Capability, CapacityRange, FsType, PoolDefinition, PoolId, VolumeId,
    VolumeParameters,
};
use crate::operation::{CopyKind, CopyOf, CreateVolume, Driver, Settings};

/// The path of the node record.
pub(super) const NODE_RECORD: &str = "/var/lib/slackwater/node.json";

/// The settings of a driver that serves these pools and no others.
pub(super) fn settings(pools: &[PoolDefinition]) -> Settings {
    Settings {
        node_name: "n".into(),
        driver_name: "csi.slackwater.dev".into(),
        pools: pools.to_vec(),
        node_record: NODE_RECORD.into(),
        state_dir: "/run/slackwater/state".into(),
        alone: true,
        ..Settings::default()
    }
}

pub(super) fn pool(definition: &str) -> PoolDefinition {
    definition.parse().unwrap()
}

/// A driver that serves one memory pool.
pub(super) fn driver(host: &MemoryHost) -> Driver {
    let settings = settings(&[pool("default=memory:")]);
    Driver::start(settings, CutInterfaces::simulated(host.clone())).unwrap()
}

pub(super) fn block() -> Capability {
    Capability {
        access_type: AccessType::Block,
        access_mode: AccessMode::SingleNodeWriter,
    }
}

/// An ext4 that one node mounts.
pub(super) fn ext4() -> Capability {
    Capability {
        access_type: AccessType::Mount {
            fs_type: Some(FsType::Ext4),
            mount_flags: Vec::new(),
        },
        access_mode: AccessMode::SingleNodeWriter,
    }
}

/// A copy for a claim.
pub(super) fn copy_for(claim: Option<&str>) -> CopyOf {
    CopyOf {
        kind: CopyKind::Restore,
        id: VolumeId {
            pool: PoolId(uuid::Uuid::nil()),
            uuid: uuid::Uuid::nil(),
        },
        name: String::new(),
        claim: claim.map(str::to_string),
        source_node: None,
    }
}

/// A raw block volume of 1 GiB.
pub(super) fn new_volume(name: &str) -> CreateVolume {
    CreateVolume {
        name: name.into(),
        capacity: CapacityRange::new(1 << 30, 0).unwrap(),
        capabilities: vec![block()],
        parameters: VolumeParameters::default(),
        requisite: Vec::new(),
        content_source: None,
    }
}

pub(super) fn volume(driver: &Driver, name: &str) -> VolumeId {
    driver.volumes.create_volume(&new_volume(name)).unwrap().id
}
