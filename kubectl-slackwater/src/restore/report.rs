//! What a restore prints.

use std::fmt::Write as _;

use serde_json::json;

use super::plan::{Copy, State};
use crate::change;
use crate::cli::{Format, RestoreArguments};
use crate::cluster::Cluster;
use crate::failure::{Failure, Result};
use crate::listing::{self, Column, Listing, Row, column, table, wide_column};
use crate::text::{size, time};

const COLUMNS: [Column; 9] = [
    column("CLAIM"),
    column("SNAPSHOT"),
    column("LEVEL"),
    column("CUT AT"),
    column("SIZE"),
    column("STATE"),
    wide_column("CLASS"),
    wide_column("MODE"),
    wide_column("REASON"),
];

/// The copies, each with the level and the time of its snapshot.
fn listing(namespace: &str, copies: &[Copy], notes: Vec<String>) -> Listing {
    Listing {
        what: "copies".into(),
        columns: COLUMNS.to_vec(),
        rows: copies.iter().map(|copy| row(namespace, copy)).collect(),
        notes,
    }
}

fn row(namespace: &str, copy: &Copy) -> Row {
    let from = &copy.snapshot;
    let state = json!(copy.state);
    Row {
        name: format!("persistentvolumeclaim/{}", copy.claim),
        cells: vec![
            copy.claim.clone(),
            from.name.clone(),
            from.cut.level.clone(),
            time(from.cut.cut_at),
            size(copy.size_bytes),
            state.as_str().unwrap_or_default().into(),
            copy.class.clone(),
            copy.mode.clone(),
            from.cut.reason.clone(),
        ],
        value: json!({
            "namespace": namespace,
            "claim": copy.claim,
            "volume": copy.volume,
            "state": state,
            "sizeBytes": copy.size_bytes,
            "storageClass": copy.class,
            "volumeMode": copy.mode,
            "accessModes": copy.access_modes,
            "snapshot": from.name,
            "group": from.group,
            "sourceClaim": from.claim,
            "level": from.cut.level,
            "reason": from.cut.reason,
            "cutAt": from.cut.cut_at,
            "existsSince": copy.since,
        }),
    }
}

/// Whether a format is read by people, who get the plan and what is done. Programs get the result.
pub fn is_for_people(format: Format) -> bool {
    matches!(format, Format::Table | Format::Wide)
}

/// Prints the copies, which are in this namespace.
pub fn print(cluster: &Cluster, namespace: &str, copies: &[Copy], format: Format) -> Result<()> {
    let listing = listing(namespace, copies, cluster.take_notes());
    listing::print(&listing.render(format, true)?, &[]);
    Ok(())
}

/// Prints the plan. Fails if the user has not confirmed it. Programs get the copies instead, as they get the
/// result.
pub fn confirm(
    cluster: &Cluster,
    arguments: &RestoreArguments,
    (namespace, copies): (&str, &[Copy]),
    plan: impl FnOnce() -> String,
) -> Result<()> {
    let (format, change) = (arguments.output.format, &arguments.change);
    if is_for_people(format) {
        for note in listing::note_lines(&cluster.take_notes()) {
            eprintln!("{note}");
        }
        return change::confirm(change, &plan());
    }
    if change.yes || change.dry_run {
        return Ok(());
    }
    print(cluster, namespace, copies, format)?;
    Err(Failure::unconfirmed())
}

/// The number of claims, in a sentence.
pub fn count(claims: usize) -> String {
    match claims {
        1 => "1 claim".to_string(),
        many => format!("{many} claims"),
    }
}

/// The claims that a plan leaves as they are, as a line of their own; empty if there are none.
pub fn kept(claims: &[String]) -> String {
    match claims.is_empty() {
        true => String::new(),
        false => format!(
            "\nNot restored, and kept as they are: {}",
            claims.join(", ")
        ),
    }
}

/// The copies as the table of a plan.
pub fn plan(copies: &[Copy], format: Format) -> String {
    let listing = listing("", copies, Vec::new());
    let rows: Vec<_> = listing
        .rows
        .iter()
        .map(|row| row.cells.as_slice())
        .collect();
    let text = table(&listing.columns, &rows, format == Format::Wide, true);
    let mut text = text.trim_end().to_string();
    for copy in copies.iter().filter(|copy| copy.since.is_some()) {
        let since = time(copy.since);
        let _ = write!(
            text,
            "\nClaim {} exists since {since}: it is not restored again.",
            copy.claim
        );
    }
    for copy in copies.iter().filter(|copy| copy.state == State::Blocked) {
        let _ = write!(
            text,
            "\nClaim {} exists, and is no copy of this snapshot: a restore refuses it (docs/restore.md).",
            copy.claim
        );
    }
    text
}
