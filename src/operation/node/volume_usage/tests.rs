//! What is measured, when, and what is forgotten.

use std::path::Path;

use nix::errno::Errno;

use super::*;
use crate::cut::CutInterfaces;
use crate::host::memory::MemoryHost;
use crate::model::SnapshotParameters;
use crate::operation::tests::{ext4, new_volume, pool, settings};
use crate::operation::{ContentSource, CreateSnapshot, CreateVolume, StageVolume};

const BLOCK: u64 = 4096;
const STAGING: &str = "/var/lib/kubelet/staging";
const HOUR: Duration = Duration::from_secs(3600);

struct Fixture {
    host: MemoryHost,
    driver: Driver,
    now: Instant,
}

impl Fixture {
    fn new(pools: &[&str]) -> Fixture {
        let host = MemoryHost::new();
        let pools: Vec<_> = pools.iter().map(|one| pool(one)).collect();
        let settings = crate::operation::Settings {
            metrics_per_volume: true,
            ..settings(&pools)
        };
        Fixture {
            driver: Driver::start(settings, CutInterfaces::simulated(host.clone())).unwrap(),
            host,
            now: Instant::now(),
        }
    }

    /// A volume that is mounted below a folder of its name.
    fn volume(&self, name: &str) -> VolumeId {
        let id = self.created(name, None);
        self.stage(id, name);
        id
    }

    fn created(&self, name: &str, in_pool: Option<&str>) -> VolumeId {
        let mut request = CreateVolume {
            capabilities: vec![ext4()],
            ..new_volume(name)
        };
        request.parameters.pool = in_pool.map(str::to_string);
        self.driver.volumes.create_volume(&request).unwrap().id
    }

    fn stage(&self, id: VolumeId, name: &str) {
        let request = StageVolume {
            volume_id: id.to_string(),
            staging_path: format!("{STAGING}-{name}"),
            capability: ext4(),
        };
        self.driver.volumes.stage_volume(&request).unwrap();
    }

    fn write(&self, name: &str, token: u64) {
        let staging = format!("{STAGING}-{name}");
        self.host.write_token(Path::new(&staging), token).unwrap();
    }

    fn snapshot(&self, name: &str, of: VolumeId) -> String {
        let request = CreateSnapshot {
            name: name.into(),
            source_volume_id: of.to_string(),
            parameters: SnapshotParameters::default(),
            requisite: Vec::new(),
        };
        let made = self.driver.snapshots.create_snapshot(&request);
        made.unwrap().id.to_string()
    }

    /// A pass after this time.
    fn pass(&mut self, later: Duration) {
        self.now += later;
        self.host.pass_time(later);
        for pool in self.driver.served() {
            self.driver.measure_volumes_at(pool, self.now);
        }
    }

    fn reports(&self) -> Vec<VolumeReport> {
        self.driver.volume_usage().expect("they are reported")
    }

    fn report(&self, id: VolumeId) -> VolumeReport {
        let mut all = self.reports().into_iter();
        all.find(|one| one.id == id)
            .expect("the volume is reported")
    }

    /// What a router gets of the first pool.
    fn images(&self) -> ImageUsage {
        let images = self.driver.pool_status()[0].images.clone();
        images.expect("they were counted")
    }

    /// The bytes that volumes have added, the most first.
    fn grown(&self) -> Vec<(VolumeId, u64)> {
        let grown = self.images().grown.expect("it is known");
        grown.iter().map(|one| (one.id, one.bytes)).collect()
    }

    fn restore(&self, name: &str, snapshot: &str) -> VolumeId {
        let request = CreateVolume {
            capabilities: vec![ext4()],
            content_source: Some(ContentSource::Snapshot(snapshot.into())),
            ..new_volume(name)
        };
        let id = self.driver.volumes.create_volume(&request).unwrap().id;
        self.stage(id, name);
        id
    }

    fn bytes(&self, id: VolumeId) -> VolumeBytes {
        self.report(id).bytes.expect("it was measured")
    }

    /// The bytes of the blocks of the volume, in its pool's status.
    fn allocated(&self) -> u64 {
        self.driver.pool_status()[0].space.unwrap().allocated
    }
}

/// Longer than the pause after a measurement.
const LATER: Duration = Duration::from_secs(600);

