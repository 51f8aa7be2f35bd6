//! What is measured, when, and what is forgotten.

use std::path::Path;

use super::*;
use crate::cut::Seams;
use crate::host::memory::MemoryHost;
use crate::model::SnapshotParameters;
use crate::operation::tests::{ext4, new_volume, pool, settings};
use crate::operation::{CreateSnapshot, CreateVolume, StageVolume};

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
            driver: Driver::start(settings, Seams::simulated(host.clone())).unwrap(),
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
    assert!(alone.own > 0);
    assert_eq!(
        (alone.own, alone.shared, alone.snapshots),
        (fixture.allocated(), 0, 0)
    );

    fixture.snapshot("s", id);
    fixture.pass(LATER);
    let cut = fixture.bytes(id);
    assert_eq!((cut.own, cut.shared, cut.snapshots), (0, alone.own, 0));

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
    assert_eq!(written.own + written.shared, fixture.allocated());
    assert!(
        written.own >= BLOCK && written.snapshots >= BLOCK,
        "{written:?}"
    );
    assert_eq!(written.shared + written.snapshots, alone.own);
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
    assert!(fixture.bytes(other).own > 0);
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
    assert_eq!(measured, 2, "one for each volume that exists");
}

#[test]
fn in_a_thin_pool_sizes_give_bounds() {
    let mut fixture = Fixture::new(&["default=memory-thin:"]);
    let id = fixture.volume("a");
    fixture.write("a", 1);
    fixture.pass(LATER);
    let alone = fixture.bytes(id);
    assert_eq!((alone.own, alone.shared), (fixture.allocated(), 0));
    fixture.snapshot("s", id);
    fixture.pass(LATER);
    let cut = fixture.bytes(id);
    assert_eq!(cut.own + cut.shared, fixture.allocated());
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
