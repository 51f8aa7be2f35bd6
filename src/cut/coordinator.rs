//! The coordinator: one attempt of a cut over any number of participants.
//!
//! Between freeze and cut the coordinator does nothing but read the clock. Whatever fails, it first
//! thaws all members, then releases all applications, and then returns the error.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::participant::{CutAnswer, CutStep, Participant, Readiness};
use super::step_workers::{Job, StepWorkers};
use super::{CutStats, Outcome};
use crate::error::{Error, Result, chain};
use crate::fault;
use crate::hook::{HookTarget, Hooks, Quiesced};
use crate::model::{Level, OnQuiesceFailure, SharedVolume, SnapshotParameters};

/// The goal of an attempt.
pub struct CutSpec<'a> {
    /// The requested level.
    pub level: Level,
    /// The parameters of the class.
    pub parameters: &'a SnapshotParameters,
    /// The members in use, of all participants. Their hooks are run.
    pub targets: &'a [HookTarget],
}

/// A member that is in use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Used {
    pub volume_id: String,
    /// "namespace/name" of its claim, if known.
    pub claim: Option<String>,
    /// Why it is published as a raw device whose writers nothing can stop, and what helps.
    pub unsuspendable_reason: Option<String>,
}

/// Refuses a group if several of its volumes are in use, on any nodes, and they cannot all be
/// stopped at the same moment.
pub fn admit(used: &[Used], level: Level, parameters: &SnapshotParameters) -> Result<()> {
    if used.len() < 2 {
        return Ok(());
    }
    let crash = |key: &str| {
        Err(Error::invalid(
            format!("parameters.{key}"),
            "\"crash\" does not freeze, so several volumes in use would not be cut at the same point in time; give filesystem",
        ))
    };
    if level == Level::Crash {
        return crash("consistency");
    }
    if parameters.on_quiesce_failure == OnQuiesceFailure::Degrade(Level::Crash) {
        return crash("onQuiesceFailure");
    }
    let mut raw = used
        .iter()
        .filter_map(|used| Some((&used.volume_id, used.unsuspendable_reason.as_ref()?)));
    raw.next().map_or(Ok(()), |(volume, why)| {
        let reason = format!(
            "it is published as a raw block device that cannot be suspended together with other volumes in use: {why}; or snapshot it alone"
        );
        Err(Error::refused(format!("volume {volume}"), reason))
    })
}

/// What a coordinator needs besides its participants.
pub struct CutContext<'a> {
    /// The quiesce hooks.
    pub hooks: &'a dyn Hooks,
    /// Returns the time in nanoseconds since 1970.
    pub now_nanos: &'a dyn Fn() -> u64,
    /// See [`super::Attempt::disturbed`].
    pub disturbed: &'a Cell<bool>,
}

/// The level and the hooks that follow from the class and the configuration.
#[derive(Debug, PartialEq, Eq)]
struct CutMode {
    level: Level,
    hooks: Vec<String>,
    /// Why the level is not higher.
    reason: String,
}

/// `None` for a participant that was aborted because another one failed: that one's error counts.
type Answer = Result<Option<CutAnswer>>;
type Participants = StepWorkers<CutStep, Answer>;

/// Runs one attempt. On an error nothing is frozen or quiesced any more, as far as this process can
/// achieve that, and the copies are worthless.
pub fn run(
    context: &CutContext<'_>,
    participants: Vec<Box<dyn Participant>>,
    spec: &CutSpec<'_>,
) -> Result<Outcome> {
    let plan = plan(context.hooks, spec)?;
    let mut workers = StepWorkers::new(jobs(participants))?;
    let ready = readiness(&mut workers, plan.level)?;
    check_stall(ready.stall, ready.most_extents.as_ref(), spec.parameters)?;

    let mut stats = CutStats::default();
    // This step comes before any application is held, and does everything that is possible by then
    // and can fail.
    prepared(
        &mut workers,
        CutStep::Ahead {
            hooks: !plan.hooks.is_empty(),
        },
        &mut stats,
    )?;
    let quiesced = quiesce(context, &plan, spec.parameters, &mut stats)?;
    // `workers` is declared after `quiesced`, so that a panic also thaws first and then releases.
    let mut workers = workers;
    let held = Instant::now();
    let cut = freeze_and_cut(context, &mut workers, &ready, spec.parameters, &mut stats);
    // Dropping `workers` thaws everything. After an error this happens before any application is
    // released.
    let workers = cut.is_ok().then_some(workers);
    stats.held = quiesced.is_some().then(|| held.elapsed());
    let (alive, released) = release(quiesced, cut.is_ok(), &mut stats);
    let cut_at = cut?;
    alive?;
    released?;
    // This is the last step, because it may take as long as a write-back.
    if let Some(mut workers) = workers {
        all(&mut workers, CutStep::Written, |_| Ok(()))?;
    }
    let (level, reason) = reached(plan, &ready);
    Ok(Outcome {
        level,
        reason,
        cut_at,
        stats,
    })
}