#[test]
fn a_cut_is_followed_by_a_measurement_of_what_it_shares() {
    let mut fixture = Fixture::new(&["default=memory:"]);
    let id = fixture.volume("a");
    fixture.write("a", 1);
    assert_eq!(fixture.report(id).bytes, None, "a scrape measures nothing");
    fixture.pass(LATER);
    let alone = fixture.bytes(id);
    assert!(alone.exclusive > 0);
    assert_eq!(
        (alone.exclusive, alone.shared, alone.snapshots),
        (fixture.allocated(), 0, 0)
    );

    fixture.snapshot("s", id);
    fixture.pass(LATER);
    let cut = fixture.bytes(id);
    assert_eq!(
        (cut.exclusive, cut.shared, cut.snapshots),
        (0, alone.exclusive, 0)
    );

    // The next write gives the volume new blocks, and the snapshot keeps the old ones.
    fixture.write("a", 2);
    fixture.pass(LATER);
    assert_eq!(
        fixture.bytes(id),
        cut,
        "nothing was cut, and no hour has passed"
    );
    fixture.pass(HOUR);
    let written = fixture.bytes(id);
    assert_eq!(written.exclusive + written.shared, fixture.allocated());
    assert!(
        written.exclusive >= BLOCK && written.snapshots >= BLOCK,
        "{written:?}"
    );
    assert_eq!(written.shared + written.snapshots, alone.exclusive);
}

#[test]
fn measurements_are_separated_by_pauses() {
    let mut fixture = Fixture::new(&["default=memory:"]);
    fixture.volume("a");
    fixture.pass(LATER);
    let other = fixture.volume("b");
    // At the very time at which the first one began.
    fixture.pass(Duration::ZERO);
    assert_eq!(fixture.report(other).bytes, None);
    fixture.pass(LATER);
    assert!(fixture.bytes(other).exclusive > 0);
}

#[test]
fn the_last_cut_outlives_its_snapshot_and_not_its_volume() {
    let mut fixture = Fixture::new(&["default=memory:"]);
    let (id, other) = (fixture.volume("a"), fixture.created("b", None));
    assert_eq!(fixture.report(id).last_cut, None);
    let snapshot = fixture.snapshot("s", id);
    let cut = fixture.report(id).last_cut.expect("a cut");
    assert_eq!(cut.level, Level::Filesystem);
    fixture.driver.snapshots.delete_snapshot(&snapshot).unwrap();
    fixture.pass(LATER);
    assert_eq!(fixture.report(id).last_cut, Some(cut));

    fixture.snapshot("of-b", other);
    let of_other = fixture.report(other).last_cut.expect("a cut");
    assert_eq!(of_other.level, Level::Filesystem, "no process writes to it");
    // Another volume of the same name has the same ID, while a snapshot of the first one may exist.
    fixture
        .driver
        .volumes
        .delete_volume(&other.to_string())
        .unwrap();
    assert_eq!(fixture.reports().len(), 1);
    assert_eq!(fixture.created("b", None), other);
    assert_eq!(fixture.report(other).last_cut, None);
    fixture.pass(LATER);
    let measured = fixture
        .driver
        .numbers
        .get()
        .values()
        .map(|pool| pool.measured.len())
        .sum::<usize>();
    assert_eq!(
        measured, 3,
        "one for each volume that exists, and one for the snapshot of one that was deleted"
    );
}

#[test]
fn in_a_thin_pool_sizes_give_bounds() {
    let mut fixture = Fixture::new(&["default=memory-thin:"]);
    let id = fixture.volume("a");
    fixture.write("a", 1);
    fixture.pass(LATER);
    let alone = fixture.bytes(id);
    assert_eq!((alone.exclusive, alone.shared), (fixture.allocated(), 0));
    fixture.snapshot("s", id);
    fixture.pass(LATER);
    let cut = fixture.bytes(id);
    assert_eq!(cut.exclusive + cut.shared, fixture.allocated());
    assert!(cut.snapshots > 0);
}

