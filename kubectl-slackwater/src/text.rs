//! Formats text for people: sizes, times and ages. Characters that a terminal could act on are escaped,
//! because anyone may write what objects contain.

use k8s_openapi::jiff::Timestamp;

/// Whether a terminal may act on the character instead of showing it, or show the text around it in
/// another order.
pub fn is_hidden(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{ad}' | '\u{61c}' | '\u{180e}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}'
            | '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e007f}')
}

/// One line, with such characters escaped.
pub fn escaped(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for c in text.chars() {
        match is_hidden(c) {
            true => safe.extend(c.escape_default()),
            false => safe.push(c),
        }
    }
    safe
}

/// Several lines, with such characters escaped.
pub fn escaped_lines(text: &str) -> String {
    text.split('\n').map(escaped).collect::<Vec<_>>().join("\n")
}

/// JSON with such characters as escape sequences of JSON. Outside of strings there are none, except
/// for line ends.
pub fn escaped_json(json: &str) -> String {
    let mut safe = String::with_capacity(json.len());
    for c in json.chars() {
        if c == '\n' || !is_hidden(c) {
            safe.push(c);
            continue;
        }
        let mut units = [0; 2];
        for unit in c.encode_utf16(&mut units) {
            safe.push_str(&format!("\\u{unit:04x}"));
        }
    }
    safe
}

/// A number of bytes: "1.5 GiB".
pub fn size(bytes: i64) -> String {
    let units = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    let mut value = bytes as f64;
    let mut unit = "B";
    for next in units {
        if value < 1024.0 {
            break;
        }
        (value, unit) = (value / 1024.0, next);
    }
    match value < 10.0 && value.fract() != 0.0 {
        true => format!("{value:.1} {unit}"),
        false => format!("{value:.0} {unit}"),
    }
}

/// A quantity of the API ("10Gi", "1500M", "2e9") in bytes. A fraction of a byte counts as one, as it
/// does in the API.
pub fn quantity(text: &str) -> Option<i64> {
    let end = text.find(|c: char| c.is_ascii_alphabetic());
    let (number, unit) = text.split_at(end.unwrap_or(text.len()));
    let factor = match unit {
        "" => 1.0,
        "m" => 1e-3,
        "k" => 1e3,
        "M" => 1e6,
        "G" => 1e9,
        "T" => 1e12,
        "P" => 1e15,
        "E" => 1e18,
        "Ki" => 1024.0,
        "Mi" => f64::from(1 << 20),
        "Gi" => f64::from(1 << 30),
        "Ti" => 2f64.powi(40),
        "Pi" => 2f64.powi(50),
        "Ei" => 2f64.powi(60),
        // An exponent.
        _ => return text.parse::<f64>().ok().map(|bytes| bytes.ceil() as i64),
    };
    Some((number.parse::<f64>().ok()? * factor).ceil() as i64)
}

/// A number of bytes as a quantity of the API.
pub fn as_quantity(bytes: i64) -> String {
    for (shift, unit) in [(30, "Gi"), (20, "Mi"), (10, "Ki")] {
        if bytes != 0 && bytes % (1 << shift) == 0 {
            return format!("{}{unit}", bytes >> shift);
        }
    }
    bytes.to_string()
}

/// A time in UTC, in whole seconds. Empty if it is not known.
pub fn time(at: Option<Timestamp>) -> String {
    let at = at.and_then(|at| Timestamp::from_second(at.as_second()).ok());
    at.map(|at| at.to_string()).unwrap_or_default()
}

/// A message after what it explains; empty if there is none.
pub fn after_colon(message: &str) -> String {
    match message {
        "" => String::new(),
        message => format!(": {message}"),
    }
}

/// The time since then: "5m". Empty if the time is not known.
pub fn age(since: Option<Timestamp>, now: Timestamp) -> String {
    let Some(since) = since else {
        return String::new();
    };
    duration(now.as_second() - since.as_second())
}

