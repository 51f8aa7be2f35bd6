//! The Pool objects, which show the state of all pools (`kubectl get pools`).
//!
//! Each pool has one object, named by the pool's UUID. People write `spec`, for example to mark a pool
//! as lost. The leading router writes `status` from the reports of agents; while an agent is away, the
//! status stays as it was last seen. The CRD is deploy/chart/crds/pools.yaml.

use ::kube::ResourceExt;
use ::kube::api::{ObjectMeta, TypeMeta};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use serde::{Deserialize, Serialize};

use super::running_copies::PoolCopies;
use super::usage::UsageSample;
use crate::model::PoolId;
use crate::router::cluster::KnownPool;
use crate::router::kube::custom_resource::own_kind;

/// The label with the driver's name. Several drivers may share a cluster.
pub const DRIVER_LABEL: &str = "slackwater.dev/driver";

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Pool {
    /// Absent from objects in lists.
    #[serde(flatten, default)]
    pub types: Option<TypeMeta>,
    /// Named by its UUID.
    pub metadata: ObjectMeta,
    /// What people decide about it.
    #[serde(default)]
    pub spec: PoolSpec,
    /// What its agent reports.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub status: Option<PoolStatus>,
}

/// What people decide about a pool.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PoolSpec {
    /// It does not return: its volumes count as deleted, and if it returns nevertheless, it is not used.
    #[serde(default, skip_serializing_if = "is_false")]
    pub lost: bool,
    /// Why it is marked as lost.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lost_reason: Option<String>,
    /// Its volumes are moved to other pools, and it gets no new ones.
    #[serde(default, skip_serializing_if = "is_false")]
    pub evacuate: bool,
    /// IDs of orphans that are to be deleted. The router removes those that are no orphans any more.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub delete_orphans: Vec<String>,
    /// The node that has it from now on. The router removes this when the node reports the pool.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
    /// The node to which its disk was moved, and which is to adopt it. The router removes this when the pool
    /// is that node's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub adopt: Option<String>,
    /// The node that is to forget it. The router removes this when that node has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub forget: Option<String>,
}

fn is_false(value: &bool) -> bool {
    !value
}

/// The last report of the pool's agent. `None` is written as null, which removes the field.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct PoolStatus {
    /// The node that reported it last.
    pub node: String,
    /// The home (topology value) of that node.
    pub home: String,
    /// Its name in its agent's configuration.
    pub name: String,
    /// "file", "lvm" or "memory".
    pub kind: String,
    /// Such as "file:/var/lib/slackwater/pool".
    pub place: String,
    /// File system of its images.
    pub file_system: String,
    /// What is mounted at its folder or above it: "/dev/sdb1", or "/dev/sda2[/srv/pool]" for a part
    /// of a file system.
    pub mount: String,
    /// Whether its images can share blocks; `None` if that is not known.
    pub shares_blocks: Option<bool>,
    /// Its size, for people.
    pub capacity: String,
    /// Its free space, for people.
    pub available: String,
    /// Its size in bytes.
    pub total_bytes: i64,
    /// Bytes that are free now.
    pub available_bytes: i64,
    /// Bytes that its volumes may grow to.
    pub promised_bytes: i64,
    /// The number of its volumes.
    pub volumes: i64,
    /// The number of its snapshots.
    pub snapshots: i64,
    pub health: Health,
    /// Why it is not healthy, and what to do; empty if it is healthy.
    pub message: String,
    /// When `health` changed last.
    pub since: Option<Time>,
    pub agent_version: String,
    /// When its agent answered last; updated once a minute while nothing else changes.
    pub last_seen: Option<Time>,
    /// Since when its Node object has been missing; `None` if it exists.
    pub node_gone_since: Option<Time>,
    /// Since when it has been on this node, with this home; `None` if that is not known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub placed_since: Option<Time>,
    /// Conditions, such as `OwnMount`.
    pub conditions: Vec<Condition>,
    /// What is left in it, while `spec.evacuate` is true and that is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub evacuation: Option<Evacuation>,
    /// What was used of it, once an hour in the last day, the oldest first.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub usage: Vec<UsageSample>,
    /// What its images occupy; `None` if that was never reported.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub images: Option<PoolImages>,
    /// The volumes that grew most; `None` if that was never reported.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub growth: Option<PoolGrowth>,
    /// When it is full, if it fills as it did in that time; `None` if that is not known, or not soon.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub full_at: Option<Time>,
    /// What no object of the cluster names; `None` if there is nothing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub orphans: Option<PoolOrphans>,
    /// Volumes whose file systems have been frozen for longer than a cut takes. The list is limited.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub frozen: Vec<FrozenVolume>,
    /// The copies that run in it; `None` if there is none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub copies: Option<PoolCopies>,
}

