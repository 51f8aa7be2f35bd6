//! A directory of others whose files are imported. It is only read, no symbolic link in it is followed,
//! and no other mount is entered.
//!
//! It is walked three times, in the same order: the survey keeps what each entry is like, the copy and
//! the walk after it compare. A file is copied under a lease, which no writer can have at the same time.

mod copy;
mod metadata;
mod walk;

use std::collections::HashSet;
use std::collections::hash_map::DefaultHasher;
use std::fmt;
use std::fs::{File, Metadata};
use std::hash::{Hash, Hasher};
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use nix::errno::Errno;
use nix::fcntl::{AT_FDCWD, OFlag, OpenHow, ResolveFlag, openat2};

use crate::error::HostError;
use crate::host::Result;
use walk::{Entry, Kind, Limits, walk};

/// At least the unit in which the kernel's clock for the times of files advances.
const CLOCK_UNIT: Duration = Duration::from_millis(20);

/// How many names are kept of what is not copied.
pub const LISTED: usize = 1000;

/// A directory that is imported.
pub struct ImportTree {
    path: PathBuf,
    root: OwnedFd,
    limits: Limits,
    /// When the survey began. What was changed since is not copied.
    began: (i64, i64),
    /// The hashes of each entry, in the order of the walk.
    surveyed: Vec<Hashes>,
    content: TreeContent,
}

/// What is in a directory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TreeContent {
    pub folders: u64,
    /// Regular files, each once for each name.
    pub files: u64,
    pub symlinks: u64,
    /// Bytes of data, without holes.
    pub bytes: u64,
    /// What is not copied: the path below the directory, and what it is. At most [`LISTED`] mount
    /// points, and as many other entries.
    pub skipped: Vec<(PathBuf, &'static str)>,
    pub not_copied: u64,
    /// How many of the list are no mount points, and how many are.
    listed: [usize; 2],
}

impl TreeContent {
    fn skip(&mut self, path: &Path, (what, is_mount_point): (&'static str, bool)) {
        self.not_copied += 1;
        let listed = &mut self.listed[usize::from(is_mount_point)];
        if *listed < LISTED {
            *listed += 1;
            self.skipped.push((path.to_path_buf(), what));
        }
    }
}

impl fmt::Display for TreeContent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} files, {} directories and {} symbolic links",
            self.files, self.folders, self.symlinks
        )
    }
}

/// How much of a directory was copied.
#[derive(Clone, Copy, Debug, Default)]
pub struct TreeProgress {
    /// Directories, files and symbolic links.
    pub entries: u64,
    /// Bytes of data.
    pub bytes: u64,
}

impl ImportTree {
    /// Opens a directory, and looks at everything in it. No part of the path may be a symbolic link.
    pub fn open(path: &Path) -> Result<ImportTree> {
        ImportTree::open_within(path, Limits::DEFAULT)
    }

    fn open_within(path: &Path, limits: Limits) -> Result<ImportTree> {
        let how = OpenHow::new()
            .flags(OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC)
            .resolve(ResolveFlag::RESOLVE_NO_SYMLINKS);
        let root = openat2(AT_FDCWD, path, how).map_err(|errno| match errno {
            Errno::ELOOP => {
                let what = "a part of the path is a symbolic link; give the path without it";
                HostError::unexpected("open", path, what)
            }
            errno => HostError::errno("open", path, errno),
        })?;
        let began = now();
        // Two writes within one unit leave the same time. One before the survey and one after it have
        // this much between them, or the first one is seen by its time.
        thread::sleep(CLOCK_UNIT);
        let mut tree = ImportTree {
            path: path.to_path_buf(),
            root,
            limits,
            began,
            surveyed: Vec::new(),
            content: TreeContent::default(),
        };
        tree.survey()?;
        Ok(tree)
    }

    /// What is in it.
    pub fn content(&self) -> &TreeContent {
        &self.content
    }

    /// Copies everything into an empty directory that is open for reading. Returns after everything
    /// was compared with the survey again.
    pub fn copy_to(&self, target: &File, report: &mut dyn FnMut(TreeProgress)) -> Result<()> {
        let mut copy = copy::Copy::new(self, target, report);
        self.compare(|entry| copy.add(entry))?;
        copy.finish()?;
        self.compare(|_| Ok(()))
    }

