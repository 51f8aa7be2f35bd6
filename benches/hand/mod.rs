//! A volume's life without the driver.

use std::path::{Path, PathBuf};

use slackwater::host::linux::LinuxHost;
use slackwater::host::{Done, Effect, Host, LoopSpec, MountSpec, NodeKind, Signature};
use slackwater::model::FsType;
use uuid::Uuid;

use super::support::{run, succeeds};

const SIZE: u64 = 1 << 30;
/// As long as a record of a staged volume.
const RECORD_BYTES: usize = 1100;

/// The driver's effects, in the driver's order.
pub struct Hand {
    host: LinuxHost,
    volumes: PathBuf,
    trash: PathBuf,
    record: Vec<u8>,
}

impl Hand {
    pub fn new(root: PathBuf, allowed: PathBuf) -> Hand {
        let (volumes, trash) = (root.join("volumes"), root.join("trash"));
        std::fs::create_dir_all(&volumes).expect("a folder");
        std::fs::create_dir_all(&trash).expect("a folder");
        Hand {
            host: LinuxHost::new(vec![allowed]),
            volumes,
            trash,
            record: vec![b' '; RECORD_BYTES],
        }
    }

    fn perform(&self, effect: Effect<'_>) -> Done {
        self.host.perform(&effect).expect("the kernel does it")
    }

    fn store(&self, folder: &Path) {
        let (new, old) = (folder.join("record.json.new"), folder.join("record.json"));
        let bytes = &self.record;
        self.perform(Effect::WriteFile { path: &new, bytes });
        self.perform(Effect::SyncFile { path: &new });
        let (from, to) = (&new, &old);
        self.perform(Effect::Rename { from, to });
        self.perform(Effect::SyncDir { path: folder });
    }

    pub fn create(&self, name: &str) {
        let folder = self.volumes.join(name);
        let image = folder.join("data.img");
        self.perform(Effect::MakeDir { path: &folder });
        let path = &self.volumes;
        self.perform(Effect::SyncDir { path });
        self.store(&folder);
        self.perform(Effect::Allocate {
            path: &image,
            size: SIZE,
            reserve: false,
        });
        self.perform(Effect::SyncFile { path: &image });
        self.store(&folder);
    }

    pub fn stage(&self, name: &str, fs: FsType, staging: &Path, fresh: bool) {
        let folder = self.volumes.join(name);
        let image = folder.join("data.img");
        let kind = NodeKind::Dir;
        self.perform(Effect::MakeTarget {
            path: staging,
            kind,
        });
        let found = self.host.stat(&image).expect("stat").expect("an image");
        let spec = LoopSpec {
            image: &image,
            backing: found.id,
            block_size: 512,
            autoclear: true,
            read_only: false,
        };
        let Done::Loop(hold) = self.perform(Effect::AttachLoop(spec)) else {
            unreachable!("a loop device");
        };
        let device = hold.device();
        let found = self.host.signature(&device).expect("a probe");
        assert_eq!(found == Signature::None, fresh, "{found:?}");
        if fresh {
            self.store(&folder);
            self.perform(Effect::Format {
                device: &device,
                fs,
                uuid: Uuid::new_v4(),
                options: &[],
                keep_blocks: false,
            });
            self.store(&folder);
        }
        self.perform(Effect::Mount(MountSpec {
            device: &device,
            target: staging,
            fs,
            options: &[],
            read_only: false,
        }));
    }

    pub fn publish(&self, staging: &Path, target: &Path) {
        let kind = NodeKind::Dir;
        self.perform(Effect::MakeTarget { path: target, kind });
        self.perform(Effect::Bind {
            source: staging,
            target,
            read_only: false,
        });
    }

    pub fn stats(&self, target: &Path) {
        self.host.space_caller(target).expect("statfs");
    }

    pub fn unpublish(&self, target: &Path) {
        self.perform(Effect::Unmount { target });
        self.perform(Effect::RemoveTarget { path: target });
    }

    /// The loop device goes with its last opener.
    pub fn unstage(&self, staging: &Path) {
        self.perform(Effect::Unmount { target: staging });
    }

    pub fn delete(&self, name: &str) {
        let (from, to) = (&self.volumes.join(name), &self.trash.join(name));
        self.perform(Effect::Rename { from, to });
        for path in [&self.trash, &self.volumes] {
            self.perform(Effect::SyncDir { path });
        }
        for file in ["data.img", "record.json"] {
            let path = &to.join(file);
            self.perform(Effect::RemoveFile { path });
        }
        self.perform(Effect::RemoveDir { path: to });
        let path = &self.trash;
        self.perform(Effect::SyncDir { path });
    }
}

/// What a person types.
pub struct Programs {
    root: PathBuf,
}

fn text(path: &Path) -> &str {
    path.to_str().expect("plain names")
}

impl Programs {
    pub fn new(root: PathBuf) -> Programs {
        std::fs::create_dir_all(&root).expect("a folder");
        Programs { root }
    }

    pub fn create(&self, name: &str) {
        let image = self.root.join(name);
        run("truncate", &["--size", "1G", text(&image)]);
        run("sync", &[text(&image), text(&self.root)]);
    }

    pub fn stage(&self, name: &str, fs: FsType, staging: &Path, fresh: bool) {
        let image = self.root.join(name);
        let device = run(
            "losetup",
            &["--find", "--show", "--direct-io=on", text(&image)],
        );
        let device = device.trim();
        if fresh {
            // blkid ends with 2 where nothing is found.
            assert!(!succeeds("blkid", &["-p", device]), "nothing is on it");
            run(&format!("mkfs.{fs}"), &["-q", device]);
            run("sync", &[device]);
        }
        run("mount", &[device, text(staging)]);
    }

    pub fn publish(&self, staging: &Path, target: &Path) {
        run("mkdir", &[text(target)]);
        run("mount", &["--bind", text(staging), text(target)]);
    }

    pub fn stats(&self, target: &Path) {
        run("stat", &["--file-system", text(target)]);
    }

    pub fn unpublish(&self, target: &Path) {
        run("umount", &[text(target)]);
        run("rmdir", &[text(target)]);
    }

    pub fn unstage(&self, name: &str, staging: &Path) {
        run("umount", &[text(staging)]);
        let found = run("losetup", &["--associated", text(&self.root.join(name))]);
        let device = found.split(':').next().expect("its device");
        run("losetup", &["--detach", device]);
    }

    pub fn delete(&self, name: &str) {
        run("rm", &[text(&self.root.join(name))]);
        run("sync", &[text(&self.root)]);
    }
}
