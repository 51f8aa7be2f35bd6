//! The deadline of a call, and how long a call may wait for locks.

use std::time::Duration;

use tonic::Request;
use tonic::metadata::MetadataMap;

/// The part of a deadline that is reserved for the work itself, after the longest wait.
const RESERVED_TIME: Duration = Duration::from_secs(5);
/// The longest wait of a call without a deadline.
const MAX_WAIT_WITHOUT_DEADLINE: Duration = Duration::from_secs(10);

/// How long a call that creates snapshots may wait for locks before it begins. Some callers report
/// the first ABORTED as a failed backup, although the conflicting operation (a stage, an expansion,
/// another snapshot of the same volume) ends by itself.
pub(crate) fn max_wait<M>(request: &Request<M>) -> Duration {
    let deadline = timeout(request.metadata());
    deadline.map_or(MAX_WAIT_WITHOUT_DEADLINE, |left| {
        left.saturating_sub(RESERVED_TIME)
    })
}

/// Parses `grpc-timeout`: up to eight digits and a unit, as gRPC over HTTP/2 defines it.
pub(crate) fn timeout(metadata: &MetadataMap) -> Option<Duration> {
    let text = metadata.get("grpc-timeout")?.to_str().ok()?;
    let (digits, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    if digits.is_empty() || digits.len() > 8 || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let count = digits.parse::<u64>().ok()?;
    Some(match unit {
        "H" => Duration::from_secs(count * 3600),
        "M" => Duration::from_secs(count * 60),
        "S" => Duration::from_secs(count),
        "m" => Duration::from_millis(count),
        "u" => Duration::from_micros(count),
        "n" => Duration::from_nanos(count),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_deadline_is_read_in_every_unit_and_nothing_else_is_one() {
        let read = |text: &str| {
            let mut metadata = MetadataMap::new();
            metadata.insert("grpc-timeout", text.parse().unwrap());
            timeout(&metadata)
        };
        for (text, duration) in [
            ("2H", Duration::from_secs(7200)),
            ("3M", Duration::from_secs(180)),
            ("10S", Duration::from_secs(10)),
            ("99999999m", Duration::from_millis(99_999_999)),
            ("5u", Duration::from_micros(5)),
            ("0n", Duration::ZERO),
        ] {
            assert_eq!(read(text), Some(duration), "{text}");
        }
        for text in [
            "",
            "S",
            "10",
            "10s",
            "-1S",
            "+1S",
            "123456789S",
            "1.5S",
            "1 S",
        ] {
            assert_eq!(read(text), None, "{text}");
        }
        assert_eq!(timeout(&MetadataMap::new()), None);
        // The format that tonic writes.
        let mut request = Request::new(());
        request.set_timeout(Duration::from_millis(1500));
        assert_eq!(
            timeout(request.metadata()),
            Some(Duration::from_millis(1500))
        );
    }
}
