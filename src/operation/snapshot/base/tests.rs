//! Hidden bases on both kinds of pools: what they are good for, and when they go.

use std::path::Path;

use super::*;
use crate::cut::CutInterfaces;
use crate::host::memory::MemoryHost;
use crate::model::id::NameKind;
use crate::model::size::{GIB, MIB};
use crate::model::{
    Allocation, CapacityRange, Members, SnapshotParameters, VolumeId, VolumeParameters,
};
use crate::operation::StageVolume;
use crate::operation::tests::{ext4, new_volume, pool, settings, volume};
use crate::operation::{
    CreateGroup, CreateSnapshot, CreateVolume, Driver, ExpandVolume, GetCapacity, GetMetadata,
    ListSnapshots,
};

const STAGING: &str = "/var/lib/kubelet/staging";
const KINDS: [&str; 2] = ["default=memory:", "default=memory-thin:"];

fn start(kind: &str) -> (MemoryHost, Driver) {
    let host = MemoryHost::new();
    let driver = start_on(&host, kind);
    (host, driver)
}

fn start_on(host: &MemoryHost, kind: &str) -> Driver {
    Driver::start(
        settings(&[pool(kind)]),
        CutInterfaces::simulated(host.clone()),
    )
    .unwrap()
}

fn keeping() -> SnapshotParameters {
    SnapshotParameters {
        keep_base: true,
        ..SnapshotParameters::default()
    }
}

fn snapshot(driver: &Driver, name: &str, of: VolumeId, parameters: SnapshotParameters) -> String {
    let request = CreateSnapshot {
        name: name.into(),
        source_volume_id: of.to_string(),
        parameters,
        requisite: Vec::new(),
    };
    let made = driver.snapshots.create_snapshot(&request);
    made.unwrap().id.to_string()
}

fn delta(driver: &Driver, base: &str, target: &str) -> Result<Vec<(u64, u64)>> {
    let page = driver.snapshots.snapshot_metadata(&GetMetadata {
        base_snapshot_id: Some(base.into()),
        snapshot_id: target.into(),
        starting_offset: 0,
        max_results: 100,
        of: None,
    });
    page.map(|page| page.ranges)
}

fn is_gone<T: std::fmt::Debug>(result: Result<T>) {
    assert!(matches!(result, Err(Error::NotFound { .. })), "{result:?}");
}

/// UUIDs of the bases in a pool.
fn bases(driver: &Driver) -> Vec<String> {
    let pool = driver.pools.serving().remove(0);
    let bases = pool.backend.snapshots.bases().into_iter();
    bases.map(|base| base.uuid.to_string()).collect()
}

fn is_base(driver: &Driver, id: &str) -> bool {
    bases(driver).iter().any(|uuid| id.ends_with(uuid))
}

fn delete(driver: &Driver, id: &str) {
    driver.snapshots.delete_snapshot(id).unwrap();
}

#[test]
fn a_deleted_snapshot_stays_the_base_of_its_volume_until_the_next_one_is_deleted() {
    for kind in KINDS {
        let (host, driver) = start(kind);
        let (of, other) = (volume(&driver, "a"), volume(&driver, "b"));
        let first = snapshot(&driver, "1", of, keeping());
        let beside = snapshot(&driver, "beside", other, keeping());
        let second = snapshot(&driver, "2", of, keeping());
        let before = delta(&driver, &first, &second).unwrap();
        delete(&driver, &first);
        delete(&driver, &beside);

        // No call shows it, and a repeat of its deletion changes nothing.
        is_gone(driver.snapshots.get_snapshot(&first));
        let listed = driver.snapshots.list_snapshots(&ListSnapshots::default());
        let listed = listed.unwrap().snapshots.into_iter();
        let listed: Vec<String> = listed.map(|one| one.id.to_string()).collect();
        assert_eq!(listed, [second.as_str()]);
        delete(&driver, &first);
        assert_eq!(delta(&driver, &first, &second).unwrap(), before);
        // It is a base, and nothing else.
        is_gone(delta(&driver, &second, &first));
        assert_eq!(driver.pool_status()[0].bases, 2);

        // A start keeps it.
        driver.leave();
        let host = host.restart_process();
        let driver = start_on(&host, kind);
        for pool in driver.served() {
            driver.clean(pool);
        }
        assert_eq!(delta(&driver, &first, &second).unwrap(), before, "{kind}");

        delete(&driver, &second);
        assert!(!is_base(&driver, &first) && is_base(&driver, &second));
        assert!(is_base(&driver, &beside), "of another volume");
        let third = snapshot(&driver, "3", of, keeping());
        is_gone(delta(&driver, &first, &third));
        delta(&driver, &second, &third).unwrap();

        // A new snapshot of the same name is another one, and the base is gone.
        assert_eq!(snapshot(&driver, "2", of, keeping()), second);
        assert!(!is_base(&driver, &second));
        driver.snapshots.get_snapshot(&second).unwrap();
        assert_eq!(driver.pools.locks_held(), 0);
    }
}

