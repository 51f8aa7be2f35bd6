//! A volume that is filled from one snapshot of another node after the other, as a move does it: each
//! call sends the differences, whatever ended the one before.

use std::net::Ipv4Addr;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::atomic::Ordering;

use prost::Message;
use slackwater::agent::receive_request::{Purpose, Source};
use slackwater::agent::{DescribeRequest, OfferRequest, ReceiveRequest};
use slackwater::csi;
use tonic::{Code, Status};

use super::restore::delete_snapshot;
use super::wire::Wire;
use slackwater_testkit::WAIT_TIMEOUT;
use slackwater_testkit::cluster::{Cluster, Volume};
use slackwater_testkit::disk::content_digest;
use slackwater_testkit::node::{check_pattern, write_pattern};
use slackwater_testkit::writers::Writers;
use slackwater_testkit::{mount, run};

const KIB: u64 = 1 << 10;
const MIB: usize = 1 << 20;
const SIZE: i64 = 128 << 20;
/// Two handshakes, one message for each range without differences, and the digests of the read-back.
pub const METADATA: u64 = 64 * KIB;

/// A volume of the first node, which is copied to the second one.
struct Moving {
    cluster: Cluster,
    volume: Volume,
    wire: Wire,
    /// The snapshot whose content the copy has.
    base: Option<String>,
    count: usize,
}

impl Moving {
    async fn new() -> Moving {
        let cluster = Cluster::new(&["xfs", "xfs"]).await;
        let volume = create(&cluster, "data").await;
        let mut source = cluster.to_agent(0);
        let description = source.describe(DescribeRequest {}).await.unwrap();
        let port = description.into_inner().peer_port as u16;
        let wire = Wire::to((Ipv4Addr::LOCALHOST, port).into()).await;
        Moving {
            cluster,
            volume,
            wire,
            base: None,
            count: 0,
        }
    }

    async fn snapshot(&mut self) -> String {
        self.count += 1;
        let name = format!("move-{}", self.count);
        // The router has found the agents again.
        self.cluster.listed(&name).await;
        let client = &self.cluster.router.client;
        let made = client.snapshot(&name, &self.volume.id, &[]).await;
        made.unwrap().snapshot_id
    }

    /// One call of a router. Returns the ID of the copy, and whether it is complete.
    async fn receive(&self, snapshot: &str, purpose: Purpose) -> Result<(String, bool), Status> {
        let offer = OfferRequest {
            snapshot_id: snapshot.into(),
            reader_node: "node-1".into(),
            base_snapshot_ids: self.base.iter().cloned().collect(),
        };
        let offer = self.cluster.to_agent(0).offer(offer).await?.into_inner();
        let offer = offer.offer.unwrap();
        assert_eq!(offer.base_identities.len(), self.base.iter().len());
        let create = request("moved");
        let request = ReceiveRequest {
            create: create.encode_to_vec(),
            source_node: "node-0".into(),
            source_address: self.wire.address.to_string(),
            source: Some(Source::Offer(offer)),
            verify: true,
            purpose: purpose.into(),
            snapshot_id: snapshot.into(),
        };
        let answer = self
            .cluster
            .to_agent(1)
            .receive(request)
            .await?
            .into_inner();
        let created = csi::CreateVolumeResponse::decode(&*answer.created).unwrap();
        let id = created.volume.unwrap().volume_id;
        Ok((id, !answer.is_incomplete))
    }

    /// Repeats the call until it succeeds, and checks that the copy is identical to the snapshot.
    /// Returns the ID of the copy.
    async fn arrive(&mut self, snapshot: String, context: &str) -> String {
        let start = std::time::Instant::now();
        let id = loop {
            match self.receive(&snapshot, Purpose::Fill).await {
                Ok((id, false)) => break id,
                Ok((_, true)) => panic!("{context}: it was completed"),
                Err(status) => {
                    let again = matches!(status.code(), Code::Unavailable | Code::Aborted);
                    assert!(
                        again && start.elapsed() < WAIT_TIMEOUT,
                        "{context}: {status}"
                    );
                    tokio::time::sleep(std::time::Duration::from_millis(100)).await;
                }
            }
        };
        let copy = self.cluster.agents[1].image("volumes", &id);
        let original = self.cluster.agents[0].image("snapshots", &snapshot);
        assert_eq!(
            content_digest(&copy),
            content_digest(&original),
            "{context}"
        );
        if let Some(base) = self.base.replace(snapshot) {
            delete_snapshot(&self.cluster.router.client, &base).await;
        }
        id
    }

