//! Workers that are created before anything is frozen, and then run one step at a time in parallel.
//! Steps and answers are passed without allocating, because writers may wait.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{Builder, JoinHandle};
use std::vec::Drain;

use crate::error::{Error, HostError, Result};

/// What a worker does with a step.
pub(super) type Job<S, A> = Box<dyn FnMut(S) -> A + Send>;

/// Several jobs. The first one runs in the caller's thread, each other one in a thread of its own,
/// so a single job needs no thread. Dropping this drops the jobs and waits until that is done.
pub(super) struct StepWorkers<S, A> {
    first: Option<Job<S, A>>,
    others: Vec<Worker<S, A>>,
    /// Room for the answers to a step.
    answers: Vec<Option<A>>,
}

struct Worker<S, A> {
    exchange: Arc<Exchange<S, A>>,
    thread: Option<JoinHandle<()>>,
}

/// What the caller and the thread of a worker pass to each other. The channels of the standard
/// library allocate when a thread first waits.
struct Exchange<S, A> {
    passed: Mutex<Passed<S, A>>,
    changed: Condvar,
}

enum Passed<S, A> {
    Nothing,
    Step(S),
    Answer(Option<A>),
    /// One of the two has ended.
    End,
}

impl<S, A> Exchange<S, A> {
    fn new() -> Exchange<S, A> {
        Exchange {
            passed: Mutex::new(Passed::Nothing),
            changed: Condvar::new(),
        }
    }

    fn passed(&self) -> MutexGuard<'_, Passed<S, A>> {
        self.passed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn pass(&self, next: Passed<S, A>) {
        let mut passed = self.passed();
        if !matches!(*passed, Passed::End) {
            *passed = next;
        }
        drop(passed);
        self.changed.notify_one();
    }

