//! How a move is undone, while its PersistentVolume names the source.

use super::{Begun, Decision, Step, act, wait};
use crate::operation::{MovingState, VolumeMoveStatus};
use crate::router::kube::adopt::step::Step as PvStep;
use crate::router::kube::moves::object::Phase;

impl Begun<'_> {
    /// Undoes everything, the application's volume first.
    pub(super) fn abort(&self, why: &str) -> Decision {
        let seen = self.seen;
        let reason = Some(why.to_string());
        let undo = |step| Decision {
            message: why.to_string(),
            abort_reason: reason.clone(),
            ..act(Phase::Aborting, step)
        };
        let unknown = |what: &str, why: &str| Decision {
            abort_reason: reason.clone(),
            ..wait(Phase::Aborting, "Unreachable", format!("{what}: {why}"))
        };
        let is_own = seen.foreign_volume.is_none();
        if let Some(live) = (seen.live.as_ref()).filter(|live| is_own && !live.is_leaving()) {
            // The new version of the PersistentVolume ends every step that another router may still
            // be about to do.
            if live.policy_before().is_some() {
                return undo(Step::Pv(PvStep::Restore));
            }
            if seen.noted.is_some() {
                return undo(Step::Pv(PvStep::Strike));
            }
        }
        let source = match &seen.source {
            Ok(source) => source,
            Err(why) => return unknown("its source", why),
        };
        // Also if it is not fenced: a request for the fence may still be on its way.
        if source.state == MovingState::Ready && source.lifted != Some(self.uid) {
            return undo(Step::LiftFence);
        }
        let delete_copy = || match &seen.names_copy {
            None => undo(Step::DeleteCopy),
            Some(name) => Decision {
                abort_reason: reason.clone(),
                ..wait(
                    Phase::Aborting,
                    "OtherPersistentVolume",
                    format!("PersistentVolume {name} names its copy"),
                )
            },
        };
        if let Some(round) = seen.snapshots.keys().next() {
            let is_read = |copy: &VolumeMoveStatus| copy.state == MovingState::Filling;
            return match seen.copy.as_ref().is_ok_and(is_read) {
                // A snapshot that is read cannot be deleted.
                true => delete_copy(),
                false => undo(Step::DeleteSnapshot(*round)),
            };
        }
        // Without snapshots no copy can begin any more.
        match &seen.copy {
            Ok(copy) if copy.state != MovingState::Absent => delete_copy(),
            Err(why) => unknown("its copy", why),
            Ok(_) => Decision {
                phase: Phase::Aborted,
                ..undo(Step::RemoveFinalizer)
            },
        }
    }
}
