//! The structure of the sources: which module may use which, and how large a part may be.
//!
//! The permitted dependencies and their reasons are in docs/architecture.md; these tests enforce
//! them. The rules themselves are tested on small inputs, so that a checker that finds nothing does
//! not pass.

mod calls;
mod layers;
mod linked;
mod rules;
mod tokens;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use rules::{Source, complaints, module_of};

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// The sources of the workspace. Modules of `core` are named like the driver's; each other member is
/// one module.
fn sources() -> Vec<Source> {
    let mut sources = below("src");
    let core = below("core/src").into_iter();
    sources.extend(core.filter(|source| source.path != "lib.rs"));
    for member in ["guard", "kubectl-slackwater", "populate"] {
        let own = below(&format!("{member}/src")).into_iter();
        sources.extend(own.map(|source| Source {
            path: format!("{member}/{}", source.path),
            ..source
        }));
    }
    sources
}

/// The Rust sources in a folder of the repository.
pub fn below(folder: &str) -> Vec<Source> {
    let mut found = Vec::new();
    let top = root().join(folder);
    let mut folders = vec![top.clone()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).expect("the folder can be read") {
            let path = entry.expect("an entry").path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|ext| ext == "rs") {
                found.push(read(&top, &path));
            }
        }
    }
    found.sort_by(|a, b| a.path.cmp(&b.path));
    found
}

fn read(top: &Path, path: &Path) -> Source {
    let inside = path.strip_prefix(top).expect("a path below the top folder");
    Source {
        path: inside.to_str().expect("a plain name").to_string(),
        text: fs::read_to_string(path).expect("a source is text"),
    }
}

#[test]
fn the_sources_follow_the_structural_rules() {
    let found = complaints(&sources());
    assert!(found.is_empty(), "\n{}\n", found.join("\n"));
}

#[test]
fn the_checker_reads_the_sources() {
    let sources = sources();
    let stage = sources
        .iter()
        .find(|source| source.path == "operation/volume/stage.rs")
        .expect("src/operation/volume/stage.rs exists");
    let used = rules::uses(&stage.path, &tokens::tokens(&stage.text));
    for module in ["backend", "host", "record", "model", "error"] {
        assert!(
            used.iter().any(|(to, _)| to == module),
            "{module}: {used:?}"
        );
    }
}

#[test]
fn the_map_names_every_module_and_only_files_that_exist() {
    let map = fs::read_to_string(root().join("docs/architecture.md")).expect("the map exists");
    for source in sources() {
        let module = module_of(&source.path);
        if module == "bin" {
            continue;
        }
        let named = match module {
            "guard" | "kubectl-slackwater" | "populate" => {
                [format!("{module}/src/lib.rs"), format!("{module}/")]
            }
            "error" | "fault" | "fuzz" | "model" | "host" | "record" => [
                format!("core/src/{module}.rs"),
                format!("core/src/{module}/"),
            ],
            module => [format!("src/{module}.rs"), format!("src/{module}/")],
        };
        assert!(
            named.iter().any(|name| map.contains(name)),
            "docs/architecture.md doesn't name {}",
            named.join(" or ")
        );
    }
    let named = map
        .split('`')
        .filter(|text| {
            [
                "src/",
                "core/",
                "guard/",
                "kubectl-slackwater/",
                "populate/",
            ]
            .iter()
            .any(|top| text.starts_with(top))
        })
        .filter(|text| !text.contains(' '));
    for name in named {
        assert!(
            root().join(name).exists(),
            "docs/architecture.md names {name}"
        );
    }
}

