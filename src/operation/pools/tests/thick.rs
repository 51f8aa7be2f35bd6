//! Thick volumes on a pool of LVM.

use super::*;
use crate::model::size::{GIB, GRAIN};
use crate::model::{Allocation, CapacityRange, SnapshotParameters};
use crate::operation::tests::copy_for;
use crate::operation::{CreateGroup, CreateSnapshot, ExpandVolume, NamedGroup};
use crate::record::ContentSource;

fn thick(name: &str, bytes: u64) -> CreateVolume {
    let mut request = new_volume(name);
    request.parameters.allocation = Allocation::Thick;
    request.capacity = CapacityRange::new(bytes.try_into().unwrap(), 0).unwrap();
    request
}

fn snapshot(of: &str) -> CreateSnapshot {
    CreateSnapshot {
        name: "s".into(),
        source_volume_id: of.into(),
        parameters: SnapshotParameters::default(),
        requisite: Vec::new(),
    }
}

fn capacity(driver: &Driver, allocation: Allocation) -> u64 {
    let mut ask = GetCapacity {
        capabilities: Vec::new(),
        parameters: new_volume("b").parameters,
        topology: None,
    };
    ask.parameters.allocation = allocation;
    driver.pools.capacity(&ask).unwrap().available
}

fn guaranteeing_sizes(host: &MemoryHost) -> Driver {
    start_with(
        host,
        &[pool("default=lvm:vg/pool,init,rawBlock=unfiltered")],
    )
    .unwrap()
}

#[test]
fn the_capacity_for_thick_volumes_is_what_one_can_have() {
    let host = MemoryHost::new();
    let driver = guaranteeing_sizes(&host);
    let bytes = capacity(&driver, Allocation::Thick);
    assert!(bytes > GIB, "{bytes}");
    let refused = driver.volumes.create_volume(&thick("a", bytes + GRAIN));
    assert!(
        matches!(refused, Err(Error::OutOfSpace { .. })),
        "{refused:?}"
    );
    driver.volumes.create_volume(&thick("a", bytes)).unwrap();
    assert_eq!(capacity(&driver, Allocation::Thick), 0);
    assert_eq!(capacity(&driver, Allocation::Thin), 0);
    assert_eq!(host.violations(), Vec::<String>::new());
}

#[test]
fn a_snapshot_of_a_thick_volume_keeps_room_for_a_whole_copy() {
    let host = MemoryHost::new();
    let driver = guaranteeing_sizes(&host);
    let before = capacity(&driver, Allocation::Thin);
    let made = driver.volumes.create_volume(&thick("a", GIB)).unwrap();
    assert_eq!(before - capacity(&driver, Allocation::Thin), GIB);
    let id = made.id.to_string();
    let made = driver.snapshots.create_snapshot(&snapshot(&id)).unwrap();
    assert_eq!(before - capacity(&driver, Allocation::Thin), 2 * GIB);

    let mut copy = thick("b", GIB);
    copy.content_source = Some(ContentSource::Snapshot(made.id.to_string()));
    let copied = driver.volumes.create_volume(&copy).unwrap();
    assert_eq!(host.thin_devices(NAME).unwrap()[&5], GIB);
    assert_eq!(before - capacity(&driver, Allocation::Thin), 3 * GIB);
    let source = copied.id.to_string();
    copy.name = "c".into();
    copy.capacity = CapacityRange::new((2 * GIB).try_into().unwrap(), 0).unwrap();
    copy.content_source = Some(ContentSource::Volume(source));
    driver.volumes.create_volume(&copy).unwrap();
    assert_eq!(host.thin_devices(NAME).unwrap()[&6], 2 * GIB);
    assert_eq!(before - capacity(&driver, Allocation::Thin), 5 * GIB);
    copy.name = "d".into();
    copy.parameters.allocation = Allocation::Thin;
    driver.volumes.create_volume(&copy).unwrap();
    assert_eq!(host.violations(), Vec::<String>::new());
}

