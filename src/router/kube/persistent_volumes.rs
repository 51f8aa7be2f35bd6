//! The PersistentVolumes of this driver: the claims of volumes, and the homes that are in use.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{PoisonError, RwLock};

use ::kube::runtime::watcher::Event;
use k8s_openapi::api::core::v1::PersistentVolume;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use super::adopt::manifest::QUARANTINED_FROM;
use super::reconcile::watches::Store;
use super::{InCluster, VOLUMES};
use crate::model::{PoolId, VolumeId};
use crate::router::cluster::Cluster;
use crate::router::create_volume::pod_placement::quantity::thousandths;
use crate::telemetry::page::world::Claim;
use crate::telemetry::volumes::VolumeClaim;

impl InCluster {
    /// Whether a PersistentVolume names a volume; `None` if this is not known yet.
    pub fn names_volume(&self, handle: &str) -> Option<bool> {
        let is_known = self.following.is_complete(VOLUMES);
        is_known.then(|| self.volumes.names(handle))
    }

    /// The number of volumes in quarantine, if this router leads.
    pub(super) fn count_quarantined(&self) -> Option<u64> {
        self.is_leader().then(|| self.volumes.quarantined())
    }
}

/// What is kept of a PersistentVolume. 20,000 of them need a few MB.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Volume {
    handle: String,
    pool: Option<PoolId>,
    claim: Option<String>,
    /// Its claim exists, and is bound to it.
    is_bound: bool,
    /// Its claim is or was deleted because its node is lost.
    is_quarantined: bool,
    homes: Vec<String>,
    capacity: u64,
}

/// All PersistentVolumes of this driver.
#[derive(Debug)]
pub struct Volumes {
    driver: String,
    topology_key: String,
    kept: RwLock<Index>,
}

#[derive(Debug, Default)]
struct Index {
    by_name: Store<Volume>,
    /// Names by volume handle. An administrator may have created several for one volume.
    names: BTreeMap<String, BTreeSet<String>>,
}

impl Index {
    /// The PersistentVolume of a volume; of several, one that is bound.
    fn find(&self, handle: &str) -> Option<&Volume> {
        let names = self.names.get(handle)?.iter();
        let all = names.filter_map(|name| self.by_name.now().get(name));
        all.max_by_key(|volume| volume.is_bound)
    }
}

impl Volumes {
    /// Without any PersistentVolumes yet.
    pub fn new(driver: &str, topology_key: &str) -> Volumes {
        Volumes {
            driver: driver.into(),
            topology_key: topology_key.into(),
            kept: RwLock::default(),
        }
    }

    /// Takes a change of the watch.
    pub fn take(&self, event: Event<PersistentVolume>) {
        let mut kept = self.kept.write().unwrap_or_else(PoisonError::into_inner);
        let kept = &mut *kept;
        match &event {
            Event::Apply(volume) | Event::Delete(volume) => {
                let name = volume.metadata.name.as_deref().unwrap_or_default();
                if let Some(before) = kept.by_name.now().get(name)
                    && let Some(names) = kept.names.get_mut(&before.handle)
                {
                    names.remove(name);
                    if names.is_empty() {
                        kept.names.remove(&before.handle);
                    }
                }
                if let (Event::Apply(_), Some(now)) = (&event, self.read(volume)) {
                    let names = kept.names.entry(now.handle).or_default();
                    names.insert(name.into());
                }
                kept.by_name
                    .take(event, |volume| self.read(&volume), |_, _| false);
            }
            Event::Init | Event::InitApply(_) => {
                kept.by_name
                    .take(event, |volume| self.read(&volume), |_, _| false);
            }
            Event::InitDone => {
                kept.by_name
                    .take(event, |volume| self.read(&volume), |_, _| false);
                kept.names.clear();
                for (name, volume) in kept.by_name.now() {
                    let names = kept.names.entry(volume.handle.clone()).or_default();
                    names.insert(name.clone());
                }
            }
        }
    }

