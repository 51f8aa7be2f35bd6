//! Reverts of single volumes, on simulated machines with both kinds of pools.

use super::*;
use crate::cut::CutInterfaces;
use crate::host::memory::{FaultMode, MemoryHost};
use crate::model::{
    AccessType, Allocation, Capability, CapacityRange, FsType, MutableParameters,
    SnapshotParameters, VolumeParameters, Wipe,
};
use crate::operation::tests::{block, ext4, new_volume, pool, settings};
use crate::operation::{
    Attach, CreateSnapshot, CreateVolume, Driver, ExpandVolume, ModifyVolume, PublishVolume,
    StageVolume,
};
use crate::service::{Rpc, status};
use nix::errno::Errno;
use slackwater_testkit::Sweep;

const REVERT: Uuid = Uuid::from_u128(0x0b5e);
const OTHER: Uuid = Uuid::from_u128(0x07e4);
const STAGING: &str = "/var/lib/kubelet/staging";
const TARGET: &str = "/var/lib/kubelet/target";
const KINDS: [&str; 2] = ["default=memory:", "default=memory-thin:"];

fn start(host: &MemoryHost, kind: &str) -> Driver {
    let settings = settings(&[pool(kind)]);
    Driver::start(settings, CutInterfaces::simulated(host.clone())).unwrap()
}

fn mounted(fs: FsType) -> Capability {
    Capability {
        access_type: AccessType::Mount {
            fs_type: Some(fs),
            mount_flags: Vec::new(),
        },
        ..ext4()
    }
}

fn asked(name: &str, how: &Capability, parameters: VolumeParameters) -> CreateVolume {
    CreateVolume {
        capabilities: vec![how.clone()],
        parameters,
        ..new_volume(name)
    }
}

fn stage(driver: &Driver, id: &str, how: &Capability) -> Result<()> {
    driver.volumes.stage_volume(&StageVolume {
        volume_id: id.into(),
        staging_path: STAGING.into(),
        capability: how.clone(),
    })
}

fn publish(driver: &Driver, id: &str, how: &Capability) -> Result<()> {
    driver.volumes.publish_volume(&PublishVolume {
        volume_id: id.into(),
        staging_path: STAGING.into(),
        target_path: TARGET.into(),
        capability: how.clone(),
        read_only: false,
    })
}

fn unstage(driver: &Driver, id: &str) {
    driver.volumes.unpublish_volume(id, TARGET).unwrap();
    driver.volumes.unstage_volume(id, STAGING).unwrap();
}

/// Uses the volume: writes a token, and returns those that it has.
fn used(host: &MemoryHost, driver: &Driver, id: &str, how: &Capability, token: u64) -> Vec<u64> {
    stage(driver, id, how).unwrap();
    let found = match how.access_type {
        AccessType::Block => {
            publish(driver, id, how).unwrap();
            host.write_block_token(TARGET.as_ref(), token).unwrap();
            host.block_tokens(TARGET.as_ref()).unwrap()
        }
        AccessType::Mount { .. } => {
            host.write_token(STAGING.as_ref(), token).unwrap();
            host.tokens(STAGING.as_ref()).unwrap()
        }
    };
    unstage(driver, id);
    found
}

fn snapshot(driver: &Driver, name: &str, of: &str) -> String {
    let asked = CreateSnapshot {
        name: name.into(),
        source_volume_id: of.into(),
        parameters: SnapshotParameters::default(),
        requisite: Vec::new(),
    };
    let made = driver.snapshots.create_snapshot(&asked).unwrap();
    made.id.to_string()
}

/// A volume with the tokens 1 and 2, and the snapshot between them.
fn with_snapshot(
    host: &MemoryHost,
    driver: &Driver,
    how: &Capability,
    parameters: VolumeParameters,
) -> (String, String) {
    let made = driver.volumes.create_volume(&asked("db", how, parameters));
    let id = made.unwrap().id.to_string();
    used(host, driver, &id, how, 1);
    let old = snapshot(driver, "old", &id);
    used(host, driver, &id, how, 2);
    (id, old)
}

fn begin(id: &str, snapshot_id: &str, uid: Uuid, number: u64) -> BeginRevert {
    BeginRevert {
        volume_id: id.into(),
        uid,
        name: "shop/back".into(),
        snapshot_id: snapshot_id.into(),
        number,
        members: 1_u32.into(),
    }
}

