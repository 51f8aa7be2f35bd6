//! Which inline volumes pods can have, and what happens to those that no mount shows.

use std::num::NonZeroU16;

use super::*;
use crate::cut::CutInterfaces;
use crate::host::memory::MemoryHost;
use crate::host::{Effect, Host};
use crate::model::parameters::EphemeralParameters;
use crate::model::{AccessMode, AccessType, Capability};
use crate::operation::Driver;
use crate::operation::Settings;
use crate::operation::tests::{pool, settings};

const TARGET: &str = "/var/lib/kubelet/inline";
const GIB: u64 = 1 << 30;

fn driver(host: &MemoryHost, pools: &[&str], most: Option<u64>) -> Driver {
    driver_for(host, pools, most, None)
}

fn driver_for(
    host: &MemoryHost,
    pools: &[&str],
    most: Option<u64>,
    max_volumes: Option<NonZeroU16>,
) -> Driver {
    let pools: Vec<_> = pools.iter().map(|definition| pool(definition)).collect();
    let settings = Settings {
        inline_max_size: most,
        max_volumes,
        ..settings(&pools)
    };
    Driver::start(settings, CutInterfaces::simulated(host.clone())).unwrap()
}

fn request(size: u64, other: Option<&str>) -> PublishEphemeral {
    PublishEphemeral {
        volume_id: "csi-0123".into(),
        target_path: TARGET.into(),
        capability: Capability {
            access_type: AccessType::Mount {
                fs_type: Some(FsType::Ext4),
                mount_flags: Vec::new(),
            },
            access_mode: AccessMode::SingleNodeWriter,
        },
        read_only: false,
        attributes: EphemeralParameters {
            size,
            other: other.map(str::to_string),
        },
    }
}

fn nothing_is_left(host: &MemoryHost, driver: &Driver) {
    assert_eq!(driver.pools.serving()[0].backend.volumes.count(), 0);
    assert_eq!(host.loops().unwrap().len(), 0);
    assert!(host.mounted().is_empty());
}

#[test]
fn there_are_none_unless_the_administrator_says_so() {
    let host = MemoryHost::new();
    let driver = driver(&host, &["default=memory:"], None);
    let error = driver
        .volumes
        .publish_ephemeral(&request(GIB, None))
        .unwrap_err();
    assert!(matches!(error, Error::Refused { .. }), "{error}");
    assert!(error.to_string().contains("--inline-max-size"), "{error}");
    nothing_is_left(&host, &driver);
}

#[test]
fn none_is_made_where_as_many_volumes_are_attached_as_a_node_may_have() {
    let host = MemoryHost::new();
    let most = NonZeroU16::new(1);
    let driver = driver_for(&host, &["default=memory:"], Some(GIB), most);
    driver
        .volumes
        .publish_ephemeral(&request(GIB, None))
        .unwrap();
    // The volume exists: a retry does not count as another one.
    driver
        .volumes
        .publish_ephemeral(&request(GIB, None))
        .unwrap();
    let another = || PublishEphemeral {
        volume_id: "csi-4567".into(),
        target_path: "/var/lib/kubelet/another".into(),
        ..request(GIB, None)
    };
    let error = driver.volumes.publish_ephemeral(&another()).unwrap_err();
    assert!(matches!(error, Error::Refused { .. }), "{error}");
    assert!(error.to_string().contains("--max-volumes"), "{error}");
    driver.volumes.unpublish_volume("csi-0123", TARGET).unwrap();
    nothing_is_left(&host, &driver);
    driver.volumes.publish_ephemeral(&another()).unwrap();
}

#[test]
fn none_is_larger_than_the_limit_and_a_pod_chooses_nothing_else() {
    let host = MemoryHost::new();
    let driver = driver(&host, &["default=memory:"], Some(GIB));
    let error = driver.volumes.publish_ephemeral(&request(GIB + 1, None));
    assert!(matches!(error, Err(Error::OutOfRange { .. })), "{error:?}");
    for key in ["allocation", "mkfsOptions", "pool", "wipe"] {
        let error = driver.volumes.publish_ephemeral(&request(GIB, Some(key)));
        assert!(matches!(error, Err(Error::Invalid { .. })), "{error:?}");
    }
    nothing_is_left(&host, &driver);
    driver
        .volumes
        .publish_ephemeral(&request(GIB, None))
        .unwrap();
    driver.volumes.unpublish_volume("csi-0123", TARGET).unwrap();
    nothing_is_left(&host, &driver);
}

