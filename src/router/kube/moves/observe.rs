//! Reads everything that the decision about a move needs.

use std::collections::{BTreeMap, BTreeSet};

use ::kube::api::{Api, ListParams};
use k8s_openapi::api::core::v1::{Node, PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::api::storage::v1::{StorageClass, VolumeAttachment};
use k8s_openapi::jiff::Timestamp;
use uuid::Uuid;

use super::decide::{ClaimState, Observed, Refusal};
use super::object::{MoveStatus, Phase, Place, VolumeMove};
use super::others::peers_of;
use super::pod_use::{has_ended, used};
use super::propose::{Question, Room, choose, is_meant};
use super::trust;
use super::{MoveController, Moving, NOTE, snapshots_of};
use crate::error::{Result, chain};
use crate::model::{SnapshotId, VolumeId};
use crate::operation::{MovingState, VolumeMoveStatus};
use crate::router::cluster::Cluster;
use crate::router::create_volume::pod_placement::quantity::thousandths;
use crate::router::kube::adopt::exchange::Exchange;
use crate::router::kube::adopt::manifest::{Homes, Manifest};
use crate::router::kube::adopt::resource;
use crate::router::kube::placement::pod_claims::claims_of;
use crate::router::kube::{ask, topology_key};
use crate::router::volume_moves::TargetPool;

/// A move cannot begin, for this reason.
type Proposed = Result<MoveStatus, Refusal>;

fn refuse<T>(reason: &'static str, message: impl Into<String>) -> Result<T, Refusal> {
    let message = message.into();
    Err(Refusal { reason, message })
}

/// Reads a move and everything that it depends on.
pub(super) async fn observe(controller: &MoveController, moving: Moving) -> Result<Moving> {
    let cluster = &controller.cluster;
    let namespace = moving.object.metadata.namespace.clone().unwrap_or_default();
    let name = moving.object.metadata.name.clone().unwrap_or_default();
    let api = Api::<VolumeMove>::namespaced(cluster.client.clone(), &namespace);
    let now = ask(&moving.to_string(), api.get_opt(&name)).await?;
    let now = now.filter(|now| now.metadata.uid == moving.object.metadata.uid);
    let Some(object) = now else {
        return Ok(Moving {
            seen: None,
            ..moving
        });
    };
    let path = object.claim();
    let claims = Api::<PersistentVolumeClaim>::namespaced(cluster.client.clone(), &namespace);
    let claim = ask(&format!("claim {path}"), claims.get_opt(&object.spec.claim)).await?;
    let status = object.status.clone().unwrap_or_default();
    let mut seen = Observed {
        object: object.clone(),
        now: Timestamp::now(),
        key: topology_key(&cluster.options.driver),
        proposal: None,
        claim: state(claim.as_ref(), status.claim_uid.as_deref()),
        live: None,
        noted: None,
        double: None,
        foreign_volume: None,
        foreign_source: None,
        names_copy: None,
        source: Ok(VolumeMoveStatus::default()),
        copy: Ok(VolumeMoveStatus::default()),
        snapshots: BTreeMap::new(),
        target_problem: None,
        is_target_lost: false,
        pods: Vec::new(),
        is_cordoned: false,
        attached: None,
    };
    let reader = Reader {
        controller,
        namespace,
    };
    if !status.phase.is_final() {
        match (&status.from, &status.to, object.uid()) {
            (Some(from), Some(to), Some(uid)) => {
                reader.begun(&mut seen, &status, (from, to), uid).await?;
            }
            _ => match reader.propose(&object, claim.as_ref()).await? {
                Some(proposal) => seen.proposal = Some(proposal),
                // It belongs to another driver.
                None => return Ok(Moving { object, seen: None }),
            },
        }
    }
    let seen = Some(Box::new(seen));
    Ok(Moving { object, seen })
}

fn state(claim: Option<&PersistentVolumeClaim>, uid: Option<&str>) -> ClaimState {
    let same = |claim: &&PersistentVolumeClaim| {
        let is_leaving = claim.metadata.deletion_timestamp.is_some();
        !is_leaving && (uid.is_none() || claim.metadata.uid.as_deref() == uid)
    };
    match claim.filter(same) {
        None => ClaimState::Gone,
        Some(claim) => {
            let status = claim.status.as_ref();
            let phase = status.and_then(|status| status.phase.as_deref());
            ClaimState::Here {
                is_bound: phase == Some("Bound"),
            }
        }
    }
}

struct Reader<'a> {
    controller: &'a MoveController,
    namespace: String,
}

