//! Since when each claim of a schedule must have a set, for the condition that reports overdue sets. A
//! slot in which the schedule was suspended, or that is older than the claim in its spec, needs none.

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use super::object::{ScheduleStatus, Since};
use super::slots::Timetable;

/// A time that is further in the future than this is one of a wrong clock.
pub(super) const MAX_AHEAD: SignedDuration = SignedDuration::from_hours(1);

/// What is known when the times are updated.
pub(super) struct Now<'a> {
    pub(super) now: Timestamp,
    /// The creation of the schedule.
    pub(super) created: Timestamp,
    pub(super) times: &'a Timetable,
    /// The schedule is suspended, or was when it was read last.
    pub(super) suspended: bool,
    /// The spec was changed since it was read last.
    pub(super) changed: bool,
}

impl Now<'_> {
    /// Records since when the claims of a schedule must have sets; of groups, which have an empty name.
    pub(super) fn record(&self, status: &mut ScheduleStatus, claims: impl Iterator<Item = String>) {
        let last = status.last_slot.as_ref().map(|slot| slot.0);
        let last = last.filter(|slot| self.is_past(*slot));
        let passed = match (&status.last_slot, last) {
            // A wrong clock has settled it. The newest slot is settled now, and is not executed.
            (Some(_), None) => self.times.last(self.now),
            _ => self.before_newest(),
        };
        let settled = [last, passed, Some(self.created)];
        let settled = settled.into_iter().flatten().max().unwrap_or(self.created);
        // Slots of which nothing is known have passed: the schedule may have had other times, or none.
        let has_missed_change = self.changed && last.is_some_and(|last| settled > last);
        let restarts = self.suspended || has_missed_change;
        let known = std::mem::take(&mut status.needed_since);
        let since = |claim: &str| {
            let its = known.iter().find(|one| one.claim == claim);
            let its = its.map(|one| one.after.0).filter(|at| self.is_past(*at));
            match its {
                Some(at) if restarts => at.max(settled),
                Some(at) => at,
                // A schedule that is new, or of a release without this record.
                None if known.is_empty() && !restarts => self.created,
                None => settled,
            }
        };
        let each = claims.map(|claim| Since {
            after: Time(since(&claim)),
            claim,
        });
        status.needed_since = each.collect();
    }

    fn is_past(&self, at: Timestamp) -> bool {
        at.duration_since(self.now) <= MAX_AHEAD
    }

    /// The slot before the newest one, which may be about to be executed.
    fn before_newest(&self) -> Option<Timestamp> {
        let newest = self.times.last(self.now)?;
        let earlier = newest.checked_sub(SignedDuration::from_secs(1)).ok()?;
        self.times.last(earlier)
    }
}

/// After which time a claim must have a set for each slot.
pub(super) fn needed_after(status: &ScheduleStatus, claim: &str) -> Option<Timestamp> {
    let mut all = status.needed_since.iter();
    all.find(|one| one.claim == claim).map(|one| one.after.0)
}
