//! The router's end of an agent's participation in a cut: a stream of steps that implements
//! [`Participant`].
//!
//! The coordinator is blocking and has a thread for each participant, so a step sends a request and
//! blocks its thread. The freeze lasts as long as the stream: whatever ends the stream, the agent
//! thaws.

use std::sync::{Arc, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::{Mutex, mpsc};
use tokio::time::timeout;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;

use crate::agent::cut_request::{Begin, Commit, Keep, Step};
use crate::agent::cut_response::{Answer, Begun, Failed, failed};
use crate::agent::{CutRequest, CutResponse};
use crate::cut::local::SYNC_BUDGET;
use crate::cut::participant::{CutAnswer, CutStep, Participant, Prepared};
use crate::error::{Error, Result, chain};
use crate::fault;
use crate::router::agents::Agent;

/// Timeouts for an agent that is connected but hangs; keepalive detects a lost agent much sooner.
/// In this step the agent writes and reads records.
const RECORD_TIMEOUT: Duration = Duration::from_secs(120);
/// In this step images are cloned ahead, which takes seconds for 100,000 extents; both write-backs
/// have a time limit.
const PREPARE_TIMEOUT: Duration = SYNC_BUDGET.saturating_mul(10);
/// Added to the agent's own freeze timeout: the agent kills its guard and thaws in this time.
const THAW_GRACE: Duration = Duration::from_secs(30);
/// In this step thick volumes are unshared, at the speed of their disk.
const KEEP_TIMEOUT: Duration = Duration::from_secs(3600);
/// How long to wait for the end of a participation: deleting what was created takes milliseconds,
/// and an agent whose disk hangs reports that after some seconds.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(10);
/// Number of steps in transit: each is answered before the next is sent.
const STEPS_IN_TRANSIT: usize = 1;

/// The participation of one agent in one attempt.
pub(super) struct ParticipantStream {
    agent: Arc<Agent>,
    freeze: Duration,
    /// Whether the agent has reported that it supports the step `ahead`.
    knows_ahead: OnceLock<bool>,
    /// `None` once the participation is to end.
    steps: std::sync::Mutex<Option<mpsc::Sender<CutRequest>>>,
    state: Mutex<State>,
}

struct State {
    answers: Streaming<CutResponse>,
    /// The result, once it has ended: whether everything that was created is deleted, or is kept as
    /// intended.
    ended: Option<std::result::Result<(), String>>,
}

impl ParticipantStream {
    /// Begins the participation of an agent; returns the agent's answer.
    pub(super) async fn begin(
        agent: Arc<Agent>,
        begin: Begin,
        freeze: Duration,
    ) -> Result<(Arc<ParticipantStream>, Begun)> {
        let (steps, outgoing) = mpsc::channel(STEPS_IN_TRANSIT);
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

    pub(super) fn agent(&self) -> &Arc<Agent> {
        &self.agent
    }

    /// Asks the agent to keep its members: from here on, the end of the stream leaves members of a
    /// group in doubt.
    pub(super) async fn keep(&self, keep: Keep) -> Result<()> {
        match self.step(Step::Keep(keep), KEEP_TIMEOUT).await? {
            Answer::Kept(_) => Ok(()),
            other => Err(self.out_of_step(&other)),
        }
    }

    /// Commits. After an error that is not the agent's own, it is unknown whether the members are
    /// committed.
    pub(super) async fn commit(&self) -> Result<()> {
        match self.step(Step::Commit(Commit {}), RECORD_TIMEOUT).await? {
            Answer::Committed(_) => Ok(()),
            other => Err(self.out_of_step(&other)),
        }
    }

    /// Ends the participation, and waits until the agent has undone what must be undone. The error
    /// says that this is not known. A second call returns the same result.
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
                    // The answer to an earlier step for which no caller waits any more.
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

    /// Ends the steps, even while an answer is awaited: the agent thaws at once, and undoes what it
    /// has created.
    fn abort(&self) {
        *self.steps() = None;
    }

    fn steps(&self) -> MutexGuard<'_, Option<mpsc::Sender<CutRequest>>> {
        self.steps.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends one step and returns its answer. After an error the participation has ended, or must
    /// be ended.
    async fn step(&self, step: Step, limit: Duration) -> Result<Answer> {
        fault::reach("router", step_name(&step));
        let mut state = self.state.lock().await;
        let lost = || self.agent.unreachable("its part in the cut has ended");
        let steps = self.steps().clone().ok_or_else(lost)?;
        let sent = steps.send(CutRequest { step: Some(step) }).await;
        // The sender is dropped here, so that closing the channel ends the steps.
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
                // An agent that is still undoing reports later whether something is left.
                if !failed.undoing {
                    state.ended = Some(leaves(&failed));
                }
                return Err(self.error(failed));
            }
            (Ok(Ok(None)), _) if self.steps().is_none() => {
                // The participation was aborted, so this is its normal end.
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
            // The status of the stream itself is not the agent's answer to the call.
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

    fn out_of_step(&self, answer: &dyn std::fmt::Debug) -> Error {
        self.agent.unreachable(&format!(
            "it answered a different step than requested: {answer:?}"
        ))
    }
}

/// The name of a step, for fault injection.
fn step_name(step: &Step) -> &'static str {
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

/// A participant, as the coordinator uses it.
pub(super) struct Remote {
    line: Arc<ParticipantStream>,
    handle: Handle,
    /// The cut is verified, so the participation ends later, when the members are committed.
    done: bool,
}

impl Remote {
    /// Creates a participant that has begun. It is used and dropped only in threads of the
    /// coordinator.
    pub(super) fn new(line: Arc<ParticipantStream>, handle: Handle) -> Remote {
        Remote {
            line,
            handle,
            done: false,
        }
    }
}

impl Participant for Remote {
    fn step(&mut self, step: CutStep) -> Result<CutAnswer> {
        let limit = match step {
            // This agent's `prepare` does all the work.
            CutStep::Ahead { .. } if self.line.knows_ahead.get() != Some(&true) => {
                return Ok(CutAnswer::Ahead(Prepared::default()));
            }
            CutStep::Ready(_) => RECORD_TIMEOUT,
            CutStep::Ahead { .. } | CutStep::Prepare => PREPARE_TIMEOUT,
            CutStep::Freeze | CutStep::Cut => self.line.freeze + THAW_GRACE,
            CutStep::Written => SYNC_BUDGET + THAW_GRACE,
        };
        let answer = self.handle.block_on(self.line.step(step.into(), limit))?;
        match CutAnswer::try_from(answer) {
            Ok(answer) if answer.is_to(step) => {
                self.done |= step == CutStep::Written;
                Ok(answer)
            }
            Ok(other) => Err(self.line.out_of_step(&other)),
            Err(other) => Err(self.line.out_of_step(&other)),
        }
    }

    fn abort(&self) -> Box<dyn Fn() + Send + Sync> {
        let line = self.line.clone();
        Box::new(move || line.abort())
    }
}

impl Drop for Remote {
    fn drop(&mut self) {
        if !self.done {
            // The agent has thawed when this returns, if it can be reached; otherwise it thaws by
            // itself. The result is stored for later calls.
            let _ = self.handle.block_on(self.line.close());
        }
    }
}
