//! What exists, and each step as one request.

use std::collections::BTreeMap;

use kube::api::{DynamicObject, ListParams};
use serde_json::{Value, json};

use super::step::{Claim, Place, Record, Step, View, Volume};
use crate::change::{create, delete, patch};
use crate::cli::Change;
use crate::cluster::{Cluster, Scope};
use crate::failure::{Failure, Result};
use crate::model::{self, claims_of, has_ended};
use crate::object::{self, Fields};

/// The annotation of a PersistentVolume with its [`Record`].
pub const RECORD: &str = "slackwater.dev/transfer";
/// The annotation of the new claim with the claim that it was.
pub const TRANSFERRED_FROM: &str = "slackwater.dev/transferred-from";
/// The mark of the controller on a volume that it has chosen itself. It gives up such a volume
/// altogether where it would keep one that was reserved.
const BOUND_BY_CONTROLLER: &str = "pv.kubernetes.io/bound-by-controller";
/// Annotations of PersistentVolumes with which the driver's controller has begun something.
const BUSY: [(&str, &str); 3] = [
    ("slackwater.dev/reclaim-policy", "is being moved or adopted"),
    ("slackwater.dev/quarantined-from", "is in quarantine"),
    (
        "slackwater.dev/policy-before-quarantine",
        "is in quarantine",
    ),
];
/// An annotation of a claim that its user writes, and that goes with it.
const OF_USER: &str = "slackwater.dev/on-node-lost";

/// A claim on its way.
pub struct Transfer<'a> {
    /// With the rights of its user.
    pub cluster: &'a Cluster,
    /// The claim.
    pub from: Place,
    /// What it becomes.
    pub to: Place,
    /// The name of its PersistentVolume.
    pub volume: String,
}

fn uid_of(object: &DynamicObject) -> String {
    object.metadata.uid.clone().unwrap_or_default()
}

/// The record of a PersistentVolume. One that cannot be read is refused: it is of a later release, or
/// was edited.
pub fn record_of(volume: &DynamicObject) -> Result<Option<Record>> {
    match volume.annotation(RECORD) {
        "" => Ok(None),
        text => serde_json::from_str(text).map(Some).map_err(|error| {
            Failure::failed(format!(
                "the annotation {RECORD} of PersistentVolume {} cannot be read: {error}",
                volume.name()
            ))
        }),
    }
}

