//! `pool adopt` and `pool forget`: fields of the Pool object, with which the controller asks the agent of a
//! node.

use kube::api::DynamicObject;
use serde_json::json;

use crate::change::{Progress, check_stored, confirm, follow, patch, print_lines};
use crate::cli::{Change, PoolAdoptArguments, PoolForgetArguments, Wait};
use crate::cluster::Cluster;
use crate::cluster::object::{self, Fields};
use crate::failure::{Failure, Result};
use crate::model::Pool;
use crate::pools::object::{describe_claims, may_patch, print_done, refuse_lost};

/// A field of the spec with the name of a node, and the condition that belongs to it.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Request {
    Adopt,
    Forget,
}

impl Request {
    fn field(self) -> &'static str {
        match self {
            Request::Adopt => "adopt",
            Request::Forget => "forget",
        }
    }

    fn condition(self) -> &'static str {
        match self {
            Request::Adopt => "Adopted",
            Request::Forget => "Forgotten",
        }
    }

    /// The node that the object names.
    fn node(self, object: &DynamicObject) -> &str {
        object.text(&format!("/spec/{}", self.field()))
    }
}

/// Has a node adopt a pool.
pub async fn adopt(
    cluster: &Cluster,
    object: &DynamicObject,
    pool: &Pool,
    arguments: &PoolAdoptArguments,
) -> Result<()> {
    let Some(node) = arguments.to_node.as_deref().filter(|_| !arguments.undo) else {
        return withdraw(cluster, object, pool, Request::Adopt, &arguments.change).await;
    };
    refuse_lost(pool)?;
    let is_served = matches!(pool.health.as_str(), "Healthy" | "Degraded");
    if Request::Adopt.node(object).is_empty() && pool.node == node && is_served {
        print_lines(&format!("Pool {} has node {node} already.", pool.title()));
        return Ok(());
    }
    cluster.get(&object::NODE, "", node).await?;
    let owner = match pool.node.as_str() {
        "" => String::new(),
        owner if owner == node => String::new(),
        owner if is_served => format!(
            ", and not to node {owner} any more. Nothing happens while node {owner} serves it"
        ),
        owner => format!(", and not to node {owner} any more"),
    };
    let plan = format!(
        "Node {node} will be asked to adopt pool {} ({}). When it has, the pool belongs to it{owner}.",
        pool.title(),
        pool.id
    );
    request_and_follow(
        cluster,
        object,
        pool,
        (Request::Adopt, node),
        &plan,
        (&arguments.change, &arguments.wait),
    )
    .await
}

/// Has a node forget a pool.
pub async fn forget(
    cluster: &Cluster,
    object: &DynamicObject,
    pool: &Pool,
    arguments: &PoolForgetArguments,
) -> Result<()> {
    if arguments.undo {
        return withdraw(cluster, object, pool, Request::Forget, &arguments.change).await;
    }
    let node = arguments.on_node.as_deref().unwrap_or(&pool.node);
    if node.is_empty() {
        return Err(Failure::failed(format!(
            "it is not known which node has pool {}; give one with --on-node",
            pool.title()
        )));
    }
    let what = format!(
        "Node {node} will forget pool {} ({}).",
        pool.title(),
        pool.id
    );
    let plan = match pool.node == node {
        true => format!(
            "{what} From then on its {} volumes and {} snapshots count as deleted.{}",
            pool.volumes,
            pool.snapshots,
            describe_claims(cluster, pool).await?
        ),
        false => format!("{what} The pool stays with node {}.", pool.node),
    };
    request_and_follow(
        cluster,
        object,
        pool,
        (Request::Forget, node),
        &plan,
        (&arguments.change, &arguments.wait),
    )
    .await
}

/// Sets the field, and with `--wait` waits until the node has done what it is asked for.
async fn request_and_follow(
    cluster: &Cluster,
    object: &DynamicObject,
    pool: &Pool,
    (kind, node): (Request, &str),
    plan: &str,
    (change, wait): (&Change, &Wait),
) -> Result<()> {
    request(cluster, object, pool, (kind, node), plan, change).await?;
    let what = match kind {
        Request::Adopt => format!("the adoption of pool {}", pool.title()),
        Request::Forget => format!("the request to forget pool {}", pool.title()),
    };
    follow(wait, change, &what, || progress(cluster, pool, kind, node)).await
}

/// Sets the field, unless it is set already.
async fn request(
    cluster: &Cluster,
    object: &DynamicObject,
    pool: &Pool,
    (request, node): (Request, &str),
    plan: &str,
    change: &Change,
) -> Result<()> {
    let field = request.field();
    if request.node(object) == node {
        print_lines(&format!(
            "spec.{field} of pool {} is {node} already.",
            pool.title()
        ));
        return Ok(());
    }
    may_patch(cluster, pool).await?;
    confirm(change, plan)?;
    let fields = json!({"spec": {field: node}});
    let now = patch(cluster, change, &object::POOL, object, fields).await?;
    check_stored(
        request.node(&now) == node,
        &format!("spec.{field}"),
        "pools.yaml",
    )?;
    let requested = match request {
        Request::Adopt => format!("to be adopted by {node}"),
        Request::Forget => format!("to be forgotten by {node}"),
    };
    print_done(pool, &requested, change);
    Ok(())
}

async fn withdraw(
    cluster: &Cluster,
    object: &DynamicObject,
    pool: &Pool,
    request: Request,
    change: &Change,
) -> Result<()> {
    let field = request.field();
    let node = request.node(object);
    if node.is_empty() {
        print_lines(&format!(
            "spec.{field} of pool {} is not set.",
            pool.title()
        ));
        return Ok(());
    }
    may_patch(cluster, pool).await?;
    let plan = format!(
        "The request of pool {} ({}) to node {node} will be withdrawn. What the node has done stays.",
        pool.title(),
        pool.id
    );
    confirm(change, &plan)?;
    let fields = json!({"spec": {field: null}});
    patch(cluster, change, &object::POOL, object, fields).await?;
    print_done(pool, &format!("spec.{field} removed"), change);
    Ok(())
}

/// How far a request is.
async fn progress(
    cluster: &Cluster,
    pool: &Pool,
    request: Request,
    node: &str,
) -> Result<Progress> {
    let object = cluster.get(&object::POOL, "", &pool.id).await?;
    let now = Pool::of(&object);
    let title = pool.title();
    let requested = request.node(&object);
    if requested == node {
        // A condition of an earlier spec is not about this one.
        let current = object.list("/status/conditions").iter().find(|one| {
            one["type"] == request.condition()
                && one["observedGeneration"].as_i64() == object.metadata.generation
        });
        let message = current.and_then(|one| one["message"].as_str());
        let message = message.unwrap_or("the controller has not begun");
        return Ok(Progress::Running(message.into()));
    }
    let is_own = now.node == node;
    let ended = match request {
        Request::Adopt if is_own => Ok(format!("Pool {title} belongs to node {node}.")),
        Request::Adopt if object.text("/spec/node") == node => {
            return Ok(Progress::Running(format!(
                "node {node} has adopted it; waiting for its next report"
            )));
        }
        Request::Forget if requested.is_empty() && (!is_own || are_volumes_deleted(&now)) => {
            Ok(format!("Node {node} has forgotten pool {title}."))
        }
        Request::Adopt | Request::Forget => Err(Failure::failed(format!(
            "spec.{} of pool {title} was changed by another user",
            request.field()
        ))),
    };
    Ok(Progress::Ended(ended))
}

/// Whether the volumes of a pool count as deleted.
fn are_volumes_deleted(pool: &Pool) -> bool {
    pool.lost || pool.health == "Forgotten"
}
