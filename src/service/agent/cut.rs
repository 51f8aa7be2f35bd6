//! Cut, GetGroup, SettleGroup, DeleteGroup and DeleteOne: the agent's side of cuts across nodes.
//!
//! A stream is one participation in a cut. A separate thread works on it, while a task reads the
//! stream: as soon as the router disconnects in any way, the task thaws, even in the middle of a
//! step.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio_stream::Stream;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Status, Streaming};
use uuid::Uuid;

use crate::agent::cut_request::Step;
use crate::agent::cut_response::{
    Answer, Begun, Committed, Failed, Kept as KeptAnswer, Target, failed,
};
use crate::agent::group_member::State;
use crate::agent::{
    CutRequest, CutResponse, DeleteGroupRequest, DeleteGroupResponse, DeleteOneRequest,
    DeleteOneResponse, GetGroupRequest, GetGroupResponse, GroupMember, SettleGroupRequest,
    SettleGroupResponse, cut_request,
};
use crate::error::{Error, Result};
use crate::model::{GroupId, Level, SnapshotParameters, VolumeId};
use crate::operation::{
    self, AbortHandle, BeginParticipation, Coordinator, CutStep, DeleteSnapshotOptions, Driver,
    GroupDecision, GroupHere, ParticipationAnswer, ParticipationStep, SnapshotState, Used,
    VerifiedCut,
};
use crate::service::reply::bytes;
use crate::service::{Rpc, Service, status};

/// Answers to one router; tonic requires the box.
pub(super) type CutStream =
    Pin<Box<dyn Stream<Item = std::result::Result<CutResponse, Status>> + Send>>;

/// Each step is answered before the next one is sent; the additional place detects a router that
/// violates this.
const STEPS_IN_TRANSIT: usize = 2;

impl Service {
    /// Serves a participation until its stream ends, and longer if something must be undone.
    pub(super) fn handle_cut(&self, steps: Streaming<CutRequest>) -> CutStream {
        let (answers, receiver) = mpsc::channel(STEPS_IN_TRANSIT);
        let driver = self.driver.clone();
        tokio::spawn(async move {
            if let Err(failed) = serve(driver, steps, answers.clone()).await {
                let answer = CutResponse {
                    answer: Some(Answer::Failed(failed)),
                };
                // A router that has disconnected needs no answer.
                let _ = answers.send(Ok(answer)).await;
            }
        });
        Box::pin(ReceiverStream::new(receiver))
    }

    pub(super) async fn handle_get_group(
        &self,
        request: GetGroupRequest,
    ) -> std::result::Result<GetGroupResponse, Status> {
        let here = self
            .run(
                // The creation of a group begins with this call, and must not take a failed query
                // for a final answer.
                Rpc::CreateVolumeGroupSnapshot,
                group_id(&request.group_id),
                move |driver, group| driver.snapshots.group_here(*group, &request.snapshot_ids),
            )
            .await?;
        Ok(group_response(here))
    }

    pub(super) async fn handle_settle_group(
        &self,
        request: SettleGroupRequest,
    ) -> std::result::Result<SettleGroupResponse, Status> {
        let args = group_id(&request.group_id).and_then(|group| Ok((group, decision(&request)?)));
        self.run(
            Rpc::CreateVolumeGroupSnapshot,
            args,
            |driver, (group, decision)| driver.snapshots.resolve_group_by(*group, decision),
        )
        .await?;
        Ok(SettleGroupResponse {})
    }

    pub(super) async fn handle_delete_group(
        &self,
        request: DeleteGroupRequest,
    ) -> std::result::Result<DeleteGroupResponse, Status> {
        self.run(
            Rpc::DeleteVolumeGroupSnapshot,
            group_id(&request.group_id),
            move |driver, group| {
                driver
                    .snapshots
                    .delete_group_here(*group, &request.snapshot_ids)
            },
        )
        .await?;
        Ok(DeleteGroupResponse {})
    }

    pub(super) async fn handle_delete_one(
        &self,
        request: DeleteOneRequest,
    ) -> std::result::Result<DeleteOneResponse, Status> {
        let unsettled = self
            .run(Rpc::DeleteSnapshot, how(&request), move |driver, how| {
                driver.snapshots.delete_one(&request.snapshot_id, how)
            })
            .await?;
        Ok(DeleteOneResponse {
            unsettled_group_id: unsettled.map(|group| group.to_string()).unwrap_or_default(),
        })
    }
}