/// The work of the participants. The first one whose step fails aborts the others at once: they
/// thaw, whatever step they are in, and do not wait until the failed one has cleaned up.
fn jobs(participants: Vec<Box<dyn Participant>>) -> Vec<Job<CutStep, Answer>> {
    let halts: Arc<[_]> = participants.iter().map(|one| one.abort()).collect();
    let failed = Arc::new(AtomicBool::new(false));
    let each = participants.into_iter().enumerate();
    let jobs = each.map(|(at, mut participant)| {
        let (halts, failed) = (halts.clone(), failed.clone());
        let job: Job<CutStep, Answer> = Box::new(move |step| {
            let done = participant.step(step).map(Some);
            if done.is_ok() {
                return done;
            }
            if failed.swap(true, Ordering::SeqCst) {
                return Ok(None);
            }
            let others = halts.iter().enumerate().filter(|(other, _)| *other != at);
            others.for_each(|(_, abort)| abort());
            done
        });
        job
    });
    jobs.collect()
}

/// Determines which hooks run, and which level is reached if there are none.
fn plan(hooks: &dyn Hooks, spec: &CutSpec<'_>) -> Result<CutMode> {
    let asked = |level: Level| CutMode {
        level,
        hooks: Vec::new(),
        reason: format!("{level} was requested"),
    };
    let instead = |level: Level, reason: String| CutMode {
        level,
        hooks: Vec::new(),
        reason,
    };
    if spec.level < Level::Application {
        return Ok(asked(spec.level));
    }
    if spec.targets.is_empty() {
        let reason = "the volume is not in use: there is no application to quiesce";
        return Ok(instead(Level::Filesystem, reason.into()));
    }
    let shared = spec.parameters.shared_volume;
    let wanted = hooks.wanted(spec.targets, shared)?;
    if !wanted.is_empty() {
        return Ok(CutMode {
            level: Level::Application,
            hooks: wanted,
            reason: String::new(),
        });
    }
    let everybody = hooks.wanted(spec.targets, SharedVolume::All)?;
    if !everybody.is_empty() {
        let names = everybody.join(", ");
        let reason = format!("several hooks share a volume, and the class skips them all: {names}");
        return Ok(instead(Level::Filesystem, reason));
    }
    let volumes: Vec<&str> = spec.targets.iter().map(|t| t.volume_id.as_str()).collect();
    let volumes = format!("volume {}", volumes.join(", "));
    match spec.parameters.on_quiesce_failure {
        OnQuiesceFailure::Degrade(level) => Ok(instead(
            level,
            format!("no hook is configured for {volumes}"),
        )),
        OnQuiesceFailure::Fail => Err(Error::refused(
            volumes,
            format!(
                "no hook is configured for it, but the class requires consistency: application; {}, or allow a lower level with onQuiesceFailure",
                hooks.how()
            ),
        )),
    }
}

/// The readiness of all participants together.
fn readiness(workers: &mut Participants, level: Level) -> Result<Readiness> {
    let mut sum = Readiness::default();
    all(workers, CutStep::Ready(level), |answer| {
        let CutAnswer::Ready(one) = answer else {
            return Err(out_of_step());
        };
        // A faulty agent may report any numbers.
        sum.in_use = sum.in_use.saturating_add(one.in_use);
        sum.raw = sum.raw.saturating_add(one.raw);
        sum.frozen = sum.frozen.saturating_add(one.frozen);
        sum.quiet = sum.quiet.saturating_add(one.quiet);
        // Participants work in parallel, so the slowest one counts.
        if one.most_extents.is_some() && one.stall >= sum.stall {
            (sum.stall, sum.most_extents) = (one.stall, one.most_extents);
        }
        Ok(())
    })?;
    Ok(sum)
}

/// Refuses a cut that would block writers for too long, before any application is quiesced.
fn check_stall(
    stall: Duration,
    most_extents: Option<&(String, u64)>,
    parameters: &SnapshotParameters,
) -> Result<()> {
    let most = parameters.freeze_timeout;
    match most_extents {
        Some((volume, extents)) if stall > most => Err(Error::refused(
            format!("volume {volume}"),
            format!(
                "its image has {extents} extents; cutting it would freeze writers for about {} ms, longer than freezeTimeout ({} ms); raise freezeTimeout, or copy the volume into a new one, which has fewer extents",
                stall.as_millis(),
                most.as_millis()
            ),
        )),
        Some(_) | None => Ok(()),
    }
}

