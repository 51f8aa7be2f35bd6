//! The journal of freezes: an entry is written before its file systems are frozen and its mapped
//! devices are suspended, in `STATE/freezes/<uuid>.json`, with a lock file next to it.
//!
//! The driver and the guard hold the lock through one open file until neither can freeze any more;
//! this includes a guard that is being killed while a FIFREEZE of it hangs. So the file systems of
//! an entry whose lock is free cannot become frozen again, nor its devices suspended, and the entry
//! is removed once they are resumed and thawed.

use std::fs::File;
use std::path::PathBuf;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use slackwater_core::error::{Error, HostError, chain};
use slackwater_core::host::freezer::JournaledFreeze;
use slackwater_core::host::linux::freeze;
use slackwater_core::host::{Device, Effect, FileId, FreezeMember, Host, Result};
use slackwater_core::model::FsType;
use slackwater_core::record::{self, Record};

/// How often a lock is tried while another process holds it for a moment to inspect it.
const LOCK_TRIES: u32 = 5;
/// Time between two attempts.
const LOCK_RETRY_INTERVAL: std::time::Duration = std::time::Duration::from_millis(5);

/// One freeze session.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// The boot in which it was written: in a later boot nothing is frozen.
    pub boot: Uuid,
    /// PID of the driver.
    pub owner: u32,
    /// When it was written, or, once `freezing` is set, when freezing began; seconds since 1970.
    pub since: u64,
    /// When the guard thaws, in seconds since 1970, rounded up; an estimate before `freezing` is
    /// set.
    pub until: u64,
    /// FIFREEZE may have been called. Before that, what is frozen or suspended was frozen by another
    /// program.
    pub freezing: bool,
    pub members: Vec<EntryMember>,
}

/// One member of an [`Entry`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EntryMember {
    pub volume_id: String,
    /// Path of its device node.
    pub device: PathBuf,
    /// Number of its device.
    pub rdev: u64,
    /// st_dev of its image.
    pub image_device: u64,
    pub image_inode: u64,
    /// Type of its file system, if it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fs: Option<FsType>,
    /// UUID of its mapped device, if that may be suspended; `device` and `rdev` are then those of the
    /// mapped device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mapped: Option<String>,
}

impl EntryMember {
    /// Creates the entry of a member of a session, with the UUID of its mapped device.
    pub fn of(member: &FreezeMember, device: &Device, mapped: Option<String>) -> EntryMember {
        EntryMember {
            volume_id: member.volume_id.clone(),
            device: device.path.clone(),
            rdev: device.rdev,
            image_device: member.image.device,
            image_inode: member.image.inode,
            fs: member.root.as_ref().map(|root| root.fs),
            mapped,
        }
    }

    pub fn device(&self) -> Device {
        Device {
            path: self.device.clone(),
            rdev: self.rdev,
        }
    }

    pub fn image(&self) -> FileId {
        FileId {
            device: self.image_device,
            inode: self.image_inode,
        }
    }
}

impl Record for Entry {
    const VERSION: u32 = 2;
    const WHAT: &'static str = "freeze journal entry";

    /// A program that knows no mapped devices must not thaw a file system on one that is suspended.
    fn written_version(&self) -> u32 {
        match self.members.iter().any(|member| member.mapped.is_some()) {
            true => 2,
            false => 1,
        }
    }
}

/// The directory of the entries.
#[derive(Clone)]
pub struct Journal {
    host: Arc<dyn Host>,
    state_dir: PathBuf,
}

/// The content of the directory.
pub struct Entries {
    /// Entries, oldest first.
    pub entries: Vec<(Uuid, Entry)>,
    /// The entries that cannot be read, and why.
    pub unreadable: Vec<(Uuid, HostError)>,
}

/// Whether a process may still freeze the file systems of an entry.
pub enum Hold {
    /// The driver or the guard holds the lock.
    Held,
    /// No process held the lock; this process now holds it as long as the file is open. (`None`:
    /// the lock file does not exist any more.)
    Free(Option<File>),
}

/// An entry of this process, and its lock.
pub struct LockedEntry {
    journal: Journal,
    id: Uuid,
    entry: Entry,
    lock: File,
}

impl Journal {
    /// The journal in a state directory, which need not exist yet.
    pub fn new(host: Arc<dyn Host>, state_dir: PathBuf) -> Journal {
        Journal { host, state_dir }
    }

    fn folder(&self) -> PathBuf {
        self.state_dir.join("freezes")
    }

    fn entry_path(&self, id: Uuid) -> PathBuf {
        self.folder().join(format!("{id}.json"))
    }

    fn lock_path(&self, id: Uuid) -> PathBuf {
        self.folder().join(format!("{id}.lock"))
    }

