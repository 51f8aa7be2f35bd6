//! `slackwater pool adopt --cluster`: the PersistentVolumes of a pool follow it to its new home. A home
//! is the value of the topology label of the node that has the pool.
//!
//! The node affinity of a PersistentVolume contains the home at which it may be used, and Kubernetes
//! does not let it be changed. So each PersistentVolume with another home than its pool is deleted and
//! created again: with the same name, for the same claim (by its uid), and identical except for the
//! home. Its claim is Lost in the meantime, and is bound again by Kubernetes, because a claim keeps
//! the name of its volume. What could go wrong is prevented:
//!
//! - **No data is deleted.** Before anything else the reclaim policy becomes Retain. The
//!   PersistentVolume gets its own policy back when it is bound again ([`step`] has all steps in their
//!   order).
//! - **Nothing is forgotten.** Before a PersistentVolume is deleted, it is stored whole in an annotation
//!   of the Pool object, which is removed when it exists again. A run that was interrupted anywhere is
//!   completed by the next one, which needs no other information.
//! - **Only what is not in use** is touched. A volume that is attached, or that a pod on a node
//!   uses, is left as it is, and the reason is reported.
//! - **Only what was checked** is deleted: by uid and version.
//!
//! Snapshots are not touched: a VolumeSnapshotContent names no home, and the id of its snapshot
//! contains the UUID of the pool, which stays the same.

pub(super) mod exchange;
pub(super) mod manifest;
mod plan;
pub(super) mod step;
mod work;

use std::collections::BTreeMap;
use std::time::Duration;

use ::kube::api::{Api, DynamicObject, ListParams};
use ::kube::core::ApiResource;
use ::kube::{Client, ResourceExt};
use k8s_openapi::api::core::v1::{PersistentVolume, Pod};
use k8s_openapi::api::storage::v1::VolumeAttachment;
use k8s_openapi::jiff::{SignedDuration, Timestamp};

use super::lists::all;
use super::pools::object::{DRIVER_LABEL, Health, Pool};
use super::topology_key;
use crate::error::{Error, Kind, Result};
use crate::model::PoolId;
use manifest::Manifest;
use plan::Users;
pub use step::Step;

/// The prefix of the annotations in which PersistentVolumes are stored.
const NOTE: &str = "adopt.slackwater.dev/";
/// A Pool object that was not updated for this time is outdated. The router updates it once a minute.
const MAX_STATUS_AGE: SignedDuration = SignedDuration::from_mins(5);

/// A pool that a node has adopted, as the cluster sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Adopted {
    pub id: PoolId,
    /// Its name on its node.
    pub name: String,
    /// The node that serves it.
    pub node: String,
    /// That node's home.
    pub home: String,
}

/// The plan for a pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// The driver's name.
    pub driver: String,
    pub pool: Adopted,
    /// Its PersistentVolumes that are not as they should be, in the order of their names.
    pub lines: Vec<Line>,
    /// The number of those that are.
    pub settled: usize,
}

/// A PersistentVolume of the plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Line {
    pub name: String,
    /// "namespace/name" of its claim.
    pub claim: Option<String>,
    /// The home in its node affinity.
    pub from: Option<String>,
    /// What is done with it.
    pub action: VolumeAction,
}

/// What is done with a PersistentVolume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum VolumeAction {
    /// It is moved to the pool's home.
    Move,
    /// An earlier run has begun to move it, and this run completes that.
    Finish,
    /// It is left as it is, for this reason.
    Left(String),
}

/// The result of a run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Done {
    /// PersistentVolumes that are at the pool's home now, and are bound as before.
    pub moved: Vec<String>,
    /// Those that were left as they are, and why.
    pub left: Vec<(String, String)>,
}

