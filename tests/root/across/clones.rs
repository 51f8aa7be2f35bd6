//! Volumes that are cloned on another node: with the content of one moment, and nothing is left of the
//! hidden snapshot, whatever dies.

use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use slackwater::{csi, fault};
use slackwater_testkit::cluster::{Agent, Cluster, Volume};
use slackwater_testkit::disk::content_digest;
use slackwater_testkit::node::{check_pattern, write_pattern};
use slackwater_testkit::snapshots::{from_snapshot, from_volume};
use slackwater_testkit::writers::{Writers, counts_in};
use slackwater_testkit::{Sweep, WAIT_TIMEOUT, eventually, mount};
use tonic::{Code, Status};

use super::restore::{delete_snapshot, request};

const DATA: usize = 24 << 20;
const FS: &str = "ext4";

/// A volume with a content source, on a node that is allowed alone.
async fn made_of(
    cluster: &Cluster,
    (name, source): (&str, csi::VolumeContentSource),
    on: &Agent,
) -> Result<csi::Volume, Status> {
    let mut request = request((name, ""), mount(FS), on).await;
    request.volume_content_source = Some(source);
    let mut controller = cluster.router.client.controller();
    let created = controller.create_volume(request).await?;
    Ok(created.into_inner().volume.unwrap())
}

/// Repeats as a sidecar does.
async fn until_made_of(
    cluster: &Cluster,
    (name, source): (&str, csi::VolumeContentSource),
    on: usize,
) -> csi::Volume {
    let start = Instant::now();
    loop {
        match made_of(cluster, (name, source.clone()), &cluster.agents[on]).await {
            Ok(made) => return made,
            Err(status) => {
                assert_not_final(name, &status);
                assert!(start.elapsed() < WAIT_TIMEOUT, "{name}: {status}");
                tokio::time::sleep(Duration::from_millis(200)).await;
            }
        }
    }
}

async fn cloned(
    cluster: &Cluster,
    (name, of): (&str, &Volume),
    on: &Agent,
) -> Result<csi::Volume, Status> {
    made_of(cluster, (name, from_volume(&of.id)), on).await
}