    fn read(&self, volume: &PersistentVolume) -> Option<Volume> {
        let spec = volume.spec.as_ref()?;
        let csi = spec.csi.as_ref().filter(|csi| csi.driver == self.driver)?;
        let claim = spec.claim_ref.as_ref().and_then(|claim| {
            Some(format!(
                "{}/{}",
                claim.namespace.as_ref()?,
                claim.name.as_ref()?
            ))
        });
        let required = spec
            .node_affinity
            .as_ref()
            .and_then(|all| all.required.as_ref());
        let terms = required
            .iter()
            .flat_map(|required| &required.node_selector_terms);
        let asked = terms.flat_map(|term| term.match_expressions.iter().flatten());
        let homes = asked
            .filter(|asked| asked.key == self.topology_key)
            .flat_map(|asked| asked.values.iter().flatten().cloned())
            .collect();
        let id = csi.volume_handle.parse::<VolumeId>();
        Some(Volume {
            pool: id.ok().map(|id| id.pool),
            handle: csi.volume_handle.clone(),
            claim,
            is_bound: {
                let status = volume.status.as_ref();
                status.and_then(|status| status.phase.as_deref()) == Some("Bound")
            },
            is_quarantined: {
                let annotations = volume.metadata.annotations.as_ref();
                annotations.is_some_and(|all| all.contains_key(QUARANTINED_FROM))
            },
            homes,
            capacity: spec.capacity.as_ref().map_or(0, capacity),
        })
    }

    /// "namespace/name" of the claim that a volume is bound to.
    pub fn claim_of(&self, handle: &str) -> Option<String> {
        let kept = self.kept.read().unwrap_or_else(PoisonError::into_inner);
        kept.find(handle)?.claim.clone()
    }

    /// The size of a volume; 0 if no PersistentVolume names it.
    pub fn bytes_of(&self, handle: &str) -> u64 {
        let kept = self.kept.read().unwrap_or_else(PoisonError::into_inner);
        kept.find(handle).map_or(0, |volume| volume.capacity)
    }

    /// The volumes that are bound to a claim, each once, with their claims.
    pub fn claims(&self) -> Vec<VolumeClaim> {
        let kept = self.kept.read().unwrap_or_else(PoisonError::into_inner);
        let each = kept.names.keys().filter_map(|handle| {
            let volume = kept.find(handle)?;
            let claim = volume.claim.as_ref().filter(|_| volume.is_bound)?;
            let (namespace, claim) = claim.split_once('/')?;
            Some(VolumeClaim {
                volume: handle.clone(),
                namespace: namespace.into(),
                claim: claim.into(),
            })
        });
        each.collect()
    }

    /// The claims that are bound to volumes of pools, with these pools.
    pub fn bound(&self) -> Vec<Claim> {
        let kept = self.kept.read().unwrap_or_else(PoisonError::into_inner);
        let all = kept.by_name.now().values().filter(|it| it.is_bound);
        let each = all.filter_map(|volume| {
            Some(Claim {
                name: volume.claim.clone()?,
                pool: volume.pool?.to_string(),
            })
        });
        each.collect()
    }

    /// The home of a PersistentVolume, by its own name; `None` if it is not known, or if there are
    /// several.
    pub fn home_of(&self, name: &str) -> Option<String> {
        let kept = self.kept.read().unwrap_or_else(PoisonError::into_inner);
        match kept.by_name.now().get(name)?.homes.as_slice() {
            [home] => Some(home.clone()),
            _ => None,
        }
    }

    /// Another PersistentVolume than this one that names one of these volumes.
    pub fn other(&self, handles: [&str; 2], but: &str) -> Option<String> {
        let kept = self.kept.read().unwrap_or_else(PoisonError::into_inner);
        let all = kept.by_name.now().iter();
        let mut others =
            all.filter(|(name, volume)| *name != but && handles.contains(&volume.handle.as_str()));
        others.next().map(|(name, _)| name.clone())
    }

    /// The PersistentVolumes of a pool: name, handle, and claim if it is bound.
    pub fn of_pool(&self, pool: PoolId) -> Vec<(String, String, Option<String>)> {
        let kept = self.kept.read().unwrap_or_else(PoisonError::into_inner);
        let all = kept.by_name.now().iter();
        let its = all.filter(|(_, volume)| volume.pool == Some(pool));
        let each = its.map(|(name, volume)| {
            let claim = volume.claim.clone().filter(|_| volume.is_bound);
            (name.clone(), volume.handle.clone(), claim)
        });
        each.collect()
    }

