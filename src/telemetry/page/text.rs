//! Texts of a status page: of bounded length, without control characters, and with ages and sizes for people.

use jiff::Timestamp;
use serde::Serialize;

/// Characters of a text that are shown. Names of objects have at most 253.
const MAX_SHOWN: usize = 300;

/// The first characters of a text, without those that change how a line is read.
pub(super) fn shown(text: &str) -> String {
    let mut short = String::new();
    for (at, c) in text.chars().enumerate() {
        if at == MAX_SHOWN {
            short.push('…');
            break;
        }
        match c.is_control() || is_format(c) {
            true => short.extend(c.escape_unicode()),
            false => short.push(c),
        }
    }
    short
}

/// Characters without a width, among them those that reverse the direction of a text.
fn is_format(c: char) -> bool {
    matches!(c, '\u{ad}' | '\u{61c}' | '\u{180e}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}'
        | '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e007f}')
}

/// A command line for a shell, one word for each of the given ones, whatever they contain. `None` if a
/// word is not shown as it is, so that the command would be another one.
pub(super) fn command(words: &[&str]) -> Option<String> {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "._/:=,-".contains(c);
    let each = words.iter().map(|word| {
        let is_whole = shown(word) == **word;
        is_whole.then(|| match !word.is_empty() && word.chars().all(is_plain) {
            true => (*word).to_string(),
            false => format!("'{}'", word.replace('\'', "'\\''")),
        })
    });
    let all: Option<Vec<_>> = each.collect();
    all.map(|words| words.join(" "))
}

/// A time, and how long ago it was.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct When {
    /// In RFC 3339.
    pub at: String,
    /// For people.
    pub age: String,
    /// 0 for times of the future.
    pub age_seconds: i64,
}

impl When {
    pub(super) fn new(at: Timestamp, now: Timestamp) -> When {
        let age_seconds = now.duration_since(at).as_secs().max(0);
        let whole = Timestamp::from_second(at.as_second()).unwrap_or(at);
        When {
            at: whole.to_string(),
            age: duration(age_seconds),
            age_seconds,
        }
    }
}

/// A time that is expected, and how long it takes until then.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Ahead {
    /// In RFC 3339.
    pub at: String,
    /// For people.
    #[serde(skip)]
    pub(super) after: String,
}

impl Ahead {
    pub(super) fn new(at: Timestamp, now: Timestamp) -> Ahead {
        let whole = Timestamp::from_second(at.as_second()).unwrap_or(at);
        Ahead {
            at: whole.to_string(),
            after: duration(at.duration_since(now).as_secs().max(0)),
        }
    }
}

/// Seconds for people: the largest unit of which there are at least two.
pub(super) fn duration(seconds: i64) -> String {
    match seconds {
        ..120 => format!("{seconds} s"),
        120..7200 => format!("{} min", seconds / 60),
        7200..172_800 => format!("{} h", seconds / 3600),
        _ => format!("{} d", seconds / 86_400),
    }
}

/// Bytes for people, with one digit after the point.
pub(super) fn size(bytes: u64) -> String {
    let units = ["bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    let (mut tenths, mut unit) = (u128::from(bytes) * 10, 0);
    while tenths >= 10_240 && unit + 1 < units.len() {
        tenths /= 1024;
        unit += 1;
    }
    match unit {
        0 => format!("{bytes} bytes"),
        _ => format!("{}.{} {}", tenths / 10, tenths % 10, units[unit]),
    }
}

/// A part of a whole, from 0 to 1000.
pub(super) fn permille(part: u64, of: u64) -> u64 {
    let share = u128::from(part) * 1000 / u128::from(of.max(1));
    u64::try_from(share.min(1000)).unwrap_or(1000)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hostile_text_is_short_and_has_no_control_characters() {
        assert_eq!(shown("shop/pg-0"), "shop/pg-0");
        assert_eq!(shown("a\u{1b}[31m\nb"), "a\\u{1b}[31m\\u{a}b");
        assert_eq!(shown("a\u{202e}b"), "a\\u{202e}b");
        let long = shown(&"ü".repeat(100_000));
        assert_eq!(long.chars().count(), MAX_SHOWN + 1);
    }

    #[test]
    fn a_hostile_name_is_one_word_of_a_command() {
        let of = |name: &str| command(&["kubectl", "get", "pool", name]);
        assert_eq!(of("a-1.b").as_deref(), Some("kubectl get pool a-1.b"));
        assert_eq!(of("").as_deref(), Some("kubectl get pool ''"));
        let hostile = "a; rm -rf '/' $(x) `y`";
        let expected = "kubectl get pool 'a; rm -rf '\\''/'\\'' $(x) `y`'";
        assert_eq!(of(hostile).as_deref(), Some(expected));
        for hidden in ["a\nrm -rf /", "a\u{202e}b", &"a".repeat(400)] {
            assert_eq!(of(hidden), None, "{hidden:?}");
        }
    }

    #[test]
    fn sizes_and_times_are_for_people() {
        assert_eq!(size(0), "0 bytes");
        assert_eq!(size(1536), "1.5 KiB");
        assert_eq!(size(100 << 30), "100.0 GiB");
        assert_eq!(size(u64::MAX), "15.9 EiB");
        assert_eq!(duration(119), "119 s");
        assert_eq!(duration(7199), "119 min");
        assert_eq!(duration(7200), "2 h");
        assert_eq!(duration(172_800), "2 d");
        assert_eq!(permille(u64::MAX, 1), 1000);
        assert_eq!(permille(1, 0), 1000);
        assert_eq!(permille(1, 4), 250);
    }

    #[test]
    fn a_time_of_the_future_has_no_age() {
        let now = Timestamp::from_second(1_800_000_000).unwrap();
        let later = When::new(Timestamp::from_second(1_800_000_100).unwrap(), now);
        assert_eq!(later.age_seconds, 0);
        assert_eq!(later.at, "2027-01-15T08:01:40Z");
    }
}
