//! The copies that run in a pool, in the status of its object: of those that its agent reports, the ones
//! that have run for a while. Most end sooner, and would only cause writes.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};

use crate::agent::RunningCopy;
use crate::agent::running_copy::Kind;

/// A copy that has run for a shorter time is not shown.
const SHOWN_AFTER_SECONDS: u64 = 10;
/// Copies of a pool that are listed.
const MAX_COPIES: usize = 20;
/// While copies run, or have just ended, their pool is written at most this often.
const UPDATE_INTERVAL: SignedDuration = SignedDuration::from_secs(30);

/// The copies that run in a pool.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PoolCopies {
    /// When the agent of the pool has reported this.
    pub reported_at: Time,
    /// The oldest first. The list is limited.
    #[serde(default)]
    pub running: Vec<PoolCopy>,
}

/// A copy that runs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PoolCopy {
    /// `Restore`, `Clone`, `Move`, `Revert`, `Import`, `Export`, `Snapshot`, `Write` or `Growth`; or
    /// `Copy`, if its agent is of a later release and reports another one.
    pub kind: String,
    /// The ID of the volume or snapshot that is filled, or of the snapshot that is exported.
    pub id: String,
    /// "namespace/name" of the claim for which it runs, if its agent has reported that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub claim: Option<String>,
    /// The node that sends the content, if that is another one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source_node: Option<String>,
    /// When it began, by the clock of the router.
    pub since: Time,
    /// Bytes of the image that are filled, or skipped because they do not differ.
    pub bytes_done: i64,
    /// Bytes of the whole image; `None` if that is not known yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes_total: Option<i64>,
    /// How many of the bytes had been done when it began: it continues a copy that was interrupted.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub bytes_before: i64,
}

fn is_zero(number: &i64) -> bool {
    *number == 0
}

/// The copies of a pool in an answer that came at this time, which is a whole second; `None` if there is none
/// to be shown.
pub(super) fn copies(reported: &[RunningCopy], pool: &str, at: Time) -> Option<PoolCopies> {
    let its = reported.iter().filter(|copy| {
        let id = copy.id.split_once('.');
        id.is_some_and(|(of, _)| of == pool) && copy.running_seconds >= SHOWN_AFTER_SECONDS
    });
    let mut running: Vec<PoolCopy> = its.filter_map(|one| copy(one, at.0)).collect();
    running.sort_by(|a, b| (&a.since, &a.id).cmp(&(&b.since, &b.id)));
    running.truncate(MAX_COPIES);
    (!running.is_empty()).then_some(PoolCopies {
        reported_at: at,
        running,
    })
}

/// `None` if its numbers cannot be.
fn copy(copy: &RunningCopy, at: Timestamp) -> Option<PoolCopy> {
    let some = |text: &String| Some(text.clone()).filter(|text| !text.is_empty());
    let number = |number: u64| i64::try_from(number).ok();
    let age = SignedDuration::from_secs(number(copy.running_seconds)?);
    Some(PoolCopy {
        kind: kind_name(copy.kind).into(),
        id: copy.id.clone(),
        claim: some(&copy.claim),
        source_node: some(&copy.source_node),
        since: Time(at.checked_sub(age).ok()?),
        bytes_done: number(copy.copied_bytes)?,
        bytes_total: number(copy.total_bytes).filter(|total| *total > 0),
        bytes_before: number(copy.before_bytes)?,
    })
}

fn kind_name(kind: i32) -> &'static str {
    match Kind::try_from(kind) {
        Ok(Kind::Restore) => "Restore",
        Ok(Kind::Clone) => "Clone",
        Ok(Kind::Move) => "Move",
        Ok(Kind::Revert) => "Revert",
        Ok(Kind::Import) => "Import",
        Ok(Kind::Export) => "Export",
        Ok(Kind::Snapshot) => "Snapshot",
        Ok(Kind::Write) => "Write",
        Ok(Kind::Growth) => "Growth",
        Ok(Kind::Unknown) | Err(_) => "Copy",
    }
}

