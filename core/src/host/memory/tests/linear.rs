//! Tests of mapped devices that show a loop device.

use super::*;
use crate::host::LinearTable;
use crate::model::size::MIB;

const UUID: &str = "SLACKWATER-a-1";
const IMAGE: &str = "/memory/img";
const COPY: &str = "/memory/copy";

fn load(host: &MemoryHost, lower: &Device, bytes: u64) -> Option<Errno> {
    let lower = lower.clone();
    let done = host.perform(&Effect::LoadLinear {
        uuid: UUID,
        table: &LinearTable { lower, bytes },
        read_only: false,
    });
    done.err().and_then(|error| error.code())
}

fn resume(host: &MemoryHost) {
    host.perform(&Effect::ResumeMapped { uuid: UUID }).unwrap();
}

/// A mapped device above a loop device, which is published as a raw block volume.
fn published(host: &MemoryHost) -> (Device, Device) {
    allocate(host, 8 * MIB, false).unwrap();
    let hold = attach(host, true).unwrap();
    let lower = hold.device().clone();
    host.perform(&Effect::CreateMapped { uuid: UUID }).unwrap();
    assert_eq!(load(host, &lower, 8 * MIB), None);
    resume(host);
    let device = host.hold_mapped(UUID).unwrap().unwrap().device;
    let (target, device) = (path(TARGET), &device);
    let kind = NodeKind::File;
    host.perform(&Effect::MakeTarget { path: target, kind })
        .unwrap();
    host.perform(&Effect::BindDevice { device, target })
        .unwrap();
    (device.clone(), lower)
}

fn clone_image(host: &MemoryHost) {
    host.perform(&Effect::Allocate {
        path: path(COPY),
        size: 8 * MIB,
        reserve: false,
    })
    .unwrap();
    let (source, target) = (path(IMAGE), path(COPY));
    host.perform(&Effect::CloneWhole { source, target })
        .unwrap();
}

#[test]
fn a_table_needs_a_device_that_is_long_enough_and_two_targets() {
    let host = MemoryHost::new();
    allocate(&host, 8 * MIB, false).unwrap();
    let hold = attach(&host, true).unwrap();
    let lower = &hold.device().clone();
    assert_eq!(load(&host, lower, 8 * MIB), Some(Errno::ENXIO));
    host.perform(&Effect::CreateMapped { uuid: UUID }).unwrap();
    assert_eq!(load(&host, &Device::of_loop(9), MIB), Some(Errno::ENXIO));
    assert_eq!(load(&host, lower, 8 * MIB + 512), Some(Errno::EINVAL));
    assert_eq!(load(&host, lower, MIB), Some(Errno::EINVAL));
    assert_eq!(load(&host, lower, MIB + 512), None);
    assert_eq!(host.violations(), Vec::<String>::new());
}

#[test]
fn writers_wait_while_the_mapped_device_is_suspended_and_a_clone_is_of_one_moment() {
    let host = MemoryHost::new();
    published(&host);
    host.write_block_token(path(TARGET), 1).unwrap();
    host.suspend_mapped(UUID).unwrap();
    let refused = host.write_block_token(path(TARGET), 2);
    assert_eq!(refused, Err(Errno::EAGAIN));
    clone_image(&host);
    assert_eq!(host.flaw(path(COPY)), None);
    resume(&host);
    host.write_block_token(path(TARGET), 2).unwrap();
    assert_eq!(host.block_tokens(path(TARGET)), Ok(vec![1, 2]));
    assert_eq!(host.image_tokens(path(COPY)), Some(vec![1]));
    assert_eq!(host.violations(), Vec::<String>::new());
}

#[test]
fn clones_in_two_steps_are_of_one_moment_only_if_the_mapped_device_is_suspended() {
    for suspended in [true, false] {
        let host = MemoryHost::new();
        published(&host);
        if suspended {
            host.suspend_mapped(UUID).unwrap();
        }
        host.perform(&Effect::Allocate {
            path: path(COPY),
            size: 8 * MIB,
            reserve: false,
        })
        .unwrap();
        let (source, target) = (path(IMAGE), path(COPY));
        host.perform(&Effect::ClonePreFreeze { source, target })
            .unwrap();
        let known = &crate::host::Known::default();
        host.perform(&Effect::CloneDelta {
            source,
            target,
            known,
        })
        .unwrap();
        assert_eq!(host.flaw(target).is_none(), suspended);
    }
}

#[test]
fn the_loop_device_exists_as_long_as_a_table_names_it() {
    let host = MemoryHost::new();
    published(&host);
    assert_eq!(host.loop_numbers().len(), 2, "no process holds either");
    host.perform(&Effect::Unmount {
        target: path(TARGET),
    })
    .unwrap();
    host.perform(&Effect::RemoveMapped { uuid: UUID }).unwrap();
    assert_eq!(host.loop_numbers(), Vec::new());
    assert_eq!(host.violations(), Vec::<String>::new());
}

#[test]
fn a_device_has_its_new_length_after_a_reload() {
    let host = MemoryHost::new();
    let (_, lower) = published(&host);
    allocate(&host, 16 * MIB, false).unwrap();
    assert_eq!(load(&host, &lower, 16 * MIB), Some(Errno::EINVAL));
    host.perform(&Effect::ResizeLoop { number: 0 }).unwrap();
    assert_eq!(load(&host, &lower, 16 * MIB), None);
    assert_eq!(host.block_bytes(path(TARGET)), Ok(8 * MIB));
    resume(&host);
    assert_eq!(host.block_bytes(path(TARGET)), Ok(16 * MIB));
    assert_eq!(host.violations(), Vec::<String>::new());
}
