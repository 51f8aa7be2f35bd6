//! Which pools a start serves if several are defined and one of them is wrong.

use super::*;
use crate::host::memory::MemoryHost;
use crate::model::PoolDefinition;
use crate::operation::pools::{admin, node_record};
use crate::operation::tests::{NODE_RECORD as NODE, pool, settings};

fn start_as(host: &MemoryHost, alone: bool, pools: &[PoolDefinition]) -> Result<Driver> {
    let settings = Settings {
        alone,
        ..settings(pools)
    };
    Driver::start(settings, CutInterfaces::simulated(host.another_process()))
}

fn start(host: &MemoryHost, pools: &[PoolDefinition]) -> Result<Driver> {
    start_as(host, true, pools)
}

/// A machine with a pool at `/memory/a`, which its node record contains.
fn machine(folders: &[&str]) -> (MemoryHost, PoolDefinition) {
    let host = MemoryHost::new();
    for folder in folders {
        host.make_folder(Path::new(folder)).unwrap();
    }
    let a = pool("a=file:/memory/a");
    admin::init(&host, Path::new(NODE), &a).unwrap();
    (host, a)
}

/// `cp -a` of a pool without volumes.
fn copy(host: &MemoryHost, from: &str, to: &str) {
    for part in ["", "volumes", "snapshots", "trash"] {
        host.make_folder(&Path::new(to).join(part)).unwrap();
    }
    let record = host.read_file(&Path::new(from).join("pool.json")).unwrap();
    let target = Path::new(to).join("pool.json");
    host.put_file(&target, &record.unwrap()).unwrap();
}

/// The refused pools and their reasons, by name.
fn refusals(driver: &Driver) -> Vec<(String, String)> {
    let pools = driver.pool_status().into_iter();
    let refused = pools.filter_map(|pool| Some((pool.name, pool.refusal?)));
    refused.collect()
}

#[test]
fn a_pool_that_can_not_be_served_does_not_hold_up_the_others() {
    let (host, a) = machine(&["/memory/a", "/memory/blank", "/memory/full"]);
    host.make_folder(Path::new("/memory/full/photos")).unwrap();
    for (wrong, why) in [
        (
            "b=file:/nowhere/b,init,mount=any",
            "does not exist; is its disk mounted?",
        ),
        ("b=file:/memory/blank", "is empty and has never been a pool"),
        (
            "b=file:/memory/full,init,mount=any",
            "neither empty nor a pool",
        ),
        (
            "b=file:/memory/a,image=1Gi",
            "contains a pool without an image",
        ),
    ] {
        // Alone it is a mistake of the administrator, and ending with an error loses nothing.
        let fresh = host.another_process();
        let forgets = Effect::RemoveFile {
            path: Path::new(NODE),
        };
        let record = fresh.read_file(Path::new(NODE)).unwrap().unwrap();
        fresh.perform(&forgets).unwrap();
        let text = chain(&start(&host, &[pool(wrong)]).err().unwrap());
        assert!(text.contains(why), "{wrong}: {text}");
        host.put_file(Path::new(NODE), &record).unwrap();

        for definitions in [[a.clone(), pool(wrong)], [pool(wrong), a.clone()]] {
            let driver = start(&host, &definitions).unwrap();
            let refused = refusals(&driver);
            assert_eq!(refused.len(), 1, "{refused:?}");
            assert_eq!(refused[0].0, "b");
            assert!(refused[0].1.contains(why), "{wrong}: {refused:?}");
            driver.refresh_pools();
            assert_eq!(refusals(&driver), refused);
        }
    }
}

#[test]
fn what_was_a_pool_is_waited_for_beside_a_wrong_definition() {
    let (host, a) = machine(&["/memory/a"]);
    let away = Effect::Rename {
        from: Path::new("/memory/a"),
        to: Path::new("/memory/elsewhere"),
    };
    host.perform(&away).unwrap();
    let driver = start(&host, &[a, pool("b=file:/nowhere/b,init,mount=any")]).unwrap();
    assert_eq!(refusals(&driver).len(), 2);
    let back = Effect::Rename {
        from: Path::new("/memory/elsewhere"),
        to: Path::new("/memory/a"),
    };
    host.perform(&back).unwrap();
    driver.refresh_pools();
    assert_eq!(refusals(&driver).len(), 1);
}

#[test]
fn a_pool_of_another_process_ends_the_start_of_one_that_is_alone() {
    let (host, a) = machine(&["/memory/a", "/memory/b"]);
    let b = pool("b=file:/memory/b,init,mount=any");
    let holder = host.another_process();
    let held = holder.try_lock_file(Path::new("/memory/a/lock")).unwrap();
    assert!(held.is_some());
    let both = [a, b];
    let begin = |alone| start_as(&host, alone, &both);
    let text = chain(&begin(true).err().unwrap());
    assert!(text.contains("another slackwater process"), "{text}");
    let driver = begin(false).unwrap();
    let refused = refusals(&driver);
    assert_eq!(refused[0].0, "a");
    assert!(refused[0].1.contains("another slackwater process"));
    assert_eq!(refused.len(), 1);
}

