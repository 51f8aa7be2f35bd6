//! The names of the claims that a StatefulSet expects. They are made from its templates, its name and
//! its ordinals, and never taken apart: `data-pg-0-1` can be of several StatefulSets.

use std::collections::{BTreeMap, BTreeSet};

/// Ordinals for which names are made, at most. A StatefulSet with more pods would exceed what a
/// cluster of the supported size can run for one application.
const MAX_ORDINALS: i64 = 10_000;

/// What names the claims of a StatefulSet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Set {
    pub name: String,
    /// The ordinal of its first pod.
    pub start: i64,
    /// The number of its pods.
    pub replicas: i64,
    /// The names of its claim templates.
    pub templates: Vec<String>,
}

/// The place of a claim in a StatefulSet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Slot {
    /// The ordinal of the pod.
    pub ordinal: i64,
    /// The index of the claim template.
    pub template: usize,
}

impl Set {
    /// The claim that a StatefulSet with these templates and this name expects in a slot.
    pub fn claim(&self, name: &str, slot: Slot) -> String {
        let template = &self.templates[slot.template];
        format!("{template}-{name}-{}", slot.ordinal)
    }

    /// The slots up to an ordinal, without it.
    fn until(&self, end: i64) -> impl Iterator<Item = Slot> {
        let templates = self.templates.len();
        let slots = move |ordinal| (0..templates).map(move |template| Slot { ordinal, template });
        (self.start..end).flat_map(slots)
    }

    /// The slot of each claim, or the claims that the StatefulSet does not expect.
    pub fn slots(&self, claims: &[&str]) -> Result<Vec<Slot>, Vec<String>> {
        let mut wanted: BTreeSet<&str> = claims.iter().copied().collect();
        let mut found = BTreeMap::new();
        for slot in self.until(self.start.saturating_add(MAX_ORDINALS)) {
            if wanted.is_empty() {
                break;
            }
            let name = self.claim(&self.name, slot);
            if let Some(claim) = wanted.take(name.as_str()) {
                found.insert(claim, slot);
            }
        }
        match wanted.is_empty() {
            true => Ok(claims.iter().map(|claim| found[claim]).collect()),
            false => Err(wanted.into_iter().map(str::to_string).collect()),
        }
    }

    /// The slots of its pods, or of the pods up to the last one of these slots, that are not among
    /// these.
    pub fn missing(&self, slots: &[Slot]) -> Vec<Slot> {
        let last = slots.iter().map(|slot| slot.ordinal + 1).max();
        let end = (self.start.saturating_add(self.replicas)).max(last.unwrap_or(self.start));
        let end = end.min(self.start.saturating_add(MAX_ORDINALS));
        self.until(end)
            .filter(|slot| !slots.contains(slot))
            .collect()
    }
}

/// Whether a name can be that of a claim: a DNS subdomain.
pub fn is_valid(name: &str) -> bool {
    let is_part = |part: &str| {
        let is_inner = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
        !part.is_empty()
            && part.chars().all(is_inner)
            && !part.starts_with('-')
            && !part.ends_with('-')
    };
    name.len() <= 253 && name.split('.').all(is_part)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(name: &str, start: i64, replicas: i64, templates: &[&str]) -> Set {
        Set {
            name: name.into(),
            start,
            replicas,
            templates: templates.iter().map(ToString::to_string).collect(),
        }
    }

    #[test]
    fn a_claim_has_exactly_the_slot_from_which_its_name_is_made() {
        let names = ["a", "a-0", "0", "b-a", "a.b", "pg"];
        let templates = ["a", "a-0", "0", "b-a", "data", "data-pg"];
        for name in names {
            for start in [0, 1, 7] {
                let set = set(name, start, 3, &templates);
                let slots: Vec<_> = set.until(start + 12).collect();
                assert_eq!(slots.len(), 12 * templates.len());
                let claims: Vec<_> = slots.iter().map(|it| set.claim(name, *it)).collect();
                let distinct: BTreeSet<_> = claims.iter().collect();
                assert_eq!(distinct.len(), claims.len(), "{name}: {claims:?}");
                let claims: Vec<_> = claims.iter().map(String::as_str).collect();
                assert_eq!(set.slots(&claims).as_ref(), Ok(&slots));
                // In any order, and one by one.
                let backwards: Vec<_> = claims.iter().rev().copied().collect();
                let found = set.slots(&backwards).unwrap();
                assert_eq!(found, slots.iter().rev().copied().collect::<Vec<_>>());
                for (claim, slot) in claims.iter().zip(&slots) {
                    assert_eq!(set.slots(&[claim]), Ok(vec![*slot]));
                }
            }
        }
    }

    #[test]
    fn names_that_only_look_like_those_of_a_set_are_refused() {
        let pg = set("pg", 2, 3, &["data"]);
        let wrong = [
            "data-pg-1",
            "data-pg-02",
            "data-pg-+2",
            "data-pg-2 ",
            "data-pg-",
            "data-pg--2",
            "data-pg-0-2",
            "wal-pg-2",
            "data-pg-2-copy",
            "data-pg-10002",
            "",
        ];
        for name in wrong {
            assert_eq!(pg.slots(&[name]), Err(vec![name.to_string()]), "{name}");
            let both = pg.slots(&["data-pg-2", name]);
            assert_eq!(both, Err(vec![name.to_string()]), "{name}");
        }
        assert!(pg.slots(&["data-pg-10001"]).is_ok());
        let extreme = set("pg", i64::MAX - 1, i64::MAX, &["data"]);
        assert!(extreme.slots(&["data-pg-0"]).is_err());
        assert!(extreme.missing(&[]).len() <= 1);
    }

    #[test]
    fn a_slot_is_missing_if_its_pod_would_get_an_empty_volume() {
        let slot = |ordinal, template| Slot { ordinal, template };
        let two = set("pg", 1, 2, &["data", "wal"]);
        let all = [slot(1, 0), slot(1, 1), slot(2, 0), slot(2, 1)];
        assert_eq!(two.missing(&all), []);
        assert_eq!(two.missing(&all[1..]), [slot(1, 0)]);
        // Between others, also if the set has no pods now.
        let none = Set {
            replicas: 0,
            ..two.clone()
        };
        assert_eq!(none.missing(&[]), []);
        assert_eq!(none.missing(&all[3..]), all[..3]);
        // More pods than members.
        let more = Set { replicas: 3, ..two };
        assert_eq!(more.missing(&all), [slot(3, 0), slot(3, 1)]);
    }

    #[test]
    fn names_of_claims_are_dns_subdomains() {
        for right in ["a", "data-pg-0", "a.b-c", &"x".repeat(253)] {
            assert!(is_valid(right), "{right}");
        }
        for wrong in [
            "",
            "A",
            "a_b",
            "-a",
            "a-",
            "a..b",
            "a/b",
            "a\u{1b}",
            "é",
            &"x".repeat(254),
        ] {
            assert!(!is_valid(wrong), "{wrong}");
        }
    }
}
