//! Orphans: volumes and snapshots on agents that nothing in the cluster names. They are told of,
//! and never deleted: nobody but a person knows whether somebody still wants them.
//!
//! The router that leads looks every few minutes. What is just being made, or deleted, isn't named
//! for a moment either, so something is an orphan only after it was one at each look for a while;
//! a router that begins to lead begins to count.

mod ask;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::PoisonError;
use std::time::{Duration, Instant};

use ::kube::api::{Api, DynamicObject, ListParams};
use ::kube::core::{ApiResource, GroupVersionKind};
use ::kube::{Client, Error as KubeError};
use k8s_openapi::api::core::v1::PersistentVolume;
use serde_json::Value;

use super::{API_TIMEOUT, AgentReports, InCluster, VOLUMES, behind, note};
use crate::error::{Error, Result, chain};
use crate::model::{GroupId, PoolId};
use crate::router::cluster::{Cluster, ObjectRef};
use crate::telemetry::router::Orphans;
pub(super) use ask::ask;

/// Between two looks: each asks every agent for all it has, and the API server for all
/// VolumeSnapshotContents.
const SCAN_INTERVAL: Duration = Duration::from_secs(5 * 60);
/// Sidecars repeat for minutes what an API server that is away has kept them from.
const MIN_AGE: Duration = Duration::from_secs(15 * 60);
/// So many are told at one look; the others at the next.
const MAX_REPORTED_AT_ONCE: usize = 50;
/// VolumeSnapshotContents of one page.
const PAGE: u32 = 500;

/// Times, shorter in tests.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    /// Between two looks.
    pub every: Duration,
    /// How long something must have been an orphan to be told.
    pub age: Duration,
}

impl Default for Pace {
    fn default() -> Pace {
        Pace {
            every: SCAN_INTERVAL,
            age: MIN_AGE,
        }
    }
}

/// What a pool has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stored {
    /// The pool.
    pub pool: PoolId,
    /// Its node.
    pub node: String,
    /// Ids of its volumes, but those that live and die with a pod.
    pub volumes: Vec<String>,
    /// Its snapshots.
    pub snapshots: Vec<StoredSnapshot>,
}

/// A snapshot that a pool has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredSnapshot {
    /// Its id.
    pub id: String,
    /// The group that it goes with, if it's a member of one.
    pub group: Option<GroupId>,
}

/// What something is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum What {
    /// A volume.
    Volume,
    /// A snapshot.
    Snapshot,
}

/// An orphan.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Orphan {
    /// What it is.
    pub what: What,
    /// Its id.
    pub id: String,
    /// Its pool.
    pub pool: PoolId,
    /// The pool's node.
    pub node: String,
    /// The group that it goes with, if it's a member of one.
    pub group: Option<GroupId>,
}

impl Orphan {
    fn words(&self) -> String {
        let (what, object) = match self.what {
            What::Volume => ("volume", "PersistentVolume"),
            What::Snapshot => ("snapshot", "VolumeSnapshotContent"),
        };
        let group = match self.group {
            Some(group) => format!(", a member of group snapshot {group},"),
            None => String::new(),
        };
        format!(
            "{what} {}{group} is on node {}, but no {object} references it; it is not deleted",
            self.id, self.node
        )
    }
}

/// What has been unnamed, since when, and whether it was told.
#[derive(Debug, Default)]
struct Memory(BTreeMap<Orphan, (Instant, bool)>);

impl Memory {
    /// Takes a look. What is on a pool that couldn't be asked is as it was.
    fn take(&mut self, stored: &[Stored], unnamed: BTreeSet<Orphan>, now: Instant) {
        let asked: BTreeSet<PoolId> = stored.iter().map(|one| one.pool).collect();
        self.0
            .retain(|orphan, _| !asked.contains(&orphan.pool) || unnamed.contains(orphan));
        for orphan in unnamed {
            self.0.entry(orphan).or_insert((now, false));
        }
    }

