//! The programs of `cargo test` are described, and started, by what they need.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;

use super::{code, read, root};

/// Names of the programs: files in `tests/`, and folders with a `main.rs`.
fn programs() -> BTreeSet<String> {
    let entries = fs::read_dir(root().join("tests")).expect("a folder");
    let paths = entries.map(|entry| entry.expect("an entry").path());
    let is_program = |path: &std::path::PathBuf| {
        path.extension().is_some_and(|end| end == "rs") || path.join("main.rs").exists()
    };
    let name = |path: std::path::PathBuf| path.file_stem().expect("a name").display().to_string();
    paths.filter(is_program).map(name).collect()
}

/// Whether a program needs root, in the table of CONTRIBUTING.md.
fn needs_root() -> BTreeMap<String, bool> {
    let page = read(&root().join("CONTRIBUTING.md"));
    let mut found = BTreeMap::new();
    for row in page.lines().filter(|line| line.starts_with("| `")) {
        let columns: Vec<_> = row.split('|').map(str::trim).collect();
        for path in code(columns[1]).filter_map(|path| path.strip_prefix("tests/")) {
            let name = path.trim_end_matches('/').trim_end_matches(".rs");
            found.insert(name.to_string(), columns[3] == "yes");
        }
    }
    found
}

/// A user who is not root may run `cargo test`: what cannot run is left out, not failed.
#[test]
fn programs_that_need_root_are_left_out_without_it() {
    let runner = read(&root().join("tests/runner"));
    let groups = runner
        .lines()
        .filter_map(|line| line.split_once(") group="));
    let of_root: BTreeSet<_> = groups
        .filter(|(_, group)| !group.starts_with("unprivileged"))
        .flat_map(|(names, _)| names.split(" | "))
        .map(str::to_string)
        .collect();
    let programs = programs();
    assert!(programs.len() > 15, "the programs are found: {programs:?}");
    assert_eq!(
        of_root.difference(&programs).next(),
        None,
        "no such program"
    );
    let needs_root = needs_root();
    for name in &programs {
        let described = needs_root.get(name);
        let described = described.unwrap_or_else(|| panic!("CONTRIBUTING.md has no row of {name}"));
        assert_eq!(
            of_root.contains(name),
            *described,
            "{name}: tests/runner and CONTRIBUTING.md differ"
        );
    }
}
