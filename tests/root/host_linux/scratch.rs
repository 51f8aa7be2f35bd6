//! A pool that is removed automatically.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use slackwater::error::{HostError, chain};
use slackwater::host::linux::LinuxHost;
use slackwater::host::{
    Device, Done, Effect, FileId, Host, LoopHold, LoopSpec, MountSpec, NodeKind, attach_loop,
};
use slackwater::model::FsType;
use slackwater::model::size::MIB;
pub use slackwater_testkit::eventually;
use tempfile::TempDir;
use uuid::Uuid;

/// A pool on a loop device, mounted in a temporary folder, and a host for it.
pub struct Scratch {
    pub host: LinuxHost,
    pub root: PathBuf,
    /// The pool's folder.
    pub pool: PathBuf,
    /// A folder for target paths.
    pub pods: PathBuf,
    disk: FileId,
    loop_number: u32,
    _folder: TempDir,
}

/// A temporary folder.
pub fn folder() -> TempDir {
    tempfile::Builder::new()
        .prefix("slackwater-")
        .tempdir()
        .expect("a temporary folder")
}

/// Runs a program that must succeed. Returns its output.
pub fn run(program: &str, arguments: &[&str]) -> String {
    slackwater_testkit::run(program, arguments)
        .trim()
        .to_string()
}

/// Runs a program. Returns its output, or its messages if it failed.
pub fn try_run(program: &str, arguments: &[&str]) -> Result<String, String> {
    let output = Command::new(program)
        .args(arguments)
        .env("LC_ALL", "C")
        .output()
        .unwrap_or_else(|error| panic!("{program}: {error}"));
    let text = String::from_utf8_lossy(&output.stdout).trim().to_string();
    if output.status.success() {
        Ok(text)
    } else {
        Err(String::from_utf8_lossy(&output.stderr).trim().to_string())
    }
}

pub fn text(path: &Path) -> &str {
    path.to_str().expect("paths of tests are UTF-8")
}

/// losetup first receives a number and then opens it: in between, another process may take the
/// number, or remove the device to clear an old discard limit.
fn attach_disk(disk: &Path) -> String {
    let attach = || try_run("losetup", &["--find", "--show", text(disk)]);
    (0..20)
        .find_map(|_| attach().ok())
        .unwrap_or_else(|| attach().expect("a loop device for the pool's disk"))
}

/// The complete message of an error.
pub fn error_text(error: &HostError) -> String {
    chain(error)
}

impl Scratch {
    /// An empty xfs pool of 1 GiB.
    pub fn new() -> Scratch {
        Scratch::on(FsType::Xfs)
    }

    pub fn on(fs: FsType) -> Scratch {
        Scratch::sized(fs, 1024 * MIB)
    }

    pub fn sized(fs: FsType, bytes: u64) -> Scratch {
        assert!(
            nix::unistd::geteuid().is_root(),
            "these tests mount file systems: run them as root"
        );
        let temporary = folder();
        let root = fs::canonicalize(temporary.path()).expect("its plain path");
        let disk_path = root.join("disk.img");
        let disk = fs::File::create(&disk_path).expect("an image");
        disk.set_len(bytes).expect("its length");
        let node = attach_disk(&disk_path);
        let (pool, pods) = (root.join("pool"), root.join("pods"));
        let scratch = Scratch {
            host: LinuxHost::new(vec![pods.clone()]),
            disk: id_of(&disk_path),
            loop_number: node.trim_start_matches("/dev/loop").parse().unwrap(),
            root,
            pool,
            pods,
            _folder: temporary,
        };
        match fs {
            FsType::Ext4 => run("mkfs.ext4", &["-q", "-F", "-m", "0", &node]),
            FsType::Xfs => run("mkfs.xfs", &["-q", "-f", &node]),
            FsType::Btrfs => run("mkfs.btrfs", &["-q", "-f", &node]),
        };
        fs::create_dir(&scratch.pool).unwrap();
        fs::create_dir(&scratch.pods).unwrap();
        run("mount", &[&node, text(&scratch.pool)]);
        scratch
    }

    pub fn perform(&self, effect: &Effect<'_>) -> Result<Done, HostError> {
        self.host.perform(effect)
    }

    /// Performs an effect that must succeed.
    pub fn done(&self, effect: &Effect<'_>) -> Done {
        self.perform(effect)
            .unwrap_or_else(|error| panic!("{}: {}", effect.name(), error_text(&error)))
    }

    /// Performs an effect that must be refused. Returns the complete message.
    pub fn refused(&self, effect: &Effect<'_>) -> String {
        match self.perform(effect) {
            Ok(_) => panic!("{} was not refused", effect.name()),
            Err(error) => error_text(&error),
        }
    }