    /// Waits for what `wanted` takes; `None` at the end.
    fn wait<T>(
        &self,
        wanted: impl Fn(Passed<S, A>) -> std::result::Result<T, Passed<S, A>>,
    ) -> Option<T> {
        let mut passed = self.passed();
        loop {
            match std::mem::replace(&mut *passed, Passed::Nothing) {
                Passed::End => {
                    *passed = Passed::End;
                    return None;
                }
                other => match wanted(other) {
                    Ok(found) => return Some(found),
                    Err(other) => *passed = other,
                },
            }
            let waited = self.changed.wait(passed);
            passed = waited.unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn step(&self) -> Option<S> {
        self.wait(|passed| match passed {
            Passed::Step(step) => Ok(step),
            other => Err(other),
        })
    }

    fn answer(&self) -> Option<A> {
        let answer = self.wait(|passed| match passed {
            Passed::Answer(answer) => Ok(answer),
            other => Err(other),
        });
        answer.flatten()
    }
}

/// Ends an exchange when its owner ends, also by a panic.
struct Ends<S, A>(Arc<Exchange<S, A>>);

impl<S, A> Drop for Ends<S, A> {
    fn drop(&mut self) {
        self.0.pass(Passed::End);
    }
}

impl<S: Copy + Send + 'static, A: Send + 'static> StepWorkers<S, A> {
    /// Creates the workers with their threads.
    pub(super) fn new(jobs: Vec<Job<S, A>>) -> Result<StepWorkers<S, A>> {
        let answers = Vec::with_capacity(jobs.len());
        let mut jobs = jobs.into_iter();
        let first = jobs.next();
        let others = jobs.map(Worker::start).collect::<Result<_>>()?;
        Ok(StepWorkers {
            first,
            others,
            answers,
        })
    }

    /// Runs the same step in all workers. Returns the answers in the order of the jobs; `None` for
    /// a job that panicked, now or earlier, and was dropped for that.
    pub(super) fn all(&mut self, step: S) -> Drain<'_, Option<A>> {
        for worker in &self.others {
            // The answer of a worker that has ended is missing below.
            worker.exchange.pass(Passed::Step(step));
        }
        self.answers.clear();
        self.answers.push(act(&mut self.first, step));
        for worker in &self.others {
            self.answers.push(worker.exchange.answer());
        }
        self.answers.drain(..)
    }
}

/// Does a step. A job that panics is dropped.
fn act<S, A>(job: &mut Option<Job<S, A>>, step: S) -> Option<A> {
    let work = job.as_mut()?;
    let answer = catch_unwind(AssertUnwindSafe(|| work(step))).ok();
    if answer.is_none() {
        *job = None;
    }
    answer
}

impl<S: Copy + Send + 'static, A: Send + 'static> Worker<S, A> {
    fn start(job: Job<S, A>) -> Result<Worker<S, A>> {
        let exchange = Arc::new(Exchange::new());
        let ends = Ends(exchange.clone());
        let work = move || {
            let mut job = Some(job);
            while let Some(step) = ends.0.step() {
                ends.0.pass(Passed::Answer(act(&mut job, step)));
            }
        };
        let thread = Builder::new().name("cut".into()).spawn(work);
        let thread = thread.map_err(|error| Error::Host {
            doing: "start the threads of a cut".into(),
            source: HostError::io("start", "a thread", &error),
        })?;
        Ok(Worker {
            exchange,
            thread: Some(thread),
        })
    }
}

impl<S, A> Drop for StepWorkers<S, A> {
    fn drop(&mut self) {
        // All workers are ended at once, so that none waits for the end of another one.
        for worker in &self.others {
            worker.exchange.pass(Passed::End);
        }
        self.first = None;
        for worker in &mut self.others {
            if let Some(thread) = worker.thread.take() {
                // If the worker panicked, its missing answer has reported that.
                let _ = thread.join();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::{Arc, Barrier};

    fn answers(crew: &mut StepWorkers<usize, usize>, step: usize) -> Vec<Option<usize>> {
        crew.all(step).collect()
    }

    #[test]
    fn all_work_at_the_same_time_and_answer_in_order() {
        let meet = Arc::new(Barrier::new(3));
        let jobs = (0..3).map(|n| {
            let meet = meet.clone();
            let job: Job<usize, usize> = Box::new(move |step| {
                meet.wait();
                10 * step + n
            });
            job
        });
        let mut crew = StepWorkers::new(jobs.collect()).unwrap();
        assert_eq!(answers(&mut crew, 1), [Some(10), Some(11), Some(12)]);
        assert_eq!(answers(&mut crew, 2), [Some(20), Some(21), Some(22)]);
    }

    #[test]
    fn all_end_at_the_same_time() {
        struct Meets(Arc<Barrier>);
        impl Drop for Meets {
            fn drop(&mut self) {
                // This would hang if the jobs were ended one after the other.
                self.0.wait();
            }
        }
        let meet = Arc::new(Barrier::new(3));
        let jobs = (0..3).map(|_| {
            let meets = Meets(meet.clone());
            let job: Job<usize, usize> = Box::new(move |step| {
                let _held = &meets;
                step
            });
            job
        });
        let mut crew = StepWorkers::new(jobs.collect()).unwrap();
        assert_eq!(answers(&mut crew, 1), [Some(1); 3]);
    }

    #[test]
    fn a_panic_ends_its_own_job_and_no_other() {
        struct Ends(Arc<AtomicUsize>);
        impl Drop for Ends {
            fn drop(&mut self) {
                self.0.fetch_add(1, Ordering::SeqCst);
            }
        }
        let ended = Arc::new(AtomicUsize::new(0));
        let jobs = (0..4).map(|n| {
            let ends = Ends(ended.clone());
            let job: Job<usize, usize> = Box::new(move |step| {
                let _held = &ends;
                assert!(n % 2 == 1 || step < 2, "planned");
                n
            });
            job
        });
        let mut crew = StepWorkers::new(jobs.collect()).unwrap();
        assert_eq!(answers(&mut crew, 1), [Some(0), Some(1), Some(2), Some(3)]);
        assert_eq!(answers(&mut crew, 2), [None, Some(1), None, Some(3)]);
        assert_eq!(ended.load(Ordering::SeqCst), 2, "those that panicked");
        assert_eq!(answers(&mut crew, 1), [None, Some(1), None, Some(3)]);
        drop(crew);
        assert_eq!(ended.load(Ordering::SeqCst), 4);
    }
}