/// All steps of a revert.
fn revert(driver: &Driver, id: &str, to: &str, uid: Uuid, number: u64) -> Result<()> {
    let volumes = &driver.volumes;
    volumes.begin_revert(&begin(id, to, uid, number))?;
    volumes.prepare_revert(id, uid)?;
    volumes.switch_revert(id, uid, 1_u32.into())?;
    volumes.end_revert(id, uid)
}

/// The records on the pool: of volumes in any state.
fn records(driver: &Driver) -> usize {
    let pools = driver.pools.serving();
    pools.iter().map(|it| it.backend.volumes.all().len()).sum()
}

#[test]
fn a_reverted_volume_has_the_content_of_its_snapshot_and_later_snapshots_survive() {
    let thick = VolumeParameters {
        allocation: Allocation::Thick,
        ..VolumeParameters::default()
    };
    let wiped = VolumeParameters {
        wipe: Wipe::Discard,
        ..VolumeParameters::default()
    };
    let plain = VolumeParameters::default();
    let hows = [
        mounted(FsType::Ext4),
        mounted(FsType::Xfs),
        mounted(FsType::Btrfs),
        block(),
    ];
    let parameters = [plain, thick, wiped];
    let mut each = Vec::new();
    for kind in KINDS {
        for how in &hows {
            each.extend(parameters.iter().map(|it| (kind, how, it)));
        }
    }
    for (kind, how, parameters) in each {
        let host = MemoryHost::new();
        let driver = start(&host, kind);
        let (id, old) = with_snapshot(&host, &driver, how, parameters.clone());
        // It grows after the snapshot, and stays as large.
        let larger = CapacityRange::new(2 << 30, 0).unwrap();
        let expanded = driver.volumes.expand_volume(&ExpandVolume {
            volume_id: id.clone(),
            capacity: larger,
            capability: None,
        });
        expanded.unwrap();
        used(&host, &driver, &id, how, 3);
        let newer = snapshot(&driver, "newer", &id);
        revert(&driver, &id, &old, REVERT, 0).unwrap();
        assert_eq!(used(&host, &driver, &id, how, 4), [1, 4], "{kind} {how:?}");
        let found = driver.volumes.get_volume(&id).unwrap();
        assert_eq!(found.size, 2 << 30);
        assert_eq!(driver.volumes.volume_health(&id).unwrap().findings, []);
        assert_eq!(records(&driver), 1, "{kind} {how:?}");
        // Forward again, after a start.
        drop(driver);
        let host = host.reboot(true);
        let driver = start(&host, kind);
        revert(&driver, &id, &newer, OTHER, 1).unwrap();
        assert_eq!(used(&host, &driver, &id, how, 5), [1, 2, 3, 5]);
        assert_eq!(host.violations(), [""; 0], "{kind} {how:?}");
        for one in [&old, &newer] {
            driver.snapshots.delete_snapshot(one).unwrap();
        }
        driver.volumes.delete_volume(&id).unwrap();
        assert_eq!(records(&driver), 0);
    }
}

#[test]
fn a_volume_whose_snapshot_is_older_than_its_file_system_is_formatted_again() {
    for kind in KINDS {
        let host = MemoryHost::new();
        let driver = start(&host, kind);
        let made = asked("db", &ext4(), VolumeParameters::default());
        let id = driver.volumes.create_volume(&made).unwrap().id.to_string();
        let blank = snapshot(&driver, "blank", &id);
        used(&host, &driver, &id, &ext4(), 1);
        revert(&driver, &id, &blank, REVERT, 0).unwrap();
        assert_eq!(used(&host, &driver, &id, &ext4(), 2), [2]);
        assert_eq!(host.violations(), [""; 0]);
    }
}

/// The call is ABORTED, and names the revert.
#[track_caller]
fn is_aborted<T: std::fmt::Debug>(rpc: Rpc, answer: Result<T>) {
    let error = answer.unwrap_err();
    let status = status::status(rpc, &error);
    assert_eq!(status.code(), tonic::Code::Aborted, "{error:?}");
    let message = status.message();
    let names = message.contains("shop/back") && message.contains(&REVERT.to_string());
    assert!(names, "{message}");
}

