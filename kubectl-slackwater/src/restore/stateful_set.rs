//! The StatefulSet whose claims are created.

pub mod claim_names;

use kube::api::{DynamicObject, ListParams};
use serde_json::Value;

use super::stateful_set::claim_names::{Set, Slot};
use crate::cluster::object::{self, Fields};
use crate::cluster::{Cluster, Scope};
use crate::failure::{Failure, Result};
use crate::model::snapshot::Snapshot;
use crate::model::{claims_of, has_ended};

/// A StatefulSet.
pub struct StatefulSet {
    object: DynamicObject,
    /// What names its claims.
    pub set: Set,
}

/// The StatefulSet of this name, if one is named.
pub async fn find(
    cluster: &Cluster,
    namespace: &str,
    name: Option<&str>,
) -> Result<Option<StatefulSet>> {
    let Some(name) = name else { return Ok(None) };
    let found = cluster.find_one(&object::STATEFUL_SET, namespace, name);
    let Some(object) = found.await? else {
        return Err(Failure::failed(format!(
            "StatefulSet {namespace}/{name} does not exist; without --statefulset, claims get the names that they had"
        )));
    };
    let templates = object.list("/spec/volumeClaimTemplates").iter();
    let templates = templates.map(|it| it["metadata"]["name"].as_str().unwrap_or_default());
    let set = Set {
        name: name.into(),
        start: object.number("/spec/ordinals/start"),
        replicas: object.number("/spec/replicas"),
        templates: templates.map(str::to_string).collect(),
    };
    Ok(Some(StatefulSet { object, set }))
}

impl StatefulSet {
    fn title(&self) -> String {
        format!("StatefulSet {}/{}", self.namespace(), self.object.name())
    }

    /// That of its claims, too.
    fn namespace(&self) -> &str {
        self.object.namespace()
    }

    /// The slots of the members, by the claims of which they were taken.
    pub fn slots(&self, members: &[Snapshot]) -> Result<Vec<Slot>> {
        let claims: Vec<_> = members.iter().map(Snapshot::base).collect();
        self.set.slots(&claims).map_err(|others| {
            let names = &self.set.templates;
            let examples = names
                .iter()
                .map(|template| format!("{template}-{}-{}", self.set.name, self.set.start));
            let examples: Vec<_> = examples.collect();
            Failure::failed(format!(
                "{} does not expect the claims {}; it expects {} and those with higher ordinals",
                self.title(),
                others.join(", "),
                match examples.is_empty() {
                    true => "none".into(),
                    false => examples.join(", "),
                }
            ))
        })
    }

    /// The claim template of a slot.
    pub fn template(&self, slot: Slot) -> &Value {
        &self.object.list("/spec/volumeClaimTemplates")[slot.template]
    }

    /// The labels that its controller gives each claim.
    pub fn labels(&self) -> &Value {
        self.object.at("/spec/selector/matchLabels")
    }

    /// Refuses a StatefulSet that is not its user's to scale, or that deletes its claims.
    pub async fn refuse_managed(&self, cluster: &Cluster) -> Result<()> {
        let title = self.title();
        let refuse = |why: String| Err(Failure::failed(format!("{title} {why}")));
        if self.object.is_being_deleted() {
            return refuse("is being deleted".into());
        }
        if let Some(owner) = self
            .object
            .metadata
            .owner_references
            .iter()
            .flatten()
            .next()
        {
            return refuse(format!(
                "belongs to {} {}, which creates its claims and scales it: restore through its operator (docs/restore.md), or give --suffix",
                owner.kind, owner.name
            ));
        }
        let scope = Scope::Namespace(self.namespace().into());
        let all = ListParams::default();
        let scalers = cluster.get_all(&object::AUTOSCALER, &scope, &all).await?;
        let scales_it = |scaler: &&DynamicObject| {
            scaler.text("/spec/scaleTargetRef/kind") == object::STATEFUL_SET.kind
                && scaler.text("/spec/scaleTargetRef/name") == self.object.name()
        };
        if let Some(scaler) = scalers.iter().find(scales_it) {
            return refuse(format!(
                "is scaled by HorizontalPodAutoscaler {}: delete it first, or give --suffix",
                scaler.name()
            ));
        }
        for field in ["whenDeleted", "whenScaled"] {
            let pointer = format!("/spec/persistentVolumeClaimRetentionPolicy/{field}");
            if !matches!(self.object.text(&pointer), "" | "Retain") {
                return refuse(format!(
                    "deletes its claims: set persistentVolumeClaimRetentionPolicy.{field} to Retain first"
                ));
            }
        }
        Ok(())
    }

