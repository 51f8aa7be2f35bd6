//! A scratch folder, and disks for pools: image files with a file system, mounted below it.

use std::fs::{File, Permissions};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use nix::unistd::{Whence, lseek};
use ring::digest;
use slackwater::host::{Mount, mountinfo};

use super::{run, succeeds, unmount};

nix::ioctl_write_int_bad!(
    /// LOOP_CTL_ADD of loop(4).
    ctl_add,
    0x4c80
);
nix::ioctl_write_int_bad!(
    /// LOOP_CTL_REMOVE of loop(4).
    ctl_remove,
    0x4c81
);

/// Adds a loop device and returns its number.
#[expect(unsafe_code, reason = "the ioctl has no safe form")]
fn loop_ctl_add(control: &std::fs::File) -> nix::Result<i32> {
    use std::os::fd::AsRawFd;
    // SAFETY: the descriptor is open and the argument, "any", is a number.
    unsafe { ctl_add(control.as_raw_fd(), -1) }
}

#[expect(unsafe_code, reason = "the ioctl has no safe form")]
fn loop_ctl_remove(control: &std::fs::File, number: i32) -> nix::Result<i32> {
    use std::os::fd::AsRawFd;
    // SAFETY: the descriptor is open and the argument is a number.
    unsafe { ctl_remove(control.as_raw_fd(), number) }
}

/// A folder that is removed with everything below it when it is dropped.
pub struct Scratch {
    path: PathBuf,
    // Dropped last: by then, everything below the folder is gone.
    _turn: Flock<File>,
}

/// Held by each test that has mounts. A process that copies the mount table keeps the mounts of
/// other tests in use, so a test that starts such a process runs alone.
fn turn(how: FlockArg) -> Flock<File> {
    // The sources' folder, because a lock file of its own would be left behind.
    let file = File::open(env!("CARGO_MANIFEST_DIR")).unwrap();
    Flock::lock(file, how).map_err(|(_, errno)| errno).unwrap()
}

impl Scratch {
    /// Creates a folder below the system's folder for temporary files.
    pub fn new() -> Scratch {
        Scratch::with(turn(FlockArg::LockShared))
    }

    /// Creates the folder of a test that may copy the mount table: no other folder exists at the
    /// same time.
    pub fn alone() -> Scratch {
        Scratch::with(turn(FlockArg::LockExclusive))
    }

    fn with(turn: Flock<File>) -> Scratch {
        let folder = tempfile::Builder::new()
            .prefix("slackwater-")
            .tempdir()
            .unwrap();
        Scratch {
            path: folder.keep().canonicalize().unwrap(),
            _turn: turn,
        }
    }

    /// The path of the folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// A path below the folder, which is not created.
    pub fn join(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// Creates a folder below this one.
    pub fn dir(&self, name: &str) -> PathBuf {
        folder(&self.join(name))
    }
}

/// Creates a folder that all users may traverse, whatever the umask is: databases refuse to run as
/// root.
pub fn folder(path: &Path) -> PathBuf {
    std::fs::create_dir_all(path).unwrap();
    std::fs::set_permissions(path, Permissions::from_mode(0o755)).unwrap();
    path.to_path_buf()
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // Repeated, because a loop device goes with its last mount, and only then releases the disk
        // below it.
        for _ in 0..3 {
            for mount in mounts_below(&self.path).iter().rev() {
                let _ = succeeds("umount", &[mount.mount_point.to_str().unwrap()]);
            }
            for device in loops_below(&self.path) {
                remove_holders(&device);
                let _ = succeeds("losetup", &["-d", &device]);
            }
        }
        for mount in mounts_below(&self.path).iter().rev() {
            let _ = succeeds("umount", &["-l", mount.mount_point.to_str().unwrap()]);
        }
        let _ = std::fs::remove_dir_all(&self.path);
    }
}

/// The mount table of this test.
pub fn mounts() -> Vec<Mount> {
    mountinfo::parse(&std::fs::read("/proc/self/mountinfo").unwrap()).unwrap()
}

/// Mounts below a folder, in the order in which they were made.
pub fn mounts_below(path: &Path) -> Vec<Mount> {
    mounts()
        .into_iter()
        .filter(|mount| mount.mount_point.starts_with(path))
        .collect()
}

/// Removes the mapped devices above a loop device, which keep it attached.
fn remove_holders(device: &str) {
    let Some(name) = device.strip_prefix("/dev/") else {
        return;
    };
    let holders = std::fs::read_dir(format!("/sys/block/{name}/holders"));
    for holder in holders.into_iter().flatten().flatten() {
        let name = std::fs::read_to_string(holder.path().join("dm/name"));
        let _ = name.map(|name| succeeds("dmsetup", &["remove", name.trim()]));
    }
}

/// Loop devices whose file is below a folder, by the file name that losetup shows.
pub fn loops_below(path: &Path) -> Vec<String> {
    let list = run("losetup", &["-l", "-n", "-O", "NAME,BACK-FILE"]);
    let below = |line: &&str| {
        line.split_whitespace()
            .nth(1)
            .is_some_and(|file| Path::new(file).starts_with(path))
    };
    list.lines()
        .filter(below)
        .filter_map(|line| line.split_whitespace().next())
        .map(str::to_string)
        .collect()
}

/// Loop devices on a file, found by device and inode.
pub fn loops_on(file: &Path) -> Vec<String> {
    let meta = std::fs::metadata(file).unwrap();
    let list = run("losetup", &["-l", "-n", "-O", "NAME,BACK-INO,BACK-MAJ:MIN"]);
    let (major, minor) = (
        nix::sys::stat::major(meta.dev()),
        nix::sys::stat::minor(meta.dev()),
    );
    let numbers = format!("{major}:{minor}");
    let mine = |line: &&str| {
        let words: Vec<_> = line.split_whitespace().collect();
        words.len() == 3 && words[1] == meta.ino().to_string() && words[2] == numbers
    };
    list.lines()
        .filter(mine)
        .filter_map(|line| line.split_whitespace().next())
        .map(str::to_string)
        .collect()
}

