//! The pages are correct: links resolve, named tests exist, flags are flags of the program,
//! examples are valid, and no developer's machine is named.

#![allow(clippy::disallowed_methods, reason = "a test starts programs")]

mod programs;
mod release;

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use slackwater::config;

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// Files below a folder whose names have this ending.
fn files(folder: &Path, end: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("an entry").path();
        if path.is_dir() && !path.ends_with("target") && !path.ends_with(".git") {
            found.extend(files(&path, end));
        } else if path.to_string_lossy().ends_with(end) {
            found.push(path);
        }
    }
    found.sort();
    found
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// All pages: their path and text.
fn pages() -> Vec<(PathBuf, String)> {
    let pages: Vec<_> = files(&root(), ".md")
        .into_iter()
        .map(|path| (path.clone(), read(&path)))
        .collect();
    assert!(pages.len() > 20, "the pages are found");
    pages
}

/// Targets of `[text](target)`.
fn links(text: &str) -> Vec<&str> {
    let after = text.split("](").skip(1);
    after.filter_map(|rest| rest.split(')').next()).collect()
}

#[test]
fn links_resolve() {
    let mut broken = Vec::new();
    for (page, text) in pages() {
        for link in links(&text) {
            let file = link.split('#').next().unwrap_or(link);
            let here = page.parent().expect("a folder");
            let outside = link.contains("://") || file.is_empty();
            if !outside && !here.join(file).exists() {
                broken.push(format!("{}: {link}", page.display()));
            }
        }
    }
    assert!(broken.is_empty(), "\n{}\n", broken.join("\n"));
}

/// The anchors of a page's headings, as GitHub generates them: in lower case, with hyphens instead
/// of spaces, without punctuation and without the markup of code and links.
fn anchors(text: &str) -> BTreeSet<String> {
    let mut is_code = false;
    let mut found = BTreeSet::new();
    for line in text.lines() {
        is_code ^= line.starts_with("```");
        let title = line.trim_start_matches('#');
        if is_code || title == line || !title.starts_with(' ') {
            continue;
        }
        let anchor = title.trim().chars().filter_map(|c| match c {
            ' ' => Some('-'),
            '-' | '_' => Some(c),
            c if c.is_alphanumeric() => Some(c.to_ascii_lowercase()),
            _ => None,
        });
        found.insert(anchor.collect());
    }
    found
}

#[test]
fn anchors_of_links_are_headings() {
    let headings = anchors("# A\n## 1. The `image`, and more\n#no\n    # code\n");
    let expected = ["a", "1-the-image-and-more"].map(str::to_string);
    assert_eq!(headings, BTreeSet::from(expected));
    let mut broken = Vec::new();
    let mut count = 0;
    for (page, text) in pages() {
        for link in links(&text)
            .into_iter()
            .filter(|link| !link.contains("://"))
        {
            let Some((file, anchor)) = link.split_once('#') else {
                continue;
            };
            let folder = page.parent().expect("a folder");
            let target = match file {
                "" => page.clone(),
                _ => folder.join(file),
            };
            if target.extension().is_some_and(|end| end == "md") && target.exists() {
                count += 1;
                if !anchors(&read(&target)).contains(anchor) {
                    broken.push(format!("{}: {link}", page.display()));
                }
            }
        }
    }
    assert!(count > 20, "the links are found");
    assert!(broken.is_empty(), "\n{}\n", broken.join("\n"));
}

/// The README lists each page for users.
#[test]
fn the_readme_lists_every_page() {
    let readme = read(&root().join("README.md"));
    for page in files(&root().join("docs"), ".md") {
        let page = page
            .strip_prefix(root())
            .expect("a page of this repository");
        let target = page.display().to_string();
        let is_decision = target.starts_with("docs/adr/") && !target.ends_with("README.md");
        assert!(
            is_decision || readme.contains(&format!("({target})")),
            "README.md does not link {target}"
        );
    }
}

#[test]
fn the_page_for_contributors_names_every_entry_of_the_folder_of_tests() {
    let page = read(&root().join("CONTRIBUTING.md"));
    let check = |path: &str| {
        // proptest stores there the cases that have failed on this machine.
        let is_named = page.contains(path) || path.ends_with("/proptest-regressions");
        assert!(is_named, "CONTRIBUTING.md does not name {path}");
    };
    for name in entries("tests") {
        let program = format!("tests/{name}");
        check(&program);
        // The parts of a test program. The page names all folders of reviewed output at once.
        if root().join(&program).join("main.rs").is_file() {
            let mut parts = entries(&program);
            parts.retain(|part| part != "snapshots" && root().join(&program).join(part).is_dir());
            for part in parts {
                check(&format!("{program}/{part}/"));
            }
        }
    }
}

/// The names in a folder of the repository.
fn entries(folder: &str) -> Vec<String> {
    let entries = fs::read_dir(root().join(folder)).expect("a folder");
    let name = |entry: std::io::Result<fs::DirEntry>| entry.expect("an entry").file_name();
    let names = entries.map(|entry| name(entry).into_string().expect("a plain name"));
    names.collect()
}