#[test]
fn a_snapshot_of_a_thick_volume_without_room_for_a_copy_is_refused() {
    let host = MemoryHost::new();
    let driver = guaranteeing_sizes(&host);
    let bytes = capacity(&driver, Allocation::Thick) / 4 * 3;
    let made = driver.volumes.create_volume(&thick("a", bytes)).unwrap();
    let refused = driver
        .snapshots
        .create_snapshot(&snapshot(&made.id.to_string()));
    assert!(
        matches!(refused, Err(Error::OutOfSpace { .. })),
        "{refused:?}"
    );
    assert_eq!(thin_ids(&host), [1, 2, 3]);
}

#[test]
fn metadata_is_reserved_for_the_worst_case_of_thick_volumes_and_their_snapshots() {
    let host = MemoryHost::new();
    let driver = guaranteeing_sizes(&host);
    let metadata = || host.thin_pool(NAME).unwrap().unwrap().metadata;
    let data_bound = capacity(&driver, Allocation::Thick);
    // A tenth stays free. A block needs 48 bytes, so this is enough for the maps of 2.5 GiB.
    let worst_of_gib = GIB / (64 << 10) * 48;
    let free = worst_of_gib / 2 * 5;
    host.set_thin_metadata((metadata().used + free) * 10 / 9 + 10);
    let bytes = capacity(&driver, Allocation::Thick);
    assert!(bytes < data_bound, "{bytes}");
    assert!(
        bytes.abs_diff(GIB / 2 * 5) < 64 * crate::model::size::MIB,
        "{bytes}"
    );
    let refused = driver.volumes.create_volume(&thick("a", bytes + GRAIN));
    let refused = refused.unwrap_err();
    assert!(
        matches!(refused, Error::OutOfMetadata { .. }),
        "{refused:?}"
    );
    let message = chain(&refused);
    assert!(
        message.contains("lvextend --poolmetadatasize +SIZE vg/pool"),
        "{message}"
    );

    // A volume and one snapshot fit, and a second snapshot does not.
    let made = driver.volumes.create_volume(&thick("a", GIB)).unwrap();
    let id = made.id.to_string();
    let first = driver.snapshots.create_snapshot(&snapshot(&id)).unwrap();
    let another = CreateSnapshot {
        name: "t".into(),
        ..snapshot(&id)
    };
    let refused = driver.snapshots.create_snapshot(&another);
    assert!(
        matches!(refused, Err(Error::OutOfMetadata { .. })),
        "{refused:?}"
    );
    assert!(capacity(&driver, Allocation::Thick) < GIB);
    // A thin copy of it may keep the map that the thick volume has now.
    let mut copy = new_volume("copy");
    copy.capacity = CapacityRange::new(GIB.try_into().unwrap(), 0).unwrap();
    copy.content_source = Some(ContentSource::Snapshot(first.id.to_string()));
    let refused = driver.volumes.create_volume(&copy);
    assert!(
        matches!(refused, Err(Error::OutOfMetadata { .. })),
        "{refused:?}"
    );
    // Nothing is reserved for a thin volume.
    assert!(capacity(&driver, Allocation::Thin) > GIB);
    volume(&driver, "thin");
    host.set_thin_metadata(2 * metadata().total);
    driver.snapshots.create_snapshot(&another).unwrap();
    driver.volumes.create_volume(&copy).unwrap();
    assert_eq!(host.violations(), Vec::<String>::new());
}

#[test]
fn thin_volumes_are_refused_before_they_take_the_metadata_of_thick_ones() {
    let host = MemoryHost::new();
    let driver = guaranteeing_sizes(&host);
    driver.volumes.create_volume(&thick("a", GIB)).unwrap();
    let status = host.thin_pool(NAME).unwrap().unwrap();
    let rest = (16 << 10) + GIB / status.block_bytes * (48 - 16);
    host.set_thin_metadata((status.metadata.used + rest) * 10 / 9 + 20_000);
    volume(&driver, "b");
    host.set_thin_metadata((status.metadata.used + rest) * 10 / 9 - 20_000);
    assert_eq!(capacity(&driver, Allocation::Thin), 0);
    let refused = driver.volumes.create_volume(&new_volume("c"));
    assert!(
        matches!(refused, Err(Error::OutOfMetadata { .. })),
        "{refused:?}"
    );
}

