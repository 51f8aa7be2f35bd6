//! Durable state: the records of volumes and pools, which are stored with the data, and the node's
//! record.
//!
//! A record is JSON with a version. It is written to a temporary file, fsynced and renamed over the
//! old one, and the directory is fsynced: after a crash either the old record or the new one
//! exists. Several records are written in the same steps, which the file system can do together; a
//! crash leaves the old or the new one of each, in any combination. A record of a newer version is
//! refused and never overwritten; an older one is read with today's defaults.
//!
//! After a rollback, a program may read fields that only a newer program knows. It keeps the fields
//! that it does not know when it writes the record again, also in nested objects. So a new field
//! must be one that an older program may ignore; a field that changes the meaning of a record
//! raises the version that is written for it ([`Record::written_version`]), and older programs
//! refuse that record.

pub mod image;
pub mod lvm_filter;
pub mod node;
pub mod pool;
pub mod snapshot;
pub mod volume;

use std::path::{Path, PathBuf};

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::error::{Error, ErrorContext, Result};
use crate::host::{Effect, Host};

pub use image::ImageRecord;
pub use lvm_filter::LvmFilterRecord;
pub use node::NodeRecord;
pub use pool::PoolRecord;
pub use snapshot::{
    Base, CopyProgress, GroupMembership, SnapshotOrigin, SnapshotRecord, SnapshotState,
};
pub use volume::{
    ContentSource, Formatted, FormattedAs, GrowthProgress, LastStage, Reverted, Reverting, Spare,
    VolumeRecord, VolumeState,
};

/// A value that is stored as a file.
pub trait Record: Serialize + DeserializeOwned {
    /// The newest version that this program reads.
    const VERSION: u32;
    /// What error messages call such a file: "record of a volume".
    const WHAT: &'static str;

    /// The version that is written: the lowest whose programs understand this record. It depends on
    /// the content, so that a record that uses no newer feature can still be read after a rollback.
    fn written_version(&self) -> u32 {
        1
    }
}

/// Suffix of the temporary file of a record.
const TEMPORARY: &str = ".new";

fn bug<T: Record>(error: serde_json::Error) -> Error {
    Error::Bug {
        invariant: format!("{} as JSON: {error}", T::WHAT),
    }
}

/// The record as JSON, with its version.
fn value<T: Record>(record: &T) -> Result<Value> {
    let mut value = serde_json::to_value(record).map_err(bug::<T>)?;
    if let Some(object) = value.as_object_mut() {
        object.insert("version".into(), record.written_version().into());
    }
    Ok(value)
}

/// Encodes a record with its version, and with those fields of the present file at `path` that this
/// program does not know.
fn encode<T: Record>(path: &Path, present: Option<&[u8]>, record: &T) -> Result<Vec<u8>> {
    let mut encoded = value(record)?;
    if let Some(bytes) = present {
        let known = value(&decode::<T>(path, bytes)?)?;
        // A field that this program skips may still be one that it cannot keep.
        let present = serde_json::from_slice(bytes).map_err(|error| Error::Damaged {
            path: path.to_path_buf(),
            problem: format!("not a {}: {error}", T::WHAT),
        })?;
        keep_unknown(&present, &known, &mut encoded);
    }
    let mut bytes = serde_json::to_vec_pretty(&encoded).map_err(bug::<T>)?;
    bytes.push(b'\n');
    Ok(bytes)
}

/// Adds to `next` the fields that `present` has beyond `known`, which is `present` as this program
/// reads it. Objects in arrays are matched by position if the array keeps its length.
fn keep_unknown(present: &Value, known: &Value, next: &mut Value) {
    match (present, known, next) {
        (Value::Object(present), Value::Object(known), Value::Object(next)) => {
            for (key, there) in present {
                match (known.get(key), next.get_mut(key)) {
                    (Some(known), Some(next)) => keep_unknown(there, known, next),
                    (None, None) => drop(next.insert(key.clone(), there.clone())),
                    // This program removed the field, or knows it and omits its default.
                    (Some(_), None) | (None, Some(_)) => {}
                }
            }
        }
        (Value::Array(present), Value::Array(known), Value::Array(next))
            if known.len() == next.len() =>
        {
            let elements = present.iter().zip(known).zip(next);
            elements.for_each(|((present, known), next)| keep_unknown(present, known, next));
        }
        _ => {}
    }
}

