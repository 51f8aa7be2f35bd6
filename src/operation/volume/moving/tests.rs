//! The fence of a move, on simulated machines with both kinds of pools.

use std::sync::Arc;

use super::*;
use crate::cut::CutInterfaces;
use crate::host::memory::{FaultMode, MemoryHost};
use crate::model::{GroupId, MutableParameters, Wipe};
use crate::operation::tests::{block, ext4, new_volume, pool, settings};
use crate::operation::{
    Attach, CreateGroup, Driver, ExpandVolume, ModifyVolume, NameLookup, PublishVolume,
    StageVolume, Validate,
};
use crate::record::ContentSource;
use crate::service::{Rpc, status};

const MOVE: Uuid = Uuid::from_u128(0x0b5e);
const OTHER: Uuid = Uuid::from_u128(0x07e4);
const LATE: Uuid = Uuid::from_u128(0x1a7e);
const STAGING: &str = "/var/lib/kubelet/staging";
const TARGET: &str = "/var/lib/kubelet/target";
const KINDS: [&str; 2] = ["default=memory:", "default=memory-thin:"];

fn start(host: &MemoryHost, kind: &str) -> Arc<Driver> {
    let settings = settings(&[pool(kind)]);
    Arc::new(Driver::start(settings, CutInterfaces::simulated(host.clone())).unwrap())
}

fn mounted(name: &str) -> CreateVolume {
    CreateVolume {
        capabilities: vec![ext4()],
        ..new_volume(name)
    }
}

fn stage(driver: &Driver, id: &str, how: crate::model::Capability) -> Result<()> {
    driver.volumes.stage_volume(&StageVolume {
        volume_id: id.into(),
        staging_path: STAGING.into(),
        capability: how,
    })
}

fn publish(driver: &Driver, id: &str, how: crate::model::Capability) -> Result<()> {
    driver.volumes.publish_volume(&PublishVolume {
        volume_id: id.into(),
        staging_path: STAGING.into(),
        target_path: TARGET.into(),
        capability: how,
        read_only: false,
    })
}

fn snapshot(name: &str, of: &str) -> CreateSnapshot {
    CreateSnapshot {
        name: name.into(),
        source_volume_id: of.into(),
        parameters: SnapshotParameters::default(),
        requisite: Vec::new(),
    }
}

/// The call is FAILED_PRECONDITION, and names the move.
#[track_caller]
fn is_refused<T: std::fmt::Debug>(rpc: Rpc, answer: Result<T>) {
    let error = answer.unwrap_err();
    let status = status::status(rpc, &error);
    assert_eq!(status.code(), tonic::Code::FailedPrecondition, "{error:?}");
    let message = status.message();
    assert!(message.contains(&MOVE.to_string()), "{message}");
}

fn calls_are_refused(driver: &Driver, id: &str, name: &str) {
    let volumes = &driver.volumes;
    is_refused(Rpc::NodeStageVolume, stage(driver, id, ext4()));
    is_refused(Rpc::NodePublishVolume, publish(driver, id, ext4()));
    let attach = Attach {
        volume_id: id.into(),
        node_id: "n".into(),
        capability: ext4(),
        read_only: false,
    };
    is_refused(Rpc::ControllerPublishVolume, volumes.attach_volume(&attach));
    let made = driver.snapshots.create_snapshot(&snapshot("s", id));
    is_refused(Rpc::CreateSnapshot, made);
    let other = volumes.create_volume(&mounted("other")).unwrap().id;
    let group = driver.snapshots.create_group(&CreateGroup {
        name: "g".into(),
        source_volume_ids: vec![other.to_string(), id.into()],
        parameters: SnapshotParameters::default(),
    });
    is_refused(Rpc::CreateVolumeGroupSnapshot, group);
    let clone = CreateVolume {
        content_source: Some(ContentSource::Volume(id.into())),
        ..mounted("clone")
    };
    is_refused(Rpc::CreateVolume, volumes.create_volume(&clone));
    let expanded = volumes.expand_volume(&ExpandVolume {
        volume_id: id.into(),
        capacity: CapacityRange::new(2 << 30, 0).unwrap(),
        capability: None,
    });
    is_refused(Rpc::ControllerExpandVolume, expanded);
    let modified = volumes.modify_volume(&ModifyVolume {
        volume_id: id.into(),
        mutable: MutableParameters {
            wipe: Some(Wipe::Discard),
        },
    });
    is_refused(Rpc::ControllerModifyVolume, modified);
    is_refused(Rpc::CreateVolume, volumes.create_volume(&mounted(name)));
    let found = driver.find_named(&NameLookup::Volume(None), name);
    is_refused(Rpc::CreateVolume, found);
    is_refused(Rpc::DeleteVolume, volumes.delete_volume(id));
    is_refused(Rpc::NodeStageVolume, volumes.check_volume(id, true));
    let another = volumes.fence_volume(id, OTHER);
    is_refused(Rpc::ControllerModifyVolume, another);
    // A move lifts only its own fence.
    volumes.lift_fence(id, LATE).unwrap();
    assert_eq!(volumes.move_status(id, &[]).unwrap().fenced, Some(MOVE));
    let foreign = volumes.snapshot_for_move(id, OTHER, Some(1));
    is_refused(Rpc::CreateSnapshot, foreign);
    assert!(volumes.delete_moved(id, OTHER).is_err());
    volumes.delete_volume(&other.to_string()).unwrap();
}

