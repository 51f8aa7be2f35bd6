//! A pool of thin devices on a simulated host.

use super::*;
use crate::backend::place::make::make_pool_of_kind;
use crate::backend::{AttachMode, ImageHandle};
use crate::error::Result;
use crate::host::mapper::ThinPoolMode;
use crate::host::memory::Unreadable;
use crate::host::{Freezer, Host, NodeKind, ThinMessage, ThinTable};
use crate::model::PoolId;

const KIND: PoolKind<'_> = PoolKind::Thin { pool: "pool" };
const WRITE: AttachMode = AttachMode {
    read_only: false,
    lasting: true,
};

fn open(host: &MemoryHost) -> PoolBackend {
    let host = Arc::new(host.clone());
    match PoolBackend::open(host, Path::new(POOL), KIND, Duration::ZERO).unwrap() {
        OpenResult::Pool(backend) => *backend,
        OpenResult::Blank | OpenResult::Locked => panic!("the pool can be had"),
    }
}

fn pool() -> (MemoryHost, PoolBackend) {
    let host = MemoryHost::with_capacity(4 * GIB);
    let home = HomeId(Uuid::from_u128(1));
    let id = PoolId(host.random_uuid());
    make_pool_of_kind(&host, "pool", Path::new(POOL), KIND, (id, home)).unwrap();
    let backend = open(&host);
    (host, backend)
}

fn thin_ids(host: &MemoryHost) -> Vec<u32> {
    host.thin_devices("pool").unwrap().into_keys().collect()
}

#[test]
fn volumes_snapshots_and_restores_are_thin_devices() {
    let (host, backend) = pool();
    let source = backend.create(volume(1, Allocation::Thin), &any).unwrap();
    let snapshot = cut(&backend, 2, &source);
    let image = Image::Snapshot(snapshot.uuid);
    let wanted = restored(&backend, 3, Allocation::Thin, image);
    let made = restore(&backend, &wanted, image);
    assert_eq!((source.image, snapshot.image, made.image), (3, 4, 5));
    assert_eq!(thin_ids(&host), [3, 4, 5]);
    assert_eq!(backend.image_problem(&made).unwrap(), None);
    backend.volumes.delete(source.uuid).unwrap();
    backend.volumes.delete(made.uuid).unwrap();
    backend.snapshots.delete(snapshot.uuid).unwrap();
    assert!(thin_ids(&host).is_empty());
    assert_eq!(backend.leftovers().unwrap(), []);
    assert_eq!(host.violations(), Vec::<String>::new());
}

#[test]
fn a_message_that_the_kernel_takes_back_is_no_success() {
    let (host, backend) = pool();
    let source = backend.create(volume(1, Allocation::Thin), &any).unwrap();
    let snapshot = cut(&backend, 2, &source);
    let before = thin_ids(&host);
    let works: [&dyn Fn(u128) -> Result<()>; 4] = [
        &|n| backend.create(volume(n, Allocation::Thin), &any).map(drop),
        &|n| {
            let record = crate::backend::pool::tests::snapshot(n, &source);
            backend.prepare_snapshot(&record, &any)?;
            let copy = Image::Snapshot(record.uuid);
            clone_unused(&backend, Image::Volume(source.uuid), copy)
        },
        &|n| {
            let from = Image::Snapshot(snapshot.uuid);
            let record = restored(&backend, n, Allocation::Thin, from);
            backend.prepare(&record, &any)?;
            clone_unused(&backend, from, Image::Volume(record.uuid))
        },
        // The kernel deletes it again: it still exists.
        &|_| backend.snapshots.delete(snapshot.uuid),
    ];
    for (n, work) in (3..).zip(works) {
        host.set_up_pool("pool", |setup| setup.fails_commits = true);
        let refused = work(n).unwrap_err();
        let why = crate::error::chain(&refused);
        assert!(why.contains("could not commit"), "{why}");
        assert_eq!(thin_ids(&host), before);
        host.set_up_pool("pool", |setup| {
            setup.fails_commits = false;
            setup.mode = ThinPoolMode::ReadWrite;
            setup.needs_check = false;
        });
    }
}