    /// Those that are old enough.
    fn old(&self, age: Duration, now: Instant) -> impl Iterator<Item = &Orphan> {
        let old = move |(since, _): &(Instant, bool)| now.duration_since(*since) >= age;
        let each = self.0.iter();
        each.filter(move |(_, state)| old(state))
            .map(|(orphan, _)| orphan)
    }

    /// Those that are old enough and weren't told yet, at most so many. They count as told.
    fn untold(&mut self, age: Duration, now: Instant) -> Vec<Orphan> {
        let each = self.0.iter_mut();
        let new = each.filter(|(_, (since, told))| !*told && now.duration_since(*since) >= age);
        let told = new.take(MAX_REPORTED_AT_ONCE).map(|(orphan, (_, told))| {
            *told = true;
            orphan.clone()
        });
        told.collect()
    }
}

/// What of it nothing names. `snapshots` is `None` where the cluster has none, and then nothing is
/// said of them.
fn unnamed(
    stored: &[Stored],
    names_volume: impl Fn(&str) -> bool,
    snapshots: Option<&BTreeSet<String>>,
) -> BTreeSet<Orphan> {
    let mut found = BTreeSet::new();
    for one in stored {
        let orphan = |what: What, id: &String, group: Option<GroupId>| Orphan {
            what,
            id: id.clone(),
            pool: one.pool,
            node: one.node.clone(),
            group,
        };
        let volumes = one.volumes.iter().filter(|id| !names_volume(id));
        found.extend(volumes.map(|id| orphan(What::Volume, id, None)));
        if let Some(named) = snapshots {
            let all = one.snapshots.iter();
            let snapshots = all.filter(|snapshot| !named.contains(&snapshot.id));
            found.extend(snapshots.map(|one| orphan(What::Snapshot, &one.id, one.group)));
        }
    }
    found
}

/// Looks for ever, while this router leads.
pub(super) async fn run(cluster: &InCluster, fleet: &dyn AgentReports) {
    let pace = cluster.options.orphans;
    let mut memory = Memory::default();
    loop {
        tokio::time::sleep(pace.every).await;
        let seen = if cluster.is_leader() {
            scan(cluster, fleet, &mut memory).await
        } else {
            memory = Memory::default();
            None
        };
        *cluster
            .orphans
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = seen;
    }
}

async fn scan(
    cluster: &InCluster,
    fleet: &dyn AgentReports,
    memory: &mut Memory,
) -> Option<Orphans> {
    // First what there is, then what names it: what is made in between is named.
    let stored = fleet.stored().await;
    let snapshots = match snapshot_handles(&cluster.client, &cluster.options.driver).await {
        Ok(snapshots) => snapshots,
        Err(error) => {
            tracing::debug!(error = %chain(&error), "failed to look for orphans");
            return *cluster
                .orphans
                .lock()
                .unwrap_or_else(PoisonError::into_inner);
        }
    };
    if !cluster.following.is_complete(VOLUMES) || cluster.problem().is_some() {
        return None;
    }
    let (age, now) = (cluster.options.orphans.age, Instant::now());
    let names = |id: &str| cluster.volumes.names(id);
    memory.take(&stored, unnamed(&stored, names, snapshots.as_ref()), now);
    for orphan in memory.untold(age, now) {
        let message = orphan.words();
        tracing::warn!(
            id = orphan.id,
            node = orphan.node,
            message,
            "found an orphan"
        );
        cluster.record_event(&ObjectRef::Pool(orphan.pool), true, "Orphan", message);
    }
    let count = |what: What| memory.old(age, now).filter(|one| one.what == what).count() as u64;
    Some(Orphans {
        volumes: count(What::Volume),
        snapshots: snapshots.map(|_| count(What::Snapshot)),
    })
}

/// Why objects of a kind can't be listed.
#[derive(Debug)]
pub(super) enum Unlisted {
    /// The API server doesn't know the kind.
    Unknown,
    /// They aren't ours to read.
    Forbidden,
    /// It can't be asked now.
    Failed(Error),
}