fn what_ends_a_use_works(driver: &Driver, id: &str) {
    let volumes = &driver.volumes;
    volumes.unpublish_volume(id, TARGET).unwrap();
    volumes.unstage_volume(id, STAGING).unwrap();
    assert_eq!(volumes.get_volume(id).unwrap().id.to_string(), id);
    let asked = Validate {
        volume_id: id.into(),
        capabilities: vec![Ok(ext4())],
        parameters: Some(VolumeParameters::default()),
        mutable: MutableParameters::default(),
    };
    assert_eq!(volumes.validate_volume(&asked).unwrap(), Ok(()));
    assert_eq!(volumes.volume_health(id).unwrap().findings, []);
}

#[test]
fn a_fenced_volume_is_kept_from_everything_but_its_move() {
    for kind in KINDS {
        let host = MemoryHost::new();
        let driver = start(&host, kind);
        let id = driver.volumes.create_volume(&mounted("db")).unwrap().id;
        let id = id.to_string();
        stage(&driver, &id, ext4()).unwrap();
        driver.volumes.unstage_volume(&id, STAGING).unwrap();
        driver.volumes.fence_volume(&id, MOVE).unwrap();
        driver.volumes.fence_volume(&id, MOVE).unwrap();
        calls_are_refused(&driver, &id, "db");
        what_ends_a_use_works(&driver, &id);
        drop(driver);
        // The fence survives the process and the machine.
        let host = host.restart_process().reboot(true);
        let driver = start(&host, kind);
        calls_are_refused(&driver, &id, "db");
        let found = driver.volumes.move_status(&id, &[]).unwrap();
        assert_eq!((found.fenced, found.user), (Some(MOVE), None));
        let fences = driver.describe().fences;
        assert_eq!(fences, [(id.parse().unwrap(), MOVE)]);
        driver.volumes.lift_fence(&id, MOVE).unwrap();
        assert_eq!(driver.describe().fences, []);
        driver.volumes.lift_fence(&id, MOVE).unwrap();
        stage(&driver, &id, ext4()).unwrap();
        driver.volumes.unstage_volume(&id, STAGING).unwrap();
        // Without a fence the move may not delete it, and it cannot fence it again.
        assert!(driver.volumes.delete_moved(&id, MOVE).is_err());
        assert!(driver.volumes.fence_volume(&id, MOVE).is_err());
        driver.volumes.fence_volume(&id, OTHER).unwrap();
        driver.volumes.delete_moved(&id, OTHER).unwrap();
        driver.volumes.delete_moved(&id, OTHER).unwrap();
        driver.volumes.lift_fence(&id, OTHER).unwrap();
        assert_eq!(host.violations(), [""; 0]);
    }
}

