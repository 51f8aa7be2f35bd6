//! What all kinds of objects of this driver share: their API group and version, UID, path and
//! finalizers.

pub(super) mod duration;

use ::kube::ResourceExt;

/// API group of our kinds.
pub(super) const GROUP: &str = "slackwater.dev";
/// Their version.
pub(super) const VERSION: &str = "v1alpha1";

/// Implements [`Resource`](kube::Resource) for a type with `metadata`: `own_kind!(Type, "plural", Scope)`,
/// where the type has the name of the kind.
macro_rules! own_kind {
    ($kind:ident, $plural:literal, $scope:ident) => {
        impl ::kube::Resource for $kind {
            type DynamicType = ();
            type Scope = ::kube::core::$scope;

            fn kind(_: &()) -> std::borrow::Cow<'_, str> {
                stringify!($kind).into()
            }

            fn group(_: &()) -> std::borrow::Cow<'_, str> {
                $crate::router::kube::custom_resource::GROUP.into()
            }

            fn version(_: &()) -> std::borrow::Cow<'_, str> {
                $crate::router::kube::custom_resource::VERSION.into()
            }

            fn plural(_: &()) -> std::borrow::Cow<'_, str> {
                $plural.into()
            }

            fn meta(&self) -> &::kube::api::ObjectMeta {
                &self.metadata
            }

            fn meta_mut(&mut self) -> &mut ::kube::api::ObjectMeta {
                &mut self.metadata
            }
        }
    };
}

pub(super) use own_kind;

/// Implements what the controllers of a namespaced kind with a finalizer ask of an object.
macro_rules! with_finalizer {
    ($kind:ident, $finalizer:ident) => {
        impl $kind {
            pub(in crate::router::kube) fn uid(&self) -> Option<uuid::Uuid> {
                self.metadata.uid.as_deref()?.parse().ok()
            }

            /// "namespace/name".
            pub(in crate::router::kube) fn path(&self) -> String {
                $crate::router::kube::custom_resource::path(self)
            }

            pub(in crate::router::kube) fn is_leaving(&self) -> bool {
                self.metadata.deletion_timestamp.is_some()
            }

            pub(in crate::router::kube) fn has_finalizer(&self) -> bool {
                let mut all = self.metadata.finalizers.iter().flatten();
                all.any(|one| one == $finalizer)
            }
        }
    };
}

pub(super) use with_finalizer;

/// "namespace/name" of an object.
pub(super) fn path<K: ResourceExt>(object: &K) -> String {
    let namespace = object.namespace().unwrap_or_default();
    format!("{namespace}/{}", object.name_any())
}
