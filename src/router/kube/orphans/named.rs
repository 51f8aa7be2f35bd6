//! Asks the API server, immediately before an orphan is deleted, whether any object names it, because
//! what is in memory may be some seconds old.

use ::kube::api::{DynamicObject, GroupVersionKind};
use ::kube::{Client, ResourceExt};
use serde_json::Value;
use uuid::Uuid;

use super::unowned_snapshots::mentions;
use super::{Orphan, OrphanKind, Unlisted, each};
use crate::error::{Error, Result};
use crate::model::VolumeId;
use crate::router::kube::custom_resource::{GROUP, VERSION};
use crate::router::kube::moves::snapshots_of;
use crate::router::kube::snapshot_contents;

/// What names an orphan now, or may be about to. An error if that cannot be determined.
pub(super) async fn named(client: &Client, orphan: &Orphan) -> Result<Option<String>> {
    let mut kinds = vec![
        GroupVersionKind::gvk("", "v1", "PersistentVolume"),
        // While a volume is adopted or moved, its PersistentVolume is in an annotation.
        GroupVersionKind::gvk(GROUP, VERSION, "Pool"),
        GroupVersionKind::gvk(GROUP, VERSION, "VolumeMove"),
        snapshot_contents::snapshot_contents(),
    ];
    kinds.extend(snapshot_contents::group_contents());
    let mut found = None;
    for kind in kinds {
        let looked = each(client, &kind, |object| {
            if found.is_none() && names(&kind.kind, object, orphan) {
                found = Some(format!("{} {}", kind.kind, object.name_any()));
            }
        });
        match looked.await {
            Ok(()) => {}
            // A cluster may have no snapshots, groups or moves, and has one version of groups.
            Err(Unlisted::Unknown) if kind.kind != "PersistentVolume" && kind.kind != "Pool" => {}
            Err(Unlisted::Failed(error)) => return Err(error),
            Err(Unlisted::Unknown | Unlisted::Forbidden) => {
                let why = "the API server does not list them, so it is unknown whether one names the orphan";
                return Err(Error::unreachable(
                    format!("the list of {}s", kind.kind),
                    why,
                ));
            }
        }
    }
    Ok(found)
}

/// Whether an object names an orphan, or may be about to.
fn names(kind: &str, object: &DynamicObject, orphan: &Orphan) -> bool {
    let mut annotations = object.annotations().values();
    let in_annotations = annotations.any(|text| text.contains(&orphan.id));
    match kind {
        // Its spec and status list orphans.
        "Pool" => in_annotations,
        "VolumeSnapshotContent" | "VolumeGroupSnapshotContent" => {
            // An existing snapshot does not keep its volume. One that is about to be taken does, and it
            // may have been taken under a name that repeats it.
            let status = object.data.pointer("/status");
            let handles = ["/snapshotHandle", "/volumeGroupSnapshotHandle"];
            let has_handle = status
                .is_some_and(|status| handles.iter().any(|path| status.pointer(path).is_some()));
            let volume = match orphan.what {
                OrphanKind::Volume => &orphan.id,
                OrphanKind::Snapshot => &orphan.source,
            };
            let is_named =
                orphan.what == OrphanKind::Snapshot && mentions(&object.data, &orphan.id);
            is_named || (!has_handle && mentions(&object.data, volume))
        }
        "VolumeMove" => {
            mentions(&object.data, &orphan.id) || ids_of_move(object).contains(&orphan.id)
        }
        _ => mentions(&object.data, &orphan.id) || in_annotations,
    }
}

/// IDs of the snapshots that a move may have, which follow from its UID.
fn ids_of_move(object: &DynamicObject) -> Vec<String> {
    let source = object.data.pointer("/status/from/handle");
    let source = source.and_then(Value::as_str);
    let source = source.and_then(|id| id.parse::<VolumeId>().ok());
    let move_uid = object.uid().and_then(|uid| uid.parse::<Uuid>().ok());
    let Some((source, move_uid)) = source.zip(move_uid) else {
        return Vec::new();
    };
    let snapshots = snapshots_of(source, move_uid).into_values();
    snapshots.map(|id| id.to_string()).collect()
}

#[cfg(test)]
mod tests;