    /// Creates an image on the pool.
    pub fn image(&self, name: &str, size: u64) -> Image {
        let path = self.pool.join(name);
        self.done(&Effect::Allocate {
            path: &path,
            size,
            reserve: false,
        });
        Image {
            id: id_of(&path),
            path,
        }
    }

    /// Attaches with autoclear, with the pool's own sector size.
    pub fn attach(&self, image: &Image) -> LoopHold {
        self.attach_as(image, true, false)
    }

    pub fn attach_as(&self, image: &Image, autoclear: bool, read_only: bool) -> LoopHold {
        let spec = LoopSpec {
            image: &image.path,
            backing: image.id,
            block_size: self.host.backing_fs(&self.pool).unwrap().sector,
            autoclear,
            read_only,
        };
        attach_loop(&self.host, spec).unwrap()
    }

    pub fn format(&self, device: &Device, fs: FsType) -> Uuid {
        let uuid = self.host.random_uuid();
        self.done(&Effect::Format {
            device,
            fs,
            uuid,
            options: &[],
            keep_blocks: false,
        });
        uuid
    }

    /// Creates a folder for a target, with its parents, and returns its path.
    pub fn target(&self, name: &str) -> PathBuf {
        let path = self.pods.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        self.done(&Effect::MakeTarget {
            path: &path,
            kind: NodeKind::Dir,
        });
        path
    }

    pub fn mount(&self, device: &Device, target: &Path, fs: FsType, options: &[&str]) {
        let options: Vec<_> = options.iter().map(|word| word.to_string()).collect();
        self.done(&Effect::Mount(MountSpec {
            device,
            target,
            fs,
            options: &options,
            read_only: false,
        }));
    }

    pub fn unmount(&self, target: &Path) {
        self.done(&Effect::Unmount { target });
    }

    /// A formatted volume, mounted at a target of its name.
    pub fn volume(&self, name: &str, fs: FsType, size: u64) -> Volume {
        let image = self.image(name, size);
        let hold = self.attach(&image);
        let device = hold.device();
        self.format(&device, fs);
        let target = self.target(&format!("{name}/mount"));
        self.mount(&device, &target, fs, &[]);
        Volume {
            image,
            hold,
            device,
            target,
        }
    }

    /// The allocated bytes of an image.
    pub fn allocated(&self, image: &Image) -> u64 {
        run("sync", &["--file-system", text(&self.pool)]);
        self.host.stat(&image.path).unwrap().unwrap().allocated
    }

    fn take_apart(&self) -> Result<(), String> {
        let mounts = self.host.mounts().map_err(|error| error_text(&error))?;
        for mount in mounts.iter().rev() {
            if mount.mount_point.starts_with(&self.root) && mount.mount_point != self.pool {
                try_run("umount", &[text(&mount.mount_point)])?;
            }
        }
        // Only while the pool is mounted is its folder's device number the pool's, so that no other
        // program's loop devices are listed.
        if mounts.iter().any(|mount| mount.mount_point == self.pool) {
            // A dead pool returns nothing, and tests keep loop devices on it only while they run.
            let device = fs::metadata(&self.pool).ok().map(|found| found.dev());
            let loops = self.host.loops().map_err(|error| error_text(&error))?;
            for status in loops
                .iter()
                .filter(|status| Some(status.backing.device) == device)
            {
                let effect = Effect::DetachLoop {
                    number: status.number,
                    backing: status.backing,
                };
                self.host
                    .perform(&effect)
                    .map_err(|error| error_text(&error))?;
            }
            try_run("umount", &[text(&self.pool)])?;
        }
        let effect = Effect::DetachLoop {
            number: self.loop_number,
            backing: self.disk,
        };
        self.host
            .perform(&effect)
            .map_err(|error| error_text(&error))?;
        Ok(())
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // A pinned folder of the host would keep the pool busy.
        self.host = LinuxHost::new(vec![self.pods.clone()]);
        let start = Instant::now();
        while let Err(problem) = self.take_apart() {
            // The kernel detaches a loop device some time after its last close, and a busy machine
            // is slow.
            if start.elapsed() > Duration::from_secs(120) {
                let problem = format!("left behind at {}: {problem}", self.root.display());
                if std::thread::panicking() {
                    eprintln!("{problem}");
                    return;
                }
                panic!("{problem}");
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

pub struct Image {
    pub path: PathBuf,
    pub id: FileId,
}

pub struct Volume {
    pub image: Image,
    pub hold: LoopHold,
    pub device: Device,
    pub target: PathBuf,
}

pub fn id_of(path: &Path) -> FileId {
    let found = fs::metadata(path).expect("the file exists");
    FileId {
        device: found.dev(),
        inode: found.ino(),
    }
}
