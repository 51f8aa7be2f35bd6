//! A file pool on a simulated host: life cycles of volumes and snapshots, and their space.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use nix::errno::Errno;

use super::*;
use crate::backend::file::IMAGE;
use crate::backend::place::make::make_pool;
use crate::backend::records::{RECORD, SNAPSHOTS, TRASH, part};
use crate::backend::{CopyMode, Leftover, PoolSpace};
use crate::error::Error;
use crate::host::Effect;
use crate::host::memory::{FaultMode, MemoryHost};
use crate::model::size::{GIB, MIB};
use crate::model::{Allocation, HomeId, Level, Wipe};
use crate::record::{ContentSource, CopyProgress, SnapshotState, VolumeState};

mod linear;
mod thin;

const POOL: &str = "/memory/pool";
const SIZE: u64 = 64 * MIB;

fn open(host: &MemoryHost) -> PoolBackend {
    match PoolBackend::open(
        Arc::new(host.clone()),
        Path::new(POOL),
        PoolKind::File { extent: None },
        Duration::ZERO,
    )
    .unwrap()
    {
        OpenResult::Pool(backend) => *backend,
        OpenResult::Blank | OpenResult::Locked => panic!("the pool can be had"),
    }
}

fn pool() -> (MemoryHost, PoolBackend) {
    let host = MemoryHost::with_capacity(4 * GIB);
    make_pool(&host, "pool", Path::new(POOL), HomeId(Uuid::from_u128(1))).unwrap();
    let backend = open(&host);
    (host, backend)
}

fn image_of(backend: &PoolBackend, image: Image) -> PathBuf {
    backend.folder.root.join(part(image)).join(IMAGE)
}

fn volume(n: u128, allocation: Allocation) -> VolumeRecord {
    VolumeRecord {
        uuid: Uuid::from_u128(n),
        name: n.to_string(),
        incarnation: Uuid::from_u128(1000 + n),
        state: VolumeState::Creating,
        size: SIZE,
        allocation,
        block_size: 512,
        asked_block_size: None,
        mkfs_options: Vec::new(),
        wipe: Wipe::None,
        created_wipe: Wipe::None,
        block_groups: true,
        capabilities: Vec::new(),
        formatted: None,
        ephemeral: false,
        last_stage: None,
        created_at: 0,
        content_source: None,
        claim: None,
        copy: None,
        growth: None,
        lineage: None,
        image: 0,
        fenced: None,
        lifted: None,
        imported: None,
        foreign_bytes: None,
        reverting: None,
        reverted: None,
        spare: None,
    }
}

fn snapshot(n: u128, of: &VolumeRecord) -> SnapshotRecord {
    SnapshotRecord {
        uuid: Uuid::from_u128(n),
        name: n.to_string(),
        incarnation: Uuid::from_u128(1000 + n),
        state: SnapshotState::Preparing,
        attempt: Uuid::from_u128(7),
        source: of.uuid,
        source_incarnation: of.incarnation,
        size: of.size,
        block_size: of.block_size,
        allocation: of.allocation,
        formatted: None,
        capabilities: Vec::new(),
        wipe: of.wipe,
        cut_at: 0,
        level: Level::Filesystem,
        min_level: None,
        reason: String::new(),
        group: None,
        copy: None,
        lineage: None,
        base: None,
        image: 0,
        for_clone: false,
        foreign_bytes: None,
    }
}

fn any(_: &PoolSpace) -> Result<()> {
    Ok(())
}

fn progress() -> Option<CopyProgress> {
    Some(CopyProgress {
        copied: 0,
        source_modified: 1,
        base: None,
    })
}

/// Makes a prepared image the clone of an image that is not in use.
fn clone_unused(backend: &PoolBackend, source: Image, copy: Image) -> Result<()> {
    let cloned = backend.copier(source, copy, &Arc::default())?.copy_whole();
    cloned.map(drop).context(|| format!("clone {source}"))
}

