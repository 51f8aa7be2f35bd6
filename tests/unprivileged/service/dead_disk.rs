//! A disk that dies below one pool affects only that pool.

use std::path::Path;

use slackwater::csi::*;
use slackwater::cut::CutInterfaces;
use slackwater::host::Host;
use slackwater::model::Alpha;
use slackwater::operation::Driver;

use crate::service::harness::*;

/// A node with the pools "a" and "b".
async fn two_pools() -> Node {
    let pools = |settings: &mut slackwater::operation::Settings| {
        settings.pools = vec![pool("a"), pool("b")];
    };
    Node::with(Alpha::default(), pools).await
}

/// Creates a volume in a pool, and stages and publishes it.
async fn published(node: &Node, pool: &str) -> String {
    let request = CreateVolumeRequest {
        parameters: map([("pool", pool)]),
        ..create(pool)
    };
    let created = node.controller.clone().create_volume(request).await;
    let id = created.unwrap().into_inner().volume.unwrap().volume_id;
    let mut client = node.node.clone();
    client.node_stage_volume(stage_in(pool, &id)).await.unwrap();
    let target = format!("{TARGET}-{pool}");
    let request = NodePublishVolumeRequest {
        staging_target_path: format!("{STAGING}-{pool}"),
        ..publish(&id, &target)
    };
    client.node_publish_volume(request).await.unwrap();
    id
}

fn stage_in(pool: &str, id: &str) -> NodeStageVolumeRequest {
    NodeStageVolumeRequest {
        staging_target_path: format!("{STAGING}-{pool}"),
        ..stage(id)
    }
}

fn unpublish_in(pool: &str, id: &str) -> NodeUnpublishVolumeRequest {
    NodeUnpublishVolumeRequest {
        volume_id: id.to_string(),
        target_path: format!("{TARGET}-{pool}"),
    }
}

fn unstage_in(pool: &str, id: &str) -> NodeUnstageVolumeRequest {
    NodeUnstageVolumeRequest {
        staging_target_path: format!("{STAGING}-{pool}"),
        ..unstage(id)
    }
}

/// Unpublishes, unstages and deletes a published volume.
async fn end(node: &Node, pool: &str, id: &str) {
    let mut client = node.node.clone();
    let (unpublish, unstage) = (unpublish_in(pool, id), unstage_in(pool, id));
    client.node_unpublish_volume(unpublish).await.unwrap();
    client.node_unstage_volume(unstage.clone()).await.unwrap();
    let staged = client.node_stage_volume(stage_in(pool, id)).await;
    staged.unwrap();
    client.node_unstage_volume(unstage).await.unwrap();
    let deleted = node.controller.clone().delete_volume(delete(id)).await;
    deleted.unwrap();
}

#[tokio::test]
async fn volumes_of_other_pools_work_despite_a_dead_loop_device() {
    let node = two_pools().await;
    published(&node, "a").await;
    let id = published(&node, "b").await;
    node.host.kill_disk(Path::new("/memory/a")).unwrap();
    end(&node, "b", &id).await;
}

#[tokio::test]
async fn a_start_with_a_dead_loop_device_serves_the_other_pools() {
    let node = two_pools().await;
    published(&node, "a").await;
    published(&node, "b").await;
    node.host.kill_disk(Path::new("/memory/a")).unwrap();
    let (settings, host) = (
        node.driver.pools.settings().clone(),
        node.host.restart_process(),
    );
    let next = Driver::start(settings, CutInterfaces::simulated(host)).unwrap();
    let refused = |name: &str| {
        let status = next.pool_status();
        let pool = status.iter().find(|pool| pool.name == name).unwrap();
        pool.refusal.clone()
    };
    assert_eq!(refused("b"), None);
    assert!(refused("a").unwrap().contains("EIO"));
}

