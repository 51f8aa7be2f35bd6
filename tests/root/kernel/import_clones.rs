//! `slackwater volumes import` of image files on the file system of the pool, as OpenEBS rawfile has
//! them: a directory for each volume, with `disk.img`. The volume shares their blocks.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::{Path, PathBuf};

use slackwater_testkit::disk::{content_digest, folder};
use slackwater_testkit::{Scratch, mount, run};

use super::{GIB, MIB, Node, check_pattern, write_pattern};

const BYTES: usize = 24 << 20;
const WORDS: [&str; 3] = ["--name", "data", "--yes"];

/// A node whose driver may clone the images below `rawfile` on the disk of its pool.
fn node(fs: &str) -> Node {
    let config = |scratch: &Scratch| format!("import-path = [{:?}]\n", rawfile(scratch));
    Node::configured(fs, 3 * GIB, config, &[])
}

fn rawfile(scratch: &Scratch) -> PathBuf {
    scratch.join("pool/rawfile")
}

/// An image as rawfile makes it: a sparse file with ext4.
fn image(node: &Node, volume: &str) -> PathBuf {
    let tree = node.scratch.dir(&format!("{volume}.tree"));
    write_pattern(&tree.join("data"), 1, BYTES);
    let path = folder(&rawfile(&node.scratch).join(volume)).join("disk.img");
    let file = OpenOptions::new().write(true).create_new(true).open(&path);
    file.unwrap().set_len(64 * MIB).unwrap();
    let (tree, image) = (tree.to_str().unwrap(), path.to_str().unwrap());
    run("mkfs.ext4", &["-q", "-F", "-d", tree, image]);
    // What is written back later would count as used by the import.
    run("sync", &["-f", image]);
    path
}

/// Everything of a file that a change of it changes.
fn state(path: &Path) -> (String, u64, [i64; 4]) {
    let found = fs::metadata(path).unwrap();
    let times = [
        found.mtime(),
        found.mtime_nsec(),
        found.ctime(),
        found.ctime_nsec(),
    ];
    (content_digest(path), found.ino(), times)
}

/// Runs the command. Returns whether it succeeded, stdout and stderr.
fn import(node: &Node, from: &Path, words: &[&str]) -> (bool, String, String) {
    let from = from.to_str().unwrap();
    let fixed = ["volumes", "import", "--to-pool", "default", "--from", from];
    let (done, printed, said) = node.server.archive(&[&fixed, words].concat(), &[]);
    let printed = String::from_utf8(printed).unwrap().trim_end().to_string();
    (done, printed, said)
}

#[track_caller]
fn refused(node: &Node, from: &Path) -> String {
    let (done, printed, said) = import(node, from, &WORDS);
    assert!(!done, "{printed} {said}");
    said
}

/// Imports a file, and expects that it is copied for this reason.
#[track_caller]
fn copied(node: &Node, from: &Path, why: &str) -> String {
    let (done, id, said) = import(node, from, &WORDS);
    assert!(
        done && said.contains("copied: ") && said.contains(why),
        "{said}"
    );
    id
}

/// Bytes that are in use on the disk of the pool.
fn used(node: &Node) -> u64 {
    run("sync", &["-f", node.disk.mount_point.to_str().unwrap()]);
    let found = nix::sys::statvfs::statvfs(&node.disk.mount_point).unwrap();
    (found.blocks() - found.blocks_free()) * found.fragment_size()
}

/// Whether all extents with data of a file are shared with others, as another program reports it. What
/// was only reserved reads as zeros, and xfs does not share it.
fn shares_all(path: &Path) -> bool {
    let printed = run("filefrag", &["-v", path.to_str().unwrap()]);
    let mut extents = printed.lines().filter(|line| {
        let first = line.split(':').next().unwrap_or_default();
        first.trim().parse::<u64>().is_ok() && !line.contains("unwritten")
    });
    assert!(printed.contains("shared"), "{printed}");
    extents.all(|line| line.contains("shared"))
}

