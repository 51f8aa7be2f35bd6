//! Pools that a running driver adopts and forgets.

use std::path::Path;

use nix::errno::Errno;

use super::*;
use crate::cut::CutInterfaces;
use crate::host::memory::{FaultMode, MemoryHost};
use crate::host::{Effect, Host};
use crate::model::HomeId;
use crate::operation::pools::node_record::load_node;
use crate::operation::tests::{NODE_RECORD, pool, settings};
use crate::operation::{Presence, Settings};

const THEIRS: &str = "/srv/theirs.json";

fn node() -> &'static Path {
    Path::new(NODE_RECORD)
}

fn definitions() -> [PoolDefinition; 2] {
    [pool("a=file:/memory/a"), pool("b=file:/memory/b")]
}

/// A machine with a pool at `/memory/a`, and the disk of another machine at `/memory/b`.
fn machine() -> (MemoryHost, PoolId) {
    let host = MemoryHost::new();
    let [a, b] = definitions();
    admin::init(&host, node(), &a).unwrap();
    let made = admin::init(&host, Path::new(THEIRS), &b).unwrap();
    (host, made.pool.id)
}

fn start_with(host: &MemoryHost, pools: &[PoolDefinition]) -> Driver {
    let settings = Settings {
        alone: false,
        ..settings(pools)
    };
    Driver::start(settings, CutInterfaces::simulated(host.clone())).unwrap()
}

fn start(host: &MemoryHost) -> Driver {
    start_with(host, &definitions())
}

fn refusal(result: Result<()>) -> String {
    result.unwrap_err().to_string()
}

/// The second pool: its ID, why it is not served, and what was found at its place.
fn second(driver: &Driver) -> (Option<PoolId>, Option<String>, Presence) {
    let status = driver.pool_status().remove(1);
    (status.id, status.refusal, status.presence)
}

fn move_away(host: &MemoryHost, path: &str) {
    let (from, to) = (Path::new(path), Path::new("/memory/away"));
    host.perform(&Effect::Rename { from, to }).unwrap();
}

fn home_at(host: &MemoryHost, path: &str) -> Option<HomeId> {
    let found = place::identify(host, &pool(&format!("x=file:{path}")), &[]).unwrap();
    found.map(|(_, home)| home)
}

#[test]
fn a_pool_of_another_home_is_adopted_by_its_id_and_served_at_once() {
    let (host, theirs) = machine();
    let driver = start(&host);
    let (id, refusal, presence) = second(&driver);
    assert_eq!((id, presence), (Some(theirs), Presence::OtherHome));
    assert!(refusal.unwrap().contains("slackwater pool adopt b"));
    for _ in 0..2 {
        driver.adopt_pool(theirs).unwrap();
        assert_eq!(second(&driver), (Some(theirs), None, Presence::Unknown));
        assert_eq!(home_at(&host, "/memory/b"), Some(driver.pools.home()));
    }
    let known = &load_node(&host, node()).unwrap().pools[&theirs];
    assert_eq!(known.place, "file:/memory/b");
    assert_eq!(host.violations(), Vec::<String>::new());
    assert_eq!(driver.pools.locks_held(), 0);
}

/// Nothing but the ID on the disk says which pool it is.
#[test]
fn a_pool_that_is_only_in_the_node_record_is_not_adopted() {
    let (host, theirs) = machine();
    let driver = start(&host);
    driver.adopt_pool(theirs).unwrap();
    drop(driver);
    // Another disk of another machine is mounted in its place.
    move_away(&host, "/memory/b");
    let host = host.restart_process();
    let [_, b] = definitions();
    let other = Path::new("/srv/other.json");
    let made = admin::init(&host, other, &b).unwrap().pool;
    let driver = start(&host);
    let record = || load_node(&host, node()).unwrap();
    let before = record();
    let message = refusal(driver.adopt_pool(theirs));
    assert!(message.contains("no place that is configured"), "{message}");
    let unknown = PoolId(host.random_uuid());
    assert!(driver.adopt_pool(unknown).is_err());
    assert_eq!(home_at(&host, "/memory/b"), Some(made.home));
    assert_eq!(record(), before);
}

#[test]
fn one_of_two_copies_is_not_adopted() {
    let (host, theirs) = machine();
    for part in ["", "volumes", "snapshots", "trash"] {
        let folder = Path::new("/memory/c").join(part);
        host.make_folder(&folder).unwrap();
    }
    let record = host.read_file(Path::new("/memory/b/pool.json")).unwrap();
    host.put_file(Path::new("/memory/c/pool.json"), &record.unwrap())
        .unwrap();
    let [a, b] = definitions();
    let driver = start_with(&host, &[a, b, pool("c=file:/memory/c")]);
    let message = refusal(driver.adopt_pool(theirs));
    assert!(message.contains("file:/memory/b") && message.contains("file:/memory/c"));
    for path in ["/memory/b", "/memory/c"] {
        assert_ne!(home_at(&host, path), Some(driver.pools.home()));
    }
}

