//! A volume's life without the driver, and its cuts.

#![allow(dead_code, reason = "each benchmark uses a part of this module")]

use std::fs::File;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use slackwater::host::linux::{LinuxHost, freeze};
use slackwater::host::{Done, Effect, Host, LoopSpec, MountSpec, NodeKind, Signature};
use slackwater::model::FsType;
use uuid::Uuid;

use slackwater_testkit::{run, succeeds};

/// The size of a volume in bytes.
pub const SIZE: u64 = 1 << 30;
/// The length of a record of a staged volume.
const RECORD_BYTES: usize = 1100;

/// The way in which images are copied while they are frozen.
#[derive(Clone, Copy, PartialEq)]
pub enum Way {
    /// FICLONE of all at once.
    SideBySide,
    /// FICLONE of one after the other.
    InSequence,
    /// Every block, as on file systems without block sharing.
    Copy,
}

/// The driver's effects, in the driver's order.
pub struct Hand {
    pub host: LinuxHost,
    pub volumes: PathBuf,
    pub snapshots: PathBuf,
    pub trash: PathBuf,
    record: Vec<u8>,
}

/// A frozen file system, which is thawed when this is dropped.
pub struct Frozen(File);

impl Frozen {
    pub fn new(mount_point: &Path) -> Frozen {
        let root = File::open(mount_point).expect("a root");
        freeze::freeze(root.as_fd()).expect("FIFREEZE");
        Frozen(root)
    }

    /// Freezes several in parallel.
    pub fn all(mount_points: &[&Path]) -> Vec<Frozen> {
        std::thread::scope(|scope| {
            let freezing = |path| scope.spawn(move || Frozen::new(path));
            let threads: Vec<_> = mount_points.iter().copied().map(freezing).collect();
            let frozen = threads.into_iter().map(|thread| thread.join());
            frozen.collect::<Result<_, _>>().expect("all are frozen")
        })
    }
}

impl Drop for Frozen {
    fn drop(&mut self) {
        // If a thaw fails although no other process thaws, the machine needs attention.
        freeze::thaw(self.0.as_fd()).expect("FITHAW");
    }
}

/// Writes a file system back.
pub fn write_back(mount_point: &Path) {
    let root = File::open(mount_point).expect("a root");
    freeze::sync(root.as_fd()).expect("syncfs");
}

impl Hand {
    pub fn new(root: PathBuf, allowed: PathBuf) -> Hand {
        let [volumes, snapshots, trash] = ["volumes", "snapshots", "trash"].map(|part| {
            let path = root.join(part);
            std::fs::create_dir_all(&path).expect("a folder");
            path
        });
        Hand {
            host: LinuxHost::new(vec![allowed]),
            volumes,
            snapshots,
            trash,
            record: vec![b' '; RECORD_BYTES],
        }
    }

    pub fn perform(&self, effect: Effect<'_>) -> Done {
        self.host.perform(&effect).expect("the effect succeeds")
    }

    pub fn store(&self, folder: &Path) {
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
        self.attach_and_mount(&folder, &image, fs, staging, fresh, &[]);
    }

    fn attach_and_mount(
        &self,
        folder: &Path,
        image: &Path,
        fs: FsType,
        staging: &Path,
        fresh: bool,
        options: &[String],
    ) {
        let kind = NodeKind::Dir;
        self.perform(Effect::MakeTarget {
            path: staging,
            kind,
        });
        let found = self.host.stat(image).expect("stat").expect("an image");
        let spec = LoopSpec {
            image,
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
            self.store(folder);
            self.perform(Effect::Format {
                device: &device,
                fs,
                uuid: Uuid::new_v4(),
                options: &[],
                keep_blocks: false,
            });
            self.store(folder);
        }
        self.perform(Effect::Mount(MountSpec {
            device: &device,
            target: staging,
            fs,
            options,
            read_only: false,
        }));
    }

    /// A copy of an image whose file system is mounted, without a write-back before it.
    pub fn snapshot(&self, name: &str, image: &Path, mount_point: &Path) {
        let folder = self.snapshots.join(name);
        let copy = folder.join("data.img");
        self.perform(Effect::MakeDir { path: &folder });
        let path = &self.snapshots;
        self.perform(Effect::SyncDir { path });
        self.store(&folder);
        self.make_copy(&copy, SIZE);
        let frozen = Frozen::new(mount_point);
        self.clone_whole(image, &copy);
        drop(frozen);
        self.perform(Effect::SyncFile { path: &copy });
        self.perform(Effect::SyncDir { path: &folder });
        self.store(&folder);
    }

    /// The indispensable steps only: no record, and no folder of its own.
    pub fn bare_snapshot(&self, name: &str, image: &Path, mount_point: &Path) {
        let copy = self.snapshots.join(name);
        self.make_copy(&copy, 0);
        let frozen = Frozen::new(mount_point);
        self.clone_whole(image, &copy);
        drop(frozen);
        self.perform(Effect::SyncFile { path: &copy });
        let path = &self.snapshots;
        self.perform(Effect::SyncDir { path });
    }

    fn make_copy(&self, path: &Path, size: u64) {
        let reserve = false;
        self.perform(Effect::Allocate {
            path,
            size,
            reserve,
        });
    }

    fn clone_whole(&self, source: &Path, target: &Path) {
        self.perform(Effect::CloneWhole { source, target });
    }

