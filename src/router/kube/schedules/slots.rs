//! The slots of a schedule: the times of its snapshots.

use std::sync::LazyLock;

use croner::Cron;
use croner::parser::{CronParser, Seconds, Year};
use jiff::tz::{TimeZone, TimeZoneDatabase};
use jiff::{SignedDuration, Timestamp};

use super::cron::{self, MIN_INTERVAL};

/// Slots are executed within this time after they are due, each schedule at another second of it.
const SPREAD_SECONDS: u64 = 60;
/// The same, as a duration.
pub(super) const SPREAD: SignedDuration = SignedDuration::from_secs(SPREAD_SECONDS as i64);

/// The time zones of this program, not those of its image: they are the same in all routers.
static ZONES: LazyLock<TimeZoneDatabase> = LazyLock::new(TimeZoneDatabase::bundled);

/// A time zone of the IANA database; UTC if none is given.
pub(super) fn zone(name: Option<&str>) -> Result<TimeZone, String> {
    let Some(name) = name else {
        return Ok(TimeZone::UTC);
    };
    let zone = ZONES.get(name);
    zone.map_err(|_| {
        format!("timeZone {name:?} is not a time zone; give one of the IANA database, such as Europe/Berlin")
    })
}

/// When a schedule has slots.
#[derive(Clone, Debug)]
pub(super) struct Timetable {
    rule: Rule,
    /// The zone of cron expressions, and of the days and weeks of which sets are kept.
    pub(super) zone: TimeZone,
}

#[derive(Clone, Debug)]
enum Rule {
    /// Multiples of this number of seconds since 1970.
    Every(i64),
    Cron(Box<Cron>),
}

impl Timetable {
    /// Slots at this interval.
    pub(super) fn every(interval: SignedDuration, zone: TimeZone) -> Result<Timetable, String> {
        let seconds = interval.as_secs();
        if interval < MIN_INTERVAL || seconds % 60 != 0 {
            return Err("every must be whole minutes, and at least 5m".into());
        }
        let rule = Rule::Every(seconds);
        Ok(Timetable { rule, zone })
    }

    /// The slots of a cron expression of five fields.
    pub(super) fn cron(text: &str, zone: TimeZone) -> Result<Timetable, String> {
        let parser = CronParser::builder()
            .seconds(Seconds::Disallowed)
            .year(Year::Disallowed)
            .build();
        let cron = parser.parse(&cron::check(text)?);
        let cron = cron.map_err(|error| format!("cron {text:?} is not valid: {error}"))?;
        let rule = Rule::Cron(Box::new(cron));
        Ok(Timetable { rule, zone })
    }

    /// The newest slot that is not after a time.
    pub(super) fn last(&self, at: Timestamp) -> Option<Timestamp> {
        match &self.rule {
            Rule::Every(seconds) => {
                let number = at.as_second().div_euclid(*seconds);
                Timestamp::from_second(number.checked_mul(*seconds)?).ok()
            }
            Rule::Cron(cron) => {
                let found = cron.find_previous_occurrence(&self.zoned(at)?, true);
                found.ok().map(|found| found.timestamp())
            }
        }
    }

    /// The first slot after a time.
    pub(super) fn next(&self, after: Timestamp) -> Option<Timestamp> {
        match &self.rule {
            Rule::Every(seconds) => {
                let number = after.as_second().div_euclid(*seconds) + 1;
                Timestamp::from_second(number.checked_mul(*seconds)?).ok()
            }
            Rule::Cron(cron) => {
                let found = cron.find_next_occurrence(&self.zoned(after)?, false);
                found.ok().map(|found| found.timestamp())
            }
        }
    }

    /// Without parts of a second, of which cron expressions know nothing.
    fn zoned(&self, at: Timestamp) -> Option<jiff::Zoned> {
        let seconds = at.as_nanosecond().div_euclid(1_000_000_000);
        let at = Timestamp::from_second(i64::try_from(seconds).ok()?).ok()?;
        Some(at.to_zoned(self.zone.clone()))
    }
}

/// How long after a slot the schedule with this UID executes it. The UID decides it, so that all
/// routers agree, and schedules with the same slots do not stop all applications at once.
pub(super) fn jitter(uid: &str) -> SignedDuration {
    let sum = uid.bytes().fold(0_u64, |sum, byte| {
        sum.wrapping_mul(31).wrapping_add(u64::from(byte))
    });
    SignedDuration::from_secs((sum % SPREAD_SECONDS) as i64)
}

#[cfg(test)]
mod tests;
