//! The `status` command: pools, last cuts, running operations and problems on one screen.

mod operations;

use std::cmp::Reverse;
use std::collections::BTreeMap;

use futures_util::{FutureExt, StreamExt};
use k8s_openapi::jiff::Timestamp;
use kube::api::{DynamicObject, ListParams};
use serde::Serialize;
use serde_json::json;

use crate::cli::{Format, ListArguments};
use crate::cluster::object::{self, Fields, Kind};
use crate::cluster::{Cluster, Scope};
use crate::failure::{Failure, Result};
use crate::listing::watch;
use crate::listing::{self, Column, column, table};
use crate::model::frozen::{self, Frozen};
use crate::model::growth;
use crate::model::snapshot::{self, Group};
use crate::model::{self, Move, Pool, Volume};
use crate::pools::health;
use crate::text::{age, size};
use operations::{Inputs, Operation};

/// What it reads.
const KINDS: [&Kind; 13] = [
    &object::POOL,
    &object::CLAIM,
    &object::VOLUME,
    &object::POD,
    &object::GROUP,
    &object::GROUP_CONTENT,
    &object::MOVE,
    &object::REVERT,
    &object::HTTP_SOURCE,
    &object::OCI_SOURCE,
    &object::S3_SOURCE,
    &object::EVENT,
    &object::SNAPSHOT,
];
/// Claims that are named for each pool.
const MAX_CLAIMS: usize = 3;
/// Events that are shown.
const MAX_EVENTS: usize = 10;
/// Lines of running work.
const MAX_WORK: usize = 20;

/// A recent warning of the driver.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Warning {
    at: Option<Timestamp>,
    object: String,
    reason: String,
    note: String,
}

/// All that is shown.
struct Screen {
    /// `None` if the user may not list pools.
    pools: Option<Vec<Pool>>,
    volumes: Vec<Volume>,
    frozen: Vec<Frozen>,
    /// The last cut of each selector.
    groups: Vec<Group>,
    moves: Vec<Move>,
    work: Vec<Operation>,
    warnings: Vec<Warning>,
}

/// Prints the screen, and with `--watch` again after each change.
pub async fn run(cluster: &Cluster, arguments: &ListArguments) -> Result<()> {
    let format = arguments.output.format;
    if format == Format::Name || (arguments.watch && format != Format::Table) {
        return Err(Failure::usage(
            "status is printed with -o table, json or yaml, and --watch with -o table".into(),
        ));
    }
    print(cluster, arguments).await?;
    if !arguments.watch {
        return Ok(());
    }
    let mut changes = watch::changes(cluster, &KINDS, &arguments.scope(cluster)).await;
    while changes.next().await.is_some() {
        tokio::time::sleep(watch::PAUSE).await;
        while let Some(Some(())) = changes.next().now_or_never() {}
        listing::print("\n---\n", &[]);
        print(cluster, arguments).await?;
    }
    Ok(())
}

async fn print(cluster: &Cluster, arguments: &ListArguments) -> Result<()> {
    let screen = read(cluster, arguments).await?;
    let notes = cluster.take_notes();
    let text = match arguments.output.format {
        Format::Json | Format::Yaml => {
            let Screen {
                pools,
                volumes,
                frozen,
                groups,
                moves,
                work,
                warnings,
            } = &screen;
            let all = json!({ "pools": pools, "volumes": volumes, "frozen": frozen, "lastCuts": groups,
                "moves": moves, "work": work, "warnings": warnings, "notes": notes });
            listing::serialize(arguments.output.format, &all)?
        }
        _ => render(&screen),
    };
    listing::print(&text, &listing::note_lines(&notes));
    Ok(())
}

async fn read(cluster: &Cluster, arguments: &ListArguments) -> Result<Screen> {
    let scope = arguments.scope(cluster);
    let selector = arguments.selector.as_deref();
    let pools = model::pools(cluster).await?;
    let objects = model::move_objects(cluster, &scope).await?;
    let moves = objects.iter().flatten().map(Move::of);
    let moves = moves.filter(|one| !one.has_ended()).collect();
    let volumes = model::volumes(cluster, &scope, selector).await?;
    let frozen = pools.iter().flatten();
    let frozen = frozen.flat_map(|(_, pool)| pool.frozen.clone()).collect();
    let claims = claims(&volumes);
    let pools = pools.map(|pools| {
        let mut pools: Vec<_> = pools.into_values().collect();
        health::sort_fullest_first(&mut pools);
        let growths = pools.iter_mut().filter_map(|pool| pool.growth.as_mut());
        growths.for_each(|growth| growth.name(&claims));
        pools
    });
    let parts = Inputs {
        pools: pools.as_deref(),
        volumes: &volumes,
        are_all: scope == Scope::All && selector.is_none(),
        now: Timestamp::now(),
    };
    Ok(Screen {
        work: operations::read(cluster, &scope, objects.as_deref(), &parts).await?,
        frozen: frozen::named(frozen, &claims),
        volumes,
        pools,
        groups: last_of_each(snapshot::groups(cluster, &scope, selector).await?),
        moves,
        warnings: warnings(cluster, &scope).await?,
    })
}

