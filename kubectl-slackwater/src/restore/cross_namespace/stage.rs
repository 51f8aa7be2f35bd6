//! How far the copies are that a restore creates in another namespace, from what exists.

use kube::api::{DynamicObject, ListParams};

use crate::cluster::object::{self, Fields};
use crate::cluster::{Cluster, Scope};
use crate::failure::{Failure, Result};
use crate::restore::plan::{BECOMES, Copy, is_copy};
use crate::transfer::execute::{TRANSFERRED_FROM, record_of};
use crate::transfer::step::NamespacedName;

/// A claim that is there to be transferred, and has a volume.
pub struct Bound {
    pub uid: String,
    /// The name of the PersistentVolume.
    pub volume: String,
}

/// How far a copy is.
pub enum Stage {
    /// No claim exists.
    Absent,
    /// The claim that is there to be transferred has no volume yet.
    Unbound(Box<DynamicObject>),
    /// It has a PersistentVolume.
    Bound(Bound),
    /// Its transfer has begun.
    Transferring(String),
    /// The new claim is bound to this PersistentVolume.
    Transferred(String),
}

/// The claim that is there to be transferred.
pub fn temporary_claim(cluster: &Cluster, copy: &Copy) -> NamespacedName {
    NamespacedName {
        namespace: cluster.namespace.clone(),
        name: copy.claim.clone(),
    }
}

/// The claim that it becomes.
pub fn target_claim(copy: &Copy) -> NamespacedName {
    let own = || NamespacedName {
        namespace: copy.snapshot.namespace.clone(),
        name: copy.claim.clone(),
    };
    copy.target.clone().unwrap_or_else(own)
}

/// Whether nothing is left to do.
pub fn has_ended(stages: &[Stage]) -> bool {
    let is_there = |stage: &Stage| matches!(stage, Stage::Transferred(_));
    stages.iter().all(is_there)
}

/// Reads how far each copy is. The former claims are read first, then the PersistentVolumes and then
/// the new claims: a transfer that goes on in between is found in one of them.
pub async fn read_stages(cluster: &Cluster, copies: &[Copy]) -> Result<Vec<Stage>> {
    let mut former = Vec::new();
    for copy in copies {
        let claim = cluster.find_one(&object::CLAIM, &cluster.namespace, &copy.claim);
        former.push(claim.await?);
    }
    let all = ListParams::default();
    let volumes = cluster.get_all(&object::VOLUME, &Scope::All, &all);
    let volumes = volumes.await?;
    let mut stages = Vec::new();
    for (copy, claim) in copies.iter().zip(former) {
        stages.push(stage(cluster, copy, claim, &volumes).await?);
    }
    Ok(stages)
}

/// How far one copy is.
async fn stage(
    cluster: &Cluster,
    copy: &Copy,
    former: Option<DynamicObject>,
    volumes: &[DynamicObject],
) -> Result<Stage> {
    let (from, to) = (temporary_claim(cluster, copy), target_claim(copy));
    for volume in volumes {
        if record_of(volume)?.is_some_and(|record| record.from == from) {
            return Ok(Stage::Transferring(volume.name().into()));
        }
    }
    let new = cluster.find_one(&object::CLAIM, &to.namespace, &to.name);
    let new = new.await?;
    let is_own = |new: &DynamicObject| new.annotation(TRANSFERRED_FROM) == from.to_string();
    if let Some(new) = &new
        && (!is_own(new) || former.is_some())
    {
        return Err(Failure::failed(format!(
            "claim {to} exists: give --suffix to create claims with other names"
        )));
    }
    let Some(former) = former else {
        return Ok(match new {
            Some(new) => Stage::Transferred(new.text("/spec/volumeName").into()),
            None => Stage::Absent,
        });
    };
    let refuse = |why: &str| Err(Failure::failed(format!("claim {from} {why}")));
    if former.is_being_deleted() {
        return refuse("is being deleted by another user");
    }
    if !is_copy(&former, &copy.snapshot) {
        return refuse("exists, and was not created by this command: delete it first");
    }
    if former.annotation(BECOMES) != to.to_string() {
        return refuse(&format!(
            "was created by another restore of this snapshot, and becomes {}: complete that one first, or delete the claim",
            former.annotation(BECOMES)
        ));
    }
    match former.text("/status/phase") {
        "Lost" => refuse("has lost its volume"),
        "Bound" => Ok(Stage::Bound(Bound {
            uid: former.uid().to_string(),
            volume: former.text("/spec/volumeName").into(),
        })),
        _ => Ok(Stage::Unbound(Box::new(former))),
    }
}
