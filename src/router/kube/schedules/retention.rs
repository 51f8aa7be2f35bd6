//! Which sets of a series are deleted: a pure function of the sets, which are those of a group schedule,
//! or those of one claim.
//!
//! - Only good sets count: those that are complete and ready. One at the requested level is never
//!   displaced by one below it.
//! - The newest good set is never deleted, and neither is the newest one at the requested level. Each
//!   set that is deleted is older than a good one; one at the requested level is older than another one
//!   at that level.
//! - Sets of the future, which a wrong clock has made, neither count nor are they deleted.

use std::collections::BTreeSet;

use jiff::civil::{Date, ISOWeekDate};
use jiff::tz::{Offset, TimeZone};
use jiff::{SignedDuration, Timestamp};

/// A set that has not become ready within this time is of no use, if there is a newer good one.
const UNREADY_FOR: SignedDuration = SignedDuration::from_hours(24);

/// Which sets are kept. Without any number, all that are not too old.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Keep {
    /// The newest ones.
    pub(super) last: usize,
    /// The newest one of each of this many hours that have sets.
    pub(super) hourly: usize,
    pub(super) daily: usize,
    pub(super) weekly: usize,
    /// No set that is older is kept.
    pub(super) max_age: Option<SignedDuration>,
}

/// What is known of a set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// It is complete and ready.
    Good { is_at_level: bool },
    /// It was ready, but a member is missing.
    Partial,
    /// It is not ready.
    Unready,
    /// It is being deleted.
    Leaving,
}

/// Why a set is deleted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reason {
    /// No number of `keep` includes it.
    Surplus,
    /// It is older than `maxAge`.
    Expired,
    /// It is incomplete, and older than all good sets that are kept.
    Incomplete,
    /// It did not become ready, and a newer one did.
    NeverReady,
}

impl Reason {
    pub(super) fn text(self) -> &'static str {
        match self {
            Reason::Surplus => "no number of keep includes it",
            Reason::Expired => "it is older than keep.maxAge",
            Reason::Incomplete => "it is incomplete, and older than all sets that are kept",
            Reason::NeverReady => "it did not become ready, and a newer set did",
        }
    }
}

/// A good set.
#[derive(Clone, Copy, Debug)]
struct Good {
    slot: Timestamp,
    is_at_level: bool,
}

/// The sets of a series that are to be deleted, the oldest first, by their slots.
pub(super) fn victims(
    keep: &Keep,
    zone: &TimeZone,
    now: Timestamp,
    sets: &[(Timestamp, State)],
) -> Vec<(Timestamp, Reason)> {
    let mut sets: Vec<_> = sets.iter().filter(|(slot, _)| *slot <= now).collect();
    sets.sort_by_key(|(slot, _)| *slot);
    let good = sets.iter().rev().filter_map(|(slot, state)| match state {
        State::Good { is_at_level } => Some(Good {
            slot: *slot,
            is_at_level: *is_at_level,
        }),
        State::Partial | State::Unready | State::Leaving => None,
    });
    // The newest first.
    let good: Vec<Good> = good.collect();
    let Some(newest) = good.first().map(|one| one.slot) else {
        return Vec::new();
    };
    let at_level: Vec<Good> = good.iter().copied().filter(|one| one.is_at_level).collect();
    let newest_at_level = at_level.first().map(|one| one.slot);
    let mut kept = keep.chosen(zone, &good);
    kept.extend(keep.chosen(zone, &at_level));
    let is_newest = |slot: Timestamp| slot == newest || Some(slot) == newest_at_level;
    let is_expired = |slot: Timestamp| {
        let age = now.duration_since(slot);
        keep.max_age.is_some_and(|most| age > most)
    };
    let oldest_kept = kept.first().copied().unwrap_or(newest);
    let reason = |slot: Timestamp, state: State| match state {
        State::Good { .. } if is_newest(slot) => None,
        State::Good { .. } if !kept.contains(&slot) => Some(Reason::Surplus),
        State::Good { .. } => is_expired(slot).then_some(Reason::Expired),
        State::Partial => (slot < oldest_kept).then_some(Reason::Incomplete),
        State::Unready => {
            let is_old = now.duration_since(slot) > UNREADY_FOR;
            (slot < newest && is_old).then_some(Reason::NeverReady)
        }
        State::Leaving => None,
    };
    let each = sets.iter();
    each.filter_map(|(slot, state)| Some((*slot, reason(*slot, *state)?)))
        .collect()
}

/// A period of which one set is kept.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Period {
    /// With its offset: an hour that comes twice is two hours.
    Hour(Date, i8, Offset),
    Day(Date),
    Week(i16, i8),
}

impl Keep {
    /// Whether there is a number.
    fn has_numbers(&self) -> bool {
        self.last + self.hourly + self.daily + self.weekly > 0
    }

    /// The slots that the numbers include of these good sets, which begin with the newest.
    fn chosen(&self, zone: &TimeZone, good: &[Good]) -> BTreeSet<Timestamp> {
        if !self.has_numbers() {
            return good.iter().map(|one| one.slot).collect();
        }
        let mut chosen: BTreeSet<Timestamp> =
            good.iter().take(self.last).map(|one| one.slot).collect();
        let hour = |slot: Timestamp| {
            let at = slot.to_zoned(zone.clone());
            Period::Hour(at.date(), at.hour(), at.offset())
        };
        let day = |slot: Timestamp| Period::Day(slot.to_zoned(zone.clone()).date());
        let week = |slot: Timestamp| {
            let date: ISOWeekDate = slot.to_zoned(zone.clone()).date().iso_week_date();
            Period::Week(date.year(), date.week())
        };
        chosen.extend(of_periods(self.hourly, good, hour));
        chosen.extend(of_periods(self.daily, good, day));
        chosen.extend(of_periods(self.weekly, good, week));
        chosen
    }
}

/// The best set of each of the newest periods that have one: the newest one at the requested level, or
/// else the newest one.
fn of_periods(
    number: usize,
    good: &[Good],
    period: impl Fn(Timestamp) -> Period,
) -> Vec<Timestamp> {
    let mut best: Vec<(Period, Good)> = Vec::new();
    for one in good {
        let its = period(one.slot);
        if let Some((_, best)) = best.last_mut().filter(|(last, _)| *last == its) {
            if one.is_at_level && !best.is_at_level {
                *best = *one;
            }
        } else if best.len() < number {
            best.push((its, *one));
        } else {
            break;
        }
    }
    best.into_iter().map(|(_, one)| one.slot).collect()
}

#[cfg(test)]
mod tests;