/// The claims of volumes, by the ID of the volume.
fn claims(volumes: &[Volume]) -> BTreeMap<String, String> {
    let claimed = volumes.iter().filter(|volume| !volume.claim.is_empty());
    let claims = claimed.map(|volume| {
        let claim = format!("{}/{}", volume.namespace, volume.claim);
        (volume.handle.clone(), claim)
    });
    claims.collect()
}

/// The last cut that is ready, and a later one that is not, of each selector.
fn last_of_each(mut groups: Vec<Group>) -> Vec<Group> {
    groups.sort_by_key(|group| Reverse(group.cut.cut_at));
    let mut last: BTreeMap<(String, String, bool), Group> = BTreeMap::new();
    for group in groups {
        let key = (group.namespace.clone(), group.selector.clone());
        let is_later =
            |ready: &Group| group.cut.cut_at.is_none() || group.cut.cut_at > ready.cut.cut_at;
        let ready = last.get(&(key.0.clone(), key.1.clone(), true));
        if group.ready || ready.is_none_or(is_later) {
            last.entry((key.0, key.1, group.ready)).or_insert(group);
        }
    }
    last.into_values().collect()
}

async fn warnings(cluster: &Cluster, scope: &Scope) -> Result<Vec<Warning>> {
    let params = ListParams::default().fields("type=Warning");
    let events = cluster.find(&object::EVENT, scope, &params).await?;
    let is_own = |event: &&DynamicObject| event.text("/reportingController") == cluster.driver;
    let events = events.iter().flatten().filter(is_own);
    let mut found: Vec<Warning> = events
        .map(|event| {
            let last = event.time("/series/lastObservedTime");
            let kind = event.text("/regarding/kind");
            let namespace = match event.text("/regarding/namespace") {
                "" => String::new(),
                namespace => format!("{namespace}/"),
            };
            Warning {
                at: last.or_else(|| event.time("/eventTime")),
                object: format!("{kind} {namespace}{}", event.text("/regarding/name")),
                reason: event.text("/reason").into(),
                note: event.text("/note").into(),
            }
        })
        .collect();
    found.sort_by_key(|warning| Reverse(warning.at));
    found.truncate(MAX_EVENTS);
    Ok(found)
}

/// A heading, and a table below it; nothing if the table is empty.
fn section(title: &str, columns: &[Column], rows: &[Vec<String>]) -> String {
    if rows.is_empty() {
        return String::new();
    }
    let rows: Vec<&[String]> = rows.iter().map(Vec::as_slice).collect();
    let lines = table(columns, &rows, false, true);
    let lines = lines.lines().map(|line| format!("  {line}\n"));
    format!("{title}\n{}\n", lines.collect::<String>())
}

fn render(screen: &Screen) -> String {
    let now = Timestamp::now();
    let mut text = summary_line(screen, now);
    text.push_str(&render_pools(screen, now));
    let parts = [
        render_frozen(&screen.frozen, now),
        render_groups(&screen.groups, now),
        render_work(&screen.work, now),
        render_warnings(&screen.warnings, now),
    ];
    text.extend(parts);
    text.truncate(text.trim_end().len());
    text + "\n"
}

fn render_frozen(frozen: &[Frozen], now: Timestamp) -> String {
    let rows: Vec<_> = frozen.iter().map(|one| one.cells(now)).collect();
    section("Frozen file systems", &frozen::COLUMNS, &rows)
}

fn render_groups(groups: &[Group], now: Timestamp) -> String {
    let rows = groups.iter().map(|group| {
        let reason = match group.error.as_str() {
            "" => &group.cut.reason,
            error => error,
        };
        let age = age(group.cut.cut_at, now);
        let ready = group.ready.to_string();
        let cells = [
            &group.namespace,
            &group.selector,
            &group.name,
            &group.cut.level,
            &ready,
            &age,
            reason,
        ];
        cells.map(str::to_string).to_vec()
    });
    let rows: Vec<_> = rows.collect();
    let columns = [
        "NAMESPACE",
        "CLAIMS",
        "SNAPSHOT",
        "LEVEL",
        "READY",
        "AGE",
        "REASON",
    ];
    section("Last group snapshots", &columns.map(column), &rows)
}

fn render_work(work: &[Operation], now: Timestamp) -> String {
    let rows = work.iter().take(MAX_WORK).map(|one| one.cells(now));
    let rows: Vec<_> = rows.collect();
    let mut text = section("Running work", &operations::COLUMNS, &rows);
    let rest = work.len().saturating_sub(MAX_WORK);
    if rest > 0 {
        text.truncate(text.trim_end().len());
        text.push_str(&format!("\n  {rest} more, which -o json has\n\n"));
    }
    text
}

fn render_warnings(warnings: &[Warning], now: Timestamp) -> String {
    let rows = warnings.iter().map(|warning| {
        let age = age(warning.at, now);
        let cells = [&age, &warning.object, &warning.reason, &warning.note];
        cells.map(String::clone).to_vec()
    });
    let rows: Vec<_> = rows.collect();
    let columns = ["AGE", "OBJECT", "REASON", "MESSAGE"];
    section("Recent warnings", &columns.map(column), &rows)
}

