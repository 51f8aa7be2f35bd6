//! The actions of an administrator on pools: pools are created, moved, lost, forgotten.

use std::path::Path;

use nix::errno::Errno;

use super::*;
use crate::host::Effect;
use crate::host::memory::{FaultMode, MemoryHost, MemoryOptions};
use crate::operation::tests::{NODE_RECORD as NODE, pool, settings};
use crate::operation::{Driver, Settings};

fn node() -> &'static Path {
    Path::new(NODE)
}

fn host_with(folders: &[&str]) -> MemoryHost {
    let host = MemoryHost::new();
    for folder in folders {
        host.make_folder(Path::new(folder)).unwrap();
    }
    host
}

fn start(host: &MemoryHost, pools: &[PoolDefinition]) -> Result<Driver> {
    let interfaces = crate::cut::CutInterfaces::simulated(host.another_process());
    Driver::start(settings(pools), interfaces)
}

fn refusal<T: std::fmt::Debug>(result: Result<T>) -> String {
    result.unwrap_err().to_string()
}

#[test]
fn a_pool_is_made_once_and_served() {
    let host = host_with(&["/memory/a"]);
    let a = pool("a=file:/memory/a");
    let made = init(&host, node(), &a).unwrap();
    let again = init(&host, node(), &a).unwrap();
    assert!(made.changed && !again.changed);
    assert_eq!(made.pool, again.pool);
    let driver = start(&host.restart_process(), &[a]).unwrap();
    assert_eq!(driver.pools.home(), made.pool.home);
    assert_eq!(driver.pool_status()[0].refusal, None);
}

#[test]
fn an_extent_size_is_refused_by_name_where_there_is_none() {
    for fs_name in ["xfs", "ext4", "btrfs"] {
        let host = MemoryHost::with_options(MemoryOptions {
            fs_name: fs_name.into(),
            ..MemoryOptions::default()
        });
        for folder in ["/memory/a", "/memory/b"] {
            host.make_folder(Path::new(folder)).unwrap();
        }
        let hinted = |name: &str| {
            let place = format!("{name}=file:/memory/{name}");
            pool(&format!("{place},init,mount=any,extent=64Ki"))
        };
        let made = init(&host, node(), &hinted("a"));
        if fs_name == "xfs" {
            made.unwrap();
            start(&host.restart_process(), &[hinted("a"), hinted("b")]).unwrap();
            continue;
        }
        let sentence = refusal(made);
        assert!(
            sentence.contains(fs_name) && sentence.contains("remove extent="),
            "{sentence}"
        );
        // A start neither creates a pool nor serves an existing one.
        init(&host, node(), &pool("a=file:/memory/a")).unwrap();
        let driver = start(
            &host.restart_process(),
            &[pool("a=file:/memory/a"), hinted("b")],
        );
        let why = driver.unwrap().pool_status()[1].refusal.clone().unwrap();
        assert!(why.contains("remove extent="), "{why}");
        assert!(host.files_below(Path::new("/memory/b")).is_empty());
    }
}

#[test]
fn a_second_pool_takes_the_home_of_the_first() {
    let host = host_with(&["/memory/a", "/memory/b"]);
    let a = init(&host, node(), &pool("a=file:/memory/a")).unwrap();
    let b = init(&host, node(), &pool("b=file:/memory/b")).unwrap();
    assert_ne!(a.pool.id, b.pool.id);
    assert_eq!(a.pool.home, b.pool.home);
}

#[test]
fn only_the_last_folder_of_a_path_is_made() {
    let host = host_with(&[]);
    assert!(init(&host, node(), &pool("a=file:/memory/a")).is_ok());
    let text = refusal(init(&host, node(), &pool("b=file:/memory/x/b")));
    assert!(text.contains("/memory/x does not exist"), "{text}");
}

#[test]
fn a_folder_with_other_files_is_never_made_a_pool() {
    let host = host_with(&["/memory/a/photos"]);
    let text = refusal(init(&host, node(), &pool("a=file:/memory/a")));
    assert!(text.contains("photos"), "{text}");
    let names = host.list_dir(Path::new("/memory/a")).unwrap();
    assert_eq!(names, Some(vec!["photos".to_string()]));
}

#[test]
fn a_volume_without_its_pool_record_is_somebodys() {
    let host = host_with(&["/memory/a/volumes/x"]);
    let text = refusal(init(&host, node(), &pool("a=file:/memory/a")));
    assert!(text.contains("volumes"), "{text}");
}

