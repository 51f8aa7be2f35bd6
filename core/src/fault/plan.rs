//! The plan of faults, and what happens at its steps.

use std::fs::OpenOptions;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::signal::{Signal, raise};

use crate::error::HostError;

const VARIABLE: &str = "SLACKWATER_FAULT";

/// Stands for a number in the list of steps.
const NUMBER: &str = "NUMBER";

/// Names of effects, and of the driver's requests to the guard.
#[rustfmt::skip]
const EFFECTS: &[&str] = &[
    NUMBER,
    "make_dir", "write_file", "sync_file", "sync_dir", "sync_all", "rename", "remove_file", "remove_dir",
    "allocate", "write_in_place", "make_like", "shorten", "zero", "hint_extents", "discard", "trim",
    "trim_volume", "clone_whole", "clone_ahead", "clone_rest", "unshare", "copy_range", "write_range",
    "renew_fs_id", "attach_loop", "detach_loop", "detach_dead_loop", "resize_loop", "set_direct_io",
    "forbid_discard", "renew_loop", "format", "check_fs", "grow_fs", "grow_unmounted",
    "make_target", "remove_target", "mount", "bind", "bind_device", "unmount", "start_session",
    "create_thin", "create_snap", "delete_thin", "set_transaction_id", "release_metadata_snap",
    "create_mapped", "load_table", "load_linear", "resume_mapped", "clear_table", "remove_mapped",
    "write_blocks", "fill_with_zeros", "rewrite",
    "guard_begin", "guard_sync", "guard_freeze", "guard_thaw", "guard_written", "sweep_resume",
    "sweep_thaw",
];

#[rustfmt::skip]
const GUARD: &[&str] = &[
    "accepted", "begun", "sync", "expedited", "freeze", "suspend", "resume", "thaw", "deadline",
    "ended",
];

/// Steps of a cut on several nodes.
#[rustfmt::skip]
pub const CUT_STEPS: &[&str] = &[
    "begin", "ready", "ahead", "prepare", "freeze", "cut", "written", "keep", "kept", "commit",
    "lead-committed", "committed",
];

/// Steps of a volume that is restored or cloned on another node than its source. A restore has no
/// hidden snapshot.
#[rustfmt::skip]
pub const COPY_STEPS: &[&str] = &[
    "looked", "snapshot-taken", "offered", "received", "snapshot-deleted",
];

const AT_STEP: &[&str] = &["kill", "kill-after", "stop", "stop-after", "hang"];

/// The grammar: scope, steps, modes.
#[rustfmt::skip]
const KNOWN: &[(&str, &[&str], &[&str])] = &[
    ("effect", EFFECTS, &["kill", "kill-after", "stop", "stop-after", "hang", "error=ERRNO"]),
    ("effect", &["all"], &["log=FILE", "after=FILE"]),
    ("guard", GUARD, AT_STEP),
    ("guard", &["memory"], &["log=FILE"]),
    ("router", CUT_STEPS, AT_STEP),
    ("router", COPY_STEPS, AT_STEP),
    ("driver", &["kill_guard"], &["delay=SECONDS"]),
    ("driver", &["memory"], &["log=FILE"]),
];

#[derive(Clone, Debug, PartialEq, Eq)]
enum Mode {
    Before(Signal),
    After(Signal),
    Hang,
    Error(Errno),
    Delay(Duration),
    Log(PathBuf),
    CountAfter(PathBuf),
}

impl Mode {
    fn parse(word: &str, value: Option<&str>) -> Option<Mode> {
        Some(match (word, value) {
            ("kill", None) => Mode::Before(Signal::SIGKILL),
            ("kill-after", None) => Mode::After(Signal::SIGKILL),
            ("stop", None) => Mode::Before(Signal::SIGSTOP),
            ("stop-after", None) => Mode::After(Signal::SIGSTOP),
            ("hang", None) => Mode::Hang,
            ("error", Some(name)) => {
                // The numbers of Linux's errors.
                let mut all = (1..=133).map(Errno::from_raw);
                Mode::Error(all.find(|errno| format!("{errno:?}") == name)?)
            }
            ("delay", Some(seconds)) => Mode::Delay(Duration::from_secs(seconds.parse().ok()?)),
            ("log", Some(file)) => Mode::Log(file.into()),
            ("after", Some(file)) => Mode::CountAfter(file.into()),
            _ => return None,
        })
    }
}

struct Fault {
    text: String,
    scope: &'static str,
    step: &'static str,
    /// Instead of a name.
    number: Option<u64>,
    mode: Mode,
    /// It has occurred.
    met: AtomicBool,
}

