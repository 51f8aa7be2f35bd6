//! The cache of data sources: VolumeSnapshots of volumes that were filled. Other claims of the same source
//! on the same node are created from them, without a pod ([ADR 0049]).
//!
//! A snapshot is named by its key. Users of the namespace can create one with that name, with these labels
//! and of any content. So only what the VolumeSnapshotContent records is believed: users of a namespace
//! cannot write to it, and this controller does so only for a snapshot that it has seen ready while the
//! prime claim still had its volume.
//!
//! [ADR 0049]: ../../../../docs/adr/0049-a-filled-volume-is-cached-as-a-snapshot.md

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::fmt;
use std::time::{Duration, Instant};

use ::kube::ResourceExt;
use ::kube::api::DynamicObject;
use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use ring::digest;
use serde_json::{Value, json};

use super::source::{Kind, Source, source_of};
use super::state::{
    PRIME_PREFIX, SELECTED_NODE, SOURCE, State, annotation, is_block, is_bound, is_leaving, is_of,
    uid,
};
use crate::model::VolumeId;
use crate::router::create_volume::pod_placement::quantity::thousandths;

/// The label of cached snapshots: the UID of the source.
pub(super) const SOURCE_LABEL: &str = "slackwater.dev/cache";
/// The annotations of cached snapshots: their node, and their pool.
pub(super) const NODE_OF: &str = "slackwater.dev/cache-node";
pub(super) const POOL_OF: &str = "slackwater.dev/cache-pool";
/// The annotation of VolumeSnapshotContents: the key, once the snapshot may be used.
pub(super) const RECORD: &str = "slackwater.dev/cache-key";
/// The annotation of prime claims: the UID of the snapshot of their volume, or [`NONE`].
pub(super) const SNAPSHOT: &str = "slackwater.dev/populate-snapshot";
/// No snapshot is created of this prime claim any more.
pub(super) const NONE: &str = "none";
/// The API group of VolumeSnapshots.
pub(super) const SNAPSHOT_GROUP: &str = "snapshot.storage.k8s.io";
/// The names of cached snapshots begin with it.
pub(super) const NAME_PREFIX: &str = "cache-";
/// The value of the field `cache` of sources.
const PER_NODE: &str = "node";

/// After this time, a claim does not wait for another one whose attempt makes no progress.
const DOWNLOAD_TIMEOUT: SignedDuration = SignedDuration::from_mins(10);
/// A decision to receive the content is known to the watch of claims after this time.
const BEGIN_INTERVAL: Duration = Duration::from_secs(30);
/// After this time, a snapshot that was created is recorded or given up.
const CREATED_INTERVAL: Duration = Duration::from_secs(600);
/// After a snapshot could not be created, no claim of the namespace waits for one.
const BROKEN_INTERVAL: Duration = Duration::from_secs(600);

/// What two volumes with the same content have in common: a digest in hexadecimal digits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Key(String);

impl Key {
    /// The key of a claim whose volume is created on a node; `None` if its content is not cached. The
    /// class decides on file system, mkfs options, block size and pools, and its parameters cannot be
    /// changed. The source is a part of the key, so that no Secret of another source is spared.
    pub(super) fn of(
        (kind, source): (Kind, &Source),
        claim: &PersistentVolumeClaim,
        class: &str,
        node: Option<&str>,
    ) -> Option<Key> {
        let spec = &source.spec;
        let is_own = source.metadata.namespace == claim.metadata.namespace;
        if !Key::is_wanted(source) || spec.unverified || !is_own {
            return None;
        }
        let content = match kind {
            Kind::Http | Kind::S3 => spec.sha256.as_ref()?.to_lowercase(),
            // A tag can lead to another image the next time.
            Kind::Oci => spec.image.as_ref()?.split_once('@')?.1.to_string(),
        };
        let text = json!([
            1,
            source.metadata.uid,
            content,
            spec.path,
            spec.platform,
            spec.format,
            spec.file_name,
            spec.owner,
            spec.preserve_owners,
            is_block(claim),
            class,
            node,
        ])
        .to_string();
        let digest = digest::digest(&digest::SHA256, text.as_bytes());
        let digits = digest.as_ref().iter().map(|byte| format!("{byte:02x}"));
        Some(Key(digits.collect()))
    }

    /// Whether a source asks for a cache.
    pub(super) fn is_wanted(source: &Source) -> bool {
        source.spec.cache.as_deref() == Some(PER_NODE)
    }

