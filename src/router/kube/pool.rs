//! The Pool objects: `kubectl get pools` is the picture of the cluster.
//!
//! One object a pool, named by the pool's UUID. `spec` is people's: it's where a pool is marked as
//! lost. `status` is written by the router that leads, from what agents report; when an agent is
//! gone it stays as it was last seen. The CRD is deploy/chart/crds/pools.yaml.

use std::borrow::Cow;

use ::kube::api::{ObjectMeta, TypeMeta};
use ::kube::core::ClusterResourceScope;
use ::kube::{Resource, ResourceExt};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use serde::{Deserialize, Serialize};

use crate::model::PoolId;
use crate::router::cluster::KnownPool;

/// API group of the object.
pub const GROUP: &str = "slackwater.dev";
/// Its version.
pub const VERSION: &str = "v1alpha1";
/// Which driver a pool is of: several may share a cluster.
pub const DRIVER_LABEL: &str = "slackwater.dev/driver";

/// A pool.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Pool {
    /// Absent in lists.
    #[serde(flatten, default)]
    pub types: Option<TypeMeta>,
    /// Named by its UUID.
    pub metadata: ObjectMeta,
    /// What people say about it.
    #[serde(default)]
    pub spec: PoolSpec,
    /// What its agent says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub status: Option<PoolStatus>,
}

/// What people say about a pool.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PoolSpec {
    /// It never comes back: its volumes count as deleted, and if it returns it isn't used.
    #[serde(default, skip_serializing_if = "is_false")]
    pub lost: bool,
    /// Who said so, and why.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lost_reason: Option<String>,
    /// The node that has it from now on. The router takes this away once it's so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
}

fn is_false(value: &bool) -> bool {
    !value
}

/// What the agent of a pool has said last. What is `None` is written as null, which takes it away.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct PoolStatus {
    /// The node that showed it last.
    pub node: String,
    /// Its topology value.
    pub home: String,
    /// Its name in its agent's configuration.
    pub name: String,
    /// "file", "lvm" or "memory".
    pub kind: String,
    /// Such as "file:/var/lib/slackwater/pool".
    pub place: String,
    /// File system of its images.
    pub file_system: String,
    /// What is mounted at its folder or around it: "/dev/sdb1", or "/dev/sda2[/srv/pool]" for a part
    /// of a file system.
    pub mount: String,
    /// Whether its images can share blocks, if that is known.
    pub shares_blocks: Option<bool>,
    /// Bytes, for people.
    pub capacity: String,
    /// Bytes, for people.
    pub available: String,
    /// Bytes.
    pub total_bytes: i64,
    /// Bytes that are free now.
    pub available_bytes: i64,
    /// Bytes that volumes may grow to.
    pub promised_bytes: i64,
    /// Volumes on it.
    pub volumes: i64,
    /// Snapshots on it.
    pub snapshots: i64,
    /// In one word.
    pub health: Health,
    /// Why it isn't healthy, and what to do; empty if it is.
    pub message: String,
    /// Since when `health` has been so.
    pub since: Option<Time>,
    /// Release of the agent.
    pub agent_version: String,
    /// When its agent was heard of last; to the minute while it's well.
    pub last_seen: Option<Time>,
    /// Since when its node's object has been gone; absent if it's there.
    pub node_gone_since: Option<Time>,
    /// What else is so of it.
    pub conditions: Vec<Condition>,
}

/// How a pool is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Health {
    /// Nothing is known yet.
    #[default]
    Unknown,
    /// It's served.
    Healthy,
    /// It's served, and something needs to be mended.
    Degraded,
    /// Its agent doesn't serve it.
    NotServed,
    /// Its agent doesn't answer, or doesn't show it.
    Unreachable,
    /// Two agents show it, and neither is known to have had it before: no call goes to it.
    Conflict,
    /// Its node's record forgets it, for good.
    Forgotten,
    /// It's marked as lost.
    Lost,
    /// It's marked as lost, and an agent shows it: nothing is done with it.
    Quarantined,
    /// A word of a later release.
    #[serde(other, skip_serializing)]
    Other,
}

impl Health {
    /// All that this release writes.
    #[cfg(test)]
    pub(super) const ALL: [Health; 9] = [
        Health::Unknown,
        Health::Healthy,
        Health::Degraded,
        Health::NotServed,
        Health::Unreachable,
        Health::Conflict,
        Health::Forgotten,
        Health::Lost,
        Health::Quarantined,
    ];

