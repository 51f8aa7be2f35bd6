//! The PersistentVolume and the claim of an imported volume.

use std::collections::HashMap;
use std::path::Path;
use std::str::FromStr;

use crate::error::Result;
use crate::model::FsType;
use crate::server::admin;
use serde_json::{Value, json};

/// A claim, by its namespace and name.
#[derive(Clone, Debug)]
pub(super) struct Claim {
    namespace: String,
    name: String,
}

impl FromStr for Claim {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Claim, String> {
        match text.split_once('/') {
            Some((namespace, name)) if !namespace.is_empty() && !name.is_empty() => Ok(Claim {
                namespace: namespace.into(),
                name: name.into(),
            }),
            _ => Err("give NAMESPACE/NAME".into()),
        }
    }
}

/// A node's driver.
pub(super) struct Node {
    driver: String,
    /// Where its volumes can be used.
    topology: HashMap<String, String>,
}

impl Node {
    /// Asks the driver at a socket.
    pub(super) async fn of(socket: &Path) -> Result<Node> {
        let (driver, topology) = admin::node(socket).await?;
        Ok(Node { driver, topology })
    }

    /// A List of both objects. `name` is the PersistentVolume's, `class` the StorageClass's. A
    /// volume without a file system is a raw device.
    pub(super) fn objects(
        &self,
        claim: &Claim,
        (name, class): (&str, &str),
        (id, size, fs): (&str, u64, Option<FsType>),
    ) -> Value {
        let mode = if fs.is_some() { "Filesystem" } else { "Block" };
        let mut csi = json!({ "driver": self.driver, "volumeHandle": id });
        if let Some(fs) = fs {
            csi["fsType"] = json!(fs.name());
        }
        let conditions = self
            .topology
            .iter()
            .map(|(key, value)| json!({ "key": key, "operator": "In", "values": [value] }));
        let terms = json!([{ "matchExpressions": conditions.collect::<Vec<_>>() }]);
        let volume = json!({
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": { "name": name },
            "spec": {
                "capacity": { "storage": size.to_string() },
                "accessModes": ["ReadWriteOnce"],
                "volumeMode": mode,
                "persistentVolumeReclaimPolicy": "Retain",
                "storageClassName": class,
                "claimRef": { "namespace": claim.namespace, "name": claim.name },
                "csi": csi,
                "nodeAffinity": { "required": { "nodeSelectorTerms": terms } },
            },
        });
        let claim = json!({
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": { "namespace": claim.namespace, "name": claim.name },
            "spec": {
                "accessModes": ["ReadWriteOnce"],
                "volumeMode": mode,
                "storageClassName": class,
                "volumeName": name,
                "resources": { "requests": { "storage": size.to_string() } },
            },
        });
        json!({ "apiVersion": "v1", "kind": "List", "items": [volume, claim] })
    }
}
