//! What a cron expression of a schedule may be. croner evaluates expressions; it accepts more than is
//! documented, and searches thousands of years for a date that never comes. What is checked here is
//! computed from the fields alone: the days of the calendar repeat, and no slot has to be searched.

use jiff::SignedDuration;
use jiff::civil::{Date, date};

/// The shortest time between two slots. A cut takes seconds, and each set holds blocks.
pub(super) const MIN_INTERVAL: SignedDuration = SignedDuration::from_mins(5);
const MINUTES_PER_DAY: u32 = 24 * 60;
/// The days of each month in a leap year.
const DAYS: [u32; 12] = [31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
const MONTHS: [&str; 12] = [
    "JAN", "FEB", "MAR", "APR", "MAY", "JUN", "JUL", "AUG", "SEP", "OCT", "NOV", "DEC",
];
const WEEKDAYS: [&str; 7] = ["SUN", "MON", "TUE", "WED", "THU", "FRI", "SAT"];
/// Expressions that have a name.
const NAMED: [(&str, &str); 6] = [
    ("@hourly", "0 * * * *"),
    ("@daily", "0 0 * * *"),
    ("@weekly", "0 0 * * 0"),
    ("@monthly", "0 0 1 * *"),
    ("@yearly", "0 0 1 1 *"),
    ("@annually", "0 0 1 1 *"),
];
/// The first and the last of 28 years, which have each pair of days that follow each other: each of the
/// fourteen years that the calendar has, and its last day with the first one of the year after it.
const FIRST_DAY: Date = date(2001, 1, 1);
const LAST_DAY: Date = date(2029, 1, 1);

/// A field of an expression.
struct Field {
    name: &'static str,
    least: u32,
    most: u32,
    /// Names of its values, beginning with the least one.
    names: &'static [&'static str],
}

/// A field whose values have no names.
const fn numbers(name: &'static str, least: u32, most: u32) -> Field {
    let names = &[];
    Field {
        name,
        least,
        most,
        names,
    }
}

const MINUTE: Field = numbers("minute", 0, 59);
const HOUR: Field = numbers("hour", 0, 23);
const DAY: Field = numbers("day of the month", 1, 31);
const MONTH: Field = Field {
    name: "month",
    least: 1,
    most: 12,
    names: &MONTHS,
};
const WEEKDAY: Field = Field {
    name: "day of the week",
    least: 0,
    most: 7,
    names: &WEEKDAYS,
};

/// The values of a field, one bit for each.
type Values = u64;

/// When an expression is due, by the clock of its time zone.
struct Fields {
    minutes: Values,
    hours: Values,
    days: Values,
    /// The last day of each month is one of them.
    has_last_day: bool,
    months: Values,
    weekdays: Values,
    /// The field is `*`, so it is only the other one of the two that decides which days are due. If
    /// neither is, a day is due that one of them has.
    are_all_days: bool,
    are_all_weekdays: bool,
}

/// Checks an expression, and returns it with five fields. The error says what is wrong, and in which
/// field.
pub(super) fn check(text: &str) -> Result<String, String> {
    let named = NAMED.iter().find(|(name, _)| *name == text.trim());
    let plain = named.map_or(text, |(_, plain)| plain);
    let fields = fields(plain).map_err(|why| format!("cron {text:?} is not valid: {why}"))?;
    if !fields.is_ever_due() {
        return Err(format!(
            "cron {text:?} is never due: no month of the field month has a day of the field day of the month"
        ));
    }
    if fields.nearest().is_some_and(|time| time < MIN_INTERVAL) {
        return Err(format!(
            "cron {text:?} is due more often than every 5 minutes"
        ));
    }
    Ok(plain.into())
}

fn fields(text: &str) -> Result<Fields, String> {
    let all: Vec<&str> = text.split_whitespace().collect();
    let &[minutes, hours, days, months, weekdays] = all.as_slice() else {
        return Err(format!(
            "it has {} fields, not the five of minute, hour, day of the month, month and day of the week",
            all.len()
        ));
    };
    let (days_alone, has_last_day) = last_day(days);
    let mut its_weekdays = values(&WEEKDAY, weekdays)?;
    // 7 is Sunday too.
    its_weekdays |= its_weekdays >> 7;
    Ok(Fields {
        minutes: values(&MINUTE, minutes)?,
        hours: values(&HOUR, hours)?,
        days: match days_alone.as_str() {
            "" if has_last_day => 0,
            days => values(&DAY, days)?,
        },
        has_last_day,
        months: values(&MONTH, months)?,
        weekdays: its_weekdays,
        are_all_days: days == "*",
        are_all_weekdays: weekdays == "*",
    })
}

/// Days of the month without `L`, and whether it was there.
fn last_day(text: &str) -> (String, bool) {
    let (last, others): (Vec<&str>, Vec<&str>) = text.split(',').partition(|item| *item == "L");
    (others.join(","), !last.is_empty())
}