fn calls_are_aborted(driver: &Driver, id: &str, to: &str, is_switched: bool) {
    let volumes = &driver.volumes;
    is_aborted(Rpc::NodeStageVolume, stage(driver, id, &ext4()));
    is_aborted(Rpc::NodePublishVolume, publish(driver, id, &ext4()));
    let attach = Attach {
        volume_id: id.into(),
        node_id: "n".into(),
        capability: ext4(),
        read_only: false,
    };
    is_aborted(Rpc::ControllerPublishVolume, volumes.attach_volume(&attach));
    let expanded = volumes.expand_volume(&ExpandVolume {
        volume_id: id.into(),
        capacity: CapacityRange::new(4 << 30, 0).unwrap(),
        capability: None,
    });
    is_aborted(Rpc::ControllerExpandVolume, expanded);
    let made = CreateSnapshot {
        name: "s".into(),
        source_volume_id: id.into(),
        parameters: SnapshotParameters::default(),
        requisite: Vec::new(),
    };
    let made = driver.snapshots.create_snapshot(&made);
    match is_switched {
        true => is_aborted(Rpc::CreateSnapshot, made),
        // Its content can still be kept.
        false => {
            let made = made.unwrap().id.to_string();
            driver.snapshots.delete_snapshot(&made).unwrap();
        }
    }
    let clone = CreateVolume {
        content_source: Some(ContentSource::Volume(id.into())),
        ..asked("clone", &ext4(), VolumeParameters::default())
    };
    if is_switched {
        is_aborted(Rpc::CreateVolume, volumes.create_volume(&clone));
    }
    let modified = volumes.modify_volume(&ModifyVolume {
        volume_id: id.into(),
        mutable: MutableParameters {
            wipe: Some(Wipe::Discard),
        },
    });
    is_aborted(Rpc::ControllerModifyVolume, modified);
    is_aborted(Rpc::DeleteVolume, volumes.delete_volume(id));
    is_aborted(Rpc::ControllerModifyVolume, volumes.fence_volume(id, OTHER));
    let second = volumes.begin_revert(&begin(id, to, OTHER, 0));
    is_aborted(Rpc::ControllerModifyVolume, second);
}

#[test]
fn from_its_beginning_to_its_end_a_revert_keeps_everything_else_from_its_volume() {
    for kind in KINDS {
        let host = MemoryHost::new();
        let driver = start(&host, kind);
        let (id, old) = with_snapshot(&host, &driver, &ext4(), VolumeParameters::default());
        let volumes = &driver.volumes;
        volumes.begin_revert(&begin(&id, &old, REVERT, 0)).unwrap();
        calls_are_aborted(&driver, &id, &old, false);
        volumes.prepare_revert(&id, REVERT).unwrap();
        calls_are_aborted(&driver, &id, &old, false);
        let spare = volumes.revert_status(&id, &old).unwrap();
        assert!(spare.is_prepared && !spare.is_switched, "{spare:?}");
        volumes.switch_revert(&id, REVERT, 1_u32.into()).unwrap();
        calls_are_aborted(&driver, &id, &old, true);
        // What ends a use works, and the fence survives the process and the machine.
        unstage(&driver, &id);
        drop(driver);
        let host = host.restart_process().reboot(true);
        let driver = start(&host, kind);
        calls_are_aborted(&driver, &id, &old, true);
        let fences = driver.describe().revert_fences;
        let fence = RevertFence {
            volume: id.parse().unwrap(),
            uid: REVERT,
            number: 0,
            members: 1_u32.into(),
            is_switched: true,
        };
        assert_eq!(fences, [fence]);
        driver.volumes.end_revert(&id, REVERT).unwrap();
        assert_eq!(driver.describe().revert_fences, []);
        assert_eq!(used(&host, &driver, &id, &ext4(), 9), [1, 9]);
    }
}