fn parse(text: &str) -> Result<Fault, String> {
    let shape = || format!("{text:?} is not scope.step:mode");
    let (place, mode) = text.split_once(':').ok_or_else(shape)?;
    let (scope, step) = place.split_once('.').ok_or_else(shape)?;
    let unknown = |what: &str, word: &str, mut known: Vec<&str>| {
        known.dedup();
        let known = known.join(", ");
        format!("{text:?}: {word:?} is not a {what}; known are: {known}")
    };
    let of_scope = || KNOWN.iter().filter(|known| known.0 == scope);
    if of_scope().next().is_none() {
        let scopes = KNOWN.iter().map(|known| known.0).collect();
        return Err(unknown("scope", scope, scopes));
    }
    let number = step.parse().ok().filter(|number| *number > 0);
    let is_step = |known: &&str| match number {
        Some(_) => *known == NUMBER,
        None => *known == step && step != NUMBER,
    };
    let found = of_scope().find_map(|known| Some((known, *known.1.iter().find(|s| is_step(s))?)));
    let Some((known, step)) = found else {
        let steps = of_scope().flat_map(|known| known.1).copied().collect();
        return Err(unknown("step", step, steps));
    };
    let (word, value) = match mode.split_once('=') {
        Some((word, value)) => (word, Some(value)),
        None => (mode, None),
    };
    let mut words = known.2.iter().map(|known| known.split('=').next());
    let is_known = words.any(|known| known == Some(word));
    let parsed = Mode::parse(word, value).filter(|_| is_known);
    Ok(Fault {
        text: text.into(),
        scope: known.0,
        step,
        number,
        mode: parsed.ok_or_else(|| unknown("mode", mode, known.2.to_vec()))?,
        met: AtomicBool::new(false),
    })
}

/// The names of all effects.
pub fn effects() -> impl Iterator<Item = &'static str> {
    EFFECTS.iter().copied().filter(|name| *name != NUMBER)
}

fn load() -> &'static Result<Vec<Fault>, String> {
    static PLAN: OnceLock<Result<Vec<Fault>, String>> = OnceLock::new();
    PLAN.get_or_init(|| {
        let text = std::env::var(VARIABLE).unwrap_or_default();
        let faults = text.split(',').filter(|fault| !fault.is_empty());
        faults.map(parse).collect()
    })
}

fn plan() -> &'static [Fault] {
    match load() {
        Ok(plan) => plan,
        Err(problem) => panic!("{VARIABLE}: {problem}"),
    }
}

/// Refuses an invalid plan. A program calls it at its start.
pub fn check() -> Result<(), HostError> {
    let refused = |problem: &String| HostError::unexpected("parse", VARIABLE, problem);
    load().as_ref().map(drop).map_err(refused)
}

/// The number of the last effect. Locked while a signal is sent.
static LAST: Mutex<u64> = Mutex::new(0);

fn turn() -> MutexGuard<'static, u64> {
    LAST.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Fault {
    /// Sends a signal to this process, once, and logs that. Other threads that reach the step, or begin
    /// an effect, wait until it is sent: SIGSTOP reaches them a moment later.
    fn raise(&self, signal: Signal) {
        let _turn = turn();
        if !self.met.swap(true, Ordering::SeqCst) {
            log("effect", "all", &self.text);
            raise(signal).expect("a process can send a signal to itself");
        }
    }
}

/// The faults at a step, without memory: the guard calls this while file systems are frozen.
fn planned(
    scope: &'static str,
    step: &'static str,
    number: Option<u64>,
) -> impl Iterator<Item = &'static Fault> + Clone {
    let is_known = |known: &(&str, &[&str], _)| known.0 == scope && known.1.contains(&step);
    assert!(KNOWN.iter().any(is_known), "{scope}.{step} is not listed");
    plan().iter().filter(move |fault| {
        let is_it = match fault.number {
            Some(_) => fault.number == number,
            None => fault.step == step,
        };
        fault.scope == scope && is_it
    })
}

fn perform<T>(faults: impl Iterator<Item = &'static Fault> + Clone, act: impl FnOnce() -> T) -> T {
    for fault in faults.clone() {
        match fault.mode {
            Mode::Before(signal) => fault.raise(signal),
            Mode::Hang => loop {
                std::thread::park();
            },
            _ => {}
        }
    }
    let done = act();
    for fault in faults {
        if let Mode::After(signal) = fault.mode {
            fault.raise(signal);
        }
    }
    done
}

/// Performs a step, with the faults that are planned for it.
pub fn around<T>(scope: &'static str, step: &'static str, act: impl FnOnce() -> T) -> T {
    perform(planned(scope, step, None), act)
}