impl PoolStatus {
    /// Bytes that are not free. An agent can report any numbers.
    pub fn used_bytes(&self) -> i64 {
        self.total_bytes.saturating_sub(self.available_bytes)
    }
}

/// The blocks of all images of a pool, each counted once.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PoolImages {
    /// Bytes that one volume has, and no other image.
    pub own_bytes: i64,
    /// Bytes that a volume has, and another image, too.
    pub shared_bytes: i64,
    /// Bytes that only snapshots and hidden bases have.
    pub snapshot_bytes: i64,
    /// An upper bound of the bytes of images that may share some and were not compared.
    #[serde(default)]
    pub undivided_bytes: i64,
    /// The number of volumes that were not measured yet.
    #[serde(default)]
    pub unmeasured_volumes: i64,
    /// When the oldest of these numbers was measured, by the clock of the node.
    pub measured_at: Time,
}

/// The volumes to which most bytes were added in the last day, the most first. The list is limited.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PoolGrowth {
    /// When this was measured, by the clock of the node.
    pub measured_at: Time,
    #[serde(default)]
    pub volumes: Vec<GrownVolume>,
}

/// A volume to which bytes were added, with its snapshots.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GrownVolume {
    pub id: String,
    pub grown_bytes: i64,
    pub since: Time,
}

/// A volume whose file system has been frozen for longer than a cut takes, by the clock of its node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FrozenVolume {
    pub id: String,
    /// When it was frozen.
    pub since: Time,
    /// When the freeze guard thaws it at the latest.
    pub until: Time,
    /// A driver or a freeze guard holds it.
    #[serde(default)]
    pub held: bool,
}

/// Volumes and snapshots of a pool that no object of the cluster names.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PoolOrphans {
    /// When that was checked last.
    pub checked: Time,
    /// How many there are.
    pub count: u64,
    /// The first of them: those whose deletion is requested, and then the oldest.
    #[serde(default)]
    pub listed: Vec<PoolOrphan>,
}

/// A volume or snapshot that no object of the cluster names.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PoolOrphan {
    pub id: String,
    /// `Volume` or `Snapshot`.
    pub kind: String,
    /// The ID of the group that it is a member of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
    /// Since when each check has found it unnamed.
    pub since: Time,
    /// When it is deleted, if that is requested.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub delete_at: Option<Time>,
    /// Why it is not deleted, although that is requested.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub message: String,
    /// What a PersistentVolume of it has to contain; `None` for a snapshot, and if its agent has not
    /// reported that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub volume: Option<OrphanVolume>,
}

/// What a PersistentVolume of a volume has to contain.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct OrphanVolume {
    pub size_bytes: i64,
    /// "ext4", "xfs" or "btrfs"; `None` if it is a raw block device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file_system: Option<String>,
    /// It was created for many readers, and is never written.
    #[serde(default, skip_serializing_if = "is_false")]
    pub for_readers: bool,
    /// "namespace/name" of the claim for which it was created; `None` if that is not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub claim: Option<String>,
    /// Why no pod can use it now; empty if one can.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub problem: String,
}

/// What is left in a pool that is being emptied. Lists are limited.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Evacuation {
    /// All that is left: volumes and snapshots.
    pub left: u64,
    /// Claims whose volumes are moved, "namespace/name".
    pub claims: Vec<String>,
    /// PersistentVolumes without a claim, which are not moved.
    pub unclaimed: Vec<String>,
    /// IDs of volumes that no PersistentVolume and no VolumeMove names.
    pub orphans: Vec<String>,
    /// IDs of sources of moves that are not deleted yet.
    pub sources: Vec<String>,
    /// IDs of snapshots.
    pub snapshots: Vec<String>,
}