/// Creates a snapshot that is ready.
fn cut(backend: &PoolBackend, n: u128, of: &VolumeRecord) -> SnapshotRecord {
    let mut record = snapshot(n, of);
    backend.prepare_snapshot(&record, &any).unwrap();
    let (source, target) = (Image::Volume(of.uuid), Image::Snapshot(record.uuid));
    clone_unused(backend, source, target).unwrap();
    backend.snapshots.sync_image(record.uuid).unwrap();
    if of.allocation == Allocation::Thick {
        backend.unshare(target, of.size).unwrap();
    }
    record.state = SnapshotState::Ready;
    backend.update_snapshot(&record).unwrap();
    backend.snapshots.get(record.uuid).unwrap().unwrap()
}

fn restored(backend: &PoolBackend, n: u128, allocation: Allocation, from: Image) -> VolumeRecord {
    let id = |uuid: Uuid| format!("{}.{uuid}", backend.record.id);
    VolumeRecord {
        content_source: Some(match from {
            Image::Volume(uuid) => ContentSource::Volume(id(uuid)),
            Image::Snapshot(uuid) => ContentSource::Snapshot(id(uuid)),
        }),
        ..volume(n, allocation)
    }
}

/// Creates a restored volume or a clone that is ready.
fn restore(backend: &PoolBackend, record: &VolumeRecord, from: Image) -> VolumeRecord {
    backend.prepare(record, &any).unwrap();
    let copy = Image::Volume(record.uuid);
    clone_unused(backend, from, copy).unwrap();
    backend.complete(record).unwrap()
}

#[test]
fn the_cost_of_a_copy_is_that_of_its_mode_and_of_what_the_last_pass_has_counted() {
    let (_, backend) = pool();
    let source = backend.create(volume(1, Allocation::Thick), &any).unwrap();
    let record = snapshot(2, &source);
    backend.prepare_snapshot(&record, &any).unwrap();
    let (image, copy) = (Image::Volume(source.uuid), Image::Snapshot(record.uuid));
    let copier = backend.copier(image, copy, &Arc::default()).unwrap();
    let whole = copier.cost(CopyMode::Whole).unwrap();
    assert_eq!(
        whole.stall,
        Duration::from_micros(15) * whole.extents as u32
    );
    let ahead = copier.cost(CopyMode::Ahead).unwrap();
    assert_eq!(ahead.extents, whole.extents);
    assert_eq!(ahead.stall, Duration::from_micros(2) * whole.extents as u32);
    assert_eq!(
        copier.min_useful_ranges(),
        0,
        "no pass has counted anything"
    );
    copier.copy_ahead().unwrap();
    copier.copy_delta().unwrap();
    let counted = copier.cost(CopyMode::Ahead).unwrap();
    assert_eq!(copier.min_useful_ranges(), counted.extents / 40);
    copier.seal();
    copier.copy_delta().unwrap();
    assert!(copier.verify().unwrap());
}

#[test]
fn a_volume_goes_and_its_snapshots_and_restores_stay() {
    let (host, backend) = pool();
    let source = backend.create(volume(1, Allocation::Thin), &any).unwrap();
    let cut = cut(&backend, 2, &source);
    backend.volumes.delete(source.uuid).unwrap();
    assert_eq!(backend.snapshots.ready(None, 10), vec![cut.clone()]);
    let image = Image::Snapshot(cut.uuid);
    let wanted = restored(&backend, 3, Allocation::Thin, image);
    let made = restore(&backend, &wanted, image);
    backend.snapshots.delete(cut.uuid).unwrap();
    assert_eq!(backend.snapshots.count(), 0);
    assert_eq!(backend.image_problem(&made).unwrap(), None);
    // It shares blocks of the first volume, although everything in between is deleted.
    assert_eq!(made.lineage(), source.incarnation);
    drop(backend);
    let backend = open(&host.restart_process());
    assert_eq!(backend.volumes.ready(None, 10), vec![made]);
    assert_eq!(host.files_below(&Path::new(POOL).join(TRASH)), [""; 0]);
}