fn growth(id: &str, bytes: u64) -> ExpandVolume {
    ExpandVolume {
        volume_id: id.into(),
        capacity: CapacityRange::new(bytes.try_into().unwrap(), 0).unwrap(),
        capability: None,
    }
}

#[test]
fn a_thick_volume_grows_with_all_its_blocks() {
    let host = MemoryHost::new();
    let driver = guaranteeing_sizes(&host);
    let before = capacity(&driver, Allocation::Thick);
    let made = driver.volumes.create_volume(&thick("a", GIB)).unwrap();
    let id = made.id.to_string();
    driver.volumes.expand_volume(&growth(&id, 2 * GIB)).unwrap();
    let devices = host.thin_devices(NAME).unwrap();
    assert_eq!(devices[&3], 2 * GIB);
    assert_eq!(before - capacity(&driver, Allocation::Thick), 2 * GIB);
    let more = growth(&id, before + GIB);
    let refused = driver.volumes.expand_volume(&more).unwrap_err();
    assert!(matches!(refused, Error::OutOfSpace { .. }), "{refused:?}");
    let metadata = host.thin_pool(NAME).unwrap().unwrap().metadata;
    host.set_thin_metadata(metadata.used + GIB / (64 << 10) * 48);
    let more = growth(&id, 3 * GIB);
    let refused = driver.volumes.expand_volume(&more).unwrap_err();
    assert!(
        matches!(refused, Error::OutOfMetadata { .. }),
        "{refused:?}"
    );
    assert_eq!(host.violations(), Vec::<String>::new());
}

/// Whether a fault at effect `n` of a growth was the last one there. After a crash, the machine may
/// have lost its power.
fn interrupted_growth(n: usize, mode: FaultMode, power_loss: bool) -> bool {
    let context = format!("effect {n}, {mode:?}, {power_loss}");
    let host = MemoryHost::new();
    let driver = guaranteeing_sizes(&host);
    let made = driver.volumes.create_volume(&thick("a", GIB)).unwrap();
    let id = made.id.to_string();
    let more = growth(&id, 2 * GIB);
    host.fail_effect(n, mode);
    drop(driver.volumes.expand_volume(&more));
    let is_over = host.faults_left() > 0;
    host.clear_faults();
    let is_crash = matches!(mode, FaultMode::CrashBefore | FaultMode::CrashAfter);
    let (host, driver) = match is_crash {
        true => {
            drop(driver);
            let host = match power_loss {
                true => host.reboot(true),
                false => host.restart_process(),
            };
            let driver = guaranteeing_sizes(&host);
            (host, driver)
        }
        false => (host, driver),
    };
    let blocks = || host.thin_devices(NAME).unwrap()[&3];
    let bytes = driver.volumes.get_volume(&id).unwrap().size;
    assert!(blocks() >= bytes, "{context}: {bytes} bytes");
    driver.volumes.expand_volume(&more).unwrap();
    assert_eq!(blocks(), 2 * GIB, "{context}");
    let left = host.mapped_devices(NAME, "").unwrap();
    assert_eq!(left.len(), 1, "{context}: {left:?}");
    driver.volumes.delete_volume(&id).unwrap();
    assert_eq!(thin_ids(&host), [1, 2], "{context}");
    assert_eq!(host.violations(), Vec::<String>::new(), "{context}");
    is_over
}

