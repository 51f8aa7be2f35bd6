//! Reads everything that decisions about schedules need.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ::kube::api::{Api, DynamicObject, ListParams};
use ::kube::client::Body;
use ::kube::core::{ApiResource, GroupVersionKind};
use ::kube::{Client, ResourceExt};
use jiff::tz::TimeZone;
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use serde_json::Value;
use tokio::sync::Mutex;

use super::check::Cache;
use super::decide::{Class, Seen, decide};
use super::names::Names;
use super::object::SnapshotSchedule;
use super::sets::{SCHEDULE_UID, Set, level_of, text};
use super::spec;
use super::uses::{Namespace, Shared, World, wanted};
use crate::error::{Error, Result, chain};
use crate::model::{PoolId, SnapshotParameters};
use crate::router::cluster::Cluster;
use crate::router::kube::lists::{all, first_pages};
use crate::router::kube::orphans::{Unlisted, each};
use crate::router::kube::{InCluster, ask, snapshot_contents};

/// Nothing is deleted while the clocks of the router and the API server differ by more than this.
const MAX_SKEW: SignedDuration = SignedDuration::from_mins(1);
/// How long the level of a new set, which is written a moment after it is ready, is looked for.
const LEVEL_TIMEOUT: SignedDuration = SignedDuration::from_mins(5);
/// How long the lists of one schedule are used for others.
const MAX_AGE: Duration = Duration::from_secs(10);
/// Snapshots of one page.
const PER_PAGE: u32 = 500;

/// What was read, and when.
type Kept<T> = Option<(Instant, Arc<T>)>;

/// What one pass reads for all schedules.
pub(super) struct Pass {
    pub(super) now: Timestamp,
    skew: Option<String>,
    /// The version of group snapshots that the cluster has.
    pub(super) groups_api: Option<ApiResource>,
    /// By whether they are of groups, and their names.
    classes: BTreeMap<(bool, String), Class>,
    /// Those of schedules.
    snapshots: Vec<DynamicObject>,
    groups: Vec<DynamicObject>,
    /// What is read only if a set is to be deleted, and when.
    shared: Mutex<Kept<Shared>>,
    /// The same of single namespaces.
    namespaces: Mutex<BTreeMap<String, Arc<Mutex<Kept<Namespace>>>>>,
    checks: Arc<Cache>,
}

pub(super) fn snapshots_api() -> ApiResource {
    ApiResource::from_gvk(&snapshot_kind("VolumeSnapshot"))
}

fn snapshot_kind(kind: &str) -> GroupVersionKind {
    GroupVersionKind::gvk("snapshot.storage.k8s.io", "v1", kind)
}

/// The same version of another kind of the group.
fn group_kind(api: &ApiResource, kind: &str) -> GroupVersionKind {
    GroupVersionKind::gvk(&api.group, &api.version, kind)
}

impl Pass {
    /// What is read of the whole cluster before a set is deleted. The schedules of a pass share it while it
    /// is new: with a list for each of them, a pass would take longer the more schedules there are.
    async fn shared(&self, client: &Client) -> Result<Arc<Shared>> {
        let mut read = self.shared.lock().await;
        if let Some((_, shared)) = read.as_ref().filter(|(at, _)| at.elapsed() < MAX_AGE) {
            return Ok(Arc::clone(shared));
        }
        let at = Instant::now();
        // The contents are read after the claims: a claim that is bound in between has its content then.
        let claims = Api::<PersistentVolumeClaim>::all(client.clone());
        let claims = all("PersistentVolumeClaims", &claims, ListParams::default()).await?;
        let mut shared = Shared {
            wanted: claims.iter().flat_map(wanted).collect(),
            contents: by_name(client, &snapshot_contents::snapshot_contents()).await?,
            ..Shared::default()
        };
        if let Some(api) = &self.groups_api {
            let kind = group_kind(api, "VolumeGroupSnapshotContent");
            shared.group_contents = by_name(client, &kind).await?;
        }
        let shared = Arc::new(shared);
        *read = Some((at, Arc::clone(&shared)));
        Ok(shared)
    }

