//! Fault injection at the n-th effect, for tests that kill the real process; only in a build with
//! the feature `fault`.
//!
//! Environment:
//! - `SLACKWATER_FAULT=N:MODE`: at the N-th effect of this process, counted from 1, MODE is
//!   `kill-before` or `kill-after` (SIGKILL to this process), `stop-before` or `stop-after`
//!   (SIGSTOP, until a SIGCONT), or `error:ENAME` (the effect is not performed and fails with that
//!   errno). Instead of N, the name of an effect selects the first effect with this name.
//! - `SLACKWATER_FAULT_LOG=FILE`: appends `n name` for each effect that begins.
//! - `SLACKWATER_FAULT_AFTER=FILE`: effects are counted and logged only once FILE exists.
//!
//! Effects of several threads are counted in the order in which they begin.

use std::fs::OpenOptions;
use std::io::Write;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};

use nix::errno::Errno;
use nix::sys::signal::{Signal, raise};

use super::{Done, Effect, Result};
use crate::error::HostError;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    Before(Signal),
    After(Signal),
    Error(Errno),
}

/// Which effect fails.
#[derive(Clone, Debug, PartialEq, Eq)]
enum At {
    Number(u64),
    First(String),
}

#[derive(Debug, Default)]
struct Plan {
    fault: Option<(At, Mode)>,
    log: Option<PathBuf>,
    after: Option<PathBuf>,
}

static PLAN: OnceLock<Plan> = OnceLock::new();
static COUNT: Mutex<u64> = Mutex::new(0);
/// The named effect has occurred.
static MET: AtomicBool = AtomicBool::new(false);

fn from_environment() -> Plan {
    let path = |name| std::env::var_os(name).map(PathBuf::from);
    let fault = std::env::var("SLACKWATER_FAULT").ok().map(|text| {
        parse(&text)
            .unwrap_or_else(|| panic!("SLACKWATER_FAULT={text:?} is not N:MODE or NAME:MODE"))
    });
    Plan {
        fault,
        log: path("SLACKWATER_FAULT_LOG"),
        after: path("SLACKWATER_FAULT_AFTER"),
    }
}

fn parse(text: &str) -> Option<(At, Mode)> {
    let (at, mode) = text.split_once(':')?;
    let mode = match mode {
        "kill-before" => Mode::Before(Signal::SIGKILL),
        "kill-after" => Mode::After(Signal::SIGKILL),
        "stop-before" => Mode::Before(Signal::SIGSTOP),
        "stop-after" => Mode::After(Signal::SIGSTOP),
        "error:EIO" => Mode::Error(Errno::EIO),
        "error:ENOSPC" => Mode::Error(Errno::ENOSPC),
        "error:EBUSY" => Mode::Error(Errno::EBUSY),
        "error:EPERM" => Mode::Error(Errno::EPERM),
        _ => return None,
    };
    let at = match at.parse() {
        Ok(0) => return None,
        Ok(number) => At::Number(number),
        Err(_) if at.starts_with(|c: char| c.is_ascii_lowercase()) => At::First(at.into()),
        Err(_) => return None,
    };
    Some((at, mode))
}

/// Performs an effect, with the fault that is planned for its number.
pub(super) fn around(effect: &Effect<'_>, act: impl FnOnce() -> Result<Done>) -> Result<Done> {
    step(effect.name(), act)
}

/// Like [`around`] for a step that is not an [`Effect`]: it is counted and logged by its name.
pub fn step<T>(name: &'static str, act: impl FnOnce() -> Result<T>) -> Result<T> {
    let plan = PLAN.get_or_init(from_environment);
    let Some(number) = count(plan, name) else {
        return act();
    };
    let planned = plan
        .fault
        .as_ref()
        .filter(|(at, _)| is_it(at, number, name));
    match planned.map(|(_, mode)| *mode) {
        None => act(),
        Some(Mode::Before(signal)) => {
            send(signal);
            act()
        }
        Some(Mode::After(signal)) => {
            let done = act();
            send(signal);
            done
        }
        Some(Mode::Error(errno)) => Err(HostError::errno("fault at", name, errno)),
    }
}

fn is_it(at: &At, number: u64, name: &str) -> bool {
    match at {
        At::Number(planned) => *planned == number,
        At::First(planned) => planned == name && !MET.swap(true, Ordering::SeqCst),
    }
}

/// Sends a signal to this process while no other thread takes a step: SIGSTOP reaches other threads
/// a moment later.
fn send(signal: Signal) {
    let _count = COUNT.lock().unwrap_or_else(PoisonError::into_inner);
    raise(signal).expect("a process can send a signal to itself");
}

/// The number of this effect; `None` before counting has begun.
fn count(plan: &Plan, name: &str) -> Option<u64> {
    if plan.after.as_ref().is_some_and(|marker| !marker.exists()) {
        return None;
    }
    let mut count = COUNT.lock().unwrap_or_else(PoisonError::into_inner);
    *count += 1;
    if let Some(log) = &plan.log {
        OpenOptions::new()
            .create(true)
            .append(true)
            .open(log)
            .and_then(|mut file| file.write_all(format!("{} {name}\n", *count).as_bytes()))
            .expect("the log of a fault test is writable");
    }
    Some(*count)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plan_is_a_number_and_a_known_mode() {
        assert_eq!(
            parse("3:kill-after"),
            Some((At::Number(3), Mode::After(Signal::SIGKILL)))
        );
        assert_eq!(
            parse("1:error:ENOSPC"),
            Some((At::Number(1), Mode::Error(Errno::ENOSPC)))
        );
        assert_eq!(
            parse("guard_freeze:stop-after"),
            Some((
                At::First("guard_freeze".into()),
                Mode::After(Signal::SIGSTOP)
            ))
        );
        for text in [
            "",
            "3",
            "0:kill-before",
            ":kill-before",
            "-1:kill-before",
            "1:sleep",
            "1:error:E",
        ] {
            assert_eq!(parse(text), None, "{text}");
        }
    }
}
