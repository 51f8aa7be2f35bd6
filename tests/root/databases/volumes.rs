//! Volumes with a folder that belongs to the unprivileged user, and copies of them.

use std::path::{Path, PathBuf};

use slackwater::csi;

use super::{GIB, Node, process};
use slackwater_testkit::mount;
use slackwater_testkit::snapshots::from_snapshot;

/// A staged volume, or a staged copy of one.
pub struct Volume {
    /// Its ID.
    pub id: String,
    /// Its mount point.
    pub staging: PathBuf,
    /// A folder in it that belongs to the unprivileged user.
    pub folder: PathBuf,
    fs: String,
}

impl Volume {
    /// Creates a volume for a claim `db/NAME`.
    pub async fn new(node: &Node, name: &str, fs: &str) -> Volume {
        Volume::in_pool(node, "default", name, fs).await
    }

    /// Creates a volume for a claim `db/NAME` in a pool.
    pub async fn in_pool(node: &Node, pool: &str, name: &str, fs: &str) -> Volume {
        let claim = [
            ("pool", pool),
            ("csi.storage.k8s.io/pvc/name", name),
            ("csi.storage.k8s.io/pvc/namespace", "db"),
        ];
        let id = node.client.create(name, GIB, mount(fs), &claim).await;
        let volume = Volume::staged(node, id.unwrap(), node.staging(name), fs).await;
        process::folder(&volume.folder);
        volume
    }

    async fn staged(node: &Node, id: String, staging: PathBuf, fs: &str) -> Volume {
        let stage = node.client.stage(&id, &staging, mount(fs)).await;
        stage.unwrap_or_else(|status| panic!("{status}\n{}", node.server.log()));
        Volume {
            id,
            folder: staging.join("files"),
            staging,
            fs: fs.into(),
        }
    }

    /// A restore of its snapshot, mounted at `staging`.
    pub async fn copy(&self, node: &Node, snapshot: &str, staging: &Path) -> Volume {
        std::fs::create_dir_all(staging).unwrap();
        let name = format!("copy of {snapshot}");
        let (capability, source) = (mount(&self.fs), from_snapshot(snapshot));
        let copy = node.client.create_from(&name, GIB, capability, source, &[]);
        let id = copy.await.unwrap().volume_id;
        Volume::staged(node, id, staging.to_path_buf(), &self.fs).await
    }

    /// Unstages it, without deleting it.
    pub async fn unstage(&self, node: &Node) {
        let unstage = node.client.unstage(&self.id, &self.staging).await;
        unstage.unwrap_or_else(|status| panic!("{status}\n{}", node.server.log()));
    }

    /// Deletes it.
    pub async fn end(self, node: &Node) {
        self.unstage(node).await;
        node.client.delete(&self.id).await.unwrap();
    }
}

/// Snapshots of volumes as a group, or, `in_sequence`, one after the other. Also returns their IDs in
/// the order of the volumes.
pub async fn cut(
    node: &Node,
    name: &str,
    volumes: &[&Volume],
    in_sequence: bool,
) -> (csi::VolumeGroupSnapshot, Vec<String>) {
    let ids: Vec<String> = volumes.iter().map(|volume| volume.id.clone()).collect();
    let group = match in_sequence {
        true => node.client.in_sequence(name, &ids).await,
        false => {
            let group = node.client.group(name, &ids, &[]).await;
            group.unwrap_or_else(|status| panic!("{status}\n{}", node.server.log()))
        }
    };
    let of = |id: &String| {
        let mut members = group.snapshots.iter();
        let member = members.find(|one| one.source_volume_id == *id);
        member.unwrap().snapshot_id.clone()
    };
    let members = ids.iter().map(of).collect();
    (group, members)
}