#[test]
fn a_growth_that_is_interrupted_claims_no_blocks_that_were_not_written() {
    for (mode, power_loss) in [
        (FaultMode::CrashBefore, true),
        (FaultMode::CrashAfter, true),
        (FaultMode::CrashBefore, false),
        (FaultMode::CrashAfter, false),
        (FaultMode::Before(nix::errno::Errno::EIO), false),
        (FaultMode::After(nix::errno::Errno::EIO), false),
    ] {
        let mut each = 1..;
        let over = each.find(|n| interrupted_growth(*n, mode, power_loss));
        assert!(over.unwrap() > 5, "{mode:?}: {over:?}");
    }
}

#[test]
fn thick_volumes_need_a_pool_that_keeps_its_promises() {
    let host = MemoryHost::new();
    let driver = guaranteeing_sizes(&host);
    let made = driver.volumes.create_volume(&thick("a", GIB)).unwrap();
    drop(driver);
    let host = host.restart_process();
    let driver = start(&host);
    assert_eq!(capacity(&driver, Allocation::Thick), 0);
    let refused = chain(&driver.volumes.create_volume(&thick("b", GIB)).unwrap_err());
    assert!(refused.contains("overcommit=1"), "{refused}");
    let asked = snapshot(&made.id.to_string());
    let refused = chain(&driver.snapshots.create_snapshot(&asked).unwrap_err());
    assert!(refused.contains("overcommit=1"), "{refused}");
    assert_eq!(thin_ids(&host), [1, 2, 3]);
}

/// The bytes after which the progress of a growth is durable, in steps.
const STEPS_OF_PROGRESS: usize = 32;

#[test]
fn while_a_thick_volume_grows_calls_for_other_volumes_do_not_wait_and_have_the_same_space() {
    let host = MemoryHost::new();
    let driver = guaranteeing_sizes(&host);
    let id = begin_thick(&driver);
    let [of, beside] = ["of", "beside"].map(|name| volume(&driver, name).to_string());
    let all = capacity(&driver, Allocation::Thick);
    assert!(all > 8 * GIB, "{all}");
    let (size, rest) = (all - GIB, 2 * GIB);
    let delay = host.delay_effects("rewrite", STEPS_OF_PROGRESS * 12);
    std::thread::scope(|scope| {
        let delay = delay;
        let growing = scope.spawn(|| driver.volumes.expand_volume(&growth(&id, size)));
        assert!(delay.is_reached());
        for allocation in [Allocation::Thin, Allocation::Thick] {
            assert_eq!(capacity(&driver, allocation), rest, "{allocation:?}");
        }
        let created = driver.volumes.create_volume(&new_volume("new")).unwrap();
        let asked = snapshot(&of);
        let snapshots = &driver.snapshots;
        let made = snapshots.create_snapshot(&asked).unwrap().id.to_string();
        let group = |sources: &[&String]| CreateGroup {
            name: "g".into(),
            source_volume_ids: sources.iter().map(|id| id.to_string()).collect(),
            parameters: SnapshotParameters::default(),
        };
        let members = snapshots.create_group(&group(&[&of, &beside])).unwrap();
        let named = NamedGroup {
            group_id: members.id.to_string(),
            snapshot_ids: Vec::new(),
        };
        snapshots.delete_group(&named).unwrap();
        snapshots.delete_snapshot(&made).unwrap();
        driver
            .volumes
            .expand_volume(&growth(&of, GIB + GRAIN))
            .unwrap();
        let deleted = created.id.to_string();
        driver.volumes.delete_volume(&deleted).unwrap();

        // Calls for the volume itself name the growth and have changed nothing.
        let refused = [
            snapshots.create_snapshot(&snapshot(&id)).map(drop),
            snapshots.create_group(&group(&[&of, &id])).map(drop),
            driver.volumes.expand_volume(&growth(&id, size)).map(drop),
            driver.volumes.delete_volume(&id),
        ];
        for refused in refused {
            let refused = refused.unwrap_err();
            assert!(matches!(refused, Error::Pending { .. }), "{refused:?}");
            let said = chain(&refused).to_string();
            assert!(
                said.contains(&format!("its growth to {size} bytes")),
                "{said}"
            );
        }
        assert_eq!(driver.pools.locks_held(), 1);
        drop(delay);
        growing.join().unwrap().unwrap();
    });
    assert_eq!(capacity(&driver, Allocation::Thin), rest - GRAIN);
    assert_eq!(driver.volumes.get_volume(&id).unwrap().size, size);
    assert_eq!(host.thin_devices(NAME).unwrap()[&3], size);
    assert_eq!(host.violations(), Vec::<String>::new());
}

