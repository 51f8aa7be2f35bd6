//! `slackwater export` and `slackwater import` between real images, with a hidden base.

use super::{GIB, MIB, Node, check_pattern, volume_uuid, write_pattern};
use slackwater_testkit::mount;

const BYTES: usize = 3 << 20;

/// The IDs of the volumes that an import has created.
fn import(node: &Node, words: &[&str], input: &[u8]) -> Vec<String> {
    let words = [&["import", "--json"], words].concat();
    let (done, printed, said) = node.server.archive(&words, input);
    assert!(done, "{said}");
    let printed: serde_json::Value = serde_json::from_slice(&printed).unwrap();
    let volumes = printed["volumes"].as_array().unwrap().iter();
    volumes
        .map(|one| one["id"].as_str().unwrap().to_string())
        .collect()
}

async fn check(node: &Node, id: &str, seed: u8) {
    let staging = node.staging("imported");
    node.stage(id, &staging, mount("ext4")).await;
    check_pattern(&staging.join("data"), seed, BYTES);
    node.client.unstage(id, &staging).await.unwrap();
}

/// The last backup is of differences to a snapshot that was deleted, as backup programs do it.
#[tokio::test]
async fn a_chain_of_archives_is_imported_with_a_deleted_base() {
    let mut node = Node::on("xfs", 3 * GIB);
    let staging = node.staging("data");
    let created = node.client.create("data", 64 * MIB, mount("ext4"), &[]);
    let id = created.await.unwrap();
    node.stage(&id, &staging, mount("ext4")).await;
    let keep = [("base", "keep")];
    write_pattern(&staging.join("data"), 1, BYTES);
    let first = node
        .client
        .snapshot("one", &id, &keep)
        .await
        .unwrap()
        .snapshot_id;
    let (done, full, said) = node.server.archive(&["export", &first], &[]);
    assert!(done, "{said}");
    node.client.delete_snapshot(&first).await.unwrap();
    write_pattern(&staging.join("data"), 2, BYTES);
    let second = node
        .client
        .snapshot("two", &id, &keep)
        .await
        .unwrap()
        .snapshot_id;
    let listed = node.cli_snapshots();
    let base = listed
        .iter()
        .find(|one| one["id"] == first.as_str())
        .unwrap();
    assert_eq!(base["state"], "base");
    assert_eq!(node.client.snapshots("").await.unwrap(), [second.as_str()]);
    let (done, more, said) = node
        .server
        .archive(&["export", &second, "--base", &first], &[]);
    assert!(done, "{said}");
    let sizes = (full.len() as u64, more.len() as u64);
    assert!(
        sizes.1 < 3 * BYTES as u64 && sizes.0 < 16 * MIB,
        "{sizes:?}"
    );

    // Truncated: nothing is there, and the driver may be killed.
    let names = ["import", "--prefix", "copy-", "--more"];
    let (done, _, said) = node.server.archive(&names, &full[..full.len() - 1]);
    assert!(!done && said.contains("truncated"), "{said}");
    let (done, _, said) = node
        .server
        .archive(&["import", "--prefix", "copy-"], &more[..more.len() / 2]);
    assert!(!done && said.contains("ends within frame"), "{said}");
    assert_eq!(node.client.list().await.unwrap(), [id.as_str()]);
    node.restart_with(&[]);
    let larger = ["--prefix", "copy-", "--size", "100Mi"];
    import(&node, &[&larger[..], &["--more"]].concat(), &full);
    assert_eq!(node.client.list().await.unwrap(), [id.as_str()]);
    let copy = import(&node, &larger, &more).remove(0);
    check(&node, &copy, 2).await;
    // The bytes of the snapshot, apart from what the mounts above have written: a second import.
    let whole = node.server.archive(&["export", &second], &[]).1;
    let again = import(&node, &["--name", "again"], &whole).remove(0);
    let image = node
        .disk
        .mount_point
        .join("snapshots")
        .join(volume_uuid(&second));
    let expected = std::fs::read(image.join("data.img")).unwrap();
    assert!(expected == std::fs::read(node.image(&again)).unwrap());

    for volume in [copy, again] {
        node.client.delete_unused(&volume).await;
    }
    node.client.delete_snapshot(&second).await.unwrap();
    node.unstage_and_delete(&id, &staging).await;
    node.assert_nothing_left();
}