    /// The snapshots of a namespace, and the groups of its schedules, which these share in the same way.
    async fn of_namespace(&self, client: &Client, namespace: &str) -> Result<Arc<Namespace>> {
        let its = {
            let mut all = self.namespaces.lock().await;
            Arc::clone(all.entry(namespace.into()).or_default())
        };
        let mut read = its.lock().await;
        if let Some((_, known)) = read.as_ref().filter(|(at, _)| at.elapsed() < MAX_AGE) {
            return Ok(Arc::clone(known));
        }
        let at = Instant::now();
        let snapshots = snapshots_api();
        let its = Api::<DynamicObject>::namespaced_with(client.clone(), namespace, &snapshots);
        let what = format!("the VolumeSnapshots of namespace {namespace}");
        let mut found = Namespace {
            snapshots: all(&what, &its, ListParams::default()).await?,
            groups: Vec::new(),
        };
        if let Some(api) = &self.groups_api {
            let its = Api::<DynamicObject>::namespaced_with(client.clone(), namespace, api);
            let params = ListParams::default().labels(SCHEDULE_UID);
            let what = format!("the VolumeGroupSnapshots of namespace {namespace}");
            found.groups = all(&what, &its, params).await?;
        }
        let found = Arc::new(found);
        *read = Some((at, Arc::clone(&found)));
        Ok(found)
    }
}

/// Reads what all schedules need.
pub(super) async fn pass(cluster: &InCluster, checks: &Arc<Cache>) -> Result<Pass> {
    let client = &cluster.client;
    let (now, skew) = clocks((cluster.options.clock)(), server_time(client).await?);
    let ours = ListParams::default().labels(SCHEDULE_UID).limit(PER_PAGE);
    let snapshots = objects(client, &snapshots_api(), ours.clone()).await?;
    let mut pass = Pass {
        now,
        skew,
        groups_api: None,
        classes: BTreeMap::new(),
        snapshots: snapshots.unwrap_or_default(),
        groups: Vec::new(),
        shared: Mutex::default(),
        namespaces: Mutex::default(),
        checks: Arc::clone(checks),
    };
    for kind in snapshot_contents::group_contents() {
        let kind = GroupVersionKind::gvk(&kind.group, &kind.version, "VolumeGroupSnapshot");
        let api = ApiResource::from_gvk(&kind);
        if let Some(groups) = objects(client, &api, ours.clone()).await? {
            (pass.groups, pass.groups_api) = (groups, Some(api));
            break;
        }
    }
    let mut kinds = vec![(false, snapshot_kind("VolumeSnapshotClass"))];
    let of_groups = pass.groups_api.iter();
    kinds.extend(of_groups.map(|api| (true, group_kind(api, "VolumeGroupSnapshotClass"))));
    for (is_group, kind) in kinds {
        let api = ApiResource::from_gvk(&kind);
        let classes = objects(client, &api, ListParams::default()).await?;
        for object in classes.unwrap_or_default() {
            let class = class(&object, &cluster.options.driver);
            pass.classes.insert((is_group, object.name_any()), class);
        }
    }
    Ok(pass)
}

/// The objects of a kind; `None` if the cluster does not have it.
async fn objects(
    client: &Client,
    api: &ApiResource,
    params: ListParams,
) -> Result<Option<Vec<DynamicObject>>> {
    let its = Api::<DynamicObject>::all_with(client.clone(), api);
    let list = |params: ListParams| {
        let its = its.clone();
        async move { its.list(&params).await }
    };
    let found = first_pages(&format!("{}s", api.kind), params, usize::MAX, list).await?;
    Ok(found.map(|(objects, _)| objects))
}

fn class(object: &DynamicObject, driver: &str) -> Class {
    let parameters = object.data.get("parameters").and_then(Value::as_object);
    let parameters: BTreeMap<String, String> = parameters
        .into_iter()
        .flatten()
        .filter_map(|(key, value)| Some((key.clone(), value.as_str()?.to_string())))
        .collect();
    let parsed = SnapshotParameters::parse(&parameters);
    Class {
        is_ours: text(object, "/driver") == Some(driver),
        deletes: text(object, "/deletionPolicy") == Some("Delete"),
        level: match parsed {
            Ok((parameters, _)) => Ok(parameters.consistency),
            Err(error) => Err(error.to_string()),
        },
    }
}

