//! `slackwater volumes import` of directories, as local-path and hostPath have them.
//!
//! A script in another language creates them and describes what was imported, so that nothing of the
//! program under test is believed.

use std::fs::{self, OpenOptions};
use std::io::Read;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use nix::fcntl::{FallocateFlags, fallocate};
use nix::sys::signal::Signal;
use nix::sys::stat::{Mode, mkdirat};
use nix::sys::statvfs::statvfs;
use slackwater::host::linux::{ImportTree, ScratchImage};
use slackwater::model::FsType;
use slackwater_testkit::disk::loops_on;
use slackwater_testkit::{Disk, Scratch, archive_command, eventually, mount, run};

use super::{GIB, MIB, Node};

/// Creates what files can have.
const CREATE: &str = r"
import os, socket, stat, struct, sys
top = os.fsencode(sys.argv[1])
os.chdir(top)
os.chmod(b'.', 0o777)
def acl(*entries):
    return struct.pack('<I', 2) + b''.join(struct.pack('<HHI', *entry) for entry in entries)
none = 0xffffffff
access = acl((1, 6, none), (2, 4, 1234), (4, 4, none), (16, 4, none), (32, 0, none))
default = acl((1, 7, none), (2, 7, 1234), (4, 5, none), (8, 3, 77), (16, 7, none), (32, 0, none))
def write(path, text, mode=0o644):
    with open(path, 'wb') as file:
        file.write(text)
    os.chmod(path, mode)
os.makedirs(b'data/deep/er')
os.setxattr(b'data/deep', 'system.posix_acl_default', default)
write(b'data/deep/under-default-acl', b'x')
os.removexattr(b'data/deep/under-default-acl', 'system.posix_acl_access')
write(b'data/plain', os.urandom(3000001))
write(b'data/empty', b'')
write(b'data/na\xffme \n\x01', b'not UTF-8')
write(b'data/program', b'#!', 0o755)
os.chown(b'data/program', 1000, 1001)
os.chmod(b'data/program', 0o6755)
os.setxattr(b'data/program', 'security.capability', struct.pack('<5I', 0x02000001, 1 << 10, 0, 0, 0))
write(b'data/acl', b'x')
os.setxattr(b'data/acl', 'system.posix_acl_access', access)
os.setxattr(b'data/acl', 'user.note', bytes(range(256)))
os.setxattr(b'data/acl', 'trusted.note', b'root only')
os.setxattr(b'data/acl', 'user.empty', b'')
with open(b'data/sparse', 'wb') as file:
    file.truncate(1 << 34)
    os.pwrite(file.fileno(), b'middle', 1 << 33)
os.link(b'data/plain', b'data/deep/er/plain-too')
os.link(b'data/plain', b'plain-three')
os.symlink(b'../../../etc/shadow', b'data/link')
os.symlink(b'nowhere', b'dangling')
os.link(b'dangling', b'dangling-too', follow_symlinks=False)
os.lchown(b'dangling', 5, 6)
os.setxattr(b'dangling', 'trusted.note', b'of a link', follow_symlinks=False)
os.mkdir(b'sticky')
os.chmod(b'sticky', 0o3771)
os.mkdir(b'closed')
os.chmod(b'closed', 0)
os.mkdir(b'mounted')
os.mkfifo(b'fifo')
os.mknod(b'device', stat.S_IFCHR | 0o600, os.makedev(1, 3))
listener = socket.socket(socket.AF_UNIX)
listener.bind(b'socket')
for at, path in enumerate([b'data/acl', b'data/deep', b'data', b'dangling', b'.']):
    os.utime(path, ns=(1_000_000_000_000_000_001 + at, 1_100_000_000_000_000_003 + at), follow_symlinks=False)
";