#[test]
fn a_volume_in_use_and_a_foreign_snapshot_are_refused() {
    for kind in KINDS {
        let host = MemoryHost::new();
        let driver = start(&host, kind);
        let volumes = &driver.volumes;
        for how in [ext4(), block()] {
            let name = how.access_type.as_str();
            let made = asked(name, &how, VolumeParameters::default());
            let id = volumes.create_volume(&made).unwrap().id.to_string();
            let old = snapshot(&driver, name, &id);
            let refused = || {
                let begun = volumes.begin_revert(&begin(&id, &old, REVERT, 0));
                assert!(matches!(begun, Err(Error::InUse { .. })), "{begun:?}");
                let found = volumes.revert_status(&id, &old).unwrap();
                assert!(found.user.is_some() && found.fenced.is_none(), "{found:?}");
            };
            stage(&driver, &id, &how).unwrap();
            refused();
            publish(&driver, &id, &how).unwrap();
            refused();
            volumes.unpublish_volume(&id, TARGET).unwrap();
            refused();
            volumes.unstage_volume(&id, STAGING).unwrap();
            assert_eq!(volumes.revert_status(&id, &old).unwrap().user, None);
        }
        let other = asked("other", &ext4(), VolumeParameters::default());
        let other = volumes.create_volume(&other).unwrap().id.to_string();
        let its = snapshot(&driver, "its", &other);
        let (id, old) = with_snapshot(&host, &driver, &ext4(), VolumeParameters::default());
        let refused = volumes.begin_revert(&begin(&id, &its, REVERT, 0));
        let refused = refused.unwrap_err().to_string();
        assert!(refused.contains("another volume"), "{refused}");
        assert!(volumes.revert_status(&id, &its).unwrap().unfit.is_some());
        // A volume of the same name that was created later is another one.
        volumes.delete_volume(&id).unwrap();
        let again = asked("db", &ext4(), VolumeParameters::default());
        volumes.create_volume(&again).unwrap();
        assert!(volumes.begin_revert(&begin(&id, &old, REVERT, 0)).is_err());
        let gone = volumes.begin_revert(&begin(&other, &old.replace('a', "b"), REVERT, 0));
        assert!(gone.is_err());
        // The fence of a move counts.
        volumes.fence_volume(&other, OTHER).unwrap();
        let moved = volumes.begin_revert(&begin(&other, &its, REVERT, 0));
        assert!(matches!(moved, Err(Error::Refused { .. })), "{moved:?}");
        assert_eq!(host.violations(), [""; 0]);
    }
}

#[test]
fn a_snapshot_that_goes_before_its_content_is_copied_leaves_the_volume_as_it_was() {
    for kind in KINDS {
        let host = MemoryHost::new();
        let driver = start(&host, kind);
        let volumes = &driver.volumes;
        let (id, old) = with_snapshot(&host, &driver, &ext4(), VolumeParameters::default());
        volumes.begin_revert(&begin(&id, &old, REVERT, 0)).unwrap();
        driver.snapshots.delete_snapshot(&old).unwrap();
        assert!(volumes.prepare_revert(&id, REVERT).is_err());
        volumes.abort_revert(&id, REVERT, 0).unwrap();
        // One that was created again under its name is another one.
        let again = snapshot(&driver, "old", &id);
        assert_eq!(again, old);
        volumes.begin_revert(&begin(&id, &old, OTHER, 1)).unwrap();
        driver.snapshots.delete_snapshot(&old).unwrap();
        assert_eq!(snapshot(&driver, "old", &id), old);
        let refused = volumes.prepare_revert(&id, OTHER).unwrap_err();
        assert!(refused.to_string().contains("created again"), "{refused}");
        volumes.abort_revert(&id, OTHER, 1).unwrap();
        assert_eq!(used(&host, &driver, &id, &ext4(), 3), [1, 2, 3]);
        // Once it is copied, the snapshot is not needed any more.
        let last = snapshot(&driver, "last", &id);
        used(&host, &driver, &id, &ext4(), 4);
        let third = Uuid::from_u128(3);
        volumes.begin_revert(&begin(&id, &last, third, 2)).unwrap();
        volumes.prepare_revert(&id, third).unwrap();
        driver.snapshots.delete_snapshot(&last).unwrap();
        volumes.switch_revert(&id, third, 1_u32.into()).unwrap();
        volumes.end_revert(&id, third).unwrap();
        assert_eq!(used(&host, &driver, &id, &ext4(), 5), [1, 2, 3, 5]);
        assert_eq!(records(&driver), 1);
    }
}

