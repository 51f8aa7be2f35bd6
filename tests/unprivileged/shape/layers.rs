//! The order of the files inside `operation/` and `router/`: no cycles, and in `operation/` layers.
//!
//! A part of the driver has no reference to a part above it, so the compiler refuses most calls that
//! go up. What it does not see are imports of types and functions, and the order within a layer.

use crate::shape::calls::{Arrows, arrows, cycles};
use crate::shape::rules::Source;

/// The folders of `operation/` from the bottom to the top: a file uses files of its own layer and of
/// the layers before it. Files beside the folders, such as `operation/lock.rs`, are the bottom.
const LAYERS: [&str; 5] = ["pools", "usage", "snapshot", "volume", "node"];

/// Arrows of `router/` without which it has no cycle, and why they stay.
const KNOWN: &[(&str, &str, &str)] = &[(
    "router/agents/agent.rs",
    "router/checked.rs",
    "a description is checked when it arrives, all other replies where a call is forwarded",
)];

fn layer(path: &str) -> Option<usize> {
    let inside = path.strip_prefix("operation/")?;
    let folder = inside.split(['/', '.']).next()?;
    Some(
        LAYERS
            .iter()
            .position(|one| *one == folder)
            .map_or(0, |at| at + 1),
    )
}

fn upward(arrows: &Arrows) -> Vec<String> {
    let mut found = Vec::new();
    for (from, used) in arrows {
        for (to, name) in used {
            if layer(from) < layer(to) && layer(from).is_some() {
                found.push(format!(
                    "{from} -> {to} ({name}) goes up; docs/architecture.md has the layers"
                ));
            }
        }
    }
    found
}

fn circular(arrows: &Arrows, known: &[(&str, &str, &str)]) -> Vec<String> {
    let mut others = arrows.clone();
    for (from, to, _) in known {
        others.entry((*from).to_string()).or_default().remove(*to);
    }
    let new = cycles(&others).into_iter();
    let new = new.map(|(from, to, name)| format!("{from} -> {to} ({name}) is part of a cycle"));
    let all = cycles(arrows);
    let is_used = |(from, to, _): &&(&str, &str, &str)| {
        all.iter().any(|cycle| cycle.0 == *from && cycle.1 == *to)
    };
    let unused = known.iter().filter(|one| !is_used(one));
    let unused = unused.map(|(from, to, _)| format!("{from} -> {to} is listed, and in no cycle"));
    new.chain(unused).collect()
}

#[test]
fn the_layers_of_operation_are_kept() {
    let arrows = arrows(&crate::shape::sources(), "operation");
    let mut found = upward(&arrows);
    found.extend(circular(&arrows, &[]));
    assert!(found.is_empty(), "\n{}\n", found.join("\n"));
}

#[test]
fn the_files_of_the_router_are_in_no_cycle() {
    let found = circular(&arrows(&crate::shape::sources(), "router"), KNOWN);
    assert!(found.is_empty(), "\n{}\n", found.join("\n"));
}

