//! Imports a volume from a file on this node, whose blocks it shares then.
//!
//! Another program owns the file, and may write to it or exchange it. So it is opened once, by a path
//! below a directory that the administrator has configured, and compared before and after the clone.

use std::path::{Component, Path, PathBuf};

use nix::errno::Errno;

use super::import::check_content;
use crate::error::{Error, Result};
use crate::operation::lock::Key;
use crate::operation::snapshot::foreign::{FileContent, refusal};
use crate::operation::snapshot::restore::Content;
use crate::operation::{ContentInfo, FileImport, ImportFile, Pool, Volumes, content_identity};
use crate::record::VolumeRecord;

impl Volumes {
    /// Creates a volume that shares the blocks of a file, unless an obstacle prevents that. A crash
    /// leaves an incomplete volume, which the next start or a repeat deletes.
    pub fn import_file(&self, request: &ImportFile) -> Result<FileImport> {
        let done = self.clone_file(request);
        done.map_err(|error| match &request.import.name {
            Some(name) if !request.dry_run && error.is_final() => self.end_import(name, error),
            Some(_) | None => error,
        })
    }

    /// A final error means that nothing is left of what an earlier call has begun. A complete volume of
    /// this name stays.
    fn end_import(&self, name: &str, error: Error) -> Error {
        let found = self.pools.locks.acquire(Key::Name(name.to_string()));
        let found = found.and_then(|lock| Ok((lock, self.find_name(name)?)));
        match found {
            Ok((_, Some(_))) => error,
            Ok((_lock, None)) => self.end_begun(name, error),
            Err(unknown) => error.with_undo(Err(unknown)),
        }
    }

    fn clone_file(&self, request: &ImportFile) -> Result<FileImport> {
        let obstacle = |why: &str| Ok(FileImport::Obstacle(why.into()));
        let path = plain_path(&request.path)?;
        let Some((top, below)) = self.split_import_path(&path) else {
            return obstacle("it is not below a directory of --import-path");
        };
        let file = match self.host.open_foreign(top, below) {
            Err(error) if error.code() == Some(Errno::ENOENT) => {
                return obstacle("the driver does not find it");
            }
            opened => opened.map_err(|error| refusal(&path, error))?,
        };
        let identity = content_identity(&file.state());
        if identity != request.identity {
            let why = "it has changed, or is another file than the one that was examined";
            return Err(Error::refused(format!("{path:?}"), why));
        }
        let facts = ContentInfo {
            source: path.display().to_string(),
            bytes: file.bytes(),
            block_size: file.block_size(),
            identity,
            read_at: self.host.now_nanos(),
        };
        let planned = self.plan_import(&request.import, facts.into_snapshot(), 1)?;
        let create = planned.create;
        let pool = self.pools.choose_pool(create.parameters.pool.as_deref())?;
        let found = |pool: &Pool| pool.backend.volumes.get(planned.uuid);
        let shares = |record: VolumeRecord| record.foreign_bytes.is_some();
        if let Some(done) = planned.done {
            return match found(&pool)?.is_some_and(shares) {
                true => Ok(FileImport::Shared(done)),
                false => obstacle("the volume exists, and does not share its blocks"),
            };
        }
        if let Some(why) = pool.backend.find_obstacle(file.as_ref())? {
            return obstacle(&why);
        }
        if request.dry_run {
            return Ok(FileImport::Possible);
        }
        let content = Content::File(Box::new(FileContent {
            path,
            file,
            identity,
        }));
        match self.create_from(&create, false, || Ok(Some(content))) {
            Err(Error::Host { source, .. }) if source.code().is_some_and(is_obstacle) => obstacle(
                &format!("the file system refuses to share its blocks ({source})"),
            ),
            made => {
                let volume = made?;
                // Another call may have created a volume with this name.
                found(&pool)?.map_or(Ok(()), |record| check_content(&record, identity))?;
                Ok(FileImport::Shared(volume))
            }
        }
    }

    /// The directory of `--import-path` that contains a path, and the rest of the path.
    fn split_import_path<'a>(&'a self, path: &'a Path) -> Option<(&'a Path, &'a Path)> {
        let tops = self.pools.settings.import_paths.iter();
        let split = tops.filter_map(|top| Some((top.as_path(), path.strip_prefix(top).ok()?)));
        split
            .filter(|(_, below)| !below.as_os_str().is_empty())
            .min_by_key(|(_, below)| below.components().count())
    }
}

/// Whether the kernel refuses to share blocks because of what the files are. A trial with one block does
/// not show all of that.
fn is_obstacle(errno: Errno) -> bool {
    matches!(
        errno,
        Errno::EXDEV | Errno::EOPNOTSUPP | Errno::EINVAL | Errno::ETXTBSY
    )
}

/// A path that consists of names only.
fn plain_path(path: &Path) -> Result<PathBuf> {
    let is_plain = |part: Component<'_>| matches!(part, Component::RootDir | Component::Normal(_));
    if !path.is_absolute() || !path.components().all(is_plain) {
        let problem = format!("{path:?} is not an absolute path without \"..\"");
        return Err(Error::invalid("path", problem));
    }
    Ok(path.components().collect())
}

#[cfg(test)]
mod tests;