#[test]
fn a_request_of_a_revert_that_has_ended_has_no_effect() {
    for kind in KINDS {
        let host = MemoryHost::new();
        let driver = start(&host, kind);
        let volumes = &driver.volumes;
        let (id, old) = with_snapshot(&host, &driver, &ext4(), VolumeParameters::default());
        revert(&driver, &id, &old, REVERT, 0).unwrap();
        used(&host, &driver, &id, &ext4(), 3);
        // Its repeats answer the same, and do nothing.
        revert(&driver, &id, &old, REVERT, 0).unwrap();
        assert!(volumes.abort_revert(&id, REVERT, 0).is_err(), "it is done");
        let newer = snapshot(&driver, "newer", &id);
        used(&host, &driver, &id, &ext4(), 4);
        // An abort before the beginning ends it for good.
        volumes.abort_revert(&id, OTHER, 1).unwrap();
        volumes.abort_revert(&id, OTHER, 1).unwrap();
        assert!(volumes.begin_revert(&begin(&id, &old, OTHER, 1)).is_err());
        // So does the end of another one.
        let third = Uuid::from_u128(3);
        revert(&driver, &id, &newer, third, 2).unwrap();
        for late in [REVERT, OTHER] {
            for number in 0..3 {
                let begun = volumes.begin_revert(&begin(&id, &old, late, number));
                assert!(begun.is_err(), "{late} {number}");
            }
            assert!(volumes.prepare_revert(&id, late).is_err());
            assert!(volumes.switch_revert(&id, late, 1_u32.into()).is_err());
            assert!(volumes.end_revert(&id, late).is_err());
            volumes.abort_revert(&id, late, 1).unwrap();
        }
        assert_eq!(used(&host, &driver, &id, &ext4(), 5), [1, 3, 5]);
        assert_eq!(volumes.revert_status(&id, &old).unwrap().number, 3);
    }
}

#[test]
fn an_abort_leaves_the_volume_as_it_was_at_every_step_before_the_switch() {
    for (kind, steps) in KINDS.into_iter().flat_map(|kind| [(kind, 1), (kind, 2)]) {
        let host = MemoryHost::new();
        let driver = start(&host, kind);
        let volumes = &driver.volumes;
        let (id, old) = with_snapshot(&host, &driver, &ext4(), VolumeParameters::default());
        volumes.begin_revert(&begin(&id, &old, REVERT, 0)).unwrap();
        assert!(
            volumes.switch_revert(&id, REVERT, 1_u32.into()).is_err(),
            "unprepared"
        );
        if steps == 2 {
            volumes.prepare_revert(&id, REVERT).unwrap();
            assert!(volumes.end_revert(&id, REVERT).is_err(), "not switched");
        }
        volumes.abort_revert(&id, REVERT, 0).unwrap();
        assert_eq!(used(&host, &driver, &id, &ext4(), 3), [1, 2, 3]);
        assert_eq!(records(&driver), 1);
        assert!(volumes.prepare_revert(&id, REVERT).is_err());
        assert!(volumes.switch_revert(&id, REVERT, 1_u32.into()).is_err());
        // After the switch there is no way back.
        volumes.begin_revert(&begin(&id, &old, OTHER, 1)).unwrap();
        volumes.prepare_revert(&id, OTHER).unwrap();
        volumes.switch_revert(&id, OTHER, 1_u32.into()).unwrap();
        assert!(volumes.abort_revert(&id, OTHER, 1).is_err());
        volumes.end_revert(&id, OTHER).unwrap();
        assert_eq!(used(&host, &driver, &id, &ext4(), 4), [1, 4]);
    }
}

type Act = fn(&Driver, &str, &str) -> Result<()>;

const STEPS: [(&str, Act); 4] = [
    ("begin", |driver, id, to| {
        driver.volumes.begin_revert(&begin(id, to, REVERT, 0))
    }),
    ("prepare", |driver, id, _| {
        driver.volumes.prepare_revert(id, REVERT)
    }),
    ("switch", |driver, id, _| {
        driver.volumes.switch_revert(id, REVERT, 1_u32.into())
    }),
    ("end", |driver, id, _| driver.volumes.end_revert(id, REVERT)),
];

