//! Cuts that the router coordinates: the attempts to cut a group over agents, or one snapshot with
//! hooks.
//!
//! In one attempt, the participation of each agent is begun (the first member's agent first, so
//! that of two routers only one proceeds), [`coordinator::run`] cuts, and all agents keep their
//! members. Then the first member's agent commits, which alone decides, and the others follow. A
//! failure before all agents have kept their members ends the streams, and with them everything
//! that was created. After a later failure members are in doubt until [`super::resolve`] has asked
//! the first member's agent.

pub(super) mod events;
mod hook_limit;
mod participant;

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use futures_util::future::join_all;
use tokio::runtime::Handle;
use tracing::Instrument;
use uuid::Uuid;

use super::Router;
use super::agents::Agent;
use crate::agent::cut_request::{Begin, Keep};
use crate::agent::cut_response::Begun;
use crate::csi;
use crate::cut::coordinator::{self, CutContext, CutSpec, Used};
use crate::cut::retry::{self, Backoffs, Clock, Subject};
use crate::cut::{Attempt, HookTarget, Outcome};
use crate::error::{Error, Result, chain};
use crate::fault;
use crate::model::{GroupId, Level, SnapshotParameters};
use crate::operation::{CutCounts, Key, Locks, VerifiedCut};
use crate::service::request;
use hook_limit::{Held, HookCutPermit};
use participant::{ParticipantStream, Remote};

/// A router's state about cuts; none of it has to survive the router.
#[derive(Default)]
pub(super) struct Cuts {
    /// Locks of the names on which this router works; against other routers, the agents lock.
    pub(super) locks: Locks,
    backoffs: Backoffs,
    /// Running cuts with hooks, by namespace.
    held: Held,
    pub(super) counts: CutCounts,
    running: AtomicUsize,
    stopping: AtomicBool,
}

/// What is said of a raw volume by an agent of an earlier release, which cannot suspend any.
const EARLIER_AGENT: &str = "the driver on its node is of an earlier release; update it, and then restart the pod that uses the volume";

/// Work that continues even if its caller stops waiting.
struct Running(Arc<Cuts>);

impl Drop for Running {
    fn drop(&mut self) {
        self.0.running.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Clock for Cuts {
    fn now(&self) -> u64 {
        since_1970().as_secs()
    }

    fn sleep(&self, time: Duration) {
        std::thread::sleep(time);
    }

    fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::SeqCst)
    }
}

fn since_1970() -> Duration {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.unwrap_or_default()
}

/// The cut to be taken.
pub(super) struct Wanted {
    /// The request name.
    pub(super) name: String,
    /// `None` for a single snapshot.
    pub(super) group: Option<GroupId>,
    /// The parameters of the class, parsed and as given.
    pub(super) parameters: SnapshotParameters,
    pub(super) given: HashMap<String, String>,
    /// All sources, in the order of the request.
    pub(super) sources: Vec<String>,
    /// The agents and the sources that each has, starting with the agent of the first source.
    pub(super) shares: Vec<(Arc<Agent>, Vec<String>)>,
    /// As in [`crate::operation::CreateSnapshot::requisite`].
    pub(super) requisite: Vec<String>,
    /// Until when it may wait for locks.
    pub(super) wait_until: Instant,
}

impl Wanted {
    /// The name used in logs.
    fn title(&self) -> String {
        let kind = if self.group.is_some() {
            "group"
        } else {
            "snapshot"
        };
        format!("{kind} {}", self.name)
    }

    fn begin(&self, now: &Attempt<'_>, attempt: Uuid, sources: &[String]) -> Begin {
        Begin {
            name: self.name.clone(),
            group_id: self.group.map(|id| id.to_string()).unwrap_or_default(),
            attempt: attempt.to_string(),
            parameters: self.given.clone(),
            source_volume_ids: sources.to_vec(),
            all_source_volume_ids: self.sources.clone(),
            level: now.level.as_str().to_string(),
            requisite_homes: self.requisite.clone(),
            early_failure: true,
            wait_millis: self.wait_millis(),
        }
    }

