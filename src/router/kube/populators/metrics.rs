//! Progress numbers of a populating pod, parsed from the last line of its log. The pod controls that text,
//! so only numbers are accepted.

use serde::Deserialize;

use super::state::{Point, is_strong};

/// Progress, as docs/populate.md describes it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
pub(super) struct Numbers {
    pub(super) received: u64,
    pub(super) total: Option<u64>,
    durable: Option<u64>,
    validator: Option<Vec<u8>>,
    digest: Option<[u8; 32]>,
}

impl Numbers {
    /// Those in the last line of a log; `None` if it has no such line.
    pub(super) fn parse(log: &str) -> Option<Numbers> {
        serde_json::from_str(log.lines().next_back()?).ok()
    }

    /// Where another attempt can continue.
    pub(super) fn point(&self) -> Option<Point> {
        let bytes = self.durable.filter(|bytes| *bytes > 0)?;
        let validator = self.validator.as_ref().filter(|one| is_strong(one))?;
        Some(Point {
            bytes,
            validator: String::from_utf8(validator.clone()).ok()?,
        })
    }

    /// The digest of an image, as it is written behind its name.
    pub(super) fn digest(&self) -> Option<String> {
        let digits = self.digest?.map(|byte| format!("{byte:02x}"));
        Some(format!("sha256:{}", digits.concat()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_line_counts_and_only_numbers_are_believed() {
        let line = r#"{"received":7,"total":9,"written":7,"entries":0,"skipped":0,"durable":5,"validator":[34,101,34]}"#;
        let numbers = Numbers::parse(&format!("{{\"received\":1}}\nChecksum…\n{line}\n")).unwrap();
        assert_eq!((numbers.received, numbers.total), (7, Some(9)));
        let point = numbers.point().unwrap();
        assert_eq!((point.bytes, point.validator.as_str()), (5, "\"e\""));
        assert_eq!(numbers.digest(), None);
        let digest = format!("{{\"received\":0,\"digest\":{:?}}}", [171_u8; 32]);
        let digest = Numbers::parse(&digest).unwrap().digest().unwrap();
        assert_eq!(digest, format!("sha256:{}", "ab".repeat(32)));
        for wrong in [
            "",
            "hello",
            "{}",
            r#"{"received":"7"}"#,
            r#"{"received":-7}"#,
            r#"{"received":1.5}"#,
            r#"{"received":7,"total":"many"}"#,
            r#"{"received":7,"digest":[1,2,3]}"#,
            r#"{"received":7,"validator":"\"e\""}"#,
            r#"{"received":7,"validator":[300]}"#,
        ] {
            assert_eq!(Numbers::parse(wrong), None, "{wrong}");
        }
        let weak = r#"{"received":7,"durable":5,"validator":[87,47,34,34]}"#;
        assert_eq!(Numbers::parse(weak).unwrap().point(), None);
        let none = r#"{"received":7,"durable":0,"validator":[34,34]}"#;
        assert_eq!(Numbers::parse(none).unwrap().point(), None);
    }

    #[test]
    fn fuzz_progress() {
        let line = r#"{"received":7,"total":9,"durable":5,"validator":[34,101,34]}"#;
        slackwater_core::fuzz::fuzz_text("progress", &[line], |text| {
            Numbers::parse(text).map(|numbers| format!("{numbers:?} {:?}", numbers.point()))
        });
    }
}
