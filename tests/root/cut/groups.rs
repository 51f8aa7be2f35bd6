//! Groups: all members or none, one moment, one answer.

use tonic::Code;

use super::{GIB, Node, refused};
use slackwater_testkit::block;
use slackwater_testkit::snapshots::members;

async fn three(node: &Node) -> Vec<(String, std::path::PathBuf)> {
    let mut volumes_of_kinds = Vec::new();
    for (n, fs) in ["ext4", "xfs", "btrfs"].into_iter().enumerate() {
        let staging = node.staging(&format!("v{n}"));
        let id = node.staged(&format!("v{n}"), &staging, fs).await;
        volumes_of_kinds.push((id, staging));
    }
    volumes_of_kinds
}

#[tokio::test(flavor = "multi_thread")]
async fn a_group_is_cut_at_one_moment_and_is_deleted_only_as_a_whole() {
    let node = Node::new();
    let client = &node.client;
    let volumes = three(&node).await;
    let ids: Vec<String> = volumes.iter().map(|(id, _)| id.clone()).collect();
    let group = client.group("g", &ids, &[]).await.unwrap();
    assert!(group.ready_to_use);
    for (snapshot, id) in group.snapshots.iter().zip(&ids) {
        assert_eq!(&snapshot.source_volume_id, id);
        assert_eq!(snapshot.group_snapshot_id, group.group_snapshot_id);
        assert_eq!(snapshot.creation_time, group.creation_time);
        assert!(snapshot.ready_to_use);
    }
    assert_eq!(
        client.group("g", &ids, &[]).await.unwrap(),
        group,
        "a repeat"
    );
    let answer = client.group("g", &ids[..2], &[]).await;
    assert!(refused(answer, Code::AlreadyExists).contains("source_volume_ids"));
    let answer = client.group("g", &ids, &[("retries", "1")]).await;
    assert!(refused(answer, Code::AlreadyExists).contains("parameters"));
    let members = members(&group);
    let mut listed = client.snapshots("").await.unwrap();
    listed.sort();
    let mut sorted = members.clone();
    sorted.sort();
    assert_eq!(listed, sorted);

    let answer = client.delete_snapshot(&members[1]).await;
    assert!(refused(answer, Code::InvalidArgument).contains(&group.group_snapshot_id));
    let id = &group.group_snapshot_id;
    let answer = client.delete_group(id, &members[..2]).await;
    assert!(refused(answer, Code::InvalidArgument).contains("snapshot_ids"));
    for _ in 0..2 {
        client.delete_group(id, &members).await.unwrap();
    }
    assert_eq!(client.snapshots("").await.unwrap(), Vec::<String>::new());
    for (id, staging) in &volumes {
        node.unstage_and_delete(id, staging).await;
    }
    node.assert_nothing_left();
}

#[tokio::test(flavor = "multi_thread")]
async fn volumes_without_a_common_moment_are_refused() {
    let node = Node::new();
    let client = &node.client;
    let volumes = three(&node).await;
    let mut ids: Vec<String> = volumes.iter().map(|(id, _)| id.clone()).collect();
    for parameter in ["consistency", "onQuiesceFailure"] {
        let answer = client.group("g", &ids, &[(parameter, "crash")]).await;
        assert!(refused(answer, Code::InvalidArgument).contains(parameter));
    }
    let (staging, target) = (node.staging("raw"), node.path("raw.target"));
    let raw = client.create("raw", GIB, block(), &[]).await.unwrap();
    client.stage(&raw, &staging, block()).await.unwrap();
    client
        .publish(&raw, &staging, &target, block(), false)
        .await
        .unwrap();
    ids.push(raw.clone());
    let answer = client.group("g", &ids, &[]).await;
    assert!(refused(answer, Code::FailedPrecondition).contains("raw block"));
    assert_eq!(client.snapshots("").await.unwrap(), Vec::<String>::new());
    client.unpublish(&raw, &target).await.unwrap();
    client.unstage(&raw, &staging).await.unwrap();
    let group = client.group("g", &ids, &[]).await.unwrap();
    let id = &group.group_snapshot_id;
    client.delete_group(id, &members(&group)).await.unwrap();
    client.delete(&raw).await.unwrap();
    for (id, staging) in &volumes {
        node.unstage_and_delete(id, staging).await;
    }
    node.assert_nothing_left();
}

/// If one volume cannot be snapshotted, no volume is.
#[tokio::test(flavor = "multi_thread")]
async fn a_group_with_a_member_that_fails_leaves_nothing() {
    let node = Node::new();
    let client = &node.client;
    let volumes = three(&node).await;
    let mut ids: Vec<String> = volumes.iter().map(|(id, _)| id.clone()).collect();
    ids.push("not-a-volume".into());
    refused(client.group("g", &ids, &[]).await, Code::NotFound);
    ids.pop();
    // Another program has already frozen the second volume; the driver must not thaw it.
    let frozen = volumes[1].1.to_str().unwrap().to_string();
    slackwater_testkit::run("fsfreeze", &["-f", &frozen]);
    let answer = client.group("g", &ids, &[("retries", "0")]).await;
    let thawed = slackwater_testkit::succeeds("fsfreeze", &["-u", &frozen]);
    assert!(
        answer.is_err() && thawed,
        "{answer:?}, still frozen by the test: {thawed}"
    );
    assert_eq!(client.snapshots("").await.unwrap(), Vec::<String>::new());
    for (_, staging) in &volumes {
        std::fs::write(staging.join("probe"), "nothing is frozen").unwrap();
    }
    for (id, staging) in &volumes {
        node.unstage_and_delete(id, staging).await;
    }
    node.assert_nothing_left();
}
