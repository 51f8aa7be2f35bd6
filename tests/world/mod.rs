//! A world for tests of the operations: a simulated machine, a driver on it, a caller who
//! repeats, users who write, and the checks that hold whatever has happened.

#![allow(
    dead_code,
    reason = "each test program that includes this uses a part of it"
)]

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use slackwater::error::{Error, Result, chain};
use slackwater::host::Host;
use slackwater::host::memory::{FaultMode, MemoryHost, MemoryOptions};
use slackwater::model::id::NameKind;
use slackwater::model::size::{GIB, MIB, image_bytes};
use slackwater::model::{
    AccessMode, AccessType, Allocation, Capability, CapacityRange, FsType, MutableParameters,
    PoolDefinition, PoolPlace, VolumeId, VolumeParameters, Wipe,
};
use slackwater::operation::inventory;
use slackwater::operation::{
    CreateVolume, Driver, ExpandNode, ExpandVolume, ListVolumes, ModifyVolume, PublishEphemeral,
    PublishVolume, Settings, StageVolume,
};
use slackwater::record::VolumeState;
use slackwater::service::{Rpc, status};

/// Folder of the pool.
pub const POOL: &str = "/memory/pool";
/// Size of a volume: xfs takes no less than 300 MiB.
pub const SIZE: u64 = 512 * MIB;

/// What a volume is to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct How {
    /// The file system; `None` is block.
    pub fs: Option<FsType>,
    pub allocation: Allocation,
    pub wipe: Wipe,
    /// Staged with the mount flag "ro".
    pub read_only: bool,
}

impl How {
    pub const EXT4: How = How::fs(FsType::Ext4);
    pub const BLOCK: How = How {
        fs: None,
        ..How::EXT4
    };
    pub const THICK: How = How {
        allocation: Allocation::Thick,
        ..How::EXT4
    };

    pub const fn fs(fs: FsType) -> How {
        How {
            fs: Some(fs),
            allocation: Allocation::Thin,
            wipe: Wipe::None,
            read_only: false,
        }
    }

    pub const fn wiped(self, wipe: Wipe) -> How {
        How { wipe, ..self }
    }

    pub fn capability(self) -> Capability {
        let access_type = match self.fs {
            None => AccessType::Block,
            Some(fs) => AccessType::Mount {
                fs_type: Some(fs),
                mount_flags: if self.read_only {
                    vec!["ro".into()]
                } else {
                    Vec::new()
                },
            },
        };
        Capability {
            access_type,
            access_mode: AccessMode::SingleNodeWriter,
        }
    }

    pub fn parameters(self) -> VolumeParameters {
        VolumeParameters {
            allocation: self.allocation,
            wipe: self.wipe,
            ..VolumeParameters::default()
        }
    }
}