    /// The sizes of the volumes in this pool that are bound to a claim.
    pub fn claimed_bytes(&self, pool: PoolId) -> Vec<u64> {
        let kept = self.kept.read().unwrap_or_else(PoisonError::into_inner);
        let all = kept.by_name.now().values();
        let its = all.filter(|it| it.pool == Some(pool) && it.is_bound && it.claim.is_some());
        its.map(|volume| volume.capacity).collect()
    }

    /// The pool that has the volume of a claim, "namespace/name".
    pub fn pool_of_claim(&self, claim: &str) -> Option<PoolId> {
        let kept = self.kept.read().unwrap_or_else(PoisonError::into_inner);
        let mut all = kept.by_name.now().values();
        all.find(|volume| volume.is_bound && volume.claim.as_deref() == Some(claim))?
            .pool
    }

    /// The bound PersistentVolumes of these pools and those that are about to be in quarantine: names, and
    /// whether they are the latter, by the namespaces of their claims.
    pub fn at_risk(&self, pools: &BTreeSet<PoolId>) -> BTreeMap<String, BTreeMap<String, bool>> {
        let kept = self.kept.read().unwrap_or_else(PoisonError::into_inner);
        let mut found = BTreeMap::<String, BTreeMap<String, bool>>::new();
        for (name, volume) in kept.by_name.now() {
            let is_of = volume.pool.is_some_and(|pool| pools.contains(&pool));
            let claim = volume.claim.as_ref().filter(|_| volume.is_bound);
            if let Some((namespace, _)) = claim.and_then(|claim| claim.split_once('/'))
                && (is_of || volume.is_quarantined)
            {
                let names = found.entry(namespace.into()).or_default();
                names.insert(name.clone(), volume.is_quarantined);
            }
        }
        found
    }

    /// The number of volumes in quarantine, whose claims are gone.
    pub fn quarantined(&self) -> u64 {
        let kept = self.kept.read().unwrap_or_else(PoisonError::into_inner);
        let all = kept.by_name.now().values();
        all.filter(|volume| volume.is_quarantined && !volume.is_bound)
            .count() as u64
    }

    /// The PersistentVolumes that name this volume.
    pub fn names_of(&self, handle: &str) -> Vec<String> {
        let kept = self.kept.read().unwrap_or_else(PoisonError::into_inner);
        let names = kept.names.get(handle).into_iter().flatten();
        names.cloned().collect()
    }

    /// Whether a PersistentVolume names this volume.
    pub fn names(&self, handle: &str) -> bool {
        let kept = self.kept.read().unwrap_or_else(PoisonError::into_inner);
        kept.names.contains_key(handle)
    }

    /// The number of PersistentVolumes of each pool that name each home.
    pub fn homes(&self) -> BTreeMap<PoolId, BTreeMap<String, usize>> {
        let kept = self.kept.read().unwrap_or_else(PoisonError::into_inner);
        let mut pools = BTreeMap::<PoolId, BTreeMap<String, usize>>::new();
        for volume in kept.by_name.now().values() {
            let Some(pool) = volume.pool else { continue };
            for home in &volume.homes {
                let homes = pools.entry(pool).or_default();
                match homes.get_mut(home) {
                    Some(count) => *count += 1,
                    None => drop(homes.insert(home.clone(), 1)),
                }
            }
        }
        pools
    }

    /// The number of PersistentVolumes that may only be used at a home.
    pub fn at_home(&self, home: &str) -> usize {
        let kept = self.kept.read().unwrap_or_else(PoisonError::into_inner);
        let all = kept.by_name.now().values();
        all.filter(|volume| volume.homes.iter().any(|its| its == home))
            .count()
    }
}

/// The size of a volume in bytes; 0 if it is not known.
fn capacity(capacity: &BTreeMap<String, Quantity>) -> u64 {
    let storage = capacity.get("storage").and_then(thousandths);
    let bytes = storage.and_then(|all| u64::try_from(all / 1_000).ok());
    bytes.unwrap_or(0)
}