#[test]
fn the_arrows_between_files_are_seen() {
    let arrows = arrows(&crate::shape::sources(), "operation");
    let expected = [
        ("operation/volume/stage.rs", "operation/pools/lookup.rs"),
        ("operation/volume/fit.rs", "operation/usage/show.rs"),
        ("operation/volume/stage.rs", "operation/snapshot/copies.rs"),
        ("operation/usage/view.rs", "operation/pools/pool.rs"),
        ("operation/node/open.rs", "operation/pools/pool.rs"),
    ];
    for (from, to) in expected {
        let used = arrows.get(from);
        assert!(
            used.is_some_and(|used| used.contains_key(to)),
            "{from} -> {to}: {used:?}"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn planted(files: &[(&str, &str)]) -> Vec<String> {
        fn source((path, text): &(&str, &str)) -> Source {
            Source {
                path: (*path).into(),
                text: (*text).into(),
            }
        }
        let mut sources: Vec<_> = files.iter().map(source).collect();
        sources.extend(PARTS.iter().map(source));
        let arrows = arrows(&sources, "operation");
        let mut found = upward(&arrows);
        found.extend(circular(&arrows, &[]));
        found
    }

    const ROOT: (&str, &str) = (
        "operation.rs",
        "pub struct Driver { locks: Locks, volumes: Volumes } pub use snapshot::copy::Copies;",
    );
    /// The parts of the planted driver.
    const PARTS: [(&str, &str); LAYERS.len()] = [
        ("operation/pools.rs", ""),
        (
            "operation/usage.rs",
            "pub struct Usage<'a> { of: &'a Arc<Driver> }",
        ),
        (
            "operation/snapshot.rs",
            "pub struct Snapshots { pub(in crate::operation) copies: copy::Copies }",
        ),
        (
            "operation/volume.rs",
            "pub struct Volumes { snapshots: Arc<Snapshots> }",
        ),
        ("operation/node.rs", ""),
    ];
    const COPY: (&str, &str) = (
        "operation/snapshot/copy.rs",
        "pub struct Copies; impl Copies { pub fn cancel(&self) {} }",
    );
    const STAGE: (&str, &str) = (
        "operation/volume/stage.rs",
        "impl Volumes { pub fn stage(&self) { self.snapshots.copies.cancel(); self.format(); } }",
    );

    #[track_caller]
    fn refused(file: (&str, &str), because: &str) {
        let found = planted(&[ROOT, COPY, STAGE, file]);
        assert!(found.iter().any(|one| one.contains(because)), "{found:?}");
    }

    #[test]
    fn what_goes_down_is_fine() {
        let format = (
            "operation/volume/format.rs",
            "use crate::operation::Copies; impl Volumes { pub fn format(&self) {} }",
        );
        assert_eq!(planted(&[ROOT, COPY, STAGE, format]), Vec::<String>::new());
    }

    #[test]
    fn an_arrow_that_goes_up_is_found() {
        let because = "operation/usage/view.rs -> operation/volume/stage.rs";
        let path = "operation/usage/view.rs";
        refused((path, "use crate::operation::volume::stage::X;"), because);
        refused(
            (path, "use super::super::volume::{a, stage::{X, Y}};"),
            because,
        );
        refused(
            (path, "impl<'a> Volumes { fn view(&self) { self.stage() } }"),
            because,
        );
        refused(
            (
                path,
                "impl<'a> Usage<'a> { fn view(&self) { self.of.volumes.stage() } }",
            ),
            because,
        );
        refused(
            (
                path,
                "fn view(driver: &Driver) { driver.volumes.stage::<u8>() }",
            ),
            because,
        );
        refused(
            (path, "fn view(it: &'a Arc<Volumes>) { Volumes::stage(it) }"),
            because,
        );
        let because = "operation/usage/view.rs -> operation/snapshot/copy.rs";
        refused((path, "use crate::operation::{Copies, Driver};"), because);
        refused(
            (
                path,
                "impl Snapshots { fn view(&self) { self.copies.cancel() } }",
            ),
            because,
        );
        refused(
            (
                path,
                "fn view(snapshots: Vec<u8>, it: &Driver) { it.volumes.snapshots.copies.cancel() }",
            ),
            because,
        );
    }

    #[test]
    fn a_cycle_of_calls_is_found() {
        refused(
            (
                "operation/volume/format.rs",
                "impl Volumes { pub fn format(&self) { self.stage() } }",
            ),
            "operation/volume/format.rs -> operation/volume/stage.rs (stage) is part of a cycle",
        );
    }

    #[test]
    fn tests_have_no_arrows() {
        let test = "#[cfg(test)] mod tests { use crate::operation::volume::stage::X; }";
        assert_eq!(
            planted(&[ROOT, COPY, STAGE, ("operation/usage/view.rs", test)]),
            Vec::<String>::new()
        );
    }

    #[test]
    fn a_listed_arrow_that_is_in_no_cycle_is_found() {
        let listed = [("router/a.rs", "router/b.rs", "why")];
        let found = circular(&Arrows::new(), &listed);
        assert!(found[0].contains("in no cycle"), "{found:?}");
    }
}
