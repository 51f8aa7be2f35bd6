//! The temporary objects of a restore whose source namespace is gone: a VolumeSnapshot in the namespace of
//! the new claim, and a VolumeSnapshotContent with the handle of the snapshot. Their names are computed from
//! the UID of the source's content, and both record for what they were created.
//!
//! The content is always Retain: it has the handle of a snapshot that another content has, too, and with the
//! policy Delete the snapshot would be deleted with it.

use kube::api::DynamicObject;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::cluster::Cluster;
use crate::cluster::object::{self, Fields};
use crate::failure::{Failure, Result};
use crate::model::Snapshot;
use crate::restore::plan::{Copy, TEMPORARY, is_copy};

/// The annotation of both objects with their [`Record`].
const RECORD: &str = "slackwater.dev/restored-content";
/// The only policy with which a snapshot is never deleted.
pub const RETAIN: &str = "Retain";

/// For what a temporary object was created.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Record {
    /// What the user has named, with its kind.
    pub source: String,
    /// The content of the snapshot.
    pub content: String,
    pub uid: String,
    /// The namespace of the claim.
    pub namespace: String,
    pub claim: String,
    /// What the claim is like. The content and the PersistentVolume may be gone later.
    pub restore_bytes: i64,
    pub mode: String,
    pub class: String,
    pub access_modes: Vec<String>,
    /// How many snapshots are restored together.
    pub members: usize,
}

/// The record of an object; `None` if it was not created by this command.
pub fn record_of(object: &DynamicObject) -> Option<Record> {
    serde_json::from_str(object.annotation(RECORD)).ok()
}

/// The name of the temporary VolumeSnapshot.
pub fn snapshot_name(uid: &str) -> String {
    format!("{TEMPORARY}{uid}")
}

/// The name of the temporary content. The same snapshot may be restored into several namespaces.
fn content_name(record: &Record) -> String {
    format!("{TEMPORARY}{}-{}", record.uid, record.namespace)
}

/// One snapshot that is restored.
pub struct Member {
    pub copy: Copy,
    pub record: Record,
}

/// What exists of a member. All of it is of this restore.
pub struct Existing {
    pub content: Option<DynamicObject>,
    pub snapshot: Option<DynamicObject>,
    pub claim: Option<DynamicObject>,
}

impl Existing {
    /// The volume of the claim exists.
    pub fn is_bound(&self) -> bool {
        let claim = self.claim.as_ref();
        claim.is_some_and(|claim| claim.text("/status/phase") == "Bound")
    }

    /// Both temporary objects exist, and none is being deleted.
    pub fn has_temporary(&self) -> bool {
        let stays = |it: &Option<DynamicObject>| {
            let object = it.as_ref();
            object.is_some_and(|it| !it.is_being_deleted())
        };
        stays(&self.content) && stays(&self.snapshot)
    }

    /// Claims can be created from the snapshot.
    pub fn is_ready(&self) -> bool {
        let snapshot = self.snapshot.as_ref();
        snapshot.is_some_and(|it| it.is_true("/status/readyToUse"))
    }

    /// The content is of a VolumeSnapshot that is gone, and can be bound to no other one.
    pub fn is_stale(&self) -> bool {
        let bound_to = |it: &DynamicObject| !it.text("/spec/volumeSnapshotRef/uid").is_empty();
        self.snapshot.is_none() && self.content.as_ref().is_some_and(bound_to)
    }
}

impl Member {
    /// The name of the temporary content.
    pub fn content(&self) -> String {
        content_name(&self.record)
    }

    fn snapshot(&self) -> &Snapshot {
        &self.copy.snapshot
    }

    /// The temporary content. It has no field of a group: csi-snapshotter writes whether the snapshot is of
    /// one.
    pub fn content_manifest(&self, driver: &str) -> Value {
        let (record, snapshot) = (&self.record, self.snapshot());
        json!({
            "apiVersion": "snapshot.storage.k8s.io/v1",
            "kind": object::SNAPSHOT_CONTENT.kind,
            "metadata": {"name": self.content(), "annotations": {RECORD: json!(record).to_string()}},
            "spec": {
                "driver": driver,
                "deletionPolicy": RETAIN,
                "source": {"snapshotHandle": snapshot.handle},
                "sourceVolumeMode": self.copy.mode,
                "volumeSnapshotRef": {"apiVersion": "snapshot.storage.k8s.io/v1",
                    "kind": object::SNAPSHOT.kind, "namespace": record.namespace, "name": snapshot.name},
            },
        })
    }

    /// The temporary VolumeSnapshot.
    pub fn snapshot_manifest(&self) -> Value {
        json!({
            "apiVersion": "snapshot.storage.k8s.io/v1",
            "kind": object::SNAPSHOT.kind,
            "metadata": {"name": self.snapshot().name,
                "annotations": {RECORD: json!(self.record).to_string()}},
            "spec": {"source": {"volumeSnapshotContentName": self.content()}},
        })
    }

