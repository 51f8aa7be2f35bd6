//! Orphans, as a controller: volumes and snapshots of agents that no object in the cluster names.
//! They are reported, and deleted only if a person requests it ([`deletion`]), because only a person can
//! know whether they are still needed.
//!
//! The leading router checks every few minutes. An object that is just being created or deleted is
//! not named for a moment either, so it is an orphan only after it was unnamed in every check for a
//! while. A router that becomes the leader starts to count from zero.
//!
//! [`unowned_snapshots`] is a command that deletes single snapshots that no object owns.
//!
//! | file | content |
//! |---|---|
//! | `controller` | the reconciler |
//! | `ask` | lists of a driver |
//! | `deletion` | which orphans are deleted, and when |
//! | `described` | what a person needs to adopt one |
//! | `named` | the check before a deletion |
//! | `unowned_snapshots` | the command |

mod ask;
mod controller;
mod deletion;
mod described;
mod named;
pub mod unowned_snapshots;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ::kube::api::{Api, DynamicObject, ListParams};
use ::kube::core::{ApiResource, GroupVersionKind};
use ::kube::{Client, Error as KubeError};
use k8s_openapi::api::core::v1::PersistentVolume;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use serde_json::Value;

pub use crate::agent::describe_volumes_response::Volume as DescribedVolume;

use super::pools::object::PoolOrphans;
use super::{API_TIMEOUT, snapshot_contents};
use crate::error::{Error, Result, chain};
use crate::model::{GroupId, PoolId};
use crate::router::csi_socket;
use crate::telemetry::router::Orphans;
pub(super) use ask::ask;
pub(super) use controller::OrphanController;
pub use deletion::Waits;

/// Between two checks. Each check asks every agent for all its volumes and snapshots, and the API
/// server for all VolumeSnapshotContents.
const SCAN_INTERVAL: Duration = Duration::from_secs(5 * 60);
/// After an outage of the API server, sidecars need minutes to repeat what they could not do.
const MIN_AGE: Duration = Duration::from_secs(15 * 60);
/// This many are reported after one check, and the others after the next ones.
const MAX_REPORTED_AT_ONCE: usize = 50;
/// VolumeSnapshotContents of one page.
const CONTENTS_PER_PAGE: u32 = 500;

/// Times, shorter in tests.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    /// Between two checks.
    pub every: Duration,
    /// How long something must have been unnamed to be reported.
    pub age: Duration,
    /// Of deletions that a person requests.
    pub deletion: Waits,
}

impl Default for Pace {
    fn default() -> Pace {
        Pace {
            every: SCAN_INTERVAL,
            age: MIN_AGE,
            deletion: Waits::default(),
        }
    }
}

/// The contents of a pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stored {
    pub pool: PoolId,
    pub node: String,
    /// Ids of its volumes, without ephemeral ones, which are deleted with their pod.
    pub volumes: Vec<String>,
    pub snapshots: Vec<StoredSnapshot>,
}

/// A snapshot of a pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredSnapshot {
    pub id: String,
    /// The ID of its volume.
    pub source: String,
    /// The group that it is a member of.
    pub group: Option<GroupId>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum OrphanKind {
    Volume,
    Snapshot,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Orphan {
    pub what: OrphanKind,
    pub id: String,
    pub pool: PoolId,
    /// The pool's node.
    pub node: String,
    /// Of a snapshot, the ID of its volume.
    pub source: String,
    /// The group that it is a member of.
    pub group: Option<GroupId>,
}

impl fmt::Display for Orphan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (what, object) = match self.what {
            OrphanKind::Volume => ("volume", "PersistentVolume"),
            OrphanKind::Snapshot => ("snapshot", "VolumeSnapshotContent"),
        };
        let group = match self.group {
            Some(group) => format!(", a member of group snapshot {group},"),
            None => String::new(),
        };
        write!(
            f,
            "{what} {}{group} is on node {}, but no {object} references it; it is not deleted",
            self.id, self.node
        )
    }
}

/// What has been unnamed, since when, and whether it was reported.
#[derive(Debug, Default)]
pub(super) struct Memory(BTreeMap<Orphan, (Instant, bool)>);

impl Memory {
    /// Takes the result of a check. The entries of a pool that could not be asked stay as they
    /// were.
    fn take(&mut self, stored: &[Stored], unnamed: BTreeSet<Orphan>, now: Instant) {
        let asked: BTreeSet<PoolId> = stored.iter().map(|one| one.pool).collect();
        self.0
            .retain(|orphan, _| !asked.contains(&orphan.pool) || unnamed.contains(orphan));
        for orphan in unnamed {
            self.0.entry(orphan).or_insert((now, false));
        }
    }

    /// Those that are old enough to be orphans.
    fn old(&self, age: Duration, now: Instant) -> impl Iterator<Item = &Orphan> {
        let is_old = move |since: &Instant| now.duration_since(*since) >= age;
        let old = self.0.iter().filter(move |(_, (since, _))| is_old(since));
        old.map(|(orphan, _)| orphan)
    }