/// Prints a line for each directory, file and link: all that a user can see of it.
const DESCRIBE: &str = r"
import hashlib, os, stat, sys
top = os.fsencode(sys.argv[1])
more = sys.argv[2:] == ['more']
first, lines = {}, []
device = os.lstat(top).st_dev
def describe(path, below):
    found = os.lstat(path)
    kind = stat.S_IFMT(found.st_mode)
    if kind not in (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK) or found.st_dev != device:
        return
    facts = [below, oct(found.st_mode), found.st_uid, found.st_gid, found.st_mtime_ns]
    if more and kind == stat.S_IFREG:
        facts += [found.st_atime_ns]
    if more:
        facts += [found.st_ctime_ns, found.st_ino, found.st_nlink]
    if kind != stat.S_IFDIR:
        facts += [first.setdefault(found.st_ino, below), found.st_nlink, found.st_size]
    for name in sorted(os.listxattr(path, follow_symlinks=False)):
        if name != 'security.selinux' and not name.startswith('trusted.SGI_ACL'):
            facts += [name, os.getxattr(path, name, follow_symlinks=False).hex()]
    if kind == stat.S_IFLNK:
        facts += [os.readlink(path)]
    if kind == stat.S_IFREG:
        data = hashlib.sha256()
        file = os.open(path, os.O_RDONLY | os.O_NOATIME)
        at = 0
        while at < found.st_size:
            try:
                at = os.lseek(file, at, os.SEEK_DATA)
            except OSError:
                break
            end = os.lseek(file, at, os.SEEK_HOLE)
            while at < end:
                block = os.pread(file, min(4096 - at % 4096, end - at), at)
                if block.strip(b'\0'):
                    data.update(b'%d:' % at + block)
                at += len(block)
        os.close(file)
        facts += [data.hexdigest()]
    lines.append(repr(facts))
    if kind == stat.S_IFDIR:
        for name in sorted(os.listdir(path)):
            describe(path + b'/' + name, below + b'/' + name)
describe(top, b'')
print('\n'.join(lines))
";

fn python(script: &str, words: &[&str]) -> String {
    run("python3", &[&["-c", script], words].concat())
}

fn describe(path: &Path) -> String {
    python(DESCRIBE, &[path.to_str().unwrap()])
}

/// A directory of a claim with the name that local-path gives it.
fn local_path(node: &Node) -> PathBuf {
    let name = "opt/local-path-provisioner/pvc-0f1a7e29-5b7c-4f3c-9d1e-3f0f5c2b8a11_shop_data";
    node.scratch.dir(name)
}

/// The words of an import of a directory.
fn words<'a>(from: &'a Path, scratch: &'a Path, more: &[&'a str]) -> Vec<&'a str> {
    let from = from.to_str().unwrap();
    let fixed = ["volumes", "import", "--to-pool", "default", "--from", from];
    let scratch = ["--scratch", scratch.to_str().unwrap()];
    [&fixed, &scratch[..], more].concat()
}

/// Runs the command. Returns what it printed, with stderr.
fn import(node: &Node, from: &Path, more: &[&str]) -> Result<(String, String), String> {
    let words = words(from, &node.disk.mount_point, more);
    let (done, printed, said) = node.server.archive(&words, &[]);
    let printed = String::from_utf8(printed).unwrap();
    match done {
        true => Ok((printed.trim_end().to_string(), said)),
        false => Err(said),
    }
}

/// Names of files without a name that are open, and of loop devices that have one.
fn nameless(disk: &Disk) -> Vec<String> {
    let found = run("losetup", &["-l", "-n", "-O", "NAME,BACK-FILE"]);
    let place = disk.mount_point.to_str().unwrap();
    let lines = found.lines().filter(|line| line.contains(place));
    lines
        .filter(|line| line.contains("(deleted)") || line.ends_with(place))
        .map(str::to_string)
        .collect()
}

