//! A file that the driver did not create, from which a volume is imported.

use std::path::Path;

use super::Result;

/// A regular file, open for reading. A process that opens it for writing as long as this exists is
/// seen by [`ForeignFile::check_unchanged`].
pub trait ForeignFile: Send + Sync {
    /// A path that reaches the open file in this process, whatever its name leads to now.
    fn path(&self) -> &Path;
    /// Its length.
    fn bytes(&self) -> u64;
    /// Bytes of its blocks, including shared ones.
    fn allocated(&self) -> u64;
    /// The block size with which its content was written, or may have been.
    fn block_size(&self) -> u32;
    /// What changes with its content, or if it is another file.
    fn state(&self) -> String;
    /// An error if it has changed since it was opened, or is about to change.
    fn check_unchanged(&self) -> Result<()>;
    /// Why a file that is created in this directory cannot share its blocks; `None` if it can. Tested
    /// with a file without a name.
    fn find_obstacle(&self, folder: &Path) -> Result<Option<String>>;
}
