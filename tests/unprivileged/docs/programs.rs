//! The programs of `cargo test` are described, and started, by what they need.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

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

/// The Rust files below a folder.
fn sources(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).expect("a folder");
    let paths = entries.map(|entry| entry.expect("an entry").path());
    paths
        .flat_map(|path| match path.is_dir() {
            true => sources(&path),
            false => vec![path],
        })
        .filter(|path| path.extension().is_some_and(|extension| extension == "rs"))
        .collect()
}

/// `make soak` names the tests that it runs: a file that leaves out trials elsewhere must be among them.
#[test]
fn what_a_sweep_leaves_out_is_in_the_soak() {
    let makefile = read(&root().join("Makefile"));
    let commands = makefile
        .lines()
        .filter(|line| line.contains("SLACKWATER_SOAK=1"));
    let command = commands
        .into_iter()
        .find(|line| line.contains("--test root"));
    let (_, named) = command
        .and_then(|line| line.split_once(" -- "))
        .expect("the command");
    let named: Vec<&str> = named.split_whitespace().collect();
    let mut checked = 0;
    for program in ["root", "simulated", "unprivileged"] {
        let folder = root().join("tests").join(program);
        for path in sources(&folder) {
            let asks = "Sweep::requested()";
            if !read(&path).contains(asks) || path.ends_with("docs/programs.rs") {
                continue;
            }
            let inside = path.strip_prefix(&folder).expect("a file of the program");
            let module = inside.with_extension("").display().to_string();
            let module = format!("{}::", module.replace('/', "::"));
            let is_named = named.iter().any(|name| module.starts_with(name));
            assert!(
                is_named,
                "`make soak` does not run {module} of tests/{program}"
            );
            checked += 1;
        }
    }
    assert!(checked > 3, "{checked} files leave out trials");
}