    /// Creates the state directory and the journal's directory.
    pub fn make_folders(&self) -> Result<()> {
        let parents: Vec<_> = self.state_dir.ancestors().collect();
        for path in parents.iter().rev().filter(|path| path.parent().is_some()) {
            // Only missing directories are created, because this process may lack the permission to
            // create those above.
            if !path.is_dir() {
                self.host.perform(&Effect::MakeDir { path })?;
            }
        }
        self.host
            .perform(&Effect::MakeDir {
                path: &self.folder(),
            })
            .map(drop)
    }

    /// Writes a new entry, locked by this process. A crash leaves a lock file, or an entry of which
    /// nothing is frozen; the next sweep removes both.
    pub fn begin(&self, entry: Entry) -> Result<LockedEntry> {
        self.make_folders()?;
        loop {
            let id = self.host.random_uuid();
            let path = self.lock_path(id);
            self.host.perform(&Effect::WriteFile {
                path: &path,
                bytes: b"",
            })?;
            // A sweep may take a lock file that is not locked yet for a leftover, and remove it.
            let lock = match freeze::lock_shared_with_guard(&path) {
                Err(error) if error.code() == Some(nix::errno::Errno::ENOENT) => continue,
                other => other?,
            };
            let Some(lock) = lock.filter(|_| path.exists()) else {
                continue;
            };
            let own = LockedEntry {
                journal: self.clone(),
                id,
                entry,
                lock,
            };
            own.write()?;
            return Ok(own);
        }
    }

    /// All entries that can be read, and the errors of the others.
    pub fn entries(&self) -> Result<Entries> {
        let mut entries = Vec::new();
        let mut unreadable = Vec::new();
        for id in self.names(".json")? {
            match self.entry(id) {
                Ok(entry) => entries.extend(entry.map(|entry| (id, entry))),
                Err(error) => unreadable.push((id, error)),
            }
        }
        entries.sort_by_key(|(_, entry)| entry.since);
        Ok(Entries {
            entries,
            unreadable,
        })
    }

    /// One entry; `None` if it was removed.
    pub fn entry(&self, id: Uuid) -> Result<Option<Entry>> {
        let path = self.entry_path(id);
        let entry = record::load::<Entry>(self.host.as_ref(), &path);
        entry.map_err(|error| HostError::unexpected("read", path, chain(&error)))
    }

    /// Whether the journal is empty: then no file system is frozen, or about to be frozen, by the
    /// driver.
    pub fn is_empty(&self) -> Result<bool> {
        Ok(self.names(".json")?.is_empty())
    }

    fn names(&self, suffix: &str) -> Result<Vec<Uuid>> {
        let names = self.host.list_dir(&self.folder())?.unwrap_or_default();
        let ids = names.iter().filter_map(|name| name.strip_suffix(suffix));
        Ok(ids.filter_map(|id| id.parse().ok()).collect())
    }

    /// The freezes in the journal, one for each member.
    pub fn list_journaled(&self) -> Result<Vec<JournaledFreeze>> {
        let Entries {
            entries,
            unreadable,
        } = self.entries()?;
        if let Some((_, error)) = unreadable.into_iter().next() {
            return Err(error);
        }
        let boot = self.host.boot_id()?;
        let mut found = Vec::new();
        for (id, entry) in entries.into_iter().filter(|(_, entry)| entry.boot == boot) {
            let held = matches!(self.take(id)?, Hold::Held);
            found.extend(entry.members.into_iter().map(|member| JournaledFreeze {
                volume_id: member.volume_id,
                device: member.device,
                owner: entry.owner,
                since: entry.since,
                until: entry.until,
                freezing: entry.freezing,
                held,
                mapped: member.mapped,
            }));
        }
        Ok(found)
    }

    /// Takes the lock of an entry if no process holds it any more.
    pub fn take(&self, id: Uuid) -> Result<Hold> {
        for _ in 0..LOCK_TRIES {
            match freeze::lock_shared_with_guard(&self.lock_path(id)) {
                Ok(Some(lock)) => return Ok(Hold::Free(Some(lock))),
                Ok(None) => std::thread::sleep(LOCK_RETRY_INTERVAL),
                Err(error) if error.code() == Some(nix::errno::Errno::ENOENT) => {
                    return Ok(Hold::Free(None));
                }
                Err(error) => return Err(error),
            }
        }
        Ok(Hold::Held)
    }

    /// Removes an entry of which nothing is frozen.
    pub fn remove(&self, id: Uuid) -> Result<()> {
        let unfinished = self.folder().join(format!("{id}.json.new"));
        for path in [unfinished, self.entry_path(id), self.lock_path(id)] {
            if path.exists() {
                self.host.perform(&Effect::RemoveFile { path: &path })?;
            }
        }
        Ok(())
    }

