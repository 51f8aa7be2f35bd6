//! `pools`.

use k8s_openapi::jiff::{SignedDuration, Timestamp};
use serde_json::json;

use crate::cli::ListArguments;
use crate::cluster::{Cluster, Scope};
use crate::failure::Result;
use crate::growth::Images;
use crate::listing::{Column, Listing, Row, column, wide};
use crate::model::{Pool, pools_of};
use crate::object::{self, Kind};
use crate::text::{age, size};

/// What it reads.
pub const KINDS: [&Kind; 1] = [&object::POOL];

const COLUMNS: [Column; 20] = [
    column("POOL"),
    column("KIND"),
    column("HEALTH"),
    column("USED"),
    column("SIZE"),
    column("FREE"),
    column("PROMISED"),
    column("VOLUMES"),
    column("SNAPSHOTS"),
    column("LAST SEEN"),
    wide("OWN"),
    wide("SHARED"),
    wide("BY SNAPSHOTS"),
    wide("UNDIVIDED"),
    wide("COUNTED"),
    wide("ID"),
    wide("FILE SYSTEM"),
    wide("MOUNT"),
    wide("HOME"),
    wide("MESSAGE"),
];

/// The pools, the fullest first.
pub async fn listing(cluster: &Cluster, arguments: &ListArguments) -> Result<Listing> {
    let params = pools_of(&cluster.driver, arguments.selector.as_deref());
    let found = cluster.get_all(&object::POOL, &Scope::All, &params).await?;
    let mut pools: Vec<Pool> = found.iter().map(Pool::of).collect();
    sort(&mut pools);
    let now = Timestamp::now();
    Ok(Listing {
        what: format!("pools of {}", cluster.driver),
        columns: COLUMNS.to_vec(),
        rows: pools.iter().map(|pool| row(pool, now)).collect(),
        notes: cluster.take_notes(),
    })
}

/// The fullest first.
pub fn sort(pools: &mut [Pool]) {
    pools.sort_by_key(|pool| {
        let fullness = pool.used_percent().unwrap_or(-1);
        (std::cmp::Reverse(fullness), pool.title(), pool.id.clone())
    });
}

/// How full it is; empty if it is not known.
pub fn used(pool: &Pool) -> String {
    let used = pool.used_percent();
    used.map(|used| format!("{used}%")).unwrap_or_default()
}

/// A size, if the agent has reported one.
pub fn size_of(pool: &Pool, bytes: i64) -> String {
    match pool.total_bytes {
        0 => String::new(),
        _ => size(bytes),
    }
}

/// The status of a pool that was reported before this time says nothing about its present state.
const STALE: SignedDuration = SignedDuration::from_mins(3);

/// How long it takes until it is full, if it fills as it did in the last day; empty if this is not known.
pub fn full_in(pool: &Pool, now: Timestamp) -> String {
    let is_fresh = |seen: Timestamp| now.duration_since(seen) <= STALE;
    let full = pool
        .full_at
        .filter(|_| pool.last_seen.is_some_and(is_fresh));
    full.map(|full| age(Some(now), full)).unwrap_or_default()
}

/// Its health, with what an administrator has decided.
pub fn health(pool: &Pool) -> String {
    let health = match pool.health.as_str() {
        "" => "Unknown",
        health => health,
    };
    match pool.evacuate {
        true => format!("{health},Evacuating"),
        false => health.into(),
    }
}

/// Why it is not healthy.
pub fn message(pool: &Pool) -> String {
    let reason = match pool.lost_reason.as_str() {
        "" => String::new(),
        reason => format!("lost: {reason}"),
    };
    let mut all = vec![pool.message.clone(), reason];
    all.extend(pool.problems.iter().cloned());
    all.retain(|text| !text.is_empty());
    all.join("; ")
}

fn row(pool: &Pool, now: Timestamp) -> Row {
    let [own, shared, snapshots, undivided, counted] = Images::cells(pool.images.as_ref(), now);
    Row {
        name: format!("pool.slackwater.dev/{}", pool.id),
        cells: vec![
            pool.title(),
            pool.kind.clone(),
            health(pool),
            used(pool),
            size_of(pool, pool.total_bytes),
            size_of(pool, pool.available_bytes),
            size_of(pool, pool.promised_bytes),
            pool.volumes.to_string(),
            pool.snapshots.to_string(),
            age(pool.last_seen, now),
            own,
            shared,
            snapshots,
            undivided,
            counted,
            pool.id.clone(),
            pool.file_system.clone(),
            pool.mount.clone(),
            pool.home.clone(),
            message(pool),
        ],
        value: json!(pool),
    }
}
