//! The steps of a move, between two agents: the fence, the copy, and the end of the source.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use slackwater::error::Error;
use slackwater::model::VolumeId;
use slackwater::model::id::NameKind;
use slackwater::operation::{MovingState, snapshot_name};
use slackwater::router::moved::{Copied, MoveCopy, MovingVolumes, TargetPool};
use slackwater::router::{Agents, NoCluster, Options, Router, TlsDial};
use slackwater::tls::{Credentials, Name};
use tonic::Code;
use uuid::Uuid;

use super::cluster::{Cluster, SIZE, WAIT_TIMEOUT};
use slackwater_testkit::node::{check_pattern, refused, volume_uuid, write_pattern};
use slackwater_testkit::{mount, run};

const PATTERN: usize = 24 << 20;

async fn router(cluster: &Cluster) -> Router {
    let (files, list) = cluster.router_parts();
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

fn sha256(path: &Path) -> String {
    let sum = run("sha256sum", &[path.to_str().unwrap()]);
    sum.split_whitespace().next().unwrap().to_string()
}

fn image(cluster: &Cluster, node: usize, id: &str) -> PathBuf {
    let root = cluster.agents[node].disk.mount_point.join("volumes");
    root.join(volume_uuid(id)).join("data.img")
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
    assert!(target.promisable >= SIZE);
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
        let mover = Uuid::new_v4();
        let name = snapshot_name(mover, None);
        let source: VolumeId = volume.id.parse().unwrap();
        let copy = MoveCopy {
            mover,
            source,
            name: name.clone(),
            target: VolumeId::of_name(to.id, NameKind::Volume, &name),
            pool: to.name.clone(),
            claim: "shop/data".into(),
            max_bytes: SIZE,
        };
        // It is in use.
        assert!(router.look(source, &[]).await.unwrap().user.is_some());
        assert!(router.fence(source, mover, false).await.is_err());
        let client = &cluster.agents[0].client;
        client.unstage(&volume.id, &volume.staging).await.unwrap();
        assert!(router.copy(&copy).await.is_err(), "without the fence");
        router.fence(source, mover, false).await.unwrap();
        let fenced = router.look(source, &[]).await.unwrap();
        assert_eq!((fenced.fenced, fenced.user), (Some(mover), None));
        let staged = client.stage(&volume.id, &volume.staging, mount(fs)).await;
        let why = refused(staged, Code::FailedPrecondition);
        assert!(why.contains(&mover.to_string()), "{why}");
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
            sha256(&image(&cluster, 1, &copied)),
            sha256(&image(&cluster, 0, &volume.id)),
            "{fs}"
        );
        let snapshot = VolumeId::of_name(source.pool, NameKind::Snapshot, &name);
        router.delete_snapshot(snapshot).await.unwrap();
        router.delete_source(source, mover).await.unwrap();
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
