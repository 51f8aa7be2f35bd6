//! The blocks of a disk: a block device, or one file of a folder.
//!
//! Zeros are not written where the target reads as zeros already, so that a thin volume stays thin.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileExt, FileTypeExt, OpenOptionsExt};
use std::path::Path;

use nix::errno::Errno;
use nix::fcntl::{OFlag, OpenHow, ResolveFlag, openat2};
use nix::sys::stat::Mode;
use ring::digest::Context;

use crate::failure::{Failure, Result};
use crate::report::Report;

/// The unit in which zeros are detected.
const BLOCK_BYTES: usize = 64 << 10;
/// What is read or written at once.
const CHUNK_BYTES: usize = 1 << 20;
static ZEROS: [u8; BLOCK_BYTES] = [0; BLOCK_BYTES];

/// The target of blocks.
pub struct Disk {
    file: File,
    capacity: u64,
    is_device: bool,
}

impl Disk {
    /// Opens a block device that nothing else uses.
    pub fn device(path: &Path) -> Result<Disk> {
        let name = path.display();
        let opened = File::options()
            .read(true)
            .write(true)
            .custom_flags(OFlag::O_EXCL.bits())
            .open(path);
        let file = opened.map_err(|error| match Errno::from_raw(error.raw_os_error().unwrap_or(0)) {
            Errno::EACCES | Errno::EPERM => Failure::refused(
                "DeviceRefused",
                format!(
                    "open {name}: {error}; a pod that is not root needs device_ownership_from_security_context of the container runtime, or else runs as root without capabilities in a namespace that allows the baseline profile"
                ),
            ),
            _ => Failure::target(format!("open {name}"), &error),
        })?;
        let failed = |error: io::Error| Failure::target(format!("read the size of {name}"), &error);
        if !file
            .metadata()
            .map_err(failed)?
            .file_type()
            .is_block_device()
        {
            let what = format!("{name} is not a block device");
            return Err(Failure::refused("ConfigurationInvalid", what));
        }
        let capacity = io::Seek::seek(&mut &file, io::SeekFrom::End(0)).map_err(failed)?;
        Ok(Disk {
            file,
            capacity,
            is_device: true,
        })
    }

    /// Opens or creates a file of a folder.
    pub fn file(folder: impl AsFd, name: &str, capacity: u64) -> Result<Disk> {
        let how = OpenHow::new()
            .flags(OFlag::O_RDWR | OFlag::O_CREAT | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC)
            .mode(Mode::from_bits_truncate(0o660))
            .resolve(ResolveFlag::RESOLVE_BENEATH | ResolveFlag::RESOLVE_NO_SYMLINKS);
        let failed = |error: io::Error| Failure::target(format!("create {name}"), &error);
        let file = openat2(folder, name, how).map_err(|errno| failed(errno.into()))?;
        let file = File::from(file);
        if !file.metadata().map_err(failed)?.is_file() {
            let what = format!("{name} of the volume is not a file");
            return Err(Failure::refused("TargetNotEmpty", what));
        }
        Ok(Disk {
            file,
            capacity,
            is_device: false,
        })
    }

    /// A file without a name, for a format that cannot be read in one direction.
    pub fn unnamed(folder: &Path, capacity: u64) -> Result<Disk> {
        let opened = nix::fcntl::open(
            folder,
            OFlag::O_TMPFILE | OFlag::O_RDWR | OFlag::O_CLOEXEC,
            Mode::from_bits_truncate(0o600),
        );
        let failed = |errno: Errno| {
            let what = format!("create a temporary file in {}", folder.display());
            Failure::target(what, &errno.into())
        };
        Ok(Disk {
            file: File::from(opened.map_err(failed)?),
            capacity,
            is_device: false,
        })
    }

    /// Another descriptor of the same target.
    pub fn try_clone(&self) -> Result<Disk> {
        let file = self.file.try_clone();
        Ok(Disk {
            file: file.map_err(|error| Failure::target("open the volume", &error))?,
            ..*self
        })
    }

    /// How many bytes fit.
    pub fn capacity(&self) -> u64 {
        self.capacity
    }

    /// The open file, to read what was written.
    pub fn as_file(&self) -> &File {
        &self.file
    }

