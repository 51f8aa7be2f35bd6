//! What the images of a pool occupy, and the volumes that grow it most, as the status of a Pool has them.

use std::collections::BTreeMap;

use k8s_openapi::jiff::Timestamp;
use kube::api::DynamicObject;
use serde::Serialize;

use crate::cluster::object::Fields;
use crate::listing::{Column, column};
use crate::model::Pool;
use crate::text::{age, size};

/// The columns of a table of volumes.
pub const COLUMNS: [Column; 5] = [
    column("POOL"),
    column("CLAIM"),
    column("GREW BY"),
    column("IN"),
    column("COUNTED"),
];
/// Volumes of each pool in a table.
const MAX_VOLUMES: usize = 3;

/// The blocks of all images of a pool, each counted once.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Images {
    pub own_bytes: i64,
    pub shared_bytes: i64,
    pub snapshot_bytes: i64,
    /// An upper bound of those that were not divided.
    pub undivided_bytes: i64,
    pub unmeasured_volumes: i64,
    pub measured_at: Option<Timestamp>,
}

impl Images {
    /// What the status of a pool has of them.
    pub fn of(pool: &DynamicObject) -> Option<Images> {
        pool.at("/status/images").as_object()?;
        let number = |field: &str| pool.number(&format!("/status/images/{field}"));
        Some(Images {
            own_bytes: number("ownBytes"),
            shared_bytes: number("sharedBytes"),
            snapshot_bytes: number("snapshotBytes"),
            undivided_bytes: number("undividedBytes"),
            unmeasured_volumes: number("unmeasuredVolumes"),
            measured_at: pool.time("/status/images/measuredAt"),
        })
    }

    /// Own, shared, snapshots, undivided, and how long ago that was counted.
    pub fn cells(images: Option<&Images>, now: Timestamp) -> [String; 5] {
        images.map_or_else(Default::default, |images| {
            let [own, shared, snapshots, undivided] = [
                images.own_bytes,
                images.shared_bytes,
                images.snapshot_bytes,
                images.undivided_bytes,
            ]
            .map(size);
            [
                own,
                shared,
                snapshots,
                undivided,
                age(images.measured_at, now),
            ]
        })
    }
}

/// The volumes of a pool to which most bytes were added in the last day.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Growth {
    pub measured_at: Option<Timestamp>,
    /// The one that grew most first.
    pub volumes: Vec<Grown>,
}

/// A volume that has grown, with its snapshots.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Grown {
    /// The ID of the volume.
    pub id: String,
    /// "NAMESPACE/NAME"; empty if it is not known.
    pub claim: String,
    pub grown_bytes: i64,
    pub since: Option<Timestamp>,
}

impl Growth {
    /// What the status of a pool has of it.
    pub fn of(pool: &DynamicObject) -> Option<Growth> {
        pool.at("/status/growth").as_object()?;
        let volumes = pool.list("/status/growth/volumes").iter();
        let volumes = volumes.map(|one| {
            let text = |field: &str| one[field].as_str().unwrap_or_default();
            Grown {
                id: text("id").into(),
                claim: String::new(),
                grown_bytes: one["grownBytes"].as_i64().unwrap_or_default(),
                since: text("since").parse().ok(),
            }
        });
        Some(Growth {
            measured_at: pool.time("/status/growth/measuredAt"),
            volumes: volumes.collect(),
        })
    }

    /// Names their claims, which are known by the IDs of their volumes.
    pub fn name(&mut self, claims: &BTreeMap<String, String>) {
        for one in &mut self.volumes {
            one.claim = claims.get(&one.id).cloned().unwrap_or_default();
        }
    }
}

/// The lines of [`COLUMNS`]; none if nothing is known of any pool.
pub fn rows(pools: &[Pool], now: Timestamp) -> Vec<Vec<String>> {
    if pools.iter().all(|pool| pool.growth.is_none()) {
        return Vec::new();
    }
    let of = |pool: &Pool| {
        let Some(growth) = &pool.growth else {
            let unknown = [pool.title(), "(not known yet)".into()];
            let mut cells = unknown.to_vec();
            cells.resize(COLUMNS.len(), String::new());
            return vec![cells];
        };
        let volumes = growth.volumes.iter().take(MAX_VOLUMES);
        let each = volumes.map(|one| {
            let claim = match one.claim.as_str() {
                "" => format!("({})", one.id),
                claim => claim.to_string(),
            };
            vec![
                pool.title(),
                claim,
                size(one.grown_bytes),
                age(one.since, now),
                age(growth.measured_at, now),
            ]
        });
        each.collect()
    };
    pools.iter().flat_map(of).collect()
}
