//! Decisions about the cache: when a volume that was filled is snapshotted, and when a claim is bound to a
//! volume that was created from a snapshot.

use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use k8s_openapi::jiff::SignedDuration;

use super::{Class, Decision, Phase, PodSeen, Seen, Step, bind};
use crate::router::kube::populators::cache::{NONE, SNAPSHOT};
use crate::router::kube::populators::state::{
    NODE, SELECTED_NODE, SOURCE, State, annotation, is_bound, uid, volume_name,
};

/// A snapshot that is not ready after this time is given up, and the claim is bound without it.
const SNAPSHOT_TIMEOUT: SignedDuration = SignedDuration::from_secs(60);
/// A volume that is not created from a snapshot after this time is filled by a pod.
const RESTORE_TIMEOUT: SignedDuration = SignedDuration::from_mins(5);

/// What has to be done for the cache before a claim is bound to its volume, which is filled; `None` if
/// nothing. Whatever fails here ends with a claim that is bound.
pub(super) fn before_binding(seen: &Seen, prime: &PersistentVolumeClaim) -> Option<Decision> {
    let cache = seen.cache.as_ref()?;
    // The content of an attempt that went on after a change of the source has another key.
    let (_, source) = seen.source.as_ref().ok()?;
    if annotation(prime, SOURCE) != Some(&source.version()) {
        return None;
    }
    let of = |message: &str| Decision::of(Phase::Binding, "Caching", message);
    let Some(recorded) = annotation(prime, SNAPSHOT) else {
        // One with this name is that of another claim, or one that this controller has not recorded.
        if cache.is_shared || cache.most == 0 || cache.find_named().is_some() {
            return None;
        }
        if cache.is_full() {
            let oldest = cache.find_oldest(None)?;
            let step = Step::DeleteSnapshot(oldest.name.clone(), oldest.uid.clone());
            return Some(of("an older snapshot is deleted").with(step));
        }
        let step = Step::CreateSnapshot(cache.key.snapshot_name());
        return Some(of("a snapshot is created for other claims").with(step));
    };
    if recorded == NONE {
        return None;
    }
    let named = cache.find_named();
    let snapshot = named.filter(|one| one.uid == recorded && !one.is_leaving)?;
    if cache.is_recorded(snapshot, &seen.driver) {
        return None;
    }
    let give_up = |why: &str| {
        let step = Step::GiveUpSnapshot(snapshot.name.clone(), snapshot.uid.clone());
        Some(of(why).with(step))
    };
    if cache.is_shared {
        return give_up("another pod uses the prime claim: its volume is not cached");
    }
    // A user of the namespace can create one while the volume is filled, and record it at the prime claim.
    if !snapshot.is_own {
        let step = Step::DeleteSnapshot(snapshot.name.clone(), snapshot.uid.clone());
        return Some(of("the snapshot was not created by this controller").with(step));
    }
    let content = cache.content_of(snapshot, &seen.driver);
    let is_of_volume = |volume: &str| handle(seen).is_some_and(|handle| handle == volume);
    match content.filter(|content| snapshot.is_ready && is_of_volume(&content.volume)) {
        Some(content) => {
            let step = Step::RecordSnapshot(content.name.clone(), content.version.clone());
            Some(of("the snapshot is ready").with(step))
        }
        None if seen.now.duration_since(snapshot.created_at) > SNAPSHOT_TIMEOUT => {
            give_up("the snapshot is not ready in time")
        }
        None => Some(of("a snapshot is created for other claims")),
    }
}

/// The handle of the volume of the prime claim.
fn handle(seen: &Seen) -> Option<&str> {
    let spec = seen.volume.as_ref()?.spec.as_ref()?;
    Some(&spec.csi.as_ref()?.volume_handle)
}

/// The provisioner has given back the node of a prime claim, because the node lacks space. One snapshot that
/// is cached there is deleted, once for a prime claim, whose own volume is not cached then.
pub(super) fn makes_room(seen: &Seen, prime: &PersistentVolumeClaim, node: &str) -> Option<Step> {
    let cache = seen.cache.as_ref()?;
    if annotation(prime, SNAPSHOT) == Some(NONE) {
        return None;
    }
    let oldest = cache.find_oldest(Some(node))?;
    Some(Step::MakeRoom {
        name: oldest.name.clone(),
        uid: oldest.uid.clone(),
        node: node.into(),
    })
}

/// A prime claim that was created from a snapshot. Nothing that is recorded at claims is believed: the
/// claim is bound only if the snapshot is recorded, and was there before the prime claim was.
pub(super) fn restored(
    seen: &Seen,
    prime: &PersistentVolumeClaim,
    state: &State,
    from: &str,
) -> Decision {
    let cache = seen.cache.as_ref();
    let snapshot = cache.and_then(|cache| cache.find_restored(from, &seen.driver));
    let created_at = prime.metadata.creation_timestamp.as_ref();
    let is_older = created_at
        .zip(snapshot)
        .is_some_and(|(prime, snapshot)| snapshot.created_at < prime.0);
    // This controller records that a population begins before it creates a prime claim.
    let why = if state.source.is_empty() {
        Some("this controller has not created the prime claim")
    } else if snapshot.is_none() || !is_older {
        Some("the snapshot cannot be used any more")
    } else if is_bound(prime) && !is_new(seen, prime) {
        Some("its volume is older than the prime claim")
    } else if matches!(seen.pod, PodSeen::Here(_)) {
        Some("a pod has the name of the prime claim")
    } else if is_bound(prime) || volume_name(prime).is_some() {
        None
    } else if is_given_back(seen, prime) {
        Some("its node lacks space")
    } else if is_late(seen, prime) {
        // Every other claim would wait for a volume of it as long.
        if let Some(snapshot) = snapshot.filter(|one| !one.is_leaving) {
            let step = Step::GiveUpSnapshot(snapshot.name.clone(), snapshot.uid.clone());
            let message = "no volume is created from the snapshot";
            return Decision::waits("NotCached", message).with(step);
        }
        Some("it takes too long")
    } else {
        None
    };
    if let Some(why) = why {
        let state = State {
            given_up: Some(uid(prime).into()),
            is_uncached: true,
            ..state.clone()
        };
        let message = format!("the volume is not created from the cached snapshot: {why}");
        return Decision::waits("NotCached", message).with(Step::Note(Box::new(state)));
    }
    if is_bound(prime) {
        return bind(seen, prime);
    }
    let message = "the volume is created from a cached snapshot";
    Decision::of(Phase::Provisioning, "Provisioning", message)
}

/// The provisioner has given back the node of a prime claim.
fn is_given_back(seen: &Seen, prime: &PersistentVolumeClaim) -> bool {
    seen.class == (Class::Own { waits: true })
        && annotation(prime, NODE).is_some()
        && annotation(prime, SELECTED_NODE).is_none()
}

fn is_late(seen: &Seen, prime: &PersistentVolumeClaim) -> bool {
    let created_at = prime.metadata.creation_timestamp.as_ref();
    created_at.is_some_and(|at| seen.now.duration_since(at.0) > RESTORE_TIMEOUT)
}

/// Whether the volume of a prime claim was created for it. One that exists already can be bound to a claim
/// of an Immediate class, and has other content.
fn is_new(seen: &Seen, prime: &PersistentVolumeClaim) -> bool {
    let created_at = |meta: &ObjectMeta| meta.creation_timestamp.as_ref().map(|time| time.0);
    let volume = seen.volume.as_ref();
    let volume = volume.and_then(|volume| created_at(&volume.metadata));
    volume.is_some() && volume >= created_at(&prime.metadata)
}
