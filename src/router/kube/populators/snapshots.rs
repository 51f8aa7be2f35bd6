//! Reads the cached snapshots of a namespace. What cannot be read counts as absent, so that a claim is filled
//! without the cache.

use std::sync::PoisonError;
use std::time::Instant;

use ::kube::Client;
use ::kube::api::{Api, DynamicObject, ListParams};
use ::kube::core::{ApiResource, GroupVersionKind};
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod};
use k8s_openapi::jiff::Timestamp;

use super::Populators;
use super::cache::{
    CacheSeen, CachedSnapshot, ContentSeen, Key, NAME_PREFIX, NONE, SNAPSHOT, SNAPSHOT_GROUP,
    SOURCE_LABEL, find_receiver, node_of, restored_from,
};
use super::decide::{PodSeen, Reason};
use super::source::{Kind, Source};
use super::state::{SELECTED_NODE, annotation, is_bound, pod_phase, prime_name};
use crate::error::Result;
use crate::router::kube::{ask, snapshot_contents};

/// The snapshots of a namespace.
pub(super) fn api(client: &Client, namespace: &str) -> Api<DynamicObject> {
    let kind = GroupVersionKind::gvk(SNAPSHOT_GROUP, "v1", "VolumeSnapshot");
    Api::namespaced_with(client.clone(), namespace, &ApiResource::from_gvk(&kind))
}

pub(super) fn contents(client: &Client) -> Api<DynamicObject> {
    let kind = ApiResource::from_gvk(&snapshot_contents::snapshot_contents());
    Api::all_with(client.clone(), &kind)
}

/// The key of a claim; `None` if its content is not cached.
fn key_of(
    populators: &Populators,
    claim: &PersistentVolumeClaim,
    prime: Option<&PersistentVolumeClaim>,
    source: (Kind, &Source),
) -> Option<Key> {
    let name = claim.spec.as_ref()?.storage_class_name.as_deref()?;
    let class = populators.class(name)?;
    let node = node_of(claim, prime);
    if class.waits && node.is_none() {
        return None;
    }
    Key::of(source, claim, &class.uid, node)
}

/// What is known of the cache from memory alone; `None` if the content of the claim is not cached.
pub(super) fn known(
    populators: &Populators,
    claim: &PersistentVolumeClaim,
    prime: Option<&PersistentVolumeClaim>,
    source: &Result<(Kind, Source), Reason>,
) -> Option<CacheSeen> {
    let settings = &populators.options.settings;
    settings.cache_class.as_ref()?;
    let (kind, source) = source.as_ref().ok()?;
    let key = key_of(populators, claim, prime, (*kind, source))?;
    let namespace = claim.metadata.namespace.as_deref().unwrap_or_default();
    let is_broken = populators
        .memory()
        .cache
        .is_broken(namespace, Instant::now());
    let mut cache = CacheSeen {
        key,
        most: settings.cache_snapshots,
        snapshots: Vec::new(),
        content: None,
        is_shared: false,
        receiver: None,
    };
    if is_broken || cache.most == 0 {
        cache.most = 0;
    } else if prime.is_none() {
        let same = |other: &PersistentVolumeClaim, prime: &PersistentVolumeClaim| {
            let its = key_of(populators, other, Some(prime), (*kind, source));
            its.as_ref() == Some(&cache.key)
        };
        let all = populators.claims.read();
        let all = all.unwrap_or_else(PoisonError::into_inner);
        cache.receiver = find_receiver(all.now(), claim, source, Timestamp::now(), same);
    }
    Some(cache)
}

/// Reads what the next decision needs.
pub(super) async fn read(
    populators: &Populators,
    mut cache: CacheSeen,
    prime: Option<&PersistentVolumeClaim>,
    pod: &PodSeen,
    claim: &PersistentVolumeClaim,
) -> CacheSeen {
    let namespace = claim.metadata.namespace.as_deref().unwrap_or_default();
    let needs_snapshots = match (prime, pod) {
        (_, PodSeen::Here(pod)) => pod_phase(pod) == "Succeeded",
        (_, PodSeen::Forbidden(_)) => false,
        (None, PodSeen::Absent) => true,
        (Some(prime), PodSeen::Absent) => {
            let is_given_back = !is_bound(prime) && annotation(prime, SELECTED_NODE).is_none();
            restored_from(prime).is_some() || is_given_back
        }
    };
    if needs_snapshots {
        match list(populators, namespace).await {
            Ok(all) => cache.snapshots = all,
            Err(_) => {
                cache.most = 0;
                cache.receiver = None;
                let mut memory = populators.memory();
                memory.cache.set_broken(namespace, Instant::now());
            }
        }
        let content = cache.find_named().and_then(|one| one.content.clone());
        if let Some(name) = content {
            let content = content_named(&populators.client, &name).await;
            cache.content = content.unwrap_or_default();
        }
    }
    if let (PodSeen::Here(pod), Some(prime)) = (pod, prime)
        && pod_phase(pod) == "Succeeded"
        && annotation(prime, SNAPSHOT) != Some(NONE)
    {
        let is_shared = is_shared(&populators.client, namespace, &prime_name(claim)).await;
        // If the pods cannot be listed, another one may use it.
        cache.is_shared = is_shared.unwrap_or(true);
    }
    cache
}

/// The cached snapshots of a namespace.
pub(super) async fn list(populators: &Populators, namespace: &str) -> Result<Vec<CachedSnapshot>> {
    let params = ListParams::default().labels(SOURCE_LABEL);
    let what = format!("the cached snapshots of namespace {namespace}");
    let found = ask(&what, api(&populators.client, namespace).list(&params)).await?;
    let all = found.items.iter().map(CachedSnapshot::read);
    // This controller may not delete others, which a user has labelled.
    let mut all: Vec<_> = all
        .filter(|one| one.name.starts_with(NAME_PREFIX))
        .collect();
    populators.memory().cache.fill_in(namespace, &mut all);
    Ok(all)
}

pub(super) async fn content_named(client: &Client, name: &str) -> Result<Option<ContentSeen>> {
    let what = format!("VolumeSnapshotContent {name}");
    let found = ask(&what, contents(client).get_opt(name)).await?;
    Ok(found.as_ref().map(ContentSeen::read))
}

/// Whether a pod other than the one that fills it uses a prime claim.
async fn is_shared(client: &Client, namespace: &str, prime: &str) -> Result<bool> {
    let api = Api::<Pod>::namespaced(client.clone(), namespace);
    let what = format!("the pods of namespace {namespace}");
    let pods = ask(&what, api.list(&ListParams::default())).await?.items;
    Ok(pods.iter().any(|pod| {
        let volumes = pod
            .spec
            .iter()
            .flat_map(|spec| spec.volumes.iter().flatten());
        let mut claims = volumes.filter_map(|one| one.persistent_volume_claim.as_ref());
        pod.metadata.name.as_deref() != Some(prime) && claims.any(|claim| claim.claim_name == prime)
    }))
}