fn values(field: &Field, text: &str) -> Result<Values, String> {
    if text == "*" {
        return Ok((field.least..=field.most).fold(0, |all, value| all | 1 << value));
    }
    let each = text.split(',').map(|item| item_values(field, item));
    each.reduce(|all, its| Ok(all? | its?))
        .unwrap_or(Ok(0))
        .map_err(|wrong| {
            let (least, most) = (field.least, field.most);
            let names = match field.names {
                [first, .., last] => format!(" or {first} to {last}"),
                _ => String::new(),
            };
            let last = if field.name == DAY.name { ", L for the last day" } else { "" };
            format!(
                "the field {} has {wrong:?}; allowed are numbers from {least} to {most}{names}{last}, ranges such as 1-5, * and steps of these such as */2 and 1-5/2, and lists of them with commas",
                field.name
            )
        })
}

/// The values of one item of a list; the error is the item.
fn item_values(field: &Field, item: &str) -> Result<Values, String> {
    let wrong = || item.to_string();
    let (range, step) = match item.split_once('/') {
        Some((range, step)) => (
            range,
            number(step).filter(|step| *step > 0).ok_or_else(wrong)?,
        ),
        None => (item, 1),
    };
    let (first, last) = match range.split_once('-') {
        _ if range == "*" && item != "*" => (field.least, field.most),
        Some((first, last)) => {
            let first = value(field, first).ok_or_else(wrong)?;
            (first, value(field, last).ok_or_else(wrong)?)
        }
        // The step of a single number is refused: it has two meanings in other programs.
        None if item.contains('/') => return Err(wrong()),
        None => {
            let only = value(field, range).ok_or_else(wrong)?;
            (only, only)
        }
    };
    if first > last {
        return Err(wrong());
    }
    let each = (first..=last).step_by(step as usize);
    Ok(each.fold(0, |all, value| all | 1 << value))
}

fn value(field: &Field, text: &str) -> Option<u32> {
    let mut names = field.names.iter();
    let named = names.position(|name| name.eq_ignore_ascii_case(text));
    let value = match named {
        Some(place) => field.least + u32::try_from(place).ok()?,
        None => number(text)?,
    };
    (field.least..=field.most).contains(&value).then_some(value)
}

/// One or two digits.
fn number(text: &str) -> Option<u32> {
    let are_digits = text.bytes().all(|byte| byte.is_ascii_digit());
    let is_short = (1..=2).contains(&text.len());
    (are_digits && is_short).then(|| text.parse().ok())?
}

fn has(values: Values, value: u32) -> bool {
    values >> value & 1 == 1
}

impl Fields {
    fn is_ever_due(&self) -> bool {
        let of_month = |(month, most): (u32, u32)| {
            let mut days = 1..=most;
            has(self.months, month) && days.any(|day| has(self.days, day))
        };
        let mut months = (1..).zip(DAYS);
        // Each month has each day of the week, and a last day.
        !self.are_all_weekdays || self.has_last_day || months.any(of_month)
    }

    /// Whether a day has slots.
    fn is_due(&self, day: Date) -> bool {
        let number = day.day().unsigned_abs().into();
        let is_last = self.has_last_day && day == day.last_of_month();
        let of_month = has(self.days, number) || is_last;
        let weekday = day.weekday().to_sunday_zero_offset().unsigned_abs().into();
        let of_week = has(self.weekdays, weekday);
        let is_meant = match (self.are_all_days, self.are_all_weekdays) {
            (true, _) => of_week,
            (false, true) => of_month,
            (false, false) => of_month || of_week,
        };
        is_meant && has(self.months, day.month().unsigned_abs().into())
    }

    /// The shortest time between two slots by the clock, of one day or of days that follow each other.
    fn nearest(&self) -> Option<SignedDuration> {
        let is_slot = |minute: &u32| has(self.hours, minute / 60) && has(self.minutes, minute % 60);
        let slots: Vec<u32> = (0..MINUTES_PER_DAY).filter(is_slot).collect();
        let within = slots.iter().zip(slots.iter().skip(1));
        let within = within.map(|(before, after)| after - before).min();
        let (first, last) = (slots.first()?, slots.last()?);
        let night = first + MINUTES_PER_DAY - last;
        let is_nearer = within.is_none_or(|within| night < within);
        let minutes = match is_nearer && self.has_days_that_follow() {
            true => Some(night),
            false => within,
        };
        minutes.map(|minutes| SignedDuration::from_mins(minutes.into()))
    }

    fn has_days_that_follow(&self) -> bool {
        let mut days = FIRST_DAY.series(jiff::Span::new().days(1));
        let mut was_due = false;
        let mut follows = |day: Date| {
            let is_due = self.is_due(day);
            std::mem::replace(&mut was_due, is_due) && is_due
        };
        days.by_ref()
            .take_while(|day| *day <= LAST_DAY)
            .any(&mut follows)
    }
}

#[cfg(test)]
mod tests;
