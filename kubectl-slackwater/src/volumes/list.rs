//! `volumes`: the list of volumes and their claims.

use k8s_openapi::jiff::Timestamp;
use serde_json::json;

use crate::cli::ListArguments;
use crate::cluster::Cluster;
use crate::cluster::object::{self, Kind};
use crate::failure::Result;
use crate::listing::{Column, Listing, Row, column, wide_column};
use crate::model::{self, Volume};
use crate::text::{age, size};

/// What it reads.
pub const KINDS: [&Kind; 4] = [&object::CLAIM, &object::VOLUME, &object::POD, &object::POOL];

const COLUMNS: [Column; 10] = [
    column("CLAIM"),
    column("STATUS"),
    column("SIZE"),
    column("NODE"),
    column("POOL"),
    column("PODS"),
    column("AGE"),
    wide_column("CLASS"),
    wide_column("MODE"),
    wide_column("ID"),
];

/// The volumes of the driver.
pub async fn listing(cluster: &Cluster, arguments: &ListArguments) -> Result<Listing> {
    let scope = arguments.scope(cluster);
    let volumes = model::volumes(cluster, &scope, arguments.selector.as_deref()).await?;
    let now = Timestamp::now();
    let rows = volumes.iter().map(|one| row(one, now)).collect();
    let notes = cluster.take_notes();
    Ok(Listing::namespaced(
        format!("volumes of {}", cluster.driver),
        &COLUMNS,
        rows,
        (&scope, notes),
    ))
}

fn row(volume: &Volume, now: Timestamp) -> Row {
    let name = match volume.claim.as_str() {
        "" => format!("persistentvolume/{}", volume.volume),
        claim => format!("persistentvolumeclaim/{claim}"),
    };
    let cells = vec![
        match volume.claim.as_str() {
            "" => format!("({})", volume.volume),
            claim => claim.into(),
        },
        volume.status.clone(),
        size(volume.size_bytes),
        volume.node.clone(),
        volume.pool_name.clone(),
        volume.pods.join(","),
        age(volume.created, now),
        volume.class.clone(),
        volume.mode.clone(),
        volume.handle.clone(),
    ];
    Row {
        name,
        cells,
        value: json!(volume),
    }
}
