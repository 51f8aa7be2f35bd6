//! Deletes cached snapshots: those whose source has no cache any more, those that were never recorded, and
//! those that were not used for the longest time if there are too many or their pool lacks space.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

use ::kube::api::{Api, DeleteParams, Preconditions};
use k8s_openapi::jiff::{SignedDuration, Timestamp};

use super::cache::{CachedSnapshot, Key};
use super::source::Kind;
use super::state::uid;
use super::{Populators, snapshots};
use crate::error::Result;
use crate::model::size::is_low_space;
use crate::router::kube::ask;
use crate::router::kube::pools::object::Pool;
use crate::router::kube::reconcile::{Controller, Next, Outcome, Reconciler, written};

/// A snapshot that is not recorded after this time was left by an interrupted or failed attempt.
const RECORD_TIMEOUT: SignedDuration = SignedDuration::from_mins(10);

/// The cache of a namespace.
pub(super) struct Cache {
    namespace: String,
    /// The UIDs of the sources whose content is cached.
    sources: BTreeSet<String>,
    most: usize,
    now: Timestamp,
    snapshots: Vec<CachedSnapshot>,
    /// The UIDs of those that are certainly not recorded.
    unrecorded: BTreeSet<String>,
    /// The pools that lack space.
    low: BTreeSet<String>,
}

impl fmt::Display for Cache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the cached snapshots of namespace {}", self.namespace)
    }
}

impl Cache {
    /// The snapshots that are deleted now. Of a pool that lacks space only one, because its report is
    /// updated once a minute.
    fn surplus(&self) -> Vec<&CachedSnapshot> {
        let staying = self.snapshots.iter().filter(|one| !one.is_leaving);
        let (mut gone, mut kept): (Vec<_>, Vec<_>) = staying.partition(|one| {
            !self.sources.contains(&one.source) || self.unrecorded.contains(&one.uid)
        });
        kept.sort_by_key(|one| one.last_used());
        for pool in &self.low {
            let first = kept.iter().position(|one| one.pool.as_ref() == Some(pool));
            gone.extend(first.map(|first| kept.remove(first)));
        }
        let too_many = kept.len().saturating_sub(self.most);
        gone.extend(kept.into_iter().take(too_many));
        gone
    }
}

/// Cleans up the caches of namespaces.
pub(super) struct CacheController(pub(super) Arc<Populators>);

impl CacheController {
    /// Whether a snapshot is not recorded, long after its creation.
    async fn is_unrecorded(&self, snapshot: &CachedSnapshot, now: Timestamp) -> Result<bool> {
        if now.duration_since(snapshot.created_at) < RECORD_TIMEOUT {
            return Ok(false);
        }
        let Some(name) = &snapshot.content else {
            return Ok(true);
        };
        let content = snapshots::content_named(&self.0.client, name).await?;
        Ok(content.is_none_or(|content| content.record.is_none()))
    }

    fn count(&self, cache: &Cache) {
        let mut memory = self.0.memory();
        let memory = &mut memory.cache;
        memory.set_snapshots(&cache.namespace, &cache.snapshots);
        let count = memory.count();
        self.0.metrics.populations().set_cache_snapshots(count);
    }

    async fn lacks_space(&self, pool: &str) -> Result<bool> {
        let api = Api::<Pool>::all(self.0.client.clone());
        let pool = ask(&format!("Pool {pool}"), api.get_opt(pool)).await?;
        let status = pool.and_then(|pool| pool.status);
        let bytes = |bytes: i64| u64::try_from(bytes).unwrap_or_default();
        Ok(status.is_some_and(|status| {
            is_low_space(bytes(status.available_bytes), bytes(status.total_bytes))
        }))
    }
}

#[tonic::async_trait]
impl Reconciler for CacheController {
    type Object = Cache;
    type Step = Vec<(String, String)>;

    async fn observe(&self, mut cache: Cache) -> Result<Cache> {
        // A namespace that does not allow it, or a cluster without snapshots, has none.
        let Ok(all) = snapshots::list(&self.0, &cache.namespace).await else {
            return Ok(cache);
        };
        cache.snapshots = all;
        self.count(&cache);
        for one in &cache.snapshots {
            if self.is_unrecorded(one, cache.now).await? {
                cache.unrecorded.insert(one.uid.clone());
            }
        }
        let pools = cache.snapshots.iter().filter_map(|one| one.pool.clone());
        for pool in pools.collect::<BTreeSet<_>>() {
            if self.lacks_space(&pool).await.unwrap_or(false) {
                cache.low.insert(pool);
            }
        }
        Ok(cache)
    }