    /// Writes bytes at a position.
    pub fn write(&self, at: u64, bytes: &[u8]) -> Result<()> {
        let end = at.checked_add(bytes.len() as u64);
        if end.is_none_or(|end| end > self.capacity) {
            return Err(self.too_large());
        }
        let mut done = 0;
        while done < bytes.len() {
            let here = at + done as u64;
            let in_block = (here % BLOCK_BYTES as u64) as usize;
            let block = &bytes[done..bytes.len().min(done + BLOCK_BYTES - in_block)];
            let is_there = is_zero(block) && self.is_zero_at(here, block.len())?;
            if !is_there {
                let written = self.file.write_all_at(block, here);
                written.map_err(|error| Failure::target("write to the volume", &error))?;
            }
            done += block.len();
        }
        Ok(())
    }

    fn too_large(&self) -> Failure {
        let what = format!(
            "the content is larger than the volume, which has {} bytes",
            self.capacity
        );
        Failure::refused("TooLarge", what)
    }

    /// Whether the target reads as zeros; the end of a file does.
    fn is_zero_at(&self, at: u64, length: usize) -> Result<bool> {
        let mut found = [0; BLOCK_BYTES];
        let count = self.read(at, &mut found[..length])?;
        Ok(is_zero(&found[..count]))
    }

    /// Reads as much as there is.
    fn read(&self, at: u64, into: &mut [u8]) -> Result<usize> {
        read_at(&self.file, at, into).map_err(|error| Failure::target("read the volume", &error))
    }

    /// Makes what was written durable.
    pub fn sync(&self) -> Result<()> {
        let synced = self.file.sync_data();
        synced.map_err(|error| Failure::target("make the volume durable", &error))
    }

    /// Hashes the first bytes again; fails if there are fewer.
    pub fn hash(&self, bytes: u64, hash: &mut Context) -> Result<()> {
        let mut chunk = vec![0; CHUNK_BYTES];
        let mut at = 0;
        while at < bytes {
            let length = (bytes - at).min(CHUNK_BYTES as u64) as usize;
            let count = self.read(at, &mut chunk[..length])?;
            if count < length {
                let what = "the volume has less than the attempt should continue from";
                return Err(Failure::new(
                    crate::failure::Next::NewVolume,
                    "ResumeFailed",
                    what,
                ));
            }
            hash.update(&chunk[..count]);
            at += count as u64;
        }
        Ok(())
    }

    /// Ends the content: the rest of a device reads as zeros, a file is exactly as long.
    pub fn finish(&self, length: u64, report: &Report) -> Result<()> {
        match self.is_device {
            true => {
                let mut at = length;
                while at < self.capacity {
                    let count =
                        (self.capacity - at).min(BLOCK_BYTES as u64 - at % BLOCK_BYTES as u64);
                    self.write(at, &ZEROS[..count as usize])?;
                    at += count;
                    report.count(|_| {});
                }
            }
            false if length > self.capacity => return Err(self.too_large()),
            false => {
                let set = self.file.set_len(length);
                set.map_err(|error| Failure::target("set the length of the file", &error))?;
            }
        }
        let synced = self.file.sync_all();
        synced.map_err(|error| Failure::target("make the volume durable", &error))
    }

    /// Begins again: what a file has is no content.
    pub fn clear(&self) -> Result<()> {
        match self.is_device {
            true => Ok(()),
            false => self
                .file
                .set_len(0)
                .map_err(|error| Failure::target("empty the file", &error)),
        }
    }
}

