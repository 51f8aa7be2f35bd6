//! `slackwater snapshots delete`: deletes snapshots that no object of the cluster owns.

use std::process::ExitCode;

use serde_json::{Value, json};

use super::{Failure, block_on, print, status};
use crate::config::{BadConfig, DriverName, Endpoint, Given};
use crate::model::SnapshotId;
use crate::router::connect;
use crate::router::orphans::unowned_snapshots::{
    SnapshotOutcome, UnownedSnapshot, UnownedSnapshots,
};

/// The arguments of the command.
#[derive(Debug, clap::Args)]
pub(super) struct Arguments {
    /// IDs of snapshots
    #[arg(value_name = "ID", required = true, value_parser = snapshot_id)]
    ids: Vec<SnapshotId>,
    /// Delete the snapshots; without it, only show what would be deleted
    #[arg(long)]
    yes: bool,
    /// The CSI socket of the controller [env: CSI_ENDPOINT]
    #[arg(long, value_name = "ENDPOINT")]
    endpoint: Option<Endpoint>,
    /// Name that the driver at --endpoint must have [default: any name]
    #[arg(long, value_name = "NAME")]
    driver_name: Option<DriverName>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

fn snapshot_id(text: &str) -> Result<SnapshotId, String> {
    let right = "give the IDs that slackwater volumes --orphans lists";
    text.parse()
        .map_err(|problem| format!("ID {text:?}: {problem}; {right}"))
}

/// Shows what would be deleted, or deletes it. Exit code 1 if a snapshot cannot be deleted.
pub(super) fn delete(arguments: &Arguments) -> Result<ExitCode, Failure> {
    let given = Given {
        endpoint: arguments.endpoint.clone(),
        ..Given::default()
    };
    let given = given.with_env(std::env::var("CSI_ENDPOINT").ok())?;
    let Some(Endpoint(socket)) = given.endpoint else {
        let missing = "--endpoint (or CSI_ENDPOINT) is missing; give the controller's CSI socket, such as unix:///csi/csi.sock";
        return Err(BadConfig(missing.into()).into());
    };
    let expected = arguments.driver_name.as_ref().map(|name| name.0.as_str());
    let lines = block_on(async {
        let unowned = UnownedSnapshots::new(connect().await?, expected, &socket).await?;
        let mut lines = Vec::new();
        for id in &arguments.ids {
            lines.push(unowned.delete_unowned(*id, arguments.yes).await);
        }
        Ok::<_, Failure>(lines)
    })?;
    if arguments.json {
        let changed = lines
            .iter()
            .any(|line| line.outcome == SnapshotOutcome::Deleted);
        let lines: Vec<Value> = lines.iter().map(in_json).collect();
        print::json(&json!({ "changed": changed, "snapshots": lines }));
    } else {
        let rows: Vec<[String; 3]> = lines.iter().map(row).collect();
        print::table(["ID", "GROUP", "ACTION"], &rows);
        if !arguments.yes {
            print::line("nothing was changed; run the same command with --yes to apply");
        }
    }
    let stays = |line: &UnownedSnapshot| matches!(line.outcome, SnapshotOutcome::Left(_));
    Ok(status(!lines.iter().any(stays)))
}

fn in_json(line: &UnownedSnapshot) -> Value {
    let (what, reason) = match &line.outcome {
        SnapshotOutcome::Absent => ("absent", None),
        SnapshotOutcome::Unowned => ("delete", None),
        SnapshotOutcome::Deleted => ("deleted", None),
        SnapshotOutcome::Left(why) => ("leave", Some(why)),
    };
    json!({ "id": line.id.to_string(), "group_id": line.group, "what": what, "reason": reason })
}

fn row(line: &UnownedSnapshot) -> [String; 3] {
    let what = match &line.outcome {
        SnapshotOutcome::Absent => "does not exist".into(),
        SnapshotOutcome::Unowned => "would be deleted with --yes: no object owns it".into(),
        SnapshotOutcome::Deleted => "deleted: no object owned it".into(),
        SnapshotOutcome::Left(why) => format!("skipped: {why}"),
    };
    [
        line.id.to_string(),
        line.group.clone().unwrap_or("-".into()),
        what,
    ]
}
