//! The copies that run in a pool, as its status lists them.

use k8s_openapi::jiff::Timestamp;
use kube::api::DynamicObject;

use crate::cluster::object::Fields;

/// A copy that runs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RunningCopy {
    pub kind: String,
    /// The ID of the volume or snapshot that is filled, or of the snapshot that is exported.
    pub id: String,
    /// "NAMESPACE/NAME", as its agent has reported it; empty if it has not.
    pub claim: String,
    /// The node that sends the content, if that is another one.
    pub source_node: String,
    pub since: Option<Timestamp>,
    pub done: i64,
    /// `None` if it is not known.
    pub total: Option<i64>,
    pub before: i64,
    pub reported: Option<Timestamp>,
}

/// What the status of a pool lists.
pub fn of(pool: &DynamicObject) -> Vec<RunningCopy> {
    let each = pool.list("/status/copies/running").iter();
    let each = each.filter(|one| one["id"].is_string()).map(|one| {
        let text = |field: &str| one[field].as_str().unwrap_or_default();
        let number = |field: &str| one[field].as_i64().unwrap_or_default().max(0);
        RunningCopy {
            kind: text("kind").into(),
            id: text("id").into(),
            claim: text("claim").into(),
            source_node: text("sourceNode").into(),
            since: text("since").parse().ok(),
            done: number("bytesDone"),
            total: one["bytesTotal"].as_i64().filter(|total| *total > 0),
            before: number("bytesBefore"),
            reported: pool.time("/status/copies/reportedAt"),
        }
    });
    each.collect()
}

impl RunningCopy {
    /// What a copy does, with the claim if that is known.
    pub fn what(&self, claim: &str) -> String {
        let id = &self.id;
        let of_snapshot = matches!(self.kind.as_str(), "Export" | "Snapshot");
        let object = match claim {
            "" if of_snapshot => format!("snapshot {id}"),
            "" => format!("volume {id}"),
            claim => format!("claim {claim}"),
        };
        let words = match (self.kind.as_str(), claim.is_empty()) {
            ("Restore", _) => "restore of",
            ("Clone", _) => "clone for",
            ("Move", _) => "move of",
            ("Revert", _) => "revert of",
            ("Import", _) => "import of",
            ("Export", false) => "export of a snapshot of",
            ("Export", true) => "export of",
            ("Snapshot", false) => "full copy for a snapshot of",
            ("Snapshot", true) => "full copy for",
            ("Write", _) => "allocation of all blocks of",
            ("Growth", _) => "growth of",
            _ => "copy for",
        };
        match self.source_node.as_str() {
            "" => format!("{words} {object}"),
            node => format!("{words} {object} from node {node}"),
        }
    }
}
