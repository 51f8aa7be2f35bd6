//! Copies to another node while programs die, the network or the disk fails, and others ask for the
//! data. The received volume is identical to its snapshot in the end, or nothing is left.

use std::collections::BTreeMap;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use nix::sys::signal::Signal;
use prost::Message as _;
use slackwater::agent::agent_client::AgentClient;
use slackwater::agent::peer_client::PeerClient;
use slackwater::agent::{
    DescribeRequest, OfferRequest, ReadRequest, ReceiveRequest, SnapshotOffer, receive_request,
};
use slackwater::csi;
use slackwater::router::{Dial as _, TlsDial};
use slackwater::tls::{Credentials, Name};
use slackwater_testkit::node::{refused, write_pattern};
use slackwater_testkit::writers::Writers;
use slackwater_testkit::{Sweep, disk, eventually, mount};
use tonic::transport::Channel;
use tonic::{Code, Status};

use super::restore::{delete_snapshot, request, restore};
use slackwater_testkit::WAIT_TIMEOUT;
use slackwater_testkit::cluster::{Agent, Cluster, Volume};
use slackwater_testkit::disk::content_digest;

const DATA: usize = 24 << 20;
const FS: &str = "ext4";

/// A snapshot on node-0 that is restored on node-1, while its volume is written.
struct Copy {
    cluster: Cluster,
    volumes: Vec<Volume>,
    /// `None` in a test that takes long, because they keep a processor busy.
    writers: Option<Writers>,
    snapshot: String,
    /// The digest of the snapshot.
    sum: String,
}

impl Copy {
    async fn new() -> Copy {
        let cluster = Cluster::new(&["xfs", "xfs"]).await;
        let volumes = cluster.volumes(&[(0, FS)]).await;
        write_pattern(&volumes[0].staging.join("file"), 7, DATA);
        let writers = Writers::start(&volumes);
        let snapshot = cluster.router.client.snapshot("s", &volumes[0].id, &[]);
        let snapshot = snapshot.await.unwrap().snapshot_id;
        let sum = content_digest(&cluster.agents[0].image("snapshots", &snapshot));
        Copy {
            cluster,
            volumes,
            writers: Some(writers),
            snapshot,
            sum,
        }
    }

    fn target(&mut self) -> &mut Agent {
        &mut self.cluster.agents[1]
    }

    /// A call, in a task of its own.
    async fn call(&self, name: &str) -> Result<csi::Volume, Status> {
        let asked = (name, self.snapshot.as_str());
        let call = restore(&self.cluster, asked, mount(FS), &self.cluster.agents[1]);
        let answer = tokio::time::timeout(WAIT_TIMEOUT, call).await;
        answer.unwrap_or_else(|_| panic!("{name}: the call hangs"))
    }

    /// Repeats as a sidecar does.
    async fn until_made(&self, name: &str) -> csi::Volume {
        let start = Instant::now();
        loop {
            match self.call(name).await {
                Ok(made) => return made,
                Err(status) => {
                    assert_not_final(name, &status);
                    assert!(start.elapsed() < WAIT_TIMEOUT, "{name}: {status}");
                    tokio::time::sleep(std::time::Duration::from_millis(200)).await;
                }
            }
        }
    }

    fn of_router(&self) -> TlsDial {
        let (files, _) = self.cluster.router_parts();
        let own = Credentials::of_files(Name::controller().unwrap(), files).unwrap();
        TlsDial::new(Arc::new(own))
    }

    /// The agent of a node, as the router calls it.
    async fn agent(&self, n: usize) -> AgentClient<Channel> {
        let (_, agents) = self.cluster.router_parts();
        let (node, address) = &agents[n];
        AgentClient::new(self.of_router().dial(node, address).await.unwrap())
    }

    /// A ticket for node-1, and where it is valid.
    async fn offer(&self) -> (SnapshotOffer, String) {
        let mut source = self.agent(0).await;
        let offered = source.offer(OfferRequest {
            base_snapshot_ids: Vec::new(),
            snapshot_id: self.snapshot.clone(),
            reader_node: "node-1".into(),
        });
        let offer = offered.await.unwrap().into_inner().offer.unwrap();
        let described = source.describe(DescribeRequest {}).await.unwrap();
        let port = described.into_inner().peer_port;
        (offer, format!("127.0.0.1:{port}"))
    }