    /// Those that are old enough and not reported yet, at most [`MAX_REPORTED_AT_ONCE`].
    fn unreported(&self, age: Duration, now: Instant) -> Vec<Orphan> {
        let is_new = |orphan: &&Orphan| self.0.get(orphan).is_some_and(|(_, reported)| !reported);
        let new = self.old(age, now).filter(is_new);
        new.take(MAX_REPORTED_AT_ONCE).cloned().collect()
    }

    fn reported(&mut self, orphan: &Orphan) {
        if let Some((_, reported)) = self.0.get_mut(orphan) {
            *reported = true;
        }
    }
}

/// What the last check has found, if this router leads.
#[derive(Debug, Default)]
pub(super) struct KnownOrphans {
    counts: Mutex<Option<Orphans>>,
    /// When pools were checked, and what their status shows of their orphans.
    shown: Mutex<BTreeMap<PoolId, (Time, Option<PoolOrphans>)>>,
}

impl KnownOrphans {
    /// The number of orphans.
    pub(super) fn counts(&self) -> Option<Orphans> {
        *lock(&self.counts)
    }

    /// When pools were checked, and what their status shows of their orphans.
    pub(super) fn shown(&self) -> BTreeMap<PoolId, (Time, Option<PoolOrphans>)> {
        lock(&self.shown).clone()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The volumes and snapshots that nothing names. `snapshots` is `None` in a cluster without snapshots,
/// where no snapshot counts as unnamed.
fn unnamed(
    stored: &[Stored],
    names_volume: impl Fn(&str) -> bool,
    snapshots: Option<&BTreeSet<String>>,
) -> BTreeSet<Orphan> {
    let mut found = BTreeSet::new();
    for one in stored {
        let orphan = |what: OrphanKind, id: &String, source: &str, group: Option<GroupId>| Orphan {
            what,
            source: source.into(),
            id: id.clone(),
            pool: one.pool,
            node: one.node.clone(),
            group,
        };
        let volumes = one.volumes.iter().filter(|id| !names_volume(id));
        found.extend(volumes.map(|id| orphan(OrphanKind::Volume, id, "", None)));
        if let Some(named) = snapshots {
            let all = one.snapshots.iter();
            let snapshots = all.filter(|snapshot| !named.contains(&snapshot.id));
            found.extend(
                snapshots.map(|one| orphan(OrphanKind::Snapshot, &one.id, &one.source, one.group)),
            );
        }
    }
    found
}

/// Why objects of a kind cannot be listed.
#[derive(Debug)]
pub(super) enum Unlisted {
    /// The API server does not know the kind.
    Unknown,
    /// This account may not read them.
    Forbidden,
    /// The API server cannot be asked now.
    Failed(Error),
}

/// Calls `look` with each object of a kind, page by page.
pub(super) async fn each(
    client: &Client,
    kind: &GroupVersionKind,
    mut look: impl FnMut(&DynamicObject),
) -> Result<(), Unlisted> {
    let api = Api::<DynamicObject>::all_with(client.clone(), &ApiResource::from_gvk(kind));
    let failed = |reason: String| {
        Unlisted::Failed(Error::unreachable(
            format!("the list of {}s", kind.kind),
            reason,
        ))
    };
    let mut params = ListParams::default().limit(CONTENTS_PER_PAGE);
    loop {
        let page = match tokio::time::timeout(API_TIMEOUT, api.list(&params)).await {
            Ok(Ok(page)) => page,
            Ok(Err(KubeError::Api(status))) if status.code == 404 => return Err(Unlisted::Unknown),
            Ok(Err(KubeError::Api(status))) if status.code == 403 => {
                return Err(Unlisted::Forbidden);
            }
            Ok(Err(error)) => return Err(failed(chain(&error))),
            Err(_) => return Err(failed("no answer from the API server".into())),
        };
        page.items.iter().for_each(&mut look);
        match page.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => params = params.continue_token(&token),
            None => return Ok(()),
        }
    }
}

/// Ids that VolumeSnapshotContents of this driver name; `None` if the cluster has no such objects or
/// does not let this account read them, as when snapshots are switched off.
async fn snapshot_handles(client: &Client, driver: &str) -> Result<Option<BTreeSet<String>>> {
    let mut handles = BTreeSet::new();
    let kind = snapshot_contents::snapshot_contents();
    let looked = each(client, &kind, |content| {
        let text = |path: &str| content.data.pointer(path).and_then(Value::as_str);
        if text("/spec/driver") == Some(driver) {
            let both = ["/status/snapshotHandle", "/spec/source/snapshotHandle"];
            handles.extend(both.into_iter().filter_map(text).map(String::from));
        }
    });
    match looked.await {
        Ok(()) => Ok(Some(handles)),
        Err(Unlisted::Unknown | Unlisted::Forbidden) => Ok(None),
        Err(Unlisted::Failed(error)) => Err(error),
    }
}

/// Volumes and snapshots of the driver at a socket that nothing in the cluster names now. Something
/// that is just being created may be among them. The node's name is empty, because the driver does not
/// report it.
///
/// The driver itself reports its name. With a wrong name no VolumeSnapshotContent would count, and
/// every snapshot would be taken for an orphan.
pub async fn behind(client: &Client, expected: Option<&str>, socket: &Path) -> Result<Vec<Orphan>> {
    let (channel, driver) = csi_socket::driver(socket, expected).await?;
    let stored = ask::behind(channel).await;
    let stored = stored.map_err(|reason| csi_socket::unreachable(socket, reason))?;
    let snapshots = snapshot_handles(client, &driver).await?;
    let api = Api::<PersistentVolume>::all(client.clone());
    let volumes = super::lists::all("PersistentVolumes", &api, ListParams::default()).await?;
    let handle = |volume: PersistentVolume| Some(volume.spec?.csi?).map(|csi| csi.volume_handle);
    let named: BTreeSet<String> = volumes.into_iter().filter_map(handle).collect();
    let found = unnamed(&stored, |id| named.contains(id), snapshots.as_ref());
    Ok(found.into_iter().collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pool(n: u8) -> PoolId {
        format!("11111111-2222-4333-8444-{n:012}").parse().unwrap()
    }

    fn stored(n: u8, volumes: &[&str], snapshots: &[&str]) -> Stored {
        let snapshot = |id: &&str| StoredSnapshot {
            source: String::new(),
            id: id.to_string(),
            group: None,
        };
        Stored {
            pool: pool(n),
            node: format!("node-{n}"),
            volumes: volumes.iter().map(ToString::to_string).collect(),
            snapshots: snapshots.iter().map(snapshot).collect(),
        }
    }

    fn ids<'a>(orphans: impl Iterator<Item = &'a Orphan>) -> Vec<&'a str> {
        orphans.map(|orphan| orphan.id.as_str()).collect()
    }

