//! The objects that name data sources: HttpSource, OciSource and S3Source. The CRDs are in
//! deploy/chart/crds; their rules have refused what is contradictory.
//!
//! People write `spec`; the leading controller writes `status`.

use std::borrow::Cow;

use ::kube::Resource;
use ::kube::api::{ObjectMeta, TypeMeta};
use ::kube::core::DynamicResourceScope;
use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use serde::{Deserialize, Serialize};

use crate::router::kube::custom_resource::{GROUP, VERSION, path};

/// The kind of a data source.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(in crate::router::kube) enum Kind {
    Http,
    Oci,
    S3,
}

impl Kind {
    pub(in crate::router::kube) const ALL: [Kind; 3] = [Kind::Http, Kind::Oci, Kind::S3];

    /// Its name in the API.
    pub(in crate::router::kube) fn as_str(self) -> &'static str {
        match self {
            Kind::Http => "HttpSource",
            Kind::Oci => "OciSource",
            Kind::S3 => "S3Source",
        }
    }

    pub(in crate::router::kube) fn plural(self) -> &'static str {
        match self {
            Kind::Http => "httpsources",
            Kind::Oci => "ocisources",
            Kind::S3 => "s3sources",
        }
    }
}

/// A data source.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(in crate::router::kube) struct Source {
    /// Absent from objects in lists.
    #[serde(flatten, default)]
    pub(in crate::router::kube) types: Option<TypeMeta>,
    pub(in crate::router::kube) metadata: ObjectMeta,
    #[serde(default)]
    pub(super) spec: SourceSpec,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(in crate::router::kube) status: Option<SourceStatus>,
}

/// The fields of all kinds. The CRD of a kind has its own ones.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct SourceSpec {
    /// Of an HttpSource.
    pub(super) url: Option<String>,
    /// Of an OciSource, as are `path` and `platform`.
    pub(super) image: Option<String>,
    pub(super) path: Option<String>,
    pub(super) platform: Option<Platform>,
    /// Of an S3Source, as are the next four.
    pub(super) endpoint: Option<String>,
    pub(super) region: Option<String>,
    pub(super) bucket: Option<String>,
    pub(super) key: Option<String>,
    pub(super) prefix: Option<String>,
    pub(super) sha256: Option<String>,
    pub(super) unverified: bool,
    pub(super) format: Option<String>,
    pub(super) file_name: Option<String>,
    pub(super) secret_ref: Option<SecretRef>,
    pub(super) owner: Option<Owner>,
    pub(super) preserve_owners: bool,
    /// "node": a volume that was filled is kept as a snapshot, for other claims on its node.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) cache: Option<String>,
}

/// Which image of an index is used.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Platform {
    pub(super) os: String,
    pub(super) architecture: String,
}

/// A Secret in the namespace of the claim.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct SecretRef {
    pub(super) name: String,
}

/// The user and the group that files belong to, and as which the pod runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Owner {
    pub(super) uid: u32,
    pub(super) gid: u32,
}

/// What the controller shows.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(in crate::router::kube) struct SourceStatus {
    /// The numbers of claims that are populated, are not yet, and will not be.
    pub(in crate::router::kube) populated: u64,
    pub(in crate::router::kube) waiting: u64,
    pub(in crate::router::kube) failed: u64,
    /// Those that are not populated come first. The list is limited.
    pub(in crate::router::kube) claims: Vec<ClaimStatus>,
    pub(in crate::router::kube) conditions: Vec<Condition>,
}

/// A claim that names the source.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(in crate::router::kube) struct ClaimStatus {
    pub(in crate::router::kube) namespace: String,
    pub(in crate::router::kube) name: String,
    pub(in crate::router::kube) uid: String,
    pub(in crate::router::kube) phase: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub(in crate::router::kube) reason: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub(in crate::router::kube) message: String,
    /// Attempts that have failed since the source was changed last.
    pub(in crate::router::kube) failures: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(in crate::router::kube) received_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(in crate::router::kube) total_bytes: Option<u64>,
    /// Of the image of an OciSource.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(in crate::router::kube) digest: Option<String>,
    /// Since when it has this phase, while it is neither populated nor failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(in crate::router::kube) since: Option<Time>,
    /// When `received_bytes` was read from the pod.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(in crate::router::kube) progress_at: Option<Time>,
    /// When the first number of the attempt was read, and that number: both have the rate.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(in crate::router::kube) progress_since: Option<Time>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(in crate::router::kube) progress_since_bytes: Option<u64>,
}

impl Source {
    /// Its UID and generation: what an attempt is made from.
    pub(super) fn version(&self) -> String {
        let meta = &self.metadata;
        let uid = meta.uid.as_deref().unwrap_or_default();
        format!("{uid}/{}", meta.generation.unwrap_or_default())
    }

    /// "namespace/name".
    pub(super) fn path(&self) -> String {
        path(self)
    }
}

impl Resource for Source {
    type DynamicType = Kind;
    type Scope = DynamicResourceScope;

    fn kind(kind: &Kind) -> Cow<'_, str> {
        kind.as_str().into()
    }

    fn group(_: &Kind) -> Cow<'_, str> {
        GROUP.into()
    }

    fn version(_: &Kind) -> Cow<'_, str> {
        VERSION.into()
    }

    fn plural(kind: &Kind) -> Cow<'_, str> {
        kind.plural().into()
    }

    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }

    fn meta_mut(&mut self) -> &mut ObjectMeta {
        &mut self.metadata
    }
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct SourceName {
    pub(super) kind: Kind,
    pub(super) namespace: String,
    pub(super) name: String,
}

