//! The status of an object in a namespace is not trusted: users with rights in that namespace may be able
//! to write it. What a step would delete or change is checked here.

use uuid::Uuid;

use super::decide::Observed;
use crate::error::{Error, Result};
use crate::model::id::NameKind;
use crate::model::{PoolId, VolumeId};
use crate::operation::snapshot_name;
use crate::router::kube::InCluster;
use crate::router::kube::adopt::manifest::Manifest;

/// The volume that a move creates in a pool.
pub(super) fn copy_of(pool: PoolId, uid: Uuid) -> VolumeId {
    VolumeId::of_name(pool, NameKind::Volume, &snapshot_name(uid, None))
}

/// Fails for any other volume than the copy, which a move that is aborted deletes.
pub(super) fn check_copy(copy: VolumeId, pool: PoolId, uid: Uuid) -> Result<()> {
    match copy == copy_of(pool, uid) {
        true => Ok(()),
        false => Err(Error::refused(
            format!("volume {copy}"),
            "it is not the copy of this move",
        )),
    }
}

/// The PersistentVolume of a claim in another namespace is neither read nor changed.
pub(super) fn is_own(volume: &Manifest, namespace: &str) -> bool {
    let bound = volume.bound();
    let its = bound.as_ref().and_then(|bound| bound.claim.split_once('/'));
    its.is_none_or(|(its, _)| its == namespace)
}

/// Fails if the source is the volume of a claim in another namespace. The fence of this move proves that
/// the volume was its source, also if its claim has changed since.
pub(super) fn check_source(
    cluster: &InCluster,
    seen: &Observed,
    (handle, namespace): (&str, &str),
    uid: Uuid,
) -> Result<()> {
    let is_fenced = (seen.source.as_ref()).is_ok_and(|source| source.fenced == Some(uid));
    let foreign = cluster.foreign_claim(handle, namespace);
    match foreign.filter(|_| !is_fenced) {
        None => Ok(()),
        Some(claim) => Err(Error::refused(
            format!("volume {handle}"),
            format!("it is the volume of claim {claim}"),
        )),
    }
}
