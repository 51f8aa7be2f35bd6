//! The participant of this process: images in the pools of this node.
//!
//! Each member is cut according to its use:
//! - not in use: one whole clone at any time, because its volume is locked; if a running copy reads it
//!   through a mapped device, the guard suspends that device for it;
//! - mounted: cloned ahead in pieces, and updated within the freeze;
//! - a raw device, or level `crash`: exactly one whole clone, which is atomic, at the cut. If the
//!   backend shows it as a mapped device, the guard suspends that device for it, without a freeze.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use nix::errno::Errno;

use super::clone_worker::{CloneStep, CloneWorker, ClonedMember, copied};
use super::guard::{MAX_DESCRIPTORS, MAX_MEMBERS};
use super::participant::{CutAnswer, CutStep, Participant, Prepared, Readiness, Thawed};
use super::semaphore::Semaphore;
use super::step_workers::{Job, StepWorkers};
use super::unused::copy_unused;
use super::{AbortHandle, CutInterfaces, CutMember, Use};
use crate::backend::{Copier, CopyMode};
use crate::error::{Error, ErrorContext, HostError, Result, chain};
use crate::host::freezer::FreezeLimits;
use crate::host::{DeviceHold, Freeze, FreezeMember, Freezer, Host, MountRoot};
use crate::model::{Level, SnapshotParameters};

/// Time limit of each write-back before a freeze. With sixteen busy volumes it took seconds. Only
/// quiesced applications wait for it. A disk that needs a minute is taken to hang.
pub const SYNC_BUDGET: Duration = Duration::from_secs(60);
/// Maximum number of passes before a freeze. Each pass leaves to the next one what was written
/// while it ran, so each is shorter than the one before.
const PASSES: usize = 3;
/// Up to this number of ranges, another pass is not worthwhile: cloning them takes about 5 ms.
const FEW_RANGES: u64 = 64;

/// Number of images that are cloned ahead in parallel. Clones on xfs contend for the locks of its
/// allocation groups, and mkfs.xfs creates four of these. More clones in parallel are hardly
/// faster, and the writers of each image wait proportionally longer for each piece (with 8 in
/// parallel, about 100 ms for each piece).
const AHEAD_AT_ONCE: usize = 4;

/// How a member is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum MemberMode {
    /// One whole clone, before anything is frozen.
    Unused,
    /// One whole clone at the cut; nothing is frozen for it.
    AtCut,
    /// A clone ahead, and the rest while the guard holds the file system frozen, the mapped device
    /// suspended, or both.
    Held,
}

/// What the guard gets of a member.
struct HeldMember {
    /// Its file system, which is frozen.
    root: Option<MountRoot>,
    /// Its mapped device, which is suspended.
    mapped: Option<DeviceHold>,
}

/// Fails if a pool has less than its headroom free.
pub type SpaceCheck = dyn Fn() -> Result<()> + Send + Sync;

/// The members of this node.
pub struct Local {
    host: Arc<dyn Host>,
    freezer: Arc<dyn Freezer>,
    members: Arc<[CutMember]>,
    limits: FreezeLimits,
    max_extents: Option<u64>,
    /// Checks that the pools still have their headroom free.
    room: Arc<SpaceCheck>,
    /// The step `ahead` is done.
    is_ahead: bool,
    /// The mode of each member, determined by `ready`.
    modes: Vec<MemberMode>,
    /// What the guard gets of the members that it will hold, in the order of the members.
    to_hold: Vec<HeldMember>,
    /// Dropped before `held`, which the workers share: dropping the last reference thaws.
    classes: Option<StepWorkers<CloneStep, Result<Thawed>>>,
    held: Option<Arc<dyn Freeze>>,
    abort: AbortHandle,
}

impl Local {
    /// Creates a participant. The copies of its members exist and are empty, and their volumes are
    /// locked.
    pub fn new(
        interfaces: &CutInterfaces,
        members: &[CutMember],
        parameters: &SnapshotParameters,
    ) -> Local {
        Local {
            host: interfaces.host.clone(),
            freezer: interfaces.freezer.clone(),
            members: members.into(),
            limits: FreezeLimits {
                sync: SYNC_BUDGET,
                freeze: parameters.freeze_timeout,
            },
            max_extents: parameters.max_extents,
            room: Arc::new(|| Ok(())),
            is_ahead: false,
            modes: Vec::new(),
            to_hold: Vec::new(),
            classes: None,
            held: None,
            abort: AbortHandle::default(),
        }
    }

