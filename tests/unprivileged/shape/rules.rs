//! The structural rules, each as a function from sources to complaints.

use crate::shape::tokens::{Token, tokens};

/// The maximum lines of code in a file. Lines of tests count half.
pub const FILE_LINES: usize = 400;
/// The maximum lines of a function, from `fn` to its closing brace.
pub const FUNCTION_LINES: usize = 70;

/// The modules that start the program: they may use all others, and no other module uses them.
const DOOR: &[&str] = &["main", "bin", "lib", "cli", "config", "doctor", "demo"];

/// Which module may use which. A module that is not listed may use nothing, and a new module must
/// be added here.
pub const ARROWS: &[(&str, &[&str])] = &[
    ("error", &[]),
    ("crc32c", &[]),
    ("thin_metadata", &["crc32c", "error"]),
    ("model", &["error"]),
    ("csi", &[]),
    // `cut` for the steps that are messages here.
    ("agent", &["cut", "model"]),
    ("tls", &["error"]),
    ("fault", &["error"]),
    (
        "host",
        &["crc32c", "thin_metadata", "fault", "model", "error"],
    ),
    ("record", &["host", "model", "error"]),
    (
        "backend",
        &[
            "host",
            "record",
            "thin_metadata",
            "crc32c",
            "model",
            "error",
        ],
    ),
    ("guard", &["fault", "host", "record", "model", "error"]),
    // The modules of that member itself: it uses nothing of the driver, and nothing uses it.
    (
        "populate",
        &[
            "config", "confine", "failure", "format", "net", "report", "source", "target",
        ],
    ),
    // The same for the plugin of kubectl, which is linked with nothing of the driver.
    (
        "kubectl-slackwater",
        &[
            "change",
            "cli",
            "cluster",
            "driver_pod",
            "failure",
            "listing",
            "model",
            "pools",
            "restore",
            "schedules",
            "text",
            "transfer",
        ],
    ),
    ("hook", &["host", "model", "error"]),
    (
        "cut",
        &[
            "fault", "guard", "backend", "host", "hook", "record", "model", "error",
        ],
    ),
    (
        "operation",
        &["cut", "backend", "host", "record", "model", "error"],
    ),
    ("telemetry", &["operation", "model", "error"]),
    (
        "service",
        &["operation", "telemetry", "agent", "csi", "model", "error"],
    ),
    // `service` for the table of codes and the parsing of requests, `operation` for the parsed
    // requests.
    (
        "router",
        &[
            "service",
            "operation",
            "cut",
            "hook",
            "telemetry",
            "agent",
            "tls",
            "csi",
            "fault",
            "model",
            "error",
        ],
    ),
    (
        "server",
        &[
            "service",
            "router",
            "operation",
            "telemetry",
            "agent",
            "tls",
            "csi",
            "model",
            "error",
        ],
    ),
];

/// Words that only some modules may contain, and why.
const WORDS: &[(&[&str], &[&str], &str)] = &[
    (
        &["tonic"],
        &[
            "service", "router", "server", "csi", "agent", "main", "demo",
        ],
        "the protocol ends at the edge",
    ),
    (
        &["kube"],
        &["hook", "router", "kubectl-slackwater"],
        "the driver of one node knows no cluster",
    ),
    (&["unsafe"], &["host"], "the kernel is behind one wall"),
    (
        &[
            "CloneWhole",
            "ClonePreFreeze",
            "CloneDelta",
            "CopyRange",
            "WriteRange",
            "Unshare",
            "RenewFsId",
        ],
        &["backend", "host"],
        "what an image is stored as is known to its backend alone",
    ),
    (
        &["POOL_FILE", "LOCK_FILE"],
        &["backend", "doctor"],
        "what the folder of a pool contains is known to its backend",
    ),
    (
        &["async", "await", "tokio"],
        &[
            "operation",
            "service",
            "router",
            "cut",
            "hook",
            "server",
            "tls",
            "telemetry",
            "main",
            "cli",
            "demo",
            "populate",
            "kubectl-slackwater",
        ],
        "blocking below, async above",
    ),
    (
        &["process::Command"],
        &["host", "demo"],
        "programs are started in one place",
    ),
    (
        &["sys_mount", "nix::mount", "libc"],
        &["host"],
        "the kernel is behind one wall",
    ),
];

