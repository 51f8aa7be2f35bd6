//! `orphans`: volumes and snapshots that no object names, as the status of the Pools lists them. Their
//! deletion is requested, and a request taken back, in the spec of the Pool.

pub mod adopt;

use std::collections::BTreeMap;

use k8s_openapi::jiff::Timestamp;
use kube::api::DynamicObject;
use serde_json::{Value, json};

use crate::change::{Need, confirm, mark, patch, print_lines, require};
use crate::cli::{Format, ListArguments, OrphanArguments};
use crate::cluster::object::{self, Fields, Kind};
use crate::cluster::{Cluster, Scope};
use crate::driver_pod::command;
use crate::failure::{Failure, Result};
use crate::listing::watch;
use crate::listing::{Column, Listing, Row, column, wide_column};
use crate::model::{Pool, pools_of};
use crate::text::{age, size};

/// What it reads.
const KINDS: [&Kind; 1] = [&object::POOL];

const COLUMNS: [Column; 10] = [
    column("ID"),
    column("KIND"),
    column("POOL"),
    column("UNNAMED FOR"),
    column("DELETED AT"),
    column("MESSAGE"),
    wide_column("GROUP"),
    wide_column("SIZE"),
    wide_column("FILE SYSTEM"),
    wide_column("CREATED FOR"),
];

/// At most this many IDs can be named in `spec.deleteOrphans`.
const MAX_REQUESTED: usize = 100;

/// Runs the command.
pub async fn run(cluster: &Cluster, arguments: &OrphanArguments) -> Result<()> {
    if arguments.adoption.adopt.is_some() {
        return adopt::run(cluster, &arguments.adoption, &arguments.change).await;
    }
    if arguments.now {
        return run_in_controller(cluster, arguments).await;
    }
    match arguments.delete.is_empty() && arguments.keep.is_empty() {
        true => watch::show(cluster, &arguments.list, &KINDS, listing).await,
        false => change(cluster, arguments).await,
    }
}

/// Lists what no object names at this moment, or deletes snapshots of it: commands of the driver, which are
/// run in a pod of the controller.
async fn run_in_controller(cluster: &Cluster, arguments: &OrphanArguments) -> Result<()> {
    let is_json = match arguments.list.output.format {
        Format::Table => false,
        Format::Json => true,
        _ => return Err(Failure::usage("--now prints a table or JSON".into())),
    };
    let pod = arguments.pods.of_controller(cluster).await?;
    let words: &[&str] = match arguments.delete.is_empty() {
        true => &["volumes", "--orphans"],
        false => &["snapshots", "delete"],
    };
    let mut words = command::command_line(&pod, words, &["endpoint"]);
    words.extend(is_json.then(|| "--json".to_string()));
    if arguments.delete.is_empty() {
        return command::run_and_print(cluster, &pod, &words).await;
    }
    words.extend(arguments.delete.iter().cloned());
    let how = (arguments.change.yes, arguments.change.dry_run);
    command::run_with_plan(cluster, &pod, words, how).await
}

/// All that the Pools list, those first that are deleted first, and then the oldest.
pub async fn listing(cluster: &Cluster, arguments: &ListArguments) -> Result<Listing> {
    let params = pools_of(&cluster.driver, arguments.selector.as_deref());
    let found = cluster.get_all(&object::POOL, &Scope::All, &params).await?;
    let now = Timestamp::now();
    let (mut rows, mut notes) = (Vec::new(), cluster.take_notes());
    for object in &found {
        let pool = Pool::of(object);
        let listed = object.list("/status/orphans/listed");
        rows.extend(listed.iter().map(|one| row(one, &pool, now)));
        let more = object.number("/status/orphans/count") - listed.len() as i64;
        if more > 0 {
            notes.push(format!(
                "pool {} has {more} more, which are younger",
                pool.title()
            ));
        }
    }
    rows.sort_by(|(a, _), (b, _)| a.cmp(b));
    Ok(Listing {
        what: format!("orphans of {}", cluster.driver),
        columns: COLUMNS.to_vec(),
        rows: rows.into_iter().map(|(_, row)| row).collect(),
        notes,
    })
}

