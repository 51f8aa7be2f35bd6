//! The steps of a move, between two agents: the fence, the copy, and the end of the source.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use slackwater::agent::DescribeRequest;
use slackwater::error::Error;
use slackwater::model::VolumeId;
use slackwater::model::id::NameKind;
use slackwater::operation::{MovingState, snapshot_name};
use slackwater::router::volume_moves::{Copied, MoveCopy, MovingVolumes, TargetPool, snapshot_of};
use slackwater::router::{Agents, NoCluster, Options, Router, TlsDial};
use slackwater::tls::{Credentials, Name};
use tonic::Code;
use uuid::Uuid;

use super::differences::{METADATA, differing};
use super::wire::Wire;
use slackwater_testkit::WAIT_TIMEOUT;
use slackwater_testkit::cluster::{Cluster, SIZE, Volume};
use slackwater_testkit::disk::content_digest;
use slackwater_testkit::node::{check_pattern, refused, write_pattern};
use slackwater_testkit::writers::Writers;
use slackwater_testkit::{mount, run};

const PATTERN: usize = 24 << 20;

async fn router(cluster: &Cluster) -> Router {
    let (_, list) = cluster.router_parts();
    router_of(cluster, list).await
}

async fn router_of(cluster: &Cluster, list: Vec<(String, String)>) -> Router {
    let (files, _) = cluster.router_parts();
    let credentials = Credentials::of_files(Name::controller().unwrap(), files).unwrap();
    let driver_name = "csi.slackwater.dev".to_string();
    let dial = TlsDial::new(Arc::new(credentials));
    let agents = Arc::new(Agents::new(Arc::new(dial), &driver_name));
    agents.set(list);
    agents.ask_all().await;
    let options = Options {
        driver_name,
        alpha: Default::default(),
        metrics: Arc::default(),
    };
    Router::new(agents, Arc::new(NoCluster), options)
}