/// The health of a pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Health {
    /// Nothing is known yet.
    #[default]
    Unknown,
    /// It is served.
    Healthy,
    /// It is served, but something needs repair.
    Degraded,
    /// Its agent does not serve it.
    NotServed,
    /// Its agent does not answer, or does not report it.
    Unreachable,
    /// Two agents report it, and neither is known to have had it before. It receives no calls.
    Conflict,
    /// It was forgotten on its node (`slackwater pool forget`), which is final.
    Forgotten,
    /// It is marked as lost.
    Lost,
    /// It is marked as lost, but an agent reports it. It is not used.
    Quarantined,
    /// A value of a later release.
    #[serde(other, skip_serializing)]
    Other,
}

impl Health {
    /// All values that this release writes.
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

    /// The value in the API.
    pub fn as_str(self) -> &'static str {
        &self.event_reason()["Pool".len()..]
    }

    /// The reason of the event that reports this value: `Pool` and the value in the API.
    pub fn event_reason(self) -> &'static str {
        match self {
            Health::Unknown | Health::Other => "PoolUnknown",
            Health::Healthy => "PoolHealthy",
            Health::Degraded => "PoolDegraded",
            Health::NotServed => "PoolNotServed",
            Health::Unreachable => "PoolUnreachable",
            Health::Conflict => "PoolConflict",
            Health::Forgotten => "PoolForgotten",
            Health::Lost => "PoolLost",
            Health::Quarantined => "PoolQuarantined",
        }
    }
}

own_kind!(Pool, "pools", ClusterResourceScope);

impl Pool {
    /// A new object, with an empty spec and without a status.
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

    /// Its id; `None` if the object's name is not an id.
    pub fn id(&self) -> Option<PoolId> {
        self.name_any().parse().ok()
    }

    /// What the router uses to find it.
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
    use crate::router::kube::pools::running_copies::PoolCopy;

    fn evacuating(new: &Pool, status: PoolStatus) -> Pool {
        let ids = |word: &str| vec![word.to_string()];
        Pool {
            spec: PoolSpec {
                evacuate: true,
                ..PoolSpec::default()
            },
            status: Some(PoolStatus {
                evacuation: Some(Evacuation {
                    left: 5,
                    claims: ids("shop/data"),
                    unclaimed: ids("pv-2"),
                    orphans: ids("orphan"),
                    sources: ids("source"),
                    snapshots: ids("snapshot"),
                }),
                ..status
            }),
            ..new.clone()
        }
    }

    fn with_requests(new: &Pool, status: PoolStatus) -> Pool {
        Pool {
            spec: PoolSpec {
                adopt: Some("node-2".into()),
                forget: Some("node-1".into()),
                ..PoolSpec::default()
            },
            status: Some(status),
            ..new.clone()
        }
    }

    fn with_orphans(new: &Pool, status: PoolStatus) -> Pool {
        let orphan = |kind: &str, group: Option<&str>| PoolOrphan {
            id: format!("id of a {kind}"),
            kind: kind.into(),
            group: group.map(str::to_string),
            since: status.since.clone().unwrap(),
            delete_at: group.is_none().then(|| status.since.clone()).flatten(),
            message: group
                .map(|_| "why it is not deleted".to_string())
                .unwrap_or_default(),
            volume: None,
        };
        Pool {
            spec: PoolSpec {
                delete_orphans: vec!["id of a Volume".into()],
                ..PoolSpec::default()
            },
            status: Some(PoolStatus {
                placed_since: status.since.clone(),
                orphans: Some(PoolOrphans {
                    checked: status.since.clone().unwrap(),
                    count: 7,
                    listed: vec![orphan("Volume", None), orphan("Snapshot", Some("group"))],
                }),
                ..status
            }),
            ..new.clone()
        }
    }

    fn with_described_orphans(new: &Pool, status: PoolStatus) -> Pool {
        let mut pool = with_orphans(new, status);
        let orphans = pool.status.as_mut().unwrap().orphans.as_mut().unwrap();
        orphans.listed[0].volume = Some(OrphanVolume {
            size_bytes: 10 << 30,
            file_system: Some("xfs".into()),
            for_readers: true,
            claim: Some("shop/data".into()),
            problem: "why no pod can use it".into(),
        });
        pool
    }

