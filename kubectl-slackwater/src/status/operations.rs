//! Running operations, each with the time that it still takes: evacuations of pools, moves, reverts,
//! claims that are filled from data sources, and other copies. They are computed from objects, as the
//! driver's status page computes them.

mod copies;

use std::collections::BTreeMap;

use k8s_openapi::jiff::{SignedDuration, Timestamp};
use kube::api::{DynamicObject, ListParams};
use serde::Serialize;
use serde_json::Value;

use self::copies::{CopiedVolume, merge_copies};
use crate::cluster::object::{self, Fields, Kind, pool_of};
use crate::cluster::{Cluster, Scope};
use crate::failure::Result;
use crate::listing::{Column, column};
use crate::model::{Move, Pool, Volume};
use crate::pools::health::STALE;
use crate::text::{age, duration, seconds, size};

/// The columns of a table.
pub const COLUMNS: [Column; 8] = [
    column("NAMESPACE"),
    column("WORK"),
    column("PHASE"),
    column("DONE"),
    column("LEFT"),
    column("BEGAN"),
    column("REPORTED"),
    column("MESSAGE"),
];
/// Kinds of data sources.
const SOURCES: [&Kind; 3] = [
    &object::HTTP_SOURCE,
    &object::OCI_SOURCE,
    &object::S3_SOURCE,
];
/// The label of moves that were created for a pool that is emptied: its UUID.
const EVACUATES: &str = "slackwater.dev/evacuates";
/// Until when a revert must have begun to switch if its spec has no deadline.
const DEADLINE: SignedDuration = SignedDuration::from_mins(10);

/// An operation that has not ended.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Operation {
    /// The resource of its object.
    pub resource: &'static str,
    pub namespace: String,
    pub name: String,
    pub what: String,
    pub phase: String,
    pub message: String,
    /// When it began, if its object has that.
    pub since: Option<Timestamp>,
    /// Its progress was not reported for minutes.
    pub outdated: bool,
    /// When its progress was reported last, if that is known.
    pub reported_at: Option<Timestamp>,
    /// The number of volumes that are done, and of all volumes; `None` for an operation on one volume, or
    /// if the user may not list all of them.
    pub volumes_done: Option<u64>,
    pub volumes: Option<u64>,
    pub bytes_done: i64,
    pub bytes_total: i64,
    /// Seconds until all bytes are copied, at the mean rate; `None` if that is not known.
    pub seconds_left: Option<i64>,
    /// It fails if it has not begun to switch by then.
    pub deadline: Option<Timestamp>,
    /// When the bytes began to be copied, and how many had been done by then.
    #[serde(skip)]
    rate: Option<(Timestamp, i64)>,
    /// The pools by whose agents its progress is reported.
    #[serde(skip)]
    pools: Vec<String>,
    /// The volumes that it copies.
    #[serde(skip)]
    parts: Vec<CopiedVolume>,
    /// It is one copy, and not an evacuation.
    #[serde(skip)]
    is_copy: bool,
}

/// What operations are computed from besides the objects of moves, reverts and sources.
pub struct Inputs<'a> {
    /// `None` if the user may not list pools.
    pub pools: Option<&'a [Pool]>,
    pub volumes: &'a [Volume],
    /// The volumes and the moves are those of the whole cluster.
    pub are_all: bool,
    pub now: Timestamp,
}

/// All operations of a scope: evacuations first, then what makes progress.
pub async fn read(
    cluster: &Cluster,
    scope: &Scope,
    moves: Option<&[DynamicObject]>,
    parts: &Inputs<'_>,
) -> Result<Vec<Operation>> {
    let all = ListParams::default();
    let mut found: Vec<Operation> = moves.into_iter().flatten().filter_map(of_move).collect();
    let reverts = cluster.find(&object::REVERT, scope, &all).await?;
    found.extend(reverts.iter().flatten().filter_map(of_revert));
    for kind in SOURCES {
        let sources = cluster.find(kind, scope, &all).await?;
        let sources = sources.iter().flatten();
        found.extend(sources.flat_map(|source| of_source(kind, source)));
    }
    let pools = parts.pools.into_iter().flatten();
    found.extend(pools.filter_map(|pool| of_pool(pool, moves, parts)));
    Ok(complete(merge_copies(found, scope, parts), parts))
}

/// Adds what follows from the age of the numbers, and sorts.
fn complete(mut found: Vec<Operation>, parts: &Inputs<'_>) -> Vec<Operation> {
    let is_old = |at: &Timestamp| parts.now.duration_since(*at) > STALE;
    let pools: BTreeMap<&str, &Pool> = {
        let pools = parts.pools.into_iter().flatten();
        pools.map(|pool| (pool.id.as_str(), pool)).collect()
    };
    for work in &mut found {
        let named = work.pools.iter();
        let named = named.filter_map(|id| pools.get(id.as_str()).copied());
        let is_here = |pool: &&Pool| !matches!(pool.health.as_str(), "Lost" | "Forgotten");
        let silent = named
            .filter(is_here)
            .map(|pool| pool.last_seen)
            .filter(|seen| seen.as_ref().is_none_or(is_old));
        let silent: Vec<_> = silent.collect();
        work.outdated = !silent.is_empty() || work.reported_at.as_ref().is_some_and(is_old);
        work.seconds_left = time_left(work, parts.now);
        let oldest = silent.into_iter().flatten().min();
        work.reported_at = work.reported_at.into_iter().chain(oldest).min();
    }
    found.sort_by_cached_key(|work| {
        (
            work.resource != object::POOL.plural || work.is_copy,
            work.seconds_left.is_none(),
            (work.resource, work.namespace.clone()),
            (work.name.clone(), work.what.clone()),
        )
    });
    found
}

