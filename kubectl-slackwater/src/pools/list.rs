//! `pools`: the list of pools.

use k8s_openapi::jiff::Timestamp;
use serde_json::json;

use super::health::{known_size, message, sort_fullest_first, summary, used_percent};
use crate::cli::ListArguments;
use crate::cluster::object::{self, Kind};
use crate::cluster::{Cluster, Scope};
use crate::failure::Result;
use crate::listing::{Column, Listing, Row, column, wide_column};
use crate::model::growth::Images;
use crate::model::{Pool, pools_of};
use crate::text::age;

/// What it reads.
pub const KINDS: [&Kind; 1] = [&object::POOL];

const COLUMNS: [Column; 20] = [
    column("POOL"),
    column("KIND"),
    column("HEALTH"),
    column("USED"),
    column("SIZE"),
    column("FREE"),
    column("PROMISED"),
    column("VOLUMES"),
    column("SNAPSHOTS"),
    column("LAST SEEN"),
    wide_column("OWN"),
    wide_column("SHARED"),
    wide_column("BY SNAPSHOTS"),
    wide_column("UNDIVIDED"),
    wide_column("COUNTED"),
    wide_column("ID"),
    wide_column("FILE SYSTEM"),
    wide_column("MOUNT"),
    wide_column("HOME"),
    wide_column("MESSAGE"),
];

/// The pools, the fullest first.
pub async fn listing(cluster: &Cluster, arguments: &ListArguments) -> Result<Listing> {
    let params = pools_of(&cluster.driver, arguments.selector.as_deref());
    let found = cluster.get_all(&object::POOL, &Scope::All, &params).await?;
    let mut pools: Vec<Pool> = found.iter().map(Pool::of).collect();
    sort_fullest_first(&mut pools);
    let now = Timestamp::now();
    Ok(Listing {
        what: format!("pools of {}", cluster.driver),
        columns: COLUMNS.to_vec(),
        rows: pools.iter().map(|pool| row(pool, now)).collect(),
        notes: cluster.take_notes(),
    })
}

fn row(pool: &Pool, now: Timestamp) -> Row {
    let [own, shared, snapshots, undivided, counted] = Images::cells(pool.images.as_ref(), now);
    Row {
        name: format!("pool.slackwater.dev/{}", pool.id),
        cells: vec![
            pool.title(),
            pool.kind.clone(),
            summary(pool, now),
            used_percent(pool),
            known_size(pool, pool.total_bytes),
            known_size(pool, pool.available_bytes),
            known_size(pool, pool.promised_bytes),
            pool.volumes.to_string(),
            pool.snapshots.to_string(),
            age(pool.last_seen, now),
            own,
            shared,
            snapshots,
            undivided,
            counted,
            pool.id.clone(),
            pool.file_system.clone(),
            pool.mount.clone(),
            pool.home.clone(),
            message(pool, now),
        ],
        value: json!(pool),
    }
}
