//! The router's answers about groups equal those of a single node.

use tonic::Code;

use slackwater_testkit::cluster::{Cluster, ids};
use slackwater_testkit::node::refused;
use slackwater_testkit::snapshots::members;

#[tokio::test(flavor = "multi_thread")]
async fn a_group_across_nodes_is_answered_like_a_group_of_one_node() {
    let mut cluster = Cluster::new(&["xfs", "btrfs"]).await;
    let volumes = cluster
        .volumes(&[(1, "ext4"), (0, "xfs"), (1, "btrfs")])
        .await;
    let client = cluster.router.client.clone();
    let asked = ids(&volumes);

    for parameter in ["consistency", "onQuiesceFailure"] {
        let across = [asked[0].clone(), asked[1].clone()];
        let answer = client.group("g", &across, &[(parameter, "crash")]).await;
        assert!(refused(answer, Code::InvalidArgument).contains(parameter));
    }
    let mut wrong = asked.clone();
    wrong.push("not-a-volume".into());
    refused(client.group("g", &wrong, &[]).await, Code::NotFound);
    let answer = client.group("g", &asked, &[("no-such", "1")]).await;
    assert!(refused(answer, Code::InvalidArgument).contains("no-such"));
    let application = [("consistency", "application")];
    let answer = client.group("g", &asked, &application).await;
    assert!(refused(answer, Code::FailedPrecondition).contains("hook"));
    let answer = client.snapshot("s", &asked[0], &application).await;
    assert!(refused(answer, Code::FailedPrecondition).contains("hook"));
    cluster.assert_no_snapshots("all of these are refused");

    let group = client.group("g", &asked, &[]).await.unwrap();
    assert!(group.ready_to_use);
    for (snapshot, id) in group.snapshots.iter().zip(&asked) {
        assert_eq!(
            &snapshot.source_volume_id, id,
            "in the order of the request"
        );
        assert_eq!(snapshot.group_snapshot_id, group.group_snapshot_id);
        assert_eq!(snapshot.creation_time, group.creation_time);
        assert!(snapshot.ready_to_use);
    }
    let again = client.group("g", &asked, &[]).await.unwrap();
    assert_eq!(again, group, "a repeat");
    let answer = client.group("g", &asked[..2], &[]).await;
    assert!(refused(answer, Code::AlreadyExists).contains("source_volume_ids"));
    let answer = client.group("g", &asked[1..2], &[]).await;
    assert!(refused(answer, Code::AlreadyExists).contains("source_volume_ids"));
    let answer = client.group("g", &asked, &[("retries", "1")]).await;
    assert!(refused(answer, Code::AlreadyExists).contains("parameters"));

    let members = members(&group);
    let id = &group.group_snapshot_id;
    let got = client.get_group(id, &members).await.unwrap();
    assert_eq!(got, group);
    assert_eq!(client.get_group(id, &[]).await.unwrap(), group);
    let answer = client.get_group(id, &members[..1]).await;
    assert!(refused(answer, Code::InvalidArgument).contains("snapshot_ids"));
    let unknown = "00000000-0000-0000-0000-000000000000";
    refused(client.get_group(unknown, &[]).await, Code::NotFound);
    let answer = client.delete_snapshot(&members[1]).await;
    assert!(refused(answer, Code::InvalidArgument).contains(id));
    let answer = client.delete_group(id, &members[..2]).await;
    assert!(refused(answer, Code::InvalidArgument).contains("snapshot_ids"));
    assert_eq!(client.snapshots("").await.unwrap().len(), 3);
    // A single snapshot keeps its level, whatever its class says later.
    let single = client.snapshot("s", &asked[0], &[]).await.unwrap();
    let other_class = client.snapshot("s", &asked[0], &[("retries", "1")]).await;
    assert_eq!(other_class.unwrap(), single);
    let answer = client.snapshot("s", &asked[0], &application).await;
    assert!(refused(answer, Code::AlreadyExists).contains("consistency"));
    client.delete_snapshot(&single.snapshot_id).await.unwrap();

    // An agent that cannot be reached is never reported as absent.
    cluster.agents[0].server.kill();
    for answer in [
        client.get_group(id, &members).await.map(drop),
        client.delete_group(id, &members).await,
        client.group("g", &asked, &[]).await.map(drop),
        client.get_group(unknown, &[]).await.map(drop),
        client.group("h", &asked, &[]).await.map(drop),
    ] {
        assert!(refused(answer, Code::Unavailable).contains("node-0"));
    }
    // Volumes of other nodes are not affected.
    let one = client.group("one", &asked[..1], &[]).await.unwrap();
    cluster.delete_group(&one).await;
    cluster.agents[0].restart_with(&[]);
    let group = cluster.until_made("g", &volumes, &[], "back").await;
    assert_eq!(group, again);
    for _ in 0..2 {
        client.delete_group(id, &members).await.unwrap();
    }
    cluster.tear_down(volumes).await;
}