#[test]
fn a_measurement_and_the_proof_of_a_cut_read_the_metadata_once_and_other_calls_never() {
    let (host, backend) = pool();
    let before = host.metadata_reads();
    let source = backend.create(volume(1, Allocation::Thin), &any).unwrap();
    let attached = backend.devices().attach(&source, WRITE).unwrap();
    let device = attached.device.clone();
    drop(attached);
    backend.devices().detach(source.uuid, &device).unwrap();
    let snapshots = [2, 3].map(|n| cut(&backend, n, &source));
    let image = Image::Snapshot(snapshots[0].uuid);
    let wanted = restored(&backend, 4, Allocation::Thin, image);
    let made = restore(&backend, &wanted, image);
    backend.volumes.delete(made.uuid).unwrap();
    let planned = snapshot(5, &source);
    backend.prepare_snapshot(&planned, &any).unwrap();
    let (from, to) = (Image::Volume(source.uuid), Image::Snapshot(planned.uuid));
    let copier = backend.copier(from, to, &Arc::default()).unwrap();
    copier.copy_ahead().unwrap();
    copier.seal();
    copier.copy_delta().unwrap();
    assert_eq!(host.metadata_reads(), before);
    assert!(copier.verify().unwrap());
    assert_eq!(host.metadata_reads(), before + 1);
    backend.space().unwrap();
    assert_eq!(host.metadata_reads(), before + 2);
}

#[test]
fn the_device_of_a_member_is_opened_without_a_list_of_all_devices() {
    let (host, backend) = pool();
    let source = backend.create(volume(1, Allocation::Thin), &any).unwrap();
    let attached = backend.devices().attach(&source, WRITE).unwrap();
    let (from, to) = (
        Image::Volume(source.uuid),
        Image::Snapshot(Uuid::from_u128(2)),
    );
    let copier = backend.copier(from, to, &Arc::default()).unwrap();
    let before = host.looks();
    let held = copier.mapped().unwrap().unwrap();
    assert_eq!(held.device, attached.device);
    // A list would be a second query.
    assert_eq!(host.looks(), before + 1);
}

/// Creates a thick volume and writes all of its blocks.
fn thick(backend: &PoolBackend) -> VolumeRecord {
    let record = volume(1, Allocation::Thick);
    backend.prepare(&record, &any).unwrap();
    let image = backend.open_image(Image::Volume(record.uuid)).unwrap();
    image.rewrite(0, SIZE).unwrap();
    image.sync().unwrap();
    drop(image);
    backend.complete(&record).unwrap()
}

#[test]
fn a_thick_volume_takes_every_write_while_the_pool_is_full() {
    let (host, backend) = pool();
    let thick = thick(&backend);
    let size = backend.store().size(Image::Volume(thick.uuid)).unwrap();
    assert_eq!(size.unwrap().allocated, SIZE);
    let thin = backend.create(volume(2, Allocation::Thin), &any).unwrap();
    let devices = backend.devices();
    let attached = [&thick, &thin].map(|it| devices.attach(it, WRITE).unwrap());
    let targets = [
        Path::new("/var/lib/kubelet/thick"),
        Path::new("/var/lib/kubelet/thin"),
    ];
    for (attached, target) in attached.iter().zip(targets) {
        let kind = NodeKind::File;
        host.perform(&Effect::MakeTarget { path: target, kind })
            .unwrap();
        let device = &attached.device;
        host.perform(&Effect::BindDevice { device, target })
            .unwrap();
    }
    host.keep_full(true);
    host.write_block_token(targets[0], 1).unwrap();
    host.write_block_token(targets[1], 1).unwrap_err();
    assert_eq!(backend.image_problem(&thick).unwrap(), None);
    assert_eq!(host.violations(), Vec::<String>::new());
}

#[test]
fn the_device_of_a_thick_volume_takes_no_discards_after_each_table() {
    let (host, backend) = pool();
    let thick = thick(&backend);
    let attached = backend.devices().attach(&thick, WRITE).unwrap();
    let seen = |log: &[String]| {
        log.iter()
            .filter(|it| it.starts_with("forbid_discard"))
            .count()
    };
    assert_eq!(seen(&host.effect_log()), 1);
    backend.devices().resize(&thick, &attached.device).unwrap();
    assert_eq!(seen(&host.effect_log()), 2);
    // A start: a crash may have come after the table.
    let images = [Image::Volume(thick.uuid)];
    let idle = backend.store().detach_idle(&images, &|_| true).unwrap();
    assert!(idle.is_empty());
    assert_eq!(seen(&host.effect_log()), 3);
}

#[test]
fn a_snapshot_of_a_thick_volume_leaves_it_no_blocks_of_its_own() {
    let (_, backend) = pool();
    let thick = thick(&backend);
    assert_eq!(backend.space().unwrap().not_in_snapshots, SIZE);
    let made = cut(&backend, 2, &thick);
    backend.unshare(Image::Snapshot(made.uuid), SIZE).unwrap();
    let space = backend.space().unwrap();
    assert_eq!((space.not_in_snapshots, space.provisioned), (0, SIZE));
    backend.snapshots.delete(made.uuid).unwrap();
    assert_eq!(backend.space().unwrap().not_in_snapshots, SIZE);
}

