//! Target paths: refused ones, and proof that no symbolic link is ever followed.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use nix::fcntl::{AT_FDCWD, RenameFlags, renameat2};
use slackwater::host::linux::LinuxHost;
use slackwater::host::{Effect, FileKind, Host, MountSpec, NodeKind};
use slackwater::model::FsType;
use slackwater::model::size::MIB;

use super::scratch::{Scratch, folder};

fn make(path: &Path, kind: NodeKind) -> Effect<'_> {
    Effect::MakeTarget { path, kind }
}

#[test]
fn a_path_must_be_plain_and_below_an_allowed_folder() {
    let folder = folder();
    let pods = folder.path().join("pods");
    fs::create_dir_all(pods.join("a")).unwrap();
    fs::create_dir_all(folder.path().join("pods-of-others")).unwrap();
    let host = LinuxHost::new(vec![pods.clone()]);
    let refusal = |path: &Path| host.check_path(path).unwrap_err();
    host.check_path(&pods.join("a/new")).unwrap();
    host.check_path(&pods.join("a")).unwrap();

    let list = format!("(--allowed-path: {})", pods.display());
    for outside in [
        "/etc/x",
        folder.path().join("pods-of-others/x").to_str().unwrap(),
    ] {
        let text = refusal(Path::new(outside));
        assert!(text.contains(outside) && text.contains(&list), "{text}");
    }
    assert!(refusal(&pods).contains("not below"), "the folder itself");
    assert!(refusal(Path::new("pods/a")).contains("absolute"));
    assert!(refusal(Path::new("")).contains("absolute"));
    for odd in ["a//b", "a/./b", "a/../../etc", "a/", "..", "."] {
        let path = format!("{}/{odd}", pods.display());
        assert!(refusal(Path::new(&path)).contains("component"), "{path}");
    }
    let long = pods.join("x/".repeat(3000) + "y");
    assert!(refusal(&long).contains("at most 4095"));
    assert!(refusal(&pods.join("no/such/x")).contains("does not exist"));
    fs::write(pods.join("file"), "").unwrap();
    assert!(refusal(&pods.join("file/x")).contains("is not a directory"));
}

#[test]
fn folders_of_the_driver_are_refused_as_target_paths() {
    let folder = folder();
    let (pods, own) = (folder.path().join("pods"), folder.path().join("own"));
    fs::create_dir(&pods).unwrap();
    fs::create_dir(&own).unwrap();
    let host = LinuxHost::new(vec![pods]).with_own_folder(own.clone());
    assert!(host.check_path(&own.join("x")).is_err());
    host.perform(&make(&own.join("x"), NodeKind::Dir)).unwrap();
    assert!(own.join("x").is_dir());
}

#[test]
fn a_link_on_the_way_or_at_the_end_is_refused_by_name() {
    let scratch = Scratch::new();
    let volume = scratch.volume("v", FsType::Ext4, 32 * MIB);
    let outside = scratch.root.join("outside");
    fs::create_dir(&outside).unwrap();
    symlink(&outside, scratch.pods.join("link")).unwrap();
    symlink("v", scratch.pods.join("inner")).unwrap();
    for path in ["link", "link/x", "inner/mount", "inner/new"] {
        let path = scratch.pods.join(path);
        let text = scratch.host.check_path(&path).unwrap_err();
        assert!(text.contains("is a symbolic link"), "{text}");
        let refusals = [
            make(&path, NodeKind::Dir),
            make(&path, NodeKind::File),
            Effect::RemoveTarget { path: &path },
            Effect::Bind {
                source: &volume.target,
                target: &path,
                read_only: false,
            },
            Effect::Bind {
                source: &path,
                target: &volume.target,
                read_only: false,
            },
            Effect::Mount(MountSpec {
                device: &volume.device,
                target: &path,
                fs: FsType::Ext4,
                options: &[],
                read_only: false,
            }),
        ];
        for effect in refusals {
            let text = scratch.refused(&effect);
            assert!(text.contains("symbolic link"), "{}: {text}", effect.name());
        }
        scratch.refused(&Effect::Unmount { target: &path });
    }
    assert!(fs::read_dir(&outside).unwrap().next().is_none());
    let link = scratch
        .host
        .stat_csi_path(&scratch.pods.join("link"))
        .unwrap();
    assert_eq!(link.unwrap().kind, FileKind::Link);
}

