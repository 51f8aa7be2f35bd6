//! The progress of an operation of the cluster, which is polled until the operation has ended.

use std::time::{Duration, Instant};

use super::print_lines;
use crate::cli::{Change, Wait};
use crate::failure::{Failure, Result, TIMED_OUT};
use crate::text::escaped;

/// How often the progress of an operation is read.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// A wait ends if this many polls one after another fail, after 45 seconds or more: an API server is
/// restarted within this time.
const MAX_FAILED: u32 = 10;

/// The progress of a command that has not taken its step, because of another user or another run.
pub const CHANGED: &str = "an object has changed since it was read: the next step is decided again";

/// How far an operation is.
pub enum Progress {
    /// It goes on; what it does now.
    Running(String),
    /// It has ended, with this line or this failure.
    Ended(Result<String>),
}

/// With `--wait`, reads the progress until the operation has ended or the time is over, and prints its last
/// line. Nothing goes on after a dry run.
pub async fn follow<A>(
    wait: &Wait,
    change: &Change,
    what: &str,
    read: impl FnMut() -> A,
) -> Result<()>
where
    A: Future<Output = Result<Progress>>,
{
    if wait.wait && !change.dry_run {
        print_lines(&until_end(wait, what, read).await?);
    }
    Ok(())
}

/// Reads the progress until the operation has ended or the time is over, and returns its last line. Each
/// line that differs from the one before it is printed on stderr.
pub async fn until_end<A>(wait: &Wait, what: &str, mut read: impl FnMut() -> A) -> Result<String>
where
    A: Future<Output = Result<Progress>>,
{
    let begun = Instant::now();
    let mut polls = Polls::default();
    let mut last = String::new();
    loop {
        let line = match polls.next(what, read().await)? {
            Progress::Ended(result) => return result,
            Progress::Running(line) => line,
        };
        if line != last {
            eprintln!("{}", escaped(&line));
            last = line;
        }
        if wait.timeout.is_some_and(|limit| begun.elapsed() >= limit) {
            return Err(Failure {
                code: TIMED_OUT,
                ..Failure::failed(format!(
                    "{what} has not ended within --timeout; it goes on in the cluster"
                ))
            });
        }
        tokio::time::sleep(polls.pause()).await;
    }
}

/// The polls of an operation. The operation goes on while the API server is away, so a poll that fails
/// does not end it.
#[derive(Debug, Default)]
struct Polls {
    /// How many have failed since the last one that did not.
    failed: u32,
}

impl Polls {
    /// What a poll has found. Fails if the answer is final, or if too many polls have failed.
    fn next(&mut self, what: &str, found: Result<Progress>) -> Result<Progress> {
        match found {
            Err(failure) if failure.is_transient && self.failed + 1 < MAX_FAILED => {
                self.failed += 1;
                Ok(Progress::Running(format!(
                    "{}; it is read again",
                    failure.message
                )))
            }
            Err(failure) if failure.is_transient => Err(Failure {
                message: format!(
                    "the progress of {what} could not be read {MAX_FAILED} times one after another: {}",
                    failure.message
                ),
                ..failure
            }),
            found => {
                self.failed = 0;
                found
            }
        }
    }

    /// The time before the next poll, which is longer after each that has failed.
    fn pause(&self) -> Duration {
        POLL_INTERVAL * (self.failed + 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn away() -> Result<Progress> {
        Err(Failure {
            is_transient: true,
            ..Failure::failed("reading x: connection refused".into())
        })
    }

    #[test]
    fn polls_that_fail_do_not_end_a_wait_until_too_many_have_failed_in_a_row() {
        let mut polls = Polls::default();
        for _ in 0..3 {
            for n in 1..MAX_FAILED {
                let Ok(Progress::Running(line)) = polls.next("x", away()) else {
                    panic!("it has ended after {n} polls")
                };
                assert!(line.contains("connection refused"), "{line}");
            }
            let running = Ok(Progress::Running(String::new()));
            assert!(polls.next("x", running).is_ok());
            assert_eq!(polls.pause(), POLL_INTERVAL);
        }
        for _ in 1..MAX_FAILED {
            assert!(polls.next("x", away()).is_ok());
        }
        assert!(polls.pause() > POLL_INTERVAL);
        let Err(failure) = polls.next("the move", away()) else {
            panic!("it never ends")
        };
        assert_eq!(failure.code, crate::failure::FAILED);
        for part in ["the move", "connection refused", "10 times"] {
            assert!(failure.message.contains(part), "{}", failure.message);
        }
    }

    #[test]
    fn a_refusal_ends_a_wait_at_once() {
        let denied = Err(Failure::denied("reading x: forbidden".into()));
        let Err(failure) = Polls::default().next("x", denied) else {
            panic!("it goes on")
        };
        assert_eq!(failure.message, "reading x: forbidden");
    }
}
