//! The kinds of objects that are read, and their fields.
//!
//! Objects are read without types: a field that is absent, or that a later release has changed, is
//! shown as empty, and does not make the others unreadable.

use k8s_openapi::jiff::Timestamp;
use kube::api::{ApiResource, DynamicObject};
use serde_json::Value;

/// A kind of objects.
#[derive(Debug, PartialEq, Eq)]
pub struct Kind {
    /// Its API group; empty for the core group.
    pub group: &'static str,
    /// Its versions, the newest first. All have the fields that are read here.
    pub versions: &'static [&'static str],
    /// Its name.
    pub kind: &'static str,
    /// Its resource, with a subresource after a slash if it is one.
    pub plural: &'static str,
    /// Its objects are in namespaces.
    pub is_namespaced: bool,
}

impl Kind {
    /// A kind of the core group.
    const fn core(kind: &'static str, plural: &'static str, is_namespaced: bool) -> Kind {
        Kind::of_group("", V1, (kind, plural), is_namespaced)
    }

    /// A kind of this project.
    const fn own(kind: &'static str, plural: &'static str, is_namespaced: bool) -> Kind {
        Kind::of_group("slackwater.dev", ALPHA, (kind, plural), is_namespaced)
    }

    const fn of_group(
        group: &'static str,
        versions: &'static [&'static str],
        (kind, plural): (&'static str, &'static str),
        is_namespaced: bool,
    ) -> Kind {
        Kind {
            group,
            versions,
            kind,
            plural,
            is_namespaced,
        }
    }

    /// The resource in one version.
    pub fn resource(&self, version: &str) -> ApiResource {
        let api_version = match self.group {
            "" => version.to_string(),
            group => format!("{group}/{version}"),
        };
        ApiResource {
            group: self.group.into(),
            version: version.into(),
            api_version,
            kind: self.kind.into(),
            plural: self.plural.into(),
        }
    }
}

const V1: &[&str] = &["v1"];
const ALPHA: &[&str] = &["v1alpha1"];
const GROUPS: &[&str] = &["v1", "v1beta2", "v1beta1"];
const STORAGE_GROUP: &str = "storage.k8s.io";
const SNAPSHOTS_GROUP: &str = "snapshot.storage.k8s.io";
const GROUPS_GROUP: &str = "groupsnapshot.storage.k8s.io";

pub const POOL: Kind = Kind::own("Pool", "pools", false);
pub const MOVE: Kind = Kind::own("VolumeMove", "volumemoves", true);
pub const REVERT: Kind = Kind::own("VolumeRevert", "volumereverts", true);
pub const SCHEDULE: Kind = Kind::own("SnapshotSchedule", "snapshotschedules", true);
pub const HTTP_SOURCE: Kind = Kind::own("HttpSource", "httpsources", true);
pub const OCI_SOURCE: Kind = Kind::own("OciSource", "ocisources", true);
pub const S3_SOURCE: Kind = Kind::own("S3Source", "s3sources", true);
pub const CLAIM: Kind = Kind::core("PersistentVolumeClaim", "persistentvolumeclaims", true);
pub const VOLUME: Kind = Kind::core("PersistentVolume", "persistentvolumes", false);
pub const POD: Kind = Kind::core("Pod", "pods", true);
/// A stream to a port of a pod.
pub const POD_PORT: Kind = Kind::core("Pod", "pods/portforward", true);
/// A program that is run in a container of a pod.
pub const POD_EXEC: Kind = Kind::core("Pod", "pods/exec", true);
pub const NODE: Kind = Kind::core("Node", "nodes", false);
pub const NAMESPACE: Kind = Kind::core("Namespace", "namespaces", false);
pub const STATEFUL_SET: Kind = Kind::of_group("apps", V1, ("StatefulSet", "statefulsets"), true);
pub const AUTOSCALER: Kind = Kind::of_group(
    "autoscaling",
    &["v2", "v1"],
    ("HorizontalPodAutoscaler", "horizontalpodautoscalers"),
    true,
);
pub const STORAGE_CLASS: Kind =
    Kind::of_group(STORAGE_GROUP, V1, ("StorageClass", "storageclasses"), false);
pub const CSI_DRIVER: Kind = Kind::of_group(STORAGE_GROUP, V1, ("CSIDriver", "csidrivers"), false);
pub const EVENT: Kind = Kind::of_group("events.k8s.io", V1, ("Event", "events"), true);
pub const SNAPSHOT: Kind = Kind::of_group(
    SNAPSHOTS_GROUP,
    V1,
    ("VolumeSnapshot", "volumesnapshots"),
    true,
);
pub const SNAPSHOT_CONTENT: Kind = Kind::of_group(
    SNAPSHOTS_GROUP,
    V1,
    ("VolumeSnapshotContent", "volumesnapshotcontents"),
    false,
);
pub const GROUP: Kind = Kind::of_group(
    GROUPS_GROUP,
    GROUPS,
    ("VolumeGroupSnapshot", "volumegroupsnapshots"),
    true,
);
pub const GROUP_CONTENT: Kind = Kind::of_group(
    GROUPS_GROUP,
    GROUPS,
    ("VolumeGroupSnapshotContent", "volumegroupsnapshotcontents"),
    false,
);

