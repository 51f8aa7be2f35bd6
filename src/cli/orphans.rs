//! `slackwater volumes --orphans`: what the driver has that nothing in the cluster names.

use std::path::Path;
use std::process::ExitCode;

use serde_json::{Value, json};
use tokio::runtime::Builder;

use super::{Failure, Place, print};
use crate::config::{self, BadConfig, DriverName, Endpoint, Given};
use crate::router::connect;
use crate::router::orphans::{self, Orphan, What};

/// Lists those of the driver at a socket. They are left as they are.
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
    let given = match &place.node.config {
        Some(path) => given.over(config::read_file(path)?),
        None => given,
    };
    let Some(Endpoint(socket)) = given.endpoint else {
        let missing = "--orphans asks the controller: --endpoint (or CSI_ENDPOINT), its CSI socket, such as unix:///csi/csi.sock, is missing";
        return Err(BadConfig(missing.into()).into());
    };
    let expected = given.driver_name.map(|name| name.0);
    list(&socket, expected.as_deref(), place.node.json)
}

fn list(socket: &Path, expected: Option<&str>, as_json: bool) -> Result<ExitCode, Failure> {
    let runtime = Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(Failure::run)?;
    let found = runtime.block_on(async {
        let client = connect().await?;
        orphans::behind(&client, expected, socket).await
    })?;
    if as_json {
        let ids = |what: What| -> Vec<Value> {
            let its = found.iter().filter(|orphan| orphan.what == what);
            its.map(|orphan| json!({ "id": orphan.id, "pool_id": orphan.pool }))
                .collect()
        };
        print::json(&json!({
            "volumes": ids(What::Volume), "snapshots": ids(What::Snapshot),
        }));
        return Ok(ExitCode::SUCCESS);
    }
    if found.is_empty() {
        print::line("everything is named by an object of the cluster");
        return Ok(ExitCode::SUCCESS);
    }
    let rows: Vec<[String; 2]> = found.iter().map(row).collect();
    print::table(["KIND", "ID"], &rows);
    print::line("what is just being made may be among them");
    Ok(ExitCode::SUCCESS)
}

fn row(orphan: &Orphan) -> [String; 2] {
    let kind = match orphan.what {
        What::Volume => "volume",
        What::Snapshot => "snapshot",
    };
    [kind.into(), orphan.id.clone()]
}
