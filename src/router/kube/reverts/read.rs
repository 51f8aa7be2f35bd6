//! Reads objects that a revert names.

use std::collections::BTreeMap;

use ::kube::ResourceExt;
use ::kube::api::{Api, DynamicObject, ListParams};
use ::kube::core::{ApiResource, GroupVersionKind};
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim, Pod};
use serde_json::Value;

use super::RevertController;
use crate::error::{Error, Result};
use crate::model::VolumeId;
use crate::router::cluster::Cluster;
use crate::router::kube::placement::pod_claims::claims_of;
use crate::router::kube::{InCluster, ask};

pub(super) fn snapshots_api() -> ApiResource {
    let kind = GroupVersionKind::gvk("snapshot.storage.k8s.io", "v1", "VolumeSnapshot");
    ApiResource::from_gvk(&kind)
}

impl InCluster {
    /// The claim of a volume, if it is in another namespace.
    pub(in crate::router::kube) fn foreign_claim(
        &self,
        handle: &str,
        namespace: &str,
    ) -> Option<String> {
        let claim = self.claim_of(handle)?;
        let is_own = claim
            .split_once('/')
            .is_some_and(|(its, _)| its == namespace);
        (!is_own).then_some(claim)
    }
}

/// An ID in the status, which the router has written.
pub(super) fn parsed(id: &str) -> Result<VolumeId> {
    let parsed = id.parse::<VolumeId>();
    parsed.map_err(|_| Error::unreachable(format!("volume {id:?}"), "is not an ID of this driver"))
}

pub(super) fn text<'a>(object: &'a DynamicObject, path: &str) -> Option<&'a str> {
    object.data.pointer(path).and_then(Value::as_str)
}

/// Whether a snapshot, or a group of them, is ready and stays.
pub(super) fn is_ready(object: &DynamicObject) -> bool {
    let ready = object.data.pointer("/status/readyToUse");
    ready.and_then(Value::as_bool) == Some(true) && object.metadata.deletion_timestamp.is_none()
}

/// Reads objects of one namespace.
pub(super) struct Reader<'a> {
    pub(super) controller: &'a RevertController,
    pub(super) namespace: String,
}

impl Reader<'_> {
    pub(super) fn namespaced(&self, api: &ApiResource) -> Api<DynamicObject> {
        let client = self.controller.cluster.client.clone();
        Api::namespaced_with(client, &self.namespace, api)
    }

    pub(super) async fn claim(&self, name: &str) -> Result<Option<PersistentVolumeClaim>> {
        let client = self.controller.cluster.client.clone();
        let api = Api::<PersistentVolumeClaim>::namespaced(client, &self.namespace);
        let what = format!("claim {}/{name}", self.namespace);
        let found = ask(&what, api.get_opt(name)).await?;
        Ok(found.filter(|claim| claim.metadata.deletion_timestamp.is_none()))
    }

    /// The ID of the volume of a PersistentVolume that is bound to a claim with this UID.
    pub(super) async fn handle(&self, volume: &str, claim_uid: &str) -> Result<Option<String>> {
        let cluster = &self.controller.cluster;
        let api = Api::<PersistentVolume>::all(cluster.client.clone());
        let what = format!("PersistentVolume {volume}");
        let found = ask(&what, api.get_opt(volume)).await?;
        let found = found.filter(|found| found.metadata.deletion_timestamp.is_none());
        let spec = found.and_then(|found| found.spec);
        Ok(spec.and_then(|spec| {
            let bound = spec.claim_ref.and_then(|claim| claim.uid);
            let csi = spec.csi.filter(|csi| csi.driver == cluster.options.driver);
            csi.filter(|_| bound.as_deref() == Some(claim_uid))
                .map(|csi| csi.volume_handle)
        }))
    }

    /// The pods that have not ended, by the claims that they name.
    pub(super) async fn pods(&self) -> Result<BTreeMap<String, Vec<String>>> {
        let client = self.controller.cluster.client.clone();
        let api = Api::<Pod>::namespaced(client, &self.namespace);
        let what = format!("the pods of namespace {}", self.namespace);
        let all = ask(&what, api.list(&ListParams::default())).await?.items;
        let mut pods: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for pod in all {
            let phase = pod.status.as_ref().and_then(|it| it.phase.as_deref());
            if matches!(phase, Some("Succeeded" | "Failed")) {
                continue;
            }
            for claim in claims_of(&pod) {
                pods.entry(claim).or_default().push(pod.name_any());
            }
        }
        Ok(pods)
    }
}
