//! The content of a volume that is imported from a file of this node, whose blocks it shares then.

use std::path::{Path, PathBuf};

use crate::error::{Error, HostCause, HostError, Result};
use crate::host::ForeignFile;
use crate::host::piece::ZERO_BLOCK;

/// A file that the driver did not create, open and protected from writers.
pub(in crate::operation) struct FileContent {
    /// Its path, for messages.
    pub(in crate::operation) path: PathBuf,
    pub(in crate::operation) file: Box<dyn ForeignFile>,
    /// A number for its content.
    pub(in crate::operation) identity: u64,
}

impl FileContent {
    /// Size of the smallest volume that contains it.
    pub(in crate::operation) fn size(&self) -> u64 {
        self.file.bytes().next_multiple_of(ZERO_BLOCK)
    }

    pub(in crate::operation) fn check_unchanged(&self) -> Result<()> {
        let unchanged = self.file.check_unchanged();
        unchanged.map_err(|error| refusal(&self.path, error))
    }
}

/// The refusal of a file that is not as it must be, or another error of the host.
pub(in crate::operation) fn refusal(path: &Path, error: HostError) -> Error {
    match error.cause {
        HostCause::Unexpected(why) => Error::refused(format!("{path:?}"), why),
        _ => Error::Host {
            doing: "import a file".into(),
            source: error,
        },
    }
}
