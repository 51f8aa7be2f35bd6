//! Paths in CSI requests. A path is refused unless it is below an allowed directory and contains no
//! symbolic links.

use std::path::{Path, PathBuf};

use nix::errno::Errno;

use crate::error::{Error, ErrorContext, Result};
use crate::host::{Effect, NodeKind};
use crate::operation::Usage;

impl Usage {
    /// Validates a path of a request before it is used.
    pub(in crate::operation) fn csi_path(&self, field: &str, text: &str) -> Result<PathBuf> {
        if text.is_empty() {
            return Err(Error::invalid(field, "is missing; give an absolute path"));
        }
        let path = Path::new(text);
        self.host
            .check_path(path)
            .map_err(|problem| Error::invalid(field, problem))?;
        Ok(path.to_path_buf())
    }

    /// Creates the last component of a path. Its parent must exist: CSI requires the caller to
    /// create it.
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

    /// The path as the mount table spells it.
    pub(in crate::operation) fn table_path(&self, path: &Path) -> Result<PathBuf> {
        self.host
            .mount_table_path(path)
            .context(|| format!("resolve {}", path.display()))
    }
}
