//! The two objects of an adopted orphan: a PersistentVolume and a claim, or a VolumeSnapshotContent and a
//! VolumeSnapshot.

use kube::api::DynamicObject;
use serde_json::{Value, json};

use crate::cli::adopt::AdoptArguments;
use crate::cluster::object::{self, Fields, Kind};
use crate::text::quantity;
use crate::transfer::step::NamespacedName;

/// The annotation without which external-provisioner does not delete a volume when the policy of its
/// PersistentVolume is changed to Delete.
const PROVISIONED_BY: &str = "pv.kubernetes.io/provisioned-by";
/// A claim with it is never bound to another PersistentVolume.
const BIND_COMPLETED: &str = "pv.kubernetes.io/bind-completed";

/// A kind of orphan, with the two kinds of objects that it gets.
#[derive(Debug, PartialEq)]
pub struct OrphanKind {
    /// As `status.orphans` has it.
    pub kind: &'static str,
    /// In a sentence.
    pub what: &'static str,
    /// Names the orphan.
    pub owner: &'static Kind,
    /// Is used by people.
    pub user: &'static Kind,
    /// The field of the user with the name of the owner.
    pub name_of_owner: &'static str,
    /// The field of the owner with the name of the user.
    reference: &'static str,
    /// Fields of the owner with the ID.
    handles: &'static [&'static str],
    /// The field of the owner with the name of the driver.
    driver: &'static str,
    /// What helps if another user of the name exists.
    pub advice: &'static str,
    /// The field of the owner with what happens to the data.
    pub policy: &'static str,
}

/// What an orphan is.
#[derive(Clone, Debug, PartialEq)]
pub enum Content {
    Volume {
        /// As a quantity of the API.
        size: String,
        /// Empty for a raw block device.
        fs: String,
        is_for_readers: bool,
        /// The topology value of its pool.
        home: String,
        /// The StorageClass; empty for none.
        class: String,
    },
    Snapshot,
}

/// The objects of an orphan.
#[derive(Clone, Debug, PartialEq)]
pub struct Pair {
    pub owner: Value,
    pub user: Value,
}

impl OrphanKind {
    pub const VOLUME: OrphanKind = OrphanKind {
        kind: "Volume",
        what: "volume",
        owner: &object::VOLUME,
        user: &object::CLAIM,
        name_of_owner: "/spec/volumeName",
        reference: "/spec/claimRef",
        handles: &["/spec/csi/volumeHandle"],
        driver: "/spec/csi/driver",
        advice: "give another --claim",
        policy: "persistentVolumeReclaimPolicy",
    };

    pub const SNAPSHOT: OrphanKind = OrphanKind {
        kind: "Snapshot",
        what: "snapshot",
        owner: &object::SNAPSHOT_CONTENT,
        user: &object::SNAPSHOT,
        name_of_owner: "/spec/source/volumeSnapshotContentName",
        reference: "/spec/volumeSnapshotRef",
        handles: &["/spec/source/snapshotHandle", "/status/snapshotHandle"],
        driver: "/spec/driver",
        advice: "give another --snapshot",
        policy: "deletionPolicy",
    };

    /// Whether an object names the orphan.
    pub fn names(&self, owner: &DynamicObject, driver: &str, id: &str) -> bool {
        let mut handles = self.handles.iter();
        owner.text(self.driver) == driver && handles.any(|path| owner.text(path) == id)
    }

    /// The claim or VolumeSnapshot that an owner names.
    pub fn place(&self, owner: &DynamicObject) -> NamespacedName {
        let reference = owner.at(self.reference);
        let text = |field: &str| reference[field].as_str().unwrap_or_default().to_string();
        NamespacedName {
            namespace: text("namespace"),
            name: text("name"),
        }
    }