#[test]
fn blocks_of_a_growth_never_count_twice_as_space() {
    let host = MemoryHost::new();
    let driver = guaranteeing_sizes(&host);
    let id = begin_thick(&driver);
    let size = capacity(&driver, Allocation::Thick) / 2 / GIB * GIB;
    let after = capacity(&driver, Allocation::Thin) + GIB - size;
    let again = STEPS_OF_PROGRESS + 5;
    for passes in [0, 1, again, 2 * again] {
        let delay = host.delay_effects("rewrite", passes);
        std::thread::scope(|scope| {
            let delay = delay;
            let growing = scope.spawn(|| driver.volumes.expand_volume(&growth(&id, size)));
            assert!(delay.is_reached());
            let now = capacity(&driver, Allocation::Thin);
            let unsaved = (passes % STEPS_OF_PROGRESS) as u64 * (16 << 20);
            assert_eq!(now, after - unsaved, "{passes}");
            host.fail_effect(1, FaultMode::Before(nix::errno::Errno::EIO));
            drop(delay);
            growing.join().unwrap().unwrap_err();
        });
        assert_eq!(capacity(&driver, Allocation::Thin), after + size - GIB);
    }
    assert_eq!(host.violations(), Vec::<String>::new());
}

/// Whether a fault at effect `n` of the creation was the last one there.
fn interrupted(n: usize, mode: FaultMode) -> bool {
    let context = format!("effect {n}, {mode:?}");
    let host = MemoryHost::new();
    let driver = guaranteeing_sizes(&host);
    host.fail_effect(n, mode);
    let request = thick("a", GIB);
    drop(driver.volumes.create_volume(&request));
    let is_over = host.faults_left() > 0;
    host.clear_faults();
    drop(driver);
    let host = host.reboot(true);
    let driver = guaranteeing_sizes(&host);
    let made = driver.volumes.create_volume(&request).unwrap();
    let devices = host.thin_devices(NAME).unwrap();
    assert_eq!(devices.len(), 3, "{context}: {devices:?}");
    let blocks = devices.values().filter(|bytes| **bytes >= GIB).count();
    assert_eq!(blocks, 1, "{context}: {devices:?}");
    driver.volumes.delete_volume(&made.id.to_string()).unwrap();
    assert_eq!(host.violations(), Vec::<String>::new(), "{context}");
    is_over
}

#[test]
fn a_creation_that_is_interrupted_leaves_no_blocks_behind() {
    for mode in [
        FaultMode::CrashBefore,
        FaultMode::CrashAfter,
        FaultMode::Before(nix::errno::Errno::EIO),
    ] {
        let mut each = 1..;
        assert!(each.any(|n| interrupted(n, mode)));
    }
}

fn begin_thick(driver: &Driver) -> String {
    let made = driver.volumes.create_volume(&thick("a", GIB)).unwrap();
    made.id.to_string()
}

/// The number of the effect with which step `n` of a call writes blocks.
fn find_step(n: usize, begin: Begin, call: Call<'_>) -> usize {
    let host = MemoryHost::new();
    let driver = guaranteeing_sizes(&host);
    let id = begin(&driver);
    let before = host.effect_log().len();
    call(&driver, &id).unwrap();
    let log = host.effect_log();
    let names = log[before..].iter().enumerate();
    let mut steps = names.filter(|(_, name)| name.starts_with("rewrite"));
    steps.nth(n).unwrap().0 + 1
}

type Begin = fn(&Driver) -> String;
type Call<'a> = &'a dyn Fn(&Driver, &str) -> Result<()>;

