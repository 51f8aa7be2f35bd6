//! Repeats the attempts of a cut, on one node and in a cluster alike: as often as its class says,
//! then at the lower level that the class allows. After that, further calls are refused for a
//! while.

mod backoff;

use std::cell::Cell;
use std::time::Duration;

use nix::errno::Errno;

use crate::error::{Error, Result, chain};
use crate::model::{Level, OnQuiesceFailure, SnapshotParameters};
pub use backoff::Backoffs;

/// How the cut is attempted now.
pub struct Attempt<'a> {
    /// The level of this attempt.
    pub level: Level,
    /// Why the level is lower than requested; empty if it is not.
    pub why: &'a str,
    /// Set before an application is quiesced or a file system is frozen. If a call fails after
    /// that, further calls are refused until its pause is over.
    pub disturbed: &'a Cell<bool>,
}

/// What is cut. It identifies the records of failures.
pub struct Subject<'a> {
    /// The name in the request, for logs.
    pub name: &'a str,
    /// IDs of its volumes. Each of them is paused.
    pub volumes: &'a [String],
    /// The parameters of its class. Calls with other parameters, also of the same class after a
    /// change, are not paused.
    pub parameters: &'a SnapshotParameters,
}

impl Subject<'_> {
    /// Whether this is a single volume whose class accepts level `crash`, which freezes nothing,
    /// instead of this level.
    fn can_fall_back_to_crash(&self, level: Level) -> bool {
        let falls = OnQuiesceFailure::Degrade(Level::Crash);
        let is_single = self.volumes.len() == 1;
        is_single && level > Level::Crash && self.parameters.on_quiesce_failure == falls
    }

    fn keys(&self) -> Vec<String> {
        let key = |volume: &String| format!("{volume} {}", self.parameters);
        self.volumes.iter().map(key).collect()
    }
}

/// The clock of the caller.
pub trait Clock {
    /// Seconds since 1970.
    fn now(&self) -> u64;
    fn sleep(&self, time: Duration);
    /// Whether the program is about to stop.
    fn is_stopping(&self) -> bool;
}

