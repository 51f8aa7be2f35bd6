//! Events and annotations about cuts, on the objects that the cuts were requested for.

use std::collections::HashMap;

use crate::cut::CutStats;
use crate::error::{Error, chain};
use crate::operation::VerifiedCut;
use crate::router::Router;
use crate::router::cluster::{Content, Note, ObjectRef};

/// Key that csi-snapshotter adds to the parameters with `--extra-create-metadata`: its snapshot
/// names contain a UUID, and are never used for another volume.
pub(in crate::router) const SNAPSHOT_CONTENT: &str =
    "csi.storage.k8s.io/volumesnapshotcontent/name";
/// Key in which csi-snapshotter passes the object that will represent a group.
const GROUP_CONTENT: &str = "csi.storage.k8s.io/volumegroupsnapshotcontent/name";

/// A kind of object, by the prefix of its metadata keys.
type Object = (&'static str, fn(String) -> ObjectRef);

/// Keys of parameters in which csi-snapshotter passes names of objects (`--extra-create-metadata`).
const OBJECTS: [Object; 2] = [
    ("csi.storage.k8s.io/volumesnapshot", ObjectRef::Snapshot),
    ("csi.storage.k8s.io/volumegroupsnapshot", ObjectRef::Group),
];

impl Router {
    /// Records an event on the object that a cut was requested for: the level that the cut reached and
    /// why it reached no more, or the error.
    pub(in crate::router) fn record_cut_event(
        &self,
        given: &HashMap<String, String>,
        cut: std::result::Result<Option<&VerifiedCut>, &Error>,
    ) {
        let Some(about) = about(given) else { return };
        match cut {
            // The caller repeats the call, which then records the event.
            Ok(None) | Err(Error::Pending { .. }) => {}
            Ok(Some(kept)) => {
                let message = match kept.reason.as_str() {
                    "" => format!("cut at level {}", kept.level),
                    reason => format!("cut at level {}: {reason}", kept.level),
                };
                self.cluster.record_event(&about, false, "Cut", message);
            }
            Err(error) => self
                .cluster
                .record_event(&about, true, "CutFailed", chain(error)),
        }
    }

    /// Records at the object of a cut how long it stopped writers, if it did.
    pub(super) fn record_durations(&self, given: &HashMap<String, String>, stats: &CutStats) {
        let (frozen, held) = (stats.freeze, stats.held);
        let content = content(given).filter(|_| frozen.is_some() || held.is_some());
        if let Some(content) = content {
            self.cluster.note(content, Note::Durations { frozen, held });
        }
    }
}

/// The object that will represent the result, which csi-snapshotter names in the parameters.
pub(in crate::router) fn content(given: &HashMap<String, String>) -> Option<Content> {
    let group = given.get(GROUP_CONTENT).cloned().map(Content::Group);
    group.or_else(|| given.get(SNAPSHOT_CONTENT).cloned().map(Content::Snapshot))
}

/// The object that the parameters of a request name.
pub(in crate::router) fn about(given: &HashMap<String, String>) -> Option<ObjectRef> {
    OBJECTS.into_iter().rev().find_map(|(prefix, about)| {
        let namespace = given.get(&format!("{prefix}/namespace"))?;
        let name = given.get(&format!("{prefix}/name"))?;
        Some(about(format!("{namespace}/{name}")))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_object_of_a_cut_is_read_from_what_the_snapshotter_adds() {
        let given = |pairs: &[(&str, &str)]| {
            let pairs = pairs.iter();
            let pairs =
                pairs.map(|(key, value)| (format!("csi.storage.k8s.io/{key}"), value.to_string()));
            about(&pairs.collect())
        };
        assert_eq!(
            given(&[
                ("volumesnapshot/name", "s"),
                ("volumesnapshot/namespace", "shop")
            ]),
            Some(ObjectRef::Snapshot("shop/s".into()))
        );
        assert_eq!(
            given(&[
                ("volumegroupsnapshot/name", "g"),
                ("volumegroupsnapshot/namespace", "shop")
            ]),
            Some(ObjectRef::Group("shop/g".into()))
        );
        assert_eq!(given(&[("volumesnapshot/name", "s")]), None);
    }
}
