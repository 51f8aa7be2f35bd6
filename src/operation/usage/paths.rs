//! Callers' paths: below an allowed folder, without links, or refused.

use std::path::{Path, PathBuf};

use nix::errno::Errno;

use crate::error::{Error, ErrorContext, Result};
use crate::host::{Effect, NodeKind};
use crate::operation::Driver;

impl Driver {
    /// A path of a request that is about to be used.
    pub(in crate::operation) fn caller_path(&self, field: &str, text: &str) -> Result<PathBuf> {
        if text.is_empty() {
            return Err(Error::invalid(field, "is missing; give an absolute path"));
        }
        let path = Path::new(text);
        self.host
            .check_path(path)
            .map_err(|problem| Error::invalid(field, problem))?;
        Ok(path.to_path_buf())
    }

    /// Makes a caller's leaf. Its parent must be there: the caller makes it, CSI says.
    pub(in crate::operation) fn make_target(
        &self,
        field: &str,
        path: &Path,
        kind: NodeKind,
    ) -> Result<()> {
        match self.host.perform(&Effect::MakeTarget { path, kind }) {
            Ok(_) => Ok(()),
            Err(error) if error.code() == Some(Errno::ENOENT) => {
                let parent = path.parent().unwrap_or(Path::new("/"));
                Err(Error::invalid(
                    field,
                    format!(
                        "{} does not exist; the caller must create it",
                        parent.display()
                    ),
                ))
            }
            Err(error) => Err(error).context(|| format!("create {}", path.display())),
        }
    }

    /// As the mount table spells it.
    pub(in crate::operation) fn table_path(&self, path: &Path) -> Result<PathBuf> {
        self.host
            .mount_table_path(path)
            .context(|| format!("resolve {}", path.display()))
    }
}