    pub(super) fn snapshot_name(&self) -> String {
        format!("{NAME_PREFIX}{}", &self.0[..40])
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A VolumeSnapshot with the label of the cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct CachedSnapshot {
    pub(super) name: String,
    pub(super) uid: String,
    /// The UID of the source.
    pub(super) source: String,
    pub(super) node: Option<String>,
    pub(super) pool: Option<String>,
    /// The name of its VolumeSnapshotContent.
    pub(super) content: Option<String>,
    pub(super) is_ready: bool,
    /// The smallest size of a volume that is created from it, in thousandths of a byte.
    pub(super) restore_size: Option<i128>,
    pub(super) created_at: Timestamp,
    /// When this controller has created or used it last.
    pub(super) used_at: Option<Timestamp>,
    /// This process has created it.
    pub(super) is_own: bool,
    pub(super) is_leaving: bool,
}

impl CachedSnapshot {
    pub(super) fn read(object: &DynamicObject) -> CachedSnapshot {
        let status = &object.data["status"];
        let text = |value: &Value| value.as_str().map(str::to_string);
        let size = text(&status["restoreSize"]).map(Quantity);
        let created_at = object.metadata.creation_timestamp.as_ref();
        CachedSnapshot {
            name: object.name_any(),
            uid: uid(object).into(),
            source: object
                .labels()
                .get(SOURCE_LABEL)
                .cloned()
                .unwrap_or_default(),
            node: annotation(object, NODE_OF).map(str::to_string),
            pool: annotation(object, POOL_OF).map(str::to_string),
            content: text(&status["boundVolumeSnapshotContentName"]),
            is_ready: status["readyToUse"] == true,
            restore_size: size.as_ref().and_then(thousandths),
            created_at: created_at.map_or(Timestamp::MAX, |time| time.0),
            used_at: None,
            is_own: false,
            is_leaving: is_leaving(object),
        }
    }

    /// Those that were not used for the longest time come first.
    pub(super) fn last_used(&self) -> (Timestamp, &str) {
        (self.used_at.unwrap_or(self.created_at), &self.name)
    }
}

/// A VolumeSnapshotContent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ContentSeen {
    pub(super) name: String,
    pub(super) version: Option<String>,
    driver: String,
    /// The UID of its snapshot.
    snapshot: String,
    /// The volume that the snapshot is of.
    pub(super) volume: String,
    /// The key that this controller has recorded.
    pub(super) record: Option<String>,
}

impl ContentSeen {
    pub(super) fn read(object: &DynamicObject) -> ContentSeen {
        let spec = &object.data["spec"];
        let text = |value: &Value| value.as_str().unwrap_or_default().to_string();
        ContentSeen {
            name: object.name_any(),
            version: object.metadata.resource_version.clone(),
            driver: text(&spec["driver"]),
            snapshot: text(&spec["volumeSnapshotRef"]["uid"]),
            volume: text(&spec["source"]["volumeHandle"]),
            record: annotation(object, RECORD).map(str::to_string),
        }
    }
}

/// What is known of the cache for a claim.
#[derive(Clone, Debug)]
pub(super) struct CacheSeen {
    pub(super) key: Key,
    /// The most snapshots in the namespace.
    pub(super) most: usize,
    /// Those of the namespace; empty if they were not read.
    pub(super) snapshots: Vec<CachedSnapshot>,
    /// The VolumeSnapshotContent of the one with the name of the key.
    pub(super) content: Option<ContentSeen>,
    /// Another pod uses the prime claim.
    pub(super) is_shared: bool,
    /// The claim that receives the same content now.
    pub(super) receiver: Option<String>,
}

impl CacheSeen {
    pub(super) fn find_named(&self) -> Option<&CachedSnapshot> {
        let name = self.key.snapshot_name();
        self.snapshots.iter().find(|one| one.name == name)
    }

    /// The VolumeSnapshotContent, if it is certainly that of a snapshot, and of this driver.
    pub(super) fn content_of(
        &self,
        snapshot: &CachedSnapshot,
        driver: &str,
    ) -> Option<&ContentSeen> {
        let content = self.content.as_ref()?;
        let is_its = snapshot.content.as_ref() == Some(&content.name)
            && content.snapshot == snapshot.uid
            && content.driver == driver;
        is_its.then_some(content)
    }