#[test]
fn a_pool_that_hangs_delays_neither_a_scrape_nor_another_pool() {
    let mut fixture = Fixture::new(&["a=memory:", "b=memory:"]);
    let ids = ["a", "b"].map(|name| fixture.created(name, Some(name)));
    fixture.pass(LATER);
    let before = fixture.bytes(ids[0]);
    let copy = fixture.snapshot("s", ids[0]);
    let hung = fixture.host.hang_disk(Path::new("/memory/a")).unwrap();
    let (driver, now) = (&fixture.driver, fixture.now + LATER);
    std::thread::scope(|scope| {
        let hangs = scope.spawn(move || driver.measure_volumes_at(ids[0].pool, now));
        driver.measure_volumes_at(ids[1].pool, now);
        let reports = driver.volume_usage().unwrap();
        let of = |id: VolumeId| reports.iter().find(|one| one.id == id).unwrap().bytes;
        assert_eq!(of(ids[0]), Some(before), "the old values");
        assert!(of(ids[1]).is_some());
        assert!(!hangs.is_finished());
        drop(hung);
    });
    assert!(copy.starts_with(&ids[0].pool.to_string()));
}

fn sum(images: &ImageUsage) -> u64 {
    images.exclusive + images.shared + images.snapshots
}

#[test]
fn bytes_are_charged_to_the_volume_that_was_written() {
    let mut fixture = Fixture::new(&["default=memory:"]);
    let (a, b) = (fixture.volume("a"), fixture.volume("b"));
    assert_eq!(fixture.driver.pool_status()[0].images, None);
    fixture.pass(Duration::ZERO);
    let new = fixture.images();
    assert_eq!(
        (new.exclusive, new.shared, new.snapshots),
        (fixture.allocated(), 0, 0)
    );
    assert_eq!((new.grown, new.unmeasured), (None, 0), "no hour has passed");

    fixture.snapshot("s", a);
    fixture.pass(LATER);
    let cut = fixture.images();
    assert_eq!(sum(&cut), new.exclusive, "a snapshot adds no blocks");
    assert_eq!(cut.exclusive, fixture.bytes(b).exclusive);
    assert_eq!(cut.shared, fixture.bytes(a).shared);

    fixture.write("a", 1);
    fixture.pass(HOUR);
    let written = fixture.images();
    // The snapshot keeps the old blocks.
    assert!(written.snapshots >= BLOCK, "{written:?}");
    let added = sum(&written) - sum(&cut);
    assert!(added >= BLOCK);
    assert_eq!(fixture.grown(), [(a, added)]);
    let since = written.grown.unwrap()[0].since;
    assert!(since <= written.measured_at);

    // The next snapshot keeps them, too, and the next write adds others.
    fixture.snapshot("s2", a);
    fixture.pass(LATER);
    assert_eq!(fixture.grown(), [(a, added)]);
    fixture.write("a", 2);
    fixture.write("b", 1);
    fixture.pass(HOUR);
    let grown = fixture.grown();
    let all = sum(&fixture.images()) - sum(&cut);
    assert_eq!(grown.iter().map(|(_, bytes)| bytes).sum::<u64>(), all);
    assert!(grown.iter().any(|(id, bytes)| *id == a && *bytes > added));

    // A day later, nothing was added within a day.
    for _ in 0..26 {
        fixture.pass(HOUR);
    }
    assert_eq!(fixture.grown(), []);
}

#[test]
fn a_write_to_a_restored_volume_is_not_charged_to_the_source() {
    let mut fixture = Fixture::new(&["default=memory:"]);
    let a = fixture.volume("a");
    fixture.write("a", 1);
    let snapshot = fixture.snapshot("s", a);
    fixture.pass(Duration::ZERO);
    let before = sum(&fixture.images());
    fixture.host.pass_time(LATER);
    let b = fixture.restore("b", &snapshot);
    fixture.write("b", 2);
    fixture.pass(HOUR);
    let added = sum(&fixture.images()) - before;
    assert!(added >= BLOCK);
    assert_eq!(fixture.grown(), [(b, added)]);

    // What is left of the source belongs to the other one then, which has added nothing.
    fixture.driver.snapshots.delete_snapshot(&snapshot).unwrap();
    let (of_a, staging) = (a.to_string(), format!("{STAGING}-a"));
    let unstaged = fixture.driver.volumes.unstage_volume(&of_a, &staging);
    unstaged.unwrap();
    fixture.driver.volumes.delete_volume(&of_a).unwrap();
    fixture.pass(HOUR);
    assert_eq!(fixture.images().shared, 0);
    assert_eq!(fixture.grown(), [(b, added)]);
}