/// Names of all tests: the function after each `#[test]` or `#[tokio::test]`, and the tests in the
/// cluster by the names that they print.
fn test_names() -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for file in files(&root().join("tests/e2e"), ".sh") {
        let text = read(&file);
        let found = text.lines().filter_map(|line| {
            let (name, _) = line.strip_prefix("test_")?.split_once("() {")?;
            Some(name.to_string())
        });
        names.extend(found);
    }
    for folder in [
        "src",
        "core/src",
        "guard/src",
        "populate",
        "kubectl-slackwater",
        "tests",
    ] {
        for file in files(&root().join(folder), ".rs") {
            let text = read(&file);
            let marked = text.split("test]").chain(text.split("::test(")).skip(1);
            names.extend(marked.filter_map(|rest| {
                let (_, name) = rest
                    .get(..400.min(rest.len()))
                    .unwrap_or(rest)
                    .split_once("fn ")?;
                let end = name.find(|c: char| !c.is_alphanumeric() && c != '_')?;
                Some(name[..end].to_string())
            }));
        }
    }
    names
}

/// Texts between backticks.
fn code(text: &str) -> impl Iterator<Item = &str> {
    text.split('`').skip(1).step_by(2)
}

#[test]
fn each_complaint_names_tests_that_exist_or_says_why_not() {
    let page = read(&root().join("docs/complaints.md"));
    let names = test_names();
    let rows: Vec<_> = page
        .lines()
        .filter(|line| line.starts_with("| ") && !line.contains("| answered by |"))
        .collect();
    assert!(rows.len() > 40, "the table is found");
    let mut wrong = Vec::new();
    for row in rows {
        let answer = row.trim_end_matches('|').rsplit('|').next().unwrap_or("");
        let named: Vec<_> = code(answer)
            .filter(|word| word.chars().all(|c| c.is_ascii_alphanumeric() || c == '_'))
            .filter(|word| word.contains('_') || *word == "stage")
            .collect();
        wrong.extend(
            named
                .iter()
                .filter(|name| !names.contains(**name))
                .map(|name| format!("no test is named {name}")),
        );
        if named.is_empty() && !answer.contains("not yet") && !answer.contains("in part") {
            wrong.push(format!("neither a test nor a reason: {row}"));
        }
    }
    assert!(wrong.is_empty(), "\n{}\n", wrong.join("\n"));
}

#[test]
fn the_comparison_names_tests_that_exist() {
    let page = read(&root().join("docs/comparison.md"));
    let (_, rows) = page.split_once("| claim | shown by |").expect("the table");
    let names = test_names();
    let mut named = 0;
    for row in rows.lines().filter(|line| line.starts_with("| ")) {
        let tests: Vec<_> = code(row).collect();
        assert!(!tests.is_empty(), "no test proves it: {row}");
        for test in &tests {
            assert!(names.contains(*test), "no test is named {test}");
        }
        named += tests.len();
    }
    assert!(named > 20, "the table is found");
}

/// Statements about databases must name the tests that prove them.
#[test]
fn consistency_names_tests_that_exist() {
    let page = read(&root().join("docs/consistency.md"));
    let names = test_names();
    let word = |word: &&str| word.chars().all(|c| c.is_ascii_lowercase() || c == '_');
    let long = |word: &&str| word.matches('_').count() >= 4;
    let settings = ["idle_in_transaction_session_timeout"];
    let named: Vec<_> = code(&page)
        .filter(word)
        .filter(long)
        .filter(|word| !word.starts_with("slackwater_") && !settings.contains(word))
        .collect();
    assert!(named.len() > 40, "the names are found");
    let wrong: Vec<_> = named
        .iter()
        .filter(|name| !names.contains(**name))
        .collect();
    assert!(wrong.is_empty(), "no tests are named {wrong:#?}");
}

#[test]
fn the_finder_of_tests_finds_them() {
    let names = test_names();
    for name in [
        "the_finder_of_tests_finds_them",
        "a_mkfs_that_was_cut_off_is_run_again",
        "a_volume_lives_from_create_to_delete",
        "a_group_on_one_node_under_load",
    ] {
        assert!(names.contains(name), "{name}");
    }
    assert!(!names.contains("links"));
}

/// The `--help` output of the program and of each command.
fn help() -> String {
    let helps = crate::cli::helps("").into_iter();
    helps.map(|(_, text)| text).collect()
}

/// Words that begin with two dashes.
fn flags(text: &str) -> BTreeSet<String> {
    let word = |c: char| c.is_ascii_lowercase() || c == '-';
    let mut found = BTreeSet::new();
    for (at, _) in text.match_indices("--") {
        let before = text[..at].chars().next_back();
        let rest = &text[at + 2..];
        let end = rest.find(|c| !word(c)).unwrap_or(rest.len());
        let alone = before.is_none_or(|c| c.is_whitespace() || "`\"([".contains(c));
        if alone && end > 0 && rest.starts_with(|c: char| c.is_ascii_lowercase()) {
            found.insert(format!("--{}", &rest[..end]));
        }
    }
    found
}

