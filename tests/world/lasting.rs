//! What is wrong with a machine and stays so for many calls, until it's ended.

use std::path::{Path, PathBuf};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use slackwater::error::chain;
use slackwater::host::memory::{Hung, Unreadable};
use slackwater::model::VolumeParameters;
use slackwater::operation::{AskCapacity, PublishVolume, StageVolume};

use super::{How, OTHER, POOL, World, create, settings, staging, target, text};

/// What stays wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Lasting {
    /// The pool is full, whatever is freed: others fill it at once.
    Full,
    /// A record on the pool can't be read.
    Unreadable(PathBuf, Unreadable),
    /// A record can't be read once a driver that has begun before has read it so many times more.
    UnreadableAfter(PathBuf, Unreadable, usize),
    /// The pool's disk is dead. In the end it answers again, or is mounted anew: then devices of
    /// volumes stay dead.
    Dead { anew: bool },
    /// The pool's disk hangs: who asks for anything on it waits.
    Hangs,
}

/// A disk that hangs until this is ended or dropped, or until it's certain that a call waits for it.
pub struct Hanging {
    end: Sender<()>,
    watched: JoinHandle<bool>,
}

impl Hanging {
    /// All calls of a test together take milliseconds.
    const LONGEST: Duration = Duration::from_secs(60);

    fn begin(hung: Hung) -> Hanging {
        let (end, ended) = channel();
        let watched = std::thread::spawn(move || {
            let waited = ended.recv_timeout(Hanging::LONGEST);
            drop(hung);
            waited == Err(RecvTimeoutError::Timeout)
        });
        Hanging { end, watched }
    }

    /// Whether a call has waited.
    fn end(self) -> bool {
        drop(self.end);
        self.watched.join().unwrap_or(true)
    }
}

impl Lasting {
    /// Whether the driver can't see all that is there.
    pub fn hides(&self) -> bool {
        !matches!(self, Lasting::Full)
    }

    /// Whether it's of the node's record: calls don't need that once the driver has begun.
    pub fn is_of_node_record(&self) -> bool {
        let node = settings().node_record;
        matches!(self, Lasting::UnreadableAfter(path, ..) if *path == node)
    }

    /// Whether the pool's disk is lost, until it's back.
    pub fn has_no_disk(&self) -> bool {
        matches!(self, Lasting::Dead { .. } | Lasting::Hangs)
    }
}

impl World {
    pub fn begin(&mut self, lasting: &Lasting) {
        self.end();
        match lasting {
            Lasting::Full => self.host.keep_full(true),
            Lasting::Unreadable(path, how) => {
                let made = self.host.make_unreadable(path, *how);
                made.expect("a record is there");
            }
            Lasting::UnreadableAfter(path, how, reads) => {
                let made = self.host.make_unreadable_after(path, *how, *reads);
                made.expect("a record is there");
            }
            Lasting::Dead { .. } => {
                let killed = self.host.kill_disk(Path::new(POOL));
                killed.expect("a disk is there");
            }
            Lasting::Hangs => {
                let hung = self.host.hang_disk(Path::new(POOL));
                self.hung = Some(Hanging::begin(hung.expect("a disk is there")));
            }
        }
        self.lasting = Some(lasting.clone());
        self.remembers = true;
    }

    /// Nothing lasts any more.
    pub fn end(&mut self) {
        match self.lasting.take() {
            Some(Lasting::Full) => self.host.keep_full(false),
            Some(Lasting::Unreadable(..) | Lasting::UnreadableAfter(..)) => {
                self.host.make_readable();
            }
            Some(Lasting::Dead { anew }) => {
                let folder = Path::new(POOL);
                let back = match anew {
                    true => self.host.mount_disk_anew(folder),
                    false => self.host.replace_disk(folder),
                };
                back.expect("a disk can be put back");
            }
            Some(Lasting::Hangs) => {
                let waited = self.hung.take().is_some_and(Hanging::end);
                assert!(!waited, "a call waited for a disk that hangs");
            }
            None => {}
        }
    }

    /// The records of the pool, of its volumes and of its snapshots.
    pub fn record_files(&self) -> Vec<PathBuf> {
        let folder = Path::new(POOL);
        let files = self.host.aside(|host| host.files_below(folder));
        let files = files.iter().map(|file| folder.join(file));
        let is_record = |file: &PathBuf| {
            let below = file.strip_prefix(folder).unwrap_or(file);
            !below.starts_with("trash")
                && (below == Path::new("pool.json") || below.ends_with("record.json"))
        };
        files.filter(is_record).collect()
    }

    /// A volume of the other pool has its whole life, whatever is wrong with the first one.
    pub fn live_in_other_pool(&self) -> std::result::Result<(), String> {
        const NAME: &str = "beside";
        let driver = self.driver().map_err(|error| chain(&error))?;
        let mut request = create(NAME, How::EXT4);
        request.parameters.pool = Some(OTHER.into());
        let made = driver.create_volume(&request);
        let id = made.map_err(|error| chain(&error))?.id.to_string();
        let stage = StageVolume {
            volume_id: id.clone(),
            staging_path: text(&staging(NAME)),
            capability: How::EXT4.capability(),
        };
        let publish = PublishVolume {
            volume_id: id.clone(),
            staging_path: text(&staging(NAME)),
            target_path: text(&target(NAME, 0)),
            capability: How::EXT4.capability(),
            read_only: false,
        };
        let lived = driver
            .stage_volume(&stage)
            .and_then(|()| driver.publish_volume(&publish))
            .and_then(|()| driver.unpublish_volume(&id, &publish.target_path))
            .and_then(|()| driver.unstage_volume(&id, &stage.staging_path))
            .and_then(|()| driver.delete_volume(&id));
        lived.map_err(|error| format!("in the other pool: {}", chain(&error)))?;
        let removed = self.host.remove_leaf(&staging(NAME));
        removed.map_err(|errno| errno.to_string())
    }

    /// What GetCapacity says of a pool.
    pub fn capacity(&self, pool: &str) -> std::result::Result<u64, String> {
        let driver = self.driver().map_err(|error| chain(&error))?;
        let parameters = VolumeParameters {
            pool: Some(pool.into()),
            ..VolumeParameters::default()
        };
        let request = AskCapacity {
            parameters,
            capabilities: Vec::new(),
            topology: None,
        };
        let capacity = driver.capacity(&request);
        capacity
            .map(|found| found.available)
            .map_err(|error| chain(&error))
    }
}
