//! The deletion of orphans that a person has named in `spec.deleteOrphans` of their Pool object: what the
//! status of the pool shows of its orphans, and which of them are to be deleted now.
//!
//! This is a pure function of the Pool object and of one check. What must not be forgotten is in the
//! status: a router that becomes the leader goes on where the one before it has stopped.

use std::collections::BTreeSet;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::{SignedDuration, Timestamp};

use super::{Orphan, OrphanKind};
use crate::router::kube::pools::object::{Health, Pool, PoolOrphan, PoolOrphans};

/// How long an orphan is kept, shorter in tests.
#[derive(Clone, Copy, Debug)]
pub struct Waits {
    /// How long nothing must have named an orphan before it can be deleted. Backups of a cluster are
    /// restored, and mistakes noticed, within this time.
    pub unnamed: SignedDuration,
    /// How long an orphan stays as it is after its deletion was requested.
    pub kept: SignedDuration,
    /// How long its pool must have been on its node. After a disk was moved to another node or cluster,
    /// PersistentVolumes may be created for days.
    pub placed: SignedDuration,
}

impl Default for Waits {
    fn default() -> Waits {
        Waits {
            unnamed: SignedDuration::from_hours(24),
            kept: SignedDuration::from_hours(24),
            placed: SignedDuration::from_hours(7 * 24),
        }
    }
}

/// If no check has seen an orphan for longer than this, something may have named it, and its time begins
/// again. The same is true if a clock was changed by more than this.
pub(super) const MAX_GAP: SignedDuration = SignedDuration::from_mins(30);
/// A request that no check has seen for longer than this has to be repeated: it may come from a backup of
/// the Pool objects.
const MAX_REQUEST_GAP: SignedDuration = SignedDuration::from_hours(24);
/// How many orphans the status lists. As many can be named in `spec.deleteOrphans`.
pub(super) const MAX_LISTED: usize = 100;

/// What follows from a check of a pool.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Plan {
    /// What the status shows; `None` if the pool has no orphans.
    pub(super) shown: Option<PoolOrphans>,
    /// What is to be deleted now.
    pub(super) due: Vec<Orphan>,
    /// IDs in `spec.deleteOrphans` that are no orphans (any more), or whose request is too old.
    pub(super) settled: Vec<String>,
}

/// Decides about the orphans of a pool of which all contents are known. `unnamed` has those of the pool.
pub(super) fn plan(pool: &Pool, unnamed: &[&Orphan], waits: Waits, now: Timestamp) -> Plan {
    let requested: BTreeSet<&str> = pool
        .spec
        .delete_orphans
        .iter()
        .map(String::as_str)
        .collect();
    let last = pool
        .status
        .as_ref()
        .and_then(|status| status.orphans.as_ref());
    let gap = last.map_or(SignedDuration::ZERO, |last| {
        now.duration_since(last.checked.0).abs()
    });
    let is_outdated = gap > MAX_REQUEST_GAP;
    let before = last.filter(|_| gap <= MAX_GAP);
    let (mut listed, mut due) = (Vec::new(), Vec::new());
    for orphan in unnamed {
        let known = before.and_then(|before| before.listed.iter().find(|one| one.id == orphan.id));
        let mut shown = PoolOrphan {
            id: orphan.id.clone(),
            kind: kind(orphan.what).into(),
            group: orphan.group.map(|group| group.to_string()),
            since: known.map_or(Time(now), |known| known.since.clone()),
            delete_at: None,
            message: String::new(),
            volume: None,
        };
        if !is_outdated && requested.contains(orphan.id.as_str()) {
            match refused(pool, orphan, waits, shown.since.0, now) {
                Some(why) => shown.message = why,
                None => {
                    let at = known.and_then(|known| known.delete_at.clone());
                    let at = at.unwrap_or(Time(now + waits.kept));
                    if at.0 <= now {
                        due.push((*orphan).clone());
                    }
                    shown.delete_at = Some(at);
                }
            }
        }
        listed.push(shown);
    }
    let is_orphan = |id: &&str| unnamed.iter().any(|orphan| orphan.id == **id);
    let settled = requested.iter().filter(|id| is_outdated || !is_orphan(id));
    let settled = settled.map(ToString::to_string).collect();
    let count = listed.len() as u64;
    listed.sort_by_key(|one| {
        (
            !requested.contains(one.id.as_str()),
            one.since.0,
            one.id.clone(),
        )
    });
    listed.truncate(MAX_LISTED);
    let checked = Time(now);
    let shown = (count > 0).then_some(PoolOrphans {
        checked,
        count,
        listed,
    });
    Plan {
        shown,
        due,
        settled,
    }
}

/// Whether an orphan is to be deleted, by its Pool object as it is now.
pub(super) fn is_due(pool: &Pool, orphan: &Orphan, waits: Waits, now: Timestamp) -> bool {
    plan(pool, &[orphan], waits, now).due == [orphan.clone()]
}

pub(super) fn kind(what: OrphanKind) -> &'static str {
    match what {
        OrphanKind::Volume => "Volume",
        OrphanKind::Snapshot => "Snapshot",
    }
}

/// Why an orphan whose deletion is requested is not deleted.
fn refused(
    pool: &Pool,
    orphan: &Orphan,
    waits: Waits,
    since: Timestamp,
    now: Timestamp,
) -> Option<String> {
    let status = pool.status.clone().unwrap_or_default();
    if let Some(group) = orphan.group {
        return Some(format!(
            "it is a member of group snapshot {group}; delete it with: slackwater snapshots delete {}",
            orphan.id
        ));
    }
    let is_served = matches!(status.health, Health::Healthy | Health::Degraded);
    if !is_served || status.node != orphan.node || pool.spec.lost {
        return Some("its pool is not served by one node".into());
    }
    let Some(placed) = status.placed_since else {
        return Some("it is not known yet since when its pool is on this node".into());
    };
    let earliest = placed.0 + waits.placed;
    if earliest > now {
        return Some(format!(
            "its pool has been on this node since {}; orphans of a pool that was moved can be deleted later, from {earliest} on",
            placed.0
        ));
    }
    let earliest = since + waits.unnamed;
    (earliest > now).then(|| {
        format!(
            "nothing has named it since {since}; it can be deleted after a day, from {earliest} on"
        )
    })
}

#[cfg(test)]
mod tests;