/// The time of the API server.
async fn server_time(client: &Client) -> Result<Timestamp> {
    let what = "the API server's clock";
    let unknown = |why: String| Error::unreachable(what, why);
    let request = http::Request::get("/version").body(Body::empty());
    let request = request.map_err(|error| unknown(error.to_string()))?;
    let answer = ask(what, client.send(request)).await?;
    let date = answer.headers().get(http::header::DATE);
    let date = date.and_then(|date| date.to_str().ok()).unwrap_or_default();
    parse_date(date).ok_or_else(|| unknown(format!("its Date is {date:?}")))
}

/// The Date of an HTTP response.
fn parse_date(text: &str) -> Option<Timestamp> {
    let time = jiff::civil::DateTime::strptime("%a, %d %b %Y %H:%M:%S GMT", text);
    TimeZone::UTC.to_timestamp(time.ok()?).ok()
}

/// The earlier time, and by how much they differ, if that is too much.
fn clocks(router: Timestamp, server: Timestamp) -> (Timestamp, Option<String>) {
    let skew = router.duration_since(server);
    let problem = (skew.abs() > MAX_SKEW).then(|| {
        format!("nothing is deleted, because the clocks of the router and the API server differ by {} s", skew.abs().as_secs())
    });
    (router.min(server), problem)
}

/// Reads what is needed for the next step of a schedule. It is read itself only if something is to be done:
/// the watch has it, and with hundreds of schedules there is mostly nothing to do.
pub(super) async fn observe(
    cluster: &InCluster,
    pass: &Pass,
    schedule: &SnapshotSchedule,
) -> Result<Option<Seen>> {
    let seen = read(cluster, pass, schedule.clone()).await?;
    if decide(&seen).is_nothing(&seen) {
        return Ok(Some(seen));
    }
    let namespace = schedule.namespace().unwrap_or_default();
    let api = Api::<SnapshotSchedule>::namespaced(cluster.client.clone(), &namespace);
    let what = format!("SnapshotSchedule {}", schedule.path());
    let now = ask(&what, api.get_opt(&schedule.name_any())).await?;
    let is_same = |now: &SnapshotSchedule| {
        now.metadata.uid == schedule.metadata.uid && now.metadata.deletion_timestamp.is_none()
    };
    match now.filter(is_same) {
        None => Ok(None),
        Some(now) if now.metadata.resource_version == schedule.metadata.resource_version => {
            Ok(Some(seen))
        }
        Some(now) => read(cluster, pass, now).await.map(Some),
    }
}

/// Reads what is needed for the next step of a schedule with this object.
async fn read(cluster: &InCluster, pass: &Pass, object: SnapshotSchedule) -> Result<Seen> {
    let namespace = object.namespace().unwrap_or_default();
    let is_group = object.spec.selector.is_some();
    let class = (is_group, object.spec.class.clone());
    let mut seen = Seen {
        now: pass.now,
        skew: pass.skew.clone(),
        has_groups: pass.groups_api.is_some(),
        class: pass.classes.get(&class).cloned(),
        sets: BTreeMap::new(),
        others: Vec::new(),
        unread: None,
        is_complete: false,
        check: None,
        object,
    };
    if let Some(Ok(check)) = seen.object.spec.check.as_ref().map(spec::check) {
        let read = pass
            .checks
            .read(cluster, &seen.object, &check.cron_job, pass.now);
        seen.check = Some(read.await);
    }
    let (all, others) = match is_group {
        true => (&pass.groups, &pass.snapshots),
        false => (&pass.snapshots, &pass.groups),
    };
    let is_its = |it: &&DynamicObject| it.namespace().as_ref() == Some(&namespace);
    seen.sets = sets(&seen.object, is_group, all.iter().filter(is_its));
    let others = sets(&seen.object, !is_group, others.iter().filter(is_its));
    seen.others = others.into_values().flatten().collect();
    read_levels(cluster, pass, &mut seen).await?;
    if decide(&seen).needs_more {
        // Slots are executed without it.
        let read = complete(cluster, pass, &namespace, &mut seen).await;
        seen.unread = read.err().map(|error| chain(&error));
    }
    Ok(seen)
}

/// The sets of a schedule among these objects of one kind, by their claims.
fn sets<'a>(
    schedule: &SnapshotSchedule,
    is_group: bool,
    all: impl Iterator<Item = &'a DynamicObject>,
) -> BTreeMap<String, Vec<Set>> {
    let mut found = BTreeMap::<String, Vec<Set>>::new();
    if let Some(names) = Names::of(schedule) {
        for set in all.filter_map(|it| Set::read(it, &names, is_group)) {
            found.entry(set.claim.clone()).or_default().push(set);
        }
    }
    found
}

