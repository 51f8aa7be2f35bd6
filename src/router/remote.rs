//! The other end of an agent's share in a cut: a stream of steps as a [`Participant`].
//!
//! The coordinator is blocking and has a thread for each participant, so a step here is a
//! question that blocks its thread. The freeze lives as long as the stream: whatever ends the
//! stream, the agent thaws.

use std::sync::{Arc, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::{Mutex, mpsc};
use tokio::time::timeout;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;

use super::agents::Agent;
use super::cutting::fault;
use crate::agent::cut_request::{
    Ahead, Begin, Commit, CutNow, Freeze, Keep, Prepare, Ready, Step, Written,
};
use crate::agent::cut_response::{Answer, Begun, Failed, failed};
use crate::agent::{CutRequest, CutResponse};
use crate::cut::local::SYNC_BUDGET;
use crate::cut::participant::{Participant, Prepared, Readiness, Thawed};
use crate::error::{Error, Result, chain};
use crate::model::Level;

/// Bounds that only an agent reaches which is there and hangs: that it's gone is told by the
/// connection, much sooner. Records are written, and looked at.
const RECORD_TIMEOUT: Duration = Duration::from_secs(120);
/// Images are cloned ahead, of some 100,000 extents in seconds; both write-backs have a budget.
const PREPARE_TIMEOUT: Duration = SYNC_BUDGET.saturating_mul(10);
/// Beyond the agent's own bound for a freeze, in which its guard is ended and thawed for.
const THAW_GRACE: Duration = Duration::from_secs(30);
/// Thick volumes are un-shared, at the speed of their disk.
const KEEP_TIMEOUT: Duration = Duration::from_secs(3600);
/// How long the end of a share is waited for: deleting what was made takes milliseconds, and an
/// agent whose disk hangs says so after some seconds.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(10);
/// Of steps on their way: each is answered before the next.
const STEPS: usize = 1;

/// A share of one agent in one try.
pub(super) struct ParticipantStream {
    agent: Arc<Agent>,
    freeze: Duration,
    /// Whether the agent has said that it knows the step `ahead`.
    knows_ahead: OnceLock<bool>,
    /// Gone once it's to end.
    steps: std::sync::Mutex<Option<mpsc::Sender<CutRequest>>>,
    state: Mutex<State>,
}

struct State {
    answers: Streaming<CutResponse>,
    /// How it ended, if it has: whether all that was made is gone, or stays where it's to stay.
    ended: Option<std::result::Result<(), String>>,
}

impl ParticipantStream {
    /// Begins a share; what the agent says of it.
    pub(super) async fn begin(
        agent: Arc<Agent>,
        begin: Begin,
        freeze: Duration,
    ) -> Result<(Arc<ParticipantStream>, Begun)> {
        let (steps, outgoing) = mpsc::channel(STEPS);
        let mut client = agent.cuts().await?;
        let opening = client.cut(ReceiverStream::new(outgoing));
        let opened = timeout(RECORD_TIMEOUT, opening)
            .await
            .map_err(|_| late(&agent))?;
        let answers = opened.map_err(|status| agent.error(&status))?;
        let line = Arc::new(ParticipantStream {
            agent,
            freeze,
            knows_ahead: OnceLock::new(),
            steps: std::sync::Mutex::new(Some(steps)),
            state: Mutex::new(State {
                answers: answers.into_inner(),
                ended: None,
            }),
        });
        match line.step(Step::Begin(begin), RECORD_TIMEOUT).await? {
            Answer::Begun(begun) => {
                line.knows_ahead.get_or_init(|| begun.ahead);
                Ok((line, begun))
            }
            other => Err(line.out_of_step(&other)),
        }
    }

    /// Whose it is.
    pub(super) fn agent(&self) -> &Arc<Agent> {
        &self.agent
    }

    /// Keeps: from here on the end of the stream leaves members of a group in doubt.
    pub(super) async fn keep(&self, keep: Keep) -> Result<()> {
        match self.step(Step::Keep(keep), KEEP_TIMEOUT).await? {
            Answer::Kept(_) => Ok(()),
            other => Err(self.out_of_step(&other)),
        }
    }

    /// Commits. An error that isn't the agent's own leaves it unknown whether it's committed.
    pub(super) async fn commit(&self) -> Result<()> {
        match self.step(Step::Commit(Commit {}), RECORD_TIMEOUT).await? {
            Answer::Committed(_) => Ok(()),
            other => Err(self.out_of_step(&other)),
        }
    }

    /// Ends it, and waits until the agent has undone what is to be undone; an error in words if
    /// that isn't known. Again it says the same.
    pub(super) async fn close(&self) -> std::result::Result<(), String> {
        self.abort();
        let mut state = self.state.lock().await;
        if let Some(ended) = &state.ended {
            return ended.clone();
        }
        let gone = async {
            loop {
                match state.answers.message().await {
                    Ok(None) => return Ok(()),
                    Ok(Some(CutResponse {
                        answer: Some(Answer::Failed(failed)),
                    })) if !failed.undoing => return leaves(&failed),
                    // A step's, which nobody waits for any more.
                    Ok(Some(_)) => {}
                    Err(status) => return Err(chain(&self.agent.error(&status))),
                }
            }
        };
        let ended = timeout(CLOSE_TIMEOUT, gone).await;
        let ended = ended.unwrap_or_else(|_| Err(chain(&late(&self.agent))));
        state.ended = Some(ended.clone());
        ended
    }

    /// Ends its steps, also while one is waited for: the agent thaws at once, and undoes what it
    /// has made.
    fn abort(&self) {
        *self.steps() = None;
    }

    fn steps(&self) -> MutexGuard<'_, Option<mpsc::Sender<CutRequest>>> {
        self.steps.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One step: its answer. After an error it has ended, or is to be ended.
    async fn step(&self, step: Step, limit: Duration) -> Result<Answer> {
        fault(word(&step));
        let mut state = self.state.lock().await;
        let lost = || self.agent.unreachable("its part in the cut has ended");
        let steps = self.steps().clone().ok_or_else(lost)?;
        let sent = steps.send(CutRequest { step: Some(step) }).await;
        // Held no longer, so that a halt is the end of the steps.
        drop(steps);
        let answer = timeout(limit, state.answers.message()).await;
        let error = match (answer, sent) {
            (Err(_), _) => return Err(late(&self.agent)),
            (
                Ok(Ok(Some(CutResponse {
                    answer: Some(answer),
                }))),
                _,
            ) => {
                let Answer::Failed(failed) = answer else {
                    return Ok(answer);
                };
                // One that undoes it still says later whether something is left.
                if !failed.undoing {
                    state.ended = Some(leaves(&failed));
                }
                return Err(self.error(failed));
            }
            (Ok(Ok(None)), _) if self.steps().is_none() => {
                // Halted: that is how it ends in order.
                state.ended = Some(Ok(()));
                return Err(lost());
            }
            (Ok(Ok(Some(CutResponse { answer: None }) | None)), _) => {
                self.agent.unreachable("it ended its part in the cut")
            }
            (Ok(Err(status)), _) => self.agent.error(&status),
        };
        state.ended = Some(Err(chain(&error)));
        Err(match error {
            // The stream's own status is not the agent's word about the call.
            Error::Forwarded { message, .. } => self.agent.unreachable(&message),
            other => other,
        })
    }

    fn error(&self, failed: Failed) -> Error {
        match failed.kind() {
            failed::Kind::CutLost => Error::CutLost {
                reason: format!("node {}: {}", self.agent.node(), failed.message),
            },
            failed::Kind::Busy => Error::Busy {
                subject: format!("node {}", self.agent.node()),
                holder: failed.message,
            },
            failed::Kind::Other => Error::Forwarded {
                code: failed.code,
                message: failed.message,
            },
        }
    }

    fn out_of_step(&self, answer: &Answer) -> Error {
        self.agent.unreachable(&format!(
            "it answered a different step than requested: {answer:?}"
        ))
    }
}

/// For tests.
fn word(step: &Step) -> &'static str {
    match step {
        Step::Begin(_) => "begin",
        Step::Ready(_) => "ready",
        Step::Ahead(_) => "ahead",
        Step::Prepare(_) => "prepare",
        Step::Freeze(_) => "freeze",
        Step::Cut(_) => "cut",
        Step::Written(_) => "written",
        Step::Keep(_) => "keep",
        Step::Commit(_) => "commit",
    }
}