#[test]
fn a_start_ends_what_no_call_continues_and_keeps_the_rest() {
    let (host, backend) = pool();
    let source = backend.create(volume(1, Allocation::Thin), &any).unwrap();
    let mut cut_off = Vec::new();
    for (n, state, copy) in [
        (2, SnapshotState::Preparing, None),
        (3, SnapshotState::Preparing, progress()),
        (4, SnapshotState::Cut, None),
    ] {
        let mut record = SnapshotRecord {
            copy,
            ..snapshot(n, &source)
        };
        backend.prepare_snapshot(&record, &any).unwrap();
        record.state = state;
        backend.update_snapshot(&record).unwrap();
        cut_off.push(record.uuid);
    }
    backend.prepare(&volume(5, Allocation::Thin), &any).unwrap();
    let copied = VolumeRecord {
        copy: progress(),
        ..volume(6, Allocation::Thin)
    };
    backend.prepare(&copied, &any).unwrap();
    drop(backend);

    let host = host.reboot(true);
    let backend = open(&host);
    let ended = backend.recover(&|_| false).unwrap();
    assert_eq!((ended.snapshots, ended.half_made), (1, 1));
    for leftover in backend.leftovers().unwrap() {
        let goes_on = matches!(leftover, Leftover::Copy(_));
        assert!(
            goes_on || backend.clean_up(&leftover).unwrap(),
            "{leftover}"
        );
    }
    let left: Vec<Uuid> = backend
        .snapshots
        .unready()
        .iter()
        .map(|left| left.uuid)
        .collect();
    assert_eq!(left, cut_off[1..]);
    assert!(
        backend.snapshots.ready(None, 10).is_empty(),
        "none was answered"
    );
    assert_eq!(backend.volumes.get(Uuid::from_u128(5)).unwrap(), None);
    assert_eq!(
        backend.volumes.get(copied.uuid).unwrap(),
        Some(copied.clone())
    );
    let image = image_of(&backend, Image::Volume(copied.uuid));
    assert!(
        host.stat(&image)
            .is_ok_and(|image| image.is_some_and(|image| image.size == SIZE))
    );
}

#[test]
fn what_is_thick_or_made_of_thick_has_blocks_of_its_own() {
    let (host, backend) = pool();
    let thick = backend.create(volume(1, Allocation::Thick), &any).unwrap();
    let before = backend.space().unwrap();
    assert_eq!((before.not_in_snapshots, before.allocated), (SIZE, SIZE));
    let cut = cut(&backend, 2, &thick);
    let image_of_cut = Image::Snapshot(cut.uuid);
    for (n, allocation, from) in [
        (3, Allocation::Thick, Image::Snapshot(cut.uuid)),
        (4, Allocation::Thin, Image::Volume(thick.uuid)),
    ] {
        let wanted = restored(&backend, n, allocation, from);
        let made = restore(&backend, &wanted, from);
        assert_eq!(made.lineage(), made.incarnation, "{n}");
        assert_eq!(backend.image_problem(&made).unwrap(), None);
    }
    let log = host.effect_log();
    let volume = |n| Image::Volume(Uuid::from_u128(n));
    for image in [image_of_cut, volume(3), volume(4)] {
        let image = image_of(&backend, image);
        let image = image
            .strip_prefix(&backend.folder.root)
            .unwrap()
            .display()
            .to_string();
        let done = log
            .iter()
            .any(|line| line.starts_with("unshare") && line.contains(&image));
        assert!(done, "{image} in {log:#?}");
    }
}

#[test]
fn room_for_promises_shrinks_by_what_a_snapshot_holds() {
    let (_, backend) = pool();
    let filled = backend.create(volume(1, Allocation::Thick), &any).unwrap();
    let thin = backend.create(volume(2, Allocation::Thin), &any).unwrap();
    let room = |backend: &PoolBackend| {
        let space = backend.space().unwrap();
        // Without the blocks of records.
        let whole = (space.available + space.not_in_snapshots).next_multiple_of(MIB);
        (whole, space.provisioned, space.pending_bytes)
    };
    let (whole, promised, _) = room(&backend);
    assert_eq!(promised, 2 * SIZE);
    // A snapshot of a thick volume counts with its full size from its intent on.
    let mut record = snapshot(3, &filled);
    backend.prepare_snapshot(&record, &any).unwrap();
    assert_eq!(room(&backend), (whole - SIZE, promised, SIZE));
    record.state = SnapshotState::Ready;
    backend.update_snapshot(&record).unwrap();
    assert_eq!(room(&backend), (whole, promised, 0));
    cut(&backend, 4, &thin);
    assert_eq!(room(&backend), (whole, promised, 0), "nothing was written");
    backend.snapshots.delete(record.uuid).unwrap();
    assert_eq!(room(&backend), (whole, promised, 0));
}