/// Whether something is wrong.
fn summary_line(screen: &Screen, now: Timestamp) -> String {
    let pools = match &screen.pools {
        None => "Pools are not shown.".to_string(),
        Some(pools) => {
            let unhealthy = pools.iter().filter(|pool| !health::is_healthy(pool, now));
            let unhealthy = unhealthy.count();
            format!("Pools: {}, with problems: {unhealthy}.", pools.len())
        }
    };
    format!(
        "{pools} Volumes: {}. Running work: {}. Recent warnings: {}.\n\n",
        screen.volumes.len(),
        screen.work.len(),
        screen.warnings.len()
    )
}

fn render_pools(screen: &Screen, now: Timestamp) -> String {
    let pools = screen.pools.as_deref().unwrap_or_default();
    if pools.is_empty() {
        return String::new();
    }
    let rows = pools.iter().map(|pool| {
        let promised = percent_of(pool.promised_bytes, pool.total_bytes);
        vec![
            pool.title(),
            health::summary(pool, now),
            health::used_percent(pool),
            promised,
            health::known_size(pool, pool.available_bytes),
            health::time_until_full(pool, now),
            largest(pool, &screen.volumes),
        ]
    });
    let rows: Vec<_> = rows.collect();
    let columns = [
        "POOL",
        "HEALTH",
        "USED",
        "PROMISED",
        "FREE",
        "FULL IN",
        "LARGEST CLAIMS",
    ];
    let mut text = section("Pools", &columns.map(column), &rows);
    let rows = growth::rows(pools, now);
    text.push_str(&section(
        "Claims that grow pools most",
        &growth::COLUMNS,
        &rows,
    ));
    let unhealthy = pools.iter().filter(|pool| !health::is_healthy(pool, now));
    let unhealthy: Vec<_> = unhealthy.collect();
    if !unhealthy.is_empty() {
        let rows = unhealthy.iter().map(|pool| {
            let (health, message) = (health::summary(pool, now), health::message(pool, now));
            vec![pool.title(), health, message]
        });
        let rows: Vec<_> = rows.collect();
        let columns = ["POOL", "HEALTH", "MESSAGE"];
        text.push_str(&section("Problems", &columns.map(column), &rows));
    }
    text
}

/// A part that may be larger than the whole.
fn percent_of(part: i64, whole: i64) -> String {
    match whole {
        0 => String::new(),
        whole => format!("{}%", i128::from(part) * 100 / i128::from(whole)),
    }
}

/// The claims of a pool with the largest sizes. Objects do not have what each volume occupies.
fn largest(pool: &Pool, volumes: &[Volume]) -> String {
    let mut own: Vec<_> = volumes.iter().filter(|one| one.pool == pool.id).collect();
    own.sort_by_key(|volume| Reverse(volume.size_bytes));
    let rest = own.len().saturating_sub(MAX_CLAIMS);
    let named = own.iter().take(MAX_CLAIMS).map(|volume| {
        let claim = match volume.claim.as_str() {
            "" => format!("({})", volume.volume),
            claim => format!("{}/{claim}", volume.namespace),
        };
        format!("{claim} {}", size(volume.size_bytes))
    });
    let mut named: Vec<_> = named.collect();
    if rest > 0 {
        named.push(format!("{rest} more"));
    }
    named.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::snapshot::Cut;

    fn group(selector: &str, name: &str, ready: bool, at: Option<i64>) -> Group {
        Group {
            selector: selector.into(),
            name: name.into(),
            ready,
            cut: Cut {
                cut_at: at.map(|at| Timestamp::from_second(at).unwrap()),
                ..Cut::default()
            },
            ..Group::default()
        }
    }

    #[test]
    fn the_last_good_cut_is_shown_and_a_later_one_that_failed() {
        let groups = vec![
            group("app=a", "old", true, Some(1)),
            group("app=a", "new", true, Some(3)),
            group("app=a", "failed-before", false, Some(2)),
            group("app=a", "failed-after", false, None),
            group("app=b", "failed-early", false, Some(1)),
            group("app=b", "good", true, Some(2)),
        ];
        let shown: Vec<_> = last_of_each(groups)
            .into_iter()
            .map(|one| one.name)
            .collect();
        assert_eq!(shown, ["failed-after", "new", "good"]);
    }

    #[test]
    fn only_the_largest_claims_of_the_pool_are_named() {
        let volume = |claim: &str, pool: &str, size_bytes: i64| Volume {
            namespace: "shop".into(),
            claim: claim.into(),
            pool: pool.into(),
            size_bytes,
            ..Volume::default()
        };
        let volumes = [
            volume("a", "p", 1 << 30),
            volume("b", "p", 4 << 30),
            volume("c", "p", 2 << 30),
            volume("d", "p", 3 << 30),
            volume("e", "q", 9 << 30),
        ];
        let pool = Pool {
            id: "p".into(),
            ..Pool::default()
        };
        let text = largest(&pool, &volumes);
        assert_eq!(text, "shop/b 4 GiB, shop/d 3 GiB, shop/c 2 GiB, 1 more");
    }
}
