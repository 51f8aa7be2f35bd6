//! A snapshot that one agent sends to another, compared with a program that reads its image, and another
//! one that writes it, at the ends of one TLS connection; and a writer at the source in the same time.
//!
//! `ROUNDS=2 MEGABYTES=128 cargo bench --bench streams` is a shorter run; `PART=copies` or `writers` runs
//! a part of it.

#![allow(
    clippy::disallowed_methods,
    reason = "a benchmark is not the driver: it may start programs and write files"
)]
#![allow(
    clippy::unwrap_used,
    reason = "a benchmark panics where something fails"
)]

#[path = "measure/mod.rs"]
mod measure;
#[path = "streams/pipe.rs"]
mod pipe;
#[path = "streams/writers.rs"]
mod writers;

use measure::{Pairs, Spread, cpu, fill, given, timed};
use prost::Message;
use slackwater::agent::receive_request::{Purpose, Source};
use slackwater::agent::{DescribeRequest, OfferRequest, ReceiveRequest};
use slackwater::csi;
use slackwater_testkit::block;
use slackwater_testkit::cluster::{Agent, Cluster};

const MIB: u64 = 1 << 20;

/// Bytes that direct I/O accepts.
#[repr(align(4096))]
struct Aligned<const N: usize>([u8; N]);

fn main() {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .unwrap();
    let part = std::env::var("PART").unwrap_or_default();
    if part.is_empty() || part == "copies" {
        runtime.block_on(copies());
    }
    if part.is_empty() || part == "writers" {
        runtime.block_on(writers::measure());
    }
}

/// Bytes of data in the snapshot, which are not zeros.
fn bytes() -> u64 {
    given("MEGABYTES", 512) as u64 * MIB
}

fn request(name: &str) -> csi::CreateVolumeRequest {
    csi::CreateVolumeRequest {
        name: name.into(),
        capacity_range: Some(csi::CapacityRange {
            required_bytes: 2 * bytes() as i64,
            limit_bytes: 0,
        }),
        volume_capabilities: vec![block()],
        ..Default::default()
    }
}

/// A raw block volume on the first node, half of which was written, and its snapshot.
struct Sent {
    cluster: Cluster,
    volume: String,
    snapshot: String,
    /// Where the agent of the source sends snapshots.
    address: String,
}

impl Sent {
    async fn new(options: &[&str]) -> Sent {
        let cluster = Cluster::with(&["xfs", "xfs"], options).await;
        let source = &cluster.agents[0];
        let router = &cluster.router.client;
        let request = csi::CreateVolumeRequest {
            accessibility_requirements: Some(source.topology().await),
            ..request("source")
        };
        let created = router.controller().create_volume(request).await.unwrap();
        let volume = created.into_inner().volume.unwrap().volume_id;
        let staging = source.staging("source");
        std::fs::create_dir_all(&staging).unwrap();
        let client = &source.client;
        client.stage(&volume, &staging, block()).await.unwrap();
        let target = source.scratch.dir("kubelet").join("source.device");
        let published = client.publish(&volume, &staging, &target, block(), false);
        published.await.unwrap();
        fill(&target, bytes());
        let snapshot = router.snapshot("sent", &volume, &[]).await.unwrap();
        let described = cluster.to_agent(0).describe(DescribeRequest {}).await;
        let port = described.unwrap().into_inner().peer_port;
        Sent {
            volume,
            snapshot: snapshot.snapshot_id,
            address: format!("127.0.0.1:{port}"),
            cluster,
        }
    }

    fn source(&self) -> &Agent {
        &self.cluster.agents[0]
    }