/// Whether a change of the copies is worth a write. The end of the last one is at once; all others wait for
/// as long as the CustomResourceDefinition of an earlier release, which drops them, must not cause a write
/// with each look.
pub(super) fn are_worth_it(
    old: Option<&PoolCopies>,
    new: Option<&PoolCopies>,
    since_write: Option<SignedDuration>,
) -> bool {
    match (old, new) {
        (Some(_), None) => true,
        (None, None) => false,
        (_, Some(_)) => old != new && since_write.is_none_or(|since| since >= UPDATE_INTERVAL),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const POOL: &str = "11111111-2222-4333-8444-000000000001";

    fn at() -> Time {
        Time(Timestamp::from_second(1_800_000_000).unwrap())
    }

    fn running(n: u128, seconds: u64) -> RunningCopy {
        RunningCopy {
            copied_bytes: 5,
            total_bytes: 9,
            kind: Kind::Restore.into(),
            id: format!("{POOL}.{}", uuid::Uuid::from_u128(n)),
            running_seconds: seconds,
            ..RunningCopy::default()
        }
    }

    fn shown(reported: &[RunningCopy]) -> Vec<PoolCopy> {
        copies(reported, POOL, at()).map_or(Vec::new(), |found| found.running)
    }

    #[test]
    fn a_copy_is_shown_after_ten_seconds_with_what_its_agent_reports() {
        assert_eq!(copies(&[], POOL, at()), None);
        assert_eq!(copies(&[running(1, 9)], POOL, at()), None);
        let reported = RunningCopy {
            claim: "shop/data".into(),
            source_node: "node-2".into(),
            before_bytes: 3,
            ..running(1, 10)
        };
        let found = copies(std::slice::from_ref(&reported), POOL, at()).unwrap();
        assert_eq!(found.reported_at, at());
        let expected = PoolCopy {
            kind: "Restore".into(),
            id: reported.id,
            claim: Some("shop/data".into()),
            source_node: Some("node-2".into()),
            since: Time(Timestamp::from_second(1_800_000_000 - 10).unwrap()),
            bytes_done: 5,
            bytes_total: Some(9),
            bytes_before: 3,
        };
        assert_eq!(found.running, [expected]);
    }

    #[test]
    fn at_most_20_of_this_pool_are_shown_the_oldest_first() {
        let mut reported: Vec<_> = (0..30).map(|n| running(n, 10 + n as u64)).collect();
        let other = RunningCopy {
            id: POOL.replace('1', "2") + "." + POOL,
            ..running(99, 9999)
        };
        reported.push(other);
        let shown = shown(&reported);
        assert_eq!(shown.len(), 20);
        assert_eq!(shown[0].id, reported[29].id);
        assert!(shown.is_sorted_by_key(|copy| copy.since.0));
    }

    #[test]
    fn every_kind_has_a_word_and_that_of_a_later_release_is_a_copy() {
        let word = |kind: i32| {
            let copy = RunningCopy {
                kind,
                ..running(1, 10)
            };
            shown(&[copy]).remove(0).kind
        };
        let words: Vec<_> = (0..=10).map(word).collect();
        let expected = [
            "Copy", "Restore", "Clone", "Move", "Revert", "Import", "Export", "Snapshot", "Write",
            "Growth", "Copy",
        ];
        assert_eq!(words, expected);
    }

    /// An agent of an earlier release names the volume alone.
    #[test]
    fn what_earlier_releases_report_and_numbers_that_cannot_be_are_left_out() {
        let earlier = RunningCopy {
            volume_name: "pvc-1".into(),
            copied_bytes: 5,
            total_bytes: 9,
            ..RunningCopy::default()
        };
        let with = |change: fn(&mut RunningCopy)| {
            let mut copy = running(1, 10);
            change(&mut copy);
            shown(&[copy])
        };
        assert_eq!(shown(&[earlier]), []);
        assert_eq!(with(|copy| copy.running_seconds = u64::MAX), []);
        assert_eq!(with(|copy| copy.running_seconds = i64::MAX as u64), []);
        assert_eq!(with(|copy| copy.copied_bytes = u64::MAX), []);
        assert_eq!(with(|copy| copy.before_bytes = u64::MAX), []);
        assert_eq!(with(|copy| copy.total_bytes = 0)[0].bytes_total, None);
        assert_eq!(
            with(|copy| copy.total_bytes = u64::MAX)[0].bytes_total,
            None
        );
    }

    #[test]
    fn numbers_are_written_twice_a_minute_and_the_end_at_once() {
        let one = copies(&[running(1, 10)], POOL, at());
        let other = copies(&[running(1, 11)], POOL, at());
        let is_worth =
            |old: &Option<PoolCopies>, new: &Option<PoolCopies>, seconds: Option<i64>| {
                let since = seconds.map(SignedDuration::from_secs);
                are_worth_it(old.as_ref(), new.as_ref(), since)
            };
        for old in [&None, &one] {
            assert!(!is_worth(old, &other, Some(29)));
            assert!(is_worth(old, &other, Some(30)));
            assert!(is_worth(old, &other, None));
        }
        assert!(is_worth(&one, &None, Some(0)));
        assert!(!is_worth(&None, &None, Some(9999)));
        assert!(!is_worth(&one, &one, Some(9999)), "the same answer");
    }
}