/// Looks at all objects of a kind, page by page.
pub(super) async fn each(
    client: &Client,
    kind: &GroupVersionKind,
    mut look: impl FnMut(&DynamicObject),
) -> Result<(), Unlisted> {
    let api = Api::<DynamicObject>::all_with(client.clone(), &ApiResource::from_gvk(kind));
    let failed = |reason: String| {
        Unlisted::Failed(Error::Unreachable {
            what: format!("the list of {}s", kind.kind),
            reason,
        })
    };
    let mut params = ListParams::default().limit(PAGE);
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

/// Ids that VolumeSnapshotContents of this driver name; `None` where the cluster has no such
/// objects for us, as where snapshots are switched off.
async fn snapshot_handles(client: &Client, driver: &str) -> Result<Option<BTreeSet<String>>> {
    let mut handles = BTreeSet::new();
    let kind = note::snapshot_contents();
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

/// What the driver behind a socket has that nothing in the cluster names now. Something that is
/// just being made may be among it. With the node's name left out, which the socket doesn't tell.
///
/// The driver itself says what it is called: VolumeSnapshotContents of any other name would not
/// count, and every snapshot would be taken for an orphan.
pub async fn behind(client: &Client, expected: Option<&str>, socket: &Path) -> Result<Vec<Orphan>> {
    let (channel, driver) = behind::driver(socket, expected).await?;
    let stored = ask::behind(channel).await;
    let stored = stored.map_err(|reason| behind::unreachable(socket, reason))?;
    let snapshots = snapshot_handles(client, &driver).await?;
    let api = Api::<PersistentVolume>::all(client.clone());
    let volumes = super::adopt::all("PersistentVolumes", &api, ListParams::default()).await?;
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
                .words()
                .contains("volume b is on node node-1")
        );
        let without = unnamed(&stored, |_| true, None);
        assert!(
            without.is_empty(),
            "a cluster without snapshots: {without:?}"
        );
    }

    #[test]
    fn only_what_is_old_counts_and_is_told_once() {
        let mut memory = Memory::default();
        let begun = Instant::now();
        let age = Duration::from_secs(10);
        let mut at = |seconds: u64, stored: &[Stored]| {
            let now = begun + Duration::from_secs(seconds);
            memory.take(stored, unnamed(stored, |_| false, None), now);
            let told = memory.untold(age, now);
            let old = memory.old(age, now).map(|one| one.id.clone());
            (old.collect::<Vec<_>>(), told.len())
        };
        let none = Vec::<String>::new();
        assert_eq!(at(0, &[stored(1, &["a", "b"], &[])]), (none.clone(), 0));
        // One was just being made; another one comes.
        assert_eq!(at(9, &[stored(1, &["a", "c"], &[])]), (none, 0));
        assert_eq!(
            at(10, &[stored(1, &["a", "c"], &[])]),
            (vec!["a".into()], 1)
        );
        assert_eq!(
            at(11, &[stored(1, &["a", "c"], &[])]),
            (vec!["a".into()], 0)
        );
        // A pool that can't be asked changes nothing.
        let both = vec!["a".to_string(), "c".into()];
        assert_eq!(at(19, &[stored(2, &["d"], &[])]), (both, 1));
        assert_eq!(at(20, &[stored(1, &["c"], &[])]), (vec!["c".into()], 0));
    }

    #[test]
    fn a_crowd_is_told_bit_by_bit() {
        let names: Vec<String> = (0..MAX_REPORTED_AT_ONCE + 7)
            .map(|n| n.to_string())
            .collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let stored = [stored(1, &names, &[])];
        let mut memory = Memory::default();
        let now = Instant::now();
        memory.take(&stored, unnamed(&stored, |_| false, None), now);
        let mut told = || memory.untold(Duration::ZERO, now).len();
        assert_eq!([told(), told(), told()], [MAX_REPORTED_AT_ONCE, 7, 0]);
    }
}
