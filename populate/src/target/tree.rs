//! A folder that is filled with the entries of archives.
//!
//! Every path is opened beneath the descriptor of the root. Links are stored as they are; a path
//! that leads through one of them stays below the root, or is refused.

mod folder;

use std::collections::HashSet;
use std::ffi::OsStr;
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::rc::Rc;

use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag, OpenHow, ResolveFlag, openat2};
use nix::sys::stat::{Mode, UtimensatFlags, fchmod, futimens, mkdirat, utimensat};
use nix::sys::time::TimeSpec;
use nix::unistd::{
    Gid, LinkatFlags, Uid, UnlinkatFlags, fchown, fchownat, linkat, symlinkat, unlinkat,
};

use crate::failure::{Failure, Result};
use crate::format::archive::{Archive, Entry, Kind};
use crate::format::name::Name;
use crate::report::Report;
use folder::{clear, is_folder, open_below};

pub use folder::check_empty;

/// What a whiteout of an image begins with, and the one that hides a whole folder.
const WHITEOUT: &[u8] = b".wh.";
const OPAQUE: &[u8] = b".wh..wh..opq";
/// The most bytes of names that are kept to the end: those of folders, and all of an image.
const NAME_BYTES: usize = 128 << 20;
const BUFFER_BYTES: usize = 256 << 10;
/// openat2 fails with EAGAIN when something else is renamed at the same time.
const MAX_ATTEMPTS: usize = 8;

/// Whose rules the archives follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Style {
    /// An archive that a user has made: a path that leaves the root by a link is refused.
    Archive,
    /// A layer of an image: the root is that of all links, whiteouts hide, and devices are skipped.
    Image,
}

/// How much is accepted, and what is kept.
#[derive(Clone, Copy, Debug)]
pub struct Rules {
    pub style: Style,
    /// Keeps owners, setuid and setgid.
    pub preserve_owners: bool,
    pub entries: u64,
    pub bytes: u64,
}

/// Reads more of the content of an entry.
type Content<'a> = &'a mut dyn FnMut(&mut [u8]) -> Result<usize>;

/// A folder that is being filled.
pub struct Tree<'a> {
    root: OwnedFd,
    rules: Rules,
    report: &'a Report,
    entries: u64,
    bytes: u64,
    /// The folder of the last entry, which most entries share.
    last: Option<(Name, Rc<OwnedFd>)>,
    /// Modes and times of folders are set at the end: entries inside would need and change them.
    folders: Vec<Entry>,
    name_bytes: usize,
    /// Names of this layer of an image, which its whiteouts do not hide.
    layer: HashSet<Vec<u8>>,
    buffer: Vec<u8>,
}

