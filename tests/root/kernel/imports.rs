//! `slackwater volumes import`: image files, block devices and stdin of others become volumes.

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::{GIB, MIB, Node, check_pattern, write_pattern};
use slackwater_testkit::disk::content_digest;

use slackwater_testkit::{WAIT_TIMEOUT, archive_command, mount, run};

const BYTES: usize = 5 << 20;

/// An image of ext4 with a file, as another driver has it.
fn image(node: &Node, name: &str) -> PathBuf {
    let tree = node.scratch.dir(&format!("{name}.tree"));
    write_pattern(&tree.join("data"), 1, BYTES);
    let path = node.scratch.dir("foreign").join(name);
    let file = OpenOptions::new().write(true).create_new(true).open(&path);
    file.unwrap().set_len(64 * MIB).unwrap();
    let words = [
        "-q",
        "-F",
        "-d",
        tree.to_str().unwrap(),
        path.to_str().unwrap(),
    ];
    run("mkfs.ext4", &words);
    path
}

/// Runs the command. Returns what it printed, or the error.
fn import(node: &Node, from: &Path, words: &[&str], input: &[u8]) -> Result<String, String> {
    let from = from.to_str().unwrap();
    let fixed = ["volumes", "import", "--to-pool", "default", "--from", from];
    let (done, printed, said) = node.server.archive(&[&fixed, words].concat(), input);
    match done {
        true => Ok(String::from_utf8(printed).unwrap().trim_end().to_string()),
        false => Err(said),
    }
}

async fn check(node: &Node, id: &str) {
    let staging = node.staging("imported");
    node.stage(id, &staging, mount("ext4")).await;
    check_pattern(&staging.join("data"), 1, BYTES);
    node.client.unstage(id, &staging).await.unwrap();
    node.client.delete_unused(id).await;
}

#[tokio::test]
async fn an_image_file_of_others_becomes_a_volume_and_stays_as_it_is() {
    let node = Node::on("xfs", 3 * GIB);
    let path = image(&node, "disk.img");
    let before = content_digest(&path);
    let words = [
        "--name",
        "data",
        "--claim",
        "shop/data",
        "--persistent-volume",
        "data-pv",
    ];
    assert_eq!(import(&node, &path, &words, &[]).unwrap(), "");
    assert!(node.client.list().await.unwrap().is_empty(), "a dry run");

    let words = [&words[..], &["--yes", "--size", "100Mi"]].concat();
    let printed = import(&node, &path, &words, &[]).unwrap();
    let objects: serde_json::Value = serde_json::from_str(&printed).unwrap();
    let [volume, claim] = objects["items"].as_array().unwrap().as_slice() else {
        panic!("{printed}");
    };
    let id = volume["spec"]["csi"]["volumeHandle"].as_str().unwrap();
    assert_eq!(node.client.list().await.unwrap(), [id]);
    assert_eq!(volume["spec"]["csi"]["fsType"], "ext4");
    assert_eq!(volume["spec"]["claimRef"]["name"], "data");
    assert_eq!(
        volume["spec"]["capacity"]["storage"],
        (100 * MIB).to_string()
    );
    assert_eq!(claim["spec"]["volumeName"], "data-pv");
    assert_eq!(claim["metadata"]["namespace"], "shop");
    let terms = &volume["spec"]["nodeAffinity"]["required"]["nodeSelectorTerms"];
    assert_eq!(terms[0]["matchExpressions"][0]["operator"], "In", "{terms}");
    // The same content again is the same volume, and another one is refused.
    let again = import(
        &node,
        &path,
        &["--name", "data", "--size", "100Mi", "--yes"],
        &[],
    );
    assert_eq!(again.unwrap(), id);
    assert!(content_digest(&path) == before);
    let file = OpenOptions::new().write(true).open(&path).unwrap();
    file.write_all_at(&[1], 40 << 20).unwrap();
    drop(file);
    let other = import(&node, &path, &["--name", "data", "--yes"], &[]).unwrap_err();
    assert!(other.contains("exists with content"), "{other}");
    check(&node, id).await;
    node.assert_nothing_left();
}