#[test]
fn what_a_new_volume_was_filled_with_was_added() {
    let mut fixture = Fixture::new(&["default=memory:"]);
    let a = fixture.volume("a");
    fixture.pass(Duration::ZERO);
    fixture.host.pass_time(LATER);
    let b = fixture.volume("b");
    fixture.write("b", 1);
    fixture.pass(HOUR);
    assert_eq!(fixture.grown(), [(b, fixture.bytes(b).exclusive)]);
    assert_eq!(
        fixture.bytes(a).exclusive + fixture.bytes(b).exclusive,
        sum(&fixture.images())
    );
}

#[test]
fn snapshots_of_deleted_volumes_are_counted() {
    let mut fixture = Fixture::new(&["default=memory:"]);
    let a = fixture.created("a", None);
    fixture.snapshot("s", a);
    fixture.pass(LATER);
    let before = fixture.images();
    fixture
        .driver
        .volumes
        .delete_volume(&a.to_string())
        .unwrap();
    fixture.pass(LATER);
    let after = fixture.images();
    assert_eq!((after.exclusive, after.shared), (0, 0));
    assert_eq!(after.snapshots, before.shared);
}

#[test]
fn in_a_thin_pool_volumes_with_snapshots_are_not_divided() {
    let mut fixture = Fixture::new(&["default=memory-thin:"]);
    let (a, b) = (fixture.volume("a"), fixture.volume("b"));
    fixture.write("a", 1);
    let reads = fixture.host.metadata_reads();
    fixture.pass(LATER);
    let once = fixture.host.metadata_reads() - reads;
    assert_eq!(once, 1, "the metadata is read once for all volumes");
    let alone = fixture.images();
    assert_eq!((alone.exclusive, alone.undivided), (fixture.allocated(), 0));
    fixture.snapshot("s", a);
    fixture.pass(LATER);
    let cut = fixture.images();
    assert_eq!(
        (cut.exclusive, cut.shared, cut.snapshots),
        (fixture.bytes(b).exclusive, 0, 0)
    );
    assert!(cut.undivided >= alone.exclusive - cut.exclusive);
}

#[test]
fn sizes_that_cannot_be_read_together_are_read_one_by_one() {
    let mut fixture = Fixture::new(&["default=memory:"]);
    let ids = ["a", "b"].map(|name| fixture.volume(name));
    // The first query of a size.
    fixture.host.fail_query(1, Errno::EIO);
    fixture.pass(LATER);
    assert_eq!(fixture.host.faults_left(), 0);
    assert!(ids.iter().all(|id| fixture.bytes(*id).exclusive > 0));
    assert_eq!(fixture.images().unmeasured, 0);
}

/// A cut clones the image of its volume while writers wait.
#[test]
fn the_map_of_a_volume_is_not_read_while_a_call_works_on_it() {
    let mut fixture = Fixture::new(&["default=memory:"]);
    let (a, b) = (fixture.volume("a"), fixture.volume("b"));
    fixture.snapshot("s", a);
    let held = fixture
        .driver
        .pools
        .locks
        .acquire(Key::Volume(a.uuid))
        .unwrap();
    fixture.pass(LATER);
    assert_eq!(fixture.report(a).bytes, None);
    assert!(fixture.bytes(b).exclusive > 0);
    assert_eq!(fixture.images().unmeasured, 1);
    drop(held);
    fixture.pass(LATER);
    assert!(fixture.bytes(a).shared > 0);
    assert_eq!(fixture.images().unmeasured, 0);
}

#[test]
fn an_agent_counts_blocks_for_its_router_without_metrics_of_volumes() {
    let host = MemoryHost::new();
    let settings = crate::operation::Settings {
        alone: false,
        ..settings(&[pool("default=memory:")])
    };
    let driver = Driver::start(settings, CutInterfaces::simulated(host)).unwrap();
    crate::operation::tests::volume(&driver, "a");
    for pool in driver.served() {
        driver.measure_volumes(pool);
    }
    assert_eq!(driver.volume_usage(), None);
    let status = driver.pool_status().remove(0);
    assert_eq!(
        status.images.unwrap().exclusive,
        status.space.unwrap().allocated
    );
}

#[test]
fn nothing_is_measured_unless_it_is_reported() {
    let host = MemoryHost::new();
    let driver = crate::operation::tests::driver(&host);
    crate::operation::tests::volume(&driver, "a");
    for pool in driver.served() {
        driver.measure_volumes(pool);
    }
    assert_eq!(driver.volume_usage(), None);
    assert!(driver.numbers.get().is_empty());
}