/// Performs an effect, or a step that changes something but cannot be a value, with the faults that
/// are planned for it.
pub fn effect<T>(
    name: &'static str,
    act: impl FnOnce() -> Result<T, HostError>,
) -> Result<T, HostError> {
    let Some(number) = count(name) else {
        return act();
    };
    let faults = planned("effect", name, Some(number));
    for fault in faults.clone() {
        if let Mode::Error(errno) = fault.mode
            && !fault.met.swap(true, Ordering::SeqCst)
        {
            return Err(HostError::errno("fault at", name, errno));
        }
    }
    perform(faults, act)
}

/// The number of this effect; `None` before counting has begun.
fn count(name: &str) -> Option<u64> {
    let mut log = None;
    for fault in planned("effect", "all", None) {
        match &fault.mode {
            Mode::CountAfter(file) if !file.exists() => return None,
            Mode::Log(file) => log = Some(file),
            _ => {}
        }
    }
    let mut last = turn();
    *last += 1;
    if let Some(log) = log {
        append(log, &format!("{} {name}\n", *last));
    }
    Some(*last)
}

fn append(log: &Path, line: &str) {
    let file = OpenOptions::new().create(true).append(true).open(log);
    file.and_then(|mut file| file.write_all(line.as_bytes()))
        .expect("the log of a fault test is writable");
}

pub(super) fn is_planned(scope: &'static str, step: &'static str) -> bool {
    planned(scope, step, None).next().is_some()
}

/// Writes a line to the logs that are planned for a step.
pub(super) fn log(scope: &'static str, step: &'static str, line: &str) {
    for fault in planned(scope, step, None) {
        if let Mode::Log(log) = &fault.mode {
            append(log, &format!("{line}\n"));
        }
    }
}

/// How much later a step comes.
pub fn delay(scope: &'static str, step: &'static str) -> Duration {
    let delays = planned(scope, step, None).filter_map(|fault| match fault.mode {
        Mode::Delay(delay) => Some(delay),
        _ => None,
    });
    delays.sum()
}

/// The environment variable for a guard that is started.
pub fn for_guard() -> Option<(&'static str, String)> {
    let faults = plan().iter().filter(|fault| fault.scope == "guard");
    let faults: Vec<&str> = faults.map(|fault| fault.text.as_str()).collect();
    (!faults.is_empty()).then(|| (VARIABLE, faults.join(",")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_has_a_known_scope_step_and_mode() {
        for (text, step, number, mode) in [
            (
                "effect.3:kill-after",
                NUMBER,
                Some(3),
                Mode::After(Signal::SIGKILL),
            ),
            (
                "effect.mount:error=ENOSPC",
                "mount",
                None,
                Mode::Error(Errno::ENOSPC),
            ),
            (
                "effect.all:log=/a.b:c",
                "all",
                None,
                Mode::Log("/a.b:c".into()),
            ),
            (
                "guard.freeze:stop",
                "freeze",
                None,
                Mode::Before(Signal::SIGSTOP),
            ),
            ("router.cut:hang", "cut", None, Mode::Hang),
        ] {
            let fault = parse(text).unwrap();
            let found = (fault.step, fault.number, fault.mode);
            assert_eq!(found, (step, number, mode), "{text}");
        }
    }

    #[test]
    fn anything_else_is_refused_with_what_is_known() {
        for (text, problem) in [
            ("kill", "\"kill\" is not scope.step:mode"),
            ("3:kill", "\"3:kill\" is not scope.step:mode"),
            (
                "disk.1:kill",
                "\"disk\" is not a scope; known are: effect, guard, router, driver",
            ),
            (
                "effect.0:kill",
                "\"0\" is not a step; known are: NUMBER, make_dir,",
            ),
            ("effect.NUMBER:kill", "\"NUMBER\" is not a step"),
            (
                "guard.1:kill",
                "\"1\" is not a step; known are: accepted, begun,",
            ),
            (
                "guard.freeze:error=EIO",
                "\"error=EIO\" is not a mode; known are: kill, kill-after, stop, stop-after, hang",
            ),
            ("effect.1:error=E", "\"error=E\" is not a mode"),
            ("effect.1:kill=", "\"kill=\" is not a mode"),
            (
                "effect.all:kill",
                "\"kill\" is not a mode; known are: log=FILE, after=FILE",
            ),
        ] {
            let found = parse(text).err().unwrap_or_default();
            assert!(found.contains(problem), "{text}: {found}");
        }
    }

    #[test]
    fn all_effects_are_known() {
        let source = include_str!("../host/effect.rs");
        let names = source.split(" => \"").skip(1);
        let names: Vec<&str> = names.filter_map(|rest| rest.split('"').next()).collect();
        assert!(names.len() > 30, "{names:?}");
        for name in names {
            assert!(EFFECTS.contains(&name), "{name}");
        }
    }
}