#[test]
fn a_number_is_not_used_again_after_a_restart() {
    let (host, backend) = pool();
    let made = backend.create(volume(1, Allocation::Thin), &any).unwrap();
    backend.volumes.delete(made.uuid).unwrap();
    let made = backend.create(volume(2, Allocation::Thin), &any).unwrap();
    assert_eq!(made.image, 4);
    backend.volumes.delete(made.uuid).unwrap();
    drop(backend);
    let host = host.reboot(true);
    let backend = open(&host);
    let next = backend.create(volume(3, Allocation::Thin), &any).unwrap();
    assert!(next.image > made.image, "{}", next.image);
}

#[test]
fn volumes_and_snapshots_are_deleted_while_the_disk_of_the_records_is_full() {
    let (host, backend) = pool();
    let source = backend.create(volume(1, Allocation::Thin), &any).unwrap();
    let snapshot = cut(&backend, 2, &source);
    host.fail_always("write_file", Some(Errno::ENOSPC));
    backend.snapshots.delete(snapshot.uuid).unwrap();
    backend.volumes.delete(source.uuid).unwrap();
    host.clear_faults();
    let host = host.reboot(true);
    let next = open(&host).create(volume(3, Allocation::Thin), &any);
    assert!(next.unwrap().image > snapshot.image.max(source.image));
}

#[test]
fn a_deleted_snapshot_counts_until_its_blocks_are_free() {
    let (host, backend) = pool();
    let thick = thick(&backend);
    let made = cut(&backend, 2, &thick);
    backend.unshare(Image::Snapshot(made.uuid), SIZE).unwrap();
    let reserved = || backend.space().unwrap().metadata.unwrap().reserved;
    let before = reserved();
    host.set_up_pool("pool", |setup| setup.fails_commits = true);
    assert!(backend.snapshots.delete(made.uuid).is_err());
    host.set_up_pool("pool", |setup| {
        setup.fails_commits = false;
        setup.mode = ThinPoolMode::ReadWrite;
        setup.needs_check = false;
    });
    assert_eq!(
        (backend.space().unwrap().not_in_snapshots, reserved()),
        (0, before)
    );
    backend.snapshots.delete(made.uuid).unwrap();
    assert_eq!(backend.space().unwrap().not_in_snapshots, SIZE);
    assert!(reserved() < before);
}

#[test]
fn at_the_end_of_the_range_the_lowest_number_is_used_that_nothing_has() {
    let (host, backend) = pool();
    let first = backend.create(volume(1, Allocation::Thin), &any).unwrap();
    let second = backend.create(volume(2, Allocation::Thin), &any).unwrap();
    let third = backend.create(volume(3, Allocation::Thin), &any).unwrap();
    assert_eq!((first.image, second.image, third.image), (3, 4, 5));
    backend.volumes.delete(first.uuid).unwrap();
    backend.volumes.delete(third.uuid).unwrap();
    drop(backend);
    let last = crate::host::mapper::MAX_THIN_ID - 1;
    host.perform(&Effect::WriteFile {
        path: &Path::new(POOL).join("next-id"),
        bytes: last.to_string().as_bytes(),
    })
    .unwrap();
    // A program that has kept a device of the deleted volume.
    let uuid = "OTHER-1";
    host.perform(&Effect::CreateMapped { uuid }).unwrap();
    let id = first.image;
    let pool = "pool";
    let message = ThinMessage::CreateThin { id };
    host.perform(&Effect::ThinMessage { pool, message })
        .unwrap();
    let table = &ThinTable {
        pool: pool.into(),
        id,
        bytes: SIZE,
    };
    host.perform(&Effect::LoadTable {
        uuid,
        table,
        read_only: false,
    })
    .unwrap();
    host.perform(&Effect::ResumeMapped { uuid }).unwrap();
    let backend = open(&host);
    let numbers: Vec<_> = (4..7)
        .map(|n| {
            backend
                .create(volume(n, Allocation::Thin), &any)
                .unwrap()
                .image
        })
        .collect();
    assert_eq!(numbers, [last, 5, 6]);
}

