//! Pools of LVM on the simulated host: created, interrupted, refused, moved and released.

mod opening;
mod thick;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use nix::errno::Errno;

use crate::backend::place::lvm::header::SLOTS_BYTES;
use crate::backend::place::lvm::{HeaderDevice, find_pool, folder, raw_block, release, thin_pool};
use crate::backend::thin::device_uuid;
use crate::backend::thin::{HEADER_ID, RECORDS_ID, TRANSACTION_ID, records_device};
use crate::cut::CutInterfaces;
use crate::error::{Error, Result, chain};
use crate::host::mapper::ThinPoolMode;
use crate::host::memory::{FaultMode, MemoryHost, PoolSetup};

use crate::host::{Effect, Host, ThinMessage, ThinTable, VolumeGroup};
use crate::model::{HomeId, PoolDefinition};
use crate::operation::pools::inventory::PoolPresence;
use crate::operation::pools::{admin, inventory};
use crate::operation::tests::{NODE_RECORD as NODE, new_volume, pool, settings, volume};
use crate::operation::{CreateVolume, Driver, GetCapacity, Presence, Settings};

const NAME: &str = "vg-pool";

fn definition() -> PoolDefinition {
    pool("default=lvm:vg/pool,init,overcommit=2,rawBlock=unfiltered")
}

fn start_with(host: &MemoryHost, pools: &[PoolDefinition]) -> Result<Driver> {
    let settings = Settings {
        alone: false,
        ..settings(pools)
    };
    Driver::start(settings, CutInterfaces::simulated(host.clone()))
}

fn start(host: &MemoryHost) -> Driver {
    start_with(host, &[definition()]).unwrap()
}

fn refusal(driver: &Driver) -> Option<String> {
    driver.pool_status().remove(0).refusal
}

fn thin_ids(host: &MemoryHost) -> Vec<u32> {
    host.thin_devices(NAME).unwrap().into_keys().collect()
}

fn send(host: &MemoryHost, message: ThinMessage) {
    let pool = NAME;
    host.perform(&Effect::ThinMessage { pool, message })
        .unwrap();
}

/// Ends a driver as SIGTERM does.
fn end(driver: Driver) {
    driver.leave();
}

#[test]
fn a_pool_is_created_once_and_served_again() {
    let host = MemoryHost::new();
    let driver = start(&host);
    assert_eq!(refusal(&driver), None);
    let id = driver.pool_status()[0].id;
    let first = volume(&driver, "a");
    assert_eq!(thin_ids(&host), [1, 2, 3]);
    let status = host.thin_pool(NAME).unwrap().unwrap();
    assert_eq!(status.transaction_id, TRANSACTION_ID);
    end(driver);
    // The device stays, so that LVM does not deactivate the thin pool.
    let left = host.mapped_devices(NAME, "").unwrap();
    assert_eq!(left.len(), 1, "{left:?}");
    assert_eq!(left[0].uuid, records_device(id.unwrap()));
    assert_eq!(host.mounted(), Vec::<PathBuf>::new());

    for power_loss in [false, true] {
        let host = host.reboot(power_loss);
        let driver = start(&host);
        assert_eq!(refusal(&driver), None);
        assert_eq!(driver.pool_status()[0].id, id);
        assert!(driver.volumes.get_volume(&first.to_string()).is_ok());
    }
    assert_eq!(host.violations(), Vec::<String>::new());
}