/// Bytes that the repeat of a call writes after a power loss at its step 50, of at least 64.
fn written_again(begin: Begin, call: Call<'_>) -> u64 {
    let step = find_step(50, begin, call);
    let host = MemoryHost::new();
    let driver = guaranteeing_sizes(&host);
    let id = begin(&driver);
    host.fail_effect(step, FaultMode::CrashBefore);
    call(&driver, &id).unwrap_err();
    drop(driver);
    let host = host.reboot(true);
    let driver = guaranteeing_sizes(&host);
    driver.clean(driver.served()[0]);
    call(&driver, &id).unwrap();
    assert_eq!(host.violations(), Vec::<String>::new());
    assert_eq!(capacity(&driver, Allocation::Thick) % GRAIN, 0);
    driver.snapshots.copied()
}

#[test]
fn a_repeat_writes_only_the_blocks_that_were_not_written_before_a_crash() {
    let blank: Call<'_> = &|driver, _| driver.volumes.create_volume(&thick("b", GIB)).map(drop);
    assert_eq!(written_again(|_| String::new(), blank), GIB / 2);

    let restored: Call<'_> = &|driver, id| {
        let mut copy = thick("b", GIB);
        copy.content_source = Some(ContentSource::Snapshot(id.into()));
        driver.volumes.create_volume(&copy).map(drop)
    };
    let begin: Begin = |driver| {
        let id = begin_thick(driver);
        let made = driver.snapshots.create_snapshot(&snapshot(&id)).unwrap();
        made.id.to_string()
    };
    assert_eq!(written_again(begin, restored), GIB / 2);

    let cloned: Call<'_> = &|driver, id| {
        let mut copy = thick("b", GIB);
        copy.content_source = Some(ContentSource::Volume(id.into()));
        driver.volumes.create_volume(&copy).map(drop)
    };
    assert_eq!(written_again(begin_thick, cloned), GIB / 2);

    // The blocks that are written already are not required a second time.
    let driver = guaranteeing_sizes(&MemoryHost::new());
    let all = capacity(&driver, Allocation::Thick);
    let grown: Call<'_> = &|driver, id| driver.volumes.expand_volume(&growth(id, all)).map(drop);
    assert_eq!(written_again(begin_thick, grown), all - GIB - GIB / 2);
}

#[test]
fn no_copy_shares_the_blocks_of_a_growth_that_was_interrupted() {
    let snapshots: Call<'_> =
        &|driver, id| driver.snapshots.create_snapshot(&snapshot(id)).map(drop);
    let clones: Call<'_> = &|driver, id| {
        let mut copy = new_volume("b");
        copy.content_source = Some(ContentSource::Volume(id.into()));
        driver.volumes.create_volume(&copy).map(drop)
    };
    let grows: Call<'_> =
        &|driver, id| driver.volumes.expand_volume(&growth(id, 2 * GIB)).map(drop);
    let step = find_step(50, begin_thick, grows);
    for copies in [snapshots, clones] {
        let host = MemoryHost::new();
        let driver = guaranteeing_sizes(&host);
        let id = begin_thick(&driver);
        host.fail_effect(step, FaultMode::CrashBefore);
        grows(&driver, &id).unwrap_err();
        drop(driver);
        let host = host.reboot(true);
        let driver = guaranteeing_sizes(&host);
        assert!(host.thin_devices(NAME).unwrap()[&3] > GIB);
        copies(&driver, &id).unwrap();
        assert_eq!(host.thin_devices(NAME).unwrap()[&3], GIB);
        grows(&driver, &id).unwrap();
        assert_eq!(host.thin_devices(NAME).unwrap()[&3], 2 * GIB);
        assert_eq!(host.violations(), Vec::<String>::new());
    }
}

