//! A PersistentVolume exactly as the API server has it, so that fields that this program does not know
//! are kept when it is created again.

use ::kube::api::DynamicObject;
use serde_json::{Value, json};

/// The annotation with the reclaim policy that a PersistentVolume had before it became Retain for the
/// move. It exists from before the deletion until the PersistentVolume is bound again.
pub(in crate::router::kube) const POLICY: &str = "slackwater.dev/reclaim-policy";
/// The annotation with the UID and the mark of the claim that is deleted because its node is lost. The
/// volume keeps its data and is not used, until a person decides about it.
pub(in crate::router::kube) const QUARANTINED_FROM: &str = "slackwater.dev/quarantined-from";
/// The annotation with the reclaim policy that a PersistentVolume had before its quarantine. It has
/// another name than [`POLICY`], so that no move and no adoption restores it.
pub(in crate::router::kube) const POLICY_BEFORE_QUARANTINE: &str =
    "slackwater.dev/policy-before-quarantine";
/// Where a PersistentVolume has the ID of its volume.
pub(in crate::router::kube) const HANDLE: &str = "/spec/csi/volumeHandle";
/// The prefix of the finalizer that external-attacher adds while a volume is attached.
const ATTACHED: &str = "external-attacher/";

/// A PersistentVolume.
#[derive(Clone, Debug, PartialEq)]
pub(in crate::router::kube) struct Manifest(pub(in crate::router::kube) DynamicObject);

/// What a PersistentVolume should be.
#[derive(Clone, Copy, Debug)]
pub(in crate::router::kube) struct Goal<'a> {
    /// The topology key of the driver.
    pub(in crate::router::kube) key: &'a str,
    pub(in crate::router::kube) home: &'a str,
    /// The ID of another volume, if it gets another one.
    pub(in crate::router::kube) handle: Option<&'a str>,
}

/// Where a PersistentVolume may be used, by its node affinity.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::router::kube) enum Homes {
    /// Anywhere, so there is no home to be changed.
    Any,
    /// At exactly one home, without any other condition.
    One(String),
    /// Something else, which a person has written and must change.
    Else,
}

/// The claim that a PersistentVolume is bound to.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::router::kube) struct Bound {
    /// "namespace/name".
    pub(in crate::router::kube) claim: String,
    /// A claim that was created again with the same name has another one.
    pub(in crate::router::kube) uid: String,
}

impl Manifest {
    pub(in crate::router::kube) fn name(&self) -> &str {
        self.0.metadata.name.as_deref().unwrap_or_default()
    }

    pub(in crate::router::kube) fn uid(&self) -> Option<&str> {
        self.0.metadata.uid.as_deref()
    }

    pub(in crate::router::kube) fn version(&self) -> Option<&str> {
        self.0.metadata.resource_version.as_deref()
    }

    pub(in crate::router::kube) fn is_leaving(&self) -> bool {
        self.0.metadata.deletion_timestamp.is_some()
    }

    pub(in crate::router::kube) fn has_finalizers(&self) -> bool {
        let finalizers = self.0.metadata.finalizers.as_ref();
        finalizers.is_some_and(|finalizers| !finalizers.is_empty())
    }

    pub(in crate::router::kube) fn text(&self, path: &str) -> Option<&str> {
        self.0.data.pointer(path)?.as_str()
    }

    /// The id of its volume, if it is of this driver.
    pub(in crate::router::kube) fn handle(&self, driver: &str) -> Option<&str> {
        let ours = self.text("/spec/csi/driver") == Some(driver);
        ours.then(|| self.text(HANDLE)).flatten()
    }

    pub(in crate::router::kube) fn policy(&self) -> &str {
        // The default of the API server.
        let policy = self.text("/spec/persistentVolumeReclaimPolicy");
        policy.unwrap_or("Retain")
    }

    /// The policy that is to be restored.
    pub(in crate::router::kube) fn policy_before(&self) -> Option<&str> {
        self.annotation(POLICY)
    }