#[test]
fn while_a_record_cannot_be_read_no_number_is_given_that_it_may_have() {
    let (host, backend) = pool();
    let source = backend.create(volume(1, Allocation::Thin), &any).unwrap();
    let record = snapshot(2, &source);
    backend.prepare_snapshot(&record, &any).unwrap();
    let file = Path::new(POOL)
        .join(part(Image::Snapshot(record.uuid)))
        .join(RECORD);
    drop(backend);
    host.make_unreadable(&file, Unreadable::Error).unwrap();
    // All IDs that were ever used are below the one in the file.
    let backend = open(&host);
    let made = backend.create(volume(3, Allocation::Thin), &any).unwrap();
    let above = source.image + 1..1000;
    assert!(above.contains(&made.image), "{}", made.image);
    drop(backend);
    let file = &Path::new(POOL).join("next-id");
    // As a release left it that did not write the file.
    host.perform(&Effect::RemoveFile { path: file }).unwrap();
    let backend = open(&host);
    let made = backend.create(volume(5, Allocation::Thin), &any).unwrap();
    assert!(made.image > 1000, "{}", made.image);
    drop(backend);
    let backend = open(&host);
    let next = backend.create(volume(6, Allocation::Thin), &any).unwrap();
    assert!(next.image - made.image < 1000, "{}", next.image);
    drop(backend);
    host.perform(&Effect::WriteFile {
        path: file,
        bytes: crate::host::mapper::MAX_THIN_ID.to_string().as_bytes(),
    })
    .unwrap();
    let backend = open(&host);
    let refused = backend.create(volume(4, Allocation::Thin), &any);
    let refused = refused.unwrap_err().to_string();
    assert!(
        refused.contains("record that could not be read"),
        "{refused}"
    );
    assert_eq!(backend.volumes.get(Uuid::from_u128(4)).unwrap(), None);
}

#[test]
fn a_device_is_found_used_again_resized_and_removed() {
    let (host, backend) = pool();
    let made = backend.create(volume(1, Allocation::Thin), &any).unwrap();
    let devices = backend.devices();
    let attached = devices.attach(&made, WRITE).unwrap();
    let again = devices.attach(&made, WRITE).unwrap();
    assert_eq!(attached.device, again.device);
    assert_eq!(devices.list(made.uuid).unwrap().len(), 1);
    let grown = backend.grow(&made, 2 * SIZE, &any, &mut || Ok(())).unwrap();
    devices.resize(&grown, &attached.device).unwrap();
    assert_eq!(host.device_bytes(&attached.device).unwrap(), grown.size);
    let device = attached.device.clone();
    drop((attached, again));
    devices.detach(made.uuid, &device).unwrap();
    assert_eq!(devices.list(made.uuid).unwrap(), []);
    assert_eq!(host.violations(), Vec::<String>::new());
}

#[test]
fn a_start_leaves_what_another_program_has_suspended_and_removes_the_rest() {
    let (host, backend) = pool();
    let made = backend.create(volume(1, Allocation::Thin), &any).unwrap();
    let attached = backend.devices().attach(&made, WRITE).unwrap();
    let device = attached.device.clone();
    let uuid = &host.mapped_devices("pool", "SLACKWATER-").unwrap()[0].uuid;
    host.suspend_mapped(uuid).unwrap();
    drop((attached, backend));
    let backend = open(&host);
    let is_it = |found: &crate::host::Device| *found == device;
    assert_eq!(backend.recover(&is_it).unwrap().loops, 0);
    assert_eq!(backend.recover(&|_| false).unwrap().loops, 0);
    let found = || host.mapped_devices("pool", "SLACKWATER-").unwrap();
    assert!(found().iter().all(|found| found.suspended));
    let refused = backend.devices().attach(&made, WRITE).unwrap_err();
    assert!(refused.to_string().contains("dmsetup resume"), "{refused}");
    host.perform(&Effect::ResumeMapped { uuid }).unwrap();

    let table = &found()[0].table.clone().unwrap();
    host.perform(&Effect::LoadTable {
        uuid,
        table,
        read_only: false,
    })
    .unwrap();
    let refused = backend.devices().attach(&made, WRITE).unwrap_err();
    assert!(refused.to_string().contains("dmsetup clear"), "{refused}");
    assert_eq!(backend.recover(&is_it).unwrap().loops, 0);
    assert!(!found()[0].has_inactive_table);
    drop(backend.devices().attach(&made, WRITE).unwrap());
    assert_eq!(backend.recover(&|_| false).unwrap().loops, 1);
    assert_eq!(backend.devices().list(made.uuid).unwrap(), []);
}

