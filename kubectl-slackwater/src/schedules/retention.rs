//! `schedule retention`: the sets that are not to be kept, as the controller has written them to the status
//! of the schedule. The controller decides it with members, levels and uses that the user may not be allowed to read.

use kube::api::DynamicObject;
use serde_json::{Value, json};

use crate::cli::Format;
use crate::cluster::Cluster;
use crate::cluster::object::{self, Fields};
use crate::failure::{Failure, Result};
use crate::listing::print;
use crate::listing::{Column, Listing, Row, column};
use crate::schedules::run::get;

const COLUMNS: [Column; 3] = [column("SET"), column("REASON"), column("WAITS FOR")];

/// Lists the sets.
pub async fn run(cluster: &Cluster, name: &str, format: Format) -> Result<()> {
    let object = get(cluster, name).await?;
    let listing = listing(&object)?;
    print(&listing.render(format, true)?, &listing.remarks(format));
    Ok(())
}

fn listing(schedule: &DynamicObject) -> Result<Listing> {
    let title = format!(
        "SnapshotSchedule {}/{}",
        schedule.namespace(),
        schedule.name()
    );
    if !schedule.at("/status/deletions").is_array() {
        return Err(Failure::failed(format!(
            "{title} has no status.deletions: its controller has not read it yet, cannot execute it (`kubectl slackwater schedules` shows why), or is of an older release, or the CustomResourceDefinition is (deploy/chart/crds/snapshotschedules.yaml)"
        )));
    }
    let kind = match schedule.at("/spec/selector").is_object() {
        true => &object::GROUP,
        false => &object::SNAPSHOT,
    };
    let row = |due: &Value| {
        let text = |key: &str| due[key].as_str().unwrap_or_default().to_string();
        let resource = kind.kind.to_lowercase();
        Row {
            name: format!("{resource}.{}/{}", kind.group, text("name")),
            cells: vec![text("name"), text("reason"), text("waits")],
            value: json!({"namespace": schedule.namespace(), "kind": kind.kind, "name": text("name"),
                "reason": text("reason"), "waits": text("waits")}),
        }
    };
    Ok(Listing {
        what: "sets that are not to be kept".into(),
        columns: COLUMNS.to_vec(),
        rows: schedule.list("/status/deletions").iter().map(row).collect(),
        notes: notes(schedule),
    })
}

/// What the list does not show.
fn notes(schedule: &DynamicObject) -> Vec<String> {
    let conditions = schedule.list("/status/conditions");
    let of = |kind: &str| conditions.iter().find(|one| one["type"] == kind);
    let mut notes = Vec::new();
    let seen = of("Scheduling").and_then(|one| one["observedGeneration"].as_i64());
    if seen != schedule.metadata.generation {
        notes.push(
            "the controller has not read the present spec yet: repeat this in a minute".into(),
        );
    }
    if schedule.is_true("/spec/suspend") {
        notes.push("the schedule is suspended: nothing is deleted, and these would be".into());
    } else if let Some(one) = of("Retention").filter(|one| is_noted(&one["reason"])) {
        notes.push(one["message"].as_str().unwrap_or_default().into());
    }
    notes
}

/// Whether the message of the condition is about more than the sets that are listed.
fn is_noted(reason: &Value) -> bool {
    ["ClocksDiffer", "FormerSets", "ReadFailed"]
        .iter()
        .any(|noted| reason == noted)
}
