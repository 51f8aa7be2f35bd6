//! Arrows between files of one module, by imports and by calls.
//!
//! Rust puts no order on the files of a module, and a method may be called from any of them. So
//! this resolves `self.name(…)`, `value.name(…)`, `value.field.name(…)` and `Type::name(…)` to the
//! file that defines the method, where a field, parameter or variable declares the type of the
//! value. Calls on other expressions are not seen. A file and the files in the folder of its name
//! count as one.

use std::collections::{BTreeMap, BTreeSet};

use crate::shape::rules::{self, Source};
use crate::shape::tokens::Token;

/// For each file the files that it uses, with a name that it uses there.
pub type Arrows = BTreeMap<String, BTreeMap<String, String>>;

struct File<'a> {
    path: &'a str,
    tokens: Vec<Token>,
    impls: Vec<Impl>,
}

/// One `impl` block: its type, its tokens, and the functions in it.
struct Impl {
    of: String,
    range: std::ops::Range<usize>,
    functions: BTreeSet<String>,
}

/// The types of the fields of structs, by struct and field.
type Fields<'a> = BTreeMap<(&'a str, &'a str), String>;

/// The arrows between the files of a module, such as `operation`.
pub fn arrows(sources: &[Source], module: &str) -> Arrows {
    let root = format!("{module}.rs");
    let below = format!("{module}/");
    let inside = |source: &&Source| source.path == root || source.path.starts_with(&below);
    let files: Vec<File> = sources
        .iter()
        .filter(inside)
        .filter(|source| !rules::is_test(&source.path))
        .map(|source| {
            let tokens = rules::production(source);
            let impls = impls(&tokens);
            let path = source.path.as_str();
            File {
                path,
                tokens,
                impls,
            }
        })
        .collect();
    let fields: Fields = files.iter().flat_map(fields).collect();
    let mut found = Arrows::new();
    for file in &files {
        let used = imports(file, &files).into_iter();
        let used = used.chain(calls(file, &files, &fields));
        for (to, name) in used.filter(|(to, _)| !is_one(file.path, to)) {
            found
                .entry(file.path.to_string())
                .or_default()
                .entry(to)
                .or_insert(name);
        }
    }
    found
}

/// Whether one of two files is the other, or is in the folder of the other's name.
fn is_one(one: &str, other: &str) -> bool {
    let holds = |outer: &str, inner: &str| inner.starts_with(&format!("{}/", stem(outer)));
    one == other || holds(one, other) || holds(other, one)
}

fn stem(path: &str) -> &str {
    path.trim_end_matches(".rs")
}

/// Arrows that are part of a cycle: both ends can reach each other.
pub fn cycles(arrows: &Arrows) -> Vec<(String, String, String)> {
    let reach = |from: &str| {
        let mut seen = BTreeSet::new();
        let mut next = vec![from.to_string()];
        while let Some(at) = next.pop() {
            for to in arrows.get(&at).into_iter().flat_map(BTreeMap::keys) {
                if seen.insert(to.clone()) {
                    next.push(to.clone());
                }
            }
        }
        seen
    };
    let reached: BTreeMap<_, _> = arrows.keys().map(|from| (from, reach(from))).collect();
    let each = arrows
        .iter()
        .flat_map(|(from, to)| to.iter().map(move |(to, name)| (from, to, name)));
    each.filter(|(from, to, _)| reached.get(to).is_some_and(|back| back.contains(*from)))
        .map(|(from, to, name)| (from.clone(), to.clone(), name.clone()))
        .collect()
}

/// The text of a token, or nothing at the end.
fn text(tokens: &[Token], at: usize) -> &str {
    tokens.get(at).map_or("", |token| token.text.as_str())
}

fn is_path(tokens: &[Token], at: usize) -> bool {
    text(tokens, at) == ":" && text(tokens, at + 1) == ":"
}

/// After the generic parameters that begin at `at`, if any do.
fn after_generics(tokens: &[Token], at: usize) -> usize {
    if text(tokens, at) != "<" {
        return at;
    }
    let mut depth = 0;
    for next in at..tokens.len() {
        match text(tokens, next) {
            "<" => depth += 1,
            ">" if text(tokens, next - 1) != "-" => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return next + 1;
        }
    }
    tokens.len()
}