#[test]
fn what_was_published_before_is_repeated_and_unpublished_whatever_is_allowed_now() {
    let host = MemoryHost::new();
    let before = driver(&host, &["default=memory:"], Some(GIB));
    before
        .volumes
        .publish_ephemeral(&request(GIB, None))
        .unwrap();
    drop(before);
    let host = host.restart_process();
    let now = driver(&host, &["default=memory:"], None);
    // A pod of the previous release may have this attribute.
    now.volumes
        .publish_ephemeral(&request(GIB, Some("allocation")))
        .unwrap();
    now.volumes.unpublish_volume("csi-0123", TARGET).unwrap();
    nothing_is_left(&host, &now);
    now.volumes
        .publish_ephemeral(&request(GIB, None))
        .unwrap_err();
}

#[test]
fn one_whose_unpublish_missed_its_pool_ends_when_the_pool_is_opened() {
    let folder = Path::new("/memory/a");
    let host = MemoryHost::new();
    host.make_folder(folder).unwrap();
    host.make_folder(Path::new("/memory/b")).unwrap();
    let pools = [
        "default=file:/memory/a,init,mount=any",
        "b=file:/memory/b,init,mount=any",
    ];
    let before = driver(&host, &pools, Some(GIB));
    before
        .volumes
        .publish_ephemeral(&request(GIB, None))
        .unwrap();
    drop(before);
    let host = host.restart_process();
    // A restart while the pod runs deletes nothing.
    let again = driver(&host, &pools, Some(GIB));
    assert_eq!(again.pools.serving()[0].backend.volumes.count(), 1);
    assert_eq!(host.mounted().len(), 1);
    drop(again);
    let host = host.restart_process();
    host.pull_disk(folder).unwrap();
    let without = driver(&host, &pools, Some(GIB));
    without
        .volumes
        .unpublish_volume("csi-0123", TARGET)
        .unwrap();
    assert!(host.mounted().is_empty());
    host.put_disk_back(folder).unwrap();
    without.refresh_pools();
    assert_eq!(without.pools.serving().len(), 2);
    nothing_is_left(&host, &without);
}

#[test]
fn one_stays_while_a_loop_that_may_stand_on_it_can_not_be_asked() {
    let (folder, other) = (Path::new("/memory/a"), Path::new("/memory/other"));
    let host = MemoryHost::new();
    host.make_folder(folder).unwrap();
    host.make_folder(other).unwrap();
    let pools = ["default=file:/memory/a,init,mount=any"];
    let driver = driver(&host, &pools, Some(GIB));
    driver
        .volumes
        .publish_ephemeral(&request(GIB, None))
        .unwrap();
    let mut images = host.files_below(folder).into_iter();
    let image = images.find(|path| path.ends_with(".img")).unwrap();
    let pool = driver.pools.serving()[0].clone();
    // Another process unmounts it.
    let target = Path::new(TARGET);
    host.perform(&Effect::Unmount { target }).unwrap();
    assert_eq!(host.loops().unwrap().len(), 0);
    // A loop device is attached to a file of the same name, on a disk that hangs.
    let copy = other.join(image);
    let parents: Vec<_> = copy.ancestors().skip(1).collect();
    for parent in parents.into_iter().rev().skip(3) {
        host.make_folder(parent).unwrap();
    }
    host.put_file(&copy, &[0; 4096]).unwrap();
    host.foreign_loop(&copy).unwrap();
    let hung = host.hang_disk(other).unwrap();
    let (ended, failed) = driver.volumes.delete_leftover_inline(&pool);
    let failed = crate::error::chain(&failed.unwrap());
    assert!(failed.contains("no answer"), "{failed}");
    assert_eq!((ended, pool.backend.volumes.count()), (0, 1));
    drop(hung);
    assert!(matches!(
        driver.volumes.delete_leftover_inline(&pool),
        (1, None)
    ));
    assert_eq!(pool.backend.volumes.count(), 0);
}