    /// Reads what exists. Refuses objects under these names that are not of this restore.
    pub async fn read_objects(&self, cluster: &Cluster) -> Result<Existing> {
        let (namespace, copy) = (&self.record.namespace, &self.copy);
        // First, because one whose VolumeSnapshot is gone is deleted.
        let name = self.content();
        let content = cluster.find_one(&object::SNAPSHOT_CONTENT, "", &name);
        let content = content.await?;
        let snapshot = cluster.find_one(&object::SNAPSHOT, namespace, &copy.snapshot.name);
        let snapshot = snapshot.await?;
        let claim = cluster.find_one(&object::CLAIM, namespace, &copy.claim);
        let claim = claim.await?;
        if let Some(claim) = &claim {
            self.check_claim(claim)?;
        }
        if let Some(snapshot) = &snapshot {
            let title = format!("VolumeSnapshot {namespace}/{}", copy.snapshot.name);
            let names = snapshot.text("/spec/source/volumeSnapshotContentName");
            self.check(snapshot, &title, names == self.content())?;
        }
        if let Some(content) = &content {
            self.check_content(content, snapshot.as_ref())?;
        }
        Ok(Existing {
            content,
            snapshot,
            claim,
        })
    }

    fn check_claim(&self, claim: &DynamicObject) -> Result<()> {
        let title = format!("claim {}/{}", self.record.namespace, self.copy.claim);
        if claim.is_being_deleted() {
            return Err(Failure::failed(format!("{title} is being deleted")));
        }
        if !is_copy(claim, self.snapshot()) {
            return Err(Failure::failed(format!(
                "{title} exists: give --suffix to create claims with other names"
            )));
        }
        match claim.text("/status/phase") {
            "Lost" => Err(Failure::failed(format!("{title} has lost its volume"))),
            _ => Ok(()),
        }
    }

    fn check(&self, object: &DynamicObject, title: &str, is_right: bool) -> Result<()> {
        let record = record_of(object);
        let Some(record) = record.filter(|it| is_right && it.uid == self.record.uid) else {
            return Err(Failure::failed(format!(
                "{title} exists, and was not created by this command: delete it first"
            )));
        };
        if record.source != self.record.source || record.claim != self.record.claim {
            return Err(Failure::failed(format!(
                "{title} was created by a restore of {} into claim {}/{}: complete that one first, or delete the VolumeSnapshot and its content (the snapshot stays)",
                record.source, record.namespace, record.claim
            )));
        }
        Ok(())
    }

    fn check_content(
        &self,
        content: &DynamicObject,
        snapshot: Option<&DynamicObject>,
    ) -> Result<()> {
        let title = format!("VolumeSnapshotContent {}", self.content());
        let handle = content.text("/spec/source/snapshotHandle");
        self.check(content, &title, handle == self.snapshot().handle)?;
        let policy = content.text("/spec/deletionPolicy");
        if policy != RETAIN {
            return Err(Failure::failed(format!(
                "{title} has the deletionPolicy {policy}, with which the snapshot would be deleted: set it to {RETAIN}"
            )));
        }
        let own = (
            self.record.namespace.as_str(),
            self.copy.snapshot.name.as_str(),
        );
        let reference = |field: &str| content.text(&format!("/spec/volumeSnapshotRef/{field}"));
        let uid = reference("uid");
        let is_its = match snapshot {
            Some(snapshot) => uid.is_empty() || uid == snapshot.uid(),
            None => true,
        };
        match is_its && (reference("namespace"), reference("name")) == own {
            true => Ok(()),
            false => Err(Failure::failed(format!(
                "{title} is bound to another VolumeSnapshot ({}/{}, UID {uid}): delete it first (the snapshot stays)",
                reference("namespace"),
                reference("name")
            ))),
        }
    }
}

#[cfg(test)]
mod tests {
    use slackwater_core::fuzz::fuzz_text;
    use slackwater_core::record::formats::{check_with, files};

    use super::*;

    /// A later plugin completes what an earlier one has recorded in the annotation.
    #[test]
    fn records_of_restored_content_keep_their_format() {
        let record = Record {
            source: "volumesnapshotcontent/old".into(),
            content: "old".into(),
            uid: "0000-1".into(),
            namespace: "shop".into(),
            claim: "data".into(),
            restore_bytes: 1 << 30,
            mode: "Filesystem".into(),
            class: "slackwater".into(),
            access_modes: vec!["ReadWriteOnce".into()],
            members: 2,
        };
        let read = |bytes: &[u8]| serde_json::from_slice::<Record>(bytes).unwrap();
        let write = |record: &Record| json!(record).to_string().into_bytes();
        check_with(
            "restored-content",
            vec![("record.json", record)],
            read,
            write,
        );
    }

    #[test]
    fn fuzz_records_of_restored_content() {
        let seeds: Vec<_> = files("restored-content").into_values().collect();
        let seeds: Vec<_> = seeds.iter().map(|it| str::from_utf8(it).unwrap()).collect();
        fuzz_text("record of restored content", &seeds, |text| {
            serde_json::from_str::<Record>(text).ok()
        });
    }
}
