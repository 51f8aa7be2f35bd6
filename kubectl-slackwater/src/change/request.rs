//! The requests that change objects: create, merge fields, delete.

use kube::api::{DeleteParams, DynamicObject, Patch, PatchParams, PostParams, Preconditions};
use serde_json::Value;

use crate::cli::Change;
use crate::cluster::object::Kind;
use crate::cluster::{Cluster, Scope};
use crate::failure::{Failure, Result};

/// Merges fields into an object, unless it has changed since it was read.
pub async fn patch(
    cluster: &Cluster,
    change: &Change,
    kind: &Kind,
    object: &DynamicObject,
    mut fields: Value,
) -> Result<DynamicObject> {
    let name = object.metadata.name.clone().unwrap_or_default();
    fields["metadata"]["resourceVersion"] = object.metadata.resource_version.clone().into();
    let params = PatchParams {
        dry_run: change.dry_run,
        ..PatchParams::default()
    };
    let scope = match &object.metadata.namespace {
        Some(namespace) => Scope::Namespace(namespace.clone()),
        None => Scope::All,
    };
    let api = cluster.api(kind, kind.versions[0], &scope);
    let done = api.patch(&name, &params, &Patch::Merge(fields)).await;
    done.map_err(|error| match error {
        kube::Error::Api(status) if status.code == 409 => Failure {
            is_conflict: true,
            ..Failure::failed(format!(
                "{} {name} has changed since it was read; nothing was changed, run the command again",
                kind.kind
            ))
        },
        error => Failure::of(&format!("changing {} {name}", kind.kind), &error),
    })
}

/// A field that the CustomResourceDefinition of an older release does not have is not stored.
pub fn check_stored(stored: bool, field: &str, file: &str) -> Result<()> {
    match stored {
        true => Ok(()),
        false => Err(Failure::failed(format!(
            "the API server did not store {field}: the CustomResourceDefinition is of an older release; apply deploy/chart/crds/{file}, and try again"
        ))),
    }
}

/// As a message names an object.
fn titled(kind: &Kind, namespace: &str, name: &str) -> String {
    match kind.is_namespaced {
        true => format!("{} {namespace}/{name}", kind.kind),
        false => format!("{} {name}", kind.kind),
    }
}

/// What the names of objects that are created for `name` begin with. A name has at most 253 bytes, and the API
/// server adds five.
pub fn name_prefix(name: &str) -> String {
    name.chars().take(240).chain(['-']).collect()
}

/// Creates an object. One of a kind without namespaces ignores the namespace.
pub async fn create(
    cluster: &Cluster,
    change: &Change,
    kind: &Kind,
    namespace: &str,
    object: Value,
) -> Result<DynamicObject> {
    let name = object["metadata"]["name"].as_str().unwrap_or_default();
    let action = match name {
        "" => format!("creating a {}", kind.kind),
        name => format!("creating {}", titled(kind, namespace, name)),
    };
    let object: DynamicObject = serde_json::from_value(object)
        .map_err(|error| Failure::failed(format!("{action}: {error}")))?;
    let scope = Scope::Namespace(namespace.to_string());
    let api = cluster.api(kind, kind.versions[0], &scope);
    let params = PostParams {
        dry_run: change.dry_run,
        ..PostParams::default()
    };
    let made = api.create(&params, &object).await;
    made.map_err(|error| Failure::of(&action, &error))
}

/// Deletes an object, if it is still that of this UID and, if one is given, of this
/// version. One that is gone is no failure.
pub async fn delete(
    cluster: &Cluster,
    change: &Change,
    kind: &Kind,
    namespace: &str,
    name: &str,
    (uid, version): (&str, Option<&str>),
) -> Result<()> {
    let scope = Scope::Namespace(namespace.to_string());
    let mut params = DeleteParams::default().preconditions(Preconditions {
        uid: Some(uid.into()),
        resource_version: version.map(str::to_string),
    });
    params.dry_run = change.dry_run;
    let api = cluster.api(kind, kind.versions[0], &scope);
    match api.delete(name, &params).await {
        Ok(_) => Ok(()),
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
        Err(error) => {
            let action = format!("deleting {}", titled(kind, namespace, name));
            Err(Failure::of(&action, &error))
        }
    }
}