    /// A restore on the other node, which is deleted again. Returns its milliseconds.
    async fn receive(&self, name: &str, verify: bool) -> f64 {
        let offer = OfferRequest {
            snapshot_id: self.snapshot.clone(),
            reader_node: "node-1".into(),
            base_snapshot_ids: Vec::new(),
        };
        let offer = self.cluster.to_agent(0).offer(offer).await.unwrap();
        let request = ReceiveRequest {
            create: request(name).encode_to_vec(),
            source_node: "node-0".into(),
            source_address: self.address.clone(),
            source: Some(Source::Offer(offer.into_inner().offer.unwrap())),
            verify,
            purpose: Purpose::Restore.into(),
            snapshot_id: self.snapshot.clone(),
        };
        let start = std::time::Instant::now();
        let mut target = self.cluster.to_agent(1);
        let answer = loop {
            match target.receive(request.clone()).await {
                // A call that lasts long: the next one joins it.
                Err(status) if status.code() == tonic::Code::Aborted => {}
                answer => break answer.unwrap(),
            }
        };
        let took = start.elapsed().as_secs_f64() * 1e3;
        let created = csi::CreateVolumeResponse::decode(&*answer.into_inner().created).unwrap();
        let id = created.volume.unwrap().volume_id;
        self.cluster.router.client.delete_unused(&id).await;
        took
    }

    /// Seconds of CPU time that both agents have used.
    fn cpu(&self) -> f64 {
        let agents = self.cluster.agents.iter();
        agents
            .map(|agent| cpu(&agent.server.pid().to_string()))
            .sum()
    }

    async fn end(self) {
        let source = self.source();
        let target = source.scratch.dir("kubelet").join("source.device");
        source
            .client
            .unpublish(&self.volume, &target)
            .await
            .unwrap();
        let staging = source.staging("source");
        let unstaged = source.client.unstage(&self.volume, &staging);
        unstaged.await.unwrap();
        let request = csi::DeleteSnapshotRequest {
            snapshot_id: self.snapshot,
            ..Default::default()
        };
        let router = &self.cluster.router.client;
        router.controller().delete_snapshot(request).await.unwrap();
        router.delete_unused(&self.volume).await;
        self.cluster.tear_down(Vec::new()).await;
    }
}

/// Copies in turns with the two programs.
async fn copies() {
    // No limit of the rate.
    let sent = Sent::new(&["--copy-rate", "1Ti"]).await;
    let image = sent.source().image("snapshots", &sent.snapshot);
    let copy = sent.cluster.agents[1].disk.mount_point.join("by-hand.img");
    let ends = pipe::Ends::new();
    let rounds = given("ROUNDS", 5);
    let [mut direct, mut buffered, mut verified] = [(); 3].map(|()| Pairs::default());
    let (mut ours, mut hand) = (Vec::new(), Vec::new());
    let gib = bytes() as f64 / (1 << 30) as f64;
    for round in 0..=rounds {
        let before = sent.cpu();
        let plain = sent.receive(&format!("plain-{round}"), false).await;
        let used = sent.cpu() - before;
        let checked = sent.receive(&format!("checked-{round}"), true).await;
        let by_hand = |how| {
            let before = cpu("self");
            let ((), took) = timed(|| ends.copy(&image, &copy, how));
            (took, cpu("self") - before)
        };
        let (with_direct, used_by_hand) = by_hand(pipe::How::Direct);
        let (with_cache, _) = by_hand(pipe::How::Buffered);
        std::fs::remove_file(&copy).unwrap();
        // The first round fills caches and connects.
        if round == 0 {
            continue;
        }
        for (pairs, theirs) in [(&mut direct, with_direct), (&mut buffered, with_cache)] {
            pairs.add(theirs, plain);
        }
        verified.add(checked, plain);
        ours.push(used / gib);
        hand.push(used_by_hand / gib);
    }
    let rate = |pairs: &Pairs| Spread::of(pairs.hand.iter().map(|ms| gib * 1024e3 / ms));
    println!("{gib} GiB, {rounds} rounds");
    println!("| a copy between agents, MiB/s | {} |", rate(&direct));
    println!(
        "| its throughput / two programs with direct I/O | {} |",
        direct.ratio()
    );
    println!(
        "| its throughput / two programs with the page cache | {} |",
        buffered.ratio()
    );
    println!(
        "| time with verification / without | {} |",
        verified.ratio()
    );
    println!(
        "| CPU seconds per GiB, both agents | {} |",
        Spread::of(ours)
    );
    println!(
        "| CPU seconds per GiB, both programs | {} |",
        Spread::of(hand)
    );
    sent.end().await;
}
