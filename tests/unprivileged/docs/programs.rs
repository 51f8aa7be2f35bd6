//! The programs of `cargo test` are described, and started, by what they need.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;

use super::{code, read, root};

/// Names of the programs, which are the folders in `tests/` with a `main.rs`, and their parts.
fn programs() -> BTreeMap<String, BTreeSet<String>> {
    let entries = fs::read_dir(root().join("tests")).expect("a folder");
    let folders = entries.map(|entry| entry.expect("an entry").path());
    let programs = folders.filter(|folder| folder.join("main.rs").exists());
    let parts = |folder: std::path::PathBuf| {
        let main = read(&folder.join("main.rs"));
        let modules = main.lines().filter_map(|line| line.strip_prefix("mod "));
        let modules = modules.map(|rest| rest.trim_end_matches(';'));
        // The others are shared by programs.
        let own = modules.filter(|name| folder.join(name).with_extension("rs").exists());
        let name = folder.file_name().expect("a name").display().to_string();
        (name, own.map(str::to_string).collect())
    };
    programs.map(parts).collect()
}

/// Whether a part of a program needs root, in the table of CONTRIBUTING.md.
fn needs_root() -> BTreeMap<String, bool> {
    let page = read(&root().join("CONTRIBUTING.md"));
    let mut found = BTreeMap::new();
    for row in page.lines().filter(|line| line.starts_with("| `")) {
        let columns: Vec<_> = row.split('|').map(str::trim).collect();
        for path in code(columns[1]).filter_map(|path| path.strip_prefix("tests/")) {
            let part = path.trim_end_matches('/').trim_end_matches(".rs");
            found.insert(part.to_string(), columns[3] == "yes");
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
        .collect();
    let programs = programs();
    assert!(programs.len() > 3, "the programs are found: {programs:?}");
    let unknown = of_root.iter().find(|name| !programs.contains_key(**name));
    assert_eq!(unknown, None, "no such program");
    let needs_root = needs_root();
    for (program, parts) in &programs {
        assert!(!parts.is_empty(), "the parts of {program} are found");
        for part in parts {
            let part = format!("{program}/{part}");
            let described = needs_root.get(&part);
            let described =
                described.unwrap_or_else(|| panic!("CONTRIBUTING.md has no row of tests/{part}"));
            assert_eq!(
                of_root.contains(program.as_str()),
                *described,
                "{part}: tests/runner and CONTRIBUTING.md differ"
            );
        }
    }
}
