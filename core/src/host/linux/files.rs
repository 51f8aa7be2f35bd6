//! Files and directories of pools: paths that begin with a pinned directory. No symbolic link is
//! followed as the last component; the components above it were created by the driver.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{ErrorKind, Read, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::{fs, io, thread};

use nix::fcntl::{Flock, FlockArg};
use nix::libc;

use super::foreign_file::DESCRIPTORS;
use super::sys;
use crate::error::HostError;
use crate::host::{FileId, FileKind, FileStat, Result, Space};

/// Records are a few KiB; a larger file was not written by the driver.
const SMALL_FILE: u64 = 16 << 20;

/// How many files are synced at the same time, each by a thread that has it open.
const SYNCS_AT_ONCE: usize = 64;

/// Adds action and path to an I/O error.
pub(super) fn failed<'a>(
    action: &'static str,
    path: &'a Path,
) -> impl FnOnce(io::Error) -> HostError + 'a {
    move |error| HostError::io(action, path, &error)
}

/// Turns "not found" into success.
fn unless_absent(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

pub(super) fn make_dir(path: &Path) -> Result<()> {
    match DirBuilder::new().mode(0o700).create(path) {
        Err(error) if error.kind() == ErrorKind::AlreadyExists => {
            let found = fs::symlink_metadata(path).map_err(failed("stat", path))?;
            if found.is_dir() {
                return Ok(());
            }
            Err(HostError::io("create directory", path, &error))
        }
        other => other.map_err(failed("create directory", path)),
    }
}

pub(super) fn write_file(path: &Path, bytes: &[u8]) -> Result<()> {
    OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .custom_flags(libc::O_NOFOLLOW)
        .open(path)
        .and_then(|mut file| file.write_all(bytes))
        .map_err(failed("write", path))
}

pub(super) fn sync_file(path: &Path) -> Result<()> {
    open_existing(path, false)?
        .sync_all()
        .map_err(failed("fsync", path))
}

pub(super) fn sync_dir(path: &Path) -> Result<()> {
    open_dir(path)?.sync_all().map_err(failed("fsync", path))
}

/// Syncs files and directories, one in this thread and each other one in a thread of its own: a journal
/// commits what has changed by then once for all who wait for it, and block devices merge flushes that
/// wait for the same one.
pub(super) fn sync_all(paths: &[PathBuf]) -> Result<()> {
    paths.chunks(SYNCS_AT_ONCE).try_for_each(sync_at_once)
}

/// Tries all of them, and returns the first error.
fn sync_at_once(paths: &[PathBuf]) -> Result<()> {
    let open = |path: &PathBuf| open_existing(path, false);
    let files: Vec<File> = paths.iter().map(open).collect::<Result<_>>()?;
    for file in &files {
        // The blocks of a new file are allocated when its data is written. If a commit began before,
        // the file would wait for the next one. An error is reported by fsync.
        let _ = sys::fs::begin_write_back(file);
    }
    let each: Vec<(&PathBuf, &File)> = paths.iter().zip(&files).collect();
    at_once(&each, |(path, file)| {
        file.sync_all().map_err(failed("fsync", path))
    })
}

/// Acts on the first one in this thread and on each of the others in another one, and returns the
/// first error.
fn at_once<T: Sync>(each: &[T], act: impl Fn(&T) -> Result<()> + Sync) -> Result<()> {
    let Some((first, others)) = each.split_first() else {
        return Ok(());
    };
    let act = &act;
    thread::scope(|scope| {
        let mut threads = Vec::new();
        // Those for which there is no thread.
        let mut own = vec![first];
        for one in others {
            let thread = thread::Builder::new().name("sync".into());
            match thread.spawn_scoped(scope, move || act(one)) {
                Ok(thread) => threads.push(thread),
                Err(_) => own.push(one),
            }
        }
        let mut done = Ok(());
        for one in own {
            done = act(one).and(done);
        }
        let panicked = |_| Err(HostError::unexpected("fsync", "", "a thread panicked"));
        for thread in threads {
            done = thread.join().unwrap_or_else(panicked).and(done);
        }
        done
    })
}

#[expect(
    clippy::disallowed_methods,
    reason = "the effect Rename; its order with fsync is the caller's plan"
)]
pub(super) fn rename(from: &Path, to: &Path) -> Result<()> {
    fs::rename(from, to).map_err(failed("rename", from))
}

pub(super) fn remove_file(path: &Path) -> Result<()> {
    unless_absent(fs::remove_file(path)).map_err(failed("remove", path))
}

pub(super) fn remove_dir(path: &Path) -> Result<()> {
    unless_absent(fs::remove_dir(path)).map_err(failed("remove directory", path))
}

pub(super) fn open_existing(path: &Path, write: bool) -> Result<File> {
    OpenOptions::new()
        .read(true)
        .write(write)
        .custom_flags(libc::O_NOFOLLOW)
        .open(path)
        .map_err(failed("open", path))
}

/// Opens the source of a clone for reading: a file of a pool, or an open file by its descriptor, which
/// the kernel shows as a link.
pub(super) fn open_source(path: &Path) -> Result<File> {
    match path.parent() == Some(Path::new(DESCRIPTORS)) {
        true => File::open(path).map_err(failed("open", path)),
        false => open_existing(path, false),
    }
}

/// Opens a file for reading and writing; creates it empty, with access for root only, if it does
/// not exist.
pub(super) fn open_or_create(path: &Path) -> Result<File> {
    OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .custom_flags(libc::O_NOFOLLOW)
        .open(path)
        .map_err(failed("open", path))
}

