//! What an agent counts of the images of its pool, on a real disk.

use slackwater::agent::{DescribeRequest, ImageUsage};
use slackwater_testkit::WAIT_TIMEOUT;
use slackwater_testkit::cluster::Cluster;
use slackwater_testkit::node::write_pattern;

use super::restore::delete_snapshot;

const MIB: i64 = 1 << 20;
/// Bytes of metadata of a file system that are written at any time.
const SLACK: i64 = 4 * MIB;

/// Waits until the agent has counted this.
async fn counted(cluster: &Cluster, what: &str, is_so: impl Fn(&ImageUsage) -> bool) -> ImageUsage {
    let start = std::time::Instant::now();
    loop {
        let described = cluster.to_agent(0).describe(DescribeRequest {}).await;
        let images = described.unwrap().into_inner().pools.remove(0).images;
        if let Some(images) = images.as_ref().filter(|images| is_so(images)) {
            return images.clone();
        }
        assert!(start.elapsed() < WAIT_TIMEOUT, "{what}: {images:?}");
        tokio::time::sleep(std::time::Duration::from_millis(200)).await;
    }
}

/// Without the metrics of single volumes: an agent counts for its router.
#[tokio::test(flavor = "multi_thread")]
async fn an_agent_counts_own_shared_and_snapshot_bytes_of_its_pool() {
    // ext4 would initialize its tables in the background.
    let cluster = Cluster::new(&["xfs"]).await;
    let volumes = cluster.volumes(&[(0, "xfs")]).await;
    let (id, file) = (&volumes[0].id, volumes[0].staging.join("file"));
    let client = &cluster.router.client;
    write_pattern(&file, 1, 24 << 20);
    let written_at = std::time::UNIX_EPOCH.elapsed().unwrap().as_secs();
    let alone = counted(&cluster, "the volume", |images| {
        images.own_bytes >= 24 * MIB
    })
    .await;
    assert_eq!((alone.shared_bytes, alone.snapshot_bytes), (0, 0));
    let first = client.snapshot("first", id, &[]).await.unwrap().snapshot_id;
    let cut = counted(&cluster, "the cut", |images| images.shared_bytes > 0).await;
    assert!(cut.shared_bytes >= 24 * MIB, "{cut:?}");
    assert!(cut.snapshot_bytes < SLACK, "{cut:?}");
    // A snapshot adds nothing. xfs does not share blocks that were never written, as those of a new log. On a
    // slow machine, the first count was made while the file was written.
    let sum = |images: &ImageUsage| images.own_bytes + images.shared_bytes + images.snapshot_bytes;
    assert!(
        alone.measured_at.unsigned_abs() <= written_at || (sum(&cut) - sum(&alone)).abs() < SLACK,
        "{alone:?}, {cut:?}"
    );
    assert_eq!((cut.undivided_bytes, cut.unmeasured_volumes), (0, 0));
    assert!(cut.growth.is_none(), "no hour has passed");

    // The file system writes over the blocks of the file, and the first snapshot keeps the old ones.
    write_pattern(&file, 2, 16 << 20);
    let second = client.snapshot("second", id, &[]).await.unwrap();
    let kept = |images: &ImageUsage| images.snapshot_bytes >= 16 * MIB;
    let written = counted(&cluster, "the second cut", kept).await;
    assert!(written.snapshot_bytes < 16 * MIB + SLACK, "{written:?}");
    assert!(
        (written.shared_bytes - cut.shared_bytes).abs() < SLACK,
        "{written:?}"
    );
    assert!(
        (written.own_bytes - cut.own_bytes).abs() < SLACK,
        "{written:?}"
    );
    assert!(
        (sum(&written) - sum(&cut) - 16 * MIB).abs() < SLACK,
        "{written:?}"
    );
    assert!(written.measured_at >= cut.measured_at);

    delete_snapshot(client, &first).await;
    let freed = |images: &ImageUsage| images.snapshot_bytes < SLACK;
    let left = counted(&cluster, "the deletion", freed).await;
    assert!(
        (left.shared_bytes - written.shared_bytes).abs() < SLACK,
        "{left:?}"
    );
    delete_snapshot(client, &second.snapshot_id).await;
    cluster.tear_down(volumes).await;
}
