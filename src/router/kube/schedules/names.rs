//! The names of the sets of a schedule: `<schedule>-<slot in UTC>-<5 characters of its UID>`, and for
//! snapshots of single claims `-<claim>` at the end. So whichever router executes a slot, and however
//! often, creates the same objects.

use std::collections::BTreeSet;

use ::kube::ResourceExt;
use jiff::Timestamp;
use jiff::civil::DateTime;
use jiff::tz::TimeZone;

use super::object::SnapshotSchedule;

/// The format of a slot in a name. Slots are whole minutes.
const SLOT: &str = "%Y%m%d-%H%M";
const SLOT_BYTES: usize = 13;
/// Characters of the UID. They tell apart schedules that had the same name one after another.
const UID_BYTES: usize = 5;
/// The limit of Kubernetes.
const MAX_NAME: usize = 253;

/// What the names of a schedule are made of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Names {
    schedule: String,
    pub(super) uid: String,
}

impl Names {
    /// `None` without a UID, which every object of an API server has.
    pub(super) fn of(schedule: &SnapshotSchedule) -> Option<Names> {
        let uid = schedule.metadata.uid.clone()?;
        uid.get(..UID_BYTES)?;
        Some(Names {
            schedule: schedule.name_any(),
            uid,
        })
    }

    /// The name of the set of a slot. `claim` is empty for groups.
    pub(super) fn name(&self, slot: Timestamp, claim: &str) -> String {
        let uid = self.uid.get(..UID_BYTES).unwrap_or_default();
        let slot = slot.to_zoned(TimeZone::UTC).strftime(SLOT).to_string();
        match claim {
            "" => format!("{}-{slot}-{uid}", self.schedule),
            claim => format!("{}-{slot}-{uid}-{claim}", self.schedule),
        }
    }

    /// The slot of a set; `None` if it does not have exactly the name that a set of this schedule has.
    pub(super) fn slot(&self, name: &str, claim: &str) -> Option<Timestamp> {
        let rest = name.strip_prefix(&self.schedule)?.strip_prefix('-')?;
        let text = rest.get(..SLOT_BYTES)?;
        let time = DateTime::strptime(SLOT, text).ok()?;
        let slot = TimeZone::UTC.to_timestamp(time).ok()?;
        (self.name(slot, claim) == name).then_some(slot)
    }

    /// Checks that Kubernetes accepts the names of the sets of these claims.
    pub(super) fn check(&self, series: &BTreeSet<String>) -> Result<(), String> {
        let of = |claim: &String| self.name(Timestamp::UNIX_EPOCH, claim).len();
        let longest = series.iter().max_by_key(|claim| of(claim));
        match longest.filter(|claim| of(claim) > MAX_NAME) {
            None => Ok(()),
            Some(claim) if claim.is_empty() => {
                Err("its name is too long for the names of its snapshots".into())
            }
            Some(claim) => Err(format!(
                "its name and that of claim {claim} are too long for the names of its snapshots"
            )),
        }
    }
}
