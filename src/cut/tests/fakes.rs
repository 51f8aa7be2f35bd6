//! A fake host, freezer and hooks in one, which log each event of a cut and can fail at any of
//! them.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use nix::errno::Errno;
use uuid::Uuid;

use crate::backend::{Copier, CopyCost, CopyMode};
use crate::cut::{CutInterfaces, CutMember, SpaceCheck, Use};
use crate::error::{Error, HostError};
use crate::hook::{HookTarget, Hooks, Quiesced};
use crate::host::freezer::{FreezeLimits, JournaledFreeze};
use crate::host::{
    BackingFs, Device, DeviceHold, Done, Effect, Extent, FileId, FileStat, FolderMount, Freeze,
    FreezeMember, Freezer, Host, Kept, Known, LoopDevice, LoopHold, Mount, MountRoot, Piece,
    Result, Signature, Space,
};
use crate::model::{FsType, SharedVolume};

pub(super) const CUT_AT: u64 = 1_700_000_000_123_456_789;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Trouble {
    Error,
    Panic,
    /// For a thaw: another program has thawed before.
    Early,
}

#[derive(Default)]
struct State {
    log: Vec<String>,
    plan: Option<(usize, Trouble)>,
    hooks: Vec<String>,
    extents: u64,
    /// Ranges that a pass clones; 1 unless set.
    ranges: Option<u64>,
    /// See [`Copier::min_useful_ranges`].
    min_useful_ranges: u64,
    /// Number of extents while an application is held.
    extents_held: Option<u64>,
    /// The extent map of a copy is not what the cut assumed.
    moved: bool,
    release_problem: Option<String>,
    frozen: BTreeSet<String>,
    quiesced: bool,
    released_while_frozen: usize,
}

#[derive(Clone, Default)]
pub(super) struct World(Arc<Mutex<State>>);

/// A volume of a test; [`World::members`] makes it a member of a cut.
pub(super) struct TestVolume {
    pub(super) target: HookTarget,
    pub(super) in_use: Use,
    /// See [`Copier::mapped`].
    pub(super) is_mapped: bool,
    pub(super) is_serial: bool,
    pub(super) emptied: Arc<AtomicBool>,
}

pub(super) fn member(name: &str, in_use: Use) -> TestVolume {
    TestVolume {
        target: HookTarget {
            volume_id: name.into(),
            claim: None,
            node: None,
        },
        in_use,
        is_mapped: false,
        is_serial: false,
        emptied: Arc::default(),
    }
}

/// A copier that logs each call.
struct FakeCopier {
    world: World,
    name: String,
    is_mapped: bool,
    is_serial: bool,
    /// A pass has counted the extents, so they are not counted again.
    is_counted: AtomicBool,
}

impl FakeCopier {
    fn event(&self, event: &str) -> Result<()> {
        self.world.host_event(&format!("{event} {}", self.name))
    }
}

impl Copier for FakeCopier {
    fn image(&self) -> FileId {
        FileId {
            device: 1,
            inode: 2,
        }
    }

    fn mapped(&self) -> Result<Option<DeviceHold>> {
        let hold = || DeviceHold {
            device: Device::of_loop(0),
            keep: Box::new(()),
        };
        Ok(self.is_mapped.then(hold))
    }

    fn is_serial(&self) -> bool {
        self.is_serial
    }

    fn cost(&self, mode: CopyMode) -> Result<CopyCost> {
        let micros = match mode {
            CopyMode::Whole => 15,
            CopyMode::Ahead => 2,
        };
        if mode == CopyMode::Whole || !self.is_counted.load(Ordering::SeqCst) {
            self.event("count")?;
        }
        let extents = self.world.extents();
        let stall = Duration::from_micros(micros * extents);
        Ok(CopyCost { extents, stall })
    }

    fn copy_whole(&self) -> Result<u64> {
        self.event("clone_whole").map(|()| 1)
    }