    /// Refuses an entry that was changed since the import began. Some file systems have seconds alone:
    /// ext4 with inodes of 128 bytes, for example.
    fn check_age(&self, path: &Path, changed: (i64, i64)) -> Result<()> {
        let is_recent = match changed.1 {
            0 => changed.0 >= self.began.0,
            _ => changed >= self.began,
        };
        if is_recent && changed > now() {
            let what = "its time of change is in the future, so a change of it might not be seen; correct the clock of the node, or wait until then";
            return Err(HostError::unexpected("import", self.whole(path), what));
        }
        match is_recent {
            true => Err(self.changed(path)),
            false => Ok(()),
        }
    }

    fn survey(&mut self) -> Result<()> {
        let (mut surveyed, mut content) = (Vec::new(), TreeContent::default());
        // A file with several names has its data once.
        let mut linked = HashSet::new();
        walk(&self.root, &self.path, self.limits, |entry| {
            if let Some(found) = entry.metadata {
                self.check_age(entry.path, (found.ctime(), found.ctime_nsec()))?;
            }
            surveyed.push(Hashes::of(entry));
            match (entry.kind, entry.metadata) {
                (Kind::Other(what), found) => content.skip(entry.path, (what, found.is_none())),
                (Kind::Folder, _) => content.folders += 1,
                (Kind::Symlink, _) => content.symlinks += 1,
                (Kind::File, found) => {
                    content.files += 1;
                    content.bytes += found
                        .filter(|found| is_first(&mut linked, found))
                        .map_or(0, |found| found.len().min(found.blocks() * 512));
                }
            }
            Ok(())
        })?;
        (self.surveyed, self.content) = (surveyed, content);
        Ok(())
    }

    /// Walks again. An error if an entry is not what it was in the survey.
    fn compare(&self, mut visit: impl FnMut(&Entry<'_>) -> Result<()>) -> Result<()> {
        let mut expected = self.surveyed.iter();
        walk(&self.root, &self.path, self.limits, |entry| {
            let (now, then) = (Hashes::of(entry), expected.next());
            match then {
                Some(then) if *then == now => visit(entry),
                Some(then) if then.path == now.path => Err(self.changed(entry.path)),
                // Another entry has been added or removed.
                _ => Err(self.changed(entry.path.parent().unwrap_or(entry.path))),
            }
        })?;
        match expected.next() {
            None => Ok(()),
            Some(_) => Err(self.changed(Path::new(""))),
        }
    }

    fn whole(&self, path: &Path) -> PathBuf {
        walk::whole(&self.path, path)
    }

    fn changed(&self, path: &Path) -> HostError {
        let what = "it changed while the directory was read; stop what uses the directory";
        HostError::unexpected("import", self.whole(path), what)
    }
}

/// Seconds and nanoseconds since 1970.
fn now() -> (i64, i64) {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let now = now.unwrap_or_default();
    (now.as_secs() as i64, i64::from(now.subsec_nanos()))
}

/// Whether a file is not one that was found under another name before.
fn is_first(linked: &mut HashSet<(u64, u64)>, found: &Metadata) -> bool {
    found.nlink() == 1 || linked.insert((found.dev(), found.ino()))
}

/// Hashes of an entry.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Hashes {
    path: u64,
    /// Another one if the entry was changed, or is another file.
    state: u64,
}

impl Hashes {
    fn of(entry: &Entry<'_>) -> Hashes {
        fn hash(of: impl Hash) -> u64 {
            let mut hasher = DefaultHasher::new();
            of.hash(&mut hasher);
            hasher.finish()
        }
        Hashes {
            path: hash(entry.path),
            state: hash(entry.metadata.map(state)),
        }
    }
}

fn state(found: &Metadata) -> ([u64; 7], [i64; 4]) {
    let numbers = [
        found.dev(),
        found.ino(),
        found.mode().into(),
        found.uid().into(),
        found.gid().into(),
        found.nlink(),
        found.len(),
    ];
    let times = [
        found.mtime(),
        found.mtime_nsec(),
        found.ctime(),
        found.ctime_nsec(),
    ];
    (numbers, times)
}

#[cfg(test)]
mod tests;
