//! Imports of files on a simulated machine.

use std::time::Duration;

use crate::cut::CutInterfaces;
use crate::error::chain;
use crate::host::memory::{MemoryHost, MemoryOptions};
use crate::model::size::{GIB, MIB};
use crate::model::{CapacityRange, SnapshotParameters};
use crate::operation::tests::{block, new_volume, pool, settings};
use crate::operation::{
    BeginRevert, CreateSnapshot, CreateVolume, Driver, Import, ListVolumes, PublishVolume,
    Settings, StageVolume, Volume,
};
use crate::record::ContentSource;

use super::*;
use uuid::Uuid;

const TOP: &str = "/memory/rawfile";
const IMAGE: &str = "/memory/rawfile/pvc-1/disk.img";
const BYTES: u64 = 512 * MIB;
const TOKEN: u64 = 7;

struct Node {
    host: MemoryHost,
    driver: Driver,
}

fn configured(kind: &str) -> Settings {
    Settings {
        import_paths: vec!["/memory/other".into(), TOP.into()],
        ..settings(&[pool(kind)])
    }
}

impl Node {
    fn new() -> Node {
        Node::with(MemoryOptions::default(), configured("default=memory:"))
    }

    fn with(options: MemoryOptions, settings: Settings) -> Node {
        let host = MemoryHost::with_options(options);
        host.write_foreign_image(Path::new(IMAGE), BYTES, TOKEN)
            .unwrap();
        let driver = Driver::start(settings, CutInterfaces::simulated(host.clone())).unwrap();
        Node { host, driver }
    }

    fn identity(&self, path: &str) -> u64 {
        let path = Path::new(path).strip_prefix(TOP).unwrap();
        let opened = self.driver.host.open_foreign(Path::new(TOP), path);
        content_identity(&opened.unwrap().state())
    }

    fn request(&self) -> ImportFile {
        ImportFile {
            import: Import {
                name: Some("data".into()),
                pool: Some("default".into()),
                size: Some(GIB),
                ..Import::default()
            },
            path: IMAGE.into(),
            identity: self.identity(IMAGE),
            dry_run: false,
        }
    }

    fn import(&self, request: &ImportFile) -> Result<FileImport> {
        self.driver.volumes.import_file(request)
    }

    fn shared(&self, request: &ImportFile) -> Volume {
        match self.import(request).unwrap() {
            FileImport::Shared(volume) => volume,
            other => panic!("{other:?}"),
        }
    }

    fn obstacle(&self, request: &ImportFile) -> String {
        match self.import(request).unwrap() {
            FileImport::Obstacle(why) => why,
            other => panic!("{other:?}"),
        }
    }

    fn refusal(&self, request: &ImportFile) -> String {
        chain(&self.import(request).unwrap_err())
    }

    fn listed(&self) -> usize {
        let all = self.driver.volumes.list_volumes(&ListVolumes::default());
        all.unwrap().volumes.len()
    }

    fn tokens(&self, volume: &Volume) -> Vec<u64> {
        let image = format!("/memory/default/volumes/{}/data.img", volume.id.uuid);
        self.host.image_tokens(Path::new(&image)).unwrap()
    }

    fn used(&self) -> u64 {
        let space = self.driver.host.space(Path::new("/memory")).unwrap();
        space.total - space.available
    }

    fn shared_record(&self, volume: &Volume) -> VolumeRecord {
        let pool = self.driver.pools.choose_pool(None).unwrap();
        pool.backend.volumes.get(volume.id.uuid).unwrap().unwrap()
    }

    /// Bytes that volumes certainly have for themselves, as the pool counts them.
    fn own(&self) -> u64 {
        let pool = self.driver.pools.choose_pool(None).unwrap();
        pool.backend.space().unwrap().not_in_snapshots
    }
}