#[test]
fn of_two_copies_of_a_pool_the_known_one_is_served() {
    let (host, a) = machine(&["/memory/a"]);
    copy(&host, "/memory/a", "/memory/b");
    let b = pool("b=file:/memory/b");
    for both in [[a.clone(), b.clone()], [b.clone(), a.clone()]] {
        let driver = start(&host, &both).unwrap();
        let refused = refusals(&driver);
        assert_eq!(refused.len(), 1, "{refused:?}");
        assert_eq!(refused[0].0, "b");
        assert!(refused[0].1.contains("file:/memory/a"), "{refused:?}");
        let id = driver.pools.serving()[0].id();
        assert!(driver.pools.pool(id).unwrap().is_some());
        let refused_id = driver
            .pools
            .states()
            .into_iter()
            .find_map(|state| match state {
                ServingState::Refused { id, .. } => Some(id),
                ServingState::Serving(_) => None,
            });
        assert_eq!(refused_id, Some(None), "another place stands for it");
        driver.refresh_pools();
        assert_eq!(refusals(&driver), refused);
    }
}

#[test]
fn of_two_copies_of_a_pool_the_one_that_is_served_goes_on() {
    let (host, a) = machine(&["/memory/a"]);
    let move_it = |from, to| {
        let (from, to) = (Path::new(from), Path::new(to));
        host.perform(&Effect::Rename { from, to }).unwrap();
    };
    copy(&host, "/memory/a", "/memory/b");
    move_it("/memory/a", "/memory/away");
    let driver = start(&host, &[a, pool("b=file:/memory/b")]).unwrap();
    assert_eq!(refusals(&driver)[0].0, "a");
    // The disk of the first one returns.
    move_it("/memory/away", "/memory/a");
    driver.refresh_pools();
    let refused = refusals(&driver);
    assert_eq!(refused.len(), 1);
    assert_eq!(refused[0].0, "a");
    assert!(
        refused[0].1.contains("also exists at file:/memory/b"),
        "{refused:?}"
    );
}

#[test]
fn of_two_copies_that_are_both_unknown_neither_is_served() {
    let (host, _) = machine(&["/memory/a", "/memory/c"]);
    admin::init(&host, Path::new(NODE), &pool("c=file:/memory/c")).unwrap();
    copy(&host, "/memory/a", "/memory/b");
    let away = Effect::Rename {
        from: Path::new("/memory/a"),
        to: Path::new("/memory/x"),
    };
    host.perform(&away).unwrap();
    let three = ["x=file:/memory/x", "b=file:/memory/b", "c=file:/memory/c"].map(pool);
    let driver = start(&host, &three).unwrap();
    let refused = refusals(&driver);
    assert_eq!(refused.len(), 2, "{refused:?}");
    assert!(refused[0].1.contains("also exists at file:/memory/b"));
    assert!(refused[1].1.contains("also exists at file:/memory/x"));
    let id = node_record::load_node(&host, Path::new(NODE)).unwrap();
    let id = id.pools.iter().find(|(_, known)| known.name == "a");
    let error = driver.pools.pool(*id.unwrap().0).err().unwrap();
    assert!(matches!(error, Error::Unreachable { .. }), "{error}");
}

#[test]
fn a_copy_waits_while_the_known_one_can_not_be_read() {
    let (host, a) = machine(&["/memory/a"]);
    copy(&host, "/memory/a", "/memory/b");
    host.put_file(Path::new("/memory/a/pool.json"), b"{")
        .unwrap();
    let driver = start(&host, &[pool("b=file:/memory/b"), a]).unwrap();
    let refused = refusals(&driver);
    assert_eq!(refused.len(), 2, "{refused:?}");
    assert!(
        refused[0].1.contains("which cannot be read now"),
        "{refused:?}"
    );
}

#[test]
fn no_pool_is_made_in_a_folder_in_which_a_disk_may_be_missing() {
    let host = MemoryHost::new();
    let folder = Path::new("/memory/a");
    host.make_folder(folder).unwrap();
    for definition in [
        "a=file:/memory/a,init",
        "a=file:/memory/a,init,mount=required",
        "a=file:/memory/a,init,image=1Gi",
        "a=file:/memory/b,init",
    ] {
        let text = chain(&start(&host, &[pool(definition)]).err().unwrap());
        assert!(text.contains("mount=any"), "{definition}: {text}");
        assert_eq!(host.list_dir(folder).unwrap(), Some(Vec::new()));
        assert_eq!(host.stat(Path::new("/memory/b")).unwrap(), None);
    }
    // The disk itself is mounted at this path.
    let driver = start(&host, &[pool("a=file:/memory,init")]);
    let text = chain(&driver.err().unwrap());
    assert!(text.contains("neither empty nor a pool"), "{text}");
    let remove = Effect::RemoveDir { path: folder };
    host.perform(&remove).unwrap();
    let driver = start(&host, &[pool("a=file:/memory,init")]).unwrap();
    assert_eq!(refusals(&driver), []);
    assert_eq!(driver.pools.serving()[0].pool_fs.without_mount, None);
}

#[test]
fn a_pool_that_is_there_is_served_wherever_it_is() {
    let host = MemoryHost::new();
    host.make_folder(Path::new("/memory/a")).unwrap();
    drop(start(&host, &[pool("a=file:/memory/a,init,mount=any")]).unwrap());
    for definition in [
        "a=file:/memory/a,init",
        "a=file:/memory/a,init,mount=required",
        "a=file:/memory/a",
    ] {
        // Also on a machine whose record of it is gone.
        for forgets in [false, true] {
            if forgets {
                let path = Path::new(NODE);
                host.perform(&Effect::RemoveFile { path }).unwrap();
            }
            let driver = start(&host, &[pool(definition)]).unwrap();
            assert_eq!(refusals(&driver), [], "{definition}");
            let pool_fs = &driver.pools.serving()[0].pool_fs;
            let why = pool_fs.without_mount.as_ref().unwrap();
            assert!(
                why.contains("no file system is mounted at /memory/a"),
                "{why}"
            );
        }
    }
}
