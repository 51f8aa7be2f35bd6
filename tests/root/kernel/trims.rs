//! Blocks of deleted files, which the driver discards on a schedule.

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use super::{GIB, Node, check_pattern, definition, write_pattern};
use slackwater_testkit::{Disk, Scratch, Server, eventually, mount, run};

/// The bytes that are written to each volume and deleted, and those that stay.
const DELETED: usize = 200 << 20;
const KEPT: usize = 8 << 20;

fn allocated(path: &Path) -> u64 {
    std::fs::metadata(path).unwrap().blocks() * 512
}

fn free(path: &Path) -> u64 {
    let found = nix::sys::statvfs::statvfs(path).unwrap();
    found.blocks_free() * found.fragment_size()
}

/// Writes a file durably and deletes it, and waits until its file system has freed its blocks.
fn write_and_delete(staging: &Path) {
    let before = free(staging);
    let file = staging.join("deleted");
    write_pattern(&file, 7, DELETED);
    std::fs::remove_file(file).unwrap();
    run("sync", &["-f", staging.to_str().unwrap()]);
    eventually("the blocks of the deleted file are free", || {
        free(staging) + DELETED as u64 / 4 > before
    });
}

/// Without btrfs, which discards by itself on kernels from 6.2 on.
#[tokio::test]
async fn a_pools_trim_schedule_frees_blocks_of_deleted_files_only_in_thin_volumes() {
    let scratch = Scratch::new();
    let disk = Disk::new(&scratch, "pool", "xfs", 8 * GIB);
    let pool = definition(&disk.mount_point);
    let server = Server::start(&scratch, &[&pool]);
    let client = server.client();
    let mut node = Node {
        server,
        client,
        disk,
        scratch,
    };
    let mut volumes = Vec::new();
    for (fs, allocation) in [
        ("xfs", "thin"),
        ("ext4", "thin"),
        ("xfs", "thick"),
        ("ext4", "thick"),
    ] {
        let name = format!("{fs}-{allocation}");
        let staging = node.staging(&name);
        let parameters = [("allocation", allocation)];
        let created = node.client.create(&name, GIB, mount(fs), &parameters);
        let id = created.await.unwrap();
        node.stage(&id, &staging, mount(fs)).await;
        write_pattern(&staging.join("kept"), 1, KEPT);
        write_and_delete(&staging);
        volumes.push((name, id, staging));
    }
    let (thin, thick) = volumes.split_at(2);
    let is_trimmed = |node: &Node, id: &str| allocated(&node.image(id)) < DELETED as u64 / 2;
    for (name, id, _) in &volumes {
        assert!(allocated(&node.image(id)) >= DELETED as u64, "{name}");
    }

    // The pool has never been trimmed, so the first round starts at once.
    node.server.kill();
    let weekly = format!("{pool},trim=7d");
    node.server = Server::start(&node.scratch, &[&weekly]);
    node.client = node.server.client();
    for (name, id, _) in thin {
        eventually(&format!("{name} is trimmed"), || is_trimmed(&node, id));
    }
    let note = node.disk.mount_point.join("trash/trimmed");
    eventually("the round has ended", || note.exists());
    for (name, id, _) in thick {
        assert!(allocated(&node.image(id)) >= GIB, "{name} keeps its blocks");
    }

    // The next round starts after its interval, and nothing else triggers it.
    for (_, _, staging) in &volumes {
        write_and_delete(staging);
    }
    node.server.kill();
    let noted = std::fs::read_to_string(&note).unwrap();
    let week_ago = noted.trim().parse::<u64>().unwrap() - 7 * 24 * 3600;
    for (name, id, _) in thin {
        assert!(!is_trimmed(&node, id), "{name} was trimmed before its time");
    }
    std::fs::write(&note, week_ago.to_string()).unwrap();
    node.server = Server::start(&node.scratch, &[&weekly]);
    node.client = node.server.client();
    for (name, id, _) in thin {
        eventually(&format!("{name} is trimmed again"), || {
            is_trimmed(&node, id)
        });
    }
    for (name, id, staging) in &volumes {
        check_pattern(&staging.join("kept"), 1, KEPT);
        let is_thick = thick.iter().any(|(_, other, _)| other == id);
        let least = if is_thick { GIB } else { KEPT as u64 };
        assert!(allocated(&node.image(id)) >= least, "{name}");
        node.unstage_and_delete(id, staging).await;
    }
    std::fs::remove_file(&note).unwrap();
    node.assert_nothing_left();
}