/// A line, and by what it is sorted.
fn row(one: &Value, pool: &Pool, now: Timestamp) -> ((bool, String, String, String), Row) {
    let text = |field: &str| one[field].as_str().unwrap_or_default().to_string();
    let since = text("since").parse::<Timestamp>().ok();
    let (id, delete_at) = (text("id"), text("deleteAt"));
    let volume = &one["volume"];
    let file_system = match volume["fileSystem"].as_str() {
        None if volume.is_object() => "block",
        file_system => file_system.unwrap_or_default(),
    };
    let cells = vec![
        id.clone(),
        text("kind"),
        pool.title(),
        age(since, now),
        delete_at.clone(),
        text("message"),
        text("group"),
        volume["sizeBytes"].as_i64().map(size).unwrap_or_default(),
        file_system.to_string(),
        volume["claim"].as_str().unwrap_or_default().to_string(),
    ];
    let mut value = one.clone();
    value["pool"] = json!(pool.id);
    value["node"] = json!(pool.node);
    let name = format!("{}/{id}", text("kind").to_lowercase());
    let order = (delete_at.is_empty(), delete_at, text("since"), id);
    (order, Row { name, cells, value })
}

/// Writes IDs to `spec.deleteOrphans` of their pools, or removes them.
async fn change(cluster: &Cluster, arguments: &OrphanArguments) -> Result<()> {
    let params = pools_of(&cluster.driver, arguments.list.selector.as_deref());
    let pools = cluster.get_all(&object::POOL, &Scope::All, &params).await?;
    let mut changes = BTreeMap::<usize, Vec<String>>::new();
    let (mut plan, mut unknown) = (String::new(), Vec::new());
    for id in &arguments.delete {
        let Some((at, orphan)) = find_listed(&pools, id) else {
            unknown.push(id.as_str());
            continue;
        };
        let requested = changes
            .entry(at)
            .or_insert_with(|| requested_deletions(&pools[at]));
        if requested.contains(id) {
            plan += &format!("The deletion of {id} is requested already.\n");
            continue;
        }
        requested.push(id.clone());
        let kind = orphan["kind"].as_str().unwrap_or_default().to_lowercase();
        let pool = Pool::of(&pools[at]).title();
        plan += &format!(
            "The {kind} {id} of pool {pool} will be deleted 24 hours after nothing has named it for 24 hours. Until then --keep takes this back.\n"
        );
    }
    for id in &arguments.keep {
        let Some(at) = pools
            .iter()
            .position(|pool| requested_deletions(pool).contains(id))
        else {
            unknown.push(id.as_str());
            continue;
        };
        let requested = changes
            .entry(at)
            .or_insert_with(|| requested_deletions(&pools[at]));
        requested.retain(|one| one != id);
        plan += &format!("{id} will not be deleted.\n");
    }
    if !unknown.is_empty() {
        return Err(Failure::failed(format!(
            "nothing was changed: no pool lists {}; `kubectl slackwater orphans` has all that can be named",
            unknown.join(", ")
        )));
    }
    changes.retain(|at, now| *now != requested_deletions(&pools[*at]));
    let full = changes.iter().find(|(_, now)| now.len() > MAX_REQUESTED);
    if let Some((at, _)) = full {
        return Err(Failure::failed(format!(
            "nothing was changed: at most {MAX_REQUESTED} deletions of pool {} can be requested at a time",
            Pool::of(&pools[*at]).title()
        )));
    }
    write(cluster, arguments, &pools, changes, plan.trim_end()).await
}

async fn write(
    cluster: &Cluster,
    arguments: &OrphanArguments,
    pools: &[DynamicObject],
    changes: BTreeMap<usize, Vec<String>>,
    plan: &str,
) -> Result<()> {
    if changes.is_empty() {
        print_lines(plan);
        return Ok(());
    }
    let needs = changes.keys().map(|at| Need {
        verb: "patch",
        kind: &object::POOL,
        namespace: "",
        name: pools[*at].name(),
    });
    require(cluster, &needs.collect::<Vec<_>>()).await?;
    confirm(&arguments.change, plan)?;
    for (at, now) in changes {
        let now = if now.is_empty() {
            Value::Null
        } else {
            json!(now)
        };
        let fields = json!({"spec": {"deleteOrphans": now}});
        let object = &pools[at];
        patch(cluster, &arguments.change, &object::POOL, object, fields).await?;
        let mark = mark(&arguments.change);
        print_lines(&format!(
            "pool.slackwater.dev/{} changed{mark}",
            object.name()
        ));
    }
    Ok(())
}

/// The pool that lists an orphan.
fn find_listed<'a>(pools: &'a [DynamicObject], id: &str) -> Option<(usize, &'a Value)> {
    let mut each = pools.iter().enumerate();
    each.find_map(|(at, pool)| {
        let mut listed = pool.list("/status/orphans/listed").iter();
        Some((at, listed.find(|one| one["id"] == id)?))
    })
}

/// The IDs whose deletion is requested.
fn requested_deletions(pool: &DynamicObject) -> Vec<String> {
    let all = pool.list("/spec/deleteOrphans").iter();
    let all = all.filter_map(|id| id.as_str().map(str::to_string));
    all.collect()
}
