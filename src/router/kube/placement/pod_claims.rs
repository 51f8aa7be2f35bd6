//! Reads what decides on the node of a new volume: the node that was selected for its claim, the other
//! claims of its pod, and whether that pod could run on another node. Nothing of this is watched,
//! because it is needed only while volumes are created.

use std::collections::{BTreeMap, BTreeSet};

use ::kube::Error as KubeError;
use ::kube::api::{Api, DynamicObject, ListParams};
use ::kube::core::{ApiResource, GroupVersionKind, PartialObjectMeta};
use k8s_openapi::api::core::v1::{
    Node, PersistentVolume, PersistentVolumeClaim, Pod, TypedObjectReference,
};
use k8s_openapi::api::storage::v1::StorageClass;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;

use crate::error::{Result, chain};
use crate::operation::ContentSource;
use crate::router::create_volume::pod_placement::quantity::thousandths;
use crate::router::create_volume::pod_placement::{
    Claim, Class, Fit, PodClaims, Source, State, Tie, fit,
};
use crate::router::kube::{InCluster, ask, snapshot_contents, topology_key};

/// The annotation of a claim with the node that the scheduler has chosen.
const SELECTED_NODE: &str = "volume.kubernetes.io/selected-node";
/// The label of a node with its name, which PersistentVolumes of other local drivers name.
const HOST_NAME: &str = "kubernetes.io/hostname";
/// The API group of snapshots.
const SNAPSHOTS: &str = "snapshot.storage.k8s.io";

/// The claims of a namespace, by name.
type Claims = BTreeMap<String, PersistentVolumeClaim>;

/// The node that the scheduler has selected for a claim.
pub(in crate::router::kube) async fn selected_node(
    cluster: &InCluster,
    claim: &str,
) -> Result<Option<String>> {
    let Some((namespace, name)) = claim.split_once('/') else {
        return Ok(None);
    };
    type Claim = PartialObjectMeta<PersistentVolumeClaim>;
    let api = Api::<Claim>::namespaced(cluster.client.clone(), namespace);
    let found = ask(&format!("claim {claim}"), api.get_opt(name)).await?;
    let annotations = found.and_then(|claim| claim.metadata.annotations);
    Ok(annotations.and_then(|mut all| all.remove(SELECTED_NODE)))
}

/// Reads the claims that pods use together with one claim.
pub(in crate::router::kube) async fn read(
    cluster: &InCluster,
    claim: &str,
    source: Option<&ContentSource>,
    is_elsewhere: bool,
) -> Result<Option<PodClaims>> {
    let Some((namespace, name)) = claim.split_once('/') else {
        return Ok(None);
    };
    let api = Api::<PersistentVolumeClaim>::namespaced(cluster.client.clone(), namespace);
    let what = format!("the claims of namespace {namespace}");
    let found = ask(&what, api.list(&ListParams::default())).await?.items;
    let all: Claims = found
        .into_iter()
        .filter_map(|one| Some((one.metadata.name.clone()?, one)))
        .collect();
    let mut others = all.iter().filter(|(other, _)| *other != name);
    if !is_elsewhere && !others.any(|(_, one)| source_of(one).is_some()) {
        return Ok(None);
    }
    let api = Api::<Pod>::namespaced(cluster.client.clone(), namespace);
    let what = format!("the pods of namespace {namespace}");
    let pods = ask(&what, api.list(&ListParams::default())).await?.items;
    let pods = pods.into_iter().filter(is_waiting).collect();
    let (names, pods, apart) = together(name, pods);
    let mut reader = Reader {
        cluster,
        namespace,
        all: &all,
        own: (name, source),
        classes: BTreeMap::new(),
        volumes: BTreeMap::new(),
        has_pods_claims: false,
    };
    let mut claims = Vec::new();
    for name in &names {
        claims.push(reader.read(name).await?);
    }
    let volumes = std::mem::take(&mut reader.volumes).into_values().collect();
    reader.has_pods_claims = true;
    let mut others = Vec::new();
    for name in of_controller(&all, &pods, &apart) {
        if !names.contains(&name) {
            others.push(reader.read(&name).await?);
        }
    }
    Ok(Some(PodClaims {
        claims,
        others,
        pods,
        volumes,
    }))
}