    /// A snapshot whose differences are sent in one call. Returns the bytes that were sent, and those
    /// that differ.
    async fn measured(&mut self, context: &str) -> (u64, u64) {
        let snapshot = self.snapshot().await;
        let path = |id: &String| self.cluster.agents[0].image("snapshots", id);
        let differs = differing(self.base.as_ref().map(path).as_deref(), &path(&snapshot));
        let before = self.wire.sent.load(Ordering::SeqCst);
        self.arrive(snapshot, context).await;
        let sent = self.wire.sent.load(Ordering::SeqCst) - before;
        println!("{context}: {sent} bytes were sent, {differs} bytes differ");
        (sent, differs)
    }

    fn file(&self, name: &str) -> std::path::PathBuf {
        self.volume.staging.join(name)
    }
}

fn request(name: &str) -> csi::CreateVolumeRequest {
    csi::CreateVolumeRequest {
        name: name.into(),
        capacity_range: Some(csi::CapacityRange {
            required_bytes: SIZE,
            limit_bytes: 0,
        }),
        volume_capabilities: vec![mount("ext4")],
        ..Default::default()
    }
}

/// Creates and stages a volume of the first node.
async fn create(cluster: &Cluster, name: &str) -> Volume {
    let agent = &cluster.agents[0];
    let request = csi::CreateVolumeRequest {
        accessibility_requirements: Some(agent.topology().await),
        ..request(name)
    };
    let router = &cluster.router.client;
    let created = router.controller().create_volume(request).await;
    let id = created.unwrap().into_inner().volume.unwrap().volume_id;
    let staging = agent.staging(name);
    std::fs::create_dir_all(&staging).unwrap();
    let staged = agent.client.stage(&id, &staging, mount("ext4"));
    staged.await.unwrap();
    Volume {
        id,
        node: 0,
        fs: "ext4",
        staging,
    }
}

/// Bytes of blocks that differ; without a base, bytes of blocks that are not zeros.
pub fn differing(base: Option<&Path>, snapshot: &Path) -> u64 {
    let now = std::fs::read(snapshot).unwrap();
    let before = base.map_or(vec![0; now.len()], |base| std::fs::read(base).unwrap());
    let blocks = now.chunks(4096).zip(before.chunks(4096));
    4096 * blocks.filter(|(now, before)| now != before).count() as u64
}

#[tokio::test(flavor = "multi_thread")]
async fn a_copy_gets_the_differences_of_each_snapshot_while_its_volume_is_written() {
    let mut moving = Moving::new().await;
    let writers = Writers::start(&[&moving.volume]);
    write_pattern(&moving.file("kept"), 1, 24 * MIB);
    write_pattern(&moving.file("deleted"), 2, 24 * MIB);
    let (sent, data) = moving.measured("first").await;
    assert!(
        sent * 100 <= data * 102 + 100 * METADATA,
        "{sent} of {data}"
    );
    write_pattern(&moving.file("later"), 3, 8 * MIB);
    write_pattern(&moving.file("kept"), 4, 4 * MIB);
    let (sent, differs) = moving.measured("second").await;
    assert!(differs > 12 * MIB as u64, "{differs}");
    assert!(
        sent * 10 <= differs * 11 + 10 * METADATA,
        "{sent} of {differs}"
    );
    // Zeros are announced, and free the blocks of the copy.
    std::fs::remove_file(moving.file("deleted")).unwrap();
    let staging = moving.volume.staging.to_str().unwrap().to_string();
    run("sync", &["-f", &staging]);
    run("fstrim", &[&staging]);
    let (sent, differs) = moving.measured("third").await;
    assert!(differs > 24 * MIB as u64, "{differs}");
    assert!(sent < 4 * MIB as u64, "{sent}");
    writers.assert_flowing("the last snapshot");
    drop(writers);

    let volume = &moving.volume;
    let source = &moving.cluster.agents[0];
    source
        .client
        .unstage(&volume.id, &volume.staging)
        .await
        .unwrap();
    let last = moving.snapshot().await;
    let (id, is_complete) = moving.receive(&last, Purpose::Move).await.unwrap();
    assert!(is_complete);
    let [source, target] = moving.cluster.agents.as_slice() else {
        panic!("two agents were started");
    };
    let original = source.image("snapshots", &last);
    let copy = target.image("volumes", &id);
    assert_eq!(content_digest(&copy), content_digest(&original));
    let blocks = |path: &Path| std::fs::metadata(path).unwrap().blocks();
    assert!(
        blocks(&copy) <= blocks(&original) + 2048,
        "blocks are freed"
    );
    let staging = target.staging("moved");
    std::fs::create_dir_all(&staging).unwrap();
    target
        .client
        .stage(&id, &staging, mount("ext4"))
        .await
        .unwrap();
    check_pattern(&staging.join("later"), 3, 8 * MIB);
    check_pattern(&staging.join("kept"), 4, 4 * MIB);
    target.client.unstage(&id, &staging).await.unwrap();
    end(moving, Some(last), &id).await;
}