/// A fault at each effect of each step, then a start with or without a loss of power, and then the
/// rest of the revert, or its abort.
#[test]
fn a_fault_at_any_effect_leaves_the_old_content_or_the_new_one() {
    let modes = [
        FaultMode::CrashBefore,
        FaultMode::CrashAfter,
        FaultMode::Before(Errno::EIO),
        FaultMode::After(Errno::EIO),
        FaultMode::Before(Errno::ENOSPC),
    ];
    let steps = |kind| (0..STEPS.len()).map(move |at| (kind, at));
    for (kind, at) in KINDS.into_iter().flat_map(steps) {
        let prepared = || {
            let host = MemoryHost::new();
            let driver = start(&host, kind);
            let (id, old) = with_snapshot(&host, &driver, &ext4(), VolumeParameters::default());
            for (_, step) in &STEPS[..at] {
                step(&driver, &id, &old).unwrap();
            }
            (host, driver, id, old)
        };
        let (name, act) = STEPS[at];
        let (host, driver, id, old) = prepared();
        let before = host.effects();
        act(&driver, &id, &old).unwrap();
        let effects = host.effects() - before;
        assert!(effects > 0, "{name}");
        let each = (1..=effects).flat_map(|n| modes.map(|mode| (n, mode)));
        let each = each.flat_map(|one| [(one, false), (one, true)]);
        for ((n, mode), is_lost) in Sweep::requested().part(each) {
            for is_aborted in [false, true] {
                let case = format!("{kind} {name} {n} {mode:?} {is_lost} {is_aborted}");
                let (host, driver, id, old) = prepared();
                host.fail_effect(n, mode);
                // The fault may hit what is repeated later.
                let _ = act(&driver, &id, &old);
                host.clear_faults();
                drop(driver);
                let host = host.restart_process();
                let host = if is_lost { host.reboot(true) } else { host };
                let driver = start(&host, kind);
                let served = driver.served();
                served.iter().for_each(|pool| driver.clean(*pool));
                let volumes = &driver.volumes;
                let found = volumes.revert_status(&id, &old).unwrap();
                assert!(found.exists, "{case}");
                if found.is_switched {
                    // The start and the cleanup have completed it.
                    let health = volumes.volume_health(&id).unwrap();
                    assert_eq!(health.findings, [], "{case}");
                    assert_eq!(records(&driver), 1, "{case}");
                }
                let is_done = found.is_switched || found.ended == Some((REVERT, true));
                let aborted = is_aborted && volumes.abort_revert(&id, REVERT, 0).is_ok();
                assert_eq!(aborted, is_aborted && !is_done, "{case}");
                if !aborted {
                    revert(&driver, &id, &old, REVERT, 0).unwrap_or_else(|error| {
                        panic!("{case}: {}", chain(&error));
                    });
                }
                let tokens = used(&host, &driver, &id, &ext4(), 7);
                let expected: &[u64] = if aborted { &[1, 2, 7] } else { &[1, 7] };
                assert_eq!(tokens, expected, "{case}");
                assert_eq!(records(&driver), 1, "{case}");
                assert_eq!(host.violations(), [""; 0], "{case}");
                volumes.delete_volume(&id).unwrap();
                driver.snapshots.delete_snapshot(&old).unwrap();
            }
        }
    }
}

#[test]
fn a_spare_that_no_volume_names_is_deleted() {
    for kind in KINDS {
        let host = MemoryHost::new();
        let driver = start(&host, kind);
        let (id, old) = with_snapshot(&host, &driver, &ext4(), VolumeParameters::default());
        let volumes = &driver.volumes;
        volumes.begin_revert(&begin(&id, &old, REVERT, 0)).unwrap();
        volumes.prepare_revert(&id, REVERT).unwrap();
        let clean = || driver.served().iter().for_each(|pool| driver.clean(*pool));
        clean();
        assert_eq!(records(&driver), 2, "it is needed");
        let (pool, _, record) = driver.pools.get_volume_even_if_fenced(&id).unwrap();
        let unnamed = VolumeRecord {
            reverting: None,
            ..record
        };
        pool.backend.update(&unnamed).unwrap();
        clean();
        assert_eq!(records(&driver), 1);
        assert_eq!(used(&host, &driver, &id, &ext4(), 3), [1, 2, 3]);
    }
}

#[test]
fn a_volume_is_not_switched_for_another_group_than_it_was_fenced_for() {
    let host = MemoryHost::new();
    let driver = start(&host, KINDS[0]);
    let (id, old) = with_snapshot(&host, &driver, &ext4(), VolumeParameters::default());
    let volumes = &driver.volumes;
    let of_three = BeginRevert {
        members: 3_u32.into(),
        ..begin(&id, &old, REVERT, 0)
    };
    volumes.begin_revert(&of_three).unwrap();
    volumes.prepare_revert(&id, REVERT).unwrap();
    let refused = volumes
        .switch_revert(&id, REVERT, 2_u32.into())
        .unwrap_err();
    assert!(refused.to_string().contains("of 3 volumes"), "{refused}");
    assert!(!volumes.revert_status(&id, &old).unwrap().is_switched);
    volumes.switch_revert(&id, REVERT, 3_u32.into()).unwrap();
    volumes.end_revert(&id, REVERT).unwrap();
    // Of a router that does not name it.
    let unnamed = BeginRevert {
        members: 0_u32.into(),
        ..begin(&id, &old, OTHER, 1)
    };
    volumes.begin_revert(&unnamed).unwrap();
    volumes.prepare_revert(&id, OTHER).unwrap();
    volumes.switch_revert(&id, OTHER, 2_u32.into()).unwrap();
}