#[test]
fn a_volume_in_use_is_not_fenced() {
    for kind in KINDS {
        let host = MemoryHost::new();
        let driver = start(&host, kind);
        let volumes = &driver.volumes;
        for how in [ext4(), block()] {
            let asked = CreateVolume {
                capabilities: vec![how.clone()],
                ..new_volume(how.access_type.as_str())
            };
            let id = volumes.create_volume(&asked).unwrap().id.to_string();
            let refused = || {
                let error = volumes.fence_volume(&id, MOVE).unwrap_err();
                assert!(matches!(error, Error::InUse { .. }), "{error:?}");
                let found = volumes.move_status(&id, &[]).unwrap();
                assert!(found.user.is_some() && found.fenced.is_none(), "{found:?}");
            };
            stage(&driver, &id, how.clone()).unwrap();
            refused();
            publish(&driver, &id, how.clone()).unwrap();
            refused();
            volumes.unpublish_volume(&id, TARGET).unwrap();
            refused();
            volumes.unstage_volume(&id, STAGING).unwrap();
            assert_eq!(volumes.move_status(&id, &[]).unwrap().user, None);
            volumes.fence_volume(&id, MOVE).unwrap();
        }
        assert_eq!(host.violations(), [""; 0]);
    }
}

#[test]
fn the_last_snapshot_is_taken_under_the_fence_and_only_once() {
    for kind in KINDS {
        let host = MemoryHost::new();
        let driver = start(&host, kind);
        let volumes = &driver.volumes;
        let id = volumes.create_volume(&mounted("db")).unwrap().id;
        let id = id.to_string();
        let token = |n| {
            stage(&driver, &id, ext4()).unwrap();
            host.write_token(STAGING.as_ref(), n).unwrap();
            volumes.unstage_volume(&id, STAGING).unwrap();
        };
        token(1);
        let early = volumes.snapshot_for_move(&id, MOVE, Some(1)).unwrap().0;
        token(2);
        let refused = volumes.snapshot_for_move(&id, MOVE, None);
        assert!(refused.is_err(), "the volume is not fenced");
        volumes.fence_volume(&id, MOVE).unwrap();
        let (last, like) = volumes.snapshot_for_move(&id, MOVE, None).unwrap();
        assert_eq!(
            (like.capacity.required, like.capabilities),
            (1 << 30, vec![ext4()])
        );
        let again = volumes.snapshot_for_move(&id, MOVE, None).unwrap().0;
        assert_eq!((again.id, again.cut_at), (last.id, last.cut_at));
        let ids = [&early, &last].map(|one| one.id.to_string());
        let found = volumes.move_status(&id, &ids).unwrap().snapshots;
        let found: Vec<_> = found
            .iter()
            .map(|it| (it.id.clone(), it.is_ready))
            .collect();
        assert_eq!(found, ids.clone().map(|id| (id, true)));
        // Restored, it has what was written before the fence.
        let copy = CreateVolume {
            content_source: Some(ContentSource::Snapshot(ids[1].clone())),
            ..mounted("copy")
        };
        let copy = volumes.create_volume(&copy).unwrap().id.to_string();
        stage(&driver, &copy, ext4()).unwrap();
        assert_eq!(host.tokens(STAGING.as_ref()).unwrap(), [1, 2]);
        volumes.unstage_volume(&copy, STAGING).unwrap();
        // A second fence of the same move would copy what is in the first one's snapshot.
        volumes.lift_fence(&id, MOVE).unwrap();
        let refused = volumes.fence_volume(&id, MOVE).unwrap_err().to_string();
        assert!(refused.contains("for good"), "{refused}");
        // Nor is a snapshot taken that would be left.
        for round in [Some(2), None] {
            let refused = volumes.snapshot_for_move(&id, MOVE, round).unwrap_err();
            assert!(refused.to_string().contains("for good"), "{refused}");
        }
        volumes.fence_volume(&id, OTHER).unwrap();
        let other = volumes.snapshot_for_move(&id, OTHER, None).unwrap().0;
        volumes.lift_fence(&id, OTHER).unwrap();
        volumes.lift_fence(&id, MOVE).unwrap();
        let refused = volumes.fence_volume(&id, OTHER).unwrap_err().to_string();
        assert!(refused.contains("earlier fence"), "{refused}");
        let other = other.id.to_string();
        driver.snapshots.delete_snapshot(&other).unwrap();
        volumes.fence_volume(&id, OTHER).unwrap();
        assert_eq!(host.violations(), [""; 0]);
    }
}

