//! Volumes whose file systems have been frozen for longer than a cut takes, as the status of a Pool lists
//! them.

use std::collections::BTreeMap;

use k8s_openapi::jiff::Timestamp;
use kube::api::DynamicObject;
use serde::Serialize;

use crate::cluster::object::Fields;
use crate::listing::{Column, column};
use crate::text::age;

/// The columns of a table.
pub const COLUMNS: [Column; 7] = [
    column("CLAIM"),
    column("NODE"),
    column("POOL"),
    column("FROZEN FOR"),
    column("UNTIL"),
    column("STATE"),
    column("SEEN"),
];

/// A volume whose file system is frozen, or was at the last report of its node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Frozen {
    /// The ID of the volume.
    pub id: String,
    /// "NAMESPACE/NAME"; empty if it is not known.
    pub claim: String,
    pub node: String,
    pub pool: String,
    pub since: Option<Timestamp>,
    /// When the freeze guard thaws it at the latest.
    pub until: Option<Timestamp>,
    /// `held` by a driver or a freeze guard, or `orphaned`: the next sweep thaws it.
    pub state: &'static str,
    /// When that was reported.
    pub seen: Option<Timestamp>,
}

/// What the status of a pool lists.
pub fn of(pool: &DynamicObject) -> Vec<Frozen> {
    let each = pool.list("/status/frozen").iter();
    let each = each.map(|one| {
        let text = |field: &str| one[field].as_str().unwrap_or_default();
        Frozen {
            id: text("id").into(),
            claim: String::new(),
            node: pool.text("/status/node").into(),
            pool: pool.text("/status/name").into(),
            since: text("since").parse().ok(),
            until: text("until").parse().ok(),
            state: match one["held"].as_bool() {
                Some(true) => "held",
                _ => "orphaned",
            },
            seen: pool.time("/status/lastSeen"),
        }
    });
    each.collect()
}

/// The oldest first, with their claims, which are known by the IDs of their volumes.
pub fn named(mut all: Vec<Frozen>, claims: &BTreeMap<String, String>) -> Vec<Frozen> {
    for one in &mut all {
        one.claim = claims.get(&one.id).cloned().unwrap_or_default();
    }
    all.sort_by(|a, b| (a.since, &a.id).cmp(&(b.since, &b.id)));
    all
}

impl Frozen {
    /// The cells of a line of [`COLUMNS`].
    pub fn cells(&self, now: Timestamp) -> Vec<String> {
        let claim = match self.claim.as_str() {
            "" => format!("({})", self.id),
            claim => claim.to_string(),
        };
        let seen = match age(self.seen, now).as_str() {
            "" => String::new(),
            age => format!("{age} ago"),
        };
        vec![
            claim,
            self.node.clone(),
            self.pool.clone(),
            age(self.since, now),
            self.until
                .map(|until| until.to_string())
                .unwrap_or_default(),
            self.state.into(),
            seen,
        ]
    }
}
