//! What happens to a source between the plan of its copy and the lock of it.

mod listed;

use std::time::Duration;

use uuid::Uuid;

use super::super::copies::{Copies, MAX_COPIES};
use super::*;
use crate::cut::CutInterfaces;
use crate::host::memory::{MemoryHost, MemoryOptions};
use crate::model::id::NameKind;
use crate::model::size::{GIB, MIB};
use crate::model::{CapacityRange, SnapshotParameters, VolumeId, VolumeParameters};
use crate::operation::tests::{copy_for, ext4, pool, settings};
use crate::operation::{CreateVolume, Driver, ExpandVolume, StageVolume};
use crate::record::{ContentSource, VolumeRecord};

struct Node {
    host: MemoryHost,
    driver: Driver,
    volume: String,
}

fn size(bytes: u64) -> CapacityRange {
    CapacityRange {
        required: bytes,
        limit: 0,
    }
}

impl Node {
    /// A pool on a disk with this file system, and a volume that was never used.
    fn on(fs_name: &str) -> Node {
        let host = MemoryHost::with_options(MemoryOptions {
            fs_name: fs_name.into(),
            ..MemoryOptions::default()
        });
        host.make_folder(std::path::Path::new("/memory/pool"))
            .unwrap();
        let settings = settings(&[pool("default=file:/memory/pool,init,mount=any")]);
        let driver = Driver::start(settings, CutInterfaces::simulated(host.clone())).unwrap();
        let mut node = Node {
            host,
            driver,
            volume: String::new(),
        };
        let made = node
            .driver
            .volumes
            .create_volume(&node.request("source", None));
        node.volume = made.unwrap().id.to_string();
        node
    }

    fn request(&self, name: &str, content_source: Option<ContentSource>) -> CreateVolume {
        CreateVolume {
            name: name.into(),
            capacity: size(GIB),
            capabilities: vec![ext4()],
            parameters: VolumeParameters::default(),
            requisite: Vec::new(),
            content_source,
        }
    }

    fn clone_request(&self) -> CreateVolume {
        self.request("clone", Some(ContentSource::Volume(self.volume.clone())))
    }

    fn expand(&self) {
        let expanded = self.driver.volumes.expand_volume(&ExpandVolume {
            volume_id: self.volume.clone(),
            capacity: size(2 * GIB),
            capability: None,
        });
        assert_eq!(expanded.unwrap().size, 2 * GIB);
    }

    fn stage(&self) {
        let staged = self.driver.volumes.stage_volume(&StageVolume {
            volume_id: self.volume.clone(),
            staging_path: "/var/lib/kubelet/staging".into(),
            capability: ext4(),
        });
        staged.unwrap();
    }

    /// Plans a clone, lets `happens` change the source, and asserts that the clone is refused.
    /// Returns the record of the source.
    fn clone_around(&self, happens: impl FnOnce()) -> VolumeRecord {
        let (driver, request) = (&self.driver, self.clone_request());
        let source = request.content_source.as_ref().unwrap();
        let content = driver.snapshots.content(source).unwrap();
        let pool = content.pool().unwrap().clone();
        let id = VolumeId::of_name(pool.id(), NameKind::Volume, "clone");
        let plan = driver
            .volumes
            .plan(&pool, id, "clone", GIB, &request.parameters);
        let record = driver
            .snapshots
            .inherit(plan.unwrap(), &request, &content)
            .unwrap();
        happens();
        let refused = driver
            .snapshots
            .make_from(&pool, record, &content)
            .unwrap_err();
        assert!(matches!(refused, Error::Pending { .. }), "{refused:?}");
        assert_eq!(
            pool.backend.volumes.get(id.uuid).unwrap(),
            None,
            "nothing is left"
        );
        assert_eq!(driver.pools.locks_held(), 0);
        pool.backend
            .volumes
            .get(VolumeId::of_name(pool.id(), NameKind::Volume, "source").uuid)
            .unwrap()
            .unwrap()
    }
}

#[test]
fn a_clone_of_a_volume_that_was_changed_since_its_plan_is_planned_again() {
    for fs_name in ["xfs", "ext4"] {
        let node = Node::on(fs_name);
        let source = node.clone_around(|| node.expand());
        assert_eq!(source.size, 2 * GIB);
        let mut request = node.clone_request();
        let refused = node.driver.volumes.create_volume(&request).unwrap_err();
        assert!(matches!(refused, Error::OutOfRange { .. }), "{refused:?}");
        request.capacity = size(2 * GIB);
        assert_eq!(
            node.driver.volumes.create_volume(&request).unwrap().size,
            2 * GIB
        );
    }
}

/// Otherwise the clone would count as not formatted, and its content would be overwritten by mkfs.
#[test]
fn a_clone_of_a_volume_that_was_formatted_since_its_plan_is_planned_again() {
    let node = Node::on("xfs");
    let source = node.clone_around(|| node.stage());
    assert!(source.formatted.is_some_and(|formatted| formatted.complete));
    let clone = node
        .driver
        .volumes
        .create_volume(&node.clone_request())
        .unwrap();
    let (_, _, record) = node.driver.pools.get_volume(&clone.id.to_string()).unwrap();
    assert!(record.formatted.is_some_and(|formatted| formatted.complete));
}