impl Transfer<'_> {
    async fn claim(&self, place: &Place) -> Result<Option<DynamicObject>> {
        let found = self
            .cluster
            .get_one(&object::CLAIM, &place.namespace, &place.name);
        found.await
    }

    async fn persistent_volume(&self) -> Result<Option<DynamicObject>> {
        let found = self.cluster.get_one(&object::VOLUME, "", &self.volume);
        found.await
    }

    /// Reads what exists.
    pub async fn view(&self) -> Result<View> {
        let volume = self.persistent_volume().await?;
        let claim = |claim: &DynamicObject| Claim {
            uid: uid_of(claim),
            is_of_volume: claim.text("/spec/volumeName") == self.volume,
            is_bound: claim.text("/status/phase") == "Bound",
            is_leaving: claim.metadata.deletion_timestamp.is_some(),
        };
        let seen = match &volume {
            None => None,
            Some(volume) => Some(Volume {
                policy: volume.text("/spec/persistentVolumeReclaimPolicy").into(),
                record: record_of(volume)?,
                claim: claim_of(volume),
                is_leaving: volume.metadata.deletion_timestamp.is_some(),
            }),
        };
        let old = self.claim(&self.from).await?;
        let hindrance = match (&volume, &old) {
            (Some(volume), Some(_)) => self.hindrance(volume).await?,
            _ => None,
        };
        Ok(View {
            volume: seen,
            old: old.as_ref().map(claim),
            new: self.claim(&self.to).await?.as_ref().map(claim),
            hindrance,
        })
    }

    /// What would lose its volume, or interfere.
    async fn hindrance(&self, volume: &DynamicObject) -> Result<Option<String>> {
        let busy = BUSY
            .iter()
            .find(|(name, _)| !volume.annotation(name).is_empty());
        if let Some((name, what)) = busy {
            return Ok(Some(format!(
                "PersistentVolume {} {what} (annotation {name})",
                self.volume
            )));
        }
        let scope = Scope::Namespace(self.from.namespace.clone());
        let all = ListParams::default();
        let pods = self.cluster.get_all(&object::POD, &scope, &all).await?;
        let uses = |pod: &&DynamicObject| {
            let claims = claims_of(pod);
            !has_ended(pod) && claims.iter().any(|(claim, _)| *claim == self.from.name)
        };
        if let Some(pod) = pods.iter().find(uses) {
            return Ok(Some(format!(
                "pod {}/{} uses it: delete the pod, or scale its controller to 0",
                self.from.namespace,
                pod.name()
            )));
        }
        let moves = model::moves(self.cluster, &scope).await?;
        let mut moves = moves.iter();
        if let Some(one) = moves.find(|one| one.claim == self.from.name && !one.has_ended()) {
            return Ok(Some(format!(
                "VolumeMove {} moves its volume (phase {})",
                one.name, one.phase
            )));
        }
        let claims = self.cluster.get_all(&object::CLAIM, &scope, &all).await?;
        let clones = |claim: &&DynamicObject| {
            claim.text("/status/phase") != "Bound"
                && claim.text("/spec/dataSource/kind") == object::CLAIM.kind
                && claim.text("/spec/dataSource/name") == self.from.name
        };
        Ok(claims.iter().find(clones).map(|claim| {
            format!(
                "claim {}, which is not bound, is a clone of it",
                claim.name()
            )
        }))
    }

    /// Takes a step.
    pub async fn perform(&self, step: Step, change: &Change) -> Result<()> {
        if step == Step::Delete {
            return self.delete(change).await;
        }
        let Some(volume) = self.persistent_volume().await? else {
            return Err(Failure::failed(format!(
                "PersistentVolume {} was deleted by another user",
                self.volume
            )));
        };
        let record = record_of(&volume)?;
        let fields = match (step, &record) {
            (Step::Record, None) => self.recorded(&volume).await?,
            (Step::Retain, Some(_)) => json!({"spec": {"persistentVolumeReclaimPolicy": "Retain"}}),
            (Step::Reserve, Some(_)) => json!({
                "metadata": {"annotations": {BOUND_BY_CONTROLLER: null}},
                "spec": {"claimRef": {"apiVersion": "v1", "kind": object::CLAIM.kind,
                    "namespace": self.to.namespace, "name": self.to.name,
                    "uid": null, "resourceVersion": null, "fieldPath": null}},
            }),
            (Step::Restore, Some(record)) => json!({
                "metadata": {"annotations": {RECORD: null}},
                "spec": {"persistentVolumeReclaimPolicy": record.policy},
            }),
            (Step::Create, Some(record)) => {
                let claim = record.claim.clone();
                let namespace = &self.to.namespace;
                create(self.cluster, change, &object::CLAIM, namespace, claim).await?;
                return Ok(());
            }
            // It has changed since the step was decided: decide again.
            _ => return Ok(()),
        };
        patch(self.cluster, change, &object::VOLUME, &volume, fields).await?;
        Ok(())
    }

    /// Lets the API server check the new claim, before there is a record of it.
    pub async fn try_create(&self, change: &Change) -> Result<()> {
        if let Some(old) = self.claim(&self.from).await? {
            let claim = manifest(&self.from, &self.to, &self.volume, &old);
            let namespace = &self.to.namespace;
            create(self.cluster, change, &object::CLAIM, namespace, claim).await?;
        }
        Ok(())
    }

    async fn delete(&self, change: &Change) -> Result<()> {
        let Some(volume) = self.persistent_volume().await? else {
            return Ok(());
        };
        // With --dry-run there is no record yet.
        let uid = match record_of(&volume)? {
            Some(record) => record.uid,
            None => claim_of(&volume).map(|(_, uid)| uid).unwrap_or_default(),
        };
        let (namespace, name) = (&self.from.namespace, &self.from.name);
        delete(self.cluster, change, &object::CLAIM, namespace, name, &uid).await
    }

    /// The record and the policy, as fields of the PersistentVolume.
    async fn recorded(&self, volume: &DynamicObject) -> Result<Value> {
        let Some(old) = self.claim(&self.from).await? else {
            return Err(Failure::failed(format!(
                "claim {} was deleted by another user",
                self.from
            )));
        };
        let record = Record {
            from: self.from.clone(),
            uid: uid_of(&old),
            to: self.to.clone(),
            policy: volume.text("/spec/persistentVolumeReclaimPolicy").into(),
            claim: manifest(&self.from, &self.to, &self.volume, &old),
        };
        let text = serde_json::to_string(&record)
            .map_err(|error| Failure::failed(format!("writing the record: {error}")))?;
        Ok(json!({
            "metadata": {"annotations": {RECORD: text}},
            "spec": {"persistentVolumeReclaimPolicy": "Retain"},
        }))
    }
}