#[tokio::test]
async fn an_image_on_the_file_system_of_the_pool_is_cloned_and_stays_as_it_is() {
    for fs in ["xfs", "btrfs"] {
        let node = node(fs);
        let top = folder(&rawfile(&node.scratch));
        if fs == "btrfs" {
            run("chattr", &["+C", top.to_str().unwrap()]);
        }
        let path = image(&node, "pvc-1");
        let (before, room) = (state(&path), used(&node));
        let (done, printed, said) = import(&node, &path, &["--name", "data"]);
        assert!(done && printed.is_empty(), "{said}");
        assert!(
            said.contains("would become") && said.contains("cloned"),
            "{said}"
        );
        assert_eq!(node.client.list().await.unwrap().len(), 0, "a dry run");
        let words = [&WORDS[..], &["--size", "100Mi", "--json"]].concat();
        let (done, printed, said) = import(&node, &path, &words);
        assert!(
            done && said.contains("cloned, it shares the blocks"),
            "{said}"
        );
        let printed: serde_json::Value = serde_json::from_str(&printed).unwrap();
        assert_eq!(printed["method"], "cloned", "{fs}");
        assert_eq!(printed["content"], "ext4");
        let id = printed["id"].as_str().unwrap();
        let more = used(&node).saturating_sub(room);
        assert!(more < BYTES as u64 / 4, "{fs}: {more} bytes are new");
        assert!(shares_all(&path) && shares_all(&node.image(id)), "{fs}");
        let (content, source) = (fs::read(node.image(id)).unwrap(), fs::read(&path).unwrap());
        assert!(content[..source.len()] == source[..], "{fs}");
        assert!(content[source.len()..].iter().all(|byte| *byte == 0));
        assert_eq!(content.len() as u64, 100 * MIB);
        assert_eq!(state(&path), before, "{fs}: the import only reads");
        // A repeat is the same volume.
        let words = [&WORDS[..], &["--size", "100Mi"]].concat();
        let (done, again, said) = import(&node, &path, &words);
        assert!(done && again == id, "{said}");
        let staging = node.staging("imported");
        node.stage(id, &staging, mount("ext4")).await;
        check_pattern(&staging.join("data"), 1, BYTES);
        write_pattern(&staging.join("data"), 2, BYTES);
        node.client.unstage(id, &staging).await.unwrap();
        assert_eq!(state(&path), before, "{fs}: the volume is written alone");
        node.client.delete_unused(id).await;
        assert_eq!(state(&path), before, "{fs}: the volume is deleted alone");
        node.assert_nothing_left();
    }
}

/// The chart mounts the directories of `--import-path` read-only into the container of the driver.
#[tokio::test]
async fn a_read_only_mount_of_the_directory_is_enough() {
    let node = node("xfs");
    let path = image(&node, "pvc-1");
    let top = rawfile(&node.scratch);
    let top = top.to_str().unwrap();
    run("mount", &["--bind", top, top]);
    run("mount", &["-o", "remount,bind,ro", top]);
    let (done, id, said) = import(&node, &path, &WORDS);
    assert!(done && said.contains("cloned"), "{said}");
    assert!(shares_all(&node.image(&id)));
    run("umount", &[top]);
    node.client.delete_unused(&id).await;
    node.assert_nothing_left();
}

#[tokio::test]
async fn a_length_that_is_no_whole_block_is_followed_by_zeros() {
    let node = node("xfs");
    let path = folder(&rawfile(&node.scratch).join("pvc-1")).join("disk.img");
    for length in [1, 5000] {
        fs::write(&path, vec![7; length]).unwrap();
        let words = [&WORDS[..], &["--size", "1Mi"]].concat();
        let (done, id, said) = import(&node, &path, &words);
        assert!(done && said.contains("cloned"), "{said}");
        let written = fs::read(node.image(&id)).unwrap();
        assert!(written[..length].iter().all(|byte| *byte == 7));
        assert!(written[length..].iter().all(|byte| *byte == 0));
        assert_eq!(written.len() as u64, MIB);
        node.client.delete_unused(&id).await;
    }
    fs::write(&path, []).unwrap();
    assert!(refused(&node, &path).contains("it is empty"));
    fs::write(&path, vec![7; 3 << 20]).unwrap();
    let (done, _, said) = import(&node, &path, &[&WORDS[..], &["--size", "1Mi"]].concat());
    assert!(!done && said.contains("give at least that"), "{said}");
    node.assert_nothing_left();
}

#[tokio::test]
async fn an_image_that_is_in_use_or_behind_a_link_is_refused() {
    let node = node("xfs");
    let path = image(&node, "pvc-1");
    let before = state(&path);
    let writer = OpenOptions::new().write(true).open(&path).unwrap();
    assert!(refused(&node, &path).contains("open for writing"));
    drop(writer);
    let attached = run("losetup", &["--find", "--show", path.to_str().unwrap()]);
    let attached = attached.trim();
    assert!(refused(&node, &path).contains("open for writing"));
    let mounted = node.scratch.dir("mounted");
    run("mount", &["-o", "ro", attached, mounted.to_str().unwrap()]);
    assert!(refused(&node, &path).contains("open for writing"));
    run("umount", &[mounted.to_str().unwrap()]);
    run("losetup", &["-d", attached]);
    let words = ["--read-only", "--find", "--show"];
    let read_only = run("losetup", &[&words[..], &[path.to_str().unwrap()]].concat());
    assert!(refused(&node, &path).contains("it is attached to"));
    run("losetup", &["-d", read_only.trim()]);
    // A tenant who owns a part of the path leads it to the image of another one.
    let top = rawfile(&node.scratch);
    symlink(&path, folder(&top.join("pvc-2")).join("disk.img")).unwrap();
    symlink(top.join("pvc-1"), top.join("pvc-3")).unwrap();
    for volume in ["pvc-2", "pvc-3"] {
        let said = refused(&node, &top.join(volume).join("disk.img"));
        assert!(said.contains("is a symbolic link"), "{said}");
    }
    run("mkfifo", &[top.join("fifo").to_str().unwrap()]);
    assert!(refused(&node, &top.join("fifo")).contains("neither a file nor"));
    assert!(refused(&node, &top).contains("--fs-type"));
    assert_eq!(node.client.list().await.unwrap().len(), 0);
    assert_eq!(state(&path), before);
    node.assert_nothing_left();
}