#[test]
fn an_image_is_copied_from_another_pool_through_its_device() {
    let (host, backend) = pool();
    let source = backend.create(volume(1, Allocation::Thin), &any).unwrap();
    let copied = VolumeRecord {
        copy: progress(),
        ..volume(2, Allocation::Thin)
    };
    backend.prepare(&copied, &any).unwrap();
    let from = backend.open_image(Image::Volume(source.uuid)).unwrap();
    let to = backend.open_image(Image::Volume(copied.uuid)).unwrap();
    from.copy_to(&to, 0, SIZE).unwrap();
    to.sync().unwrap();
    drop((from, to));
    backend.complete(&copied).unwrap();
    assert_eq!(backend.devices().list(source.uuid).unwrap(), []);
    assert_eq!(host.violations(), Vec::<String>::new());
}

#[test]
fn a_pool_without_free_metadata_has_no_space() {
    let (host, backend) = pool();
    backend.create(volume(1, Allocation::Thin), &any).unwrap();
    assert!(backend.space().unwrap().available > 0);
    host.set_thin_metadata(4096);
    assert_eq!(backend.space().unwrap().available, 0);
}

/// A snapshot of volume 1 that a copy reads, the device through which it reads, and a prepared volume.
fn read_by_a_copy(backend: &PoolBackend) -> (ImageHandle, Image, Image) {
    let source = backend.create(volume(1, Allocation::Thin), &any).unwrap();
    let from = Image::Snapshot(cut(backend, 2, &source).uuid);
    let reader = backend.open_image(from).unwrap();
    let record = restored(backend, 3, Allocation::Thin, from);
    backend.prepare(&record, &any).unwrap();
    (reader, from, Image::Volume(record.uuid))
}

fn copy_unused(host: &MemoryHost, backend: &PoolBackend, from: Image, to: Image) -> Result<u64> {
    let copier = backend.copier(from, to, &Arc::default())?;
    crate::cut::copy_unused(host, "snapshot", &*copier, Duration::from_secs(10))
}

fn suspended(host: &MemoryHost) -> usize {
    let found = host.mapped_devices("pool", "SLACKWATER-").unwrap();
    found.iter().filter(|found| found.suspended).count()
}

#[test]
fn the_guard_suspends_a_device_that_a_copy_reads_for_another_copy() {
    let (host, backend) = pool();
    let (reader, from, to) = read_by_a_copy(&backend);
    let refused = clone_unused(&backend, from, to).unwrap_err();
    assert!(refused.to_string().contains("clone"), "{refused}");
    assert_eq!(copy_unused(&host, &backend, from, to).unwrap(), 1);
    assert_eq!((thin_ids(&host).len(), suspended(&host)), (3, 0));
    assert!(host.list_journaled().unwrap().is_empty());
    drop(reader);
    assert!(
        host.mapped_devices("pool", "SLACKWATER-")
            .unwrap()
            .is_empty()
    );
    assert_eq!(host.violations(), Vec::<String>::new());
}

#[test]
fn a_process_that_dies_during_a_copy_leaves_no_device_suspended() {
    let mut kills = 0;
    for mode in [FaultMode::CrashBefore, FaultMode::CrashAfter] {
        for n in 1.. {
            let (host, backend) = pool();
            let (reader, from, to) = read_by_a_copy(&backend);
            // Then the next process must resume it.
            host.let_guard_die(true);
            host.fail_effect(n, mode);
            let done = copy_unused(&host, &backend, from, to);
            if host.is_alive() {
                done.unwrap();
                break;
            }
            let next = host.restart_process();
            drop((reader, backend));
            next.sweep().unwrap();
            assert_eq!(suspended(&next), 0, "{mode:?} {n}");
            assert_eq!(next.violations(), Vec::<String>::new());
            kills += 1;
        }
    }
    assert!(kills >= 6, "{kills} kills");
}

#[test]
fn a_copy_does_not_wait_for_a_device_that_is_suspended() {
    let (host, backend) = pool();
    let (reader, from, _) = read_by_a_copy(&backend);
    let found = host.mapped_devices("pool", "SLACKWATER-").unwrap();
    let uuid = &found[0].uuid;
    host.suspend_mapped(uuid).unwrap();
    let refused = backend.open_image(from).err().unwrap();
    assert!(refused.to_string().contains("dmsetup resume"), "{refused}");
    host.perform(&Effect::ResumeMapped { uuid }).unwrap();
    drop((backend.open_image(from).unwrap(), reader));
}

#[test]
fn attached_volumes_are_counted_without_devices_for_copies() {
    let (_, backend) = pool();
    let (reader, ..) = read_by_a_copy(&backend);
    let count = || backend.devices().count_without_loops().unwrap();
    assert_eq!(count(), 0);
    let made = backend.create(volume(4, Allocation::Thin), &any).unwrap();
    let attached = backend.devices().attach(&made, WRITE).unwrap();
    assert_eq!(count(), 1);
    drop((attached, reader));
}