#[test]
fn a_volume_shares_the_blocks_of_a_file_and_is_never_formatted() {
    let node = Node::new();
    let used = node.used();
    let request = node.request();
    let dry = ImportFile {
        dry_run: true,
        ..request.clone()
    };
    assert_eq!(node.import(&dry).unwrap(), FileImport::Possible);
    assert_eq!((node.listed(), node.used()), (0, used));
    let volume = node.shared(&request);
    assert_eq!((volume.size, node.tokens(&volume)), (GIB, vec![TOKEN]));
    let image = Path::new("/memory/default/volumes").join(volume.id.uuid.to_string());
    let found = node.driver.host.stat(&image.join("data.img")).unwrap();
    assert!(found.unwrap().size >= GIB, "the rest of the volume exists");
    // Only the record is new.
    let more = node.used() - used;
    assert!(more <= 2 * 4096, "{more} bytes");
    let id = volume.id.to_string();
    node.driver
        .volumes
        .stage_volume(&StageVolume {
            volume_id: id.clone(),
            staging_path: "/var/lib/kubelet/staging".into(),
            capability: block(),
        })
        .unwrap();
    node.driver
        .volumes
        .publish_volume(&PublishVolume {
            volume_id: id,
            staging_path: "/var/lib/kubelet/staging".into(),
            target_path: "/var/lib/kubelet/target".into(),
            capability: block(),
            read_only: false,
        })
        .unwrap();
    assert_eq!(node.driver.volumes.formats(), 0);
    let target = Path::new("/var/lib/kubelet/target");
    node.host.write_block_token(target, 8).unwrap();
    let source = node.host.image_tokens(Path::new(IMAGE)).unwrap();
    assert_eq!(source, [TOKEN], "a write to the volume leaves the file");
}

#[test]
fn a_repeat_returns_the_volume_and_another_content_is_refused() {
    let node = Node::new();
    let request = node.request();
    let volume = node.shared(&request);
    assert_eq!(node.shared(&request), volume);
    node.host
        .write_foreign_image(Path::new(IMAGE), BYTES, 8)
        .unwrap();
    let why = node.refusal(&request);
    assert!(why.contains("has changed, or is another file"), "{why}");
    let why = node.refusal(&node.request());
    assert!(why.contains("exists with content"), "{why}");
    assert_eq!(node.tokens(&volume), [TOKEN]);
}

#[test]
fn without_import_paths_no_file_is_opened() {
    let without = settings(&[pool("default=memory:")]);
    let node = Node::with(MemoryOptions::default(), without);
    // Nor is it found out whether it exists.
    let mut request = node.request();
    let looks = node.host.looks();
    for path in [IMAGE, "/memory/rawfile/none"] {
        request.path = path.into();
        assert!(node.obstacle(&request).contains("--import-path"));
    }
    assert_eq!(node.host.looks(), looks);
    assert_eq!(node.listed(), 0);
}

#[test]
fn only_paths_below_a_configured_directory_are_opened() {
    let node = Node::new();
    let request = node.request();
    let with = |path: &str| ImportFile {
        path: path.into(),
        ..request.clone()
    };
    let looks = node.host.looks();
    for path in [TOP, "/memory/rawfile-2/disk.img", "/etc/passwd", "/"] {
        assert!(
            node.obstacle(&with(path)).contains("--import-path"),
            "{path}"
        );
    }
    assert_eq!(node.host.looks(), looks, "none of them is opened");
    for path in [
        "disk.img",
        "",
        "/memory/rawfile/../secret",
        "/memory/rawfile/pvc-1/..",
    ] {
        let why = node.refusal(&with(path));
        assert!(why.starts_with("path: "), "{path}: {why}");
    }
    let odd = format!("{TOP}//pvc-1/./disk.img");
    node.shared(&with(&odd));
    let why = node.obstacle(&with("/memory/rawfile/none"));
    assert!(why.contains("does not find it"), "{why}");
    let why = node.refusal(&with("/memory/rawfile/pvc-1"));
    assert!(why.contains("not a regular file"), "{why}");
}

#[test]
fn a_file_that_is_attached_is_refused() {
    let node = Node::new();
    let request = node.request();
    let number = node.host.foreign_loop(Path::new(IMAGE)).unwrap();
    let why = node.refusal(&request);
    assert!(why.contains("open for writing"), "{why}");
    assert_eq!(node.listed(), 0);
    node.host.release_loop(number);
    node.shared(&request);
}

#[test]
fn what_cannot_share_blocks_is_left_to_a_copy() {
    let ext4 = MemoryOptions {
        fs_name: "ext4".into(),
        ..MemoryOptions::default()
    };
    let node = Node::with(ext4, configured("default=memory:"));
    let why = node.obstacle(&node.request());
    assert!(why.contains("cannot share blocks"), "{why}");
    let thin = configured("default=memory-thin:");
    let node = Node::with(MemoryOptions::default(), thin);
    let why = node.obstacle(&node.request());
    assert!(why.contains("not files"), "{why}");
    assert_eq!(node.listed(), 0);
}