    /// As the API has it.
    pub fn word(self) -> &'static str {
        match self {
            Health::Unknown | Health::Other => "Unknown",
            Health::Healthy => "Healthy",
            Health::Degraded => "Degraded",
            Health::NotServed => "NotServed",
            Health::Unreachable => "Unreachable",
            Health::Conflict => "Conflict",
            Health::Forgotten => "Forgotten",
            Health::Lost => "Lost",
            Health::Quarantined => "Quarantined",
        }
    }
}

impl Resource for Pool {
    type DynamicType = ();
    type Scope = ClusterResourceScope;

    fn kind(_: &()) -> Cow<'_, str> {
        "Pool".into()
    }

    fn group(_: &()) -> Cow<'_, str> {
        GROUP.into()
    }

    fn version(_: &()) -> Cow<'_, str> {
        VERSION.into()
    }

    fn plural(_: &()) -> Cow<'_, str> {
        "pools".into()
    }

    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }

    fn meta_mut(&mut self) -> &mut ObjectMeta {
        &mut self.metadata
    }
}

impl Pool {
    /// A new one, that nothing has been said about.
    pub fn new(id: PoolId, driver: &str) -> Pool {
        Pool {
            types: Some(TypeMeta::resource::<Pool>()),
            metadata: ObjectMeta {
                name: Some(id.to_string()),
                labels: Some([(DRIVER_LABEL.to_string(), driver.to_string())].into()),
                ..ObjectMeta::default()
            },
            spec: PoolSpec::default(),
            status: None,
        }
    }

    /// Its id; none of an object that somebody has named otherwise.
    pub fn id(&self) -> Option<PoolId> {
        self.name_any().parse().ok()
    }

    /// What the router remembers of it.
    pub fn known(&self) -> Option<KnownPool> {
        let status = self.status.clone().unwrap_or_default();
        Some(KnownPool {
            id: self.id()?,
            name: status.name,
            node: self.spec.node.clone().unwrap_or(status.node),
            home: status.home,
            lost: self.spec.lost,
        })
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;

    use super::*;
    use crate::record::formats::check_with;

    #[test]
    fn pool_objects_keep_their_format() {
        let time: Time = serde_json::from_str("\"2026-01-02T03:04:05Z\"").unwrap();
        let id = PoolId(uuid::Uuid::from_u128(1));
        let new = Pool::new(id, "csi.slackwater.dev");
        let condition = Condition {
            last_transition_time: time.clone(),
            message: "why".into(),
            observed_generation: None,
            reason: "NotAMount".into(),
            status: "True".into(),
            type_: "SharesFileSystem".into(),
        };
        let status = |health| PoolStatus {
            node: "node-1".into(),
            home: "home".into(),
            name: "fast".into(),
            kind: "file".into(),
            place: "file:/srv/fast".into(),
            file_system: "xfs".into(),
            mount: "/dev/sdb1".into(),
            shares_blocks: Some(true),
            capacity: "10 GiB".into(),
            available: "9 GiB".into(),
            total_bytes: 10 << 30,
            available_bytes: 9 << 30,
            promised_bytes: 5 << 30,
            volumes: 3,
            snapshots: 2,
            health,
            message: "mend it".into(),
            since: Some(time.clone()),
            agent_version: "0.1.0".into(),
            last_seen: Some(time.clone()),
            node_gone_since: Some(time.clone()),
            conditions: vec![condition.clone()],
        };
        let spec = PoolSpec {
            lost: true,
            lost_reason: Some("its disk is dead".into()),
            node: Some("node-2".into()),
        };
        let names = Health::ALL.map(|health| format!("{}.json", health.word().to_lowercase()));
        let mut expected = vec![("new.json", new.clone())];
        expected.extend(names.iter().zip(Health::ALL).map(|(name, health)| {
            let pool = Pool {
                spec: spec.clone(),
                status: Some(status(health)),
                ..new.clone()
            };
            (name.as_str(), pool)
        }));
        let read = |bytes: &[u8]| serde_json::from_slice::<Pool>(bytes).unwrap();
        let write = |pool: &Pool| serde_json::to_vec_pretty(pool).unwrap();
        check_with("pool-object", expected, read, write);
    }
}
