//! A file system that cannot be grown is mounted at its size, and reported.

use nix::errno::Errno;

use super::*;
use crate::host::memory::{FaultMode, MemoryHost};
use crate::model::VolumeId;
use crate::model::size::GIB;
use crate::model::{AccessMode, CapacityRange};
use crate::operation::tests::{driver, new_volume};
use crate::operation::{CreateVolume, Driver, ExpandVolume, NodeExpandVolume, StageVolume};

const STAGING: &str = "/var/lib/kubelet/staging";

fn capability(fs: FsType) -> Capability {
    Capability {
        access_type: AccessType::Mount {
            fs_type: Some(fs),
            mount_flags: Vec::new(),
        },
        access_mode: AccessMode::SingleNodeWriter,
    }
}

fn size(required: u64) -> CapacityRange {
    CapacityRange { required, limit: 0 }
}

fn stage(driver: &Driver, id: VolumeId, fs: FsType) -> Result<()> {
    driver.volumes.stage_volume(&StageVolume {
        volume_id: id.to_string(),
        staging_path: STAGING.into(),
        capability: capability(fs),
    })
}

/// A volume that was used, and that grew while it was not in use.
fn grown(host: &MemoryHost, fs: FsType) -> (Driver, VolumeId) {
    let driver = driver(host);
    let request = CreateVolume {
        capabilities: vec![capability(fs)],
        ..new_volume("a")
    };
    let id = driver.volumes.create_volume(&request).unwrap().id;
    stage(&driver, id, fs).unwrap();
    driver
        .volumes
        .unstage_volume(&id.to_string(), STAGING)
        .unwrap();
    let expanded = driver.volumes.expand_volume(&ExpandVolume {
        volume_id: id.to_string(),
        capacity: size(2 * GIB),
        capability: None,
    });
    assert_eq!(expanded.unwrap().size, 2 * GIB);
    (driver, id)
}

/// Stages a volume while one effect fails: the effect after whose failure the file system is
/// mounted and too small.
fn staged_small(fs: FsType) -> (MemoryHost, Driver, VolumeId) {
    for effect in 1..60 {
        let host = MemoryHost::new();
        if fs == FsType::Ext4 {
            host.refuse_ext4_growth();
        }
        let (driver, id) = grown(&host, fs);
        host.fail_effect(effect, FaultMode::Before(Errno::EIO));
        let staged = stage(&driver, id, fs);
        let is_small = host
            .fs_bytes(Path::new(STAGING))
            .is_ok_and(|size| size < 2 * GIB);
        assert_eq!(
            driver.usage.not_grown().len(),
            usize::from(staged.is_ok() && is_small),
            "{fs}: effect {effect}"
        );
        if is_small && staged.is_ok() {
            host.clear_faults();
            return (host, driver, id);
        }
    }
    panic!("{fs}: nothing keeps it from growing");
}

#[test]
fn a_stage_that_could_not_grow_its_volume_is_reported_until_it_has_grown_or_ended() {
    for fs in [FsType::Xfs, FsType::Ext4, FsType::Btrfs] {
        let (host, driver, id) = staged_small(fs);
        let reported = driver.describe().not_grown;
        assert_eq!(reported[0].id, id);
        assert!(reported[0].reason.contains("grow"), "{fs}: {reported:?}");
        stage(&driver, id, fs).unwrap();
        assert_eq!(driver.usage.not_grown(), [], "{fs}");
        assert_eq!(host.fs_bytes(Path::new(STAGING)), Ok(2 * GIB), "{fs}");

        let (_host, driver, id) = staged_small(fs);
        driver
            .volumes
            .unstage_volume(&id.to_string(), STAGING)
            .unwrap();
        assert_eq!(driver.usage.not_grown(), [], "{fs}");
    }
    let (host, driver, id) = staged_small(FsType::Xfs);
    let grown = driver.volumes.expand_node(&NodeExpandVolume {
        volume_id: id.to_string(),
        volume_path: STAGING.into(),
        capacity: None,
        capability: None,
    });
    assert_eq!(grown.unwrap(), 2 * GIB);
    assert_eq!(host.fs_bytes(Path::new(STAGING)), Ok(2 * GIB));
    assert_eq!(driver.usage.not_grown(), []);
}
