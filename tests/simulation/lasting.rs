//! Faults of a machine that last for many calls, until they are ended.

use std::path::{Path, PathBuf};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use slackwater::error::chain;
use slackwater::host::memory::{Hung, Unreadable};
use slackwater::model::VolumeParameters;
use slackwater::operation::{GetCapacity, PublishVolume, StageVolume};

use super::{OTHER, POOL, Simulation, VolumeConfig, create, settings, staging, target, text};

/// A fault that lasts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LastingFault {
    /// The pool is full. Other programs fill it at once with whatever is freed.
    Full,
    /// A record on the pool cannot be read.
    Unreadable(PathBuf, Unreadable),
    /// A record becomes unreadable after the driver, which has read it before, has read it this
    /// many more times.
    UnreadableAfter(PathBuf, Unreadable, usize),
    /// The pool's disk is dead. At the end it answers again, or is mounted again; in the second
    /// case devices of volumes stay dead.
    Dead { remounted: bool },
    /// The pool's disk hangs: each process that accesses it waits.
    Hangs,
}

/// A disk that hangs until this is ended or dropped, or until it is certain that a call waits for
/// it.
pub struct HangingDisk {
    end: Sender<()>,
    watched: JoinHandle<bool>,
}

impl HangingDisk {
    /// All calls of a test together take milliseconds.
    const LONGEST: Duration = Duration::from_secs(60);

    fn begin(hung: Hung) -> HangingDisk {
        let (end, end_receiver) = channel();
        let watched = std::thread::spawn(move || {
            let waited = end_receiver.recv_timeout(HangingDisk::LONGEST);
            drop(hung);
            waited == Err(RecvTimeoutError::Timeout)
        });
        HangingDisk { end, watched }
    }

    /// Whether a call has waited.
    fn end(self) -> bool {
        drop(self.end);
        self.watched.join().unwrap_or(true)
    }
}

impl LastingFault {
    /// Whether the driver cannot see everything that exists.
    pub fn hides(&self) -> bool {
        !matches!(self, LastingFault::Full)
    }

    /// Whether the fault affects the node's record, which calls do not need once the driver has
    /// started.
    pub fn is_of_node_record(&self) -> bool {
        let node = settings().node_record;
        matches!(self, LastingFault::UnreadableAfter(path, ..) if *path == node)
    }

    /// Whether the pool's disk is missing, until it comes back.
    pub fn has_no_disk(&self) -> bool {
        matches!(self, LastingFault::Dead { .. } | LastingFault::Hangs)
    }
}

impl Simulation {
    pub fn begin(&mut self, lasting_fault: &LastingFault) {
        self.end();
        match lasting_fault {
            LastingFault::Full => self.host.keep_full(true),
            LastingFault::Unreadable(path, mode) => {
                let result = self.host.make_unreadable(path, *mode);
                result.expect("the record exists");
            }
            LastingFault::UnreadableAfter(path, mode, reads) => {
                let result = self.host.make_unreadable_after(path, *mode, *reads);
                result.expect("the record exists");
            }
            LastingFault::Dead { .. } => {
                let killed = self.host.kill_disk(Path::new(POOL));
                killed.expect("the disk exists");
            }
            LastingFault::Hangs => {
                let hung = self.host.hang_disk(Path::new(POOL));
                self.hung = Some(HangingDisk::begin(hung.expect("the disk exists")));
            }
        }
        self.lasting_fault = Some(lasting_fault.clone());
        self.remembers = true;
    }

    /// Ends the fault.
    pub fn end(&mut self) {
        match self.lasting_fault.take() {
            Some(LastingFault::Full) => self.host.keep_full(false),
            Some(LastingFault::Unreadable(..) | LastingFault::UnreadableAfter(..)) => {
                self.host.make_readable();
            }
            Some(LastingFault::Dead { remounted }) => {
                let folder = Path::new(POOL);
                let back = match remounted {
                    true => self.host.mount_disk_again(folder),
                    false => self.host.replace_disk(folder),
                };
                back.expect("the disk can be put back");
            }
            Some(LastingFault::Hangs) => {
                let waited = self.hung.take().is_some_and(HangingDisk::end);
                assert!(!waited, "a call waited for a disk that hangs");
            }
            None => {}
        }
    }

    /// The records of the pool, of its volumes and of its snapshots.
    pub fn record_files(&self) -> Vec<PathBuf> {
        let folder = Path::new(POOL);
        let files = self.host.without_faults(|host| host.files_below(folder));
        let files = files.iter().map(|file| folder.join(file));
        let is_record = |file: &PathBuf| {
            let below = file.strip_prefix(folder).unwrap_or(file);
            !below.starts_with("trash")
                && (below == Path::new("pool.json") || below.ends_with("record.json"))
        };
        files.filter(is_record).collect()
    }

    /// Creates, uses and deletes a volume in the other pool, which must work whatever is wrong with
    /// the first pool.
    pub fn live_in_other_pool(&self) -> std::result::Result<(), String> {
        const NAME: &str = "other-pool-volume";
        let driver = self.driver().map_err(|error| chain(&error))?;
        let mut request = create(NAME, VolumeConfig::EXT4);
        request.parameters.pool = Some(OTHER.into());
        let result = driver.volumes.create_volume(&request);
        let id = result.map_err(|error| chain(&error))?.id.to_string();
        let stage = StageVolume {
            volume_id: id.clone(),
            staging_path: text(&staging(NAME)),
            capability: VolumeConfig::EXT4.capability(),
        };
        let publish = PublishVolume {
            volume_id: id.clone(),
            staging_path: text(&staging(NAME)),
            target_path: text(&target(NAME, 0)),
            capability: VolumeConfig::EXT4.capability(),
            read_only: false,
        };
        let lifecycle = driver
            .volumes
            .stage_volume(&stage)
            .and_then(|()| driver.volumes.publish_volume(&publish))
            .and_then(|()| driver.volumes.unpublish_volume(&id, &publish.target_path))
            .and_then(|()| driver.volumes.unstage_volume(&id, &stage.staging_path))
            .and_then(|()| driver.volumes.delete_volume(&id));
        lifecycle.map_err(|error| format!("in the other pool: {}", chain(&error)))?;
        let removed = self.host.remove_leaf(&staging(NAME));
        removed.map_err(|errno| errno.to_string())
    }

    /// Available bytes of a pool, from GetCapacity.
    pub fn capacity(&self, pool: &str) -> std::result::Result<u64, String> {
        let driver = self.driver().map_err(|error| chain(&error))?;
        let parameters = VolumeParameters {
            pool: Some(pool.into()),
            ..VolumeParameters::default()
        };
        let request = GetCapacity {
            parameters,
            capabilities: Vec::new(),
            topology: None,
        };
        let capacity = driver.pools.capacity(&request);
        capacity
            .map(|found| found.available)
            .map_err(|error| chain(&error))
    }
}