    fn annotation(&self, key: &str) -> Option<&str> {
        let annotations = self.0.metadata.annotations.as_ref()?;
        annotations.get(key).map(String::as_str)
    }

    /// UID and mark of the claim because of which its volume is in quarantine.
    pub(in crate::router::kube) fn quarantined_from(&self) -> Option<&str> {
        self.annotation(QUARANTINED_FROM)
    }

    /// The policy that it had before its quarantine.
    pub(in crate::router::kube) fn policy_before_quarantine(&self) -> Option<&str> {
        self.annotation(POLICY_BEFORE_QUARANTINE)
    }

    pub(in crate::router::kube) fn phase(&self) -> &str {
        self.text("/status/phase").unwrap_or_default()
    }

    pub(in crate::router::kube) fn bound(&self) -> Option<Bound> {
        let namespace = self.text("/spec/claimRef/namespace")?;
        let name = self.text("/spec/claimRef/name")?;
        Some(Bound {
            claim: format!("{namespace}/{name}"),
            uid: self.text("/spec/claimRef/uid").unwrap_or_default().into(),
        })
    }

    pub(in crate::router::kube) fn homes(&self, key: &str) -> Homes {
        let affinity = self.0.data.pointer("/spec/nodeAffinity/required");
        let Some(required) = affinity.filter(|value| !value.is_null()) else {
            return Homes::Any;
        };
        let terms = required.get("nodeSelectorTerms").and_then(Value::as_array);
        let Some([term]) = terms.map(Vec::as_slice) else {
            return Homes::Else;
        };
        let says = |name: &str| term.get(name).and_then(Value::as_array);
        if says("matchFields").is_some_and(|fields| !fields.is_empty()) {
            return Homes::Else;
        }
        let Some([asked]) = says("matchExpressions").map(Vec::as_slice) else {
            return Homes::Else;
        };
        let values = asked.get("values").and_then(Value::as_array);
        match (asked["key"].as_str(), asked["operator"].as_str(), values) {
            (Some(its), Some("In"), Some(values)) if its == key => match values.as_slice() {
                [Value::String(home)] => Homes::One(home.clone()),
                _ => Homes::Else,
            },
            _ => Homes::Else,
        }
    }

    /// The object that replaces it: identical except for its home and, if the goal names one, its
    /// volume, and with the policy that it has now. Fields that the API server sets itself are
    /// omitted.
    pub(in crate::router::kube) fn at(&self, goal: Goal<'_>) -> Manifest {
        let mut new = self.plain();
        let metadata = &mut new.0.metadata;
        metadata.uid = None;
        metadata.resource_version = None;
        metadata.creation_timestamp = None;
        metadata.deletion_timestamp = None;
        metadata.deletion_grace_period_seconds = None;
        metadata.generation = None;
        let finalizers = metadata.finalizers.iter_mut();
        finalizers.for_each(|all| all.retain(|one| !one.starts_with(ATTACHED)));
        new.0.data["spec"]["nodeAffinity"]["required"] = json!({ "nodeSelectorTerms": [{
            "matchExpressions": [{ "key": goal.key, "operator": "In", "values": [goal.home] }],
        }]});
        if let Some(handle) = goal.handle {
            new.0.data["spec"]["csi"]["volumeHandle"] = json!(handle);
        }
        new
    }

    /// The form in which it is stored: without managed fields and status.
    pub(in crate::router::kube) fn plain(&self) -> Manifest {
        let mut plain = self.clone();
        plain.0.metadata.managed_fields = None;
        if let Some(object) = plain.0.data.as_object_mut() {
            object.remove("status");
        }
        plain
    }
}

#[cfg(test)]
pub(in crate::router::kube) mod tests {
    use super::*;

    pub(in crate::router::kube) const KEY: &str = "topology.csi.slackwater.dev/home";
    pub(in crate::router::kube) const DRIVER: &str = "csi.slackwater.dev";