    /// The UID of the claim or VolumeSnapshot that is bound to an owner; empty if none is.
    pub fn bound_to<'a>(&self, owner: &'a DynamicObject) -> &'a str {
        let uid = &owner.at(self.reference)["uid"];
        uid.as_str().unwrap_or_default()
    }

    /// The claim or VolumeSnapshot that the command line names.
    pub fn wanted<'a>(&self, arguments: &'a AdoptArguments) -> Option<&'a NamespacedName> {
        match self.kind {
            "Snapshot" => arguments.new_snapshot.as_ref(),
            _ => arguments.new_claim.as_ref(),
        }
    }

    /// Whether a claim was bound, and so is not bound to a new object.
    pub fn was_bound(&self, user: &DynamicObject) -> bool {
        let bound = "/status/boundVolumeSnapshotContentName";
        !user.annotation(BIND_COMPLETED).is_empty() || !user.text(bound).is_empty()
    }

    /// The field that keeps an existing claim from being bound.
    pub fn difference(&self, wanted: &Value, found: &DynamicObject) -> Option<&'static str> {
        if self.kind == "Snapshot" {
            return None;
        }
        let spec = &wanted["spec"];
        let size = |value: &Value| value.as_str().and_then(quantity).unwrap_or(i64::MAX);
        let requested = found.at("/spec/resources/requests/storage");
        let modes = found.list("/spec/accessModes").iter();
        let offered = spec["accessModes"].as_array().cloned().unwrap_or_default();
        let mut modes = modes.filter(|mode| !offered.contains(mode));
        let mode = match found.text("/spec/volumeMode") {
            "" => "Filesystem",
            mode => mode,
        };
        let class = spec["storageClassName"].as_str().unwrap_or_default();
        if found.text("/spec/storageClassName") != class {
            Some("storageClassName")
        } else if spec["volumeMode"] != mode {
            Some("volumeMode")
        } else if modes.next().is_some() {
            Some("accessModes")
        } else if size(requested) > size(&spec["resources"]["requests"]["storage"]) {
            Some("size")
        } else {
            None
        }
    }

    /// Both objects, of which the owner exists.
    pub fn pair_of(&self, owner: &DynamicObject) -> Pair {
        let place = self.place(owner);
        let user = match self.kind {
            "Snapshot" => snapshot(&place, owner.name()),
            _ => claim(&place, owner.name(), owner.at("/spec")),
        };
        Pair {
            owner: json!({"metadata": {"name": owner.name()}}),
            user,
        }
    }
}

/// For people: its size and its file system, after its ID.
pub fn content_of(content: &Content) -> String {
    match content {
        Content::Snapshot => String::new(),
        Content::Volume { size, fs, .. } if fs.is_empty() => {
            format!(" ({size}, raw block device)")
        }
        Content::Volume { size, fs, .. } => format!(" ({size}, {fs})"),
    }
}

/// Both objects, without a UID in the reference of the owner: the claim does not exist yet.
pub fn pair(
    driver: &str,
    (id, name): (&str, &str),
    place: &NamespacedName,
    content: &Content,
) -> Pair {
    let reference = json!({"namespace": place.namespace, "name": place.name});
    let Content::Volume {
        size,
        fs,
        is_for_readers,
        home,
        class,
    } = content
    else {
        let owner = json!({
            "apiVersion": "snapshot.storage.k8s.io/v1",
            "kind": "VolumeSnapshotContent",
            "metadata": {"name": name},
            "spec": {
                "deletionPolicy": "Retain",
                "driver": driver,
                "source": {"snapshotHandle": id},
                "volumeSnapshotRef": reference,
            },
        });
        let user = snapshot(place, name);
        return Pair { owner, user };
    };
    let mut csi = json!({"driver": driver, "volumeHandle": id});
    if !fs.is_empty() {
        csi["fsType"] = json!(fs);
    }
    let key = format!("topology.{driver}/home");
    let mode = if *is_for_readers {
        "ReadOnlyMany"
    } else {
        "ReadWriteOnce"
    };
    let spec = json!({
        "capacity": {"storage": size},
        "accessModes": [mode],
        "volumeMode": if fs.is_empty() { "Block" } else { "Filesystem" },
        "persistentVolumeReclaimPolicy": "Retain",
        "storageClassName": class,
        "claimRef": reference,
        "csi": csi,
        "nodeAffinity": {"required": {"nodeSelectorTerms": [
            {"matchExpressions": [{"key": key, "operator": "In", "values": [home]}]},
        ]}},
    });
    Pair {
        user: claim(place, name, &spec),
        owner: json!({
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": name, "annotations": {PROVISIONED_BY: driver}},
            "spec": spec,
        }),
    }
}

fn snapshot(place: &NamespacedName, owner: &str) -> Value {
    json!({
        "apiVersion": "snapshot.storage.k8s.io/v1",
        "kind": "VolumeSnapshot",
        "metadata": {"namespace": place.namespace, "name": place.name},
        "spec": {"source": {"volumeSnapshotContentName": owner}},
    })
}

/// A claim for all of a PersistentVolume.
fn claim(place: &NamespacedName, owner: &str, volume: &Value) -> Value {
    let class = volume["storageClassName"].as_str().unwrap_or_default();
    json!({
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"namespace": place.namespace, "name": place.name},
        "spec": {
            "accessModes": volume["accessModes"],
            "volumeMode": volume["volumeMode"],
            "storageClassName": class,
            "volumeName": owner,
            "resources": {"requests": {"storage": volume["capacity"]["storage"]}},
        },
    })
}