#[test]
fn a_base_is_deleted_with_its_volume_and_none_comes_after_it() {
    for kind in KINDS {
        let (_, driver) = start(kind);
        let of = volume(&driver, "a");
        let (first, last) = (
            snapshot(&driver, "1", of, keeping()),
            snapshot(&driver, "2", of, keeping()),
        );
        delete(&driver, &first);
        driver.volumes.delete_volume(&of.to_string()).unwrap();
        assert_eq!(bases(&driver), Vec::<String>::new());
        delete(&driver, &last);
        assert_eq!(bases(&driver), Vec::<String>::new());
        let pool = driver.pools.serving().remove(0);
        assert_eq!(pool.backend.space().unwrap().bases, 0, "{kind}");
    }
}

#[test]
fn a_snapshot_is_a_base_only_if_its_class_says_so_and_nothing_is_to_be_overwritten() {
    let (_, driver) = start(KINDS[0]);
    let of = volume(&driver, "a");
    let plain = snapshot(&driver, "1", of, SnapshotParameters::default());
    delete(&driver, &plain);
    assert_eq!(bases(&driver), Vec::<String>::new());

    let mut wiped = new_volume("wiped");
    wiped.parameters.wipe = Wipe::Zero;
    let wiped = driver.volumes.create_volume(&wiped).unwrap().id;
    delete(&driver, &snapshot(&driver, "2", wiped, keeping()));
    assert_eq!(bases(&driver), Vec::<String>::new());
}

#[test]
fn members_become_bases_however_they_are_deleted() {
    for members in [Members::Together, Members::Independent] {
        let (_, driver) = start(KINDS[1]);
        let sources = [volume(&driver, "a"), volume(&driver, "b")];
        let group = driver.snapshots.create_group(&CreateGroup {
            name: "g".into(),
            source_volume_ids: sources.iter().map(VolumeId::to_string).collect(),
            parameters: SnapshotParameters {
                members,
                ..keeping()
            },
        });
        let group = group.unwrap();
        let ids: Vec<String> = group
            .snapshots
            .iter()
            .map(|one| one.id.to_string())
            .collect();
        let named = crate::operation::NamedGroup {
            group_id: group.id.to_string(),
            snapshot_ids: ids.clone(),
        };
        match members {
            Members::Together => driver.snapshots.delete_group(&named).unwrap(),
            Members::Independent => ids.iter().for_each(|id| delete(&driver, id)),
        }
        assert_eq!(bases(&driver).len(), 2, "{members:?}");
        driver.snapshots.delete_group(&named).unwrap();
        is_gone(driver.snapshots.get_group(&named));
        assert_eq!(bases(&driver).len(), 2, "{members:?}");
        driver
            .snapshots
            .resolve_group_by(group.id, &Default::default())
            .unwrap();
        for (id, source) in ids.iter().zip(sources) {
            let next = snapshot(&driver, &format!("of {source}"), source, keeping());
            delta(&driver, id, &next).unwrap();
        }
    }
}

