//! A fixture for tests of the operations: a simulated machine with a driver on it, a caller that
//! repeats its calls, users that write, and checks that must hold after any sequence of steps.

#![allow(
    dead_code,
    reason = "each test program that includes this module uses a part of it"
)]

pub mod check;
pub mod cuts;
pub mod import_file;
pub mod lasting;
pub mod remote;
mod step;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use slackwater::cut::CutInterfaces;
use slackwater::error::{Error, Result, chain};
use slackwater::host::memory::{FaultMode, MemoryHost, MemoryOptions};
use slackwater::model::id::NameKind;
use slackwater::model::size::{GIB, MIB};
use slackwater::model::{CapacityRange, VolumeId};
use slackwater::operation::{CreateVolume, Driver, Settings};

pub use lasting::LastingFault;
pub use step::{Step, VolumeConfig};

/// The folder of the pool.
pub const POOL: &str = "/memory/default";
/// The name of the second pool, for simulations with two.
pub const OTHER: &str = "other";
/// The capacity of the pool, enough for all volumes of a test.
pub const CAPACITY: u64 = 16 * GIB;
/// The size of a volume. xfs needs at least 300 MiB.
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

/// Whether the pool stores images as thin devices: the environment has `SIMULATED_THIN`.
pub fn is_thin() -> bool {
    std::env::var_os("SIMULATED_THIN").is_some()
}

pub fn settings() -> Settings {
    Settings {
        node_name: "node".into(),
        driver_name: "csi.slackwater.dev".into(),
        pools: vec![
            match is_thin() {
                true => "default=memory-thin:".to_string(),
                false => format!("default=file:{POOL},init,mount=any"),
            }
            .parse()
            .expect("a definition"),
        ],
        node_record: "/var/lib/slackwater/node.json".into(),
        state_dir: "/run/slackwater/state".into(),
        alone: true,
        inline_max_size: Some(1 << 40),
        import_paths: vec![import_file::TOP.into()],
        ..Settings::default()
    }
}

/// A simulated machine, its driver, and the answers that the caller has received.
pub struct Simulation {
    pub host: MemoryHost,
    driver: Option<Arc<Driver>>,
    /// The IDs that were answered. They are kept after a delete, so that it can be repeated.
    pub ids: BTreeMap<&'static str, String>,
    pub configs: BTreeMap<&'static str, VolumeConfig>,
    /// Calls whose answer did not reach the caller. The caller will repeat them.
    pub unanswered: Vec<Step>,
    /// The tokens that a user has synced.
    pub tokens: BTreeMap<&'static str, BTreeSet<u64>>,
    /// The expected content of snapshots and clones.
    pub cuts: cuts::Cuts,
    settings: Settings,
    /// The fault that lasts at the moment.
    pub lasting_fault: Option<LastingFault>,
    /// The driver was started before that fault began.
    pub remembers: bool,
    /// The pool's disk, while it hangs.
    hung: Option<lasting::HangingDisk>,
}

impl Simulation {
    /// Creates a machine that is the same each time, without a driver.
    pub fn new() -> Simulation {
        let host = MemoryHost::with_options(MemoryOptions {
            capacity: CAPACITY,
            seed: Some(1),
            ..MemoryOptions::default()
        });
        // Calls come one at a time, unless a test enables turns.
        host.take_turns(false);
        Simulation {
            host,
            driver: None,
            ids: BTreeMap::new(),
            configs: BTreeMap::new(),
            unanswered: Vec::new(),
            tokens: BTreeMap::new(),
            cuts: cuts::Cuts::default(),
            lasting_fault: None,
            remembers: false,
            settings: settings(),
            hung: None,
        }
    }

    /// A simulation whose driver has two pools.
    pub fn with_other_pool() -> Simulation {
        let mut sim = Simulation::new();
        let other = match is_thin() {
            true => format!("{OTHER}=memory-thin:"),
            false => format!("{OTHER}=file:/memory/{OTHER},init,mount=any"),
        };
        let other = other.parse().expect("a definition");
        sim.settings.pools.push(other);
        sim.begun()
    }

