//! Many calls at once, and many volumes.

use std::collections::HashSet;
use std::sync::Arc;

use tokio::sync::Semaphore;
use tonic::Code;

use super::{GIB, Node, check_pattern, write_pattern};
use slackwater_testkit::{disk, mount};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn forty_volumes_twenty_at_a_time() {
    let node = Arc::new(Node::on("xfs", 64 * GIB));
    let places = Arc::new(Semaphore::new(20));
    let kinds = ["ext4", "xfs", "btrfs"];
    let mut lives = Vec::new();
    for n in 0..40usize {
        let (node, places) = (node.clone(), places.clone());
        lives.push(tokio::spawn(async move {
            let _place = places.acquire().await.unwrap();
            let fs = kinds[n % 3];
            let (staging, target) = (node.staging(&n.to_string()), node.path(&n.to_string()));
            let id = node.created(&format!("crowd-{n}"), mount(fs)).await;
            node.stage(&id, &staging, mount(fs)).await;
            node.client
                .publish(&id, &staging, &target, mount(fs), false)
                .await
                .unwrap();
            write_pattern(&target.join("data"), n as u8, 1 << 16);
            (id, staging, target)
        }));
    }
    let mut alive = Vec::new();
    for life in lives {
        alive.push(life.await.unwrap());
    }
    let devices: HashSet<_> = alive
        .iter()
        .flat_map(|(id, ..)| disk::loops_on(&node.image(id)))
        .collect();
    assert_eq!(devices.len(), 40, "each volume has a device of its own");
    for (n, (_, _, target)) in alive.iter().enumerate() {
        check_pattern(&target.join("data"), n as u8, 1 << 16);
    }
    let mut ends = Vec::new();
    for (id, staging, target) in alive {
        let (node, places) = (node.clone(), places.clone());
        ends.push(tokio::spawn(async move {
            let _place = places.acquire().await.unwrap();
            node.client.unpublish(&id, &target).await.unwrap();
            node.unstage_and_delete(&id, &staging).await;
        }));
    }
    for end in ends {
        end.await.unwrap();
    }
    node.assert_nothing_left();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sixty_four_creates_of_one_name_create_one_volume() {
    let node = Node::new();
    let mut calls = Vec::new();
    for _ in 0..64 {
        let client = node.client.clone();
        calls.push(tokio::spawn(async move {
            client.create("one", GIB, mount("ext4"), &[]).await
        }));
    }
    let mut ids = HashSet::new();
    for call in calls {
        match call.await.unwrap() {
            Ok(id) => drop(ids.insert(id)),
            Err(status) => assert_eq!(status.code(), Code::Aborted, "{status:?}"),
        }
    }
    assert_eq!(ids.len(), 1);
    assert_eq!(node.disk.volumes().len(), 1);
    node.client
        .delete(ids.iter().next().unwrap())
        .await
        .unwrap();
    node.assert_nothing_left();
}

/// Volumes on the pool before the driver starts: copies of one that the driver created, each with a
/// UUID and a name of its own.
const MANY: usize = 10_000;

#[tokio::test]
async fn ten_thousand_volumes_on_one_pool() {
    let mut node = Node::on("xfs", 20 * GIB);
    let first = node
        .client
        .create("first", 1 << 20, mount("ext4"), &[])
        .await
        .unwrap();
    node.server.kill();
    let (pool, volume) = first.split_once('.').unwrap();
    let record = std::fs::read_to_string(node.image(&first).with_file_name("record.json")).unwrap();
    for n in 1..MANY {
        let uuid = uuid::Uuid::new_v5(
            &pool.parse().unwrap(),
            format!("volume\nmany-{n}").as_bytes(),
        )
        .to_string();
        let folder = node.disk.mount_point.join("volumes").join(&uuid);
        std::fs::create_dir(&folder).unwrap();
        let copy = record
            .replace(volume, &uuid)
            .replace("\"first\"", &format!("\"many-{n}\""));
        std::fs::write(folder.join("record.json"), copy).unwrap();
        std::fs::File::create(folder.join("data.img"))
            .unwrap()
            .set_len(1 << 20)
            .unwrap();
    }
    node.server.restart();
    node.client = node.server.client();
    let ids = node.client.list().await.unwrap();
    assert_eq!(ids.len(), MANY);
    assert!(
        ids.windows(2).all(|pair| pair[0] < pair[1]),
        "each volume once, in order"
    );
    // An existing name is found again, and a new volume can be created, used and deleted next to
    // them.
    let known = node
        .client
        .create("many-77", 1 << 20, mount("ext4"), &[])
        .await
        .unwrap();
    assert!(ids.contains(&known));
    let staging = node.staging("new");
    let id = node
        .client
        .create("new", 1 << 20, mount("ext4"), &[])
        .await
        .unwrap();
    node.stage(&id, &staging, mount("ext4")).await;
    node.client.unstage(&id, &staging).await.unwrap();
    assert!(node.client.capacity(&[]).await.unwrap() > GIB);
    for id in ids.iter().take(50).chain([&id]) {
        node.client.delete(id).await.unwrap();
    }
    assert_eq!(node.client.list().await.unwrap().len(), MANY - 50);
}