    fn copy_ahead(&self) -> Result<u64> {
        self.event("clone_ahead").map(|()| 1)
    }

    fn copy_delta(&self) -> Result<u64> {
        self.event("clone_rest")?;
        self.is_counted.store(true, Ordering::SeqCst);
        Ok(self.world.state(|state| state.ranges.unwrap_or(1)))
    }

    fn min_useful_ranges(&self) -> u64 {
        self.world.state(|state| state.min_useful_ranges)
    }

    fn seal(&self) {}

    fn verify(&self) -> Result<bool> {
        self.event("verify")?;
        Ok(self.world.state(|state| !state.moved))
    }
}

pub(super) fn mounted(name: &str) -> TestVolume {
    let in_use = Use::Mounted {
        device: Device::of_loop(7),
        fs: FsType::Xfs,
        mount_point: PathBuf::from("/mnt").join(name),
    };
    member(name, in_use)
}

pub(super) fn raw(name: &str) -> TestVolume {
    member(name, Use::Raw)
}

fn name(path: &Path) -> String {
    path.file_name().unwrap().to_string_lossy().into_owned()
}

impl World {
    pub(super) fn with_hooks(hooks: &[&str]) -> World {
        let world = World::default();
        world.state(|state| state.hooks = hooks.iter().map(|hook| hook.to_string()).collect());
        world
    }

    pub(super) fn interfaces(&self) -> CutInterfaces {
        let world = Arc::new(self.clone());
        CutInterfaces {
            host: world.clone(),
            freezer: world.clone(),
            hooks: world,
        }
    }