/// Decodes a record; `path` is used in the error.
pub fn decode<T: Record>(path: &Path, bytes: &[u8]) -> Result<T> {
    let damaged = |problem: String| Error::Damaged {
        path: path.to_path_buf(),
        problem,
    };
    let unreadable = |error: serde_json::Error| damaged(format!("not a {}: {error}", T::WHAT));
    /// Decoded first, because a newer version may differ in everything else.
    #[derive(serde::Deserialize)]
    struct Version {
        version: u32,
    }
    let Version { version } = serde_json::from_slice(bytes).map_err(unreadable)?;
    if version > T::VERSION {
        return Err(damaged(format!(
            "{} has version {version}, but this program supports versions up to {}; use the newer program",
            T::WHAT,
            T::VERSION
        )));
    }
    serde_json::from_slice(bytes).map_err(unreadable)
}

/// Reads a record; `None` if the file does not exist.
pub fn load<T: Record>(host: &dyn Host, path: &Path) -> Result<Option<T>> {
    match host
        .read_file(path)
        .context(|| format!("read {}", T::WHAT))?
    {
        Some(bytes) => decode(path, &bytes).map(Some),
        None => Ok(None),
    }
}

/// Writes a record durably. A crash leaves the old or the new record, and perhaps a temporary file,
/// which the next write replaces. A file that cannot be read as such a record is not replaced.
pub fn store<T: Record>(host: &dyn Host, path: &Path, record: &T) -> Result<()> {
    store_all(host, &[(path.to_path_buf(), record)], None)
}

/// Writes several records durably, as [`store`] writes each. After an error or a crash, each record is
/// the old or the new one. `parent` is a directory in which the directories of the records were
/// created. Its entries are made durable before any record can be read.
pub fn store_all<T: Record>(
    host: &dyn Host,
    records: &[(PathBuf, &T)],
    parent: Option<&Path>,
) -> Result<()> {
    let encoded = records.iter().map(|(path, record)| {
        let present = host.read_file(path);
        let present = present.context(|| format!("read {}", T::WHAT))?;
        encode(path, present.as_deref(), *record)
    });
    let encoded: Vec<Vec<u8>> = encoded.collect::<Result<_>>()?;
    let temporary = |(path, _): &(PathBuf, &T)| {
        let mut name = path.as_os_str().to_owned();
        name.push(TEMPORARY);
        PathBuf::from(name)
    };
    let temporary: Vec<PathBuf> = records.iter().map(temporary).collect();
    let directories = records.iter().filter_map(|(path, _)| path.parent());
    let directories: Vec<PathBuf> = directories.map(Path::to_path_buf).collect();
    let first: Vec<PathBuf> = temporary
        .iter()
        .map(PathBuf::as_path)
        .chain(parent)
        .map(Path::to_path_buf)
        .collect();
    let write = || {
        for (path, bytes) in temporary.iter().zip(&encoded) {
            host.perform(&Effect::WriteFile { path, bytes })?;
        }
        match &first[..] {
            [path] => host.perform(&Effect::SyncFile { path })?,
            paths => host.perform(&Effect::SyncAll { paths })?,
        };
        for (from, (to, _)) in temporary.iter().zip(records) {
            host.perform(&Effect::Rename { from, to })?;
        }
        match &directories[..] {
            [path] => host.perform(&Effect::SyncDir { path }),
            paths => host.perform(&Effect::SyncAll { paths }),
        }
    };
    write().map(drop).context(|| format!("write {}", T::WHAT))
}

#[cfg(any(test, feature = "testing"))]
pub mod formats;
#[cfg(any(test, feature = "testing"))]
pub mod fuzz;
#[cfg(test)]
mod tests;