async fn until_copied(router: &Router, copy: &MoveCopy) {
    let start = Instant::now();
    loop {
        match router.copy(copy).await {
            Ok(Copied::Complete) => return,
            Ok(Copied::Continues) => {}
            Err(error) => assert!(matches!(error, Error::Unreachable { .. }), "{error:?}"),
        }
        assert!(start.elapsed() < WAIT_TIMEOUT);
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

fn target(router: &Router, node: &str) -> TargetPool {
    let all = router.targets();
    let mut its = all.into_iter().filter(|target| target.node == node);
    let target = its.next().unwrap();
    assert_eq!(target.problem, None);
    assert!(target.provisionable >= SIZE);
    target
}

#[tokio::test(flavor = "multi_thread")]
async fn a_moved_volume_is_identical_and_its_source_is_fenced_until_it_is_deleted() {
    let mut cluster = Cluster::new(&["xfs", "xfs"]).await;
    for fs in ["ext4", "xfs"] {
        let volume = cluster.volumes(&[(0, fs)]).await.remove(0);
        write_pattern(&volume.staging.join("file"), 7, PATTERN);
        let router = router(&cluster).await;
        let to = target(&router, "node-1");
        let move_uid = Uuid::new_v4();
        let name = snapshot_name(move_uid, None);
        let source: VolumeId = volume.id.parse().unwrap();
        let copy = MoveCopy {
            move_uid,
            source,
            name: name.clone(),
            target: VolumeId::of_name(to.id, NameKind::Volume, &name),
            pool: to.name.clone(),
            claim: "shop/data".into(),
            max_bytes: SIZE,
            round: None,
        };
        // It is in use.
        assert!(router.look(source, &[]).await.unwrap().user.is_some());
        assert!(router.fence(source, move_uid, false).await.is_err());
        let client = &cluster.agents[0].client;
        client.unstage(&volume.id, &volume.staging).await.unwrap();
        assert!(router.copy(&copy).await.is_err(), "without the fence");
        router.fence(source, move_uid, false).await.unwrap();
        let fenced = router.look(source, &[]).await.unwrap();
        assert_eq!((fenced.fenced, fenced.user), (Some(move_uid), None));
        let staged = client.stage(&volume.id, &volume.staging, mount(fs)).await;
        let why = refused(staged, Code::FailedPrecondition);
        assert!(why.contains(&move_uid.to_string()), "{why}");
        // A snapshot that was requested before the move, and is taken after it.
        let late = cluster
            .router
            .client
            .snapshot("late", &volume.id, &[])
            .await;
        refused(late, Code::FailedPrecondition);
        let too_large = MoveCopy {
            max_bytes: SIZE - 1,
            ..copy.clone()
        };
        let refused_copy = router.copy(&too_large).await.unwrap_err().to_string();
        assert!(refused_copy.contains("PersistentVolume"), "{refused_copy}");
        // Both agents are killed: the fence stays, and the copy is made.
        for agent in &mut cluster.agents {
            agent.server.kill();
        }
        for agent in &mut cluster.agents {
            agent.restart_with(&[]);
        }
        until_copied(&router, &copy).await;
        let made = router.look(copy.target, &[]).await.unwrap();
        assert_eq!((made.state, made.size), (MovingState::Ready, SIZE));
        let copied = copy.target.to_string();
        assert_eq!(
            content_digest(&cluster.agents[1].image("volumes", &copied)),
            content_digest(&cluster.agents[0].image("volumes", &volume.id)),
            "{fs}"
        );
        let snapshot = VolumeId::of_name(source.pool, NameKind::Snapshot, &name);
        router.delete_snapshot(snapshot).await.unwrap();
        router.delete_source(source, move_uid).await.unwrap();
        let gone = router.look(source, &[snapshot]).await.unwrap();
        assert_eq!((gone.state, gone.snapshots.len()), (MovingState::Absent, 0));
        let late = cluster
            .router
            .client
            .snapshot("late", &volume.id, &[])
            .await;
        refused(late, Code::NotFound);
        let agent = &cluster.agents[1];
        let staging = agent.staging("moved");
        std::fs::create_dir_all(&staging).unwrap();
        agent
            .client
            .stage(&copied, &staging, mount(fs))
            .await
            .unwrap();
        check_pattern(&staging.join("file"), 7, PATTERN);
        agent.client.unstage(&copied, &staging).await.unwrap();
        router.delete_copy(copy.target).await.unwrap();
    }
    cluster.tear_down(Vec::new()).await;
}

/// A volume that moves from the first node to the second one, and a router that sees both; the
/// snapshots go over a wire.
struct Moving {
    cluster: Cluster,
    router: Router,
    wire: Wire,
    volume: Volume,
    copy: MoveCopy,
}

impl Moving {
    async fn new() -> Moving {
        let cluster = Cluster::new(&["xfs", "xfs"]).await;
        let volume = cluster.volumes(&[(0, "ext4")]).await.remove(0);
        // Another address of this machine, where the port at which the first node sends is free.
        let address = |port| SocketAddr::from((Ipv4Addr::new(127, 0, 0, 2), port));
        let (_, mut list) = cluster.router_parts();
        let of_router = Wire::at(address(0), list[0].1.parse().unwrap()).await;
        list[0].1 = of_router.address.to_string();
        let router = router_of(&cluster, list).await;
        let described = cluster
            .to_agent(0)
            .describe(DescribeRequest {})
            .await
            .unwrap();
        let port = u16::try_from(described.into_inner().peer_port).unwrap();
        let wire = Wire::at(address(port), (Ipv4Addr::LOCALHOST, port).into()).await;
        let to = target(&router, "node-1");
        let move_uid = Uuid::new_v4();
        let name = snapshot_name(move_uid, None);
        let copy = MoveCopy {
            move_uid,
            source: volume.id.parse().unwrap(),
            target: VolumeId::of_name(to.id, NameKind::Volume, &name),
            name,
            pool: to.name,
            claim: "shop/data".into(),
            max_bytes: SIZE,
            round: None,
        };
        Moving {
            cluster,
            router,
            wire,
            volume,
            copy,
        }
    }

    fn of_round(&self, round: u32) -> MoveCopy {
        MoveCopy {
            round: Some(round),
            ..self.copy.clone()
        }
    }

    fn file(&self, name: &str) -> PathBuf {
        self.volume.staging.join(name)
    }

    fn snapshot(&self, round: Option<u32>) -> PathBuf {
        let id = snapshot_of(self.copy.source, self.copy.move_uid, round);
        self.cluster.agents[0].image("snapshots", &id.to_string())
    }

    fn sent(&self) -> u64 {
        self.wire.sent.load(Ordering::SeqCst)
    }

    async fn delete_snapshot(&self, round: Option<u32>) {
        let id = snapshot_of(self.copy.source, self.copy.move_uid, round);
        self.router.delete_snapshot(id).await.unwrap();
    }

    /// Writes a file, and waits until it is on the device: the snapshots freeze nothing.
    fn write(&self, name: &str, seed: u8, bytes: usize) {
        write_pattern(&self.file(name), seed, bytes);
        run("sync", &["-f", self.volume.staging.to_str().unwrap()]);
    }

    async fn unstage(&self) {
        let client = &self.cluster.agents[0].client;
        let unstaged = client.unstage(&self.volume.id, &self.volume.staging);
        unstaged.await.unwrap();
    }

    async fn is_absent(&self, volume: VolumeId) -> bool {
        let ids = [None, Some(1), Some(2)];
        let ids = ids.map(|round| snapshot_of(self.copy.source, self.copy.move_uid, round));
        let looked = match volume == self.copy.source {
            true => self.router.look(volume, &ids).await,
            false => self.router.look(volume, &[]).await,
        };
        let looked = looked.unwrap();
        looked.state == MovingState::Absent && looked.snapshots.is_empty()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn after_copies_in_advance_only_what_was_written_since_is_sent_under_the_fence() {
    let moving = Moving::new().await;
    let (router, copy) = (&moving.router, &moving.copy);
    let writers = Writers::start(&[&moving.volume]);
    moving.write("kept", 1, 4 * PATTERN);
    let first = moving.of_round(2);
    assert_eq!(router.snapshot(&first, None).await.unwrap(), SIZE);
    until_copied(router, &first).await;
    let all = moving.sent();
    let image_of_copy = moving.cluster.agents[1].image("volumes", &copy.target.to_string());
    assert_eq!(
        content_digest(&image_of_copy),
        content_digest(&moving.snapshot(Some(2)))
    );
    // It is no volume yet.
    let made = router.look(copy.target, &[]).await.unwrap();
    assert_eq!(made.state, MovingState::Filling);
    let snapshot = snapshot_of(copy.source, copy.move_uid, Some(2));
    let found = router.look(copy.source, &[snapshot]).await.unwrap();
    assert!(found.user.is_some(), "it is in use");
    let content = made.content.unwrap();
    assert_eq!(
        (content.identity, content.is_whole),
        (found.snapshots[0].identity, true)
    );

    moving.write("later", 2, 8 << 20);
    let second = moving.of_round(1);
    let changed = router.snapshot(&second, Some(2)).await.unwrap();
    until_copied(router, &second).await;
    let increment = moving.sent() - all;
    println!("first {all} bytes; then {increment} bytes for {changed} changed ones");
    assert!(changed >= 8 << 20, "{changed}");
    assert!(
        increment * 10 <= changed * 11 + 10 * METADATA,
        "{increment} of {changed}"
    );
    assert_eq!(
        content_digest(&image_of_copy),
        content_digest(&moving.snapshot(Some(1)))
    );
    moving.delete_snapshot(Some(2)).await;
    writers.assert_flowing("copies in advance");
    drop(writers);

    moving.write("last", 3, 2 << 20);
    moving.unstage().await;
    router
        .fence(copy.source, copy.move_uid, false)
        .await
        .unwrap();
    let before = moving.sent();
    until_copied(router, copy).await;
    let last = moving.sent() - before;
    let differs = differing(Some(&moving.snapshot(Some(1))), &moving.snapshot(None));
    println!("under the fence {last} bytes for {differs} changed ones");
    // The digests of the read-back are sent, too.
    assert!(
        last * 10 <= differs * 11 + 20 * METADATA,
        "{last} of {differs}"
    );
    assert!(last * 10 < all, "{last} of {all}");
    assert_eq!(
        content_digest(&image_of_copy),
        content_digest(&moving.cluster.agents[0].image("volumes", &moving.volume.id))
    );
    for round in [None, Some(1)] {
        moving.delete_snapshot(round).await;
    }
    router
        .delete_source(copy.source, copy.move_uid)
        .await
        .unwrap();
    assert!(moving.is_absent(copy.source).await);
    let agent = &moving.cluster.agents[1];
    let staging = agent.staging("moved");
    std::fs::create_dir_all(&staging).unwrap();
    let id = copy.target.to_string();
    agent
        .client
        .stage(&id, &staging, mount("ext4"))
        .await
        .unwrap();
    check_pattern(&staging.join("kept"), 1, 4 * PATTERN);
    check_pattern(&staging.join("last"), 3, 2 << 20);
    agent.client.unstage(&id, &staging).await.unwrap();
    router.delete_copy(copy.target).await.unwrap();
    moving.cluster.tear_down(Vec::new()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_move_that_is_undone_ends_a_copy_that_is_running() {
    let moving = Moving::new().await;
    let (router, copy) = (&moving.router, &moving.copy);
    moving.write("kept", 1, 4 * PATTERN);
    let round = moving.of_round(1);
    router.snapshot(&round, None).await.unwrap();
    let slow = moving.wire.slow_down(2 << 20);
    assert_eq!(router.copy(&round).await.unwrap(), Copied::Continues);
    router
        .fence(copy.source, copy.move_uid, true)
        .await
        .unwrap();
    let snapshot = snapshot_of(copy.source, copy.move_uid, Some(1));
    assert!(
        router.delete_snapshot(snapshot).await.is_err(),
        "it is read"
    );
    assert!(
        router.delete_copy(copy.target).await.is_err(),
        "the copy runs"
    );
    let start = Instant::now();
    while router.delete_copy(copy.target).await.is_err() {
        assert!(start.elapsed() < WAIT_TIMEOUT);
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    drop(slow);
    assert!(moving.sent() < PATTERN as u64 * 3, "{}", moving.sent());
    moving.delete_snapshot(Some(1)).await;
    // What was delayed on its way has no effect.
    assert!(router.snapshot(&round, None).await.is_err());
    assert!(router.copy(&round).await.is_err());
    assert!(moving.is_absent(copy.target).await);
    moving.unstage().await;
    moving
        .cluster
        .router
        .client
        .delete_unused(&moving.volume.id)
        .await;
    assert!(moving.is_absent(copy.source).await);
    moving.cluster.tear_down(Vec::new()).await;
}