/// Reads until `into` is full or the file ends.
pub fn read_at(file: &File, at: u64, into: &mut [u8]) -> io::Result<usize> {
    let mut done = 0;
    while done < into.len() {
        match file.read_at(&mut into[done..], at + done as u64) {
            Ok(0) => break,
            Ok(count) => done += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(done)
}

fn is_zero(bytes: &[u8]) -> bool {
    bytes == &ZEROS[..bytes.len()]
}

/// A folder of the target and the bytes of its file system.
pub fn open_folder(path: &Path) -> Result<(OwnedFd, u64)> {
    let failed =
        |errno: Errno| Failure::target(format!("open {}", path.display()), &io::Error::from(errno));
    let flags = OFlag::O_DIRECTORY | OFlag::O_RDONLY | OFlag::O_CLOEXEC;
    let folder = nix::fcntl::open(path, flags, Mode::empty()).map_err(failed)?;
    let size = nix::sys::statvfs::fstatvfs(&folder).map_err(failed)?;
    let capacity = size.blocks().saturating_mul(size.fragment_size());
    Ok((folder, capacity))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use proptest::prelude::*;

    use super::*;
    use crate::source::received::sha256;

    fn disk(capacity: u64) -> (tempfile::TempDir, Disk) {
        let folder = tempfile::TempDir::with_prefix("slackwater-").expect("a folder");
        let (open, _) = open_folder(folder.path()).expect("it opens");
        let disk = Disk::file(&open, "disk.img", capacity).expect("a file");
        (folder, disk)
    }

    fn content(disk: &Disk) -> Vec<u8> {
        let mut all = vec![0; disk.file.metadata().expect("metadata").len() as usize];
        read_at(&disk.file, 0, &mut all).expect("it is read");
        all
    }

    #[test]
    fn zeros_are_holes_and_replace_what_was_there() {
        let (_folder, disk) = disk(1 << 20);
        let report = Report::new(std::io::sink());
        disk.write(0, &[0; 300_000]).expect("zeros");
        disk.finish(300_000, &report).expect("it ends");
        let metadata = disk.file.metadata().expect("metadata");
        assert_eq!((metadata.len(), metadata.blocks()), (300_000, 0));
        disk.write(1000, &[1; 200_000]).expect("ones");
        disk.write(1500, &[0; 150_000]).expect("zeros again");
        disk.finish(300_000, &report).expect("it ends");
        let mut expected = vec![0; 300_000];
        expected[1000..201_000].fill(1);
        expected[1500..151_500].fill(0);
        assert!(content(&disk) == expected);
    }

    #[test]
    fn no_byte_is_written_beyond_the_capacity() {
        let (_folder, disk) = disk(10);
        let report = Report::new(std::io::sink());
        disk.write(0, &[1; 10]).expect("it fits");
        for (at, length) in [(0, 11), (10, 1), (u64::MAX, 1), (u64::MAX - 5, 10)] {
            let failure = disk.write(at, &vec![0; length]).expect_err("too large");
            assert_eq!(failure.reason, "TooLarge");
        }
        assert!(disk.finish(11, &report).is_err());
        disk.finish(0, &report).expect("nothing fits");
        assert!(content(&disk).is_empty());
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        /// Whatever is written, in whatever order: the file has that, and nothing beyond the capacity.
        #[test]
        fn any_writes_are_those_of_a_disk_of_this_capacity(
            capacity in 0_u64..200_000,
            writes in prop::collection::vec((0_u64..220_000, 0_usize..150_000, 0_u8..3, 0_u64..4), 0..8),
            length in 0_u64..220_000,
        ) {
            let (_folder, disk) = disk(capacity);
            let mut expected = Vec::new();
            for (at, count, byte, edge) in writes {
                // Some end at the capacity, or one byte before or behind it.
                let at = match edge {
                    0 => at,
                    edge => (capacity + edge).saturating_sub(count as u64 + 2),
                };
                let end = at as usize + count;
                match disk.write(at, &vec![byte; count]) {
                    Ok(()) => {
                        prop_assert!(end as u64 <= capacity);
                        expected.resize(end.max(expected.len()), 0);
                        expected[at as usize..end].fill(byte);
                    }
                    Err(failure) => {
                        prop_assert!(end as u64 > capacity);
                        prop_assert_eq!(failure.reason, "TooLarge");
                    }
                }
                prop_assert!(disk.file.metadata().expect("metadata").len() <= capacity);
            }
            match disk.finish(length, &Report::new(std::io::sink())) {
                Ok(()) => {
                    prop_assert!(length <= capacity);
                    expected.resize(length as usize, 0);
                    prop_assert!(content(&disk) == expected);
                }
                Err(failure) => {
                    prop_assert!(length > capacity);
                    prop_assert_eq!(failure.reason, "TooLarge");
                }
            }
        }
    }

    #[test]
    fn a_prefix_that_is_shorter_than_recorded_is_not_continued() {
        let (_folder, disk) = disk(1 << 20);
        disk.write(0, b"abc").expect("it is written");
        let mut hash = sha256();
        disk.hash(3, &mut hash).expect("it is there");
        let failure = disk.hash(4, &mut sha256()).expect_err("it is not");
        assert_eq!(failure.exit_code(), 12);
    }

    #[test]
    fn a_link_in_the_place_of_the_file_is_not_followed() {
        let folder = tempfile::TempDir::with_prefix("slackwater-").expect("a folder");
        let outside = tempfile::NamedTempFile::with_prefix("slackwater-").expect("a file");
        std::os::unix::fs::symlink(outside.path(), folder.path().join("disk.img")).expect("a link");
        let (open, _) = open_folder(folder.path()).expect("it opens");
        assert!(Disk::file(&open, "disk.img", 10).is_err());
        assert!(Disk::file(&open, "../x", 10).is_err());
        assert!(Disk::device(outside.path()).is_err(), "a file is no device");
    }
}