    /// Creates a volume from a snapshot of [`Hand::snapshot`], and mounts it.
    pub fn restore(&self, name: &str, snapshot: &str, fs: FsType, staging: &Path) {
        let folder = self.volumes.join(name);
        let image = folder.join("data.img");
        self.perform(Effect::MakeDir { path: &folder });
        let path = &self.volumes;
        self.perform(Effect::SyncDir { path });
        self.store(&folder);
        self.make_copy(&image, SIZE);
        self.clone_whole(&self.snapshots.join(snapshot).join("data.img"), &image);
        let mut options = Vec::new();
        match fs {
            FsType::Ext4 => {}
            FsType::Xfs => options.push("nouuid".into()),
            FsType::Btrfs => {
                let uuid = Uuid::new_v4();
                let image = &image;
                self.perform(Effect::RenewFsId { image, uuid });
            }
        }
        self.perform(Effect::SyncFile { path: &image });
        self.store(&folder);
        self.attach_and_mount(&folder, &image, fs, staging, false, &options);
        // The folder in which it is staged.
        self.store(&folder);
    }

    /// Copies images while all are frozen. Returns the moment at which all were frozen, and the
    /// milliseconds of the longest copy. Each image is thawed once it is copied; the copies are
    /// removed.
    pub fn cut(&self, images: &[(&Path, &Path)], way: Way) -> (u64, f64) {
        let copies: Vec<PathBuf> = (0..images.len())
            .map(|n| self.snapshots.join(format!("cut-{n}")))
            .collect();
        for ((image, mount_point), copy) in images.iter().zip(&copies) {
            let size = std::fs::metadata(image).expect("an image").len();
            self.make_copy(copy, if way == Way::Copy { size } else { 0 });
            write_back(mount_point);
        }
        let mount_points: Vec<&Path> = images.iter().map(|(_, path)| *path).collect();
        let frozen = Frozen::all(&mount_points);
        let cut_at = super::measure::now();
        let longest = Mutex::new(0.0f64);
        let one = |((image, _), copy): (&(&Path, &Path), &PathBuf), frozen: Frozen| {
            let ((), took) = super::measure::timed(|| self.copy(image, copy, way));
            drop(frozen);
            let mut longest = longest.lock().expect("no panic");
            *longest = longest.max(took);
        };
        let all = images.iter().zip(&copies).zip(frozen);
        let one = &one;
        match way {
            Way::SideBySide => std::thread::scope(|scope| {
                for (pair, frozen) in all {
                    scope.spawn(move || one(pair, frozen));
                }
            }),
            Way::InSequence | Way::Copy => all.for_each(|(pair, frozen)| one(pair, frozen)),
        }
        for path in &copies {
            self.perform(Effect::SyncFile { path });
        }
        let longest = longest.into_inner().expect("no panic");
        (cut_at, longest)
    }

    fn copy(&self, source: &Path, target: &Path, way: Way) {
        match way {
            Way::SideBySide | Way::InSequence => self.clone_whole(source, target),
            Way::Copy => {
                let length = std::fs::metadata(source).expect("an image").len();
                let offset = 0;
                self.perform(Effect::CopyRange {
                    source,
                    target,
                    offset,
                    length,
                });
            }
        }
    }

    /// Removes everything that [`Hand::snapshot`] and similar functions have created.
    pub fn forget_snapshots(&self) {
        std::fs::remove_dir_all(&self.snapshots).expect("a folder");
        std::fs::create_dir(&self.snapshots).expect("a folder");
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
        self.host.space_csi_path(target).expect("statfs");
    }

    pub fn unpublish(&self, target: &Path) {
        self.perform(Effect::Unmount { target });
        self.perform(Effect::RemoveTarget { path: target });
    }

    /// The loop device is detached when its last opener closes it.
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

/// The programs that an administrator types.
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
            // blkid ends with 2 if it finds nothing.
            assert!(!succeeds("blkid", &["-p", device]), "the device is blank");
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

    /// A copy of an image whose file system is mounted.
    pub fn snapshot(&self, name: &str, image: &Path, mount_point: &Path) {
        let copy = self.root.join(name);
        run("fsfreeze", &["--freeze", text(mount_point)]);
        let copied = succeeds("cp", &["--reflink=always", text(image), text(&copy)]);
        run("fsfreeze", &["--unfreeze", text(mount_point)]);
        assert!(copied, "cp shares blocks");
        run("sync", &[text(&copy), text(&self.root)]);
    }

    pub fn restore(&self, name: &str, snapshot: &str, fs: FsType, staging: &Path) {
        let image = self.root.join(name);
        let from = self.root.join(snapshot);
        run("cp", &["--reflink=always", text(&from), text(&image)]);
        let device = run(
            "losetup",
            &["--find", "--show", "--direct-io=on", text(&image)],
        );
        let device = device.trim();
        if fs == FsType::Btrfs {
            run("btrfstune", &["-m", device]);
        }
        run("sync", &[text(&image), text(&self.root)]);
        let option = if fs == FsType::Xfs { "nouuid" } else { "rw" };
        run("mount", &["-o", option, device, text(staging)]);
    }

    pub fn delete(&self, name: &str) {
        run("rm", &[text(&self.root.join(name))]);
        run("sync", &[text(&self.root)]);
    }
}