#[test]
fn a_file_system_that_forgets_is_refused() {
    let options = crate::host::memory::MemoryOptions {
        fs_name: "tmpfs".into(),
        ..Default::default()
    };
    let host = MemoryHost::with_options(options);
    let text = refusal(init(&host, node(), &pool("a=file:/memory/a")));
    assert!(text.contains("lost at a reboot"), "{text}");
    let names = host.list_dir(Path::new("/memory")).unwrap();
    assert_eq!(names, Some(Vec::new()), "nothing was made");
}

#[test]
fn a_disk_that_is_not_mounted_is_not_made_a_pool_until_it_is_forgotten() {
    let host = host_with(&["/memory/a"]);
    let a = pool("a=file:/memory/a");
    let made = init(&host, node(), &a).unwrap();
    let text = refusal(forget(&host, node(), "a"));
    assert!(text.contains("the pool is present"), "{text}");

    // The disk is removed: the same path is empty.
    let moved = Effect::Rename {
        from: Path::new("/memory/a"),
        to: Path::new("/memory/elsewhere"),
    };
    host.perform(&moved).unwrap();
    host.make_folder(Path::new("/memory/a")).unwrap();
    for definition in [&a, &pool("b=file:/memory/a"), &pool("a=file:/memory/c")] {
        let text = refusal(init(&host, node(), definition));
        assert!(text.contains("is its disk mounted?"), "{text}");
    }

    let (id, _) = forget(&host, node(), "a").unwrap();
    assert_eq!(id, made.pool.id);
    assert_eq!(forget(&host, node(), &id.to_string()).unwrap().0, id);
    let new = init(&host, node(), &a).unwrap();
    assert_ne!(new.pool.id, made.pool.id);
    assert_eq!(new.pool.home, made.pool.home);
}

#[test]
fn an_unknown_pool_can_not_be_forgotten() {
    let host = host_with(&[]);
    assert!(matches!(
        forget(&host, node(), "a"),
        Err(Error::NotFound { .. })
    ));
}

#[test]
fn a_pool_of_another_machine_waits_for_adopt() {
    let host = host_with(&["/memory/a", "/memory/b"]);
    let (a, b) = (pool("a=file:/memory/a"), pool("b=file:/memory/b"));
    init(&host, node(), &a).unwrap();
    let theirs = make::make_pool(
        &host,
        "b",
        Path::new("/memory/b"),
        HomeId(host.random_uuid()),
    );
    let theirs = theirs.unwrap();
    let text = refusal(init(&host, node(), &b));
    assert!(text.contains("pool adopt b=file:/memory/b"), "{text}");

    // Another process has the pool and holds its lock.
    let holder = host.another_process();
    let held = holder.try_lock_file(Path::new("/memory/b/lock")).unwrap();
    assert!(held.is_some());
    let text = refusal(adopt(&host, node(), &b, &[], false));
    assert!(text.contains("stop that process first"), "{text}");
    drop(holder.restart_process());

    // The result is returned in advance, and nothing is changed.
    let changed = host.effects();
    let reported = adopt(&host, node(), &b, &[], true).unwrap();
    assert_eq!(host.effects(), changed);
    let adopted = adopt(&host, node(), &b, &[], false).unwrap();
    assert_eq!(reported, adopted);
    assert_eq!(adopted.from, Some(theirs.home));
    assert_eq!(adopted.pool.id, theirs.id);
    assert_eq!(adopt(&host, node(), &b, &[], false).unwrap().from, None);
    let driver = start(&host.restart_process(), &[a, b]).unwrap();
    assert!(
        driver
            .pool_status()
            .iter()
            .all(|pool| pool.refusal.is_none())
    );
}

#[test]
fn disks_that_move_to_a_fresh_machine_bring_their_home_along() {
    let host = host_with(&["/memory/a"]);
    let home = HomeId(host.random_uuid());
    make::make_pool(&host, "a", Path::new("/memory/a"), home).unwrap();
    let a = pool("a=file:/memory/a");
    assert_eq!(adopt(&host, node(), &a, &[], false).unwrap().from, None);
    assert_eq!(load_node(&host, node()).unwrap().home, Some(home));
}