async fn until_cloned(cluster: &Cluster, name: &str, of: &Volume, on: usize) -> csi::Volume {
    until_made_of(cluster, (name, from_volume(&of.id)), on).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_clone_on_another_node_is_identical_to_its_volume() {
    let cluster = Cluster::new(&["xfs", "ext4"]).await;
    let volumes = cluster.volumes(&[(0, FS)]).await;
    let (volume, target) = (&volumes[0], &cluster.agents[1]);
    write_pattern(&volume.staging.join("file"), 7, DATA);
    let writers = Writers::start(&volumes);
    let made = cloned(&cluster, ("live", volume), target).await.unwrap();
    cluster.assert_thawed(&writers, "live");
    cluster.assert_no_snapshots("live");
    let again = cloned(&cluster, ("live", volume), target).await.unwrap();
    assert_eq!(again, made, "a repeat");
    cluster.assert_no_snapshots("a repeat");
    let staging = target.staging("live");
    std::fs::create_dir_all(&staging).unwrap();
    let staged = target.client.stage(&made.volume_id, &staging, mount(FS));
    staged.await.unwrap();
    check_pattern(&staging.join("file"), 7, DATA);
    let counts = counts_in(&staging);
    assert!(counts.iter().all(|count| *count > 0), "{counts:?}");
    let unstaged = target.client.unstage(&made.volume_id, &staging);
    unstaged.await.unwrap();
    cluster.router.client.delete_unused(&made.volume_id).await;

    // While nothing writes, both are the same, byte by byte.
    drop(writers);
    let source = &cluster.agents[0];
    let unstaged = source.client.unstage(&volume.id, &volume.staging);
    unstaged.await.unwrap();
    let made = cloned(&cluster, ("quiet", volume), target).await.unwrap();
    assert_eq!(
        content_digest(&target.image("volumes", &made.volume_id)),
        content_digest(&source.image("volumes", &volume.id))
    );
    cluster.assert_no_snapshots("quiet");
    cluster.router.client.delete_unused(&made.volume_id).await;
    cluster.tear_down(volumes).await;
}

/// After the process that answers or its connection has ended.
fn assert_not_final(context: &str, status: &Status) {
    let may_repeat = matches!(
        status.code(),
        Code::Unavailable | Code::Aborted | Code::Unknown | Code::Cancelled
    );
    assert!(may_repeat, "{context}: {status}");
}

/// The clone has the content of its volume, no snapshot is left, and the clone is deleted then.
async fn check(cluster: &Cluster, name: &str, made: &csi::Volume) {
    cluster.until_no_snapshots(name).await;
    filled_as_its_source(cluster, name, made).await;
}

/// The volume has the content of its source, and is deleted then.
async fn filled_as_its_source(cluster: &Cluster, name: &str, made: &csi::Volume) {
    let (target, staging) = (&cluster.agents[1], cluster.agents[1].staging(name));
    std::fs::create_dir_all(&staging).unwrap();
    let staged = target.client.stage(&made.volume_id, &staging, mount(FS));
    staged.await.unwrap();
    check_pattern(&staging.join("file"), 7, DATA);
    let unstaged = target.client.unstage(&made.volume_id, &staging);
    unstaged.await.unwrap();
    cluster.router.client.delete_unused(&made.volume_id).await;
}

/// The router, the source and the target are killed while the target writes the copy.
#[tokio::test(flavor = "multi_thread")]
async fn a_clone_is_completed_whatever_is_killed_and_nothing_is_left_of_its_snapshot() {
    let mut cluster = Cluster::new(&["xfs", "xfs"]).await;
    let volumes = cluster.volumes(&[(0, FS)]).await;
    write_pattern(&volumes[0].staging.join("file"), 7, DATA);
    for (name, victim) in [("router", None), ("source", Some(0)), ("target", Some(1))] {
        cluster.agents[1].arm("effect.write_range:stop");
        cluster.listed(name).await;
        let call = cloned(&cluster, (name, &volumes[0]), &cluster.agents[1]);
        let during = async {
            let target = &cluster.agents[1];
            while !target.is_stopped() {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            assert_eq!(cluster.agents[0].disk.snapshots().len(), 1, "{name}");
            match victim {
                None => cluster.router.process.signal(Signal::SIGKILL),
                Some(agent) => cluster.agents[agent].server.signal(Signal::SIGKILL),
            }
            target.server.signal(Signal::SIGCONT);
        };
        let (first, ()) = tokio::join!(call, during);
        match (victim, first) {
            // What was on its way may have been everything.
            (Some(0), Ok(_)) => {}
            (_, Ok(made)) => panic!("{name}: {made:?}"),
            (_, Err(status)) => assert_not_final(name, &status),
        }
        if victim.is_none() {
            cluster.restart_router(&[]).await;
        }
        for agent in &mut cluster.agents {
            agent.restart_with(&[]);
        }
        let made = until_cloned(&cluster, name, &volumes[0], 1).await;
        check(&cluster, name, &made).await;
    }
    cluster.tear_down(volumes).await;
}

/// A call to a router that dies at a step, or does not reach it. The next router completes the volume.
async fn completed_by_the_next_router(
    cluster: &mut Cluster,
    (name, source): (&str, csi::VolumeContentSource),
    step: &str,
) -> (bool, csi::Volume) {
    cluster.arm_router(&format!("router.{step}:kill")).await;
    cluster.listed(name).await;
    let first = made_of(cluster, (name, source.clone()), &cluster.agents[1]).await;
    let has_died = first.is_err();
    if let Err(status) = first {
        assert_not_final(name, &status);
        eventually(&format!("{name}: the router has died"), || {
            !cluster.router.process.is_alive()
        });
    }
    cluster.restart_router(&[]).await;
    let made = until_made_of(cluster, (name, source), 1).await;
    (has_died, made)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_router_killed_at_any_step_of_a_clone_or_restore_leaves_one_complete_volume() {
    let mut cluster = Cluster::new(&["xfs", "xfs"]).await;
    let volumes = cluster.volumes(&[(0, FS)]).await;
    write_pattern(&volumes[0].staging.join("file"), 7, DATA);
    for step in fault::COPY_STEPS {
        let name = format!("clone-{step}");
        let source = from_volume(&volumes[0].id);
        let (has_died, made) =
            completed_by_the_next_router(&mut cluster, (&name, source), step).await;
        assert!(has_died, "{name}");
        check(&cluster, &name, &made).await;
        assert_eq!(cluster.agents[1].disk.volumes().len(), 0, "{name}");
    }
    let snapshot = cluster.router.client.snapshot("s", &volumes[0].id, &[]);
    let snapshot = snapshot.await.unwrap().snapshot_id;
    for step in fault::COPY_STEPS {
        let name = format!("restore-{step}");
        let source = from_snapshot(&snapshot);
        let (has_died, made) =
            completed_by_the_next_router(&mut cluster, (&name, source), step).await;
        assert_eq!(has_died, !step.starts_with("snapshot-"), "{name}");
        filled_as_its_source(&cluster, &name, &made).await;
        assert_eq!(cluster.agents[1].disk.volumes().len(), 0, "{name}");
    }
    delete_snapshot(&cluster.router.client, &snapshot).await;
    cluster.tear_down(volumes).await;
}

/// It takes the hidden snapshot, sends it, and deletes it.
#[tokio::test(flavor = "multi_thread")]
async fn a_source_killed_at_any_effect_leaves_nothing_of_the_hidden_snapshot() {
    let mut cluster = Cluster::new(&["xfs", "xfs"]).await;
    let volumes = cluster.volumes(&[(0, FS)]).await;
    write_pattern(&volumes[0].staging.join("file"), 7, DATA);
    // The other effects are those of `make soak`.
    let step = if Sweep::requested().is_full { 1 } else { 3 };
    let mut deaths = 0;
    for n in (1..).step_by(step) {
        let mode = if n % 2 == 0 { "kill" } else { "kill-after" };
        let (name, fault) = (format!("s-{n}"), format!("effect.{n}:{mode}"));
        cluster.agents[0].arm(&fault);
        cluster.listed(&fault).await;
        let first = cloned(&cluster, (&name, &volumes[0]), &cluster.agents[1]).await;
        if let Err(status) = &first {
            assert_not_final(&fault, status);
            let server = &mut cluster.agents[0].server;
            eventually(&format!("{fault}: the source has died"), || {
                !server.is_alive()
            });
        }
        let is_dead = !cluster.agents[0].server.is_alive();
        cluster.agents[0].restart_with(&[]);
        let made = until_cloned(&cluster, &name, &volumes[0], 1).await;
        if let Ok(first) = first {
            assert_eq!(first, made, "{fault}: an answer stays");
        }
        check(&cluster, &name, &made).await;
        if !is_dead {
            break;
        }
        deaths += 1;
    }
    println!("{deaths} deaths");
    assert!(deaths > 5, "{deaths} deaths");
    cluster.tear_down(volumes).await;
}
