//! What the status page of a router shows: objects in memory, the last answers of agents, and lists of
//! snapshots and data sources, which are read for each page.

mod copies;
mod cuts;
mod fills;
mod running;

use std::pin::Pin;
use std::sync::{Arc, PoisonError};

use ::kube::ResourceExt;
use k8s_openapi::jiff::Timestamp;

use super::InCluster;
use super::persistent_volumes::Volumes;
use super::pools::object::{Health, Pool, PoolGrowth};
use crate::telemetry::page::world::{self, Source, World};

/// A router's cluster as the source of a status page.
pub struct StatusSource(pub Arc<InCluster>);

impl Source for StatusSource {
    fn world(&self) -> Pin<Box<dyn Future<Output = World> + Send + '_>> {
        Box::pin(async {
            let cluster = &self.0;
            let schedules = cluster.shown_schedules();
            let mut each = schedules.iter().flatten();
            let has_singles = each.any(|schedule| !schedule.is_group);
            let (cuts, fills) = tokio::join!(
                cuts::read(&cluster.client, has_singles),
                fills::read(&cluster.client)
            );
            let pools = cluster.pools.read();
            let pools: Vec<Pool> = {
                let pools = pools.unwrap_or_else(PoisonError::into_inner);
                pools.now().values().cloned().collect()
            };
            let reports = cluster.agents.reports().into_iter();
            let mut work = running::work(cluster, &pools);
            work.extend(fills.work);
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
                work_problem: fills.problem,
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
        health: status.health.as_str(),
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

fn agent(report: super::pools::status::Report) -> world::Agent {
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
