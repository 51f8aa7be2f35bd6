//! Mapped devices above the loop devices of raw block volumes, on a simulated host.

use super::*;
use crate::backend::AttachMode;
use crate::host::memory::MemoryOptions;
use crate::host::{Host, LoopSpec};

const RAW: AttachMode = AttachMode {
    read_only: false,
    lasting: true,
};

fn uuid_of(record: &VolumeRecord) -> String {
    format!("SLACKWATER-linear-{}", record.uuid)
}

fn raw(backend: &PoolBackend) -> VolumeRecord {
    backend.create(volume(1, Allocation::Thin), &any).unwrap()
}

fn recover(backend: &PoolBackend) {
    backend.recover(&|_| false).unwrap();
}

/// Attaches a device as for a raw block volume; returns whether it is a mapped device.
fn is_mapped(backend: &PoolBackend, record: &VolumeRecord) -> bool {
    let attached = backend.devices().attach(record, RAW).unwrap();
    let found = backend.devices().list(record.uuid).unwrap();
    assert_eq!(found.len(), 1);
    assert_eq!(found[0].device, attached.device);
    attached.device.loop_number().is_none()
}

#[test]
fn a_raw_volume_has_a_mapped_device_until_that_is_detached() {
    let (host, backend) = pool();
    let record = raw(&backend);
    let devices = backend.devices();
    for read_only in [false, true] {
        let mode = AttachMode { read_only, ..RAW };
        let attached = devices.attach(&record, mode).unwrap();
        let again = devices.attach(&record, mode).unwrap();
        assert_eq!(attached.device, again.device);
        let other = AttachMode {
            read_only: !read_only,
            ..RAW
        };
        devices.attach(&record, other).unwrap_err();
        assert!(devices.watch(record.uuid, again).unwrap().is_none());
        let found = devices.list(record.uuid).unwrap();
        let seen: Vec<_> = found.iter().map(|it| (it.whole, it.read_only)).collect();
        assert_eq!(seen, [(true, read_only)]);
        let device = attached.device.clone();
        drop(attached);
        assert_eq!(host.loop_numbers().len(), 2);
        devices.detach(record.uuid, &device).unwrap();
        assert_eq!(host.loop_numbers(), [], "nothing is left");
    }
    assert_eq!(host.violations(), Vec::<String>::new());
}

#[test]
fn the_mapped_device_of_a_thick_volume_grows_and_takes_no_discards() {
    let (host, backend) = pool();
    let thick = backend.create(volume(1, Allocation::Thick), &any).unwrap();
    let devices = backend.devices();
    let attached = devices.attach(&thick, RAW).unwrap();
    let grown = backend
        .grow(&thick, 2 * SIZE, &any, &mut || Ok(()))
        .unwrap();
    devices.resize(&grown, &attached.device).unwrap();
    assert_eq!(host.device_bytes(&attached.device).unwrap(), 2 * SIZE);
    let log = host.effect_log();
    let of = |name: &str| log.iter().filter(|it| it.starts_with(name)).count();
    assert_eq!((of("forbid_discard"), of("load_linear")), (2, 2));
    // A growth that ended before the device was resized.
    let grown = backend
        .grow(&grown, 3 * SIZE, &any, &mut || Ok(()))
        .unwrap();
    let again = devices.attach(&grown, RAW).unwrap();
    assert_eq!(host.device_bytes(&again.device).unwrap(), 3 * SIZE);
    assert_eq!(host.violations(), Vec::<String>::new());
}

#[test]
fn a_loop_device_stays_where_a_mapped_one_is_not_wanted_or_not_possible() {
    let (_, backend) = pool();
    let unwanted = VolumeRecord {
        block_groups: false,
        ..volume(1, Allocation::Thin)
    };
    let unwanted = backend.create(unwanted, &any).unwrap();
    assert!(!is_mapped(&backend, &unwanted));
    let small = VolumeRecord {
        size: MIB,
        ..volume(2, Allocation::Thin)
    };
    let small = backend.create(small, &any).unwrap();
    assert!(
        !is_mapped(&backend, &small),
        "it has no place for two parts"
    );

    let host = MemoryHost::with_options(MemoryOptions {
        device_mapper: false,
        ..MemoryOptions::default()
    });
    make_pool(&host, "pool", Path::new(POOL), HomeId(Uuid::from_u128(1))).unwrap();
    let backend = open(&host);
    let record = raw(&backend);
    assert!(!is_mapped(&backend, &record));
    let copier = backend.copier(
        Image::Volume(record.uuid),
        Image::Snapshot(Uuid::from_u128(9)),
        &Arc::default(),
    );
    assert!(copier.unwrap().mapped().unwrap().is_none());
}

#[test]
fn a_volume_that_was_published_with_its_loop_device_keeps_it() {
    let (host, backend) = pool();
    let record = raw(&backend);
    let image = &image_of(&backend, Image::Volume(record.uuid));
    let spec = LoopSpec {
        image,
        backing: host.stat(image).unwrap().unwrap().id,
        block_size: 512,
        autoclear: false,
        read_only: false,
    };
    host.perform(&Effect::AttachLoop(spec)).unwrap();
    assert!(!is_mapped(&backend, &record));
    recover(&backend);
    assert!(is_mapped(&backend, &record), "from the next publish on");
}

#[test]
fn a_crash_at_any_step_leaves_what_the_next_attach_uses_and_a_start_removes() {
    let cases = (1..).flat_map(|step| {
        let modes = [FaultMode::CrashBefore, FaultMode::CrashAfter].into_iter();
        modes.flat_map(move |mode| [(step, mode, true), (step, mode, false)])
    });
    for (step, mode, is_start) in cases {
        let (host, backend) = pool();
        let record = raw(&backend);
        host.fail_effect(step, mode);
        let attached = backend.devices().attach(&record, RAW);
        if attached.is_ok() {
            assert!(step > 4, "{step} steps");
            return;
        }
        let host = host.restart_process();
        let backend = open(&host);
        if is_start {
            recover(&backend);
            assert_eq!(host.loop_numbers(), [], "step {step}");
        }
        assert!(is_mapped(&backend, &record), "step {step}");
        assert_eq!(host.violations(), Vec::<String>::new());
    }
}

#[test]
fn a_device_that_another_program_has_suspended_is_neither_used_nor_removed() {
    let (host, backend) = pool();
    let record = raw(&backend);
    assert!(is_mapped(&backend, &record));
    let uuid = &uuid_of(&record);
    host.suspend_mapped(uuid).unwrap();
    let refused = backend.devices().attach(&record, RAW).unwrap_err();
    let message = crate::error::chain(&refused);
    assert!(message.contains("dmsetup resume"), "{message}");
    recover(&backend);
    assert_eq!(host.loop_numbers().len(), 2);
    host.perform(&Effect::ResumeMapped { uuid }).unwrap();
    recover(&backend);
    assert_eq!(host.loop_numbers(), []);
}