/// Whether the pod of the claims could run on a node.
pub(in crate::router::kube) async fn check_node(
    cluster: &InCluster,
    claims: &PodClaims,
    name: &str,
) -> Fit {
    let api = Api::<Node>::all(cluster.client.clone());
    let node = ask(&format!("node {name}"), api.get_opt(name)).await;
    let node = node.map_err(|error| chain(&error))?;
    let node = node.ok_or_else(|| format!("node {name} is no longer in the cluster"))?;
    let api = Api::<Pod>::all(cluster.client.clone());
    let there = ListParams::default().fields(&format!("spec.nodeName={name}"));
    let here = ask(&format!("the pods of node {name}"), api.list(&there)).await;
    let here = here.map_err(|error| chain(&error))?.items;
    let mut pods = claims.pods.iter();
    pods.try_for_each(|pod| fit::fits(pod, &claims.volumes, &node, (&here, None)))
}

/// A pod that has ended, or is being deleted, waits for no volume.
pub(super) fn is_waiting(pod: &Pod) -> bool {
    let phase = pod
        .status
        .as_ref()
        .and_then(|status| status.phase.as_deref());
    pod.metadata.deletion_timestamp.is_none() && !matches!(phase, Some("Succeeded" | "Failed"))
}

/// The names of the claims that are tied together by pods with one of them, those pods, and the
/// other pods.
fn together(claim: &str, pods: Vec<Pod>) -> (BTreeSet<String>, Vec<Pod>, Vec<Pod>) {
    let mut names = BTreeSet::from([claim.to_string()]);
    let (mut tied, mut others) = (Vec::new(), pods);
    loop {
        let is_tied = |pod: &Pod| claims_of(pod).iter().any(|name| names.contains(name));
        let (more, rest): (Vec<_>, Vec<_>) = others.into_iter().partition(is_tied);
        others = rest;
        if more.is_empty() {
            return (names, tied, others);
        }
        names.extend(more.iter().flat_map(claims_of));
        tied.extend(more);
    }
}

/// The claims that a pod uses, those of its generic ephemeral volumes included.
pub(in crate::router::kube) fn claims_of(pod: &Pod) -> Vec<String> {
    let volumes = pod
        .spec
        .iter()
        .flat_map(|spec| spec.volumes.iter().flatten());
    let name = pod.metadata.name.as_deref().unwrap_or_default();
    let named = volumes.filter_map(|volume| {
        let claim = volume.persistent_volume_claim.as_ref();
        let ephemeral = volume
            .ephemeral
            .as_ref()
            .map(|_| format!("{name}-{}", volume.name));
        claim.map(|claim| claim.claim_name.clone()).or(ephemeral)
    });
    named.collect()
}

fn controller(pod: &Pod) -> Option<&OwnerReference> {
    let mut owners = pod.metadata.owner_references.iter().flatten();
    owners.find(|owner| owner.controller == Some(true))
}

/// The names of the claims of the controllers of these pods: of their other pods, and of a
/// StatefulSet also those whose pods do not exist now.
fn of_controller(all: &Claims, pods: &[Pod], others: &[Pod]) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for pod in pods {
        let Some(owner) = controller(pod) else {
            continue;
        };
        let is_its = |other: &&Pod| controller(other).is_some_and(|one| one.uid == owner.uid);
        found.extend(others.iter().filter(is_its).flat_map(claims_of));
        if owner.kind == "StatefulSet" {
            let volumes = pod
                .spec
                .iter()
                .flat_map(|spec| spec.volumes.iter().flatten());
            let templates: Vec<_> = volumes
                .map(|volume| format!("{}-{}-", volume.name, owner.name))
                .collect();
            let is_member = |name: &&String| {
                let mut ordinals = templates
                    .iter()
                    .filter_map(|one| name.strip_prefix(one.as_str()));
                ordinals.any(|ordinal| ordinal.parse::<u32>().is_ok())
            };
            found.extend(all.keys().filter(is_member).cloned());
        }
    }
    found
}