#[test]
fn what_is_refused_leaves_nothing() {
    let (host, backend) = pool();
    let source = backend.create(volume(1, Allocation::Thin), &any).unwrap();
    let before = host.files_below(Path::new(POOL));
    let full = |space: &PoolSpace| {
        Err(Error::OutOfSpace {
            pool: "pool".into(),
            enlarge: "enlarge the pool".into(),
            required: SIZE,
            available: space.available,
        })
    };
    assert!(
        backend
            .prepare_snapshot(&snapshot(2, &source), &full)
            .is_err()
    );
    assert!(
        backend
            .prepare(&volume(3, Allocation::Thin), &full)
            .is_err()
    );
    let elsewhere = SnapshotRecord {
        source_incarnation: Uuid::from_u128(99),
        ..snapshot(2, &source)
    };
    let error = backend.prepare_snapshot(&elsewhere, &any).unwrap_err();
    assert!(matches!(error, Error::NotFound { .. }), "{error}");
    let gone = Image::Snapshot(Uuid::from_u128(98));
    let orphan = restored(&backend, 3, Allocation::Thin, gone);
    let error = backend.prepare(&orphan, &any).unwrap_err();
    assert!(matches!(error, Error::NotFound { .. }), "{error}");
    assert_eq!(host.files_below(Path::new(POOL)), before);
    assert_eq!(backend.snapshots.unready(), Vec::new());
}

#[test]
fn a_pool_of_an_earlier_release_gets_its_directory_of_snapshots_durably() {
    let (host, backend) = pool();
    let folder = Path::new(POOL).join(SNAPSHOTS);
    let root = Path::new(POOL);
    host.perform(&Effect::RemoveDir { path: &folder }).unwrap();
    host.perform(&Effect::SyncDir { path: root }).unwrap();
    let source = backend.create(volume(1, Allocation::Thin), &any).unwrap();
    // The directory was created before, but not durably.
    host.perform(&Effect::MakeDir { path: &folder }).unwrap();
    let made = cut(&backend, 2, &source);
    drop(backend);
    let backend = open(&host.reboot(true));
    assert_eq!(backend.snapshots.ready(None, 10), vec![made]);
}

#[test]
fn a_damaged_record_of_a_snapshot_is_reported_and_delays_nothing_else() {
    let (host, backend) = pool();
    let source = backend.create(volume(1, Allocation::Thin), &any).unwrap();
    let (bad, good) = (cut(&backend, 2, &source), cut(&backend, 3, &source));
    drop(backend);
    let path = format!("{POOL}/{SNAPSHOTS}/{}/{RECORD}", bad.uuid);
    host.put_file(Path::new(&path), b"{}").unwrap();
    let backend = open(&host.restart_process());
    assert_eq!(backend.recover(&|_| false).unwrap().total(), 0);
    assert_eq!(backend.snapshots.damaged().len(), 1);
    assert!(matches!(
        backend.snapshots.get(bad.uuid),
        Err(Error::Damaged { .. })
    ));
    assert_eq!(backend.snapshots.ready(None, 10), vec![good]);
    assert!(backend.space().is_ok());
    backend.snapshots.delete(bad.uuid).unwrap();
    assert!(backend.snapshots.damaged().is_empty());
}