    fn state<T>(&self, with: impl FnOnce(&mut State) -> T) -> T {
        with(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    pub(super) fn plan(&self, step: usize, trouble: Trouble) {
        self.state(|state| state.plan = Some((step, trouble)));
    }

    pub(super) fn set_extents(&self, extents: u64) {
        self.state(|state| state.extents = extents);
    }

    pub(super) fn set_ranges(&self, ranges: u64, min_useful_ranges: u64) {
        self.state(|state| {
            (state.ranges, state.min_useful_ranges) = (Some(ranges), min_useful_ranges);
        });
    }

    pub(super) fn members(&self, volumes: &[TestVolume]) -> Vec<CutMember> {
        let members = volumes.iter().map(|volume| CutMember {
            target: volume.target.clone(),
            copier: Arc::new(FakeCopier {
                world: self.clone(),
                name: volume.target.volume_id.clone(),
                is_mapped: volume.is_mapped,
                is_serial: volume.is_serial,
                is_counted: AtomicBool::default(),
            }),
            in_use: volume.in_use.clone(),
            unsuspendable_reason: None,
            emptied: volume.emptied.clone(),
        });
        members.collect()
    }

    fn extents(&self) -> u64 {
        self.state(|state| match state.extents_held {
            Some(extents) if state.quiesced => extents,
            Some(_) | None => state.extents,
        })
    }

    pub(super) fn grow_when_quiesced(&self, extents: u64) {
        self.state(|state| state.extents_held = Some(extents));
    }

    pub(super) fn room(&self) -> Arc<SpaceCheck> {
        let world = self.clone();
        Arc::new(move || {
            world.host_event("room").map_err(|error| Error::Host {
                doing: "look at the room".into(),
                source: error,
            })
        })
    }

    pub(super) fn move_copies(&self) {
        self.state(|state| state.moved = true);
    }

    pub(super) fn set_release_problem(&self, problem: &str) {
        self.state(|state| state.release_problem = Some(problem.into()));
    }

    pub(super) fn log(&self) -> Vec<String> {
        self.state(|state| state.log.clone())
    }

    pub(super) fn released_while_frozen(&self) -> usize {
        self.state(|state| state.released_while_frozen)
    }

    pub(super) fn assert_still(&self) {
        self.state(|state| {
            assert!(
                state.frozen.is_empty(),
                "{:?}: {:?}",
                state.frozen,
                state.log
            );
            assert!(!state.quiesced, "{:?}", state.log);
        });
    }

    /// Logs an event. Returns the fault if one is planned for it.
    pub(super) fn note(&self, event: &str) -> Option<Trouble> {
        let trouble = self.state(|state| {
            let now = state.log.len();
            state.log.push(event.into());
            state.plan.filter(|(step, _)| *step == now)
        });
        let trouble = trouble.map(|(_, trouble)| trouble);
        assert!(trouble != Some(Trouble::Panic), "planned");
        trouble
    }

    fn host_event(&self, event: &str) -> Result<()> {
        match self.note(event) {
            Some(Trouble::Error) => Err(HostError::errno("do", event, Errno::EIO)),
            Some(Trouble::Panic | Trouble::Early) | None => Ok(()),
        }
    }

    fn hook_event(&self, event: &str) -> crate::error::Result<()> {
        self.host_event(event)
            .map_err(|_| Error::quiesce_failed("db", "planned"))
    }

    fn record_release(&self) {
        self.state(|state| {
            if state.quiesced && !state.frozen.is_empty() {
                state.released_while_frozen += 1;
            }
            state.quiesced = false;
        });
    }
}

impl Hooks for World {
    fn wanted(
        &self,
        _targets: &[HookTarget],
        shared: SharedVolume,
    ) -> crate::error::Result<Vec<String>> {
        let hooks = self.state(|state| state.hooks.clone());
        Ok(match shared {
            SharedVolume::Skip if hooks.len() > 1 => Vec::new(),
            SharedVolume::All | SharedVolume::One | SharedVolume::Skip | SharedVolume::Fail => {
                hooks
            }
        })
    }

    fn quiesce(
        &self,
        names: &[String],
        _timeout: Duration,
    ) -> crate::error::Result<Box<dyn Quiesced>> {
        self.hook_event(&format!("quiesce {}", names.join(" ")))?;
        self.state(|state| state.quiesced = true);
        Ok(Box::new(Sessions(self.clone())))
    }
}

struct Sessions(World);

impl Quiesced for Sessions {
    fn verify(&mut self) -> crate::error::Result<()> {
        self.0.hook_event("verify")
    }

    fn release(self: Box<Self>) -> crate::error::Result<Option<String>> {
        self.0.hook_event("release")?;
        Ok(self.0.state(|state| state.release_problem.clone()))
    }
}

impl Drop for Sessions {
    fn drop(&mut self) {
        self.0.record_release();
    }
}

impl Freezer for World {
    fn begin(&self, members: Vec<FreezeMember>, _limits: FreezeLimits) -> Result<Box<dyn Freeze>> {
        let names: Vec<String> = members.into_iter().map(|member| member.volume_id).collect();
        self.host_event(&format!("begin {}", names.join(" ")))?;
        Ok(Box::new(Frozen {
            world: self.clone(),
            names,
        }))
    }

    fn sweep(&self) -> Result<Vec<String>> {
        Ok(Vec::new())
    }

    fn list_journaled(&self) -> Result<Vec<JournaledFreeze>> {
        Ok(Vec::new())
    }
}

struct Frozen {
    world: World,
    names: Vec<String>,
}

impl Freeze for Frozen {
    fn sync(&self) -> Result<()> {
        self.world.host_event("sync")
    }

    fn freeze(&self) -> Result<()> {
        self.world.host_event("freeze")?;
        let names = self.names.iter().cloned();
        self.world.state(|state| state.frozen.extend(names));
        Ok(())
    }

    fn thaw(&self, member: usize) -> Result<bool> {
        let name = &self.names[member];
        let trouble = self.world.note(&format!("thaw {name}"));
        match trouble {
            Some(Trouble::Error) => Err(HostError::errno("thaw", name, Errno::EIO)),
            Some(Trouble::Panic | Trouble::Early) | None => {
                Ok(self.world.state(|state| state.frozen.remove(name)) && trouble.is_none())
            }
        }
    }

    fn written(&self) -> Result<()> {
        self.world.host_event("written")
    }

    fn give_up(&self) {
        self.world.state(|state| {
            for name in &self.names {
                state.frozen.remove(name);
            }
        });
    }
}

impl Drop for Frozen {
    fn drop(&mut self) {
        self.give_up();
    }
}

fn none<T>(what: &'static str) -> Result<T> {
    Err(HostError::unexpected(what, "/", "a cut doesn't need this"))
}

impl Host for World {
    fn perform(&self, _: &Effect<'_>) -> Result<Done> {
        none("perform an effect")
    }
    fn stat(&self, _: &Path) -> Result<Option<FileStat>> {
        none("stat")
    }
    fn verify_copy(&self, _: &Path, _: &Known) -> Result<bool> {
        none("verify")
    }
    fn extent_count(&self, _: &Path) -> Result<u64> {
        none("count")
    }

    fn open_mount_root(
        &self,
        mount_point: &Path,
        device: &Device,
        fs: FsType,
    ) -> Result<MountRoot> {
        self.host_event(&format!("root {}", name(mount_point)))?;
        Ok(MountRoot {
            device: device.clone(),
            fs,
            keep: Box::new(()),
        })
    }

    fn now_nanos(&self) -> u64 {
        self.note("clock");
        CUT_AT
    }

    fn now(&self) -> u64 {
        CUT_AT / 1_000_000_000
    }

    fn pin_dir(&self, _: &Path) -> Result<(PathBuf, Kept)> {
        none("pin")
    }
    fn try_lock_file(&self, _: &Path) -> Result<Option<Kept>> {
        none("lock")
    }
    fn read_file(&self, _: &Path) -> Result<Option<Vec<u8>>> {
        none("read")
    }
    fn list_dir(&self, _: &Path) -> Result<Option<Vec<String>>> {
        none("list")
    }
    fn space(&self, _: &Path) -> Result<Space> {
        none("statfs")
    }
    fn mount_of(&self, _: &Path) -> Result<FolderMount> {
        none("statx")
    }
    fn backing_fs(&self, _: &Path) -> Result<BackingFs> {
        none("statfs")
    }
    fn extents(&self, _: &Path, _: u64, _: usize) -> Result<Vec<Extent>> {
        none("map")
    }
    fn read_range(&self, _: &Path, _: u64, _: u64) -> Result<Vec<Piece>> {
        none("read")
    }
    fn mounts(&self) -> Result<Vec<Mount>> {
        none("list mounts")
    }
    fn loop_devices(&self, _: &dyn Fn(&Path) -> bool) -> Result<Vec<LoopDevice>> {
        none("list loops")
    }
    fn hold_loop(&self, _: u32, _: FileId) -> Result<Option<LoopHold>> {
        none("hold")
    }
    fn is_claimed(&self, _: &Device) -> Result<bool> {
        none("open")
    }
    fn device_bytes(&self, _: &Device) -> Result<u64> {
        none("measure")
    }
    fn signature(&self, _: &Device) -> Result<Signature> {
        none("probe")
    }
    fn is_unclean(&self, _: &Device, _: FsType) -> Result<bool> {
        none("look at")
    }
    fn can_grow_unmounted(&self, _: &Device) -> Result<bool> {
        none("measure")
    }
    fn should_grow(&self, _: &Device, _: &Path, _: FsType) -> Result<bool> {
        none("measure")
    }
    fn check_path(&self, _: &Path) -> std::result::Result<(), String> {
        Err("none".into())
    }
    fn stat_csi_path(&self, _: &Path) -> Result<Option<FileStat>> {
        none("stat")
    }
    fn space_csi_path(&self, _: &Path) -> Result<Space> {
        none("statfs")
    }
    fn boot_id(&self) -> Result<Uuid> {
        none("read")
    }
    fn random_uuid(&self) -> Uuid {
        Uuid::nil()
    }
    fn missing(&self) -> Vec<String> {
        Vec::new()
    }
}