/// What only the store of image files may contain, among the files of `backend`, `operation` and
/// `cut`. The place of a pool may contain them, too: a pool can be in an image itself.
const FILE_STORE_WORDS: &[&str] = &[
    "IMAGE",
    "Allocate",
    "Truncate",
    "MakeLike",
    "HintExtents",
    "Unshare",
    "RenewFsId",
    "CloneWhole",
    "ClonePreFreeze",
    "CloneDelta",
    "AttachLoop",
    "DetachLoop",
    "ResizeLoop",
    "RecreateLoop",
    "DisableDiscard",
    "loops_on",
    "loop_devices",
    "hold_loop",
    "backing_fs",
    "extent_count",
];

/// Which of them the store of thin devices may contain, too.
const THIN_STORE_WORDS: &[&str] = &["DisableDiscard", "RenewFsId", "backing_fs"];

/// A file of src/.
pub struct Source {
    /// Its path within src/, such as `backend/file.rs`.
    pub path: String,
    /// Its text.
    pub text: String,
}

/// All violations in the sources.
pub fn complaints(sources: &[Source]) -> Vec<String> {
    sources.iter().flat_map(complaints_of).collect()
}

fn complaints_of(source: &Source) -> Vec<String> {
    let all = tokens(&source.text);
    let production = production(source);
    let mut found = Vec::new();
    found.extend(first_line(source));
    found.extend(size(source, &all, &production));
    found.extend(functions(source, &all));
    found.extend(arrows(source, &production));
    found.extend(words(source, &production));
    found.extend(unfinished(source));
    found
}

/// Whether a file is the module of `#[cfg(test)] mod tests;` or `mod fuzz;`, or below it.
pub fn is_test(path: &str) -> bool {
    path.ends_with("/tests.rs") || path.contains("/tests/") || path.ends_with("fuzz.rs")
}

/// The tokens of a file without its tests.
pub fn production(source: &Source) -> Vec<Token> {
    match is_test(&source.path) {
        true => Vec::new(),
        false => without_tests(&tokens(&source.text)),
    }
}

/// The top-level module that a file belongs to.
pub fn module_of(path: &str) -> &str {
    path.split('/')
        .next()
        .unwrap_or(path)
        .trim_end_matches(".rs")
}

fn first_line(source: &Source) -> Option<String> {
    (!source.text.starts_with("//!")).then(|| {
        format!(
            "{}: does not begin with a //! comment about its purpose",
            source.path
        )
    })
}

/// The number of lines with code; those of tests count half.
fn size(source: &Source, all: &[Token], production: &[Token]) -> Option<String> {
    let lines = |tokens: &[Token]| {
        let mut lines: Vec<_> = tokens.iter().map(|token| token.line).collect();
        lines.dedup();
        lines.len()
    };
    let code = lines(production);
    let tests = lines(all) - code;
    let weight = code + tests / 2;
    (weight > FILE_LINES).then(|| {
        format!(
            "{}: {code} lines of code and {tests} of tests; at most {FILE_LINES}, tests half",
            source.path
        )
    })
}

fn functions(source: &Source, all: &[Token]) -> Vec<String> {
    let mut found = Vec::new();
    for (at, token) in all.iter().enumerate() {
        let named = all.get(at + 1).is_some_and(|next| is_word(&next.text));
        if token.text != "fn" || !named {
            continue;
        }
        let Some(open) = body(all, at) else { continue };
        let end = closing(all, open).map_or(token.line, |close| all[close].line);
        let lines = end - token.line + 1;
        if lines > FUNCTION_LINES {
            let name = &all[at + 1].text;
            found.push(format!(
                "{}:{}: fn {name} has {lines} lines; at most {FUNCTION_LINES}",
                source.path, token.line
            ));
        }
    }
    found
}

/// The opening brace of a function's body; `None` for a signature alone.
fn body(all: &[Token], from: usize) -> Option<usize> {
    let mut depth = 0;
    for (at, token) in all.iter().enumerate().skip(from) {
        match token.text.as_str() {
            "(" | "[" => depth += 1,
            ")" | "]" => depth -= 1,
            "{" if depth == 0 => return Some(at),
            ";" if depth == 0 => return None,
            _ => {}
        }
    }
    None
}

