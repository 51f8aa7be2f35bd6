//! Durations in the objects of this driver.

use std::time::Duration;

/// A longer time is practically for ever.
const MAX_SECONDS: u64 = 365 * 24 * 60 * 60;

/// A duration such as `30m`, of at most 365 days; `None` if it is not one.
pub(in crate::router::kube) fn duration(text: &str) -> Option<Duration> {
    let digits = text.trim_end_matches(|c: char| !c.is_ascii_digit());
    let unit = match &text[digits.len()..] {
        "s" => 1,
        "m" => 60,
        "h" => 60 * 60,
        "d" => 24 * 60 * 60,
        _ => return None,
    };
    let seconds = digits.parse::<u64>().ok()?.checked_mul(unit)?;
    (seconds <= MAX_SECONDS).then(|| Duration::from_secs(seconds))
}