/// Makes a plan, and changes nothing. `which` is the pool's UUID, its name, or NODE/NAME. Only pools of
/// `driver` count if it is given; otherwise the label of the pool's object names the driver. An error if
/// there is no such pool, or if it is not certain which node has it now.
pub async fn make_plan(client: &Client, driver: Option<&str>, which: &str) -> Result<Plan> {
    let pools = of_driver(client, driver).await?;
    let object = one_of(which, &pools)?;
    let driver = object.labels().get(DRIVER_LABEL).ok_or_else(|| {
        let what = format!("pool {}", object.name_any());
        Error::refused(what, format!("its object has no label {DRIVER_LABEL}"))
    })?;
    let pool = adopted(object, Timestamp::now())?;
    let live = Api::<DynamicObject>::all_with(client.clone(), &resource());
    let live = all("PersistentVolumes", &live, ListParams::default()).await?;
    let live: Vec<_> = live.into_iter().map(Manifest).collect();
    let attachments = Api::<VolumeAttachment>::all(client.clone());
    let attachments = all("VolumeAttachments", &attachments, ListParams::default()).await?;
    let pods = Api::<Pod>::all(client.clone());
    let pods = all("Pods", &pods, ListParams::default()).await?;
    let key = topology_key(driver);
    let (lines, settled) = plan::lines(
        pool.id,
        driver,
        (&key, &pool.home),
        &live,
        &noted(object, NOTE)?,
        &Users::new(&attachments, &pods),
    );
    Ok(Plan {
        driver: driver.clone(),
        pool,
        lines,
        settled,
    })
}

/// Carries out a plan. PersistentVolumes that cannot be moved are left as they are, and returned with
/// the reason. `watch` is called with each step before it is done. An error, or the end of the process
/// at any point, leaves some PersistentVolumes moved, some not, and at most one deleted, which is stored:
/// the next run completes it. `max_wait` is the longest time without any claim becoming bound again,
/// while some are not.
pub async fn carry_out(
    client: &Client,
    plan: &Plan,
    max_wait: Duration,
    watch: impl FnMut(&str, Step) + Send,
) -> Result<Done> {
    work::run(client, plan, max_wait, watch).await
}

pub(super) fn resource() -> ApiResource {
    ApiResource::erase::<PersistentVolume>(&())
}

/// Pool objects of a driver, or of all.
pub(super) async fn of_driver(client: &Client, driver: Option<&str>) -> Result<Vec<Pool>> {
    let params = match driver {
        Some(driver) => ListParams::default().labels(&format!("{DRIVER_LABEL}={driver}")),
        None => ListParams::default(),
    };
    all("Pools", &Api::<Pool>::all(client.clone()), params).await
}

pub(super) fn one_of<'a>(which: &str, pools: &'a [Pool]) -> Result<&'a Pool> {
    let is_it = |pool: &&Pool| {
        let status = pool.status.clone().unwrap_or_default();
        pool.name_any() == which
            || status.name == which
            || format!("{}/{}", status.node, status.name) == which
    };
    let found: Vec<_> = pools.iter().filter(is_it).collect();
    match found[..] {
        [one] => Ok(one),
        [] => Err(Error::not_found(Kind::Pool, which)),
        [..] => {
            let each = found.iter().map(|pool| {
                let node = pool.status.as_ref().map(|status| status.node.as_str());
                format!("{} of node {}", pool.name_any(), node.unwrap_or("?"))
            });
            Err(Error::refused(
                format!("pool {which}"),
                format!(
                    "several pools have this name; give one of the IDs {}",
                    each.collect::<Vec<_>>().join(", ")
                ),
            ))
        }
    }
}

/// The pool, if it is certain which node has it.
fn adopted(pool: &Pool, now: Timestamp) -> Result<Adopted> {
    let name = pool.name_any();
    let refuse = |why: String| Err(Error::refused(format!("pool {name}"), why));
    let (Some(id), Some(status)) = (pool.id(), &pool.status) else {
        return refuse("its object has no status yet".into());
    };
    if pool.spec.lost {
        return refuse("it is marked as lost; set spec.lost to false first".into());
    }
    if !matches!(status.health, Health::Healthy | Health::Degraded) {
        return refuse(format!(
            "it is {}, so its home is unknown: {}",
            status.health.as_str(),
            status.message
        ));
    }
    let seen = status.last_seen.as_ref().map(|seen| seen.0);
    if seen.is_none_or(|seen| now.duration_since(seen) > MAX_STATUS_AGE) {
        return refuse(
            "its object was not updated for several minutes; is the controller running?".into(),
        );
    }
    if status.home.is_empty() {
        return refuse(format!("node {} reports no home", status.node));
    }
    Ok(Adopted {
        id,
        name: status.name.clone(),
        node: status.node.clone(),
        home: status.home.clone(),
    })
}