    #[test]
    fn what_nothing_names_is_found() {
        let stored = [stored(1, &["a", "b"], &["s", "t"]), stored(2, &["c"], &[])];
        let named = ["s".to_string()].into();
        let found = unnamed(&stored, |id| id == "a", Some(&named));
        assert_eq!(ids(found.iter()), ["b", "c", "t"]);
        assert!(
            found
                .first()
                .unwrap()
                .to_string()
                .contains("volume b is on node node-1")
        );
        let without = unnamed(&stored, |_| true, None);
        assert!(
            without.is_empty(),
            "a cluster without snapshots: {without:?}"
        );
    }

    #[test]
    fn only_what_is_old_counts_and_is_reported_once() {
        let mut memory = Memory::default();
        let begun = Instant::now();
        let age = Duration::from_secs(10);
        let mut at = |seconds: u64, stored: &[Stored]| {
            let now = begun + Duration::from_secs(seconds);
            memory.take(stored, unnamed(stored, |_| false, None), now);
            let reported = memory.unreported(age, now);
            reported.iter().for_each(|orphan| memory.reported(orphan));
            let old = memory.old(age, now).map(|one| one.id.clone());
            (old.collect::<Vec<_>>(), reported.len())
        };
        let none = Vec::<String>::new();
        assert_eq!(at(0, &[stored(1, &["a", "b"], &[])]), (none.clone(), 0));
        // The volume was just being created; another one appears.
        assert_eq!(at(9, &[stored(1, &["a", "c"], &[])]), (none, 0));
        assert_eq!(
            at(10, &[stored(1, &["a", "c"], &[])]),
            (vec!["a".into()], 1)
        );
        assert_eq!(
            at(11, &[stored(1, &["a", "c"], &[])]),
            (vec!["a".into()], 0)
        );
        // A pool that cannot be asked changes nothing.
        let both = vec!["a".to_string(), "c".into()];
        assert_eq!(at(19, &[stored(2, &["d"], &[])]), (both, 1));
        assert_eq!(at(20, &[stored(1, &["c"], &[])]), (vec!["c".into()], 0));
    }

    #[test]
    fn many_orphans_are_reported_in_parts() {
        let names: Vec<String> = (0..MAX_REPORTED_AT_ONCE + 7)
            .map(|n| n.to_string())
            .collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let stored = [stored(1, &names, &[])];
        let mut memory = Memory::default();
        let now = Instant::now();
        memory.take(&stored, unnamed(&stored, |_| false, None), now);
        let mut report = || {
            let reported = memory.unreported(Duration::ZERO, now);
            reported.iter().for_each(|orphan| memory.reported(orphan));
            reported.len()
        };
        assert_eq!([report(), report(), report()], [MAX_REPORTED_AT_ONCE, 7, 0]);
    }
}
