//! Volumes that are restored on another node than that of their snapshot.

use std::os::unix::fs::FileExt;
use std::path::Path;

use slackwater::csi;
use tonic::Code;

use slackwater_testkit::cluster::{Agent, Cluster, SIZE};
use slackwater_testkit::disk::content_digest;
use slackwater_testkit::node::{check_pattern, refused, write_pattern};
use slackwater_testkit::snapshots::from_snapshot;
use slackwater_testkit::{Client, Scratch, block, mount};

const PATTERN: usize = 24 << 20;

/// The request for a volume of a snapshot, on a node that is allowed alone.
pub(super) async fn request(
    (name, snapshot): (&str, &str),
    capability: csi::VolumeCapability,
    on: &Agent,
) -> csi::CreateVolumeRequest {
    csi::CreateVolumeRequest {
        name: name.into(),
        capacity_range: Some(csi::CapacityRange {
            required_bytes: SIZE as i64,
            limit_bytes: 0,
        }),
        volume_capabilities: vec![capability],
        parameters: [("restore".to_string(), "pod".to_string())].into(),
        volume_content_source: Some(from_snapshot(snapshot)),
        accessibility_requirements: Some(on.topology().await),
        ..Default::default()
    }
}

/// A volume of a snapshot, on a node that is allowed alone.
pub(super) async fn restore(
    cluster: &Cluster,
    asked: (&str, &str),
    capability: csi::VolumeCapability,
    on: &Agent,
) -> Result<csi::Volume, tonic::Status> {
    let request = request(asked, capability, on).await;
    let mut controller = cluster.router.client.controller();
    let created = controller.create_volume(request).await?;
    Ok(created.into_inner().volume.unwrap())
}

pub(super) async fn delete_snapshot(router: &Client, id: &str) {
    let request = csi::DeleteSnapshotRequest {
        snapshot_id: id.into(),
        ..Default::default()
    };
    let deleted = router.controller().delete_snapshot(request).await;
    deleted.unwrap();
}