/// The last name of the type at `at`, without references, smart pointers and parameters.
fn type_name(tokens: &[Token], mut at: usize) -> String {
    let mut name = String::new();
    loop {
        match text(tokens, at) {
            "&" | "mut" | "'" | "dyn" => at += 1,
            "Arc" | "Box" if text(tokens, at + 1) == "<" => at += 2,
            word if rules::is_word(word) => {
                name = word.to_string();
                at += 1;
                match is_path(tokens, at) {
                    true => at += 2,
                    // A lifetime: of `&'a T` the tick is not a token.
                    false if rules::is_word(text(tokens, at)) && word.len() == 1 => {}
                    false => return name,
                }
            }
            _ => return name,
        }
    }
}

fn impls(tokens: &[Token]) -> Vec<Impl> {
    let mut found = Vec::new();
    for at in 0..tokens.len() {
        let starts = at == 0 || matches!(text(tokens, at - 1), "}" | ";" | "]" | "{");
        if text(tokens, at) != "impl" || !starts {
            continue;
        }
        let head = after_generics(tokens, at + 1);
        let Some(open) = (head..tokens.len()).find(|at| text(tokens, *at) == "{") else {
            continue;
        };
        let close = rules::closing(tokens, open).unwrap_or(tokens.len());
        let of = (head..open).find(|at| text(tokens, *at) == "for");
        let names = (open..close).filter(|at| text(tokens, *at) == "fn");
        found.push(Impl {
            of: type_name(tokens, of.map_or(head, |of| of + 1)),
            range: open..close,
            functions: names.map(|at| text(tokens, at + 1).to_string()).collect(),
        });
    }
    found
}

/// The files that define a method of a type.
fn definers<'a>(files: &'a [File<'a>], of: &str, name: &str) -> Vec<&'a str> {
    let defines = |file: &&File| {
        let mut impls = file.impls.iter();
        impls.any(|one| one.of == of && one.functions.contains(name))
    };
    let found = files.iter().filter(defines);
    found.map(|file| file.path).collect()
}

/// The declared types of fields, parameters and variables, `name: Type`.
fn declared(tokens: &[Token]) -> BTreeMap<&str, String> {
    let mut found = BTreeMap::new();
    for at in 1..tokens.len() {
        let is_single = text(tokens, at - 1) != ":" && text(tokens, at + 1) != ":";
        let name = text(tokens, at - 1);
        if text(tokens, at) == ":" && is_single && rules::is_word(name) {
            found.insert(name, type_name(tokens, at + 1));
        }
    }
    found
}

/// The fields of the structs of a file, with their types.
fn fields<'a>(file: &'a File) -> Vec<((&'a str, &'a str), String)> {
    let tokens = &file.tokens;
    let mut found = Vec::new();
    for at in (0..tokens.len()).filter(|at| text(tokens, *at) == "struct") {
        let open = after_generics(tokens, at + 2);
        if text(tokens, open) == "{" {
            let close = rules::closing(tokens, open).unwrap_or(tokens.len());
            let each = declared(&tokens[open..close]).into_iter();
            found.extend(each.map(|(name, of)| ((text(tokens, at + 1), name), of)));
        }
    }
    found
}

/// The possible types of the value that ends with the word at `at`, such as `self.field`. The
/// fields of a value of unknown type may be those of any struct.
fn types_of<'a>(
    file: &'a File,
    at: usize,
    variables: &'a BTreeMap<&str, String>,
    fields: &'a Fields,
) -> Vec<&'a str> {
    let word = text(&file.tokens, at);
    if at > 1 && text(&file.tokens, at - 1) == "." {
        let holders = types_of(file, at - 2, variables, fields);
        let is_it = |(holder, field): &(&str, &str)| {
            *field == word && (holders.is_empty() || holders.contains(holder))
        };
        let found = fields.iter().filter(|(field, _)| is_it(field));
        return found.map(|(_, of)| of.as_str()).collect();
    }
    let found = match word {
        "self" | "Self" => {
            let mut impls = file.impls.iter();
            impls
                .find(|one| one.range.contains(&at))
                .map(|one| one.of.as_str())
        }
        word if word.starts_with(char::is_uppercase) => Some(word),
        word => variables.get(word).map(String::as_str),
    };
    found.into_iter().collect()
}

