//! Checks that this program reads the files in `tests/formats`, which programs of earlier releases
//! have written, and writes them back byte for byte.
//!
//! The keys of records are names of Rust fields. A field that is renamed without `serde(rename)`
//! would read as absent, so a file in this directory is never changed: a new form of a record gets
//! a new file. `UPDATE_FORMATS=1 cargo test --lib` writes the files that are missing, and no
//! others.

#![allow(clippy::unwrap_used, reason = "of tests alone")]

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::path::{Path, PathBuf};

use super::{Record, decode, encode};

fn folder(kind: &str) -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    root.join("../tests/formats").join(kind)
}

/// Names and contents of the files of a kind.
pub fn files(kind: &str) -> BTreeMap<String, Vec<u8>> {
    let Ok(entries) = std::fs::read_dir(folder(kind)) else {
        return BTreeMap::new();
    };
    entries
        .map(|entry| {
            let entry = entry.unwrap();
            let name = entry.file_name().into_string().unwrap();
            (name, std::fs::read(entry.path()).unwrap())
        })
        .collect()
}

/// Compares the files of a kind with what this program reads and writes.
#[expect(clippy::disallowed_methods, reason = "a test writes its own files")]
#[track_caller]
pub fn check_with<T: PartialEq + Debug>(
    kind: &str,
    expected: Vec<(&str, T)>,
    read: impl Fn(&[u8]) -> T,
    write: impl Fn(&T) -> Vec<u8>,
) {
    if std::env::var_os("UPDATE_FORMATS").is_some() {
        std::fs::create_dir_all(folder(kind)).unwrap();
        for (name, value) in &expected {
            let path = folder(kind).join(name);
            if !path.exists() {
                std::fs::write(path, write(value)).unwrap();
            }
        }
    }
    let files = files(kind);
    for (name, value) in &expected {
        let file = files.get(*name);
        let file = file.unwrap_or_else(|| panic!("{kind}/{name} is missing: UPDATE_FORMATS=1"));
        assert_eq!(read(file), *value, "{kind}/{name}");
    }
    for (name, bytes) in files {
        let written = write(&read(&bytes));
        assert!(
            written == bytes,
            "{kind}/{name} is written as \"{}\", but has \"{}\"",
            written.escape_ascii(),
            bytes.escape_ascii()
        );
    }
}

/// Like [`check_with`], for a kind of record.
#[track_caller]
pub fn check<T: Record + PartialEq + Debug>(kind: &str, expected: Vec<(&str, T)>) {
    let path = folder(kind);
    let read = |bytes: &[u8]| decode::<T>(&path, bytes).unwrap();
    let write = |record: &T| encode(&path, None, record).unwrap();
    check_with(kind, expected, read, write);
}

#[cfg(test)]
mod records;
#[cfg(test)]
mod snapshots;
#[cfg(test)]
mod thin;