/// A volume that shares its blocks with its base, on a pool with little space. Returns the ID of the
/// base, and the size of a volume for which there is no space beside it.
fn scarce(host: &MemoryHost, driver: &Driver, kind: &str) -> (String, u64) {
    let mut request = of_size("a", 64 * MIB);
    let is_thin = kind == KINDS[1];
    match is_thin {
        true => request.parameters.allocation = Allocation::Thick,
        false => request.capabilities = vec![ext4()],
    }
    let of = driver.volumes.create_volume(&request).unwrap().id;
    if !is_thin {
        let staged = driver.volumes.stage_volume(&StageVolume {
            volume_id: of.to_string(),
            staging_path: STAGING.into(),
            capability: ext4(),
        });
        staged.unwrap();
        // A block each.
        for token in 0..1024 {
            host.write_unsynced(Path::new(STAGING), token).unwrap();
        }
    }
    let base = snapshot(driver, "1", of, keeping());
    delete(driver, &base);
    let (available, missing) = match is_thin {
        true => (16 * MIB, 8 * MIB),
        false => (72 * MIB, 2 * MIB),
    };
    host.leave_available(available);
    (base, missing)
}

fn of_size(name: &str, bytes: u64) -> CreateVolume {
    CreateVolume {
        capacity: CapacityRange::new(bytes as i64, 0).unwrap(),
        ..new_volume(name)
    }
}

#[test]
fn a_base_is_deleted_before_a_volume_is_refused_for_its_space() {
    for kind in KINDS {
        let (host, driver) = start(kind);
        let (base, bytes) = scarce(&host, &driver, kind);
        let offered = driver.pools.capacity(&GetCapacity {
            parameters: VolumeParameters::default(),
            capabilities: Vec::new(),
            topology: None,
        });
        let offered = offered.unwrap().available;
        assert!(
            offered >= bytes,
            "{kind}: a scheduler would not try: {offered}"
        );

        // Too large, whatever is deleted: the base stays.
        let refused = driver.volumes.create_volume(&of_size("huge", GIB));
        let is_refused = matches!(refused, Err(Error::OutOfSpace { .. }));
        assert!(is_refused, "{refused:?}");
        assert!(is_base(&driver, &base), "{kind}");

        let made = driver.volumes.create_volume(&of_size("b", bytes));
        made.unwrap_or_else(|error| panic!("{kind}: {error}"));
        assert_eq!(bases(&driver), Vec::<String>::new(), "{kind}");
        assert_eq!(driver.pools.locks_held(), 0);
    }
}

#[test]
fn a_base_is_deleted_before_a_growth_is_refused_for_its_space() {
    let (host, driver) = start(KINDS[1]);
    let (base, more) = scarce(&host, &driver, KINDS[1]);
    let grown = driver.volumes.expand_volume(&ExpandVolume {
        volume_id: volume_named(&driver, "a"),
        capacity: CapacityRange::new((64 * MIB + more) as i64, 0).unwrap(),
        capability: None,
    });
    grown.unwrap();
    assert!(!is_base(&driver, &base));
}

fn volume_named(driver: &Driver, name: &str) -> String {
    let pool = driver.pools.serving().remove(0);
    let uuid = VolumeId::of_name(pool.id(), NameKind::Volume, name).uuid;
    VolumeId {
        pool: pool.id(),
        uuid,
    }
    .to_string()
}

#[test]
fn a_base_is_deleted_when_the_space_that_is_kept_free_is_in_use() {
    for kind in KINDS {
        let (host, driver) = start(kind);
        let (base, _) = scarce(&host, &driver, kind);
        let clean = || {
            let pools = driver.served().into_iter();
            pools.for_each(|pool| driver.clean(pool));
        };
        clean();
        assert!(is_base(&driver, &base), "{kind}");
        host.leave_available(MIB);
        clean();
        assert!(!is_base(&driver, &base), "{kind}");
    }
}

#[test]
fn no_base_is_kept_on_a_full_pool() {
    let (host, driver) = start(KINDS[0]);
    let of = volume(&driver, "a");
    let one = snapshot(&driver, "1", of, keeping());
    host.leave_available(0);
    delete(&driver, &one);
    assert_eq!(bases(&driver), Vec::<String>::new());
    is_gone(driver.snapshots.get_snapshot(&one));
}
