//! Mounting, binding and unmounting at target paths.

use std::fs;
use std::path::Path;

use slackwater::host::linux::LinuxHost;
use slackwater::host::{Device, Effect, FileKind, Host, Mount, MountSpec, NodeKind};
use slackwater::model::FsType;
use slackwater::model::size::MIB;

use super::scratch::{Scratch, eventually, run, text};

fn mount_at(host: &LinuxHost, path: &Path) -> Option<Mount> {
    let mounts = host.mounts().unwrap();
    mounts
        .into_iter()
        .rev()
        .find(|mount| mount.mount_point == path)
}

#[test]
fn a_volume_is_mounted_as_requested_and_listed_in_the_mount_table() {
    let scratch = Scratch::new();
    for fs in FsType::ALL {
        let image = scratch.image(fs.name(), 320 * MIB);
        let hold = scratch.attach(&image);
        let device = hold.device();
        scratch.format(&device, fs);
        let target = scratch.target(&format!("{fs}/mount"));
        scratch.mount(
            &device,
            &target,
            fs,
            &["noatime", "nodev", "defaults", "x-word"],
        );
        let found = mount_at(&scratch.host, &target).unwrap();
        assert_eq!(
            (found.fs_name.as_str(), &found.source),
            (fs.name(), &device.path)
        );
        assert!(
            ["noatime", "nodev"]
                .iter()
                .all(|word| found.options.iter().any(|o| o == word))
        );
        if fs != FsType::Btrfs {
            assert_eq!(found.device, device.rdev);
        }
        fs::write(target.join("file"), "x").unwrap();
        // Only the mount keeps the loop device, which is detached with it.
        drop(hold);
        assert!(
            scratch
                .host
                .loops()
                .unwrap()
                .iter()
                .any(|status| status.backing == image.id)
        );
        scratch.unmount(&target);
        eventually("the loop device is gone", || {
            let loops = scratch.host.loops().unwrap();
            loops.iter().all(|status| status.backing != image.id)
        });
        assert!(mount_at(&scratch.host, &target).is_none());
    }
}

#[test]
fn a_wrong_option_is_named() {
    let scratch = Scratch::new();
    for fs in FsType::ALL {
        let image = scratch.image(fs.name(), 320 * MIB);
        let hold = scratch.attach(&image);
        scratch.format(&hold.device(), fs);
        let refusal = scratch.refused(&Effect::Mount(MountSpec {
            device: &hold.device(),
            target: &scratch.target(&format!("{fs}/mount")),
            fs,
            options: &["noatime".into(), "nosuchword=secret".into()],
            read_only: false,
        }));
        assert!(refusal.contains("nosuchword"), "{refusal}");
        assert!(!refusal.contains("secret"), "{refusal}");
    }
}

#[test]
fn a_device_without_the_file_system_is_refused_with_a_sentence() {
    let scratch = Scratch::new();
    let image = scratch.image("a", 320 * MIB);
    let hold = scratch.attach(&image);
    let refusal = scratch.refused(&Effect::Mount(MountSpec {
        device: &hold.device(),
        target: &scratch.target("a/mount"),
        fs: FsType::Ext4,
        options: &[],
        read_only: false,
    }));
    assert!(refusal.contains("has no ext4"), "{refusal}");
}

#[test]
fn a_node_with_another_number_is_never_mounted_or_bound() {
    let scratch = Scratch::new();
    let volume = scratch.volume("v", FsType::Ext4, 32 * MIB);
    let device = Device {
        path: volume.device.path.clone(),
        rdev: volume.device.rdev + 1,
    };
    let refusal = scratch.refused(&Effect::Mount(MountSpec {
        device: &device,
        target: &scratch.target("other/mount"),
        fs: FsType::Ext4,
        options: &[],
        read_only: false,
    }));
    assert!(refusal.contains("not the block device"), "{refusal}");
    let target = scratch.pods.join("node");
    scratch.done(&Effect::MakeTarget {
        path: &target,
        kind: NodeKind::File,
    });
    let refusal = scratch.refused(&Effect::BindDevice {
        device: &device,
        target: &target,
    });
    assert!(refusal.contains("not the block device"), "{refusal}");
}