#[test]
fn a_thick_volume_is_written_at_the_rate_of_copies_and_within_their_number() {
    let host = MemoryHost::new();
    let driver = guaranteeing_sizes(&host);
    let id = begin_thick(&driver);
    let before = host.now();
    begin_another(&driver).unwrap();
    assert!(host.now() - before >= 3, "1 GiB at 256 MiB/s");

    let pools = [driver.served()[0]; 2];
    let begin = || driver.snapshots.begin_copy(copy_for(None), None, pools);
    let running: Vec<_> = std::iter::from_fn(|| begin().ok()).collect();
    let refused = [
        driver.volumes.create_volume(&thick("c", GIB)).map(drop),
        driver
            .volumes
            .expand_volume(&growth(&id, 2 * GIB))
            .map(drop),
    ];
    let is_pending = |it: &Result<()>| matches!(it, Err(Error::Pending { .. }));
    assert!(refused.iter().all(is_pending), "{refused:?}");
    drop(running);
    driver.volumes.expand_volume(&growth(&id, 2 * GIB)).unwrap();
}

fn begin_another(driver: &Driver) -> Result<()> {
    driver.volumes.create_volume(&thick("b", GIB)).map(drop)
}

#[test]
fn a_stop_keeps_what_was_written_for_a_repeat() {
    let host = MemoryHost::new();
    let driver = guaranteeing_sizes(&host);
    let id = begin_thick(&driver);
    driver.stop();
    let stopped = begin_another(&driver);
    assert!(matches!(stopped, Err(Error::Stopping)), "{stopped:?}");
    let stopped = driver.volumes.expand_volume(&growth(&id, 2 * GIB));
    assert!(matches!(stopped, Err(Error::Stopping)), "{stopped:?}");
    assert_eq!(thin_ids(&host), [1, 2, 3, 4]);
    drop(driver);
    let host = host.restart_process();
    let driver = guaranteeing_sizes(&host);
    begin_another(&driver).unwrap();
    assert_eq!(thin_ids(&host), [1, 2, 3, 4]);
    driver.volumes.expand_volume(&growth(&id, 2 * GIB)).unwrap();
    assert_eq!(host.violations(), Vec::<String>::new());
}

/// A volume that was to grow, until this happened in step 40. Returns its ID.
fn failed_growth(host: &MemoryHost, driver: &Driver, mode: FaultMode) -> String {
    let grow: Call<'_> = &|driver, id| driver.volumes.expand_volume(&growth(id, 2 * GIB)).map(drop);
    let step = find_step(40, begin_thick, grow);
    let id = begin_thick(driver);
    host.fail_effect(step, mode);
    grow(driver, &id).unwrap_err();
    id
}

#[test]
fn a_growth_that_fails_frees_its_blocks() {
    let host = MemoryHost::new();
    let driver = guaranteeing_sizes(&host);
    let mode = FaultMode::Before(nix::errno::Errno::EIO);
    let id = failed_growth(&host, &driver, mode);
    assert_eq!(host.thin_devices(NAME).unwrap()[&3], GIB);
    driver.volumes.expand_volume(&growth(&id, 2 * GIB)).unwrap();
    assert_eq!(host.thin_devices(NAME).unwrap()[&3], 2 * GIB);
    assert_eq!(host.violations(), Vec::<String>::new());
}

#[test]
fn a_growth_that_no_call_asks_for_any_more_gives_its_blocks_back() {
    let host = MemoryHost::new();
    let driver = guaranteeing_sizes(&host);
    let id = failed_growth(&host, &driver, FaultMode::CrashBefore);
    drop(driver);
    let host = host.reboot(true);
    let driver = guaranteeing_sizes(&host);
    let blocks = || host.thin_devices(NAME).unwrap()[&3];
    let clean = || driver.clean(driver.served()[0]);
    clean();
    assert!(blocks() > GIB);
    host.pass_time(std::time::Duration::from_secs(3600));
    clean();
    assert_eq!(blocks(), GIB);
    assert_eq!(driver.volumes.get_volume(&id).unwrap().size, GIB);
    driver.volumes.expand_volume(&growth(&id, 2 * GIB)).unwrap();
    assert_eq!(blocks(), 2 * GIB);
    assert_eq!(host.violations(), Vec::<String>::new());
}