#[tokio::test]
async fn what_cannot_be_cloned_is_copied_and_the_reason_is_printed() {
    // Without --import-path, the default.
    let plain = Node::on("xfs", 3 * GIB);
    let path = image(&plain, "pvc-1");
    let (_, _, said) = import(&plain, &path, &["--name", "data"]);
    assert!(
        said.contains("copied: it is not below a directory of --import-path"),
        "{said}"
    );
    let id = copied(&plain, &path, "--import-path");
    assert!(!run("filefrag", &["-v", path.to_str().unwrap()]).contains("shared"));
    plain.client.delete_unused(&id).await;
    plain.assert_nothing_left();
    // Outside of the directory.
    let elsewhere = node("xfs");
    let path = image(&elsewhere, "pvc-1");
    let outside = folder(&elsewhere.scratch.join("pool/others")).join("disk.img");
    fs::rename(&path, &outside).unwrap();
    let id = copied(&elsewhere, &outside, "--import-path");
    elsewhere.client.delete_unused(&id).await;
    // On another file system.
    let other = slackwater_testkit::Disk::new(&elsewhere.scratch, "pool/rawfile", "xfs", GIB);
    let path = image(&elsewhere, "pvc-2");
    let id = copied(&elsewhere, &path, "another file system");
    elsewhere.client.delete_unused(&id).await;
    other.unmount();
    elsewhere.assert_nothing_left();
    // On file systems that cannot share blocks, or only with files of another kind.
    for (fs, why) in [("ext4", "cannot share blocks"), ("btrfs", "checksums")] {
        let node = node(fs);
        let path = image(&node, "pvc-1");
        let before = state(&path);
        let id = copied(&node, &path, why);
        let staging = node.staging("imported");
        node.stage(&id, &staging, mount("ext4")).await;
        check_pattern(&staging.join("data"), 1, BYTES);
        node.client.unstage(&id, &staging).await.unwrap();
        assert_eq!(state(&path), before);
        node.client.delete_unused(&id).await;
        node.assert_nothing_left();
    }
}

/// The driver is stopped right before the clone, or after it. A process that opens the image for writing
/// then ends the import, although it would have to wait.
#[cfg(feature = "fault")]
#[tokio::test]
async fn an_image_that_is_opened_for_writing_during_the_clone_becomes_no_volume() {
    use std::os::unix::fs::{FileExt, OpenOptionsExt};

    use nix::sys::signal::Signal;

    for mode in ["stop", "stop-after"] {
        let mut node = node("xfs");
        let path = image(&node, "pvc-1");
        let plan = format!("effect.clone_whole:{mode}");
        node.restart_with(&[("SLACKWATER_FAULT", &plan)]);
        std::thread::scope(|scope| {
            let call = scope.spawn(|| import(&node, &path, &WORDS));
            while !node.server.is_stopped() {
                std::thread::sleep(std::time::Duration::from_millis(5));
            }
            let writer = OpenOptions::new()
                .write(true)
                .custom_flags(nix::libc::O_NONBLOCK)
                .open(&path);
            let waits = writer.unwrap_err().raw_os_error();
            assert_eq!(waits, Some(nix::libc::EWOULDBLOCK));
            node.server.signal(Signal::SIGCONT);
            let (done, printed, said) = call.join().unwrap();
            assert!(
                !done && said.contains("opened for writing"),
                "{printed} {said}"
            );
        });
        assert_eq!(node.client.list().await.unwrap().len(), 0);
        node.assert_nothing_left();
        // Now it has an owner that writes.
        let writer = OpenOptions::new().write(true).open(&path).unwrap();
        writer.write_all_at(&[7; 4096], 60 << 20).unwrap();
        drop(writer);
        let (done, id, said) = import(&node, &path, &WORDS);
        assert!(done && said.contains("cloned"), "{said}");
        node.client.delete_unused(&id).await;
    }
}

#[cfg(feature = "fault")]
#[tokio::test]
async fn a_clone_that_a_kill_has_cut_off_is_repeated() {
    for mode in ["kill", "kill-after"] {
        let mut node = node("xfs");
        let path = image(&node, "pvc-1");
        let before = state(&path);
        let plan = format!("effect.clone_whole:{mode}");
        node.restart_with(&[("SLACKWATER_FAULT", &plan)]);
        refused(&node, &path);
        node.restart_with(&[]);
        assert_eq!(node.client.list().await.unwrap().len(), 0);
        let (done, id, said) = import(&node, &path, &WORDS);
        assert!(done && said.contains("cloned"), "{said}");
        assert!(shares_all(&node.image(&id)));
        assert_eq!(state(&path), before);
        node.client.delete_unused(&id).await;
        node.assert_nothing_left();
    }
}
