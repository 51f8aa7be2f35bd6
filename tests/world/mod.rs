//! A world for tests of the operations: a simulated machine, a driver on it, a caller who
//! repeats, users who write, and the checks that hold whatever has happened.

#![allow(
    dead_code,
    reason = "each test program that includes this uses a part of it"
)]

pub mod check;
pub mod cuts;
pub mod lasting;
mod step;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use slackwater::cut::Seams;
use slackwater::error::{Error, Result, chain};
use slackwater::host::memory::{FaultMode, MemoryHost, MemoryOptions};
use slackwater::model::id::NameKind;
use slackwater::model::size::{GIB, MIB};
use slackwater::model::{CapacityRange, VolumeId};
use slackwater::operation::{CreateVolume, Driver, Settings};

pub use lasting::Lasting;
pub use step::{How, Step};

/// Folder of the pool.
pub const POOL: &str = "/memory/pool";
/// Another pool, of a world with two.
pub const OTHER: &str = "other";
/// Room for all volumes of a test.
pub const CAPACITY: u64 = 16 * GIB;
/// Size of a volume: xfs takes no less than 300 MiB.
pub const SIZE: u64 = 512 * MIB;

pub fn staging(name: &str) -> PathBuf {
    PathBuf::from(format!(
        "/var/lib/kubelet/plugins/kubernetes.io/csi/{name}/globalmount"
    ))
}

pub fn target(name: &str, n: u8) -> PathBuf {
    PathBuf::from(format!("/var/lib/kubelet/pods/{n}/volumes/{name}/mount"))
}

fn text(path: &Path) -> String {
    path.to_str().expect("test paths are UTF-8").to_string()
}

pub fn settings() -> Settings {
    Settings {
        node_name: "node".into(),
        driver_name: "csi.slackwater.dev".into(),
        pools: vec![
            format!("default=file:{POOL},init,mount=any")
                .parse()
                .expect("a definition"),
        ],
        node_record: "/var/lib/slackwater/node.json".into(),
        state_dir: "/run/slackwater/state".into(),
        alone: true,
        inline_max_size: Some(1 << 40),
        ..Settings::default()
    }
}

/// A machine, its driver, and what the caller was told.
pub struct World {
    pub host: MemoryHost,
    driver: Option<Arc<Driver>>,
    /// Ids as answered, kept after a delete so that it can be repeated.
    pub ids: BTreeMap<&'static str, String>,
    pub hows: BTreeMap<&'static str, How>,
    /// Calls whose answer nobody has heard: the caller will repeat them.
    pub unanswered: Vec<Step>,
    /// Tokens that a user has synced.
    pub tokens: BTreeMap<&'static str, BTreeSet<u64>>,
    /// What must be in snapshots and clones.
    pub cuts: cuts::Cuts,
    settings: Settings,
    /// What lasts now.
    pub lasting: Option<Lasting>,
    /// The driver has begun before that.
    pub remembers: bool,
    /// The pool's disk, while it hangs.
    hung: Option<lasting::Hanging>,
}

impl World {
    /// A machine of its own, the same each time; no driver yet.
    pub fn new() -> World {
        let host = MemoryHost::with_options(MemoryOptions {
            capacity: CAPACITY,
            seed: Some(1),
            ..MemoryOptions::default()
        });
        // Calls come one at a time, unless a test says otherwise.
        host.take_turns(false);
        World {
            host,
            driver: None,
            ids: BTreeMap::new(),
            hows: BTreeMap::new(),
            unanswered: Vec::new(),
            tokens: BTreeMap::new(),
            cuts: cuts::Cuts::default(),
            lasting: None,
            remembers: false,
            settings: settings(),
            hung: None,
        }
    }

    /// With a driver of two pools.
    pub fn with_other_pool() -> World {
        let mut world = World::new();
        let other = format!("{OTHER}=file:/memory/{OTHER},init,mount=any");
        let other = other.parse().expect("a definition");
        world.settings.pools.push(other);
        world.begun()
    }

    /// With a driver, and some steps done.
    pub fn after(steps: &[Step]) -> World {
        let mut world = World::new().begun();
        for step in steps {
            world
                .run(step)
                .unwrap_or_else(|error| panic!("{step:?}: {}", chain(&error)));
        }
        world
    }

    fn begun(mut self) -> World {
        self.run(&Step::Start).expect("a calm start");
        // What ids are made with, also when the pool isn't served later on.
        self.pool_id().expect("a pool that is served");
        self
    }

    pub fn driver(&self) -> Result<Arc<Driver>> {
        self.driver.clone().ok_or(Error::Stopping)
    }

    pub fn is_up(&self) -> bool {
        self.driver.is_some() && self.host.is_alive()
    }

    /// Power on again.
    pub fn reboot(&mut self, power_loss: bool) {
        self.driver = None;
        self.host = self.host.reboot(power_loss);
    }