    /// A bound PersistentVolume at a home, as the provisioner creates it. Its own uid and that of its
    /// claim end with 1.
    pub(in crate::router::kube) fn volume(name: &str, handle: &str, home: &str) -> Manifest {
        let object = json!({
            "apiVersion": "v1", "kind": "PersistentVolume",
            "metadata": {
                "name": name, "uid": "uid-1", "resourceVersion": "10",
                "creationTimestamp": "2026-01-01T00:00:00Z",
                "annotations": { "pv.kubernetes.io/provisioned-by": DRIVER },
                "labels": { "a": "b" },
                "finalizers": [
                    "external-provisioner.volume.kubernetes.io/finalizer",
                    "kubernetes.io/pv-protection",
                    "external-attacher/csi-slackwater-dev",
                ],
                "managedFields": [{ "manager": "csi-provisioner" }],
            },
            "spec": {
                "capacity": { "storage": "1Gi" },
                "accessModes": ["ReadWriteOnce"],
                "persistentVolumeReclaimPolicy": "Delete",
                "claimRef": { "namespace": "shop", "name": "data", "uid": "claim-1" },
                "csi": { "driver": DRIVER, "volumeHandle": handle, "fsType": "xfs" },
                "nodeAffinity": { "required": { "nodeSelectorTerms": [{ "matchExpressions": [
                    { "key": KEY, "operator": "In", "values": [home] },
                ]}]}},
                "fieldOfALaterRelease": { "x": 1 },
            },
            "status": { "phase": "Bound" },
        });
        Manifest(serde_json::from_value(object).unwrap())
    }

    #[test]
    fn what_is_made_again_differs_in_its_home_alone() {
        let before = volume("pv", "pool.volume", "home-1");
        let goal = Goal {
            key: KEY,
            home: "home-2",
            handle: None,
        };
        let after = before.at(goal);
        assert_eq!(after.homes(KEY), Homes::One("home-2".into()));
        assert_eq!((after.uid(), after.version()), (None, None));
        assert_eq!(after.bound(), before.bound());
        let finalizers = after.0.metadata.finalizers.clone().unwrap();
        assert_eq!(finalizers.len(), 2, "not the attacher's: {finalizers:?}");
        let text = |manifest: &Manifest| {
            let mut value = serde_json::to_value(&manifest.0).unwrap();
            value["metadata"] = json!({
                "name": value["metadata"]["name"], "labels": value["metadata"]["labels"],
                "annotations": value["metadata"]["annotations"],
            });
            value.as_object_mut().unwrap().remove("status");
            value.to_string()
        };
        assert_eq!(text(&before).replace("home-1", "home-2"), text(&after));
    }

    #[test]
    fn an_affinity_of_anybody_elses_is_left_to_them() {
        let with = |affinity: Value| {
            let mut manifest = volume("pv", "pool.volume", "home-1");
            manifest.0.data["spec"]["nodeAffinity"] = affinity;
            manifest.homes(KEY)
        };
        let terms = |terms: Value| json!({ "required": { "nodeSelectorTerms": terms } });
        let home = json!({ "key": KEY, "operator": "In", "values": ["home-1"] });
        assert_eq!(with(Value::Null), Homes::Any);
        let one = terms(json!([{ "matchExpressions": [home] }]));
        assert_eq!(with(one), Homes::One("home-1".into()));
        let host = json!({ "key": "kubernetes.io/hostname", "operator": "In", "values": ["a"] });
        for other in [
            json!([]),
            json!([{ "matchExpressions": [] }]),
            json!([{ "matchExpressions": [home, host] }]),
            json!([{ "matchExpressions": [host] }]),
            json!([{ "matchExpressions": [home] }, { "matchExpressions": [home] }]),
            json!([{ "matchExpressions": [home], "matchFields": [host] }]),
            json!([{ "matchExpressions": [{ "key": KEY, "operator": "Exists" }] }]),
            json!([{ "matchExpressions": [{ "key": KEY, "operator": "NotIn", "values": ["x"] }] }]),
            json!([{ "matchExpressions": [{ "key": KEY, "operator": "In", "values": ["x", "y"] }] }]),
        ] {
            assert_eq!(with(terms(other.clone())), Homes::Else, "{other}");
        }
    }
}