    /// Adds a check of the free space in its pools, which runs just before the freeze.
    #[must_use]
    pub fn with_room(mut self, room: Arc<SpaceCheck>) -> Local {
        self.room = room;
        self
    }

    /// Adds a handle that aborts the participant from another thread.
    #[must_use]
    pub fn aborted_by(mut self, abort: &AbortHandle) -> Local {
        self.abort = abort.clone();
        self
    }

    fn in_mode(&self, mode: MemberMode) -> impl Iterator<Item = (usize, &CutMember)> {
        let members = self.members.iter().zip(&self.modes).enumerate();
        members
            .filter(move |(_, (_, its))| **its == mode)
            .map(|(at, (member, _))| (at, member))
    }

    /// Clones the whole images of members that are not in use, one after the other.
    fn clone_unused(&self) -> Result<u64> {
        let mut extents = 0;
        for (_, member) in self.in_mode(MemberMode::Unused) {
            let (id, copier) = (&member.target.volume_id, &*member.copier);
            extents += copy_unused(&*self.freezer, id, copier, self.limits.freeze)?;
        }
        Ok(extents)
    }

    /// Clones the whole images of members in use of which the guard holds nothing, one after the other.
    fn clone_moment(&self) -> Result<u64> {
        let mut extents = 0;
        for (_, member) in self.in_mode(MemberMode::AtCut) {
            extents += copied(member, Copier::copy_whole)?;
        }
        Ok(extents)
    }

    /// Hands the members that it will hold over to the freeze guard, and creates the workers for their
    /// clones: one for each member, and one for all members whose clones are no faster in parallel.
    fn begin(&mut self) -> Result<()> {
        let held = std::mem::take(&mut self.to_hold);
        let slots: Vec<usize> = self.in_mode(MemberMode::Held).map(|(at, _)| at).collect();
        let mut classes: Vec<Vec<ClonedMember>> = Vec::new();
        let mut series = Vec::new();
        let mut members = Vec::new();
        for (slot, (at, held)) in slots.into_iter().zip(held).enumerate() {
            let member = &self.members[at];
            let cloned = ClonedMember { at, slot };
            if member.copier.is_serial() {
                series.push(cloned);
            } else {
                classes.push(vec![cloned]);
            }
            members.push(FreezeMember {
                volume_id: member.target.volume_id.clone(),
                namespace: member.target.namespace(),
                image: member.copier.image(),
                root: held.root,
                mapped: held.mapped,
            });
        }
        if !series.is_empty() {
            classes.push(series);
        }
        let held = self.freezer.begin(members, self.limits);
        let held: Arc<dyn Freeze> = held.map_err(refusal)?.into();
        self.held = Some(held.clone());
        self.abort.watch(&held)?;
        let failed = Arc::new(AtomicBool::new(false));
        let ahead = Arc::new(Semaphore::new(AHEAD_AT_ONCE));
        let jobs = classes.into_iter().map(|members| {
            let class = CloneWorker {
                members: self.members.clone(),
                class: members,
                held: held.clone(),
                failed: failed.clone(),
                ahead: ahead.clone(),
            };
            let job: Job<CloneStep, Result<Thawed>> = Box::new(move |step| class.act(step));
            job
        });
        self.classes = Some(StepWorkers::new(jobs.collect())?);
        Ok(())
    }

    /// Runs a step in all workers. Returns the sum of their answers, or the first error, after all
    /// have finished.
    fn all(&mut self, step: CloneStep) -> Result<Thawed> {
        let mut sum = Thawed::default();
        let Some(classes) = &mut self.classes else {
            return Ok(sum);
        };
        for answer in classes.all(step) {
            let thawed = answer.ok_or_else(|| Error::bug("no clone panics"))??;
            sum.extents += thawed.extents;
            sum.lost = sum.lost.or(thawed.lost);
        }
        Ok(sum)
    }

    /// Clones again what was written since the last pass, until another pass would gain nothing.
    /// Returns the number of ranges.
    fn clone_again(&mut self) -> Result<u64> {
        let mut done = 0;
        for _ in 0..PASSES {
            let ranges = self.all(CloneStep::Delta)?.extents;
            done += ranges;
            let held = self.in_mode(MemberMode::Held);
            let min_useful_ranges: u64 = held
                .map(|(_, member)| member.copier.min_useful_ranges())
                .sum();
            if ranges <= FEW_RANGES.max(min_useful_ranges) {
                break;
            }
        }
        Ok(done)
    }

    fn sync(&self) -> Result<Duration> {
        let begun = Instant::now();
        if let Some(held) = &self.held {
            held.sync().context(|| "write back volumes".into())?;
        }
        Ok(begun.elapsed())
    }

