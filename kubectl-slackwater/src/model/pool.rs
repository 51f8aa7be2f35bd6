//! The pools of the driver.

use std::collections::BTreeMap;

use k8s_openapi::jiff::Timestamp;
use kube::api::{DynamicObject, ListParams};
use serde::Serialize;

use super::frozen::{self, Frozen};
use super::growth::{Growth, Images};
use super::running_copy::{self, RunningCopy};
use crate::cluster::object::{self, Fields};
use crate::cluster::{Cluster, Scope};
use crate::failure::Result;
use crate::text::{escaped, percent};

/// The label of Pool objects with the driver's name.
const DRIVER_LABEL: &str = "slackwater.dev/driver";

/// A Pool object.
#[derive(Clone, Debug, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Pool {
    pub id: String,
    pub node: String,
    pub name: String,
    pub kind: String,
    pub health: String,
    pub message: String,
    pub total_bytes: i64,
    pub available_bytes: i64,
    pub promised_bytes: i64,
    pub volumes: i64,
    pub snapshots: i64,
    pub file_system: String,
    pub mount: String,
    pub home: String,
    pub lost: bool,
    pub lost_reason: String,
    pub evacuate: bool,
    pub last_seen: Option<Timestamp>,
    /// When it is full, if it fills as it did in the last day.
    pub full_at: Option<Timestamp>,
    /// What its images occupy; `None` if that is not known.
    pub images: Option<Images>,
    /// The volumes that grow it most, without the names of claims; `None` if that is not known.
    pub growth: Option<Growth>,
    /// Conditions that name a problem, as "type: message".
    pub problems: Vec<String>,
    /// What is frozen for long, without the names of claims.
    pub frozen: Vec<Frozen>,
    /// The copies that run in it.
    #[serde(skip)]
    pub copies: Vec<RunningCopy>,
    /// What is left in it while it is emptied; `None` if that is not known.
    #[serde(skip)]
    pub left: Option<i64>,
    /// The same as a sentence, and since when there is something left.
    #[serde(skip)]
    pub evacuation: String,
    #[serde(skip)]
    pub evacuation_since: Option<Timestamp>,
    #[serde(skip)]
    pub created: Option<Timestamp>,
}

impl Pool {
    /// From its object.
    pub fn of(object: &DynamicObject) -> Pool {
        let text = |pointer| object.text(pointer).to_string();
        let conditions = object.conditions().into_iter();
        let is_problem = |[kind, status, reason, _]: &[&str; 4]| match *kind {
            // What the pool's definition allows is no problem.
            "OwnMount" => *status == "False" && *reason != "AnyMount",
            // They exist only while what was requested waits.
            "Adopted" | "Forgotten" => *status == "False",
            _ => false,
        };
        let problems = conditions.filter(is_problem);
        let mut conditions = object.list("/status/conditions").iter();
        let evacuated = conditions.find(|it| it["type"] == "Evacuated");
        let evacuated = |field: &str| evacuated.and_then(|it| it[field].as_str());
        Pool {
            id: object.name().into(),
            node: text("/status/node"),
            name: text("/status/name"),
            kind: text("/status/kind"),
            health: text("/status/health"),
            message: text("/status/message"),
            total_bytes: object.number("/status/totalBytes"),
            available_bytes: object.number("/status/availableBytes"),
            promised_bytes: object.number("/status/promisedBytes"),
            volumes: object.number("/status/volumes"),
            snapshots: object.number("/status/snapshots"),
            file_system: text("/status/fileSystem"),
            mount: text("/status/mount"),
            home: text("/status/home"),
            lost: object.is_true("/spec/lost"),
            lost_reason: text("/spec/lostReason"),
            evacuate: object.is_true("/spec/evacuate"),
            last_seen: object.time("/status/lastSeen"),
            full_at: object.time("/status/fullAt"),
            problems: problems
                .map(|[kind, _, _, message]| format!("{kind}: {message}"))
                .collect(),
            frozen: frozen::of(object),
            copies: running_copy::of(object),
            images: Images::of(object),
            growth: Growth::of(object),
            left: object.at("/status/evacuation/left").as_i64(),
            evacuation: evacuated("message").unwrap_or_default().into(),
            evacuation_since: evacuated("lastTransitionTime").and_then(|at| at.parse().ok()),
            created: object.created(),
        }
    }

    /// NODE/NAME, as people name it; the ID while no node has it.
    pub fn title(&self) -> String {
        match self.node.is_empty() {
            true => self.id.clone(),
            false => escaped(&format!("{}/{}", self.node, self.name)),
        }
    }

    /// How full it is.
    pub fn used_percent(&self) -> Option<i64> {
        percent(self.total_bytes - self.available_bytes, self.total_bytes)
    }
}

/// The parameters that select the pools of the driver.
pub fn pools_of(driver: &str, selector: Option<&str>) -> ListParams {
    let own = format!("{DRIVER_LABEL}={driver}");
    ListParams::default().labels(&match selector {
        Some(more) => format!("{own},{more}"),
        None => own,
    })
}

/// All pools, by their ID. `None` if the user may not list them.
pub async fn pools(cluster: &Cluster) -> Result<Option<BTreeMap<String, Pool>>> {
    let params = pools_of(&cluster.driver, None);
    let found = cluster.find(&object::POOL, &Scope::All, &params).await?;
    let by_id = |object: &DynamicObject| (object.name().to_string(), Pool::of(object));
    Ok(found.map(|objects| objects.iter().map(by_id).collect()))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const POOL: &str = "11111111-2222-4333-8444-000000000001";

    #[test]
    fn problems_of_a_pool_are_conditions_that_wait_for_a_person() {
        let condition = |kind: &str, status: &str, reason: &str| {
            json!({"type": kind, "status": status, "reason": reason,
                "message": format!("why {reason}")})
        };
        let pool = Pool::of(
            &serde_json::from_value(json!({
                "metadata": {"name": POOL},
                "status": {"conditions": [
                    condition("OwnMount", "False", "AnyMount"),
                    condition("Evacuated", "False", "Evacuating"),
                    condition("Adopted", "False", "NotPresent"),
                    condition("Forgotten", "False", "Refused"),
                    condition("Forgotten", "True", "Done"),
                ]},
            }))
            .unwrap(),
        );
        let expected = ["Adopted: why NotPresent", "Forgotten: why Refused"];
        assert_eq!(pool.problems, expected);
        let pool = Pool::of(
            &serde_json::from_value(json!({
                "metadata": {"name": POOL},
                "status": {"conditions": [condition("OwnMount", "False", "NotMounted")]},
            }))
            .unwrap(),
        );
        assert_eq!(pool.problems, ["OwnMount: why NotMounted"]);
    }
}
