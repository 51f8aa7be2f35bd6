//! Slots of a schedule that have no set, as its status lists them.

use std::collections::BTreeSet;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use super::object::ScheduleStatus;
use super::slots::Timetable;

/// Slots that the status lists.
const MAX_LISTED: usize = 20;

/// Adds slots that were skipped. The oldest ones make room for them.
pub(super) fn skip(status: &mut ScheduleStatus, slots: impl IntoIterator<Item = Timestamp>) {
    let known = status.skipped_slots.iter().map(|slot| slot.0);
    let all: BTreeSet<Timestamp> = known.chain(slots).collect();
    let surplus = all.len().saturating_sub(MAX_LISTED);
    status.skipped_slots = all.into_iter().skip(surplus).map(Time).collect();
}

/// The newest slots between two times.
pub(super) fn between(times: &Timetable, after: Timestamp, before: Timestamp) -> Vec<Timestamp> {
    let mut found = Vec::new();
    let mut at = before;
    while found.len() < MAX_LISTED {
        let earlier = at.checked_sub(SignedDuration::from_secs(1)).ok();
        match earlier.and_then(|earlier| times.last(earlier)) {
            Some(slot) if slot > after && slot < at => {
                found.push(slot);
                at = slot;
            }
            Some(_) | None => break,
        }
    }
    found
}