    /// Opens what the guard must hold of a member in use at this level; `None` if it holds nothing.
    fn open(&self, member: &CutMember, level: Level) -> Result<Option<HeldMember>> {
        let volume = &member.target.volume_id;
        let root = match (&member.in_use, level) {
            (Use::Unused, _) => return Ok(None),
            (Use::Raw, _) | (Use::Mounted { .. }, Level::Crash) => None,
            (
                Use::Mounted {
                    device,
                    fs,
                    mount_point,
                },
                Level::Filesystem | Level::Application,
            ) => Some(self.host.open_mount_root(mount_point, device, *fs)),
        };
        let root = root.transpose();
        let root = root.context(|| format!("open the file system of volume {volume}"))?;
        let mapped = member.copier.mapped();
        let mapped = mapped.context(|| format!("open the device of volume {volume}"))?;
        let is_held = root.is_some() || mapped.is_some();
        Ok(is_held.then_some(HeldMember { root, mapped }))
    }

    /// How a member is cut, of which the guard holds `held`.
    fn mode_of(member: &CutMember, held: Option<&HeldMember>) -> MemberMode {
        match (&member.in_use, held) {
            (Use::Unused, _) => MemberMode::Unused,
            (Use::Raw | Use::Mounted { .. }, Some(_)) => MemberMode::Held,
            (Use::Raw | Use::Mounted { .. }, None) => MemberMode::AtCut,
        }
    }

    /// Checks the number of extents of a member, and adds what a member in use costs within the
    /// freeze.
    fn add_cost(
        &self,
        member: &CutMember,
        mode: MemberMode,
        (stall, most): (&mut Duration, &mut Option<(String, u64)>),
    ) -> Result<()> {
        let volume = &member.target.volume_id;
        let cost = member.copier.cost(match mode {
            MemberMode::Unused | MemberMode::AtCut => CopyMode::Whole,
            MemberMode::Held => CopyMode::Ahead,
        });
        let cost = cost.context(|| format!("count the extents of volume {volume}"))?;
        self.check_extents(member, cost.extents)?;
        if mode == MemberMode::Unused {
            return Ok(());
        }
        *stall = stall.saturating_add(cost.stall);
        if most.as_ref().is_none_or(|(_, n)| *n < cost.extents) {
            *most = Some((volume.clone(), cost.extents));
        }
        Ok(())
    }

    fn check_extents(&self, member: &CutMember, extents: u64) -> Result<()> {
        match self.max_extents.filter(|most| extents > *most) {
            None => Ok(()),
            Some(most) => Err(Error::refused(
                format!("volume {}", member.target.volume_id),
                format!(
                    "its image has {extents} extents, but the class allows {most} (maxExtents); raise maxExtents, or copy the volume into a new one, which has fewer extents"
                ),
            )),
        }
    }
}

/// Checks that a guard accepts requests, with mapped devices or without.
pub(super) fn check_ready(freezer: &dyn Freezer, is_mapped: bool) -> Result<()> {
    let ready = freezer.ready(is_mapped);
    ready.map_err(|error| match error.code() {
        Some(Errno::EPROTONOSUPPORT) => refusal(error),
        Some(_) | None => Error::unreachable("a cut of volumes in use", chain(&error)),
    })
}

/// EAGAIN means that the guard already holds its maximum. It is no failure, and the call may be
/// repeated.
pub(super) fn refusal(error: HostError) -> Error {
    match error.code() {
        Some(Errno::EAGAIN) => Error::unreachable("a cut of volumes in use", chain(&error)),
        Some(Errno::EPROTONOSUPPORT | Errno::EOPNOTSUPP | Errno::EPERM) => {
            Error::refused("a cut of volumes in use", chain(&error))
        }
        Some(Errno::EBUSY) => Error::Busy {
            subject: "a volume of the cut".into(),
            holder: chain(&error),
        },
        Some(_) | None => Error::Host {
            doing: "hand volumes over to the freeze guard".into(),
            source: error,
        },
    }
}

/// A freeze by another program ends the attempts: a further attempt would find it, too.
pub(super) fn not_frozen(error: HostError) -> Error {
    match error.code() {
        Some(Errno::EBUSY) => Error::Busy {
            subject: "a volume of the cut".into(),
            holder: format!("another program froze it: {}", chain(&error)),
        },
        Some(_) | None => Error::CutLost {
            reason: format!("volumes could not be frozen: {}", chain(&error)),
        },
    }
}