fn late(agent: &Agent) -> Error {
    agent.unreachable("it does not answer in time")
}

fn leaves(failed: &Failed) -> std::result::Result<(), String> {
    match failed.left {
        true => Err(failed.message.clone()),
        false => Ok(()),
    }
}

fn prepared(done: crate::agent::cut_response::Prepared) -> Prepared {
    Prepared {
        sync: Duration::from_micros(done.sync_micros),
        extents: done.extents,
        stall: Duration::from_micros(done.stall_micros),
        most_extents: (!done.most_extents_volume_id.is_empty())
            .then_some((done.most_extents_volume_id, done.most_extents)),
    }
}

/// A share, as the coordinator sees it.
pub(super) struct Remote {
    line: Arc<ParticipantStream>,
    handle: Handle,
    /// The cut is proven good: it ends later, when it's committed.
    done: bool,
}

impl Remote {
    /// Of a share that was begun. Used and dropped in threads of the coordinator alone.
    pub(super) fn new(line: Arc<ParticipantStream>, handle: Handle) -> Remote {
        Remote {
            line,
            handle,
            done: false,
        }
    }

    fn ask<T>(
        &self,
        step: Step,
        limit: Duration,
        fits: impl FnOnce(Answer) -> std::result::Result<T, Answer>,
    ) -> Result<T> {
        let answer = self.handle.block_on(self.line.step(step, limit))?;
        fits(answer).map_err(|other| self.line.out_of_step(&other))
    }
}