fn quiesce(
    context: &CutContext<'_>,
    plan: &CutMode,
    parameters: &SnapshotParameters,
    stats: &mut CutStats,
) -> Result<Option<Box<dyn Quiesced>>> {
    if plan.hooks.is_empty() {
        return Ok(None);
    }
    let begun = Instant::now();
    context.disturbed.set(true);
    let quiesced = context
        .hooks
        .quiesce(&plan.hooks, parameters.quiesce_timeout);
    stats.quiesce = Some(begun.elapsed());
    quiesced.map(Some)
}

/// Runs a step that precedes the freeze. Returns the longest stall that a participant expects, and
/// its image with the most extents.
fn prepared(
    workers: &mut Participants,
    step: CutStep,
    stats: &mut CutStats,
) -> Result<(Duration, Option<(String, u64)>)> {
    let mut sync = Duration::ZERO;
    let mut slowest = (Duration::ZERO, None);
    all(workers, step, |answer| {
        let (CutAnswer::Ahead(one) | CutAnswer::Prepared(one)) = answer else {
            return Err(out_of_step());
        };
        sync = sync.max(one.sync);
        stats.extents_ahead += one.extents;
        if one.stall >= slowest.0 && one.most_extents.is_some() {
            slowest = (one.stall, one.most_extents);
        }
        Ok(())
    })?;
    stats.sync += sync;
    Ok(slowest)
}

/// Updates the clones; freezes, cuts and thaws all members. Returns the time of the cut.
fn freeze_and_cut(
    context: &CutContext<'_>,
    workers: &mut Participants,
    ready: &Readiness,
    parameters: &SnapshotParameters,
    stats: &mut CutStats,
) -> Result<u64> {
    let (stall, most_extents) = prepared(workers, CutStep::Prepare, stats)?;
    check_stall(stall, most_extents.as_ref(), parameters)?;
    if ready.frozen > 0 {
        context.disturbed.set(true);
    }
    let begun = Instant::now();
    // If all goes well, nothing in here allocates: the kernel could wait for the writers to get
    // memory.
    fault::without_memory("driver", "coordinator", || {
        all(workers, CutStep::Freeze, |_| Ok(()))?;
        let cut_at = (context.now_nanos)();
        let mut lost = None;
        let cut = all(workers, CutStep::Cut, |answer| {
            let CutAnswer::Thawed(thawed) = answer else {
                return Err(out_of_step());
            };
            stats.extents_within += thawed.extents;
            lost = lost.take().or(thawed.lost);
            Ok(())
        });
        stats.freeze = (ready.frozen > 0).then(|| begun.elapsed());
        cut?;
        match lost {
            None => Ok(cut_at),
            Some(reason) => Err(Error::CutLost { reason }),
        }
    })
}

/// Ends the sessions of the hooks. Returns whether they held through the cut, and whether they
/// ended without failure.
fn release(
    quiesced: Option<Box<dyn Quiesced>>,
    is_cut: bool,
    stats: &mut CutStats,
) -> (Result<()>, Result<()>) {
    let Some(mut quiesced) = quiesced else {
        return (Ok(()), Ok(()));
    };
    let begun = Instant::now();
    let alive = if is_cut { quiesced.verify() } else { Ok(()) };
    let released = quiesced.release();
    stats.release = Some(begun.elapsed());
    let released = match released {
        Ok(problem) => {
            if let Some(problem) = &problem {
                tracing::warn!(problem, "released an application late");
            }
            stats.release_problem = problem;
            Ok(())
        }
        Err(error) => {
            // The error is logged here, because another error may be returned instead.
            tracing::warn!(error = chain(&error), "failed to release an application");
            Err(error)
        }
    };
    (alive, released)
}

/// The level that was reached, and why it is not higher. Raw members of a group are recorded with a
/// level of their own, so they do not lower that of the others.
fn reached(plan: CutMode, ready: &Readiness) -> (Level, String) {
    let is_raw = ready.raw > 0 && ready.raw == ready.in_use && ready.quiet == 0;
    if is_raw && plan.level == Level::Filesystem {
        let reason = "raw block device: cut at one point in time, but it cannot be frozen";
        return (Level::Crash, reason.into());
    }
    (plan.level, plan.reason)
}

/// Runs a step in all participants, and then passes their answers on. Returns the first error, after
/// all have finished.
fn all(
    workers: &mut Participants,
    step: CutStep,
    mut each: impl FnMut(CutAnswer) -> Result<()>,
) -> Result<()> {
    for answer in workers.all(step) {
        let panicked = || Error::bug("no participant of a cut panics");
        if let Some(answer) = answer.ok_or_else(panicked)?? {
            each(answer)?;
        }
    }
    Ok(())
}

fn out_of_step() -> Error {
    Error::bug("a participant answers the requested step")
}