/// The new claim, like the old one. What controllers have written is left out, and a source of data,
/// which is in the old namespace.
pub fn manifest(from: &Place, to: &Place, volume: &str, old: &DynamicObject) -> Value {
    let kept = |key: &str| {
        let domain = key.split_once('/').map_or("", |(domain, _)| domain);
        let is_own = domain == "slackwater.dev" || domain.ends_with(".slackwater.dev");
        let is_kubernetes = domain == "kubernetes.io" || domain.ends_with(".kubernetes.io");
        key == OF_USER || !(is_own || is_kubernetes)
    };
    let annotations = old.metadata.annotations.clone().unwrap_or_default();
    let mut annotations: BTreeMap<_, _> = annotations
        .into_iter()
        .filter(|(key, _)| kept(key))
        .collect();
    annotations.insert(TRANSFERRED_FROM.into(), from.to_string());
    let mut claim = json!({
        "apiVersion": "v1",
        "kind": object::CLAIM.kind,
        "metadata": {"name": to.name, "annotations": annotations,
            "labels": old.metadata.labels},
        "spec": {"volumeName": volume},
    });
    for field in [
        "accessModes",
        "resources",
        "storageClassName",
        "volumeMode",
        "volumeAttributesClassName",
    ] {
        let value = old.at(&format!("/spec/{field}"));
        if !value.is_null() {
            claim["spec"][field] = value.clone();
        }
    }
    claim
}

/// The claim of a PersistentVolume, and its UID.
pub fn claim_of(volume: &DynamicObject) -> Option<(Place, String)> {
    let text = |field: &str| volume.text(&format!("/spec/claimRef/{field}")).to_string();
    let place = Place {
        namespace: text("namespace"),
        name: text("name"),
    };
    (!place.name.is_empty()).then(|| (place, text("uid")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn annotations_of_controllers_stay_behind() {
        let kept = |key: &str| {
            let old: DynamicObject = serde_json::from_value(json!({"metadata": {
                "name": "data", "labels": {"app": "pg"}, "annotations": {key: "x"}},
                "spec": {"accessModes": ["ReadWriteOnce"], "dataSource": {"name": "s"},
                    "storageClassName": "slackwater", "volumeName": "other"}}))
            .unwrap();
            let from = Place {
                namespace: "shop".into(),
                name: "data".into(),
            };
            let to = Place {
                namespace: "other".into(),
                name: "copy".into(),
            };
            let claim = manifest(&from, &to, "pv", &old);
            assert_eq!(claim["spec"]["volumeName"], "pv");
            assert_eq!(claim["spec"]["dataSource"], Value::Null);
            assert_eq!(claim["metadata"]["labels"], json!({"app": "pg"}));
            assert_eq!(
                claim["metadata"]["annotations"][TRANSFERRED_FROM],
                "shop/data"
            );
            !claim["metadata"]["annotations"][key].is_null()
        };
        for key in ["team", "example.org/owner", "myslackwater.dev/x", OF_USER] {
            assert!(kept(key), "{key}");
        }
        for key in [
            "pv.kubernetes.io/bind-completed",
            "volume.kubernetes.io/selected-node",
            "kubectl.kubernetes.io/last-applied-configuration",
            "slackwater.dev/restored-from",
            "slackwater.dev/node-lost",
        ] {
            assert!(!kept(key), "{key}");
        }
    }
}