    /// If several agents take part, none waits for its locks, because each would hold its locks
    /// while another one waits.
    fn wait_millis(&self) -> u64 {
        let left = self.wait_until.saturating_duration_since(Instant::now());
        match self.shares.len() {
            1 => u64::try_from(left.as_millis()).unwrap_or(u64::MAX),
            _ => 0,
        }
    }
}

impl Router {
    /// Number of cuts that are running.
    pub fn cuts_running(&self) -> usize {
        self.cuts.running.load(Ordering::SeqCst)
    }

    /// Stops new cuts and new attempts from now on.
    pub fn stop_cuts(&self) {
        self.cuts.stopping.store(true, Ordering::SeqCst);
    }

    /// Runs work to its end, even if its caller stops waiting.
    pub(super) async fn detached<T: Send + 'static>(
        &self,
        work: impl Future<Output = Result<T>> + Send + 'static,
    ) -> Result<T> {
        self.cuts.running.fetch_add(1, Ordering::SeqCst);
        let running = Running(self.cuts.clone());
        if self.cuts.stopping.load(Ordering::SeqCst) {
            return Err(Error::Stopping);
        }
        let work = async move {
            let _running = running;
            work.await
        };
        let task = tokio::spawn(work.instrument(tracing::Span::current()));
        task.await
            .map_err(|panic| Error::bug(format!("no cut panics: {panic}")))?
    }

    /// Cuts a single snapshot whose application is quiesced by hooks of the cluster. Afterwards the
    /// snapshot exists, or its volume is copied instead of cut: in both cases, the request must
    /// then be forwarded to its agent, which answers. After an error nothing is left that a
    /// repeated call does not find.
    pub(super) async fn cut_single(
        &self,
        agent: Arc<Agent>,
        asked: &csi::CreateSnapshotRequest,
        wait_until: Instant,
    ) -> Result<()> {
        let key = self.topology_key();
        let topology_key = self.options.alpha.snapshot_topology.then_some(key.as_str());
        let request = request::create_snapshot(asked, topology_key)?.args;
        let lock = Key::SnapshotName(request.name.clone());
        let lock = self.cuts.locks.acquire(lock)?;
        let wanted = Wanted {
            name: request.name,
            group: None,
            parameters: request.parameters,
            given: asked.parameters.clone(),
            sources: vec![request.source_volume_id.clone()],
            shares: vec![(agent, vec![request.source_volume_id])],
            requisite: request.requisite,
            wait_until,
        };
        let router = self.clone();
        let work = async move {
            let _lock = lock;
            let given = wanted.given.clone();
            let cut = router.cut(wanted).await;
            router.record_cut_event(&given, cut.as_ref().map(Option::as_ref));
            cut
        };
        self.detached(work).await.map(drop)
    }

    /// Reserves a place among the running cuts with hooks of its namespaces.
    fn admit_hooks(&self, wanted: &Wanted) -> Result<Option<HookCutPermit>> {
        if wanted.parameters.consistency < Level::Application {
            return Ok(None);
        }
        let claims = wanted.sources.iter();
        let claims = claims.filter_map(|source| self.cluster.claim_of(source));
        let namespace = |claim: String| Some(claim.split_once('/')?.0.to_string());
        let namespaces = claims.filter_map(namespace).collect();
        HookCutPermit::admit(&self.cuts.held, namespaces).map(Some)
    }

    /// Tries to cut, as often as the class permits. Returns the result, or `None` if nothing is to
    /// be cut.
    pub(super) async fn cut(&self, wanted: Wanted) -> Result<Option<VerifiedCut>> {
        let held = self.admit_hooks(&wanted)?;
        let (router, handle) = (self.clone(), Handle::current());
        let span = tracing::Span::current();
        let tries = move || {
            let (_entered, _held) = (span.enter(), held);
            let once = |now: &Attempt<'_>| router.cut_once(&handle, &wanted, now);
            let cuts = &router.cuts;
            let subject = Subject {
                name: &wanted.title(),
                volumes: &wanted.sources,
                parameters: &wanted.parameters,
            };
            retry::retry(cuts.as_ref(), &cuts.backoffs, &subject, once)
        };
        let task = tokio::task::spawn_blocking(tries);
        task.await
            .map_err(|panic| Error::bug(format!("no cut panics: {panic}")))?
    }

    fn cut_once(
        &self,
        handle: &Handle,
        wanted: &Wanted,
        now: &Attempt<'_>,
    ) -> Result<Option<VerifiedCut>> {
        let attempt = Uuid::new_v4();
        let mut lines = Vec::new();
        let done = handle.block_on(self.begin(wanted, now, attempt, &mut lines));
        let done = match done {
            Ok(None) => {
                handle
                    .block_on(close_all(&lines))
                    .map_err(|left| Error::RollbackFailed {
                        first: Box::new(Error::Stopping),
                        undo: left,
                    })?;
                return Ok(None);
            }
            Ok(Some(used)) => self.freeze_and_cut(handle, &lines, wanted, now, &used),
            Err(first) => Err(first),
        };
        let outcome = match done {
            Ok(outcome) => outcome,
            Err(first) => return Err(handle.block_on(undone(&lines, first))),
        };
        let kept = VerifiedCut {
            reason: match now.why {
                "" => outcome.reason,
                why => why.to_string(),
            },
            cut_at: outcome.cut_at,
            level: outcome.level,
        };
        handle.block_on(self.keep(&lines, wanted, &kept))?;
        self.record_durations(&wanted.given, &outcome.stats);
        Ok(Some(kept))
    }

    /// Begins the participation of all agents; returns the members that are in use, or `None` if
    /// nothing is to be cut.
    async fn begin(
        &self,
        wanted: &Wanted,
        now: &Attempt<'_>,
        attempt: Uuid,
        lines: &mut Vec<Arc<ParticipantStream>>,
    ) -> Result<Option<Vec<Used>>> {
        let freeze = wanted.parameters.freeze_timeout;
        let begin = |(agent, sources): &(Arc<Agent>, Vec<String>)| {
            ParticipantStream::begin(agent.clone(), wanted.begin(now, attempt, sources), freeze)
        };
        let mut shares = wanted.shares.iter();
        let mut used = Vec::new();
        if let Some(first) = shares.next() {
            let (line, begun) = begin(first).await?;
            lines.push(line);
            if begun.plain {
                return Ok(None);
            }
            used.extend(self.used(&first.0, &first.1, begun)?);
        }
        let mut problem = None;
        let left = shares.clone();
        for ((agent, sources), begun) in left.zip(join_all(shares.map(begin)).await) {
            let begun = begun.and_then(|(line, begun)| {
                lines.push(line);
                self.used(agent, sources, begun)
            });
            match begun {
                Ok(its) => used.extend(its),
                Err(error) => problem = problem.or(Some(error)),
            }
        }
        problem.map_or(Ok(()), Err)?;
        coordinator::admit(&used, now.level, &wanted.parameters)?;
        Ok(Some(used))
    }

    /// The members that are in use. The pods whose hooks run are found by the PersistentVolumes,
    /// because an agent could name any application of the cluster.
    fn used(&self, agent: &Agent, sources: &[String], begun: Begun) -> Result<Vec<Used>> {
        let begun = self.begun(agent, sources, begun)?;
        let has_volumes = self.cluster.knows_nodes();
        let used = begun.targets.into_iter().map(|target| Used {
            claim: match has_volumes {
                true => self.cluster.claim_of(&target.volume_id),
                false => Some(target.claim).filter(|claim| !claim.is_empty()),
            },
            volume_id: target.volume_id,
            unsuspendable_reason: target.raw.then(|| match target.unsuspendable.is_empty() {
                true => EARLIER_AGENT.into(),
                false => target.unsuspendable,
            }),
        });
        Ok(used.collect())
    }

    fn freeze_and_cut(
        &self,
        handle: &Handle,
        lines: &[Arc<ParticipantStream>],
        wanted: &Wanted,
        now: &Attempt<'_>,
        used: &[Used],
    ) -> Result<Outcome> {
        let node_of = |volume_id: &String| {
            let share = wanted
                .shares
                .iter()
                .find(|(_, its)| its.contains(volume_id));
            share.map(|(agent, _)| agent.node().to_string())
        };
        let targets = used.iter().map(|used| HookTarget {
            volume_id: used.volume_id.clone(),
            claim: used.claim.clone(),
            node: node_of(&used.volume_id),
        });
        let targets: Vec<_> = targets.collect();
        let hooks = self.cluster.hooks();
        let context = CutContext {
            hooks: hooks.as_ref(),
            now_nanos: &|| u64::try_from(since_1970().as_nanos()).unwrap_or(u64::MAX),
            disturbed: now.disturbed,
        };
        let spec = CutSpec {
            level: now.level,
            parameters: &wanted.parameters,
            targets: &targets,
        };
        let remote = |line: &Arc<ParticipantStream>| {
            Box::new(Remote::new(line.clone(), handle.clone())) as _
        };
        let attempt = coordinator::run(&context, lines.iter().map(remote).collect(), &spec);
        self.cuts.counts.count(&attempt);
        attempt
    }

    /// The steps from a verified cut to its commit. The agent of the first stream decides.
    async fn keep(
        &self,
        lines: &[Arc<ParticipantStream>],
        wanted: &Wanted,
        kept: &VerifiedCut,
    ) -> Result<()> {
        let keep = Keep {
            cut_at: kept.cut_at,
            level: kept.level.as_str().to_string(),
            reason: kept.reason.clone(),
        };
        let kept = join_all(lines.iter().map(|line| line.keep(keep.clone()))).await;
        fault::reach("router", "kept");
        if let Some(first) = kept.into_iter().find_map(Result::err) {
            return Err(self.resolve_after_failure(lines, wanted, first).await);
        }
        let mut lines_left = lines.iter();
        if let Some(lead) = lines_left.next()
            && let Err(first) = lead.commit().await
        {
            return Err(self.resolve_after_failure(lines, wanted, first).await);
        }
        fault::reach("router", "lead-committed");
        let others = join_all(lines_left.map(|line| line.commit())).await;
        fault::reach("router", "committed");
        match others.into_iter().find_map(Result::err) {
            None => Ok(()),
            // The group is committed: a repeated call, or the next poll, commits the remaining
            // members.
            Some(first) => Err(Error::RollbackFailed {
                first: Box::new(first),
                undo: "at least one member of the group is not committed yet".into(),
            }),
        }
    }

    /// After a failure that may have left members in doubt: ends the streams and resolves the
    /// group. The returned error is final only if nothing is left.
    async fn resolve_after_failure(
        &self,
        lines: &[Arc<ParticipantStream>],
        wanted: &Wanted,
        first: Error,
    ) -> Error {
        let first = undone(lines, first).await;
        let Some(group) = wanted.group else {
            return first;
        };
        match self.settled(group, &wanted.sources).await {
            // An agent whose connection was lost may have committed, which it reports now.
            Ok(state) if state.is_committed() => Error::pending(format!("group snapshot {group}")),
            Ok(_) => first,
            Err(doubt) => Error::RollbackFailed {
                first: Box::new(first),
                undo: chain(&doubt),
            },
        }
    }
}

/// Ends all streams; the error names the agents that may have left something.
async fn close_all(lines: &[Arc<ParticipantStream>]) -> std::result::Result<(), String> {
    let ended = join_all(lines.iter().map(|line| async {
        let ended = line.close().await;
        ended.map_err(|left| format!("node {}: {left}", line.agent().node()))
    }));
    let left: Vec<_> = ended.await.into_iter().filter_map(Result::err).collect();
    match left.is_empty() {
        true => Ok(()),
        false => Err(left.join("; ")),
    }
}

/// Ends all streams after a failure. The returned error has a final code only if all agents have
/// confirmed that nothing is left.
async fn undone(lines: &[Arc<ParticipantStream>], first: Error) -> Error {
    match (close_all(lines).await, first) {
        (Ok(()), first) => first,
        // This error is not final, and names the agent.
        (Err(_), first @ Error::Unreachable { .. }) => first,
        (Err(left), first) => Error::RollbackFailed {
            first: Box::new(first),
            undo: left,
        },
    }
}