/// Opens a directory that must not be a symbolic link.
pub(super) fn open_real_dir(path: &Path) -> Result<File> {
    OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_DIRECTORY | libc::O_NOFOLLOW)
        .open(path)
        .map_err(failed("open directory", path))
}

fn open_dir(path: &Path) -> Result<File> {
    OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_DIRECTORY)
        .open(path)
        .map_err(failed("open directory", path))
}

/// Opens a directory that the user configured, following links, and returns the path by which it
/// stays reachable.
pub(super) fn pin_dir(path: &Path) -> Result<(File, PathBuf)> {
    let folder = open_dir(path)?;
    let pinned = PathBuf::from(format!("/proc/self/fd/{}", folder.as_raw_fd()));
    Ok((folder, pinned))
}

/// Takes the lock of a file; `None` if another process has it. The standard library opens files
/// close-on-exec, so no child program inherits the lock.
pub(super) fn try_lock(path: &Path) -> Result<Option<Flock<File>>> {
    match Flock::lock(open_or_create(path)?, FlockArg::LockExclusiveNonblock) {
        Ok(lock) => Ok(Some(lock)),
        Err((_, nix::errno::Errno::EWOULDBLOCK)) => Ok(None),
        Err((_, errno)) => Err(HostError::errno("lock", path, errno)),
    }
}

pub(super) fn read_file(path: &Path) -> Result<Option<Vec<u8>>> {
    let file = match OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NOFOLLOW)
        .open(path)
    {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        other => other.map_err(failed("open", path))?,
    };
    // Otherwise it would be read in pieces that begin with 32 bytes.
    let length = file.metadata().map_or(0, |found| found.len());
    let mut bytes = Vec::with_capacity(length.min(SMALL_FILE) as usize + 64);
    file.take(SMALL_FILE + 1)
        .read_to_end(&mut bytes)
        .map_err(failed("read", path))?;
    if bytes.len() as u64 > SMALL_FILE {
        let what = format!("it has more than {SMALL_FILE} bytes, so it is not a record");
        return Err(HostError::unexpected("read", path, what));
    }
    Ok(Some(bytes))
}

pub(super) fn list_dir(path: &Path) -> Result<Option<Vec<String>>> {
    let entries = match fs::read_dir(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        other => other.map_err(failed("list", path))?,
    };
    let mut names = entries
        .map(|entry| entry.map(|entry| entry.file_name().to_string_lossy().into_owned()))
        .collect::<io::Result<Vec<_>>>()
        .map_err(failed("list", path))?;
    names.sort();
    Ok(Some(names))
}

pub(super) fn stat(path: &Path) -> Result<Option<FileStat>> {
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        other => Ok(Some(describe(&other.map_err(failed("stat", path))?))),
    }
}

/// Converts the result of stat.
pub(super) fn describe(found: &fs::Metadata) -> FileStat {
    let kind = found.file_type();
    FileStat {
        id: FileId {
            device: found.dev(),
            inode: found.ino(),
        },
        kind: if kind.is_file() {
            FileKind::File
        } else if kind.is_dir() {
            FileKind::Dir
        } else if kind.is_block_device() {
            FileKind::Block
        } else if kind.is_symlink() {
            FileKind::Link
        } else {
            FileKind::Other
        },
        size: found.len(),
        // st_blocks counts units of 512 bytes, whatever the file system's block size.
        allocated: found.blocks() * 512,
        rdev: found.rdev(),
        modified: (found.mtime() as u64).saturating_mul(1_000_000_000) + found.mtime_nsec() as u64,
    }
}

pub(super) fn space(path: &Path) -> Result<Space> {
    let folder = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_PATH)
        .open(path)
        .map_err(failed("open", path))?;
    space_of(folder, path)
}

/// Space on the file system of an open file, which may be opened with O_PATH.
pub(super) fn space_of(file: impl AsFd, path: &Path) -> Result<Space> {
    let found = nix::sys::statvfs::fstatvfs(file)
        .map_err(|errno| HostError::errno("statfs", path, errno))?;
    let unit = found.fragment_size();
    Ok(Space {
        total: found.blocks() * unit,
        available: found.blocks_available() * unit,
        free: found.blocks_free() * unit,
        inodes: found.files(),
        inodes_free: found.files_free(),
    })
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::sync::Mutex;

    use super::*;

    /// The threads that act on this number of files at once.
    fn threads_of(count: usize) -> HashSet<thread::ThreadId> {
        let used = Mutex::new(HashSet::new());
        let each: Vec<usize> = (0..count).collect();
        let act = |_: &usize| {
            used.lock().unwrap().insert(thread::current().id());
            Ok(())
        };
        at_once(&each, act).unwrap();
        used.into_inner().unwrap()
    }

    #[test]
    fn of_several_syncs_the_calling_thread_makes_one() {
        for count in [1, 2, 5] {
            let used = threads_of(count);
            assert_eq!(used.len(), count);
            assert!(used.contains(&thread::current().id()));
        }
        assert!(threads_of(0).is_empty());
    }

    #[test]
    fn all_are_tried_and_any_error_is_returned() {
        for fails in 0..4 {
            let tried = Mutex::new(0);
            let act = |n: &usize| {
                *tried.lock().unwrap() += 1;
                match *n == fails {
                    true => Err(HostError::unexpected("fsync", "x", "failed")),
                    false => Ok(()),
                }
            };
            assert_eq!(at_once(&[0, 1, 2], act).is_err(), fails < 3);
            assert_eq!(*tried.lock().unwrap(), 3);
        }
    }
}