/// Fields of an object.
pub trait Fields {
    /// The value at a JSON pointer.
    fn at(&self, pointer: &str) -> &Value;
    fn name(&self) -> &str;
    /// Its namespace; empty if it has none.
    fn namespace(&self) -> &str;
    /// An annotation; empty if it is absent.
    fn annotation(&self, name: &str) -> &str;
    /// Its UID; empty if it is not stored yet.
    fn uid(&self) -> &str;
    /// When it was created.
    fn created(&self) -> Option<Timestamp>;
    /// Whether its deletion was requested.
    fn is_being_deleted(&self) -> bool;

    /// A text; empty if it is absent.
    fn text(&self, pointer: &str) -> &str {
        self.at(pointer).as_str().unwrap_or_default()
    }

    /// A number; 0 if it is absent.
    fn number(&self, pointer: &str) -> i64 {
        self.at(pointer).as_i64().unwrap_or_default()
    }

    /// Whether a field is true.
    fn is_true(&self, pointer: &str) -> bool {
        self.at(pointer).as_bool().unwrap_or_default()
    }

    /// A list; empty if it is absent.
    fn list(&self, pointer: &str) -> &[Value] {
        self.at(pointer).as_array().map_or(&[], Vec::as_slice)
    }

    fn time(&self, pointer: &str) -> Option<Timestamp> {
        self.text(pointer).parse().ok()
    }

    /// The labels of a selector, as `KEY=VALUE`.
    fn match_labels(&self, pointer: &str) -> Vec<String> {
        let labels = self.at(pointer).as_object().into_iter().flatten();
        let labels = labels.map(|(key, value)| format!("{key}={}", value.as_str().unwrap_or("?")));
        labels.collect()
    }

    /// The phase of a VolumeMove or VolumeRevert. Its controller has not begun if it has none.
    fn operation_phase(&self) -> &str {
        match self.text("/status/phase") {
            "" => "Pending",
            phase => phase,
        }
    }

    /// Conditions: type, status, reason, message.
    fn conditions(&self) -> Vec<[&str; 4]> {
        let each = self.list("/status/conditions").iter();
        each.map(|condition| {
            ["type", "status", "reason", "message"]
                .map(|key| condition[key].as_str().unwrap_or_default())
        })
        .collect()
    }
}

impl Fields for DynamicObject {
    fn at(&self, pointer: &str) -> &Value {
        self.data.pointer(pointer).unwrap_or(&Value::Null)
    }

    fn name(&self) -> &str {
        self.metadata.name.as_deref().unwrap_or_default()
    }

    fn namespace(&self) -> &str {
        self.metadata.namespace.as_deref().unwrap_or_default()
    }

    fn annotation(&self, name: &str) -> &str {
        let annotations = self.metadata.annotations.as_ref();
        let found = annotations.and_then(|all| all.get(name));
        found.map(String::as_str).unwrap_or_default()
    }

    fn uid(&self) -> &str {
        self.metadata.uid.as_deref().unwrap_or_default()
    }

    fn is_being_deleted(&self) -> bool {
        self.metadata.deletion_timestamp.is_some()
    }

    fn created(&self) -> Option<Timestamp> {
        self.metadata.creation_timestamp.as_ref().map(|time| time.0)
    }
}

/// The pool of a volume or a snapshot: the first half of its ID, if it is one of the driver's.
pub fn pool_of(handle: &str) -> Option<&str> {
    let (pool, rest) = handle.split_once('.')?;
    let is_uuid = |text: &str| {
        text.len() == 36
            && text.char_indices().all(|(at, c)| match at {
                8 | 13 | 18 | 23 => c == '-',
                _ => matches!(c, '0'..='9' | 'a'..='f'),
            })
    };
    (is_uuid(pool) && is_uuid(rest)).then_some(pool)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_ids_of_the_driver_have_a_pool() {
        let uuid = "11111111-2222-4333-8444-00000000000a";
        assert_eq!(pool_of(&format!("{uuid}.{uuid}")), Some(uuid));
        let wrong = [
            uuid.to_string(),
            format!("{uuid}.{uuid}x"),
            format!("{uuid}./{}", &uuid[1..]),
            format!("{}.{uuid}", uuid.to_uppercase()),
            String::new(),
        ];
        for handle in wrong {
            assert_eq!(pool_of(&handle), None, "{handle}");
        }
    }

    #[test]
    fn fields_of_another_shape_are_empty() {
        let object = serde_json::json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"},
            "spec": {"a": 5, "b": "text", "c": [1]}, "status": {"conditions": [
                {"type": "Ready", "status": "True"}, 7]}});
        let object: DynamicObject = serde_json::from_value(object).unwrap();
        assert_eq!(object.text("/spec/a"), "");
        assert_eq!(object.number("/spec/b"), 0);
        assert_eq!(object.list("/spec/b").len(), 0);
        assert_eq!(object.list("/spec/c").len(), 1);
        assert!(!object.is_true("/spec/none"));
        assert_eq!(
            object.conditions(),
            [["Ready", "True", "", ""], ["", "", "", ""]]
        );
    }
}
