//! Tests of thin pools: the rules of dm-thin that a pool of thin devices relies on.

use std::time::Duration;

use super::*;
use crate::host::freezer::FreezeLimits;
use crate::host::{FreezeMember, Freezer, ThinMessage, ThinSnapshot, ThinTable};
use crate::model::size::MIB;

const POOL: &str = "vg-pool";
const UUID: &str = "SLACKWATER-a-1";

fn message(host: &MemoryHost, message: ThinMessage) -> Option<Errno> {
    let pool = POOL;
    let done = host.perform(&Effect::ThinMessage { pool, message });
    done.err().and_then(|error| error.code())
}

fn snapshot(host: &MemoryHost, id: u32, origin: u32) -> Option<Errno> {
    let snapshot = ThinSnapshot {
        pool: POOL.into(),
        rdev: host.thin_pool(POOL).unwrap().unwrap().rdev,
        id,
        origin,
    };
    let prepared = &host.prepare_thin_snapshot(snapshot).unwrap();
    let done = host.perform(&Effect::CreateThinSnapshot { prepared });
    done.err().and_then(|error| error.code())
}

fn table(id: u32) -> ThinTable {
    ThinTable {
        pool: POOL.into(),
        id,
        bytes: 64 * MIB,
    }
}

fn activate(host: &MemoryHost, uuid: &str, id: u32) -> Device {
    let table = &table(id);
    let read_only = false;
    host.perform(&Effect::CreateMapped { uuid }).unwrap();
    host.perform(&Effect::LoadTable {
        uuid,
        table,
        read_only,
    })
    .unwrap();
    host.perform(&Effect::ResumeMapped { uuid }).unwrap();
    host.hold_mapped(uuid).unwrap().unwrap().device
}

/// A thin device with a file system that is mounted at a path.
fn mounted(host: &MemoryHost, target: &Path) -> Device {
    assert_eq!(message(host, ThinMessage::CreateThin { id: 1 }), None);
    let device = activate(host, UUID, 1);
    let (fs, uuid) = (FsType::Ext4, Uuid::from_u128(1));
    host.perform(&Effect::Format {
        device: &device,
        fs,
        uuid,
        options: &[],
        keep_blocks: false,
    })
    .unwrap();
    let (path, kind) = (target, NodeKind::Dir);
    host.perform(&Effect::MakeTarget { path, kind }).unwrap();
    host.perform(&Effect::Mount(MountSpec {
        device: &device,
        target,
        fs,
        options: &[],
        read_only: false,
    }))
    .unwrap();
    device
}

#[test]
fn messages_fail_as_the_kernel_defines_it() {
    let host = MemoryHost::new();
    let create = ThinMessage::CreateThin { id: 1 };
    assert_eq!(snapshot(&host, 2, 1), Some(Errno::ENODATA));
    assert_eq!(message(&host, create), None);
    assert_eq!(message(&host, create), Some(Errno::EEXIST));
    assert_eq!(snapshot(&host, 2, 1), None);
    assert_eq!(snapshot(&host, 2, 1), Some(Errno::EEXIST));
    let delete = ThinMessage::Delete { id: 1 };
    activate(&host, UUID, 1);
    assert_eq!(message(&host, delete), Some(Errno::EBUSY));
    host.perform(&Effect::RemoveMapped { uuid: UUID }).unwrap();
    assert_eq!(message(&host, delete), None);
    assert_eq!(message(&host, delete), Some(Errno::ENODATA));
    let (from, to) = (0, 1);
    let claim = ThinMessage::SetTransactionId { from, to };
    assert_eq!(message(&host, claim), None);
    assert_eq!(message(&host, claim), Some(Errno::EINVAL));
    host.set_thin_metadata(0);
    assert_eq!(message(&host, create), Some(Errno::ENOSPC));
    assert_eq!(host.violations(), Vec::<String>::new());
}