    /// A copy that is read back before it is complete.
    async fn receive_verified(&self, name: &str) -> Result<(), Status> {
        let (offer, source_address) = self.offer().await;
        let create = request((name, &self.snapshot), mount(FS), &self.cluster.agents[1]);
        let request = ReceiveRequest {
            purpose: receive_request::Purpose::Restore.into(),
            snapshot_id: String::new(),
            create: create.await.encode_to_vec(),
            source_node: "node-0".into(),
            source_address,
            verify: true,
            source: Some(receive_request::Source::Offer(offer)),
        };
        let mut request = tonic::Request::new(request);
        request.set_timeout(WAIT_TIMEOUT);
        self.agent(1).await.receive(request).await.map(drop)
    }

    /// The volume has the content of the snapshot, and is deleted; nothing is left then.
    async fn check(&self, made: &csi::Volume, context: &str) {
        let id = &made.volume_id;
        let target = &self.cluster.agents[1];
        assert_eq!(
            content_digest(&target.image("volumes", id)),
            self.sum,
            "{context}"
        );
        self.cluster.router.client.delete_unused(id).await;
        self.assert_nothing_left(context);
    }

    fn assert_nothing_left(&self, context: &str) {
        let disk = &self.cluster.agents[1].disk;
        let left = || [disk.volumes(), disk.trash()].concat();
        eventually(&format!("{context}: nothing is left"), || {
            left() == Vec::<PathBuf>::new() && disk::loops_below(&disk.mount_point).is_empty()
        });
    }

    async fn tear_down(self) {
        drop(self.writers);
        delete_snapshot(&self.cluster.router.client, &self.snapshot).await;
        self.cluster.tear_down(self.volumes).await;
    }
}

fn assert_not_final(context: &str, status: &Status) {
    let is_final = !matches!(status.code(), Code::Unavailable | Code::Aborted);
    assert!(!is_final, "{context}: the result is unknown: {status}");
}

/// The number and the name of each effect of a copy.
async fn effects(copy: &mut Copy, is_verified: bool) -> Vec<(usize, String)> {
    let log = copy.target().scratch.join("effects");
    let _ = std::fs::remove_file(&log);
    let plan = format!("effect.all:log={}", log.display());
    copy.target().arm(&plan);
    copy.cluster.listed("all").await;
    if is_verified {
        copy.receive_verified("all").await.unwrap();
    } else {
        copy.until_made("all").await;
    }
    let text = std::fs::read_to_string(&log).unwrap();
    copy.target().restart_with(&[]);
    let made = copy.until_made("all").await;
    copy.check(&made, "all").await;
    let lines = text.lines().map(|line| line.split_once(' ').unwrap());
    lines
        .map(|(number, name)| (number.parse().unwrap(), name.to_string()))
        .collect()
}

/// The first and the last effect of each kind, or all of them.
fn chosen(effects: &[(usize, String)]) -> Vec<usize> {
    let mut kinds = BTreeMap::<&str, [usize; 2]>::new();
    for (number, name) in effects {
        kinds.entry(name).or_insert([*number; 2])[1] = *number;
    }
    assert!(kinds.contains_key("write_range"), "{kinds:?}");
    if Sweep::requested().is_full {
        return effects.iter().map(|(number, _)| *number).collect();
    }
    let mut chosen: Vec<usize> = kinds.into_values().flatten().collect();
    chosen.sort_unstable();
    chosen.dedup();
    chosen
}

#[tokio::test(flavor = "multi_thread")]
async fn a_target_killed_at_any_effect_of_a_copy_completes_it_or_leaves_nothing() {
    let mut copy = Copy::new().await;
    copy.writers = None;
    let mut deaths = 0;
    let modes = ["kill", "kill-after"];
    for (at, n) in chosen(&effects(&mut copy, false).await)
        .into_iter()
        .enumerate()
    {
        let both = Sweep::requested().is_full;
        // The other mode is one of `make soak`.
        let modes = if both {
            &modes[..]
        } else {
            &modes[at % 2..][..1]
        };
        for when in modes {
            let fault = format!("effect.{n}:{when}");
            let name = format!("t-{n}-{when}");
            copy.target().arm(&fault);
            // The router has found the target again.
            copy.cluster.listed(&fault).await;
            let first = copy.call(&name).await;
            if let Err(status) = &first {
                assert_not_final(&fault, status);
                // The connection ends before the process does.
                eventually(&format!("{fault}: the target has died"), || {
                    !copy.target().server.is_alive()
                });
            }
            deaths += usize::from(!copy.target().server.is_alive());
            copy.target().restart_with(&[]);
            let made = copy.until_made(&name).await;
            if let Ok(first) = first {
                assert_eq!(first, made, "{fault}: an answer stays");
            }
            copy.check(&made, &fault).await;
        }
    }
    assert!(deaths > 8, "{deaths} deaths");
    copy.tear_down().await;
}