    /// Whether the content of a snapshot is recorded as complete, and as that of the key.
    pub(super) fn is_recorded(&self, snapshot: &CachedSnapshot, driver: &str) -> bool {
        let content = self.content_of(snapshot, driver);
        content.is_some_and(|content| content.record.as_ref() == Some(&self.key.0))
    }

    /// The snapshot from which the volume of a claim can be created.
    pub(super) fn find_usable(
        &self,
        claim: &PersistentVolumeClaim,
        driver: &str,
    ) -> Option<&CachedSnapshot> {
        let snapshot = self.find_named()?;
        let is_usable = snapshot.is_ready
            && !snapshot.is_leaving
            && snapshot
                .restore_size
                .is_some_and(|least| size_of(claim) >= least)
            && self.is_recorded(snapshot, driver);
        is_usable.then_some(snapshot)
    }

    /// The snapshot that a prime claim is created from, if it was recorded, also while it is deleted.
    pub(super) fn find_restored(&self, from: &str, driver: &str) -> Option<&CachedSnapshot> {
        let snapshot = self.find_named().filter(|one| one.name == from)?;
        (snapshot.is_ready && self.is_recorded(snapshot, driver)).then_some(snapshot)
    }

    /// The one that was not used for the longest time, of one node or of all.
    pub(super) fn find_oldest(&self, node: Option<&str>) -> Option<&CachedSnapshot> {
        let all = self.snapshots.iter().filter(|one| !one.is_leaving);
        let its = all.filter(|one| node.is_none() || one.node.as_deref() == node);
        its.min_by_key(|one| one.last_used())
    }

    /// Whether the namespace has as many as it may have.
    pub(super) fn is_full(&self) -> bool {
        let staying = self.snapshots.iter().filter(|one| !one.is_leaving);
        staying.count() >= self.most
    }
}

/// The requested size of a claim, in thousandths of a byte.
fn size_of(claim: &PersistentVolumeClaim) -> i128 {
    let resources = claim.spec.as_ref().and_then(|spec| spec.resources.as_ref());
    let requests = resources.and_then(|resources| resources.requests.as_ref());
    let size = requests.and_then(|requests| requests.get("storage"));
    size.and_then(thousandths).unwrap_or_default()
}

/// The name of the snapshot of its namespace that a prime claim is created from.
pub(super) fn restored_from(prime: &PersistentVolumeClaim) -> Option<&str> {
    let source = prime.spec.as_ref()?.data_source_ref.as_ref()?;
    let is_snapshot = source.kind == "VolumeSnapshot"
        && source.api_group.as_deref() == Some(SNAPSHOT_GROUP)
        && source.namespace.is_none();
    is_snapshot.then_some(source.name.as_str())
}

/// Whether a prime claim has a data source; a pod fills those without one.
pub(super) fn has_source(prime: &PersistentVolumeClaim) -> bool {
    let spec = prime.spec.as_ref();
    spec.is_some_and(|spec| spec.data_source_ref.is_some() || spec.data_source.is_some())
}

/// The pool of a volume or of a snapshot.
pub(super) fn pool_of(handle: &str) -> Option<String> {
    let id = handle.parse::<VolumeId>().ok()?;
    Some(id.pool.to_string())
}

/// The node on which the volume of a claim is, or will be, created.
pub(super) fn node_of<'a>(
    claim: &'a PersistentVolumeClaim,
    prime: Option<&'a PersistentVolumeClaim>,
) -> Option<&'a str> {
    let its = prime.and_then(|prime| annotation(prime, SELECTED_NODE));
    its.or_else(|| annotation(claim, SELECTED_NODE))
}

/// Another claim of the same source that is receiving the content for itself. `is_same` compares the keys of
/// a claim and its prime claim. An attempt without progress does not count.
pub(super) fn find_receiver(
    all: &BTreeMap<String, PersistentVolumeClaim>,
    own: &PersistentVolumeClaim,
    source: &Source,
    now: Timestamp,
    is_same: impl Fn(&PersistentVolumeClaim, &PersistentVolumeClaim) -> bool,
) -> Option<String> {
    let namespace = own.metadata.namespace.as_deref().unwrap_or_default();
    let prefix = format!("{namespace}/{PRIME_PREFIX}");
    let primes = all.range(prefix.clone()..);
    let primes = primes.take_while(|(path, _)| path.starts_with(&prefix));
    let mut receiving = primes.filter_map(|(_, prime)| {
        // This is checked first because it is cheap.
        if has_source(prime) || annotation(prime, SNAPSHOT) == Some(NONE) {
            return None;
        }
        let owner = prime.metadata.owner_references.as_ref()?.first()?;
        let claim = all.get(&format!("{namespace}/{}", owner.name))?;
        let is_other = !is_bound(claim)
            && is_of(prime, claim)
            && uid(claim) != uid(own)
            && source_of(claim) == source_of(own)
            && size_of(claim) <= size_of(own);
        let receives = is_other && is_receiving(claim, prime, source, now);
        (receives && is_same(claim, prime)).then(|| claim.name_any())
    });
    receiving.next()
}