#[test]
fn pools_of_two_machines_on_a_fresh_one_are_settled_by_adopt() {
    let host = host_with(&["/memory/a", "/memory/b"]);
    let (a, b) = (pool("a=file:/memory/a"), pool("b=file:/memory/b"));
    let made: Vec<PoolRecord> = [&a, &b]
        .iter()
        .map(|pool| {
            let home = HomeId(host.random_uuid());
            make::make_pool(&host, &pool.name, file_folder(pool).unwrap(), home).unwrap()
        })
        .collect();
    let both = [a, b.clone()];
    let driver = start(&host, &both).unwrap();
    assert!(
        driver
            .pool_status()
            .iter()
            .all(|pool| pool.refusal.is_some())
    );
    drop(driver);

    let adopted = adopt(&host, node(), &b, &both, false).unwrap();
    assert_eq!(adopted.pool.home, made[0].home);
    let driver = start(&host.restart_process(), &both).unwrap();
    assert!(
        driver
            .pool_status()
            .iter()
            .all(|pool| pool.refusal.is_none())
    );
}

#[test]
fn a_running_driver_learns_what_an_administrator_did() {
    let host = host_with(&["/memory/a", "/memory/b"]);
    let both = [pool("a=file:/memory/a"), pool("b=file:/memory/b")];
    for pool in &both {
        let home = HomeId(host.random_uuid());
        make::make_pool(&host, &pool.name, file_folder(pool).unwrap(), home).unwrap();
    }
    let driver = start(&host, &both).unwrap();
    let text = refusal(driver.pools.get_home());
    assert!(text.contains("several homes"), "{text}");

    let cli = host.another_process();
    let adopted = adopt(&cli, node(), &both[1], &both, false).unwrap();
    let host = cli.restart_process();
    driver.refresh_pools();
    assert_eq!(driver.pools.get_home().unwrap(), adopted.pool.home);
    let served = |driver: &Driver| {
        let status = driver.pool_status().into_iter();
        status.filter(|pool| pool.refusal.is_none()).count()
    };
    assert_eq!(served(&driver), 2);

    // A third pool that this machine had and that never returns.
    let gone = pool("c=file:/memory/c");
    let c = init(&host, node(), &gone).unwrap().pool.id;
    let away = Effect::Rename {
        from: Path::new("/memory/c"),
        to: Path::new("/memory/away"),
    };
    host.perform(&away).unwrap();
    driver.refresh_pools();
    let volume = format!("{c}.{}", host.random_uuid());
    assert!(driver.volumes.delete_volume(&volume).is_err());
    forget(&host, node(), "c").unwrap();
    driver.refresh_pools();
    driver.volumes.delete_volume(&volume).unwrap();
    let record = load_node(&host, node()).unwrap();
    assert!(record.forgotten.contains_key(&c) && record.pools.len() == 2);
}

#[test]
fn init_that_ends_at_any_effect_is_finished_by_a_repeat() {
    let a = pool("a=file:/memory/a");
    let count = {
        let host = host_with(&[]);
        init(&host, node(), &a).unwrap();
        host.effects()
    };
    assert!(count > 5);
    for n in 1..=count {
        for mode in [
            FaultMode::Before(Errno::EIO),
            FaultMode::After(Errno::EIO),
            FaultMode::CrashBefore,
            FaultMode::CrashAfter,
        ] {
            let host = host_with(&[]);
            host.fail_effect(n, mode);
            let _ = init(&host, node(), &a);
            let host = host.restart_process();
            for power_loss in [false, true] {
                let host = host.reboot(power_loss);
                let made = init(&host, node(), &a).unwrap();
                let home = load_node(&host, node()).unwrap().home;
                assert_eq!(home, Some(made.pool.home), "{n} {mode:?}");
            }
            let host = host.another_process();
            assert!(
                host.violations().is_empty(),
                "{n} {mode:?}: {:?}",
                host.violations()
            );
        }
    }
}

#[test]
fn an_image_that_can_not_be_made_is_refused_before_anything_is_reserved() {
    let host = |fs_name: &str| {
        MemoryHost::with_options(crate::host::memory::MemoryOptions {
            fs_name: fs_name.into(),
            ..Default::default()
        })
    };
    let nothing = Vec::<String>::new();
    let a = pool("a=file:/memory/a,image=200Gi");
    for (fs_name, why) in [
        ("ext4", "give at most image=102336Mi"),
        ("btrfs", "shares blocks by itself"),
    ] {
        let host = host(fs_name);
        let message = refusal(init(&host, node(), &a));
        assert!(message.contains(why), "{message}");
        let left = host.files_below(Path::new("/memory/a"));
        assert!(left.iter().all(|name| name == "lock"), "{left:?}");
        assert_eq!(host.files_below(Path::new("/var/lib/slackwater")), nothing);
        // The folder still counts as empty.
        init(&host, node(), &pool("a=file:/memory/a")).unwrap();
    }
}