    /// Refuses a StatefulSet with claims that are neither restored nor there: its controller would
    /// create empty ones beside those that are restored. Returns the claims that are there and are kept,
    /// which are those of other pods only: with one of them, the volumes of a pod would be from different points in time.
    pub async fn refuse_gaps(&self, cluster: &Cluster, slots: &[Slot]) -> Result<Vec<String>> {
        let (mut absent, mut kept) = (Vec::new(), Vec::new());
        for slot in self.set.missing(slots) {
            let name = self.set.claim(&self.set.name, slot);
            let claim = cluster.find_one(&object::CLAIM, self.namespace(), &name);
            match claim.await? {
                None => absent.push((slot, name)),
                Some(_) if slots.iter().any(|one| one.ordinal == slot.ordinal) => {
                    return Err(Failure::failed(format!(
                        "{} would start a pod whose volumes are from different points in time: claim {name} exists, and no member restores it",
                        self.title()
                    )));
                }
                Some(_) => kept.push(name),
            }
        }
        let Some((last, _)) = absent.last() else {
            return Ok(kept);
        };
        let members = slots.iter().map(|slot| slot.ordinal).max();
        let has_more_replicas = members.is_none_or(|members| last.ordinal > members);
        let names: Vec<_> = absent.iter().map(|(_, name)| name.as_str()).collect();
        Err(Failure::failed(match has_more_replicas {
            true => format!(
                "{} has more replicas ({}) than there are members: it would create these claims empty: {}",
                self.title(),
                self.set.replicas,
                names.join(", ")
            ),
            false => format!(
                "{} would create these claims empty, which no member restores: {}",
                self.title(),
                names.join(", ")
            ),
        }))
    }

    /// How the claims of these slots are put to use.
    pub fn advice(&self, slots: &[Slot], suffix: Option<&str>) -> String {
        let last = slots.iter().map(|slot| slot.ordinal - self.set.start + 1);
        let replicas = last.max().unwrap_or_default();
        let (name, namespace) = (&self.set.name, self.namespace());
        match suffix {
            None => format!(
                "To start it: kubectl scale statefulset {name} -n {namespace} --replicas={replicas}. Further replicas get empty volumes, unless their claims exist."
            ),
            Some(suffix) => format!(
                "A StatefulSet {name}-{suffix} with the same templates uses these claims. With more than {replicas} replicas, the others get empty volumes."
            ),
        }
    }

    /// Refuses a StatefulSet that is not scaled to zero, or that another object with its name has
    /// replaced, now.
    pub async fn refuse_pods(&self, cluster: &Cluster, pods: &[DynamicObject]) -> Result<()> {
        let name = self.object.name();
        let now = cluster.find_one(&object::STATEFUL_SET, self.namespace(), name);
        let now = now.await?;
        let uid = |object: &DynamicObject| object.metadata.uid.clone();
        let Some(now) = now.filter(|now| uid(now) == uid(&self.object)) else {
            return Err(Failure::failed(format!(
                "{} was deleted or replaced since it was read; run the command again",
                self.title()
            )));
        };
        let replicas = now.number("/spec/replicas");
        if replicas != 0 {
            return Err(Failure::failed(format!(
                "{} has {replicas} replicas: scale it down first: kubectl scale statefulset {name} -n {} --replicas=0",
                self.title(),
                self.namespace()
            )));
        }
        let owns = |pod: &&DynamicObject| {
            let mut owners = pod.metadata.owner_references.iter().flatten();
            owners.any(|owner| Some(&owner.uid) == self.object.metadata.uid.as_ref())
        };
        match pods.iter().find(owns) {
            None => Ok(()),
            Some(pod) => Err(Failure::failed(format!(
                "pod {} of {} still exists; run the command again when it is gone",
                pod.name(),
                self.title()
            ))),
        }
    }
}

/// Refuses claims that a pod waits for: it would start while others are not restored yet.
pub fn refuse_users(pods: &[DynamicObject], claims: &[&str]) -> Result<()> {
    match user_of(pods, claims) {
        None => Ok(()),
        Some((pod, claim)) => Err(Failure::failed(format!(
            "pod {pod} waits for the claim {claim}: delete the pod, or scale its controller to 0, and run the command again"
        ))),
    }
}

/// A pod that uses one of these claims, and which.
pub fn user_of(pods: &[DynamicObject], claims: &[&str]) -> Option<(String, String)> {
    for pod in pods.iter().filter(|pod| !has_ended(pod)) {
        for (claim, _) in claims_of(pod) {
            if claims.contains(&claim.as_str()) {
                return Some((format!("{}/{}", pod.namespace(), pod.name()), claim));
            }
        }
    }
    None
}
