//! Which copies are listed while they run.

use std::io::{Read, Write};
use std::sync::{Arc, Mutex};

use super::*;
use crate::host::memory::MemoryHost;
use crate::model::{Allocation, CapacityRange};
use crate::operation::{BeginRevert, CopyKind, Export, Import, Members};

/// Of each copy in a list: its kind, its ID, its claim and its numbers.
type Seen = Vec<(CopyKind, String, Option<String>, (u64, u64))>;

fn listed(driver: &Driver) -> Seen {
    let all = driver.snapshots.copies().into_iter();
    let each = all.map(|one| {
        let id = one.of.id.to_string();
        (one.of.kind, id, one.of.claim, (one.copied, one.total))
    });
    each.collect()
}

/// What is listed while the disk of the pool hangs in the middle of an operation.
fn during<T: Send>(
    (host, driver): (&MemoryHost, &Driver),
    operation: impl FnOnce() -> Result<T> + Send,
) -> (Seen, T) {
    let pool = driver.pools.serving().remove(0);
    assert_eq!(listed(driver), []);
    let hung = host.hang_disk(&pool.backend.folder.path).unwrap();
    let (seen, done) = std::thread::scope(|scope| {
        let running = scope.spawn(operation);
        let start = Instant::now();
        while listed(driver).is_empty() && start.elapsed() < Duration::from_secs(60) {
            std::thread::sleep(Duration::from_millis(5));
        }
        let seen = listed(driver);
        drop(hung);
        (seen, running.join().unwrap())
    });
    assert_eq!(listed(driver), [], "it has ended");
    (seen, done.unwrap())
}

fn kinds(seen: &Seen) -> Vec<CopyKind> {
    seen.iter().map(|(kind, ..)| *kind).collect()
}

#[test]
fn full_copies_of_a_pool_without_reflink_are_listed_while_they_run() {
    let node = Node::on("ext4");
    let place = (&node.host, &node.driver);
    let driver = &node.driver;
    let request = CreateSnapshot {
        name: "s".into(),
        source_volume_id: node.volume.clone(),
        parameters: SnapshotParameters::default(),
        requisite: Vec::new(),
    };
    let (seen, made) = during(place, || driver.snapshots.create_snapshot(&request));
    assert_eq!(kinds(&seen), [CopyKind::Snapshot]);
    let snapshot = made.id.to_string();
    assert_eq!(seen[0].1, snapshot);

    let mut clone = node.clone_request();
    clone.parameters.claim = Some("shop/clone".into());
    let (seen, made) = during(place, || driver.volumes.create_volume(&clone));
    assert_eq!(kinds(&seen), [CopyKind::Clone]);
    assert_eq!(seen[0].1, made.id.to_string());
    assert_eq!(seen[0].2, Some("shop/clone".into()));

    let source = ContentSource::Snapshot(snapshot.clone());
    let restore = node.request("restored", Some(source));
    let (seen, _) = during(place, || driver.volumes.create_volume(&restore));
    assert_eq!(kinds(&seen), [CopyKind::Restore]);

    let uid = Uuid::from_u128(1);
    let begun = driver.volumes.begin_revert(&BeginRevert {
        volume_id: node.volume.clone(),
        uid,
        name: "shop/back".into(),
        snapshot_id: snapshot,
        number: 0,
        members: Members::default(),
    });
    begun.unwrap();
    let prepare = || driver.volumes.prepare_revert(&node.volume, uid);
    let (seen, ()) = during(place, prepare);
    assert_eq!(kinds(&seen), [CopyKind::Revert]);
    assert_eq!(
        seen[0].1, node.volume,
        "not the new image, which has no name"
    );
}

