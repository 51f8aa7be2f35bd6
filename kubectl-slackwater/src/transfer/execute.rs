//! Reads what exists, and executes each step of a transfer as one request.

use std::collections::BTreeMap;

use kube::api::{DynamicObject, ListParams};
use serde_json::{Value, json};

use super::step::{Claim, NamespacedName, Record, Step, View, Volume};
use crate::change::{create, delete, patch};
use crate::cli::Change;
use crate::cluster::object::{self, Fields};
use crate::cluster::{Cluster, Scope};
use crate::failure::{DENIED, Failure, Result};
use crate::model::{self, claims_of, has_ended};

/// The annotation of a PersistentVolume with its [`Record`].
pub const RECORD: &str = "slackwater.dev/transfer";
/// The annotation of the new claim with the claim that it was.
pub const TRANSFERRED_FROM: &str = "slackwater.dev/transferred-from";
/// The annotation of the old claim with the attempt to undo its transfer.
pub const UNDONE: &str = "slackwater.dev/transfer-undone";
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

/// A claim that is transferred.
pub struct Transfer<'a> {
    /// With the permissions of its user.
    pub cluster: &'a Cluster,
    /// The claim.
    pub from: NamespacedName,
    /// What it becomes.
    pub to: NamespacedName,
    /// The name of its PersistentVolume.
    pub volume: String,
}

/// What exists, with the objects from which it was read. A step writes to exactly these: in these
/// versions, so that what was decided is never done to something else.
pub struct Observed {
    /// What the decision is made from.
    pub view: View,
    /// The PersistentVolume.
    pub volume: Option<DynamicObject>,
    /// The claim in the namespace that it leaves.
    pub old: Option<DynamicObject>,
    /// The claim in the other namespace.
    pub new: Option<DynamicObject>,
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
    async fn claim(&self, place: &NamespacedName) -> Result<Option<DynamicObject>> {
        let found = self
            .cluster
            .find_one(&object::CLAIM, &place.namespace, &place.name);
        found.await
    }

    async fn persistent_volume(&self) -> Result<Option<DynamicObject>> {
        let found = self.cluster.find_one(&object::VOLUME, "", &self.volume);
        found.await
    }

    /// Reads what exists.
    pub async fn read(&self) -> Result<Observed> {
        let volume = self.persistent_volume().await?;
        let claim = |claim: &DynamicObject| Claim {
            uid: claim.uid().to_string(),
            is_of_volume: claim.text("/spec/volumeName") == self.volume,
            is_bound: claim.text("/status/phase") == "Bound",
            is_being_deleted: claim.is_being_deleted(),
            is_transferred: claim.annotation(TRANSFERRED_FROM) == self.from.to_string(),
            undone: claim.annotation(UNDONE).into(),
        };
        let seen = match &volume {
            None => None,
            Some(volume) => Some(Volume {
                policy: volume.text("/spec/persistentVolumeReclaimPolicy").into(),
                record: record_of(volume)?,
                claim: claim_of(volume),
                is_being_deleted: volume.is_being_deleted(),
            }),
        };
        let old = self.claim(&self.from).await?;
        let blocker = match (&volume, &old) {
            (Some(volume), Some(_)) => {
                match find_namespace_blocker(self.cluster, &self.to.namespace).await? {
                    None => self.blocker(volume).await?,
                    why => why,
                }
            }
            _ => None,
        };
        let new = self.claim(&self.to).await?;
        Ok(Observed {
            view: View {
                volume: seen,
                old: old.as_ref().map(claim),
                new: new.as_ref().map(claim),
                blocker,
            },
            volume,
            old,
            new,
        })
    }