/// Deletes everything; the volume is not staged any more.
async fn end(moving: Moving, last: Option<String>, copy: &str) {
    let router = &moving.cluster.router.client;
    for snapshot in moving.base.iter().chain(&last) {
        delete_snapshot(router, snapshot).await;
    }
    router.delete_unused(copy).await;
    router.delete_unused(&moving.volume.id).await;
    moving.cluster.tear_down(Vec::new()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slow_connection_is_not_taken_for_a_lost_one() {
    let mut moving = Moving::new().await;
    write_pattern(&moving.file("file"), 1, 16 * MIB);
    let snapshot = moving.snapshot().await;
    // What is on its way delays the answers to pings.
    let slow = moving.wire.slow_down(2 * MIB as u64);
    // The call ends before the copy does, and is repeated.
    let copied = loop {
        match moving.receive(&snapshot, Purpose::Fill).await {
            Err(status) if status.code() == Code::Aborted => {}
            Err(status) => panic!("{status}"),
            Ok((id, _)) => break id,
        }
    };
    drop(slow);
    let sent = moving.wire.sent.load(Ordering::SeqCst);
    assert!(sent < 20 * MIB as u64, "{sent} bytes were sent");
    let volume = &moving.volume;
    let source = &moving.cluster.agents[0].client;
    let unstaged = source.unstage(&volume.id, &volume.staging).await;
    unstaged.unwrap();
    end(moving, Some(snapshot), &copied).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_copy_whose_agent_or_connection_ends_is_never_a_mixture() {
    let mut moving = Moving::new().await;
    let writers = Writers::start(&[&moving.volume]);
    write_pattern(&moving.file("file"), 1, 8 * MIB);
    let first = moving.snapshot().await;
    let mut id = moving.arrive(first, "first").await;
    let mut killed = 0;
    for n in (1..).step_by(3) {
        let context = format!("effect {n} of the target");
        write_pattern(&moving.file("file"), n as u8, 2 * MIB);
        let snapshot = moving.snapshot().await;
        moving.cluster.agents[1].arm(&format!("effect.{n}:kill"));
        let lived = moving.receive(&snapshot, Purpose::Fill).await.is_ok();
        moving.cluster.agents[1].restart_with(&[]);
        // A newer snapshot may come instead.
        let snapshot = match n % 2 {
            0 => snapshot,
            _ => {
                write_pattern(&moving.file("file"), 100 + n as u8, MIB);
                let newer = moving.snapshot().await;
                delete_snapshot(&moving.cluster.router.client, &snapshot).await;
                newer
            }
        };
        id = moving.arrive(snapshot, &context).await;
        if lived {
            break;
        }
        killed += 1;
    }
    assert!(killed > 3, "{killed}");
    for (seed, limit) in [(200, 10 * KIB), (201, 512 * KIB), (202, 1500 * KIB)] {
        let context = format!("the connection ends after {limit} bytes");
        write_pattern(&moving.file("file"), seed, 2 * MIB);
        let snapshot = moving.snapshot().await;
        let end_at = moving.wire.sent.load(Ordering::SeqCst) + limit;
        moving.wire.limit.store(end_at, Ordering::SeqCst);
        let status = moving.receive(&snapshot, Purpose::Fill).await.unwrap_err();
        assert_eq!(status.code(), Code::Unavailable, "{context}: {status}");
        moving.wire.limit.store(u64::MAX, Ordering::SeqCst);
        id = moving.arrive(snapshot, &context).await;
    }
    drop(writers);
    let volume = &moving.volume;
    let source = &moving.cluster.agents[0];
    source
        .client
        .unstage(&volume.id, &volume.staging)
        .await
        .unwrap();
    end(moving, None, &id).await;
}