impl Participant for Remote {
    fn ready(&mut self, level: Level) -> Result<Readiness> {
        let level = level.word().to_string();
        self.ask(
            Step::Ready(Ready { level }),
            RECORD_TIMEOUT,
            |answer| match answer {
                Answer::Ready(ready) => Ok(Readiness {
                    in_use: ready.in_use as usize,
                    raw: ready.raw as usize,
                    frozen: ready.frozen as usize,
                    stall: Duration::from_micros(ready.stall_micros),
                    most_extents: (!ready.most_extents_volume_id.is_empty())
                        .then_some((ready.most_extents_volume_id, ready.most_extents)),
                }),
                other => Err(other),
            },
        )
    }

    fn ahead(&mut self, hooks: bool) -> Result<Prepared> {
        if self.line.knows_ahead.get() != Some(&true) {
            // Its `prepare` does all of it.
            return Ok(Prepared::default());
        }
        let step = Step::Ahead(Ahead { hooks });
        self.ask(step, PREPARE_TIMEOUT, |answer| match answer {
            Answer::Ahead(done) => Ok(prepared(done)),
            other => Err(other),
        })
    }

    fn prepare(&mut self) -> Result<Prepared> {
        self.ask(
            Step::Prepare(Prepare {}),
            PREPARE_TIMEOUT,
            |answer| match answer {
                Answer::Prepared(done) => Ok(prepared(done)),
                other => Err(other),
            },
        )
    }

    fn freeze(&mut self) -> Result<()> {
        let limit = self.line.freeze + THAW_GRACE;
        self.ask(Step::Freeze(Freeze {}), limit, |answer| match answer {
            Answer::Frozen(_) => Ok(()),
            other => Err(other),
        })
    }

    fn cut(&mut self) -> Result<Thawed> {
        let limit = self.line.freeze + THAW_GRACE;
        self.ask(Step::Cut(CutNow {}), limit, |answer| match answer {
            Answer::Thawed(done) => Ok(Thawed {
                extents: done.extents,
                lost: (!done.lost.is_empty()).then_some(done.lost),
            }),
            other => Err(other),
        })
    }

    fn written(&mut self) -> Result<()> {
        let limit = SYNC_BUDGET + THAW_GRACE;
        self.ask(Step::Written(Written {}), limit, |answer| match answer {
            Answer::Written(_) => Ok(()),
            other => Err(other),
        })?;
        self.done = true;
        Ok(())
    }

    fn abort(&self) -> Box<dyn Fn() + Send + Sync> {
        let line = self.line.clone();
        Box::new(move || line.abort())
    }
}

impl Drop for Remote {
    fn drop(&mut self) {
        if !self.done {
            // Thawed when this returns, if the agent can be reached; else by its own doing. What
            // it says is kept for who asks.
            let _ = self.handle.block_on(self.line.close());
        }
    }
}
