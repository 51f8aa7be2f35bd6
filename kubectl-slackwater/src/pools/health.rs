//! The health and the fill level of a pool, as the list of pools and `status` show them.

use k8s_openapi::jiff::{SignedDuration, Timestamp};

use crate::model::Pool;
use crate::text::{age, size};

pub fn sort_fullest_first(pools: &mut [Pool]) {
    pools.sort_by_key(|pool| {
        let fullness = pool.used_percent().unwrap_or(-1);
        (std::cmp::Reverse(fullness), pool.title(), pool.id.clone())
    });
}

/// How full it is; empty if it is not known.
pub fn used_percent(pool: &Pool) -> String {
    let used = pool.used_percent();
    used.map(|used| format!("{used}%")).unwrap_or_default()
}

/// A size, if the agent has reported one.
pub fn known_size(pool: &Pool, bytes: i64) -> String {
    match pool.total_bytes {
        0 => String::new(),
        _ => size(bytes),
    }
}

/// What was not reported for longer is not the present state. The status of a pool is written once a minute.
pub const STALE: SignedDuration = SignedDuration::from_mins(3);

fn is_fresh(pool: &Pool, now: Timestamp) -> bool {
    let is_recent = |seen: Timestamp| now.duration_since(seen) <= STALE;
    pool.last_seen.is_some_and(is_recent)
}

/// Its status is called the present one, but is too old for that. That of a pool whose agent cannot be
/// reached, or which is gone, is not called so.
fn is_outdated(pool: &Pool, now: Timestamp) -> bool {
    let is_old = matches!(pool.health.as_str(), "Unreachable" | "Lost" | "Forgotten");
    !is_old && !is_fresh(pool, now)
}

/// An agent serves it, reports it, and nothing needs repair.
pub fn is_healthy(pool: &Pool, now: Timestamp) -> bool {
    pool.health == "Healthy" && pool.problems.is_empty() && !is_outdated(pool, now)
}

/// How long it takes until it is full, if it fills as it did in the last day; empty if this is not known.
pub fn time_until_full(pool: &Pool, now: Timestamp) -> String {
    let full = pool.full_at.filter(|_| is_fresh(pool, now));
    full.map(|full| age(Some(now), full)).unwrap_or_default()
}

/// Its health, with what an administrator has decided, and whether it is known at all.
pub fn summary(pool: &Pool, now: Timestamp) -> String {
    let mut health = match pool.health.as_str() {
        "" => "Unknown".to_string(),
        health => health.into(),
    };
    if is_outdated(pool, now) {
        health.push_str(",Outdated");
    }
    if pool.evacuate {
        health.push_str(",Evacuating");
    }
    health
}

/// Why it is not healthy.
pub fn message(pool: &Pool, now: Timestamp) -> String {
    let reason = match pool.lost_reason.as_str() {
        "" => String::new(),
        reason => format!("lost: {reason}"),
    };
    let mut all = vec![pool.message.clone(), reason];
    all.extend(pool.problems.iter().cloned());
    if is_outdated(pool, now) {
        let seen = match pool.last_seen {
            None => "it was never reported".to_string(),
            seen => format!("it was reported {} ago", age(seen, now)),
        };
        all.push(format!("{seen}: see whether the controller runs"));
    }
    all.retain(|text| !text.is_empty());
    all.join("; ")
}
