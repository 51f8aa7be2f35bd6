//! `slackwater pool hand-over`: assigns a pool to another node.

use std::process::ExitCode;

use serde_json::json;

use super::adopt::{DriverSource, driver};
use super::{Failure, block_on, print};
use crate::router::{connect, hand_over};

/// Changes the pool's object, and prints the consequences.
pub(super) fn run(
    pool: &str,
    node: &str,
    source: &DriverSource,
    as_json: bool,
) -> Result<ExitCode, Failure> {
    let done = block_on(async {
        let driver = driver(source).await?;
        let client = connect().await?;
        hand_over::hand_over(&client, driver.as_deref(), pool, node).await
    })?;
    if as_json {
        print::json(&json!({
            "id": done.id, "name": done.name, "node_before": done.from, "node": done.to,
            "changed": !done.unchanged,
        }));
        return Ok(ExitCode::SUCCESS);
    }
    let (id, name, to) = (&done.id, &done.name, &done.to);
    print::line(match done.unchanged {
        true => format!("pool {name} ({id}) already belongs to node {to}"),
        false => format!(
            "pool {name} ({id}) belonged to node {}; it belongs to node {to} as soon as the agent of that node reports it",
            done.from
        ),
    });
    Ok(ExitCode::SUCCESS)
}