/// A write to a shared block needs another one, so blocks that a file of others has are not space for
/// the promise of the volume, nor for those of its copies.
#[test]
fn blocks_that_the_file_has_are_not_counted_as_those_of_volumes() {
    let node = Node::new();
    let volume = node.shared(&node.request());
    assert_eq!(node.own(), 0);
    let made = node.driver.snapshots.create_snapshot(&CreateSnapshot {
        name: "s".into(),
        source_volume_id: volume.id.to_string(),
        parameters: SnapshotParameters::default(),
        requisite: Vec::new(),
    });
    let snapshot = made.unwrap().id.to_string();
    let restored = node.driver.volumes.create_volume(&CreateVolume {
        capacity: CapacityRange::new(1 << 30, 0).unwrap(),
        content_source: Some(ContentSource::Snapshot(snapshot.clone())),
        ..new_volume("restored")
    });
    restored.unwrap();
    let delete = |id: &str| node.driver.volumes.delete_volume(id).unwrap();
    delete(&volume.id.to_string());
    node.driver.snapshots.delete_snapshot(&snapshot).unwrap();
    assert_eq!(node.own(), 0, "the copy has the blocks of the file");
}

#[test]
fn a_volume_that_the_pool_has_no_space_for_is_refused() {
    let node = Node::new();
    let mut request = node.request();
    request.import.size = Some(1 << 40);
    let why = node.refusal(&request);
    assert!(why.contains("bytes available"), "{why}");
    assert_eq!(node.listed(), 0);
}

/// The command refuses such a size. Another program can send it.
#[test]
fn a_volume_is_never_smaller_than_its_file() {
    let node = Node::new();
    let mut request = node.request();
    for size in [1, 4096, BYTES - 4096] {
        request.import.size = Some(size);
        let why = node.refusal(&request);
        assert!(why.contains("request at least as much"), "{why}");
        assert_eq!(node.listed(), 0);
    }
    for size in [Some(BYTES), None] {
        request.import.size = size;
        let volume = node.shared(&request);
        assert_eq!((volume.size, node.tokens(&volume)), (BYTES, vec![TOKEN]));
        let id = volume.id.to_string();
        node.driver.volumes.delete_volume(&id).unwrap();
    }
}

#[test]
fn blocks_count_as_those_of_the_volume_an_hour_after_the_file_is_gone() {
    let node = Node::new();
    let volume = node.shared(&node.request());
    let pool = volume.id.pool;
    let hour = || {
        node.host.pass_time(Duration::from_secs(3601));
        node.driver.clean(pool);
    };
    node.driver.clean(pool);
    hour();
    assert_eq!(node.own(), 0, "the file is still there");
    node.host.remove_foreign_image(Path::new(IMAGE)).unwrap();
    node.driver.clean(pool);
    assert_eq!(node.own(), 0, "this hour has not passed");
    hour();
    let content = node.own();
    assert!(content > 0);
    // It stays so.
    assert_eq!(node.shared_record(&volume).foreign_bytes, None);
    hour();
    assert_eq!((node.own(), node.tokens(&volume)), (content, vec![TOKEN]));
}

#[test]
fn blocks_of_a_reverted_volume_are_still_those_of_the_file_until_it_is_gone() {
    let node = Node::new();
    let volume = node.shared(&node.request());
    let (id, pool, uid) = (volume.id.to_string(), volume.id.pool, Uuid::from_u128(7));
    let snapshot = node.driver.snapshots.create_snapshot(&CreateSnapshot {
        name: "old".into(),
        source_volume_id: id.clone(),
        parameters: SnapshotParameters::default(),
        requisite: Vec::new(),
    });
    let snapshot_id = snapshot.unwrap().id.to_string();
    let before = node.shared_record(&volume);
    let used = node.used();
    let volumes = &node.driver.volumes;
    let begin = BeginRevert {
        volume_id: id.clone(),
        uid,
        name: "shop/back".into(),
        snapshot_id: snapshot_id.clone(),
        number: 0,
        members: 1_u32.into(),
    };
    volumes.begin_revert(&begin).unwrap();
    volumes.prepare_revert(&id, uid).unwrap();
    assert_eq!(node.own(), 0, "the new image shares the same blocks");
    volumes.switch_revert(&id, uid, 1_u32.into()).unwrap();
    volumes.end_revert(&id, uid).unwrap();
    node.driver.clean(pool);
    let after = node.shared_record(&volume);
    assert_eq!(after.foreign_bytes, before.foreign_bytes);
    assert_eq!(after.lineage(), before.lineage());
    assert_eq!((node.own(), node.used()), (0, used));
    node.driver.snapshots.delete_snapshot(&snapshot_id).unwrap();
    assert_eq!(node.own(), 0, "the file is still there");
    node.host.remove_foreign_image(Path::new(IMAGE)).unwrap();
    node.driver.clean(pool);
    node.host.pass_time(Duration::from_secs(3601));
    node.driver.clean(pool);
    assert!(node.own() > 0);
    assert_eq!(node.tokens(&volume), [TOKEN]);
}
