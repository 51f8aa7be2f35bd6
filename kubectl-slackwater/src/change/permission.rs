//! The permissions of the user, which are checked with the API server before the first change.

use k8s_openapi::api::authorization::v1::{
    ResourceAttributes, SelfSubjectAccessReview, SelfSubjectAccessReviewSpec,
};
use kube::api::{Api, PostParams};

use crate::cluster::Cluster;
use crate::cluster::object::Kind;
use crate::failure::{Failure, Result};

/// A permission that a command needs.
pub struct Need<'a> {
    pub verb: &'a str,
    /// The kind of objects.
    pub kind: &'a Kind,
    /// The namespace, for kinds that are in one.
    pub namespace: &'a str,
    /// The object; empty for all.
    pub name: &'a str,
}

/// Asks the API server for each permission, and names those that are missing.
pub async fn require(cluster: &Cluster, needs: &[Need<'_>]) -> Result<()> {
    let missing = missing(cluster, needs).await?;
    match missing.is_empty() {
        true => Ok(()),
        false => Err(Failure::denied(format!(
            "nothing was changed, because these permissions are missing:{missing}"
        ))),
    }
}

/// The permissions that the user does not have, each in a line of its own; empty if there are none.
pub async fn missing(cluster: &Cluster, needs: &[Need<'_>]) -> Result<String> {
    let api = Api::<SelfSubjectAccessReview>::all(cluster.client.clone());
    let some = |text: &str| Some(text.to_string()).filter(|text| !text.is_empty());
    let mut missing = String::new();
    for need in needs {
        let (resource, subresource) = need
            .kind
            .plural
            .split_once('/')
            .unwrap_or((need.kind.plural, ""));
        let attributes = ResourceAttributes {
            verb: some(need.verb),
            group: some(need.kind.group),
            resource: some(resource),
            subresource: some(subresource),
            namespace: some(need.namespace).filter(|_| need.kind.is_namespaced),
            name: some(need.name),
            ..ResourceAttributes::default()
        };
        let review = SelfSubjectAccessReview {
            spec: SelfSubjectAccessReviewSpec {
                resource_attributes: Some(attributes),
                ..SelfSubjectAccessReviewSpec::default()
            },
            ..SelfSubjectAccessReview::default()
        };
        let answer = api.create(&PostParams::default(), &review).await;
        let answer = answer.map_err(|error| Failure::of("asking for permissions", &error))?;
        if !answer.status.is_some_and(|status| status.allowed) {
            missing.push_str(&format!("\n  {}", describe(need)));
        }
    }
    Ok(missing)
}

fn describe(need: &Need<'_>) -> String {
    let group = match need.kind.group {
        "" => String::new(),
        group => format!(".{group}"),
    };
    let name = match need.name {
        "" => String::new(),
        name => format!("/{name}"),
    };
    let place = match (need.kind.is_namespaced, need.namespace) {
        (true, "") => " in all namespaces".to_string(),
        (true, namespace) => format!(" in namespace {namespace}"),
        (false, _) => String::new(),
    };
    format!("{} {}{group}{name}{place}", need.verb, need.kind.plural)
}