#[test]
fn digests_of_images_depend_on_their_bytes_and_not_on_their_allocation() {
    let scratch = Scratch::new();
    let (holes, zeros) = (scratch.join("holes"), scratch.join("zeros"));
    let length = (3 << 20) + 5;
    let with = |path: &Path| {
        let file = std::fs::File::create(path).unwrap();
        file.set_len(length).unwrap();
        file.write_all_at(b"data", 1 << 20).unwrap();
        file
    };
    let (_, full) = (with(&holes), with(&zeros));
    full.write_all_at(&[0; 4096], 2 << 20).unwrap();
    let digest = content_digest(&holes);
    assert_eq!(content_digest(&zeros), digest);
    for (at, byte) in [(0, 1), (length - 1, 1), ((1 << 20) + 3, b'b'), (length, 0)] {
        let changed = with(&zeros);
        changed.write_all_at(&[byte], at).unwrap();
        assert_ne!(content_digest(&zeros), digest, "{at}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_volume_on_another_node_is_identical_to_its_snapshot() {
    let cluster = Cluster::new(&["xfs", "ext4"]).await;
    let [source, target] = cluster.agents.as_slice() else {
        panic!("two agents were started");
    };
    for fs in ["ext4", "xfs"] {
        let volumes = cluster.volumes(&[(0, fs)]).await;
        let volume = &volumes[0];
        write_pattern(&volume.staging.join("file"), 7, PATTERN);
        let name = format!("s-{fs}");
        let snapshot = cluster.router.client.snapshot(&name, &volume.id, &[]);
        let snapshot = snapshot.await.unwrap().snapshot_id;
        // What is written later is not in it.
        write_pattern(&volume.staging.join("later"), 9, 4096);
        let restored = restore(&cluster, ("restored", &snapshot), mount(fs), target).await;
        let restored = restored.unwrap();
        let again = restore(&cluster, ("restored", &snapshot), mount(fs), target).await;
        assert_eq!(again.unwrap(), restored, "a repeat");
        let copied = target.image("volumes", &restored.volume_id);
        let original = source.image("snapshots", &snapshot);
        assert_eq!(content_digest(&copied), content_digest(&original), "{fs}");
        let blocks = |path: &Path| {
            let found = std::fs::metadata(path).unwrap();
            std::os::unix::fs::MetadataExt::blocks(&found)
        };
        assert!(
            blocks(&copied) <= blocks(&original) + 2048,
            "holes stay holes"
        );
        let id = &restored.volume_id;
        let staging = target.staging("restored");
        std::fs::create_dir_all(&staging).unwrap();
        target.client.stage(id, &staging, mount(fs)).await.unwrap();
        check_pattern(&staging.join("file"), 7, PATTERN);
        assert!(!staging.join("later").exists());
        target.client.unstage(id, &staging).await.unwrap();
        let router = &cluster.router.client;
        router.delete_unused(id).await;
        delete_snapshot(router, &snapshot).await;
        let unstaged = source.client.unstage(&volume.id, &volume.staging);
        unstaged.await.unwrap();
        router.delete_unused(&volume.id).await;
    }
    cluster.tear_down(Vec::new()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_raw_block_volume_is_restored_on_another_node_after_its_source_was_away() {
    let mut cluster = Cluster::new(&["xfs", "ext4"]).await;
    let source = &cluster.agents[0];
    let request = csi::CreateVolumeRequest {
        name: "raw".into(),
        capacity_range: Some(csi::CapacityRange {
            required_bytes: SIZE as i64,
            limit_bytes: 0,
        }),
        volume_capabilities: vec![block()],
        accessibility_requirements: Some(source.topology().await),
        ..Default::default()
    };
    let router = cluster.router.client.clone();
    let created = router.controller().create_volume(request).await;
    let volume = created.unwrap().into_inner().volume.unwrap().volume_id;
    let target_path = source.scratch.dir("kubelet").join("raw.device");
    let staging = source.staging("raw");
    std::fs::create_dir_all(&staging).unwrap();
    let client = &source.client;
    client.stage(&volume, &staging, block()).await.unwrap();
    let published = client.publish(&volume, &staging, &target_path, block(), false);
    published.await.unwrap();
    let device = std::fs::OpenOptions::new().write(true).open(&target_path);
    let device = device.unwrap();
    for at in [0, 3 << 20, SIZE - 4096] {
        device.write_all_at(&[0xa5; 4096], at).unwrap();
    }
    device.sync_all().unwrap();
    drop(device);
    client.unpublish(&volume, &target_path).await.unwrap();
    client.unstage(&volume, &staging).await.unwrap();
    let snapshot = router.snapshot("raw", &volume, &[]).await.unwrap();
    let snapshot = snapshot.snapshot_id;

    cluster.agents[0].server.kill();
    let asked = ("restored", snapshot.as_str());
    let answer = restore(&cluster, asked, block(), &cluster.agents[1]).await;
    let why = refused(answer, Code::Unavailable);
    assert!(why.contains("node-0"), "{why}");
    cluster.agents[0].restart_with(&[]);
    let start = std::time::Instant::now();
    let restored = loop {
        match restore(&cluster, asked, block(), &cluster.agents[1]).await {
            Ok(restored) => break restored,
            Err(status) => {
                assert_eq!(status.code(), Code::Unavailable, "{status}");
                assert!(
                    start.elapsed() < slackwater_testkit::WAIT_TIMEOUT,
                    "{status}"
                );
                tokio::time::sleep(std::time::Duration::from_millis(200)).await;
            }
        }
    };
    let [source, target] = cluster.agents.as_slice() else {
        panic!("two agents were started");
    };
    let copied = target.image("volumes", &restored.volume_id);
    assert_eq!(
        content_digest(&copied),
        content_digest(&source.image("snapshots", &snapshot))
    );
    router.delete_unused(&restored.volume_id).await;
    router.delete_unused(&volume).await;
    // A snapshot that does not exist any more is a final error, and nothing is left.
    delete_snapshot(&router, &snapshot).await;
    let gone = restore(&cluster, ("late", &snapshot), block(), target).await;
    refused(gone, Code::NotFound);
    cluster.tear_down(Vec::new()).await;
}