/// The brace that closes the one at `open`.
pub fn closing(all: &[Token], open: usize) -> Option<usize> {
    let mut depth = 0;
    for (at, token) in all.iter().enumerate().skip(open) {
        match token.text.as_str() {
            "{" => depth += 1,
            "}" => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return Some(at);
        }
    }
    None
}

/// The tokens without modules, functions and imports marked `#[cfg(test)]`.
fn without_tests(all: &[Token]) -> Vec<Token> {
    let mut kept = Vec::new();
    let mut at = 0;
    while at < all.len() {
        if !says(all, at, &["#", "[", "cfg", "(", "test", ")", "]"]) {
            kept.push(all[at].clone());
            at += 1;
            continue;
        }
        let end = match body(all, at + 7) {
            Some(open) => closing(all, open),
            None => (at..all.len()).find(|at| all[*at].text == ";"),
        };
        at = end.map_or(all.len(), |end| end + 1);
    }
    kept
}

fn says(all: &[Token], at: usize, texts: &[&str]) -> bool {
    texts
        .iter()
        .enumerate()
        .all(|(n, text)| all.get(at + n).is_some_and(|token| token.text == *text))
}

pub fn is_word(text: &str) -> bool {
    text.starts_with(|c: char| c.is_alphabetic() || c == '_')
}

fn arrows(source: &Source, production: &[Token]) -> Vec<String> {
    let from = module_of(&source.path);
    let mut found = Vec::new();
    for (to, line) in uses(&source.path, production) {
        if to == from || DOOR.contains(&from) {
            continue;
        }
        let allowed = ARROWS.iter().find(|(module, _)| *module == from);
        let place = format!("{}:{line}", source.path);
        match allowed {
            None => found.push(format!("{place}: module {from} has no row in ARROWS")),
            Some((_, to_these)) if to_these.contains(&to.as_str()) => {}
            Some((_, to_these)) => found.push(format!(
                "{place}: {from} -> {to} is against the arrows; {from} may use {}",
                if to_these.is_empty() {
                    "nobody".to_string()
                } else {
                    to_these.join(", ")
                }
            )),
        }
    }
    found
}

/// The top-level modules that a file names, with the line.
pub fn uses(path: &str, tokens: &[Token]) -> Vec<(String, usize)> {
    let deep = depth(path);
    let mut inside: Vec<usize> = Vec::new(); // closing braces of inline modules
    let mut found = Vec::new();
    for (at, token) in tokens.iter().enumerate() {
        inside.retain(|close| at < *close);
        if token.text == "mod" && tokens.get(at + 2).is_some_and(|token| token.text == "{") {
            inside.extend(closing(tokens, at + 2));
        }
        let after = match token.text.as_str() {
            "crate" | "slackwater" | "slackwater_core" if says(tokens, at + 1, &[":", ":"]) => {
                at + 3
            }
            "super" if !is_path_end(tokens, at) => match supers(tokens, at) {
                (count, after) if count == deep + inside.len() => after,
                _ => continue,
            },
            _ => continue,
        };
        found.extend(heads(tokens, after));
    }
    found
}

/// The number of modules above a file: 1 for `host.rs`, 2 for `host/linux.rs`.
fn depth(path: &str) -> usize {
    match path {
        "lib.rs" | "main.rs" => 0,
        _ => path.split('/').count() - usize::from(path.ends_with("/mod.rs")),
    }
}

/// Whether this `super` continues an earlier one.
fn is_path_end(tokens: &[Token], at: usize) -> bool {
    at >= 3 && says(tokens, at - 3, &["super", ":", ":"])
}

/// The number of `super::` from here, and the tokens that follow them.
fn supers(tokens: &[Token], at: usize) -> (usize, usize) {
    let mut count = 0;
    while says(tokens, at + 3 * count, &["super", ":", ":"]) {
        count += 1;
    }
    (count, at + 3 * count)
}

/// The first words of a path, or of each path in a group.
fn heads(tokens: &[Token], at: usize) -> Vec<(String, usize)> {
    let Some(first) = tokens.get(at) else {
        return Vec::new();
    };
    if first.text != "{" {
        return vec![(first.text.clone(), first.line)];
    }
    let mut found = Vec::new();
    let mut depth = 0;
    let mut expect = true;
    for token in &tokens[at..] {
        match token.text.as_str() {
            "{" => depth += 1,
            "}" => depth -= 1,
            "," if depth == 1 => expect = true,
            text if expect && depth == 1 && is_word(text) => {
                found.push((token.text.clone(), token.line));
                expect = false;
            }
            _ => {}
        }
        if depth == 0 {
            break;
        }
    }
    found
}