    /// Does a step; the answer as text.
    pub fn run(&mut self, step: &Step) -> Result<String> {
        match step {
            Step::Start => return self.start(),
            Step::Reboot => {
                self.reboot(false);
                return self.start();
            }
            Step::Write(name, token) => {
                self.write(name, *token);
                return Ok(String::new());
            }
            Step::WriteUnsynced(name, token) => {
                let written = self.host.write_unsynced(&staging(name), *token);
                written.expect("a user can write");
                return Ok(String::new());
            }
            Step::GuardDies => {
                self.host.let_guard_die(true);
                return Ok(String::new());
            }
            Step::CutOff(step, n) => {
                self.host.fail_effect(*n, FaultMode::CrashAfter);
                // Nobody hears the answer.
                let _ = self.run(step);
                match **step {
                    Step::PublishInline(name, how) => drop(self.hows.insert(name, how.inline())),
                    Step::Create(..)
                    | Step::Snapshot(..)
                    | Step::Restore(..)
                    | Step::Clone(..)
                    | Step::Group(..) => self.unanswered.push((**step).clone()),
                    _ => {}
                }
                self.driver = None;
                return Ok(String::new());
            }
            Step::Begin(lasting) => {
                self.begin(lasting);
                return Ok(String::new());
            }
            Step::PullDisk | Step::PutDiskBack => {
                let folder = Path::new(POOL);
                let done = match step {
                    Step::PullDisk => self.host.pull_disk(folder),
                    _ => self.host.put_disk_back(folder),
                };
                done.expect("a disk can be moved");
                return Ok(String::new());
            }
            Step::RefuseGrowth => {
                self.host.refuse_ext4_growth();
                return Ok(String::new());
            }
            Step::LeaveUnclean(name) => {
                let image = World::image("volumes", &self.ids[name]);
                let left = self.host.leave_unclean(Path::new(&image), true);
                left.expect("a file system is there");
                return Ok(String::new());
            }
            Step::Create(name, how) => {
                let volume = self.driver()?.create_volume(&create(name, *how))?;
                self.ids.insert(name, volume.id.to_string());
                self.hows.insert(name, *how);
                return Ok(format!("{volume:?}"));
            }
            _ => {}
        }
        self.note(step);
        let answer = self.call(&*self.driver()?, step);
        if let Step::Group(name, _) = step {
            self.learn_strange(name);
        }
        let answer = answer?;
        self.learn(step);
        match step {
            Step::PublishInline(name, how) => {
                self.hows.insert(name, how.inline());
            }
            Step::Delete(name) | Step::UnpublishInline(name) => {
                self.tokens.remove(name);
            }
            _ => {}
        }
        Ok(answer)
    }

    fn start(&mut self) -> Result<String> {
        self.driver = None;
        self.remembers = false;
        self.host = self.host.restart_process();
        let driver = Driver::start(self.settings.clone(), Seams::simulated(self.host.clone()))?;
        self.driver = Some(Arc::new(driver));
        self.clean()?;
        self.serving()
    }

    /// What a process does by itself, at its start and then again and again: it ends what calls
    /// have left.
    pub fn clean(&self) -> Result<()> {
        let driver = self.driver()?;
        for pool in driver.served() {
            driver.clean(pool);
            driver.wipe(pool);
            driver.resolve_groups(pool);
        }
        Ok(())
    }

    /// What the pools are like.
    pub fn serving(&self) -> Result<String> {
        let each = self.driver()?.pool_status().into_iter().map(|pool| {
            let refusal = pool.refusal.unwrap_or_default();
            format!(
                "{} {refusal:?} {} {}",
                pool.name, pool.volumes, pool.damaged
            )
        });
        Ok(each.collect::<Vec<_>>().join(", "))
    }

    /// Whether a pool isn't served.
    pub fn refuses(&self) -> bool {
        let refused = |driver: Arc<Driver>| {
            let status = driver.pool_status();
            status.iter().any(|pool| pool.refusal.is_some())
        };
        self.driver().is_ok_and(refused)
    }

    pub fn id(&self, name: &str) -> String {
        let of = |pool| VolumeId::of_name(pool, NameKind::Volume, name).to_string();
        let derived = || self.pool_id().map(of);
        let known = self.ids.get(name).cloned();
        known.or_else(derived).unwrap_or_else(|| name.into())
    }

    pub fn inline_id(&self, name: &str) -> String {
        let of = |pool| VolumeId::of_name(pool, NameKind::Ephemeral, name).to_string();
        self.pool_id().map_or_else(|| name.into(), of)
    }

    pub fn how(&self, name: &str) -> How {
        self.hows.get(name).copied().unwrap_or(How::EXT4)
    }

    fn write(&mut self, name: &'static str, token: u64) {
        let written = match self.how(name).fs {
            Some(_) if self.ids.contains_key(name) => self.host.write_token(&staging(name), token),
            Some(_) => self.host.write_token(&target(name, 0), token),
            None => self.host.write_block_token(&target(name, 0), token),
        };
        written.expect("a user can write");
        self.tokens.entry(name).or_default().insert(token);
    }
}

pub fn range(required: u64) -> CapacityRange {
    CapacityRange { required, limit: 0 }
}

pub fn create(name: &str, how: How) -> CreateVolume {
    CreateVolume {
        name: name.into(),
        capacity: range(SIZE),
        capabilities: vec![how.capability()],
        parameters: how.parameters(),
        requisite: Vec::new(),
        content_source: None,
    }
}