#[tokio::test]
async fn what_is_in_use_truncated_or_packed_is_not_imported() {
    let node = Node::on("xfs", 3 * GIB);
    let path = image(&node, "disk.img");
    let refused = |path: &Path, words: &[&str]| {
        let words = [&["--name", "data", "--yes"], words].concat();
        import(&node, path, &words, &[]).unwrap_err()
    };
    let writer = OpenOptions::new().write(true).open(&path).unwrap();
    assert!(refused(&path, &[]).contains("open for writing"));
    drop(writer);
    let attached = run("losetup", &["--find", "--show", path.to_str().unwrap()]);
    let attached = attached.trim();
    assert!(refused(&path, &[]).contains("open for writing"));
    let mounted = node.scratch.dir("mounted");
    run("mount", &[attached, mounted.to_str().unwrap()]);
    assert!(refused(Path::new(attached), &[]).contains("is mounted"));
    run("umount", &[mounted.to_str().unwrap()]);
    // The device itself is not in use.
    let id = import(
        &node,
        Path::new(attached),
        &["--name", "data", "--yes"],
        &[],
    );
    check(&node, &id.unwrap()).await;
    run("losetup", &["-d", attached]);
    let words = ["--read-only", "--find", "--show"];
    let read_only = run("losetup", &[&words[..], &[path.to_str().unwrap()]].concat());
    let said = refused(&path, &[]);
    let expected = format!("it is attached to {}", read_only.trim());
    assert!(said.contains(&expected), "{said}");
    run("losetup", &["-d", read_only.trim()]);
    assert!(refused(&path, &["--size", "32Mi"]).contains("at least"));
    let file = OpenOptions::new().write(true).open(&path).unwrap();
    file.set_len(60 << 20).unwrap();
    drop(file);
    assert!(refused(&path, &[]).contains("truncated"));
    let qcow2 = path.with_extension("qcow2");
    std::fs::write(&qcow2, b"QFI\xfb and the rest of it").unwrap();
    assert!(refused(&qcow2, &[]).contains("qemu-img convert"));
    assert!(refused(&path.with_extension("none"), &[]).contains("ENOENT"));
    assert!(node.client.list().await.unwrap().is_empty());
    node.assert_nothing_left();
}

/// A device has no time of change, so nothing says that the content is the one of the first attempt.
#[tokio::test]
async fn the_import_of_a_device_that_changed_is_repeated_from_its_beginning() {
    let node = Node::on("xfs", 3 * GIB);
    let path = image(&node, "disk.img");
    let device = run("losetup", &["--find", "--show", path.to_str().unwrap()]);
    let device = Path::new(device.trim());
    let words = ["--name", "data", "--yes"];
    let is_done = AtomicBool::new(false);
    let failed = std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            let file = OpenOptions::new().write(true).open(device).unwrap();
            // Until both reads of an import have seen another number.
            for number in 1_u64.. {
                file.write_all_at(&number.to_le_bytes(), 40 << 20).unwrap();
                if is_done.load(Ordering::Relaxed) {
                    break;
                }
            }
            file.write_all_at(&[0; 8], 40 << 20).unwrap();
        });
        let failed = import(&node, device, &words, &[]);
        is_done.store(true, Ordering::Relaxed);
        writer.join().unwrap();
        failed.unwrap_err()
    });
    assert!(failed.contains("changed while it was read"), "{failed}");
    assert!(node.client.list().await.unwrap().is_empty(), "{failed}");
    let id = import(&node, device, &words, &[]).unwrap();
    assert_eq!(node.client.list().await.unwrap(), [id.as_str()]);
    let content = std::fs::read(device).unwrap();
    assert!(std::fs::read(node.image(&id)).unwrap() == content);
    check(&node, &id).await;
    run("losetup", &["-d", device.to_str().unwrap()]);
    node.assert_nothing_left();
}