#[test]
fn a_volume_is_not_switched_if_another_member_was_replaced() {
    let host = MemoryHost::new();
    let driver = start(&host, KINDS[0]);
    let (id, old) = with_snapshot(&host, &driver, &ext4(), VolumeParameters::default());
    let volumes = &driver.volumes;
    let of = |other: &'static str| Members::of([id.as_str(), other].into_iter());
    assert_eq!(of("b"), Members::of(["b", id.as_str(), "b"].into_iter()));
    let fenced = |members| BeginRevert {
        members,
        ..begin(&id, &old, REVERT, 0)
    };
    volumes.begin_revert(&fenced(of("b"))).unwrap();
    volumes.begin_revert(&fenced(of("b"))).unwrap();
    let refused = volumes.begin_revert(&fenced(of("c"))).unwrap_err();
    assert!(
        refused.to_string().contains("of other volumes"),
        "{refused}"
    );
    volumes.prepare_revert(&id, REVERT).unwrap();
    let refused = volumes.switch_revert(&id, REVERT, of("c")).unwrap_err();
    assert!(
        refused.to_string().contains("of other volumes"),
        "{refused}"
    );
    assert!(!volumes.revert_status(&id, &old).unwrap().is_switched);
    // It survives the process and the machine, and is in the report.
    drop(driver);
    let driver = start(&host.restart_process().reboot(true), KINDS[0]);
    let fences = driver.describe().revert_fences;
    assert_eq!(fences[0].members, of("b"));
    assert!(driver.volumes.switch_revert(&id, REVERT, of("c")).is_err());
    driver.volumes.switch_revert(&id, REVERT, of("b")).unwrap();
    // A router of an earlier release names the number alone.
    driver
        .volumes
        .switch_revert(&id, REVERT, 2_u32.into())
        .unwrap();
}

#[test]
fn a_wipe_that_fails_or_takes_long_keeps_no_volume_fenced() {
    // Thin pools know no wipe with zeros; freeing their devices fails.
    let fails = ["zero", "delete"];
    for (kind, is_held) in KINDS
        .into_iter()
        .flat_map(|kind| [(kind, false), (kind, true)])
    {
        let host = MemoryHost::new();
        let driver = start(&host, kind);
        let wiped = VolumeParameters {
            wipe: if kind == KINDS[0] {
                Wipe::Zero
            } else {
                Wipe::None
            },
            ..VolumeParameters::default()
        };
        let (id, old) = with_snapshot(&host, &driver, &ext4(), wiped);
        let volumes = &driver.volumes;
        volumes.begin_revert(&begin(&id, &old, REVERT, 0)).unwrap();
        volumes.prepare_revert(&id, REVERT).unwrap();
        let (pool, _, record) = driver.pools.get_volume_even_if_fenced(&id).unwrap();
        let spare = record.reverting.unwrap().spare;
        let its = Key::Volume(spare);
        // As while the cleanup wipes what an earlier attempt has left.
        let held = is_held.then(|| driver.pools.locks.acquire(its).unwrap());
        for name in fails {
            host.fail_always(name, Some(Errno::EIO));
        }
        let case = format!("{kind} {is_held}");
        let aborted = volumes.abort_revert(&id, REVERT, 0);
        aborted.unwrap_or_else(|error| panic!("{case}: {}", chain(&error)));
        let open = volumes.revert_status(&id, &old).unwrap();
        assert_eq!(open.ended, Some((REVERT, false)), "{case}");
        assert_eq!(records(&driver), 1, "{case}");
        assert_eq!(used(&host, &driver, &id, &ext4(), 3), [1, 2, 3], "{case}");
        // The other members of a group wait for a switch.
        volumes.begin_revert(&begin(&id, &old, OTHER, 1)).unwrap();
        volumes.prepare_revert(&id, OTHER).unwrap();
        volumes.switch_revert(&id, OTHER, 1_u32.into()).unwrap();
        volumes.end_revert(&id, OTHER).unwrap();
        let trash = pool.backend.folder.path.join("trash");
        let left = || driver.host.list_dir(&trash).unwrap().unwrap().len();
        assert_eq!(left(), 2, "{case}: what is not wiped must not be freed");
        for name in fails {
            host.fail_always(name, None);
        }
        drop(held);
        driver.clean(pool.id());
        driver.wipe(pool.id());
        assert_eq!(left(), 0, "{case}");
        assert_eq!(used(&host, &driver, &id, &ext4(), 4), [1, 4], "{case}");
        assert_eq!(host.violations(), [""; 0], "{case}");
    }
}

