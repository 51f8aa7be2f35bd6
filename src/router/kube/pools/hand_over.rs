//! `slackwater pool hand-over`: a person decides which node has a pool from now on.
//!
//! A pool belongs to the node that reported it last. The report of another node does not count while
//! that node cannot be asked, or reports that the pool's disk is missing: the other one may be a copy of
//! the pool, or a false report. The field `spec.node` of the Pool object settles this. The leading router
//! removes the field when that node reports the pool.

use ::kube::api::{Api, Patch, PatchParams};
use ::kube::core::PartialObjectMeta;
use ::kube::{Client, ResourceExt};
use k8s_openapi::api::core::v1::Node;

use super::object::Pool;
use crate::error::{Error, Kind, Result};
use crate::router::kube::{adopt, ask};

/// A pool that is handed over.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HandedOver {
    /// Its UUID.
    pub id: String,
    /// Its name in its node's configuration.
    pub name: String,
    /// The node that had it; empty if that is not known.
    pub from: String,
    /// The node that has it from now on.
    pub to: String,
    /// The node that has it is the one that had it before.
    pub unchanged: bool,
}

/// Sets the node of a pool, which is given by its UUID, its name, or NODE/NAME. `driver` is as for
/// [`adopt::make_plan`].
pub async fn hand_over(
    client: &Client,
    driver: Option<&str>,
    which: &str,
    node: &str,
) -> Result<HandedOver> {
    let pools = adopt::of_driver(client, driver).await?;
    let pool = adopt::one_of(which, &pools)?;
    let nodes = Api::<PartialObjectMeta<Node>>::all(client.clone());
    if ask(&format!("node {node}"), nodes.get_opt(node))
        .await?
        .is_none()
    {
        return Err(Error::not_found(Kind::Node, node));
    }
    let id = pool.name_any();
    let refuse = |why: &str| Err(Error::refused(format!("pool {id}"), why));
    if pool.spec.lost {
        return refuse("it is marked as lost; set spec.lost to false first");
    }
    let status = pool.status.clone().unwrap_or_default();
    let marked = pool.spec.node.as_deref();
    let unchanged = marked.unwrap_or(&status.node) == node;
    if !unchanged {
        let patch = serde_json::json!({ "spec": { "node": node } });
        let api = Api::<Pool>::all(client.clone());
        let (params, patch) = (PatchParams::default(), Patch::Merge(patch));
        let now = ask(&format!("pool {id}"), api.patch(&id, &params, &patch)).await?;
        if now.spec.node.as_deref() != Some(node) {
            return refuse(
                "the API server did not store spec.node: the CustomResourceDefinition is of an older release; apply deploy/chart/crds/pools.yaml, and try again",
            );
        }
    }
    Ok(HandedOver {
        id,
        name: status.name,
        from: status.node,
        to: node.into(),
        unchanged,
    })
}