impl Reader<'_> {
    /// A move that has begun.
    async fn begun(
        &self,
        seen: &mut Observed,
        status: &MoveStatus,
        (from, to): (&Place, &Place),
        uid: Uuid,
    ) -> Result<()> {
        let (cluster, volumes) = (&self.controller.cluster, &self.controller.volumes);
        let volume = status.volume.as_deref().unwrap_or_default();
        let pool = trust::parsed_pool(to)?;
        let (source, copy) = (trust::parsed(from)?, trust::parsed(to)?);
        trust::check_copy(copy, pool, uid)?;
        let exchange = Exchange::new(&cluster.client, pool, NOTE);
        let (live, noted) = exchange.read(volume).await?;
        seen.noted = noted.filter(|noted| noted.uid() == status.volume_uid.as_deref());
        seen.live = live;
        let namespace = self.namespace.as_str();
        let mut manifests = seen.live.iter().chain(&seen.noted);
        seen.foreign_volume = manifests.find_map(|one| trust::foreign_claim_of(one, namespace));
        seen.names_copy = cluster.volumes.names_of(&to.handle).into_iter().next();
        seen.double = cluster.volumes.other([&from.handle, &to.handle], volume);
        let wanted = snapshots_of(source, uid);
        let ids: Vec<SnapshotId> = wanted.values().copied().collect();
        let looked = volumes.look(source, &ids).await;
        seen.source = looked.map_err(|error| chain(&error));
        let is_fenced = (seen.source.as_ref()).is_ok_and(|source| source.fenced == Some(uid));
        let foreign = cluster.foreign_claim(&from.handle, namespace);
        seen.foreign_source = foreign.filter(|_| !is_fenced);
        let found = seen.source.iter().flat_map(|source| &source.snapshots);
        let found = found.filter_map(|one| {
            let mut wanted = wanted.iter();
            let (round, _) = wanted.find(|(_, id)| id.to_string() == one.id)?;
            Some((*round, one.clone()))
        });
        seen.snapshots = found.collect();
        seen.copy = (volumes.look(copy, &[]).await).map_err(|error| chain(&error));
        seen.is_target_lost = cluster.is_lost(pool);
        let target = volumes.targets().into_iter().find(|one| one.id == pool);
        seen.target_problem = match target {
            Some(target) if target.problem.is_some() => target.problem,
            Some(target) => {
                let is_absent = |copy: &VolumeMoveStatus| copy.state == MovingState::Absent;
                let is_new = seen.copy.as_ref().is_ok_and(is_absent);
                let is_full = is_new && target.provisionable < status.bytes_total;
                is_full.then(|| {
                    format!(
                        "only {} bytes may still be promised there",
                        target.provisionable
                    )
                })
            }
            None => Some("no agent reports its pool".into()),
        };
        let pods = self.pods(&seen.object).await?;
        seen.pods = pods.iter().map(used).collect();
        let node = self.node(&from.node).await?;
        let spec = node.as_ref().and_then(|node| node.spec.as_ref());
        seen.is_cordoned = node.is_none() || spec.is_some_and(|it| it.unschedulable == Some(true));
        let is_quiet = |source: &VolumeMoveStatus| source.user.is_none();
        if status.switched_at.is_none() && seen.source.as_ref().is_ok_and(is_quiet) {
            seen.attached = self.attached(volume).await?;
        }
        Ok(())
    }

    /// The pods that use the claim.
    async fn pods(&self, object: &VolumeMove) -> Result<Vec<Pod>> {
        let client = self.controller.cluster.client.clone();
        let api = Api::<Pod>::namespaced(client, &self.namespace);
        let what = format!("the pods of namespace {}", self.namespace);
        let all = ask(&what, api.list(&ListParams::default())).await?.items;
        let uses = |pod: &Pod| !has_ended(pod) && claims_of(pod).contains(&object.spec.claim);
        Ok(all.into_iter().filter(uses).collect())
    }

    async fn node(&self, name: &str) -> Result<Option<Node>> {
        let api = Api::<Node>::all(self.controller.cluster.client.clone());
        ask(&format!("node {name}"), api.get_opt(name)).await
    }

    /// The node to which a PersistentVolume is attached. One that was never attached there waits for
    /// the fence.
    async fn attached(&self, volume: &str) -> Result<Option<String>> {
        let api = Api::<VolumeAttachment>::all(self.controller.cluster.client.clone());
        let all = ask("VolumeAttachments", api.list(&ListParams::default())).await?;
        let mut its = all.items.into_iter().filter(|one| {
            let is_attached = one.status.as_ref().is_some_and(|status| status.attached);
            is_attached && one.spec.source.persistent_volume_name.as_deref() == Some(volume)
        });
        Ok(its.next().map(|one| one.spec.node_name))
    }

    /// What a move would begin with; `None` if its volume belongs to another driver.
    async fn propose(
        &self,
        object: &VolumeMove,
        claim: Option<&PersistentVolumeClaim>,
    ) -> Result<Option<Proposed>> {
        let cluster = &self.controller.cluster;
        let Some(claim) = claim.filter(|claim| claim.metadata.deletion_timestamp.is_none()) else {
            return Ok(Some(refuse("NoClaim", "its claim does not exist")));
        };
        let spec = claim.spec.as_ref();
        let volume = spec
            .and_then(|spec| spec.volume_name.clone())
            .unwrap_or_default();
        if volume.is_empty() {
            return Ok(Some(refuse("NotBound", "its claim is not bound")));
        }
        let api = Api::all_with(cluster.client.clone(), &resource());
        let live = ask(&format!("PersistentVolume {volume}"), api.get_opt(&volume)).await?;
        let Some(live) = live.map(Manifest) else {
            return Ok(Some(refuse(
                "NotBound",
                "its PersistentVolume does not exist",
            )));
        };
        let Some(handle) = live.handle(&cluster.options.driver) else {
            return Ok(None);
        };
        let uid = claim.metadata.uid.clone();
        let source = match self.source(object, &live, handle, uid.as_deref()) {
            Ok(source) => source,
            Err(refusal) => return Ok(Some(Err(refusal))),
        };
        self.with_target(object, &live, (uid, source))
            .await
            .map(Some)
    }

    /// The source of a move, if it can be moved at all.
    fn source(
        &self,
        object: &VolumeMove,
        live: &Manifest,
        handle: &str,
        uid: Option<&str>,
    ) -> Result<Place, Refusal> {
        let cluster = &self.controller.cluster;
        let bound = live.bound();
        if live.is_leaving() || bound.map(|bound| bound.uid).as_deref() != uid {
            return refuse("NotBound", "its PersistentVolume is not bound to its claim");
        }
        if live.policy_before().is_some() {
            let why = "its PersistentVolume is being exchanged by someone else";
            return refuse("PersistentVolumeChanged", why);
        }
        let Homes::One(home) = live.homes(&topology_key(&cluster.options.driver)) else {
            let why = "the node affinity of its PersistentVolume is not exactly one home";
            return refuse("PersistentVolumeChanged", why);
        };
        if let Some(other) = cluster.volumes.other([handle, handle], live.name()) {
            let why = format!("PersistentVolume {other} names the same volume");
            return refuse("OtherPersistentVolume", why);
        }
        let others = cluster.moves().into_values();
        let mut others = others.filter(|other| {
            let status = other.status.clone().unwrap_or_default();
            other.metadata.uid != object.metadata.uid
                && other.claim() == object.claim()
                && status.from.is_some()
                && !status.phase.is_final()
        });
        if let Some(other) = others.next() {
            let why = format!("VolumeMove {} moves its volume", other.path());
            return refuse("OtherMove", why);
        }
        if let Err(why) = object.keep_source() {
            return refuse("KeepSource", why);
        }
        let pool = handle.parse::<VolumeId>().ok().map(|id| id.pool);
        let known = cluster.known_pools().into_iter();
        let mut known = known.filter(|known| Some(known.id) == pool && !known.lost);
        let Some(known) = known.next() else {
            return refuse(
                "SourceUnknown",
                format!("the pool of volume {handle} is not known"),
            );
        };
        Ok(Place {
            node: known.node,
            home,
            pool: known.id.to_string(),
            pool_name: known.name,
            handle: handle.into(),
        })
    }

    /// Completes a proposal with a target.
    async fn with_target(
        &self,
        object: &VolumeMove,
        live: &Manifest,
        (claim_uid, from): (Option<String>, Place),
    ) -> Result<Proposed> {
        let cluster = &self.controller.cluster;
        let name = live.text("/spec/storageClassName").unwrap_or_default();
        let api = Api::<StorageClass>::all(cluster.client.clone());
        let class = match name {
            "" => None,
            name => ask(&format!("StorageClass {name}"), api.get_opt(name)).await?,
        };
        let Some(class) = class else {
            let why = "the StorageClass of its claim does not exist, so it is not known where its volume may be";
            return Ok(refuse("NoClass", why));
        };
        let Some(bytes) = capacity(live) else {
            let why = "its PersistentVolume has no capacity";
            return Ok(refuse("PersistentVolumeChanged", why));
        };
        let Some(uid) = object.uid() else {
            return Ok(refuse("NoTarget", "the object has no UID"));
        };
        let targets = self.controller.volumes.targets();
        let rooms = self.rooms(object, &targets).await?;
        let pods = self.pods(object).await?;
        let volumes = self.volumes_of(&pods, &object.spec.claim).await?;
        let peers = peers_of(cluster, object, &pods).await?;
        let chosen = choose(&Question {
            to: &object.spec.to,
            source: trust::parsed_pool(&from)?,
            bytes,
            class: &class,
            key: &topology_key(&cluster.options.driver),
            targets: &targets,
            rooms: &rooms,
            pods: &pods,
            volumes: &volumes,
            peers: peers.as_ref(),
        });
        let target = match chosen {
            Ok(target) => target,
            Err(refusal) => return Ok(Err(refusal)),
        };
        let copy = trust::copy_of(target.id, uid);
        Ok(Ok(MoveStatus {
            phase: Phase::Copying,
            volume: Some(live.name().into()),
            volume_uid: live.uid().map(String::from),
            claim_uid,
            from: Some(from),
            to: Some(Place {
                node: target.node,
                home: target.home,
                pool: target.id.to_string(),
                pool_name: target.name,
                handle: copy.to_string(),
            }),
            bytes_total: bytes,
            ..MoveStatus::default()
        }))
    }

    /// The nodes of the pools that a move means.
    async fn rooms(
        &self,
        object: &VolumeMove,
        targets: &[TargetPool],
    ) -> Result<BTreeMap<String, Room>> {
        let meant = targets.iter();
        let meant = meant.filter(|target| is_meant(&object.spec.to, target));
        let nodes: BTreeSet<&String> = meant.map(|target| &target.node).collect();
        let mut rooms = BTreeMap::new();
        for node in nodes {
            rooms.insert(node.clone(), self.room(node).await?);
        }
        Ok(rooms)
    }

    async fn room(&self, name: &str) -> Result<Room> {
        let node = self.node(name).await?;
        let api = Api::<Pod>::all(self.controller.cluster.client.clone());
        let there = ListParams::default().fields(&format!("spec.nodeName={name}"));
        let pods = ask(&format!("the pods of node {name}"), api.list(&there))
            .await?
            .items;
        Ok(Room { node, pods })
    }

    /// The PersistentVolumes of the other claims of these pods.
    async fn volumes_of(&self, pods: &[Pod], but: &str) -> Result<Vec<PersistentVolume>> {
        let client = || self.controller.cluster.client.clone();
        let claims = Api::<PersistentVolumeClaim>::namespaced(client(), &self.namespace);
        let names: BTreeSet<String> = pods.iter().flat_map(claims_of).collect();
        let mut found = Vec::new();
        for name in names.iter().filter(|name| *name != but) {
            let claim = ask(&format!("claim {name}"), claims.get_opt(name)).await?;
            let spec = claim.and_then(|claim| claim.spec);
            let Some(volume) = spec.and_then(|spec| spec.volume_name) else {
                continue;
            };
            let api = Api::<PersistentVolume>::all(client());
            let volume = ask(&format!("PersistentVolume {volume}"), api.get_opt(&volume)).await?;
            found.extend(volume);
        }
        Ok(found)
    }
}

/// The size of a PersistentVolume in bytes.
pub(super) fn capacity(live: &Manifest) -> Option<u64> {
    let text = live.text("/spec/capacity/storage")?;
    let quantity = k8s_openapi::apimachinery::pkg::api::resource::Quantity(text.into());
    u64::try_from(thousandths(&quantity)? / 1_000).ok()
}

/// Bytes of the copy that exist.
pub(super) fn bytes_done(copy: &VolumeMoveStatus, total: u64) -> u64 {
    match copy.state {
        MovingState::Absent => 0,
        MovingState::Filling => copy.copied.min(total),
        MovingState::Ready => total,
    }
}