    /// Removes what a crash during the writing of an entry left: lock files without an entry, and
    /// temporary files.
    pub fn remove_leftovers(&self) -> Result<()> {
        for id in self.names(".lock")? {
            if self.entry_path(id).exists() {
                continue;
            }
            let Hold::Free(_lock) = self.take(id)? else {
                continue;
            };
            // The entry may have been written in the meantime.
            if !self.entry_path(id).exists() {
                self.remove(id)?;
            }
        }
        Ok(())
    }
}

impl LockedEntry {
    fn write(&self) -> Result<()> {
        let path = self.journal.entry_path(self.id);
        record::store(self.journal.host.as_ref(), &path, &self.entry).map_err(|error| match error {
            Error::Host { source, .. } => source,
            other => HostError::unexpected("write", path, chain(&other)),
        })
    }

    /// Records that freezing begins, and its deadline.
    pub fn begin_freezing(&mut self, since: u64, until: u64) -> Result<()> {
        self.entry.since = since;
        self.entry.until = until;
        self.entry.freezing = true;
        self.write()
    }

    /// Records that everything was thawed without the guard, as if the deadline had passed.
    pub fn expire(&mut self) -> Result<()> {
        self.entry.until = self.journal.host.now().saturating_sub(1);
        self.write()
    }

    /// Whether another session may have something frozen that the guard must still thaw: its entry
    /// is held, and either marked as freezing with a deadline that has not passed, or unreadable.
    pub fn is_another_frozen(&self) -> Result<bool> {
        let journal = &self.journal;
        let (boot, now) = (journal.host.boot_id()?, journal.host.now());
        let Entries {
            entries,
            unreadable,
        } = journal.entries()?;
        let counts = |entry: &Entry| entry.freezing && entry.boot == boot && now <= entry.until;
        let counting = entries.iter().filter(|(_, entry)| counts(entry));
        let ids = counting.map(|(id, _)| *id);
        for id in ids.chain(unreadable.iter().map(|(id, _)| *id)) {
            if id != self.id && matches!(journal.take(id)?, Hold::Held) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// The open lock file, to be passed to the guard.
    pub fn lock(&self) -> &File {
        &self.lock
    }

    /// Removes the entry when nothing of it is frozen any more, or can become frozen.
    pub fn remove_entry(self) {
        if let Err(error) = self.journal.remove(self.id) {
            let path = self.journal.entry_path(self.id);
            tracing::warn!(entry = %path.display(), error = %chain(&error), "failed to remove the journal entry of a finished freeze; the next sweep removes it");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use slackwater_core::record::formats;

    #[test]
    fn entries_of_the_journal_keep_their_format() {
        let member = |fs| EntryMember {
            volume_id: "pool.volume".into(),
            device: "/dev/loop7".into(),
            rdev: 1799,
            image_device: 64768,
            image_inode: u64::MAX,
            fs: Some(fs),
            mapped: None,
        };
        let members = Vec::from([FsType::Ext4, FsType::Xfs, FsType::Btrfs].map(member));
        let entry = |freezing, members| Entry {
            boot: Uuid::from_u128(1),
            owner: 4711,
            since: 1_700_000_000,
            until: 1_700_000_010,
            freezing,
            members,
        };
        let mapped = |volume: &str, fs| EntryMember {
            volume_id: volume.into(),
            device: "/dev/mapper/SLACKWATER-pool-volume".into(),
            rdev: 64774,
            image_device: 64768,
            image_inode: 17,
            fs,
            mapped: Some("SLACKWATER-pool-volume".into()),
        };
        let both = mapped("pool.mounted", Some(FsType::Xfs));
        let suspended = vec![both, mapped("pool.raw", None), members[0].clone()];
        let expected = vec![
            ("announced.json", entry(false, members.clone())),
            ("freezing.json", entry(true, members)),
            ("suspending.json", entry(true, suspended)),
        ];
        formats::check("freeze-journal", expected);
    }

    #[test]
    fn fuzz_entries_of_the_journal() {
        let path = std::path::Path::new("/entry.json");
        let seeds: Vec<_> = formats::files("freeze-journal").into_values().collect();
        let parse = |bytes: &[u8]| record::decode::<Entry>(path, bytes);
        let target = |bytes: &[u8]| drop(parse(bytes));
        slackwater_core::fuzz::fuzz("freeze journal", &seeds, target, |bytes| {
            assert!(parse(bytes).is_err() || parse(bytes).is_ok_and(|entry| entry.owner == 4711));
        });
    }
}
