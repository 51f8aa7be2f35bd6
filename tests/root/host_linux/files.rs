//! Files and folders of a pool, and the detection of the backing file system.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::PathBuf;
use std::process::{Command, Stdio};

use slackwater::host::linux::LinuxHost;
use slackwater::host::{Effect, FileKind, Host};
use slackwater::model::FsType;
use slackwater::model::size::MIB;

use super::scratch::{Scratch, folder, run, text};

#[test]
fn any_number_of_files_and_folders_is_synced_at_once_or_the_error_names_the_one_that_fails() {
    for fs in FsType::ALL {
        let scratch = Scratch::on(fs);
        let mut paths = Vec::new();
        for n in 0..70 {
            let folder = scratch.pool.join(format!("{n}"));
            let (path, bytes) = (folder.join("record"), &b"text"[..]);
            scratch.done(&Effect::MakeDir { path: &folder });
            scratch.done(&Effect::WriteFile { path: &path, bytes });
            paths.extend([path, folder]);
        }
        paths.push(scratch.pool.clone());
        scratch.done(&Effect::SyncAll { paths: &paths });
        scratch.done(&Effect::SyncAll { paths: &[] });
        let missing: PathBuf = scratch.pool.join("69/missing");
        paths.push(missing.clone());
        let refused = scratch.refused(&Effect::SyncAll { paths: &paths });
        assert!(refused.contains(text(&missing)), "{fs}: {refused}");
    }
}

#[test]
fn the_backing_file_system_is_found_through_links_and_binds() {
    for fs in FsType::ALL {
        let scratch = Scratch::on(fs);
        let inner = scratch.pool.join("inner");
        scratch.done(&Effect::MakeDir { path: &inner });
        let link = scratch.root.join("link");
        symlink(&inner, &link).unwrap();
        let backing = scratch.host.backing_fs(&link).unwrap();
        assert_eq!(backing.fs_name, fs.name());
        assert_eq!(backing.mount_point, scratch.pool);
        // XFS with shared blocks accepts direct writes only of whole blocks.
        let sector = if fs == FsType::Xfs {
            4096..=4096
        } else {
            512..=4096
        };
        assert!(sector.contains(&backing.sector), "{fs}: {}", backing.sector);

        let (pinned, _kept) = scratch.host.pin_dir(&link).unwrap();
        assert_eq!(scratch.host.backing_fs(&pinned).unwrap(), backing);
        let space = scratch.host.space(&pinned).unwrap();
        assert!(
            space.total > 700 * MIB && space.available <= space.free,
            "{fs}: {space:?}"
        );
        assert_eq!(space.inodes == 0, fs == FsType::Btrfs, "{fs}: {space:?}");
    }
}

#[test]
fn a_pinned_folder_is_reached_whatever_is_mounted_over_it() {
    let scratch = Scratch::new();
    let over = scratch.root.join("over");
    fs::create_dir(&over).unwrap();
    fs::write(over.join("below"), "x").unwrap();
    let (pinned, _kept) = scratch.host.pin_dir(&over).unwrap();
    run("mount", &["-t", "tmpfs", "none", text(&over)]);
    assert!(scratch.host.stat(&over.join("below")).unwrap().is_none());
    assert!(scratch.host.stat(&pinned.join("below")).unwrap().is_some());
    assert!(scratch.host.pin_dir(&scratch.root.join("missing")).is_err());
}

#[test]
fn a_lock_is_exclusive_and_no_child_inherits_it() {
    let folder = folder();
    let path = folder.path().join("lock");
    let first = LinuxHost::new(Vec::new());
    let second = LinuxHost::new(Vec::new());
    let lock = first.try_lock_file(&path).unwrap();
    assert!(lock.is_some());
    assert!(second.try_lock_file(&path).unwrap().is_none());
    assert!(
        first.try_lock_file(&path).unwrap().is_none(),
        "nor twice by the same"
    );
    let mut child = Command::new("sleep")
        .arg("60")
        .stdin(Stdio::null())
        .spawn()
        .unwrap();
    drop(lock);
    let free = second.try_lock_file(&path);
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(
        free.unwrap().is_some(),
        "the child runs, and the lock is free"
    );
    let mode = fs::metadata(&path).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
}

#[test]
fn files_and_folders_are_created_once_and_can_be_removed_repeatedly() {
    let folder = folder();
    let host = LinuxHost::new(Vec::new());
    let perform = |effect: Effect<'_>| host.perform(&effect).map(drop);
    let (dir, file, new) = (
        folder.path().join("dir"),
        folder.path().join("dir/file"),
        folder.path().join("dir/new"),
    );
    assert_eq!(host.list_dir(&dir).unwrap(), None);
    assert_eq!(host.read_file(&file).unwrap(), None);
    perform(Effect::MakeDir { path: &dir }).unwrap();
    perform(Effect::MakeDir { path: &dir }).unwrap();
    assert_eq!(
        fs::metadata(&dir).unwrap().permissions().mode() & 0o777,
        0o700
    );
    for bytes in [&b"first, longer"[..], b"second"] {
        perform(Effect::WriteFile { path: &file, bytes }).unwrap();
        assert_eq!(host.read_file(&file).unwrap().as_deref(), Some(bytes));
    }
    assert!(perform(Effect::MakeDir { path: &file }).is_err());
    perform(Effect::SyncFile { path: &file }).unwrap();
    perform(Effect::Rename {
        from: &file,
        to: &new,
    })
    .unwrap();
    perform(Effect::SyncDir { path: &dir }).unwrap();
    assert_eq!(host.list_dir(&dir).unwrap().unwrap(), ["new"]);
    assert_eq!(host.stat(&new).unwrap().unwrap().kind, FileKind::File);
    assert!(
        perform(Effect::RemoveDir { path: &dir }).is_err(),
        "the folder is not empty"
    );
    for _ in 0..2 {
        perform(Effect::RemoveFile { path: &new }).unwrap();
    }
    for _ in 0..2 {
        perform(Effect::RemoveDir { path: &dir }).unwrap();
    }
}

#[test]
fn a_link_in_a_pool_is_neither_read_nor_written() {
    let folder = folder();
    let host = LinuxHost::new(Vec::new());
    let (secret, link) = (folder.path().join("secret"), folder.path().join("link"));
    fs::write(&secret, "secret").unwrap();
    symlink(&secret, &link).unwrap();
    assert!(host.read_file(&link).is_err());
    let effects = [
        Effect::WriteFile {
            path: &link,
            bytes: b"x",
        },
        Effect::Allocate {
            path: &link,
            size: 4096,
            reserve: false,
        },
        Effect::Discard {
            path: &link,
            from: 0,
        },
    ];
    for effect in effects {
        assert!(host.perform(&effect).is_err(), "{}", effect.name());
    }
    assert_eq!(fs::read_to_string(&secret).unwrap(), "secret");
    assert_eq!(host.stat(&link).unwrap().unwrap().kind, FileKind::Link);
}

#[test]
fn this_host_has_all_requirements_of_volumes_or_reports_what_to_do() {
    let host = LinuxHost::new(Vec::new());
    for missing in host.missing() {
        assert!(missing.contains("; "), "{missing:?} names no fix");
    }
    let boot = host.boot_id().unwrap();
    assert_eq!(boot, LinuxHost::new(Vec::new()).boot_id().unwrap());
    assert_ne!(host.random_uuid(), host.random_uuid());
    assert!(host.now() > 1_600_000_000);
}