impl SourceName {
    /// "namespace/name".
    pub(super) fn path(&self) -> String {
        format!("{}/{}", self.namespace, self.name)
    }
}

/// The source that a claim names; `None` if what it names is not one of these kinds.
pub(super) fn source_of(claim: &PersistentVolumeClaim) -> Option<SourceName> {
    let reference = claim.spec.as_ref()?.data_source_ref.as_ref()?;
    if reference.api_group.as_deref() != Some(GROUP) {
        return None;
    }
    let mut kinds = Kind::ALL.into_iter();
    let kind = kinds.find(|kind| kind.as_str() == reference.kind)?;
    let own = claim.metadata.namespace.clone().unwrap_or_default();
    let other = reference.namespace.clone().filter(|name| !name.is_empty());
    Some(SourceName {
        kind,
        namespace: other.unwrap_or(own),
        name: reference.name.clone(),
    })
}

#[cfg(test)]
mod tests {
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
    use serde_json::json;

    use super::*;
    use crate::record::formats::check_with;

    fn source(spec: SourceSpec, status: Option<SourceStatus>) -> Source {
        Source {
            metadata: ObjectMeta {
                name: Some("base".into()),
                namespace: Some("shop".into()),
                ..ObjectMeta::default()
            },
            spec,
            status,
            ..Source::default()
        }
    }

    fn words(text: &str) -> Option<String> {
        Some(text.to_string())
    }

    fn http() -> SourceSpec {
        SourceSpec {
            url: words("https://images.example/base.img.xz"),
            sha256: Some("0a".repeat(32)),
            format: words("raw"),
            file_name: words("base.img"),
            secret_ref: Some(SecretRef {
                name: "token".into(),
            }),
            owner: Some(Owner {
                uid: 1000,
                gid: 1001,
            }),
            ..SourceSpec::default()
        }
    }

    fn cached() -> SourceSpec {
        SourceSpec {
            cache: words("node"),
            ..http()
        }
    }

    #[test]
    fn source_objects_keep_their_format() {
        let oci = SourceSpec {
            image: words("registry.example/base:1"),
            path: words("disk"),
            platform: Some(Platform {
                os: "linux".into(),
                architecture: "arm64".into(),
            }),
            preserve_owners: true,
            ..SourceSpec::default()
        };
        let s3 = SourceSpec {
            endpoint: words("https://s3.example"),
            region: words("here"),
            bucket: words("data"),
            prefix: words("set/"),
            key: None,
            unverified: true,
            ..SourceSpec::default()
        };
        let time: Time = serde_json::from_str("\"2026-01-02T03:04:05Z\"").unwrap();
        let status = SourceStatus {
            populated: 3,
            waiting: 1,
            failed: 0,
            claims: vec![ClaimStatus {
                namespace: "shop".into(),
                name: "data".into(),
                uid: "c-1".into(),
                phase: "Populating".into(),
                reason: "Running".into(),
                message: "the pod runs".into(),
                failures: 2,
                received_bytes: Some(5),
                total_bytes: Some(10),
                digest: words("sha256:00"),
                ..ClaimStatus::default()
            }],
            conditions: vec![Condition {
                last_transition_time: time.clone(),
                message: String::new(),
                observed_generation: Some(1),
                reason: "Proceeding".into(),
                status: "True".into(),
                type_: "Proceeding".into(),
            }],
        };
        let mut progress = status.clone();
        for claim in &mut progress.claims {
            claim.since = Some(time.clone());
            claim.progress_at = Some(time.clone());
            claim.progress_since = Some(time.clone());
            claim.progress_since_bytes = Some(1);
        }
        let expected = vec![
            ("http.json", source(http(), Some(status))),
            ("progress.json", source(http(), Some(progress))),
            ("oci.json", source(oci, None)),
            ("s3.json", source(s3, None)),
            ("cached.json", source(cached(), None)),
        ];
        let read = |bytes: &[u8]| serde_json::from_slice::<Source>(bytes).unwrap();
        let write = |object: &Source| serde_json::to_vec_pretty(object).unwrap();
        check_with("source-object", expected, read, write);
    }

    #[test]
    fn a_claim_names_a_source_of_its_own_namespace_or_of_another_one() {
        let named = |reference: serde_json::Value| {
            let claim = json!({"metadata": {"namespace": "shop", "name": "data"},
                "spec": {"dataSourceRef": reference}});
            let claim = serde_json::from_value(claim).unwrap();
            source_of(&claim).map(|name| format!("{} {}", name.kind.as_str(), name.path()))
        };
        let group = "slackwater.dev";
        let own = json!({"apiGroup": group, "kind": "HttpSource", "name": "base"});
        assert_eq!(named(own).as_deref(), Some("HttpSource shop/base"));
        let other =
            json!({"apiGroup": group, "kind": "S3Source", "name": "base", "namespace": "bank"});
        assert_eq!(named(other).as_deref(), Some("S3Source bank/base"));
        for foreign in [
            json!({"apiGroup": "snapshot.storage.k8s.io", "kind": "VolumeSnapshot", "name": "s"}),
            json!({"apiGroup": "other.example", "kind": "HttpSource", "name": "base"}),
            json!({"kind": "HttpSource", "name": "base"}),
            json!({"apiGroup": group, "kind": "GitSource", "name": "base"}),
        ] {
            assert_eq!(named(foreign), None);
        }
    }
}