/// One fault in the creation of a pool, and what happens until the next try.
fn interrupted_creation(n: usize, mode: FaultMode, power_loss: Option<bool>) -> bool {
    let context = format!("effect {n}, {mode:?}, {power_loss:?}");
    let host = MemoryHost::new();
    host.fail_effect(n, mode);
    let first = start_with(&host, &[definition()]);
    let is_over = host.faults_left() > 0;
    drop(first);
    host.clear_faults();
    let host = match power_loss {
        Some(power_loss) => host.reboot(power_loss),
        None => host.restart_process(),
    };
    let driver = start(&host);
    assert_eq!(refusal(&driver), None, "{context}");
    volume(&driver, "a");
    assert_eq!(thin_ids(&host), [1, 2, 3], "{context}");
    let headers = host.mapped_devices(NAME, "").unwrap();
    assert_eq!(headers.len(), 1, "{context}: {headers:?}");
    end(driver);
    let host = host.restart_process();
    let driver = start(&host);
    assert_eq!(refusal(&driver), None, "{context}");
    assert_eq!(driver.pool_status()[0].volumes, 1, "{context}");
    let log = host.effect_log();
    let mounted = log.iter().position(|effect| effect.starts_with("mount "));
    let formatted = log.iter().rposition(|effect| effect.starts_with("format "));
    assert!(formatted < mounted, "{context}: {log:?}");
    assert_eq!(host.violations(), Vec::<String>::new(), "{context}");
    is_over
}

#[test]
fn a_creation_that_was_interrupted_at_any_effect_is_completed() {
    let modes = [
        FaultMode::Before(Errno::EIO),
        FaultMode::After(Errno::EIO),
        FaultMode::CrashBefore,
        FaultMode::CrashAfter,
    ];
    for mode in modes {
        for power_loss in [None, Some(false), Some(true)] {
            let tried = (1..1000).find(|n| interrupted_creation(*n, mode, power_loss));
            assert!(tried.unwrap() > 25, "{mode:?}: {tried:?}");
        }
    }
}

#[test]
fn a_creation_that_failed_is_completed_by_the_same_driver() {
    for n in 1..60 {
        let host = MemoryHost::new();
        host.fail_effect(n, FaultMode::Before(Errno::EIO));
        let Ok(driver) = start_with(&host, &[definition()]) else {
            continue;
        };
        host.clear_faults();
        driver.refresh_pools();
        assert_eq!(refusal(&driver), None, "effect {n}");
        assert_eq!(host.violations(), Vec::<String>::new(), "effect {n}");
    }
}