fn words(source: &Source, production: &[Token]) -> Vec<String> {
    let module = module_of(&source.path);
    let mut found = Vec::new();
    for (words, allowed, why) in WORDS {
        if allowed.contains(&module) {
            continue;
        }
        for word in *words {
            for line in lines_saying(production, word) {
                found.push(format!(
                    "{}:{line}: contains {word}, which is allowed only in {}: {why}",
                    source.path,
                    allowed.join(", ")
                ));
            }
        }
    }
    let is_in = |module: &str| {
        let rest = source.path.strip_prefix(module);
        rest.is_some_and(|rest| rest.starts_with(['.', '/']))
    };
    let is_free = is_in("backend/file") || is_in("backend/place");
    let is_thin_store = source.path.starts_with("backend/thin");
    for word in FILE_STORE_WORDS {
        if is_free || !is_without_file_store(&source.path, word) {
            continue;
        }
        if is_thin_store && THIN_STORE_WORDS.contains(word) {
            continue;
        }
        for line in lines_saying(production, word) {
            found.push(format!(
                "{}:{line}: contains {word}, which is allowed only in backend/file: records and life cycle are the same for all kinds of pools",
                source.path
            ));
        }
    }
    found
}

/// Whether a file outside of the store of image files may not contain one of its words.
fn is_without_file_store(path: &str, word: &str) -> bool {
    // Some of the words are refused everywhere above the backend.
    let is_refused = WORDS.iter().any(|(words, ..)| words.contains(&word));
    match module_of(path) {
        "backend" => true,
        "operation" | "cut" => !is_refused,
        _ => false,
    }
}

/// Lines that contain a word, or a path of two words, also within a group.
fn lines_saying(tokens: &[Token], word: &str) -> Vec<usize> {
    let (outer, inner) = word.split_once("::").unwrap_or((word, ""));
    let hits = tokens.iter().enumerate().filter(|(at, token)| {
        token.text == outer
            && (inner.is_empty()
                || says(tokens, at + 1, &[":", ":"])
                    && heads(tokens, at + 3).iter().any(|(head, _)| head == inner))
    });
    hits.map(|(_, token)| token.line).collect()
}

