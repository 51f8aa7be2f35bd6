//! The steps of a VolumeRevert at an agent, with files on real file systems.

use slackwater::agent::revert_request::Step;
use slackwater::agent::{LookForRevertRequest, LookForRevertResponse, RevertRequest};
use tonic::{Code, Status};
use uuid::Uuid;

use super::restore::delete_snapshot;
use slackwater_testkit::cluster::{Cluster, Volume};
use slackwater_testkit::node::{check_pattern, refused, write_pattern};
use slackwater_testkit::{eventually, mount};

const PATTERN: usize = 24 << 20;

/// A revert of a volume to a snapshot.
struct Revert<'a> {
    cluster: &'a Cluster,
    volume: &'a Volume,
    snapshot: &'a str,
    uid: Uuid,
    number: u64,
}

impl Revert<'_> {
    async fn step(&self, step: Step) -> Result<(), Status> {
        let asked = RevertRequest {
            volume_id: self.volume.id.clone(),
            revert_uid: self.uid.to_string(),
            step: step.into(),
            name: "shop/back".into(),
            snapshot_id: self.snapshot.into(),
            number: self.number,
            members: 1,
            members_digest: String::new(),
        };
        self.cluster.to_agent(0).revert(asked).await.map(drop)
    }

    async fn look(&self) -> LookForRevertResponse {
        let asked = LookForRevertRequest {
            volume_id: self.volume.id.clone(),
            snapshot_id: self.snapshot.into(),
        };
        let found = self.cluster.to_agent(0).look_for_revert(asked).await;
        found.unwrap().into_inner()
    }

    async fn stage(&self) -> Result<(), Status> {
        let volume = self.volume;
        let client = &self.cluster.agents[0].client;
        let staged = client.stage(&volume.id, &volume.staging, mount(volume.fs));
        staged.await.map(drop)
    }

    async fn unstage(&self) {
        let client = &self.cluster.agents[0].client;
        let unstaged = client.unstage(&self.volume.id, &self.volume.staging);
        unstaged.await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reverted_volume_has_its_former_files_and_a_later_snapshot_survives() {
    let mut cluster = Cluster::new(&["xfs"]).await;
    let volumes = cluster.volumes(&[(0, "xfs"), (0, "ext4")]).await;
    for volume in &volumes {
        let file = volume.staging.join("file");
        let client = &cluster.router.client;
        let mut snapshots = Vec::new();
        for seed in [7, 8] {
            write_pattern(&file, seed, PATTERN);
            let name = format!("{}-{seed}", volume.fs);
            let made = client.snapshot(&name, &volume.id, &[]).await.unwrap();
            snapshots.push(made.snapshot_id);
        }
        write_pattern(&volume.staging.join("later"), 9, PATTERN);
        let [first, second] = &snapshots[..] else {
            unreachable!()
        };
        let uid = Uuid::new_v4();
        for kill in [false, true] {
            // Once the process is killed, the new image and the fence must still be there.
            if kill {
                cluster.agents[0].restart_with(&[]);
            }
            let back = Revert {
                cluster: &cluster,
                volume,
                snapshot: first,
                uid,
                number: 0,
            };
            if !kill {
                assert!(back.look().await.user.contains("mounted"));
                refused(back.step(Step::Begin).await, Code::FailedPrecondition);
                back.unstage().await;
                back.step(Step::Begin).await.unwrap();
                back.step(Step::Prepare).await.unwrap();
            } else {
                let found = back.look().await;
                assert!(found.prepared && !found.switched, "{found:?}");
                let why = refused(back.stage().await, Code::Aborted);
                assert!(why.contains("shop/back"), "{why}");
                back.step(Step::Switch).await.unwrap();
                refused(back.stage().await, Code::Aborted);
                back.step(Step::End).await.unwrap();
                back.stage().await.unwrap();
                check_pattern(&file, 7, PATTERN);
                assert!(!volume.staging.join("later").exists());
                back.unstage().await;
            }
        }
        let forward = Revert {
            cluster: &cluster,
            volume,
            snapshot: second,
            uid: Uuid::new_v4(),
            number: 1,
        };
        for step in [Step::Begin, Step::Prepare, Step::Switch, Step::End] {
            forward.step(step).await.unwrap();
        }
        forward.stage().await.unwrap();
        check_pattern(&file, 8, PATTERN);
        for snapshot in &snapshots {
            delete_snapshot(&cluster.router.client, snapshot).await;
        }
    }
    // The cleanup frees former images, so that no fence waits for it.
    let trash = || cluster.agents[0].disk.trash();
    eventually("former images are freed", || trash().is_empty());
    cluster.tear_down(volumes).await;
}