#[test]
fn a_pool_that_is_used_by_another_program_is_refused_and_not_changed() {
    type Change<'a> = &'a dyn Fn(&MemoryHost);
    let group = |lock_type: &str, system_id: &str| VolumeGroup {
        uuid: "one".into(),
        lock_type: lock_type.into(),
        system_id: system_id.into(),
        is_foreign: !system_id.is_empty(),
    };
    let used: [(&str, Change<'_>); 8] = [
        ("containerd: the thin device 7", &|host| {
            send(host, ThinMessage::CreateThin { id: 1 });
            send(host, ThinMessage::CreateThin { id: 7 });
            send(host, ThinMessage::Delete { id: 1 });
        }),
        ("Docker: its transaction ID is 1", &|host| {
            send(host, ThinMessage::CreateThin { id: 1 });
            send(host, ThinMessage::SetTransactionId { from: 0, to: 1 });
        }),
        ("LVM: its transaction ID is 2", &|host| {
            send(host, ThinMessage::SetTransactionId { from: 0, to: 2 });
        }),
        ("LVM: vg-pool-tpool exists", &|host| {
            host.set_up_pool("vg-pool-tpool", |_| {});
        }),
        ("lvmlockd: (lock type sanlock)", &|host| {
            host.set_up_pool(NAME, |setup| setup.groups = vec![group("sanlock", "")]);
        }),
        ("another machine: the system ID other", &|host| {
            host.set_up_pool(NAME, |setup| setup.groups = vec![group("", "other")]);
        }),
        ("a copy of the disk: there are 2 volume groups", &|host| {
            let groups = vec![group("", ""), group("", "")];
            host.set_up_pool(NAME, |setup| setup.groups = groups);
        }),
        ("thin_dump: a snapshot of its metadata is held", &|host| {
            host.set_up_pool(NAME, |setup| setup.holds_metadata = true);
        }),
    ];
    for (what, use_it) in used {
        let host = MemoryHost::new();
        use_it(&host);
        let before = (thin_ids(&host), host.thin_pool(NAME).unwrap());
        let driver = start_with(&host, &[definition()]);
        let error = match driver {
            Ok(driver) => refusal(&driver).unwrap(),
            Err(error) => chain(&error),
        };
        let (_, expected) = what.split_once(": ").unwrap();
        assert!(error.contains(expected), "{what}: {error}");
        assert_eq!(before, (thin_ids(&host), host.thin_pool(NAME).unwrap()));
        assert_eq!(host.mapped_devices(NAME, "").unwrap(), []);
        let error = admin::init(&host, Path::new(NODE), &definition()).unwrap_err();
        assert!(chain(&error).contains(expected), "{what}: {error}");
        assert_eq!(before, (thin_ids(&host), host.thin_pool(NAME).unwrap()));
    }
}

#[test]
fn a_pool_that_is_set_up_unsafely_is_served_once_the_command_in_the_refusal_has_mended_it() {
    type Change = fn(&mut PoolSetup);
    let flaws: [(Change, &str); 6] = [
        (|setup| setup.active = false, "vgchange --activate y vg"),
        (
            |setup| setup.zeroes_blocks = false,
            "lvchange --zero y vg/pool",
        ),
        (
            |setup| setup.errors_when_full = false,
            "lvchange --errorwhenfull y vg/pool",
        ),
        (
            |setup| setup.mode = ThinPoolMode::ReadOnly,
            "lvchange --permission rw vg/pool",
        ),
        (
            |setup| setup.mode = ThinPoolMode::Failed,
            "lvconvert --repair vg/pool",
        ),
        (
            |setup| setup.needs_check = true,
            "lvconvert --repair vg/pool",
        ),
    ];
    for is_new in [true, false] {
        for (flaw, command) in flaws {
            let mut host = MemoryHost::new();
            if !is_new {
                end(start(&host));
                host = host.reboot(false);
            }
            host.set_up_pool(NAME, flaw);
            let driver = start(&host);
            let why = refusal(&driver).unwrap();
            assert!(why.contains(command), "{why}");
            let is_unused = host
                .without_faults(|host| host.thin_devices(NAME))
                .unwrap()
                .is_empty();
            assert_eq!(is_unused, is_new, "{why}");
            host.set_up_pool(NAME, |setup| *setup = PoolSetup::default());
            driver.refresh_pools();
            assert_eq!(refusal(&driver), None, "{command}");
        }
    }
}

#[test]
fn a_snapshot_of_the_metadata_that_a_crash_has_left_is_released() {
    let host = MemoryHost::new();
    let driver = start(&host);
    let is_held = || host.thin_pool(NAME).unwrap().unwrap().holds_metadata;
    host.set_up_pool(NAME, |setup| setup.holds_metadata = true);
    // The driver reads the metadata while another process examines the pool.
    let admin_process = host.another_process();
    let _ = admin::init(&admin_process, Path::new(NODE), &definition());
    assert!(is_held());
    end(driver);
    assert_eq!(refusal(&start(&host)), None);
    assert!(!is_held());
}

#[test]
fn without_init_no_pool_is_created() {
    let host = MemoryHost::new();
    let plain = pool("default=lvm:vg/pool");
    let error = start_with(&host, std::slice::from_ref(&plain)).err();
    let error = chain(&error.unwrap());
    assert!(
        error.contains("slackwater pool init default=lvm:vg/pool"),
        "{error}"
    );
    assert_eq!(thin_ids(&host).len(), 0);
    let made = admin::init(&host, Path::new(NODE), &plain).unwrap();
    assert!(made.changed);
    let again = admin::init(&host, Path::new(NODE), &plain).unwrap();
    assert_eq!((again.changed, again.pool), (false, made.pool));
    let driver = start_with(&host, &[plain]).unwrap();
    assert_eq!(refusal(&driver), None);
}

#[test]
fn a_pool_of_another_machine_is_not_mounted_before_it_is_adopted() {
    let host = MemoryHost::new();
    let driver = start(&host);
    let known = volume(&driver, "a");
    end(driver);
    let host = host.reboot(false);
    // The node record of another machine, with a pool of its own.
    let node = Path::new(NODE);
    host.perform(&Effect::RemoveFile { path: node }).unwrap();
    host.make_folder(Path::new("/memory/b")).unwrap();
    admin::init(&host, node, &pool("b=file:/memory/b")).unwrap();
    let both = [pool("b=file:/memory/b"), definition()];
    let driver = start_with(&host, &both).unwrap();
    let why = driver.pool_status().remove(1).refusal.unwrap();
    assert!(why.contains("slackwater pool adopt default=lvm:vg/pool"));
    assert_eq!(host.mounted(), Vec::<PathBuf>::new());

    let home = driver.pools.home();
    let effects = host.effects();
    let would = admin::adopt(&host, node, &definition(), &[], true).unwrap();
    assert!(would.from.is_some() && would.pool.home == home);
    let after = host.effect_log().split_off(effects);
    let changes = |effect: &&String| !effect.contains("mapped") && !effect.contains("load_table");
    assert_eq!(after.iter().find(changes), None);
    let adopted = admin::adopt(&host, node, &definition(), &[], false).unwrap();
    assert_eq!(adopted, would_have(&adopted.pool, would.from));
    let again = admin::adopt(&host, node, &definition(), &[], false).unwrap();
    assert_eq!(again.from, None);
    driver.refresh_pools();
    assert_eq!(driver.pool_status().remove(1).refusal, None);
    assert!(driver.volumes.get_volume(&known.to_string()).is_ok());
    assert_eq!(host.violations(), Vec::<String>::new());
}

fn would_have(pool: &crate::record::PoolRecord, from: Option<HomeId>) -> admin::Adopted {
    admin::Adopted {
        pool: pool.clone(),
        from,
    }
}

#[test]
fn a_device_that_another_process_has_created_for_the_header_is_not_removed() {
    let host = MemoryHost::new();
    end(start(&host));
    let host = host.reboot(false);
    host.fail_always("create_mapped", Some(Errno::EBUSY));
    let before = host.effects();
    assert!(find_pool(&host, thin_pool(&definition()).unwrap()).is_err());
    let log = host.effect_log().split_off(before);
    assert!(log.last().unwrap().starts_with("create_mapped"), "{log:?}");
}

#[test]
fn an_adoption_that_was_interrupted_is_repeated() {
    for n in 1..40 {
        let host = MemoryHost::new();
        end(start(&host));
        let host = host.reboot(false);
        let node = Path::new(NODE);
        host.perform(&Effect::RemoveFile { path: node }).unwrap();
        host.make_folder(Path::new("/memory/b")).unwrap();
        let made = admin::init(&host, node, &pool("b=file:/memory/b")).unwrap();
        host.fail_effect(n, FaultMode::CrashAfter);
        let _ = admin::adopt(&host, node, &definition(), &[], false);
        host.clear_faults();
        let host = host.restart_process();
        let adopted = admin::adopt(&host, node, &definition(), &[], false).unwrap();
        assert_eq!(adopted.pool.home, made.pool.home, "effect {n}");
        let found = find_pool(&host, thin_pool(&definition()).unwrap()).unwrap();
        assert_eq!(found.unwrap().home, made.pool.home, "effect {n}");
        let driver = start(&host);
        assert_eq!(refusal(&driver), None, "effect {n}");
        assert_eq!(host.violations(), Vec::<String>::new(), "effect {n}");
    }
}

#[test]
fn a_pool_whose_transaction_id_was_lost_is_refused_with_the_way_back() {
    let host = MemoryHost::new();
    end(start(&host));
    for lost in [0, 1] {
        let host = host.reboot(false);
        let from = TRANSACTION_ID;
        send(&host, ThinMessage::SetTransactionId { from, to: lost });
        let driver = start(&host);
        let why = refusal(&driver).unwrap();
        let way = format!("set_transaction_id {lost} {TRANSACTION_ID}");
        assert!(why.contains(&way), "{why}");
        assert_eq!(thin_ids(&host), [1, 2]);
        let (from, to) = (lost, TRANSACTION_ID);
        send(&host, ThinMessage::SetTransactionId { from, to });
        driver.refresh_pools();
        assert_eq!(refusal(&driver), None);
        end(driver);
    }
}

#[test]
fn a_pool_that_cannot_be_read_is_not_absent() {
    let damages: [fn(&MemoryHost); 4] = [
        |host| host.set_up_pool(NAME, |setup| setup.mode = ThinPoolMode::Failed),
        |host| {
            let (from, to) = (TRANSACTION_ID, 0);
            send(host, ThinMessage::SetTransactionId { from, to });
        },
        |host| {
            let (from, to) = (TRANSACTION_ID, 1);
            send(host, ThinMessage::SetTransactionId { from, to });
        },
        |host| {
            let status = host.thin_pool(NAME).unwrap().unwrap();
            let device = HeaderDevice::open(host, NAME, &status, true).unwrap();
            device.unwrap().overwrite(&[0; SLOTS_BYTES]);
        },
    ];
    for damage in damages {
        let host = MemoryHost::new();
        let driver = start(&host);
        let id = driver.pool_status()[0].id.unwrap();
        volume(&driver, "a");
        end(driver);
        let host = host.reboot(false);
        damage(&host);
        let driver = start(&host);
        let status = driver.pool_status().remove(0);
        assert_eq!(status.presence, Presence::Unknown, "{:?}", status.refusal);
        let listed = inventory::pools(&host, Path::new(NODE), &[definition()]).unwrap();
        let state = &listed[0].state;
        assert!(matches!(state, PoolPresence::Unreadable(_)), "{state:?}");
        driver.forget_pool(id).unwrap_err();
        admin::forget(&host, Path::new(NODE), "default").unwrap_err();
    }
}

#[test]
fn a_header_whose_device_is_suspended_is_not_read() {
    let host = MemoryHost::new();
    end(start(&host));
    let host = host.reboot(false);
    let status = host.thin_pool(NAME).unwrap().unwrap();
    let device = HeaderDevice::open(&host, NAME, &status, false).unwrap();
    let found = host.mapped_devices(NAME, "SLACKWATER-").unwrap();
    let uuid = &found[0].uuid;
    host.suspend_mapped(uuid).unwrap();
    let driver = start(&host);
    let why = refusal(&driver).unwrap();
    assert!(why.contains("dmsetup resume"), "{why}");
    host.perform(&Effect::ResumeMapped { uuid }).unwrap();
    device.unwrap().close();
    driver.refresh_pools();
    assert_eq!(refusal(&driver), None);
}

#[test]
fn a_known_pool_that_is_gone_is_not_created_again() {
    let host = MemoryHost::new();
    end(start(&host));
    let other = pool("default=lvm:vg/other,init");
    let driver = start_with(&host, std::slice::from_ref(&other)).unwrap();
    let why = refusal(&driver).unwrap();
    assert!(why.contains("slackwater pool forget"), "{why}");
    assert_eq!(host.thin_devices("vg-other").unwrap().len(), 0);
    let error = admin::forget(&host, Path::new(NODE), "default").unwrap_err();
    assert!(chain(&error).contains("the pool is present"), "{error}");
    host.set_up_pool(NAME, |setup| setup.active = false);
    admin::forget(&host, Path::new(NODE), "default").unwrap();
    driver.refresh_pools();
    assert_eq!(refusal(&driver), None);
}

#[test]
fn records_that_were_lost_are_not_replaced_while_volumes_exist() {
    let host = MemoryHost::new();
    let driver = start(&host);
    volume(&driver, "a");
    let folder = folder(driver.pool_status()[0].id.unwrap());
    let path = &folder.join("pool.json");
    host.perform(&Effect::RemoveFile { path }).unwrap();
    let path = Path::new(NODE);
    drop(driver);
    host.perform(&Effect::RemoveFile { path }).unwrap();
    let host = host.restart_process();
    let driver = start(&host);
    let why = refusal(&driver).unwrap();
    assert!(why.contains("it has no pool.json"), "{why}");
    assert_eq!(thin_ids(&host), [1, 2, 3]);
}

#[test]
fn a_process_waits_for_another_one_that_opens_the_pool() {
    let host = MemoryHost::new();
    let driver = start(&host);
    end(driver);
    let host = host.restart_process();
    let name = definition();
    let name = thin_pool(&name).unwrap();
    let status = host.thin_pool(NAME).unwrap().unwrap();
    host.make_folder(Path::new("/memory/b")).unwrap();
    let other = host.another_process();
    let device = HeaderDevice::open(&other, name.mapped(), &status, true);
    let device = device.unwrap().unwrap();
    let driver = start_with(
        &host,
        &[definition(), pool("b=file:/memory/b,init,mount=any")],
    );
    let driver = driver.unwrap();
    let why = refusal(&driver).unwrap();
    assert!(why.contains("another slackwater process"), "{why}");
    device.close();
    driver.refresh_pools();
    assert_eq!(refusal(&driver), None);
}

#[test]
fn a_pool_is_released_only_while_no_process_uses_it() {
    let host = MemoryHost::new();
    let driver = start(&host);
    let admin_process = host.another_process();
    let error = release(&admin_process, &definition()).unwrap_err();
    assert!(matches!(error, Error::Locked { .. }), "{error}");
    let uuid = volume(&driver, "a").uuid;
    let pool = driver.pools.serving().remove(0);
    let record = pool.backend.volumes.get(uuid).unwrap().unwrap();
    let mode = crate::backend::AttachMode {
        read_only: false,
        lasting: true,
    };
    let attached = pool.backend.devices().attach(&record, mode).unwrap();
    let id = pool.id();
    drop((attached, pool));
    end(driver);
    // As if its records were mounted in the mount namespace of a container: the device of the volume
    // stays, because the driver there may be about to use it.
    let elsewhere = host.another_process().claim_mapped(&records_device(id));
    let elsewhere = elsewhere.unwrap().unwrap();
    let error = release(&admin_process, &definition()).unwrap_err();
    assert!(chain(&error).contains("mount namespace"), "{error}");
    assert_eq!(host.mapped_devices(NAME, "").unwrap().len(), 2);
    drop(elsewhere);
    let open = admin_process.hold_mapped(&device_uuid(id, uuid)).unwrap();
    let error = release(&admin_process, &definition()).unwrap_err();
    assert!(chain(&error).contains(&uuid.to_string()), "{error}");
    // As after the end of a pod of a raw block volume whose pool was not served.
    drop(open);
    let other = "OTHER-1";
    let table = &ThinTable {
        pool: NAME.into(),
        id: record.image,
        bytes: record.size,
    };
    let load = Effect::LoadTable {
        uuid: other,
        table,
        read_only: false,
    };
    let resume = Effect::ResumeMapped { uuid: other };
    for step in [Effect::CreateMapped { uuid: other }, load, resume] {
        host.perform(&step).unwrap();
    }
    assert!(release(&admin_process, &definition()).is_err());
    let left = host.mapped_devices(NAME, "").unwrap();
    assert!(left.iter().any(|device| device.uuid == other), "{left:?}");
    host.perform(&Effect::RemoveMapped { uuid: other }).unwrap();
    assert!(release(&admin_process, &definition()).unwrap());
    assert!(!release(&admin_process, &definition()).unwrap());
    assert_eq!(host.mapped_devices(NAME, "").unwrap(), []);
    assert_eq!(host.mounted(), Vec::<PathBuf>::new());
    let driver = start(&host);
    assert_eq!(refusal(&driver), None);
    assert_eq!(host.violations(), Vec::<String>::new());
}

#[test]
fn a_pool_that_has_failed_is_released_for_its_repair() {
    let host = MemoryHost::new();
    let driver = start(&host);
    host.set_up_pool(NAME, |setup| setup.mode = ThinPoolMode::Failed);
    let admin_process = host.another_process();
    let error = release(&admin_process, &definition()).unwrap_err();
    assert!(matches!(error, Error::Locked { .. }), "{error}");
    end(driver);
    assert!(release(&admin_process, &definition()).unwrap());
    assert_eq!(host.mapped_devices(NAME, "").unwrap(), []);
    assert_eq!(host.mounted(), Vec::<PathBuf>::new());
}

#[test]
fn two_volume_groups_that_swap_their_names_do_not_swap_their_volumes() {
    let host = MemoryHost::new();
    let driver = start(&host);
    volume(&driver, "a");
    host.swap_pools(NAME, "vg-other");
    let request = CreateVolume {
        name: "b".into(),
        ..crate::operation::tests::new_volume("b")
    };
    let error = driver.volumes.create_volume(&request).unwrap_err();
    assert!(chain(&error).contains("another thin pool"), "{error}");
    assert_eq!(thin_ids(&host).len(), 0);
    host.swap_pools(NAME, "vg-other");
    volume(&driver, "b");
    assert_eq!(thin_ids(&host), [1, 2, 3, 5]);
}

#[test]
fn a_pool_is_listed_while_it_is_served_and_while_it_is_not() {
    let host = MemoryHost::new();
    let driver = start(&host);
    let id = driver.pool_status()[0].id;
    let listed = || inventory::pools(&host, Path::new(NODE), &[definition()]).unwrap();
    let served = listed().remove(0);
    assert_eq!((served.id, served.folder), (id, id.map(folder)));
    end(driver);
    let entry = listed().remove(0);
    assert_eq!((entry.id, entry.folder), (id, None));
    assert_eq!(entry.state, PoolPresence::Here);
    host.set_up_pool(NAME, |setup| setup.active = false);
    assert_eq!(listed().remove(0).state, PoolPresence::Absent);
    let names: BTreeSet<_> = listed().into_iter().map(|entry| entry.place).collect();
    assert_eq!(names, BTreeSet::from(["lvm:vg/pool".to_string()]));
}

#[test]
fn a_pool_that_is_set_up_otherwise_later_takes_nothing_new_until_that_is_undone() {
    let host = MemoryHost::new();
    let driver = start(&host);
    let first = volume(&driver, "a");
    let create = |name| driver.volumes.create_volume(&new_volume(name));
    let ask = GetCapacity {
        capabilities: Vec::new(),
        parameters: new_volume("b").parameters,
        topology: None,
    };
    type Change = fn(&mut PoolSetup);
    let changes: [(&str, Change); 3] = [
        ("lvchange --zero y vg/pool", |it| it.zeroes_blocks = false),
        ("lvchange --errorwhenfull y vg/pool", |it| {
            it.errors_when_full = false;
        }),
        ("lvconvert --repair vg/pool", |it| it.needs_check = true),
    ];
    for (command, change) in changes {
        host.set_up_pool(NAME, change);
        let error = chain(&create("b").unwrap_err());
        assert!(error.contains(command), "{error}");
        let capacity = driver.pools.capacity(&ask).unwrap();
        assert_eq!(capacity.available, 0, "{command}");
        host.set_up_pool(NAME, |setup| *setup = PoolSetup::default());
        let made = create("b").unwrap();
        host.set_up_pool(NAME, change);
        driver.volumes.delete_volume(&made.id.to_string()).unwrap();
        host.set_up_pool(NAME, |setup| *setup = PoolSetup::default());
    }
    driver.volumes.delete_volume(&first.to_string()).unwrap();
    assert_eq!(thin_ids(&host), [1, 2]);
}

fn map_foreign(host: &MemoryHost, id: u32) {
    let uuid = "OTHER-1";
    let table = &ThinTable {
        pool: NAME.into(),
        id,
        bytes: crate::model::size::MIB,
    };
    host.perform(&Effect::CreateMapped { uuid }).unwrap();
    let read_only = false;
    host.perform(&Effect::LoadTable {
        uuid,
        table,
        read_only,
    })
    .unwrap();
    host.perform(&Effect::ResumeMapped { uuid }).unwrap();
}

#[test]
fn a_pool_whose_header_or_records_another_program_has_mapped_is_refused() {
    for id in [HEADER_ID, RECORDS_ID] {
        let host = MemoryHost::new();
        end(start(&host));
        let host = host.reboot(false);
        map_foreign(&host, id);
        let driver = start(&host);
        let why = refusal(&driver).unwrap();
        let expected = format!("has mapped its thin device {id} ");
        assert!(why.contains(&expected), "{why}");
        assert_eq!(host.mounted(), Vec::<PathBuf>::new());
        let uuid = "OTHER-1";
        host.perform(&Effect::RemoveMapped { uuid }).unwrap();
        driver.refresh_pools();
        assert_eq!(refusal(&driver), None);
        assert_eq!(host.violations(), Vec::<String>::new());
    }
}

#[test]
fn differences_between_records_and_thin_devices_are_listed_and_nothing_is_deleted() {
    let host = MemoryHost::new();
    let driver = start(&host);
    let [first, second] = ["a", "b"].map(|name| volume(&driver, name));
    end(driver);
    let read = || {
        let entry = inventory::pools(&host, Path::new(NODE), &[definition()]);
        let entry = entry.unwrap().remove(0);
        let path = folder(entry.id.unwrap());
        inventory::read_entry(&host, &entry, entry.id.unwrap(), &path).unwrap()
    };
    let driver = start(&host);
    assert_eq!(read().damaged, []);
    let pool = driver.pools.serving().remove(0);
    let image =
        |id: &crate::model::VolumeId| pool.backend.volumes.get(id.uuid).unwrap().unwrap().image;
    let (lost, id) = (image(&first), 700);
    send(&host, ThinMessage::Delete { id: lost });
    send(&host, ThinMessage::CreateThin { id });
    let found = read();
    let problems: Vec<_> = found.damaged.iter().map(|it| it.problem.as_str()).collect();
    assert_eq!(problems.len(), 2, "{problems:?}");
    assert!(
        problems[0].contains("its thin device 3 is missing in vg/pool"),
        "{problems:?}"
    );
    assert!(
        problems[1].contains("its thin device 700 (0 B)"),
        "{problems:?}"
    );
    assert_eq!(thin_ids(&host), [1, 2, image(&second), 700]);
}

#[test]
fn raw_block_volumes_wait_for_the_filter_of_lvm_or_for_the_option() {
    let host = MemoryHost::new();
    let plain = pool("default=lvm:vg/pool,init");
    let driver = start_with(&host, std::slice::from_ref(&plain)).unwrap();
    let create = || driver.volumes.create_volume(&new_volume("a"));
    let error = create().unwrap_err();
    assert!(matches!(error, Error::Refused { .. }), "{error}");
    assert!(error.to_string().contains(raw_block::FILTER), "{error}");
    let path = &raw_block::filter_record(Path::new(NODE));
    let seen = crate::record::LvmFilterRecord { checked_at: 1 };
    crate::record::store(&host, path, &seen).unwrap();
    let made = create().unwrap();
    // What cannot be read allows nothing.
    let bytes = b"{}".as_slice();
    host.perform(&Effect::WriteFile { path, bytes }).unwrap();
    driver.volumes.delete_volume(&made.id.to_string()).unwrap();
    assert!(matches!(create().unwrap_err(), Error::Damaged { .. }));
}