#[test]
fn what_a_delete_has_left_is_ended_without_a_repeat() {
    let (host, backend) = pool();
    let trash = Path::new(POOL).join(TRASH);
    let wiped = VolumeRecord {
        wipe: Wipe::Zero,
        ..volume(1, Allocation::Thin)
    };
    let made = backend.create(wiped, &any).unwrap();
    // The rename succeeds, but is not durable.
    host.fail_effect(2, FaultMode::Before(Errno::EIO));
    let deleted = backend.volumes.delete(made.uuid);
    assert!(
        matches!(deleted, Err(Error::RollbackFailed { .. })),
        "{deleted:?}"
    );
    host.fail_effect(1, FaultMode::Before(Errno::EIO));
    let leftovers = backend.leftovers().unwrap();
    let [leftover] = leftovers.as_slice() else {
        panic!("{leftovers:?}");
    };
    assert!(backend.clean_up(leftover).is_err());
    let left = host.files_below(&trash);
    assert!(!left.is_empty(), "in vain, and it's still there");
    assert_eq!(backend.leftovers().unwrap(), leftovers);
    assert!(backend.clean_up(leftover).unwrap());
    assert!(host.files_below(&trash).is_empty());
    let wiped = |line: &String| line.starts_with("zero");
    assert!(host.effect_log().iter().any(wiped), "it asked for a wipe");
    let effects = host.effects();
    assert!(!backend.clean_up(leftover).unwrap());
    assert!(backend.leftovers().unwrap().is_empty());
    assert_eq!(host.effects(), effects, "there is nothing left to do");
}

#[test]
fn many_deletes_tell_the_disk_once_also_after_a_crash() {
    let (host, backend) = pool();
    let discarded = |n| VolumeRecord {
        wipe: Wipe::Discard,
        ..volume(n, Allocation::Thin)
    };
    for n in 1..=5 {
        let made = backend.create(discarded(n), &any).unwrap();
        backend.volumes.delete(made.uuid).unwrap();
    }
    let trims = || {
        let log = host.effect_log();
        log.iter().filter(|line| line.starts_with("trim")).count()
    };
    assert_eq!(trims(), 0, "no delete waits for it");
    // After a crash and a failure, the discard is still due.
    drop(backend);
    let backend = open(&host);
    host.fail_effect(1, FaultMode::Before(Errno::EIO));
    backend.folder.discard_freed().unwrap_err();
    drop(backend);
    let backend = open(&host);
    let before = trims();
    backend.folder.discard_freed().unwrap();
    assert_eq!(trims(), before + 1);
    backend.folder.discard_freed().unwrap();
    drop(backend);
    open(&host).folder.discard_freed().unwrap();
    assert_eq!(trims(), before + 1, "all of it was logged");
    let left = host.files_below(&Path::new(POOL).join(TRASH));
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn a_wipe_does_not_wait_for_another_one() {
    let (host, backend) = pool();
    let record = VolumeRecord {
        wipe: Wipe::Zero,
        ..volume(1, Allocation::Thin)
    };
    let record = backend.create(record, &|_| Ok(())).unwrap();
    let another = backend.folder.wiping.lock().unwrap();
    let error = backend.volumes.delete(record.uuid).unwrap_err();
    let Error::RollbackFailed { first, .. } = error else {
        panic!("{error}");
    };
    assert!(matches!(*first, Error::Pending { .. }), "{first}");
    assert_eq!(backend.volumes.get(record.uuid).unwrap(), None);
    assert!(matches!(
        backend.volumes.delete(record.uuid),
        Err(Error::RollbackFailed { .. })
    ));
    assert_eq!(backend.folder.trash_of(&[record.uuid]).unwrap().len(), 1);
    drop(another);
    backend.volumes.delete(record.uuid).unwrap();
    assert_eq!(backend.folder.trash_of(&[record.uuid]).unwrap().len(), 0);
    assert!(host.violations().is_empty());
}

#[test]
fn a_look_that_fails_does_not_lose_the_wipe() {
    for look in 1.. {
        let (host, backend) = pool();
        let wiped = VolumeRecord {
            wipe: Wipe::Zero,
            ..volume(1, Allocation::Thin)
        };
        let made = backend.create(wiped, &any).unwrap();
        host.fail_query(look, Errno::EIO);
        if backend.volumes.delete(made.uuid).is_err() {
            backend.volumes.delete(made.uuid).unwrap();
        }
        let zeroed = |line: &String| line.starts_with("zero");
        assert!(host.effect_log().iter().any(zeroed), "look {look}");
        if host.faults_left() > 0 {
            assert!(look > 3, "some have failed");
            return;
        }
    }
}