/// The seconds that the rest takes at the mean rate since the copy began.
fn time_left(work: &Operation, now: Timestamp) -> Option<i64> {
    let (since, before) = work.rate.filter(|_| !work.outdated)?;
    let time = work.reported_at.unwrap_or(now).duration_since(since);
    let done = work.bytes_done.checked_sub(before)?;
    let left = work.bytes_total.checked_sub(work.bytes_done)?;
    if time.as_secs() <= 0 || done <= 0 || left <= 0 {
        return None;
    }
    let seconds = i128::from(left) * i128::from(time.as_secs()) / i128::from(done);
    i64::try_from(seconds).ok()
}

fn of_move(object: &DynamicObject) -> Option<Operation> {
    let moved = Move::of(object);
    if moved.has_ended() {
        return None;
    }
    // Later rounds copy differences, and the bytes of earlier ones count with theirs.
    let begun = match (object.number("/status/preCopy/round"), &*moved.phase) {
        (0, "LastCopy") => object.time("/status/fencedAt"),
        (1, "Copying") => object.time("/status/preCopy/begunAt"),
        _ => None,
    };
    let place = |word: &str, node: &str| match node {
        "" => String::new(),
        node => format!(" {word} {node}"),
    };
    Some(Operation {
        resource: object::MOVE.plural,
        what: format!(
            "move of claim {}{}{}",
            moved.claim,
            place("from", &moved.from),
            place("to", &moved.to)
        ),
        namespace: moved.namespace,
        name: moved.name,
        phase: moved.phase,
        message: moved.message,
        since: object.created(),
        bytes_done: moved.bytes_done,
        bytes_total: moved.bytes_total,
        rate: begun.map(|begun| (begun, 0)),
        pools: ["from", "to"]
            .map(|place| object.text(&format!("/status/{place}/pool")).to_string())
            .to_vec(),
        parts: vec![CopiedVolume::of(object.text("/status/to/handle"), false)],
        ..Operation::default()
    })
}

fn of_revert(object: &DynamicObject) -> Option<Operation> {
    let phase = object.operation_phase();
    if matches!(phase, "Done" | "Failed" | "Incomplete") {
        return None;
    }
    let has_switched = phase == "Switching";
    let is_done = |member: &&Value| match member["state"].as_str() {
        Some("Prepared") => !has_switched,
        Some("Switched" | "Reverted") => has_switched,
        _ => false,
    };
    let members = object.list("/status/members");
    let done = members.iter().filter(is_done).count() as u64;
    let group = object.text("/spec/groupSnapshot");
    let snapshot = match group {
        "" => object.text("/spec/snapshot"),
        group => group,
    };
    let handles = members.iter().filter_map(|it| it["handle"].as_str());
    Some(Operation {
        resource: object::REVERT.plural,
        namespace: object.namespace().into(),
        name: object.name().into(),
        what: format!("revert to snapshot {snapshot}"),
        phase: phase.into(),
        message: object.text("/status/message").into(),
        since: object.created(),
        volumes_done: (!members.is_empty()).then_some(done),
        volumes: (!members.is_empty()).then_some(members.len() as u64),
        deadline: deadline(object).filter(|_| !has_switched && phase != "Aborting"),
        pools: handles.filter_map(pool_of).map(String::from).collect(),
        parts: members.iter().map(member).collect(),
        ..Operation::default()
    })
}

/// The volume of a member of a revert.
fn member(member: &Value) -> CopiedVolume {
    let text = |field: &str| member[field].as_str().unwrap_or_default();
    CopiedVolume::of(
        text("handle"),
        matches!(text("state"), "" | "Waiting" | "Fenced"),
    )
}

/// Until when a revert must have begun to switch, if its deadline can be read.
fn deadline(object: &DynamicObject) -> Option<Timestamp> {
    let time = match object.text("/spec/deadline") {
        "" => DEADLINE,
        text => SignedDuration::from_secs(seconds(text)?),
    };
    object.created()?.checked_add(time).ok()
}