/// The reference to the content source of a claim.
fn source_of(claim: &PersistentVolumeClaim) -> Option<TypedObjectReference> {
    let spec = claim.spec.as_ref()?;
    let older = spec
        .data_source
        .as_ref()
        .map(|source| TypedObjectReference {
            api_group: source.api_group.clone(),
            kind: source.kind.clone(),
            name: source.name.clone(),
            namespace: None,
        });
    spec.data_source_ref.clone().or(older)
}

/// Reads claims, and what they name.
struct Reader<'a> {
    cluster: &'a InCluster,
    namespace: &'a str,
    all: &'a Claims,
    /// The claim of the new volume, and the content source in the call.
    own: (&'a str, Option<&'a ContentSource>),
    classes: BTreeMap<String, Class>,
    volumes: BTreeMap<String, PersistentVolume>,
    /// All claims of the pods are read. Of the PersistentVolumes of others only the home is needed,
    /// which is in memory.
    has_pods_claims: bool,
}

impl Reader<'_> {
    async fn read(&mut self, name: &str) -> Result<Claim> {
        let claim = self.all.get(name);
        let spec = claim.and_then(|claim| claim.spec.as_ref());
        let volume = spec.and_then(|spec| spec.volume_name.as_deref());
        let state = match volume.filter(|volume| !volume.is_empty()) {
            Some(volume) => State::Bound(self.tie(volume).await?),
            None => State::Unbound {
                class: match spec {
                    Some(spec) => self.class(spec.storage_class_name.as_deref()).await,
                    None => Class::Unknown("the claim does not exist".into()),
                },
                source: match (name == self.own.0, claim) {
                    (true, _) => self.own.1.cloned().map_or(Source::None, Source::Of),
                    (false, Some(claim)) => self.source(claim).await,
                    (false, None) => Source::None,
                },
            },
        };
        let metadata = claim.map(|claim| &claim.metadata);
        let annotations = metadata.and_then(|metadata| metadata.annotations.as_ref());
        let requests = spec.and_then(|spec| spec.resources.as_ref()?.requests.as_ref());
        let bytes = requests.and_then(|requests| thousandths(requests.get("storage")?));
        Ok(Claim {
            path: format!("{}/{name}", self.namespace),
            uid: metadata
                .and_then(|metadata| metadata.uid.clone())
                .unwrap_or_default(),
            selected: annotations.and_then(|all| all.get(SELECTED_NODE).cloned()),
            bytes: bytes
                .and_then(|bytes| u64::try_from(bytes / 1_000).ok())
                .unwrap_or(0),
            state,
        })
    }

    /// The node that a PersistentVolume is tied to.
    async fn tie(&mut self, name: &str) -> Result<Tie> {
        if self.has_pods_claims
            && let Some(home) = self.cluster.volumes.home_of(name)
        {
            return Ok(Tie::Home(home));
        }
        let api = Api::<PersistentVolume>::all(self.cluster.client.clone());
        let found = ask(&format!("PersistentVolume {name}"), api.get_opt(name)).await?;
        let Some(volume) = found else {
            return Ok(Tie::Loose);
        };
        let key = topology_key(&self.cluster.options.driver);
        let home = only(&volume, &key).map(Tie::Home);
        let tie = home.or_else(|| only(&volume, HOST_NAME).map(Tie::Node));
        self.volumes.insert(name.into(), volume);
        Ok(tie.unwrap_or(Tie::Loose))
    }

    async fn class(&mut self, name: Option<&str>) -> Class {
        let Some(name) = name.filter(|name| !name.is_empty()) else {
            return Class::Others;
        };
        if let Some(known) = self.classes.get(name) {
            return known.clone();
        }
        let api = Api::<StorageClass>::all(self.cluster.client.clone());
        let what = format!("StorageClass {name}");
        let class = match ask(&what, api.get_opt(name)).await {
            Ok(Some(class)) if class.provisioner == self.cluster.options.driver => {
                Class::Ours(class.parameters.unwrap_or_default())
            }
            Ok(Some(_)) => Class::Others,
            Ok(None) => Class::Unknown(format!("{what} does not exist")),
            Err(error) => Class::Unknown(chain(&error)),
        };
        self.classes.insert(name.into(), class.clone());
        class
    }

    /// The content source of a claim, with the ID that its object names.
    async fn source(&self, claim: &PersistentVolumeClaim) -> Source {
        let Some(source) = source_of(claim) else {
            return Source::None;
        };
        let namespace = source.namespace.as_deref().unwrap_or(self.namespace);
        let found = match (source.api_group.as_deref(), source.kind.as_str()) {
            (Some(SNAPSHOTS), "VolumeSnapshot") => {
                let found = self.snapshot(namespace, &source.name).await;
                found.map(ContentSource::Snapshot)
            }
            (None | Some(""), "PersistentVolumeClaim") => {
                let found = self.volume(namespace, &source.name).await;
                found.map(ContentSource::Volume)
            }
            (_, kind) => Err(format!(
                "{kind} {} is not a source that the driver reads",
                source.name
            )),
        };
        found.map_or_else(Source::Unknown, Source::Of)
    }

    async fn snapshot(&self, namespace: &str, name: &str) -> std::result::Result<String, String> {
        let client = || self.cluster.client.clone();
        let kind = GroupVersionKind::gvk(SNAPSHOTS, "v1", "VolumeSnapshot");
        let kind = ApiResource::from_gvk(&kind);
        let api = Api::<DynamicObject>::namespaced_with(client(), namespace, &kind);
        let what = format!("VolumeSnapshot {namespace}/{name}");
        let path = "/status/boundVolumeSnapshotContentName";
        let content = text(&what, api.get_opt(name), path).await?;
        let kind = ApiResource::from_gvk(&snapshot_contents::snapshot_contents());
        let api = Api::<DynamicObject>::all_with(client(), &kind);
        let what = format!("VolumeSnapshotContent {content}");
        text(&what, api.get_opt(&content), "/status/snapshotHandle").await
    }

    async fn volume(&self, namespace: &str, name: &str) -> std::result::Result<String, String> {
        let client = || self.cluster.client.clone();
        let what = format!("claim {namespace}/{name}");
        let api = Api::<DynamicObject>::namespaced_with(
            client(),
            namespace,
            &core("PersistentVolumeClaim"),
        );
        let volume = text(&what, api.get_opt(name), "/spec/volumeName").await?;
        let what = format!("PersistentVolume {volume}");
        let api = Api::<DynamicObject>::all_with(client(), &core("PersistentVolume"));
        text(&what, api.get_opt(&volume), "/spec/csi/volumeHandle").await
    }
}