#[test]
fn a_crash_at_any_effect_leaves_the_fence_as_it_was_or_as_it_should_be() {
    type Act = fn(&Driver, &str) -> Result<()>;
    let acts: [(&str, bool, Act); 3] = [
        ("fence", false, |driver, id| {
            driver.volumes.fence_volume(id, MOVE)
        }),
        ("lift", true, |driver, id| {
            driver.volumes.lift_fence(id, MOVE)
        }),
        ("snapshot", true, |driver, id| {
            driver.volumes.snapshot_for_move(id, MOVE, None).map(drop)
        }),
    ];
    for (kind, (name, fenced, act)) in KINDS
        .into_iter()
        .flat_map(|kind| acts.map(|act| (kind, act)))
    {
        let prepared = || {
            let host = MemoryHost::new();
            let driver = start(&host, kind);
            let id = driver.volumes.create_volume(&mounted("db")).unwrap().id;
            let id = id.to_string();
            if fenced {
                driver.volumes.fence_volume(&id, MOVE).unwrap();
            }
            (host, driver, id)
        };
        let (host, driver, id) = prepared();
        let before = host.effects();
        act(&driver, &id).unwrap();
        let effects = host.effects() - before;
        assert!(effects > 0, "{name}");
        for (n, mode) in (1..=effects)
            .flat_map(|n| [FaultMode::CrashBefore, FaultMode::CrashAfter].map(|mode| (n, mode)))
        {
            let (host, driver, id) = prepared();
            host.fail_effect(n, mode);
            assert!(act(&driver, &id).is_err(), "{name} {n}");
            drop(driver);
            let host = host.reboot(true);
            let driver = start(&host, kind);
            let found = driver.volumes.move_status(&id, &[]).unwrap();
            assert_eq!(found.state, MovingState::Ready, "{name} {n}");
            // The fence is whole: either everything is refused, or nothing.
            let staged = stage(&driver, &id, ext4());
            assert_eq!(staged.is_err(), found.fenced.is_some(), "{name} {n}");
            if staged.is_ok() {
                driver.volumes.unstage_volume(&id, STAGING).unwrap();
            }
            act(&driver, &id).unwrap();
            let found = driver.volumes.move_status(&id, &[]).unwrap();
            assert_eq!(found.fenced.is_some(), name != "lift", "{name} {n}");
            assert_eq!(host.violations(), [""; 0], "{name} {n}");
        }
    }
}

#[test]
fn an_id_that_belongs_to_no_pool_of_this_node_is_an_error_and_not_absent() {
    let host = MemoryHost::new();
    let driver = start(&host, KINDS[0]);
    let foreign = format!("{}.{}", Uuid::from_u128(1), GroupId(Uuid::from_u128(2)));
    let volumes = &driver.volumes;
    for answer in [
        volumes.move_status(&foreign, &[]).map(drop),
        volumes.lift_fence(&foreign, MOVE),
        volumes.delete_moved(&foreign, MOVE),
        volumes.fence_volume(&foreign, MOVE),
    ] {
        let error = answer.unwrap_err();
        assert!(matches!(error, Error::Unreachable { .. }), "{error:?}");
    }
}

#[test]
fn a_snapshot_is_another_one_after_it_was_deleted_and_taken_again() {
    for kind in KINDS {
        let host = MemoryHost::new();
        let driver = start(&host, kind);
        let volumes = &driver.volumes;
        let id = volumes
            .create_volume(&mounted("db"))
            .unwrap()
            .id
            .to_string();
        let identity = || {
            let made = volumes.snapshot_for_move(&id, MOVE, Some(1)).unwrap().0;
            let made = made.id.to_string();
            let found = volumes
                .move_status(&id, std::slice::from_ref(&made))
                .unwrap();
            (made, found.snapshots[0].identity)
        };
        let (snapshot, first) = identity();
        assert_eq!(identity(), (snapshot.clone(), first));
        driver.snapshots.delete_snapshot(&snapshot).unwrap();
        let (again, second) = identity();
        assert_eq!(again, snapshot);
        assert_ne!(first, second);
    }
}

#[test]
fn no_snapshot_is_taken_in_advance_where_it_would_be_a_full_copy() {
    let host = MemoryHost::new();
    let driver = start(&host, KINDS[0]);
    let volumes = &driver.volumes;
    let thick = CreateVolume {
        parameters: VolumeParameters {
            allocation: Allocation::Thick,
            ..VolumeParameters::default()
        },
        ..mounted("thick")
    };
    let id = volumes.create_volume(&thick).unwrap().id.to_string();
    let refused = volumes.snapshot_for_move(&id, MOVE, Some(1)).unwrap_err();
    assert!(refused.to_string().contains("full copy"), "{refused}");
    volumes.fence_volume(&id, MOVE).unwrap();
    volumes.snapshot_for_move(&id, MOVE, None).unwrap();
}
