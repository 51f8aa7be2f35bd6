//! The last look before an orphan is deleted: the API server is asked whether anything names it, because
//! what is in memory may be some seconds old.

use ::kube::api::{DynamicObject, GroupVersionKind};
use ::kube::{Client, ResourceExt};
use serde_json::Value;

use super::{Orphan, Unlisted, What, each};
use crate::error::{Error, Result};
use crate::router::kube::note;
use crate::router::kube::pool::{GROUP, VERSION};

/// What names an orphan now, or may be about to. An error if that cannot be determined.
pub(super) async fn named(client: &Client, orphan: &Orphan) -> Result<Option<String>> {
    let mut kinds = vec![
        GroupVersionKind::gvk("", "v1", "PersistentVolume"),
        // While a volume is adopted or moved, its PersistentVolume is in an annotation.
        GroupVersionKind::gvk(GROUP, VERSION, "Pool"),
        GroupVersionKind::gvk(GROUP, VERSION, "VolumeMove"),
        note::snapshot_contents(),
    ];
    kinds.extend(note::group_contents());
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
    let annotations = object.annotations().values();
    let in_annotations = || {
        annotations
            .into_iter()
            .any(|text| text.contains(&orphan.id))
    };
    match kind {
        // Its spec and status list orphans.
        "Pool" => in_annotations(),
        // An existing snapshot of a volume does not keep the volume, but one that is about to be taken does.
        "VolumeSnapshotContent" | "VolumeGroupSnapshotContent" if orphan.what == What::Volume => {
            let has_handle = object.data.pointer("/status").is_some_and(|status| {
                ["/snapshotHandle", "/volumeGroupSnapshotHandle"]
                    .iter()
                    .any(|path| status.pointer(path).is_some())
            });
            !has_handle && mentions(&object.data, &orphan.id)
        }
        _ => mentions(&object.data, &orphan.id) || in_annotations(),
    }
}

/// Whether a text is anywhere in a value.
fn mentions(value: &Value, text: &str) -> bool {
    match value {
        Value::String(value) => value.contains(text),
        Value::Array(values) => values.iter().any(|value| mentions(value, text)),
        Value::Object(fields) => fields.values().any(|value| mentions(value, text)),
        Value::Null | Value::Bool(_) | Value::Number(_) => false,
    }
}

#[cfg(test)]
mod tests;