#[tokio::test]
async fn a_directory_of_local_path_becomes_a_volume_with_all_that_its_files_have() {
    let node = Node::on("xfs", 3 * GIB);
    let from = local_path(&node);
    python(CREATE, &[from.to_str().unwrap()]);
    let mounted = from.join("mounted");
    run("mount", &["-t", "tmpfs", "none", mounted.to_str().unwrap()]);
    fs::write(mounted.join("of another file system"), "x").unwrap();
    let all = |path: &Path| python(DESCRIBE, &[path.to_str().unwrap(), "more"]);
    let before = all(&from);
    for fs in ["ext4", "xfs", "btrfs"] {
        let name = format!("data-{fs}");
        let words = ["--name", &name, "--size", "400Mi", "--fs-type", fs];
        let (printed, said) = import(&node, &from, &words).unwrap();
        assert!(
            printed.is_empty() && said.contains("would become"),
            "{said}"
        );
        for skipped in [
            "a FIFO: \"fifo\"",
            "a device: \"device\"",
            "a socket: \"socket\"",
        ] {
            assert!(said.contains(skipped), "{said}");
        }
        assert!(said.contains("a mount point: \"mounted\""), "{said}");
        assert!(node.client.list().await.unwrap().is_empty(), "a dry run");

        let (id, said) = import(&node, &from, &[&words[..], &["--yes"]].concat()).unwrap();
        assert!(said.contains("a FIFO: \"fifo\""), "{said}");
        assert!(nameless(&node.disk).is_empty());
        let staging = node.staging("imported");
        node.stage(&id, &staging, mount(fs)).await;
        assert_eq!(describe(&staging), describe(&from), "{fs}");
        let blocks = run(
            "du",
            &["-sm", staging.join("data/sparse").to_str().unwrap()],
        );
        assert!(
            blocks.starts_with("0\t") || blocks.starts_with("1\t"),
            "{blocks}"
        );
        node.client.unstage(&id, &staging).await.unwrap();
        node.client.delete_unused(&id).await;
    }
    assert_eq!(all(&from), before, "the source was only read");
    run("umount", &[mounted.to_str().unwrap()]);
    node.assert_nothing_left();
}

#[tokio::test]
async fn what_cannot_be_imported_of_a_directory_is_named() {
    let node = Node::on("xfs", 3 * GIB);
    let from = local_path(&node);
    fs::write(from.join("data"), vec![7; 60 << 20]).unwrap();
    let refused = |words: &[&str]| {
        let words = [&["--name", "data", "--yes"], words].concat();
        import(&node, &from, &words).unwrap_err()
    };
    let ext4 = ["--fs-type", "ext4"];
    let sized = |size| [&ext4[..], &["--size", size]].concat();
    assert!(refused(&ext4).contains("--size"));
    assert!(refused(&["--size", "1Gi"]).contains("--fs-type"));
    assert!(refused(&sized("32Mi")).contains("give more than that"));
    let full = refused(&sized("61Mi"));
    assert!(
        full.contains("larger --size") && full.contains("data"),
        "{full}"
    );
    let writer = OpenOptions::new().append(true).open(from.join("data"));
    let busy = refused(&sized("1Gi"));
    assert!(
        busy.contains("_data/data") && busy.contains("open for writing"),
        "{busy}"
    );
    drop(writer);
    let link = node.scratch.join("link");
    std::os::unix::fs::symlink(&from, &link).unwrap();
    let words = [&["--name", "data", "--yes"], &sized("1Gi")[..]].concat();
    let refused = import(&node, &link, &words).unwrap_err();
    assert!(refused.contains("symbolic link"), "{refused}");
    let other = Disk::new(&node.scratch, "small", "ext4", 64 * MIB);
    let elsewhere = self::words(&from, &other.mount_point, &words);
    let (done, _, said) = node.server.archive(&elsewhere, &[]);
    assert!(!done && said.contains("bytes free"), "{said}");
    assert!(node.client.list().await.unwrap().is_empty());
    assert!(nameless(&node.disk).is_empty());
    node.assert_nothing_left();
}

/// The disk is full only after the space was examined, so the kernel reports it late.
#[test]
fn an_image_that_could_not_be_written_is_not_imported() {
    let scratch = Scratch::new();
    let from = scratch.dir("from");
    fs::write(from.join("data"), vec![7; 40 << 20]).unwrap();
    for fs in [FsType::Ext4, FsType::Xfs, FsType::Btrfs] {
        for pool in ["ext4", "xfs", "btrfs"] {
            let disk = Disk::new(&scratch, &format!("{pool}-{fs}"), pool, 512 * MIB);
            let image = ScratchImage::create(&disk.mount_point, 400 * MIB, 0, fs).unwrap();
            let file = fs::File::create(disk.mount_point.join("other")).unwrap();
            let mut taken = 512 * MIB;
            while taken > 16 << 10 {
                let at = file.metadata().unwrap().len() as i64;
                if fallocate(file.as_fd(), FallocateFlags::empty(), at, taken as i64).is_err() {
                    taken /= 2;
                }
            }
            let tree = ImportTree::open(&from).unwrap();
            let copied = tree.copy_to(image.root(), &mut |_| {});
            let ended = image.into_source();
            assert!(copied.is_err() || ended.is_err(), "{fs} on {pool}");
            drop((ended, file));
            eventually("the loop device is gone", || nameless(&disk).is_empty());
            disk.unmount();
        }
    }
}

