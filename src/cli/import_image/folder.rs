//! A directory of others, whose files are copied into a new file system.

use std::path::PathBuf;
use std::time::Instant;

use super::source::{Found, Source};
use super::{Arguments, Failure, PROGRESS_INTERVAL, Result};
use crate::config::BadConfig;
use crate::error::{Error, ErrorContext};
use crate::host::linux::{ImportTree, LISTED, ScratchImage};
use crate::host::piece::ZERO_BLOCK;
use crate::model::FsType;
use crate::model::size::HumanBytes;

/// A directory that is imported.
pub(super) struct Folder {
    tree: ImportTree,
    fs: FsType,
    bytes: u64,
    scratch: PathBuf,
}

impl Folder {
    /// Opens the directory, and looks at everything in it.
    pub(super) fn open(arguments: &Arguments) -> Result<Folder, Failure> {
        let (Some(fs), Some(size)) = (arguments.fs_type, arguments.size) else {
            let missing = "--fs-type and --size are needed for a directory; give the file system and the size of the volume that gets its files";
            return Err(BadConfig(missing.into()).into());
        };
        if arguments.yes && arguments.scratch.is_none() {
            let missing = "--scratch is needed for a directory; give a directory with space for its files, such as that of a pool";
            return Err(BadConfig(missing.into()).into());
        }
        let tree = ImportTree::open(&arguments.from);
        let tree = tree.context(|| "examine".into())?;
        let needed = tree.content().bytes;
        if needed > size {
            let from = arguments.from.display();
            let why =
                format!("its files have {needed} bytes, and --size is {size}; give more than that");
            return Err(Error::refused(from, why).into());
        }
        Ok(Folder {
            tree,
            fs,
            bytes: size.next_multiple_of(ZERO_BLOCK),
            scratch: arguments.scratch.clone().unwrap_or_default(),
        })
    }

    /// The length of the file system.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// What the volume will have. Lists what is not copied.
    pub(super) fn examine(&self) -> Found {
        let content = self.tree.content();
        eprintln!("{content}");
        let mut skipped: Vec<_> = content.skipped.iter().collect();
        // What is mounted may be more than one entry, so it is listed in any case.
        skipped.sort_by_key(|(_, what)| *what != "a mount point");
        skipped.truncate(LISTED);
        for (path, what) in &skipped {
            eprintln!("not copied, {what}: {path:?}");
        }
        let more = content.not_copied.saturating_sub(skipped.len() as u64);
        if more > 0 {
            eprintln!("not copied: {more} more");
        }
        Found::Fs(self.fs)
    }

    /// Copies the files into an image.
    pub(super) fn into_source(self) -> Result<Source, Failure> {
        let content = self.tree.content();
        let image = ScratchImage::create(&self.scratch, self.bytes, content.bytes, self.fs);
        let image = image.context(|| "create an image for the files".into())?;
        let (of, whole) = (
            content.files + content.folders + content.symlinks,
            HumanBytes(content.bytes),
        );
        let mut shown = Instant::now();
        let copied = self.tree.copy_to(image.root(), &mut |progress| {
            if shown.elapsed() >= PROGRESS_INTERVAL {
                shown = Instant::now();
                let bytes = HumanBytes(progress.bytes);
                eprintln!(
                    "{} of {of} entries, {bytes} of {whole} copied",
                    progress.entries
                );
            }
        });
        copied.context(|| "copy the files".into())?;
        let source = image.into_source();
        Ok(Source::Opened(source.context(|| "end the image".into())?))
    }
}