/// The files whose methods a file calls, with the name of the method.
fn calls(file: &File, files: &[File], fields: &Fields) -> Vec<(String, String)> {
    let variables = declared(&file.tokens);
    let tokens = &file.tokens;
    let mut found = Vec::new();
    for at in 1..tokens.len() {
        let name = text(tokens, at);
        let is_call =
            text(tokens, at + 1) == "(" || is_path(tokens, at + 1) && text(tokens, at + 3) == "<";
        if !rules::is_word(name) || !is_call {
            continue;
        }
        let value = match text(tokens, at - 1) {
            "." if at > 1 => at - 2,
            ":" if at > 2 => at - 3,
            _ => continue,
        };
        let of = types_of(file, value, &variables, fields).into_iter();
        let to: Vec<_> = of.flat_map(|of| definers(files, of, name)).collect();
        if !to.contains(&file.path) {
            found.extend(to.into_iter().map(|to| (to.to_string(), name.to_string())));
        }
    }
    found
}

/// The files that a file imports from or names by a path, with the first name of each.
fn imports(file: &File, files: &[File]) -> Vec<(String, String)> {
    let mut found = Vec::new();
    for (at, token) in file.tokens.iter().enumerate() {
        let base = match token.text.as_str() {
            "crate" => Vec::new(),
            "super" if at < 3 || text(&file.tokens, at - 3) != "super" => segments(file.path),
            _ => continue,
        };
        if is_path(&file.tokens, at + 1) {
            for path in paths(&file.tokens, at).0 {
                found.extend(resolve(base.clone(), &path, files));
            }
        }
    }
    found
}

fn segments(path: &str) -> Vec<String> {
    stem(path).split('/').map(str::to_string).collect()
}

/// The paths of a tree such as `a::{b, c::d}` at `at`, and where it ends.
fn paths(tokens: &[Token], mut at: usize) -> (Vec<Vec<String>>, usize) {
    let mut head = Vec::new();
    loop {
        if text(tokens, at) == "{" {
            let mut all = Vec::new();
            at += 1;
            while !matches!(text(tokens, at), "}" | "") {
                let (inner, end) = paths(tokens, at);
                all.extend(inner.into_iter().map(|path| [head.clone(), path].concat()));
                at = (end..tokens.len())
                    .find(|at| matches!(text(tokens, *at), "," | "}"))
                    .unwrap_or(tokens.len());
                at += usize::from(text(tokens, at) == ",");
            }
            return (all, at + 1);
        }
        head.push(text(tokens, at).to_string());
        at += 1;
        match is_path(tokens, at) && text(tokens, at + 2) != "<" {
            true => at += 2,
            false => return (vec![head], at),
        }
    }
}

/// The file that a path leads to, through `pub use` of the files above it.
fn resolve(base: Vec<String>, path: &[String], files: &[File]) -> Option<(String, String)> {
    let mut at = base;
    let mut rest = path.iter().peekable();
    while let Some(word) = rest.peek() {
        match word.as_str() {
            "crate" => at.clear(),
            "super" => {
                at.pop();
            }
            "self" => {}
            word => {
                let next = format!("{}.rs", [&at[..], &[word.to_string()]].concat().join("/"));
                if !files.iter().any(|file| file.path == next) {
                    break;
                }
                at.push(word.to_string());
            }
        }
        rest.next();
    }
    let here = format!("{}.rs", at.join("/"));
    let file = files.iter().find(|file| file.path == here)?;
    let name = rest.next().map_or("", String::as_str);
    for (start, token) in file.tokens.iter().enumerate() {
        if token.text == "use" && start > 0 && text(&file.tokens, start - 1) == "pub" {
            for shown in paths(&file.tokens, start + 1).0 {
                if !name.is_empty()
                    && shown.last().is_some_and(|last| last == name)
                    && shown.len() > 1
                {
                    return resolve(at, &shown, files);
                }
            }
        }
    }
    Some((here, name.to_string()))
}