impl Participant for Local {
    fn step(&mut self, step: CutStep) -> Result<CutAnswer> {
        Ok(match step {
            CutStep::Ready(level) => CutAnswer::Ready(self.ready(level)?),
            CutStep::Ahead { hooks } => CutAnswer::Ahead(self.ahead(hooks)?),
            CutStep::Prepare => CutAnswer::Prepared(self.prepare()?),
            CutStep::Freeze => {
                self.freeze()?;
                CutAnswer::Frozen
            }
            CutStep::Cut => CutAnswer::Thawed(self.cut()?),
            CutStep::Written => {
                self.written()?;
                CutAnswer::Written
            }
        })
    }

    fn abort(&self) -> Box<dyn Fn() + Send + Sync> {
        let abort = self.abort.clone();
        Box::new(move || abort.now())
    }
}

/// The steps of the participant.
impl Local {
    pub(super) fn ready(&mut self, level: Level) -> Result<Readiness> {
        let mut ready = Readiness::default();
        let members = self.members.clone();
        for member in members.iter() {
            let held = self.open(member, level)?;
            let mode = Local::mode_of(member, held.as_ref());
            self.modes.push(mode);
            let stall = (&mut ready.stall, &mut ready.most_extents);
            self.add_cost(member, mode, stall)?;
            if mode == MemberMode::Unused {
                ready.quiet += 1;
                continue;
            }
            ready.in_use += 1;
            ready.raw += usize::from(member.in_use == Use::Raw);
            ready.frozen += usize::from(held.is_some());
            self.to_hold.extend(held);
        }
        self.check_guard()?;
        Ok(ready)
    }

    /// Checks that the guard can hold the members, so that no application is quiesced in vain.
    fn check_guard(&self) -> Result<()> {
        let count = self.to_hold.len();
        let mapped = self.to_hold.iter().filter(|held| held.mapped.is_some());
        let mapped = mapped.count();
        // One descriptor for each file system, and one for each device.
        let most = match count + mapped > MAX_DESCRIPTORS {
            true => MAX_DESCRIPTORS / 2,
            false => MAX_MEMBERS,
        };
        if count > most {
            return Err(Error::refused(
                "the group",
                format!(
                    "{count} of its volumes are in use on this node, but at most {most} can be frozen together; create smaller groups"
                ),
            ));
        }
        if count == 0 {
            return Ok(());
        }
        check_ready(self.freezer.as_ref(), mapped > 0)
    }

    pub(super) fn ahead(&mut self, hooks: bool) -> Result<Prepared> {
        self.is_ahead = true;
        let mut done = Prepared {
            extents: self.clone_unused()?,
            ..Prepared::default()
        };
        if self.to_hold.is_empty() {
            return Ok(done);
        }
        self.begin()?;
        done.sync += self.sync()?;
        done.extents += self.all(CloneStep::Ahead)?.extents;
        if hooks {
            // Otherwise what was written during the clone would be written back and cloned while
            // the hooks hold the applications.
            done.sync += self.sync()?;
            done.extents += self.clone_again()?;
        }
        Ok(done)
    }

    pub(super) fn prepare(&mut self) -> Result<Prepared> {
        let mut done = match self.is_ahead {
            true => Prepared::default(),
            false => self.ahead(false)?,
        };
        if self.held.is_some() {
            done.sync += self.sync()?;
            done.extents += self.clone_again()?;
            self.all(CloneStep::Seal)?;
        }
        // Since the first check, images may have got more extents, and pools may have filled up.
        let members = self.members.clone();
        for (member, mode) in members.iter().zip(&self.modes) {
            if *mode != MemberMode::Unused {
                self.add_cost(member, *mode, (&mut done.stall, &mut done.most_extents))?;
            }
        }
        (self.room)()?;
        Ok(done)
    }

    pub(super) fn freeze(&mut self) -> Result<()> {
        match &self.held {
            Some(held) => held.freeze().map_err(not_frozen),
            None => Ok(()),
        }
    }

    pub(super) fn cut(&mut self) -> Result<Thawed> {
        let mut done = self.all(CloneStep::Cut)?;
        done.extents += self.clone_moment()?;
        Ok(done)
    }

    fn written(&mut self) -> Result<()> {
        match &self.held {
            Some(held) => held
                .written()
                .context(|| "verify that all data was written back before the cut".into())?,
            None => return Ok(()),
        }
        match self.all(CloneStep::Verify)?.lost {
            Some(reason) => Err(Error::CutLost { reason }),
            None => Ok(()),
        }
    }
}