fn is_receiving(
    claim: &PersistentVolumeClaim,
    prime: &PersistentVolumeClaim,
    source: &Source,
    now: Timestamp,
) -> bool {
    let state = State::of(claim);
    let began_at = prime.metadata.creation_timestamp.as_ref();
    let last = began_at.max(state.progress_at.as_ref());
    !is_leaving(claim)
        && !is_leaving(prime)
        && state.given_up.as_deref() != Some(uid(prime))
        && annotation(prime, SOURCE) == Some(&source.version())
        && last.is_some_and(|last| now.duration_since(last.0) < DOWNLOAD_TIMEOUT)
}

/// What the leader remembers of the cache. Losing it costs a download, or the order of deletions.
#[derive(Debug, Default)]
pub(super) struct CacheMemory {
    /// By the name of the snapshot: the claim for which its content is received, and since when.
    begun: BTreeMap<String, (String, Instant)>,
    namespaces: BTreeMap<String, InNamespace>,
}

#[derive(Debug, Default)]
struct InNamespace {
    /// When a snapshot could not be created.
    broken_at: Option<Instant>,
    /// When snapshots were used last, by their UIDs.
    used: BTreeMap<String, Timestamp>,
    /// When this process has created snapshots, by their UIDs.
    created: BTreeMap<String, Instant>,
    count: usize,
}

impl CacheMemory {
    /// Whether a claim is the first one to receive content. The watch of claims, from which the others
    /// learn of it, is late.
    pub(super) fn begins(&mut self, snapshot: &str, claim: &str, now: Instant) -> bool {
        self.begun
            .retain(|_, (_, since)| now.duration_since(*since) < BEGIN_INTERVAL);
        let first = self.begun.entry(snapshot.into());
        first.or_insert_with(|| (claim.into(), now)).0 == claim
    }

    fn namespace(&mut self, namespace: &str) -> &mut InNamespace {
        self.namespaces.entry(namespace.into()).or_default()
    }

    pub(super) fn set_broken(&mut self, namespace: &str, now: Instant) {
        self.namespace(namespace).broken_at = Some(now);
    }

    pub(super) fn is_broken(&self, namespace: &str, now: Instant) -> bool {
        let its = self.namespaces.get(namespace);
        let since = its.and_then(|its| its.broken_at);
        since.is_some_and(|since| now.duration_since(since) < BROKEN_INTERVAL)
    }

    pub(super) fn set_created(&mut self, namespace: &str, snapshot: &str, now: Instant) {
        let its = self.namespace(namespace);
        its.created
            .retain(|_, at| now.duration_since(*at) < CREATED_INTERVAL);
        its.created.insert(snapshot.into(), now);
    }

    pub(super) fn set_used(&mut self, namespace: &str, snapshot: &str, now: Timestamp) {
        let its = self.namespace(namespace);
        its.used.insert(snapshot.into(), now);
    }

    /// Sets when the snapshots of a namespace were used, and which of them this process has created.
    pub(super) fn fill_in(&self, namespace: &str, snapshots: &mut [CachedSnapshot]) {
        let its = self.namespaces.get(namespace);
        for one in snapshots {
            one.used_at = its.and_then(|its| its.used.get(&one.uid)).copied();
            one.is_own = its.is_some_and(|its| its.created.contains_key(&one.uid));
        }
    }

    /// Records which snapshots a namespace has.
    pub(super) fn set_snapshots(&mut self, namespace: &str, all: &[CachedSnapshot]) {
        let its = self.namespace(namespace);
        its.count = all.len();
        its.used
            .retain(|uid, _| all.iter().any(|one| one.uid == *uid));
    }

    /// The number of snapshots in all namespaces.
    pub(super) fn count(&self) -> usize {
        self.namespaces.values().map(|its| its.count).sum()
    }

    pub(super) fn retain_namespaces(&mut self, is_one: impl Fn(&str) -> bool) {
        self.namespaces.retain(|namespace, _| is_one(namespace));
    }
}