/// How often a wait between two attempts checks whether the program is about to stop.
const STOP_POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Repeats attempts as often as the class says, then at the lower level that the class allows. A
/// set of attempts that failed is recorded for each volume: until its pause is over, a call for one
/// of these volumes by the same class returns that failure as [`Error::Paused`], and disturbs no
/// application. An error other than a failed attempt ends the call at once. It is recorded as well
/// if an application or a file system was disturbed, unless a thin pool was suspended just then: as
/// long as it is, further calls fail before they disturb anything.
pub fn retry<T>(
    clock: &dyn Clock,
    backoffs: &Backoffs,
    subject: &Subject<'_>,
    mut once: impl FnMut(&Attempt<'_>) -> Result<T>,
) -> Result<T> {
    let (parameters, keys) = (subject.parameters, subject.keys());
    backoffs.check(&keys, clock.now())?;
    let (mut level, mut why) = (parameters.consistency, String::new());
    let mut failed = 0;
    let disturbed = Cell::new(false);
    loop {
        let now = Attempt {
            level,
            why: &why,
            disturbed: &disturbed,
        };
        let error = match once(&now) {
            Err(error) if is_failed_try(&error) => error,
            // Another program has frozen the volume, so its image is at one point in time already.
            // A further attempt would not find it thawed.
            Err(error @ Error::Busy { .. })
                if disturbed.get() && subject.can_fall_back_to_crash(level) =>
            {
                why = format!("{level} was requested: {}", chain(&error));
                (level, failed) = (Level::Crash, 0);
                continue;
            }
            Err(error) if disturbed.get() && !is_pool_suspended(&error) => {
                return Err(backoffs.failed(&keys, error, clock.now()));
            }
            Err(error) => return Err(error),
            Ok(done) => {
                backoffs.forget(&keys);
                return Ok(done);
            }
        };
        let name = subject.name;
        tracing::warn!(name, level = %level, failed = failed + 1, error = %chain(&error), "failed to cut");
        match parameters.on_quiesce_failure {
            _ if failed < parameters.retries => {
                failed += 1;
                wait(clock, parameters.retry_interval)?;
            }
            OnQuiesceFailure::Degrade(lower) if lower < level && is_quiesce_failure(&error) => {
                why = format!("{level} was requested: {}", chain(&error));
                (level, failed) = (lower, 0);
            }
            OnQuiesceFailure::Degrade(_) | OnQuiesceFailure::Fail => {
                return Err(backoffs.failed(&keys, error, clock.now()));
            }
        }
    }
}

/// Sleeps. Fails if the program is about to stop.
fn wait(clock: &dyn Clock, time: Duration) -> Result<()> {
    let mut left = time;
    while !left.is_zero() {
        if clock.is_stopping() {
            return Err(Error::Stopping);
        }
        let nap = STOP_POLL_INTERVAL.min(left);
        clock.sleep(nap);
        left -= nap;
    }
    Ok(())
}

/// Whether an attempt was made and failed, so that another one may succeed.
fn is_failed_try(error: &Error) -> bool {
    matches!(error, Error::QuiesceFailed { .. } | Error::CutLost { .. })
}

/// Whether a thin pool was suspended, as LVM does for a moment while it changes the pool. Nothing was
/// done in the pool.
fn is_pool_suspended(error: &Error) -> bool {
    matches!(error, Error::Host { source, .. } if source.code() == Some(Errno::EAGAIN))
}

fn is_quiesce_failure(error: &Error) -> bool {
    matches!(error, Error::QuiesceFailed { .. })
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;
    use crate::error::HostError;

    /// A clock that only `sleep` advances, so that no test has to wait.
    #[derive(Default)]
    struct Hand(Cell<Duration>);

    impl Clock for Hand {
        fn now(&self) -> u64 {
            self.0.get().as_secs()
        }

        fn sleep(&self, time: Duration) {
            self.0.set(self.0.get() + time);
        }

        fn is_stopping(&self) -> bool {
            false
        }
    }

    fn failed(kind: &str) -> Error {
        match kind {
            "lost" => Error::CutLost {
                reason: "planned".into(),
            },
            "quiesce" => Error::quiesce_failed("db", "planned"),
            "suspended" => Error::Host {
                doing: "cut volume v".into(),
                source: HostError::errno("create a snapshot in", "pool", Errno::EAGAIN),
            },
            _ => Error::Stopping,
        }
    }

    fn class(on_quiesce_failure: OnQuiesceFailure) -> SnapshotParameters {
        SnapshotParameters {
            consistency: Level::Application,
            on_quiesce_failure,
            ..SnapshotParameters::default()
        }
    }

    fn group_of_two(parameters: &SnapshotParameters) -> Subject<'_> {
        static VOLUMES: std::sync::LazyLock<[String; 2]> =
            std::sync::LazyLock::new(|| ["v".into(), "w".into()]);
        Subject {
            name: "group g",
            volumes: VOLUMES.as_slice(),
            parameters,
        }
    }

    /// Runs attempts that all fail in the same way. Returns their levels, the error and the time.
    fn all_fail(parameters: &SnapshotParameters, kind: &str) -> (Vec<Level>, Error, u64) {
        let (clock, backoffs) = (Hand::default(), Backoffs::default());
        let mut levels = Vec::new();
        let done = retry::<()>(&clock, &backoffs, &group_of_two(parameters), |now| {
            levels.push(now.level);
            now.disturbed.set(matches!(kind, "disturbed" | "suspended"));
            Err(failed(kind))
        });
        (levels, done.unwrap_err(), clock.now())
    }

    #[test]
    fn tries_are_as_many_as_the_class_says_at_each_level_that_it_allows() {
        let (app, fs) = (Level::Application, Level::Filesystem);
        let (levels, error, took) = all_fail(&class(OnQuiesceFailure::Fail), "quiesce");
        assert_eq!(levels, [app; 3]);
        assert!(matches!(error, Error::Paused { sets: 1, .. }), "{error:?}");
        assert_eq!(took, 10, "two intervals of 5 s");
        let degrade = class(OnQuiesceFailure::Degrade(fs));
        let (levels, ..) = all_fail(&degrade, "quiesce");
        assert_eq!(levels, [app, app, app, fs, fs, fs]);
        let (levels, ..) = all_fail(&degrade, "lost");
        assert_eq!(levels, [app; 3], "a lower level freezes as well");
        let (levels, error, _) = all_fail(&degrade, "other");
        assert_eq!(levels, [app]);
        assert!(matches!(error, Error::Stopping), "no pause: {error:?}");
        let (levels, error, _) = all_fail(&degrade, "disturbed");
        assert_eq!(levels, [app], "no further try");
        let Error::Paused { last, .. } = error else {
            panic!("an application was disturbed: {error:?}");
        };
        assert!(matches!(*last, Error::Stopping), "{last:?}");
        let (levels, error, _) = all_fail(&degrade, "suspended");
        assert_eq!(levels, [app], "the caller repeats the call");
        assert!(is_pool_suspended(&error), "no pause: {error:?}");
    }

    #[test]
    fn what_another_program_has_frozen_is_not_tried_again_but_cut_at_level_crash_where_that_is_allowed()
     {
        let frozen = |volumes: &[String], parameters: &SnapshotParameters| {
            let (clock, backoffs) = (Hand::default(), Backoffs::default());
            let subject = Subject {
                name: "snapshot s",
                volumes,
                parameters,
            };
            let mut levels = Vec::new();
            let done = retry(&clock, &backoffs, &subject, |now| {
                levels.push(now.level);
                if now.level == Level::Crash {
                    return Ok(now.why.to_string());
                }
                now.disturbed.set(true);
                Err(Error::Busy {
                    subject: "a volume".into(),
                    holder: "planned".into(),
                })
            });
            (levels, done)
        };
        let (fs, crash) = (Level::Filesystem, Level::Crash);
        let falls = SnapshotParameters {
            on_quiesce_failure: OnQuiesceFailure::Degrade(crash),
            ..SnapshotParameters::default()
        };
        let (one, two) = (["v".to_string()], ["v".to_string(), "w".to_string()]);
        let (levels, done) = frozen(&one, &falls);
        assert_eq!(levels, [fs, crash]);
        let why = done.unwrap();
        assert!(why.contains("planned"), "{why}");
        for (volumes, parameters) in [
            (one.as_slice(), &SnapshotParameters::default()),
            (two.as_slice(), &falls),
        ] {
            let (levels, done) = frozen(volumes, parameters);
            assert_eq!(levels, [fs], "one try");
            assert!(matches!(done, Err(Error::Paused { .. })), "{done:?}");
        }
    }

    #[test]
    fn a_name_that_has_failed_is_left_alone_for_a_while_and_a_success_forgets_it() {
        let (clock, backoffs) = (Hand::default(), Backoffs::default());
        let parameters = class(OnQuiesceFailure::Fail);
        let asked = Cell::new(0);
        let call = |works: bool| {
            retry(&clock, &backoffs, &group_of_two(&parameters), |now| {
                asked.set(asked.get() + 1);
                match works {
                    true => Ok(now.why.to_string()),
                    false => Err(failed("lost")),
                }
            })
        };
        assert!(call(false).is_err());
        assert_eq!(asked.get(), 3);
        let error = call(true).unwrap_err();
        assert!(matches!(error, Error::Paused { .. }), "{error:?}");
        assert_eq!(asked.get(), 3, "no application was disturbed");
        // The name makes no difference, nor does another group with one of the volumes; another
        // class does.
        let other = ["w".to_string(), "x".to_string()];
        let subject = |parameters| Subject {
            name: "snapshot s",
            volumes: &other,
            parameters,
        };
        let paused = retry(&clock, &backoffs, &subject(&parameters), |_| Ok(()));
        assert!(matches!(paused, Err(Error::Paused { .. })), "{paused:?}");
        let filesystem = SnapshotParameters::default();
        retry(&clock, &backoffs, &subject(&filesystem), |_| Ok(())).unwrap();
        clock.sleep(Duration::from_secs(60));
        assert_eq!(call(true).unwrap(), "");
        assert!(call(true).is_ok(), "forgotten");
    }

    #[test]
    fn what_is_reached_instead_says_why() {
        let (clock, backoffs) = (Hand::default(), Backoffs::default());
        let parameters = class(OnQuiesceFailure::Degrade(Level::Filesystem));
        let done = retry(
            &clock,
            &backoffs,
            &group_of_two(&parameters),
            |now| match now.level {
                Level::Application => Err(failed("quiesce")),
                Level::Filesystem | Level::Crash => Ok(now.why.to_string()),
            },
        );
        let why = done.unwrap();
        assert!(
            why.starts_with("application was requested: hook db"),
            "{why}"
        );
    }
}