#[test]
fn a_link_that_is_inserted_during_the_lookup_is_not_followed() {
    let scratch = Scratch::new();
    let volume = scratch.volume("v", FsType::Ext4, 32 * MIB);
    let (outside, pod) = (scratch.root.join("outside"), scratch.pods.join("pod"));
    fs::create_dir(&outside).unwrap();
    fs::create_dir(&pod).unwrap();
    let bait = scratch.pods.join("bait");
    symlink(&outside, &bait).unwrap();
    let stop = AtomicBool::new(false);
    let target = pod.join("mount");
    let mut mounted = 0;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                let exchange = RenameFlags::RENAME_EXCHANGE;
                renameat2(AT_FDCWD, &pod, AT_FDCWD, &bait, exchange).unwrap();
            }
        });
        for _ in 0..2000 {
            let created = scratch.perform(&make(&target, NodeKind::Dir));
            let bound = scratch.perform(&Effect::Bind {
                source: &volume.target,
                target: &target,
                read_only: true,
            });
            mounted += usize::from(created.is_ok() && bound.is_ok());
            let _ = scratch.perform(&Effect::Unmount { target: &target });
            let _ = scratch.perform(&Effect::RemoveTarget { path: &target });
        }
        stop.store(true, Ordering::Relaxed);
    });
    assert!(fs::read_dir(&outside).unwrap().next().is_none());
    assert!(mounted > 0, "some tries meet the folder");
    let mounts = scratch.host.mounts().unwrap();
    assert!(
        mounts
            .iter()
            .all(|mount| !mount.mount_point.starts_with(&outside))
    );
}

#[test]
fn targets_can_be_created_and_removed_repeatedly() {
    let folder = folder();
    let root = folder.path();
    let host = LinuxHost::new(vec![root.to_path_buf()]);
    let perform = |effect: Effect<'_>| host.perform(&effect).map(drop);
    for (name, kind, found) in [
        ("dir", NodeKind::Dir, FileKind::Dir),
        ("file", NodeKind::File, FileKind::File),
    ] {
        let path = root.join(name);
        perform(make(&path, kind)).unwrap();
        perform(make(&path, kind)).unwrap();
        assert_eq!(host.stat_csi_path(&path).unwrap().unwrap().kind, found);
        let other = match kind {
            NodeKind::Dir => NodeKind::File,
            NodeKind::File => NodeKind::Dir,
        };
        assert!(perform(make(&path, other)).is_err());
        perform(Effect::RemoveTarget { path: &path }).unwrap();
        perform(Effect::RemoveTarget { path: &path }).unwrap();
        assert!(host.stat_csi_path(&path).unwrap().is_none());
    }
    // If the parent is missing, the path does not exist.
    let orphan = root.join("gone/x");
    assert!(host.stat_csi_path(&orphan).unwrap().is_none());
    perform(Effect::RemoveTarget { path: &orphan }).unwrap();
    assert!(perform(make(&orphan, NodeKind::Dir)).is_err());
}

#[test]
fn a_folder_with_content_is_not_removed() {
    let folder = folder();
    let root = folder.path();
    let host = LinuxHost::new(vec![root.to_path_buf()]);
    fs::write(root.join("file"), "data").unwrap();
    fs::create_dir_all(root.join("dir/inner")).unwrap();
    for name in ["file", "dir"] {
        let path = root.join(name);
        let effect = Effect::RemoveTarget { path: &path };
        assert!(host.perform(&effect).is_err());
        assert!(path.exists());
    }
}