/// The value of a pool's metric.
async fn metric(node: &Node, name: &str, pool: &str) -> String {
    let (metrics, driver) = (node.metrics.clone(), node.driver.clone());
    metrics.observe(driver);
    let scrape = move || {
        metrics.refresh();
        metrics.render().unwrap()
    };
    let text = tokio::task::spawn_blocking(scrape).await.unwrap();
    let line = format!("slackwater_{name}{{pool=\"{pool}\"}} ");
    let mut lines = text.lines();
    let found = lines.find_map(|found| found.strip_prefix(&line));
    found.unwrap_or_else(|| panic!("{line} in {text}")).into()
}

async fn capacity(node: &Node, pool: &str) -> i64 {
    let request = GetCapacityRequest {
        parameters: map([("pool", pool)]),
        ..Default::default()
    };
    let answer = node.controller.clone().get_capacity(request).await;
    answer.unwrap().into_inner().available_capacity
}

#[tokio::test]
async fn a_pool_whose_disk_dies_is_not_served_until_it_is_there_again() {
    let node = two_pools().await;
    let id = published(&node, "a").await;
    let well = published(&node, "b").await;
    let folder = Path::new("/memory/a");
    node.host.kill_disk(folder).unwrap();
    // Measured before the refresh that finds the dead disk.
    assert_eq!(capacity(&node, "a").await, 0);
    node.driver.refresh_pools();
    let refusals = || -> Vec<_> {
        let pools = node.driver.pool_status().into_iter();
        pools.map(|pool| pool.refusal).collect()
    };
    let why = refusals()[0].clone().unwrap();
    assert!(why.contains("its disk is dead"), "{why}");
    assert_eq!(refusals()[1], None);
    assert_eq!(capacity(&node, "a").await, 0);
    assert!(capacity(&node, "b").await > 0);
    assert_eq!(metric(&node, "pool_served", "a").await, "0.0");
    assert_eq!(metric(&node, "pool_served", "b").await, "1.0");
    let deleted = node.controller.clone().delete_volume(delete(&id)).await;
    assert_eq!(deleted.unwrap_err().code(), tonic::Code::Unavailable);

    node.host.replace_disk(folder).unwrap();
    // The driver keeps neither folder nor lock, so that the pool can be opened again.
    node.driver.refresh_pools();
    assert_eq!(refusals(), [None, None]);
    assert_eq!(metric(&node, "pool_served", "a").await, "1.0");
    end(&node, "a", &id).await;
    end(&node, "b", &well).await;
}

#[tokio::test]
async fn pods_of_a_dead_disk_end_before_the_driver_has_probed_the_disk() {
    let node = two_pools().await;
    let id = published(&node, "a").await;
    node.host.kill_disk(Path::new("/memory/a")).unwrap();
    let mut client = node.node.clone();
    for _ in 0..2 {
        let (unpublish, unstage) = (unpublish_in("a", &id), unstage_in("a", &id));
        client.node_unpublish_volume(unpublish).await.unwrap();
        client.node_unstage_volume(unstage).await.unwrap();
    }
    let mut mounts = node.host.mounts().unwrap();
    mounts.retain(|mount| mount.mount_point.starts_with("/var/lib/kubelet"));
    assert_eq!(mounts, Vec::new());
}

#[tokio::test]
async fn a_raw_device_on_a_dead_disk_ends_with_its_pod() {
    let node = two_pools().await;
    let request = CreateVolumeRequest {
        parameters: map([("pool", "a")]),
        volume_capabilities: vec![block()],
        ..create("raw")
    };
    let created = node.controller.clone().create_volume(request).await;
    let id = created.unwrap().into_inner().volume.unwrap().volume_id;
    let mut client = node.node.clone();
    let staged = NodeStageVolumeRequest {
        volume_capability: Some(block()),
        ..stage(&id)
    };
    client.node_stage_volume(staged).await.unwrap();
    let shown = NodePublishVolumeRequest {
        volume_capability: Some(block()),
        ..publish(&id, TARGET)
    };
    client.node_publish_volume(shown).await.unwrap();
    let devices = || node.host.loop_devices(&|_| true).unwrap().len();
    assert_eq!(devices(), 1);
    node.host.kill_disk(Path::new("/memory/a")).unwrap();
    node.driver.refresh_pools();
    assert_eq!(devices(), 1, "of a pod that runs");
    let unpublish = NodeUnpublishVolumeRequest {
        volume_id: id.clone(),
        target_path: TARGET.into(),
    };
    client.node_unpublish_volume(unpublish).await.unwrap();
    client.node_unstage_volume(unstage(&id)).await.unwrap();
    assert_eq!(devices(), 0);
}

