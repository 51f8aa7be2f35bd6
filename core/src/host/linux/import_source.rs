//! A file or a block device of others whose content is imported. It is only read, and no
//! other process may write to it while it is open.

use std::fs::{File, Metadata, OpenOptions};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::libc;

use super::files::failed;
use super::{format, image, loop_device, sys};
use crate::error::HostError;
use crate::host::piece::add;
use crate::host::{Device, FileId, LoopDevice, Piece, Result, Signature};

/// The block size of a loop device of a file that was never attached.
pub(super) const FILE_BLOCK: u32 = 512;

/// How long a file may still be open for writing. A process that starts a program has copies of all
/// descriptors of its parent until the program is executed, also of a file that the parent has closed.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);
const CLOSE_POLL_INTERVAL: Duration = Duration::from_millis(10);

/// What is imported.
pub struct ImportSource {
    path: PathBuf,
    file: File,
    bytes: u64,
    kind: Kind,
}

enum Kind {
    /// Opened exclusively: it cannot be mounted or become a part of another device. A process can
    /// open it for writing nevertheless.
    Device(Device),
    /// A lease keeps others from opening it for writing.
    File { state: State, block_size: u32 },
}

/// What changes with the content of a file, or with the file of a path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct State {
    /// Device and inode.
    file: [u64; 2],
    bytes: u64,
    /// Of modification and of change, in seconds and nanoseconds.
    times: [i64; 4],
}

impl State {
    pub(super) fn of(file: &Metadata) -> State {
        State {
            file: [file.dev(), file.ino()],
            bytes: file.len(),
            times: [
                file.mtime(),
                file.mtime_nsec(),
                file.ctime(),
                file.ctime_nsec(),
            ],
        }
    }
}

impl ImportSource {
    /// Opens a regular file or a block device. An error if it is used: mounted, attached, a part of
    /// another device, or open for writing.
    pub fn open(path: &Path) -> Result<ImportSource> {
        // A pipe must not wait for its writer.
        let file = OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_NONBLOCK)
            .open(path)
            .map_err(failed("open", path))?;
        let found = file.metadata().map_err(failed("stat", path))?;
        let refused = |what: &str| Err(HostError::unexpected("import", path, what));
        let kind = found.file_type();
        let source = if kind.is_block_device() {
            ImportSource::device(path, found.rdev())?
        } else if kind.is_file() {
            ImportSource::file(path, file, FILE_BLOCK)?
        } else {
            return refused("it is neither a file nor a block device");
        };
        match source.bytes {
            0 => refused("it is empty"),
            _ => Ok(source),
        }
    }

    fn device(path: &Path, rdev: u64) -> Result<ImportSource> {
        let device = Device {
            path: path.to_path_buf(),
            rdev,
        };
        let file = loop_device::open_exclusive(&device).map_err(|error| match error.code() {
            Some(Errno::EBUSY) => {
                let what = "it is mounted, or a part of another device; unmount it first";
                HostError::unexpected("import", path, what)
            }
            _ => error,
        })?;
        let bytes = sys::block_bytes(&file)
            .map_err(|errno| HostError::errno("read the size of", path, errno))?;
        Ok(ImportSource {
            path: path.to_path_buf(),
            file,
            bytes,
            kind: Kind::Device(device),
        })
    }

    /// A regular file that is open for reading. The path is only for errors.
    pub(super) fn file(path: &Path, file: File, block_size: u32) -> Result<ImportSource> {
        take_lease(&file, path)?;
        let found = file.metadata().map_err(failed("stat", path))?;
        check_detached(&found, path)?;
        let state = State::of(&found);
        Ok(ImportSource {
            path: path.to_path_buf(),
            bytes: state.bytes,
            kind: Kind::File { state, block_size },
            file,
        })
    }

    /// Its length.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The block size with which its content was written, or may have been.
    pub fn block_size(&self) -> Result<u32> {
        match self.kind {
            Kind::Device(_) => sys::logical_block_bytes(&self.file)
                .map_err(|errno| HostError::errno("read the block size of", &self.path, errno)),
            Kind::File { block_size, .. } => Ok(block_size),
        }
    }

    /// What changes with its content; nothing of a device does.
    pub fn state(&self) -> Option<String> {
        match &self.kind {
            Kind::Device(_) => None,
            Kind::File { state, .. } => Some(format!("{state:?}")),
        }
    }

    /// What is on it.
    pub fn signature(&self) -> Result<Signature> {
        match &self.kind {
            Kind::Device(device) => format::signature(device),
            Kind::File { .. } => format::signature_of_file(&self.file, &self.path),
        }
    }

    /// The first bytes.
    pub fn head(&self, length: usize) -> Result<Vec<u8>> {
        let mut bytes = vec![0; length.min(self.bytes as usize)];
        let read = self.file.read_exact_at(&mut bytes, 0);
        read.map_err(failed("read", &self.path))?;
        Ok(bytes)
    }

    /// The data of a range, without blocks of zeros. What is beyond the end reads as zeros.
    pub fn read(&self, offset: u64, length: u64) -> Result<Vec<Piece>> {
        let end = offset.saturating_add(length).min(self.bytes);
        let mut pieces = Vec::new();
        image::each_data(&self.file, &self.path, offset..end, |at, data| {
            add(&mut pieces, at, data);
            Ok(())
        })?;
        Ok(pieces)
    }

    /// An error if others have written to it, or are about to. What a process writes to a device
    /// cannot be seen here: read it again and compare.
    pub fn check_unchanged(&self) -> Result<()> {
        match &self.kind {
            Kind::Device(_) => Ok(()),
            Kind::File { state, .. } => check_unchanged(&self.file, &self.path, state),
        }
    }

    /// Whether [`ImportSource::check_unchanged`] sees every change.
    pub fn can_detect_changes(&self) -> bool {
        matches!(self.kind, Kind::File { .. })
    }
}