    fn with_observed_condition(new: &Pool, mut status: PoolStatus) -> Pool {
        status.conditions[0].observed_generation = Some(3);
        Pool {
            status: Some(status),
            ..new.clone()
        }
    }

    fn with_frozen(new: &Pool, status: PoolStatus) -> Pool {
        let time = status.since.clone().unwrap();
        Pool {
            status: Some(PoolStatus {
                frozen: vec![FrozenVolume {
                    id: "id of a volume".into(),
                    since: time.clone(),
                    until: time,
                    held: true,
                }],
                ..status
            }),
            ..new.clone()
        }
    }

    fn copying(new: &Pool, status: PoolStatus) -> Pool {
        let time = status.since.clone().unwrap();
        let first = PoolCopy {
            kind: "Restore".into(),
            id: "id of a volume".into(),
            claim: Some("shop/data".into()),
            source_node: Some("node-2".into()),
            since: time.clone(),
            bytes_done: 3 << 30,
            bytes_total: Some(4 << 30),
            bytes_before: 1 << 30,
        };
        let second = PoolCopy {
            kind: "Export".into(),
            id: "id of a snapshot".into(),
            claim: None,
            source_node: None,
            bytes_done: 0,
            bytes_total: None,
            bytes_before: 0,
            ..first.clone()
        };
        Pool {
            status: Some(PoolStatus {
                copies: Some(PoolCopies {
                    reported_at: time,
                    running: vec![first, second],
                }),
                ..status
            }),
            ..new.clone()
        }
    }

    fn counted(new: &Pool, status: PoolStatus) -> Pool {
        let time = status.since.clone().unwrap();
        Pool {
            status: Some(PoolStatus {
                images: Some(PoolImages {
                    own_bytes: 3 << 30,
                    shared_bytes: 2 << 30,
                    snapshot_bytes: 1 << 30,
                    undivided_bytes: 1 << 29,
                    unmeasured_volumes: 1,
                    measured_at: time.clone(),
                }),
                growth: Some(PoolGrowth {
                    measured_at: time.clone(),
                    volumes: vec![GrownVolume {
                        id: "id of a volume".into(),
                        grown_bytes: 1 << 20,
                        since: time,
                    }],
                }),
                ..status
            }),
            ..new.clone()
        }
    }

    fn filling(new: &Pool, status: PoolStatus) -> Pool {
        let time = status.since.clone().unwrap();
        Pool {
            status: Some(PoolStatus {
                usage: vec![UsageSample {
                    time: time.clone(),
                    used_bytes: 1 << 30,
                }],
                full_at: Some(time),
                ..status
            }),
            ..new.clone()
        }
    }

    type WithPart = fn(&Pool, PoolStatus) -> Pool;

    /// Objects with a part of the status that most do not have.
    const PARTS: [(&str, WithPart); 9] = [
        ("adopting.json", with_requests),
        ("evacuating.json", evacuating),
        ("frozen.json", with_frozen),
        ("copying.json", copying),
        ("counted.json", counted),
        ("filling.json", filling),
        ("orphans.json", with_orphans),
        ("described-orphans.json", with_described_orphans),
        ("observed.json", with_observed_condition),
    ];

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
            usage: Vec::new(),
            images: None,
            growth: None,
            full_at: None,
            placed_since: None,
            evacuation: None,
            orphans: None,
            frozen: Vec::new(),
            copies: None,
        };
        let spec = PoolSpec {
            evacuate: false,
            delete_orphans: Vec::new(),
            lost: true,
            lost_reason: Some("its disk is dead".into()),
            node: Some("node-2".into()),
            adopt: None,
            forget: None,
        };
        let names = Health::ALL.map(|health| format!("{}.json", health.as_str().to_lowercase()));
        let mut expected = vec![("new.json", new.clone())];
        expected.extend(names.iter().zip(Health::ALL).map(|(name, health)| {
            let pool = Pool {
                spec: spec.clone(),
                status: Some(status(health)),
                ..new.clone()
            };
            (name.as_str(), pool)
        }));
        expected.extend(PARTS.map(|(name, of)| (name, of(&new, status(Health::Healthy)))));
        let read = |bytes: &[u8]| serde_json::from_slice::<Pool>(bytes).unwrap();
        let write = |pool: &Pool| serde_json::to_vec_pretty(pool).unwrap();
        check_with("pool-object", expected, read, write);
    }
}