/// The disk fails when the last directory is written, and then nothing is left that could fail.
#[test]
fn an_image_whose_journal_has_failed_is_not_imported() {
    let scratch = Scratch::new();
    let disk = Disk::new(&scratch, "pool", "xfs", 512 * MIB);
    for fails in [false, true] {
        let image = ScratchImage::create(&disk.mount_point, 256 * MIB, 0, FsType::Ext4).unwrap();
        mkdirat(image.root(), "written", Mode::S_IRWXU).unwrap();
        if fails {
            // Blocks beyond the first ones are an error from here on.
            nameless_file(&disk).set_len(MIB).unwrap();
            let devices = nameless(&disk);
            let device = devices[0].split_whitespace().next().unwrap();
            run("losetup", &["--set-capacity", device]);
            assert!(image.root().sync_all().is_err());
        }
        let ended = image.into_source();
        assert_eq!(ended.is_err(), fails);
        drop(ended);
        eventually("the loop device is gone", || nameless(&disk).is_empty());
    }
    disk.unmount();
}

/// The file without a name that this process has open on a disk.
fn nameless_file(disk: &Disk) -> fs::File {
    let open = fs::read_dir("/proc/self/fd").unwrap();
    let mut paths = open.map(|entry| entry.unwrap().path());
    let found = paths.find(|path| {
        let to = fs::read_link(path).unwrap_or_default();
        to.starts_with(&disk.mount_point) && to.to_string_lossy().ends_with("(deleted)")
    });
    OpenOptions::new().write(true).open(found.unwrap()).unwrap()
}

#[tokio::test]
async fn nothing_is_left_of_an_import_of_a_directory_that_was_killed() {
    let mut node = Node::on("xfs", 3 * GIB);
    let from = local_path(&node);
    for number in 0..300 {
        let folder = from.join(format!("d{}", number % 17));
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join(number.to_string()), vec![number as u8; 700_000]).unwrap();
    }
    let more = [
        "--size",
        "1Gi",
        "--fs-type",
        "xfs",
        "--yes",
        "--name",
        "data",
    ];
    let (socket, disk) = (
        node.server.socket().to_path_buf(),
        node.disk.mount_point.clone(),
    );
    let start = || {
        let words = words(&from, &disk, &more);
        let mut command = archive_command(&socket, &words);
        command.stdout(Stdio::null()).stderr(Stdio::piped());
        (Instant::now(), command.spawn().unwrap())
    };
    let pool = node.disk.mount_point.clone();
    let space = || statvfs(&pool).unwrap().blocks_available() * 4096;
    let before = space();
    let (begun, mut child) = start();
    assert!(child.wait().unwrap().success());
    let whole = begun.elapsed();
    let listed = node.client.list().await.unwrap();
    node.client.delete_unused(&listed[0]).await;

    let mut were_attached = 0;
    for step in 0..12_u32 {
        let (begun, mut child) = start();
        if step % 2 == 0 {
            // While it fills the file system.
            let is_attached = || !nameless(&node.disk).is_empty();
            while !is_attached() && child.try_wait().unwrap().is_none() {
                std::thread::sleep(Duration::from_millis(2));
            }
        } else {
            std::thread::sleep((whole * step / 12).saturating_sub(begun.elapsed()));
        }
        were_attached += usize::from(!nameless(&node.disk).is_empty());
        child.kill().unwrap();
        child.wait().unwrap();
        eventually("the loop device is gone", || {
            nameless(&node.disk).is_empty()
        });
    }
    assert!(were_attached > 1, "{were_attached}");
    // What was sent of the last one is begun again, under the same name, unless it was complete. The
    // driver ends an import some time after its caller has gone.
    let mut answer = import(&node, &from, &more);
    while matches!(&answer, Err(said) if said.contains("is running; try again")) {
        std::thread::sleep(Duration::from_millis(50));
        answer = import(&node, &from, &more);
    }
    let id = match answer {
        Ok((id, _)) => id,
        Err(said) => {
            assert!(said.contains("exists with content"), "{said}");
            let listed = node.client.list().await.unwrap();
            node.client.delete_unused(&listed[0]).await;
            import(&node, &from, &more).unwrap().0
        }
    };
    let staging = node.staging("imported");
    node.stage(&id, &staging, mount("xfs")).await;
    assert_eq!(describe(&staging), describe(&from));
    node.client.unstage(&id, &staging).await.unwrap();
    node.client.delete_unused(&id).await;
    eventually("its space is free", || space() + 64 * MIB > before);
    kill_the_driver(&mut node, &from, &more).await;
    node.assert_nothing_left();
}

