//! Callers' paths: below an allowed folder, without links, or refused.

use std::path::{Path, PathBuf};

use super::Driver;
use crate::error::{Doing, Error, Result};
use crate::host::FileKind;

impl Driver {
    /// A path of a request that is about to be used.
    pub(super) fn caller_path(&self, field: &str, text: &str) -> Result<PathBuf> {
        if text.is_empty() {
            return Err(Error::invalid(field, "is missing; give an absolute path"));
        }
        let path = Path::new(text);
        self.host
            .check_path(path)
            .map_err(|problem| Error::invalid(field, problem))?;
        Ok(path.to_path_buf())
    }

    /// The same, where its parent must be there already: the caller makes it, CSI says.
    pub(super) fn new_caller_path(&self, field: &str, text: &str) -> Result<PathBuf> {
        let path = self.caller_path(field, text)?;
        let parent = path.parent().unwrap_or(Path::new("/"));
        match self
            .host
            .stat_caller(parent)
            .doing(|| format!("look at {}", parent.display()))?
            .map(|stat| stat.kind)
        {
            Some(FileKind::Dir) => Ok(path),
            Some(_) => Err(Error::invalid(
                field,
                format!("{} is not a directory", parent.display()),
            )),
            None => Err(Error::invalid(
                field,
                format!("{} does not exist; the caller makes it", parent.display()),
            )),
        }
    }

    /// As the mount table spells it.
    pub(super) fn table_path(&self, path: &Path) -> Result<PathBuf> {
        self.host
            .mount_table_path(path)
            .doing(|| format!("resolve {}", path.display()))
    }
}
