//! Owners, setuid and setgid of archives, with the capabilities that the pod of `preserveOwners` has: root has
//! these alone, in a process of its own.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, lchown, symlink};
use std::path::Path;
use std::process::Command;

use serde_json::json;
use slackwater_populate::config::Config;
use slackwater_populate::report::Report;
use slackwater_populate::run::Attempt;

use crate::server::serves;
use crate::support::{Volume, policy};

/// The configuration of the process.
const CONFIG: &str = "SLACKWATER_POPULATE_OWNERS";
/// Those of the controller's pod (`OWNER_CAPABILITIES`), and their bits.
const CAPABILITIES: [(&str, u64); 4] = [
    ("chown", 1 << 0),
    ("dac_override", 1 << 1),
    ("fowner", 1 << 3),
    ("fsetid", 1 << 4),
];

/// Not a test by itself: another one starts it, as a process with few capabilities.
#[test]
fn an_attempt_with_few_capabilities() {
    let Ok(text) = std::env::var(CONFIG) else {
        return;
    };
    let status = fs::read_to_string("/proc/self/status").expect("it is read");
    let mut lines = status.lines();
    let effective = lines.find_map(|line| line.strip_prefix("CapEff:\t"));
    let effective = u64::from_str_radix(effective.expect("a line"), 16).expect("a number");
    let all: u64 = CAPABILITIES.iter().map(|(_, bit)| bit).sum();
    assert_eq!(effective & !all, 0, "{effective:x}");
    let config = Config::parse(&text).expect("it is valid");
    let report = Report::new(std::io::sink());
    let attempt = Attempt::prepare(&config, policy(), &report).expect("it is prepared");
    attempt.run().expect("the target is filled");
}

/// Fills a volume as root with some capabilities. Returns whether that succeeded.
fn fill_with(volume: &Volume, archive: &[u8], capabilities: &[&str], keeps: bool) -> bool {
    let server = serves(archive.to_vec());
    let config = volume.config(&server.url("/x"), json!({"preserveOwners": keeps}));
    let bounds = capabilities.iter().map(|name| format!(",+{name}"));
    let bounds = format!("--bounding-set=-all{}", bounds.collect::<String>());
    let output = Command::new("setpriv")
        .args([&bounds, "--inh-caps=-all", "--no-new-privs"])
        .arg(std::env::current_exe().expect("this program"))
        .args([
            "--exact",
            "owners::an_attempt_with_few_capabilities",
            "--nocapture",
        ])
        .env(CONFIG, config.to_string())
        .output()
        .expect("setpriv starts");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.contains("running 1 test"), "{output:?}");
    let stderr = String::from_utf8_lossy(&output.stderr);
    let is_filled = output.status.success();
    // It was the attempt that failed, and nothing before it.
    assert!(
        is_filled || stderr.contains("the target is filled"),
        "{stderr}"
    );
    is_filled
}

/// Name, mode, user and group.
const ENTRIES: [(&str, u32, u32, u32); 5] = [
    ("closed", 0o700, 1000, 2000),
    ("closed/inner", 0o2710, 1001, 2001),
    ("closed/inner/program", 0o4755, 1002, 2002),
    ("closed/inner/group", 0o2755, 1003, 2003),
    ("closed/inner/secret", 0o400, 1004, 2004),
];
const LINK: &str = "closed/inner/link";

/// An archive in which a folder is named after what is inside, with an attribute on each entry that looks like
/// file capabilities. It is not valid: the kernel would refuse it.
fn archive() -> Vec<u8> {
    let folder = tempfile::TempDir::with_prefix("slackwater-").expect("a folder");
    let path = |name: &str| folder.path().join(name);
    fs::create_dir_all(path("closed/inner")).expect("a folder");
    for name in ["program", "group", "secret"] {
        fs::write(path("closed/inner").join(name), name).expect("a file");
    }
    symlink("secret", path(LINK)).expect("a link");
    lchown(path(LINK), Some(1005), Some(2005)).expect("an owner");
    fs::hard_link(path("closed/inner/secret"), path("closed/inner/hard")).expect("a link");
    for (name, mode, user, group) in ENTRIES {
        chown(path(name), Some(user), Some(group)).expect("an owner");
        let mode = fs::Permissions::from_mode(mode);
        fs::set_permissions(path(name), mode).expect("a mode");
    }
    let names: Vec<_> = ENTRIES.iter().map(|(name, ..)| *name).rev().collect();
    let list = path("list");
    let rest = [LINK, "closed/inner/hard"];
    fs::write(&list, [&names[..], &rest].concat().join("\n")).expect("a file");
    let output = Command::new("tar")
        .args(["--create", "--format=pax", "--no-recursion", "--directory"])
        .arg(folder.path())
        .arg("--pax-option=SCHILY.xattr.security.capability:=x")
        .arg("--files-from")
        .arg(&list)
        .output()
        .expect("tar starts");
    assert!(output.status.success(), "{output:?}");
    output.stdout
}

fn owner_and_mode(path: &Path) -> (u32, u32, u32) {
    let found = fs::symlink_metadata(path).expect("it exists");
    (found.mode() & 0o7777, found.uid(), found.gid())
}

/// Whether each entry has the mode and the owner that it has in the archive.
fn is_whole(volume: &Volume) -> bool {
    let are_same = ENTRIES.iter().all(|(name, mode, user, group)| {
        let path = volume.root().join(name);
        path.exists() && owner_and_mode(&path) == (*mode, *user, *group)
    });
    let link = volume.root().join(LINK);
    are_same && link.is_symlink() && {
        let (_, user, group) = owner_and_mode(&link);
        (user, group) == (1005, 2005)
    }
}

#[test]
fn owners_and_setuid_are_kept_with_the_capabilities_of_the_pod_and_none_less() {
    let archive = archive();
    let names: Vec<_> = CAPABILITIES.iter().map(|(name, _)| *name).collect();
    let volume = Volume::new();
    assert!(fill_with(&volume, &archive, &names, true));
    assert!(is_whole(&volume));
    let hard = volume.root().join("closed/inner/hard");
    assert_eq!(owner_and_mode(&hard), (0o400, 1004, 2004));
    for missing in &names {
        let others: Vec<_> = names.iter().copied().filter(|one| one != missing).collect();
        let volume = Volume::new();
        let is_filled = fill_with(&volume, &archive, &others, true);
        assert!(!is_filled || !is_whole(&volume), "{missing} is not needed");
    }
}

#[test]
fn without_preserve_owners_root_drops_setuid_and_needs_no_capability() {
    let volume = Volume::new();
    assert!(fill_with(&volume, &archive(), &[], false));
    for (name, mode, ..) in ENTRIES {
        let found = owner_and_mode(&volume.root().join(name));
        assert_eq!(found, (mode & 0o777, 0, 0), "{name}");
    }
}