#[test]
fn an_image_that_was_begun_is_no_pool_for_a_definition_without() {
    let host = host_with(&["/memory/a"]);
    let record = crate::record::ImageRecord {
        size: 1 << 30,
        block_size: 512,
        formatted: crate::record::Formatted::begun(
            crate::record::FormattedAs::Xfs,
            uuid::Uuid::nil(),
        ),
        created_at: 0,
    };
    crate::record::store(&host, Path::new("/memory/a/image.json"), &record).unwrap();
    let a = pool("a=file:/memory/a,init,mount=any");
    let message = refusal(init(&host, node(), &a));
    assert!(message.contains("add image=1024Mi"), "{message}");
    assert!(refusal(start(&host, std::slice::from_ref(&a)).map(drop)).contains("add image="));
    assert!(refusal(adopt(&host, node(), &a, &[], false)).contains("add image="));
}

/// Otherwise a new pool would be created at an empty path at which a pool was.
#[test]
fn the_node_record_outlives_a_power_loss_wherever_a_crash_came_before() {
    let a = pool("a=file:/memory/a,init,mount=any");
    let node_record = Path::new("/srv/far/away/node.json");
    let start = |host: &MemoryHost| {
        let settings = Settings {
            node_record: node_record.into(),
            ..settings(std::slice::from_ref(&a))
        };
        Driver::start(settings, crate::cut::CutInterfaces::simulated(host.clone()))
    };
    let calm = host_with(&["/memory/a", "/srv"]);
    start(&calm).unwrap();
    for cut_off in 1..=calm.effects() + 1 {
        let host = host_with(&["/memory/a", "/srv"]);
        host.fail_effect(cut_off, FaultMode::CrashAfter);
        let _ = start(&host);
        host.clear_faults();
        let host = host.restart_process();
        let driver = start(&host).unwrap();
        let id = driver.pool_status()[0].id;
        let host = host.reboot(true);
        let record = load_node(&host, node_record).unwrap();
        let known: Vec<_> = record.pools.keys().copied().map(Some).collect();
        assert_eq!(known, [id], "after effect {cut_off}");
    }
}

#[test]
fn a_pool_that_can_not_be_read_keeps_its_id_when_it_is_examined_again() {
    let host = host_with(&["/memory/a"]);
    let a = pool("a=file:/memory/a");
    let made = init(&host, node(), &a).unwrap();
    host.pull_disk(Path::new("/memory/a")).unwrap();
    let driver = start(&host, &[a]).unwrap();
    assert_eq!(driver.pool_status()[0].id, Some(made.pool.id));
    host.put_disk_back(Path::new("/memory/a")).unwrap();
    host.kill_disk(Path::new("/memory/a")).unwrap();
    driver.refresh_pools();
    let status = driver.pool_status().remove(0);
    assert!(status.refusal.is_some_and(|why| why.contains("EIO")));
    assert_eq!(status.id, Some(made.pool.id));
}

/// The log output while `act` runs.
fn logged(act: impl FnOnce()) -> String {
    let mut lines = tempfile::tempfile().unwrap();
    let writer = std::sync::Mutex::new(lines.try_clone().unwrap());
    let subscriber = tracing_subscriber::fmt().with_writer(writer).finish();
    tracing::subscriber::with_default(subscriber, act);
    let mut reported = String::new();
    std::io::Seek::rewind(&mut lines).unwrap();
    std::io::Read::read_to_string(&mut lines, &mut reported).unwrap();
    reported
}

#[test]
fn why_a_pool_is_not_served_is_logged_once_and_again_when_it_changes() {
    // With only one subscriber in the process, the one that came first would decide which lines are
    // logged.
    let _other = tracing::subscriber::set_default(tracing_subscriber::registry());
    let (disk, host) = (Path::new("/memory/a"), host_with(&["/memory/a"]));
    let a = pool("a=file:/memory/a");
    init(&host, node(), &a).unwrap();
    host.pull_disk(disk).unwrap();
    let reported = logged(|| {
        let driver = start(&host, &[a]).unwrap();
        (0..3).for_each(|_| driver.refresh_pools());
        host.put_disk_back(disk).unwrap();
        host.kill_disk(disk).unwrap();
        (0..3).for_each(|_| driver.refresh_pools());
    });
    let whys: Vec<_> = reported
        .lines()
        .filter(|line| line.contains("refusing to serve"))
        .collect();
    assert_eq!(whys.len(), 2, "{reported}");
    assert!(whys[0].contains("is its disk mounted?") && whys[1].contains("EIO"));
}