/// One call of the caller, or one act of the world.
#[derive(Clone, Debug, PartialEq)]
pub enum Step {
    Create(&'static str, How),
    Delete(&'static str),
    Modify(&'static str, Wipe),
    Expand(&'static str, u64),
    ExpandNode(&'static str),
    Stage(&'static str),
    /// The same with the capability of another kind of volume.
    StageAs(&'static str, How),
    Unstage(&'static str),
    Publish(&'static str, u8, bool),
    PublishAs(&'static str, u8, bool, How),
    Unpublish(&'static str, u8),
    PublishInline(&'static str, How),
    UnpublishInline(&'static str),
    /// A user writes a token at the stage, or to the device published as 0, and syncs it.
    Write(&'static str, u64),
    /// The process is killed and starts again.
    Start,
    LookAgain,
    /// A call, cut off by the end of the process after its n-th effect.
    CutOff(Box<Step>, usize),
    /// The pool's disk is pulled out, or put back.
    PullDisk,
    PutDiskBack,
    /// The machine boots again, without losing anything.
    Reboot,
}

impl Step {
    /// The call that it is.
    pub fn rpc(&self) -> Option<Rpc> {
        Some(match self {
            Step::Create(..) => Rpc::CreateVolume,
            Step::Delete(_) => Rpc::DeleteVolume,
            Step::Modify(..) => Rpc::ControllerModifyVolume,
            Step::Expand(..) => Rpc::ControllerExpandVolume,
            Step::ExpandNode(_) => Rpc::NodeExpandVolume,
            Step::Stage(_) | Step::StageAs(..) => Rpc::NodeStageVolume,
            Step::Unstage(_) => Rpc::NodeUnstageVolume,
            Step::Publish(..) | Step::PublishAs(..) | Step::PublishInline(..) => {
                Rpc::NodePublishVolume
            }
            Step::Unpublish(..) | Step::UnpublishInline(_) => Rpc::NodeUnpublishVolume,
            Step::Write(..)
            | Step::Start
            | Step::LookAgain
            | Step::CutOff(..)
            | Step::PullDisk
            | Step::PutDiskBack
            | Step::Reboot => return None,
        })
    }

    /// Whether its caller forgets the object after this error.
    pub fn is_final(&self, error: &Error) -> bool {
        use tonic::Code::{Aborted, Cancelled, DeadlineExceeded, Unavailable};
        let code = self.rpc().map(|rpc| status::code(rpc, error));
        code.is_some_and(|code| {
            !matches!(code, Aborted | Cancelled | DeadlineExceeded | Unavailable)
        })
    }
}

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
        pools: vec![PoolDefinition {
            name: "default".into(),
            place: PoolPlace::File { path: POOL.into() },
            init: true,
            overcommit: 1.0,
        }],
        node_record: "/var/lib/slackwater/node.json".into(),
    }
}

/// A machine, its driver, and what the caller was told.
pub struct World {
    pub host: MemoryHost,
    driver: Option<Arc<Driver>>,
    /// Ids as answered, kept after a delete so that it can be repeated.
    pub ids: BTreeMap<&'static str, String>,
    pub hows: BTreeMap<&'static str, How>,
    /// Creations whose answer nobody has heard: the caller will repeat them.
    pub unanswered: BTreeMap<&'static str, How>,
    /// Tokens that a user has synced.
    pub tokens: BTreeMap<&'static str, BTreeSet<u64>>,
}

/// Everything that can be seen from outside.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Picture {
    pub mounted: Vec<PathBuf>,
    pub targets: Vec<PathBuf>,
    pub loops: usize,
    pub files: Vec<String>,
}

impl Picture {
    /// What differs from what was expected; `None` if nothing does.
    pub fn differs(&self, expected: &Picture) -> Option<String> {
        let differ = |what: &str, now: String, then: String| {
            (now != then).then(|| format!("{what} {now} instead of {then}; "))
        };
        let parts = [
            differ(
                "mounted",
                format!("{:?}", self.mounted),
                format!("{:?}", expected.mounted),
            ),
            differ(
                "targets",
                format!("{:?}", self.targets),
                format!("{:?}", expected.targets),
            ),
            differ("loops", self.loops.to_string(), expected.loops.to_string()),
            differ(
                "files",
                format!("{:?}", self.files),
                format!("{:?}", expected.files),
            ),
        ];
        let text: String = parts.into_iter().flatten().collect();
        (!text.is_empty()).then_some(text)
    }
}

impl World {
    /// A machine of its own, the same each time; no driver yet.
    pub fn new() -> World {
        let host = MemoryHost::with_options(MemoryOptions {
            capacity: 16 * GIB,
            seed: Some(1),
            ..MemoryOptions::default()
        });
        World {
            host,
            driver: None,
            ids: BTreeMap::new(),
            hows: BTreeMap::new(),
            unanswered: BTreeMap::new(),
            tokens: BTreeMap::new(),
        }
    }

    /// With a driver, and some steps done.
    pub fn after(steps: &[Step]) -> World {
        let mut world = World::new();
        world.run(&Step::Start).expect("a calm start");
        for step in steps {
            world
                .run(step)
                .unwrap_or_else(|error| panic!("{step:?}: {}", chain(&error)));
        }
        world
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
            Step::CutOff(step, n) => {
                self.host.fail_effect(*n, FaultMode::CrashAfter);
                // Nobody hears the answer.
                let _ = self.run(step);
                match **step {
                    Step::Create(name, how) => drop(self.unanswered.insert(name, how)),
                    Step::PublishInline(name, how) => drop(self.hows.insert(name, how)),
                    _ => {}
                }
                self.driver = None;
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
            Step::Create(name, how) => {
                let volume = self.driver()?.create_volume(&create(name, *how))?;
                self.ids.insert(name, volume.id.to_string());
                self.hows.insert(name, *how);
                return Ok(format!("{volume:?}"));
            }
            _ => {}
        }
        let answer = self.call(&*self.driver()?, step)?;
        match step {
            Step::PublishInline(name, how) => {
                self.hows.insert(name, *how);
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
        self.host = self.host.restart_process();
        let driver = Driver::start(settings(), Arc::new(self.host.clone()))?;
        self.driver = Some(Arc::new(driver));
        self.serving()
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

    fn id(&self, name: &str) -> String {
        let derived = || {
            let status = self.driver().ok()?.pool_status();
            let pool = status.first()?.id?;
            Some(VolumeId::of_name(pool, NameKind::Volume, name).to_string())
        };
        let known = self.ids.get(name).cloned();
        known.or_else(derived).unwrap_or_else(|| name.into())
    }

    fn how(&self, name: &str) -> How {
        self.hows.get(name).copied().unwrap_or(How::EXT4)
    }

    /// One call, to a driver.
    pub fn call(&self, driver: &Driver, step: &Step) -> Result<String> {
        let done = |()| String::from("done");
        match step {
            Step::Create(name, how) => driver
                .create_volume(&create(name, *how))
                .map(|volume| format!("{volume:?}")),
            Step::Delete(name) => driver.delete_volume(&self.id(name)).map(done),
            Step::Modify(name, wipe) => driver
                .modify_volume(&ModifyVolume {
                    volume_id: self.id(name),
                    mutable: MutableParameters { wipe: Some(*wipe) },
                })
                .map(done),
            Step::Expand(name, size) => driver
                .expand_volume(&ExpandVolume {
                    volume_id: self.id(name),
                    capacity: range(*size),
                    capability: None,
                })
                .map(|expanded| format!("{expanded:?}")),
            Step::LookAgain => {
                driver.look_again();
                self.serving()
            }
            _ => self.call_node(driver, step),
        }
    }

    fn call_node(&self, driver: &Driver, step: &Step) -> Result<String> {
        let done = |()| String::from("done");
        match step {
            Step::ExpandNode(name) => driver
                .expand_node(&ExpandNode {
                    volume_id: self.id(name),
                    volume_path: text(&staging(name)),
                    capacity: None,
                    capability: None,
                })
                .map(|size| size.to_string()),
            Step::Stage(name) => self.call_node(driver, &Step::StageAs(name, self.how(name))),
            Step::StageAs(name, how) => driver
                .stage_volume(&StageVolume {
                    volume_id: self.id(name),
                    staging_path: text(&staging(name)),
                    capability: how.capability(),
                })
                .map(done),
            Step::Unstage(name) => driver
                .unstage_volume(&self.id(name), &text(&staging(name)))
                .map(done),
            Step::Publish(name, n, read_only) => {
                let step = Step::PublishAs(name, *n, *read_only, self.how(name));
                self.call_node(driver, &step)
            }
            Step::PublishAs(name, n, read_only, how) => driver
                .publish_volume(&PublishVolume {
                    volume_id: self.id(name),
                    staging_path: text(&staging(name)),
                    target_path: text(&target(name, *n)),
                    capability: how.capability(),
                    read_only: *read_only,
                })
                .map(done),
            Step::Unpublish(name, n) => driver
                .unpublish_volume(&self.id(name), &text(&target(name, *n)))
                .map(done),
            Step::PublishInline(name, how) => driver
                .publish_ephemeral(&PublishEphemeral {
                    volume_id: name.to_string(),
                    target_path: text(&target(name, 0)),
                    capability: how.capability(),
                    read_only: false,
                    size: SIZE,
                    parameters: how.parameters(),
                })
                .map(done),
            Step::UnpublishInline(name) => driver
                .unpublish_volume(name, &text(&target(name, 0)))
                .map(done),
            other => panic!("{other:?} is not a call of the node"),
        }
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

    pub fn picture(&self) -> Picture {
        let mut mounted = self.host.mounted();
        mounted.sort();
        let mut files = self.host.files_below(Path::new(POOL));
        // What is being written is replaced by the next write; the lock comes with each start.
        files.retain(|file| !file.ends_with(".new") && file != "lock");
        let mut targets = self.host.targets();
        targets.retain(|target| !target.ends_with("globalmount"));
        Picture {
            mounted,
            targets,
            loops: self.host.loop_numbers().len(),
            files,
        }
    }

    /// What must hold at any time when nothing runs.
    pub fn check(&self) -> std::result::Result<(), String> {
        let violations = self.host.violations();
        if !violations.is_empty() {
            return Err(format!("violations: {violations:?}"));
        }
        let Some(driver) = &self.driver else {
            return Ok(());
        };
        if driver.locks_held() > 0 {
            return Err("a lock is left".into());
        }
        let mut backings = BTreeSet::new();
        for found in self.host.loops().map_err(|error| error.to_string())? {
            if !backings.insert(found.backing) {
                return Err(format!("two loop devices on one image: {found:?}"));
            }
        }
        for pool in driver.pool_status() {
            if pool.damaged > 0 {
                return Err("a record is damaged".into());
            }
        }
        let listed = driver
            .list_volumes(&ListVolumes::default())
            .map_err(|error| chain(&error))?;
        for volume in listed.volumes {
            let id = volume.id.to_string();
            let found = driver.get_volume(&id).map_err(|error| chain(&error))?;
            let health = driver.volume_health(&id).map_err(|error| chain(&error))?;
            if found != volume || !health.findings.is_empty() {
                return Err(format!("{volume:?} {found:?} {health:?}"));
            }
            let image = format!("{POOL}/volumes/{}/data.img", volume.id.uuid);
            let image = self.host.stat(Path::new(&image));
            let size = image
                .map_err(|error| error.to_string())?
                .map(|stat| stat.size);
            if size.is_none_or(|size| size < image_bytes(volume.size)) {
                return Err(format!("{volume:?} has an image of {size:?} bytes"));
            }
        }
        Ok(())
    }

    /// What the records of lasting volumes say.
    pub fn records(&self) -> Vec<String> {
        let Ok(driver) = self.driver() else {
            return Vec::new();
        };
        let ids = driver.pool_status().into_iter().filter_map(|pool| pool.id);
        let volumes = ids.flat_map(|id| {
            let found = inventory::volumes(&self.host, "default", id, Path::new(POOL));
            found.map(|found| found.volumes).unwrap_or_default()
        });
        let records = volumes
            .map(|found| found.record)
            .filter(|record| !record.ephemeral && record.state == VolumeState::Ready);
        records
            .map(|record| {
                let (size, wipe, formatted) = (record.size, record.wipe, record.formatted);
                format!("{} {size} {wipe:?} {formatted:?}", record.uuid)
            })
            .collect()
    }

    /// Whether every token that was synced is where it belongs; the volume is staged or published.
    pub fn check_tokens(&self, name: &str) -> std::result::Result<(), String> {
        let Some(expected) = self.tokens.get(name) else {
            return Ok(());
        };
        let found = match self.how(name).fs {
            Some(_) if self.ids.contains_key(name) => self.host.tokens(&staging(name)),
            Some(_) => self.host.tokens(&target(name, 0)),
            None => self.host.block_tokens(&target(name, 0)),
        };
        let found: BTreeSet<u64> = found
            .map_err(|errno| format!("tokens of {name}: {errno}"))?
            .into_iter()
            .collect();
        match expected.difference(&found).next() {
            Some(lost) => Err(format!("token {lost} of {name} is lost")),
            None => Ok(()),
        }
    }

    /// Leads every volume to its end, with all calls at their first try, and looks that nothing
    /// is left.
    pub fn finish(&mut self) -> std::result::Result<(), String> {
        for (name, how) in std::mem::take(&mut self.unanswered) {
            let created = self.run(&Step::Create(name, how));
            created.map_err(|error| format!("in the end, create {name}: {}", chain(&error)))?;
        }
        let names: Vec<&'static str> = self.hows.keys().copied().collect();
        for name in names {
            for step in self.last_steps(name)? {
                if let Step::Delete(_) | Step::UnpublishInline(_) = step {
                    self.check()?;
                }
                self.run(&step)
                    .map_err(|error| format!("in the end, {step:?}: {}", chain(&error)))?;
                if matches!(step, Step::Stage(_) if self.how(name).fs.is_some())
                    || matches!(step, Step::Publish(..) if self.how(name).fs.is_none())
                {
                    self.check_tokens(name)?;
                }
            }
            self.host
                .remove_leaf(&staging(name))
                .map_err(|errno| format!("{name} is still staged: {errno}"))?;
        }
        self.check()?;
        let files = self.host.files_below(Path::new(POOL));
        let left = self.picture();
        let nothing_left = left.mounted.is_empty()
            && left.targets.is_empty()
            && left.loops == 0
            && files == ["lock", "pool.json", "trash", "volumes"];
        match nothing_left {
            true => Ok(()),
            false => Err(format!("left at the end: {left:?} {files:?}")),
        }
    }

    /// What ends a volume, however it is now.
    fn last_steps(&self, name: &'static str) -> std::result::Result<Vec<Step>, String> {
        let Some(id) = self.ids.get(name) else {
            return Ok(vec![Step::UnpublishInline(name)]);
        };
        let driver = self.driver().map_err(|error| chain(&error))?;
        let mut steps = Vec::new();
        if driver.get_volume(id).is_ok() {
            steps.push(Step::Stage(name));
            if self.how(name).fs.is_none() {
                // Not beside one that is read-only.
                steps.push(Step::Unpublish(name, 0));
                steps.push(Step::Unpublish(name, 1));
                steps.push(Step::Publish(name, 0, false));
            }
        }
        steps.extend([
            Step::Unpublish(name, 0),
            Step::Unpublish(name, 1),
            Step::Unstage(name),
            Step::Delete(name),
            Step::Delete(name),
        ]);
        Ok(steps)
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
    }
}