#[test]
fn a_snapshot_has_what_a_suspended_device_held_and_shares_its_blocks() {
    let host = MemoryHost::new();
    let target = path("/var/lib/kubelet/a");
    mounted(&host, target);
    host.write_token(target, 7).unwrap();
    host.suspend_mapped(UUID).unwrap();
    let used = || host.thin_pool(POOL).unwrap().unwrap().data.used;
    let before = used();
    assert_eq!(snapshot(&host, 2, 1), None);
    assert_eq!(used(), before);
    assert_eq!(host.sync(target), Err(Errno::EAGAIN), "its writers wait");
    host.perform(&Effect::ResumeMapped { uuid: UUID }).unwrap();
    host.write_token(target, 8).unwrap();
    assert!(used() > before);
    let copy = activate(&host, "SLACKWATER-a-2", 2);
    assert_eq!(host.image_tokens(&copy.path), Some(vec![7]));
    assert_eq!(host.violations(), Vec::<String>::new());
    assert_eq!(host.flaw(&copy.path), None);
}

#[test]
fn a_snapshot_of_a_device_in_use_is_invalid_unless_it_is_suspended() {
    let host = MemoryHost::new();
    mounted(&host, path("/var/lib/kubelet/a"));
    assert_eq!(snapshot(&host, 2, 1), None);
    let copy = activate(&host, "SLACKWATER-a-2", 2);
    assert!(host.flaw(&copy.path).is_some());
}

#[test]
fn one_uuid_has_one_device_and_two_devices_on_one_id_are_a_violation() {
    let host = MemoryHost::new();
    assert_eq!(message(&host, ThinMessage::CreateThin { id: 1 }), None);
    activate(&host, UUID, 1);
    let again = host.perform(&Effect::CreateMapped { uuid: UUID });
    assert_eq!(again.unwrap_err().code(), Some(Errno::EBUSY));
    assert_eq!(host.violations(), Vec::<String>::new());
    activate(&host, "other", 1);
    assert_eq!(host.violations().len(), 1);
    let all = host.mapped_devices(POOL, "SLACKWATER-").unwrap();
    assert_eq!(all.len(), 2, "foreign devices are found by their table");
}

#[test]
fn a_full_pool_refuses_writes_and_takes_them_again_after_a_delete() {
    let host = MemoryHost::new();
    let target = path("/var/lib/kubelet/a");
    mounted(&host, target);
    assert_eq!(message(&host, ThinMessage::CreateThin { id: 3 }), None);
    let other = activate(&host, "SLACKWATER-a-3", 3);
    let (fs, uuid) = (FsType::Ext4, Uuid::from_u128(3));
    let format = Effect::Format {
        device: &other,
        fs,
        uuid,
        options: &[],
        keep_blocks: false,
    };
    host.perform(&format).unwrap();
    host.leave_available(0);
    assert_eq!(host.write_token(target, 1), Err(Errno::ENOSPC));
    let uuid = "SLACKWATER-a-3";
    host.perform(&Effect::RemoveMapped { uuid }).unwrap();
    assert_eq!(message(&host, ThinMessage::Delete { id: 3 }), None);
    host.write_token(target, 2).unwrap();
}

#[test]
fn a_message_is_durable_at_once() {
    let host = MemoryHost::new();
    let target = path("/var/lib/kubelet/a");
    mounted(&host, target);
    host.write_token(target, 7).unwrap();
    host.suspend_mapped(UUID).unwrap();
    assert_eq!(snapshot(&host, 2, 1), None);
    let host = host.reboot(true);
    let copy = activate(&host, "SLACKWATER-a-2", 2);
    assert_eq!(host.image_tokens(&copy.path), Some(vec![7]));
}

const LIMITS: FreezeLimits = FreezeLimits {
    sync: Duration::from_secs(10),
    freeze: Duration::from_secs(10),
};

/// The device as a member of a session, with the file system if it is mounted.
fn member(host: &MemoryHost, device: &Device, mounted: Option<&Path>) -> FreezeMember {
    let open = |target| host.open_mount_root(target, device, FsType::Ext4).unwrap();
    FreezeMember {
        volume_id: "v".into(),
        namespace: None,
        image: FileId {
            device: host.thin_pool(POOL).unwrap().unwrap().rdev,
            inode: 1,
        },
        root: mounted.map(open),
        mapped: host.hold_mapped(UUID).unwrap(),
    }
}