/// The PersistentVolumes that are stored at a Pool object, by name.
pub(in crate::router::kube) fn noted(
    pool: &Pool,
    prefix: &str,
) -> Result<BTreeMap<String, Manifest>> {
    let annotations = pool.metadata.annotations.iter().flatten();
    let notes = annotations.filter(|(key, _)| key.starts_with(prefix));
    let each = notes.map(|(key, text)| {
        let object: DynamicObject = serde_json::from_str(text).map_err(|error| {
            Error::refused(
                format!("pool {}", pool.name_any()),
                format!("annotation {key} is not a PersistentVolume: {error}"),
            )
        })?;
        let manifest = Manifest(object);
        Ok((manifest.name().to_string(), manifest))
    });
    each.collect()
}

/// The annotation in which a PersistentVolume is stored. It does not contain the name, which may be
/// longer than the key of an annotation.
fn note_key(prefix: &str, name: &str) -> String {
    let id = uuid::Uuid::new_v5(&uuid::Uuid::NAMESPACE_OID, name.as_bytes());
    format!("{prefix}{id}")
}

#[cfg(test)]
mod tests {
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

    use super::*;
    use crate::router::kube::pools::object::PoolStatus;

    fn pool(n: u8, name: &str, node: &str) -> Pool {
        let id = format!("11111111-2222-4333-8444-{n:012}");
        let mut pool = Pool::new(id.parse().unwrap(), "csi.slackwater.dev");
        pool.status = Some(PoolStatus {
            node: node.into(),
            home: format!("home-of-{node}"),
            name: name.into(),
            health: Health::Healthy,
            last_seen: Some(Time(Timestamp::now())),
            ..PoolStatus::default()
        });
        pool
    }

    #[test]
    fn a_pool_is_found_by_id_name_or_both() {
        let pools = [
            pool(1, "default", "a"),
            pool(2, "default", "b"),
            pool(3, "moved", "a"),
        ];
        let found = |which: &str| one_of(which, &pools).map(ResourceExt::name_any);
        let third = pools[2].name_any();
        assert_eq!(found("moved").unwrap(), third);
        assert_eq!(found("a/moved").unwrap(), third);
        assert_eq!(found(&third).unwrap(), third);
        assert_eq!(found("b/default").unwrap(), pools[1].name_any());
        let several = found("default").unwrap_err().to_string();
        assert!(
            several.contains(&pools[0].name_any()) && several.contains("node b"),
            "{several}"
        );
        assert!(matches!(found("b/moved"), Err(Error::NotFound { .. })));
    }

    #[test]
    fn a_pool_without_a_certain_report_is_refused() {
        let changed = |change: fn(&mut Pool)| {
            let mut pool = pool(1, "default", "a");
            change(&mut pool);
            adopted(&pool, Timestamp::now()).map_err(|error| error.to_string())
        };
        assert_eq!(changed(|_| {}).unwrap().home, "home-of-a");
        let with = |health: Health| {
            let mut pool = pool(1, "default", "a");
            pool.status.as_mut().unwrap().health = health;
            adopted(&pool, Timestamp::now()).is_ok()
        };
        assert!(with(Health::Degraded));
        for health in [
            Health::Unknown,
            Health::NotServed,
            Health::Unreachable,
            Health::Conflict,
            Health::Forgotten,
            Health::Lost,
            Health::Quarantined,
            Health::Other,
        ] {
            assert!(!with(health), "{health:?}");
        }
        assert!(changed(|pool| pool.spec.lost = true).is_err());
        assert!(changed(|pool| pool.status = None).is_err());
        assert!(changed(|pool| pool.status.as_mut().unwrap().home = String::new()).is_err());
        let stale = changed(|pool| {
            let long_ago = Timestamp::from_second(1_700_000_000).unwrap();
            pool.status.as_mut().unwrap().last_seen = Some(Time(long_ago));
        });
        assert!(stale.unwrap_err().contains("is the controller running"));
    }
}
