//! The copies that an agent reports: a bounded number, of its own pools, with names and numbers that can be.

use std::collections::BTreeSet;

use super::{NAME_BYTES, cut};
use crate::agent::RunningCopy;
use crate::model::{VolumeId, is_claim, is_object_name};

/// Maximum number of running copies that an agent may report.
const MAX_COPIES: usize = 64;

/// Keeps those of these pools, and those without an ID, which agents of earlier releases report.
pub(super) fn keep(copies: &mut Vec<RunningCopy>, pools: &BTreeSet<String>) {
    copies.retain(|copy| {
        let pool = copy.id.parse::<VolumeId>().map(|id| id.pool);
        copy.id.is_empty() || pool.is_ok_and(|pool| pools.contains(&pool.to_string()))
    });
    copies.truncate(MAX_COPIES);
    for copy in copies {
        cut(&mut copy.volume_name, NAME_BYTES);
        if !is_claim(&copy.claim) {
            copy.claim.clear();
        }
        if !is_object_name(&copy.source_node) {
            copy.source_node.clear();
        }
        if copy.total_bytes > 0 {
            copy.copied_bytes = copy.copied_bytes.min(copy.total_bytes);
        }
        copy.before_bytes = copy.before_bytes.min(copy.copied_bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const POOL: &str = "6f1a2b3c-0000-4000-8000-000000000001";

    fn copy() -> RunningCopy {
        RunningCopy {
            volume_name: "pvc-1".into(),
            copied_bytes: 5,
            total_bytes: 9,
            id: format!("{POOL}.{POOL}"),
            claim: "shop/data".into(),
            source_node: "node-2.example".into(),
            running_seconds: 10,
            before_bytes: 3,
            ..RunningCopy::default()
        }
    }

    fn kept(copies: Vec<RunningCopy>) -> Vec<RunningCopy> {
        let mut copies = copies;
        keep(&mut copies, &[POOL.to_string()].into());
        copies
    }

    #[test]
    fn only_copies_of_own_pools_are_kept_and_a_bounded_number() {
        let earlier = RunningCopy {
            id: String::new(),
            ..copy()
        };
        assert_eq!(kept(vec![copy(), earlier.clone()]), [copy(), earlier]);
        let other = POOL.replace('1', "2");
        for id in [format!("{other}.{POOL}"), POOL.into(), "<b>".into()] {
            assert_eq!(kept(vec![RunningCopy { id, ..copy() }]), []);
        }
        assert_eq!(kept(vec![copy(); 1000]).len(), MAX_COPIES);
    }

    #[test]
    fn names_that_nothing_can_have_are_removed_and_numbers_are_limited() {
        let with = |change: &dyn Fn(&mut RunningCopy)| {
            let mut one = copy();
            change(&mut one);
            kept(vec![one]).remove(0)
        };
        for claim in ["shop", "shop/<b>", "shop/\u{1b}[2J", &"a/".repeat(500)] {
            assert_eq!(with(&|one| one.claim = claim.into()).claim, "");
        }
        for node in ["<b>", "Node", "a b", &"a".repeat(254)] {
            assert_eq!(with(&|one| one.source_node = node.into()).source_node, "");
        }
        let long = with(&|one| one.volume_name = "\u{e4}".repeat(500)).volume_name;
        assert!(long.len() <= NAME_BYTES);
        let more = with(&|one| one.copied_bytes = 10);
        assert_eq!((more.before_bytes, more.copied_bytes), (3, 9));
        let unknown = with(&|one| one.total_bytes = 0);
        assert_eq!(unknown.copied_bytes, 5);
        let before = with(&|one| one.before_bytes = 6);
        assert_eq!(before.before_bytes, 5);
    }
}