/// Reads the levels of the newest sets, unless the status has them.
async fn read_levels(cluster: &InCluster, pass: &Pass, seen: &mut Seen) -> Result<()> {
    let status = seen.object.status.clone().unwrap_or_default();
    let shown = status.last_cut_slot.map(|slot| slot.0);
    let Some(Class {
        level: Ok(requested),
        ..
    }) = seen.class
    else {
        return Ok(());
    };
    for sets in seen.sets.values_mut() {
        let newest = sets
            .iter_mut()
            .filter(|set| set.is_good() && set.slot <= seen.now);
        let Some(set) = newest.max_by_key(|set| set.slot) else {
            continue;
        };
        let is_new = Some(set.slot) != shown;
        let is_awaited = seen.now.duration_since(set.created) < LEVEL_TIMEOUT;
        if !is_new && (status.level.is_some() || !is_awaited) {
            continue;
        }
        let api = match (&pass.groups_api, set.claim.is_empty()) {
            (Some(api), true) => {
                ApiResource::from_gvk(&group_kind(api, "VolumeGroupSnapshotContent"))
            }
            (None, true) => continue,
            (_, false) => ApiResource::from_gvk(&snapshot_contents::snapshot_contents()),
        };
        let name = set.content.clone().unwrap_or_default();
        let contents = Api::<DynamicObject>::all_with(cluster.client.clone(), &api);
        let content = ask(&format!("{} {name}", api.kind), contents.get_opt(&name)).await?;
        if let Some(level) = content.as_ref().and_then(level_of) {
            set.set_level(Some(level), requested);
        }
    }
    Ok(())
}

/// Reads all sets again, because they may have changed since the beginning of the pass, with their
/// members, levels, volumes and uses.
async fn complete(
    cluster: &InCluster,
    pass: &Pass,
    namespace: &str,
    seen: &mut Seen,
) -> Result<()> {
    let Some(Class {
        level: Ok(requested),
        ..
    }) = seen.class
    else {
        return Ok(());
    };
    let client = &cluster.client;
    let mut world = World {
        namespace: pass.of_namespace(client, namespace).await?,
        shared: pass.shared(client).await?,
        ..World::default()
    };
    world.readers = readers(cluster);
    let is_group = seen.object.spec.selector.is_some();
    let listed = match is_group {
        true => &world.namespace.groups,
        false => &world.namespace.snapshots,
    };
    seen.sets = sets(&seen.object, is_group, listed.iter());
    for set in seen.sets.values_mut().flatten() {
        world.complete(set, namespace, requested);
    }
    seen.is_complete = true;
    Ok(())
}

/// All objects of a kind.
async fn by_name(
    client: &Client,
    kind: &GroupVersionKind,
) -> Result<BTreeMap<String, DynamicObject>> {
    let mut found = BTreeMap::new();
    let listed = each(client, kind, |object| {
        found.insert(object.name_any(), object.clone());
    });
    match listed.await {
        Ok(()) => Ok(found),
        Err(Unlisted::Failed(error)) => Err(error),
        Err(Unlisted::Unknown | Unlisted::Forbidden) => Err(Error::unreachable(
            format!("the list of {}s", kind.kind),
            "the API server does not have them, or does not allow them to be read",
        )),
    }
}

/// What agents read now, by pool. Nothing reads the snapshots of a pool that is lost.
fn readers(cluster: &InCluster) -> BTreeMap<PoolId, Option<BTreeSet<String>>> {
    let lost = cluster.pool_objects().into_keys();
    let lost = lost.filter(|pool| cluster.is_lost(*pool));
    let mut found: BTreeMap<_, _> = lost.map(|pool| (pool, Some(BTreeSet::new()))).collect();
    for report in cluster.agents.reports() {
        let is_answering = report.problem.is_none();
        let Some((_, answer)) = report.seen.filter(|_| is_answering) else {
            continue;
        };
        let read: BTreeSet<String> = answer.read_snapshots.iter().cloned().collect();
        for pool in answer.pools.iter().filter_map(|pool| pool.id.parse().ok()) {
            found.insert(pool, Some(read.clone()));
        }
    }
    found
}

#[cfg(test)]
mod tests;