#[test]
fn the_writing_of_thick_volumes_is_listed_while_it_runs() {
    let host = MemoryHost::new();
    let settings = settings(&[pool("default=memory-thin:")]);
    let driver = Driver::start(settings, CutInterfaces::simulated(host.clone())).unwrap();
    let request = CreateVolume {
        parameters: VolumeParameters {
            allocation: Allocation::Thick,
            ..VolumeParameters::default()
        },
        ..crate::operation::tests::new_volume("thick")
    };
    let create = || driver.volumes.create_volume(&request);
    let (seen, made) = during((&host, &driver), create);
    assert_eq!(kinds(&seen), [CopyKind::Write]);
    let grow = ExpandVolume {
        volume_id: made.id.to_string(),
        capacity: CapacityRange::new(2 << 30, 0).unwrap(),
        capability: None,
    };
    let expand = || driver.volumes.expand_volume(&grow);
    let (seen, _) = during((&host, &driver), expand);
    assert_eq!(kinds(&seen), [CopyKind::Growth]);
    assert_eq!(seen[0].1, grow.volume_id);
}

/// An archive that notes what is listed whenever a part of it is written or read.
struct Noting<T> {
    archive: T,
    driver: Arc<Driver>,
    seen: Arc<Mutex<Vec<Seen>>>,
}

impl<T> Noting<T> {
    fn note(&self) {
        self.seen.lock().unwrap().push(listed(&self.driver));
    }
}

impl<T: Write> Write for Noting<T> {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.note();
        self.archive.write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.archive.flush()
    }
}

impl<T: Read> Read for Noting<T> {
    fn read(&mut self, bytes: &mut [u8]) -> std::io::Result<usize> {
        self.note();
        self.archive.read(bytes)
    }
}

/// The progress of the only kind of copy that was listed, each state once.
fn progress(seen: &Mutex<Vec<Seen>>, kind: CopyKind, id: &str) -> Vec<(u64, u64)> {
    let seen = seen.lock().unwrap();
    let each = seen.iter().flatten();
    let mut numbers: Vec<_> = each
        .map(|(is, of, _, numbers)| {
            assert_eq!((*is, of.as_str()), (kind, id));
            *numbers
        })
        .collect();
    numbers.dedup();
    numbers
}

#[test]
fn exports_and_imports_are_listed_while_they_run() {
    let node = Node::on("xfs");
    let request = CreateSnapshot {
        name: "s".into(),
        source_volume_id: node.volume.clone(),
        parameters: SnapshotParameters::default(),
        requisite: Vec::new(),
    };
    let snapshot = node.driver.snapshots.create_snapshot(&request).unwrap();
    let snapshot = snapshot.id.to_string();
    let driver = Arc::new(node.driver);
    let seen = Arc::<Mutex<Vec<Seen>>>::default();
    let mut to = Noting {
        archive: Vec::new(),
        driver: driver.clone(),
        seen: seen.clone(),
    };
    let export = Export {
        snapshot_ids: vec![snapshot.clone()],
        base_snapshot_ids: Vec::new(),
    };
    driver.snapshots.export(&export, &mut to).unwrap();
    let archive = to.archive;
    let numbers = progress(&seen, CopyKind::Export, &snapshot);
    assert_eq!(numbers.first(), Some(&(0, GIB)));
    assert_eq!(numbers.last(), Some(&(GIB - 4 * MIB, GIB)));
    assert!(numbers.is_sorted() && numbers.len() > 100);
    assert_eq!(listed(&driver), []);

    // The output is full: nothing is left.
    let mut full = [0; 9000];
    let mut full = Noting {
        archive: &mut full[..],
        driver: driver.clone(),
        seen: Arc::default(),
    };
    driver.snapshots.export(&export, &mut full).unwrap_err();
    assert!(!full.seen.lock().unwrap().concat().is_empty());
    assert_eq!(listed(&driver), []);

    let from = Noting {
        archive: std::io::Cursor::new(archive),
        driver: driver.clone(),
        seen: Arc::default(),
    };
    let seen = from.seen.clone();
    let import = Import {
        name: Some("imported".into()),
        ..Import::default()
    };
    let made = driver.volumes.import(&import, Box::new(from)).unwrap();
    let numbers = progress(&seen, CopyKind::Import, &made[0].id.to_string());
    assert!(numbers.contains(&(16 * MIB, GIB)), "{numbers:?}");
    assert_eq!(listed(&driver), []);
}
