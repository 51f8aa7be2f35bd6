//! The report of one agent about one pool, as the status of its object.

use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use k8s_openapi::jiff::Timestamp;

use super::{bytes, whole};
use crate::agent::{DescribeResponse, Pool as Shown};
use crate::model::VolumeId;
use crate::router::kube::pools::object::{
    FrozenVolume, GrownVolume, Health, PoolGrowth, PoolImages, PoolStatus,
};
use crate::router::kube::pools::running_copies;

/// Volumes of a pool that are listed as frozen.
const MAX_FROZEN: usize = 20;

/// A pool in the answer of an agent.
#[derive(Debug)]
pub(super) struct Observation {
    pub(super) at: Timestamp,
    pub(super) answer: Arc<DescribeResponse>,
    /// Of the pool in the answer.
    pub(super) index: usize,
}

impl Observation {
    pub(super) fn pool(&self) -> &Shown {
        &self.answer.pools[self.index]
    }

    pub(super) fn status(&self, strays: usize, pods: &BTreeMap<String, String>) -> PoolStatus {
        let (answer, pool) = (&self.answer, self.pool());
        let (health, message) = health(answer, pool, strays, pods);
        let kind = pool.place.split(':').next().unwrap_or_default();
        PoolStatus {
            node: answer.node_name.clone(),
            home: answer.home.clone(),
            name: pool.name.clone(),
            kind: kind.into(),
            place: pool.place.clone(),
            file_system: pool.file_system.clone(),
            mount: pool.mount.clone(),
            shares_blocks: self.reports_storage().then_some(pool.shares_blocks),
            conditions: self.own_mount().into_iter().collect(),
            placed_since: None,
            evacuation: None,
            usage: Vec::new(),
            images: self.images(),
            growth: self.growth(),
            full_at: None,
            orphans: None,
            frozen: self.frozen(),
            copies: running_copies::copies(&answer.copies, &pool.id, whole(self.at)),
            capacity: bytes(pool.total_bytes),
            available: bytes(pool.available_bytes),
            total_bytes: pool.total_bytes,
            available_bytes: pool.available_bytes,
            promised_bytes: pool.promised_bytes,
            volumes: pool.volumes,
            snapshots: pool.snapshots,
            health,
            message,
            since: None,
            agent_version: answer.version.clone(),
            last_seen: Some(whole(self.at)),
            node_gone_since: None,
        }
    }

    fn images(&self) -> Option<PoolImages> {
        let images = self.pool().images.as_ref()?;
        Some(PoolImages {
            own_bytes: images.own_bytes,
            shared_bytes: images.shared_bytes,
            snapshot_bytes: images.snapshot_bytes,
            undivided_bytes: images.undivided_bytes,
            unmeasured_volumes: images.unmeasured_volumes,
            measured_at: time(images.measured_at)?,
        })
    }

    fn growth(&self) -> Option<PoolGrowth> {
        let images = self.pool().images.as_ref()?;
        let volumes = images.growth.as_ref()?.volumes.iter();
        let volumes = volumes.filter_map(|one| {
            Some(GrownVolume {
                id: one.volume_id.clone(),
                grown_bytes: one.grown_bytes,
                since: time(one.since)?,
            })
        });
        Some(PoolGrowth {
            volumes: volumes.collect(),
            measured_at: time(images.measured_at)?,
        })
    }

    /// Volumes of the pool that have been frozen for long.
    fn frozen(&self) -> Vec<FrozenVolume> {
        let its = self.answer.long_freezes.iter().filter(|one| {
            let id = one.volume_id.parse::<VolumeId>();
            id.is_ok_and(|id| id.pool.to_string() == self.pool().id)
        });
        let each = its.filter_map(|one| {
            Some(FrozenVolume {
                id: one.volume_id.clone(),
                since: time(one.since)?,
                until: time(one.until)?,
                held: one.held,
            })
        });
        each.take(MAX_FROZEN).collect()
    }

    /// Whether the pool is served, by an agent that reports what the pool lies on.
    fn reports_storage(&self) -> bool {
        !self.pool().file_system.is_empty()
    }

    /// The condition that the pool has a file system that is mounted at its folder.
    fn own_mount(&self) -> Option<Condition> {
        let without = &self.pool().without_mount;
        let (status, reason, message) = match (without.is_empty(), self.pool().any_mount) {
            (true, _) => ("True", "Mounted", String::new()),
            (false, true) => ("False", "AnyMount", without.clone()),
            (false, false) => (
                "False",
                "NotMounted",
                format!(
                    "{without}; the pool was created there nevertheless and is served. If a disk is meant to be mounted there, move its volumes to one; otherwise set mount=any in its definition (in the chart mount: any)"
                ),
            ),
        };
        self.reports_storage().then(|| Condition {
            last_transition_time: whole(self.at),
            message,
            observed_generation: None,
            reason: reason.into(),
            status: status.into(),
            type_: "OwnMount".into(),
        })
    }
}

/// Keeps what only a pool that is served reports.
pub(super) fn keep_unreported(status: &mut PoolStatus, old: &PoolStatus) {
    if status.file_system.is_empty() {
        status.file_system = old.file_system.clone();
        status.mount = old.mount.clone();
        status.shares_blocks = old.shares_blocks;
        status.conditions = old.conditions.clone();
    }
    // An agent counts them some time after its start.
    let images = status.images.take();
    status.images = images.or_else(|| old.images.clone());
    let growth = status.growth.take();
    status.growth = growth.or_else(|| old.growth.clone());
}

fn time(seconds: i64) -> Option<Time> {
    Timestamp::from_second(seconds).ok().map(Time)
}

fn health(
    answer: &DescribeResponse,
    pool: &Shown,
    strays: usize,
    pods: &BTreeMap<String, String>,
) -> (Health, String) {
    if pool.forgotten {
        let message = "it was forgotten on its node: its volumes count as deleted";
        return (Health::Forgotten, message.into());
    }
    if !pool.refusal.is_empty() {
        let name = |uid| pods.get(uid).map_or(uid, String::as_str);
        let names: Vec<_> = pool.pods.iter().map(|uid| name(uid.as_str())).collect();
        let kept = match names.is_empty() {
            true => String::new(),
            false => format!("; in use by pods {}", names.join(", ")),
        };
        return (Health::NotServed, format!("{}{kept}", pool.refusal));
    }
    if answer.home.is_empty() {
        return (Health::NotServed, answer.home_problem.clone());
    }
    let mut wrong = Vec::new();
    if pool.damaged > 0 {
        wrong.push(format!("{} of its records cannot be read", pool.damaged));
    }
    if strays > 0 {
        wrong.push(format!(
            "{strays} PersistentVolumes have another home than this node, so their pods cannot be scheduled: kubectl slackwater pool follow {}",
            pool.id
        ));
    }
    wrong.extend(pool.changed_devices.iter().cloned());
    if !answer.guard_alive {
        wrong.push("the freeze guard of its node does not answer".into());
    }
    wrong.extend(answer.missing.iter().cloned());
    match wrong.is_empty() {
        true => (Health::Healthy, String::new()),
        false => (Health::Degraded, wrong.join("; ")),
    }
}
