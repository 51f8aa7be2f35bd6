//! Copies before the fence, so that only what was written last is copied while the application waits.
//!
//! They need no consistency. Each round takes a snapshot and copies what differs from the one before,
//! which is deleted then: the last one is the base of the next copy. A round that fails delays nothing
//! but itself.

use k8s_openapi::jiff::SignedDuration;

use super::{Begun, Decision, Step, act, wait};
use crate::model::size::MIB;
use crate::operation::{MoveContentStatus, MoveSnapshotStatus, VolumeMoveStatus};
use crate::router::kube::moves::object::Phase;
use crate::router::volume_moves::ROUNDS;

/// The rounds end when one has less than this to copy. It takes a second at the limit of the rate, and
/// so does what is written in that time.
const SMALL_BYTES: u64 = 256 * MIB;
/// They end after this many, for an application that writes faster than is copied.
const MAX_ROUNDS: u32 = 5;
/// While a move waits for pods, a round is made this often: an agent deletes an incomplete copy that no
/// call has named for an hour.
const MIN_ROUND_INTERVAL: SignedDuration = SignedDuration::from_mins(10);

/// The number of the snapshot of a round.
fn snapshot_of_round(round: u32) -> u32 {
    ROUNDS[(round % 2) as usize]
}

impl Begun<'_> {
    /// What is to be done about the copies before the fence; `None` if nothing is now.
    pub(super) fn pre_copy(&self) -> Option<Decision> {
        let (seen, pre_copy) = (self.seen, &self.status.pre_copy);
        // A move that waits has what it waits for; the rounds after that are not shown as a phase.
        let phase = match self.status.phase {
            Phase::Waiting => Phase::Waiting,
            _ => Phase::Copying,
        };
        let copy = match &seen.copy {
            Ok(copy) => copy,
            Err(why) => return Some(wait(phase, "TargetUnknown", why)),
        };
        let step = |step| Some(act(phase, step));
        let own = snapshot_of_round(pre_copy.round);
        let other = snapshot_of_round(pre_copy.round + 1);
        let [taken, base] = [own, other].map(|round| seen.snapshots.get(&Some(round)));
        let begun_at = pre_copy.begun_at.as_ref();
        let is_due = begun_at.is_none_or(|at| seen.now.duration_since(at.0) >= MIN_ROUND_INTERVAL);
        let was_taken = pre_copy.bytes.is_some();
        if pre_copy.problem.is_some() || (was_taken && taken.is_none()) {
            let again = match (taken, base) {
                (None, _) => Step::BeginRound(pre_copy.round),
                (Some(_), Some(_)) => Step::DeleteSnapshot(Some(other)),
                (Some(_), None) => Step::BeginRound(pre_copy.round + 1),
            };
            return is_due.then(|| act(phase, again));
        }
        if pre_copy.round == 0 {
            return step(Step::BeginRound(1));
        }
        let Some(taken) = taken.filter(|taken| taken.is_ready && was_taken) else {
            return step(Step::Snapshot(own));
        };
        if copy.content != Some(whole(taken)) {
            return step(Step::Fill(own));
        }
        if base.is_some() {
            return step(Step::DeleteSnapshot(Some(other)));
        }
        let is_small = pre_copy.bytes.is_some_and(|bytes| bytes < SMALL_BYTES);
        let is_enough = pre_copy.round >= MAX_ROUNDS || (pre_copy.round > 1 && is_small);
        (is_due || !is_enough).then(|| act(phase, Step::BeginRound(pre_copy.round + 1)))
    }

    /// The snapshot whose copy is begun, and not complete. To complete it takes less than to copy
    /// everything again.
    pub(super) fn begun_round(&self, copy: &VolumeMoveStatus) -> Option<u32> {
        let content = copy.content.filter(|content| !content.is_whole)?;
        ROUNDS.into_iter().find(|round| {
            let snapshot = self.seen.snapshots.get(&Some(*round));
            snapshot.is_some_and(|it| it.is_ready && it.identity == content.identity)
        })
    }
}

fn whole(snapshot: &MoveSnapshotStatus) -> MoveContentStatus {
    MoveContentStatus {
        identity: snapshot.identity,
        is_whole: true,
    }
}