    /// What would lose its volume, or interfere.
    async fn blocker(&self, volume: &DynamicObject) -> Result<Option<String>> {
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

    /// Takes a step that was decided from what was read. `false`: an object has changed since then, and
    /// nothing was stored.
    pub async fn perform(&self, step: Step, seen: &Observed, change: &Change) -> Result<bool> {
        match self.execute(step, seen, change).await {
            Err(failure) if failure.is_conflict => Ok(false),
            done => done,
        }
    }

    async fn execute(&self, step: Step, seen: &Observed, change: &Change) -> Result<bool> {
        let Some(volume) = &seen.volume else {
            return Ok(false);
        };
        let fields = match (step, record_of(volume)?) {
            (Step::Delete, record) => {
                return self.delete(volume, record.as_ref(), seen, change).await;
            }
            (Step::Record, None) => {
                let Some(old) = &seen.old else {
                    return Ok(false);
                };
                self.try_create(self.manifest(old), seen).await?;
                self.recorded(volume, old)?
            }
            (Step::Retain, Some(_)) => json!({"spec": {"persistentVolumeReclaimPolicy": "Retain"}}),
            (Step::Reserve, Some(_)) => reserved(&self.to),
            (Step::Restore, Some(record)) => json!({
                "metadata": {"annotations": {RECORD: null}},
                "spec": {"persistentVolumeReclaimPolicy": record.policy},
            }),
            (Step::Create, Some(record)) => {
                let namespace = &self.to.namespace;
                create(
                    self.cluster,
                    change,
                    &object::CLAIM,
                    namespace,
                    record.claim,
                )
                .await?;
                return Ok(true);
            }
            _ => return Ok(false),
        };
        patch(self.cluster, change, &object::VOLUME, volume, fields).await?;
        Ok(true)
    }

    /// Lets the API server check the new claim, while the old one still exists: a quota or a policy of
    /// the other namespace may refuse it.
    async fn try_create(&self, claim: Value, seen: &Observed) -> Result<()> {
        if seen.view.new.is_some() {
            return Ok(());
        }
        let namespace = &self.to.namespace;
        create(
            self.cluster,
            &Change::DRY_RUN,
            &object::CLAIM,
            namespace,
            claim,
        )
        .await?;
        Ok(())
    }

    /// Deletes the old claim, of which a record without `--dry-run` is a condition.
    async fn delete(
        &self,
        volume: &DynamicObject,
        record: Option<&Record>,
        seen: &Observed,
        change: &Change,
    ) -> Result<bool> {
        let Some(old) = &seen.old else {
            return Ok(false);
        };
        if let Some(record) = record {
            self.try_create(record.claim.clone(), seen).await?;
        }
        if !change.dry_run {
            // Only while it has the record and the policy Retain, and nothing else has begun with it:
            // as it was read, so it must not have changed.
            let now = self.persistent_volume().await?;
            let version = |object: &DynamicObject| {
                let metadata = &object.metadata;
                (metadata.uid.clone(), metadata.resource_version.clone())
            };
            if record.is_none() || now.map(|now| version(&now)) != Some(version(volume)) {
                return Ok(false);
            }
        }
        let (namespace, name) = (&self.from.namespace, &self.from.name);
        let version = old.metadata.resource_version.as_deref();
        let which = (old.uid(), version.filter(|_| !change.dry_run));
        delete(self.cluster, change, &object::CLAIM, namespace, name, which).await?;
        Ok(true)
    }

    fn manifest(&self, old: &DynamicObject) -> Value {
        manifest(&self.from, &self.to, &self.volume, old)
    }

    /// The record and the policy, as fields of the PersistentVolume.
    fn recorded(&self, volume: &DynamicObject, old: &DynamicObject) -> Result<Value> {
        let record = Record {
            from: self.from.clone(),
            uid: old.uid().to_string(),
            to: self.to.clone(),
            policy: volume.text("/spec/persistentVolumeReclaimPolicy").into(),
            claim: self.manifest(old),
            undo: None,
        };
        let text = serde_json::to_string(&record)
            .map_err(|error| Failure::failed(format!("writing the record: {error}")))?;
        Ok(json!({
            "metadata": {"annotations": {RECORD: text}},
            "spec": {"persistentVolumeReclaimPolicy": "Retain"},
        }))
    }
}

/// Why a namespace cannot get a claim, if the user may read it.
pub async fn find_namespace_blocker(cluster: &Cluster, name: &str) -> Result<Option<String>> {
    match cluster.find_one(&object::NAMESPACE, "", name).await {
        Ok(None) => Ok(Some(format!("namespace {name} does not exist"))),
        Ok(Some(found)) if found.is_being_deleted() => {
            Ok(Some(format!("namespace {name} is being deleted")))
        }
        Err(failure) if failure.code != DENIED => Err(failure),
        Ok(Some(_)) | Err(_) => Ok(None),
    }
}

/// The new claim, like the old one. What controllers have written is left out, and a source of data,
/// which is in the old namespace.
pub fn manifest(
    from: &NamespacedName,
    to: &NamespacedName,
    volume: &str,
    old: &DynamicObject,
) -> Value {
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

/// The fields of a PersistentVolume that is reserved for a claim that does not exist yet.
pub fn reserved(claim: &NamespacedName) -> Value {
    json!({
        "metadata": {"annotations": {BOUND_BY_CONTROLLER: null}},
        "spec": {"claimRef": {"apiVersion": "v1", "kind": object::CLAIM.kind,
            "namespace": claim.namespace, "name": claim.name,
            "uid": null, "resourceVersion": null, "fieldPath": null}},
    })
}

/// The claim of a PersistentVolume, and its UID.
fn claim_of(volume: &DynamicObject) -> Option<(NamespacedName, String)> {
    let text = |field: &str| volume.text(&format!("/spec/claimRef/{field}")).to_string();
    let place = NamespacedName {
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
            let from = NamespacedName {
                namespace: "shop".into(),
                name: "data".into(),
            };
            let to = NamespacedName {
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
