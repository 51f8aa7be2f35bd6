//! What the status page of a router shows: objects in memory, the last answers of agents, and lists of
//! snapshots, which are read for each page.

mod cuts;

use std::pin::Pin;
use std::sync::{Arc, PoisonError};

use ::kube::ResourceExt;
use k8s_openapi::jiff::{SignedDuration, Timestamp};

use super::InCluster;
use super::evacuated;
use super::pool::{Health, Pool, PoolGrowth};
use super::volume_move::{Phase, VolumeMove};
use super::volume_revert::{RevertPhase, VolumeRevert};
use super::volumes::Volumes;
use crate::telemetry::page::world::{self, Source, Work, World};

/// A router's cluster as the source of a status page.
pub struct StatusSource(pub Arc<InCluster>);

impl Source for StatusSource {
    fn world(&self) -> Pin<Box<dyn Future<Output = World> + Send + '_>> {
        Box::pin(async {
            let cluster = &self.0;
            let schedules = cluster.shown_schedules();
            let mut each = schedules.iter().flatten();
            let has_singles = each.any(|schedule| !schedule.is_group);
            let cuts = cuts::read(&cluster.client, has_singles).await;
            let pools = cluster.pools.read();
            let pools: Vec<Pool> = {
                let pools = pools.unwrap_or_else(PoisonError::into_inner);
                pools.now().values().cloned().collect()
            };
            let reports = cluster.agents.reports().into_iter();
            let mut work: Vec<Work> = pools.iter().filter_map(evacuation).collect();
            work.extend(cluster.moves().values().filter_map(running_move));
            work.extend(cluster.reverts().values().filter_map(running_revert));
            World {
                now: Timestamp::now(),
                driver: cluster.options.driver.clone(),
                namespace: cluster.options.namespace.clone(),
                router: cluster.options.me.clone(),
                problem: cluster.problem(),
                pools: pools.iter().map(|it| pool(it, &cluster.volumes)).collect(),
                agents: reports.map(agent).collect(),
                claims: cluster.volumes.bound(),
                schedules,
                cuts,
                work,
            }
        })
    }
}

fn count(number: i64) -> u64 {
    u64::try_from(number).unwrap_or(0)
}

fn pool(pool: &Pool, volumes: &Volumes) -> world::Pool {
    let status = pool.status.clone().unwrap_or_default();
    let frozen = status.frozen.into_iter().map(|one| world::Frozen {
        claim: volumes.claim_of(&one.id),
        volume: one.id,
        since: one.since.0,
        until: one.until.0,
        is_held: one.held,
    });
    world::Pool {
        id: pool.name_any(),
        name: status.name,
        node: status.node,
        health: status.health.word(),
        is_well: status.health == Health::Healthy,
        is_gone: matches!(status.health, Health::Lost | Health::Forgotten),
        message: status.message,
        since: status.since.map(|since| since.0),
        seen: status.last_seen.map(|seen| seen.0),
        total_bytes: count(status.total_bytes),
        available_bytes: count(status.available_bytes),
        promised_bytes: count(status.promised_bytes),
        volumes: count(status.volumes),
        snapshots: count(status.snapshots),
        frozen: frozen.collect(),
        full_at: status.full_at.map(|at| at.0),
        orphans: status.orphans.map_or(0, |orphans| orphans.count),
        images: status.images.map(|images| world::Images {
            own: count(images.own_bytes),
            shared: count(images.shared_bytes),
            snapshots: count(images.snapshot_bytes),
            undivided: count(images.undivided_bytes),
            unmeasured: count(images.unmeasured_volumes),
            measured: images.measured_at.0,
        }),
        growth: status.growth.map(|it| growth(it, volumes)),
    }
}

fn growth(growth: PoolGrowth, volumes: &Volumes) -> world::Growth {
    let each = growth.volumes.into_iter().map(|one| world::Grown {
        claim: volumes.claim_of(&one.id),
        volume: one.id,
        bytes: count(one.grown_bytes),
        since: one.since.0,
    });
    world::Growth {
        measured: growth.measured_at.0,
        volumes: each.collect(),
    }
}

fn agent(report: super::pool_status::Report) -> world::Agent {
    let answer = report.seen.as_ref().map(|(_, answer)| answer);
    world::Agent {
        version: answer.map_or(String::new(), |answer| answer.version.clone()),
        has_guard: answer.is_some_and(|answer| answer.guard_alive),
        missing: answer.map_or(Vec::new(), |answer| answer.missing.clone()),
        seen: report.seen.as_ref().map(|(at, _)| *at),
        node: report.node,
        problem: report.problem,
    }
}

/// A pool that is being emptied.
fn evacuation(pool: &Pool) -> Option<Work> {
    let status = pool.status.clone().unwrap_or_default();
    let left = status.evacuation.map(|evacuation| evacuation.left);
    (pool.spec.evacuate && left != Some(0)).then(|| Work {
        resource: "pools",
        name: pool.name_any(),
        what: format!("evacuation of pool {} of node {}", status.name, status.node),
        phase: left.map_or(String::new(), |left| format!("{left} left")),
        message: {
            let mut all = status.conditions.into_iter();
            let found = all.find(|one| one.type_ == evacuated::EVACUATED);
            found.map_or(String::new(), |one| one.message)
        },
        ..Work::default()
    })
}

fn running_move(moved: &VolumeMove) -> Option<Work> {
    let status = moved.status.clone().unwrap_or_default();
    if status.phase.is_final() {
        return None;
    }
    let to = status.to.as_ref().map(|to| to.node.as_str());
    // Later rounds copy differences, and the bytes of earlier ones count with theirs.
    let is_first = status.phase == Phase::Copying && status.pre_copy.round == 1;
    let begun = status.pre_copy.begun_at.filter(|_| is_first);
    Some(Work {
        resource: "volumemoves",
        namespace: moved.namespace().unwrap_or_default(),
        name: moved.name_any(),
        what: match to {
            Some(node) => format!("move of claim {} to node {node}", moved.claim()),
            None => format!("move of claim {}", moved.claim()),
        },
        phase: status.phase.word().into(),
        message: status.message,
        failing: super::moves::failed_since(moved),
        done_bytes: status.bytes_done,
        total_bytes: status.bytes_total,
        copying_since: begun.map(|begun| begun.0),
        deadline: None,
    })
}

fn running_revert(revert: &VolumeRevert) -> Option<Work> {
    let status = revert.status.clone().unwrap_or_default();
    if status.phase.is_final() {
        return None;
    }
    let of = [&revert.spec.group_snapshot, &revert.spec.snapshot];
    let of = of.into_iter().flatten().next();
    // From then on there is no way back.
    let has_switched = status.phase >= RevertPhase::Switching;
    let created = revert.metadata.creation_timestamp.as_ref();
    let deadline = created.filter(|_| !has_switched).and_then(|created| {
        let time = SignedDuration::try_from(revert.deadline().ok()?).ok()?;
        created.0.checked_add(time).ok()
    });
    Some(Work {
        resource: "volumereverts",
        namespace: revert.namespace().unwrap_or_default(),
        name: revert.name_any(),
        what: match of {
            Some(snapshot) => format!("revert to snapshot {snapshot}"),
            None => "revert".into(),
        },
        phase: status.phase.word().into(),
        message: status.message,
        deadline,
        ..Work::default()
    })
}