fn is_suspended(host: &MemoryHost) -> bool {
    let devices = host.mapped_devices(POOL, "SLACKWATER-").unwrap();
    devices.iter().any(|device| device.suspended)
}

fn refusal(host: &MemoryHost, member: FreezeMember) -> Option<Errno> {
    host.begin(vec![member], LIMITS).err().unwrap().code()
}

#[test]
fn the_guard_suspends_the_devices_that_it_gets_and_no_others() {
    let host = MemoryHost::new();
    let target = path(STAGE);
    let device = mounted(&host, target);
    let mut without = member(&host, &device, Some(target));
    without.mapped = None;
    for (member, suspended) in [
        (member(&host, &device, Some(target)), true),
        (without, false),
    ] {
        let freeze = host.begin(vec![member], LIMITS).unwrap();
        assert!(!is_suspended(&host));
        freeze.freeze().unwrap();
        assert_eq!(is_suspended(&host), suspended);
        assert_eq!(host.write_token(target, 7), Err(Errno::EAGAIN));
        assert!(freeze.thaw(0).unwrap());
        assert!(!is_suspended(&host));
        drop(freeze);
    }
    host.write_token(target, 7).unwrap();
    assert!(host.violations().is_empty());
}

#[test]
fn a_raw_member_is_suspended_and_swept_after_the_death_of_its_guard() {
    let host = MemoryHost::new();
    message(&host, ThinMessage::CreateThin { id: 1 });
    let device = activate(&host, UUID, 1);
    host.let_guard_die(true);
    let freeze = host.begin(vec![member(&host, &device, None)], LIMITS);
    let freeze = freeze.unwrap();
    freeze.freeze().unwrap();
    let listed = host.list_journaled().unwrap();
    assert_eq!(listed[0].mapped.as_deref(), Some(UUID));
    assert_eq!(snapshot(&host, 2, 1), None);
    let next = host.restart_process();
    drop(freeze);
    assert!(is_suspended(&next), "no process is left to resume it");
    assert_eq!(next.sweep().unwrap(), ["v"]);
    assert!(!is_suspended(&next));
    assert!(next.violations().is_empty());
}

#[test]
fn devices_that_another_program_is_about_to_change_are_refused() {
    let host = MemoryHost::new();
    message(&host, ThinMessage::CreateThin { id: 1 });
    let device = activate(&host, UUID, 1);
    host.suspend_mapped(UUID).unwrap();
    let refused = refusal(&host, member(&host, &device, None));
    assert_eq!(refused, Some(Errno::EBUSY));
    assert!(is_suspended(&host));
    host.perform(&Effect::ResumeMapped { uuid: UUID }).unwrap();
    host.perform(&Effect::LoadTable {
        uuid: UUID,
        table: &table(1),
        read_only: false,
    })
    .unwrap();
    let refused = refusal(&host, member(&host, &device, None));
    assert_eq!(refused, Some(Errno::EBUSY));
    let listed = || host.mapped_devices(POOL, "SLACKWATER-").unwrap()[0].clone();
    assert!(listed().has_inactive_table);
    host.perform(&Effect::ClearTable { uuid: UUID }).unwrap();
    assert!(!listed().has_inactive_table);
    host.begin(vec![member(&host, &device, None)], LIMITS)
        .unwrap();
}

#[test]
fn a_suspended_pool_answers_again_once_it_is_resumed() {
    let host = MemoryHost::new();
    message(&host, ThinMessage::CreateThin { id: 1 });
    host.set_up_pool(POOL, |setup| setup.suspended = true);
    let create = ThinMessage::CreateThin { id: 2 };
    assert_eq!(message(&host, create), Some(Errno::EAGAIN));
    host.perform(&Effect::CreateMapped { uuid: UUID }).unwrap();
    let loaded = host.perform(&Effect::LoadTable {
        uuid: UUID,
        table: &table(1),
        read_only: false,
    });
    assert_eq!(loaded.unwrap_err().code(), Some(Errno::EAGAIN));
    host.set_up_pool(POOL, |setup| setup.suspended = false);
    assert_eq!(message(&host, create), None);
}