/// A disk for a pool: an image with a file system, mounted.
pub struct Disk {
    /// The image of the file system.
    pub image: PathBuf,
    /// Where the file system is mounted.
    pub mount_point: PathBuf,
}

impl Disk {
    /// Creates an image of `size` bytes (sparse), formats it as `fs` and mounts it at `name`.
    pub fn new(scratch: &Scratch, name: &str, fs: &str, size: u64) -> Disk {
        let image = scratch.join(&format!("{name}.disk"));
        std::fs::File::create(&image)
            .unwrap()
            .set_len(size)
            .unwrap();
        let force = if fs == "ext4" { "-F" } else { "-f" };
        run(
            &format!("mkfs.{fs}"),
            &["-q", force, image.to_str().unwrap()],
        );
        let disk = Disk {
            image,
            mount_point: scratch.dir(name),
        };
        disk.mount();
        disk
    }

    /// Mounts it where it was mounted before.
    pub fn mount(&self) {
        self.mount_at(&self.mount_point);
    }

    /// Recreates free loop devices, since a discard limit that another program set on one would
    /// stay. Returns the number of a device that certainly has none.
    fn renew_loops() -> i32 {
        let control = std::fs::OpenOptions::new()
            .read(true)
            .write(true)
            .open("/dev/loop-control")
            .unwrap();
        for number in 0..64 {
            let limit =
                std::fs::read_to_string(format!("/sys/block/loop{number}/queue/discard_max_bytes"));
            if limit.is_ok_and(|limit| limit.trim() == "0") {
                let _ = loop_ctl_remove(&control, number);
            }
        }
        loop_ctl_add(&control).unwrap()
    }

    /// Mounts it at a path. A program first receives the number of a loop device and then opens it:
    /// in between, another process may take that device, or remove it to recreate it. A loop device
    /// that a thick volume has just used does not accept discards; it is not usable here.
    pub fn mount_at(&self, path: &Path) {
        let (image, at) = (self.image.to_str().unwrap(), path.to_str().unwrap());
        let mut device = "loop".to_string();
        for _ in 1..20 {
            if !succeeds("mount", &["-o", &device, image, at]) {
                device = "loop".into();
                continue;
            }
            if takes_discards(path) {
                return;
            }
            unmount(path);
            // The kernel may offer the same device again, because it is freed a moment later.
            device = format!("loop=/dev/loop{}", Disk::renew_loops());
        }
        // Perhaps no device of this machine accepts discards; a test that needs them checks it.
        run("mount", &["-o", "loop", image, at]);
    }

    /// Unmounts it.
    pub fn unmount(&self) {
        unmount(&self.mount_point);
    }

    /// The folder of the only volume on a pool at the root of this disk.
    pub fn volumes(&self) -> Vec<PathBuf> {
        let folder = self.mount_point.join("volumes");
        let mut names: Vec<_> = std::fs::read_dir(folder)
            .unwrap()
            .map(|entry| entry.unwrap().path())
            .collect();
        names.sort();
        names
    }

    /// Folders of snapshots on a pool at the root of this disk.
    pub fn snapshots(&self) -> Vec<PathBuf> {
        let Ok(names) = std::fs::read_dir(self.mount_point.join("snapshots")) else {
            return Vec::new();
        };
        names.map(|entry| entry.unwrap().path()).collect()
    }

    /// The entries of the trash.
    pub fn trash(&self) -> Vec<PathBuf> {
        std::fs::read_dir(self.mount_point.join("trash"))
            .unwrap()
            .map(|entry| entry.unwrap().path())
            .collect()
    }
}

/// Whether the loop device mounted at a path accepts discards.
fn takes_discards(path: &Path) -> bool {
    let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap();
    let is_at_path = |line: &&str| line.split(' ').nth(1) == path.to_str();
    let line = mounts
        .lines()
        .rfind(is_at_path)
        .expect("the path is mounted");
    let name = line.split(' ').next().unwrap().trim_start_matches("/dev/");
    let limit = std::fs::read_to_string(format!("/sys/block/{name}/queue/discard_max_bytes"));
    limit.unwrap().trim() != "0"
}

/// The SHA-256 of a file's length and of its blocks that are not zero, with their positions. Files
/// with equal bytes have equal digests, whatever of them is allocated, and holes cost no time.
pub fn content_digest(path: &Path) -> String {
    const BLOCK: u64 = 64 << 10;
    let file = File::open(path).unwrap();
    let length = file.metadata().unwrap().len();
    let mut digest = digest::Context::new(&digest::SHA256);
    digest.update(&length.to_le_bytes());
    let (zeros, mut block) = (vec![0; BLOCK as usize], vec![0; BLOCK as usize]);
    let mut at = 0;
    while at < length {
        at = match lseek(&file, at as i64, Whence::SeekData) {
            Ok(data) => data as u64 / BLOCK * BLOCK,
            Err(Errno::ENXIO) => break,
            Err(error) => panic!("{}: {error}", path.display()),
        };
        let block = &mut block[..BLOCK.min(length - at) as usize];
        file.read_exact_at(block, at).unwrap();
        if *block != zeros[..block.len()] {
            digest.update(&at.to_le_bytes());
            digest.update(block);
        }
        at += BLOCK;
    }
    format!("{:?}", digest.finish())
}