/// Which module may use which, as the map has it, without `model` and `error`.
fn arrows_of_the_map(map: &str) -> BTreeMap<&str, BTreeSet<&str>> {
    let (_, rest) = map
        .split_once("## Dependencies between modules")
        .expect("the section");
    let block = rest.split("```").nth(1).expect("a block");
    let lines = block.lines().filter(|line| !line.contains("entry points"));
    let mut found = BTreeMap::new();
    for line in lines {
        let (modules, used) = line.split_once("->").unwrap_or((line, ""));
        // Notes are in parentheses.
        let (before, after) = used.split_once('(').unwrap_or((used, ""));
        let after = after.split_once(')').map_or("", |(_, after)| after);
        let used = before.split(',').chain(after.split(','));
        let used: BTreeSet<_> = used.map(str::trim).filter(|one| !one.is_empty()).collect();
        let modules = modules.split(',').map(str::trim);
        found.extend(
            modules
                .filter(|one| !one.is_empty())
                .map(|one| (one, used.clone())),
        );
    }
    found
}

#[test]
fn the_map_has_the_permitted_dependencies() {
    let map = fs::read_to_string(root().join("docs/architecture.md")).expect("the map exists");
    let basic = ["model", "error"];
    // These are members that use nothing of the driver.
    let left_out = [&basic[..], &["populate", "kubectl-slackwater"]].concat();
    let others = rules::ARROWS
        .iter()
        .filter(|(module, _)| !left_out.contains(module));
    let expected = others.map(|(module, used)| {
        let used = used.iter().filter(|one| !basic.contains(one));
        (*module, used.copied().collect())
    });
    assert_eq!(arrows_of_the_map(&map), expected.collect());
}

#[test]
fn the_map_names_every_file_that_handles_grpc_codes() {
    let map = fs::read_to_string(root().join("docs/architecture.md")).expect("the map exists");
    let (_, rest) = map
        .split_once("**A final code means")
        .expect("the invariant");
    let (invariant, _) = rest.split_once("\n\n**").expect("the next invariant");
    for source in below("src") {
        let tokens = rules::production(&source);
        let handles_codes = tokens.iter().any(|token| token.text == "Code");
        assert!(
            !handles_codes || invariant.contains(&format!("`src/{}`", source.path)),
            "docs/architecture.md does not say what src/{} does with codes of gRPC",
            source.path
        );
    }
}

#[test]
fn every_request_with_a_field_has_a_fuzz_target() {
    let targets = ["src/service/request/fuzz.rs", "src/service/agent/fuzz.rs"]
        .map(|path| fs::read_to_string(root().join(path)).expect("the targets exist"))
        .concat();
    for path in ["proto/csi.proto", "proto/agent.proto"] {
        let proto = fs::read_to_string(root().join(path)).expect("the definition exists");
        for message in proto.split("\nmessage ").skip(1) {
            let (name, rest) = message.split_once(" {").expect("a body");
            let Some(call) = name.strip_suffix("Request") else {
                continue;
            };
            let body = rest.split("\n}").next().unwrap_or_default();
            let mut lines = body.lines().map(str::trim);
            // Secrets are not read.
            let is_field = |line: &str| line.ends_with(';') && !line.contains("csi_secret");
            let has_field = lines.any(|line| is_field(line) && !line.starts_with("option "));
            let target = format!("fuzz_message(\"{call}\"");
            assert!(
                !has_field || targets.contains(&target),
                "{path}: {name} has no fuzz target"
            );
        }
    }
}

#[test]
fn temporary_files_have_the_projects_prefix() {
    let nameless = [
        "tempfile::tempdir()",
        "tempfile::tempdir_in(",
        "TempDir::new()",
        "TempDir::new_in(",
        "NamedTempFile::new()",
        "NamedTempFile::new_in(",
    ];
    let tests = ["tests", "populate/tests", "kubectl-slackwater/tests"]
        .map(below)
        .into_iter()
        .flatten();
    let sources = sources().into_iter().chain(tests);
    for source in sources.filter(|source| !source.path.starts_with("unprivileged/shape")) {
        for word in nameless {
            assert!(
                !source.text.contains(word),
                "{}: {word} has no prefix `slackwater-` (CONTRIBUTING.md)",
                source.path
            );
        }
    }
}
