//! `snapshots`: the list of snapshots with the levels that they have reached.

use k8s_openapi::jiff::Timestamp;
use serde_json::json;

use crate::cli::ListArguments;
use crate::cluster::Cluster;
use crate::cluster::object::{self, Kind};
use crate::failure::Result;
use crate::listing::{Column, Listing, Row, column, wide_column};
use crate::model::snapshot::{self, Snapshot};
use crate::text::{age, size};

/// What it reads.
pub const KINDS: [&Kind; 4] = [
    &object::SNAPSHOT,
    &object::SNAPSHOT_CONTENT,
    &object::GROUP,
    &object::GROUP_CONTENT,
];

const COLUMNS: [Column; 12] = [
    column("SNAPSHOT"),
    column("CLAIM"),
    column("GROUP"),
    column("LEVEL"),
    column("READY"),
    column("AGE"),
    column("RESTORE SIZE"),
    column("REASON"),
    wide_column("FROZEN"),
    wide_column("HELD"),
    wide_column("CONTENT"),
    wide_column("ID"),
];

/// The snapshots, the newest first.
pub async fn listing(cluster: &Cluster, arguments: &ListArguments) -> Result<Listing> {
    let scope = arguments.scope(cluster);
    let snapshots = snapshot::snapshots(cluster, &scope, arguments.selector.as_deref()).await?;
    let now = Timestamp::now();
    let rows = snapshots.iter().map(|one| row(one, now)).collect();
    let notes = cluster.take_notes();
    Ok(Listing::namespaced(
        format!("snapshots of {}", cluster.driver),
        &COLUMNS,
        rows,
        (&scope, notes),
    ))
}

fn milliseconds(time: Option<u64>) -> String {
    time.map(|time| format!("{time} ms")).unwrap_or_default()
}

fn row(snapshot: &Snapshot, now: Timestamp) -> Row {
    let restore = match snapshot.restore_bytes {
        0 => String::new(),
        bytes => size(bytes),
    };
    let reason = match snapshot.error.as_str() {
        "" => snapshot.cut.reason.clone(),
        error => error.into(),
    };
    let cells = vec![
        snapshot.name.clone(),
        snapshot.claim.clone(),
        snapshot.group.clone(),
        snapshot.cut.level.clone(),
        snapshot.ready.to_string(),
        age(snapshot.cut.cut_at, now),
        restore,
        reason,
        milliseconds(snapshot.cut.frozen_ms),
        milliseconds(snapshot.cut.held_ms),
        snapshot.content.clone(),
        snapshot.handle.clone(),
    ];
    Row {
        name: format!("volumesnapshot.snapshot.storage.k8s.io/{}", snapshot.name),
        cells,
        value: json!(snapshot),
    }
}