#[test]
fn a_label_is_dropped_where_the_kernel_has_no_selinux() {
    if Path::new("/sys/fs/selinux/enforce").exists() {
        return;
    }
    let scratch = Scratch::new();
    let volume = scratch.volume("v", FsType::Xfs, 320 * MIB);
    scratch.unmount(&volume.target);
    let label = "context=\"system_u:object_r:container_file_t:s0:c15,c25\"";
    scratch.mount(
        &volume.device,
        &volume.target,
        FsType::Xfs,
        &[label, "nouuid"],
    );
}

#[test]
fn a_read_only_bind_is_read_only_and_keeps_the_flags_of_its_source() {
    let scratch = Scratch::new();
    let volume = scratch.volume("v", FsType::Ext4, 32 * MIB);
    scratch.unmount(&volume.target);
    scratch.mount(
        &volume.device,
        &volume.target,
        FsType::Ext4,
        &["nosuid", "noexec", "noatime"],
    );
    fs::write(volume.target.join("file"), "x").unwrap();
    let (pod, reader) = (scratch.target("pod/mount"), scratch.target("reader/mount"));
    for (target, read_only) in [(&pod, false), (&reader, true)] {
        scratch.done(&Effect::Bind {
            source: &volume.target,
            target,
            read_only,
        });
    }
    assert_eq!(fs::read_to_string(reader.join("file")).unwrap(), "x");
    let refusal = fs::write(reader.join("file"), "y").unwrap_err();
    assert_eq!(refusal.kind(), std::io::ErrorKind::ReadOnlyFilesystem);
    fs::write(pod.join("file"), "z").unwrap();
    assert_eq!(fs::read_to_string(reader.join("file")).unwrap(), "z");

    let found = mount_at(&scratch.host, &reader).unwrap();
    assert!(found.is_read_only());
    for word in ["nosuid", "noexec", "noatime"] {
        assert!(
            found.options.iter().any(|option| option == word),
            "{found:?}"
        );
    }
    assert!(!mount_at(&scratch.host, &pod).unwrap().is_read_only());
    scratch.unmount(&reader);
    scratch.unmount(&pod);
    assert!(fs::read_dir(&reader).unwrap().next().is_none());
}

#[test]
fn a_device_is_bound_to_a_target_file() {
    let scratch = Scratch::new();
    let image = scratch.image("raw", 16 * MIB);
    let hold = scratch.attach(&image);
    let device = hold.device();
    let target = scratch.pods.join("raw");
    scratch.done(&Effect::MakeTarget {
        path: &target,
        kind: NodeKind::File,
    });
    scratch.done(&Effect::BindDevice {
        device: &device,
        target: &target,
    });
    let found = scratch.host.stat_csi_path(&target).unwrap().unwrap();
    assert_eq!((found.kind, found.rdev), (FileKind::Block, device.rdev));
    let refusal = scratch.refused(&Effect::RemoveTarget { path: &target });
    assert!(
        refusal.contains("it is a block device instead of"),
        "{refusal}"
    );
    scratch.unmount(&target);
    scratch.done(&Effect::RemoveTarget { path: &target });
    assert!(scratch.host.stat_csi_path(&target).unwrap().is_none());
}

#[test]
fn odd_names_survive_the_mount_table() {
    let scratch = Scratch::new();
    let volume = scratch.volume("v", FsType::Ext4, 32 * MIB);
    for name in [
        "with space",
        "tab\tand\nline",
        "back\\slash",
        "\u{fc}\u{4e16}",
        "a\\040b",
    ] {
        let target = scratch.target(name);
        scratch.done(&Effect::Bind {
            source: &volume.target,
            target: &target,
            read_only: true,
        });
        assert!(
            mount_at(&scratch.host, &target).unwrap().is_read_only(),
            "{name:?}"
        );
        scratch.unmount(&target);
        scratch.done(&Effect::RemoveTarget { path: &target });
    }
}