    fn next(cache: &Cache) -> Next<Self::Step> {
        let surplus = cache.surplus().into_iter();
        let names: Vec<_> = surplus
            .map(|one| (one.name.clone(), one.uid.clone()))
            .collect();
        match names.is_empty() {
            true => Next::Done,
            false => Next::Step(names),
        }
    }

    async fn execute(&self, cache: &Cache, names: Self::Step) -> Result<Outcome> {
        let api = snapshots::api(&self.0.client, &cache.namespace);
        let mut outcome = Ok(Outcome::Done);
        for (name, uid) in names {
            let params = DeleteParams {
                preconditions: Some(Preconditions {
                    uid: Some(uid),
                    resource_version: None,
                }),
                ..DeleteParams::default()
            };
            let what = format!("VolumeSnapshot {}/{name}", cache.namespace);
            // One that cannot be deleted keeps none of the others.
            match written(&what, api.delete(&name, &params)).await {
                Ok(_) => tracing::info!(
                    namespace = cache.namespace,
                    snapshot = name,
                    "deleted a cached snapshot"
                ),
                Err(error) => outcome = Err(error),
            }
        }
        outcome
    }
}

#[tonic::async_trait]
impl Controller for CacheController {
    const NAME: &'static str = "cached snapshots";

    async fn list(&self, _leads_since: Timestamp) -> Option<Vec<Cache>> {
        let settings = &self.0.options.settings;
        if !self.0.has_read_objects() || settings.cache_class.is_none() {
            return None;
        }
        let mut sources: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
        for source in Kind::ALL
            .into_iter()
            .flat_map(|kind| self.0.sources(kind).into_values())
        {
            let namespace = source.metadata.namespace.clone().unwrap_or_default();
            let its = sources.entry(namespace).or_default();
            if Key::is_wanted(&source) {
                its.insert(uid(&source).into());
            }
        }
        let mut memory = self.0.memory();
        memory
            .cache
            .retain_namespaces(|one| sources.contains_key(one));
        let count = memory.cache.count();
        drop(memory);
        self.0.metrics.populations().set_cache_snapshots(count);
        let each = sources.into_iter().map(|(namespace, sources)| Cache {
            namespace,
            sources,
            most: settings.cache_snapshots,
            now: Timestamp::now(),
            snapshots: Vec::new(),
            unrecorded: BTreeSet::new(),
            low: BTreeSet::new(),
        });
        Some(each.collect())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn snapshot(number: i64, source: &str, pool: &str) -> CachedSnapshot {
        let created = Timestamp::from_second(1_800_000_000 + number).unwrap();
        let object = serde_json::from_value(json!({
            "metadata": {"name": format!("cache-{number}"), "uid": format!("sn-{number}"),
                "creationTimestamp": created.to_string(), "labels": {"slackwater.dev/cache": source},
                "annotations": {"slackwater.dev/cache-pool": pool}}}));
        CachedSnapshot::read(&object.unwrap())
    }

    fn names(cache: &Cache) -> Vec<String> {
        let mut names: Vec<_> = cache.surplus().iter().map(|one| one.name.clone()).collect();
        names.sort();
        names
    }

    #[test]
    fn what_is_useless_goes_first_then_what_lacks_space_and_then_what_is_too_much() {
        let mut cache = Cache {
            namespace: "shop".into(),
            sources: ["s-1".to_string()].into(),
            most: 4,
            now: Timestamp::UNIX_EPOCH,
            snapshots: (0..4)
                .map(|number| snapshot(number, "s-1", if number < 2 { "a" } else { "b" }))
                .collect(),
            unrecorded: BTreeSet::new(),
            low: BTreeSet::new(),
        };
        assert!(names(&cache).is_empty());
        cache.most = 3;
        assert_eq!(names(&cache), ["cache-0"]);
        cache.snapshots[0].used_at = Some(Timestamp::MAX);
        assert_eq!(names(&cache), ["cache-1"], "the first one was used since");
        cache.most = 4;
        cache.low = ["b".to_string(), "c".to_string()].into();
        assert_eq!(names(&cache), ["cache-2"], "one of each pool at a time");
        cache.most = 3;
        assert_eq!(names(&cache), ["cache-2"], "and it counts");
        cache.low.clear();
        cache.unrecorded = ["sn-3".to_string()].into();
        assert_eq!(names(&cache), ["cache-3"]);
        cache.most = 0;
        cache.snapshots[3].is_leaving = true;
        assert_eq!(names(&cache), ["cache-0", "cache-1", "cache-2"]);
        cache.most = 4;
        cache.sources = ["s-2".to_string()].into();
        assert_eq!(
            names(&cache),
            ["cache-0", "cache-1", "cache-2"],
            "the source has no cache"
        );
    }
}
