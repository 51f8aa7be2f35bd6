//! Growth that fails, more than once, with use of the volume in between: the data stays intact.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use nix::errno::Errno;
use slackwater::csi::*;
use slackwater::host::memory::{FaultMode, MemoryHost, MemoryOptions};
use slackwater::model::Alpha;
use tonic::Code;

use crate::service::harness::*;

async fn on(backing_fs: &str) -> Node {
    let machine = MemoryHost::with_options(MemoryOptions {
        fs_name: backing_fs.into(),
        ..MemoryOptions::default()
    });
    machine.make_folder(Path::new(POOL)).unwrap();
    let place = slackwater::model::PoolPlace::File { path: POOL.into() };
    let host = Arc::new(machine.clone());
    Node::on(machine, host, Alpha::default(), |settings| {
        settings.pools[0].place = place;
        settings.pools[0].init = true;
        settings.pools[0].mount = Some(slackwater::model::MountRule::Any);
    })
    .await
}

const POOL: &str = "/memory/pool";

impl Node {
    async fn grow(&self, id: &str, bytes: i64) -> Result<(), Code> {
        let request = ControllerExpandVolumeRequest {
            volume_id: id.to_string(),
            capacity_range: at_least(bytes),
            ..Default::default()
        };
        let mut controller = self.controller.clone();
        let grown = controller.controller_expand_volume(request).await;
        grown.map(drop).map_err(|status| status.code())
    }

    async fn stage(&self, id: &str) {
        let staged = self.node.clone().node_stage_volume(stage(id)).await;
        staged.unwrap();
    }

    /// A volume whose record says one GiB, and whose image and file system have two, with data.
    async fn half_grown(&self) -> String {
        let id = self.staged("v").await;
        self.unstage(&id).await;
        // The image is lengthened, but its record cannot be written.
        self.host.fail_always("rename", Some(Errno::EIO));
        assert_eq!(self.grow(&id, 2 * GIB).await, Err(Code::Aborted));
        self.host.clear_faults();
        self.stage(&id).await;
        assert_eq!(
            self.host.fs_bytes(Path::new(STAGING)),
            Ok(2 * GIB as u64),
            "the device shows the whole image, and the file system has grown with it"
        );
        self.host.write_token(Path::new(STAGING), 7).unwrap();
        id
    }

    fn image(&self, id: &str) -> PathBuf {
        let uuid = id.split('.').nth(1).unwrap();
        Path::new(POOL).join("volumes").join(uuid).join("data.img")
    }
}

#[tokio::test]
async fn a_failed_growth_never_shortens_what_an_earlier_one_has_lengthened() {
    for fault in ["allocate", "sync_file"] {
        for staged in [true, false] {
            let node = on("xfs").await;
            let id = node.half_grown().await;
            if !staged {
                node.unstage(&id).await;
            }
            node.host.fail_always(fault, Some(Errno::EIO));
            let refused = node.grow(&id, 3 * GIB).await.unwrap_err();
            assert!(
                matches!(refused, Code::Internal | Code::Aborted),
                "{refused:?}"
            );
            node.host.clear_faults();
            assert_eq!(node.host.violations(), Vec::<String>::new());
            if staged {
                node.unstage(&id).await;
            }
            node.stage(&id).await;
            assert_eq!(node.host.tokens(Path::new(STAGING)), Ok(vec![7]));
            let image = node.host.without_faults(|host| {
                use slackwater::host::Host;
                host.stat(&node.image(&id)).unwrap().unwrap()
            });
            assert!(image.size >= 2 * GIB as u64, "{fault}: {image:?}");
            node.grow(&id, 3 * GIB).await.unwrap();
            node.stop().await;
        }
    }
}

/// The first growth leaves a longer image. If nothing uses the volume in between, the undo of the
/// second growth removes only what it added itself.
#[tokio::test]
async fn a_growth_that_fails_halfway_takes_back_only_its_own_length() {
    let node = on("xfs").await;
    let id = node.create("v").await.volume_id;
    // Performed, but reported as failed.
    node.host.fail_effect(1, FaultMode::After(Errno::EIO));
    assert_eq!(node.grow(&id, 2 * GIB).await, Err(Code::Internal));
    let bytes = || {
        use slackwater::host::Host;
        let look = |host: &MemoryHost| host.stat(&node.image(&id)).unwrap().unwrap().size;
        node.host.without_faults(look)
    };
    assert_eq!(bytes(), GIB as u64);
    node.host.fail_always("rename", Some(Errno::EIO));
    assert_eq!(node.grow(&id, 2 * GIB).await, Err(Code::Aborted));
    node.host.clear_faults();
    // After the record is renamed; first its folder is synced.
    node.host.fail_effect(2, FaultMode::After(Errno::EIO));
    assert_eq!(node.grow(&id, 3 * GIB).await, Err(Code::Internal));
    assert_eq!(bytes(), 2 * GIB as u64);
    node.stop().await;
}

/// Where blocks cannot be shared, a copy has the length of the image, not the length in the record.
#[tokio::test]
async fn a_copy_of_a_half_grown_volume_has_all_of_its_file_system() {
    let node = on("ext4").await;
    let id = node.half_grown().await;
    node.unstage(&id).await;
    let snapshot = node.cut("s", &id).await.snapshot_id;
    for (name, source) in [
        ("clone", from_volume(&id)),
        ("restore", from_snapshot(&snapshot)),
    ] {
        let created = node
            .make(crate::service::snapshots::made_from(name, source))
            .await;
        node.stage(&created.volume_id).await;
        assert_eq!(node.host.tokens(Path::new(STAGING)), Ok(vec![7]), "{name}");
        node.unstage(&created.volume_id).await;
    }
    node.stop().await;
}

#[tokio::test]
async fn a_size_that_no_file_can_have_is_not_offered() {
    let node = on("ext4").await;
    node.host.set_capacity(100 << 40);
    let mut controller = node.controller.clone();
    let capacity = controller.get_capacity(GetCapacityRequest::default()).await;
    let capacity = capacity.unwrap().into_inner();
    assert!(capacity.available_capacity > 1 << 44);
    let maximum = capacity.maximum_volume_size.unwrap();
    assert!(maximum < 1 << 44 && maximum > 1 << 43, "{maximum}");
    node.stop().await;
}

/// zfs accepts a reservation, but does not reserve anything for it.
#[tokio::test]
async fn thick_and_zeroing_are_for_file_systems_that_are_known_to_write_in_place() {
    for (backing_fs, is_known) in [
        ("ext4", true),
        ("xfs", true),
        ("btrfs", false),
        ("zfs", false),
    ] {
        let node = on(backing_fs).await;
        for class in [("allocation", "thick"), ("wipe", "zero")] {
            let request = CreateVolumeRequest {
                parameters: map([class]),
                ..create(class.0)
            };
            let created = node.controller.clone().create_volume(request).await;
            let refused = created.err().map(|status| status.code());
            let wanted = (!is_known).then_some(Code::InvalidArgument);
            assert_eq!(refused, wanted, "{backing_fs} {class:?}");
        }
        node.stop().await;
    }
}
