//! What survives a restart: records of volumes and pools beside the data, and the node's own.
//!
//! A record is JSON with a version. It is written as a temporary file, fsynced, renamed over the
//! old one, and the directory is fsynced: after a crash there is the old record or the new one.
//! A newer version is refused, never overwritten; an older one is read with today's defaults.

pub mod image;
pub mod node;
pub mod pool;
pub mod snapshot;
pub mod volume;

use std::path::Path;

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::error::{Doing, Error, Result};
use crate::host::{Effect, Host};

pub use image::ImageRecord;
pub use node::NodeRecord;
pub use pool::PoolRecord;
pub use snapshot::{CopyProgress, GroupMembership, SnapshotRecord, SnapshotState};
pub use volume::{ContentSource, Formatted, FormattedAs, LastStage, VolumeRecord, VolumeState};

/// Something that is kept as a file.
pub trait Record: Serialize + DeserializeOwned {
    /// The version that this program writes, and the newest that it reads.
    const VERSION: u32;
    /// What is said of a file of it: "record of a volume".
    const WHAT: &'static str;
}

/// Suffix of a record that is being written.
const TEMPORARY: &str = ".new";

/// Encodes with the version.
pub fn encode<T: Record>(record: &T) -> Result<Vec<u8>> {
    let bug = |error: serde_json::Error| Error::Bug {
        invariant: format!("{} as JSON: {error}", T::WHAT),
    };
    let mut value = serde_json::to_value(record).map_err(bug)?;
    if let Some(object) = value.as_object_mut() {
        object.insert("version".into(), T::VERSION.into());
    }
    let mut bytes = serde_json::to_vec_pretty(&value).map_err(bug)?;
    bytes.push(b'\n');
    Ok(bytes)
}

/// Decodes; `path` is for the error.
pub fn decode<T: Record>(path: &Path, bytes: &[u8]) -> Result<T> {
    let damaged = |problem: String| Error::Damaged {
        path: path.to_path_buf(),
        problem,
    };
    let unreadable = |error: serde_json::Error| damaged(format!("not a {}: {error}", T::WHAT));
    /// Read first: a newer version may differ in everything else.
    #[derive(serde::Deserialize)]
    struct Version {
        version: u32,
    }
    let Version { version } = serde_json::from_slice(bytes).map_err(unreadable)?;
    if version > T::VERSION {
        return Err(damaged(format!(
            "{} has version {version}, this program knows up to {}; use the newer program again",
            T::WHAT,
            T::VERSION
        )));
    }
    serde_json::from_slice(bytes).map_err(unreadable)
}

/// Reads a record; `None` if there is no file.
pub fn load<T: Record>(host: &dyn Host, path: &Path) -> Result<Option<T>> {
    match host.read_file(path).doing(|| format!("read {}", T::WHAT))? {
        Some(bytes) => decode(path, &bytes).map(Some),
        None => Ok(None),
    }
}

/// Writes a record durably. A crash leaves the old or the new one, and perhaps a temporary file,
/// which the next write replaces.
pub fn store<T: Record>(host: &dyn Host, path: &Path, record: &T) -> Result<()> {
    let bytes = encode(record)?;
    let mut temporary = path.as_os_str().to_owned();
    temporary.push(TEMPORARY);
    let temporary = Path::new(&temporary);
    let directory = path.parent().ok_or_else(|| Error::Bug {
        invariant: "a record has a directory".into(),
    })?;
    let mut steps = [
        Effect::WriteFile {
            path: temporary,
            bytes: &bytes,
        },
        Effect::SyncFile { path: temporary },
        Effect::Rename {
            from: temporary,
            to: path,
        },
        Effect::SyncDir { path: directory },
    ]
    .into_iter();
    steps
        .try_for_each(|step| host.perform(&step).map(drop))
        .doing(|| format!("write {}", T::WHAT))
}
