//! What is left in pools that are being emptied: kept in memory by the controller that empties them, and
//! shown in the status of the Pool objects.

use std::collections::BTreeMap;
use std::sync::PoisonError;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};

use crate::model::PoolId;
use crate::router::kube::InCluster;
use crate::router::kube::pools::object::{Evacuation, Pool};

/// IDs that the status lists of each kind.
pub(super) const MAX_LISTED: usize = 50;
/// The condition of a pool in which nothing is left.
pub(in crate::router::kube) const EVACUATED: &str = "Evacuated";

/// What is left in a pool, or why that is not known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Checked {
    /// The generation of the Pool object. What was found before it was changed proves nothing.
    pub(in crate::router::kube) generation: Option<i64>,
    pub(in crate::router::kube) found: Result<Evacuation, String>,
}

/// What the status of a pool shows; `None` if it is not to be emptied.
pub(in crate::router::kube) fn shown(
    pool: &Pool,
    checked: Option<&Checked>,
    now: Time,
) -> Option<(Option<Evacuation>, Condition)> {
    if !pool.spec.evacuate {
        return None;
    }
    let checked = checked.filter(|checked| checked.generation == pool.metadata.generation);
    let (status, reason, message) = match checked.map(|checked| &checked.found) {
        Some(Ok(found)) if found.left == 0 => ("True", "Empty", String::new()),
        Some(Ok(found)) => ("False", "NotEmpty", summary(found)),
        Some(Err(why)) => ("False", "Unknown", why.clone()),
        None => ("False", "Unknown", "it was not examined yet".into()),
    };
    let condition = Condition {
        last_transition_time: now,
        message,
        observed_generation: None,
        reason: reason.into(),
        status: status.into(),
        type_: EVACUATED.into(),
    };
    let found = checked.and_then(|checked| checked.found.clone().ok());
    Some((found, condition))
}

/// What is left, as a sentence.
pub(super) fn summary(found: &Evacuation) -> String {
    let kinds = [
        (&found.claims, "volumes of claims"),
        (&found.unclaimed, "volumes without a claim"),
        (&found.orphans, "volumes that no object names"),
        (&found.sources, "volumes that are being moved"),
        (&found.snapshots, "snapshots"),
    ];
    let named = kinds.iter().filter(|(list, _)| !list.is_empty());
    let words = named.map(|(list, kind)| match list.len() {
        MAX_LISTED => format!("{MAX_LISTED} {kind} or more"),
        count => format!("{count} {kind}"),
    });
    let words: Vec<_> = words.collect();
    format!("in it are {}", words.join(", "))
}

impl InCluster {
    /// What is left in pools that are being emptied.
    pub(in crate::router::kube) fn evacuations(&self) -> BTreeMap<PoolId, Checked> {
        let all = self.evacuations.lock();
        all.unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(super) fn set_evacuations(&self, now: BTreeMap<PoolId, Checked>) {
        let all = self.evacuations.lock();
        *all.unwrap_or_else(PoisonError::into_inner) = now;
    }
}