/// The seconds of a time such as 90s, 10m, 2h or 1d; `None` for any other text.
pub fn seconds(text: &str) -> Option<i64> {
    let units = [('s', 1), ('m', 60), ('h', 3600), ('d', 86400)];
    let mut units = units.into_iter();
    let of = |(unit, seconds)| Some((text.strip_suffix(unit)?, seconds));
    let (number, seconds): (&str, i64) = units.find_map(of)?;
    let number: u32 = number.parse().ok()?;
    Some(i64::from(number) * seconds)
}

/// A number of seconds: "5m".
pub fn duration(seconds: i64) -> String {
    let (minute, hour, day) = (60, 3600, 86400);
    match seconds.max(0) {
        s if s < 2 * minute => format!("{s}s"),
        s if s < 2 * hour => format!("{}m", s / minute),
        s if s < 2 * day => format!("{}h", s / hour),
        s => format!("{}d", s / day),
    }
}

/// A part of a whole in percent.
pub fn percent(part: i64, whole: i64) -> Option<i64> {
    let percent = i128::from(part) * 100 / i128::from(whole).max(1);
    (whole > 0).then_some(percent.clamp(0, 100) as i64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_terminal_acts_on_is_escaped() {
        let hostile = "a\u{1b}[2J\nb\u{9b}1m\u{202e}c\u{7f}é";
        let safe = escaped(hostile);
        assert_eq!(safe, "a\\u{1b}[2J\\nb\\u{9b}1m\\u{202e}c\\u{7f}é");
        assert!(!safe.chars().any(is_hidden));
        assert_eq!(escaped_lines("a\nb\t"), "a\nb\\t");
        let json = serde_json::to_string_pretty(&[hostile]).unwrap();
        let safe = escaped_json(&json);
        assert!(!safe.chars().any(|c| c != '\n' && is_hidden(c)), "{safe}");
        let back: Vec<String> = serde_json::from_str(&safe).unwrap();
        assert_eq!(back, [hostile]);
    }

    #[test]
    fn numbers_are_short() {
        let cases = [
            (0, "0 B"),
            (1023, "1023 B"),
            (1536, "1.5 KiB"),
            (10 << 30, "10 GiB"),
            ((10 << 30) + (1 << 29), "10 GiB"),
            (1 << 50, "1 PiB"),
        ];
        for (bytes, expected) in cases {
            assert_eq!(size(bytes), expected);
        }
        let cases = [
            ("10Gi", Some(10 << 30)),
            ("1500M", Some(1_500_000_000)),
            ("2e3", Some(2000)),
            ("7", Some(7)),
            ("1E", Some(1_000_000_000_000_000_000)),
            ("1.1Gi", Some(1_181_116_007)),
            ("x", None),
            ("", None),
        ];
        for (text, expected) in cases {
            assert_eq!(quantity(text), expected, "{text}");
        }
        for bytes in [0, 1, 1023, 1024, 1536, 1 << 20, (10 << 30) + 512, 10 << 30] {
            assert_eq!(quantity(&as_quantity(bytes)), Some(bytes));
        }
        assert_eq!(as_quantity(10 << 30), "10Gi");
        assert_eq!(percent(1, 3), Some(33));
        assert_eq!(percent(5, 3), Some(100));
        assert_eq!(percent(1, 0), None);
    }

    #[test]
    fn ages_have_one_unit() {
        let now = Timestamp::from_second(1_000_000).unwrap();
        let at = |before: i64| {
            age(
                Some(Timestamp::from_second(1_000_000 - before).unwrap()),
                now,
            )
        };
        let ages = [119, 120, 7199, 7200, 2 * 86400 - 1, 2 * 86400].map(at);
        assert_eq!(ages, ["119s", "2m", "119m", "2h", "47h", "2d"]);
        // Of a clock that is ahead.
        assert_eq!(at(-5), "0s");
        assert_eq!(age(None, now), "");
    }
}
