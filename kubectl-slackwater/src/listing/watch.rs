//! Prints a list once, or again and again as its objects change.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use futures_util::stream::{BoxStream, select_all};
use futures_util::{FutureExt, StreamExt};
use kube::api::{Api, DynamicObject};
use kube::core::PartialObjectMeta;
use kube::runtime::{WatchStreamExt, watcher};

use crate::cli::{Format, ListArguments};
use crate::cluster::object::Kind;
use crate::cluster::{Cluster, Scope};
use crate::failure::{Failure, Result};
use crate::listing::{Listing, Row, print};

/// Changes within this time are read together: a list costs the API server more than an event.
pub const PAUSE: Duration = Duration::from_secs(1);

/// Prints a list, and with `--watch` its lines that change.
pub async fn show<'a, F, A>(
    cluster: &'a Cluster,
    arguments: &'a ListArguments,
    kinds: &[&Kind],
    list: F,
) -> Result<()>
where
    F: Fn(&'a Cluster, &'a ListArguments) -> A,
    A: Future<Output = Result<Listing>>,
{
    let format = arguments.output.format;
    if arguments.watch && matches!(format, Format::Json | Format::Yaml) {
        return Err(Failure::usage(
            "--watch prints lines: use it with -o table, wide or name".into(),
        ));
    }
    let first = list(cluster, arguments).await?;
    print(
        &first.render(format, !arguments.no_headers)?,
        &first.remarks(format),
    );
    if !arguments.watch {
        return Ok(());
    }
    let mut rows = first.rows;
    let mut changes = changes(cluster, kinds, &arguments.scope(cluster)).await;
    while changes.next().await.is_some() {
        tokio::time::sleep(PAUSE).await;
        // What happened in the meantime is in the next list, too.
        while let Some(Some(())) = changes.next().now_or_never() {}
        let next = list(cluster, arguments).await?;
        let changed = Listing {
            rows: changed(&rows, &next.rows),
            notes: Vec::new(),
            ..next
        };
        print(&changed.render(format, false)?, &[]);
        for gone in gone(&rows, &next.rows) {
            print(&format!("{} deleted\n", crate::text::escaped(gone)), &[]);
        }
        rows = next.rows;
    }
    Ok(())
}

/// One item after each change of an object of these kinds. A watch that fails is begun again.
pub async fn changes(cluster: &Cluster, kinds: &[&Kind], scope: &Scope) -> BoxStream<'static, ()> {
    let mut watches: Vec<BoxStream<'static, ()>> = Vec::new();
    for kind in kinds {
        let Some(version) = cluster.served_version(kind, scope).await else {
            continue;
        };
        let resource = kind.resource(version);
        let client = cluster.client.clone();
        let api: Api<PartialObjectMeta<DynamicObject>> = match scope {
            Scope::Namespace(namespace) if kind.is_namespaced => {
                Api::namespaced_with(client, namespace, &resource)
            }
            _ => Api::all_with(client, &resource),
        };
        let watch = watcher(api, watcher::Config::default()).default_backoff();
        let changes = watch.filter_map(|event| async move {
            use watcher::Event::{Apply, Delete, InitDone};
            matches!(event, Ok(Apply(_) | Delete(_) | InitDone)).then_some(())
        });
        watches.push(changes.boxed());
    }
    select_all(watches).boxed()
}

/// Lines that are new or differ, but for their ages.
fn changed(before: &[Row], now: &[Row]) -> Vec<Row> {
    let before: BTreeMap<_, _> = before.iter().map(|row| (identity(row), row)).collect();
    let is_same = |row: &&Row| {
        let old = before.get(&identity(row));
        old.is_some_and(|old| old.value == row.value)
    };
    now.iter().filter(|row| !is_same(row)).cloned().collect()
}

/// What stays the same while a line changes.
fn identity(row: &Row) -> (&str, &str) {
    (
        &row.name,
        row.value["namespace"].as_str().unwrap_or_default(),
    )
}

/// Names of lines that are gone.
fn gone<'a>(before: &'a [Row], now: &[Row]) -> Vec<&'a str> {
    let now: BTreeSet<_> = now.iter().map(identity).collect();
    let is_gone = |old: &&Row| !now.contains(&identity(old));
    let gone = before.iter().filter(is_gone);
    gone.map(|row| row.name.as_str()).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn only_lines_that_differ_are_printed_again() {
        let row = |name: &str, namespace: &str, size: i64, age: &str| Row {
            name: name.into(),
            cells: vec![age.into()],
            value: json!({"namespace": namespace, "size": size}),
        };
        let before = [
            row("a", "x", 1, "1s"),
            row("a", "y", 1, "1s"),
            row("b", "x", 1, "1s"),
        ];
        let now = [
            row("a", "x", 1, "9s"),
            row("a", "y", 2, "9s"),
            row("c", "x", 1, "9s"),
        ];
        assert_eq!(changed(&before, &now), [now[1].clone(), now[2].clone()]);
        assert_eq!(gone(&before, &now), ["b"]);
    }
}
