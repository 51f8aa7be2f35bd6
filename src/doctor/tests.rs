//! Results of doctor on simulated machines, as reviewed snapshots.

use std::path::Path;

use super::*;
use crate::host::memory::{FaultMode, MemoryHost, MemoryOptions};
use crate::operation::pools::admin;

const STATE: &str = "/memory-run/state";
const NODE: &str = "/var/lib/slackwater/node.json";

fn machine(fs_name: &str) -> MemoryHost {
    let host = MemoryHost::with_options(MemoryOptions {
        seed: Some(1),
        fs_name: fs_name.into(),
        allowed: vec!["/var/lib/kubelet".into(), STATE.into()],
        ..Default::default()
    });
    for folder in [
        "/proc/sys/kernel",
        "/proc/self",
        "/sys/kernel",
        "/dev",
        "/usr/sbin",
        "/var/lib/kubelet",
        STATE,
    ] {
        host.make_folder(Path::new(folder)).unwrap();
    }
    let files: [(&str, &str); 8] = [
        ("/proc/sys/kernel/osrelease", "6.12.1\n"),
        ("/proc/self/status", "CapEff:\t000001ffffffffff\n"),
        (
            "/proc/self/mountinfo",
            "22 1 8:1 / / rw shared:1 - ext4 /dev/sda1 rw\n",
        ),
        ("/sys/kernel/rcu_expedited", "0\n"),
        ("/dev/loop-control", ""),
        ("/usr/sbin/blkid", ""),
        ("/usr/sbin/mkfs.ext4", ""),
        ("/usr/sbin/mkfs.xfs", ""),
    ];
    for (path, text) in files {
        host.put_file(Path::new(path), text.as_bytes()).unwrap();
    }
    host
}

fn examined(pools: &[&str]) -> Subject {
    Subject {
        pools: pools.iter().map(|text| text.parse().unwrap()).collect(),
        node_record: NODE.into(),
        state_dir: STATE.into(),
        trial_dir: format!("{STATE}/doctor-1").into(),
        allowed_paths: vec!["/var/lib/kubelet".into()],
        programs: vec!["/usr/sbin".into()],
    }
}

fn listed(checks: &[Check]) -> String {
    let lines: Vec<String> = checks.iter().map(Check::to_string).collect();
    lines.join("\n")
}

#[test]
fn a_machine_in_order() {
    let host = machine("xfs");
    let examined = examined(&["default=file:/memory/a,mount=any"]);
    admin::init(&host, Path::new(NODE), &examined.pools[0]).unwrap();
    let checks = examine(&host, &host, &examined);
    insta::assert_snapshot!(listed(&checks));
    assert!(!has_failures(&checks));
    let left = host.files_below(Path::new("/memory/a"));
    assert!(!left.iter().any(|name| name.contains("doctor")), "{left:?}");
    assert_eq!(host.loop_numbers(), []);
    assert!(host.violations().is_empty());
}

#[test]
fn a_machine_with_each_trouble_of_pools() {
    let host = machine("ext4");
    let examined = examined(&[
        "away=file:/memory/away",
        "new=file:/memory/new",
        "later=file:/memory/later,init",
        "foreign=file:/memory/foreign",
        "moved=file:/memory/moved",
        "broken=file:/memory/broken",
        "damaged=file:/memory/damaged",
    ]);
    for pool in [
        &examined.pools[0],
        &examined.pools[6],
        &"gone=file:/memory/gone".parse().unwrap(),
    ] {
        admin::init(&host, Path::new(NODE), pool).unwrap();
    }
    let away = crate::host::Effect::Rename {
        from: Path::new("/memory/away"),
        to: Path::new("/memory/elsewhere"),
    };
    host.perform(&away).unwrap();
    host.make_folder(Path::new("/memory/foreign/photos"))
        .unwrap();
    let home = crate::model::HomeId(uuid::Uuid::from_u128(7));
    crate::backend::place::make::make_pool(&host, "moved", Path::new("/memory/moved"), home)
        .unwrap();
    host.make_folder(Path::new("/memory/broken")).unwrap();
    host.put_file(Path::new("/memory/broken/pool.json"), b"{\"version\":9}")
        .unwrap();
    let volume = "/memory/damaged/volumes/00000000-0000-0000-0000-000000000001";
    host.make_folder(Path::new(volume)).unwrap();
    host.put_file(&Path::new(volume).join("record.json"), b"{}")
        .unwrap();
    let snapshot = "/memory/damaged/snapshots/00000000-0000-0000-0000-000000000002";
    host.make_folder(Path::new(snapshot)).unwrap();
    host.put_file(&Path::new(snapshot).join("data.img"), b"")
        .unwrap();
    let checks = examine(&host, &host, &examined);
    let of_pools: Vec<Check> = checks
        .into_iter()
        .filter(|check| check.subject.starts_with("pool"))
        .collect();
    insta::assert_snapshot!(listed(&of_pools));
    assert!(has_failures(&of_pools));
}

#[test]
fn a_machine_without_anything() {
    let host = MemoryHost::new();
    insta::assert_snapshot!(listed(&examine(&host, &host, &examined(&[]))));
}

#[test]
fn a_trial_that_can_not_be_made_to_its_end_leaves_nothing() {
    for mode in [
        FaultMode::Before(nix::errno::Errno::EIO),
        FaultMode::After(nix::errno::Errno::EIO),
    ] {
        for number in 1.. {
            let host = machine("xfs");
            let (before, examined) = (host.effects(), examined(&[]));
            host.fail_effect(number, mode);
            let checks = examine(&host, &host, &examined);
            if host.effects() - before < number {
                assert!(number > 25, "each step was made to fail");
                break;
            }
            let failed = host.effect_log()[before + number - 1].clone();
            let trials = ["ext4", "xfs", "freeze"];
            let tried = checks
                .iter()
                .filter(|check| trials.contains(&&*check.subject));
            let worst = tried.max_by_key(|check| check.level).unwrap();
            // An entry that was journaled but reported as failed is swept by the next process.
            let host = host.restart_process();
            let is_journal = failed.starts_with("freeze_journal");
            assert!(
                host.list_journaled().unwrap().is_empty() || is_journal,
                "{failed}"
            );
            host.sweep().unwrap();
            assert!(host.list_journaled().unwrap().is_empty(), "{failed}");
            assert!(
                host.violations().is_empty(),
                "{failed}: {:?}",
                host.violations()
            );
            // A cleanup that fails leaves what it should remove, and this is reported.
            let is_clean_up = failed.starts_with("unmount") || failed.starts_with("remove");
            // A guard that has opened the root, but whose answer did not arrive, keeps it open
            // until it notices.
            let may_leave = is_clean_up || is_journal;
            let left = host.files_below(Path::new(STATE));
            if may_leave && !left.is_empty() {
                assert_eq!(worst.level, CheckStatus::Warn, "{failed}: {worst}");
            } else {
                assert_eq!(host.loop_numbers(), [], "{failed}: {worst}");
                assert_eq!(left, Vec::<String>::new(), "{failed}: {worst}");
            }
        }
    }
}