#[tokio::test]
async fn a_possibly_frozen_volume_stays_mounted_on_a_dead_disk() {
    let node = two_pools().await;
    let id = published(&node, "a").await;
    let host = &node.host;
    let number = host.loops().unwrap()[0].clone();
    let device = slackwater::host::Device::of_loop(number.number);
    let staging = format!("{STAGING}-a");
    let fs = slackwater::model::FsType::Ext4;
    let root = host.open_mount_root(Path::new(&staging), &device, fs);
    let member = slackwater::host::FreezeMember {
        volume_id: id.clone(),
        namespace: None,
        image: number.backing,
        root: Some(root.unwrap()),
        mapped: None,
    };
    let limits = slackwater::host::freezer::FreezeLimits {
        sync: std::time::Duration::from_secs(10),
        freeze: std::time::Duration::from_secs(10),
    };
    let freeze = slackwater::host::Freezer::begin(host, vec![member], limits).unwrap();
    host.kill_disk(Path::new("/memory/a")).unwrap();
    node.driver.refresh_pools();
    let (unpublish, unstage) = (unpublish_in("a", &id), unstage_in("a", &id));
    let mut client = node.node.clone();
    let refused = client.node_unpublish_volume(unpublish.clone()).await;
    assert_eq!(refused.unwrap_err().code(), tonic::Code::Aborted);
    let refused = client.node_unstage_volume(unstage.clone()).await;
    assert_eq!(refused.unwrap_err().code(), tonic::Code::Aborted);
    drop(freeze);
    client.node_unpublish_volume(unpublish).await.unwrap();
    client.node_unstage_volume(unstage).await.unwrap();
}

#[tokio::test]
async fn pods_that_use_a_dead_disk_are_reported_until_they_have_ended() {
    const POD: &str = "0f3c2d4e-8a54-4d7c-9d43-0d3f6a3e5b11";
    let node = two_pools().await;
    let id = published(&node, "a").await;
    let target = format!("/var/lib/kubelet/pods/{POD}/volumes/kubernetes.io~csi/pvc-1/mount");
    let mut client = node.node.clone();
    let second = NodePublishVolumeRequest {
        staging_target_path: format!("{STAGING}-a"),
        ..publish(&id, &target)
    };
    client.node_publish_volume(second).await.unwrap();
    // What the kernel reports of the device.
    let number = node.host.loops().unwrap()[0].number;
    let folder = format!("/sys/block/loop{number}/loop");
    node.host.make_folder(Path::new(&folder)).unwrap();
    let uuid = id.split_once('.').unwrap().1;
    let image = format!("/volumes/{uuid}/data.img\n");
    let file = Path::new(&folder).join("backing_file");
    node.host.put_file(&file, image.as_bytes()).unwrap();
    let pods = || node.driver.pool_status()[0].pods.clone();
    assert_eq!(pods(), Vec::<String>::new(), "the pool is served");
    node.host.kill_disk(Path::new("/memory/a")).unwrap();
    for _ in 0..3 {
        node.driver.refresh_pools();
        assert_eq!(pods(), [POD]);
    }
    let unpublish = NodeUnpublishVolumeRequest {
        volume_id: id,
        target_path: target,
    };
    client.node_unpublish_volume(unpublish).await.unwrap();
    assert_eq!(pods(), Vec::<String>::new());
}
