//! The status of an object in a namespace is not trusted: users with rights in that namespace may be able
//! to write it. What a step would delete or change is checked here.

use uuid::Uuid;

use super::object::Place;
use crate::error::{Error, Result};
use crate::model::id::NameKind;
use crate::model::{PoolId, VolumeId};
use crate::operation::snapshot_name;
use crate::router::kube::adopt::manifest::Manifest;

pub(super) fn parsed(place: &Place) -> Result<VolumeId> {
    let id = place.handle.parse();
    id.map_err(|_| Error::invalid("status", "has no valid volume ID"))
}

pub(super) fn parsed_pool(place: &Place) -> Result<PoolId> {
    let id = place.pool.parse();
    id.map_err(|_| Error::invalid("status", "has no valid pool ID"))
}

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

/// The claim of a PersistentVolume, if it is in another namespace.
pub(super) fn foreign_claim_of(volume: &Manifest, namespace: &str) -> Option<String> {
    let claim = volume.bound()?.claim;
    let is_own = (claim.split_once('/')).is_some_and(|(its, _)| its == namespace);
    (!is_own).then_some(claim)
}
