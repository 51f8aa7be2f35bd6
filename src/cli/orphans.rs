//! `slackwater volumes --orphans`: lists what the driver has and no object of the cluster
//! references.

use std::path::Path;
use std::process::ExitCode;

use serde_json::{Value, json};

use super::{Failure, Place, block_on, print};
use crate::config::{BadConfig, DriverName, Endpoint, Given};
use crate::router::connect;
use crate::router::orphans::{self, Orphan, OrphanKind};

/// Lists the orphans of the driver at a socket. They are not changed.
pub(super) fn run(
    place: &Place,
    endpoint: Option<Endpoint>,
    driver_name: Option<DriverName>,
) -> Result<ExitCode, Failure> {
    let given = Given {
        endpoint,
        driver_name,
        ..Given::default()
    };
    let given = given.with_env(std::env::var("CSI_ENDPOINT").ok())?;
    let given = given.over_file(place.node.config.as_deref())?;
    let Some(Endpoint(socket)) = given.endpoint else {
        let missing = "--orphans queries the controller, but --endpoint (or CSI_ENDPOINT) is missing; give its CSI socket, such as unix:///csi/csi.sock";
        return Err(BadConfig(missing.into()).into());
    };
    let expected = given.driver_name.map(|name| name.0);
    list(&socket, expected.as_deref(), place.node.json)
}

fn list(socket: &Path, expected: Option<&str>, as_json: bool) -> Result<ExitCode, Failure> {
    let found = block_on(async {
        let client = connect().await?;
        orphans::behind(&client, expected, socket).await
    })?;
    if as_json {
        let of = |what: OrphanKind| found.iter().filter(move |orphan| orphan.what == what);
        let volumes =
            of(OrphanKind::Volume).map(|one| json!({ "id": one.id, "pool_id": one.pool }));
        let snapshots = of(OrphanKind::Snapshot)
            .map(|one| json!({ "id": one.id, "pool_id": one.pool, "group_id": one.group }));
        print::json(&json!({
            "volumes": volumes.collect::<Vec<Value>>(),
            "snapshots": snapshots.collect::<Vec<Value>>(),
        }));
        return Ok(ExitCode::SUCCESS);
    }
    if found.is_empty() {
        print::line("every volume and snapshot is referenced by an object of the cluster");
        return Ok(ExitCode::SUCCESS);
    }
    let rows: Vec<[String; 3]> = found.iter().map(row).collect();
    print::table(["KIND", "ID", "GROUP"], &rows);
    print::line("volumes and snapshots that are being created right now may be in this list");
    Ok(ExitCode::SUCCESS)
}

fn row(orphan: &Orphan) -> [String; 3] {
    let kind = match orphan.what {
        OrphanKind::Volume => "volume",
        OrphanKind::Snapshot => "snapshot",
    };
    let group = orphan.group.map_or("-".into(), |group| group.to_string());
    [kind.into(), orphan.id.clone(), group]
}
