//! `snapshots`: the list of snapshots with the levels that they have reached.

use k8s_openapi::jiff::Timestamp;
use serde_json::json;

use crate::cli::ListArguments;
use crate::cluster::object::{self, Kind};
use crate::cluster::{Cluster, Scope};
use crate::failure::Result;
use crate::listing::{Column, Listing, Row, column, wide};
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
    wide("FROZEN"),
    wide("HELD"),
    wide("CONTENT"),
    wide("ID"),
];

/// The snapshots, the newest first.
pub async fn listing(cluster: &Cluster, arguments: &ListArguments) -> Result<Listing> {
    let scope = arguments.scope(cluster);
    let snapshots = snapshot::snapshots(cluster, &scope, arguments.selector.as_deref()).await?;
    let now = Timestamp::now();
    let is_all = scope == Scope::All;
    let namespace = is_all.then_some(column("NAMESPACE"));
    Ok(Listing {
        what: format!("snapshots of {}", cluster.driver),
        columns: namespace.into_iter().chain(COLUMNS).collect(),
        rows: snapshots.iter().map(|one| row(one, is_all, now)).collect(),
        notes: cluster.take_notes(),
    })
}

fn milliseconds(time: Option<u64>) -> String {
    time.map(|time| format!("{time} ms")).unwrap_or_default()
}

fn row(snapshot: &Snapshot, has_namespace: bool, now: Timestamp) -> Row {
    let namespace = has_namespace.then(|| snapshot.namespace.clone());
    let restore = match snapshot.restore_bytes {
        0 => String::new(),
        bytes => size(bytes),
    };
    let reason = match snapshot.error.as_str() {
        "" => snapshot.reason.clone(),
        error => error.into(),
    };
    let cells = [
        snapshot.name.clone(),
        snapshot.claim.clone(),
        snapshot.group.clone(),
        snapshot.level.clone(),
        snapshot.ready.to_string(),
        age(snapshot.cut_at, now),
        restore,
        reason,
        milliseconds(snapshot.frozen_ms),
        milliseconds(snapshot.held_ms),
        snapshot.content.clone(),
        snapshot.handle.clone(),
    ];
    Row {
        name: format!("volumesnapshot.snapshot.storage.k8s.io/{}", snapshot.name),
        cells: namespace.into_iter().chain(cells).collect(),
        value: json!(snapshot),
    }
}