#[tokio::test]
async fn stdin_becomes_a_volume_unless_it_is_longer_than_announced() {
    let node = Node::on("btrfs", 3 * GIB);
    let path = image(&node, "disk.img");
    let stdin = Path::new("-");
    let content = std::fs::read(&path).unwrap();
    let words = ["--name", "data", "--yes"];
    let missing = import(&node, stdin, &words, &content).unwrap_err();
    assert!(missing.contains("--size is missing"), "{missing}");
    let sized = |size| [&words[..], &["--size", size]].concat();
    let long = import(&node, stdin, &sized("63Mi"), &content).unwrap_err();
    assert!(long.contains("more than"), "{long}");
    assert!(node.client.list().await.unwrap().is_empty());
    let words = [&["--name", "other"], &sized("64Mi")[2..]].concat();
    let id = import(&node, stdin, &words, &content).unwrap();
    check(&node, &id).await;
    // Not a whole number of blocks, and shorter than announced: the rest reads as zeros.
    let words = ["--name", "short", "--yes", "--size", "1Mi"];
    let id = import(&node, stdin, &words, &[7; 5000]).unwrap();
    check_start(&node, &id).await;
    let short = node.scratch.join("short");
    std::fs::write(&short, [7; 5000]).unwrap();
    let id = import(&node, &short, &["--name", "short", "--yes"], &[]);
    check_start(&node, &id.unwrap()).await;
}

/// A file or stdin of no byte and of one byte, and a directory without a file and with one byte.
#[tokio::test]
async fn the_smallest_content_becomes_a_volume_and_a_file_without_content_is_refused() {
    let node = Node::on("xfs", 3 * GIB);
    let file = node.scratch.join("small");
    std::fs::write(&file, []).unwrap();
    let words = ["--name", "data", "--yes"];
    let empty = import(&node, &file, &words, &[]).unwrap_err();
    assert!(empty.contains("it is empty"), "{empty}");
    std::fs::write(&file, [7]).unwrap();
    let id = import(&node, &file, &words, &[]).unwrap();
    let mut expected = vec![0; 4096];
    expected[0] = 7;
    assert!(std::fs::read(node.image(&id)).unwrap() == expected);
    node.client.delete_unused(&id).await;
    let stdin = Path::new("-");
    for (input, begin) in [(&[][..], 0), (&[7][..], 7)] {
        let words = [&words[..], &["--size", "1Mi"]].concat();
        let id = import(&node, stdin, &words, input).unwrap();
        let mut expected = vec![0; 1 << 20];
        expected[0] = begin;
        assert!(std::fs::read(node.image(&id)).unwrap() == expected);
        node.client.delete_unused(&id).await;
    }
    let folder = node.scratch.dir("folder");
    let scratch = node.disk.mount_point.to_str().unwrap();
    let words = [
        &words[..],
        &["--size", "64Mi", "--fs-type", "ext4", "--scratch", scratch],
    ]
    .concat();
    for count in 0..2 {
        if count == 1 {
            std::fs::write(folder.join("one"), [7]).unwrap();
        }
        let id = import(&node, &folder, &words, &[]).unwrap();
        let staging = node.staging("imported");
        node.stage(&id, &staging, mount("ext4")).await;
        let names = std::fs::read_dir(&staging).unwrap().count();
        assert_eq!(names, count);
        if count == 1 {
            assert_eq!(std::fs::read(staging.join("one")).unwrap(), [7]);
        }
        node.client.unstage(&id, &staging).await.unwrap();
        node.client.delete_unused(&id).await;
    }
    node.assert_nothing_left();
}

/// A raw volume begins with 5000 bytes, and has zeros after them.
async fn check_start(node: &Node, id: &str) {
    let written = std::fs::read(node.image(id)).unwrap();
    assert!(written[..5000].iter().all(|byte| *byte == 7));
    assert!(written[5000..].iter().all(|byte| *byte == 0));
    node.client.delete_unused(id).await;
}

#[tokio::test]
async fn a_refusal_does_not_wait_for_the_rest_of_stdin() {
    let node = Node::on("xfs", 3 * GIB);
    let words = ["volumes", "import", "--yes", "--from", "-", "--size", "1Mi"];
    let words = [&words[..], &["--name", "data", "--to-pool", "other"]].concat();
    let mut command = archive_command(node.server.socket(), &words);
    command.stdin(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    // It stays open.
    let stdin = child.stdin.take();
    let start = Instant::now();
    while child.try_wait().unwrap().is_none() {
        assert!(start.elapsed() < WAIT_TIMEOUT, "it waits for stdin");
        std::thread::sleep(Duration::from_millis(50));
    }
    drop(stdin);
    let said = child.wait_with_output().unwrap().stderr;
    let said = String::from_utf8_lossy(&said);
    assert!(said.contains("other"), "{said}");
    node.assert_nothing_left();
}