fn core(kind: &str) -> ApiResource {
    ApiResource::from_gvk(&GroupVersionKind::gvk("", "v1", kind))
}

/// A text in an object.
async fn text(
    what: &str,
    answer: impl Future<Output = std::result::Result<Option<DynamicObject>, KubeError>>,
    path: &str,
) -> std::result::Result<String, String> {
    let found = ask(what, answer).await.map_err(|error| chain(&error))?;
    let found = found.ok_or_else(|| format!("{what} does not exist"))?;
    let value = found.data.pointer(path).and_then(|value| value.as_str());
    let value = value.ok_or_else(|| {
        format!(
            "{what} has no {}",
            path.trim_start_matches('/').replace('/', ".")
        )
    })?;
    Ok(value.to_string())
}

/// The only value that the node affinity of a volume allows for a label.
fn only(volume: &PersistentVolume, key: &str) -> Option<String> {
    let affinity = volume.spec.as_ref()?.node_affinity.as_ref()?;
    let terms = &affinity.required.as_ref()?.node_selector_terms;
    let mut found = BTreeSet::new();
    for term in terms {
        let mut asked = term.match_expressions.iter().flatten();
        let asked = asked.find(|asked| asked.key == key && asked.operator == "In")?;
        found.extend(asked.values.iter().flatten());
    }
    let mut found = found.into_iter();
    match (found.next(), found.next()) {
        (Some(value), None) => Some(value.clone()),
        _ => None,
    }
}