#[test]
fn only_the_topmost_mount_goes_and_a_busy_one_stays() {
    let scratch = Scratch::new();
    let volume = scratch.volume("v", FsType::Ext4, 32 * MIB);
    let target = scratch.target("pod/mount");
    for _ in 0..2 {
        scratch.done(&Effect::Bind {
            source: &volume.target,
            target: &target,
            read_only: false,
        });
    }
    let open = fs::File::create(target.join("open")).unwrap();
    assert!(
        scratch
            .refused(&Effect::Unmount { target: &target })
            .contains("EBUSY")
    );
    drop(open);
    scratch.unmount(&target);
    assert!(mount_at(&scratch.host, &target).is_some());
    scratch.unmount(&target);
    assert!(mount_at(&scratch.host, &target).is_none());
    assert!(
        scratch
            .refused(&Effect::Unmount { target: &target })
            .contains("EINVAL")
    );
}

#[test]
fn a_target_folder_behind_a_link_keeps_the_path_of_the_request() {
    let scratch = Scratch::new();
    let link = scratch.root.join("kubelet");
    std::os::unix::fs::symlink(&scratch.pods, &link).unwrap();
    let host = LinuxHost::new(vec![link.clone()]);
    let volume = scratch.volume("v", FsType::Ext4, 32 * MIB);
    let found = mount_at(&host, &link.join("v/mount"));
    assert!(found.is_some(), "{:#?}", host.mounts().unwrap());
    let target = link.join("v/bound");
    host.check_path(&target).unwrap();
    for effect in [
        Effect::MakeTarget {
            path: &target,
            kind: NodeKind::Dir,
        },
        Effect::Bind {
            source: &link.join("v/mount"),
            target: &target,
            read_only: true,
        },
    ] {
        host.perform(&effect).unwrap();
    }
    assert!(mount_at(&host, &target).unwrap().is_read_only());
    assert!(volume.target.parent().unwrap().join("bound").exists());
}

#[test]
fn a_bind_on_a_shared_mount_reaches_its_peers() {
    let scratch = Scratch::new();
    let volume = scratch.volume("v", FsType::Ext4, 32 * MIB);
    fs::write(volume.target.join("file"), "x").unwrap();
    let (shared, peer) = (scratch.target("shared"), scratch.root.join("peer"));
    fs::create_dir(&peer).unwrap();
    run("mount", &["-t", "tmpfs", "none", text(&shared)]);
    run("mount", &["--make-shared", text(&shared)]);
    run("mount", &["--bind", text(&shared), text(&peer)]);
    let target = scratch.target("shared/mount");
    scratch.done(&Effect::Bind {
        source: &volume.target,
        target: &target,
        read_only: true,
    });
    assert!(
        peer.join("mount/file").exists(),
        "as a pod's mount namespace would see it"
    );
    assert!(
        mount_at(&scratch.host, &peer.join("mount"))
            .unwrap()
            .is_read_only()
    );
    scratch.unmount(&target);
    assert!(!peer.join("mount/file").exists());
}

#[test]
fn a_file_system_that_shut_itself_down_is_unmounted_nevertheless() {
    let scratch = Scratch::new();
    let volume = scratch.volume("v", FsType::Xfs, 320 * MIB);
    run("xfs_io", &["-x", "-c", "shutdown", text(&volume.target)]);
    assert!(fs::metadata(&volume.target).is_err(), "even stat fails");
    scratch.host.check_path(&volume.target).unwrap();
    scratch.unmount(&volume.target);
    scratch.done(&Effect::RemoveTarget {
        path: &volume.target,
    });
}