async fn serve(
    driver: Arc<Driver>,
    mut steps: Streaming<CutRequest>,
    answers: mpsc::Sender<std::result::Result<CutResponse, Status>>,
) -> std::result::Result<(), Failed> {
    let first = match steps.message().await {
        Ok(Some(first)) => first.step,
        // The participation has not begun.
        Ok(None) | Err(_) => return Ok(()),
    };
    let rpc = match &first {
        Some(Step::Begin(begin)) if begin.group_id.is_empty() => Rpc::CreateSnapshot,
        Some(_) | None => Rpc::CreateVolumeGroupSnapshot,
    };
    let is_early = matches!(&first, Some(Step::Begin(begin)) if begin.early_failure);
    let wait = match &first {
        Some(Step::Begin(begin)) => Duration::from_millis(begin.wait_millis),
        Some(_) | None => Duration::ZERO,
    };
    let begin = begin(first).map_err(|error| failed(rpc, &error))?;
    if !wait.is_zero() {
        let locks = driver.snapshots.locks_of_participation(&begin);
        tokio::select! {
            () = driver.wait_until_free(&locks, wait) => {}
            // The router has disconnected, and the participation has not begun.
            () = answers.closed() => return Ok(()),
        }
    }
    let (orders, inbox) = mpsc::channel(STEPS_IN_TRANSIT);
    let abort = AbortHandle::default();
    let ears = listen(steps, orders, answers.clone(), abort.clone());
    let mut line = Line {
        inbox,
        answers,
        early: is_early.then_some(rpc),
    };
    let share = move |driver: &Driver| {
        driver
            .snapshots
            .serve_participation(&begin, &abort, &mut line)
    };
    let work = driver.run_blocking_in(rpc.class(), share);
    tokio::pin!(work);
    let done = tokio::select! {
        done = &mut work => done,
        () = ears => work.await,
    };
    done.map_err(|error| failed(rpc, &error))
}

/// Passes steps on until the router ends the stream or disconnects, and thaws then.
async fn listen(
    mut steps: Streaming<CutRequest>,
    orders: mpsc::Sender<ParticipationStep>,
    answers: mpsc::Sender<std::result::Result<CutResponse, Status>>,
    abort: AbortHandle,
) {
    let why = loop {
        let next = tokio::select! {
            next = steps.message() => next,
            () = answers.closed() => break Some("the router has gone".to_string()),
        };
        let step = match next {
            Ok(Some(request)) => step(request.step),
            Ok(None) => break None,
            Err(status) => {
                break Some(format!(
                    "the stream of the cut failed: {}",
                    status.message()
                ));
            }
        };
        // A step that is invalid or arrives too early ends the participation as well.
        let Some(Ok(())) = step.map(|step| orders.try_send(step)) else {
            break Some("received a step that is out of order".to_string());
        };
    };
    // Nothing is logged before everything is thawed, because the log may lie on a frozen file
    // system.
    abort.now();
    if let Some(why) = why {
        tracing::warn!(reason = why, "aborting the part of this node in a cut");
    }
}

/// The connection between the working thread and the stream.
struct Line {
    inbox: mpsc::Receiver<ParticipationStep>,
    answers: mpsc::Sender<std::result::Result<CutResponse, Status>>,
    /// The RPC, if the router accepts a failure before it has been undone.
    early: Option<Rpc>,
}

impl Coordinator for Line {
    fn next(&mut self) -> Option<ParticipationStep> {
        self.inbox.blocking_recv()
    }

    fn send_reply(&mut self, answer: ParticipationAnswer) {
        let answer = Some(answer_of(answer));
        let _ = self.answers.blocking_send(Ok(CutResponse { answer }));
    }

    fn failing(&mut self, error: &Error) {
        let Some(rpc) = self.early else { return };
        let answer = Some(Answer::Failed(Failed {
            undoing: true,
            ..failed(rpc, error)
        }));
        let _ = self.answers.blocking_send(Ok(CutResponse { answer }));
    }
}

pub(super) fn group_id(text: &str) -> Result<GroupId> {
    text.parse()
        .map_err(|_| Error::invalid("group_id", format!("{text:?} is not a valid group ID")))
}

/// The group, or `None` where the ID is empty.
fn optional_group_id(text: &str) -> Result<Option<GroupId>> {
    (!text.is_empty()).then(|| group_id(text)).transpose()
}

pub(super) fn how(request: &DeleteOneRequest) -> Result<DeleteSnapshotOptions> {
    Ok(DeleteSnapshotOptions {
        of_any_group: request.of_any_group,
        settled: optional_group_id(&request.settled_group_id)?,
        for_clone: false,
    })
}

fn attempt(field: &str, text: &str) -> Result<Uuid> {
    Uuid::try_parse(text)
        .map_err(|_| Error::invalid(field, format!("{text:?} is not a valid attempt ID")))
}

fn level(text: &str) -> Result<Level> {
    Level::parse(text).ok_or_else(|| {
        Error::invalid(
            "level",
            format!("{text:?} is not a level that this agent supports"),
        )
    })
}