/// What happens while the target is blocked in the middle of a copy.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Event {
    SourceDies,
    RouterDies,
    /// Its connection is open, and nothing arrives.
    SourceHangs,
    /// The connection between router and target is cut.
    RouterCut,
}

#[tokio::test(flavor = "multi_thread")]
async fn a_copy_survives_the_death_of_its_source_and_of_the_router_and_a_cut_of_the_network() {
    let mut copy = Copy::new().await;
    for event in [
        Event::SourceDies,
        Event::RouterDies,
        Event::SourceHangs,
        Event::RouterCut,
    ] {
        let context = format!("{event:?}");
        copy.target().arm("effect.write_range:stop");
        copy.cluster.listed(&context).await;
        let answer = {
            let call = copy.call(&context);
            let during = async {
                let target = &copy.cluster.agents[1];
                let stands = || async {
                    while !target.is_stopped() {
                        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
                    }
                };
                stands().await;
                match event {
                    Event::SourceDies => copy.cluster.agents[0].server.signal(Signal::SIGKILL),
                    Event::SourceHangs => copy.cluster.agents[0].server.signal(Signal::SIGSTOP),
                    Event::RouterDies => copy.cluster.router.process.signal(Signal::SIGKILL),
                    Event::RouterCut => target.wire.cut(),
                }
                target.server.signal(Signal::SIGCONT);
            };
            let (answer, ()) = tokio::join!(call, during);
            answer
        };
        match (event, &answer) {
            // What was on its way may have been everything.
            (_, Ok(_)) => {}
            (_, Err(status)) => assert!(
                matches!(
                    status.code(),
                    Code::Unavailable | Code::Aborted | Code::Unknown | Code::Cancelled
                ),
                "{context}: {status}"
            ),
        }
        match event {
            Event::SourceDies => copy.cluster.agents[0].restart_with(&[]),
            Event::SourceHangs => copy.cluster.agents[0].server.signal(Signal::SIGCONT),
            Event::RouterDies => copy.cluster.restart_router(&[]).await,
            Event::RouterCut => copy.cluster.agents[1].wire.mend(),
        }
        let made = copy.until_made(&context).await;
        let writers = copy.writers.as_ref().unwrap();
        writers.assert_flowing(&context);
        copy.check(&made, &context).await;
    }
    copy.target().restart_with(&[]);
    copy.tear_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_target_whose_disk_gets_full_during_a_copy_leaves_nothing() {
    let mut copy = Copy::new().await;
    copy.target().arm("effect.write_range:stop");
    copy.cluster.listed("full").await;
    let filler = copy.cluster.agents[1].disk.mount_point.join("filler");
    let (answer, ()) = {
        let call = copy.call("full");
        let during = async {
            let target = &copy.cluster.agents[1];
            while !target.is_stopped() {
                tokio::time::sleep(std::time::Duration::from_millis(20)).await;
            }
            // Another program takes all that is free.
            let file = std::fs::File::create(&filler).unwrap();
            let found = nix::sys::statvfs::statvfs(&filler).unwrap();
            let mut free = found.blocks_available() * found.fragment_size();
            while free > 0 {
                let length = i64::try_from(free).unwrap();
                let mode = nix::fcntl::FallocateFlags::empty();
                let at = file.metadata().unwrap().len() as i64;
                if nix::fcntl::fallocate(&file, mode, at, length).is_err() {
                    free /= 2;
                    free -= free % 4096;
                }
            }
            target.server.signal(Signal::SIGCONT);
        };
        tokio::join!(call, during)
    };
    let why = refused(answer, Code::ResourceExhausted);
    assert!(why.contains("node-1"), "{why}");
    copy.assert_nothing_left("full");
    std::fs::remove_file(&filler).unwrap();
    copy.target().restart_with(&[]);
    let made = copy.until_made("full").await;
    copy.check(&made, "full").await;
    copy.tear_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_snapshot_is_sent_only_to_the_node_for_which_the_router_has_a_ticket() {
    let mut copy = Copy::new().await;
    let (files, agents) = copy.cluster.router_parts();
    let folder = files.certificate.parent().unwrap().to_path_buf();
    let of_router = copy.of_router();
    let of_node = |node: &str| {
        let file = |end: &str| folder.join(end);
        let files = slackwater::tls::Files {
            certificate: file(&format!("node-{node}.crt")),
            key: file(&format!("node-{node}.key")),
            authorities: file("ca.crt"),
        };
        let own = Credentials::of_files(Name::node(node).unwrap(), files).unwrap();
        TlsDial::new(Arc::new(own))
    };
    let node = &agents[0].0;
    let (offer, peer) = copy.offer().await;
    let first = async |dial: &TlsDial, ticket: Vec<u8>, crc32: bool| {
        let channel = dial.dial(node, &peer).await.unwrap();
        let client = PeerClient::new(channel);
        let mut client = client.max_decoding_message_size(16 << 20);
        let request = ReadRequest {
            base_identity: None,
            ticket,
            from: 0,
            only_digests: false,
            crc32,
        };
        let mut messages = client.read(request).await?.into_inner();
        Ok::<_, Status>(messages.message().await?.expect("a range"))
    };
    let read = async |dial: &TlsDial, ticket: Vec<u8>| first(dial, ticket, true).await;
    let reader = of_node("node-1");
    let sent = read(&reader, offer.ticket.clone()).await.unwrap();
    assert!(!sent.pieces.is_empty() && sent.crc32.is_some() && sent.sha256.is_empty());
    // A reader of an earlier release.
    let sent = first(&reader, offer.ticket.clone(), false).await.unwrap();
    assert!(!sent.pieces.is_empty() && sent.crc32.is_none() && sent.sha256.len() == 32);
    // Another node, with the ticket of the first one.
    let other = of_node("node-0");
    let why = refused(
        read(&other, offer.ticket.clone()).await,
        Code::FailedPrecondition,
    );
    assert!(why.contains("the ticket"), "{why}");
    // A ticket that was not issued, and one of an earlier process.
    let mut guessed = offer.ticket.clone();
    guessed[31] ^= 1;
    refused(read(&reader, guessed).await, Code::FailedPrecondition);
    // The router is no node.
    assert!(read(&of_router, offer.ticket.clone()).await.is_err());
    copy.cluster.agents[0].restart_with(&[]);
    copy.cluster.listed("restarted").await;
    assert!(read(&reader, offer.ticket).await.is_err());
    copy.tear_down().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_copy_that_differs_from_its_source_is_noticed_when_it_is_read_back() {
    let mut copy = Copy::new().await;
    let effects = effects(&mut copy, true).await;
    let is_write = |(_, name): &&(usize, String)| name == "write_range";
    let last = effects.iter().rfind(is_write).unwrap().0;
    copy.target().arm(&format!("effect.{last}:stop-after"));
    copy.cluster.listed("damaged").await;
    let (answer, ()) = {
        let call = copy.receive_verified("damaged");
        let during = async {
            let target = &copy.cluster.agents[1];
            while !target.is_stopped() {
                tokio::time::sleep(std::time::Duration::from_millis(20)).await;
            }
            // One bit of the superblock of ext4 changes on the disk.
            let volume = target.disk.volumes().remove(0);
            let path = volume.join("data.img");
            let image = std::fs::OpenOptions::new()
                .read(true)
                .write(true)
                .open(path);
            let image = image.unwrap();
            let mut byte = [0];
            image.read_exact_at(&mut byte, 1024 + 56).unwrap();
            image.write_all_at(&[byte[0] ^ 1], 1024 + 56).unwrap();
            image.sync_all().unwrap();
            target.server.signal(Signal::SIGCONT);
        };
        tokio::join!(call, during)
    };
    let why = refused(answer, Code::Internal);
    assert!(why.contains("differs from its source"), "{why}");
    copy.assert_nothing_left("damaged");
    copy.target().restart_with(&[]);
    let made = copy.until_made("damaged").await;
    copy.check(&made, "damaged").await;
    copy.tear_down().await;
}