/// The program's own sentences and lines, which contain no flag of another program.
fn about_the_program(text: &str) -> String {
    let others = [
        "cargo ",
        "docker ",
        "helm ",
        "kubectl ",
        "apt-get ",
        "systemctl ",
        "rm -r ",
        "losetup ",
        "rsync, ",
        "lvcreate ",
        "lvchange ",
        "lvextend ",
        "vgchange ",
        "--chunksize ",
        "mkfs",
        "btrfs ",
        "guest-run",
        "guest-setup",
        "csi-sanity/run.sh",
    ];
    let mut lines = Vec::new();
    let mut continues = false; // a command that began with another program
    for line in text.lines() {
        let other = continues || others.iter().any(|other| line.contains(other));
        continues = other && line.ends_with('\\');
        if !other {
            lines.push(line);
        }
    }
    lines.join("\n")
}

#[test]
fn flags_in_the_pages_are_flags_of_the_program() {
    let known = flags(&help());
    assert!(known.contains("--allowed-path"), "{known:?}");
    let mut wrong = Vec::new();
    for (page, text) in pages() {
        // The plugin of kubectl checks its pages itself.
        if page.ends_with("docs/plugin.md") || page.ends_with("docs/restore.md") {
            continue;
        }
        // The programs of the guest and of upstream have flags of their own.
        if page.starts_with(root().join("tests")) || page.starts_with(root().join("csi-sanity")) {
            continue;
        }
        let named = flags(&about_the_program(&text));
        wrong.extend(
            named
                .difference(&known)
                .map(|flag| format!("{}: {flag}", page.display())),
        );
    }
    assert!(wrong.is_empty(), "\n{}\n", wrong.join("\n"));
}

#[test]
fn the_shipped_configuration_is_valid() {
    let path = root().join("deploy/slackwater.toml");
    let mut given = config::parse_file(&path, &read(&path)).expect("the file parses");
    given.node_name = Some("node-1".parse().expect("a name"));
    let whole = given
        .finish()
        .expect("the file is complete except for the node's name");
    let unit = read(&root().join("deploy/slackwater.service"));
    assert!(unit.contains("--node-name %H") && unit.contains("Restart=always"));
    for pool in &whole.node().expect("a node").pools {
        let place = pool.place.to_string();
        let folder = place.trim_start_matches("file:");
        assert!(
            unit.contains(&format!("RequiresMountsFor={folder}\n")),
            "{folder}"
        );
    }
}

#[test]
fn the_image_has_the_programs_that_the_driver_starts() {
    let program = read(&root().join("core/src/host/linux/program.rs"));
    let program = program.split("#[cfg(test)]").next().unwrap_or(&program);
    let programs = program.split("Program::new(\"").skip(1);
    let dockerfile = read(&root().join("Dockerfile"));
    let demo = read(&root().join("deploy/deps"));
    let mut count = 0;
    // Its name, a comma, and its package.
    for package in programs.filter_map(|rest| rest.split('"').nth(2)) {
        assert!(dockerfile.contains(package), "Dockerfile lacks {package}");
        assert!(demo.contains(package), "deploy/deps lacks {package}");
        count += 1;
    }
    assert!(count >= 4, "the programs are found");
}

/// cargo reads the manifests of all members, also to build one of them.
#[test]
fn the_image_is_built_from_all_members() {
    let manifest = read(&root().join("Cargo.toml"));
    let members = manifest
        .lines()
        .find_map(|line| line.strip_prefix("members = ["));
    let members = members.expect("a list").split('"').skip(1).step_by(2);
    let dockerfile = read(&root().join("Dockerfile"));
    let context = read(&root().join(".dockerignore"));
    let mut count = 0;
    for member in members.chain(["src", "proto"]) {
        let copied = format!("\nCOPY {member} {member}\n");
        assert!(
            dockerfile.contains(&copied),
            "Dockerfile does not copy {member}"
        );
        let kept = format!("\n!{member}\n");
        assert!(context.contains(&kept), ".dockerignore leaves {member} out");
        count += 1;
    }
    assert!(count > 5, "the members are found");
}

#[test]
fn every_decision_is_in_the_list_and_has_its_parts() {
    let folder = root().join("docs/adr");
    let list = read(&folder.join("README.md"));
    for page in files(&folder, ".md") {
        let name = page
            .file_name()
            .expect("a name")
            .to_string_lossy()
            .into_owned();
        if name == "README.md" {
            continue;
        }
        assert!(list.contains(&format!("({name})")), "{name} is not listed");
        let text = read(&page);
        for part in ["## Context", "## Decision", "## Consequences"] {
            assert!(text.contains(part), "{name} has no {part}");
        }
    }
}