#[test]
fn a_snapshot_that_is_a_copy_of_a_volume_that_was_changed_since_its_plan_is_planned_again() {
    let node = Node::on("ext4");
    let driver = &node.driver;
    let request = CreateSnapshot {
        name: "s".into(),
        source_volume_id: node.volume.clone(),
        parameters: SnapshotParameters::default(),
        requisite: Vec::new(),
    };
    let source = driver.snapshots.source(&node.volume, None).unwrap();
    let id = SnapshotId::of_name(source.pool.id(), NameKind::Snapshot, "s");
    node.expand();
    let refused = driver
        .snapshots
        .copy_snapshot(&request, &source, id)
        .unwrap_err();
    assert!(matches!(refused, Error::Pending { .. }), "{refused:?}");
    assert_eq!(source.pool.backend.snapshots.get(id.uuid).unwrap(), None);
    assert_eq!(
        driver.snapshots.create_snapshot(&request).unwrap().size,
        2 * GIB
    );
}

#[test]
fn no_namespace_has_more_than_half_of_the_copies() {
    let copies = Copies::new(None);
    let pools = [PoolId(Uuid::nil()); 2];
    let begin = |claim| copies.begin(copy_for(claim), pools);
    let mut running: Vec<_> = (0..MAX_COPIES / 2)
        .map(|_| begin(Some("loud/data")).unwrap())
        .collect();
    let error = begin(Some("loud/more")).err().unwrap();
    assert!(matches!(error, Error::Pending { .. }), "{error}");
    running.extend((0..MAX_COPIES / 2).map(|_| begin(Some("quiet/data")).unwrap()));
    for claim in [Some("other/data"), None] {
        assert!(matches!(begin(claim), Err(Error::Pending { .. })));
    }
    running.remove(0);
    drop(begin(Some("loud/more")).unwrap());
    running.clear();
    // Copies without a claim count as one namespace, which may use all places.
    running.extend((0..MAX_COPIES).map(|_| begin(None).unwrap()));
}

#[test]
fn copies_of_a_pool_share_its_rate() {
    let rate = 64 * MIB;
    let copies = Copies::new(Some(rate));
    let [a, b, c] = [1, 2, 3].map(|n| PoolId(Uuid::from_u128(n)));
    let step = Duration::from_secs_f64(STEP_BYTES as f64 / rate as f64);
    let first = copies.step(Instant::now(), [a, a], STEP_BYTES);
    let second = copies.step(Instant::now(), [a, b], STEP_BYTES);
    assert!(second >= first + step, "the pool that both read");
    assert!(copies.step(Instant::now(), [c, b], STEP_BYTES) >= second + step);
    assert!(
        copies.step(Instant::now(), [a, a], STEP_BYTES)
            < copies.step(Instant::now(), [c, b], STEP_BYTES) + step
    );
}

/// A copy into a volume that a stop interrupted after its preparation. Returns the ID of the
/// volume.
fn cut_off(node: &Node) -> VolumeId {
    let pool = node.driver.pools.serving().remove(0);
    let id = VolumeId::of_name(pool.id(), NameKind::Volume, "clone");
    let source = VolumeId::of_name(pool.id(), NameKind::Volume, "source");
    let (_, progress) = begin_at(&pool, Image::Volume(source.uuid)).unwrap();
    let record = VolumeRecord {
        copy: Some(progress),
        content_source: Some(ContentSource::Volume(node.volume.clone())),
        ..node
            .driver
            .volumes
            .plan(&pool, id, "clone", GIB, &VolumeParameters::default())
            .unwrap()
    };
    pool.backend.prepare(&record, &|_| Ok(())).unwrap();
    id
}

#[test]
fn a_copy_that_no_call_asks_for_any_more_is_ended() {
    let node = Node::on("ext4");
    let (driver, host) = (&node.driver, &node.host);
    let id = cut_off(&node);
    let pool = driver.pools.serving().remove(0);
    let clean = || driver.clean(pool.id());
    let is_there = || pool.backend.volumes.get(id.uuid).unwrap().is_some();
    let wait = |minutes: u64| host.pass_time(Duration::from_secs(60 * minutes));
    // The callers may have been down for as long as the driver.
    host.pass_time(Duration::from_secs(24 * 3600));
    clean();
    wait(59);
    clean();
    assert!(is_there());
    // A call asks for the copy, in vain, because there are too many others.
    let pools = [pool.id(); 2];
    let other = || driver.snapshots.begin_copy(copy_for(None), None, pools);
    let others: Vec<_> = (0..MAX_COPIES).map(|_| other().unwrap()).collect();
    let create = || driver.volumes.create_volume(&node.clone_request());
    let refused = create().unwrap_err();
    assert!(matches!(refused, Error::Pending { .. }), "{refused:?}");
    drop(others);
    wait(59);
    clean();
    assert!(is_there());
    // A call holds its lock.
    wait(2);
    let lock = driver.pools.locks.acquire(Key::Volume(id.uuid)).unwrap();
    clean();
    assert!(is_there());
    drop(lock);
    clean();
    assert!(!is_there());
    // After a final answer nothing is left: the source is in use, so the copy is worthless.
    cut_off(&node);
    assert!(is_there());
    node.stage();
    let refused = create().unwrap_err();
    assert!(matches!(refused, Error::Refused { .. }), "{refused:?}");
    assert!(!is_there());
    assert!(
        pool.backend.volumes.ready(None, 10).len() == 1,
        "the source stays"
    );
}
