//! A snapshot of level filesystem contains data that was written and never synced.

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::Path;

use super::volumes::Volume;
use super::{MIB, Node, check_pattern, pattern};

const BYTES: usize = 5 * MIB as usize + 77;

/// All kinds of changes in a folder without a sync. Returns the open files.
fn write_unsynced(folder: &Path) -> Vec<File> {
    let file = |name: &str| File::create(folder.join(name)).unwrap();
    let mut large = file("large");
    large.write_all(&pattern(1, BYTES)).unwrap();
    large.write_all_at(&pattern(2, 4096), 1 << 20).unwrap();
    let mut sparse = file("sparse");
    sparse.write_all_at(b"far", 64 * MIB).unwrap();
    sparse.write_all(b"near").unwrap();
    let mut temporary = file("renamed.tmp");
    temporary.write_all(&pattern(3, 10_000)).unwrap();
    fs::rename(folder.join("renamed.tmp"), folder.join("renamed")).unwrap();
    fs::create_dir(folder.join("inner")).unwrap();
    std::os::unix::fs::symlink("../large", folder.join("inner/link")).unwrap();
    fs::hard_link(folder.join("renamed"), folder.join("inner/second")).unwrap();
    file("gone").write_all(b"gone").unwrap();
    fs::remove_file(folder.join("gone")).unwrap();
    vec![large, sparse, temporary]
}

fn check_unsynced(folder: &Path) {
    let large = fs::read(folder.join("inner/link")).unwrap();
    let mut wanted = pattern(1, BYTES);
    wanted[1 << 20..(1 << 20) + 4096].copy_from_slice(&pattern(2, 4096));
    assert!(
        large == wanted,
        "every byte is present, {} of {BYTES}",
        large.len()
    );
    let sparse = fs::read(folder.join("sparse")).unwrap();
    assert_eq!(sparse.len() as u64, 64 * MIB + 3);
    assert!(sparse.starts_with(b"near") && sparse.ends_with(b"far"));
    check_pattern(&folder.join("renamed"), 3, 10_000);
    check_pattern(&folder.join("inner/second"), 3, 10_000);
    let mut names: Vec<_> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    assert_eq!(names, ["inner", "large", "renamed", "sparse"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn data_that_was_written_and_never_synced_is_in_the_snapshot() {
    let node = Node::new();
    for fs in ["ext4", "xfs", "btrfs"] {
        let volume = Volume::new(&node, fs, fs).await;
        let mut open = write_unsynced(&volume.folder);
        let snapshot = node.client.snapshot(fs, &volume.id, &[]).await;
        let snapshot = snapshot.unwrap_or_else(|e| panic!("{e}\n{}", node.server.log()));
        // The volume keeps changing; the snapshot does not.
        for file in &mut open {
            file.write_all_at(&pattern(9, BYTES), 0).unwrap();
        }
        let copy = node.staging("copy");
        let copy = volume.copy(&node, &snapshot.snapshot_id, &copy).await;
        check_unsynced(&copy.folder);
        drop(open);
        copy.end(&node).await;
        volume.end(&node).await;
        node.client
            .delete_snapshot(&snapshot.snapshot_id)
            .await
            .unwrap();
    }
    node.assert_nothing_left();
}

/// What level crash does not guarantee, and proof that the test above could fail.
#[tokio::test(flavor = "multi_thread")]
async fn level_crash_has_synced_data_and_may_lack_the_rest() {
    let node = Node::new();
    let volume = Volume::new(&node, "volume", "ext4").await;
    let mut lost = false;
    // Another program's sync may come between, but not each time.
    for attempt in 0..10 {
        let name = format!("crash-{attempt}");
        super::write_pattern(&volume.folder.join("synced"), attempt, 100_000);
        let unsynced = volume.folder.join(format!("unsynced-{attempt}"));
        fs::write(&unsynced, pattern(attempt, BYTES)).unwrap();
        let crash = [("consistency", "crash")];
        let snapshot = node.client.snapshot(&name, &volume.id, &crash).await;
        let snapshot = snapshot.unwrap().snapshot_id;
        let copy = volume.copy(&node, &snapshot, &node.staging(&name)).await;
        check_pattern(&copy.folder.join("synced"), attempt, 100_000);
        let found = fs::read(copy.folder.join(unsynced.file_name().unwrap()));
        lost = found.unwrap_or_default() != pattern(attempt, BYTES);
        copy.end(&node).await;
        node.client.delete_snapshot(&snapshot).await.unwrap();
        if lost {
            break;
        }
    }
    assert!(lost, "ten cuts without a freeze contain all unsynced data");
    volume.end(&node).await;
    node.assert_nothing_left();
}