/// The claims of a data source that are not filled yet.
fn of_source(kind: &'static Kind, source: &DynamicObject) -> Vec<Operation> {
    let claims = source.list("/status/claims").iter();
    let open = claims.filter(|claim| {
        let has_ended = matches!(claim["phase"].as_str(), Some("Populated" | "Failed"));
        !has_ended && claim["reason"] != "WaitForFirstConsumer"
    });
    let fill = |claim: &Value| {
        let text = |field: &str| claim[field].as_str().unwrap_or_default();
        let time = |field: &str| text(field).parse::<Timestamp>().ok();
        let number = |field: &str| claim[field].as_i64().unwrap_or_default();
        // In another phase, its numbers are those of the phase before.
        let is_filling = text("phase") == "Populating";
        Operation {
            resource: kind.plural,
            namespace: source.namespace().into(),
            name: source.name().into(),
            what: format!(
                "claim {}/{} is filled from {}",
                text("namespace"),
                text("name"),
                kind.kind
            ),
            phase: text("phase").into(),
            message: text("message").into(),
            since: time("since"),
            reported_at: time("progressAt").filter(|_| is_filling),
            bytes_done: number("receivedBytes"),
            bytes_total: number("totalBytes"),
            rate: time("progressSince")
                .filter(|_| is_filling)
                .map(|since| (since, number("progressSinceBytes"))),
            ..Operation::default()
        }
    };
    open.map(fill).collect()
}

/// A pool that is being emptied.
fn of_pool(pool: &Pool, moves: Option<&[DynamicObject]>, parts: &Inputs<'_>) -> Option<Operation> {
    if !pool.evacuate || pool.left == Some(0) {
        return None;
    }
    let work = Operation {
        resource: object::POOL.plural,
        name: pool.id.clone(),
        what: format!("evacuation of pool {}", pool.title()),
        phase: pool
            .left
            .map_or(String::new(), |left| format!("{left} left")),
        message: pool.evacuation.clone(),
        since: pool.evacuation_since,
        pools: vec![pool.id.clone()],
        ..Operation::default()
    };
    match moves.filter(|_| parts.are_all) {
        Some(moves) => Some(with_totals(work, moves, parts.volumes)),
        None => Some(work),
    }
}

/// What has been moved out of a pool by its evacuation, and what the claims have that are still in it.
fn with_totals(mut work: Operation, moves: &[DynamicObject], volumes: &[Volume]) -> Operation {
    let is_claimed = |one: &&Volume| one.pool == work.name && !one.claim.is_empty();
    let here: Vec<&Volume> = volumes.iter().filter(is_claimed).collect();
    let (mut all, mut moved) = (here.len() as u64, 0);
    let (mut done, mut is_copying) = (0i64, false);
    let sizes = here.iter().map(|one| one.size_bytes);
    let mut total = sizes.fold(0, i64::saturating_add);
    let mut first: Option<Timestamp> = None;
    for object in moves {
        let labels = object.metadata.labels.as_ref();
        let is_its = labels.and_then(|all| all.get(EVACUATES)) == Some(&work.name);
        if is_its {
            first = first.into_iter().chain(object.created()).min();
        }
        let one = Move::of(object);
        if object.text("/status/from/pool") != work.name || one.phase == "Aborted" {
            continue;
        }
        // Its PersistentVolume names the copy, which is in another pool.
        match object.time("/status/switchedAt") {
            Some(_) if is_its || !one.has_ended() => {
                all += 1;
                moved += u64::from(one.phase == "Done");
                total = total.saturating_add(one.bytes_total);
                done = done.saturating_add(one.bytes_total);
            }
            // One of before.
            Some(_) => {}
            None => {
                let copies = matches!(one.phase.as_str(), "Copying" | "LastCopy");
                is_copying |= copies && one.message.is_empty();
                done = done.saturating_add(one.bytes_done.min(one.bytes_total));
            }
        }
    }
    work.since = work.since.into_iter().chain(first).min();
    (work.volumes_done, work.volumes) = (Some(moved), Some(all));
    (work.bytes_done, work.bytes_total) = (done.min(total), total);
    // While all of its moves wait, for pods to end or for a target, nothing has a rate.
    work.rate = first.filter(|_| is_copying).map(|first| (first, 0));
    work
}

impl Operation {
    /// The cells of [`COLUMNS`].
    pub fn cells(&self, now: Timestamp) -> Vec<String> {
        let volumes = self.volumes.map(|all| {
            let done = self.volumes_done.unwrap_or_default();
            format!("{done} of {all} volumes")
        });
        let bytes = match (self.bytes_done, self.bytes_total) {
            (0, 0) => None,
            (done, 0) => Some(size(done)),
            (done, total) => Some(format!("{} of {}", size(done), size(total))),
        };
        let done: Vec<_> = volumes.into_iter().chain(bytes).collect();
        let phase = match self.outdated {
            true => format!("outdated, was {}", self.phase),
            false => self.phase.clone(),
        };
        vec![
            self.namespace.clone(),
            self.what.clone(),
            phase,
            done.join(", "),
            self.left(now),
            age(self.since, now),
            age(self.reported_at, now),
            self.message.clone(),
        ]
    }

    fn left(&self, now: Timestamp) -> String {
        let left = self.seconds_left.map(duration);
        let deadline = self.deadline.map(|deadline| {
            let until = deadline.duration_since(now).as_secs().max(0);
            format!("fails in {} unless it switches", duration(until))
        });
        match left.into_iter().chain(deadline).collect::<Vec<_>>() {
            all if all.is_empty() => "no estimate".into(),
            all => all.join(", "),
        }
    }
}

#[cfg(test)]
mod tests;