#[test]
fn only_a_pool_that_is_absent_is_forgotten() {
    let (host, theirs) = machine();
    let driver = start(&host);
    let own = driver.pool_status()[0].id.unwrap();
    for (id, place) in [(own, "file:/memory/a"), (theirs, "file:/memory/b")] {
        let message = refusal(driver.forget_pool(id));
        assert!(message.contains("it is present at") && message.contains(place));
    }
    driver.adopt_pool(theirs).unwrap();
    drop(driver);
    move_away(&host, "/memory/b");
    let host = host.restart_process();
    let driver = start(&host);
    let (id, refusal, presence) = second(&driver);
    assert_eq!((id, presence), (Some(theirs), Presence::Absent));
    assert!(refusal.unwrap().contains("is its disk mounted?"));
    for _ in 0..2 {
        driver.forget_pool(theirs).unwrap();
        let record = load_node(&host, node()).unwrap();
        assert!(record.forgotten.contains_key(&theirs) && !record.pools.contains_key(&theirs));
    }
    let volume = format!("{theirs}.{theirs}");
    driver.volumes.delete_volume(&volume).unwrap();
    let unknown = driver.forget_pool(PoolId(host.random_uuid()));
    assert!(matches!(unknown, Err(Error::NotFound { .. })));
    assert_eq!(driver.pools.locks_held(), 0);
}

/// The name of a pool may look like the ID of another one.
#[test]
fn a_pool_is_forgotten_by_its_id_and_not_by_its_name() {
    let host = MemoryHost::new();
    let id = PoolId(host.random_uuid());
    let misleading = pool(&format!("{id}=file:/memory/a"));
    let made = admin::init(&host, node(), &misleading).unwrap().pool;
    move_away(&host, "/memory/a");
    let driver = start_with(&host, &[misleading]);
    let message = driver.forget_pool(id);
    assert!(matches!(message, Err(Error::NotFound { .. })));
    let record = load_node(&host, node()).unwrap();
    assert!(record.pools.contains_key(&made.id) && record.forgotten.is_empty());
}

#[test]
fn a_dead_disk_is_neither_adopted_nor_forgotten() {
    let (host, theirs) = machine();
    let driver = start(&host);
    driver.adopt_pool(theirs).unwrap();
    host.kill_disk(Path::new("/memory/b")).unwrap();
    driver.refresh_pools();
    assert_eq!(second(&driver).2, Presence::Unknown);
    for message in [driver.adopt_pool(theirs), driver.forget_pool(theirs)] {
        let message = crate::error::chain(&message.unwrap_err()).to_string();
        assert!(message.contains("EIO"), "{message}");
    }
    assert!(load_node(&host, node()).unwrap().forgotten.is_empty());
}

#[test]
fn an_adoption_that_ends_at_any_effect_is_completed_by_a_repeat() {
    let modes = [
        FaultMode::Before(Errno::EIO),
        FaultMode::After(Errno::EIO),
        FaultMode::CrashBefore,
        FaultMode::CrashAfter,
    ];
    let count = {
        let (host, theirs) = machine();
        let driver = start(&host);
        let before = host.effects();
        driver.adopt_pool(theirs).unwrap();
        host.effects() - before
    };
    assert!(count > 5, "{count}");
    for n in 1..=count {
        for mode in modes {
            let (host, theirs) = machine();
            let driver = start(&host);
            host.fail_effect(n, mode);
            let _ = driver.adopt_pool(theirs);
            drop(driver);
            for power_loss in [false, true] {
                let host = host.restart_process().reboot(power_loss);
                let driver = start(&host);
                driver.adopt_pool(theirs).unwrap();
                let (_, refusal, _) = second(&driver);
                assert_eq!(refusal, None, "{n} {mode:?}");
                assert!(
                    host.violations().is_empty(),
                    "{n} {mode:?}: {:?}",
                    host.violations()
                );
            }
        }
    }
}

#[test]
fn a_pool_of_lvm_is_reported_with_its_id_and_adopted() {
    let host = MemoryHost::new();
    let thin = pool("default=lvm:vg/pool");
    let made = admin::init(&host, Path::new(THEIRS), &thin).unwrap().pool;
    let [_, b] = definitions();
    admin::init(&host, node(), &b).unwrap();
    let driver = start_with(&host, &[b, thin]);
    let (id, refusal, presence) = second(&driver);
    assert_eq!((id, presence), (Some(made.id), Presence::OtherHome));
    assert!(refusal.unwrap().contains("slackwater pool adopt"));
    driver.adopt_pool(made.id).unwrap();
    assert_eq!(second(&driver), (Some(made.id), None, Presence::Unknown));
    let message = driver.forget_pool(made.id).unwrap_err().to_string();
    assert!(message.contains("lvm:vg/pool"), "{message}");
    assert_eq!(host.violations(), Vec::<String>::new());
}
