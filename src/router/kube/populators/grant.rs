//! ReferenceGrants: whether claims of one namespace may name a source of another one.
//!
//! Kubernetes keeps the namespace of a `dataSourceRef` only with its feature gate
//! CrossNamespaceVolumeDataSource. Without the gate, every claim names a source of its own namespace.

use ::kube::api::{Api, DynamicObject, ListParams};
use ::kube::core::{ApiResource, GroupVersionKind};
use ::kube::{Client, Error as KubeError};
use serde_json::Value;

use super::source::SourceName;
use crate::error::Result;
use crate::router::kube::ask;
use crate::router::kube::custom_resource::GROUP;

/// Whether the namespace of a source allows claims of another one to use it.
pub(super) async fn is_granted(client: &Client, source: &SourceName, from: &str) -> Result<bool> {
    let kind = GroupVersionKind::gvk("gateway.networking.k8s.io", "v1beta1", "ReferenceGrant");
    let kind = ApiResource::from_gvk(&kind);
    let api = Api::<DynamicObject>::namespaced_with(client.clone(), &source.namespace, &kind);
    let list = async {
        match api.list(&ListParams::default()).await {
            Ok(grants) => Ok(grants.items),
            // The cluster does not have the CRD.
            Err(KubeError::Api(status)) if status.code == 404 => Ok(Vec::new()),
            Err(error) => Err(error),
        }
    };
    let what = format!("ReferenceGrants of namespace {}", source.namespace);
    let grants = ask(&what, list).await?;
    Ok(grants
        .iter()
        .any(|grant| grants_it(&grant.data, source, from)))
}

fn grants_it(grant: &Value, source: &SourceName, from: &str) -> bool {
    let entries = |key: &str| {
        let list = grant["spec"][key].as_array().cloned();
        list.unwrap_or_default().into_iter()
    };
    let is_from = entries("from").any(|one| {
        one["group"] == "" && one["kind"] == "PersistentVolumeClaim" && one["namespace"] == from
    });
    let is_to = entries("to").any(|one| {
        // An empty name is none: all sources of the kind.
        let name = one["name"].as_str().unwrap_or_default();
        let is_named = name.is_empty() || name == source.name;
        one["group"] == GROUP && one["kind"] == source.kind.as_str() && is_named
    });
    is_from && is_to
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::router::kube::populators::source::Kind;

    #[test]
    fn a_grant_names_the_namespace_of_the_claim_and_the_kind_of_the_source() {
        let source = SourceName {
            kind: Kind::Http,
            namespace: "images".into(),
            name: "base".into(),
        };
        let grants = |from: Value, to: Value| {
            grants_it(
                &json!({"spec": {"from": [from], "to": [to]}}),
                &source,
                "shop",
            )
        };
        let from = json!({"group": "", "kind": "PersistentVolumeClaim", "namespace": "shop"});
        let to = json!({"group": "slackwater.dev", "kind": "HttpSource"});
        assert!(grants(from.clone(), to.clone()));
        for name in ["base", ""] {
            let mut named = to.clone();
            named["name"] = json!(name);
            assert!(grants(from.clone(), named), "{name}");
        }
        for (key, value) in [("kind", "OciSource"), ("name", "other"), ("group", "")] {
            let mut other = to.clone();
            other[key] = json!(value);
            assert!(!grants(from.clone(), other), "{key}");
        }
        for (key, value) in [("kind", "Pod"), ("namespace", "bank"), ("group", "apps")] {
            let mut other = from.clone();
            other[key] = json!(value);
            assert!(!grants(other, to.clone()), "{key}");
        }
        assert!(!grants_it(&json!({}), &source, "shop"));
    }
}
