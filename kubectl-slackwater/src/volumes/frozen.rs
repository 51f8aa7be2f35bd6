//! `frozen`: file systems that have been frozen for longer than a cut takes.

use std::collections::BTreeMap;

use k8s_openapi::jiff::Timestamp;
use kube::api::ListParams;
use serde_json::json;

use crate::cli::ListArguments;
use crate::cluster::object::{self, Fields, Kind};
use crate::cluster::{Cluster, Scope};
use crate::failure::Result;
use crate::listing::{Listing, Row, wide_column};
use crate::model::frozen::{self, Frozen};
use crate::model::pools_of;

/// What it reads.
pub const KINDS: [&Kind; 1] = [&object::POOL];

/// All that the Pools list, the oldest freeze first.
pub async fn listing(cluster: &Cluster, arguments: &ListArguments) -> Result<Listing> {
    let params = pools_of(&cluster.driver, arguments.selector.as_deref());
    let pools = cluster.get_all(&object::POOL, &Scope::All, &params).await?;
    let all: Vec<Frozen> = pools.iter().flat_map(frozen::of).collect();
    // Without a freeze there is no claim to be named.
    let claims = match all.is_empty() {
        true => BTreeMap::new(),
        false => claims(cluster).await?,
    };
    let now = Timestamp::now();
    let all = frozen::named(all, &claims);
    let mut columns = frozen::COLUMNS.to_vec();
    columns.push(wide_column("ID"));
    Ok(Listing {
        what: format!("long freezes of {}", cluster.driver),
        columns,
        rows: all.iter().map(|one| row(one, now)).collect(),
        notes: cluster.take_notes(),
    })
}

/// The claims of volumes, by the ID of the volume.
async fn claims(cluster: &Cluster) -> Result<BTreeMap<String, String>> {
    let params = ListParams::default();
    let volumes = cluster.find(&object::VOLUME, &Scope::All, &params).await?;
    let own = volumes.iter().flatten().filter(|volume| {
        let claim = volume.text("/spec/claimRef/name");
        volume.text("/spec/csi/driver") == cluster.driver && !claim.is_empty()
    });
    let claims = own.map(|volume| {
        let claim = format!(
            "{}/{}",
            volume.text("/spec/claimRef/namespace"),
            volume.text("/spec/claimRef/name")
        );
        (volume.text("/spec/csi/volumeHandle").to_string(), claim)
    });
    Ok(claims.collect())
}

fn row(one: &Frozen, now: Timestamp) -> Row {
    let mut cells = one.cells(now);
    cells.push(one.id.clone());
    Row {
        name: format!("volume/{}", one.id),
        cells,
        value: json!(one),
    }
}