/// Marks of unfinished work, also in comments.
fn unfinished(source: &Source) -> Vec<String> {
    let marks = ["TODO", "FIXME", "HACK"];
    let lines = source.text.lines().enumerate();
    lines
        .filter(|(_, line)| {
            line.split(|c: char| !c.is_alphanumeric())
                .any(|word| marks.contains(&word))
        })
        .map(|(n, line)| format!("{}:{}: unfinished: {}", source.path, n + 1, line.trim()))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn judge(path: &str, text: &str) -> Vec<String> {
        complaints(&[Source {
            path: path.into(),
            text: format!("//! x\n{text}"),
        }])
    }

    #[track_caller]
    fn refused(path: &str, text: &str, because: &str) {
        let found = judge(path, text);
        assert!(
            found.len() == 1 && found[0].contains(because),
            "{path}: {text}: {found:?}"
        );
    }

    #[track_caller]
    fn fine(path: &str, text: &str) {
        assert_eq!(judge(path, text), Vec::<String>::new(), "{path}: {text}");
    }

    #[test]
    fn a_forbidden_dependency_is_found_however_it_is_written() {
        refused(
            "host.rs",
            "use crate::operation::Driver;",
            "host -> operation",
        );
        refused(
            "host/linux.rs",
            "use crate::{error::Error, backend::{A, B}};",
            "host -> backend",
        );
        refused(
            "model/id.rs",
            "fn f() { crate::host::now() }",
            "model -> host",
        );
        refused("error.rs", "use super::model::VolumeId;", "error -> model");
        refused(
            "host/linux.rs",
            "use super::super::record::Record;",
            "host -> record",
        );
        refused(
            "model/id.rs",
            "mod inner { use super::super::super::csi::X; }",
            "model -> csi",
        );
        refused(
            "operation.rs",
            "use crate::cli::Arguments;",
            "operation -> cli",
        );
        refused(
            "service.rs",
            "use slackwater::backend::Backend;",
            "service -> backend",
        );
    }

    #[test]
    fn allowed_dependencies_and_the_top_modules_are_accepted() {
        fine(
            "backend/file.rs",
            "use super::{Admit, file}; use crate::host::{Host, effect::Effect};",
        );
        fine(
            "main.rs",
            "use slackwater::{cli, server, host::linux::LinuxHost};",
        );
        fine(
            "model/id.rs",
            "#[cfg(test)] mod tests { use crate::host::memory::MemoryHost; }",
        );
        fine(
            "model/id.rs",
            "// crate::host\nconst X: &str = \"crate::host::Host\";",
        );
    }

    #[test]
    fn a_module_without_a_row_is_found() {
        refused("gossip.rs", "use crate::model::VolumeId;", "no row");
    }

    #[test]
    fn words_of_one_module_are_found_elsewhere() {
        refused(
            "operation/stage.rs",
            "fn f(s: tonic::Status) {}",
            "contains tonic",
        );
        refused("service.rs", "use kube::Client;", "contains kube");
        refused("backend.rs", "fn f() { unsafe { g() } }", "contains unsafe");
        refused(
            "operation/snapshot.rs",
            "fn f() { g(Effect::CloneWhole { source, target }) }",
            "contains CloneWhole",
        );
        refused(
            "operation.rs",
            "use std::process::{self, Command};",
            "contains process::Command",
        );
        refused(
            "record.rs",
            "fn f() { std::process::Command::new(x); }",
            "contains process::Command",
        );
        refused("backend/file.rs", "async fn f() {}", "contains async");
        refused(
            "backend/pool.rs",
            "fn f() { g(Effect::DetachLoop { number, backing }) }",
            "contains DetachLoop",
        );
        let detach = "fn f() { g(Effect::DetachLoop { number, backing }) }";
        refused("cut/begin.rs", detach, "contains DetachLoop");
        refused("operation/volume/expand.rs", detach, "contains DetachLoop");
        let recreate = "fn f() { g(Effect::RecreateLoop { number }) }";
        fine("backend/place/image.rs", recreate);
        refused(
            "operation/pools/admin.rs",
            recreate,
            "contains RecreateLoop",
        );
        fine("backend/file/device.rs", "fn f() { host.loops_on(path) }");
        fine(
            "host/linux.rs",
            "fn f() { unsafe { g() } std::process::Command::new(x); }",
        );
        fine(
            "cli.rs",
            "enum Command { A } fn f() { std::process::exit(1) }",
        );
    }

    #[test]
    fn a_long_function_is_found_by_name() {
        let body = "    x();\n".repeat(FUNCTION_LINES - 1);
        refused(
            "model.rs",
            &format!("fn long() {{\n{body}}}"),
            "fn long has 71 lines",
        );
        let body = "    x();\n".repeat(FUNCTION_LINES - 2);
        fine("model.rs", &format!("fn short() {{\n{body}}}"));
        fine(
            "model.rs",
            &format!(
                "trait T {{\n    fn f();\n{}}}",
                "    const X: u8;\n".repeat(90)
            ),
        );
    }

    #[test]
    fn a_long_file_is_found_and_its_tests_count_half() {
        let line = "const X: u8 = 0;\n";
        refused(
            "model.rs",
            &line.repeat(FILE_LINES + 1),
            "401 lines of code",
        );
        let tests = format!("#[cfg(test)]\nmod tests {{\n{}}}\n", line.repeat(397));
        fine("model.rs", &format!("{}{tests}", line.repeat(200)));
        refused(
            "model.rs",
            &format!("{}{tests}", line.repeat(201)),
            "400 of tests",
        );
        fine("model.rs", &"// a comment\n\n".repeat(900));
    }

    #[test]
    fn a_file_without_a_description_is_found() {
        let found = complaints(&[Source {
            path: "model.rs".into(),
            text: "use std::fmt;".into(),
        }]);
        assert!(
            found[0].contains("does not begin with a //! comment"),
            "{found:?}"
        );
    }

    #[test]
    fn marks_of_unfinished_work_are_found_in_comments_too() {
        refused("model.rs", "// TODO: more", "unfinished");
        fine("model.rs", "const TODOS: u8 = 0; // all done");
    }
}