impl<'a> Tree<'a> {
    pub fn new(root: OwnedFd, rules: Rules, report: &'a Report) -> Tree<'a> {
        Tree {
            root,
            rules,
            report,
            entries: 0,
            bytes: 0,
            last: None,
            folders: Vec::new(),
            name_bytes: 0,
            layer: HashSet::new(),
            buffer: vec![0; BUFFER_BYTES],
        }
    }

    /// Adds all entries of an archive, or of one layer.
    pub fn add_all(&mut self, content: impl Read) -> Result<()> {
        self.layer.clear();
        let mut archive = Archive::new(content).of_layer(self.rules.style == Style::Image);
        while let Some(entry) = archive.next_entry()? {
            self.add(entry, &mut |into| archive.read(into))?;
        }
        Ok(())
    }

    /// Sets what was left to the end, and makes everything durable.
    pub fn finish(mut self) -> Result<()> {
        for entry in std::mem::take(&mut self.folders).into_iter().rev() {
            let Some(name) = &entry.name else { continue };
            let flags = OFlag::O_DIRECTORY | OFlag::O_RDONLY;
            let opened = self.open(name.as_path(), flags, ResolveFlag::RESOLVE_NO_SYMLINKS);
            match opened {
                Ok(folder) => self.set_metadata(&folder, &entry)?,
                // A later layer has removed or replaced it.
                Err(Errno::ENOENT | Errno::ELOOP | Errno::ENOTDIR) => {}
                Err(errno) => return Err(self.failure("open", name, errno)),
            }
        }
        let synced = nix::unistd::syncfs(&self.root);
        synced.map_err(|errno| Failure::target("make the volume durable", &errno.into()))
    }

    /// Adds one entry, whose content the function reads.
    pub fn add(&mut self, entry: Entry, content: Content) -> Result<()> {
        self.entries += 1;
        if self.entries > self.rules.entries {
            let what = format!("the source has more than {} entries", self.rules.entries);
            return Err(Failure::refused("TooLarge", what));
        }
        let entries = self.entries;
        self.report.count(|numbers| numbers.entries = entries);
        // The root, and the folder of mkfs, keep what they have.
        let name = entry.name.clone();
        let Some(name) = name.filter(|name| name.as_bytes() != b"lost+found") else {
            return Ok(());
        };
        let (folder, last) = name.split();
        let last = OsStr::from_bytes(last).to_owned();
        let parent = self.folder(folder.as_ref())?;
        if self.rules.style == Style::Image {
            if last.as_bytes().starts_with(WHITEOUT) {
                return self.whiteout(&name, &parent, last.as_bytes());
            }
            self.record_layer_name(&name)?;
        }
        match &entry.kind {
            Kind::File => self.add_file(&entry, &name, &parent, &last, content),
            Kind::Folder => self.add_folder(entry, &name, &parent, &last),
            Kind::Symlink(text) => {
                let text = OsStr::from_bytes(text);
                self.replace(&name, &parent, &last, || {
                    symlinkat(text, &parent, last.as_os_str())
                })?;
                self.set_link_metadata(&entry, &name, &parent, &last)
            }
            Kind::HardLink(to) => self.add_hard_link(to, &name, &parent, &last),
            Kind::Device if self.rules.style == Style::Image => {
                self.report.count(|numbers| numbers.skipped += 1);
                Ok(())
            }
            Kind::Device => {
                let what = format!("the archive has the device or FIFO {name}");
                Err(Failure::refused("ArchiveRefused", what))
            }
        }
    }

    fn add_file(
        &mut self,
        entry: &Entry,
        name: &Name,
        parent: &OwnedFd,
        last: &OsStr,
        content: Content,
    ) -> Result<()> {
        self.bytes = self.bytes.saturating_add(entry.size);
        if self.bytes > self.rules.bytes {
            let what = format!(
                "the archive's files are larger than the volume, which has {} bytes",
                self.rules.bytes
            );
            return Err(Failure::refused("TooLarge", what));
        }
        let how = OpenHow::new()
            .flags(OFlag::O_WRONLY | OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_CLOEXEC)
            .mode(Mode::from_bits_truncate(0o600))
            .resolve(ResolveFlag::RESOLVE_BENEATH | ResolveFlag::RESOLVE_NO_SYMLINKS);
        let created = self.replace(name, parent, last, || openat2(parent, last, how))?;
        let mut file = File::from(created);
        loop {
            let count = content(&mut self.buffer)?;
            if count == 0 {
                break;
            }
            let written = file.write_all(&self.buffer[..count]);
            written.map_err(|error| Failure::target(format!("write {name}"), &error))?;
            self.report.count(|numbers| numbers.written += count as u64);
        }
        self.set_metadata(&OwnedFd::from(file), entry)
    }

    fn add_folder(
        &mut self,
        entry: Entry,
        name: &Name,
        parent: &OwnedFd,
        last: &OsStr,
    ) -> Result<()> {
        // Until the end, entries can be created inside.
        let mode = Mode::from_bits_truncate(entry.mode & 0o777 | 0o700);
        let create = || mkdirat(parent, last, mode);
        match create() {
            Ok(()) => {}
            Err(Errno::EEXIST) if is_folder(parent, last) => {}
            Err(Errno::EEXIST) => self.replace(name, parent, last, create)?,
            Err(errno) => return Err(self.failure("create", name, errno)),
        }
        self.count_name(name)?;
        self.folders.push(entry);
        Ok(())
    }

    /// Keeps the name of an entry of a layer, and those of its folders.
    fn record_layer_name(&mut self, name: &Name) -> Result<()> {
        let mut next = Some(name.clone());
        while let Some(name) = next {
            if !self.layer.insert(name.as_bytes().to_vec()) {
                break;
            }
            self.count_name(&name)?;
            next = name.split().0;
        }
        Ok(())
    }

    fn count_name(&mut self, name: &Name) -> Result<()> {
        self.name_bytes += name.as_bytes().len();
        match self.name_bytes > NAME_BYTES {
            true => Err(Failure::refused(
                "TooLarge",
                "the archive has too many and too long names",
            )),
            false => Ok(()),
        }
    }

    fn add_hard_link(
        &mut self,
        to: &Name,
        name: &Name,
        parent: &OwnedFd,
        last: &OsStr,
    ) -> Result<()> {
        let (folder, target) = to.split();
        let from = match folder {
            Some(folder) => self.open(
                folder.as_path(),
                OFlag::O_PATH | OFlag::O_DIRECTORY,
                self.resolve(),
            ),
            None => self.root.try_clone().map_err(|_| Errno::EMFILE),
        };
        let from = from.map_err(|errno| self.failure("follow the hard link to", to, errno))?;
        if to == name {
            return Ok(());
        }
        let target = OsStr::from_bytes(target);
        self.replace(name, parent, last, || {
            linkat(&from, target, parent, last, LinkatFlags::empty())
        })
    }

    /// Creates something, in the place of what has this name already.
    fn replace<T>(
        &mut self,
        name: &Name,
        parent: &OwnedFd,
        last: &OsStr,
        create: impl Fn() -> nix::Result<T>,
    ) -> Result<T> {
        let mut made = create();
        if matches!(made, Err(Errno::EEXIST)) {
            self.remove(parent, last)
                .map_err(|errno| self.failure("replace", name, errno))?;
            made = create();
        }
        made.map_err(|errno| self.failure("create", name, errno))
    }

    /// Removes what an entry replaces. Only an image may replace a folder.
    fn remove(&mut self, parent: &OwnedFd, last: &OsStr) -> nix::Result<()> {
        self.last = None;
        match unlinkat(parent, last, UnlinkatFlags::NoRemoveDir) {
            Err(Errno::EISDIR) if self.rules.style == Style::Image => {
                let folder = open_below(parent, last)?;
                clear(&folder, None, &|_| false)?;
                unlinkat(parent, last, UnlinkatFlags::RemoveDir)
            }
            other => other,
        }
    }

    fn whiteout(&mut self, name: &Name, parent: &OwnedFd, last: &[u8]) -> Result<()> {
        let failed = |tree: &Tree, errno| tree.failure("apply the whiteout", name, errno);
        if last == OPAQUE {
            self.last = None;
            let folder = name.split().0;
            let is_kept = |path: &[u8]| self.layer.contains(path);
            let cleared = open_below(parent, OsStr::new("."))
                .and_then(|open| clear(&open, folder.as_ref().map(Name::as_bytes), &is_kept));
            return cleared.map_err(|errno| failed(self, errno));
        }
        let hidden = OsStr::from_bytes(&last[WHITEOUT.len()..]);
        if matches!(hidden.as_bytes(), b"" | b"." | b"..") || hidden.as_bytes().starts_with(b".wh.")
        {
            return Err(Failure::refused(
                "ArchiveRefused",
                format!("the whiteout {name} is invalid"),
            ));
        }
        match self.remove(parent, hidden) {
            Ok(()) | Err(Errno::ENOENT) => Ok(()),
            Err(errno) => Err(failed(self, errno)),
        }
    }

    fn resolve(&self) -> ResolveFlag {
        match self.rules.style {
            Style::Archive => ResolveFlag::RESOLVE_BENEATH,
            Style::Image => ResolveFlag::RESOLVE_IN_ROOT,
        }
    }

    fn open(&self, path: &Path, flags: OFlag, resolve: ResolveFlag) -> nix::Result<OwnedFd> {
        let how = OpenHow::new().flags(flags | OFlag::O_CLOEXEC).resolve(
            resolve
                | self.resolve()
                | ResolveFlag::RESOLVE_NO_MAGICLINKS
                | ResolveFlag::RESOLVE_NO_XDEV,
        );
        let mut last = Err(Errno::EAGAIN);
        for _ in 0..MAX_ATTEMPTS {
            last = openat2(&self.root, path, how);
            if !matches!(last, Err(Errno::EAGAIN)) {
                break;
            }
        }
        last
    }

    /// The folder of an entry, which is created if no entry has.
    fn folder(&mut self, name: Option<&Name>) -> Result<Rc<OwnedFd>> {
        let Some(name) = name else {
            let root = self.root.try_clone();
            let root = root.map_err(|error| Failure::target("open the volume", &error))?;
            return Ok(Rc::new(root));
        };
        if let Some((last, folder)) = &self.last
            && last == name
        {
            return Ok(folder.clone());
        }
        let flags = OFlag::O_PATH | OFlag::O_DIRECTORY;
        let mut opened = self.open(name.as_path(), flags, ResolveFlag::empty());
        if matches!(opened, Err(Errno::ENOENT)) {
            opened = self.create_folders(name, flags);
        }
        let folder = Rc::new(opened.map_err(|errno| self.failure("open", name, errno))?);
        self.last = Some((name.clone(), folder.clone()));
        Ok(folder)
    }

    fn create_folders(&self, name: &Name, flags: OFlag) -> nix::Result<OwnedFd> {
        let mut parent = self.root.try_clone().map_err(|_| Errno::EMFILE)?;
        for folder in name.with_folders() {
            let last = OsStr::from_bytes(folder.split().1).to_owned();
            match mkdirat(&parent, last.as_os_str(), Mode::from_bits_truncate(0o755)) {
                Ok(()) | Err(Errno::EEXIST) => {}
                Err(errno) => return Err(errno),
            }
            parent = self.open(folder.as_path(), flags, ResolveFlag::empty())?;
        }
        Ok(parent)
    }

    fn set_metadata(&self, file: &OwnedFd, entry: &Entry) -> Result<()> {
        let set = || {
            if self.rules.preserve_owners {
                fchown(
                    file,
                    Some(Uid::from_raw(entry.owner.0)),
                    Some(Gid::from_raw(entry.owner.1)),
                )?;
            }
            fchmod(file, self.mode(entry))?;
            let time = time(entry);
            futimens(file, &time, &time)
        };
        set().map_err(|errno| match &entry.name {
            Some(name) => self.failure("set the mode and time of", name, errno),
            None => Failure::target("set the mode of the volume", &errno.into()),
        })
    }

    fn set_link_metadata(
        &self,
        entry: &Entry,
        name: &Name,
        parent: &OwnedFd,
        last: &OsStr,
    ) -> Result<()> {
        let set = || {
            if self.rules.preserve_owners {
                let (uid, gid) = (Uid::from_raw(entry.owner.0), Gid::from_raw(entry.owner.1));
                fchownat(
                    parent,
                    last,
                    Some(uid),
                    Some(gid),
                    AtFlags::AT_SYMLINK_NOFOLLOW,
                )?;
            }
            let time = time(entry);
            utimensat(parent, last, &time, &time, UtimensatFlags::NoFollowSymlink)
        };
        set().map_err(|errno| self.failure("set the owner and time of", name, errno))
    }

    /// Without its owner, setuid and setgid would be of the user of this program.
    fn mode(&self, entry: &Entry) -> Mode {
        let kept = if self.rules.preserve_owners {
            0o7777
        } else {
            0o777
        };
        Mode::from_bits_truncate(entry.mode & kept)
    }

    /// What the entries themselves cause is final; the rest is a failure of the volume.
    fn failure(&self, verb: &str, name: &Name, errno: Errno) -> Failure {
        let what = format!("{verb} {name}");
        let why = match errno {
            Errno::EXDEV | Errno::ELOOP => "it leads out of the volume, by a link",
            Errno::ENOTDIR => "a part of its path is not a folder",
            Errno::EISDIR | Errno::EEXIST | Errno::ENOTEMPTY => "a folder is in its place",
            Errno::ENAMETOOLONG => "its path is too long",
            Errno::ENOENT => "what it leads to does not exist",
            Errno::EPERM | Errno::EACCES => "it is not permitted",
            Errno::EMLINK => "it has too many links",
            errno => return Failure::target(what, &errno.into()),
        };
        Failure::refused("ArchiveRefused", format!("{what}: {why} ({errno})"))
    }
}

fn time(entry: &Entry) -> TimeSpec {
    TimeSpec::new(entry.modified.0, entry.modified.1)
}

#[cfg(test)]
mod tests;