impl AsFd for ImportSource {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// Keeps others from opening a file for writing, as long as it is open here.
pub(super) fn take_lease(file: &File, path: &Path) -> Result<()> {
    wait_for_lease(file, CLOSE_TIMEOUT).map_err(|errno| match errno {
        Errno::EAGAIN => {
            let what = "a process or a loop device has it open for writing; end that first";
            HostError::unexpected("import", path, what)
        }
        errno => HostError::errno("keep others from writing to", path, errno),
    })
}

/// Refuses a file that is attached to a loop device. A lease does not find a device that only reads it.
fn check_detached(found: &Metadata, path: &Path) -> Result<()> {
    let file = FileId {
        device: found.dev(),
        inode: found.ino(),
    };
    // A device that this process cannot examine is left out.
    let is_it = |device: &LoopDevice| {
        let status = device.status.as_ref();
        status.is_ok_and(|status| status.backing == file)
    };
    let mut all = loop_device::list(&|_| true)?.into_iter();
    match all.find(is_it) {
        None => Ok(()),
        Some(device) => {
            let device = Device::of_loop(device.number).path;
            let what = format!(
                "it is attached to {}; detach it first (losetup --detach)",
                device.display()
            );
            Err(HostError::unexpected("import", path, what))
        }
    }
}

/// Takes a read lease as soon as no process has the file open for writing. EAGAIN if one still has it
/// after this time.
pub(super) fn wait_for_lease(file: &File, time: Duration) -> nix::Result<()> {
    let begun = Instant::now();
    loop {
        match sys::take_read_lease(file) {
            Err(Errno::EAGAIN) if begun.elapsed() < time => thread::sleep(CLOSE_POLL_INTERVAL),
            taken => return taken,
        }
    }
}

/// An error if a file with a lease was written to, or is about to be.
pub(super) fn check_unchanged(file: &File, path: &Path, state: &State) -> Result<()> {
    let is_leased = sys::has_read_lease(file)
        .map_err(|errno| HostError::errno("examine the lease of", path, errno))?;
    let now = file.metadata().map_err(failed("stat", path))?;
    if is_leased && State::of(&now) == *state {
        return Ok(());
    }
    let what = "it was opened for writing, or changed, while it was read";
    Err(HostError::unexpected("import", path, what))
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use proptest::prelude::*;

    use super::*;

    fn refused(path: &Path) -> String {
        match ImportSource::open(path) {
            Err(error) => crate::error::chain(&error),
            Ok(_) => panic!("{} is not refused", path.display()),
        }
    }

    #[test]
    fn a_file_is_read_without_its_holes_and_a_writer_is_seen() {
        let file = tempfile::Builder::new().prefix("slackwater-").tempfile();
        let (mut writer, path) = file.unwrap().into_parts();
        assert!(refused(&path).contains("open for writing"), "{path:?}");
        writer.write_all(&[7; 5000]).unwrap();
        writer.set_len(1 << 20).unwrap();
        drop(writer);
        let source = ImportSource::open(&path).unwrap();
        assert_eq!(
            (source.bytes(), source.head(2).unwrap()),
            (1 << 20, vec![7; 2])
        );
        let pieces = source.read(0, 4 << 20).unwrap();
        let data: usize = pieces.iter().map(|piece| piece.bytes.len()).sum();
        assert_eq!((pieces.len(), data), (1, 8192));
        assert_eq!(source.signature().unwrap(), Signature::None);
        source.check_unchanged().unwrap();
        // A writer would wait for the lease.
        let other = path.to_path_buf();
        let opened = thread::spawn(move || OpenOptions::new().write(true).open(other));
        let start = Instant::now();
        while source.check_unchanged().is_ok() {
            assert!(start.elapsed().as_secs() < 30, "the writer is not seen");
            thread::yield_now();
        }
        drop(source);
        opened.join().unwrap().unwrap();
    }

    #[test]
    fn a_writer_that_is_about_to_close_the_file_is_waited_for() {
        let file = tempfile::Builder::new().prefix("slackwater-").tempfile();
        let (mut writer, path) = file.unwrap().into_parts();
        writer.write_all(&[7; 5000]).unwrap();
        let closed = thread::spawn(move || {
            thread::sleep(CLOSE_TIMEOUT / 8);
            drop(writer);
        });
        let source = ImportSource::open(&path).unwrap();
        assert_eq!(source.bytes(), 5000);
        closed.join().unwrap();
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        /// A file of any content, with holes: what is read is what it has, in whatever ranges, and nothing
        /// of it decides how much that is.
        #[test]
        fn any_file_is_read_as_it_is_and_stays_so(
            writes in prop::collection::vec((0_u64..600_000, prop::collection::vec(any::<u8>(), 1..9000)), 0..6),
            length in 1_u64..700_000,
            step in 4096_u64..300_000,
        ) {
            let file = tempfile::Builder::new().prefix("slackwater-").tempfile();
            let (writer, path) = file.unwrap().into_parts();
            for (at, bytes) in &writes {
                writer.write_all_at(bytes, *at).unwrap();
            }
            writer.set_len(length).unwrap();
            drop(writer);
            let before = std::fs::read(&path).unwrap();
            let state = State::of(&path.metadata().unwrap());
            let source = ImportSource::open(&path).unwrap();
            prop_assert_eq!(source.bytes(), length);
            let mut found = vec![0; length as usize];
            let mut at = 0;
            while at < length + step {
                for piece in source.read(at, step).unwrap() {
                    prop_assert!(piece.offset >= at && piece.end() <= (at + step).min(length));
                    let range = piece.offset as usize..piece.end() as usize;
                    found[range].copy_from_slice(&piece.bytes);
                }
                at += step;
            }
            prop_assert!(found == before);
            source.check_unchanged().unwrap();
            drop(source);
            prop_assert_eq!(State::of(&path.metadata().unwrap()), state);
        }
    }

    #[test]
    fn only_files_with_content_and_devices_are_imported() {
        let file = tempfile::Builder::new().prefix("slackwater-").tempfile();
        let path = file.unwrap().into_temp_path();
        assert!(refused(&path).contains("is empty"));
        assert!(refused(Path::new("/")).contains("neither"));
        assert!(refused(Path::new("/dev/null")).contains("neither"));
        assert!(refused(Path::new("/nowhere")).contains("ENOENT"));
    }
}