    /// A simulation with a driver, after some steps.
    pub fn after(steps: &[Step]) -> Simulation {
        let mut sim = Simulation::new().begun();
        for step in steps {
            sim.run(step)
                .unwrap_or_else(|error| panic!("{step:?}: {}", chain(&error)));
        }
        sim
    }

    fn begun(mut self) -> Simulation {
        self.run(&Step::Start).expect("a start without faults");
        // IDs are derived from the pool's ID, also when the pool is not served later.
        self.pool_id().expect("the pool is served");
        self
    }

    pub fn driver(&self) -> Result<Arc<Driver>> {
        self.driver.clone().ok_or(Error::Stopping)
    }

    pub fn is_up(&self) -> bool {
        self.driver.is_some() && self.host.is_alive()
    }

    /// Turns the power on again.
    pub fn reboot(&mut self, power_loss: bool) {
        self.driver = None;
        self.host = self.host.reboot(power_loss);
    }

    /// Performs a step and returns the answer as text.
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
            Step::WriteForeign => {
                import_file::write(&self.host);
                return Ok(String::new());
            }
            Step::GuardDies => {
                self.host.let_guard_die(true);
                return Ok(String::new());
            }
            Step::CutOff(step, n) => {
                self.host.fail_effect(*n, FaultMode::CrashAfter);
                // The caller does not receive the answer.
                let _ = self.run(step);
                match **step {
                    Step::PublishInline(name, config) => {
                        self.configs.insert(name, config.inline());
                    }
                    Step::Create(..)
                    | Step::Snapshot(..)
                    | Step::Restore(..)
                    | Step::Receive(..)
                    | Step::ImportFile(..)
                    | Step::Clone(..)
                    | Step::Group(..) => self.unanswered.push((**step).clone()),
                    _ => {}
                }
                self.driver = None;
                return Ok(String::new());
            }
            Step::Begin(lasting_fault) => {
                self.begin(lasting_fault);
                return Ok(String::new());
            }
            Step::PullDisk | Step::PutDiskBack => {
                let folder = Path::new(POOL);
                let done = match step {
                    Step::PullDisk => self.host.pull_disk(folder),
                    _ => self.host.put_disk_back(folder),
                };
                done.expect("the disk can be removed and put back");
                return Ok(String::new());
            }
            Step::RefuseGrowth => {
                self.host.refuse_ext4_growth();
                return Ok(String::new());
            }
            Step::LeaveUnclean(name) => {
                let image = self.image("volumes", &self.ids[name]);
                let left = self.host.leave_unclean(Path::new(&image), true);
                left.expect("the image has a file system");
                return Ok(String::new());
            }
            Step::Create(name, config) => {
                let request = create(name, *config);
                let volume = self.driver()?.volumes.create_volume(&request)?;
                self.ids.insert(name, volume.id.to_string());
                self.configs.insert(name, config.of_pool());
                return Ok(format!("{volume:?}"));
            }
            _ => {}
        }
        self.before_call(step);
        let answer = self.call(&*self.driver()?, step);
        if let Step::Group(name, _) = step {
            self.record_foreign_writes(name);
        }
        let answer = answer?;
        self.after_call(step);
        match step {
            Step::PublishInline(name, config) => {
                self.configs.insert(name, config.inline());
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
        let driver = Driver::start(
            self.settings.clone(),
            CutInterfaces::simulated(self.host.clone()),
        )?;
        self.driver = Some(Arc::new(driver));
        self.clean()?;
        self.serving()
    }

    /// Does what a process does by itself, at its start and periodically: it cleans up what calls
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

    /// Describes the state of the pools.
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

    /// Whether a pool is not served.
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

    pub fn config(&self, name: &str) -> VolumeConfig {
        self.configs
            .get(name)
            .copied()
            .unwrap_or(VolumeConfig::EXT4)
    }

    fn write(&mut self, name: &'static str, token: u64) {
        let written = match self.config(name).fs {
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

pub fn create(name: &str, config: VolumeConfig) -> CreateVolume {
    let config = config.of_pool();
    CreateVolume {
        name: name.into(),
        capacity: range(SIZE),
        capabilities: vec![config.capability()],
        parameters: config.parameters(),
        requisite: Vec::new(),
        content_source: None,
    }
}