#[test]
fn an_abort_stops_the_writing_of_a_thick_volume_of_a_thin_pool() {
    let thick = VolumeParameters {
        allocation: Allocation::Thick,
        ..VolumeParameters::default()
    };
    let host = MemoryHost::new();
    let driver = start(&host, KINDS[1]);
    let (id, old) = with_snapshot(&host, &driver, &ext4(), thick);
    let volumes = &driver.volumes;
    volumes.begin_revert(&begin(&id, &old, REVERT, 0)).unwrap();
    let (pool, ..) = driver.pools.get_volume_even_if_fenced(&id).unwrap();
    let hung = host.hang_disk(&pool.backend.folder.path).unwrap();
    std::thread::scope(|scope| {
        let preparing = scope.spawn(|| volumes.prepare_revert(&id, REVERT));
        let start = std::time::Instant::now();
        let is_registered = || !driver.snapshots.copies().is_empty();
        while !is_registered() && start.elapsed().as_secs() < 60 {
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        let aborted = is_registered().then(|| volumes.abort_revert(&id, REVERT, 0));
        drop(hung);
        let prepared = preparing.join().unwrap();
        let aborted = aborted.expect("the writing is not registered");
        assert!(matches!(aborted, Err(Error::Pending { .. })), "{aborted:?}");
        let stopped = prepared.unwrap_err().to_string();
        assert!(stopped.contains("not wanted any more"), "{stopped}");
    });
    volumes.abort_revert(&id, REVERT, 0).unwrap();
    assert_eq!(records(&driver), 1);
    assert_eq!(used(&host, &driver, &id, &ext4(), 3), [1, 2, 3]);
}

#[test]
fn the_former_image_is_in_the_trash_until_it_is_wiped() {
    let host = MemoryHost::new();
    let driver = start(&host, KINDS[0]);
    let (id, old) = with_snapshot(&host, &driver, &ext4(), VolumeParameters::default());
    let volumes = &driver.volumes;
    volumes.begin_revert(&begin(&id, &old, REVERT, 0)).unwrap();
    volumes.prepare_revert(&id, REVERT).unwrap();
    let (pool, id, record) = driver.pools.get_volume_even_if_fenced(&id).unwrap();
    let whole = pool.backend.find_whole_spare(&record).unwrap().unwrap();
    pool.backend.switch(&record, &whole).unwrap();
    pool.backend.end_switch(id.uuid).unwrap();
    let trash = || {
        let files = host.files_below(&pool.backend.folder.path);
        let images = files.into_iter().filter(|it| it.ends_with("data.img"));
        images.filter(|it| it.starts_with("trash/")).count()
    };
    assert_eq!(trash(), 1);
    driver.clean(pool.id());
    assert_eq!(trash(), 0);
}

#[test]
fn no_space_for_the_new_image_is_refused_before_anything_is_created() {
    let host = MemoryHost::new();
    let driver = start(&host, KINDS[0]);
    let thick = VolumeParameters {
        allocation: Allocation::Thick,
        ..VolumeParameters::default()
    };
    let (id, old) = with_snapshot(&host, &driver, &ext4(), thick);
    let volumes = &driver.volumes;
    volumes.begin_revert(&begin(&id, &old, REVERT, 0)).unwrap();
    host.leave_available(1 << 29);
    let refused = volumes.prepare_revert(&id, REVERT).unwrap_err();
    assert!(
        matches!(refused, Error::OutOfSpace { .. }),
        "{}",
        chain(&refused)
    );
    assert_eq!(records(&driver), 1);
    volumes.abort_revert(&id, REVERT, 0).unwrap();
    assert_eq!(used(&host, &driver, &id, &ext4(), 3), [1, 2, 3]);
}
