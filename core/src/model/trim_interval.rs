//! How often blocks that the files of a volume no longer use are returned to its pool.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

const HOUR_SECONDS: u64 = 3600;
const DAY_SECONDS: u64 = 24 * HOUR_SECONDS;
/// A trim reads the free-space metadata of the whole file system, so it does not run more often.
const MIN_SECONDS: u64 = HOUR_SECONDS;
/// A longer interval is practically never.
const MAX_SECONDS: u64 = 365 * DAY_SECONDS;

/// The time between two trims of a pool's volumes, in whole hours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TrimInterval {
    seconds: u64,
}

impl TrimInterval {
    /// The interval as a duration.
    pub fn get(self) -> Duration {
        Duration::from_secs(self.seconds)
    }
}

impl FromStr for TrimInterval {
    type Err = String;

    fn from_str(text: &str) -> Result<TrimInterval, String> {
        let whole = |unit: char, seconds: u64| {
            let digits = text.strip_suffix(unit)?;
            let is_number = digits.bytes().all(|c| c.is_ascii_digit());
            let number: u64 = digits.parse().ok().filter(|_| is_number)?;
            number.checked_mul(seconds)
        };
        let seconds = whole('d', DAY_SECONDS).or_else(|| whole('h', HOUR_SECONDS));
        match seconds.filter(|seconds| (MIN_SECONDS..=MAX_SECONDS).contains(seconds)) {
            Some(seconds) => Ok(TrimInterval { seconds }),
            None => Err(format!(
                "trim={text} is not a valid interval; give one from 1h to 365d, such as 7d"
            )),
        }
    }
}

impl fmt::Display for TrimInterval {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.seconds % DAY_SECONDS {
            0 => write!(f, "{}d", self.seconds / DAY_SECONDS),
            _ => write!(f, "{}h", self.seconds / HOUR_SECONDS),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_whole_hours_and_days_are_accepted() {
        for (text, seconds, printed) in [
            ("1h", HOUR_SECONDS, "1h"),
            ("36h", 36 * HOUR_SECONDS, "36h"),
            ("48h", 2 * DAY_SECONDS, "2d"),
            ("7d", 7 * DAY_SECONDS, "7d"),
            ("365d", MAX_SECONDS, "365d"),
        ] {
            let interval: TrimInterval = text.parse().unwrap();
            assert_eq!(interval.get(), Duration::from_secs(seconds));
            assert_eq!(interval.to_string(), printed);
        }
        let bad = [
            "",
            "7",
            "d",
            "0h",
            "0d",
            "+7d",
            "366d",
            "30m",
            "1w",
            "1.5d",
            "-1d",
            "7 d",
            "99999999999999999999d",
            "9999999999999999999d",
        ];
        for text in bad {
            let sentence = text.parse::<TrimInterval>().unwrap_err();
            assert!(
                sentence.contains(&format!("trim={text} ")) && sentence.contains("such as 7d"),
                "{sentence}"
            );
        }
    }
}