/// Kills the driver while it gets the image.
async fn kill_the_driver(node: &mut Node, from: &Path, more: &[&str]) {
    let words = words(from, &node.disk.mount_point, more);
    let mut command = archive_command(node.server.socket(), &words);
    command.stdout(Stdio::null()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    eventually("the driver has a part", || !node.disk.volumes().is_empty());
    node.server.signal(Signal::SIGKILL);
    assert!(!child.wait().unwrap().success());
    let mut said = String::new();
    child.stderr.unwrap().read_to_string(&mut said).unwrap();
    assert!(said.contains("slackwater:"), "{said}");
    assert!(nameless(&node.disk).is_empty());
    node.restart_with(&[]);
    assert!(node.client.list().await.unwrap().is_empty());
    let (id, _) = import(node, from, more).unwrap();
    node.client.delete_unused(&id).await;
}

/// The driver keeps a part of what it was sent; another content does not continue it.
#[tokio::test]
async fn a_failed_import_of_stdin_begins_again_under_its_name() {
    let node = Node::on("xfs", 3 * GIB);
    let stdin = |size: &str, bytes: &[u8]| {
        let fixed = ["volumes", "import", "--to-pool", "default", "--from", "-"];
        let more = ["--name", "data", "--yes", "--size", size];
        node.server.archive(&[&fixed[..], &more].concat(), bytes)
    };
    let (done, _, said) = stdin("64Mi", &vec![7; (64 << 20) + 1]);
    assert!(!done && said.contains("more than"), "{said}");
    let (done, printed, said) = stdin("64Mi", &vec![8; 64 << 20]);
    assert!(done, "{said}");
    let id = String::from_utf8(printed).unwrap().trim_end().to_string();
    let image = fs::File::open(node.image(&id)).unwrap();
    let mut read = vec![0; 64 << 20];
    image.read_exact_at(&mut read, 0).unwrap();
    assert!(read.iter().all(|byte| *byte == 8));
    assert!(loops_on(&node.image(&id)).is_empty());
    node.client.delete_unused(&id).await;
    node.assert_nothing_left();
}

/// Measured with `SLACKWATER_SOAK=1`; otherwise a tenth.
#[tokio::test]
async fn many_files_are_imported() {
    let node = Node::on("xfs", 3 * GIB);
    let from = local_path(&node);
    let per_folder = slackwater_testkit::rounds(500, 5000);
    for folder in 0..20 {
        let folder = node.scratch.dir(&format!("{}/d{folder}", from.display()));
        for number in 0..per_folder {
            fs::write(folder.join(number.to_string()), number.to_string()).unwrap();
        }
    }
    let begun = Instant::now();
    let more = [
        "--name",
        "many",
        "--size",
        "2Gi",
        "--fs-type",
        "ext4",
        "--yes",
    ];
    let (id, said) = import(&node, &from, &more).unwrap();
    println!("{} files: {:?}", 20 * per_folder, begun.elapsed());
    assert!(
        said.contains(&format!("{} files", 20 * per_folder)),
        "{said}"
    );
    let staging = node.staging("imported");
    node.stage(&id, &staging, mount("ext4")).await;
    assert_eq!(describe(&staging), describe(&from));
    node.client.unstage(&id, &staging).await.unwrap();
    node.client.delete_unused(&id).await;
    node.assert_nothing_left();
}