pub(super) fn begin(first: Option<Step>) -> Result<BeginParticipation> {
    let Some(Step::Begin(begin)) = first else {
        return Err(Error::invalid("step", "the first step must be begin"));
    };
    let all = begin.all_source_volume_ids.iter();
    let all = all.map(|id| id.parse().map_err(|_| Error::no_volume(id)));
    Ok(BeginParticipation {
        group: optional_group_id(&begin.group_id)?,
        attempt: attempt("attempt", &begin.attempt)?,
        parameters: SnapshotParameters::parse(&begin.parameters)?.0,
        all_volumes: all.collect::<Result<Vec<VolumeId>>>()?,
        level: level(&begin.level)?,
        name: begin.name,
        volume_ids: begin.source_volume_ids,
        requisite: begin.requisite_homes,
    })
}

/// `None` for a message that is no step after the beginning.
pub(super) fn step(step: Option<Step>) -> Option<ParticipationStep> {
    Some(match CutStep::try_from(step?) {
        Ok(step) => ParticipationStep::Cut(step),
        Err(Step::Keep(kept)) => ParticipationStep::Keep(keep(kept)?),
        Err(Step::Commit(_)) => ParticipationStep::Commit,
        Err(_) => return None,
    })
}

fn keep(kept: cut_request::Keep) -> Option<VerifiedCut> {
    Some(VerifiedCut {
        cut_at: kept.cut_at,
        level: Level::parse(&kept.level)?,
        reason: kept.reason,
    })
}

fn answer_of(answer: ParticipationAnswer) -> Answer {
    match answer {
        ParticipationAnswer::Begun(used) => Answer::Begun(Begun {
            targets: used.into_iter().map(target).collect(),
            plain: false,
            ahead: true,
        }),
        ParticipationAnswer::Plain => Answer::Begun(Begun {
            targets: Vec::new(),
            plain: true,
            ahead: false,
        }),
        ParticipationAnswer::Cut(answer) => answer.into(),
        ParticipationAnswer::Kept => Answer::Kept(KeptAnswer {}),
        ParticipationAnswer::Committed => Answer::Committed(Committed {}),
    }
}

fn target(used: Used) -> Target {
    Target {
        volume_id: used.volume_id,
        claim: used.claim.unwrap_or_default(),
        raw: used.unsuspendable_reason.is_some(),
        unsuspendable: used.unsuspendable_reason.unwrap_or_default(),
    }
}

/// The properties of a failure on which the router decides and which no gRPC code expresses.
fn failed(rpc: Rpc, error: &Error) -> Failed {
    let said = status(rpc, error);
    let (kind, message) = match error {
        Error::CutLost { reason } => (failed::Kind::CutLost, reason.clone()),
        Error::Busy { .. } => (failed::Kind::Busy, said.message().to_string()),
        _ => (failed::Kind::Other, said.message().to_string()),
    };
    Failed {
        kind: kind.into(),
        code: said.code().into(),
        message,
        left: matches!(
            error,
            Error::RollbackFailed { .. } | Error::Pending { .. } | Error::Bug { .. }
        ),
        undoing: false,
    }
}

pub(super) fn decision(request: &SettleGroupRequest) -> Result<GroupDecision> {
    let undo = request.undone_attempts.iter();
    let undo = undo.map(|text| attempt("undone_attempts", text));
    Ok(GroupDecision {
        commit: match request.attempt.as_str() {
            "" => None,
            text => Some(attempt("attempt", text)?),
        },
        undo: undo.collect::<Result<_>>()?,
    })
}

fn group_response(here: GroupHere) -> GetGroupResponse {
    let membership = here.membership;
    let known = membership.as_ref();
    GetGroupResponse {
        members: here.members.into_iter().map(member).collect(),
        all_source_volume_ids: known.map(|of| of.sources.clone()).unwrap_or_default(),
        all_member_ids: known.map(|of| of.members.clone()).unwrap_or_default(),
        asked: known.and_then(|of| of.asked.clone()).unwrap_or_default(),
        busy: here.busy,
        unseen: here.unseen.unwrap_or_default(),
        independent: known.is_some_and(|of| of.independent),
    }
}

fn member(member: operation::GroupMember) -> GroupMember {
    let snapshot = member.snapshot;
    let state = match member.state {
        SnapshotState::Preparing => State::Preparing,
        SnapshotState::Cut => State::Cut,
        SnapshotState::Ready => State::Ready,
    };
    GroupMember {
        snapshot_id: snapshot.id.to_string(),
        source_volume_id: snapshot.source_volume_id.to_string(),
        size_bytes: bytes(snapshot.size),
        cut_at: snapshot.cut_at,
        level: snapshot.level.to_string(),
        reason: snapshot.reason,
        attempt: member.attempt.to_string(),
        state: state.into(),
        home: snapshot.home.to_string(),
    }
}
